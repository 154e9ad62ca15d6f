"""Resets that come late, or slide with the time, neither free tasks early nor cost polls."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from engine.slot_stage import MIDNIGHT, PlayedProvider, Stage, World, play, slot
from headgate.core.slots.quota import QuotaLimit, QuotaReport
from headgate.core.slots.wakes import WakeMode
from headgate.engine.slots.slot import SlotSetup
from headgate.testing import SimulatedLoop

AFTER_RESET = WakeMode.AFTER_RESET


class TellingProvider(PlayedProvider):
    """Tells a percentage and a reset that follow from the time."""

    def __init__(self, world: World, told: Callable[[float], tuple[float, float | None]]) -> None:
        super().__init__(world)
        self._clock, self._told = world.clock, told

    def _report(self, key: str) -> QuotaReport:  # noqa: ARG002
        percent, resets_at = self._told(self._clock())
        reset_ms = None if resets_at is None else round(resets_at * 1_000)
        limit = QuotaLimit(
            type="TOKENS_LIMIT", unit=3, percentage=percent, next_reset_epoch_ms=reset_ms
        )
        return QuotaReport(limits=(limit,))


def telling(
    world: World,
    told: Callable[[float], tuple[float, float | None]],
    *,
    is_adaptive: bool = False,
    **wake: object,
) -> SlotSetup:
    setup = slot(world, **wake)  # type: ignore[arg-type]
    config = msgspec.structs.replace(setup.config, adaptive_polling=is_adaptive)
    return msgspec.structs.replace(setup, config=config, provider=TellingProvider(world, told))


@pytest.mark.parametrize("frees_after_minutes", [12, 30])
def test_tasks_are_held_at_a_hundred_percent_though_the_reset_has_just_passed(
    frees_after_minutes: int,
) -> None:
    resets_at = MIDNIGHT + 3_600.0 + 600
    frees_at = resets_at + frees_after_minutes * 60

    def told(now: float) -> tuple[float, float]:
        return (100.0, resets_at) if now < frees_at else (3.0, resets_at + 5 * 3_600)

    async def main(loop: SimulatedLoop, world: World) -> list[str]:
        stage = Stage(loop, world, [telling(world, told)])
        await stage.start()
        await stage.until(1.4)
        hold = stage.status().standing.closure
        assert hold is not None
        assert hold.why == "exhausted, 100% used, a poll has to show the reset"
        # By then it shows room, or has told of a window that ended long ago.
        await stage.until(1.45)
        assert stage.status().standing.closure is None
        return world.poll_times()

    polls = play(main)
    late = [time for time in polls if time > "01:00"]
    assert late == [f"01:{minute:02d}:02" for minute in (10, 11, 12, 14, 18, 26)]


@pytest.mark.parametrize("left_seconds", [0.06, 1.0, 30.0, 60.0, -1.0, -5.0, -40.0])
@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("modes", [(), (AFTER_RESET,)])
def test_a_reset_that_slides_brings_no_polls(
    left_seconds: float, is_adaptive: bool, modes: tuple[WakeMode, ...]
) -> None:
    async def main(loop: SimulatedLoop, world: World) -> tuple[int, int]:
        setup = telling(
            world, lambda now: (1.0, now + left_seconds), is_adaptive=is_adaptive, modes=modes
        )
        stage = Stage(loop, world, [setup])
        await stage.start()
        # A reset that has passed calls for a wake at the start, and that for polls each minute.
        await stage.until(0.2 if left_seconds > 0 else 0.6)
        woken = len(world.wakes)
        world.polls.clear()
        await stage.until(10.2)
        return len(world.polls), len(world.wakes) - woken

    polls, wakes = play(main)
    assert polls <= 21
    assert wakes == 0


def test_a_slot_used_up_by_the_second_is_read_once_a_minute_at_most() -> None:
    async def main(loop: SimulatedLoop, world: World) -> int:
        stage = Stage(loop, world, [telling(world, lambda now: (100.0, now + 0.06))])
        await stage.start()
        await stage.until(1)
        assert stage.status().standing.closure is not None
        return len(world.polls)

    assert play(main) <= 62


def test_windows_shorter_than_the_interval_are_still_opened_again_by_wakes() -> None:
    async def main(loop: SimulatedLoop, world: World) -> int:
        world.window_seconds = 45.0
        stage = Stage(loop, world, [slot(world, modes=[AFTER_RESET])])
        await stage.start()
        await stage.until(1)
        return len(world.wakes)

    assert play(main) >= 20


def test_a_window_that_tasks_open_again_is_followed_by_its_own_wake() -> None:
    """Each reading shows another reset, but none that moves with the time."""
    opened = [MIDNIGHT - 3 * 3_600, MIDNIGHT + 2 * 3_600 + 20]

    def told(now: float) -> tuple[float, float | None]:
        ends = [at + 5 * 3_600 for at in opened if at <= now < at + 5 * 3_600]
        return 5.0, (ends[-1] if ends else None)

    async def main(loop: SimulatedLoop, world: World) -> list[str]:
        stage = Stage(loop, world, [telling(world, told, modes=[AFTER_RESET])])
        await stage.start()
        await stage.until(7.1)
        return world.wake_times()

    assert play(main) == ["07:02"]
