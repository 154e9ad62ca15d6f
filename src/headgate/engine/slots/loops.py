"""The wake loop of a slot: looks once a minute whether a wake is due, and sends it.

It steps when a minute of the wall clock begins. The next minute is worked out, never slept for
after the work, so that nothing drifts; and a minute that it comes late to is not lost, because
markers tell what is due, see `headgate.core.slots.wakes`. Nothing that a step finds is done
before the store has confirmed it, so that each trigger is served once, whichever node or life of it
looks.
"""

from __future__ import annotations

import time
from functools import partial

from headgate.core.slots.polling import due_wake, may_open_window, window_is_over
from headgate.core.slots.slot import SlotConfig, SlotRow, exhausted_until
from headgate.core.slots.steps import (
    close_window,
    miss_wake,
    skip_wake,
)
from headgate.core.slots.wakes import (
    SECONDS_PER_MINUTE,
    WakeTrigger,
    is_paused,
    minute_of,
    missed_time,
    next_wake_at,
)
from headgate.engine.slots import slot_log
from headgate.engine.slots.slot import RETRY_SECONDS, KeySlot
from headgate.errors import StoreError

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
        slot_log.started(slot.trail, slot.name, "wake scheduler")
        while True:
            pulse.begin()
            try:
                next_at = await self.run_once()
                slot_log.went_on(slot.name, "wake scheduler", pulse)
            except StoreError as error:
                slot_log.store_away(slot.name, "wake scheduler", pulse, str(error))
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
            slot_log.config_changed(slot.trail, slot.name, "wake scheduler")
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
        if not config.wake.is_polled:
            # To ask would be to send the wake: what is known decides.
            if may_open_window(slot.row, slot.now()):
                await slot.claim_and_send("scheduled", pulse=slot.wake_pulse)
            else:
                await self._skip(config, due.trigger)
            return True
        pre_check = await slot.poll("wake-precheck", pulse=slot.wake_pulse, is_forced=True)
        if pre_check is None or pre_check.is_stale:
            # Somebody else reads, or died at it. Rather than miss the time, go without.
            if self._is_last_look():
                await slot.claim_and_send("scheduled", pulse=slot.wake_pulse)
            return False
        if pre_check.needs_wake:
            await slot.claim_and_send("scheduled", pulse=slot.wake_pulse)
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
            if await slot.shared.rows.step((slot.name,), step):
                slot_log.missed(slot.trail, config, trigger)

    def _tell_trigger(self, trigger: WakeTrigger) -> None:
        told = (trigger.mode.value, trigger.marker)
        if told != self._told:
            slot_log.condition_met(self._slot.trail, self._slot.name, trigger)
        self._told = told

    async def _skip(self, config: SlotConfig, trigger: WakeTrigger) -> None:
        slot = self._slot
        step = partial(skip_wake, config=config, marker=trigger.marker)
        await slot.shared.rows.step((slot.name,), step)
        slot.wakes["skipped"] += 1
        slot_log.skipped(slot.trail, slot.name, trigger, slot.row)

    async def _close_window(self, now: float) -> None:
        slot = self._slot
        if not window_is_over(slot.config, slot.row, now):
            return
        asked_at = time.monotonic()
        configs = slot.shared.sharers(slot.config)
        step = partial(
            close_window, configs=configs, name=slot.name, claim_id=slot.shared.make_id()
        )
        done = await slot.shared.rows.step(tuple(one.name for one in configs), step)
        slot_log.window_closed(slot.trail, slot.config, done)
        if done.claim is not None:
            await slot.send_claimed(done.claim, asked_at=asked_at, pulse=slot.wake_pulse)


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


# The quota loop of a slot: reads the quota when it is due, and begins the slot with a reading.
#
# It sleeps until the next poll, which a wake, a new configuration or somebody who was told "too
# many requests" may bring forward. The first reading after a start decides whether to wake at
# once.

LONGEST_SLEEP_SECONDS = 3_600.0


class QuotaLoop:
    """Reads the quota of one slot."""

    def __init__(self, slot: KeySlot) -> None:
        self._slot = slot
        self._seen = slot.config

    async def run(self) -> None:
        """Read whenever it is due, until cancelled."""
        slot, pulse = self._slot, self._slot.quota_pulse
        slot_log.started(slot.trail, slot.name, "quota poller")
        slot_log.still_disabled(slot.name, slot.row)
        while True:
            pulse.begin()
            slot.quota_sleeps_until = float("-inf")
            try:
                next_at = await self.run_once()
                slot_log.went_on(slot.name, "quota poller", pulse)
            except StoreError as error:
                slot_log.store_away(slot.name, "quota poller", pulse, str(error))
                next_at = slot.now() + RETRY_SECONDS
            now = slot.now()
            pulse.end(now)
            slot.quota_sleeps_until = next_at
            await slot.quota_alarm.sleep(min(next_at - now, LONGEST_SLEEP_SECONDS))

    async def run_once(self) -> float:
        """Read the quota if it is due, and return when to look again."""
        slot = self._slot
        slot.look_at_key()
        self._tell_change()
        await slot.begin()
        await slot.store_observed()
        slot.restate()
        is_looking = slot.takes_look()
        if not slot.config.wake.is_polled and slot.is_on:
            return await self._look_unpolled()
        due_at = slot.next_poll_at(slot.row)
        # Read after it: what is due is due at the moment at which that was asked.
        now = slot.now()
        if due_at is None:
            return float("inf")
        if due_at <= now or (is_looking and not is_paused(slot.row.schedule, now)):
            action = "initial-quota-poll" if slot.row.start else "background-quota-poll"
            if await slot.poll(action, pulse=slot.quota_pulse, is_forced=is_looking) is None:
                return slot.now() + RETRY_SECONDS
        if slot.row.start == "wake":
            await slot.claim_and_send("initial", pulse=slot.quota_pulse)
        return self._next_look()

    async def _look_unpolled(self) -> float:
        """Look after a slot whose quota only traffic tells; nothing is sent but a first wake."""
        slot = self._slot
        await slot.look()
        if slot.row.start == "wake":
            await slot.claim_and_send("initial", pulse=slot.quota_pulse)
        interval = slot.config.wake.poll_interval_minutes * SECONDS_PER_MINUTE
        return min(self._next_look(), slot.now() + interval)

    def _next_look(self) -> float:
        """Return when the next poll is due, or the slot means something else for its tasks."""
        slot, now = self._slot, self._slot.now()
        row, reading = slot.row, slot.row.reading
        due_at = slot.next_poll_at(row)
        moments = (
            due_at,
            row.schedule.paused_until,
            slot.observed_due_at,
            None if reading is None else reading.resets_at,
            None if reading is None else exhausted_until(slot.config, reading),
        )
        # A response may have been shown while this step was under way.
        if (due_at is not None and due_at <= now) or slot.observed_due_at <= now:
            return now
        ahead = [moment for moment in moments if moment is not None and moment > now]
        return min(ahead, default=float("inf"))

    def _tell_change(self) -> None:
        slot = self._slot
        if slot.config != self._seen:
            slot_log.config_changed(slot.trail, slot.name, "quota poller")
        self._seen = slot.config
