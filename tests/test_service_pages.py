"""Pages that talk to a service: their `shell` blocks run beside a real one, with their settings."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from typing import IO

import pytest

from doc_pages import PAGES, ROOT, Output, blocks_of, name_of
from service.fake_providers import fake_provider
from service.support import running_service

SHOWN_PLACE = "127.0.0.1:7420"
PATIENCE_SECONDS = 20.0
LOOK_SECONDS = 0.05
SHOWN_PORT = "7430"
LOOKS = (
    "show ",
    "cat ",
    "headgate show",
    "headgate slots log",
    "headgate slots status",
    "headgate tasks",
    "headgate why",
    "headgate webhooks list",
)
"""Commands that change nothing, so that they can be run until they show what the page does."""

SERVICE_PAGES = [
    page
    for page in PAGES
    if any(block.language == "shell" for block in blocks_of(page.read_text()))
]


class Shell:
    """One shell in which the commands of a page run, so that they share variables."""

    def __init__(self, input_: IO[str], output: IO[str]) -> None:
        self._input = input_
        self._output = output

    def run(self, command: str) -> str:
        """Run a command, and return what it prints."""
        self._input.write(f"{command}\necho; echo end of command\n")
        self._input.flush()
        lines = list(iter(self._output.readline, "end of command\n"))
        return "".join(lines).removesuffix("\n")


@contextmanager
def shell_in(folder: Path, address: str) -> Iterator[Shell]:
    (folder / "docs").symlink_to(ROOT / "docs")
    commands = Path(sys.executable).parent
    process = subprocess.Popen(
        ["bash"],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "HEADGATE_URL": address,
            "XDG_DATA_HOME": str(folder / "nothing"),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        yield Shell(process.stdin, process.stdout)
        process.stdin.close()


def commands_of(page: Path) -> list[tuple[str, str]]:
    """Return each command of a page with the output that it shows."""
    bodies = [block.body for block in blocks_of(page.read_text()) if block.language == "shell"]
    found: list[tuple[str, str]] = []
    for body in bodies:
        parts = re.split(r"^\$ (.*)\n", body, flags=re.MULTILINE)
        found += zip(parts[1::2], parts[2::2], strict=True)
    return found


def settings_name(page: Path) -> str:
    """Return the name under which a page has its settings saved."""
    named = re.search(r"^Save this as `(\S+)`:$", page.read_text(), re.MULTILINE)
    return named[1] if named else "page.toml"


def settings_of(page: Path) -> str:
    """Return the settings that a page starts its service with: its first block of TOML."""
    return next(b.body for b in blocks_of(page.read_text()) if b.language == "toml")


def provider_of(page: Path, port: str) -> AbstractContextManager[object]:
    """Serve the fake provider that a page has started before its service, if it does so."""
    is_started = "\nheadgate slots fake-provider\n" in page.read_text()
    return fake_provider(port=port) if is_started else nullcontext()


def run_until_right(shell: Shell, command: str, shown: str) -> str:
    """Run a command; one that only looks is run again until it shows what the page does."""
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        printed = shell.run(command)
        only_looks = command.startswith(LOOKS)
        if not only_looks or Output(shown, printed).is_right or time.monotonic() > ends_at:
            return printed
        time.sleep(LOOK_SECONDS)


def test_there_is_a_page_that_talks_to_a_service() -> None:
    names = {name_of(page) for page in SERVICE_PAGES}
    assert names >= {"docs/tutorials/first-service.md", "docs/tutorials/operate-a-service.md"}


@pytest.mark.parametrize("page", SERVICE_PAGES, ids=name_of)
def test_what_a_page_says_to_a_service_is_answered_as_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    settings = tmp_path / settings_name(page)
    settings.write_text(settings_of(page).replace(SHOWN_PORT, port))
    monkeypatch.setenv("FAKE_KEY", "any-text")
    with (
        provider_of(page, port),
        running_service(tmp_path, "--config", str(settings)) as service,
        shell_in(tmp_path, service.address) as sh,
    ):
        places = {SHOWN_PLACE: service.address.removeprefix("http://"), SHOWN_PORT: port}
        for command, shown in commands_of(page):
            there = reduce(lambda text, place: text.replace(*place), places.items(), command)
            printed = run_until_right(sh, there, shown)
            assert Output(shown, printed).is_right, f"$ {command}\n{printed}\n{service.output()}"


def free_port() -> str:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])
