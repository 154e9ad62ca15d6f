"""What people do with slots: wake one by hand, disable it, enable it again."""

from __future__ import annotations

import asyncio
from functools import partial

from headgate.audit import AuditEntry
from headgate.core.key_slots.steps import PollDone, switch
from headgate.core.key_slots.times import wake_obstacle
from headgate.core.key_slots.wake import is_paused
from headgate.errors import SlotUnavailableError, WindowOpenError
from headgate.runtime.key_slots import lines as slot_lines
from headgate.runtime.key_slots.key_slot import KeySlot
from headgate.runtime.key_slots.status import SlotStatus
from headgate.runtime.key_slots.wake_sending import claim_and_send
from headgate.runtime.supervisor import Pulse

PRE_CHECK_TRIES = 10
PRE_CHECK_PAUSE_SECONDS = 1.0


async def warm_slot(slot: KeySlot, entry: AuditEntry | None) -> SlotStatus:
    """Wake a slot, unless a fresh reading shows that its window is open."""
    await slot.begin()
    _check_free(slot)
    checked = await _pre_check(slot)
    _check_free(slot)
    if not checked.needs_wake:
        raise _needless(slot)
    claim, done = await claim_and_send(slot, "manual", pulse=Pulse(), entry=entry)
    if claim is None:
        _check_free(slot)
        raise SlotUnavailableError(slot.name, "somebody else woke it just now")
    if done is not None and done.is_stale and done.problem:
        raise SlotUnavailableError(slot.name, f"the wake was {done.problem}")
    if done is not None and done.problem:
        raise SlotUnavailableError(slot.name, f"the wake was sent and failed ({done.problem})")
    return slot.status()


async def switch_slot(slot: KeySlot, entry: AuditEntry | None, *, is_on: bool) -> SlotStatus:
    """Enable a slot, whatever had disabled it, or disable it."""
    await slot.begin()
    step = partial(switch, config=slot.config, is_on=is_on)
    await slot.shared.mirror.step((slot.name,), step, entry)
    slot_lines.switched(slot.trail, slot.name, is_on=is_on)
    slot.restate()
    slot.wake_alarm.ring()
    slot.quota_alarm.ring()
    return slot.status()


async def _pre_check(slot: KeySlot) -> PollDone:
    for _ in range(PRE_CHECK_TRIES):
        done = await slot.poll("manual-precheck", pulse=Pulse(), is_forced=True)
        if done is not None and not done.is_stale:
            return done
        _check_free(slot)
        await asyncio.sleep(PRE_CHECK_PAUSE_SECONDS)
    raise SlotUnavailableError(slot.name, "its quota is being read just now")


def _check_free(slot: KeySlot) -> None:
    obstacle = wake_obstacle(slot.config, slot.row, slot.now())
    if obstacle:
        schedule = slot.row.schedule
        until = schedule.paused_until if is_paused(schedule, slot.now()) else None
        raise SlotUnavailableError(slot.name, obstacle, until=until)


def _needless(slot: KeySlot) -> WindowOpenError | SlotUnavailableError:
    reading, hold = slot.row.reading, slot.standing().hold
    if reading is not None and reading.is_exhausted and hold is not None:
        return SlotUnavailableError(slot.name, hold.why, until=hold.until)
    return WindowOpenError(slot.name, None if reading is None else reading.resets_at)
