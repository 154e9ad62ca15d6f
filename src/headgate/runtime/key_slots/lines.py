"""What is told of slots: lines for people in the log of the service, events in the log of slots.

Rule: each thing that happens is told once, and a line that asks for something to be done says what.
"""

from __future__ import annotations

from datetime import UTC, datetime

import structlog
from structlog.typing import FilteringBoundLogger

from headgate.core.key_slots.quota import QuotaFailureKind
from headgate.core.key_slots.slot import SlotConfig, SlotRow
from headgate.core.key_slots.steps import PollDone
from headgate.core.key_slots.wake import WakeTrigger
from headgate.core.key_slots.wake_confirmation import Confirmation, WindowEnd
from headgate.core.key_slots.wakes import WakeClaim, WakeDone, WindowDone
from headgate.runtime.supervisor import Pulse
from headgate.slot_logs import SlotTrail

log = structlog.get_logger("headgate.slots")

_FAR = "some far day"
_NO_KEY = QuotaFailureKind.NO_KEY.value
_THROTTLED = QuotaFailureKind.THROTTLED.value


def _of(name: str) -> FilteringBoundLogger:
    """Return what tells of one slot; its lines have the slot as a field beside the words."""
    bound: FilteringBoundLogger = log.bind(slot=name)
    return bound


def gone(name: str) -> None:
    """Tell that a slot left the settings."""
    _of(name).info(f"slot {name} is not configured any more")


def started(trail: SlotTrail, name: str, loop: str) -> None:
    """Tell that a loop has started."""
    _of(name).info(f"slot {name} {loop} started")
    trail.event(f"{_dashed(loop)}.started")


def still_disabled(name: str, row: SlotRow) -> None:
    """Tell at a start that a slot was disabled before, and stays so."""
    if row.schedule.slot_auto_disabled:
        reason = row.schedule.disabled_reason
        _of(name).warning(f"slot {name} is still disabled: {reason}; {_advice(name)}")


def from_nothing(trail: SlotTrail, name: str, problem: str) -> None:
    """Tell that what was kept of a slot could not be read, and is gone."""
    line = f"slot {name} starts from nothing: what was kept of it could not be read"
    _of(name).error(line, problem=problem)
    trail.event("slot-from-nothing")


def config_changed(trail: SlotTrail, name: str, loop: str) -> None:
    """Tell that a loop goes by another configuration."""
    _of(name).info(f"slot {name} {loop} detected config change")
    trail.event(f"{_dashed(loop)}.config-changed")


def store_away(name: str, loop: str, pulse: Pulse, problem: str) -> None:
    """Tell once that a loop cannot ask the store."""
    if not pulse.problem.startswith("the store"):
        line = f"slot {name} {loop} cannot reach the store; nothing is sent until it can"
        _of(name).warning(line, problem=problem)
    pulse.problem = "the store cannot be asked"


def went_on(name: str, loop: str, pulse: Pulse) -> None:
    """Tell that a loop does its work, if it was known that it did not."""
    if pulse.problem:
        _of(name).info(f"slot {name} {loop} goes on")
        pulse.problem = ""


def condition_met(trail: SlotTrail, name: str, trigger: WakeTrigger) -> None:
    """Tell that a mode calls for a wake."""
    _of(name).info(f"slot {name} wake condition met: {trigger.reason}")
    trail.event("wake-condition-met", mode=trigger.mode.value, marker=trigger.marker)


def skipped(trail: SlotTrail, name: str, trigger: WakeTrigger, row: SlotRow) -> None:
    """Tell that a wake is not needed."""
    _of(name).info(f"slot {name} wake not needed: the window is open (next_reset: {_reset(row)})")
    trail.event("wake-skipped", mode=trigger.mode.value, marker=trigger.marker)


def missed(trail: SlotTrail, config: SlotConfig, trigger: WakeTrigger) -> None:
    """Tell that a time of day is past without its wake."""
    name, minutes = config.name, max(config.wake.wake_catch_up_minutes, 1)
    _of(name).warning(f"slot {name} wake missed: {trigger.reason} had no wake within {minutes} min")
    trail.event("wake-missed", mode=trigger.mode.value, marker=trigger.marker)


def shared_wake(trail: SlotTrail, name: str, claim: WakeClaim) -> None:
    """Tell that the wake of another slot serves this one."""
    _of(name).info(
        f"slot {name} shares the wake of another slot with the same key ({claim.reason})"
    )
    trail.event("wake-shared", claim.id, cause=claim.cause, reason=claim.reason)


def unsent(trail: SlotTrail, name: str, claim: WakeClaim) -> None:
    """Tell that a wake was not sent, because it was claimed too long before."""
    waited = f"more than {claim.send_within_seconds:.0f} s passed before it could leave"
    _of(name).warning(f"slot {name} {claim.cause} wake not sent: {waited}; its retry sees to it")
    trail.event("wake-unsent", claim.id, cause=claim.cause)


def woken(trail: SlotTrail, name: str, claim: WakeClaim, done: WakeDone) -> None:
    """Tell that a wake was sent, and what came of it."""
    also = f", also for {', '.join(claim.also)}" if claim.also else ""
    if done.problem:
        _of(name).warning(f"slot {name} {claim.cause} wake failed{also}: {done.problem}")
    else:
        _of(name).info(f"slot {name} {claim.cause} wake fired{also}")
    trail.event(
        "wake-sent", claim.id, cause=claim.cause, outcome=done.outcome, also=list(claim.also)
    )
    if done.confirmation is Confirmation.CONFIRMED:
        _confirmed(trail, name, done.row, claim.id)
    if done.is_disabled:
        _disabled(trail, name, done.row)


