"""The limits of an OpenAI key, as its rate-limit headers tell them.

`x-ratelimit-limit-tokens`, `-remaining-` and `-reset-`, and the same for requests; a reset is a
duration such as `6m0s`. Many others send the same headers, some with plain seconds.
"""

from __future__ import annotations

from headgate.core.key_slots.quota import QuotaReport
from headgate.providers.header_quota import Dialect
from headgate.providers.rate_headers import Headers, RateRows
from headgate.providers.slot_places import KEY_PLACEHOLDER

_PREFIX = "x-ratelimit-"
_RATES = ("tokens", "requests")


def rows_of(headers: Headers, now: float) -> QuotaReport:
    """Return the rates of the key."""
    rows = RateRows(headers, now=now)
    for rate in _RATES:
        limit, remaining, reset = (
            f"{_PREFIX}{part}-{rate}" for part in ("limit", "remaining", "reset")
        )
        rows.add_rate(rate, limit=limit, remaining=remaining, reset=reset)
    return rows.report()


def used_up_until(headers: Headers, now: float) -> float | None:  # noqa: ARG001 - as a dialect has it
    """Return None: no header tells a window that is used up from a rate that was too high."""
    return None


DIALECT = Dialect(
    headers_begin_with=_PREFIX,
    key_header=("authorization", f"Bearer {KEY_PLACEHOLDER}"),
    headers={},
    rows_of=rows_of,
    used_up_until=used_up_until,
)
