"""When a slot needs something next: a poll, a wake, the end of a retry window.

These are looks at a row, cheap enough for every minute of every slot. What they find is decided
once more in a step, see `headgate.core.key_slots.steps`, before anything is sent.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headgate.core.key_slots.headroom import why_off
from headgate.core.key_slots.poll_backoff import next_poll_at
from headgate.core.key_slots.slot import Claim, SlotConfig, SlotRow
from headgate.core.key_slots.wake import (
    WakeTrigger,
    is_paused,
    may_wake,
    next_wake_at,
    should_fire_wake,
    why_paused,
)
from headgate.core.key_slots.wake_confirmation import WindowEnd, close_window

WakeCause = Literal["scheduled", "initial", "manual", "retry"]

CLAIM_SECONDS = 90.0
"""How long a poll is left to whoever claimed it."""


class DueWake(msgspec.Struct, frozen=True, kw_only=True):
    """A wake that is due: for a trigger of a mode, or because the slot has just started."""

    cause: WakeCause
    reason: str
    trigger: WakeTrigger | None = None


def poll_due_at(config: SlotConfig, row: SlotRow, now: float) -> float | None:
    """Return when the slot is to be polled, `now` if it is due, None if it is not polled.

    While somebody polls it, that is when their claim ends at the latest.
    """
    if why_off(config, row):
        return None
    due_at = next_poll_at(
        config.wake, row.schedule, now, reading=row.reading, is_adaptive=config.adaptive_polling
    )
    claim = row.poll_claim
    if due_at is None or claim is None or not is_live(claim, now, seconds=CLAIM_SECONDS):
        return due_at
    return max(due_at, claim.until)


def due_wake(config: SlotConfig, row: SlotRow, now: float) -> DueWake | None:
    """Return the wake that is due, before any pre-check."""
    if why_off(config, row):
        return None
    trigger = should_fire_wake(config.wake, row.schedule, now)
    if trigger is not None:
        return DueWake(cause="scheduled", reason=trigger.reason, trigger=trigger)
    if row.start == "wake" and config.wake.wake_modes and may_wake(row.schedule, now):
        return DueWake(cause="initial", reason="start of the slot")
    return None


def window_is_over(config: SlotConfig, row: SlotRow, now: float) -> bool:
    """Tell whether a wake is pending whose retry window has ended."""
    if not row.schedule.wake_pending:
        return False
    return close_window(config.wake, row.schedule, now).outcome is not WindowEnd.NOT_YET


def next_wake_of(config: SlotConfig, row: SlotRow, now: float) -> WakeTrigger | None:
    """Return the trigger that comes first; `due_at` has passed if it is only being held."""
    return None if why_off(config, row) else next_wake_at(config.wake, row.schedule, now)


def wake_obstacle(config: SlotConfig, row: SlotRow, now: float) -> str:
    """Return why not even a person can have the slot woken now; "" if one can."""
    if row.schedule.wake_pending:
        return "a wake is being confirmed"
    if is_paused(row.schedule, now):
        return f"paused, {why_paused(row.schedule)}"
    return why_off(config, row)


def is_live(claim: Claim | None, now: float, *, seconds: float) -> bool:
    """Tell whether somebody is still at work under a claim.

    One that ends later than any claim made now was made before the clock went back.
    """
    return claim is not None and now < claim.until <= now + 2 * seconds
