"""The provider that bills, asked by the SDKs of the two whose protocols it speaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from gateway.billing_upstream import TEXT, BillingUpstream, Fault, Plan, unified_headers

TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL_WEATHER = '[[tool weather {"city": "Ghent"}]]'
FAULTS: tuple[Fault, ...] = ("drop", "cut", "garbage")


@asynccontextmanager
async def openai_client(upstream: BillingUpstream) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=upstream.openai_url, api_key="a", max_retries=0
    ) as client:
        yield client


@asynccontextmanager
async def anthropic_client(upstream: BillingUpstream) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=upstream.url, api_key="a", max_retries=0
    ) as client:
        yield client


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


async def test_chat_completions_are_charged_as_they_are_told() -> None:
    async with BillingUpstream("a") as upstream, openai_client(upstream) as client:
        answer = await client.chat.completions.create(
            model="gpt-5", messages=said("[[say one two]] [[think 3]] [[mark m]]")
        )
        assert answer.choices[0].message.content == "one two"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        (charge,) = upstream.charged(mark="m")
        assert charge.was_told
        assert charge.end == "whole"
        assert charge.input_tokens == answer.usage.prompt_tokens
        assert (charge.output_tokens, charge.reasoning_tokens) == (5, 3)


@pytest.mark.parametrize("wants_usage", [True, False])
async def test_a_chat_stream_tells_its_usage_only_when_asked(wants_usage: bool) -> None:
    async with BillingUpstream("a") as upstream, openai_client(upstream) as client:
        extra: Any = {"stream_options": {"include_usage": True}} if wants_usage else {}
        answer = await client.chat.completions.create(
            model="gpt-5", messages=said("[[words 20]]"), stream=True, **extra
        )
        chunks = [chunk async for chunk in answer]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text.split() == [f"word{index}" for index in range(20)]
        told = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert told == ([20] if wants_usage else [])
        assert upstream.bill[0].output_tokens == 20
        assert upstream.bill[0].was_told is wants_usage


@pytest.mark.parametrize("is_stream", [True, False])
async def test_chat_calls_a_tool_until_it_has_a_result(is_stream: bool) -> None:
    function: Any = {"type": "function", "function": {"name": "weather", "parameters": TOOL}}
    async with BillingUpstream("a") as upstream, openai_client(upstream) as client:
        messages = said(CALL_WEATHER)
        if is_stream:
            async with client.chat.completions.stream(
                model="gpt-5", messages=messages, tools=[function]
            ) as events:
                message: Any = (await events.get_final_completion()).choices[0].message
        else:
            answer = await client.chat.completions.create(
                model="gpt-5", messages=messages, tools=[function]
            )
            assert answer.choices[0].finish_reason == "tool_calls"
            message = answer.choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city":"Ghent"}')
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        messages = [*messages, message.to_dict(), result]
        after = await client.chat.completions.create(
            model="gpt-5", messages=messages, tools=[function]
        )
        assert after.choices[0].message.content == TEXT


async def test_completions_and_embeddings() -> None:
    async with BillingUpstream("a") as upstream, openai_client(upstream) as client:
        answer = await client.completions.create(model="gpt-5", prompt="[[say so be it]]")
        assert answer.choices[0].text == "so be it"
        stream = await client.completions.create(model="gpt-5", prompt="p", stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == TEXT
        vectors = await client.embeddings.create(model="text-embedding-3-small", input=["a", "b"])
        again = await client.embeddings.create(
            model="text-embedding-3-small", input=["a"], encoding_format="float"
        )
        assert vectors.data[0].embedding == again.data[0].embedding
        assert vectors.data[0].embedding != vectors.data[1].embedding
        assert upstream.bill[2].input_tokens == vectors.usage.prompt_tokens
        assert upstream.bill[2].output_tokens == 0


async def test_responses_think_speak_and_call() -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": TOOL, "strict": False}
    async with BillingUpstream("a") as upstream, openai_client(upstream) as client:
        whole = await client.responses.create(model="gpt-5", input="[[think 4]]")
        assert whole.output_text == TEXT
        assert whole.usage is not None
        assert whole.usage.output_tokens_details.reasoning_tokens == 4
        stored = await client.responses.retrieve(whole.id)
        assert stored.output_text == TEXT
        await client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(whole.id)
        async with client.responses.stream(
            model="gpt-5", input=f"[[think 4]] {CALL_WEATHER}", tools=[tool]
        ) as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert "response.reasoning_summary_text.delta" in kinds
        assert [item.type for item in final.output] == ["reasoning", "function_call"]
        assert final.usage is not None
        assert final.usage.output_tokens == upstream.bill[1].output_tokens
        assert all(charge.was_told for charge in upstream.bill)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_messages_think_speak_and_call(is_stream: bool) -> None:
    tool: Any = {"name": "weather", "input_schema": TOOL}
    async with BillingUpstream("a") as upstream, anthropic_client(upstream) as client:
        given: Any = {
            "model": "claude-sonnet-5",
            "max_tokens": 100,
            "messages": said(f"[[think 4]] {CALL_WEATHER}"),
            "tools": [tool],
        }
        if is_stream:
            async with client.messages.stream(**given) as events:
                message: Any = await events.get_final_message()
        else:
            message = await client.messages.create(**given)
        assert [block.type for block in message.content] == ["thinking", "tool_use"]
        assert message.content[1].input == {"city": "Ghent"}
        assert message.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": message.content[1].id, "content": "rain"}
        given["messages"] += [
            {"role": "assistant", "content": message.to_dict()["content"]},
            {"role": "user", "content": [result]},
        ]
        after = await client.messages.create(**given)
        assert [block.type for block in after.content] == ["thinking", "text"]
        assert message.usage.output_tokens == upstream.bill[0].output_tokens
        assert message.usage.input_tokens == upstream.bill[0].input_tokens


async def test_a_marked_prompt_is_written_to_the_cache_of_its_key_once() -> None:
    async with BillingUpstream("a", "b") as upstream, anthropic_client(upstream) as client:
        system: Any = [
            {"type": "text", "text": "be kind " * 50, "cache_control": {"type": "ephemeral"}}
        ]
        given: Any = {"model": "claude-sonnet-5", "max_tokens": 9, "system": system}
        answers = [await client.messages.create(**given, messages=said("x")) for _ in range(2)]
        other = client.with_options(api_key="b")
        answers.append(await other.messages.create(**given, messages=said("x")))
        written = [answer.usage.cache_creation_input_tokens for answer in answers]
        read = [answer.usage.cache_read_input_tokens for answer in answers]
        length = written[0]
        assert length is not None
        assert length > 0
        assert written == [length, 0, length]
        assert read == [0, length, 0]
        assert [charge.cached_tokens for charge in upstream.bill] == read
        assert len({charge.input_tokens for charge in upstream.bill}) == 1
        count = await client.messages.count_tokens(
            model="claude-sonnet-5", system=system, messages=said("x")
        )
        assert count.input_tokens == upstream.bill[0].input_tokens
        assert len(upstream.bill) == 3


async def test_models_come_in_both_shapes() -> None:
    async with (
        BillingUpstream("a") as upstream,
        openai_client(upstream) as one,
        anthropic_client(upstream) as other,
    ):
        assert [model.id async for model in one.models.list()] == list(upstream.models)
        assert [model.id async for model in other.models.list()] == list(upstream.models)


async def test_an_answer_ends_at_the_most_tokens_that_were_asked_for() -> None:
    async with BillingUpstream("a") as upstream, anthropic_client(upstream) as client:
        answer = await client.messages.create(
            model="claude-sonnet-5", max_tokens=2, messages=said("[[words 9]]")
        )
        assert answer.stop_reason == "max_tokens"
        assert answer.usage.output_tokens == 2
        assert upstream.bill[0].output_tokens == 2


async def test_a_refused_request_is_not_charged() -> None:
    async with BillingUpstream("a", "b") as upstream, anthropic_client(upstream) as client:
        upstream.accounts["a"].fail(429, retry_after="7")
        upstream.accounts["a"].fail(529)
        given: Any = {"model": "claude-sonnet-5", "max_tokens": 9, "messages": said("x")}
        with pytest.raises(anthropic.RateLimitError) as limited:
            await client.messages.create(**given)
        assert limited.value.response.headers["retry-after"] == "7"
        with pytest.raises(anthropic.APIStatusError) as overloaded:
            await client.messages.create(**given)
        assert overloaded.value.status_code == 529
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="c").messages.create(**given)
        await client.with_options(api_key="b").messages.create(**given)
        await client.messages.create(**given)
        assert [charge.key for charge in upstream.bill] == ["b", "a"]
        assert upstream.accounts["a"].statuses == {429: 1, 529: 1, 200: 1}


async def test_a_request_without_a_model_is_not_accepted() -> None:
    async with BillingUpstream("a") as upstream, openai_client(upstream) as client:
        with pytest.raises(openai.BadRequestError):
            await client.post("/chat/completions", cast_to=object, body={"messages": said("x")})
        assert upstream.bill == []


async def test_a_prompt_may_ask_for_one_failure() -> None:
    async with BillingUpstream("a", "b") as upstream, openai_client(upstream) as client:
        messages = said("[[fail 429]] [[mark once]]")
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="gpt-5", messages=messages)
        other = client.with_options(api_key="b")
        await other.chat.completions.create(model="gpt-5", messages=messages)
        assert [charge.key for charge in upstream.charged(mark="once")] == ["b"]
        assert upstream.refused(mark="once") == ["a"]


async def test_a_prompt_may_ask_to_be_held_until_it_is_released() -> None:
    async with BillingUpstream("a") as upstream, openai_client(upstream) as client:
        messages = said("[[until later]]")
        asking = asyncio.create_task(
            client.chat.completions.create(model="gpt-5", messages=messages)
        )
        async with asyncio.timeout(10):
            while not upstream.requests:
                upstream.changed.clear()
                await upstream.changed.wait()
            await client.chat.completions.create(model="gpt-5", messages=said("x"))
            assert not asking.done()
            upstream.releases.add("later")
            assert (await asking).choices[0].message.content == TEXT


async def test_rate_headers_come_with_every_answer_of_their_key() -> None:
    async with BillingUpstream("a") as upstream, anthropic_client(upstream) as client:
        upstream.accounts["a"].headers = unified_headers(five_hours=0.25, resets_at=1_800_000_000)
        answer = await client.messages.with_raw_response.create(
            model="claude-sonnet-5", max_tokens=9, messages=said("x")
        )
        assert answer.headers["anthropic-ratelimit-unified-5h-utilization"] == "0.25"
        assert answer.headers["anthropic-ratelimit-unified-5h-reset"] == "1800000000"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_answer_that_does_not_come_whole_is_charged_and_not_told(
    fault: Fault, is_stream: bool
) -> None:
    async with BillingUpstream("a") as upstream, anthropic_client(upstream) as client:
        upstream.script.append(Plan(fault=fault, after_events=5))
        with pytest.raises(Exception):  # noqa: B017, PT011 - each fault has an error of its own
            await ask_message(client, is_stream=is_stream)
        (charge,) = upstream.bill
        assert not charge.was_told
        assert charge.input_tokens > 0
        if is_stream and fault != "drop":
            # The start, a ping, the start of a block, and two words.
            assert charge.output_tokens == 2


async def ask_message(client: anthropic.AsyncAnthropic, *, is_stream: bool) -> None:
    given: Any = {"model": "claude-sonnet-5", "max_tokens": 99, "messages": said("x")}
    if is_stream:
        async with client.messages.stream(**given) as events:
            message = await events.get_final_message()
            # Events that are no events are skipped by this SDK.
            assert message.stop_reason is not None
    else:
        answer = await client.messages.create(**given)
        assert answer.content


async def test_a_stream_that_is_left_is_charged_up_to_there() -> None:
    async with BillingUpstream("a") as upstream, openai_client(upstream) as client:
        answer = await client.chat.completions.create(
            model="gpt-5", messages=said("[[words 1000]] [[pace 0.01]]"), stream=True
        )
        async for _ in answer:
            break
        await answer.close()
        async with asyncio.timeout(10):
            while upstream.bill[0].end == "open":
                upstream.changed.clear()
                await upstream.changed.wait()
        assert upstream.bill[0].end == "left"
        assert upstream.bill[0].output_tokens < 1000
        assert not upstream.bill[0].was_told


async def test_a_stream_without_end_ends_with_its_client() -> None:
    async with BillingUpstream("a") as upstream, openai_client(upstream) as client:
        upstream.script.append(Plan(fault="endless"))
        answer = await client.chat.completions.create(
            model="gpt-5", messages=said("x"), stream=True
        )
        seen = 0
        async for _ in answer:
            seen += 1
            if seen == 500:
                break
        await answer.close()
        async with asyncio.timeout(10):
            while upstream.bill[0].end == "open":
                upstream.changed.clear()
                await upstream.changed.wait()
        assert upstream.bill[0].end == "left"
        assert upstream.bill[0].output_tokens >= 499


async def test_a_usage_that_lies_is_not_counted_as_told() -> None:
    async with BillingUpstream("a") as upstream, openai_client(upstream) as client:
        lie = {"prompt_tokens": -1, "completion_tokens": 1 << 60, "total_tokens": 0}
        upstream.script.append(Plan(usage=lie))
        answer = await client.chat.completions.create(model="gpt-5", messages=said("x"))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1 << 60
        assert not upstream.bill[0].was_told
        assert upstream.bill[0].output_tokens == 4
