"""The limits of an Anthropic key, as its rate-limit headers tell them.

A plan has windows of five hours and seven days, as shares of one: `…-unified-5h-utilization`, with
`-reset` and `-status`. A key of the API has rates: `…-tokens-limit`, `-remaining` and `-reset`,
and the same for requests, input and output tokens. The windows of a plan come first.
"""

from __future__ import annotations

import re

from headgate.core.key_slots.quota import QuotaLimit, QuotaReport
from headgate.providers.header_quota import Dialect
from headgate.providers.rate_headers import Headers, RateRows
from headgate.providers.reset_times import epoch_ms
from headgate.providers.slot_places import KEY_PLACEHOLDER

UNIFIED_LIMIT = "UNIFIED_LIMIT"
"""The type of rows that are windows of a plan; the unit is the length, as `5h`."""
API_VERSION = "2023-06-01"
MAX_WINDOWS = 16

_PREFIX = "anthropic-ratelimit-"
_RATES = ("tokens", "input-tokens", "output-tokens", "requests")
_WINDOW = re.compile(rf"{_PREFIX}unified-(([0-9]{{1,3}})([a-z])[0-9a-z_]{{0,12}})-utilization")
_UNIT_HOURS = {"h": 1, "d": 24, "w": 168}
_REJECTED = "rejected"
_FULL_PERCENT = 100.0


def rows_of(headers: Headers, now: float) -> QuotaReport:
    """Return the windows of the plan, the shortest first, and the rates of the key."""
    rows = RateRows(headers, now=now)
    for window in _windows(headers):
        _add_window(rows, headers, window)
    for rate in _RATES:
        limit, remaining, reset = (
            f"{_PREFIX}{rate}-{part}" for part in ("limit", "remaining", "reset")
        )
        rows.add_rate(rate, limit=limit, remaining=remaining, reset=reset)
    return rows.report()


def used_up_until(headers: Headers, now: float) -> float | None:
    """Return when the last of the windows that refuse requests resets; None if none refuses."""
    rows = RateRows(headers, now=now)
    refusing = [name for name in ("", *_windows(headers)) if _status(headers, name) == _REJECTED]
    # All windows must have room, so the latest of the resets is the one that counts.
    times = [rows.time(_name(window, "reset")) for window in refusing]
    return max((time for time in times if time is not None), default=None)


def _add_window(rows: RateRows, headers: Headers, window: str) -> None:
    share = rows.number(_name(window, "utilization"))
    if share is None:
        return
    percentage = _FULL_PERCENT * share
    if _status(headers, window) == _REJECTED:
        percentage = max(percentage, _FULL_PERCENT)
    rows.add(
        QuotaLimit(
            type=UNIFIED_LIMIT,
            unit=window,
            percentage=percentage,
            next_reset_epoch_ms=epoch_ms(rows.time(_name(window, "reset"))),
        )
    )


def _windows(headers: Headers) -> list[str]:
    """Return the names of windows, the shortest first, as `5h` and `7d`."""
    found = [match for name in headers if (match := _WINDOW.fullmatch(name)) is not None]
    found.sort(key=lambda match: (int(match[2]) * _UNIT_HOURS.get(match[3], 1), match[1]))
    return [match[1] for match in found[:MAX_WINDOWS]]


def _status(headers: Headers, window: str) -> str:
    return headers.get(_name(window, "status"), "").strip().lower()


def _name(window: str, part: str) -> str:
    return f"{_PREFIX}unified-{window}-{part}" if window else f"{_PREFIX}unified-{part}"


DIALECT = Dialect(
    headers_begin_with=_PREFIX,
    key_header=("x-api-key", KEY_PLACEHOLDER),
    headers={"anthropic-version": API_VERSION},
    rows_of=rows_of,
    used_up_until=used_up_until,
)