def window_closed(trail: SlotTrail, config: SlotConfig, done: WindowDone) -> None:
    """Tell what the end of a retry window calls for."""
    name, minutes = config.name, config.wake.wake_quota_retry_window_minutes
    if done.outcome is WindowEnd.RETRY_NOW:
        _of(name).warning(f"slot {name} wake not confirmed within {minutes} min: sent once more")
    elif done.outcome is WindowEnd.BACK_TO_SCHEDULE:
        _of(name).warning(f"slot {name} wake not confirmed: back to the normal schedule")
    elif done.outcome is WindowEnd.WAKES_DISABLED:
        reason = done.row.schedule.disabled_reason
        _of(name).error(f"slot {name} wakes auto-disabled: {reason}; {_advice(name)}")
    else:
        return
    trail.event("wake-window-closed", outcome=done.outcome.value)


def polled(trail: SlotTrail, config: SlotConfig, done: PollDone, *, flow_id: str) -> None:
    """Tell what came of a poll."""
    name = config.name
    if done.is_stale:
        trail.event("quota-poller.stale-answer", flow_id, outcome=done.outcome)
        return
    if done.problem:
        _failed(trail, config, done, flow_id)
    else:
        _read(name, done)
    if done.key_was_away and done.outcome != _NO_KEY:
        _of(name).info(f"slot {name} has its key again")
    if done.errors_before and not done.problem:
        _of(name).info(f"slot {name} recovered after {done.errors_before} consecutive error(s)")
        trail.event("quota-poller.recovered", flow_id, errors=done.errors_before)
    if done.confirmation is Confirmation.CONFIRMED:
        _confirmed(trail, name, done.row, flow_id)
    elif done.confirmation is Confirmation.NOT_CONFIRMED:
        errors = done.row.schedule.wake_errors
        _of(name).info(
            f"slot {name} wake not confirmed yet ({errors} reading(s) without a new reset)"
        )
        trail.event("quota-poller.wake-unconfirmed", flow_id, wake_errors=errors)


def switched(trail: SlotTrail, name: str, *, is_on: bool) -> None:
    """Tell that somebody enabled or disabled a slot."""
    _of(name).info(f"slot {name} {'enabled' if is_on else 'disabled'} by hand")
    trail.event("slot-enabled" if is_on else "slot-disabled")


def _read(name: str, done: PollDone) -> None:
    reading = done.row.reading
    percent = None if reading is None else reading.percent_used
    used = "" if percent is None else f", {percent:.0f}% used"
    exhausted = ", exhausted" if reading is not None and reading.is_exhausted else ""
    _of(name).info(f"slot {name} quota refreshed (next_reset: {_reset(done.row)}{used}{exhausted})")


def _failed(trail: SlotTrail, config: SlotConfig, done: PollDone, flow_id: str) -> None:
    name, most = config.name, config.wake.max_consecutive_errors
    if done.outcome == _NO_KEY:
        if not done.key_was_away:
            line = f"slot {name} cannot have its key; its tasks wait and it is tried each minute"
            _of(name).error(f"{line} ({done.problem})")
    elif done.outcome == _THROTTLED:
        until = _moment(done.row.schedule.paused_until)
        _of(name).warning(f"slot {name} was asked to wait ({done.problem}): paused until {until}")
        trail.event("quota-poller.paused", flow_id, until=until)
    elif done.errors_after > done.errors_before:
        count = f"{done.errors_after}/{most} consecutive"
        _of(name).warning(f"slot {name} poll failed ({count}): {done.problem}")
    elif done.row.schedule.wake_pending:
        _of(name).warning(f"slot {name} poll failed (a wake is being confirmed): {done.problem}")
    elif not done.is_disabled:
        _of(name).warning(f"slot {name} poll failed (out of turn, not counted): {done.problem}")
    if done.backoff_minutes is not None:
        _of(name).info(f"slot {name} backing off: next poll in {done.backoff_minutes} min")
        trail.event("quota-poller.backoff", flow_id, minutes=done.backoff_minutes)
    if done.is_disabled:
        _disabled(trail, name, done.row)


def _disabled(trail: SlotTrail, name: str, row: SlotRow) -> None:
    reason = row.schedule.disabled_reason
    _of(name).error(f"slot {name} auto-disabled: {reason}; {_advice(name)}")
    trail.event("slot-auto-disabled", reason=reason)


def _advice(name: str) -> str:
    return f"mend it, then change the settings or run `headgate slots enable {name}`"


def _confirmed(trail: SlotTrail, name: str, row: SlotRow, flow_id: str) -> None:
    _of(name).info(f"slot {name} wake confirmed (next_reset: {_reset(row)})")
    trail.event("quota-poller.wake-confirmed", flow_id, next_reset=_reset(row))


def _reset(row: SlotRow) -> str:
    return _moment(None if row.reading is None else row.reading.resets_at)


def _moment(seconds: float | None) -> str:
    if seconds is None:
        return "none"
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (OverflowError, OSError, ValueError):
        return _FAR


def _dashed(loop: str) -> str:
    return loop.replace(" ", "-")
