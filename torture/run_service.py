"""The service that tortured runs are carried out on; it is ended now and then, and started again.

It is killed, alone or after its writer, or asked to end, while a process of a run asks it for
something, or while nobody does and it goes on with what it has.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from executors.endpoint import free_port
from headgate.storage.sqlite import SqliteReader
from service.support import START_SECONDS, ServiceProcess, wait_until
from torture.run_audit import STORE_NAME, StepRow, rows_in

ENDS_RATIO = 0.35
"""In how many lives of a run's processes the service is ended."""

KINDS = {"killed": 0.5, "killed after its writer": 0.25, "stopped": 0.25}
LIVE_SECONDS = 2.0
AWAY_SECONDS = 0.5
WRITERLESS_SECONDS = 0.2
SETTINGS = """
[scheduler]
max_inflight = {permits}
worker_count = {permits}
task_retention_seconds = 86_400
drain_seconds = 2
retry_base_seconds = 0.05
retry_max_seconds = 0.3

[targets.step]
kind = "callable"
entry_point = "torture.run_target:work"
"""
_SUBMISSIONS = "SELECT id, submission FROM task_inputs"


class _Params(msgspec.Struct):
    name: str


class _Submission(msgspec.Struct):
    params: _Params
    labels: dict[str, str] = {}


class RunService:
    """A service with as many permits as a run would have by itself."""

    def __init__(self, folder: Path, source: random.Random, *, permits: int) -> None:
        folder.mkdir()
        self.data = folder / "data"
        config = folder / "service.toml"
        config.write_text(SETTINGS.format(permits=permits))
        arguments = ("--config", str(config), "--data", str(self.data))
        self._process = ServiceProcess(folder, *arguments, port=free_port())
        self._random = source
        self.ends: Counter[str] = Counter()
        """How often it was ended in each way."""
        self.strange_ends: list[str] = []

    @property
    def url(self) -> str:
        """Where it serves, whichever process it has."""
        return self._process.address

    def start(self) -> None:
        """Start a process, and return when it does its work."""
        self._process.spawn()
        wait_until(self._process.is_ready, seconds=START_SECONDS, what=self._process.output)

    def stop(self) -> None:
        """End it for good, as an operator does."""
        code = self._process.stop()
        if code != 0:
            self.strange_ends.append(f"the service ended with {code}")

    def kill(self) -> None:
        """End whatever process is left."""
        self._process.kill()

    @contextmanager
    def troubled(self) -> Iterator[None]:
        """Have it be ended at some moment of the block, or not; it serves when the block ends."""
        if self._random.random() >= ENDS_RATIO:
            yield
            return
        kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
        pauses = [self._random.uniform(0.0, most) for most in (LIVE_SECONDS, AWAY_SECONDS)]
        trouble = threading.Thread(target=self._end_and_start, args=(kind, *pauses))
        trouble.start()
        try:
            yield
        finally:
            trouble.join()
            self.ends[kind] += 1

    def tasks_of(self, run_id: str, names: list[str]) -> list[StepRow]:
        """Read the tasks of a run from the store of the service."""
        numbers = self._numbers(run_id, names)
        return [StepRow(numbers[row.id], row) for row in rows_in(self.data) if row.id in numbers]

    def _end_and_start(self, kind: str, live_seconds: float, away_seconds: float) -> None:
        time.sleep(live_seconds)
        try:
            if kind == "stopped":
                self.stop()
            elif kind == "killed after its writer":
                os.kill(self._process.writer_pid, signal.SIGKILL)
                time.sleep(WRITERLESS_SECONDS)
            self.kill()
            time.sleep(away_seconds)
            self.start()
        except (AssertionError, OSError) as error:
            self.strange_ends.append(f"the service, {kind}: {error}")

    def _numbers(self, run_id: str, names: list[str]) -> dict[str, int]:
        reader = SqliteReader(self.data / STORE_NAME)
        try:
            rows = reader.begin().read(_SUBMISSIONS)
        finally:
            reader.close()
        read = {row[0]: msgspec.json.decode(row[1], type=_Submission) for row in rows}
        return {
            task_id: names.index(submission.params.name)
            for task_id, submission in read.items()
            if submission.labels.get("run") == run_id
        }
