"""`headgate up --demo`: alive within seconds, nothing beyond this machine, nothing left behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from config.running import running
from headgate.cli.main import run
from headgate.cli.up import demo_welcome
from service.support import ServiceProcess, family, wait_until

ALIVE_SECONDS = 20.0
"""Twice what is promised: the machine of the tests may have other things to do."""
LONG_TASK_SECONDS = 20
FIRST_LINES = """\
open {address} in a browser; Ctrl-C ends it
  a demonstration: agents and provider are simulated on this machine, and nothing is kept
  in another terminal: headgate top --url {address} --data {folder}
"""
LOOPBACK = ("0100007F", "00000000")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the demonstration write where the test can look."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return folder


@contextmanager
def demonstration(folder: Path, *arguments: str) -> Iterator[ServiceProcess]:
    service = ServiceProcess(folder, "--demo", *arguments)
    service.start()
    try:
        yield service
    finally:
        service.kill()


def is_alive(service: ServiceProcess) -> bool:
    stats = service.ask("GET", "/scheduler/stats").body
    states = {one["state"] for one in service.ask("GET", "/slots").body["slots"]}
    dead = service.ask("GET", "/webhooks?state=dead").body["webhooks"]
    is_working = stats["metrics"]["tasksCompleted"] > 5 and stats["queue"]["totalInflight"] > 0
    return is_working and {"open", "disabled"} <= states and len(dead) == 1


def test_the_page_is_alive_within_seconds_and_nothing_is_left_afterwards(
    tmp_path: Path, temporary: Path
) -> None:
    # Settings of the user lie in the folder; they are not even read.
    (tmp_path / "headgate.toml").write_text("this is no TOML")
    with demonstration(tmp_path) as service:
        wait_until(lambda: is_alive(service), seconds=ALIVE_SECONDS, what=service.output)
        wait_until(
            lambda: "is used up" in service.text("/") and "is nearly used up" in service.text("/"),
            seconds=ALIVE_SECONDS,
            what=lambda: service.text("/"),
        )
        wait_until(
            lambda: service.ask("GET", "/calls?state=done").body["calls"],
            seconds=ALIVE_SECONDS,
            what=service.output,
        )
        page = service.text("/")
        for name in ("research", "session:load-test", "archive", "retired"):
            assert name in page
        assert list(temporary.iterdir())
        assert remote_addresses(service.pid) <= set(LOOPBACK)
        assert family(service.pid) == [service.pid]
        assert service.output() == FIRST_LINES.format(
            address=service.address, folder=next(temporary.iterdir())
        )
        service.send(signal.SIGINT)
        assert service.wait() == 0
        assert "headgate: stopping" not in service.output()
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "data").exists()


def test_a_stop_does_not_wait_for_what_runs(tmp_path: Path, temporary: Path) -> None:
    with demonstration(tmp_path, "--dashboard", "off") as service:
        assert service.ask("GET", "/").status == 404
        task_id = service.submit(projectId="research", params={"seconds": LONG_TASK_SECONDS})
        service.wait_for(task_id, "running")
        service.send(signal.SIGINT)
        assert service.wait(LONG_TASK_SECONDS / 2) == 0
    assert list(temporary.iterdir()) == []


def test_where_a_token_is_asked_for_it_is_told(tmp_path: Path, temporary: Path) -> None:
    with demonstration(tmp_path, "--host", "0.0.0.0") as service:
        token = (next(temporary.iterdir()) / "token").read_text().strip()
        assert f"  log in with {token}\n" in service.output()
        assert "0.0.0.0" not in service.output()
        assert "curl" not in service.output()


async def test_without_pages_nobody_is_sent_to_a_browser(tmp_path: Path) -> None:
    async with running(tmp_path, '[dashboard]\nmode = "off"\n') as service:
        text = demo_welcome(service.service, "http://127.0.0.1:7420", tmp_path)
    assert text.startswith("headgate serves http://127.0.0.1:7420 without pages; Ctrl-C ends it\n")
    assert "browser" not in text
    assert "headgate top" in text


def test_for_a_program_it_is_one_line(tmp_path: Path) -> None:
    with demonstration(tmp_path, "--json") as service:
        assert json.loads(service.output())["address"] == service.address


@pytest.mark.parametrize("option", ["--config", "--data", "--store", "--ledger"])
def test_it_takes_no_settings_and_no_data_of_the_user(
    option: str, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "--demo", option, "mine"]) == 2
    assert f"leave out {option}" in capsys.readouterr().err
    assert list(temporary.iterdir()) == []


def remote_addresses(pid: int) -> set[str]:
    """Return the other ends of all connections of a process, as the kernel writes them."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            # A file may be closed between the list and the look.
            links.append(path.readlink().as_posix())
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [
        line.split()
        for kind in ("tcp", "udp")
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
    ]
    return {line[2].partition(":")[0] for line in lines if line[9] in own}
