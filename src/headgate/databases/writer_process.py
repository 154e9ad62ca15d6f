"""The process that writes: it takes jobs from a socket, all that wait into one transaction.

It belongs to the process that started it. When that one closes the socket, or is gone, it ends by
itself; a signal for the whole group, as Ctrl-C is, is not meant for it. It keeps the open files
that it was given, so that a lock which its parent holds lasts until nobody writes any more. It has
no log: what it fails of, it tells its parent, which has one.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from headgate.databases.frames import LAST_WORDS, RECEIVE_BYTES, Frames, framed
from headgate.databases.jobs import MAX_BATCH, Job, perform
from headgate.databases.workplace import Recipe, Workplace

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
