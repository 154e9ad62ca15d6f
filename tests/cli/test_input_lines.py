"""Lines of input come in batches that are bounded, whatever the input is."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.cli import submit_lines
from headgate.cli.submit_lines import MOST_LINES, line_batches


@contextmanager
def piped(pieces: list[bytes]) -> Iterator[int]:
    """Give the reading end of a pipe into which another thread writes."""
    reader, writer = os.pipe()

    def write() -> None:
        with os.fdopen(writer, "wb", buffering=0) as pipe:
            for piece in pieces:
                pipe.write(piece)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield reader
    finally:
        thread.join()
        os.close(reader)


def batches_of(*pieces: bytes) -> list[list[tuple[int, bytes]]]:
    with piped(list(pieces)) as source:
        return [[(line.number, line.content) for line in batch] for batch in line_batches(source)]


def test_a_batch_has_fifty_lines_at_most() -> None:
    batches = batches_of(b"{}\n" * 120)
    assert [len(batch) for batch in batches] == [MOST_LINES, MOST_LINES, 20]
    assert batches[2][-1] == (120, b"{}")


def test_empty_lines_are_counted_and_passed_over() -> None:
    assert batches_of(b"\n{}\n  \r\n[1]") == [[(2, b"{}"), (4, b"[1]")]]


@settings(deadline=None, max_examples=30)
@given(
    lines=st.lists(st.binary(max_size=8).map(lambda b: b.replace(b"\n", b"")), max_size=60),
    size=st.integers(1, 9),
)
def test_lines_do_not_depend_on_how_the_input_was_cut(lines: list[bytes], size: int) -> None:
    data = b"\n".join(lines)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    found = [line for batch in batches_of(*pieces) for line in batch]
    assert found == [(n, line) for n, line in enumerate(lines, 1) if line.strip()]


def test_a_line_that_is_too_long_is_told_of_once_and_the_next_one_is_read() -> None:
    long = b"x" * (submit_lines.MOST_LINE_BYTES + 200_000)
    with piped([b"{}\n", long, b"\n[2]\n"]) as source:
        lines = [line for batch in line_batches(source) for line in batch]
    assert [line.number for line in lines] == [1, 2, 3]
    assert lines[1].content == b""
    assert "more than" in lines[1].problem
    assert lines[2].content == b"[2]"


def test_a_batch_is_smaller_where_its_lines_are_long() -> None:
    batches = batches_of(*[b"x" * 300_000 + b"\n"] * 5)
    assert all(len(batch) <= 2 for batch in batches)
    assert sum(len(batch) for batch in batches) == 5


def test_a_line_is_not_kept_waiting_for_others() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"{}\n")
    batches = line_batches(reader)
    assert [line.content for line in next(batches)] == [b"{}"]
    os.write(writer, b"[2]\n")
    os.close(writer)
    assert [line.content for line in next(batches)] == [b"[2]"]
    assert list(batches) == []
    os.close(reader)
