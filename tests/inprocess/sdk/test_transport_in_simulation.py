"""Whatever is cancelled, refused or lost when: permits come back, and nothing stays reserved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import httpx2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.budgets.local import LocalBudgetTracker
from headgate.budgets.tracker import budget_queue
from headgate.errors import BudgetExceededError, PermitTimeoutError
from headgate.inprocess.permits import SharedResource
from headgate.inprocess.scheduler import LoadScheduler
from headgate.inprocess.sdk import async_client
from headgate.testing import SimulatedLoop, simulate
from inprocess.sdk import upstream
from inprocess.sdk.scene import COST, PRICES, SCOPE

BODY = msgspec.json.encode({"model": "gpt-4o", "messages": [], "max_tokens": 10})
URL = "http://provider.test/v1/chat/completions"


class SlowStream(httpx2.AsyncByteStream):
    """Takes a second for each piece; a piece that is None ends it with an error."""

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            await asyncio.sleep(1)
            if piece is None:
                raise httpx2.ReadError("cut off")
            yield piece


class Provider(httpx2.AsyncBaseTransport):
    """Answers after two seconds with what its script says."""

    def __init__(self, script: Callable[[], httpx2.Response | Exception]) -> None:
        self._script = script

    async def handle_async_request(self, _request: httpx2.Request) -> httpx2.Response:
        await asyncio.sleep(2)
        answer = self._script()
        if isinstance(answer, Exception):
            raise answer
        return answer


def streamed(pieces: Sequence[bytes | None]) -> httpx2.Response:
    headers = {"content-type": "text/event-stream"}
    return httpx2.Response(200, headers=headers, stream=SlowStream(pieces))


ANSWERS: dict[str, Callable[[], httpx2.Response | Exception]] = {
    "whole": lambda: httpx2.Response(200, json=upstream.CHAT),
    "streamed": lambda: streamed([*upstream.CHAT_STREAM]),
    "cut": lambda: streamed([*upstream.CHAT_STREAM[:2], None]),
    "limited": lambda: httpx2.Response(429, headers={"retry-after": "3"}),
    "broken": lambda: httpx2.Response(500),
    "not sent": lambda: httpx2.ConnectError("refused"),
    "lost": lambda: httpx2.ReadError("lost"),
}


class Caller(msgspec.Struct, frozen=True):
    """One call: when it comes, how it is answered, when it is cancelled, if ever."""

    at: int
    answer: str
    cancel_after: float | None
    agent_id: str


callers = st.builds(
    Caller,
    at=st.integers(0, 5),
    answer=st.sampled_from(sorted(ANSWERS)),
    cancel_after=st.none() | st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.5, 3.0, 4.0]),
    agent_id=st.sampled_from("abc"),
)


@settings(max_examples=60)
@given(
    st.lists(callers, min_size=1, max_size=8),
    st.integers(1, 3),
    st.sampled_from(["0.0003", "0.001"]),
    st.booleans(),
    st.integers(0, 1_000),
)
def test_nothing_is_leaked(
    calls: list[Caller], capacity: int, limit_usd: str, pauses: bool, seed: int
) -> None:
    async def main(loop: SimulatedLoop) -> None:
        tracker = LocalBudgetTracker(clock=loop.time)
        await tracker.set_budget(SCOPE, limit_usd=limit_usd)
        resource = SharedResource("llm", capacity)
        scheduler = LoadScheduler(None, resource)

        async def call(caller: Caller) -> None:
            await asyncio.sleep(caller.at)
            client = async_client(
                scheduler=scheduler,
                agent_id=caller.agent_id,
                tracker=tracker,
                scope=SCOPE,
                prices=PRICES,
                max_wait_seconds=4,
                pause_when_limited=pauses,
                transport=Provider(ANSWERS[caller.answer]),
            )
            await client.post(URL, content=BODY)

        async def cancelled(caller: Caller) -> None:
            asking = asyncio.create_task(call(caller))
            if caller.cancel_after is not None:
                loop.call_later(caller.at + caller.cancel_after, asking.cancel)
            await asyncio.wait({asking})
            if not asking.cancelled():
                error = asking.exception()
                expected = (BudgetExceededError, PermitTimeoutError, httpx2.TransportError)
                assert error is None or isinstance(error, expected), error

        await asyncio.gather(*(cancelled(caller) for caller in calls))
        status = await tracker.status(SCOPE)
        assert (status.reserved_micro_usd, status.reserved_tokens) == (0, 0)
        assert (resource.free, scheduler.queued) == (capacity, 0)

    simulate(main, seed=seed)


@pytest.mark.parametrize("capacity", [None, 5, 60])
def test_at_the_defaults_sixty_calls_all_run_in_a_budget_that_holds_a_few(
    capacity: int | None,
) -> None:
    async def main(loop: SimulatedLoop) -> tuple[int, float]:
        tracker = LocalBudgetTracker(clock=loop.clock)
        # Each call holds 109 micro-dollars and costs 70, so 41 fit at once and 64 in all.
        await tracker.set_budget(SCOPE, limit_usd="0.0045")
        resource = SharedResource("llm", capacity or 1)
        client = async_client(
            scheduler=None if capacity is None else LoadScheduler(None, resource),
            tracker=tracker,
            scope=SCOPE,
            prices=PRICES,
            transport=Provider(ANSWERS["whole"]),
        )
        answers = await asyncio.gather(*[client.post(URL, content=BODY) for _ in range(60)])
        assert [answer.status_code for answer in answers] == [200] * 60
        assert (resource.free, len(budget_queue(tracker))) == (capacity or 1, 0)
        status = await tracker.status(SCOPE)
        assert status.reserved_micro_usd == status.overrun_micro_usd == 0
        return status.spent_micro_usd, loop.time()

    spent, seconds = simulate(main).result
    assert spent == 60 * COST
    assert seconds < 40


class Counting(Provider):
    """Counts how many calls are in flight, and what is held for them."""

    def __init__(self, tracker: LocalBudgetTracker) -> None:
        super().__init__(ANSWERS["whole"])
        self._tracker = tracker
        self._calls = 0
        self.most: list[int] = []
        self.held: list[int] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self._calls += 1
        self.most.append(self._calls)
        self.held.append((await self._tracker.status(SCOPE)).reserved_micro_usd)
        try:
            return await super().handle_async_request(request)
        finally:
            self._calls -= 1


OPEN = msgspec.json.encode({"model": "gpt-4o", "messages": []})
LONG = msgspec.json.encode({"model": "gpt-4o", "messages": [], "max_tokens": 50})


def test_a_request_that_leaves_its_length_open_begins_with_a_probe() -> None:
    async def main(loop: SimulatedLoop) -> Counting:
        tracker = LocalBudgetTracker(clock=loop.clock)
        await tracker.set_budget(SCOPE, limit_usd="0.01")
        provider = Counting(tracker)
        client = async_client(tracker=tracker, scope=SCOPE, prices=PRICES, transport=provider)
        answers = await asyncio.gather(*[client.post(URL, content=OPEN) for _ in range(60)])
        assert [answer.status_code for answer in answers] == [200] * 60
        status = await tracker.status(SCOPE)
        assert status.spent_micro_usd + status.overrun_micro_usd == 60 * COST
        return provider

    provider = simulate(main).result
    # One probe of a tenth, then two of four times five tokens, six of that, and so on.
    assert provider.held[0] == 1_000
    assert provider.most[:3] == [1, 1, 2]
    assert max(provider.most) > 10


def test_a_length_that_is_set_for_the_client_needs_no_probe() -> None:
    async def main(loop: SimulatedLoop) -> Counting:
        tracker = LocalBudgetTracker(clock=loop.clock)
        await tracker.set_budget(SCOPE, limit_usd="0.1")
        provider = Counting(tracker)
        client = async_client(
            tracker=tracker, scope=SCOPE, prices=PRICES, transport=provider, max_tokens=20
        )
        await asyncio.gather(*[client.post(URL, content=OPEN) for _ in range(20)])
        return provider

    assert max(simulate(main).result.most) == 20


@pytest.mark.parametrize(("reserve", "is_less"), [("strict", False), ("expected", True)])
def test_an_expected_output_holds_less_than_the_request_allows(
    reserve: Literal["strict", "expected"], is_less: bool
) -> None:
    async def main(loop: SimulatedLoop) -> list[int]:
        tracker = LocalBudgetTracker(clock=loop.clock)
        await tracker.set_budget(SCOPE, limit_usd="1")
        provider = Counting(tracker)
        client = async_client(
            tracker=tracker, scope=SCOPE, prices=PRICES, transport=provider, reserve=reserve
        )
        for _ in range(40):
            await client.post(URL, content=LONG)
        return provider.held

    held = simulate(main).result
    # The input is nine tokens, the output fifty at most and five as it came.
    assert held[0] == 509
    assert held[:20] == [509] * 20
    assert (held[-1] < 75) == is_less


def test_a_stream_that_is_open_does_not_wait_for_itself() -> None:
    async def main(loop: SimulatedLoop) -> float:
        tracker = LocalBudgetTracker(clock=loop.clock)
        await tracker.set_budget(SCOPE, limit_usd="0.00015")
        client = async_client(
            tracker=tracker, scope=SCOPE, prices=PRICES, transport=Provider(ANSWERS["streamed"])
        )
        async with client.stream("POST", URL, content=BODY):
            with pytest.raises(BudgetExceededError):
                await client.post(URL, content=BODY)
        return loop.time()

    assert simulate(main).result < 10


def test_after_a_rate_limit_calls_wait_as_long_as_it_asked() -> None:
    async def main(loop: SimulatedLoop) -> list[float]:
        begun: list[float] = []

        def script() -> httpx2.Response:
            begun.append(loop.time() - 2)
            return answers.pop(0)

        answers = [
            httpx2.Response(429, headers={"retry-after": "30"}),
            *[httpx2.Response(200, json=upstream.CHAT)] * 2,
        ]
        resource = SharedResource("llm", 1)
        client = async_client(
            scheduler=LoadScheduler(None, resource),
            pause_when_limited=True,
            transport=Provider(script),
        )
        start = loop.time()
        await client.post(URL, content=BODY)
        waiting = asyncio.create_task(client.post(URL, content=BODY))
        await asyncio.sleep(5)
        assert resource.free == 1
        await waiting
        await client.post(URL, content=BODY)
        return [moment - start for moment in begun]

    assert simulate(main).result == [0, 32, 34]


def test_a_long_call_keeps_its_lease() -> None:
    async def main(loop: SimulatedLoop) -> int:
        tracker = LocalBudgetTracker(clock=loop.time)
        client = async_client(
            tracker=tracker,
            scope=SCOPE,
            prices=PRICES,
            lease_seconds=3,
            transport=Provider(lambda: streamed([b": wait\n\n"] * 60 + [*upstream.CHAT_STREAM])),
        )
        await client.post(URL, content=BODY)
        status = await tracker.status(SCOPE)
        assert status.overrun_micro_usd == 0
        return status.spent_micro_usd

    assert simulate(main).result == COST


def test_no_answer_is_given_before_there_is_a_permit() -> None:
    async def main(loop: SimulatedLoop) -> list[float]:
        provider = Provider(ANSWERS["streamed"])
        client = async_client(
            scheduler=LoadScheduler(None, SharedResource("llm", 2)), transport=provider
        )
        ended: list[float] = []

        async def call() -> None:
            await client.post(URL, content=BODY)
            ended.append(loop.time() - start)

        start = loop.time()
        await asyncio.gather(*(call() for _ in range(6)))
        return ended

    # Each takes two seconds to be answered and four to be read, two at a time.
    assert simulate(main).result == pytest.approx([6, 6, 12, 12, 18, 18])
