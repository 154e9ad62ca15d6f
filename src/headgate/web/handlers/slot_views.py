"""Slots as people and programs see them: what is known of each, and what comes next.

Everything here is told from a status alone, so that any node answers for all slots.
"""

from __future__ import annotations

from datetime import datetime

from headgate.bodies.slots import LimitBody, LoopBody, NextWakeBody, SlotBody, SlotState
from headgate.core.key_slots.headroom import why_off
from headgate.core.key_slots.quota import QuotaLimit
from headgate.core.key_slots.slot import SlotReading
from headgate.core.key_slots.wake import SlotSchedule, WakeMode, is_paused
from headgate.runtime.key_slots.status import LoopHealth, SlotStatus
from headgate.task_snapshot import exact_moment

RETRY = "retry"

_UNREAD = SlotReading(read_at=0.0)


def slot_body(status: SlotStatus, now: float) -> SlotBody:
    """Return everything about a slot."""
    schedule, standing = status.row.schedule, status.standing
    reading = status.row.reading or _UNREAD
    modes = status.config.wake.wake_modes
    off = why_off(status.config, status.row)
    return SlotBody(
        name=status.config.name,
        provider=status.config.provider,
        state=_state(status, now),
        enabled=not off,
        percent_used=standing.percent_used,
        resets_at=_moment(standing.resets_at),
        read_at=_moment(reading.read_at or None),
        level=reading.level,
        limits=[_limit(limit) for limit in reading.limits],
        hold="" if standing.hold is None else standing.hold.why,
        held_until=None if standing.hold is None else _moment(standing.hold.until),
        wake_modes=[mode.value for mode in WakeMode if mode in modes],
        wakes_enabled=bool(modes) and not (off or schedule.wake_auto_disabled),
        next_wake=_next_wake(status, now),
        wake_pending=schedule.wake_pending,
        last_wake_at=_moment(schedule.last_wake_at),
        last_confirmed_at=_moment(schedule.last_confirmed_at),
        wake_errors=schedule.wake_errors,
        poll_errors=schedule.consecutive_poll_errors,
        last_error=schedule.last_problem,
        last_poll_at=_moment(schedule.last_poll_at),
        next_poll_at=_moment(status.next_poll_at),
        disabled_reason=off or schedule.disabled_reason,
        wake_loop=_loop(status.wake_loop),
        quota_loop=_loop(status.quota_loop),
    )


def _state(status: SlotStatus, now: float) -> SlotState:
    reading = status.row.reading
    if why_off(status.config, status.row):
        return "disabled"
    if is_paused(status.row.schedule, now):
        return "paused"
    if reading is None:
        return "unknown"
    if reading.is_exhausted:
        return "exhausted"
    return "cold" if reading.resets_at is None or reading.resets_at <= now else "open"


def _next_wake(status: SlotStatus, now: float) -> NextWakeBody | None:
    schedule = status.row.schedule
    if why_off(status.config, status.row):
        return None
    retry_at = _retry_at(schedule)
    if retry_at is not None:
        reason = "the last wake is not confirmed yet; if it is not by then, it is sent again"
        return NextWakeBody(at=exact_moment(retry_at), mode=RETRY, reason=reason)
    trigger = status.next_wake
    if trigger is None:
        return None
    # A pause holds what is due; it is sent when the pause ends.
    paused_until = schedule.paused_until if is_paused(schedule, now) else None
    at = _moment(max(trigger.due_at, paused_until or trigger.due_at))
    if at is None:
        return None
    return NextWakeBody(at=at, mode=trigger.mode.value, reason=trigger.reason)


def _retry_at(schedule: SlotSchedule) -> float | None:
    is_ahead = schedule.wake_pending and not schedule.wake_timeout_retry_fired
    return schedule.wake_retry_window_deadline if is_ahead else None


def _limit(limit: QuotaLimit) -> LimitBody:
    reset_ms = limit.next_reset_epoch_ms
    return LimitBody(
        type=limit.type,
        unit=limit.unit,
        number=limit.number,
        percent_used=limit.percent_used,
        resets_at=_moment(None if reset_ms is None else reset_ms / 1000),
    )


def _loop(health: LoopHealth) -> LoopBody:
    return LoopBody(
        last_step_at=_moment(health.last_step_at),
        restarts=health.restarts,
        problem=health.problem,
    )


def _moment(seconds: float | None) -> datetime | None:
    """Return a time; None where none is known, or no calendar reaches it."""
    try:
        return None if seconds is None else exact_moment(seconds)
    except (OverflowError, OSError, ValueError):
        return None
