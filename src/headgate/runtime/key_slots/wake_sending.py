"""How a wake is sent: claimed in the store, sent, and its answer kept.

Between any two of these the process may die. Before the claim nothing has happened; after it the
wake is pending, and its retry window sends it if no reading confirms it.
"""

from __future__ import annotations

import time
from functools import partial

from headgate.audit import AuditEntry
from headgate.core.key_slots.times import WakeCause
from headgate.core.key_slots.wakes import WakeClaim, WakeDone, claim_wake, wake_done
from headgate.runtime.key_slots import lines as slot_lines
from headgate.runtime.key_slots.key_slot import KeySlot
from headgate.runtime.supervisor import Pulse

ACTIONS: dict[WakeCause, str] = {
    "scheduled": "scheduled-wake",
    "initial": "initial-wake",
    "manual": "manual-wake",
    "retry": "forced-wake-retry",
}
"""What each kind of wake is called in the log of slots."""


async def claim_and_send(
    slot: KeySlot, cause: WakeCause, *, pulse: Pulse, entry: AuditEntry | None = None
) -> tuple[WakeClaim | None, WakeDone | None]:
    """Send a wake unless there is no need any more; without a claim nothing was sent."""
    asked_at = time.monotonic()
    configs = slot.shared.sharers(slot.config)
    step = partial(
        claim_wake,
        configs=configs,
        name=slot.name,
        cause=cause,
        claim_id=slot.shared.make_id(),
    )
    claim = await slot.shared.mirror.step(tuple(one.name for one in configs), step, entry)
    if claim is None:
        return None, None
    return claim, await send_claimed(slot, claim, asked_at=asked_at, pulse=pulse)


async def send_claimed(
    slot: KeySlot, claim: WakeClaim, *, asked_at: float, pulse: Pulse
) -> WakeDone | None:
    """Send what was claimed, and have the store know; None if another slot's wake serves it.

    `asked_at` is when the claim was asked for, by `time.monotonic`: the clock of a running loop may
    stand still within one of its rounds. A claim that has grown old, because the process or its
    machine stood still, is not sent: its retry sees to it.
    """
    if claim.is_shared:
        slot.wakes["shared"] += 1
        slot_lines.shared_wake(slot.trail, slot.name, claim)
        return None
    is_timely = partial(_is_timely, slot, claim, asked_at)
    answer = await slot.send_wake(ACTIONS[claim.cause], claim.id, pulse=pulse, is_timely=is_timely)
    if answer is None:
        return _unsent(slot, claim)
    configs = slot.shared.sharers(slot.config)
    done = await slot.shared.mirror.step(
        tuple(one.name for one in configs),
        partial(wake_done, configs=configs, name=slot.name, claim_id=claim.id, answer=answer),
    )
    slot.wakes[done.outcome] += 1
    slot_lines.woken(slot.trail, slot.name, claim, done)
    slot.shared.poll_soon((slot.name, *claim.also))
    return done


def _is_timely(slot: KeySlot, claim: WakeClaim, asked_at: float) -> bool:
    """Tell by both clocks: one of them stands still while a machine sleeps, one can be set back."""
    took = time.monotonic() - asked_at
    return took < claim.send_within_seconds and slot.now() < claim.send_before


def _unsent(slot: KeySlot, claim: WakeClaim) -> WakeDone:
    slot.wakes["too_late"] += 1
    slot_lines.unsent(slot.trail, slot.name, claim)
    problem = "not sent, because too much time had passed; its retry window sees to it"
    return WakeDone(row=slot.row, outcome="too_late", is_stale=True, problem=problem)
