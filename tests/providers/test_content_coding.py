"""Content codings of answers: what is decoded, what is refused, and how much work a slice is."""

from __future__ import annotations

import gzip
import random
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headgate.providers.content_coding import (
    FREE_OUTPUT_BYTES,
    MAX_MEMBERS,
    MAX_RATIO,
    SLICE_INPUT_BYTES,
    SLICE_OUTPUT_BYTES,
    ContentCodingError,
    ContentDecoder,
    TooLongError,
    coding_of,
)

MIB = 1 << 20


gzipped = partial(gzip.compress, mtime=0)


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "identity": ("identity", bytes),
    "gzip": ("gzip", gzipped),
    "stored gzip": ("gzip", lambda data: gzipped(data, compresslevel=0)),
    "padded gzip": ("gzip", lambda data: gzipped(data) + b"\0" * 600),
    "zlib": ("deflate", zlib.compress),
    "raw deflate": ("deflate", raw_deflate),
}


def decoded(chunks: list[bytes], coding: str, max_bytes: int = 16 * MIB) -> bytes:
    """Feed a decoder as every reader does, and see that no slice is larger than one may be."""
    decoder = ContentDecoder(coding, max_bytes=max_bytes)
    made = bytearray()
    for chunk in chunks:
        made += decoder.feed(chunk)
        while decoder.has_more:
            piece = decoder.feed(b"")
            assert len(piece) <= SLICE_OUTPUT_BYTES
            made += piece
    decoder.finish()
    return bytes(made)


@pytest.mark.parametrize("name", CODINGS)
@given(data=st.data())
def test_what_was_coded_comes_out_however_it_is_cut(name: str, data: st.DataObject) -> None:
    coding, coded = CODINGS[name]
    body = data.draw(st.binary(max_size=3_000)) * data.draw(st.integers(1, 100))
    wire = coded(body)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    chunks = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    assert decoded(chunks, coding) == body


def test_gzip_members_follow_one_another() -> None:
    wire = gzipped(b"one, ") + gzipped(b"") + gzipped(b"two")
    assert decoded([wire], "gzip") == b"one, two"
    assert decoded([wire[i : i + 1] for i in range(len(wire))], "gzip") == b"one, two"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "identity"])
def test_an_empty_body_needs_no_coding(coding: str) -> None:
    assert decoded([], coding) == b""


BODY = b'{"ok": true}' * 100
DAMAGED = [
    ("gzip", b"abc", "incorrect header check"),
    ("gzip", gzipped(BODY)[:-1], "stops in the middle"),
    ("gzip", gzipped(BODY)[:5], "stops in the middle"),
    ("gzip", gzipped(BODY)[:-8] + bytes(8), "incorrect data check"),
    ("gzip", gzipped(BODY) + b"x", "something follows its end"),
    ("gzip", gzipped(BODY) + b"\x1f", "stops in the middle"),
    ("gzip", gzipped(BODY) + b"\x1f\x8bxx", "unknown compression method"),
    ("gzip", zlib.compress(BODY), "incorrect header check"),
    ("deflate", gzipped(BODY), "damaged"),
    ("deflate", zlib.compress(BODY)[:-4], "stops in the middle"),
    ("deflate", raw_deflate(BODY) + b"more", "something follows its end"),
    ("deflate", b"\x07", "invalid block type"),
]


@pytest.mark.parametrize(("coding", "wire", "said"), DAMAGED)
def test_a_damaged_answer_is_refused_and_may_be_whole_next_time(
    coding: str, wire: bytes, said: str
) -> None:
    for chunks in ([wire], [wire[i : i + 1] for i in range(len(wire))]):
        with pytest.raises(ContentCodingError, match=said) as caught:
            decoded(chunks, coding)
        assert caught.value.is_damaged
        assert coding in str(caught.value)


@cache
def zeros(coding: str) -> bytes:
    body = bytes(8 * MIB)
    return gzipped(body) if coding == "gzip" else zlib.compress(body)


def too_many_members(_: str) -> bytes:
    return gzipped(b"") * (MAX_MEMBERS + 1)


BOMBS = [
    ("gzip", zeros, "grows more than 256 times"),
    ("deflate", zeros, "grows more than 256 times"),
    ("gzip", too_many_members, "more than 1024 members"),
]


@pytest.mark.parametrize(("coding", "wire", "said"), BOMBS)
def test_a_bomb_is_refused_for_good(coding: str, wire: Callable[[str], bytes], said: str) -> None:
    with pytest.raises(ContentCodingError, match=said) as caught:
        decoded([wire(coding)], coding, max_bytes=1 << 40)
    assert not caught.value.is_damaged


@pytest.mark.parametrize(
    ("coding", "wire"),
    [
        ("identity", bytes(101)),
        ("gzip", gzipped(bytes(101))),
        # Nothing comes out of these, and they are read no longer than one that is not coded.
        ("deflate", b"\0\0\0\xff\xff" * 10_000),
    ],
)
def test_nobody_gets_more_than_fits(coding: str, wire: bytes) -> None:
    with pytest.raises(TooLongError, match="larger than 100 bytes"):
        decoded([wire], coding, max_bytes=100)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "identity"])
def test_what_just_fits_is_let_through(coding: str) -> None:
    body = random.Random(1).randbytes(100_000)
    _, coded = CODINGS["zlib" if coding == "deflate" else coding]
    wire = coded(body)
    assert decoded([wire], coding, max_bytes=len(body)) == body


