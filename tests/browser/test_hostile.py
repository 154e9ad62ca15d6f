"""Whoever names something wants to run something here, hide something or break a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from browser.hostile_service import MARKS, NAME, PROJECT, SCOPE, Hostile, hostile_service
from browser.screens import SCREENS
from browser.visiting import PHONE, WIDE, login_of, visits_to
from browser.watching import Watch

FOREIGN = "main script, main iframe, main object, main img, main svg[onload]"
RUNS = "<script>window.ran.push('script')</script>"
DRAWS = "<svg onload"
WRITTEN = {
    "overview": DRAWS,
    "tasks": DRAWS,
    "calls": RUNS,
    "call": RUNS,
    "projects": NAME,
    "budgets": SCOPE,
    "slots": RUNS,
    "webhooks": RUNS,
    "settings": NAME,
    "task-done": RUNS,
    "task-failed": RUNS,
    "task-waits": NAME,
    "project": PROJECT,
    "budget": SCOPE,
    "slot": RUNS,
    "slot-log": DRAWS,
    "webhook": RUNS,
    "audit": NAME,
    "tokens": NAME,
}
"""A part of what was written by somebody hostile, for each screen that shows such a text."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    """Run a service that is full of what hostile people wrote."""
    with hostile_service(tmp_path_factory.mktemp("hostile")) as one:
        yield one


@pytest.fixture(scope="module")
def let_in(browser: Browser, hostile: Hostile) -> Any:
    """Log in once, and give the cookies that this leaves."""
    return login_of(browser, hostile.service)


@pytest.fixture
def page(browser: Browser, hostile: Hostile, let_in: Any, watch: Watch) -> Iterator[Page]:
    """Open a page at this service."""
    with visits_to(hostile.service, browser, let_in, watch) as open_page:
        yield open_page(None)


def nothing_happened(page: Page) -> None:
    """See that nothing of theirs ran, became a part of the page or turned its direction."""
    assert page.evaluate("window.ran") == []
    assert page.locator(FOREIGN).count() == 0
    assert page.locator("a[href^='javascript:']").count() == 0
    assert not set(page.locator("main").inner_text()) & set(MARKS)
    assert len(page.content()) < 150_000, "a megabyte is not in the page"


@pytest.mark.parametrize("name", [name for name, one in SCREENS.items() if one.is_let_in])
def test_what_they_wrote_is_text_on_every_screen_and_fits_a_phone(
    page: Page, watch: Watch, hostile: Hostile, name: str
) -> None:
    watch.expect(f"status of {SCREENS[name].status}")
    SCREENS[name].visit(page, hostile.places, hostile.service.address)
    expect(page.locator("main")).to_contain_text(WRITTEN.get(name, ""))
    nothing_happened(page)
    for size in (WIDE, PHONE):
        page.set_viewport_size(size)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_the_list_finds_a_task_by_its_text_and_leads_to_its_agent(
    page: Page, hostile: Hostile
) -> None:
    page.goto(f"{hostile.service.address}/ui/tasks")
    page.get_by_label("Text", exact=True).fill("<script>window.ran")
    page.get_by_role("button", name="Show", exact=True).click()
    row = page.locator("#rows tbody tr", has=page.locator(f"a[href$='{hostile.answered}']"))
    page.wait_for_url("**?text=*")
    # Its page has no room for others: it is larger than what one page may have together.
    page.get_by_role("link", name="Older", exact=True).click()
    expect(row).to_contain_text("<script>window.ran.push('script')")
    row.get_by_role("link", name=NAME[:20]).first.click()
    page.wait_for_url("**&agent=*")
    page.get_by_role("link", name="Older", exact=True).click()
    expect(row).to_be_visible()
    nothing_happened(page)


def test_the_raw_text_of_a_task_is_whole_and_runs_nothing(page: Page, hostile: Hostile) -> None:
    page.goto(f"{hostile.service.address}/ui/tasks/{hostile.answered}")
    with page.expect_response(lambda answer: answer.url.endswith("/raw")) as found:
        page.get_by_role("link", name="Raw JSON", exact=True).click()
    assert found.value.headers["content-type"].startswith("application/json")
    assert found.value.headers["x-content-type-options"] == "nosniff"
    assert page.evaluate("window.ran") == []
