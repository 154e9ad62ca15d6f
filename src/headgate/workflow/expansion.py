"""How the runs of all steps are numbered: each step has a range, in the order of the file.

Rule: nothing is kept for a run, only where the numbers of each step begin. A step with `foreach`
has as many runs as items, which may be none; any other has one.
"""

from __future__ import annotations

import os
import stat
import weakref
from array import array
from bisect import bisect_right
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

import msgspec

from headgate.core.text import is_deeper
from headgate.errors import StoreError, WorkflowError
from headgate.workflow.workflow import FileItems, ListItems, Step, StepItems, Workflow

# The order of steps: which go first, and whether any wait for each other in a circle.


def ordered(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return steps so that parents go first, and otherwise in the order of the file."""
    by_id = {step.id: step for step in steps}
    order = topological_order({step.id: step.depends_on for step in steps})
    return tuple(by_id[step_id] for step_id in order)


def topological_order(parents: Mapping[str, Iterable[str]]) -> list[str]:
    """Return names so that parents go first; those that wait in a circle are left out."""
    waiting_for = {name: len(set(before)) for name, before in parents.items()}
    children: dict[str, list[str]] = {name: [] for name in parents}
    for name, before in parents.items():
        for parent in set(before):
            children[parent].append(name)
    ready = deque(name for name, count in waiting_for.items() if count == 0)
    order: list[str] = []
    while ready:
        name = ready.popleft()
        order.append(name)
        for child in children[name]:
            waiting_for[child] -= 1
            if waiting_for[child] == 0:
                ready.append(child)
    return order


def circle_in(parents: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return a circle, each name before the one that it waits for; empty if there is none."""
    stuck = dict.fromkeys(name for name in parents)
    for name in topological_order(parents):
        del stuck[name]
    if not stuck:
        return ()
    # Whatever is stuck waits for something that is stuck, so this walk comes back to itself.
    name = next(iter(stuck))
    seen: dict[str, int] = {}
    walk: list[str] = []
    while name not in seen:
        seen[name] = len(walk)
        walk.append(name)
        name = next(parent for parent in parents[name] if parent in stuck)
    return tuple(walk[seen[name] :])


# The items of steps with `foreach`: listed in the file, or the lines of a JSONL file.
#
# A file is read once before the run, line by line, and every line is checked. Rule: of a file
# only the offsets of its lines are kept; an item is read again whenever it is asked for, from a
# copy that belongs to the run, so that a resume sees the same items.

MAX_RUNS = 1_000_000
MAX_FILE_BYTES = 1 << 30
MAX_LINE_BYTES = 1 << 20
MAX_DEPTH = 200

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
    """The lines of a JSONL file, of which only the offsets are kept."""

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
    copy = copy_of_items(copies, step_id)
    if copy.exists():
        return copy
    part = copies / f"items-{step_id}.part"
    try:
        with part.open("wb") as target:
            target.writelines(normal_lines(path))
            target.flush()
            os.fsync(target.fileno())
        part.replace(copy)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    return copy


def copy_of_items(folder: Path, step_id: str) -> Path:
    """Return the copy of a file of items, which is named after the first step that has it."""
    return folder / f"items-{step_id}.jsonl"


def normal_lines(path: Path) -> Iterator[bytes]:
    """Give the lines of a file of items as copies have them: without empty ones, and checked."""
    with _opened(path) as source:
        for _, line in _lines(source, path):
            yield line + b"\n"


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
        if number == 1 and line.startswith(BOM_UTF8):
            start, line = start + len(BOM_UTF8), line[len(BOM_UTF8) :]
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


class StepRun(msgspec.Struct, frozen=True):
    """One run of a step: which step it is, and the number of its item."""

    step: Step
    index: int


class Expansion:
    """The numbers of the runs of a workflow, from 0 to `total` - 1."""

    def __init__(self, workflow: Workflow, items: Mapping[str, ItemSource]) -> None:
        self._steps = workflow.steps
        counts = [items[step.id].count if step.foreach else 1 for step in workflow.steps]
        self._starts = array("L", accumulate(counts, initial=0))
        self._positions = {step.id: position for position, step in enumerate(workflow.steps)}
        self.total = self._starts[-1]

    def run_of(self, number: int) -> StepRun:
        """Return the step and the index of a run."""
        position = self.position_of(number)
        return StepRun(self._steps[position], number - self._starts[position])

    def position_of(self, number: int) -> int:
        """Return where in the file the step of a run stands, from 0."""
        if not 0 <= number < self.total:
            raise IndexError(number)
        # Steps without runs begin where the next one does, and the last of those has the run.
        return bisect_right(self._starts, number) - 1

    def runs_of(self, step_id: str) -> range:
        """Return the numbers of all runs of a step."""
        position = self._positions[step_id]
        return range(self._starts[position], self._starts[position + 1])

    def name_of(self, number: int) -> str:
        """Return a run as people read it: the id of its step, with `[index]` if it has items."""
        run = self.run_of(number)
        return f"{run.step.id}[{run.index}]" if run.step.foreach else run.step.id
