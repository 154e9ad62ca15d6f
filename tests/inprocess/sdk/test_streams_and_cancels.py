"""Calls that are cancelled, closed or forgotten, and the other kinds of calls that are governed."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import anthropic
import openai
import pytest

from executors.endpoint import reply
from headgate.budgets.local import LocalBudgetTracker
from headgate.errors import InvalidSettingError, LedgerUnavailableError
from headgate.inprocess.budget import Budget
from headgate.inprocess.permits import SharedResource
from headgate.inprocess.scheduler import LoadScheduler
from headgate.inprocess.sdk import UngovernedRequestError, clients
from headgate.providers.prices import Price, PriceList
from inprocess.sdk import upstream
from inprocess.sdk.scene import COST, MAX_TOKENS, PRICE, SCOPE, SDKS, Scene, Sdk, scene, until
from inprocess.sdk.test_governed_sdks import USED, estimate_of
from inprocess.sdk.upstream import Silence, Stream, each, whole

CHAT: dict[str, Any] = {
    "model": "gpt-4o",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": MAX_TOKENS,
}

DEAR = Price(input=1_000, output=10_000)
DEAR_PRICES = PriceList({"o3-dear": DEAR, "gpt-4o": PRICE})


async_sdks = pytest.mark.parametrize(
    "sdk", [sdk for sdk in SDKS if sdk.name.startswith("Async")], ids=lambda sdk: sdk.name
)


def openai_of(made: Scene) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="key",
        base_url=f"{made.endpoint.url}/v1",
        http_client=made.async_client(),
        max_retries=0,
    )


@async_sdks
async def test_a_call_that_is_cancelled_while_it_waits_for_a_permit_costs_nothing(sdk: Sdk) -> None:
    async with scene(whole(sdk.body)) as made:
        async with made.scheduler.acquire("other"):
            asking = asyncio.ensure_future(sdk.ask(made))
            await until(lambda: made.scheduler.queued > 0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        assert await made.booked() == (0, 0)


@async_sdks
async def test_a_call_that_is_cancelled_before_its_answer_costs_the_estimate(sdk: Sdk) -> None:
    async with scene(Silence()) as made:
        asking = asyncio.ensure_future(sdk.ask(made))
        await until(lambda: bool(made.endpoint.seen))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await made.booked() == estimate_of(made.endpoint.seen[0])


@async_sdks
async def test_a_stream_that_is_cancelled_costs_the_estimate(sdk: Sdk) -> None:
    answer = Stream(sdk.events, hang_after=1)
    async with scene(answer) as made:
        asking = asyncio.ensure_future(sdk.ask(made, stream=True))
        await answer.hanging.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await made.booked() == estimate_of(made.endpoint.seen[0])


async def test_a_stream_that_is_left_early_frees_its_permit_and_costs_the_estimate() -> None:
    answer = Stream(upstream.CHAT_STREAM, hang_after=1)
    async with scene(answer) as made, openai_of(made) as sdk:
        async with await sdk.chat.completions.create(**CHAT, stream=True) as chunks:
            async for _ in chunks:
                break
        assert await made.booked() == estimate_of(made.endpoint.seen[0])


async def test_a_stream_that_nobody_reads_or_closes_ends_when_it_is_forgotten() -> None:
    async with scene(Stream(upstream.CHAT_STREAM)) as made, openai_of(made) as sdk:
        chunks = await sdk.chat.completions.create(**CHAT, stream=True)
        assert made.resource.in_use == 1
        del chunks
        gc.collect()
        await until(lambda: made.resource.free == 1)
        await asyncio.wait(clients._ending)
        assert await made.booked() == estimate_of(made.endpoint.seen[0])


async def test_a_stream_passes_piece_by_piece() -> None:
    answer = Stream(upstream.CHAT_STREAM, hang_after=1)
    async with scene(answer) as made, openai_of(made) as sdk:
        async with await sdk.chat.completions.create(**CHAT, stream=True) as chunks:
            first = await anext(aiter(chunks))
            assert first.choices[0].delta.content == "forty "
            assert answer.sent == 1
        await made.booked()


async def test_a_stream_without_usage_costs_the_estimate_and_nothing_is_asked_for() -> None:
    async with scene(Stream(upstream.CHAT_STREAM_WITHOUT_USAGE)) as made, openai_of(made) as sdk:
        async for _ in await sdk.chat.completions.create(**CHAT, stream=True):
            pass
        assert "stream_options" not in made.endpoint.seen[0].json
        assert await made.booked() == estimate_of(made.endpoint.seen[0])


async def test_the_usage_of_a_stream_is_asked_for_where_that_was_said() -> None:
    answer = Stream(upstream.CHAT_STREAM)
    async with scene(answer, ask_stream_usage=True) as made, openai_of(made) as sdk:
        async for _ in await sdk.chat.completions.create(**CHAT, stream=True):
            pass
        assert made.endpoint.seen[0].json == {
            **CHAT,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert await made.booked() == USED


async def test_responses_are_governed() -> None:
    async with scene(whole(upstream.RESPONSE)) as made, openai_of(made) as sdk:
        done = await sdk.responses.create(
            model="gpt-4o", input="hello", max_output_tokens=MAX_TOKENS
        )
        assert done.output_text == upstream.TEXT
        assert await made.booked() == USED


async def test_streamed_responses_are_governed() -> None:
    async with scene(Stream(upstream.RESPONSE_STREAM)) as made, openai_of(made) as sdk:
        events = await sdk.responses.create(model="gpt-4o", input="hello", stream=True)
        kinds = [event.type async for event in events]
        assert kinds[-1] == "response.completed"
        assert await made.booked() == USED


async def test_embeddings_are_governed() -> None:
    async with scene(whole(upstream.EMBEDDINGS)) as made, openai_of(made) as sdk:
        await sdk.embeddings.create(model="gpt-4o", input=["a", "b"], encoding_format="float")
        assert await made.booked() == (upstream.INPUT_TOKENS, upstream.INPUT_TOKENS)


async def test_what_asks_no_model_passes_and_what_may_cost_is_refused() -> None:
    models = whole({"object": "list", "data": []})
    async with scene(models, max_wait_seconds=0.01) as made, openai_of(made) as sdk:
        async with made.scheduler.acquire("other"):
            await sdk.models.list()
            with pytest.raises(UngovernedRequestError, match="allow_other"):
                await sdk.images.generate(prompt="a gate", model="gpt-4o")
        assert len(made.endpoint.seen) == 1
        assert await made.booked() == (0, 0)


async def test_counting_tokens_is_free_and_a_batch_is_refused() -> None:
    answer = whole({"input_tokens": 3})
    async with scene(answer) as made:
        sdk = anthropic.AsyncAnthropic(
            api_key="key", base_url=made.endpoint.url, http_client=made.async_client()
        )
        async with sdk:
            messages: Any = [{"role": "user", "content": "hi"}]
            counted = await sdk.messages.count_tokens(model="claude-house", messages=messages)
            assert counted.input_tokens == 3
            with pytest.raises(UngovernedRequestError):
                await sdk.messages.batches.create(requests=[])
        assert len(made.endpoint.seen) == 1
        assert await made.booked() == (0, 0)


async def test_other_requests_pass_where_that_was_said() -> None:
    answer = whole({"created": 1, "data": []})
    async with scene(answer, allow_other=True) as made, openai_of(made) as sdk:
        await sdk.images.generate(prompt="a gate", model="gpt-4o")
        assert len(made.endpoint.seen) == 1


async def test_a_redirect_costs_nothing_by_itself() -> None:
    async with scene() as made, openai_of(made) as sdk:
        made.endpoint.answer = each(
            reply(307, Location=f"{made.endpoint.url}/v2/chat/completions"), whole(upstream.CHAT)
        )
        await sdk.chat.completions.create(**CHAT)
        assert [seen.path for seen in made.endpoint.seen] == [
            "/v1/chat/completions",
            "/v2/chat/completions",
        ]
        assert await made.booked() == USED


class NoCommits(LocalBudgetTracker):
    """A tracker whose ledger goes away when something is to be booked."""

    async def commit(self, *_arguments: Any, **_more: Any) -> None:
        raise LedgerUnavailableError("gone")


async def test_an_answer_is_not_lost_where_it_cannot_be_booked(sdk: Sdk) -> None:
    tracker = NoCommits()
    async with scene(whole(sdk.body), tracker=tracker) as made:
        assert await sdk.ask(made, retries=2) == upstream.TEXT
        assert [str(error) for error in made.unsettled] == ["gone"]
        assert made.resource.free == 1
        assert len(made.endpoint.seen) == 1
        made.unsettled.clear()


async def test_a_budget_of_the_scheduler_is_used(sdk: Sdk) -> None:
    tracker = LocalBudgetTracker()
    resource = SharedResource("llm", 1)
    scheduler = LoadScheduler(None, resource, budget=Budget(tracker, session="s1"))
    fields = {"tracker": None, "scheduler": scheduler, "scope": "project:p1"}
    async with scene(whole(sdk.body), **fields) as made:
        assert await sdk.ask(made) == upstream.TEXT
        for scope in ("agent:analyst", SCOPE, "project:p1"):
            status = await tracker.status(scope)
            assert (status.spent_micro_usd, status.reserved_micro_usd) == (COST, 0)
        assert resource.free == 1


async def test_a_small_budget_takes_the_cheaper_model_that_was_named() -> None:
    tracker = LocalBudgetTracker()
    scheduler = LoadScheduler(
        None,
        SharedResource("llm", 1),
        budget=Budget(tracker, mode="downgrade", limits={"agent:analyst": "0.05"}),
    )
    fields: dict[str, Any] = {"tracker": None, "scope": None, "scheduler": scheduler}
    fields |= {"cheaper": {"o3-dear": "gpt-4o"}, "prices": DEAR_PRICES}
    async with scene(whole(upstream.CHAT), **fields) as made, openai_of(made) as sdk:
        await sdk.chat.completions.create(**{**CHAT, "model": "o3-dear"})
        assert made.endpoint.seen[0].json == CHAT
        assert await tracker.get_spent("agent:analyst") == COST / 1e6


async def test_a_scheduler_alone_needs_no_prices() -> None:
    fields = {"tracker": None, "scope": None, "prices": None}
    async with scene(whole(upstream.CHAT), **fields) as made, openai_of(made) as sdk:
        await sdk.chat.completions.create(**{**CHAT, "model": "nobody-knows"})
        assert made.scheduler.tick == 1
        assert made.resource.free == 1


async def test_each_call_asks_whose_it_is() -> None:
    names = iter(["first", "second"])
    async with scene(whole(upstream.CHAT), agent_id=lambda: next(names)) as made:
        async with openai_of(made) as sdk:
            await sdk.chat.completions.create(**CHAT)
            await sdk.chat.completions.create(**CHAT)
        assert [lane.agent_id for lane in made.scheduler.stats()] == ["first", "second"]


async def test_heavier_models_and_prompts_weigh_more() -> None:
    async with scene(whole(upstream.CHAT)) as made, openai_of(made) as sdk:
        long: Any = [{"role": "user", "content": "x" * 8_000}]
        await sdk.chat.completions.create(**{**CHAT, "messages": long})
        (stats,) = made.scheduler.stats()
        assert stats.weight == pytest.approx(3 * 2, rel=0.02)


async def test_nothing_of_a_prompt_or_a_key_is_logged(
    sdk: Sdk, caplog: pytest.LogCaptureFixture
) -> None:
    # What an earlier test left open when its loop ended may be collected, and told of, only now.
    gc.collect()
    with caplog.at_level(logging.DEBUG, logger="headgate"):
        async with scene(each(reply(500), whole(sdk.body))) as made:
            await sdk.ask(made, retries=1)
            await made.booked()
    assert [record for record in caplog.records if record.name.startswith("headgate")] == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"scheduler": None, "tracker": None}, "scheduler"),
        ({"scope": None}, "scope"),
        (
            {"scheduler": LoadScheduler(None, SharedResource("r", 1), budget="memory:")},
            "tracker",
        ),
    ],
)
async def test_settings_that_govern_nothing_or_twice_are_refused(
    fields: dict[str, Any], field: str
) -> None:
    async with scene(**fields) as made:
        with pytest.raises(InvalidSettingError) as refused:
            made.async_client()
        assert refused.value.field == field
