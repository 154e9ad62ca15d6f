"""The metrics of slots: what is known is shown, and a slot that is gone leaves nothing."""

from __future__ import annotations

from collections.abc import Sequence

from engine.slot_stage import MIDNIGHT, Stage, World, failure, play, slot
from headgate.core.slots.wakes import WakeMode
from headgate.engine.slots.slot import SlotStatus
from headgate.metrics import slot_metrics
from headgate.testing import SimulatedLoop

Samples = dict[tuple[str, ...], float]


def samples(statuses: Sequence[SlotStatus], now: float) -> Samples:
    return {
        (sample.name.removeprefix("headgate_slot_"), *sample.labels.values()): sample.value
        for metric in slot_metrics(statuses, now)
        for sample in metric.samples
    }


def test_metrics_show_room_resets_counts_errors_and_loops() -> None:
    async def main(loop: SimulatedLoop, world: World) -> Samples:
        bad = slot(world, "bad", key="key-2", is_enabled=False)
        stage = Stage(loop, world, [slot(world, modes=[WakeMode.AFTER_RESET]), bad])
        await stage.start()
        await stage.until(0.4)
        world.poll_script.append(failure("timeout"))
        await stage.until(0.51)
        return samples(stage.slots.statuses(), loop.clock())

    shown = play(main)
    assert shown["percent_used", "work"] == 1.0
    assert shown["reset_timestamp_seconds", "work"] == MIDNIGHT + 5 * 3_600
    assert shown["polls_total", "work", "ok"] == 2
    assert shown["polls_total", "work", "timeout"] == 1
    assert shown["wakes_total", "work", "ok"] == 1
    assert shown["poll_errors", "work"] == 1
    assert (shown["closed", "work"], shown["disabled", "work"]) == (0, 0)
    assert (shown["closed", "bad"], shown["disabled", "bad"]) == (1, 1)
    assert ("percent_used", "bad") not in shown
    assert shown["loop_restarts_total", "work", "wake"] == 0
    assert 0 <= shown["loop_step_age_seconds", "work", "wake"] < 60


def test_a_slot_that_is_gone_leaves_no_series() -> None:
    async def main(loop: SimulatedLoop, world: World) -> Samples:
        stage = Stage(loop, world, [slot(world)])
        await stage.start()
        await stage.until(1)
        stage.slots.reconfigure([])
        await stage.until(2)
        return samples(stage.slots.statuses(), loop.clock())

    assert play(main) == {}
