"""What goes wrong around a call: loops that end, clients that close early, odd prices."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import msgspec
import openai
import pytest

from executors.endpoint import Seen, reply, running_endpoint
from headgate import connect_budget
from headgate.budgets.local import LocalBudgetTracker
from headgate.budgets.status import ScopeStatus
from headgate.errors import BudgetExceededError, InvalidFieldError, PermitTimeoutError
from headgate.inprocess.budget import Budget
from headgate.inprocess.permits import SharedResource
from headgate.inprocess.scheduler import LoadScheduler
from headgate.inprocess.sdk import (
    GovernedAsyncTransport,
    Governor,
    LoopThread,
    UnusableLoopError,
    async_client,
    clients,
    sync_client,
)
from headgate.providers.prices import Cost, PriceList
from headgate.testing import SimulatedLoop, simulate
from inprocess.sdk import upstream
from inprocess.sdk.scene import (
    MAX_TOKENS,
    PRICE,
    PRICES,
    SCOPE,
    Scene,
    anthropic_async,
    anthropic_sync,
    openai_async,
    scene,
    until,
)
from inprocess.sdk.test_clients import BODY, URL, answering
from inprocess.sdk.test_governed_sdks import USED, estimate_of
from inprocess.sdk.test_streams_and_cancels import CHAT, NoCommits, openai_of
from inprocess.sdk.upstream import Stream, each, whole


async def all_ended(made: Scene) -> None:
    """Wait for the calls that end behind somebody's back."""
    await until(lambda: made.resource.free == 1 and not clients._ending)


async def test_a_sync_stream_that_is_closed_on_its_loop_frees_its_permit() -> None:
    async with scene(Stream(upstream.CHAT_STREAM)) as made:
        with made.sync_client() as client:
            sdk = openai.OpenAI(
                api_key="key", base_url=f"{made.endpoint.url}/v1", http_client=client, max_retries=0
            )
            chunks = await asyncio.to_thread(
                lambda: sdk.chat.completions.create(**CHAT, stream=True)
            )
            chunks.close()
            await all_ended(made)
            assert await made.booked() == estimate_of(made.endpoint.seen[0])


async def test_a_sync_answer_that_is_dropped_on_its_loop_frees_its_permit() -> None:
    async with scene(Stream(upstream.CHAT_STREAM)) as made:
        client = made.sync_client()

        def opened() -> tuple[httpx2.Response, Any]:
            url = f"{made.endpoint.url}/v1/chat/completions"
            answer = client.send(client.build_request("POST", url, json=CHAT), stream=True)
            pieces = answer.iter_bytes()
            next(pieces)
            return answer, pieces

        kept: list[Any] = [await asyncio.to_thread(opened)]
        kept.clear()
        # The thread may let go of the response a moment later, and its end is nobody's task here.
        async with asyncio.timeout(30):
            while (await made.tracker.status(SCOPE)).reserved_tokens:
                gc.collect()
                await asyncio.sleep(0.01)
        assert await made.booked() == estimate_of(made.endpoint.seen[0])


async def status_at(url: str) -> ScopeStatus:
    async with connect_budget(url) as tracker:
        return await tracker.status(SCOPE)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/budget.db"


async def test_a_ledger_stays_open_while_a_call_of_another_client_runs(url: str) -> None:
    unsettled: list[Exception] = []
    governor = Governor(tracker=url, scope=SCOPE, prices=PRICES, on_unsettled=unsettled.append)
    async with running_endpoint(Stream(upstream.CHAT_STREAM)) as endpoint:

        def client() -> openai.AsyncOpenAI:
            transport = GovernedAsyncTransport(httpx2.AsyncHTTPTransport(), governor)
            http_client = httpx2.AsyncClient(transport=transport)
            base_url = f"{endpoint.url}/v1"
            return openai.AsyncOpenAI(api_key="key", base_url=base_url, http_client=http_client)

        async with client() as first:
            chunks = await first.chat.completions.create(**CHAT, stream=True)
            await client().close()
            assert len([chunk async for chunk in chunks]) == 3
            # It is open for further calls too.
            async for _ in await first.chat.completions.create(**CHAT, stream=True):
                pass
    status = await status_at(url)
    assert (status.spent_micro_usd, status.reserved_micro_usd) == (2 * USED[0], 0)
    assert unsettled == []
    assert governor.tracker is not None
    assert not governor.tracker.is_open


