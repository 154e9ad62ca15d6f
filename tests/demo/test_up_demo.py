"""`headgate up --demo`: alive within seconds, nothing beyond this machine, nothing left behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from headgate.cli.main import run
from service.support import ServiceProcess, family, wait_until

ALIVE_SECONDS = 20.0
"""Twice what is promised: the machine of the tests may have other things to do."""
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
        page = service.text("/")
        for name in ("research", "session:load-test", "archive", "retired"):
            assert name in page
        assert list(temporary.iterdir())
        assert remote_addresses(service.pid) <= set(LOOPBACK)
        assert family(service.pid) == [service.pid]
        assert "nothing is kept when it ends" in service.output()
        assert service.stop() == 0
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "data").exists()


def test_an_end_at_once_leaves_nothing_either(tmp_path: Path, temporary: Path) -> None:
    with demonstration(tmp_path, "--dashboard", "off") as service:
        assert service.ask("GET", "/").status == 404
        service.send(signal.SIGINT)
        wait_until(lambda: "finishing what runs" in service.output(), seconds=ALIVE_SECONDS)
        service.send(signal.SIGINT)
        assert service.wait() in (0, 130)
    assert list(temporary.iterdir()) == []


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
