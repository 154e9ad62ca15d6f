"""Texts without secrets: what a key is, is taken out before anybody sees the text.

A known key is found wherever it stands, also quoted for an address or for JSON. Beyond that
everything goes that looks like one: what follows `Bearer`, the values of fields and parameters
with a telling name, passwords in addresses, and texts that begin as keys do.
"""

from __future__ import annotations

import json
import re
from urllib.parse import quote, quote_plus

REDACTED = "[redacted]"
MIN_SECRET_LENGTH = 4
"""A shorter text is no key, and turns up everywhere."""

_NAMES = (
    r"(?:x[-_])?api[-_]?key|authorization|(?:access|auth|refresh|id)[-_]?token|token|"
    r"(?:client[-_]?)?secret|password|passwd|key|sig|signature"
)
_RULES = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]+"), rf"\1 {REDACTED}"),
    (
        re.compile(
            rf'(?i)(?<![\w-])((?:{_NAMES})\\?"?\s*[:=]\s*\\?"?)(?!bearer |basic )[^"&\s,}}\\]+'
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"://[^/@\s\"]+@"), f"://{REDACTED}@"),
    (re.compile(r"\b(?:sk|pk|ghp|xox[abp])[-_][\w-]{8,}"), REDACTED),
)


def redacted(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Return the text with these secrets, and whatever looks like one, taken out."""
    for secret in secrets:
        for form in _forms(secret):
            text = text.replace(form, REDACTED)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def _forms(secret: str) -> set[str]:
    if len(secret) < MIN_SECRET_LENGTH:
        return set()
    return {
        secret,
        quote(secret),
        quote(secret, safe=""),
        quote_plus(secret),
        json.dumps(secret)[1:-1],
    }
