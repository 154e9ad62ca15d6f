"""Pages that talk to a service: their `shell` blocks run beside a real one, with their settings."""

from __future__ import annotations

import re
import time
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from pathlib import Path

import pytest

from doc_pages import PAGES, Output, blocks_of, name_of
from doc_shells import Shell, commands_of, saved_files, shell_in
from executors.endpoint import free_port
from service.fake_providers import fake_provider
from service.support import running_service

SHOWN_PLACE = "127.0.0.1:7420"
PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 0.05
SHOWN_PORT = "7430"
LOOKS = (
    "show ",
    "cat ",
    "headgate show",
    "headgate slot log",
    "headgate slot list",
    "headgate calls",
    "headgate tasks",
    "headgate why",
    "headgate webhooks list",
)
"""Commands that change nothing, so that they can be run until they show what the page does."""

SERVICE_PAGES = [
    page
    for page in PAGES
    if {"shell", "toml"} <= {block.language for block in blocks_of(page.read_text())}
]


def settings_name(page: Path) -> str:
    """Return the name under which a page has its settings saved."""
    names = saved_files(page.read_text())
    return next((name for name in names if name.endswith(".toml")), "page.toml")


def settings_of(page: Path) -> str:
    """Return the settings that a page starts its service with: its first block of TOML."""
    return next(b.body for b in blocks_of(page.read_text()) if b.language == "toml")


def provider_of(page: Path, port: str) -> AbstractContextManager[object]:
    """Serve the fake provider that a page has started before its service, if it does so."""
    is_started = "\nheadgate fake-provider\n" in page.read_text()
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
    assert names >= {"docs/tutorials/gateway.md", "docs/tutorials/service.md"}


@pytest.mark.parametrize("page", SERVICE_PAGES, ids=name_of)
def test_what_a_page_says_to_a_service_is_answered_as_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = str(free_port())
    for name, body in saved_files(page.read_text()).items():
        (tmp_path / name).write_text(body)
    settings = tmp_path / settings_name(page)
    settings.write_text(settings_of(page).replace(SHOWN_PORT, port))
    for variable in re.findall(r'key_env = "(\w+)"', settings.read_text()):
        # Each key has a window of its own at the fake provider.
        monkeypatch.setenv(variable, f"any-text-{variable}")
    with (
        provider_of(page, port),
        running_service(tmp_path, "--config", str(settings)) as service,
        shell_in(tmp_path, HEADGATE_URL=service.address) as sh,
    ):
        places = {SHOWN_PLACE: service.address.removeprefix("http://"), SHOWN_PORT: port}
        for command, shown in commands_of(page):
            there = reduce(lambda text, place: text.replace(*place), places.items(), command)
            printed = run_until_right(sh, there, shown)
            assert Output(shown, printed).is_right, f"$ {command}\n{printed}\n{service.output()}"
