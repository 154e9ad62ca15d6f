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
import os
import pickle
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from headgate.core.tasks.retries import Backoff
from headgate.databases.awaited import Awaited, deliver
from headgate.databases.child import Child, ChildStarter
from headgate.databases.frames import LAST_WORDS, RECEIVE_BYTES, Frames, framed
from headgate.databases.jobs import MAX_BATCH, MAX_QUEUED, Answer, Batch, Request
from headgate.databases.transaction import Transaction
from headgate.databases.workplace import Recipe, Wire
from headgate.errors import LedgerUnavailableError

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
