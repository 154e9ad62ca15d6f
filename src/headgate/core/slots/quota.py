"""What a provider says about a key's quota, read into typed values.

Provider answers change without notice, so the rows of `limits[]` are the truth and nothing is
assumed about them: unknown types and units are kept, a row that cannot be read is named and the
others still count, and an answer that makes no sense is a `QuotaFailure`, never an exception.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone, tzinfo

import msgspec

from headgate.core.enums import LenientEnum

TOKENS_LIMIT = "TOKENS_LIMIT"
CREDIT_LIMIT = "CREDIT_LIMIT"
RATE_LIMIT = "RATE_LIMIT"
"""The type of rows that are a rate of requests or tokens; the unit says of which."""
UNIFIED_LIMIT = "UNIFIED_LIMIT"
"""The type of rows that are windows of a plan; the unit is the length, as `5h`."""
UNIT_HOURS = 3
SUCCESS_CODE = 200
EXHAUSTION_CODES = frozenset({1308, 1310, *range(1316, 1322)})

MAX_AHEAD_SECONDS = 400 * 86_400.0
"""No window is longer; a reset behind it is no time, whatever it was meant to be."""
MAX_PERCENT = 10_000.0
MAX_ROWS = 64
"""How many rows of an answer are read; what a provider tells has a bound."""

_LAST_EPOCH_MS = 253_402_300_799_000


class QuotaLimit(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"current_value": "currentValue", "next_reset_epoch_ms": "nextResetTime"},
):
    """One row of a provider's `limits[]`. `usage` is the allowance, `current_value` what is used.

    A row without `next_reset_epoch_ms` describes a cold key: no window is open.
    """

    type: str
    unit: int | str | None = None
    number: float | None = None
    usage: float | None = None
    current_value: float | None = None
    remaining: float | None = None
    percentage: float | None = None
    next_reset_epoch_ms: int | None = None

    @property
    def percent_used(self) -> float | None:
        """How much of the limit is used, from 0 to 100 or beyond; None if the row does not say."""
        if self.percentage is not None:
            return self.percentage
        if self.usage and self.current_value is not None:
            return 100.0 * self.current_value / self.usage
        return None


class QuotaReport(msgspec.Struct, frozen=True, kw_only=True):
    """A provider's good answer: the plan's level, the rows, and what could not be read of them."""

    level: str | None = None
    limits: tuple[QuotaLimit, ...] = ()
    unreadable: tuple[str, ...] = ()


class QuotaFailureKind(LenientEnum):
    """Why there is no reading; each kind calls for something else.

    With NO_KEY nobody was asked.
    """

    NO_KEY = "no_key"
    REFUSED = "refused"
    EXHAUSTED = "exhausted"
    THROTTLED = "throttled"
    SERVER_ERROR = "server_error"
    REJECTED = "rejected"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    GARBAGE = "garbage"


class QuotaFailure(msgspec.Struct, frozen=True, kw_only=True):
    """No reading, and why. `resets_at` is the Unix second at which the provider says it ends.

    `retry_after_seconds` is the wait that it asked for, as sent; None if it asked for none.
    """

    kind: QuotaFailureKind
    message: str = ""
    code: int | None = None
    resets_at: float | None = None
    retry_after_seconds: float | None = None


class WakeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a wake; `report` where the answer told the quota as well."""

    failure: QuotaFailure | None = None
    report: QuotaReport | None = None


class _Envelope(msgspec.Struct, frozen=True):
    code: int
    msg: object = None
    success: bool | None = None
    data: object = None


class _Data(msgspec.Struct, frozen=True):
    limits: list[object]
    level: object = None


def read_quota(body: object, zone: tzinfo) -> QuotaReport | QuotaFailure:
    """Read the decoded answer of a quota endpoint: `{code, msg, success, data: {level, limits}}`.

    The envelope's own code counts: a refusal can arrive with HTTP status 200. `zone` is the one
    in which the provider writes times into its messages.
    """
    try:
        envelope = msgspec.convert(body, _Envelope, strict=False)
        if envelope.code != SUCCESS_CODE or envelope.success is False:
            return failure_of(envelope.code, envelope.msg, zone)
        data = msgspec.convert(envelope.data, _Data)
    except msgspec.ValidationError as error:
        return QuotaFailure(kind=QuotaFailureKind.GARBAGE, message=str(error))
    level = None if data.level is None else str(data.level)
    return read_limits(data.limits, level=level)


