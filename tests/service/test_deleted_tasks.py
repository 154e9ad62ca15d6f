"""A deleted task says that it was, and by which setting: over HTTP, in commands and on its page."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from cli.said import Command, Said
from headgate.cli.main import run
from headgate.client.client import Client
from headgate.client.sync_client import SyncClient
from headgate.errors import RequestRefusedError, TaskDeletedError
from service.support import ECHO_TARGET, ServiceProcess, running_service, wait_until

SETTINGS = f"""{ECHO_TARGET}
[scheduler]
max_ended_tasks = 1

[targets.broken]
kind = "command"
command = ["sh", "-c", "echo token=hunter2secret: no such page >&2; exit 3"]
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("deleted")
    (folder / "headgate.toml").write_text(SETTINGS)
    with running_service(folder) as process:
        yield process


@pytest.fixture(scope="module")
def failed(service: ServiceProcess) -> str:
    """A task that failed before all others, and stays."""
    task_id = service.submit(target="broken")
    service.wait_for(task_id)
    return task_id


@pytest.fixture(scope="module")
def deleted(service: ServiceProcess, failed: str) -> str:
    """A task that succeeded after that, and went."""
    assert service.task(failed)["state"] == "failed"
    task_id = service.submit()
    path = f"/tasks/{task_id}"
    wait_until(lambda: service.ask("GET", path).status == 410, seconds=20, what=service.output)
    return task_id


@pytest.fixture
def headgate(
    service: ServiceProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    monkeypatch.setenv("HEADGATE_URL", service.address)
    monkeypatch.setenv("XDG_DATA_HOME", str(service.folder / "nothing"))

    def command(*arguments: str) -> Said:
        capsys.readouterr()
        code = run(list(arguments))
        return Said(code, *capsys.readouterr())

    return command


def test_the_failure_is_still_there_and_its_error_is_in_the_log(
    service: ServiceProcess, failed: str, deleted: str
) -> None:
    assert service.task(failed)["state"] == "failed"
    lines = [line for line in service.output().splitlines() if "task failed" in line]
    assert len(lines) == 1
    assert failed in lines[0]
    assert "no such page" in lines[0]
    assert "hunter2" not in lines[0]
    assert service.ask("GET", f"/tasks/{deleted}").status == 410


@pytest.mark.parametrize("command", ["show", "why", "cancel", "retry", "watch"])
def test_every_command_names_the_setting(headgate: Command, deleted: str, command: str) -> None:
    said = headgate(command, deleted)
    assert said.code == 2
    assert f"task {deleted} was deleted" in said.err
    assert "scheduler.max_ended_tasks = 1" in said.err


def test_one_of_several_says_so_by_its_code(headgate: Command, deleted: str) -> None:
    said = headgate("cancel", deleted, "nope", "--json")
    assert [line["code"] for line in said.lines] == ["task_deleted", "not_found"]


def test_both_clients_raise_an_error_of_its_own_type(service: ServiceProcess, deleted: str) -> None:
    async def ask() -> None:
        async with Client(service.address) as client:
            await client.get(deleted)

    with pytest.raises(TaskDeletedError) as caught:
        asyncio.run(ask())
    assert isinstance(caught.value, RequestRefusedError)
    assert (caught.value.status, caught.value.task_id) == (410, deleted)
    assert caught.value.setting == "scheduler.max_ended_tasks"
    assert caught.value.cut.endswith("Z")
    with SyncClient(service.address) as client, pytest.raises(TaskDeletedError):
        client.why(deleted)


def test_its_page_says_what_deleted_it(service: ServiceProcess, deleted: str) -> None:
    connection = HTTPConnection(service.address.removeprefix("http://"), timeout=30.0)
    connection.request("GET", f"/ui/tasks/{deleted}", headers={"Accept": "text/html"})
    answer = connection.getresponse()
    page = answer.read().decode()
    connection.close()
    assert answer.status == 410
    assert "scheduler.max_ended_tasks = 1" in page
    assert "still in the usage and the budgets" in page
