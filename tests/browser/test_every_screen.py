"""What holds for every screen: it is readable for everybody, fits a phone, and needs no script."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from browser.live_service import Live
from browser.screens import SCREENS, find_places
from browser.visiting import PHONE, Visitor, was_done
from browser.watching import Watch
from service.support import Gate

GRAVE = ("serious", "critical")
AXE = (files("axe_playwright_python") / "axe.min.js").read_text()
RUN_AXE = "async (wish) => (await axe.run({resultTypes: ['violations'], ...wish})).violations"
# Another theme changes the colours of a screen and nothing else.
COLOURS = {"runOnly": ["color-contrast"]}
# A day ahead of whenever these tests run.
LATER = (datetime.now(UTC) + timedelta(days=1)).isoformat()

every_screen = pytest.mark.parametrize("name", SCREENS)


@pytest.fixture(scope="module")
def places(live: Live) -> dict[str, str]:
    """Have something to show on every screen, and return what stands in their addresses."""
    service = live.service
    fields: dict[str, Any] = {
        "projectId": "search",
        "labels": {"team": "blue"},
        "scopes": ["session:shown"],
        "estimate": {"tokens": 500, "usd": "0.01"},
        "callbackUrl": f"{live.receiver.url}/gone",
    }
    for params in ({"error": "no answer"}, {"answer": "because"}):
        service.wait_for(service.submit(**fields, params=params))
    service.submit(projectId="narrow", params={"answer": 1}, notBefore=LATER)
    asked = {"model": "gpt-5", "messages": [{"role": "user", "content": "why?"}]}
    assert service.ask("POST", "/v1/chat/completions", asked).status == 200
    return find_places(service, waiting="projectId=narrow", scope="session:shown")


def come_to(name: str, visitor: Visitor, watch: Watch, live: Live, places: dict[str, str]) -> Page:
    """Come to a screen; one that tells of an error has its status in the console as well."""
    screen = SCREENS[name]
    watch.expect(f"status of {screen.status}")
    page = visitor(None, is_let_in=screen.is_let_in)
    screen.visit(page, places, live.service.address)
    return page


def findings(page: Page, wish: dict[str, Any] | None = None) -> list[str]:
    """Return what axe finds that keeps somebody out, with the places."""
    if not page.evaluate("Boolean(window.axe)"):
        page.evaluate(AXE)
    found = page.evaluate(RUN_AXE, wish or {})
    return [
        f"{one['id']}: {one['help']} at {[node['target'] for node in one['nodes']][:5]}"
        for one in found
        if one["impact"] in GRAVE
    ]


@every_screen
def test_a_screen_keeps_nobody_out_and_fits_a_phone(
    visitor: Visitor, watch: Watch, live: Live, places: dict[str, str], name: str
) -> None:
    page = come_to(name, visitor, watch, live, places)
    assert findings(page) == []
    page.emulate_media(color_scheme="dark")
    assert findings(page, COLOURS) == []
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


def test_screens_are_complete_without_script(
    visitor: Visitor, watch: Watch, live: Live, places: dict[str, str]
) -> None:
    watch.expect("status of 404")
    page = visitor(None, java_script_enabled=False)
    for name, screen in SCREENS.items():
        if name == "keys" or not screen.is_let_in:
            continue
        screen.visit(page, places, live.service.address)
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
