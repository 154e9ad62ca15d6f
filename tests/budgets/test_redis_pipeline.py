"""Callers share batches, and none of them depends on what becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headgate.budgets import redis
from headgate.budgets.redis import MAX_BATCH, SharedPipeline
from headgate.errors import LedgerUnavailableError

Pipeline = SharedPipeline[int, int]


class Server:
    """Answers each request with its negative, and remembers the batches; it can be held up."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.has_work = asyncio.Event()
        self.is_free = asyncio.Event()
        self.is_free.set()

    async def send(self, requests: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(requests))
        self.has_work.set()
        await self.is_free.wait()
        if 13 in requests:
            raise LedgerUnavailableError("thirteen")
        return [ValueError(str(each)) if each == 7 else -each for each in requests]


async def test_calls_of_one_turn_are_one_batch_in_the_order_of_the_calls() -> None:
    server = Server()
    pipeline = Pipeline(server.send)
    answers = await asyncio.gather(*(pipeline.call(number) for number in (3, 1, 2)))
    assert answers == [-3, -1, -2]
    assert server.batches == [[3, 1, 2]]


async def test_calls_wait_while_a_batch_is_under_way_and_a_batch_is_bounded() -> None:
    server = Server()
    pipeline = Pipeline(server.send)
    answers = await asyncio.gather(*(pipeline.call(number) for number in range(100, 800)))
    assert answers == [-number for number in range(100, 800)]
    assert [number for batch in server.batches for number in batch] == list(range(100, 800))
    assert max(len(batch) for batch in server.batches) <= MAX_BATCH


async def test_an_error_for_one_request_is_an_answer_to_that_one_only() -> None:
    pipeline = Pipeline(Server().send)
    calls = (pipeline.call(number) for number in (6, 7, 8))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [answers[0], answers[2]] == [-6, -8]
    assert isinstance(answers[1], ValueError)


async def test_a_failed_batch_fails_its_callers_and_the_next_batch_goes_out() -> None:
    pipeline = Pipeline(Server().send)
    answers = await asyncio.gather(pipeline.call(13), pipeline.call(14), return_exceptions=True)
    assert [type(answer) for answer in answers] == [LedgerUnavailableError] * 2
    assert answers[0] is not answers[1]
    assert await pipeline.call(14) == -14


async def test_a_caller_cancelled_before_its_batch_leaves_is_not_sent() -> None:
    server = Server()
    server.is_free.clear()
    pipeline = Pipeline(server.send)
    first = asyncio.create_task(pipeline.call(1))
    await server.has_work.wait()
    cancelled, kept = asyncio.create_task(pipeline.call(2)), asyncio.create_task(pipeline.call(3))
    await asyncio.sleep(0)
    cancelled.cancel()
    server.is_free.set()
    assert (await first, await kept) == (-1, -3)
    assert [number for batch in server.batches for number in batch] == [1, 3]


async def test_a_caller_cancelled_under_way_leaves_its_batch_whole() -> None:
    server = Server()
    server.is_free.clear()
    pipeline = Pipeline(server.send)
    tasks = [asyncio.create_task(pipeline.call(number)) for number in (1, 2, 3)]
    await server.has_work.wait()
    tasks[1].cancel()
    server.is_free.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [answers[0], answers[2]] == [-1, -3]
    assert isinstance(answers[1], asyncio.CancelledError)


async def test_closing_ends_everybody_who_waits_and_nobody_hangs() -> None:
    server = Server()
    server.is_free.clear()
    pipeline = Pipeline(server.send)
    tasks = [asyncio.create_task(pipeline.call(number)) for number in range(3 * MAX_BATCH)]
    await server.has_work.wait()
    await pipeline.close()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(answer) for answer in answers} == {LedgerUnavailableError}
    server.is_free.set()
    assert await pipeline.call(5) == -5


async def test_more_callers_than_can_wait_are_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis, "MAX_WAITING", 3)
    pipeline = Pipeline(Server().send)
    calls = (pipeline.call(number) for number in range(20, 24))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[:3] == [-20, -21, -22]
    assert isinstance(answers[3], LedgerUnavailableError)
