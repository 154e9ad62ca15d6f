"""`make screenshots`: every screen of the demonstration, light and dark, on a desk and on a phone.

All of them go to build/screenshots, to be looked at; those that the documentation shows go to
docs/images as well. Rule: what is committed is small, and made by nothing but this.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page, sync_playwright

from browser.chromium import ADVICE, chromium_path
from browser.screens import SCREENS
from browser.visiting import PHONE, WIDE
from browser.watching import SERVER_FAULT
from service.support import ROOT, ServiceProcess, wait_until

FOLDER = ROOT / "build/screenshots"
IMAGES = ROOT / "docs/images"
IN_DOCS = (
    "overview-light-wide",
    "overview-dark-wide",
    "overview-light-phone",
    "tasks-light-wide",
    "task-waits-light-wide",
    "projects-light-wide",
    "budgets-light-wide",
    "slots-light-wide",
    "settings-light-wide",
)
# A task of the project that is paused waits for as long as it is looked at.
TASKS = {
    "task-done": "state=done",
    "task-failed": "state=failed",
    "task-waits": "state=queued&projectId=archive",
}
ENDED_TASKS = 250
ALIVE_SECONDS = 240.0
QUALITY = 70
SETTLE_MS = 1_500

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
    paths = {**SCREENS, **dict(further(service))}
    for scheme in SCHEMES:
        for width, size in (("wide", WIDE), ("phone", PHONE)):
            with browser.new_context(color_scheme=scheme, viewport=size) as context:
                page = context.new_page()
                for name, path in paths.items():
                    visit(page, f"{service.address}{path}")
                    keep(page, f"{name}-{scheme}-{width}")
    browser.close()


def visit(page: Page, url: str) -> None:
    """Open a screen and let its charts be drawn, which happens after their figures have come."""
    answer = page.goto(url)
    if answer is None or answer.status >= SERVER_FAULT:
        sys.exit(f"{url} cannot be drawn: {page.locator('main').inner_text()}")
    page.wait_for_timeout(SETTLE_MS)


def further(service: ServiceProcess) -> Iterator[tuple[str, str]]:
    """Return the screens whose addresses depend on what the demonstration has done."""
    for name, which in TASKS.items():
        tasks = service.ask("GET", f"/tasks?limit=1&{which}").body["tasks"]
        yield name, f"/ui/tasks/{tasks[0]['taskId']}"
    project = service.ask("GET", "/projects").body["projects"][-1]["id"]
    yield "project", f"/ui/projects/{project}"
    yield "budget", "/ui/budgets?scope=session%3Aload-test"
    slot = service.ask("GET", "/slots").body["slots"][0]["name"]
    yield "slot", f"/ui/slots/{slot}"
    webhook = service.ask("GET", "/webhooks?state=dead&limit=1").body["webhooks"][0]["id"]
    yield "webhook", f"/ui/webhooks/{webhook}"
    yield "audit", "/ui/settings/audit"
    yield "tokens", "/ui/settings/tokens"
    yield "bulk-cancel", "/ui/tasks/cancel?state=queued"
    yield "not-found", "/ui/tasks/none"


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
