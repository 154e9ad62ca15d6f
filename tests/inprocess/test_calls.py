"""`configure`, `wrap`, `governed`: functions of every kind under one scheduler of the process."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

import headgate
from headgate import Budget, Estimate, LoadScheduler
from headgate.core.lifecycle import Usage
from headgate.errors import InvalidSettingError, PermitTimeoutError
from inprocess.calling import run


async def answer(text: str) -> str:
    await asyncio.sleep(1)
    return text.upper()


async def counted() -> AsyncIterator[int]:
    for number in range(3):
        await asyncio.sleep(1)
        yield number


def test_an_async_function_runs_when_it_has_a_permit() -> None:
    async def scenario(scheduler: LoadScheduler) -> tuple[list[str], int]:
        calls = (headgate.wrap(answer, text, agent_id="a") for text in "abcd")
        return await asyncio.gather(*calls), scheduler.tick

    assert run(scenario, capacity=2) == (["A", "B", "C", "D"], 4)


def test_a_plain_function_runs_in_a_thread() -> None:
    async def main() -> tuple[str, int]:
        scheduler = headgate.configure(capacity=2)
        name = await headgate.wrap(lambda: threading.current_thread().name, agent_id="a")
        assert await headgate.wrap(str.upper, "x", agent_id="a") == "X"
        return str(name), scheduler.resource.in_use

    name, in_use = asyncio.run(main())
    assert name.startswith("headgate-call")
    assert in_use == 0


def test_a_cancelled_call_keeps_its_permit_until_its_thread_has_ended() -> None:
    async def main() -> None:
        scheduler = headgate.configure(capacity=1)
        started, end = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def work() -> None:
            loop.call_soon_threadsafe(started.set)
            end.wait(10)

        calling = asyncio.create_task(headgate.wrap(work, agent_id="a"))
        await started.wait()
        calling.cancel()
        await asyncio.wait({calling})
        assert calling.cancelled()
        assert scheduler.resource.in_use == 1
        end.set()
        assert await headgate.wrap(answer_at_once, agent_id="b", timeout=10) == 1
        assert scheduler.resource.in_use == 0

    asyncio.run(main())


async def answer_at_once() -> int:
    return 1


def test_a_plain_generator_is_pulled_in_a_thread_and_holds_its_permit() -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)

    async def main() -> None:
        scheduler = headgate.configure(capacity=1)
        stream = await headgate.wrap(numbers, agent_id="a")
        assert await anext(stream) == 0
        assert scheduler.resource.in_use == 1
        assert [number async for number in stream] == [1, 2]
        assert scheduler.resource.in_use == 0

    asyncio.run(main())


def test_a_stream_holds_its_permit_until_it_is_exhausted() -> None:
    async def scenario(scheduler: LoadScheduler) -> None:
        stream = await headgate.wrap(counted, agent_id="a")
        assert scheduler.resource.in_use == 1
        assert [number async for number in stream] == [0, 1, 2]
        assert scheduler.resource.in_use == 0

    run(scenario, capacity=1)


def test_a_stream_that_is_closed_early_frees_its_permit_once() -> None:
    async def scenario(scheduler: LoadScheduler) -> None:
        async with await headgate.wrap(counted, agent_id="a") as stream:
            assert await anext(stream) == 0
        await stream.aclose()
        assert (scheduler.resource.in_use, scheduler.tick) == (0, 1)

    run(scenario, capacity=1)


def test_a_stream_that_nobody_reads_frees_its_permit_when_it_is_forgotten() -> None:
    async def scenario(scheduler: LoadScheduler) -> None:
        stream = await headgate.wrap(counted, agent_id="a")
        assert scheduler.resource.in_use == 1
        del stream
        gc.collect()
        await asyncio.sleep(1)
        assert scheduler.resource.in_use == 0

    run(scenario, capacity=1)


def test_a_stream_that_fails_frees_its_permit() -> None:
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise LookupError

    async def scenario(scheduler: LoadScheduler) -> None:
        stream = await headgate.wrap(broken, agent_id="a")
        with pytest.raises(LookupError):
            assert [number async for number in stream] == []
        assert scheduler.resource.in_use == 0

    run(scenario, capacity=1)


class Answers:
    """What an SDK returns for a stream: an async iterator with more to it."""

    response = "headers"

    def __init__(self) -> None:
        self.is_closed = False

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> int:
        return 1

    async def close(self) -> None:
        self.is_closed = True


def test_a_stream_of_an_sdk_keeps_what_it_has_and_is_closed_with_it() -> None:
    answers = Answers()

    async def opened() -> Answers:
        return answers

    async def scenario(scheduler: LoadScheduler) -> None:
        stream = await headgate.wrap(opened, agent_id="a")
        assert stream.response == "headers"
        await stream.close()
        assert answers.is_closed
        assert scheduler.resource.in_use == 0

    run(scenario)


def test_a_governed_function_waits_for_a_permit_at_each_call() -> None:
    @headgate.governed(agent_id="a", weight=2.0)
    async def ask(text: str) -> str:
        grant = headgate.current_grant()
        assert grant is not None
        assert grant.weight == 2.0
        return await answer(text)

    @headgate.governed(agent_id="a")
    async def stream() -> AsyncIterator[int]:
        async for number in counted():
            yield number

    async def scenario(scheduler: LoadScheduler) -> None:
        assert [await ask("a"), await ask("b")] == ["A", "B"]
        assert [number async for number in stream()] == [0, 1, 2]
        async for _ in stream():
            assert scheduler.resource.in_use == 1
            break
        await asyncio.sleep(1)
        assert (scheduler.resource.in_use, scheduler.tick) == (0, 4)

    run(scenario, capacity=1)
    assert headgate.current_grant() is None


def test_a_decorator_that_hides_that_a_function_is_async_is_awaited_all_the_same() -> None:
    @functools.wraps(answer_at_once)
    def hidden() -> Awaitable[int]:
        return answer_at_once()

    async def main() -> int:
        headgate.configure()
        return int(await headgate.wrap(hidden, agent_id="a"))

    assert asyncio.run(main()) == 1


def test_a_plain_function_that_looks_like_the_async_one_inside_runs_in_a_thread() -> None:
    @functools.wraps(answer_at_once)
    def synchronous() -> int:
        return asyncio.run(answer_at_once())

    async def main() -> int:
        headgate.configure()
        return int(await headgate.wrap(synchronous, agent_id="a"))

    assert asyncio.run(main()) == 1


async def complete(*, model: str, messages: list[dict[str, str]]) -> str:
    grant = headgate.current_grant()
    assert grant is not None
    return f"{model} {grant.weight:g}"


def test_the_weight_follows_from_the_model_and_the_prompt() -> None:
    async def scenario(scheduler: LoadScheduler) -> str:
        messages = [{"role": "user", "content": "x" * 11_996}]
        return str(
            await headgate.wrap(complete, agent_id="a", model="claude-opus-4", messages=messages)
        )

    assert run(scenario) == "claude-opus-4 15"


def test_measured_costs_correct_the_weights_of_a_type() -> None:
    def cost(micro_usd: int) -> Callable[[str], Usage]:
        return lambda _: Usage(micro_usd=micro_usd, tokens=1)

    async def scenario(scheduler: LoadScheduler) -> list[str]:
        for _ in range(20):
            for kind, micro_usd in (("cheap", 100), ("dear", 300)):
                await headgate.wrap(
                    answer, "x", agent_id="a", task_type=kind, usage_of=cost(micro_usd)
                )
        assert scheduler.stats()[0].charged_micro_usd == 8_000
        return [
            str(await headgate.wrap(complete, agent_id="a", task_type=kind, model="", messages=[]))
            for kind in ("cheap", "dear")
        ]

    cheap, dear = (float(text.split()[-1]) for text in run(scenario))
    assert cheap < 2.0 < dear


def test_a_function_gets_the_cheaper_model_where_the_budget_is_too_small() -> None:
    async def scenario(scheduler: LoadScheduler) -> str:
        estimate = Estimate(usd=5, model="opus", cheaper=Estimate(usd=1, model="haiku"))
        return str(
            await headgate.wrap(
                complete, agent_id="a", model="opus", messages=[], weight=1.0, estimate=estimate
            )
        )

    budget = Budget(mode="downgrade", limits={"agent:a": 2})
    assert run(scenario, budget=budget) == "haiku 1"


def test_a_call_that_gets_no_permit_in_time_is_not_made() -> None:
    async def scenario(scheduler: LoadScheduler) -> None:
        async with scheduler.acquire("a"):
            with pytest.raises(PermitTimeoutError):
                await headgate.wrap(answer, "x", agent_id="b", timeout=1)

    run(scenario, capacity=1)


def test_a_scheduler_in_use_is_not_replaced() -> None:
    async def scenario(scheduler: LoadScheduler) -> None:
        assert headgate.current_scheduler() is scheduler
        async with scheduler.acquire("a"):
            with pytest.raises(InvalidSettingError, match="calls are under way"):
                headgate.configure()
        assert headgate.configure() is headgate.current_scheduler()

    run(scenario)
