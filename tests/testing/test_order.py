"""The same seed gives the same trace; other seeds give other orders."""

from __future__ import annotations

import asyncio
import random

import pytest

from headgate.testing import SimulatedLoop, TraceEvent, simulate


async def _race(loop: SimulatedLoop) -> None:
    async def racer(number: int) -> None:
        for lap in range(3):
            await asyncio.sleep(0)
            loop.record("lap", racer=number, lap=lap)
        await asyncio.sleep(loop.random.choice([1, 2, 3]))
        loop.record("home", racer=number)

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(racer(number))


@pytest.mark.parametrize("seed", [None, 0, 1, 12345])
def test_the_same_seed_gives_the_same_trace(seed: int | None) -> None:
    first, second = simulate(_race, seed=seed), simulate(_race, seed=seed)
    assert first == second
    assert len(first.trace) == 16


def test_different_seeds_explore_different_orders() -> None:
    orders = {str(simulate(_race, seed=seed).trace) for seed in range(20)}
    assert len(orders) == 20


def test_every_order_of_three_ready_tasks_is_reached() -> None:
    async def main(loop: SimulatedLoop) -> str:
        order: list[str] = []

        async def note(name: str) -> None:
            order.append(name)

        await asyncio.gather(*(note(name) for name in "abc"))
        return "".join(order)

    reached = {simulate(main, seed=seed).result for seed in range(100)}
    assert reached == {"abc", "acb", "bac", "bca", "cab", "cba"}


def test_without_a_seed_the_order_is_that_of_asyncio() -> None:
    async def main(_: object) -> list[int]:
        order: list[int] = []

        async def note(number: int) -> None:
            for _ in range(number):
                await asyncio.sleep(0)
            order.append(number)

        await asyncio.gather(*(note(number) for number in (2, 0, 1, 2)))
        return order

    assert simulate(main, seed=None).result == asyncio.run(main(None)) == [0, 1, 2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_plain_callbacks_keep_their_order_whatever_the_seed(seed: int) -> None:
    async def main(loop: SimulatedLoop) -> list[int]:
        order: list[int] = []
        for number in range(10):
            loop.call_soon(order.append, number)
        await asyncio.sleep(1)
        return order

    assert simulate(main, seed=seed).result == list(range(10))


def test_cancelling_tasks_in_any_order_gives_the_same_trace() -> None:
    def traced(*, backwards: bool) -> tuple[TraceEvent, ...]:
        async def wait(loop: SimulatedLoop, number: int) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                loop.record("ended", number=number)

        async def main(loop: SimulatedLoop) -> None:
            tasks = [asyncio.create_task(wait(loop, number)) for number in range(5)]
            await asyncio.sleep(1)
            for task in reversed(tasks) if backwards else tasks:
                task.cancel()
            await asyncio.wait(tasks)

        return simulate(main, seed=3).trace

    assert traced(backwards=False) == traced(backwards=True)


def test_the_global_random_state_is_neither_read_nor_moved() -> None:
    random.seed(1)
    before = random.getstate()
    first = simulate(_race, seed=7)
    assert random.getstate() == before
    random.seed(2)
    assert simulate(_race, seed=7) == first


def test_drawing_random_numbers_does_not_change_the_order_of_tasks() -> None:
    def order(draws: int) -> list[object]:
        async def main(loop: SimulatedLoop) -> None:
            for _ in range(draws):
                loop.random.random()
            await _race(loop)

        laps = [event for event in simulate(main, seed=9).trace if event.event == "lap"]
        return [event.details["racer"] for event in laps]

    assert order(0) == order(5)
