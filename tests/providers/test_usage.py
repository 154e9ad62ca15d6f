"""What an answer says was used: every shape that providers send, and anything else as unknown."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.lifecycle import UNKNOWN_USAGE, Usage
from headgate.core.money import MAX_RESERVATION_MICRO_USD, MAX_RESERVATION_TOKENS
from headgate.providers.prices import Price, PriceList
from headgate.providers.usage import MAX_LINE_BYTES, UsageHider, tells_unknown_usage, usage_of

# A token of input costs one micro-dollar, one of output ten, one from the cache nothing.
PRICES = PriceList(
    {
        "mine": Price(input=1, output=10, cached_input=0, cache_write=2),
        "dear": Price(input=1_000_000, output=1_000_000),
    }
)

SHAPES: list[tuple[str, dict[str, Any], int, int]] = [
    ("chat completion", {"prompt_tokens": 10, "completion_tokens": 5}, 15, 60),
    (
        "chat completion from a cache",
        {
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 2},
        },
        15,
        56,
    ),
    (
        "details that are not known",
        {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": None},
        2,
        11,
    ),
    (
        "a count of cached tokens that is not known",
        {
            "prompt_tokens": 1,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": None},
        },
        2,
        11,
    ),
    ("embeddings", {"prompt_tokens": 8, "total_tokens": 8}, 8, 8),
    (
        "a total with hidden output",
        {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 40},
        40,
        310,
    ),
    (
        "responses",
        {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 10},
            "output_tokens": 2,
            "total_tokens": 12,
        },
        12,
        20,
    ),
    ("a message", {"input_tokens": 10, "output_tokens": 2}, 12, 30),
    (
        "a message with a cache",
        {
            "input_tokens": 1,
            "output_tokens": 2,
            "cache_creation_input_tokens": 100,
            "cache_read_input_tokens": 1_000,
        },
        1_103,
        221,
    ),
    (
        "a message without a cache",
        {
            "input_tokens": 1,
            "output_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": None,
        },
        3,
        21,
    ),
    ("nothing used", {"prompt_tokens": 0, "completion_tokens": 0}, 0, 0),
    ("counts of a proxy", {"prompt_tokens": 10.0, "completion_tokens": "5"}, 15, 60),
    ("a total alone, as output", {"total_tokens": 10}, 10, 100),
]


def read(body: object) -> Usage:
    return usage_of(json.dumps(body).encode(), PRICES)


@pytest.mark.parametrize(("counts", "tokens", "micro_usd"), [row[1:] for row in SHAPES])
def test_tokens_are_counted_and_priced(counts: dict[str, Any], tokens: int, micro_usd: int) -> None:
    body = {"id": "x", "model": "mine", "usage": counts, "choices": [{"message": {"usage": 1}}]}
    assert read(body) == Usage(tokens=tokens, micro_usd=micro_usd, model="mine", is_priced=True)


@pytest.mark.parametrize("model", ["no-such-model", "", None, 5, {"a": 1}])
def test_a_model_without_a_price_has_tokens_and_no_cost(model: object) -> None:
    body = {"model": model, "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    known = model if isinstance(model, str) and model else None
    assert read(body) == Usage(tokens=3, micro_usd=None, model=known)


def test_published_prices_are_used() -> None:
    body = {"model": "gpt-4o", "usage": {"prompt_tokens": 1_000, "completion_tokens": 1_000}}
    usage = usage_of(json.dumps(body).encode(), PriceList())
    assert usage.tokens == 2_000
    assert usage.micro_usd is not None
    assert 1_000 < usage.micro_usd < 100_000


def events(*bodies: object) -> bytes:
    lines = [f"event: x\ndata: {json.dumps(body)}\n\n" for body in bodies]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


STREAMS = [
    (
        events(
            {"model": "mine", "choices": [{"delta": {}}], "usage": None},
            {
                "model": "mine",
                "choices": [],
                "usage": {"prompt_tokens": 10, "completion_tokens": 5},
            },
        ),
        Usage(tokens=15, micro_usd=60, model="mine", is_priced=True),
    ),
    (
        events(
            {
                "type": "message_start",
                "message": {"model": "mine", "usage": {"input_tokens": 10, "output_tokens": 1}},
            },
            {"type": "content_block_delta", "delta": {"text": '"usage"'}},
            {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 7}},
        ),
        Usage(tokens=17, micro_usd=80, model="mine", is_priced=True),
    ),
    (
        events(
            {"type": "response.created", "response": {"model": "mine", "usage": None}},
            {
                "type": "response.completed",
                "response": {"model": "mine", "usage": {"input_tokens": 1, "output_tokens": 1}},
            },
        ),
        Usage(tokens=2, micro_usd=11, model="mine", is_priced=True),
    ),
    (events({"message": "text", "usage": {"input_tokens": 1, "output_tokens": 1}}), UNKNOWN_USAGE),
    (events({"usage": None}), UNKNOWN_USAGE),
    (b'data: {"usage": \n\ndata: "usage"\n', UNKNOWN_USAGE),
]


@pytest.mark.parametrize(("body", "usage"), STREAMS)
def test_the_events_of_a_stream_are_put_together(body: bytes, usage: Usage) -> None:
    assert usage_of(body, PRICES) == usage


GARBAGE: list[object] = [
    {},
    {"usage": None},
    {"usage": 5},
    {"usage": []},
    {"usage": {}},
    {"usage": {"prompt_tokens": 1}},
    {"usage": {"completion_tokens": 1}},
    {"usage": {"output_tokens": 1}},
    {"usage": {"input_tokens": 1}},
    {"usage": {"input_tokens": 1, "cache_read_input_tokens": 1}},
    {"usage": {"prompt_tokens": -1, "completion_tokens": 1}},
    {"usage": {"prompt_tokens": 1, "completion_tokens": -1}},
    {"usage": {"prompt_tokens": 1, "completion_tokens": -1, "total_tokens": 5}},
    {"usage": {"prompt_tokens": 5, "total_tokens": 1}},
    {"usage": {"input_tokens": -5, "output_tokens": 1, "cache_read_input_tokens": 10}},
    {"usage": {"prompt_tokens": 1.5, "completion_tokens": 1}},
    {"usage": {"prompt_tokens": True, "completion_tokens": 1}},
    {"usage": {"prompt_tokens": "one", "completion_tokens": 1}},
    {"usage": {"prompt_tokens": 10**13, "completion_tokens": 1}},
    {"usage": {"prompt_tokens": 10**12, "completion_tokens": 1}},
    {"usage": {"prompt_tokens": 10**40, "completion_tokens": 1}},
    {"usage": {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": [1]}},
    [{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}],
    "usage",
]


@pytest.mark.parametrize("tokens", [-1, 10**13])
def test_a_count_that_nobody_can_have_used_is_no_silence(tokens: int) -> None:
    body = {"model": "mine", "usage": {"prompt_tokens": tokens, "completion_tokens": 1}}
    assert read(body) == Usage(model="mine")


@pytest.mark.parametrize("body", GARBAGE)
def test_what_cannot_be_read_is_unknown(body: object) -> None:
    assert read(body) == UNKNOWN_USAGE


@pytest.mark.parametrize("details", [{"cached_tokens": 5}, {"cached_tokens": -5}])
def test_an_impossible_cache_leaves_the_cost_open(details: dict[str, int]) -> None:
    counts = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": details}
    assert read({"model": "mine", "usage": counts}) == Usage(tokens=2, micro_usd=None, model="mine")


def test_a_cost_that_the_books_would_refuse_is_left_open() -> None:
    body = {"model": "dear", "usage": {"prompt_tokens": 10**9, "completion_tokens": 0}}
    assert read(body) == Usage(tokens=10**9, micro_usd=None, model="dear")


@pytest.mark.parametrize(
    "body", [b'"usage"' + b"[" * 9_000, b'{"usage": ' + b"[" * 9_000, b'\xff"usage"']
)
def test_a_body_that_is_no_json_is_unknown(body: bytes) -> None:
    assert usage_of(body, PRICES) == UNKNOWN_USAGE


def test_raw_json_can_be_read_too() -> None:
    body = msgspec.Raw(b'{"model": "mine", "usage": {"input_tokens": 1, "output_tokens": 0}}')
    assert usage_of(body, PRICES) == Usage(tokens=1, micro_usd=1, model="mine", is_priced=True)


counts = st.integers() | st.integers(0, 10**13) | st.none() | st.floats() | st.text(max_size=3)
names = st.sampled_from(
    [
        "prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens",
        "cache_creation_input_tokens", "cache_read_input_tokens", "cached_tokens",
        "prompt_tokens_details", "input_tokens_details", "usage", "model", "message", "response",
    ]
)  # fmt: skip
anything = st.recursive(
    counts | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=6),
    max_leaves=12,
)
usages = st.dictionaries(names, counts | st.dictionaries(names, counts, max_size=2), max_size=8)
bodies = st.builds(
    lambda usage, model: {"usage": usage, "model": model}, usages | anything, anything
)


@settings(deadline=None, max_examples=300)
@given(body=bodies | anything, as_event=st.booleans())
def test_no_answer_raises_and_what_is_known_can_be_booked(body: object, as_event: bool) -> None:
    usage = usage_of(events(body), PRICES) if as_event else read(body)
    assert usage.tokens is None or 0 <= usage.tokens <= MAX_RESERVATION_TOKENS
    assert usage.micro_usd is None or 0 <= usage.micro_usd <= MAX_RESERVATION_MICRO_USD


@settings(deadline=None)
@given(body=st.binary(max_size=200), position=st.integers(0, 200))
def test_no_bytes_raise(body: bytes, position: int) -> None:
    assert usage_of(body[:position] + b'"usage"' + body[position:], PRICES) == UNKNOWN_USAGE


@pytest.mark.parametrize(
    ("result", "is_told"),
    [
        ({"usage": {"units": 7}}, True),
        ({"usage": {}}, False),
        ({"usage": None}, False),
        ({"usage": "headgate [OPTIONS]"}, False),
        ({"text": "usage"}, False),
        ({"stdout": '{"usage": {"units": 7}}', "stderr": ""}, True),
        ({"stdout": "usage: ls", "stderr": ""}, False),
        (["usage"], False),
    ],
)
def test_usage_of_another_shape_is_noticed(result: object, is_told: bool) -> None:
    assert tells_unknown_usage(msgspec.json.encode(result)) is is_told


CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"usage"}}],"usage":null}'
USAGE_CHUNK = b'data: {"choices":[],"usage":{"prompt_tokens":20,"completion_tokens":5}}'


@given(
    st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]), st.lists(st.integers(0, 400)), st.booleans()
)
def test_a_stream_without_its_usage_is_the_same_wherever_it_is_cut(
    end: bytes, cuts: list[int], is_ended: bool
) -> None:
    events = [CHUNK, b": waiting", CHUNK, USAGE_CHUNK, b"data: [DONE]"]
    whole = end.join(events) + (end if is_ended else b"")
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    hider = UsageHider()
    pieces = [whole[first:last] for first, last in itertools.pairwise(places)]
    shown = b"".join([hider.feed(piece) for piece in pieces]) + hider.finish()
    assert shown == whole.replace(USAGE_CHUNK + end, b"")


def test_an_event_that_is_too_long_goes_on_and_the_next_is_looked_at() -> None:
    hider = UsageHider()
    long = b'data: {"text":"' + b"x" * MAX_LINE_BYTES
    assert hider.feed(long) == long
    assert (
        hider.feed(b'"}\n\n' + USAGE_CHUNK + b"\n\n" + CHUNK + b"\n\n")
        == b'"}\n\n' + CHUNK + b"\n\n"
    )
    assert hider.finish() == b""


def test_usage_at_the_end_of_a_stream_that_is_cut_off_is_hidden_too() -> None:
    hider = UsageHider()
    assert hider.feed(USAGE_CHUNK) + hider.finish() == b""
