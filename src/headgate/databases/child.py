"""Starts processes that write: one at a time for a writer, and one ahead if that is wanted.

A process needs a moment until it can work. Whoever knows early that one will be needed has it
started ahead, with the modules that it will use; it waits for its first order, and ends by itself
if none comes before the program ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

_PROGRAM = "from headgate.databases.writer_process import main; main({}, {}, {!r})"


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
