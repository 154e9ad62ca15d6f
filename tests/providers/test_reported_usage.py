"""All that an answer says it used: to the token, whole or as a stream in any pieces, and its bill.

A provider's own words are the books: what it counts apart is kept apart, and priced apart.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.lifecycle import Usage
from headgate.providers.prices import Price, PriceList
from headgate.providers.usage import (
    EventStreamReader,
    ReportedUsage,
    ResponseReader,
    reported_usage,
)

# A token of input costs one micro-dollar, one of output ten, of the cache nothing to read.
PRICES = PriceList({"m": Price(input=1, output=10, cached_input=0, cache_write="1.25")})

CHAT = {
    "prompt_tokens": 100,
    "completion_tokens": 40,
    "total_tokens": 140,
    "prompt_tokens_details": {"cached_tokens": 60, "audio_tokens": 10},
    "completion_tokens_details": {
        "reasoning_tokens": 30,
        "audio_tokens": 5,
        "accepted_prediction_tokens": 0,
    },
}
RESPONSE = {
    "input_tokens": 100,
    "input_tokens_details": {"cached_tokens": 60},
    "output_tokens": 40,
    "output_tokens_details": {"reasoning_tokens": 30},
    "total_tokens": 140,
}
MESSAGE = {
    "input_tokens": 10,
    "cache_creation_input_tokens": 50,
    "cache_read_input_tokens": 200,
    "cache_creation": {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 30},
    "output_tokens": 7,
    "server_tool_use": {"web_search_requests": 2},
    "service_tier": "standard",
}
SHAPES: list[tuple[str, dict[str, Any], dict[str, Any], int]] = [
    (
        "chat",
        {"usage": CHAT, "service_tier": "default"},
        {
            "input_tokens": 100,
            "output_tokens": 40,
            "cached_tokens": 60,
            "reasoning_tokens": 30,
            "audio_input_tokens": 10,
            "audio_output_tokens": 5,
            "service_tier": "default",
        },
        440,
    ),
    (
        "completions",
        {"usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}},
        {"input_tokens": 3, "output_tokens": 4},
        43,
    ),
    (
        "embeddings",
        {"usage": {"prompt_tokens": 8, "total_tokens": 8}},
        {"input_tokens": 8, "output_tokens": 0},
        8,
    ),
    (
        "responses",
        {
            "usage": RESPONSE,
            "output": [
                {"type": "web_search_call", "status": "completed"},
                {"type": "file_search_call"},
                {"type": "message", "content": [{"text": '{"type": "web_search_call"}'}]},
                {"type": "web_search_call"},
            ],
        },
        {
            "input_tokens": 100,
            "output_tokens": 40,
            "cached_tokens": 60,
            "reasoning_tokens": 30,
            "server_tool_requests": 2,
            "file_searches": 1,
        },
        40 + 400 + 2 * 10_000 + 2_500,
    ),
    (
        "messages",
        {"usage": MESSAGE},
        {
            "input_tokens": 260,
            "output_tokens": 7,
            "cached_tokens": 200,
            "cache_write_tokens": 20,
            "cache_write_1h_tokens": 30,
            "server_tool_requests": 2,
        },
        10 + 25 + 60 + 70 + 2 * 10_000,
    ),
    (
        "messages that say nothing of an hour",
        {"usage": {**MESSAGE, "cache_creation": None, "server_tool_use": None}},
        {
            "input_tokens": 260,
            "output_tokens": 7,
            "cached_tokens": 200,
            "cache_write_tokens": 50,
        },
        10 + 63 + 70,
    ),
    (
        "details that are nonsense",
        {
            "usage": {
                "prompt_tokens": 1,
                "completion_tokens": 1,
                "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": "loud"},
                "completion_tokens_details": [1],
                "output_tokens_details": 5,
                "cache_creation": "x",
                "server_tool_use": {"web_search_requests": -5},
            },
            "output": "none",
            "service_tier": 5,
        },
        {"input_tokens": 1, "output_tokens": 1},
        11,
    ),
]


@pytest.mark.parametrize(("body", "said", "micro_usd"), [row[1:] for row in SHAPES])
def test_every_count_of_a_whole_answer_is_kept_and_billed(
    body: dict[str, Any], said: dict[str, Any], micro_usd: int
) -> None:
    usage = reported_usage(json.dumps({"model": "m", **body}).encode())
    assert usage == ReportedUsage(model="m", **said)
    assert usage.cost(PRICES) == Usage(
        tokens=usage.tokens, micro_usd=micro_usd, model="m", is_priced=True
    )


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        {"prompt_tokens": -1, "completion_tokens": 1},
        {"prompt_tokens": 10**13, "completion_tokens": 1},
        {
            "prompt_tokens": 1,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": -1},
        },
    ],
)
def test_what_nobody_can_have_used_is_not_reported(usage: object) -> None:
    assert reported_usage(json.dumps({"model": "m", "usage": usage}).encode()) is None


def test_a_speed_without_a_price_leaves_the_cost_open() -> None:
    body = {"model": "m", "usage": {**MESSAGE, "speed": "fast"}}
    usage = reported_usage(json.dumps(body).encode())
    assert usage is not None
    assert usage.cost(PRICES) == Usage(tokens=267, micro_usd=None, model="m")


def event(data: dict[str, Any]) -> str:
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data, separators=(',', ':'))}\n\n"


def chat_chunk(**fields: object) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "model": "m", "choices": [], **fields}


CHAT_STREAM = (
    event(chat_chunk(choices=[{"delta": {"content": "a"}}], usage=None))
    + event(chat_chunk(choices=[{"delta": {"content": '"usage":{ [DONE] '}}], usage=None))
    + event(chat_chunk(usage=CHAT))
    + "data: [DONE]\n\n"
)
RESPONSE_STREAM = (
    event({"type": "response.created", "response": {"model": "m", "usage": None, "output": []}})
    + event({"type": "response.output_text.delta", "delta": "message_stop"})
    + event(
        {
            "type": "response.completed",
            "response": {"model": "m", "usage": RESPONSE, "output": [{"type": "web_search_call"}]},
        }
    )
)
MESSAGE_STREAM = (
    event({"type": "message_start", "message": {"model": "m", "usage": {**MESSAGE}}})
    + event({"type": "ping"})
    + event({"type": "content_block_delta", "delta": {"text": "x"}})
    + event({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 99}})
    + event({"type": "message_stop"})
)
SEVERAL_LINES = (
    ': a comment\ndata: {"model": "m",\ndata: "choices": [], "usage":\n'
    'data: {"prompt_tokens": 3, "completion_tokens": 4}}\n\ndata: [DONE]\n\n'
)
STREAMS = [
    (CHAT_STREAM, 100, 40, 60),
    (RESPONSE_STREAM, 100, 40, 60),
    (MESSAGE_STREAM, 260, 99, 200),
    (SEVERAL_LINES, 3, 4, 0),
]


def pieces(data: st.DataObject, text: bytes) -> list[bytes]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(("stream", "given_tokens", "made", "cached"), STREAMS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_it_does_not_matter_how_a_stream_is_cut(
    data: st.DataObject, stream: str, given_tokens: int, made: int, cached: int, end: str
) -> None:
    reader = EventStreamReader()
    for piece in pieces(data, stream.replace("\n", end).encode()):
        reader.feed(piece)
    usage, is_all = reader.reported()
    assert is_all
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.cached_tokens) == (
        given_tokens,
        made,
        cached,
    )


def test_events_fed_one_by_one_say_what_they_say_together() -> None:
    for stream, *_ in STREAMS:
        whole, parts = EventStreamReader(), EventStreamReader()
        whole.feed(stream.encode())
        for one in stream.encode().split(b"\n\n")[:-1]:
            parts.feed(one + b"\n\n")
        assert parts.reported() == whole.reported()


def test_a_stream_that_is_cut_off_has_said_what_came_so_far() -> None:
    reader = EventStreamReader()
    reader.feed(MESSAGE_STREAM.split("event: message_delta")[0].encode())
    usage, is_all = reader.reported()
    assert not is_all
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (260, 7)


def test_an_event_of_too_many_lines_is_not_read() -> None:
    reader = EventStreamReader()
    reader.feed(b"data: [\n" * 100_000 + b'data: "usage"\n\n')
    reader.feed(CHAT_STREAM.encode())
    usage, is_all = reader.reported()
    assert is_all
    assert usage is not None
    assert usage.input_tokens == 100


def test_a_reader_of_answers_reports_both_kinds() -> None:
    for body, kind in (
        (json.dumps({"model": "m", "usage": CHAT}), "application/json"),
        (CHAT_STREAM, "text/event-stream"),
    ):
        reader = ResponseReader({"content-type": kind})
        assert reader.reported() == (None, False)
        reader.feed(body.encode())
        usage, is_all = reader.reported()
        assert is_all
        assert usage is not None
        assert usage.reasoning_tokens == 30
