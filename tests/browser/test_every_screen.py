"""What holds for every screen: it is readable for everybody, fits a phone, and needs no script."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from browser.live_service import Live
from browser.screens import SCREENS
from browser.visiting import PHONE, Gate, Visitor, was_done
from browser.watching import Watch

GRAVE = ("serious", "critical")
AXE = (files("axe_playwright_python") / "axe.min.js").read_text()
RUN_AXE = "async () => (await axe.run({resultTypes: ['violations']})).violations"

every_screen = pytest.mark.parametrize(
    "path", [*SCREENS.values(), "{task}"], ids=[*SCREENS, "task"]
)


@pytest.fixture(scope="module")
def task(live: Live) -> str:
    """Submit a task with something in each of its parts, and return the address of its page."""
    fields: Any = {"labels": {"team": "blue"}, "estimate": {"tokens": 500, "usd": "0.01"}}
    one = live.service.submit(
        projectId="search", input={"question": "why?"}, params={"error": "no answer"}, **fields
    )
    live.service.wait_for(one)
    return f"/ui/tasks/{one}"


def findings(page: Page) -> list[str]:
    """Return what axe finds that keeps somebody out, with the places."""
    page.evaluate(AXE)
    found = page.evaluate(RUN_AXE)
    return [
        f"{one['id']}: {one['help']} at {[node['target'] for node in one['nodes']][:5]}"
        for one in found
        if one["impact"] in GRAVE
    ]


@every_screen
def test_a_screen_keeps_nobody_out_and_fits_a_phone(visitor: Visitor, task: str, path: str) -> None:
    page = visitor(path.format(task=task))
    assert findings(page) == []
    page.emulate_media(color_scheme="dark")
    assert findings(page) == []
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert findings(page) == []


def test_the_login_keeps_nobody_out(visitor: Visitor, watch: Watch) -> None:
    watch.expect("status of 401")
    page = visitor("/ui/login", is_let_in=False)
    page.get_by_label("Token").fill("hg_wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_be_visible()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert findings(page) == []


def test_screens_are_complete_without_script(visitor: Visitor, live: Live, task: str) -> None:
    page = visitor(None, java_script_enabled=False)
    for path in (*SCREENS.values(), task):
        page.goto(live.url(path))
        expect(page.locator("h1")).to_be_attached()
        expect(page.locator("main")).not_to_be_empty()


def test_an_action_is_done_without_script(visitor: Visitor, live: Live, gate: Gate) -> None:
    task = live.service.submit(params=gate.params)
    live.service.wait_for(task, "running")
    page = visitor(f"/ui/tasks/{task}", java_script_enabled=False)
    page.locator("summary", has_text="Cancel").click()
    page.get_by_role("button", name="Cancel the task").click()
    was_done(page)
    live.service.wait_for(task, "cancelled")
