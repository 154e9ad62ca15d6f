"""The quota loop of a slot: reads the quota when it is due, and begins the slot with a reading.

It sleeps until the next poll, which a wake, a new configuration or somebody who was told "too many
requests" may bring forward. The first reading after a start decides whether to wake at once.
"""

from __future__ import annotations

from headgate.core.key_slots.wake import is_paused
from headgate.errors import StoreError
from headgate.runtime.key_slots import lines as slot_lines
from headgate.runtime.key_slots.key_slot import RETRY_SECONDS, KeySlot
from headgate.runtime.key_slots.wake_sending import claim_and_send

LONGEST_SLEEP_SECONDS = 3_600.0


class QuotaLoop:
    """Reads the quota of one slot."""

    def __init__(self, slot: KeySlot) -> None:
        self._slot = slot
        self._seen = slot.config

    async def run(self) -> None:
        """Read whenever it is due, until cancelled."""
        slot, pulse = self._slot, self._slot.quota_pulse
        slot_lines.started(slot.trail, slot.name, "quota poller")
        slot_lines.still_disabled(slot.name, slot.row)
        while True:
            pulse.begin()
            slot.quota_sleeps_until = float("-inf")
            try:
                next_at = await self.run_once()
                slot_lines.went_on(slot.name, "quota poller", pulse)
            except StoreError as error:
                slot_lines.store_away(slot.name, "quota poller", pulse, str(error))
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
        slot.restate()
        is_looking = slot.takes_look()
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
            await claim_and_send(slot, "initial", pulse=slot.quota_pulse)
        return self._next_look()

    def _next_look(self) -> float:
        """Return when the next poll is due, or the slot means something else for its tasks."""
        slot, now = self._slot, self._slot.now()
        row = slot.row
        due_at = slot.next_poll_at(row)
        moments = (
            due_at,
            row.schedule.paused_until,
            None if row.reading is None else row.reading.resets_at,
        )
        ahead = [moment for moment in moments if moment is not None and moment > now]
        return now if due_at is not None and due_at <= now else min(ahead, default=float("inf"))

    def _tell_change(self) -> None:
        slot = self._slot
        if slot.config != self._seen:
            slot_lines.config_changed(slot.trail, slot.name, "quota poller")
        self._seen = slot.config
