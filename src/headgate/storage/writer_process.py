"""A writer whose transactions run in a process of its own, so that they share no interpreter.

What waits is sent as one frame, which becomes one transaction, and is answered in its order. While
one frame is worked on the next is sent, so that the process need not wait; all that comes after
waits here, and is in the frame after that. So whatever goes first waits for two transactions at
most, and what is under way has a bound.

Rule: when the process ends, whatever it had not answered may be on disk or not, and its callers are
told so. What it was not sent yet waits for the next process, which is started at once; but if one
after the other ends as soon as it began, there is a wait between them, and nothing is taken.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeVar

import structlog

from headgate.core.retries import Backoff
from headgate.errors import LedgerUnavailableError
from headgate.storage.transaction import Database, Transaction
from headgate.storage.writer import (
    MAX_BATCH,
    MAX_QUEUED,
    Answer,
    Awaited,
    Batch,
    Job,
    Request,
    deliver,
    perform,
)

# Starts processes that write: one at a time for a writer, and one ahead if that is wanted.
#
# A process needs a moment until it can work. Whoever knows early that one will be needed has it
# started ahead, with the modules that it will use; it waits for its first order, and ends by itself
# if none comes before the program ends.

_PROGRAM = "from headgate.storage.writer_process import main; main({}, {}, {!r})"


class Child(NamedTuple):
    """A process, and this end of the socket to it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket


class ChildStarter:
    """Starts processes that keep `inherited` files open, and load `modules` at once."""

    def __init__(self, *, inherited: Sequence[int] = (), modules: Sequence[str] = ()) -> None:
        self._inherited = tuple(inherited)
        self._modules = tuple(modules)
        self._ahead: Child | None = None

    def start_ahead(self) -> None:
        """Start a process for whoever asks next."""
        self._ahead = self._start()

    def start(self) -> Child:
        """Return a process that waits for its first order."""
        child, self._ahead = self._ahead, None
        return self._start() if child is None else child

    def _start(self) -> Child:
        ours, theirs = socket.socketpair()
        try:
            process = self._popen(theirs.fileno())
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return Child(process, ours)

    def _popen(self, descriptor: int) -> subprocess.Popen[bytes]:
        program = _PROGRAM.format(descriptor, os.getpid(), self._modules)
        # The same modules under the same names, and nothing from the folder that it starts in.
        paths = os.pathsep.join(path for path in sys.path if path)
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            pass_fds=(descriptor, *self._inherited),
            # What a terminal sends to everybody in the foreground is for the parent alone.
            process_group=0,
        )


# Frames on a stream between two processes of this program: a length, then as many bytes.
#
# Both ends are ours, so a frame is taken as it comes; how large one becomes is for the sender. One
# that begins with a zero byte, as no job or answer does, is why a process ends.

RECEIVE_BYTES = 2**18
LAST_WORDS = b"\0"

_LENGTH = struct.Struct("<I")