def test_a_small_answer_may_grow_by_any_ratio() -> None:
    blanks = b" " * FREE_OUTPUT_BYTES
    assert len(blanks) > MAX_RATIO * len(gzipped(blanks))
    assert decoded([gzipped(blanks)], "gzip") == blanks


def test_a_large_answer_of_repeated_rows_is_no_bomb() -> None:
    rows = b"".join(b'{"id": %d, "state": "done", "cost": 0.25},\n' % i for i in range(200_000))
    assert decoded([gzipped(rows)], "gzip") == rows


def test_the_time_for_one_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1_000))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(clock)))
    decoder = ContentDecoder("gzip", max_bytes=MIB, max_seconds=2.0)
    wire = gzipped(random.Random(1).randbytes(5 * SLICE_INPUT_BYTES))
    decoder.feed(wire)
    decoder.feed(b"")
    with pytest.raises(ContentCodingError, match="more than 2 s"):
        decoder.feed(b"")


def bits(*fields: tuple[int, int]) -> list[int]:
    return [value >> place & 1 for value, width in fields for place in range(width)]


def packed(blocks: list[int]) -> bytes:
    whole = len(blocks) // 8 * 8
    return bytes(
        sum(bit << place for place, bit in enumerate(blocks[start : start + 8]))
        for start in range(0, whole, 8)
    )


_ONE_BIT_LENGTHS = [(1 if symbol in {18, 1} else 0, 3) for symbol in (
    16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15,
)]  # fmt: skip


def empty_tables() -> bytes:
    """Write blocks with tables for 286 symbols, and nothing in them: much work for no output."""
    block = bits(
        *((0, 1), (2, 2), (29, 5), (29, 5), (15, 4), *_ONE_BIT_LENGTHS),
        *((1, 1), (127, 7), (1, 1), (107, 7), (0, 1), (1, 1), (18, 7), (0, 1), (1, 1), (18, 7)),
        (0, 1),
    )
    return packed(block * 2_000)


COSTLY: dict[str, tuple[str, Callable[[], bytes]]] = {
    "zeros": ("gzip", lambda: zeros("gzip")),
    "noise": ("gzip", lambda: gzipped(random.Random(1).randbytes(MIB))),
    "members": ("gzip", lambda: gzipped(b"") * 1_000),
    "empty tables": ("deflate", empty_tables),
    "empty blocks": ("deflate", lambda: b"\0\0\0\xff\xff" * 10_000),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_slice_is_a_millisecond_of_work_whatever_the_bytes_are(name: str) -> None:
    coding, made = COSTLY[name]
    decoder = ContentDecoder(coding, max_bytes=1 << 40, max_ratio=1 << 20)
    took = []
    chunk = made()
    while chunk or decoder.has_more:
        before = time.thread_time()
        decoder.feed(chunk)
        took.append(time.thread_time() - before)
        chunk = b""
    # The median: a machine that others use makes single slices longer.
    assert sorted(took)[len(took) // 2] < 0.001


HEADERS = [
    ("", "identity"),
    ("identity", "identity"),
    ("identity, identity", "identity"),
    (" , ,", "identity"),
    ("gzip", "gzip"),
    ("GZip", "gzip"),
    ("x-gzip", "gzip"),
    ("\tdeflate ", "deflate"),
    ("identity, gzip", "gzip"),
]


@pytest.mark.parametrize(("value", "coding"), HEADERS)
def test_one_coding_is_read(value: str, coding: str) -> None:
    assert coding_of({"content-encoding": value}) == coding


def test_an_answer_without_the_header_is_not_coded() -> None:
    assert coding_of({}) == "identity"


REFUSED = [
    ("gzip, gzip", "more than one Content-Encoding (gzip, gzip)"),
    ("gzip,gzip,gzip,gzip", "more than one Content-Encoding (gzip, gzip, gzip, gzip)"),
    ("gzip, identity, deflate", "more than one Content-Encoding (gzip, deflate)"),
    ("br", "Content-Encoding is br; requests accept gzip, deflate"),
    ("zstd", "Content-Encoding is zstd; requests accept gzip, deflate"),
    ("gzip;q=1", "Content-Encoding is gzip;q=1; requests accept gzip, deflate"),
]


@pytest.mark.parametrize(("value", "said"), REFUSED)
def test_a_coding_that_was_not_asked_for_is_refused(value: str, said: str) -> None:
    with pytest.raises(ContentCodingError) as caught:
        coding_of({"content-encoding": value})
    assert said in str(caught.value)
    assert not caught.value.is_damaged


@given(st.text(max_size=50).map(lambda text: text * 100))
@example("gzip," * 20_000)
def test_no_header_makes_a_long_error(value: str) -> None:
    said = ""
    try:
        assert coding_of({"content-encoding": value}) in {"identity", "gzip", "deflate"}
    except ContentCodingError as error:
        said = str(error)
    assert len(said) < 150


@given(st.lists(st.binary(max_size=300), max_size=10), st.sampled_from(["gzip", "deflate"]))
def test_no_bytes_raise_anything_else(chunks: list[bytes], coding: str) -> None:
    with suppress(ContentCodingError):
        decoded([b"\x1f\x8b\x08\0", *chunks], coding)
    with suppress(ContentCodingError):
        decoded(chunks, coding)