def read_limits(rows: list[object], *, level: str | None = None) -> QuotaReport | QuotaFailure:
    """Read the rows one by one; only if none of several can be read is the answer garbage."""
    limits: list[QuotaLimit] = []
    unreadable: list[str] = []
    for index, row in enumerate(rows[:MAX_ROWS]):
        try:
            limits.append(_usable(msgspec.convert(row, QuotaLimit, strict=False)))
        except msgspec.ValidationError as error:
            unreadable.append(f"limits[{index}]: {error}")
    if unreadable and not limits:
        return QuotaFailure(kind=QuotaFailureKind.GARBAGE, message="; ".join(unreadable))
    return QuotaReport(level=level, limits=tuple(limits), unreadable=tuple(unreadable))


def sound_report(report: QuotaReport, now: float) -> QuotaReport:
    """Return the rows that make sense at this time, and name the others as unreadable."""
    problems = [_nonsense_in(limit, now) for limit in report.limits[:MAX_ROWS]]
    if not any(problems) and len(problems) == len(report.limits):
        return report
    rows = list(zip(report.limits, problems, strict=False))
    named = [f"{limit.type}: {problem}" for limit, problem in rows if problem]
    return msgspec.structs.replace(
        report,
        limits=tuple(limit for limit, problem in rows if not problem),
        unreadable=(*report.unreadable, *named),
    )


def sound_reset(resets_at: float | None, now: float) -> float | None:
    """Return a reset that a window can have; None for any other."""
    if resets_at is None or not resets_at <= now + MAX_AHEAD_SECONDS:
        return None
    return resets_at


def _nonsense_in(limit: QuotaLimit, now: float) -> str:
    """Return what is wrong with a row; "" if it can be used."""
    figures = (limit.number, limit.usage, limit.current_value, limit.remaining, limit.percentage)
    if not all(figure is None or math.isfinite(figure) for figure in figures):
        return "it has a figure that is no number"
    percent = limit.percent_used
    if percent is not None and not 0 <= percent <= MAX_PERCENT:
        return f"{percent:.6g}% used makes no sense"
    reset_ms = limit.next_reset_epoch_ms
    if reset_ms is not None and sound_reset(reset_ms / 1_000, now) is None:
        return "it resets further ahead than any window is long"
    return ""


def _usable(limit: QuotaLimit) -> QuotaLimit:
    """Drop a reset time that is no time, and a percentage that is no number."""
    reset_ms, percentage = limit.next_reset_epoch_ms, limit.percentage
    return msgspec.structs.replace(
        limit,
        next_reset_epoch_ms=reset_ms if reset_ms and 0 < reset_ms <= _LAST_EPOCH_MS else None,
        percentage=None if percentage is not None and math.isnan(percentage) else percentage,
    )


def driving_limit(
    report: QuotaReport, *, row_type: str | None = None, row_unit: int | str | None = None
) -> QuotaLimit | QuotaFailure:
    """Return the row whose reset time drives wakes.

    By default the tokens row, else the credits of the hours' window, else the first row. A
    configured `row_type` (and `row_unit`) overrides that. If there is no such row the answer is of
    no use: the reset of another row would open windows at the wrong time.
    """
    chosen = _default_row(report) if row_type is None else _row_of(report, row_type, row_unit)
    if chosen is not None:
        return chosen
    rows = ", ".join(f"{limit.type} unit {limit.unit}" for limit in report.limits) or "none"
    problem = "; ".join((f"no row drives wakes, the answer has {rows}", *report.unreadable))
    return QuotaFailure(kind=QuotaFailureKind.GARBAGE, message=problem)


