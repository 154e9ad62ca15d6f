"""What keeps a run in this process from going on: its store, its books, or its folder is gone.

Rule: what may pass is said, and waited for. What cannot is raised, so that the run ends.
"""

from __future__ import annotations

from pathlib import Path

from headgate.errors import StoreError
from headgate.runtime.engine import Engine


def trouble_of(engine: Engine) -> str:
    """Say in one line why nothing of a run ends or starts; empty if all is well."""
    if books := books_problem(engine):
        return f"the books do not answer, and nothing starts or is booked: {books}"
    store = engine.runner.problem or engine.node.problem or engine.dispatcher.problem
    return f"the store does not answer, and no step ends before it does: {store}" if store else ""


def closing_trouble(engine: Engine, seconds: float) -> str:
    """Say in one line what the end of a run waits for, and for how long; empty if for nothing."""
    if books := books_problem(engine):
        wait = f"the end waits {seconds:.0f} s for them, or until Ctrl-C"
        return f"the books do not answer, and what has ended is not booked; {wait}: {books}"
    return trouble_of(engine)


def books_problem(engine: Engine) -> str:
    """Return what a ledger outside the store failed by the last time; empty if by nothing."""
    return "" if engine.ledger is None else engine.ledger.problem


class StoreFile:
    """The file of a store as it was opened: one that was deleted does not come back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: tuple[int, int] | None = None

    def note(self) -> None:
        """Remember the file, now that it is open."""
        self._opened = self._found()

    def check(self) -> None:
        """Raise if the file is not the one that was opened."""
        if self._opened is None or self._found() == self._opened:
            return
        folder = self._path.parent
        lost = self._path if folder.exists() else f"the folder of the run, {folder},"
        problem = f"{lost} was deleted or replaced while the run went on; what ran is lost"
        advice = "; begin anew with headgate run FILE"
        raise StoreError(problem + advice)

    def _found(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino
