"""How a worker of another queue tells how far it is, at next to no cost to it.

A worker counts what it has run, and at every so many appends the time to a file. Whoever feeds it
waits for the file to grow.
"""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path

BROKER_VARIABLE = "BENCH_BROKER"
MARKS_VARIABLE = "BENCH_MARKS"
EVERY_VARIABLE = "BENCH_EVERY"

# Taking the next number is one step of the interpreter, so threads may share it.
_numbers = count(1)
_every = int(os.environ.get(EVERY_VARIABLE, "1"))


def broker_url() -> str:
    """Return where the broker of this run is."""
    return os.environ[BROKER_VARIABLE]


def marks_path() -> Path:
    """Return the file in which the marks are; whatever else a queue keeps may lie beside it."""
    return Path(os.environ[MARKS_VARIABLE])


def count_one() -> None:
    """Count a task that was run."""
    if next(_numbers) % _every == 0:
        with marks_path().open("a") as file:
            file.write(f"{time.time()}\n")


def read_marks(path: Path) -> list[float]:
    """Return the times at which each further part was done."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [float(line) for line in lines if line.endswith("\n")]
