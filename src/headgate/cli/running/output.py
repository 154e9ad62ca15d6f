"""Standard output during a run: the end of the run alone is written there.

Functions that steps call run in this process, and print. Rule: whatever they print, by any means,
is told like progress, and never gets between the lines of the end or into its JSON.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STANDARD_OUTPUT = 1
STANDARD_ERROR = 2
LONGEST_LINE_BYTES = 64 * 1024


class ToldStream(io.RawIOBase):
    """Tells what is written to it, line by line; threads may write at the same time."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell
        self._begun = b""
        self._lock = Lock()

    def writable(self) -> bool:
        """Say that it can be written to."""
        return True

    def fileno(self) -> int:
        """Return where a child process writes to that is given this stream."""
        return STANDARD_OUTPUT

    def write(self, content: ReadableBuffer, /) -> int:
        """Tell the lines that are whole; the rest of the last one is waited for."""
        data = bytes(content)
        with self._lock:
            *lines, self._begun = (self._begun + data).split(b"\n")
            if len(self._begun) > LONGEST_LINE_BYTES:
                lines, self._begun = [*lines, self._begun], b""
        for line in lines:
            self._tell(line.decode(errors="replace"))
        return len(data)

    def tell_rest(self) -> None:
        """Tell a last line that nobody has ended."""
        if self._begun:
            self.write(b"\n")


@contextmanager
def own_output(tell: Callable[[str], None]) -> Iterator[TextIO | None]:
    """Give the body what standard output was, and have `tell` hear all that goes there meanwhile.

    None stands for an output that is closed.
    """
    before = sys.stdout
    if before is None:
        yield None
        return
    told = ToldStream(tell)
    sys.stdout = io.TextIOWrapper(told, encoding="utf-8", errors="replace", write_through=True)
    try:
        with _descriptor_kept(before) as output:
            yield output
    finally:
        told.tell_rest()
        sys.stdout = before


@contextmanager
def _descriptor_kept(stream: TextIO) -> Iterator[TextIO]:
    """Have writes to the descriptor go to standard error, and give another stream to its file."""
    if not _is_standard(stream):
        yield stream
        return
    stream.flush()
    kept = os.dup(STANDARD_OUTPUT)
    elsewhere = os.open(os.devnull, os.O_WRONLY)
    # Without a standard error its number may belong to any file, such as a store.
    os.dup2(elsewhere if sys.stderr is None else STANDARD_ERROR, STANDARD_OUTPUT)
    os.close(elsewhere)
    output = open(kept, "w", encoding=stream.encoding, errors=stream.errors)  # noqa: PTH123, SIM115
    try:
        yield output
    finally:
        os.dup2(kept, STANDARD_OUTPUT)
        with suppress(OSError):
            output.close()


def _is_standard(stream: TextIO) -> bool:
    try:
        return stream.fileno() == STANDARD_OUTPUT
    except (OSError, ValueError):
        return False


def discard(output: TextIO | None) -> None:
    """Have a stream that cannot be written to forget what it holds, so that it can be closed."""
    if output is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output.fileno())
        os.close(nowhere)
