"""A stage for slots: the real loops and store on a simulated loop, with a provider that is played.

The played provider has one window for each key, as `headgate.testing` has it, and counts what it is
asked. What else it shall answer is put into its script.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, MutableMapping
from datetime import UTC, tzinfo
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from structlog.testing import capture_logs

from headgate.core.slots.quota import (
    QuotaFailure,
    QuotaFailureKind,
    QuotaLimit,
    QuotaReport,
    WakeAnswer,
)
from headgate.core.slots.slot import SlotConfig, SlotRow
from headgate.core.slots.status import LogLine
from headgate.core.slots.wakes import WakeConfig, WakeMode
from headgate.engine.slots.slot import SlotSetup, SlotStatus
from headgate.engine.slots.slot_log import SlotLog
from headgate.engine.slots.slots import Slots
from headgate.errors import InvalidSettingError
from headgate.providers.endpoints import ProviderEndpoint
from headgate.providers.provider import Call, RequestFailed, RequestSent, ResponseReceived
from headgate.providers.quota_apis import ANTHROPIC, HeaderQuotaProvider
from headgate.storage.memory import MemoryDatabase, MemoryTaskStore
from headgate.storage.slot_rows import SlotStore
from headgate.storage.writer import Fault, Faults
from headgate.testing import SimulatedLoop, simulate
from headgate.testing.fake_provider import FakeWindow

T = TypeVar("T")

READER = HeaderQuotaProvider(ANTHROPIC, ProviderEndpoint(), clock=lambda: 0.0)

WINDOW_SECONDS = 5 * 3_600.0
MINUTE = 60.0
MIDNIGHT = 1_767_225_600.0
"""2026-01-01T00:00:00Z, where a simulation begins."""


class Asked(NamedTuple):
    """One request that the provider got: when, for which key, and why."""

    at: float
    key: str
    action: str


class Told:
    """What was told to people so far."""

    def __init__(self, lines: list[MutableMapping[str, Any]]) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[str]:
        return (str(line["event"]) for line in self._lines)

    def __contains__(self, text: str) -> bool:
        return any(text in line for line in self)

    def count(self, text: str) -> int:
        """Count the lines with a text in them."""
        return sum(text in line for line in self)


class World:
    """The windows of all keys, and what was asked of them; outlives every node."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.polls: list[Asked] = []
        self.wakes: list[Asked] = []
        self.poll_script: deque[QuotaReport | QuotaFailure] = deque()
        self.wake_script: deque[WakeAnswer] = deque()
        self.opens_windows = True
        self.window_seconds = WINDOW_SECONDS
        self.latency_seconds = 0.0
        self.hangs = False
        self.lines = Told([])
        self.stages: list[Stage] = []
        self._windows: dict[str, FakeWindow] = {}

    def window(self, key: str) -> FakeWindow:
        """Return the window of a key."""
        if key not in self._windows:
            self._windows[key] = FakeWindow(seconds=self.window_seconds, clock=self.clock)
        return self._windows[key]

    def wake_times(self) -> list[str]:
        """Return when wakes were sent, as hours and minutes since midnight of the first day."""
        return [_hours(asked.at) for asked in self.wakes]

    def poll_times(self) -> list[str]:
        """Return the same for polls."""
        return [_hours(asked.at) for asked in self.polls]


class PlayedProvider:
    """Speaks for one slot to the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_closed = False
        self.fails = False

    async def read_quota(self, call: Call) -> QuotaReport | QuotaFailure:
        """Answer with what the window of the key is, or as the script says."""
        world = self._world
        world.polls.append(Asked(world.clock(), call.key, call.action))
        await self._pass(call)
        answer = world.poll_script.popleft() if world.poll_script else self._report(call.key)
        _tell(call, answer if isinstance(answer, QuotaFailure) else None)
        return answer

    def read_response(
        self, status: int, headers: Mapping[str, str], now: float
    ) -> QuotaReport | QuotaFailure | None:
        """Read the headers as those of Anthropic."""
        return READER.read_response(status, headers, now)

    async def wake(self, call: Call) -> WakeAnswer:
        """Open the window of the key, or answer as the script says."""
        world = self._world
        world.wakes.append(Asked(world.clock(), call.key, call.action))
        await self._pass(call)
        answer = world.wake_script.popleft() if world.wake_script else WakeAnswer()
        if answer.failure is None and world.opens_windows:
            world.window(call.key).use()
        _tell(call, answer.failure)
        return answer

    async def close(self) -> None:
        """Take note."""
        self.is_closed = True

    async def _pass(self, call: Call) -> None:
        call.trail.sent(
            RequestSent(
                flow_id=call.flow_id, action=call.action, method="GET", url="https://p.test/q"
            )
        )
        if self._world.latency_seconds:
            await asyncio.sleep(self._world.latency_seconds)
        if self.fails:
            raise ZeroDivisionError
        if self._world.hangs:
            await asyncio.get_running_loop().create_future()

    def _report(self, key: str) -> QuotaReport:
        window = self._world.window(key)
        resets_at = window.resets_at
        reset_ms = None if resets_at is None else round(resets_at * 1_000)
        limit = QuotaLimit(
            type="TOKENS_LIMIT", unit=3, percentage=window.percent, next_reset_epoch_ms=reset_ms
        )
        return QuotaReport(level="pro", limits=(limit,))


class HeardLog(SlotLog):
    """A slot log that keeps its lines in memory."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(Path("nowhere"), clock=clock)
        self.lines: list[LogLine] = []

    def write(self, line: LogLine, moment: float) -> None:  # noqa: ARG002
        """Keep a line."""
        self.lines.append(line)

    def actions(self, *, phase: str = "event") -> list[str]:
        """Return what the lines of a phase are about."""
        return [line.action for line in self.lines if line.phase == phase]


