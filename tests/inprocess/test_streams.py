"""Answers that come in pieces: their permit, their cost, and their end, whoever brings it about."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

import headgate
from headgate import Budget, Estimate, LoadScheduler
from headgate.core.lifecycle import Usage
from inprocess.calling import granted, nothing, really, run


def test_an_async_stream_can_report_its_cost_at_every_step() -> None:
    async def stream() -> AsyncIterator[int]:
        granted().charge("0.10")
        yield 1
        granted().charge("0.30")

    async def scenario(scheduler: LoadScheduler) -> int:
        items = await headgate.wrap(stream, agent_id="a")
        assert items.grant.agent_id == "a"
        async for _ in items:
            assert headgate.current_grant() is None
        return scheduler.stats()[0].charged_micro_usd

    assert run(scenario, budget=Budget(default=Estimate(usd=1))) == 300_000


def test_a_plain_stream_can_report_its_cost_in_its_thread() -> None:
    def stream() -> Iterator[int]:
        yield 1
        granted().charge("0.30")

    async def scenario(scheduler: LoadScheduler) -> int:
        assert [item async for item in await headgate.wrap(stream, agent_id="a")] == [1]
        return scheduler.stats()[0].charged_micro_usd

    assert really(scenario, budget=Budget(default=Estimate(usd=1))) == 300_000


def used(item: int) -> Usage | None:
    """Say that the first item tells nothing, the second a cost, and the third nothing again."""
    return {2: Usage(micro_usd=400_000, tokens=7), 3: Usage()}.get(item)


async def three() -> AsyncIterator[int]:
    for item in (1, 2, 3):
        yield item


def test_the_last_item_of_a_stream_that_tells_its_cost_is_what_is_booked() -> None:
    async def scenario(scheduler: LoadScheduler) -> tuple[int, int]:
        async for _ in await headgate.wrap(three, agent_id="a", usage_of=used):
            pass
        stats = scheduler.stats()[0]
        return stats.charged_micro_usd, stats.charged_tokens

    assert run(scenario, budget=Budget(default=Estimate(usd=1, tokens=9))) == (400_000, 7)


@pytest.mark.parametrize(("estimate", "booked"), [("1.00", 1_000_000), ("0.10", 400_000)])
def test_a_stream_that_was_cut_off_books_what_it_told_or_the_estimate_if_more(
    estimate: str, booked: int
) -> None:
    async def scenario(scheduler: LoadScheduler) -> int:
        async with await headgate.wrap(three, agent_id="a", usage_of=used) as items:
            assert [await anext(items), await anext(items)] == [1, 2]
        return scheduler.stats()[0].charged_micro_usd

    assert run(scenario, budget=Budget(default=Estimate(usd=estimate))) == booked


class Pages:
    """An answer that makes its iterator only when it is read."""

    response = "headers"

    def __init__(self) -> None:
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[int]:
        yield headgate.current_scheduler().resource.in_use

    async def close(self) -> None:
        self.is_closed = True


def test_an_answer_that_can_only_be_iterated_asynchronously_is_a_stream() -> None:
    pages = Pages()

    async def opened() -> Pages:
        return pages

    async def scenario(scheduler: LoadScheduler) -> None:
        async with await headgate.wrap(opened, agent_id="a") as stream:
            assert stream.response == "headers"
            assert [in_use async for in_use in stream] == [1]
        assert pages.is_closed
        assert scheduler.resource.in_use == 0

    run(scenario, capacity=1)


class Lines:
    """What an SDK returns for a plain stream: an iterator with more to it."""

    response = "headers"

    def __init__(self) -> None:
        self.closed_in = ""

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> int:
        return 1

    def close(self) -> None:
        self.closed_in = threading.current_thread().name


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_plain_stream_keeps_what_it_has_and_is_closed_in_a_thread(is_forgotten: bool) -> None:
    lines = Lines()

    async def scenario(scheduler: LoadScheduler) -> None:
        stream = await headgate.wrap(lambda: lines, agent_id="a")
        assert stream.response == "headers"
        assert await anext(stream) == 1
        if is_forgotten:
            del stream
            gc.collect()
        else:
            await stream.close()
        await headgate.wrap(nothing, agent_id="a", timeout=5)
        assert lines.closed_in.startswith("headgate-call")

    really(scenario, capacity=1)


def test_a_plain_stream_whose_step_was_cancelled_is_closed_after_that_step() -> None:
    end = threading.Event()
    steps: list[str] = []

    def stream() -> Iterator[int]:
        try:
            end.wait(10)
            steps.append("step")
            yield 1
        finally:
            steps.append("closed")

    async def scenario(scheduler: LoadScheduler) -> None:
        items = await headgate.wrap(stream, agent_id="a")
        reading = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})
        await items.aclose()
        assert (scheduler.resource.in_use, steps) == (1, [])
        end.set()
        await headgate.wrap(nothing, agent_id="a", timeout=5)
        assert steps == ["step", "closed"]

    really(scenario, capacity=1)


def test_a_plain_stream_that_is_closed_while_it_is_read_is_closed_after_that_step() -> None:
    end = threading.Event()

    class Slow(Lines):
        def __next__(self) -> int:
            end.wait(10)
            return 1

    slow_lines = Slow()

    async def scenario(scheduler: LoadScheduler) -> None:
        items = await headgate.wrap(lambda: slow_lines, agent_id="a")
        reading = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0)
        await items.aclose()
        assert (scheduler.resource.in_use, slow_lines.closed_in) == (1, "")
        end.set()
        assert await reading == 1
        assert slow_lines.closed_in.startswith("headgate-call")
        assert scheduler.resource.in_use == 0

    really(scenario, capacity=1)


def test_a_stream_that_somebody_closes_while_it_is_read_frees_its_permit_after_both() -> None:
    class Slow:
        def __aiter__(self) -> Slow:
            return self

        async def __anext__(self) -> int:
            await asyncio.sleep(1)
            return 1

        async def close(self) -> None:
            await asyncio.sleep(2)

    async def opened() -> Slow:
        return Slow()

    async def scenario(scheduler: LoadScheduler) -> None:
        stream = await headgate.wrap(opened, agent_id="a")
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.5)
        await stream.close()
        assert await reading == 1
        assert scheduler.resource.in_use == 0

    run(scenario, capacity=1)


def test_a_stream_that_is_read_keeps_its_permit_though_somebody_tries_to_close_it() -> None:
    async def slow() -> AsyncIterator[int]:
        await asyncio.sleep(1)
        yield 1

    async def scenario(scheduler: LoadScheduler) -> None:
        stream = await headgate.wrap(slow, agent_id="a")
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.5)
        with pytest.raises(RuntimeError, match="already running"):
            await stream.aclose()
        assert scheduler.resource.in_use == 1
        assert await reading == 1
        await stream.aclose()
        assert scheduler.resource.in_use == 0

    run(scenario, capacity=1)
