"""Headers of HTTP, whoever sends them: which can be written, and what a response says with them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from headgate.errors import InvalidSettingError

HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
HEADER_VALUE = re.compile(r"(?:[!-~](?:[ \t!-~]*[!-~])?)?")
SECRET_NAME = re.compile("authorization|cookie|key|password|secret|token", re.IGNORECASE)
"""Names under which one expects a secret, in headers as in queries."""
FRAMING_HEADERS = (
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
)
"""Headers that frame a message or belong to its connection, and are nobody's to choose."""


def check_header_value(value: str, setting: str) -> None:
    """Refuse a value that no header can carry; the value is not repeated."""
    if not HEADER_VALUE.fullmatch(value):
        problem = "its value must be printable ASCII without spaces at its ends"
        raise InvalidSettingError(setting, problem)


def retry_after_seconds(headers: Mapping[str, str], *, now: float) -> float | None:
    """Return how long a pause the headers ask for; None if they ask for none that is readable."""
    in_ms = _number(headers.get("retry-after-ms"))
    if in_ms is not None:
        return max(in_ms / 1_000, 0.0)
    asked = headers.get("retry-after")
    seconds = _number(asked)
    if seconds is None:
        at = _date(asked)
        seconds = None if at is None else at - now
    return None if seconds is None else max(seconds, 0.0)


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _date(text: str | None) -> float | None:
    try:
        return parsedate_to_datetime(text or "").timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):
        return None
