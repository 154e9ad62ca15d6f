"""Everything can be reached and done without a mouse."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from browser.live_service import Live
from browser.screens import NAVIGATION
from browser.visiting import Visitor, was_done
from service.support import Gate

# As a person counts them: what Tab comes to, by name or by text.
FOCUSED = """() => {
  const one = document.activeElement;
  return one === document.body ? "" : (one.innerText || one.ariaLabel || one.name || "").trim();
}"""
HAS_RING = """() => {
  const style = getComputedStyle(document.activeElement);
  return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
}"""
MAX_STOPS = 40


def stops(page: Page, until: str) -> list[str]:
    """Press Tab until something is reached, and return what was passed; each must be seen."""
    passed: list[str] = []
    while until not in passed and len(passed) < MAX_STOPS:
        page.keyboard.press("Tab")
        passed.append(page.evaluate(FOCUSED))
        assert page.evaluate(HAS_RING), f"no ring around {passed[-1]!r}"
    assert until in passed, passed
    return passed


def test_the_first_stop_leads_past_the_navigation(visitor: Visitor) -> None:
    page = visitor("/ui/tasks")
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUSED) == "Skip to the content"
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")


def test_tab_goes_through_the_navigation_in_the_order_it_is_read(visitor: Visitor) -> None:
    page = visitor("/")
    passed = stops(page, "Settings")
    names = ["Overview", "Tasks", "Calls", "Projects", "Budgets", "Slots", "Webhooks", "Settings"]
    assert passed == ["Skip to the content", "Headgate", *names]


@pytest.mark.parametrize(("key", "name"), [*zip("otapbswc", NAVIGATION, strict=True)])
def test_g_and_a_letter_go_to_a_page(visitor: Visitor, live: Live, key: str, name: str) -> None:
    page = visitor("/ui/tasks" if name != "tasks" else "/")
    page.keyboard.press("g")
    page.keyboard.press(key)
    expect(page).to_have_url(live.url(NAVIGATION[name]))


def test_the_list_of_keys_opens_closes_and_gives_the_focus_back(visitor: Visitor) -> None:
    page = visitor("/")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_the_list_of_keys_has_the_keys_while_it_is_open(visitor: Visitor, live: Live) -> None:
    page = visitor("/")
    page.keyboard.press("?")
    for key in ("g", "t", "/"):
        page.keyboard.press(key)
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page).to_have_url(live.url("/"))


def test_the_slash_goes_to_a_filter_and_to_no_other_field(visitor: Visitor) -> None:
    page = visitor("/ui/projects/search")
    page.keyboard.press("/")
    expect(page.locator("body")).to_be_focused()
    page.goto(page.url.removesuffix("/search"))
    page.keyboard.press("/")
    expect(page.get_by_label("Find by name")).to_be_focused()


def test_a_letter_that_is_typed_into_a_field_goes_nowhere(visitor: Visitor) -> None:
    page = visitor("/ui/tasks")
    page.keyboard.press("/")
    text = page.get_by_label("Text", exact=True)
    expect(text).to_be_focused()
    page.keyboard.type("go to t?")
    expect(text).to_have_value("go to t?")
    page.keyboard.press("Enter")
    expect(page.get_by_text("No task matches")).to_be_visible()


# Fetched as the stream has it fetched, so that nothing is waited for but the answers.
REFRESHED = """() => new Promise((done) => {
  const region = document.activeElement.closest("[hx-get]");
  document.addEventListener("htmx:afterSettle", () => done(), { once: true });
  htmx.trigger(region, region.getAttribute("hx-trigger").split(" ")[0]);
})"""
WHERE = """() => {
  const one = document.activeElement;
  const row = one.closest("tr, li, article");
  return [one.localName, one.getAttribute("href"), one.innerText.trim(), row && row.innerText];
}"""
PLACES = {
    "a task": ("/ui/tasks", "#rows tbody th a >> nth=1"),
    "an agent of a row": ("/ui/tasks", "#rows tbody tr >> nth=2 >> a.quiet >> nth=1"),
    "the bulk cancel": ("/ui/tasks", "#rows .bulk a >> nth=0"),
    "the overview": ("/", "main [hx-get] a[href] >> nth=0"),
    "a project's link": ("/ui/projects", "main [hx-get] tbody a >> nth=1"),
    "a project's button": ("/ui/projects", "main [hx-get] summary >> nth=1"),
    "a slot's button": ("/ui/slots", "main [hx-get] summary >> nth=1"),
    "a task's button": ("/ui/tasks/{task}", "#task-now summary >> nth=0"),
    "a task's result": ("/ui/tasks/{task}", "#task-now pre >> nth=0"),
}


@pytest.mark.parametrize("place", PLACES)
def test_focus_stays_where_it_is_through_ten_refreshes(
    visitor: Visitor, live: Live, gate: Gate, place: str
) -> None:
    tasks = [live.service.submit(agentId="kept", params=gate.params) for _ in range(4)]
    # One that starts has the page drawn anew, under the hands of whoever looks for a place there.
    # The others may have to wait until it is known what such a task costs.
    live.service.wait_for(tasks[0], "running")
    path, selector = PLACES[place]
    page = visitor(path.format(task=tasks[0]))
    page.locator(selector).focus()
    before = page.evaluate(WHERE)[:3]
    for _ in range(10):
        page.evaluate(REFRESHED)
        assert page.evaluate(WHERE)[:3] == before


def test_focus_goes_with_its_row_when_others_come_before_it(
    visitor: Visitor, live: Live, gate: Gate
) -> None:
    tasks = [live.service.submit(agentId="rows", params=gate.params) for _ in range(2)]
    page = visitor("/ui/tasks?agent=rows")
    page.locator(f"#rows tr:has(a[href$='{tasks[0]}']) a.quiet").first.focus()
    live.service.submit(agentId="rows", params=gate.params)
    expect(page.locator("#rows tbody tr")).to_have_count(3)
    assert tasks[0][-6:] in page.evaluate(WHERE)[3]


def test_a_task_is_cancelled_with_the_keyboard_alone(
    visitor: Visitor, live: Live, gate: Gate
) -> None:
    task = live.service.submit(params=gate.params)
    live.service.wait_for(task, "running")
    page = visitor(f"/ui/tasks/{task}")
    stops(page, "Cancel")
    page.keyboard.press("Enter")
    stops(page, "Cancel the task")
    page.keyboard.press("Enter")
    was_done(page)
    live.service.wait_for(task, "cancelled")
