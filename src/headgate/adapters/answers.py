"""What an answer says was used, read from its bytes while they pass by.

Rule: the bytes go to whoever asked as they come; what is kept of them is bounded. Of a stream that
is one line and the counts, of another body the body, up to a limit. What was not read to its end,
or cannot be read, leaves the usage unknown, or at least so much.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from headgate.core.tasks.outcomes import UNKNOWN_USAGE, Usage
from headgate.providers.prices import PriceList
from headgate.providers.usage import StreamedUsage, usage_of

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_LINE_BYTES = 8 * 1024 * 1024
READABLE_CODINGS = ("gzip", "deflate", "identity")
"""The content codings that can be read here; a request that allows others is kept to these."""

_PIECE_BYTES = 64 * 1024
_DETECT_HEADER = 32 + zlib.MAX_WBITS


class AnswerReader:
    """Reads along with one answer."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        coding = headers.get("content-encoding", "identity").strip().lower()
        self._inflater = None
        if coding in {"gzip", "deflate"}:
            self._inflater = zlib.decompressobj(_DETECT_HEADER)
        self._is_readable = coding in READABLE_CODINGS
        kind = headers.get("content-type", "").lower()
        self._content: _Lines | _Body | None = None
        if kind.startswith("text/event-stream"):
            self._content = _Lines()

    def feed(self, chunk: bytes) -> None:
        """Read the next bytes, as they came over the wire."""
        if not self._is_readable:
            return
        if self._inflater is None:
            self._read(chunk)
            return
        try:
            self._inflate(self._inflater, chunk)
        except zlib.error:
            self._is_readable = False

    def usage(self, prices: PriceList, *, priced_as: str) -> tuple[Usage, bool]:
        """Return what was used as far as it is known, and whether that is all of it."""
        if not self._is_readable or self._content is None:
            return UNKNOWN_USAGE, False
        return self._content.usage(prices, priced_as)

    def _inflate(self, inflater: zlib._Decompress, chunk: bytes) -> None:
        while chunk:
            self._read(inflater.decompress(chunk, _PIECE_BYTES))
            chunk = inflater.unconsumed_tail

    def _read(self, piece: bytes) -> None:
        if self._content is None:
            # Some gateways send events under another type, or none; JSON begins otherwise.
            piece = piece.lstrip()
            if not piece:
                return
            self._content = _Body() if piece.startswith(b"{") else _Lines()
        self._content.feed(piece)


class _Body:
    """A body that is one JSON value."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._bytes = 0

    def feed(self, piece: bytes) -> None:
        self._bytes += len(piece)
        if self._bytes <= MAX_BODY_BYTES:
            self._parts.append(piece)
        else:
            self._parts.clear()

    def usage(self, prices: PriceList, priced_as: str) -> tuple[Usage, bool]:
        usage = usage_of(b"".join(self._parts), prices, priced_as=priced_as)
        return usage, True


class _Lines:
    """A body of server-sent events."""

    def __init__(self) -> None:
        self._streamed = StreamedUsage()
        self._line = bytearray()
        self._is_skipping = False

    def feed(self, piece: bytes) -> None:
        for part in piece.splitlines(keepends=True):
            is_ended = part.endswith((b"\n", b"\r"))
            if len(self._line) + len(part) > MAX_LINE_BYTES:
                self._is_skipping = True
                self._line.clear()
            if not self._is_skipping:
                self._line += part
            if is_ended:
                self._end_line()

    def usage(self, prices: PriceList, priced_as: str) -> tuple[Usage, bool]:
        self._end_line()
        return self._streamed.usage(prices, priced_as=priced_as), self._streamed.is_over

    def _end_line(self) -> None:
        self._streamed.read(bytes(self._line).rstrip(b"\r\n"))
        self._line.clear()
        self._is_skipping = False
