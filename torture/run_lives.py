"""The lives of `headgate run` processes, each ended at a random moment in a random way.

Only the process itself is killed, as the kernel or an impatient person would do it: what it started
has to end by itself.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headgate.storage.data_lock import is_held
from run_commands import EXIT_DONE, EXIT_EXHAUSTED, EXIT_FAILED, EXIT_INTERRUPTED, Ended, ended
from service.support import family
from torture.run_audit import marks_in

START_SECONDS = 0.9
WORK_SECONDS = 0.5
DRAIN_SECONDS = 0.2
END_SECONDS = 0.3
MOST_SECONDS = 60.0
LOOK_SECONDS = 0.005
LEFT_SECONDS = 5.0
KILLED = -signal.SIGKILL
# Ctrl-C in the last moments of Python ends the process by that signal; a shell calls it 130 too.
INTERRUPTED_LATE = -signal.SIGINT
USUAL_CODES = (
    *(EXIT_DONE, EXIT_FAILED, EXIT_EXHAUSTED, EXIT_INTERRUPTED),
    *(INTERRUPTED_LATE, KILLED),
)

KINDS = {
    "starting": 0.15,
    "turned back": 0.1,
    "working": 0.25,
    "writing": 0.1,
    "ending": 0.1,
    "draining": 0.1,
    "interrupted": 0.1,
    "stopped": 0.1,
}
"""How often a process is killed in each part of its life, and how often it is asked to end."""

LEFT_ALONE = "left alone"


class Life:
    """One process from its start to its end, over the marks that its steps leave."""

    def __init__(
        self, process: subprocess.Popen[str], marks: Path, source: random.Random, last: str
    ) -> None:
        self._process = process
        self._marks = marks
        self._random = source
        self._last = last
        self._first_marks = sum(marks_in(marks).values())

    def end(self, kind: str) -> Ended:
        """Let it live until the moment comes, and end it; it may have ended by itself before."""
        ends: dict[str, Callable[[], None]] = {
            "starting": self._while_it_starts,
            "turned back": self._by_an_early_interrupt,
            "working": self._while_it_works,
            "writing": self._writer_first,
            "ending": self._when_all_is_done,
            "draining": self._while_it_drains,
            "interrupted": self._by_one_interrupt,
            "stopped": self._by_two_interrupts,
        }
        if kind != LEFT_ALONE:
            ends[kind]()
        return ended(self._process, seconds=MOST_SECONDS)

    def _while_it_starts(self) -> None:
        self._pause(START_SECONDS)
        self._kill()

    def _by_an_early_interrupt(self) -> None:
        self._pause(START_SECONDS)
        self._send(signal.SIGINT)

    def _while_it_works(self) -> None:
        self._await(self._has_worked)
        self._pause(WORK_SECONDS)
        self._kill()

    def _writer_first(self) -> None:
        self._await(self._has_worked)
        # Whatever is looked at may end at this moment.
        with suppress(OSError):
            for pid in family(self._process.pid)[1:]:
                if b"headgate.storage.writer" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self._pause(WORK_SECONDS)
        self._kill()

    def _when_all_is_done(self) -> None:
        self._await(lambda: self._last in marks_in(self._marks))
        self._pause(END_SECONDS)
        self._kill()

    def _while_it_drains(self) -> None:
        self._by_one_interrupt()
        self._pause(DRAIN_SECONDS)
        self._kill()

    def _by_one_interrupt(self) -> None:
        self._await(self._has_worked)
        self._pause(WORK_SECONDS)
        self._send(signal.SIGINT)

    def _by_two_interrupts(self) -> None:
        self._by_one_interrupt()
        self._pause(DRAIN_SECONDS)
        self._send(signal.SIGINT)

    def _has_worked(self) -> bool:
        return sum(marks_in(self._marks).values()) > self._first_marks

    def _await(self, condition: Callable[[], bool]) -> None:
        ends_at = time.monotonic() + MOST_SECONDS
        while self._process.poll() is None and not condition() and time.monotonic() < ends_at:
            time.sleep(LOOK_SECONDS)

    def _pause(self, most_seconds: float) -> None:
        time.sleep(self._random.uniform(0.0, most_seconds))

    def _kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)


def draw_kind(source: random.Random) -> str:
    """Draw the way in which a process is ended."""
    return source.choices(list(KINDS), list(KINDS.values()))[0]


def wait_until_left(folder: Path) -> bool:
    """Wait until no process has a run any more; what a killed one started ends shortly after it."""
    ends_at = time.monotonic() + LEFT_SECONDS
    while is_held(folder) and time.monotonic() < ends_at:
        time.sleep(LOOK_SECONDS)
    return not is_held(folder)
