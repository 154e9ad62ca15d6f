"""Slots in bad weather: two nodes that crash, clocks that jump, and a provider that fails all ways.

Every half hour the weather of each key is drawn: all is well, readings fail, both sides are told to
wait, wakes are lost or open nothing, the window is used up. Meanwhile a node crashes and comes
back, and now and then the clock jumps. After hours of calm nothing may be left of it: no slot is
disabled, held or stuck with a wake, nothing is overdue, and no wake was sent twice.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import count

import msgspec

from headgate.core.slots.polling import due_wake, window_is_over
from headgate.core.slots.quota import QuotaFailure, QuotaFailureKind, QuotaReport, WakeAnswer
from headgate.core.slots.slot import SlotConfig
from headgate.engine.slots.slot import SlotSetup
from headgate.engine.slots.slot_log import SlotTrail
from headgate.engine.slots.slots import Slots
from headgate.providers.provider import Call
from headgate.testing import Host, SimulatedLoop
from torture.slot_fleet import FleetProvider, NotedSlots, fleet

WEATHER_SECONDS = 1_800.0
CALM_SECONDS = 9 * 3_600.0
"""Longer than the longest backoff, and than any window that was used up."""

LATE_SECONDS = 180.0
WEATHERS = ("fine",) * 4 + ("ill", "throttled", "told to wait", "lost", "cold", "used up")
JUMPS_SECONDS = (-2_400.0, -90.0, 45.0, 600.0, 5_400.0)
"""How far the clock goes back; forward where it is negative."""


Node = tuple[Host, "asyncio.Future[None]", Slots]


class TroubledProvider(FleetProvider):
    """A provider with a weather for each key."""

    def __init__(self, loop: SimulatedLoop, seed: int) -> None:
        super().__init__(loop.clock, seed)
        self.weather: dict[str, str] = {}
        self.sent: Counter[str] = Counter()
        self.troubles: Counter[str] = Counter()

    def change(self, keys: list[str], draws: random.Random) -> None:
        """Draw the weather of the next half hour."""
        self.weather = {key: draws.choice(WEATHERS) for key in keys}
        for key, weather in self.weather.items():
            self.troubles[weather] += 1
            window = self._window(key)
            if weather == "used up" and window.resets_at is not None:
                window.set_percent(100.0)

    async def read_quota(self, call: Call) -> QuotaReport | QuotaFailure:
        """Tell the window of the key, unless the weather is against it."""
        failure = self._failure(call.key)
        if failure is None:
            return await super().read_quota(call)
        self.polls += 1
        self.failures += 1
        await asyncio.sleep(self._draws.uniform(0.05, 30.0))
        return failure

    async def wake(self, call: Call) -> WakeAnswer:
        """Open the window of the key, unless the weather is against it."""
        self.sent[call.flow_id] += 1
        weather, failure = self.weather.get(call.key), self._failure(call.key)
        if failure is None and weather not in ("lost", "cold"):
            return await super().wake(call)
        await asyncio.sleep(self._draws.uniform(0.05, 30.0))
        lost = QuotaFailure(kind=QuotaFailureKind.TIMEOUT, message="played")
        return WakeAnswer(failure=failure or (lost if weather == "lost" else None))

    def _failure(self, key: str) -> QuotaFailure | None:
        weather = self.weather.get(key)
        if weather == "ill":
            return QuotaFailure(kind=QuotaFailureKind.SERVER_ERROR, message="played")
        if weather in ("throttled", "told to wait"):
            seconds = 700.0 if weather == "told to wait" else None
            return QuotaFailure(kind=QuotaFailureKind.THROTTLED, retry_after_seconds=seconds)
        return None


def _patient(setup: SlotSetup) -> SlotSetup:
    """Return a setup whose wakes go on however many fail; every third keeps the usual limit."""
    config = setup.config
    if int(config.name.rpartition("-")[2]) % 3 == 0:
        return setup
    wake = msgspec.structs.replace(config.wake, max_consecutive_errors=1_000)
    return msgspec.structs.replace(setup, config=msgspec.structs.replace(config, wake=wake))


class BadDays:
    """One run: bad weather for some hours, then calm, and what is left of it."""

    def __init__(self, *, slots: int, hours: int, seed: int) -> None:
        self.slots, self.hours, self.seed = slots, hours, seed
        self.crashes = self.jumps = 0
        self.left: list[str] = []

    async def live(self, loop: SimulatedLoop) -> None:
        """Let the hours pass."""
        self._loop, self._draws, self._ids = loop, random.Random(self.seed), count()
        self.provider = TroubledProvider(loop, self.seed)
        self.store = NotedSlots(loop.clock)
        setups = [_patient(one) for one in fleet(self.slots, self.provider)]
        self.configs: list[SlotConfig] = [setup.config for setup in setups]
        keys = sorted({config.key_digest for config in self.configs})
        nodes = [self._node(setups) for _ in range(2)]
        for _ in range(round(self.hours * 3_600 / WEATHER_SECONDS)):
            self.provider.change(keys, self._draws)
            await asyncio.sleep(self._draws.uniform(1.0, WEATHER_SECONDS))
            nodes[0] = await self._trouble(nodes[0], setups)
            nodes.reverse()
        self.provider.weather = {}
        await asyncio.sleep(CALM_SECONDS)
        self.left = [line for config in self.configs for line in self._left_of(config)]
        for host, _, _ in nodes:
            host.crash()

    def _node(self, setups: list[SlotSetup]) -> Node:
        host = Host(self._loop, "node")
        slots = Slots(
            self.store,
            setups,
            trail_of=SlotTrail,
            make_id=lambda: f"id-{next(self._ids)}",
            is_shared=True,
        )

        async def life() -> None:
            await slots.prepare()
            await slots.run()

        return host, host.spawn(life()), slots

    async def _trouble(self, node: Node, setups: list[SlotSetup]) -> Node:
        """Have a node crash, the clock jump, or somebody ask for a look."""
        host, life, slots = node
        kind = self._draws.choice(("crash", "jump", "look", "look"))
        if kind == "jump":
            self.jumps += 1
            self._loop.clock.set_back(self._draws.choice(JUMPS_SECONDS))
        elif kind == "look":
            for config in self.configs:
                slots.read_soon(config.name)
        else:
            self.crashes += 1
            host.crash()
            await asyncio.gather(life, return_exceptions=True)
            await asyncio.sleep(self._draws.choice((0.5, 120.0, 1_500.0)))
            return self._node(setups)
        return node

    def _left_of(self, config: SlotConfig) -> list[str]:
        now, row = self._loop.clock(), self.store.row(config.name)
        schedule, before = row.schedule, now - LATE_SECONDS
        found = {
            "disabled": schedule.slot_auto_disabled,
            "wakes disabled below the limit": schedule.wake_auto_disabled
            and schedule.wake_errors < config.wake.max_consecutive_errors,
            "no poll": schedule.last_poll_at is None
            or not 0 <= now - schedule.last_poll_at <= CALM_SECONDS,
            "errors": schedule.consecutive_poll_errors > 1,
            "an open retry window": window_is_over(config, row, before),
            "an overdue wake": due_wake(config, row, before) is not None,
            "an old exhaustion": row.reading is not None
            and row.reading.is_exhausted
            and (row.reading.resets_at or 0.0) < before,
        }
        return [f"{config.name}: {what}" for what, is_left in found.items() if is_left]


def report(days: BadDays) -> bool:
    """Print what came of bad days, and return whether every promise was kept."""
    provider = days.provider
    twice = sum(times > 1 for times in provider.sent.values())
    print(f"slots in bad weather: {days.slots} on two nodes for {days.hours} hours, then calm")
    print(f"  crashes {days.crashes}, jumps of the clock {days.jumps}")
    print(f"  weather {dict(sorted(provider.troubles.items()))}")
    print(
        f"  wakes {sum(provider.sent.values()):,}, sent twice {twice}, left undone {len(days.left)}"
    )
    for line in days.left[:5]:
        print(f"  {line}")
    return not days.left and not twice and bool(provider.sent)