class Stage:
    """A node with slots; several may share a database and a world."""

    def __init__(
        self,
        loop: SimulatedLoop,
        world: World,
        setups: Iterable[SlotSetup],
        *,
        database: MemoryDatabase | None = None,
        is_shared: bool = False,
        faults: Faults | None = None,
    ) -> None:
        self.world = world
        self.log = HeardLog(loop.clock)
        self._is_broken = False
        self._faults = faults
        self.store = MemoryTaskStore(
            database, clock=loop.clock, is_shared=is_shared, faults=self._fault
        )
        ids = count()
        node = loop.random.getrandbits(64)
        self.slots = Slots(
            SlotStore(self.store),
            tuple(setups),
            trail_of=self.log.trail,
            make_id=lambda: f"{node:x}-{next(ids)}",
            is_shared=is_shared,
        )
        self._clock = loop.clock

    async def start(self) -> asyncio.Task[None]:
        """Begin the slots, and run them."""
        await self.store.open()
        await self.slots.prepare()
        self.running = asyncio.get_running_loop().create_task(self.slots.run())
        # A task that nobody holds may be freed while it waits.
        self.world.stages.append(self)
        return self.running

    async def live(self) -> None:
        """Run until cancelled or crashed."""
        await self.store.open()
        await self.slots.prepare()
        await self.slots.run()

    async def until(self, hours: float) -> None:
        """Let time pass up to so many hours after midnight."""
        await asyncio.sleep(max(0.0, MIDNIGHT + hours * 3_600.0 - self._clock()))

    def breaks(self) -> None:
        """Have the store refuse everything from now on."""
        self._is_broken = True

    def mends(self) -> None:
        """Have the store answer again."""
        self._is_broken = False

    def _fault(self) -> Fault | None:
        if self._is_broken:
            return Fault.REFUSED
        return None if self._faults is None else self._faults()

    def status(self, name: str = "work") -> SlotStatus:
        """Return everything about a slot."""
        return next(one for one in self.slots.statuses() if one.config.name == name)

    def row(self, name: str = "work") -> SlotRow:
        """Return what is known of a slot."""
        return self.status(name).row


def slot(
    world: World,
    name: str = "work",
    *,
    key: str | None = "key-1",
    modes: Iterable[WakeMode] = (),
    zone: tzinfo = UTC,
    is_enabled: bool = True,
    digest: str = "",
    is_logging: bool = True,
    provider: str = "zai",
    **wake: object,
) -> SlotSetup:
    """Return the setup of a slot of the played provider."""
    config = msgspec.structs.replace(WakeConfig(wake_modes=frozenset(modes), zone=zone), **wake)

    def read_key() -> str:
        if key is None:
            raise InvalidSettingError("slots.work.key_env", "the variable KEY is not set; set it")
        return key

    return SlotSetup(
        config=SlotConfig(
            name=name,
            provider=provider,
            wake=config,
            is_enabled=is_enabled,
            key_digest=f"digest of {key}",
            settings_digest=digest or f"{key} {config} {is_enabled}",
        ),
        provider=PlayedProvider(world),
        read_key=read_key,
        is_logging=is_logging,
    )


def play(
    main: Callable[[SimulatedLoop, World], Coroutine[object, object, T]],
    *,
    seed: int | None = 0,
    start: float = MIDNIGHT,
    max_steps: int = 5_000_000,
) -> T:
    """Run a play on a fresh simulated loop, with a world of its own."""

    async def with_world(loop: SimulatedLoop) -> T:
        world = World(loop.clock)
        with capture_logs() as lines:
            world.lines = Told(lines)
            return await main(loop, world)

    return simulate(with_world, seed=seed, start=start, max_steps=max_steps).result


def failure(kind: str, **fields: object) -> QuotaFailure:
    """Return a failure of a kind."""
    made = QuotaFailure(kind=QuotaFailureKind(kind), message=f"played {kind}")
    return msgspec.structs.replace(made, **fields)


def _tell(call: Call, failed: QuotaFailure | None) -> None:
    if failed is None:
        answer = ResponseReceived(
            flow_id=call.flow_id,
            action=call.action,
            method="GET",
            url="https://p.test/q",
            status=200,
            duration_ms=1.0,
            body="{}",
        )
        call.trail.received(answer)
        return
    call.trail.failed(
        RequestFailed(
            flow_id=call.flow_id,
            action=call.action,
            method="GET",
            url="https://p.test/q",
            error=failed.message,
            duration_ms=1.0,
        )
    )


def _hours(at: float) -> str:
    minutes, seconds = divmod(round(at - MIDNIGHT), 60)
    shown = f"{minutes // 60:02d}:{minutes % 60:02d}"
    return shown if seconds == 0 else f"{shown}:{seconds:02d}"
