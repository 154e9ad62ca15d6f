"""`headgate up` as somebody uses it who has never seen it: what it prints, and how it ends."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import msgspec
import pytest

from executors.endpoint import free_port
from headgate.app import STORE_FILE
from headgate.cli.connection import Connection, find_service
from headgate.cli.up import STOPPED_AT_ONCE
from headgate.storage.data_lock import LOCK_NAME, hold_directory, service_address
from headgate.storage.sqlite import SqliteTaskStore
from service.support import Gate, ServiceProcess, running_service, wait_until

TARGETS = """
[scheduler]
drain_seconds = {drain_seconds}
node_lease_seconds = 60

[targets.python]
kind = "callable"
entry_point = "service.work:run"
default = true

[targets.hangs]
kind = "callable"
entry_point = "service.work:hang_at_first"

[targets.child]
kind = "command"
command = ["sh", "-c", "echo $$ > child.pid; sleep 3600"]
kill_grace_seconds = 0.1
"""
DRAINING = "headgate: stopping when 1 task has finished; Ctrl-C again stops at once"
SOON_SECONDS = 30.0
"""Less than the lease, and less than a drain: nothing that is awaited so long waited for these."""


def config(folder: Path, *, drain_seconds: float = 60.0) -> tuple[str, str]:
    path = folder / "service.toml"
    path.write_text(TARGETS.format(drain_seconds=drain_seconds))
    return "--config", str(path)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with running_service(tmp_path, *config(tmp_path)) as running:
        yield running


def refused(folder: Path, *arguments: str, port: int = 0) -> tuple[int, str]:
    """Start a process that must not come up, and return its exit code and what it printed."""
    other = ServiceProcess(folder, *arguments, port=port)
    other.spawn()
    code = other.wait()
    return code, other.output()


def state_of(folder: Path, task_id: str) -> str:
    with sqlite3.connect(folder / "data" / STORE_FILE) as database:
        return str(
            database.execute("SELECT state FROM tasks WHERE id = ?", (task_id,)).fetchone()[0]
        )


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def run_line(service: ServiceProcess, line: str) -> str:
    """Run a curl line as it is; where there is no curl, send what it would send."""
    if shutil.which("curl"):
        done = subprocess.run(["sh", "-c", line], capture_output=True, check=True, timeout=20)
        return done.stdout.decode()
    body = msgspec.json.decode(shlex.split(line)[-1])
    return msgspec.json.encode(service.ask("POST", "/tasks", body).body).decode()


def test_the_line_that_is_printed_first_runs_a_task_to_its_end(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        line = next(line for line in service.output().splitlines() if "curl" in line)
        submitted = msgspec.json.decode(run_line(service, line))
        task = service.wait_for(submitted["taskId"])
        assert task["state"] == "done", task
        assert not service.address.endswith(":0")
        assert service.ask("GET", "/livez").body == {"status": "ok"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_lets_what_runs_come_to_its_end(
    service: ServiceProcess, number: signal.Signals, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "go on")
    task_id = service.submit(params=gate.params)
    service.wait_for(task_id, "running")
    service.send(number)
    wait_until(lambda: DRAINING in service.output(), seconds=SOON_SECONDS)
    gate.open()
    assert service.wait() == 0
    assert state_of(service.folder, task_id) == "done"


def test_a_second_signal_ends_the_process_at_once(service: ServiceProcess) -> None:
    task_id = service.submit(target="hangs")
    service.wait_for(task_id, "running")
    service.send(signal.SIGINT)
    wait_until(lambda: DRAINING in service.output(), seconds=SOON_SECONDS)
    answer = service.ask("GET", "/readyz")
    assert (answer.status, answer.body["error"]) == (503, "draining")
    service.send(signal.SIGINT)
    assert service.wait(SOON_SECONDS) == 130
    assert service.output().splitlines()[-1] == f"headgate: {STOPPED_AT_ONCE}"


def test_a_child_process_does_not_outlive_the_drain(tmp_path: Path) -> None:
    with running_service(tmp_path, *config(tmp_path, drain_seconds=0.1)) as service:
        task_id = service.submit(target="child")
        note = tmp_path / "child.pid"
        wait_until(lambda: note.exists() and note.read_text().strip(), seconds=SOON_SECONDS)
        child = int(note.read_text())
        assert is_alive(child)
        assert service.stop() == 0
        assert not is_alive(child)
        assert state_of(tmp_path, task_id) == "queued"


def test_what_ran_and_waited_at_a_crash_is_run_at_the_next_start(service: ServiceProcess) -> None:
    parent = service.submit(target="hangs")
    child = service.submit(dependsOn=[parent])
    service.wait_for(parent, "running")
    service.kill()
    service.start()
    # The lease of the process that was killed has a minute to go.
    task = service.wait_for(parent, seconds=SOON_SECONDS)
    assert (task["state"], task["result"]) == ("done", {"attempt": 2})
    assert service.wait_for(child)["state"] == "done"


def test_a_second_process_on_the_same_data_is_refused(service: ServiceProcess) -> None:
    data, other = service.folder / "data", service.folder / "other"
    other.mkdir()
    (other / "same").symlink_to(data)
    (other / "link.db").symlink_to(data / STORE_FILE)
    for arguments in (
        ("--data", str(data)),
        ("--data", str(other), "--store", f"sqlite:///{data / STORE_FILE}"),
        ("--data", str(other / "same")),
        ("--data", str(other), "--store", f"sqlite:///{other / 'link.db'}"),
    ):
        code, output = refused(other, *arguments)
        assert code == 1
        assert output.count("\n") == 1, output
        assert f"is in use by process {service.pid}" in output


def test_a_hard_link_to_the_data_of_a_process_is_refused(service: ServiceProcess) -> None:
    other = service.folder / "other"
    other.mkdir()
    (other / STORE_FILE).hardlink_to(service.folder / "data" / STORE_FILE)
    code, output = refused(other, "--data", str(other))
    assert code == 1
    assert "is one of 2 hard links" in output
    service.wait_for(service.submit(), "done")


def test_a_lock_that_was_deleted_lets_nobody_in_and_comes_back(service: ServiceProcess) -> None:
    data = service.folder / "data"
    (data / LOCK_NAME).unlink()
    code, output = refused(service.folder, "--data", str(data))
    assert (code, "is in use by" in output) == (1, True), output
    wait_until((data / LOCK_NAME).exists, seconds=SOON_SECONDS)
    wait_until(lambda: "it is there again" in service.output(), seconds=SOON_SECONDS)
    code, output = refused(service.folder, "--data", str(data))
    assert f"is in use by process {service.pid}" in output
    service.wait_for(service.submit(), "done")


def test_a_process_whose_data_another_has_taken_ends_at_once(service: ServiceProcess) -> None:
    data = service.folder / "data"
    data.rename(service.folder / "moved")
    shutil.copytree(service.folder / "moved", data, ignore=shutil.ignore_patterns(LOCK_NAME))
    with hold_directory(data):
        assert service.wait() == 1
    assert "because its lock was deleted" in service.output()


def test_a_port_that_is_taken_is_told_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = refused(tmp_path, "--data", str(tmp_path), port=port)
    assert code == 2
    assert output.count("\n") == 1, output
    assert f"port {port} is in use by another program" in output


def test_a_port_that_another_service_has_is_told_so(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        port = urlsplit(service.address).port or 0
        _, output = refused(tmp_path, "--data", str(tmp_path / "other"), port=port)
    assert f"port {port} is in use by another Headgate; stop it" in output
    # The other one has the port: commands with this directory must not reach it.
    assert service_address(tmp_path / "other") == ""


def test_the_next_node_of_a_store_sends_people_to_the_token_of_the_first(
    tmp_path: Path, postgres_url: str
) -> None:
    path = tmp_path / "headgate.toml"
    path.write_text("[auth]\nrequired = true\n")
    folders = (tmp_path / "a", tmp_path / "b")
    nodes = [
        ServiceProcess(tmp_path, *up_options(data, postgres_url), port=free_port())
        for data in folders
    ]
    said, found = [], []
    try:
        for node in nodes:
            node.start()
            said.append(node.output())
        found = [find_service(Connection(data=data)).url for data in folders]
        port = urlsplit(nodes[1].address).port
    finally:
        for node in nodes:
            node.kill()
    assert found == [node.address for node in nodes]
    assert "curl" in said[0]
    assert "use the token of the first node: HEADGATE_TOKEN=" in said[1]
    assert "curl" not in said[1]
    assert "token create" not in said[1]
    assert f"OPENAI_BASE_URL=http://127.0.0.1:{port}/v1" in said[1]


def up_options(data: Path, store_url: str) -> tuple[str, ...]:
    return ("--config", "headgate.toml", "--store", store_url, "--data", str(data))


def test_a_key_that_does_not_exist_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[scheduler]\nmax_inflght = 3\n")
    code, output = refused(tmp_path, "--data", str(tmp_path), "--config", str(path))
    assert code == 2
    assert output.count("\n") == 1, output
    assert "max_inflght" in output


async def test_tables_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    store = SqliteTaskStore(tmp_path / STORE_FILE)
    await store.open()
    await store.close()
    with sqlite3.connect(tmp_path / STORE_FILE) as database:
        database.execute("UPDATE headgate_schema SET version = 99 WHERE part = 'tasks'")
    code, output = refused(tmp_path, "--data", str(tmp_path))
    assert code == 1
    assert output.count("\n") == 1, output
    assert "install a newer headgate" in output


@contextmanager
def two_nodes(
    folder: Path, store_url: str, *, advertise: str = ""
) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """Run two nodes on one store; the first one dispatches, and may say where it is reached."""
    folders = (folder / "first", folder / "second")
    for each in folders:
        each.mkdir()
    path = folder / "first.toml"
    path.write_text(f'[server]\nadvertise = "{advertise}"\n' if advertise else "")
    store = ("--store", store_url)
    with running_service(folders[0], *store, "--config", str(path)) as first:
        wait_until(first.is_ready, seconds=10.0, what=first.output)
        with running_service(folders[1], *store) as second:
            wait_until(second.is_ready, seconds=SOON_SECONDS, what=second.output)
            assert second.ask("GET", "/readyz").body["role"] == "node"
            yield first, second


def test_every_node_says_why_a_task_waits(tmp_path: Path, postgres_url: str) -> None:
    with two_nodes(tmp_path, postgres_url) as (first, second):
        task_ids = [node.submit(notBefore="2100-01-01T00:00:00Z") for node in (first, second)]
        for path in [f"/tasks/{task_id}/why" for task_id in task_ids]:
            wait_until(partial(is_explained, first, path), seconds=SOON_SECONDS)
            assert second.ask("GET", path) == first.ask("GET", path)
        assert second.ask("GET", "/tasks/tsk_none/why").status == 404


def is_explained(node: ServiceProcess, path: str) -> bool:
    """Tell whether a node has reasons; one of a task that another took comes a little later."""
    answer = node.ask("GET", path)
    return answer.status == 200 and bool(answer.body["reasons"])


def test_a_dispatcher_is_asked_where_it_says_that_it_is_reached(
    tmp_path: Path, postgres_url: str
) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with two_nodes(tmp_path, postgres_url, advertise=nowhere) as (_, second):
        task_id = second.submit(notBefore="2100-01-01T00:00:00Z")
        answer = second.ask("GET", f"/tasks/{task_id}/why")
        assert (answer.status, answer.body["code"]) == (503, "not_dispatching")
        assert answer.body["details"] == {"address": nowhere}


def test_the_first_answer_of_a_service_that_starts_is_a_good_one(tmp_path: Path) -> None:
    port = free_port()
    service = ServiceProcess(tmp_path, "--data", str(tmp_path / "data"), port=port)
    service.spawn()
    try:
        statuses: list[int] = []
        wait_until(partial(has_answered, port, statuses), seconds=30, what=service.output)
        assert statuses == [200]
        assert "is unavailable" not in service.output()
    finally:
        service.stop()


def has_answered(port: int, statuses: list[int]) -> bool:
    """Ask for the tasks, and note the status unless nobody listens."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/tasks", timeout=20) as answer:
            statuses.append(answer.status)
    except HTTPError as error:
        statuses.append(error.code)
    except URLError:
        pass
    return bool(statuses)
