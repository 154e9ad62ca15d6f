"""One browser and one service for all tests here; a fresh visitor, watched, for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from browser.chromium import ADVICE, chromium_path
from browser.live_service import Live, live_service
from browser.visiting import WAIT_MS, Visitor, login_of, visits_to
from browser.watching import Watch
from service.support import Gate
from service.tls_proxy import NAME

expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start the system's Chromium, or end the run and say how to install one."""
    path = chromium_path()
    if path is None:
        pytest.exit(ADVICE, returncode=1)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path, args=[f"--host-resolver-rules=MAP {NAME} 127.0.0.1"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run the service that most tests visit."""
    with live_service(tmp_path_factory.mktemp("live")) as one:
        yield one


@pytest.fixture(scope="session")
def login(browser: Browser, live: Live) -> Any:
    """Log in once, and give the cookies that this leaves."""
    return login_of(browser, live.service)


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Note what goes wrong on the pages of a test, and fail for it at the end."""
    one = Watch()
    yield one
    assert one.faults == []


@pytest.fixture
def visitor(browser: Browser, live: Live, login: Any, watch: Watch) -> Iterator[Visitor]:
    """Open pages of the service that most tests visit."""
    with visits_to(live.service, browser, login, watch) as open_page:
        yield open_page


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Give something that tasks wait for, and let them end with the test."""
    one = Gate(tmp_path / "go on")
    yield one
    one.open()
