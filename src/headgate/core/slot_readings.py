"""What a provider's answer says about a slot: its reading, and whether it is used up.

The row that drives wakes gives percent and reset. A slot is exhausted when that row, or another of
its type such as the weekly one beside the row of five hours, is used up and has not reset. The row
of tools by the month never exhausts a slot: models do not draw on it.
"""

from __future__ import annotations

import msgspec

from headgate.core.quota import (
    QuotaFailure,
    QuotaFailureKind,
    QuotaLimit,
    QuotaReport,
    driving_limit,
)
from headgate.core.slots import EXHAUSTED_PERCENT, SlotConfig, SlotReading
from headgate.core.wake import SAME_RESET_MS

TIME_LIMIT = "TIME_LIMIT"
MAX_KEPT_LIMITS = 32

_MS_PER_SECOND = 1000


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A good answer: the reading to be kept, and the row or failure that the wake rules go by."""

    kept: SlotReading
    driving: QuotaLimit | QuotaFailure
    reset_ms: int | None


def read_answer(
    config: SlotConfig,
    answer: QuotaReport | QuotaFailure,
    now: float,
    previous: SlotReading | None = None,
) -> Reading | QuotaFailure:
    """Read an answer for a slot; a failure is handed back unless it says that all is used up."""
    if isinstance(answer, QuotaReport):
        row = driving_limit(answer, row_type=config.limit_type, row_unit=config.limit_unit)
        return row if isinstance(row, QuotaFailure) else _read_rows(config, answer, row, now)
    if answer.kind is QuotaFailureKind.EXHAUSTED:
        return _read_exhaustion(answer, now, previous)
    return answer


def is_same(reading: SlotReading, previous: SlotReading | None) -> bool:
    """Tell whether a reading says nothing that the one before it did not."""
    if previous is None or reading.is_exhausted != previous.is_exhausted:
        return False
    same_reset = reading.resets_at == previous.resets_at
    if reading.resets_at is not None and previous.resets_at is not None:
        apart_ms = abs(reading.resets_at - previous.resets_at) * _MS_PER_SECOND
        same_reset = apart_ms <= SAME_RESET_MS
    return same_reset and reading.percent_used == previous.percent_used


def _read_rows(config: SlotConfig, report: QuotaReport, row: QuotaLimit, now: float) -> Reading:
    used_up = [each for each in report.limits if _is_used_up(config, each, row, now)]
    # All of them have to reset before there is room; the last one decides.
    shown = max(used_up, key=lambda each: each.next_reset_epoch_ms or 0, default=row)
    kept = SlotReading(
        read_at=now,
        percent_used=shown.percent_used,
        resets_at=_seconds(shown.next_reset_epoch_ms),
        level=report.level,
        limits=report.limits[:MAX_KEPT_LIMITS],
        is_exhausted=bool(used_up),
    )
    return Reading(kept=kept, driving=row, reset_ms=row.next_reset_epoch_ms)


def _is_used_up(config: SlotConfig, limit: QuotaLimit, driving: QuotaLimit, now: float) -> bool:
    if limit.type != driving.type or (limit.type == TIME_LIMIT and config.limit_type != TIME_LIMIT):
        return False
    percent, reset = limit.percent_used, _seconds(limit.next_reset_epoch_ms)
    return percent is not None and percent >= EXHAUSTED_PERCENT and (reset is None or reset > now)


def _read_exhaustion(failure: QuotaFailure, now: float, previous: SlotReading | None) -> Reading:
    kept = SlotReading(
        read_at=now,
        percent_used=EXHAUSTED_PERCENT,
        resets_at=failure.resets_at,
        level=None if previous is None else previous.level,
        is_exhausted=True,
    )
    resets_at = failure.resets_at
    reset_ms = None if resets_at is None else int(resets_at * _MS_PER_SECOND)
    return Reading(kept=kept, driving=failure, reset_ms=reset_ms)


def _seconds(epoch_ms: int | None) -> float | None:
    return None if epoch_ms is None else epoch_ms / _MS_PER_SECOND
