"""One step of a tortured run: it takes a while, leaves a mark, and takes a little longer.

The mark is one line of a file that outlives every process, and is on disk before the step ends; so
a step that was recorded as done has left one, and one that ran again has left two.
"""

from __future__ import annotations

import os
import sys
import time

LONGEST_SECONDS = 0.08
LONGEST_AFTER_SECONDS = 0.04


def work(name: str, path: str) -> None:
    """Be the program of a step."""
    # How long it takes differs from attempt to attempt, so that kills meet it everywhere.
    first, second = os.urandom(2)
    time.sleep(LONGEST_SECONDS * first / 255)
    marks = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(marks, f"{name}\n".encode())
        os.fsync(marks)
    finally:
        os.close(marks)
    time.sleep(LONGEST_AFTER_SECONDS * second / 255)
    sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
