"""Crashes between any two steps: no trigger is served twice, and none is lost.

Two nodes work on the rows of three slots, two of which use the same key. Hypothesis lets them take
single steps in any order, kills them anywhere, lets time pass and the clock jump, and has the
provider fail in every way it knows. What must hold is checked after each undisturbed minute.
"""

from __future__ import annotations

from datetime import UTC

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.slots.slot_world import CLAIM_SECONDS, Life, World, finish
from headgate.core.slots.polling import due_wake, window_is_over
from headgate.core.slots.quota import QuotaFailure, QuotaFailureKind
from headgate.core.slots.slot import SlotConfig, why_off
from headgate.core.slots.steps import reopen, switch
from headgate.core.slots.wakes import QuotaSource, WakeConfig, WakeMode, is_paused

pytestmark = pytest.mark.hypothesis

NOW = 1_771_176_960.0
WINDOW_MINUTES = 15
NODES = (0, 1)
NAMES = ("work", "home", "other")
MAX_BACK_SECONDS = 20 * 3600.0
MAX_POLL_SECONDS = 480 * 60.0
"""The longest time between two polls, that of the backoff."""

FAILURES = [
    None,
    None,
    *(QuotaFailure(kind=kind) for kind in QuotaFailureKind if kind is not QuotaFailureKind.REFUSED),
    QuotaFailure(kind=QuotaFailureKind.THROTTLED, retry_after_seconds=90),
]

nodes = st.sampled_from(NODES)
names = st.sampled_from(NAMES)


def config_of(
    name: str, modes: frozenset[WakeMode], times: tuple[str, ...], source: QuotaSource
) -> SlotConfig:
    wake = WakeConfig(
        wake_modes=modes,
        wake_times=times,
        wake_interval_minutes=60,
        zone=UTC,
        quota_from=source,
        wake_quota_retry_window_minutes=WINDOW_MINUTES,
        max_consecutive_errors=1_000,
    )
    key = "k2" if name == "other" else "k1"
    return SlotConfig(name=name, provider="zai", wake=wake, key_digest=key, settings_digest="s")


