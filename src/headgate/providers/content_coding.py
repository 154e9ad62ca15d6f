"""Content codings of answers: decoded in slices, within bounds on what comes in and what comes out.

An answer comes from somebody else, and a few hundred bytes of it may stand for gigabytes. So
nothing decodes an answer but `ContentDecoder`: it takes one coding, does a bounded piece of work a
call, and gives up when an answer passes a bound on its size, on how much it grows, on its parts or
on the processor time that it takes. `gzip` and `deflate` are what Python itself decodes; others are
never asked for, and refused.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Mapping

READABLE_CODINGS = ("gzip", "deflate", "identity")
ACCEPT_ENCODING = "gzip, deflate"
"""What requests say that they take."""

SLICE_INPUT_BYTES = 4 << 10
SLICE_OUTPUT_BYTES = 64 << 10
"""What one call decodes at most: well under a millisecond, whatever the bytes are."""

MAX_RATIO = 256
"""How much longer than its coded form an answer may be, beyond `FREE_OUTPUT_BYTES`.

Logs and tables of one repeated row reach a hundred; a bomb of zeros has a thousand.
"""
FREE_OUTPUT_BYTES = 1 << 20
"""Small answers may grow by any ratio: they do no harm, and some are mostly blanks."""
MAX_MEMBERS = 1_024
"""How many gzip members an answer may have; each costs, even if nothing is in it."""
MAX_DECODE_SECONDS = 5.0
"""Processor time for one answer; 64 MiB of ordinary text take about a quarter of a second."""

_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_GZIP_FIRST = 0x1F
_MOST_READ = 1_000
_MOST_SHOWN = 60


class ContentCodingError(Exception):
    """An answer cannot be decoded; the text says why.

    `is_damaged` tells a broken answer, which may be whole the next time, from one that passed a
    bound or has a coding that nobody asked for.
    """

    def __init__(self, problem: str, *, is_damaged: bool = False) -> None:
        super().__init__(problem)
        self.is_damaged = is_damaged


def codings_of(headers: Mapping[str, str]) -> list[str]:
    """Return the codings of an answer in the order in which they were applied."""
    value = headers.get("content-encoding", "")[:_MOST_READ]
    names = (name.strip(" \t").lower().removeprefix("x-") for name in value.split(","))
    return [name for name in names if name not in {"", "identity"}]


def check_one_coding(headers: Mapping[str, str]) -> None:
    """Refuse an answer with several codings: each may make a thousand bytes of one."""
    codings = codings_of(headers)
    if len(codings) > 1:
        problem = f"it has more than one Content-Encoding ({_shown(codings)})"
        raise ContentCodingError(problem)


def coding_of(headers: Mapping[str, str]) -> str:
    """Return the one coding of an answer: `identity`, `gzip` or `deflate`; refuse all others."""
    check_one_coding(headers)
    codings = codings_of(headers)
    if not codings:
        return "identity"
    if codings[0] not in READABLE_CODINGS:
        problem = f"its Content-Encoding is {_shown(codings)}; requests accept {ACCEPT_ENCODING}"
        raise ContentCodingError(problem)
    return codings[0]


def _shown(codings: list[str]) -> str:
    text = ", ".join(codings)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


class TooLongError(ContentCodingError):
    """An answer is longer than whoever reads it takes."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"it is larger than {max_bytes} bytes")


