"""A thousand slots for a virtual week: no trigger is missed or served twice, and memory stays.

What was served is compared with a plain walk through the minutes of the week: a time of day is due
in the first minute in which the wall clock of its zone shows it or more, an interval after each
interval, a reset after each window that the provider opened.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import resource
import time
from datetime import UTC, date, datetime, tzinfo
from functools import cache
from itertools import count
from math import inf
from pathlib import Path

import structlog

from headgate.core.slots.slot import SlotConfig
from headgate.core.slots.wakes import WakeMode
from headgate.engine.slots.slot_log import SlotTrail
from headgate.engine.slots.slots import Slots
from headgate.testing import SimulatedLoop, simulate
from torture.slot_fleet import (
    MAX_LATENCY_SECONDS,
    WINDOW_SECONDS,
    FleetProvider,
    NotedSlots,
    Served,
    fleet,
)
from torture.slot_troubles import BadDays, report

START = datetime(2026, 3, 26, 0, 0, 30, tzinfo=UTC).timestamp()
"""Three days before clocks change in Berlin."""

DAY_SECONDS = 86_400
MINUTE_SECONDS = 60
MARGIN_SECONDS = 2_400.0
"""What comes due so shortly before the end may be served behind it."""

ON_ITS_WAY_SECONDS = 2 * MAX_LATENCY_SECONDS
"""How long a wake takes from its pre-check to the window that it opens."""

MOST_GROWTH_BYTES = 10 * 1024 * 1024
MOST_NAMED = 5
BAD_HOURS = 24
FEWEST_BAD_SLOTS = 10
MAX_STEPS = 2_000_000_000
_STATM_RESIDENT = 1


class Fleet:
    """One run: the slots, what they were told, and how much memory they took."""

    def __init__(self, *, slots: int, days: int, seed: int) -> None:
        self.slots, self.days, self.seed = slots, days, seed
        self.first_day_bytes = self.last_bytes = 0

    async def live(self, loop: SimulatedLoop) -> None:
        """Let the days pass."""
        self.provider = FleetProvider(loop.clock, self.seed)
        self.store = NotedSlots(loop.clock)
        setups = fleet(self.slots, self.provider)
        self.configs = [setup.config for setup in setups]
        ids = count()
        slots = Slots(self.store, setups, trail_of=SlotTrail, make_id=lambda: f"id-{next(ids)}")
        await slots.prepare()
        running = loop.create_task(slots.run())
        for day in range(self.days):
            await asyncio.sleep(DAY_SECONDS)
            self.last_bytes = _resident_bytes()
            if day == 0:
                self.first_day_bytes = self.last_bytes
        running.cancel()
        await asyncio.wait([running])

    def faults(self) -> tuple[int, int, int]:
        """Return how many triggers there were, how many were missed, and how many doubled."""
        end = START + self.days * DAY_SECONDS - MARGIN_SECONDS
        due = missed = doubled = 0
        for config in self.configs:
            served = self.store.served[config.name]
            for expected, found in self._compared(config, served, end):
                due += len(expected)
                gone = set(expected) - set(found)
                missed += len(gone)
                if gone:
                    print(f"  missed by {config.name}: {sorted(map(str, gone))[:MOST_NAMED]}")
                doubled += len(found) - len(set(found)) + len(set(found) - set(expected))
        return due, missed, doubled

    def _compared(
        self, config: SlotConfig, served: Served, end: float
    ) -> list[tuple[list[object], list[object]]]:
        pairs: list[tuple[list[object], list[object]]] = []
        wake = config.wake
        if WakeMode.TIMES in wake.wake_modes:
            expected = {
                marker: at
                for time_of_day in wake.wake_times
                for marker, at in moments(time_of_day, wake.zone, self.days).items()
            }
            pairs.append(_until(end, expected, served.times))
        if WakeMode.INTERVAL in wake.wake_modes:
            first, seconds = START - START % MINUTE_SECONDS, wake.wake_interval_minutes * 60
            steps = range(self.days * DAY_SECONDS // seconds + 1)
            times = {first + step * seconds: first + step * seconds for step in steps}
            pairs.append(_until(end, times, served.intervals))
        if WakeMode.AFTER_RESET in wake.wake_modes:
            pairs.append(_until(end, self._resets(config), served.resets))
        return pairs

    def _resets(self, config: SlotConfig) -> dict[int, float]:
        """Return when a wake is due after each reset.

        One whose window was followed by another before that, or by a wake that was on its way then,
        may be served or not: there is no later time to wait for.
        """
        resets = self.provider.resets_ms.get(config.key_digest, [])
        opened = [reset / 1_000 - WINDOW_SECONDS for reset in resets[1:]]
        offset = config.wake.wake_after_reset_minutes * MINUTE_SECONDS
        due = {reset: reset / 1_000 + offset for reset in resets}
        return {
            reset: at if next_opened > at + ON_ITS_WAY_SECONDS else inf
            for (reset, at), next_opened in zip(due.items(), (*opened, inf), strict=False)
        }


@cache
def local_minutes(zone: tzinfo, days: int) -> tuple[tuple[float, date, str], ...]:
    """Return every minute of the run with what the wall clock of a zone shows."""
    first = START - START % MINUTE_SECONDS
    minutes = (first + MINUTE_SECONDS * step for step in range(days * 1_440 + 1))
    shown = ((at, datetime.fromtimestamp(at, zone)) for at in minutes)
    return tuple((at, local.date(), f"{local:%H:%M}") for at, local in shown)


@cache
def moments(time_of_day: str, zone: tzinfo, days: int) -> dict[str, float]:
    """Return when each day has a time, by its marker: the first minute that shows it or more."""
    minutes = local_minutes(zone, days)
    _, first_day, first_shown = minutes[0]
    found: dict[str, float] = {}
    for at, day, shown in minutes:
        is_over = day == first_day and first_shown > time_of_day
        marker = f"{day.isoformat()} {time_of_day}"
        if shown >= time_of_day and marker not in found and not is_over:
            found[marker] = at
    return found


def run(options: argparse.Namespace) -> bool:
    """Run the fleet, print what came of it, and return whether every promise was kept."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    week = Fleet(slots=options.slots, days=options.days, seed=options.seed)
    began = time.process_time()
    steps = simulate(week.live, seed=options.seed, start=START, max_steps=MAX_STEPS).steps
    seconds = time.process_time() - began
    due, missed, doubled = week.faults()
    growth = week.last_bytes - week.first_day_bytes
    provider = week.provider
    print(f"\nslots: {options.slots} for {options.days} days, {steps:,} steps, {seconds:.0f} s")
    print(f"  polls {provider.polls:,}, of which failed {provider.failures:,}")
    print(f"  wakes {provider.wakes:,}, into a window that was open {provider.needless:,}")
    print(f"  triggers {due:,}, missed {missed}, doubled {doubled}")
    print(f"  memory after the first day {week.first_day_bytes >> 20} MB, then", end=" ")
    print(f"{growth / 2**20:+.1f} MB")
    is_kept = (
        not missed
        and not doubled
        and due > 0
        # Only a pre-check that failed may send a wake into an open window.
        and provider.needless <= provider.failures
        and growth < MOST_GROWTH_BYTES
    )
    return _runs_through_bad_days(options) and is_kept


def _runs_through_bad_days(options: argparse.Namespace) -> bool:
    slots = max(options.slots // 10, FEWEST_BAD_SLOTS)
    bad = BadDays(slots=slots, hours=BAD_HOURS, seed=options.seed)
    simulate(bad.live, seed=options.seed, start=START, max_steps=MAX_STEPS)
    return report(bad)


def _until(
    end: float,
    due: dict[str, float] | dict[float, float] | dict[int, float],
    found: list[str] | list[float] | list[int],
) -> tuple[list[object], list[object]]:
    """Return what was due before the end, and what was served of that or of nothing."""
    behind = {marker for marker, at in due.items() if at > end}
    expected: list[object] = [marker for marker in due if marker not in behind]
    return expected, [marker for marker in found if marker not in behind]


def _resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[_STATM_RESIDENT])
    return pages * resource.getpagesize()
