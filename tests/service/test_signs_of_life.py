"""Two services on one PostgreSQL: a busy one keeps its tasks, and one that stands still does not.

The lease of a node is renewed where no request can delay it. It ends all the same when the process
is stopped, or when its event loop has shown nothing for too long.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate.engine.node import DISPATCHER_LEASE_SECONDS
from headgate.storage.sql_store import SILENT_LEASES
from service.support import ServiceProcess, running_service, wait_until

LEASE_SECONDS = 1.0
LONGER_SECONDS = 4.5
"""Longer than the leases of a node and of a dispatcher, and shorter than what ends a silent one."""

SOON_SECONDS = 30.0
SETTINGS = """
[scheduler]
node_lease_seconds = {lease_seconds}

[store]
process = {process}

[targets.python]
kind = "callable"
entry_point = "service.work:run"
default = true

[targets.hold]
kind = "callable"
entry_point = "service.work:hold_loop"
"""


class Pair:
    """A service that runs a task and can be made busy, and one that would take the task over."""

    def __init__(self, first: ServiceProcess, other: ServiceProcess, task_id: str) -> None:
        self.first, self.other, self.task_id = first, other, task_id

    def is_dispatching(self, service: ServiceProcess) -> bool:
        return bool(service.ask("GET", "/readyz").body["role"] == "dispatcher")

    def task(self) -> Any:
        return self.other.task(self.task_id)

    def is_lost(self) -> bool:
        task = self.task()
        return bool(task["attempt"] > 1 or task["state"] == "queued")


@contextmanager
def pair(
    folder: Path, url: str, *, busy_seconds: float, task_seconds: float, process: bool = True
) -> Iterator[Pair]:
    """Run both; the first is busy for so long as soon as the file `now` is there."""
    config = folder / "service.toml"
    text = SETTINGS.format(lease_seconds=LEASE_SECONDS, process=str(process).lower())
    config.write_text(text)
    (folder / "other").mkdir()
    arguments = ("--store", url, "--config", str(config))
    with running_service(folder, *arguments) as first:
        params = {"when": str(folder / "now"), "seconds": busy_seconds}
        first.wait_for(first.submit(target="hold", params=params), "running")
        task_id = first.submit(params={"seconds": task_seconds})
        first.wait_for(task_id, "running")
        with running_service(folder / "other", *arguments) as other:
            wait_until(other.is_ready, seconds=SOON_SECONDS)
            yield Pair(first, other, task_id)


def test_a_busy_node_loses_neither_its_tasks_nor_the_dispatcher(
    tmp_path: Path, postgres_url: str
) -> None:
    seconds = LONGER_SECONDS + 3.0
    with pair(
        tmp_path, postgres_url, busy_seconds=LONGER_SECONDS, task_seconds=seconds
    ) as services:
        (tmp_path / "now").touch()
        ends_at = time.monotonic() + LONGER_SECONDS
        while time.monotonic() < ends_at:
            assert not services.is_lost()
            assert not services.is_dispatching(services.other)
            time.sleep(0.1)
        done = services.other.wait_for(services.task_id)
        assert (done["state"], done["attempt"]) == ("done", 1)
        assert services.is_dispatching(services.first)


def test_a_node_whose_loop_never_comes_back_is_taken_over(
    tmp_path: Path, postgres_url: str
) -> None:
    with pair(tmp_path, postgres_url, busy_seconds=60.0, task_seconds=60.0) as services:
        (tmp_path / "now").touch()
        longest = SILENT_LEASES * DISPATCHER_LEASE_SECONDS + DISPATCHER_LEASE_SECONDS
        took = wait_until(services.is_lost, seconds=longest + SOON_SECONDS)
        assert took > SILENT_LEASES * LEASE_SECONDS - 1.0


def test_a_node_that_is_stopped_loses_its_lease_at_once_and_drops_its_task(
    tmp_path: Path, postgres_url: str
) -> None:
    with pair(tmp_path, postgres_url, busy_seconds=0.0, task_seconds=600.0) as services:
        services.first.send(signal.SIGSTOP)
        wait_until(services.is_lost, seconds=DISPATCHER_LEASE_SECONDS + SOON_SECONDS)
        services.first.send(signal.SIGCONT)
        wait_until(lambda: "others took the tasks" in services.first.output(), seconds=SOON_SECONDS)
        wait_until(lambda: services.task()["state"] == "running", seconds=SOON_SECONDS)
        assert services.task()["attempt"] == 2


@pytest.mark.parametrize("process", [True, False])
def test_a_node_that_comes_back_before_anybody_acted_goes_on_with_its_task(
    tmp_path: Path, postgres_url: str, *, process: bool
) -> None:
    with pair(
        tmp_path, postgres_url, busy_seconds=0.0, task_seconds=8.0, process=process
    ) as services:
        # Nobody can act who stands still as well.
        stopped = [*services.other.pids, *services.first.pids]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(DISPATCHER_LEASE_SECONDS + 1.0)
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGCONT)
        done = services.other.wait_for(services.task_id)
        assert (done["state"], done["attempt"]) == ("done", 1)
        assert "others took the tasks" not in services.first.output()