class ContentDecoder:
    """Decodes one answer, or any stream of bytes, a slice at a time.

    `feed` takes the next bytes and returns what one slice of work makes of all that waits; while
    `has_more`, feed it nothing to go on. `finish` says that nothing comes any more. All three raise
    `ContentCodingError`, after which the decoder is of no use. It may go from one thread to
    another, and belongs to one at a time.
    """

    def __init__(
        self,
        coding: str,
        *,
        max_bytes: int,
        max_ratio: int = MAX_RATIO,
        max_seconds: float = MAX_DECODE_SECONDS,
    ) -> None:
        self._coding = coding
        self._max_bytes = max_bytes
        # A coded form is longer than what it stands for by a few bytes a block at the most.
        self._max_input_bytes = max_bytes + max_bytes // 64 + SLICE_INPUT_BYTES
        self._max_ratio = max_ratio
        self._max_seconds = max_seconds
        self._waiting = bytearray()
        self._inflater: zlib._Decompress | None = None
        self._is_full = False
        self._members = 0
        self._seconds = 0.0
        self._bytes_in = 0
        self._bytes_out = 0

    @property
    def has_more(self) -> bool:
        """Whether there is something left to decode before further bytes come."""
        return self._is_full or bool(self._waiting)

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes, and return what one slice of work makes of what is there."""
        self._bytes_in += len(data)
        if self._coding == "identity":
            self._bytes_out += len(data)
            if self._bytes_out > self._max_bytes:
                raise TooLongError(self._max_bytes)
            return data
        if self._bytes_in > self._max_input_bytes:
            raise TooLongError(self._max_bytes)
        self._waiting += data
        if not self.has_more:
            return b""
        started = time.thread_time()
        piece = self._inflated()
        self._seconds += time.thread_time() - started
        self._bytes_out += len(piece)
        self._check_bounds()
        return piece

    def feed_many(
        self, data: bytes, *, max_bytes: float = math.inf, seconds: float = math.inf
    ) -> bytes:
        """Do slices of work until there is nothing to do, or one of the bounds is reached."""
        ends = time.perf_counter() + seconds
        made = bytearray(self.feed(data))
        while self.has_more and len(made) < max_bytes and time.perf_counter() < ends:
            made += self.feed(b"")
        return bytes(made)

    def finish(self) -> None:
        """Refuse an answer that ends before its coded form does."""
        is_begun = self._inflater is not None and not self._inflater.eof
        if is_begun or self.has_more:
            problem = f"its {self._coding} data stops in the middle"
            raise ContentCodingError(problem, is_damaged=True)

    def _inflated(self) -> bytes:
        inflater = self._inflater
        if inflater is None or inflater.eof:
            inflater = self._next_inflater()
        if inflater is None:
            return b""
        taken = bytes(self._waiting[:SLICE_INPUT_BYTES])
        del self._waiting[:SLICE_INPUT_BYTES]
        try:
            piece = inflater.decompress(taken, SLICE_OUTPUT_BYTES)
        except zlib.error as error:
            # Behind a number and what it was doing.
            raise self._damaged(str(error).rpartition(": ")[2]) from None
        self._waiting[:0] = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
        self._is_full = len(piece) == SLICE_OUTPUT_BYTES and not inflater.eof
        self._inflater = inflater
        return piece

    def _next_inflater(self) -> zlib._Decompress | None:
        """Return what decodes from here on; None if only padding follows the end of gzip data."""
        if self._inflater is not None:
            # Some tools fill up a block with zeros, and some write one member after the other.
            padding = len(self._waiting) - len(self._waiting.lstrip(b"\0"))
            del self._waiting[:padding]
            if not self._waiting:
                return None
            if self._coding != "gzip" or self._waiting[0] != _GZIP_FIRST:
                raise self._damaged("something follows its end")
        self._members += 1
        if self._members > MAX_MEMBERS:
            problem = f"its gzip data has more than {MAX_MEMBERS} members"
            raise ContentCodingError(problem)
        if self._coding == "gzip":
            return zlib.decompressobj(_GZIP_WINDOW)
        # Servers write `deflate` with the header of zlib or without; none writes a first block
        # that looks like that header.
        is_zlib = self._waiting[0] & 0x0F == zlib.DEFLATED
        return zlib.decompressobj(zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)

    def _check_bounds(self) -> None:
        if self._bytes_out > self._max_bytes:
            raise TooLongError(self._max_bytes)
        taken = self._bytes_in - len(self._waiting)
        if self._bytes_out > max(FREE_OUTPUT_BYTES, self._max_ratio * taken):
            problem = f"its {self._coding} data grows more than {self._max_ratio} times"
            raise ContentCodingError(problem)
        if self._seconds > self._max_seconds:
            problem = f"its {self._coding} data takes more than {self._max_seconds:g} s to decode"
            raise ContentCodingError(problem)

    def _damaged(self, reason: str) -> ContentCodingError:
        problem = f"its {self._coding} data is damaged: {reason}"
        return ContentCodingError(problem, is_damaged=True)
