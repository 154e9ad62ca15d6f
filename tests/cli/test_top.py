"""`headgate top` as a command: in a terminal, without one, and without a service."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from headgate.cli.main import run
from service.support import ServiceProcess, running_service

MOST_SECONDS = 60.0
COLOURS = re.compile(rb"\x1b\[[0-9;]*(?:3[0-7]|4[0-7]|9[0-7]|[34]8;[25])[0-9;]*m")
MOUSE = re.compile(rb"\x1b\[\?100[0-36]h")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("top")) as process:
        yield process


def in_terminal(
    *arguments: str, keys: bytes = b"", after: bytes = b"", **variables: str
) -> tuple[int, bytes]:
    """Run the command in a terminal; press keys when something is shown. Return its code."""
    environ = {**os.environ, "TERM": "xterm-256color", **variables}
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "headgate", *arguments]
        os.execve(sys.executable, command, environ)
    shown, has_pressed, end = b"", not keys, time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # what ran there has ended
                break
        if not has_pressed and after in shown:
            os.write(terminal, keys)
            has_pressed = True
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


def test_it_is_shown_and_left_by_a_key(service: ServiceProcess) -> None:
    code, shown = in_terminal("top", "--url", service.address, keys=b"q", after=b"in flight")
    assert code == 0
    assert b"1 Projects" in shown
    assert COLOURS.search(shown)
    assert not MOUSE.search(shown)


def test_no_colour_is_used_where_none_is_wanted(service: ServiceProcess) -> None:
    code, shown = in_terminal(
        "top", "--url", service.address, keys=b"\x03", after=b"in flight", NO_COLOR="1"
    )
    assert code == 0
    assert not COLOURS.search(shown)


def test_without_a_service_it_ends_with_one_line() -> None:
    code, shown = in_terminal("top", "--url", "http://127.0.0.1:1")
    assert code == 3
    assert shown.startswith(b"headgate: no service answers at http://127.0.0.1:1: ")
    assert shown.count(b"\n") == 1


def test_with_a_token_that_nobody_knows_it_ends_with_one_line(service: ServiceProcess) -> None:
    code, shown = in_terminal("top", "--url", service.address, "--token", "hg_nobody")
    assert code == 4
    assert shown.count(b"\n") == 1


def test_without_its_package_it_says_which_extra_it_needs() -> None:
    statement = (
        "import asyncio, sys; sys.modules['textual'] = None; from headgate.cli.top import shown; "
        "asyncio.run(shown('http://127.0.0.1:1', None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", statement], capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1].endswith(
        "headgate top: needs the package textual, which is not installed; "
        "run pip install 'headgate[top]'"
    )


def test_without_a_terminal_it_says_what_to_use(
    service: ServiceProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", "--url", service.address]) == 2
    assert capsys.readouterr().err == (
        "headgate: headgate top: needs a terminal; "
        "use --json, headgate stats or headgate watch instead\n"
    )


def test_as_json_it_writes_every_pane_once(
    service: ServiceProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", "--url", service.address, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == [
        "stats",
        "projects",
        "lanes",
        "running",
        "waiting",
        "budgets",
        "slots",
    ]
    assert [project["id"] for project in figures["projects"]] == ["default"]
    assert figures["waiting"] == figures["running"] == figures["slots"] == []
