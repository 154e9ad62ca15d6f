"""Usage that is read while an answer passes by: whole or in pieces, compressed or not, bounded."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.lifecycle import UNKNOWN_USAGE, Usage
from headgate.providers import usage
from headgate.providers.usage import ResponseReader, StreamedUsage
from inprocess.sdk import upstream
from inprocess.sdk.scene import COST, PRICES

STREAM = {"content-type": "text/event-stream"}
ANSWERS = [
    ("gpt-4o", {"content-type": "application/json"}, msgspec.json.encode(upstream.CHAT)),
    ("gpt-4o", STREAM, b"".join(upstream.CHAT_STREAM)),
    ("gpt-4o", STREAM, b"".join(upstream.CHAT_STREAM).replace(b"\n", b"\r\n")),
    ("gpt-4o", STREAM, b"".join(upstream.RESPONSE_STREAM)),
    ("claude-house", STREAM, b"".join(upstream.MESSAGE_STREAM)),
]
CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "identity": bytes,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
}


def read(chunks: list[bytes], headers: dict[str, str], model: str = "gpt-4o") -> tuple[Usage, bool]:
    reader = ResponseReader(headers)
    for chunk in chunks:
        reader.feed(chunk)
        while reader.has_more:
            reader.feed(b"")
    return reader.usage(PRICES, priced_as=model)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize(("model", "headers", "body"), ANSWERS)
@settings(max_examples=20)
@given(data=st.data())
def test_it_does_not_matter_how_an_answer_is_cut(
    data: st.DataObject, model: str, headers: dict[str, str], body: bytes, coding: str
) -> None:
    wire = CODINGS[coding](body)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    chunks = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    usage, is_all = read(chunks, {**headers, "content-encoding": coding}, model)
    assert (usage.micro_usd, usage.tokens, is_all) == (COST, upstream.TOKENS, True)


@pytest.mark.parametrize(("model", "headers", "body"), ANSWERS[1:])
@settings(max_examples=30)
@given(data=st.data())
def test_a_stream_that_ends_early_is_not_all(
    data: st.DataObject, model: str, headers: dict[str, str], body: bytes
) -> None:
    # The last event may lack its blank line, but nothing of itself.
    end = data.draw(st.integers(0, len(body.rstrip()) - 1))
    assert not read([body[:end]], headers, model)[1]


@given(st.lists(st.binary(max_size=200), max_size=20), st.sampled_from(["gzip", "identity", "br"]))
def test_nothing_that_comes_raises(chunks: list[bytes], coding: str) -> None:
    for kind in ("text/event-stream", "application/json"):
        usage, _ = read(chunks, {"content-type": kind, "content-encoding": coding})
        assert usage == UNKNOWN_USAGE


def test_a_coding_that_cannot_be_read_is_unknown() -> None:
    body = msgspec.json.encode(upstream.CHAT)
    assert read([body], {"content-encoding": "br"}) == (UNKNOWN_USAGE, False)


def test_a_long_line_is_left_out_and_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_LINE_BYTES", 1_000)
    chunks = [b"data: " + b"x" * 700, b"x" * 700, b"x" * 10, b"\n\n", *upstream.CHAT_STREAM]
    assert read(chunks, STREAM)[0].tokens == upstream.TOKENS


def test_a_body_that_is_too_long_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_BODY_BYTES", 10)
    body = msgspec.json.encode(upstream.CHAT)
    assert read([body[:8], body[8:]], {}) == (UNKNOWN_USAGE, True)


def test_of_a_long_stream_only_the_counts_are_kept() -> None:
    event = upstream.CHAT_STREAM[2]
    reader = ResponseReader(STREAM)
    tracemalloc.start()
    try:
        for _ in range(2_000):
            reader.feed(event)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 20 * len(event)


@pytest.mark.parametrize("line", [b'data: {"type": ["message_stop"]}', b"data: message_stop"])
def test_a_strange_last_event_is_none(line: bytes) -> None:
    streamed = StreamedUsage()
    streamed.read(line)
    assert not streamed.is_over
