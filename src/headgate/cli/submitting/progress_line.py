"""What is told while a task is waited for: a line that changes, or a line for each change."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from headgate.cli.task_view import has_colour, in_colour_of, shortened
from headgate.cli.times import length_of
from headgate.core.texts.printable import printable

if TYPE_CHECKING:
    from headgate.task_snapshot import TaskSnapshot

FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
FRAME_SECONDS = 0.1
_CLEAR = "\r\x1b[2K"


class ProgressLine:
    """Shows a task on standard error; in a terminal a thread keeps the line moving."""

    def __init__(self, task_id: str) -> None:
        self._task_id = task_id
        self._started = time.monotonic()
        self._is_live = sys.stderr is not None and sys.stderr.isatty()
        self._coloured = has_colour(sys.stderr)
        self._task: TaskSnapshot | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._is_live:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._is_live:
            self._thread.join()
            click.echo(_CLEAR, nl=False, err=True)

    def told(self, tasks: Iterable[TaskSnapshot]) -> Iterator[TaskSnapshot]:
        """Pass tasks on, and show each."""
        for task in tasks:
            self._task = task
            if not self._is_live:
                click.echo(self._text(), err=True)
            yield task

    def _draw(self) -> None:
        frame = 0
        while not self._over.wait(FRAME_SECONDS):
            frame = (frame + 1) % len(FRAMES)
            click.echo(f"{_CLEAR}{FRAMES[frame]} {self._text()}", nl=False, err=True)

    def _text(self) -> str:
        parts = [self._task_id]
        if self._task is not None:
            parts += _words(self._task, coloured=self._coloured)
        return " ".join((*parts, f"({length_of(time.monotonic() - self._started)})"))


def _words(task: TaskSnapshot, *, coloured: bool) -> list[str]:
    words = [in_colour_of(task.state, task.state.value, coloured=coloured)]
    if task.attempt > 1:
        words.append(f"attempt {task.attempt}")
    if task.error:
        words.append(printable(shortened(task.error)))
    return words
