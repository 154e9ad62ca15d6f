"""Slots whose quota only real traffic tells: nothing is asked, and responses are learned from."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from engine.slot_stage import MIDNIGHT, Stage, World, failure, play, slot
from headgate.core.slots.quota import QuotaLimit, QuotaReport, WakeAnswer
from headgate.core.slots.slot import SlotStanding
from headgate.core.slots.status import next_wake
from headgate.core.slots.wakes import WakeMode
from headgate.engine.slots.slot import SlotSetup
from headgate.errors import SlotUnavailableError, WindowOpenError
from headgate.testing import SimulatedLoop

INTERVAL, TIMES, AFTER_RESET = WakeMode.INTERVAL, WakeMode.TIMES, WakeMode.AFTER_RESET
HOUR = 3_600.0
TOO_MANY = 429


def headers(resets_in_hours: float, used: float = 0.2, status: str = "allowed") -> dict[str, str]:
    """Return what a plan of Anthropic answers with, by its hours since midnight."""
    prefix = "anthropic-ratelimit-unified"
    reset = str(int(MIDNIGHT + resets_in_hours * HOUR))
    return {
        f"{prefix}-status": status,
        f"{prefix}-reset": reset,
        f"{prefix}-5h-utilization": str(used),
        f"{prefix}-5h-status": status,
        f"{prefix}-5h-reset": reset,
    }


def quiet(world: World, **fields: Any) -> SlotSetup:
    return slot(world, provider="anthropic", quota_from="traffic", **fields)


def told(resets_in_hours: float) -> WakeAnswer:
    """Return the answer to a wake that opened a window, which tells when it ends."""
    reset_ms = int((MIDNIGHT + resets_in_hours * HOUR) * 1000)
    row = QuotaLimit(type="UNIFIED_LIMIT", unit="5h", percentage=1, next_reset_epoch_ms=reset_ms)
    return WakeAnswer(report=QuotaReport(limits=(row,)))


def test_a_slot_without_a_mode_sends_nothing_ever() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [quiet(world)])
        await stage.start()
        await stage.until(72)
        assert (world.polls, world.wakes) == ([], [])
        assert stage.status().next_poll_at is None
        assert stage.status().standing.closure is None

    play(main)


SIX_HOURS = {"wake_interval_minutes": 360}
MODES = [
    ((TIMES,), {"wake_times": ("06:30", "13:00")}, (11.5, 18.0), ["06:30", "13:00"]),
    # Nothing is known at the start, so a mode that keeps windows open sends its wake.
    ((AFTER_RESET,), {}, (5.0, 10.02, 15.04), ["00:00", "05:01", "10:03"]),
    ((INTERVAL,), SIX_HOURS, (5.0, 11.0, 17.0), ["00:00", "06:00", "12:00"]),
    ((INTERVAL,), {**SIX_HOURS, "wake_on_start": False}, (11.0, 17.0), ["06:00", "12:00"]),
]


@pytest.mark.parametrize(("modes", "wake", "resets", "expected"), MODES)
def test_only_wakes_are_sent_and_their_answers_are_readings(
    modes: tuple[WakeMode, ...],
    wake: dict[str, Any],
    resets: tuple[float, ...],
    expected: list[str],
) -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        world.wake_script.extend(told(hours) for hours in resets)
        stage = Stage(loop, world, [quiet(world, modes=modes, **wake)])
        await stage.start()
        await stage.until(14)
        assert world.polls == []
        assert world.wake_times() == expected
        assert not stage.row().schedule.wake_pending
        assert stage.row().schedule.last_confirmed_at is not None

    play(main)


def test_what_traffic_tells_skips_a_wake_and_status_says_so_before() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [quiet(world, modes=[TIMES], wake_times=("06:30",))])
        await stage.start()
        await stage.until(5)
        stage.slots.observe("work", 200, headers(9.5), loop.clock())
        await stage.until(5.01)
        status = stage.status()
        assert status.standing.percent_used == 20.0
        assert status.standing.resets_at == MIDNIGHT + 9.5 * HOUR
        wake = next_wake(status.config, status.row, loop.clock())
        assert wake is not None
        assert wake.text.startswith("06:30 UTC: skipped, the window is open until 09:30")
        with pytest.raises(WindowOpenError):
            await stage.slots.warm("work")
        await stage.until(7)
        assert (world.polls, world.wakes) == ([], [])
        assert stage.status().wakes == {"skipped": 1}

    play(main)


def test_a_window_that_traffic_showed_used_up_holds_tasks_until_its_reset_and_no_longer() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [quiet(world)])
        heard: list[tuple[float, bool]] = []

        def listen(standings: tuple[SlotStanding, ...]) -> None:
            heard.append((loop.clock() - MIDNIGHT, standings[0].closure is not None))

        await stage.start()
        stage.slots.listen(listen)
        await stage.until(1)
        stage.slots.observe("work", TOO_MANY, headers(3, 1.0, "rejected"), loop.clock())
        await stage.until(1.01)
        closure = stage.status().standing.closure
        assert closure is not None
        assert closure.until == MIDNIGHT + 3 * HOUR
        await stage.until(2.9)
        assert stage.status().standing.closure is not None
        await stage.until(3.01)
        assert stage.status().standing.closure is None
        assert [is_closed for _, is_closed in heard] == [False, True, False]
        assert heard[-1][0] == pytest.approx(3 * HOUR, abs=1.0)
        assert world.polls == []

    play(main)


def test_however_much_traffic_there_is_it_is_stored_twice_a_minute() -> None:
    async def main(loop: SimulatedLoop, world: World) -> dict[str, int]:
        stage = Stage(loop, world, [quiet(world)])
        await stage.start()
        await stage.until(1)
        for second in range(600):
            for _ in range(10):
                stage.slots.observe("work", 200, headers(5, second / 1_000), loop.clock())
            await asyncio.sleep(1.0)
        assert stage.row().reading is not None
        assert stage.status().standing.percent_used == pytest.approx(59, abs=4)
        return stage.status().polls

    assert 20 <= play(main)["observed"] <= 22


def test_what_matters_is_stored_within_a_second_or_so() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [quiet(world)])
        await stage.start()
        await stage.until(1)
        stage.slots.observe("work", 200, headers(5, 0.9), loop.clock())
        await asyncio.sleep(0.1)
        stage.slots.observe("work", 200, headers(5, 0.95), loop.clock())
        await asyncio.sleep(1.5)
        assert stage.status().standing.percent_used == 90.0
        stage.slots.observe("work", 200, headers(5, 0.99), loop.clock())
        await asyncio.sleep(0.1)
        # The last word of a burst counts, though no response follows it.
        stage.slots.observe("work", 200, headers(5, 1.0, "rejected"), loop.clock())
        await asyncio.sleep(2.0)
        assert stage.status().standing.closure is not None

    play(main)


def test_a_refusal_that_says_the_window_is_used_up_is_stored_at_once() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [quiet(world)])
        await stage.start()
        await stage.until(1)
        stage.slots.observe("work", 200, headers(5, 0.01), loop.clock())
        await asyncio.sleep(0.1)
        for _ in range(10):
            stage.slots.observe("work", TOO_MANY, headers(5, 1.0, "rejected"), loop.clock())
            await asyncio.sleep(0.01)
            closure = stage.status().standing.closure
            assert closure is not None
            assert closure.until == MIDNIGHT + 5 * HOUR
        assert stage.status().polls["observed"] == 2

    play(main)


def test_a_response_that_is_shown_while_the_loop_is_at_work_is_not_lost() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [quiet(world)])

        def answer(standings: tuple[SlotStanding, ...]) -> None:
            # The loop tells of the reset within its step, and somebody uses the key at once.
            if loop.clock() >= MIDNIGHT + 2 * HOUR and standings[0].percent_used == 0.0:
                stage.slots.observe("work", 200, headers(7, 0.5), loop.clock())

        await stage.start()
        stage.slots.listen(answer)
        await stage.until(1)
        stage.slots.observe("work", 200, headers(2, 0.2), loop.clock())
        await stage.until(2)
        await asyncio.sleep(5.0)
        assert stage.status().standing.percent_used == 50.0

    play(main)


def test_traffic_that_says_nothing_wakes_no_loop() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [quiet(world)])
        await stage.start()
        await stage.until(0.5)
        for _ in range(600):
            stage.slots.observe("work", 200, {"content-type": "text/html"}, loop.clock())
            await asyncio.sleep(0.3)
        seen_at = stage.status().quota_loop.last_step_at
        assert seen_at is not None
        assert seen_at <= MIDNIGHT + 0.51 * HOUR

    play(main)


def test_headers_that_say_nothing_and_slots_that_are_not_there_change_nothing() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [quiet(world)])
        await stage.start()
        await stage.until(0.1)
        before = stage.row()
        stage.slots.observe("other", 200, headers(5), loop.clock())
        for status in (200, 401, 403, TOO_MANY, 500):
            stage.slots.observe("work", status, {"content-type": "text/html"}, loop.clock())
        await stage.until(2)
        assert stage.row() == before

    play(main)


def test_a_wake_that_fails_is_sent_once_more_and_the_schedule_goes_on() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        setup = quiet(world, modes=[TIMES], wake_times=("01:00", "09:00"))
        world.wake_script.extend([WakeAnswer(failure=failure("server_error"))] * 2)
        world.wake_script.append(told(14))
        stage = Stage(loop, world, [setup])
        await stage.start()
        await stage.until(2)
        assert world.wake_times() == ["01:00", "01:15"]
        assert "server error" in stage.row().schedule.last_problem
        await stage.until(10)
        assert world.wake_times() == ["01:00", "01:15", "09:00"]
        assert stage.row().schedule.last_problem == ""
        assert world.polls == []

    play(main)


def test_a_wake_whose_answer_has_no_headers_is_taken_as_sent_and_not_repeated() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [quiet(world, modes=[TIMES], wake_times=("01:00",))])
        await stage.start()
        await stage.until(4)
        assert world.wake_times() == ["01:00"]
        assert not stage.row().schedule.wake_pending
        assert stage.row().schedule.last_confirmed_at is None

    play(main)


def test_traffic_confirms_a_wake_whose_answer_was_lost() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        world.wake_script.append(WakeAnswer(failure=failure("timeout")))
        stage = Stage(loop, world, [quiet(world, modes=[TIMES], wake_times=("01:00",))])
        await stage.start()
        await stage.until(1.1)
        assert stage.row().schedule.wake_pending
        stage.slots.observe("work", 200, headers(6), loop.clock())
        await stage.until(3)
        assert world.wake_times() == ["01:00"]
        assert stage.row().schedule.last_confirmed_at is not None
        assert world.lines.count("slot work wake confirmed") == 1

    play(main)


@pytest.mark.parametrize("code", [401, 403])
def test_a_key_that_a_wake_found_refused_can_be_enabled_again(code: int) -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        world.wake_script.append(WakeAnswer(failure=failure("refused", code=code)))
        stage = Stage(loop, world, [quiet(world, modes=[INTERVAL])])
        await stage.start()
        await stage.until(0.5)
        closure = stage.status().standing.closure
        assert closure is not None
        assert f"the provider refused the key ({code})" in closure.why
        assert "headgate slot resume work" in closure.why
        with pytest.raises(SlotUnavailableError):
            await stage.slots.warm("work")
        await stage.slots.switch("work", is_on=True)
        await stage.until(0.6)
        assert stage.status().standing.closure is None
        assert len(world.wakes) == 2

    play(main)


def test_a_missing_key_holds_tasks_until_it_is_there() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [quiet(world, key=None)])
        await stage.start()
        await stage.until(3)
        closure = stage.status().standing.closure
        assert closure is not None
        assert "the variable KEY is not set" in closure.why
        there = quiet(world)
        same = msgspec.structs.replace(stage.status().config, name="work")
        stage.slots.reconfigure([msgspec.structs.replace(there, config=same)])
        await stage.until(3.1)
        assert stage.status().standing.closure is None
        assert (world.polls, world.wakes) == ([], [])

    play(main)


def test_a_wake_by_hand_is_sent_where_nothing_is_known() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        world.wake_script.append(told(6))
        stage = Stage(loop, world, [quiet(world)])
        await stage.start()
        await stage.until(1)
        await stage.slots.warm("work")
        assert (len(world.polls), len(world.wakes)) == (0, 1)
        with pytest.raises(WindowOpenError, match="06:00:00 UTC"):
            await stage.slots.warm("work")

    play(main)


def test_polls_that_cost_are_put_off_while_traffic_tells_the_quota() -> None:
    async def main(loop: SimulatedLoop, world: World) -> list[str]:
        stage = Stage(loop, world, [slot(world, provider="anthropic", quota_from="requests")])
        await stage.start()
        for minute in range(1, 240):
            await stage.until(minute / 60)
            if 10 <= minute < 200:
                stage.slots.observe("work", 200, headers(5), loop.clock())
        return world.poll_times()

    times = play(main)
    assert times[0] == "00:00"
    assert [time for time in times if "00:00:30" < time < "03:49"] == []


def test_a_rate_is_no_window_and_no_wake_is_sent_for_it() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(
            loop,
            world,
            [quiet(world, modes=[TIMES, AFTER_RESET], wake_times=("06:00",), wake_on_start=False)],
        )
        await stage.start()
        await stage.until(1)
        rate = {
            "anthropic-ratelimit-tokens-limit": "1000",
            "anthropic-ratelimit-tokens-remaining": "900",
            "anthropic-ratelimit-tokens-reset": "2026-01-01T01:00:30Z",
        }
        stage.slots.observe("work", 200, rate, loop.clock())
        await stage.until(7)
        assert world.wakes == []
        wake = next_wake(stage.status().config, stage.row(), loop.clock())
        assert wake is not None
        assert "is a rate" in wake.text

    play(main)
