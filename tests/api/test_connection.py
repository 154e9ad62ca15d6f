"""A connection fed with pieces and noise, without a socket."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.fake_app import fake_app
from api.memory_transport import MemoryTransport, fed
from headgate.api.http.connection import (
    CHUNK_ALLOWANCE_BYTES,
    MAX_FRAMING_BYTES,
    MAX_HEAD_BYTES,
    Connection,
    Connections,
    Exchange,
)

BODY = b'{"agentId": "a", "action": "click"}'
SUBMIT = b"POST /tasks HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)
CHUNKED = (
    b"POST /tasks HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
)
LIST = b"GET /tasks?limit=1 HTTP/1.1\r\nHost: localhost\r\n\r\n"
STREAM = SUBMIT + LIST + CHUNKED + SUBMIT
UPGRADE = b"Connection: keep-alive, Upgrade\r\nUpgrade: h2c\r\n\r\n"
CHUNKED_HEAD = b"POST /tasks HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
ONE_CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
ONE_READ = 256 * 1024


def cut(text: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % len(text) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_answers_do_not_depend_on_how_the_requests_are_cut(places: list[int]) -> None:
    transport = asyncio.run(fed(cut(STREAM, places)))
    statuses = re.findall(rb"HTTP/1\.1 (\d+)", transport.written)
    positions = re.findall(rb'"position":(\d+)', transport.written)
    assert statuses == [b"202", b"200", b"202", b"202"]
    assert positions == [b"1", b"2", b"3"]


def wishing(request: bytes) -> bytes:
    """Return a request that would rather speak another protocol."""
    return request.replace(b"\r\n\r\n", b"\r\n" + UPGRADE, 1)


def statuses_of(pieces: list[bytes]) -> list[bytes]:
    return re.findall(rb"HTTP/1\.1 (\d+)", asyncio.run(fed(pieces)).written)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_a_wish_to_upgrade_changes_nothing(places: list[int]) -> None:
    stream = b"".join([wishing(request) for request in (SUBMIT, LIST, CHUNKED, LIST, SUBMIT)])
    transport = asyncio.run(fed(cut(stream + SUBMIT, places)))
    statuses = re.findall(rb"HTTP/1\.1 (\d+)", transport.written)
    assert statuses == [b"202", b"200", b"202", b"200", b"202", b"202"]
    assert re.findall(rb'"position":(\d+)', transport.written) == [b"1", b"2", b"3", b"4"]


def test_a_client_that_would_upgrade_and_asks_first_is_told_to_go_on_once() -> None:
    head, body = wishing(SUBMIT).split(b"\r\n\r\n", 1)
    asking = head + b"\r\nExpect: 100-continue\r\n\r\n"
    assert statuses_of([asking, body]) == [b"100", b"202"]


def test_a_bad_address_is_refused_whether_or_not_it_would_upgrade() -> None:
    bad = b"GET http://h:x/ HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert statuses_of([bad]) == statuses_of([wishing(bad)]) == [b"400"]


def submitting(body: bytes, *, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return SUBMIT.partition(b"Content-Length")[0] + b"content-length: %d\r\n\r\n%b" % (length, body)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 120)), min_size=2, max_size=6),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_a_head_that_is_sent_again_means_the_same_with_another_length(
    given: list[tuple[bool, int]], places: list[int]
) -> None:
    ends = [(b"}" if is_good else b"]") + b" " * spaces for is_good, spaces in given]
    stream = b"".join([submitting(BODY[:-1] + end) for end in ends])
    expected = [b"202" if is_good else b"400" for is_good, _ in given]
    assert statuses_of(cut(stream, places)) == expected


@pytest.mark.parametrize(
    ("again", "status"),
    [
        (submitting(b"", length=99_999_999), b"413"),
        (submitting(b"").replace(b"localhost", b"elsewhere"), b"421"),
        (submitting(BODY).replace(b": 35", b": 0x23"), b"400"),
        (submitting(BODY).replace(b": 35", b": 35, 35"), b"400"),
        (submitting(BODY).replace(b": 35", b": 35\r\ncontent-length: 35"), b"400"),
        (submitting(BODY).replace(b": 35", b": 35\r\ntransfer-encoding: chunked"), b"400"),
    ],
)
def test_a_head_that_is_almost_sent_again_is_read_anew(again: bytes, status: bytes) -> None:
    assert statuses_of([submitting(BODY), submitting(BODY), again]) == [b"202", b"202", status]


def test_long_heads_are_not_kept_while_their_connections_are_idle() -> None:
    more = b"X: %b\r\n" % (b"x" * 60_000)
    head = submitting(BODY).replace(b"content-length", more + b"content-length")

    async def scenario() -> int:
        shared, count = Connections(fake_app()), 40
        connections = []
        before = 0
        tracemalloc.start()
        try:
            for _ in range(count + 1):
                connection, transport = shared.new(), MemoryTransport()
                connection.connection_made(transport)
                place = head.index(b"\r\n\r\n") + 4
                for piece in (head[:place], head[place:]):
                    connection.data_received(piece)
                async with asyncio.timeout(10.0):
                    while not transport.written.endswith(b"}"):  # noqa: ASYNC110 - it has no event
                        await asyncio.sleep(0)
                assert b"HTTP/1.1 202" in transport.written
                connections.append(connection)
                if len(connections) == 1:
                    before = tracemalloc.get_traced_memory()[0]
            return (tracemalloc.get_traced_memory()[0] - before) // count
        finally:
            tracemalloc.stop()

    assert asyncio.run(scenario()) < 32 * 1024


@pytest.mark.parametrize(
    "sent",
    [b"", LIST, SUBMIT, SUBMIT[:-3], CHUNKED_HEAD, STREAM, wishing(SUBMIT), b"A" * 70_000],
    ids=["idle", "list", "submit", "half", "head", "several", "upgrade", "refused"],
)
@pytest.mark.parametrize("steps", [0, 30])
def test_what_a_lost_connection_had_is_freed_without_a_search_for_garbage(
    sent: bytes, steps: int
) -> None:
    def kept() -> int:
        return sum(isinstance(one, Connection | Exchange) for one in gc.get_objects())

    async def scenario() -> int:
        before = kept()
        connection = Connections(fake_app()).new()
        connection.connection_made(MemoryTransport())
        if sent:
            connection.data_received(sent)
        for _ in range(steps):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        del connection
        for _ in range(30):
            await asyncio.sleep(0)
        return kept() - before

    gc.disable()
    try:
        assert asyncio.run(scenario()) == 0
    finally:
        gc.enable()


def padded(before: bytes, after: bytes, *, size: int) -> bytes:
    return before + b"a" * (size - len(before) - len(after)) + after


def in_reads(text: bytes, *, size: int) -> list[bytes]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize("read_bytes", [1000, 65_536, ONE_READ])
@pytest.mark.parametrize(
    ("excess", "last"), [(0, b"200"), (1, b"431")], ids=["as long as may be", "one byte longer"]
)
@pytest.mark.parametrize("name", [b"X-Long: ", b"X-Long:" + b" " * 60_000, UPGRADE[:-2] + b"X: "])
@pytest.mark.parametrize("first", [b"", SUBMIT, CHUNKED], ids=["alone", "length", "chunked"])
def test_the_bound_of_a_head_is_exact(
    first: bytes, name: bytes, excess: int, last: bytes, read_bytes: int
) -> None:
    before = b"GET /tasks HTTP/1.1\r\nHost: localhost\r\n" + name
    head = padded(before, b"\r\n\r\n", size=MAX_HEAD_BYTES + excess)
    reads = in_reads(first + head, size=read_bytes)
    if last == b"431" and first and len(reads) == 1:
        # A refusal would overtake the answer before it, which says that it is the last.
        assert statuses_of(reads) == [b"202"]
    else:
        assert statuses_of(reads) == ([b"202"] if first else []) + [last]


@pytest.mark.parametrize("read_bytes", [1000, 65_536, ONE_READ])
@pytest.mark.parametrize(
    ("excess", "status"), [(0, b"202"), (1, b"400")], ids=["as long as may be", "one byte longer"]
)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ONE_CHUNK + b"0\r\nX-T: ", b"\r\n\r\n"),
        (ONE_CHUNK + b"0\r\n" + b"X: y\r\n" * 1000 + b"X: ", b"\r\n\r\n"),
        (ONE_CHUNK + b"0;x=", b"\r\n\r\n"),
        (b"%x;x=" % len(BODY), b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    ],
    ids=["long trailer", "many trailers", "last extension", "first extension"],
)
def test_what_comes_with_a_chunked_body_is_bounded(
    before: bytes, after: bytes, excess: int, status: bytes, read_bytes: int
) -> None:
    may_be = len(BODY) + MAX_FRAMING_BYTES + 2 * CHUNK_ALLOWANCE_BYTES
    reads = in_reads(CHUNKED_HEAD + padded(before, after, size=may_be + excess), size=read_bytes)
    assert statuses_of(reads) == [status]


def test_a_trailer_without_end_is_refused_when_it_has_passed_the_bound() -> None:
    reads = [CHUNKED_HEAD + ONE_CHUNK + b"0\r\nX-T: ", *[b"a" * 60_000] * 2]
    assert statuses_of(reads) == [b"400"]


def test_a_body_may_come_in_the_smallest_chunks() -> None:
    body = BODY + b" " * 20_000
    chunks = b"".join([b"1\r\n%c\r\n" % byte for byte in body])
    assert statuses_of([CHUNKED_HEAD + chunks + b"0\r\n\r\n" + LIST]) == [b"202", b"200"]


def test_empty_lines_before_a_request_are_passed_over_within_bounds() -> None:
    assert statuses_of([b"\r\n\r\n\r\n" + LIST]) == [b"200"]
    assert statuses_of([b"\r\n" * 50_000]) == [b"431"]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.binary(max_size=40) | st.sampled_from([SUBMIT, LIST, SUBMIT[:50], b"\r\n"])),
)
def test_noise_is_answered_in_the_one_shape_or_not_at_all(pieces: list[bytes]) -> None:
    transport = asyncio.run(fed(pieces))
    statuses = [int(text) for text in re.findall(rb"HTTP/1\.1 (\d+)", transport.written)]
    assert all(status in (200, 202, 400, 404, 405, 413, 415, 417, 431) for status in statuses)
    if statuses and statuses[-1] == 400:
        body = transport.written.rpartition(b"\r\n\r\n")[2]
        assert json.loads(body)["code"]