def framed(payload: bytes) -> bytes:
    """Return a payload as it is sent."""
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Cuts what has arrived into frames, whatever the pieces were in which it came."""

    def __init__(self) -> None:
        self._arrived = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """Take a piece in, and return the frames that are complete."""
        arrived = self._arrived
        arrived += piece
        complete: list[bytes] = []
        start = 0
        while len(arrived) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(arrived, start)[0]
            if len(arrived) < end:
                break
            complete.append(bytes(arrived[begin:end]))
            start = end
        del arrived[:start]
        return complete


# What a process of its own needs to write for another one: a database, and a language for jobs.
#
# Rule: whatever is sent can be sent again to another process, and means the same there. So a job is
# data, or a function of a module with its arguments bound, and never something that was made on the
# spot.

Asked = TypeVar("Asked", bound=Job)


class Wire(Protocol):
    """How jobs and their answers are written as bytes, and read again."""

    def pack(self, job: Job) -> bytes:
        """Write one job; raise if it cannot be sent."""

    def unpack(self, packed: bytes) -> list[Job]:
        """Read jobs that were packed each by itself, and joined."""

    def pack_answers(self, jobs: Sequence[Job]) -> bytes:
        """Write what came of jobs, in their order."""

    def unpack_answers(self, packed: bytes, jobs: deque[Asked]) -> list[Asked]:
        """Read what came of the first of these jobs, take them out, and return them."""

    def join(self, packed: Sequence[bytes]) -> bytes:
        """Put jobs together that were packed each by itself."""


class Workplace(NamedTuple):
    """What is made in the process that writes."""

    database: Database
    wire: Wire


Recipe = Callable[[], Workplace]
"""Makes a workplace; it is sent to the process as its first order."""


log = structlog.get_logger("headgate.writer")

CLOSE_SECONDS = 5.0
MAX_FIRST = 1_024
MAX_FRAMES = 2
MAX_FRAME_BYTES = 4 * 2**20
SHORT_LIFE_SECONDS = 1.0
MAX_SHORT_LIVES = 3
RESTARTS = Backoff(base_seconds=0.1, max_seconds=5.0)

_ENDED = "the process that writes has ended; what was asked of it may be done or not, look again"
_AWAY = "the process that writes cannot be started; see its messages, it is tried again"


class ProcessWriter:
    """Writes for the callers of one event loop, in a process that ends with this one."""

    def __init__(
        self,
        recipe: Recipe,
        wire: Wire,
        starter: ChildStarter,
        *,
        max_queued: int = MAX_QUEUED,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._recipe = recipe
        self._wire = wire
        self._starter = starter
        self._max_queued = max_queued
        self._close_seconds = close_seconds
        self._first: deque[Awaited] = deque()
        self._waiting: deque[Awaited] = deque()
        self._line: _Line | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._short_lives = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False
        self._is_pumping = False
        self._owner = 0

    @property
    def pid(self) -> int | None:
        """The id of the process that writes."""
        return None if self._line is None else self._line.process.pid

    @property
    def queue_length(self) -> int:
        """How many calls wait for the next transaction; those in the one under way do not."""
        behind = 0 if self._line is None else self._line.waiting
        return len(self._first) + len(self._waiting) + behind

    def start(self) -> None:
        """Start the process, if it does not run."""
        if self._is_open:
            return
        self._owner, self._loop = os.getpid(), asyncio.get_running_loop()
        self._is_open, self._is_pumping, self._short_lives = True, False, 0
        self._spawn()

    async def close(self) -> None:
        """Finish what is queued, and end the process; one that hangs is killed after a while."""
        self._is_open = False
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        line = self._line
        sent = () if line is None else line.sent
        left = [job.future for job in (*sent, *self._first, *self._waiting)]
        if left and line is not None:
            await asyncio.wait(left, timeout=self._close_seconds)
        line, self._line = self._line, None
        if line is not None:
            await line.close(self._close_seconds)
            _fail(line.sent, LedgerUnavailableError(_ENDED))
        self._fail_waiting()

    def submit(
        self, operation: Callable[[Transaction], Answer], *, goes_first: bool = False
    ) -> asyncio.Future[Answer]:
        """Run an operation in one of the next transactions; it must be one that can be sent."""
        job = Awaited(operation)
        return self._enqueue(job, self._first if goes_first else self._waiting)

    def submit_request(
        self, batch: Batch[Request, Answer], request: Request
    ) -> asyncio.Future[Answer]:
        """Hand a request to its batch function together with those beside it."""
        return self._enqueue(Awaited(request, batch), self._waiting)

    def _enqueue(self, job: Awaited, queue: deque[Awaited]) -> asyncio.Future[Any]:
        self._refuse_unless_open(job)
        most = MAX_FIRST if queue is self._first else self._max_queued
        if len(queue) >= most:
            problem = f"{most} calls wait already; try again later"
            raise LedgerUnavailableError(problem)
        queue.append(job)
        self._pump_soon()
        return job.future

    def _refuse_unless_open(self, job: Awaited) -> None:
        if not self._is_open:
            raise LedgerUnavailableError("the database is closed; open it again")
        if os.getpid() != self._owner:
            # A fork takes the socket along, and two would write to it.
            problem = "the database was opened in another process; open it in this process"
            raise LedgerUnavailableError(problem)
        if job.future.get_loop() is not self._loop:
            problem = "the database was opened in another event loop; open it in this one"
            raise LedgerUnavailableError(problem)
        if self._restart is not None:
            raise LedgerUnavailableError(_AWAY)

    def _pump_soon(self) -> None:
        if not self._is_pumping:
            self._is_pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Send what waits, as far as the process is not too far behind."""
        self._is_pumping = False
        line = self._line
        while line is not None and self._has_waiting() and len(line.frames) < MAX_FRAMES:
            packed = self._taken(line)
            if packed:
                line.send(self._wire.join(packed), jobs=len(packed))

    def _has_waiting(self) -> bool:
        return bool(self._first or self._waiting)

    def _taken(self, line: _Line) -> list[bytes]:
        packed: list[bytes] = []
        size_bytes = 0
        while self._has_waiting() and len(packed) < MAX_BATCH and size_bytes < MAX_FRAME_BYTES:
            job = (self._first or self._waiting).popleft()
            if not job.future.cancelled() and (one := self._packed(job)) is not None:
                line.sent.append(job)
                packed.append(one)
                size_bytes += len(one)
        return packed

    def _packed(self, job: Awaited) -> bytes | None:
        try:
            return self._wire.pack(job)
        # Whatever is wrong with a job is for its caller, and not for those beside it.
        except Exception as error:  # noqa: BLE001
            job.fail(error)
            deliver([job])
            return None

    def _spawn(self) -> None:
        self._restart = None
        try:
            self._line = _Line(self._starter.start(), self._recipe, self._answered, self._lost)
        except OSError as error:
            log.warning("the process that writes cannot be started", problem=str(error))
            self._short_lives += 1
            self._start_later()
            return
        self._pump_soon()

    def _answered(self, line: _Line, frames: list[bytes]) -> None:
        answered = [self._wire.unpack_answers(frame, line.sent) for frame in frames]
        line.settle(sum(map(len, answered)))
        # The process is not to wait for what these answers set in motion here.
        self._pump()
        for jobs in answered:
            deliver(jobs)

    def _lost(self, line: _Line) -> None:
        """Tell the callers of a process that has ended, and start another."""
        if line is not self._line:
            return
        self._line = None
        _fail(line.sent, LedgerUnavailableError(_ENDED))
        if not self._is_open:
            self._fail_waiting()
            return
        code, problem = line.process.returncode, line.last_words
        log.warning("the process that writes has ended", exit_code=code, problem=problem)
        self._short_lives = 0 if line.has_lived() else self._short_lives + 1
        if line.has_answered and self._short_lives <= MAX_SHORT_LIVES:
            self._spawn()
        else:
            self._start_later()

    def _start_later(self) -> None:
        self._fail_waiting()
        seconds = RESTARTS.seconds(max(1, self._short_lives), draw=0.0)
        self._restart = asyncio.get_running_loop().call_later(seconds, self._spawn)

    def _fail_waiting(self) -> None:
        for queue in (self._first, self._waiting):
            _fail(queue, LedgerUnavailableError(_AWAY))


