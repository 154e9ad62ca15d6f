"""The journal of a run on a service: what was sent there, what was taken, and how it ended.

A line is written before a batch is sent, with the very bytes of it and the key that they go under;
a second one when the service has answered; a third for each task that has ended, with its result,
which the service forgets after a time. So a process that ends anywhere in between leaves behind
what the next one needs to go on, and to send nothing twice.

Rule: a line counts when it is on disk. One that a crash has cut off was never counted, and goes;
damage anywhere else is an error, because what was done could be done again. Lines are bounded, and
of a run that is large no more is in memory than where its lines lie.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headgate.errors import StoreError
from headgate.workflow.backend import StepTask, TaskState
from headgate.workflow.step_requests import result_value

MAX_LINE_BYTES = 80 * 2**20
"""More than any answer of a service can make: a client reads no more than 64 MiB."""

_ONLY_THE_OWNER = 0o600
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
_NULL = msgspec.Raw(b"null")


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="opened"):
    """Where the run is carried out; `keys` is how the keys of its requests begin.

    `within` is the budget around all scopes of the run, where the token is bound to one.
    """

    server: str
    keys: str
    within: str = ""


class SentOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a step in a batch; `is_needed` if a later step may ask for its result."""

    number: int
    generation: int
    is_needed: bool = True
    is_provisional: bool = False


class Sent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="sent"):
    """A batch that is about to be sent, at a time in Unix seconds."""

    key: str
    at: float
    orders: tuple[SentOrder, ...]
    body: msgspec.Raw


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="taken"):
    """The answer to a batch: an id for each order; an empty one means that it was not taken."""

    key: str
    task_ids: tuple[str, ...]


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="ended"):
    """A task that has ended, and what came of it."""

    task: StepTask
    result: msgspec.Raw = msgspec.field(default_factory=lambda: _NULL)


Entry = Opened | Sent | Taken | Ended


class Unfinished(NamedTuple):
    """A task that was taken, and whose end was not written down."""

    task: StepTask
    is_needed: bool


class _Location(NamedTuple):
    offset: int
    size: int


class _Write(NamedTuple):
    entries: Sequence[Entry]
    lines: list[bytes]
    done: asyncio.Future[None]


class Journal:
    """The journal in one file; whoever has the run holds it alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._size = 0
        self._is_broken = False
        self._waiting: list[_Write] = []
        self._flushing: asyncio.Task[None] | None = None
        self._ended: dict[tuple[int, int], _Location] = {}
        self.opened: Opened | None = None
        self.sent = 0
        """How many batches were written down."""
        self.pending: dict[str, Sent] = {}
        """Batches whose answer is not known, by their key."""
        self.unfinished: dict[int, Unfinished] = {}

    def open(self) -> None:
        """Read what is there, and cut off what a crash has left of a last line.

        Without a file there is nothing, and none is made before something is written.
        """
        if not self._path.exists():
            return
        with _kept_in(self._path):
            self._file = os.open(self._path, _FLAGS)
            with self._path.open("rb") as file:
                for number, line in enumerate(_lines(file, self._path), start=1):
                    if not self._read(line, number, is_last=not file.peek(1)):
                        break
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)

    async def write(self, *entries: Entry) -> None:
        """Write entries; they are on disk when this returns, or it raises `StoreError`."""
        lines = [msgspec.json.encode(entry) + b"\n" for entry in entries]
        if max(map(len, lines)) > MAX_LINE_BYTES:
            problem = f"a new line has more than {MAX_LINE_BYTES} bytes"
            raise self._damaged(problem)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Write(entries, lines, done))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        await done

    def ended(self) -> Iterator[StepTask]:
        """Give the tasks that have ended, of every generation."""
        for place in list(self._ended.values()):
            yield self._line(place).task

    def result(self, number: int, generation: int) -> Any:  # noqa: ANN401 - any JSON
        """Return the result of a task that has ended; None if there is none."""
        place = self._ended.get((number, generation))
        return None if place is None else result_value(self._line(place).result)

    async def close(self) -> None:
        """Let go of the file; what was handed over is written first."""
        if self._flushing is not None:
            await self._flushing
        self._is_broken = True
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self, line: bytes, number: int, *, is_last: bool) -> bool:
        """Take in a line; one that cannot be read is passed over if nothing follows it."""
        try:
            if not line.endswith(b"\n"):
                return False
            entry = _ENTRIES.decode(line)
        except (msgspec.MsgspecError, ValueError):
            if is_last:
                return False
            problem = f"line {number} is none of a journal"
            raise self._damaged(problem) from None
        self._note(entry, line)
        return True

    async def _flush(self) -> None:
        try:
            while self._waiting:
                writes, self._waiting = self._waiting, []
                await self._write_all(writes)
        finally:
            self._flushing = None

    async def _write_all(self, writes: list[_Write]) -> None:
        data = b"".join(line for write in writes for line in write.lines)
        try:
            await asyncio.to_thread(self._append, data)
        except StoreError as error:
            for write in writes:
                if not write.done.done():
                    write.done.set_exception(StoreError(str(error)))
            return
        for write in writes:
            for entry, line in zip(write.entries, write.lines, strict=True):
                self._note(entry, line)
            if not write.done.done():
                write.done.set_result(None)

    def _append(self, data: bytes) -> None:
        if self._is_broken:
            problem = f"{self._path} takes no more lines; resume the run"
            raise StoreError(problem)
        try:
            with _kept_in(self._path):
                if self._file < 0:
                    self._file = _created(self._path)
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._file, rest) :]
                os.fsync(self._file)
        except StoreError:
            # What a failed sync has kept is not known, so nothing may follow it.
            self._is_broken = True
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise

    def _note(self, entry: Entry, line: bytes) -> None:
        match entry:
            case Opened():
                self.opened = entry
            case Sent(key=key):
                self.pending[key] = entry
                self.sent += 1
            case Taken():
                self._note_taken(entry)
            case Ended(task=task):
                self.unfinished.pop(task.number, None)
                self._ended[task.number, task.generation] = _Location(self._size, len(line))
        self._size += len(line)

    def _note_taken(self, entry: Taken) -> None:
        sent = self.pending.pop(entry.key, None)
        if sent is None:
            problem = f"it has an answer to {entry.key}, which was not sent"
            raise self._damaged(problem)
        for order, task_id in zip(sent.orders, entry.task_ids, strict=True):
            if task_id:
                task = queued_task(order, task_id)
                self.unfinished[order.number] = Unfinished(task, order.is_needed)

    def _damaged(self, problem: str) -> StoreError:
        return StoreError(f"{self._path}: {problem}; begin the run anew")

    def _line(self, place: _Location) -> Ended:
        with _kept_in(self._path):
            line = os.pread(self._file, place.size, place.offset)
        entry = _ENTRIES.decode(line)
        assert isinstance(entry, Ended), entry  # noqa: S101 - only such locations are noted
        return entry


def queued_task(order: SentOrder, task_id: str) -> StepTask:
    """Return what is known of a task that was just taken."""
    return StepTask(
        number=order.number,
        generation=order.generation,
        task_id=task_id,
        state=TaskState.QUEUED,
        is_provisional=order.is_provisional,
    )


_ENTRIES: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def _lines(file: BufferedReader, path: Path) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            problem = f"{path}: a line has more than {MAX_LINE_BYTES} bytes; begin the run anew"
            raise StoreError(problem)
        yield line


@contextmanager
def _kept_in(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        problem = f"{path} cannot be kept: {why}; see to that, then resume the run"
        raise StoreError(problem) from error


def _created(path: Path) -> int:
    file = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, _ONLY_THE_OWNER)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return file
