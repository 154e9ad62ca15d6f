"""A wake that was claimed long ago is not sent, and one that is on its way is not sent twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.slot_stage import MIDNIGHT, MINUTE, Stage, World, play, slot
from headgate.core.slots.wakes import WakeMode
from headgate.errors import SlotUnavailableError
from headgate.storage.memory import MemoryDatabase
from headgate.storage.slot_rows import SlotStore
from headgate.testing import Host, HostCrashedError, SimulatedLoop

AFTER_RESET = WakeMode.AFTER_RESET


class SlowReplies:
    """Has the reply to each claim of a wake come late, while the store itself is quick."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        real = SlotStore.step

        async def step(slots: SlotStore, names: Any, step: Any, entry: Any = None) -> Any:
            answer = await real(slots, names, step, entry)
            if step.func.__name__ == "claim_wake" and answer is not None:
                delay, self.seconds = self.seconds, 0.0
                await asyncio.sleep(delay)
            return answer

        monkeypatch.setattr(SlotStore, "step", step)


@pytest.mark.parametrize(
    ("window_minutes", "late_seconds", "sent_after"),
    [
        (1, 0.0, [0.0]),
        (1, 25.0, [25.0]),
        (1, 35.0, [60.0]),
        (1, 96.0, [120.0]),
        (15, 96.0, [96.0]),
        (15, 8 * MINUTE, [15 * MINUTE]),
    ],
)
def test_a_wake_that_leaves_late_is_left_to_its_retry(
    monkeypatch: pytest.MonkeyPatch,
    window_minutes: int,
    late_seconds: float,
    sent_after: list[float],
) -> None:
    replies = SlowReplies(monkeypatch)

    async def main(loop: SimulatedLoop, world: World) -> list[float]:
        setup = slot(world, modes=[AFTER_RESET], wake_quota_retry_window_minutes=window_minutes)
        stage = Stage(loop, world, [setup])
        replies.seconds = late_seconds
        await stage.start()
        await stage.until(1)
        return [asked.at - MIDNIGHT for asked in world.wakes]

    assert play(main) == sent_after


def test_a_wake_by_hand_that_was_not_sent_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = SlowReplies(monkeypatch)

    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world, wake_quota_retry_window_minutes=1)])
        await stage.start()
        await stage.until(0.1)
        replies.seconds = 45.0
        with pytest.raises(SlotUnavailableError, match="not sent"):
            await stage.slots.warm("work")
        assert world.wakes == []
        assert "slot work manual wake not sent: more than 30 s passed" in world.lines

    play(main)


def test_a_machine_that_slept_over_its_claim_does_not_send_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock of the process stands still in a sleep; that of the store does not."""
    replies = SlowReplies(monkeypatch)

    async def main(loop: SimulatedLoop, world: World) -> int:
        stage = Stage(loop, world, [slot(world, modes=[AFTER_RESET])])
        replies.seconds = 1.0
        await stage.start()
        await asyncio.sleep(0.5)
        loop.clock.set_back(-6 * 3_600.0)
        world.window("key-1").use()
        await asyncio.sleep(10 * MINUTE)
        return len(world.wakes)

    assert play(main) == 0


def test_a_slot_renamed_while_its_wake_is_in_flight_joins_that_wake() -> None:
    async def main(loop: SimulatedLoop, world: World) -> int:
        world.latency_seconds = 6.0
        stage = Stage(loop, world, [slot(world, "old", modes=[AFTER_RESET])])
        await stage.start()
        await asyncio.sleep(7)
        assert len(world.wakes) == 1
        stage.slots.reconfigure([slot(world, "new", modes=[AFTER_RESET])])
        await asyncio.sleep(7)
        assert stage.row("new").schedule.wake_pending
        world.window("key-1").use()
        await asyncio.sleep(5 * MINUTE)
        assert not stage.row("new").schedule.wake_pending
        return len(world.wakes)

    assert play(main) == 1


def test_a_wake_claimed_before_the_clock_went_back_stops_no_reading() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        database, host = MemoryDatabase(), Host(loop, "node")
        setup = slot(world, modes=[AFTER_RESET])
        world.latency_seconds = 5.0
        life = host.spawn(Stage(loop, world, [setup], database=database).live())
        await asyncio.sleep(7)
        assert len(world.wakes) == 1
        host.crash()
        with pytest.raises(HostCrashedError):
            await life
        loop.clock.set_back(6 * 3_600.0)
        read = len(world.polls)
        stage = Stage(loop, world, [setup], database=database)
        await stage.start()
        await asyncio.sleep(2 * MINUTE)
        assert len(world.polls) > read

    play(main)
