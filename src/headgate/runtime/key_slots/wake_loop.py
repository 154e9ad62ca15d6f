"""The wake loop of a slot: looks once a minute whether a wake is due, and sends it.

It steps when a minute of the wall clock begins. The next minute is worked out, never slept for
after the work, so that nothing drifts; and a minute that it comes late to is not lost, because
markers tell what is due, see `headgate.core.key_slots.wake`. Nothing that a step finds is done
before the store has confirmed it, so that each trigger is served once, whichever node or life of it
looks.
"""

from __future__ import annotations

import time
from functools import partial

from headgate.core.key_slots.slot import SlotConfig, SlotRow
from headgate.core.key_slots.times import due_wake, window_is_over
from headgate.core.key_slots.wake import (
    SECONDS_PER_MINUTE,
    WakeTrigger,
    is_paused,
    minute_of,
    missed_time,
    next_wake_at,
)
from headgate.core.key_slots.wakes import close_window, miss_wake, skip_wake
from headgate.errors import StoreError
from headgate.runtime.key_slots import lines as slot_lines
from headgate.runtime.key_slots.key_slot import RETRY_SECONDS, KeySlot
from headgate.runtime.key_slots.wake_sending import claim_and_send, send_claimed

QUIET_SECONDS = 900.0
"""How long a look is believed that found nothing to do, while nothing changes."""


class WakeLoop:
    """Wakes one slot."""

    def __init__(self, slot: KeySlot) -> None:
        self._slot = slot
        self._seen = slot.config
        self._told = ("", "")
        self._quiet_of: tuple[SlotRow, SlotConfig] | None = None
        self._quiet_from = self._quiet_until = 0.0

    async def run(self) -> None:
        """Look at the beginning of every minute, until cancelled."""
        slot, pulse = self._slot, self._slot.wake_pulse
        slot_lines.started(slot.trail, slot.name, "wake scheduler")
        while True:
            pulse.begin()
            try:
                next_at = await self.run_once()
                slot_lines.went_on(slot.name, "wake scheduler", pulse)
            except StoreError as error:
                slot_lines.store_away(slot.name, "wake scheduler", pulse, str(error))
                next_at = slot.now() + RETRY_SECONDS
                # What the look was for is still to be done.
                self._quiet_of = None
            now = slot.now()
            pulse.end(now)
            await slot.wake_alarm.sleep(min(next_at - now, SECONDS_PER_MINUTE))

    async def run_once(self) -> float:
        """Do what is due, and return when to look again."""
        slot = self._slot
        slot.look_at_key()
        now = slot.now()
        if self._is_quiet(now):
            return next_minute(now)
        self._tell_change()
        await slot.begin()
        if not slot.is_on:
            return next_minute(now)
        if slot.row.schedule.wake_pending:
            await self._close_window(now)
        elif not await self._fire(now):
            return slot.now() + RETRY_SECONDS
        return next_minute(now)

    def _is_quiet(self, now: float) -> bool:
        """Tell whether an earlier look has shown that nothing is due, which costs next to nothing.

        It holds for the row and the configuration that it was made with, for some minutes, and not
        under a clock that was set back.
        """
        slot = self._slot
        row, config = slot.row, slot.config
        known = self._quiet_of
        if known is None or known[0] is not row or known[1] is not config or now < self._quiet_from:
            self._quiet_of, self._quiet_from = (row, config), now
            self._quiet_until = min(_next_due(config, row, now), now + QUIET_SECONDS)
            # The first look at anything new is a real one.
            return False
        if now >= self._quiet_until:
            self._quiet_of = None
            return False
        return True

    def _tell_change(self) -> None:
        slot = self._slot
        if slot.config != self._seen:
            slot_lines.config_changed(slot.trail, slot.name, "wake scheduler")
        self._seen = slot.config

    async def _fire(self, now: float) -> bool:
        """Send a wake that is due and needed; False if that cannot be told yet."""
        slot = self._slot
        await self._give_up(now)
        due = due_wake(slot.config, slot.row, now)
        if due is None or due.trigger is None:
            return True
        config = slot.config
        self._tell_trigger(due.trigger)
        pre_check = await slot.poll("wake-precheck", pulse=slot.wake_pulse, is_forced=True)
        if pre_check is None or pre_check.is_stale:
            # Somebody else reads, or died at it. Rather than miss the time, go without.
            if self._is_last_look():
                await claim_and_send(slot, "scheduled", pulse=slot.wake_pulse)
            return False
        if pre_check.needs_wake:
            await claim_and_send(slot, "scheduled", pulse=slot.wake_pulse)
        elif not pre_check.is_disabled:
            await self._skip(config, due.trigger)
        return True

    def _is_last_look(self) -> bool:
        slot = self._slot
        return due_wake(slot.config, slot.row, slot.now() + 2 * RETRY_SECONDS) is None

    async def _give_up(self, now: float) -> None:
        """Tell of a time of day that was held for longer than it is caught up."""
        slot, config = self._slot, self._slot.config
        trigger = missed_time(config.wake, slot.row.schedule, now)
        if trigger is not None:
            step = partial(miss_wake, config=config, marker=trigger.marker)
            if await slot.shared.mirror.step((slot.name,), step):
                slot_lines.missed(slot.trail, config, trigger)

    def _tell_trigger(self, trigger: WakeTrigger) -> None:
        told = (trigger.mode.value, trigger.marker)
        if told != self._told:
            slot_lines.condition_met(self._slot.trail, self._slot.name, trigger)
        self._told = told

    async def _skip(self, config: SlotConfig, trigger: WakeTrigger) -> None:
        slot = self._slot
        step = partial(skip_wake, config=config, marker=trigger.marker)
        await slot.shared.mirror.step((slot.name,), step)
        slot.wakes["skipped"] += 1
        slot_lines.skipped(slot.trail, slot.name, trigger, slot.row)

    async def _close_window(self, now: float) -> None:
        slot = self._slot
        if not window_is_over(slot.config, slot.row, now):
            return
        asked_at = time.monotonic()
        configs = slot.shared.sharers(slot.config)
        step = partial(
            close_window, configs=configs, name=slot.name, claim_id=slot.shared.make_id()
        )
        done = await slot.shared.mirror.step(tuple(one.name for one in configs), step)
        slot_lines.window_closed(slot.trail, slot.config, done)
        if done.claim is not None:
            await send_claimed(slot, done.claim, asked_at=asked_at, pulse=slot.wake_pulse)


def next_minute(now: float) -> float:
    """Return when the next minute of the wall clock begins."""
    return minute_of(now) + SECONDS_PER_MINUTE


def _next_due(config: SlotConfig, row: SlotRow, now: float) -> float:
    """Return the earliest moment at which there may be something to do."""
    schedule = row.schedule
    if schedule.wake_pending:
        due_at = schedule.wake_retry_window_deadline or now
    else:
        trigger = next_wake_at(config.wake, schedule, now)
        due_at = float("inf") if trigger is None else trigger.due_at
    return max(due_at, schedule.paused_until or due_at) if is_paused(schedule, now) else due_at
