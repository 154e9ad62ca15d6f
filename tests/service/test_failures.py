"""What the service does when its store fails, and when the store comes back.

Clients go on submitting all the time. Each of them gets an answer within a bound: taken, or 503
with a reason. What was taken is done in the end, by the process that was there all along.
"""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from budgets.servers import PostgresServer, running_replicas
from budgets.support import assert_ledger_is_right
from headgate.app import STORE_FILE
from headgate.budgets.connect import connect_budget
from headgate.core.budgets.reservations import Call
from headgate.storage.sqlite import STORE_BUSY_TIMEOUT_SECONDS
from service.support import Answer, Gate, ServiceProcess, running_service, wait_until

SETTINGS = """
[scheduler]
max_queue_size = 100_000
max_per_agent = 100_000
node_lease_seconds = {lease_seconds}

[targets.python]
kind = "callable"
entry_point = "service.work:run"
"""
CLIENTS = 3
PAUSE_SECONDS = 0.02
ENOUGH_REFUSALS = 10
SOON_SECONDS = 30.0
MOST_SECONDS = 20.0
"""How long a client may be kept waiting while the store fails."""
ROOM_BYTES = 4_096
ESTIMATE = {"tokens": 10, "usd": "0.001"}

FULL = "disk I/O error"
LOCKED = "is locked by another process"


class Clients:
    """Threads that submit without pause, and remember every answer."""

    def __init__(self, service: ServiceProcess) -> None:
        self.answers: list[Answer] = []
        self.longest_seconds = 0.0
        self._service = service
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._submit) for _ in range(CLIENTS)]

    @property
    def acknowledged(self) -> list[str]:
        """The tasks that were taken."""
        return [answer.body["taskId"] for answer in self.answers if answer.status == 202]

    @property
    def refusals(self) -> list[Answer]:
        """What was answered otherwise."""
        return [answer for answer in self.answers if answer.status != 202]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def wait_for_refusals(self) -> None:
        """Wait until the failure has been told to clients, several times."""
        wait_until(lambda: len(self.refusals) >= ENOUGH_REFUSALS, seconds=SOON_SECONDS)

    def _submit(self) -> None:
        body = {"agentId": "a", "action": "work", "params": {"seconds": 0.05}}
        while not self._is_over.wait(PAUSE_SECONDS):
            started = time.monotonic()
            self.answers.append(self._service.ask("POST", "/tasks", body))
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - started)


@contextmanager
def under_load(service: ServiceProcess) -> Iterator[Clients]:
    """Let clients submit, beginning with some whose tasks are taken."""
    clients = Clients(service)
    clients.start()
    try:
        wait_until(lambda: len(clients.acknowledged) >= CLIENTS, seconds=SOON_SECONDS)
        yield clients
    finally:
        clients.stop()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    # Nobody else can have taken the tasks of a process that is alone, however long it is silent.
    with running_service(tmp_path, *config(tmp_path, lease_seconds=1.0)) as running:
        yield running


def config(folder: Path, *, lease_seconds: float) -> tuple[str, str]:
    path = folder / "service.toml"
    path.write_text(SETTINGS.format(lease_seconds=lease_seconds))
    return "--config", str(path)


def check_refusals(
    service: ServiceProcess, clients: Clients, reason: str, *, most_seconds: float
) -> None:
    """Hold what clients were told against the shape of a refusal; the log has the reason."""
    assert clients.longest_seconds < most_seconds
    for answer in clients.refusals:
        assert answer.status == 503, answer
        assert (answer.body["code"], answer.body["retryable"]) == ("unavailable", True)
        assert reason not in answer.body["error"]
    assert reason in service.output()


def check_readiness(service: ServiceProcess) -> None:
    """See that the service says by itself what is wrong, and that it lives."""
    wait_until(lambda: not service.is_ready(), seconds=SOON_SECONDS)
    answer = service.ask("GET", "/readyz")
    assert (answer.status, answer.body["code"]) == (503, "not_ready")
    assert answer.body["error"]
    assert service.ask("GET", "/livez").status == 200


def check_recovery(service: ServiceProcess, clients: Clients, *, running: str, gate: Gate) -> None:
    """See that the same process works on, and that nothing that it took is lost."""
    wait_until(service.is_ready, seconds=SOON_SECONDS, what=service.output)
    taken = len(clients.acknowledged)
    wait_until(lambda: len(clients.acknowledged) > taken, seconds=SOON_SECONDS)
    clients.stop()
    gate.open()
    for task_id in clients.acknowledged:
        assert service.wait_for(task_id)["state"] == "done"
    # What ran through the failure is not run a second time.
    task = service.wait_for(running)
    assert (task["state"], task["result"]) == ("done", {"attempt": 1})
    assert service.stop() == 0


