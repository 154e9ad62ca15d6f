"""The items of steps with `foreach`: listed in the file, or the lines of a JSONL file.

A file is read once before the run, line by line, and every line is checked. Rule: of a file only
the offsets of its lines are kept; an item is read again whenever it is asked for, from a copy that
belongs to the run, so that a resume sees the same items.
"""

from __future__ import annotations

import os
import stat
import weakref
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

import msgspec

from headgate.core.texts.nesting import is_deeper
from headgate.errors import StoreError, WorkflowError
from headgate.workflow.graph import ordered
from headgate.workflow.workflow import FileItems, ListItems, StepItems, Workflow

MAX_RUNS = 1_000_000
MAX_FILE_BYTES = 1 << 30
MAX_LINE_BYTES = 1 << 20
MAX_DEPTH = 200

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TOO_DEEP = f"is nested deeper than {MAX_DEPTH} levels; write it more simply"
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)


class ItemSource(Protocol):
    """Items by their number."""

    @property
    def count(self) -> int:
        """How many there are."""

    def item(self, index: int) -> Any:  # noqa: ANN401
        """Return one item as a JSON value."""


class ListedItems:
    """Items that the workflow's file lists."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values = values

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._values)

    def item(self, index: int) -> Any:  # noqa: ANN401
        """Return one item."""
        return self._values[index]


class LineItems:
    """The lines of a JSONL file, of which only the places are kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("Q")
        self._lengths = array("L")
        with _opened(path) as file:
            for start, line in _lines(file, path):
                self._starts.append(start)
                self._lengths.append(len(line))
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._starts)

    def item(self, index: int) -> Any:  # noqa: ANN401
        """Read one item; `StoreError` if the file is not what it was."""
        line = os.pread(self._descriptor, self._lengths[index], self._starts[index])
        try:
            return msgspec.json.decode(line)
        except _UNREADABLE:
            problem = f"{self._path}: was changed after it was read; start a new run"
            raise StoreError(problem) from None


def load_items(workflow: Workflow, *, copies: Path | None) -> Mapping[str, ItemSource]:
    """Read and check the items of every step with `foreach`, by the id of the step.

    `copies` is a folder of the run: files are copied there, and a copy that is there already is
    read instead of the file. Without one the files themselves are read, as for a dry run.
    """
    loaded: dict[str, ItemSource] = {}
    files: dict[Path, ItemSource] = {}
    for position, step in enumerate(workflow.steps):
        match step.foreach:
            case ListItems(values=values):
                loaded[step.id] = ListedItems(values)
            case FileItems(path=path):
                if path not in files:
                    files[path] = _file_items(workflow, position, path, copies)
                loaded[step.id] = files[path]
    for step in ordered(workflow.steps):
        if isinstance(step.foreach, StepItems):
            loaded[step.id] = loaded[step.foreach.step]
    _check_total(workflow, loaded)
    return loaded


def _file_items(workflow: Workflow, position: int, path: Path, copies: Path | None) -> ItemSource:
    step_id = workflow.steps[position].id
    try:
        return LineItems(path if copies is None else _copied(path, copies, step_id))
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}; name a JSONL file"
        raise _wrong(workflow, position, problem) from None


def _wrong(workflow: Workflow, position: int, problem: str) -> WorkflowError:
    line, key = workflow.steps[position].line, f"steps[{position}].foreach"
    return WorkflowError(workflow.file, problem, line=line, key=key)


def _copied(path: Path, copies: Path, step_id: str) -> Path:
    """Return the copy of a file, made whole before it has its name."""
    copy = copies / f"items-{step_id}.jsonl"
    if copy.exists():
        return copy
    part = copies / f"items-{step_id}.part"
    try:
        with _opened(path) as source, part.open("wb") as target:
            for _, line in _lines(source, path):
                target.write(line + b"\n")
            target.flush()
            os.fsync(target.fileno())
        part.replace(copy)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    return copy


def _opened(path: Path) -> IO[bytes]:
    """Open a file of items; a pipe would be waited for, and can be read only once."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise WorkflowError(str(path), "is not a file; write the items into one")
    if about.st_size > MAX_FILE_BYTES:
        raise WorkflowError(str(path), f"has more than {MAX_FILE_BYTES:,} bytes; split it")
    return path.open("rb")


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Give where each line begins, and the line, once it is found to be JSON; skip empty ones."""
    offset = count = number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        start, number = offset, number + 1
        offset += len(line)
        if len(line) > MAX_LINE_BYTES:
            _refuse(path, number, f"has more than {MAX_LINE_BYTES:,} bytes; shorten it")
        if number == 1 and line.startswith(_BYTE_ORDER_MARK):
            start, line = start + len(_BYTE_ORDER_MARK), line[len(_BYTE_ORDER_MARK) :]
        if not line.strip():
            continue
        _check_line(line, path, number)
        count += 1
        if count > MAX_RUNS:
            _refuse(path, number, f"is more than {MAX_RUNS:,} items; split the file")
        yield start, line.rstrip(b"\r\n")


def _check_line(line: bytes, path: Path, number: int) -> None:
    try:
        value = msgspec.json.decode(line)
    except RecursionError:
        _refuse(path, number, _TOO_DEEP)
    except _UNREADABLE as error:
        _refuse(path, number, f"is not JSON: {error}; write one value a line")
    # Whoever reads it later may be deeper in calls of its own.
    if is_deeper(line, value, levels=MAX_DEPTH):
        _refuse(path, number, _TOO_DEEP)


def _check_total(workflow: Workflow, loaded: Mapping[str, ItemSource]) -> None:
    total = 0
    for position, step in enumerate(workflow.steps):
        total += loaded[step.id].count if step.foreach else 1
        if total > MAX_RUNS:
            problem = f"with this step the workflow has more than {MAX_RUNS:,} runs; split it"
            raise _wrong(workflow, position, problem)


def _refuse(path: Path, number: int, problem: str) -> NoReturn:
    raise WorkflowError(str(path), problem, line=number)
