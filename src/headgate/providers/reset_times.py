"""When a quota resets, in whichever way a provider writes it.

| value | meaning |
| --- | --- |
| nothing, `null`, an empty text, 0 or less | no window is open |
| a number below 100,000,000 | seconds from now |
| a number below 100,000,000,000 | seconds since 1970 |
| a larger number | milliseconds since 1970 |
| a text with a number | the same as the number |
| `6m0s`, `1h30m`, `12ms` | a duration from now |
| `2026-02-14T09:30:00Z` | ISO 8601; without an offset, in the provider's zone |
"""

from __future__ import annotations

import math
import re
from datetime import datetime, tzinfo

FIRST_EPOCH_SECONDS = 100_000_000
"""The third of March 1973; no window is three years long, and none ended before this."""
FIRST_EPOCH_MS = 100_000_000_000
LAST_EPOCH_SECONDS = 253_402_300_799

_UNIT_SECONDS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "us": 0.000_001}
_UNIT_SECONDS |= {"µs": 0.000_001, "ns": 0.000_000_001}
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(ms|us|µs|ns|[dhms])")
_DURATION = re.compile(f"(?:{_PART.pattern})+")
_MAX_TEXT = 64
_TOO_LARGE = 10**18


def duration_seconds(text: str) -> float | None:
    """Read a duration such as `6m0s`; None if it is none."""
    if len(text) > _MAX_TEXT or not _DURATION.fullmatch(text):
        return None
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _PART.findall(text))


def reset_time(value: object, *, now: float, zone: tzinfo) -> float | None:
    """Return the Unix second of a reset; None if no window is open. What is neither, ValueError."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return _in_text(value.strip(), now=now, zone=zone)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("is no time")
    # A whole number may have more digits than a time can, and than can be divided.
    return _in_number(min(value, _TOO_LARGE), now=now)


def _in_text(text: str, *, now: float, zone: tzinfo) -> float | None:
    seconds = duration_seconds(text)
    if seconds is not None:
        return _checked(now + seconds)
    try:
        return _in_number(float(text), now=now)
    except ValueError:
        pass
    found = datetime.fromisoformat(text[:_MAX_TEXT])
    try:
        return _checked((found if found.tzinfo else found.replace(tzinfo=zone)).timestamp())
    except OverflowError:
        raise ValueError("is no time") from None


def _in_number(number: float, *, now: float) -> float | None:
    if math.isnan(number):
        raise ValueError("is no time")
    if number <= 0:
        return None
    if number < FIRST_EPOCH_SECONDS:
        return _checked(now + number)
    return _checked(number if number < FIRST_EPOCH_MS else number / 1_000)


def _checked(seconds: float) -> float:
    if not 0 < seconds <= LAST_EPOCH_SECONDS:
        raise ValueError("is no time")
    return seconds


def epoch_ms(seconds: float | None) -> int | None:
    """Return a Unix second as a row of a quota has it."""
    return None if seconds is None else round(seconds * 1_000)
