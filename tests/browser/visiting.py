"""What tests do to come to a page, and what they hold in their hands there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, ViewportSize, expect

from service.support import ServiceProcess

WAIT_MS = 8_000
WIDE: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}

Visitor = Callable[..., Page]


class Gate:
    """A file that tasks wait for: they run until it is opened."""

    def __init__(self, path: Path) -> None:
        self.params: dict[str, Any] = {"until": str(path)}
        self._path = path

    def open(self) -> None:
        """Let the tasks end."""
        self._path.touch()


def log_in(page: Page, service: ServiceProcess, path: str = "/") -> None:
    """Log in as a person does, and come to a page."""
    page.goto(f"{service.address}{path}")
    page.get_by_label("Token").fill(service.token)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{service.address}{path}")


def was_done(page: Page, part: str = "") -> None:
    """See that the page says once that something was done."""
    said = page.locator("main > .flash")
    expect(said).to_contain_text("Done:")
    expect(said).to_contain_text(part)