class Slots(RuleBasedStateMachine):
    """Two nodes, three slots, and everything that can go wrong."""

    @initialize(
        modes=st.frozensets(st.sampled_from(WakeMode), min_size=1),
        times=st.lists(
            st.sampled_from(["00:10", "09:00", "17:40", "17:41", "18:00"]), min_size=1, max_size=3
        ),
        source=st.sampled_from(["address", "requests", "traffic"]),
    )
    def start(self, modes: frozenset[WakeMode], times: list[str], source: QuotaSource) -> None:
        configs = tuple(config_of(name, modes, tuple(times), source) for name in NAMES)
        self.world = World(NOW, configs)
        self.lives: dict[int, Life | None] = dict.fromkeys(NODES)
        self.turned_back = 0.0
        for name in NAMES:
            self.world.begin(name, starts=True)

    @rule(node=nodes, name=names, loop=st.sampled_from(["wake", "quota"]))
    def take_a_step(self, node: int, name: str, loop: str) -> None:
        life = self.lives[node]
        if life is None:
            passes = self.world.wake_pass if loop == "wake" else self.world.quota_pass
            life = self.lives[node] = passes(name)
        if next(life, life) is life:
            self.lives[node] = None

    @rule(node=nodes)
    def finish_a_pass(self, node: int) -> None:
        life, self.lives[node] = self.lives[node], None
        if life is not None:
            finish(life)

    @rule(node=nodes)
    def crash_and_restart(self, node: int) -> None:
        self.lives[node] = None
        for name in NAMES:
            self.world.begin(name, starts=True)

    @rule(seconds=st.floats(0.1, 200.0))
    def let_seconds_pass(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(minutes=st.integers(1, 700))
    def sleep(self, minutes: int) -> None:
        self.world.now += minutes * 60.0

    @rule(hours=st.floats(0.1, 6.0))
    def turn_the_clock_back(self, hours: float) -> None:
        if self.turned_back + hours * 3600 <= MAX_BACK_SECONDS:
            self.turned_back += hours * 3600
            self.world.now -= hours * 3600
            # Intervals count anew, and a marker that names a minute ahead may come again.
            for served in [each for each in self.world.served if each[1] is WakeMode.INTERVAL]:
                del self.world.served[served]

    @rule(key=st.sampled_from(["k1", "k2"]), failure=st.sampled_from(FAILURES))
    def let_polls_fail(self, key: str, failure: QuotaFailure | None) -> None:
        self.world.providers[key].failure = failure

    @rule(key=st.sampled_from(["k1", "k2"]), failure=st.sampled_from(FAILURES))
    def let_wakes_fail(self, key: str, failure: QuotaFailure | None) -> None:
        self.world.providers[key].wake_failure = failure

    @rule(key=st.sampled_from(["k1", "k2"]), percent=st.sampled_from([7.0, 100.0]))
    def use_the_window(self, key: str, percent: float) -> None:
        self.world.providers[key].percent = percent

    @rule(name=names)
    def see_traffic(self, name: str) -> None:
        self.world.see_traffic(name)

    @rule(name=names, is_on=st.booleans())
    def switch(self, name: str, is_on: bool) -> None:
        config = self.world.configs[name]
        self.world.unsent.discard(name)
        self.world.step((name,), lambda rows, now: switch(rows, now, config=config, is_on=is_on))

    @rule(name=names)
    def reopen(self, name: str) -> None:
        config = self.world.configs[name]
        self.world.step((name,), lambda rows, now: reopen(rows, now, config=config))

    @rule(name=names, minutes=st.integers(30, 90), times=st.sampled_from([("09:00",), ("18:00",)]))
    def reconfigure(self, name: str, minutes: int, times: tuple[str, ...]) -> None:
        config = self.world.configs[name]
        wake = msgspec.structs.replace(config.wake, wake_interval_minutes=minutes, wake_times=times)
        digest = f"{minutes} {times}"
        self.world.configs[name] = msgspec.structs.replace(
            config, wake=wake, settings_digest=digest
        )
        self.world.begin(name)

    @rule()
    def an_undisturbed_minute(self) -> None:
        """Both nodes die, one comes back; its next three rounds leave nothing undone.

        Three, because a wake may be held by one whose window ends after the poll of the first.
        """
        self.lives = dict.fromkeys(NODES)
        self.world.now += CLAIM_SECONDS
        for name in NAMES:
            for _ in range(3):
                self.world.minute(name)
            self._check_nothing_is_left(name)

    def _check_nothing_is_left(self, name: str) -> None:
        world = self.world
        config, row = world.configs[name], world.row(name)
        assert not window_is_over(config, row, world.now)
        schedule = row.schedule
        if not why_off(config, row) and not is_paused(schedule, world.now):
            assert row.start == ""
            self._check_polls(name)
            # A wake that ended the pass has asked for the poll that confirms it.
            is_asked = schedule.poll_requested and config.wake.is_polled
            assert not is_asked or schedule.wake_pending
        if not row.schedule.wake_pending:
            assert due_wake(config, row, world.now) is None

    def _check_polls(self, name: str) -> None:
        """By the row alone, not by the rule that says when a poll is due."""
        world, row = self.world, self.world.row(name)
        if not world.configs[name].wake.is_polled:
            assert row.poll_claim is None
            return
        assert row.schedule.last_poll_at is not None
        assert 0 <= world.now - row.schedule.last_poll_at <= MAX_POLL_SECONDS

    @invariant()
    def each_trigger_is_served_once(self) -> None:
        assert all(count == 1 for count in self.world.served.values()), self.world.served

    @invariant()
    def each_claim_is_sent_once(self) -> None:
        assert all(count == 1 for count in self.world.sent.values()), self.world.sent

    @invariant()
    def a_claimed_wake_that_was_not_sent_is_pending(self) -> None:
        pending = {name for name in NAMES if self.world.row(name).schedule.wake_pending}
        assert self.world.unsent <= pending

    def teardown(self) -> None:
        """Once all is well again, no wake stays pending, and polls and wakes go on."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for provider in world.providers.values():
            provider.failure = provider.wake_failure = None
        for name in NAMES:
            if world.row(name).is_off:
                self.switch(name, True)
        pauses = [world.row(name).schedule.paused_until or 0.0 for name in NAMES]
        world.now = max(world.now, *pauses) + CLAIM_SECONDS
        world.run(2 * WINDOW_MINUTES + 2)
        for name in NAMES:
            row = world.row(name)
            assert not row.schedule.wake_pending
            assert not is_paused(row.schedule, world.now)
            self._check_polls(name)
        self.each_trigger_is_served_once()
        self.each_claim_is_sent_once()


TestSlots = Slots.TestCase
TestSlots.settings = settings(deadline=None, max_examples=80, stateful_step_count=60)