def test_a_full_disk_is_told_and_outlived(service: ServiceProcess, tmp_path: Path) -> None:
    """The limit on the size of files stands for the disk: writes fail in the middle of a file."""
    gate = Gate(tmp_path / "go on")
    running = service.submit(params=gate.params)
    service.wait_for(running, "running")
    with under_load(service) as clients:
        limit_file_size(service, largest_file(service.folder / "data") + ROOM_BYTES)
        clients.wait_for_refusals()
        check_readiness(service)
        limit_file_size(service, resource.RLIM_INFINITY)
        check_recovery(service, clients, running=running, gate=gate)
    check_refusals(service, clients, FULL, most_seconds=MOST_SECONDS)


def test_a_store_that_another_process_has_locked_is_told_and_outlived(
    service: ServiceProcess, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "go on")
    running = service.submit(params=gate.params)
    service.wait_for(running, "running")
    with under_load(service) as clients:
        path = service.folder / "data" / STORE_FILE
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            check_readiness(service)
            wait_until(lambda: clients.refusals, seconds=SOON_SECONDS)
        check_recovery(service, clients, running=running, gate=gate)
    # A request may come while another transaction is still waiting for the lock.
    check_refusals(
        service, clients, LOCKED, most_seconds=2 * STORE_BUSY_TIMEOUT_SECONDS + MOST_SECONDS
    )


def test_a_postgresql_that_is_restarted_is_told_and_outlived(
    tmp_path: Path, postgres: PostgresServer, postgres_url: str
) -> None:
    arguments = (*config(tmp_path, lease_seconds=30.0), "--store", postgres_url)
    with running_service(tmp_path, *arguments) as service:
        gate = Gate(tmp_path / "go on")
        running = service.submit(params=gate.params)
        service.wait_for(running, "running")
        with under_load(service) as clients:
            postgres.stop()
            try:
                clients.wait_for_refusals()
                check_readiness(service)
            finally:
                postgres.start()
            check_recovery(service, clients, running=running, gate=gate)
        check_refusals(service, clients, "PostgreSQL", most_seconds=MOST_SECONDS)


@pytest.mark.parametrize("topology", ["sentinel", "cluster"])
def test_a_ledger_that_fails_over_is_told_and_outlived(tmp_path: Path, topology: str) -> None:
    with running_replicas(topology) as ledger:
        arguments = (*config(tmp_path, lease_seconds=30.0), "--ledger", ledger.url)
        with running_service(tmp_path, *arguments) as service:
            first = service.submit(estimate=ESTIMATE)
            assert service.wait_for(first)["state"] == "done"
            port = ledger.wait_for_primary()
            ledger.servers[port].kill()
            waiting = [service.submit(estimate=ESTIMATE) for _ in range(20)]
            ledger.wait_for_primary(other_than=port)
            for task_id in waiting:
                assert service.wait_for(task_id, seconds=60.0)["state"] == "done"
            wait_until(service.is_ready, seconds=SOON_SECONDS, what=service.output)
            assert "nothing was granted" in service.output()
            assert service.stop() == 0
        asyncio.run(check_books(ledger.url, {first, *waiting}))


async def check_books(url: str, tasks: set[str]) -> None:
    """See that each task was reserved and settled once, whichever server was asked."""
    async with connect_budget(url) as tracker:
        entries = await tracker.journal(limit=1_000)
        for call in (Call.RESERVE, Call.COMMIT):
            made = [entry.reservation_id.split(":")[0] for entry in entries if entry.call is call]
            assert sorted(made) == sorted(tasks)
        status = await tracker.status()
        assert (status.reserved_micro_usd, status.reserved_tokens) == (0, 0)
        await assert_ledger_is_right(tracker)


def test_a_postgresql_that_is_away_at_the_start_is_told_in_one_line(tmp_path: Path) -> None:
    store = f"postgresql:///none?host={tmp_path}"
    service = ServiceProcess(tmp_path, "--data", str(tmp_path / "data"), "--store", store)
    service.spawn()
    assert service.wait() == 1
    assert service.output().count("\n") == 1, service.output()
    assert "PostgreSQL" in service.output()


def largest_file(folder: Path) -> int:
    """Return the size of the largest file that is written to; the reserve of the store is not."""
    written = [path for path in folder.iterdir() if not path.name.endswith("-reserve")]
    return max(path.stat().st_size for path in written)


def limit_file_size(service: ServiceProcess, size_bytes: int) -> None:
    for pid in service.pids:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, hard))
