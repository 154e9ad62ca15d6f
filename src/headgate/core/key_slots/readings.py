"""What a provider's answer says about a slot: its reading, and whether it is used up.

The row that drives wakes gives percent and reset. A slot is exhausted when that row, or another of
its type such as the weekly one beside the row of five hours, is used up, even if its reset has
just passed: a provider may reset later than it said. One that still tells of the same window long
after has not looked since, and does so when the key is used. The row of tools by the month never
exhausts a slot: models do not draw on it.

Where a limit is a rate, its reset slides: each answer tells one that lies as far ahead as the one
before it did. Such a reset never comes, and calls for nothing.
"""

from __future__ import annotations

import msgspec

from headgate.core.key_slots.quota import (
    QuotaFailure,
    QuotaFailureKind,
    QuotaLimit,
    QuotaReport,
    driving_limit,
    sound_report,
    sound_reset,
)
from headgate.core.key_slots.slot import EXHAUSTED_PERCENT, SlotConfig, SlotReading, SlotRow
from headgate.core.key_slots.wake import SAME_RESET_MS, SECONDS_PER_MINUTE

TIME_LIMIT = "TIME_LIMIT"
MAX_KEPT_LIMITS = 32

LATE_RESET_SECONDS = 900.0
"""How long after its reset a window that is used up is believed to be so."""

LEAST_SLIDE_SECONDS = 30.0
"""A reset that moves by less is one that two servers tell a little differently."""

SLIDE_ERROR_SECONDS = 60.0
"""How much nearer or further than before a sliding reset may be: a rate recovers with its use."""

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
        report = sound_report(answer, now)
        row = driving_limit(report, row_type=config.limit_type, row_unit=config.limit_unit)
        if isinstance(row, QuotaFailure):
            return row
        return _after(previous, _read_rows(config, report, row, now))
    if answer.kind is QuotaFailureKind.EXHAUSTED:
        return _after(previous, _read_exhaustion(answer, now, previous))
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


def _after(previous: SlotReading | None, read: Reading) -> Reading:
    """Return the reading with what the one before it adds to it."""
    kept = read.kept
    if previous is None or not (previous.is_exhausted and kept.is_exhausted):
        return read
    has_passed = previous.resets_at is not None and previous.resets_at <= kept.read_at
    kept = msgspec.structs.replace(kept, is_used_up_again=has_passed)
    return msgspec.structs.replace(read, kept=kept)


def slides(config: SlotConfig, read: Reading, row: SlotRow) -> bool:
    """Tell whether the reset of a reading is the one before it, moved by the time that has passed.

    A window of its own would move so too if it ended and another began between the two readings.
    Where it is longer than the time between polls that is told apart; and never after a wake.
    """
    last_ms, previous = row.schedule.next_reset_epoch_ms, row.reading
    if previous is None or previous.resets_at is None or last_ms is None or read.reset_ms is None:
        return False
    now = read.kept.read_at
    moved, passed = (read.reset_ms - last_ms) / _MS_PER_SECOND, now - previous.read_at
    left = read.reset_ms / _MS_PER_SECOND - now
    is_short = left < config.wake.poll_interval_minutes * SECONDS_PER_MINUTE
    is_moving = moved >= LEAST_SLIDE_SECONDS and abs(moved - passed) <= SLIDE_ERROR_SECONDS
    return is_moving and (is_short or last_ms / _MS_PER_SECOND > now)


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
    resets_at = _seconds(limit.next_reset_epoch_ms)
    if resets_at is not None and now - resets_at > LATE_RESET_SECONDS:
        return False
    return limit.percent_used is not None and limit.percent_used >= EXHAUSTED_PERCENT


def _read_exhaustion(failure: QuotaFailure, now: float, previous: SlotReading | None) -> Reading:
    resets_at = sound_reset(failure.resets_at, now)
    kept = SlotReading(
        read_at=now,
        percent_used=EXHAUSTED_PERCENT,
        resets_at=resets_at,
        level=None if previous is None else previous.level,
        is_exhausted=True,
    )
    reset_ms = None if resets_at is None else int(resets_at * _MS_PER_SECOND)
    return Reading(kept=kept, driving=failure, reset_ms=reset_ms)


def _seconds(epoch_ms: int | None) -> float | None:
    return None if epoch_ms is None else epoch_ms / _MS_PER_SECOND
