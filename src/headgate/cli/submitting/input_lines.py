"""Lines of standard input, in batches that are full or that nothing follows soon.

Rule: at most one batch and one line are kept. A line that is too long becomes a problem that has
its number, and the rest of it is passed over.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from typing import NamedTuple

MOST_LINES = 50
MOST_LINE_BYTES = 1_000_000
MOST_BATCH_BYTES = 700_000
IDLE_SECONDS = 0.1
PIECE_BYTES = 64 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_STANDARD_INPUT = 0


class Line(NamedTuple):
    """One line, counted from 1; `problem` if it cannot be a task."""

    number: int
    content: bytes
    problem: str = ""


def line_batches(source: int = _STANDARD_INPUT) -> Iterator[list[Line]]:
    """Give the lines of a file descriptor that are not empty, up to 50 at a time."""
    batch: list[Line] = []
    size = 0
    for line in _lines(source):
        if line is not None and (batch and size + len(line.content) > MOST_BATCH_BYTES):
            yield batch
            batch, size = [], 0
        if line is not None:
            batch.append(line)
            size += len(line.content)
        if batch and (line is None or len(batch) == MOST_LINES):
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _lines(source: int) -> Iterator[Line | None]:
    """Give lines as they come, and None whenever no further one is there soon."""
    number, rest, is_passed_over = 0, b"", False
    for piece in _unmarked(_pieces(source)):
        if piece is None:
            yield None
            continue
        *complete, rest = (rest + piece).split(b"\n")
        for content in complete:
            number += 1
            if is_passed_over:
                is_passed_over = False
            elif content.strip():
                yield _line(number, content)
        if len(rest) > MOST_LINE_BYTES:
            if not is_passed_over:
                yield _line(number + 1, rest)
            rest, is_passed_over = b"", True
    if rest.strip() and not is_passed_over:
        yield _line(number + 1, rest)


def _line(number: int, content: bytes) -> Line:
    if len(content) > MOST_LINE_BYTES:
        return Line(number, b"", f"the line has more than {MOST_LINE_BYTES} bytes")
    return Line(number, content)


def _unmarked(pieces: Iterator[bytes | None]) -> Iterator[bytes | None]:
    """Pass pieces on without a byte order mark before the first; it may be cut anywhere."""
    begin = b""
    for piece in pieces:
        begin += piece or b""
        if len(begin) >= len(BYTE_ORDER_MARK) or not BYTE_ORDER_MARK.startswith(begin):
            break
    yield begin.removeprefix(BYTE_ORDER_MARK)
    yield from pieces


def _pieces(source: int) -> Iterator[bytes | None]:
    while True:
        ready, _, _ = select.select([source], [], [], IDLE_SECONDS)
        if not ready:
            yield None
            select.select([source], [], [])
        piece = os.read(source, PIECE_BYTES)
        if not piece:
            return
        yield piece