async def test_a_stream_that_outlives_its_client_is_booked(url: str) -> None:
    unsettled: list[Exception] = []
    fields: dict[str, Any] = {"tracker": url, "scheduler": None, "on_unsettled": unsettled.append}
    async with scene(Stream(upstream.CHAT_STREAM, hang_after=2), **fields) as made:
        async with openai_of(made) as sdk:
            chunks = await sdk.chat.completions.create(**CHAT, stream=True)
            await anext(aiter(chunks))
        await chunks.close()
        estimate = estimate_of(made.endpoint.seen[0])
    status = await status_at(url)
    assert (status.spent_micro_usd, status.reserved_micro_usd) == (estimate[0], 0)
    assert unsettled == []


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 50, "max_tokens": 200},
        {"n": 2, "max_tokens": 5_000},
    ],
)
async def test_several_answers_are_held_for_together(fields: dict[str, Any]) -> None:
    async with scene(whole(upstream.CHAT)) as made, openai_of(made) as sdk:
        await made.tracker.set_budget(SCOPE, limit_usd="0.05")
        asked = {name: value for name, value in CHAT.items() if name != "max_tokens"}
        with pytest.raises(BudgetExceededError):
            await sdk.chat.completions.create(**{**asked, **fields})
        assert made.endpoint.seen == []


async def test_several_prompts_are_held_for_together() -> None:
    async with scene(whole(upstream.CHAT)) as made, openai_of(made) as sdk:
        await made.tracker.set_budget(SCOPE, limit_usd="0.05")
        with pytest.raises(BudgetExceededError):
            await sdk.completions.create(model="gpt-4o", prompt=["hi"] * 100, max_tokens=1_000)
        assert made.endpoint.seen == []


class OddPrices(PriceList):
    """Prices of one's own, that fail when a cost is to be read."""

    def cost(self, model: str, **tokens: Any) -> Cost:
        if "cache_read_tokens" in tokens:
            raise KeyError("no such column")
        return super().cost(model, **tokens)


async def test_a_cost_that_cannot_be_read_is_the_estimate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scene(whole(upstream.CHAT), prices=OddPrices({"gpt-4o": PRICE})) as made:
        assert await openai_async(made) == upstream.TEXT
        assert await made.booked() == estimate_of(made.endpoint.seen[0])
    assert "KeyError" in caplog.text


async def test_a_listener_that_fails_does_not_take_the_answer_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def listen(_error: Exception) -> None:
        raise KeyError("listener")

    async with scene(whole(upstream.CHAT), tracker=NoCommits(), on_unsettled=listen) as made:
        assert await openai_async(made) == upstream.TEXT
        assert made.resource.free == 1
    assert "gone" in caplog.text
    assert "KeyError" in caplog.text


class OddTracker(LocalBudgetTracker):
    """A tracker of one's own, with errors of its own."""

    async def commit(self, *_arguments: Any, **_more: Any) -> None:
        raise OSError("disk")


async def test_a_tracker_with_errors_of_its_own_does_not_take_the_answer_away() -> None:
    async with scene(whole(upstream.CHAT), tracker=OddTracker()) as made:
        assert await openai_async(made) == upstream.TEXT
        assert made.resource.free == 1
        assert "OSError" in str(made.unsettled.pop())