def _default_row(report: QuotaReport) -> QuotaLimit | None:
    # The unreadable row may have been the tokens row, so the first one must not stand in for it.
    first = None if report.unreadable else next(iter(report.limits), None)
    return (
        # Beside the row of hours there may be one of the week, whose reset is days away.
        _row_of(report, TOKENS_LIMIT, None) or _first(report, CREDIT_LIMIT, UNIT_HOURS) or first
    )


def _row_of(report: QuotaReport, row_type: str, unit: int | str | None) -> QuotaLimit | None:
    if unit is not None:
        return _first(report, row_type, unit)
    return _first(report, row_type, UNIT_HOURS) or _first(report, row_type)


def _first(report: QuotaReport, row_type: str, unit: int | str | None = None) -> QuotaLimit | None:
    for limit in report.limits:
        if limit.type == row_type and (unit is None or str(limit.unit) == str(unit)):
            return limit
    return None


def failure_of(code: object, message: object, zone: tzinfo) -> QuotaFailure:
    """Name the failure behind an HTTP status or a provider's error code.

    Works for the body of a refused wake as well: an exhausted key answers one with a code and a
    message that holds the reset time.
    """
    number = _code_number(code)
    text = "" if message is None else str(message)
    kind = QuotaFailureKind.GARBAGE if number is None else _kind_of(number)
    exhausted = kind is QuotaFailureKind.EXHAUSTED
    resets_at = reset_time_in(text, zone) if exhausted else None
    return QuotaFailure(kind=kind, message=text, code=number, resets_at=resets_at)


def _code_number(code: object) -> int | None:
    try:
        return msgspec.convert(code, int, strict=False)
    except msgspec.ValidationError:
        return None


def _kind_of(code: int) -> QuotaFailureKind:
    if code in EXHAUSTION_CODES:
        return QuotaFailureKind.EXHAUSTED
    if 500 <= code <= 599:  # noqa: PLR2004 - the class of HTTP server errors
        return QuotaFailureKind.SERVER_ERROR
    return _KIND_BY_CODE.get(code, QuotaFailureKind.REJECTED)


_KIND_BY_CODE = {
    401: QuotaFailureKind.REFUSED,
    403: QuotaFailureKind.REFUSED,
    408: QuotaFailureKind.TIMEOUT,
    429: QuotaFailureKind.THROTTLED,
    **dict.fromkeys(range(1000, 1005), QuotaFailureKind.REFUSED),
    **dict.fromkeys((1302, 1303, 1305, 1312, 1313), QuotaFailureKind.THROTTLED),
}

_DATE_TIME = re.compile(
    r"(?<![0-9])([0-9]{4})[-/]([0-9]{1,2})[-/]([0-9]{1,2})"
    r"(?:T|,?[ ]+)([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?(?:[.,][0-9]+)?(?![0-9])"
    r"[ ]?(Z|UTC|GMT|[+-][0-9]{2}:?[0-9]{2})?"
)


def reset_time_in(message: str, zone: tzinfo) -> float | None:
    """Find the latest date and time in a message, in Unix seconds; None if it has none.

    A time without an offset is read in `zone`. The latest one, because a message that also says
    when the limit was hit names the reset as the later of the two.
    """
    return max(_times_in(message, zone), default=None)


def _times_in(message: str, zone: tzinfo) -> Iterator[float]:
    for match in _DATE_TIME.finditer(message):
        *digits, offset = match.groups()
        year, month, day, hour, minute, second = (int(text or 0) for text in digits)
        try:
            found = datetime(
                year, month, day, hour, minute, second, tzinfo=_zone_of(offset) or zone
            )
            yield found.timestamp()
        except (ValueError, OverflowError):
            # Digits that look like a date and are none; the message may hold a real one as well.
            continue


def _zone_of(offset: str | None) -> tzinfo | None:
    if offset is None:
        return None
    if offset in {"Z", "UTC", "GMT"}:
        return timezone(timedelta(0))
    sign = -1 if offset[0] == "-" else 1
    return timezone(sign * timedelta(hours=int(offset[1:3]), minutes=int(offset[-2:])))
