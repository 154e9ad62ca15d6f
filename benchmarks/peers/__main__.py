"""Feed the worker of one queue some times over, and print the seconds that each time took.

    python -m benchmarks.peers on_saq --broker URL --tasks 10000 --runs 3

The first, shorter time is not counted: it is there to warm everything up. The last line of the
output is JSON, everything before it is the worker's own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.peers.marks import BROKER_VARIABLE, EVERY_VARIABLE, MARKS_VARIABLE, read_marks

PARTS = 10
LOOK_SECONDS = 0.005
MOST_SECONDS = 240
# One that is slow is not repeated as often.
ENOUGH_SECONDS = 30.0
STOP_SECONDS = 10.0


def feed(name: str, *, tasks: int, runs: int, marks: Path) -> list[float]:
    """Start the worker, warm it up, feed it, and return the seconds of each time."""
    peer = importlib.import_module(f"benchmarks.peers.{name}")
    worker = subprocess.Popen(peer.worker_command(), start_new_session=True)
    try:
        peer.produce(tasks // PARTS)
        wait_for_mark(marks, 1, worker)
        seconds: list[float] = []
        while len(seconds) < runs and sum(seconds) < ENOUGH_SECONDS:
            started = time.time()
            peer.produce(tasks)
            last_mark = 1 + PARTS * (len(seconds) + 1)
            seconds.append(wait_for_mark(marks, last_mark, worker) - started)
        return seconds
    finally:
        end(worker)


def wait_for_mark(marks: Path, number: int, worker: subprocess.Popen[bytes]) -> float:
    """Wait until so many parts are done, and return when the last of them was."""
    while len(found := read_marks(marks)) < number:
        if worker.poll() is not None:
            raise SystemExit("the worker has ended")
        time.sleep(LOOK_SECONDS)
    return found[number - 1]


def end(worker: subprocess.Popen[bytes]) -> None:
    """End the worker with all of its children: it was started as a group of its own."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    worker.wait(STOP_SECONDS)


def give_up(*_: object) -> None:
    problem = f"not done within {MOST_SECONDS} seconds"
    raise SystemExit(problem)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--broker", required=True)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    options = parser.parse_args()
    # Whatever hangs, this ends, and its worker with it.
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(MOST_SECONDS)
    with tempfile.TemporaryDirectory(prefix="hg-") as folder:
        marks = Path(folder) / "marks"
        os.environ[BROKER_VARIABLE] = options.broker
        os.environ[MARKS_VARIABLE] = str(marks)
        os.environ[EVERY_VARIABLE] = str(options.tasks // PARTS)
        seconds = feed(options.name, tasks=options.tasks, runs=options.runs, marks=marks)
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
