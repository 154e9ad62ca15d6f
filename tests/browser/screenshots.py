"""`make screenshots`: every screen of the demonstration, light and dark, on a desk and on a phone.

All of them go to build/screenshots, to be looked at; those that the documentation shows go to
docs/images as well. Rule: what is committed is small, and made by nothing but this. The login is
left out, since the demonstration lets everybody in.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page, sync_playwright

from browser.chromium import ADVICE, chromium_path
from browser.screens import SCREENS, find_places
from browser.visiting import PHONE, WIDE
from service.support import ROOT, ServiceProcess, wait_until

FOLDER = ROOT / "build/screenshots"
IMAGES = ROOT / "docs/images"
IN_DOCS = (
    "overview-light-wide",
    "overview-dark-wide",
    "overview-light-phone",
    "tasks-light-wide",
    "task-waits-light-wide",
    "calls-light-wide",
    "projects-light-wide",
    "budgets-light-wide",
    "budgets-dark-wide",
    "slots-light-wide",
    "webhooks-light-wide",
    "settings-light-wide",
)
# A task of the project that is paused waits for as long as it is looked at.
WAITING = "projectId=archive"
USED_UP_SCOPE = "session:load-test"
ENDED_TASKS = 250
ALIVE_SECONDS = 240.0
QUALITY = 70

Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")


def main() -> None:
    """Start the demonstration, wait until it has something to show, and draw it."""
    path = chromium_path()
    if path is None:
        sys.exit(ADVICE)
    FOLDER.mkdir(parents=True, exist_ok=True)
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        service = ServiceProcess(Path(folder), "--demo")
        service.start()
        try:
            wait_until(lambda: is_alive(service), seconds=ALIVE_SECONDS, what=service.output)
            draw(playwright.chromium.launch(executable_path=path), service)
        finally:
            service.stop()


def is_alive(service: ServiceProcess) -> bool:
    """Tell whether the demonstration has run long enough for charts to have a shape."""
    done = service.ask("GET", "/scheduler/stats").body["metrics"]["tasksCompleted"]
    return bool(done >= ENDED_TASKS)


def draw(browser: Browser, service: ServiceProcess) -> None:
    """Draw every screen in both themes and both widths."""
    places = find_places(service, waiting=WAITING, scope=USED_UP_SCOPE)
    for scheme in SCHEMES:
        for width, size in (("wide", WIDE), ("phone", PHONE)):
            with browser.new_context(color_scheme=scheme, viewport=size) as context:
                page = context.new_page()
                for name, screen in SCREENS.items():
                    if screen.is_let_in:
                        screen.visit(page, places, service.address)
                        wait_for_charts(page)
                        keep(page, f"{name}-{scheme}-{width}")
    browser.close()


def wait_for_charts(page: Page) -> None:
    """Let the charts of a screen be drawn, which happens after their figures have come."""
    for chart in page.locator("[data-chart]").all():
        chart.locator(".u-legend").wait_for()


def keep(page: Page, name: str) -> None:
    """Write a screen whole, and what is first seen of it for the documentation."""
    page.screenshot(path=FOLDER / f"{name}.png", full_page=True)
    if name in IN_DOCS:
        (IMAGES / f"{name.removesuffix('-wide')}.webp").write_bytes(small_picture(page))


def small_picture(page: Page) -> bytes:
    """Return what is seen without scrolling, in a format that is small."""
    session = page.context.new_cdp_session(page)
    wish: dict[str, Any] = {"format": "webp", "quality": QUALITY}
    return base64.b64decode(session.send("Page.captureScreenshot", wish)["data"])


if __name__ == "__main__":
    main()