@pytest.mark.parametrize("kind", ["Content-Type: text/plain\r\n", ""])
async def test_events_are_events_whatever_the_answer_calls_them(kind: str) -> None:
    count = len(upstream.MESSAGE_STREAM)

    async def answer(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\n{kind}Transfer-Encoding: chunked\r\n\r\n".encode())
        for event in upstream.MESSAGE_STREAM[:count]:
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        if count < len(upstream.MESSAGE_STREAM):
            await writer.drain()
            writer.close()
            raise ConnectionError
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with scene(answer) as made:
        await anthropic_async(made, stream=True)
        assert await made.booked() == USED
    count = 4
    async with scene(answer) as made:
        with pytest.raises(Exception, match=r"(?i)connection|incomplete|peer"):
            await anthropic_async(made, stream=True)
        assert await made.booked() == estimate_of(made.endpoint.seen[0])


@pytest.mark.parametrize("status", [301, 302, 303])
async def test_a_redirect_to_what_was_made_costs_the_estimate(status: int) -> None:
    async with scene() as made, openai_of(made) as sdk:
        made.endpoint.answer = each(
            reply(status, Location=f"{made.endpoint.url}/v1/answers/1"), whole(upstream.CHAT)
        )
        await sdk.chat.completions.create(**CHAT)
        assert made.endpoint.seen[1].method == "GET"
        assert await made.booked() == estimate_of(made.endpoint.seen[0])


class Limiting(httpx2.AsyncBaseTransport):
    """Asks for an hour's pause once, after a second, then answers."""

    def __init__(self) -> None:
        self.sent_at: list[float] = []

    async def handle_async_request(self, _request: httpx2.Request) -> httpx2.Response:
        self.sent_at.append(asyncio.get_running_loop().time())
        is_first = len(self.sent_at) == 1
        await asyncio.sleep(1)
        if is_first:
            return httpx2.Response(429, headers={"retry-after": "3600"})
        return httpx2.Response(200, json=upstream.CHAT)


@pytest.mark.parametrize("has_budget", [False, True])
def test_a_pause_holds_calls_that_waited_for_a_permit_already(has_budget: bool) -> None:
    async def main(loop: SimulatedLoop) -> list[float]:
        provider, resource = Limiting(), SharedResource("llm", 1)
        tracker = LocalBudgetTracker(clock=loop.time)
        budget = Budget(tracker, session="s1") if has_budget else None
        client = async_client(
            scheduler=LoadScheduler(None, resource, budget=budget),
            prices=PRICES,
            pause_when_limited=True,
            transport=provider,
        )
        start = loop.time()
        asking = [asyncio.create_task(client.post(URL, json=BODY)) for _ in range(4)]
        await asyncio.sleep(1_000)
        assert resource.free == 1
        status = await tracker.status(SCOPE)
        assert (status.spent_micro_usd, status.reserved_micro_usd) == (0, 0)
        await asyncio.gather(*asking)
        return [moment - start for moment in provider.sent_at]

    assert simulate(main).result == pytest.approx([0, 3_601, 3_602, 3_603])


def test_a_pause_is_part_of_the_time_for_a_permit() -> None:
    async def main(loop: SimulatedLoop) -> float:
        client = async_client(
            scheduler=LoadScheduler(None, SharedResource("llm", 1)),
            max_wait_seconds=5,
            pause_when_limited=True,
            transport=Limiting(),
        )
        await client.post(URL, json=BODY)
        start = loop.time()
        with pytest.raises(PermitTimeoutError, match="pause"):
            await client.post(URL, json=BODY)
        return loop.time() - start

    assert simulate(main).result == pytest.approx(5)


class Gone:
    """A sync client on a loop that ends while its first call is under way."""

    def __init__(self, *, is_closed: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._is_closed = is_closed
        self.unsettled: list[Exception] = []
        self.client = sync_client(
            tracker=LocalBudgetTracker(),
            scope=SCOPE,
            prices=PRICES,
            loop=self.loop,
            transport=httpx2.MockTransport(self._answer),
            on_unsettled=self.unsettled.append,
        )

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        if self._is_closed:
            self.loop.close()
        return answering(request)


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.filterwarnings("ignore:coroutine '_renew' was never awaited")
def test_a_loop_that_ends_takes_no_answer_away_and_refuses_the_next_call(is_closed: bool) -> None:
    gone = Gone(is_closed=is_closed)
    assert gone.client.post(URL, json=BODY).status_code == 200
    assert len(gone.unsettled) == 1
    with pytest.raises(UnusableLoopError, match="does not run"):
        gone.client.post(URL, json=BODY)
    assert len(gone.unsettled) == 1
    gone.client.close()
    if not is_closed:
        for task in asyncio.all_tasks(gone.loop):
            task.cancel()
        gone.loop.run_until_complete(asyncio.sleep(0.01))
        gone.loop.close()


def test_a_loop_that_stops_lets_nobody_wait_for_ever() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def work() -> None:
        loop.call_soon(loop.stop)
        await asyncio.Event().wait()

    with pytest.raises(UnusableLoopError):
        LoopThread(loop).run(work)
    thread.join(10)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_a_loop_that_cancels_what_it_runs_is_over() -> None:
    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()

    with pytest.raises(UnusableLoopError):
        LoopThread().run(work)


def fail() -> str:
    raise LookupError("no agent is set")


@pytest.mark.parametrize("ask", [openai_async, anthropic_async, anthropic_sync])
@pytest.mark.parametrize("name", ["agent_id", "scope"])
@pytest.mark.parametrize("given", [fail, lambda: None])
async def test_a_name_that_cannot_be_had_is_told_once(
    ask: Callable[..., Any], name: str, given: Callable[[], Any]
) -> None:
    asked: list[str] = []

    def counting() -> Any:
        asked.append(name)
        return given()

    fields: dict[str, Any] = {name: counting}
    async with scene(**fields) as made:
        with pytest.raises(InvalidFieldError, match=name):
            await ask(made, retries=2)
        assert len(asked) == 1


async def test_anthropics_sync_client_says_that_it_cannot_wait_for_its_own_loop() -> None:
    async with scene() as made:
        sdk = anthropic.Anthropic(
            api_key="key", base_url=made.endpoint.url, http_client=made.sync_client(), max_retries=2
        )
        with pytest.raises(UnusableLoopError, match="async client"):
            sdk.messages.create(model="claude-house", messages=[], max_tokens=MAX_TOKENS)
        await until(lambda: made.resource.free == 1)


async def test_a_call_that_was_not_sent_costs_nothing_whoever_ends_it() -> None:
    async with scene() as made:
        governor = Governor(**made.fields)
        request = httpx2.Request("POST", URL, json=BODY)
        call = governor.call_for(request, request.read())
        await call.begin()
        assert made.resource.in_use == 1
        await call.finish()
        assert await made.booked() == (0, 0)


@pytest.mark.parametrize("status", [200, 429])
async def test_the_head_of_every_response_is_shown_and_who_fails_at_it_fails_no_call(
    status: int,
) -> None:
    seen: list[tuple[int, str]] = []

    def listen(status: int, headers: Mapping[str, str]) -> None:
        seen.append((status, headers["x-ratelimit-remaining-tokens"]))
        raise ZeroDivisionError

    answer = reply(status, msgspec.json.encode(USED_CHAT), X_RateLimit_Remaining_Tokens="7")
    async with scene(answer, on_response=listen) as made, made.async_client() as client:
        response = await client.post(f"{made.endpoint.url}/v1/chat/completions", json=BODY)
        assert response.status_code == status
    assert seen == [(status, "7")]


USED_CHAT = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_answer_with_several_codings_is_refused_and_booked_as_held(
    is_async: bool,
) -> None:
    answer = reply(200, b"{}", Content_Encoding="gzip, gzip", Content_Type="application/json")
    async with scene(answer) as made:
        url = f"{made.endpoint.url}/v1/chat/completions"

        async def ask() -> None:
            if is_async:
                async with made.async_client() as client:
                    await client.post(url, json=CHAT)
            else:
                with made.sync_client() as sync:
                    await asyncio.to_thread(sync.post, url, json=CHAT)

        with pytest.raises(httpx2.DecodingError, match="more than one Content-Encoding"):
            await ask()
        await all_ended(made)
        assert await made.booked() == estimate_of(made.endpoint.seen[0])
