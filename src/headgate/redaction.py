"""Texts without secrets: what a key is, is taken out before anybody sees the text.

A known key is found wherever it stands, also quoted for an address, for JSON or by Python. Beyond
that everything goes that looks like one: what follows `Bearer`, the values of fields and parameters
with a telling name, passwords in addresses, and texts that begin as keys do. The last function here
keeps the secrets of a whole process to itself.
"""

from __future__ import annotations

import json
import re
import sys
from functools import lru_cache
from urllib.parse import quote, quote_plus

REDACTED = "[redacted]"
MIN_SECRET_LENGTH = 4
"""A shorter text is no key, and turns up everywhere."""

HIDDEN = "***"
"""Stands for a value that is left out of an address or of settings."""

_NAMES = (
    r"(?i:api[-_]?key|authorization|(?:access|auth|refresh|id|session)[-_]?token|token|"
    r"secret|password|passwd|key|sig|signature)"
)
# What a name ends with tells: `access_key` and `accessKey` are keys, a monkey is none.
_NAME = (
    rf"(?<![\w-])(?:(?:[\w-]*[-_])?{_NAMES}|"
    r"\w*[a-z0-9](?:Key|Token|Secret|Password|Signature))"
)
_BEFORE = rf"({_NAME}\\*\"?\s*[:=]\s*)"
_NO_SCHEME = r"(?!(?i:bearer|basic) )"
_RULES = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]+"), rf"\1 {REDACTED}"),
    (re.compile(rf'{_BEFORE}"{_NO_SCHEME}(?:[^"\\]|\\.)+', re.DOTALL), rf'\1"{REDACTED}'),
    (re.compile(rf'{_BEFORE}(\\+"){_NO_SCHEME}[^"\\]+'), rf"\1\2{REDACTED}"),
    # A list or an object goes as a whole; one whose end was cut off, with all that follows.
    (
        re.compile(
            rf"{_BEFORE}(?:\[(?!redacted\])(?:[^\[\]]|\[[^\[\]]*\])*+(?:\]|.*)|"
            r"\{(?:[^{}]|\{[^{}]*\})*+(?:\}|.*))",
            re.DOTALL,
        ),
        rf'\1"{REDACTED}"',
    ),
    (re.compile(rf'({_NAME}"\s*:\s*)[^"\s,}}\]\\]+'), rf'\1"{REDACTED}"'),
    (
        re.compile(rf'{_BEFORE}{_NO_SCHEME}(?!\[redacted\])[^"&\s,}}\\]+'),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"://[^/@\s\"]+@"), f"://{REDACTED}@"),
    (re.compile(r"\b(?:(?:sk|pk|gsk|ghp|xox[abp])[-_][\w-]{8,}|AIza[\w-]{20,})"), REDACTED),
)
_ESCAPE = re.compile("%[0-9A-F]{2}")
_REFERENCE = re.compile(r"\{[\w.]+\}")


def hidden_address(url: str) -> str:
    """Return an address without credentials, and with nothing that its query says.

    Any parameter may be a secret, whatever it is called; a reference such as `{key}` is none.
    """
    scheme, sign, rest = url.partition("://")
    _, at, host = rest.rpartition("@")
    shown = f"{scheme}{sign}{HIDDEN}{at}{host}" if at else url
    address, mark, query = shown.partition("#")[0].partition("?")
    return f"{address}{mark}{'&'.join(map(_hidden_parameter, query.split('&')))}"


def _hidden_parameter(parameter: str) -> str:
    name, sign, value = parameter.partition("=")
    if not sign:
        return HIDDEN if name else ""
    return f"{name}={value if not value or _REFERENCE.fullmatch(value) else HIDDEN}"


def redacted(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Return the text with these secrets, and whatever looks like one, taken out."""
    for secret in secrets:
        for form in written_forms(secret):
            text = text.replace(form, REDACTED)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


# A poll takes the same key out of some ninety texts.
@lru_cache(maxsize=256)
def written_forms(secret: str) -> tuple[str, ...]:
    """Return how a secret may be written: as it is, quoted for an address, for JSON or by Python.

    The longest come first: what contains another is to be found before it.
    """
    if len(secret) < MIN_SECRET_LENGTH:
        return ()
    raw = secret.encode(errors="surrogateescape")
    quoted = (quote(raw), quote(raw, safe=""), quote_plus(raw))
    in_json = (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
    forms = {
        secret,
        raw.decode(errors="replace"),
        *quoted,
        *(_ESCAPE.sub(_lowered, text) for text in quoted),
        *in_json,
        *(text.replace("/", "\\/") for text in in_json),
        repr(secret)[1:-1],
        repr(raw)[2:-1],
    }
    return tuple(sorted(forms, key=len, reverse=True))


def _lowered(escape: re.Match[str]) -> str:
    return escape[0].lower()


_PR_SET_DUMPABLE = 4


def hide_process() -> None:
    """Keep other processes of the same user from reading this one's environment and memory.

    Only root can then attach a debugger or a profiler, and there are no core dumps, which would
    have the secrets in them. Systems other than Linux have nothing to ask for.
    """
    if sys.platform == "linux":
        # Loading it takes a moment, which most of those who redact texts need not spend.
        import ctypes  # noqa: PLC0415

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
