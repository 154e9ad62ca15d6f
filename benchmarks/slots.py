"""The cost of an idle slot: what its two loops take while there is nothing to do.

Slots of the times mode whose times are far away step once a minute, on the event loop and clock of
the simulation, so that an hour takes no time but that of the processor. The floor is the same hour
with as many tasks that only sleep by the minute. Both run in turns, and the quickest turn counts.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import time
from collections.abc import Callable, Coroutine, Mapping
from itertools import count
from pathlib import Path
from zoneinfo import ZoneInfo

import structlog

from benchmarks.options import Options
from benchmarks.report import Row, table
from headgate.core.slots.quota import QuotaLimit, QuotaReport, WakeAnswer
from headgate.core.slots.slot import SlotConfig
from headgate.core.slots.wakes import WakeConfig, WakeMode
from headgate.engine.slots.slot import SlotSetup
from headgate.engine.slots.slot_log import SlotTrail
from headgate.engine.slots.slots import Slots
from headgate.providers.provider import Call
from headgate.storage.memory import MemoryDatabase, MemoryTaskStore
from headgate.storage.slot_rows import SlotStore
from headgate.testing import SimulatedLoop, simulate

SLOTS = 1_000
MINUTES = 60
TURNS = 3
MOST_MICROSECONDS = 100.0
"""For one slot and minute. At this, a thousand slots take less than two thousandths of a core."""

MOST_BYTES = 32 * 1024
MAX_STEPS = 100_000_000
_STATM_RESIDENT = 1


class QuietProvider:
    """Has a window open that never changes."""

    async def read_quota(self, _call: Call) -> QuotaReport:
        """Tell that a little is used."""
        row = QuotaLimit(type="TOKENS_LIMIT", percentage=7, next_reset_epoch_ms=1_800_000_000_000)
        return QuotaReport(limits=(row,))

    def read_response(
        self, _status: int, _headers: Mapping[str, str], _now: float
    ) -> QuotaReport | None:
        """Tell nothing: there is no traffic."""

    async def wake(self, _call: Call) -> WakeAnswer:
        """Answer; nobody asks."""
        return WakeAnswer()

    async def close(self) -> None:
        """Do nothing."""


def setups(number: int) -> list[SlotSetup]:
    """Return slots that have nothing to do for some hours."""
    provider, zone = QuietProvider(), ZoneInfo("Europe/Berlin")
    wake = WakeConfig(
        wake_modes=frozenset({WakeMode.TIMES, WakeMode.AFTER_RESET}),
        wake_times=("20:00", "22:00"),
        poll_interval_minutes=1440,
        zone=zone,
    )
    return [
        SlotSetup(
            config=SlotConfig(
                name=f"slot-{one}", provider="quiet", wake=wake, key_digest=f"key-{one}"
            ),
            provider=provider,
            read_key=lambda: "key",
            is_logging=False,
        )
        for one in range(number)
    ]


class Hour:
    """One hour of idle slots: processor seconds, and the bytes that the slots take."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.bytes = 0

    async def of_slots(self, loop: SimulatedLoop) -> None:
        """Run the loops of all slots."""
        before = resident_bytes()
        store = MemoryTaskStore(MemoryDatabase(), clock=loop.clock)
        await store.open()
        ids = count()
        slots = Slots(
            SlotStore(store), setups(SLOTS), trail_of=SlotTrail, make_id=lambda: f"{next(ids)}"
        )
        await slots.prepare()
        running = loop.create_task(slots.run())
        await asyncio.sleep(2 * 60)
        self.bytes = resident_bytes() - before
        await self._measure()
        running.cancel()
        await asyncio.wait([running])

    async def of_sleepers(self, loop: SimulatedLoop) -> None:
        """Let as many tasks sleep by the minute."""
        tasks = [loop.create_task(_sleep_by_the_minute()) for _ in range(SLOTS)]
        await self._measure()
        for task in tasks:
            task.cancel()

    async def _measure(self) -> None:
        began = time.process_time()
        await asyncio.sleep(MINUTES * 60)
        self.seconds = time.process_time() - began


async def _sleep_by_the_minute() -> None:
    while True:  # noqa: ASYNC110
        await asyncio.sleep(60)


def run(_options: Options) -> bool:
    """Measure, print, and return whether an idle slot is as cheap as it should be."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    slots = [_turn(Hour.of_slots) for _ in range(TURNS)]
    sleepers = [_turn(Hour.of_sleepers) for _ in range(TURNS)]
    per_minute = 1e6 / (SLOTS * MINUTES)
    cost = min(hour.seconds for hour in slots) * per_minute
    floor = min(hour.seconds for hour in sleepers) * per_minute
    size = slots[0].bytes / SLOTS
    rows: list[Row] = [
        ("a slot with nothing to do", f"{cost:.1f}", f"{cost / floor:.1f}", f"{size / 1024:.1f}"),
        ("a task that only sleeps (floor)", f"{floor:.1f}", "1.0", ""),
    ]
    title = f"idle slots: {SLOTS:,}, processor time for one slot and minute"
    table(title, ("", "microseconds", "of the floor", "KiB"), rows)
    return cost <= MOST_MICROSECONDS and size <= MOST_BYTES


def _turn(what: Callable[[Hour, SimulatedLoop], Coroutine[object, object, None]]) -> Hour:
    hour = Hour()
    gc.collect()
    simulate(lambda loop: what(hour, loop), seed=None, max_steps=MAX_STEPS)
    return hour


def resident_bytes() -> int:
    """Return the memory that the process has."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[_STATM_RESIDENT])
    return pages * resource.getpagesize()
