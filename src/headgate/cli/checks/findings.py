"""What a check found: a verdict, what is so, and what to do about it."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a doctor's report; what is ok needs no advice."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    """Find that something is as it should be."""
    return Finding(check=check, verdict="ok", found=found)


def warn(check: str, found: str, advice: str) -> Finding:
    """Find something that works, and may not be meant so."""
    return Finding(check=check, verdict="warn", found=found, advice=advice)


def fail(check: str, found: str, advice: str) -> Finding:
    """Find something that keeps the service from its work."""
    return Finding(check=check, verdict="fail", found=found, advice=advice)
