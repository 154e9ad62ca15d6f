"""Ctrl-C during a run: the first lets steps finish, the second stops them, the third is final."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headgate.cli.exit_codes import EXIT_INTERRUPTED

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MOST_PATIENT = 2


class Interruptions:
    """Counts how often somebody wanted the run to end, and does what each time means.

    `interrupt` is told each of the first two, `running` says how many steps run, and `note` is
    told what happens now.
    """

    def __init__(
        self,
        *,
        interrupt: Callable[[], None],
        running: Callable[[], int],
        note: Callable[[str], None],
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._interrupt = interrupt
        self._running = running
        self._note = note
        self._leave = leave
        self.count = 0

    def __call__(self) -> None:
        """Take one more."""
        self.count += 1
        if self.count > MOST_PATIENT:
            # What runs is killed with the process, and its money counted as assumed by a resume.
            if sys.stderr is not None:
                sys.stderr.flush()
            self._leave(EXIT_INTERRUPTED)
            return
        self._interrupt()
        self._note(self._words())

    def _words(self) -> str:
        count = self._running()
        steps, them = ("1 step", "it") if count == 1 else (f"{count:,} steps", "them")
        if self.count == 1:
            return f"finishing {steps}; Ctrl-C again stops {them}"
        return f"stopping {steps}; Ctrl-C again ends at once"


@contextmanager
def terminations_raise() -> Iterator[None]:
    """Have SIGTERM raise `KeyboardInterrupt`, as SIGINT does, until a run takes signals itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interruptible(interruptions: Interruptions) -> Iterator[None]:
    """Have signals interrupt the run while the body runs, in place of ending the process."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, interruptions)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
