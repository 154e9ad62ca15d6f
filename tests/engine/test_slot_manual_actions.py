"""What people and tasks ask of slots: wakes by hand, switches, looks, standings."""

from __future__ import annotations

import asyncio

import pytest

from engine.slot_stage import MIDNIGHT, Stage, World, failure, play, slot
from headgate.core.slots.quota import QuotaLimit, QuotaReport, WakeAnswer
from headgate.core.slots.slot import SlotStanding
from headgate.core.slots.status import next_wake
from headgate.core.slots.wakes import WakeMode
from headgate.errors import SlotNotFoundError, SlotUnavailableError, WindowOpenError
from headgate.storage.audit import Actor, AuditEntry, AuditLog
from headgate.testing import SimulatedLoop


def entry(action: str) -> AuditEntry:
    return AuditEntry(actor=Actor(name="ada"), action=action, subject="work")


def test_a_cold_slot_is_woken_by_hand_and_the_wake_is_confirmed() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world)])
        await stage.start()
        await stage.until(1)
        await stage.slots.warm("work", entry("slot.warm"))
        await asyncio.sleep(1)
        assert [asked.action for asked in world.wakes] == ["manual-wake"]
        assert stage.row().schedule.last_confirmed_at is not None
        rows = (await AuditLog(stage.store).page()).rows
        assert [row.action for row in rows] == ["slot.warm"]

    play(main)


def test_an_open_window_is_not_woken_by_hand() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        world.window("key-1").use()
        stage = Stage(loop, world, [slot(world)])
        await stage.start()
        await stage.until(1)
        with pytest.raises(WindowOpenError, match="2026-01-01 05:00:00 UTC") as caught:
            await stage.slots.warm("work")
        assert caught.value.resets_at == MIDNIGHT + 5 * 3_600
        assert world.wakes == []

    play(main)


def test_a_slot_that_sends_nothing_says_why() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        setups = [slot(world, "off", is_enabled=False), slot(world, "work", key="other")]
        stage = Stage(loop, world, setups)
        await stage.start()
        await stage.until(1)
        with pytest.raises(SlotUnavailableError, match="disabled in the configuration"):
            await stage.slots.warm("off")
        await stage.slots.switch("work", is_on=False)
        with pytest.raises(SlotUnavailableError, match="paused by hand"):
            await stage.slots.warm("work")
        with pytest.raises(SlotNotFoundError, match="there is no slot 'none'"):
            await stage.slots.warm("none")
        with pytest.raises(SlotNotFoundError):
            await stage.slots.switch("none", is_on=True)

    play(main)


WAKES = [
    (WakeAnswer(failure=failure("refused", code=401)), "refused"),
    (WakeAnswer(failure=failure("throttled", code=429, retry_after_seconds=90.0)), "throttled"),
    (WakeAnswer(failure=failure("server_error", code=500)), "server error"),
]


@pytest.mark.parametrize(("answer", "word"), WAKES)
def test_a_wake_by_hand_that_fails_says_so(answer: WakeAnswer, word: str) -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world)])
        await stage.start()
        await stage.until(1)
        world.wake_script.append(answer)
        with pytest.raises(SlotUnavailableError, match=word):
            await stage.slots.warm("work")

    play(main)


def test_an_exhausted_key_is_not_woken_by_hand() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        reset_ms = int((MIDNIGHT + 50 * 3_600) * 1_000)
        weekly = QuotaLimit(
            type="CREDIT_LIMIT", unit=6, percentage=100, next_reset_epoch_ms=reset_ms
        )
        hours = QuotaLimit(type="CREDIT_LIMIT", unit=3, percentage=0)
        stage = Stage(loop, world, [slot(world)])
        world.poll_script.extend([QuotaReport(limits=(weekly, hours))] * 4)
        await stage.start()
        await stage.until(1)
        with pytest.raises(SlotUnavailableError, match="exhausted, 100% used"):
            await stage.slots.warm("work")

    play(main)


def test_a_slot_that_is_switched_off_is_left_alone_and_comes_back_with_a_poll() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world, modes=[WakeMode.INTERVAL])])
        await stage.start()
        await stage.until(0.1)
        status = await stage.slots.switch("work", is_on=False, entry=entry("slot.disable"))
        assert status.standing.closure is not None
        assert next_wake(status.config, status.row, stage.store.now()) is None
        assert status.next_poll_at is None
        asked = len(world.polls) + len(world.wakes)
        await stage.until(10)
        assert len(world.polls) + len(world.wakes) == asked
        await stage.slots.switch("work", is_on=True)
        await stage.until(10.1)
        assert world.poll_times()[-1] == "10:00"
        assert stage.status().standing.closure is None

    play(main)


def test_somebody_who_met_a_refusal_has_the_quota_read_at_most_once_a_minute() -> None:
    async def main(loop: SimulatedLoop, world: World) -> list[str]:
        stage = Stage(loop, world, [slot(world)])
        await stage.start()
        await stage.until(0.25)
        for _ in range(30):
            stage.slots.read_soon("work")
            stage.slots.read_soon("nobody")
            await asyncio.sleep(3)
        return world.poll_times()

    assert play(main) == ["00:00", "00:15", "00:16"]


def test_a_listener_is_told_at_once_and_of_every_change() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world)])
        told: list[tuple[SlotStanding, ...]] = []
        stage.slots.listen(told.append)
        assert [each.percent_used for each in told[0]] == [None]
        await stage.start()
        await stage.until(0.6)
        assert told[-1][0].percent_used == 0.0
        count = len(told)
        await stage.until(2)
        assert len(told) == count
        world.window("key-1").use()
        await stage.until(2.1)
        assert told[-1][0].percent_used == 1.0
        assert told[-1] == stage.slots.standings()
        # The window is over: nobody has to ask to know that nothing of it is used.
        await stage.until(7.01)
        assert told[-1][0].percent_used == 0.0

    play(main)
