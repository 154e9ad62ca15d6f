"""The terms of a step, such as priority and timeout, and the defaults, which have them, too.

Rule: a key means and allows the same in both places, because one table reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headgate.core.money import MAX_RESERVATION_TOKENS
from headgate.core.snapshot import MAX_PRIORITY, MAX_WEIGHT
from headgate.core.tasks.records import MAX_ATTEMPT_SECONDS, MAX_ATTEMPTS, OnParentFailure
from headgate.workflow.values import Value
from headgate.workflow.workflow import Estimate

ESTIMATE_KEYS = ("usd", "tokens")
MIN_TIMEOUT_SECONDS = 0.1
MAX_NAME_LENGTH = 128
MAX_TOKENS = 1_024
LARGEST_MAX_TOKENS = 10_000_000

_NAME = re.compile(r"[^\s\x00-\x1f\x7f](?:[^\x00-\x1f\x7f]*[^\s\x00-\x1f\x7f])?")


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What steps have that do not say it themselves; `terms` are fields of a step."""

    terms: dict[str, Any] = {}
    endpoint: str | None = None
    model: Value | None = None
    max_tokens: int = MAX_TOKENS
    target: str | None = None


def read_max_tokens(value: Value) -> int:
    """Read how long an answer may be."""
    return value.whole(1, LARGEST_MAX_TOKENS)


def read_name(value: Value) -> str:
    """Read the name of an agent, a target, a model or the like."""
    name = value.name(_NAME, "write one without spaces at its ends", most=MAX_NAME_LENGTH)
    if not name.isprintable():
        value.refuse("must be printable; leave out what cannot be seen")
    return name


def read_estimate(value: Value) -> Estimate:
    """Read what a step is expected to cost at most."""
    fields = value.fields(ESTIMATE_KEYS, "an estimate")
    if not fields:
        value.refuse("says nothing; write usd, tokens or both")
    usd, tokens = fields.get("usd"), fields.get("tokens")
    return Estimate(
        micro_usd=None if usd is None else usd.amount(),
        tokens=None if tokens is None else tokens.whole(0, MAX_RESERVATION_TOKENS),
    )


def _weight(value: Value) -> float:
    return value.number(0, MAX_WEIGHT)


def _on_parent_failure(value: Value) -> OnParentFailure:
    return OnParentFailure(value.choice(tuple(one.value for one in OnParentFailure)))


TERMS: dict[str, tuple[str, Callable[[Value], Any]]] = {
    "priority": ("priority", lambda value: value.whole(-MAX_PRIORITY, MAX_PRIORITY)),
    "weight": ("weight", _weight),
    "agent": ("agent", read_name),
    "retries": ("retries", lambda value: value.whole(0, MAX_ATTEMPTS - 1)),
    "timeout": (
        "timeout_seconds",
        lambda value: value.seconds(MIN_TIMEOUT_SECONDS, MAX_ATTEMPT_SECONDS),
    ),
    "estimate": ("estimate", read_estimate),
    "on_parent_failure": ("on_parent_failure", _on_parent_failure),
}
"""By its key, the field of a step that a term is, and what reads it."""


def read_terms(fields: Mapping[str, Value]) -> dict[str, Any]:
    """Read those terms that are there, as fields of a step."""
    return {field: read(fields[key]) for key, (field, read) in TERMS.items() if key in fields}
