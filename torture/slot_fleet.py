"""A fleet of slots for a virtual week: the real loops, on rows in memory, with a played provider.

Every row that a step writes is noted, so that what was served can be compared with a count that
shares no code with the rules: minutes of the wall clock, and the windows that the provider opened.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar
from zoneinfo import ZoneInfo

import msgspec

from headgate.core.slots.quota import (
    QuotaFailure,
    QuotaFailureKind,
    QuotaLimit,
    QuotaReport,
    WakeAnswer,
)
from headgate.core.slots.slot import SlotConfig, SlotRow
from headgate.core.slots.wakes import WakeConfig, WakeMode
from headgate.engine.slots.slot import SlotSetup
from headgate.providers.provider import Call
from headgate.storage.audit import AuditEntry
from headgate.storage.slot_rows import SlotStore, Step
from headgate.testing.fake_provider import FakeWindow

Answer = TypeVar("Answer")

ZONES = (
    *("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"),
    *("Pacific/Apia", "America/Sao_Paulo", "Africa/Cairo"),
)
TIMES = ("02:30", "06:00", "09:00", "14:30", "23:45")
INTERVALS = (45, 60, 90, 240, 360)
WINDOW_SECONDS = 5 * 3_600.0
FAULT_RATE = 0.005
MAX_LATENCY_SECONDS = 1.5


class Served(msgspec.Struct):
    """The triggers of one slot that were served, in their order."""

    times: list[str] = []
    intervals: list[float] = []
    resets: list[int] = []


class NotedSlots(SlotStore):
    """Keeps rows in memory, and notes every marker that changes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock
        self.served: dict[str, Served] = {}
        self.steps = 0
        self._rows: dict[str, SlotRow] = {}
        self._version = 0

    def row(self, name: str) -> SlotRow:
        """Return what is kept of a slot."""
        return self._rows.get(name) or SlotRow(name=name)

    async def rows(self, after: int = -1) -> tuple[SlotRow, ...]:
        """Return the rows that changed after a version."""
        await asyncio.sleep(0)
        return tuple(self._rows[name] for name in self._names_after(after))

    async def step(
        self,
        names: tuple[str, ...],
        step: Step[Answer],
        entry: AuditEntry | None = None,  # noqa: ARG002
    ) -> Answer:
        """Take a step at once, as in a transaction."""
        await asyncio.sleep(0)
        rows = {name: self._rows.get(name) or SlotRow(name=name) for name in names}
        changed, answer = step(rows, self.now())
        self.steps += 1
        for row in changed:
            self._write(row)
        await asyncio.sleep(0)
        return answer

    async def drop_unreadable(self, name: str) -> bool:  # noqa: ARG002
        """Find every row readable."""
        return False

    async def forget(self, configured: Collection[str]) -> int:  # noqa: ARG002
        """Forget nothing."""
        return 0

    def _names_after(self, version: int) -> Iterable[str]:
        if version < 0:
            return list(self._rows)
        # The newest changes stand last; a mirror is never far behind.
        found: list[str] = []
        for name in reversed(self._rows):
            if self._rows[name].version <= version:
                break
            found.append(name)
        return reversed(found)

    def _write(self, row: SlotRow) -> None:
        self._version += 1
        before = self._rows.pop(row.name, None)
        self._rows[row.name] = msgspec.structs.replace(row, version=self._version)
        self._note(before or SlotRow(name=row.name), row)

    def _note(self, before: SlotRow, after: SlotRow) -> None:
        served = self.served.setdefault(after.name, Served())
        old, new = before.schedule, after.schedule
        if new.last_times_marker != old.last_times_marker and new.last_times_marker:
            served.times.append(new.last_times_marker)
        if new.last_interval_fire != old.last_interval_fire and new.last_interval_fire:
            served.intervals.append(new.last_interval_fire)
        if new.last_reset_marker != old.last_reset_marker and new.last_reset_marker:
            served.resets.append(new.last_reset_marker)


class FleetProvider:
    """One provider for all: a window for each key, some latency, a failed reading now and then."""

    def __init__(self, clock: Callable[[], float], seed: int) -> None:
        self.polls = self.wakes = self.failures = self.needless = 0
        self.resets_ms: dict[str, list[int]] = {}
        self._clock = clock
        self._draws = random.Random(seed)
        self._windows: dict[str, FakeWindow] = {}

    async def read_quota(self, call: Call) -> QuotaReport | QuotaFailure:
        """Tell the window of the key."""
        self.polls += 1
        await asyncio.sleep(self._draws.uniform(0.05, MAX_LATENCY_SECONDS))
        if self._draws.random() < FAULT_RATE:
            self.failures += 1
            return QuotaFailure(kind=QuotaFailureKind.TIMEOUT, message="played")
        window = self._window(call.key)
        resets_at = window.resets_at
        reset_ms = None if resets_at is None else round(resets_at * 1_000)
        row = QuotaLimit(
            type="TOKENS_LIMIT", unit=3, percentage=window.percent, next_reset_epoch_ms=reset_ms
        )
        return QuotaReport(limits=(row,))

    def read_response(
        self, _status: int, _headers: Mapping[str, str], _now: float
    ) -> QuotaReport | None:
        """Tell nothing: there is no traffic."""

    async def wake(self, call: Call) -> WakeAnswer:
        """Open the window of the key, and note a wake that found it open."""
        self.wakes += 1
        await asyncio.sleep(self._draws.uniform(0.05, MAX_LATENCY_SECONDS))
        window = self._window(call.key)
        is_open = window.resets_at is not None
        window.use()
        if is_open:
            self.needless += 1
        elif window.resets_at is not None:
            self.resets_ms.setdefault(call.key, []).append(round(window.resets_at * 1_000))
        return WakeAnswer()

    async def close(self) -> None:
        """Do nothing."""

    def _window(self, key: str) -> FakeWindow:
        if key not in self._windows:
            self._windows[key] = FakeWindow(seconds=WINDOW_SECONDS, clock=self._clock)
        return self._windows[key]


def fleet(count: int, provider: FleetProvider) -> list[SlotSetup]:
    """Return slots of all modes and many zones; one in ten shares the key of its neighbour."""
    return [_setup(number, provider) for number in range(count)]


def _setup(number: int, provider: FleetProvider) -> SlotSetup:
    key = f"key-{number - 1 if number % 10 == 1 else number}"
    modes = (
        {WakeMode.INTERVAL},
        {WakeMode.TIMES},
        {WakeMode.AFTER_RESET},
        {WakeMode.TIMES, WakeMode.AFTER_RESET},
        {WakeMode.TIMES, WakeMode.INTERVAL},
    )[number % 5]
    wake = WakeConfig(
        wake_modes=frozenset(modes),
        wake_interval_minutes=INTERVALS[number % len(INTERVALS)],
        wake_times=TIMES[: 1 + number % len(TIMES)],
        wake_after_reset_minutes=1 + number % 7,
        poll_interval_minutes=60 * (1 + number % 4),
        zone=ZoneInfo(ZONES[number % len(ZONES)]),
    )
    config = SlotConfig(
        name=f"slot-{number}",
        provider="played",
        wake=wake,
        key_digest=key,
        settings_digest=str(number),
    )
    return SlotSetup(config=config, provider=provider, read_key=lambda: key, is_logging=False)
