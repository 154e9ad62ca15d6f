"""A task whose sender wants to run something here, hide something or break the page."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from browser.live_service import Live
from browser.screens import SCREENS
from browser.visiting import PHONE, Visitor

SCRIPT = "\"'><script>window.ran.push('script')</script><img src=x onerror=window.ran.push('img')>"
# Short enough for names, which end at 128 characters, and for the keys of labels.
NAME = "</td><svg onload=window.ran.push('name')>{{7*7}}"
BACKWARDS = "\u202egnp.exe\u202c \u2066\u200b\x1b[31m"
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def task(live: Live) -> str:
    """Submit a task that is hostile in every field that may hold a text."""
    fields: dict[str, Any] = {
        "agentId": NAME,
        "action": SCRIPT,
        "selector": SCRIPT,
        "ref": NAME,
        "tabId": NAME,
        "labels": {NAME: SCRIPT, "javascript:alert(1)": "javascript:window.ran.push('label')"},
        "input": {SCRIPT: SCRIPT + BACKWARDS},
        "callbackUrl": f"{live.receiver.url}/gone?x={'%3Cscript%3E'}window.ran.push('url')",
        "params": {"error": SCRIPT + BACKWARDS + "A" * (MEGABYTE // 2)},
    }
    failed = live.service.submit(**fields)
    answered = live.service.submit(
        **{**fields, "params": {"answer": SCRIPT + BACKWARDS + "long " * (MEGABYTE // 6)}}
    )
    for one in (failed, answered):
        live.service.wait_for(one, "failed", "done")
    return answered


def nothing_ran(page: Page) -> None:
    """See that nothing of the sender ran, and that what was sent is there as text."""
    assert page.evaluate("window.ran") == []
    assert page.locator("main script, main iframe, main object, main img").count() == 0
    assert page.locator("a[href^='javascript:']").count() == 0


@pytest.mark.parametrize("path", [*SCREENS.values()], ids=[*SCREENS])
def test_nothing_of_it_runs_on_any_screen(visitor: Visitor, task: str, path: str) -> None:
    page = visitor(path)
    expect(page.locator("main")).to_be_visible()
    nothing_ran(page)


def test_the_list_shows_it_as_text_and_finds_it_by_its_text(visitor: Visitor, task: str) -> None:
    page = visitor("/ui/tasks")
    page.get_by_label("Text", exact=True).fill("<script>window.ran")
    page.get_by_role("button", name="Show", exact=True).click()
    row = page.locator("#rows tbody tr", has=page.locator(f"a[href$='{task}']"))
    expect(row).to_contain_text("<script>window.ran.push('script')")
    row.get_by_role("link", name=NAME[:20]).first.click()
    expect(row).to_be_visible()
    nothing_ran(page)


@pytest.mark.parametrize("options", [{}, {"viewport": PHONE}], ids=["wide", "phone"])
def test_its_own_page_shows_its_text_with_marks_written_out(
    visitor: Visitor, task: str, options: dict[str, Any]
) -> None:
    page = visitor(f"/ui/tasks/{task}", **options)
    main = page.locator("main")
    expect(main).to_contain_text("<script>window.ran.push('script')</script>")
    text = main.inner_text()
    assert not set(text) & set("\u202e\u202c\u2066\u200b\x1b")
    assert "{{7*7}}" in text
    assert len(page.content()) < 150_000, "a megabyte is not in the page"
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= page.evaluate("window.innerWidth")
    nothing_ran(page)


def test_its_raw_text_is_whole_and_runs_nothing(visitor: Visitor, live: Live, task: str) -> None:
    page = visitor(f"/ui/tasks/{task}")
    with page.expect_response(lambda answer: answer.url.endswith("/raw")) as found:
        page.get_by_role("link", name="Raw JSON", exact=True).click()
    assert found.value.headers["content-type"].startswith("application/json")
    assert found.value.headers["x-content-type-options"] == "nosniff"
    assert page.evaluate("window.ran") == []
