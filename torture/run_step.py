"""One step of a tortured run: it takes a while, leaves a mark, and takes a little longer.

The mark is one line of a file that outlives every process, and is on disk before the step ends; so
a step that was recorded as done has left one, and one that ran again has left two. With a number of
tokens it answers as a model would, and uses half as many of them, or up to nine times that.
"""

from __future__ import annotations

import json
import os
import sys
import time

LONGEST_SECONDS = 0.08
LONGEST_AFTER_SECONDS = 0.04


def draw_seconds() -> tuple[float, float]:
    """Draw how long a step takes before its mark and after it."""
    # It differs from attempt to attempt, so that kills meet it everywhere.
    first, second = os.urandom(2)
    return LONGEST_SECONDS * first / 255, LONGEST_AFTER_SECONDS * second / 255


def leave_mark(name: str, path: str) -> None:
    """Write a line, and return when it is on disk."""
    marks = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(marks, f"{name}\n".encode())
        os.fsync(marks)
    finally:
        os.close(marks)


def answer(name: str, tokens: int) -> str:
    """Return what a step says that has used about so many tokens."""
    used = tokens // 2 + 4 * tokens * os.urandom(1)[0] // 255
    usage = {"prompt_tokens": used, "completion_tokens": 0}
    return json.dumps({"name": name, "model": "stand-in", "usage": usage})


def work(name: str, path: str, tokens: int = 0) -> None:
    """Be the program of a step."""
    before, after = draw_seconds()
    time.sleep(before)
    leave_mark(name, path)
    time.sleep(after)
    sys.stdout.write(f"{answer(name, tokens) if tokens else name}\n")


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]) if sys.argv[3:] else 0)