class _Line:
    """The socket to a process, and what it has been sent and has not answered.

    `sent` are the jobs, in their order, and `frames` how many of them are in each frame.
    """

    def __init__(
        self,
        child: Child,
        recipe: Recipe,
        answered: Callable[[_Line, list[bytes]], None],
        lost: Callable[[_Line], None],
    ) -> None:
        self.sent: deque[Awaited] = deque()
        self.frames: deque[int] = deque()
        self.has_answered = False
        self.last_words = "it gave no reason"
        self._answered = answered
        self._lost = lost
        self._frames = Frames()
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self.process, self._socket = child
        self._socket.settimeout(0.0)
        self._loop.add_reader(self._socket, self._read)
        self._write(framed(pickle.dumps(recipe)))

    @property
    def waiting(self) -> int:
        """How many jobs were sent and are not in the transaction under way."""
        return len(self.sent) - (self.frames[0] if self.frames else 0)

    def has_lived(self) -> bool:
        """Tell whether the process has worked for a while."""
        return self.has_answered and self._loop.time() >= self._started_at + SHORT_LIFE_SECONDS

    def settle(self, jobs: int) -> None:
        """Forget frames of which so many jobs were answered; an answer is for whole frames."""
        while jobs > 0:
            jobs -= self.frames.popleft()

    def send(self, payload: bytes, *, jobs: int) -> None:
        """Send a frame of jobs, or as much of it as can be sent; the rest follows by itself."""
        self.frames.append(jobs)
        self._write(framed(payload))

    def _write(self, frame: bytes) -> None:
        if self._unsent:
            self._unsent += frame
            return
        sent = 0
        # A process that is gone is noticed by the end of what it says.
        with suppress(BlockingIOError, ConnectionError):
            sent = self._socket.send(frame)
        if sent < len(frame):
            self._unsent += memoryview(frame)[sent:]
            self._loop.add_writer(self._socket, self._send_rest)

    async def close(self, seconds: float) -> None:
        """Say that no more will come, and wait for the end of the process."""
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, seconds)
        self._reap()

    def _send_rest(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except ConnectionError:
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            piece = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            piece = b""
        if not piece:
            self._end()
            return
        frames = self._frames.feed(piece)
        if frames and frames[-1].startswith(LAST_WORDS):
            self.last_words = frames.pop()[len(LAST_WORDS) :].decode(errors="replace")
        if frames:
            self.has_answered = True
            self._answered(self, frames)

    def _end(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._reap()
        self._lost(self)

    def _reap(self) -> None:
        self.process.kill()
        self.process.wait()


def _fail(jobs: deque[Awaited], error: Exception) -> None:
    failed = list(jobs)
    jobs.clear()
    for job in failed:
        job.fail(error)
    deliver(failed)


# The process that writes: it takes jobs from a socket, all that wait into one transaction.
#
# It belongs to the process that started it. When that one closes the socket, or is gone, it ends
# by itself; a signal for the whole group, as Ctrl-C is, is not meant for it. It keeps the open
# files that it was given, so that a lock which its parent holds lasts until nobody writes any
# more. It has no log: what it fails of, it tells its parent, which has one.

_SET_DEATH_SIGNAL = 1


class _Inbox:
    """The frames that have come and are yet to be worked on."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames()
        self._waiting: deque[bytes] = deque()

    def next(self) -> bytes | None:
        """Wait for the next frame; None if no more will come."""
        while not self._waiting:
            piece = self._connection.recv(RECEIVE_BYTES)
            if not piece:
                return None
            self._waiting.extend(self._frames.feed(piece))
        return self._waiting.popleft()

    def next_if_here(self) -> bytes | None:
        """Return the next frame if it has come already."""
        while not self._waiting:
            try:
                piece = self._connection.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if not piece:
                return None
            self._waiting.extend(self._frames.feed(piece))
        return self._waiting.popleft()


def main(descriptor: int, parent: int, modules: Sequence[str]) -> None:
    """Write for the parent until it wants no more; the modules are loaded while it is busy."""
    _belong_to(parent)
    for name in modules:
        # What is missing is said by the parent, which needs it too.
        with suppress(ImportError):
            import_module(name)
    connection = socket.socket(fileno=descriptor)
    inbox = _Inbox(connection)
    try:
        order = inbox.next()
        if order is not None:
            recipe: Recipe = pickle.loads(order)  # noqa: S301
            _work(connection, inbox, recipe())
    except ConnectionError:
        # The parent is gone, and nobody is left to be told.
        return
    # Whoever started this process has a log, and says it there.
    except Exception as error:  # noqa: BLE001
        words = f"{type(error).__name__}: {error}".encode(errors="replace")
        with suppress(OSError):
            connection.sendall(framed(LAST_WORDS + words))
        sys.exit(1)


def _work(connection: socket.socket, inbox: _Inbox, place: Workplace) -> None:
    _tune_interpreter()
    try:
        while jobs := _take(inbox, place):
            perform(place.database, jobs)
            connection.sendall(framed(place.wire.pack_answers(jobs)))
    finally:
        place.database.close()


def _take(inbox: _Inbox, place: Workplace) -> list[Job]:
    jobs: list[Job] = []
    frame = inbox.next()
    while frame is not None:
        jobs += place.wire.unpack(frame)
        if len(jobs) >= MAX_BATCH:
            break
        frame = inbox.next_if_here()
    return jobs


def _belong_to(parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        # A parent that is killed while this process waits for a disk would otherwise be outlived.
        from ctypes import CDLL  # noqa: PLC0415

        CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


def _tune_interpreter() -> None:
    # Rows and records come and go by the thousand, and none of them form cycles.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
