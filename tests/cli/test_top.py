"""`headgate top` as a command: in a terminal, without one, and without a service."""

from __future__ import annotations

import json
import os
import pty
import re
import secrets
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

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
    command = [sys.executable, "-m", "headgate", *arguments]
    return typed(command, *([(after, keys)] if keys else []), **variables)


def typed(command: list[str], *steps: tuple[bytes, bytes], **variables: str) -> tuple[int, bytes]:
    """Run something in a terminal; whenever the next thing is shown, press its keys."""
    environ = {**os.environ, "TERM": "xterm-256color", **variables}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, environ)
    shown, seen, left = b"", 0, list(steps)
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # what ran there has ended
                break
        if left and left[0][0] in shown[seen:]:
            awaited, keys = left.pop(0)
            seen = shown.index(awaited, seen) + len(awaited)
            os.write(terminal, keys)
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


def test_a_terminal_that_cannot_be_drawn_on_gets_one_line(service: ServiceProcess) -> None:
    code, shown = in_terminal("top", "--url", service.address, TERM="dumb")
    assert code == 2
    assert shown.count(b"\n") == 1
    assert b"TERM is dumb" in shown
    assert b"--json" in shown


def test_nothing_is_drawn_into_a_file_that_errors_go_to(
    service: ServiceProcess, tmp_path: Path
) -> None:
    errors = tmp_path / "errors"
    command = f"{sys.executable} -m headgate top --url {service.address} 2>{errors}"
    code, shown = typed(["sh", "-c", command], (b"in flight", b"q"))
    assert (code, shown) == (2, b"")
    assert errors.read_text() == (
        "headgate: headgate top: needs a terminal, and draws on its standard error; "
        "leave that to the terminal, or use --json, headgate stats or headgate watch instead\n"
    )


def test_it_can_be_put_aside_and_taken_up_again(service: ServiceProcess) -> None:
    # Only a shell with jobs can take a program up again.
    command = f"{sys.executable} -m headgate top --url {service.address}"
    shown = typed(
        ["sh", "-m", "-c", f"{command}; echo put aside; fg; echo left with $?"],
        (b"in flight", b"\x1a"),
        (b"put aside", b""),
        # All of it is drawn again, also what has not changed.
        (b"1 Projects", b"q"),
    )[1]
    assert b"left with 0" in shown


def test_without_a_service_it_ends_with_one_line() -> None:
    code, shown = in_terminal("top", "--url", "http://127.0.0.1:1")
    assert code == 3
    assert shown.startswith(b"headgate: no service answers at http://127.0.0.1:1: ")
    assert shown.count(b"\n") == 1


def test_with_a_token_that_nobody_knows_it_ends_with_one_line(service: ServiceProcess) -> None:
    code, shown = in_terminal("top", "--url", service.address, "--token", "hg_nobody")
    assert code == 4
    assert shown.count(b"\n") == 1


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
        "calls",
    ]
    assert [project["id"] for project in figures["projects"]] == ["default"]
    assert figures["waiting"] == figures["running"] == figures["slots"] == []


@pytest.mark.parametrize(
    ("token_fields", "projects"),
    [
        ({"permissions": ["read"]}, ["default"]),
        ({"permissions": ["read", "submit"], "projectId": "default"}, ["default"]),
        ({"permissions": ["read"], "agentId": "judge"}, []),
    ],
)
def test_as_json_a_token_has_every_pane_of_its_own(
    service: ServiceProcess,
    capsys: pytest.CaptureFixture[str],
    token_fields: dict[str, object],
    projects: list[str],
) -> None:
    wish = {"name": secrets.token_hex(4), **token_fields}
    token = service.ask("POST", "/tokens", wish).body["token"]
    assert run(["top", "--url", service.address, "--token", token, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [project["id"] for project in figures["projects"]] == projects
    assert None not in figures.values()


def test_as_json_a_token_that_may_not_read_is_refused_in_one_line(
    service: ServiceProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    token_fields = {"name": "sender", "permissions": ["submit"]}
    token = service.ask("POST", "/tokens", token_fields).body["token"]
    assert run(["top", "--url", service.address, "--token", token, "--json"]) == 4
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
