"""The list of tasks: filters in the address, live rows, many tasks cancelled or tried again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Locator, Page, expect

from browser.live_service import Live
from browser.visiting import Visitor, was_done
from browser.watching import Watch
from service.support import Gate, wait_until

NEXT_YEAR = "2099-01-01T00:00"


def rows(page: Page) -> list[str]:
    """Return the ids of the tasks that the page lists."""
    places = page.locator("#rows tbody th a")
    found: list[str] = places.evaluate_all("links => links.map(one => one.href.split('/').pop())")
    return found


def row_of(page: Page, task: str) -> Locator:
    """Return the row of a task."""
    return page.locator("#rows tbody tr", has=page.locator(f"a[href$='{task}']"))


def show(page: Page) -> None:
    """Send the filters, and wait for what they find."""
    with page.expect_navigation():
        page.get_by_role("button", name="Show", exact=True).click()


@pytest.fixture(scope="module")
def two(live: Live) -> tuple[str, str]:
    """Submit two tasks that differ in everything that can be filtered by."""
    first = live.service.submit(
        agentId="reader", projectId="search", target="work", action="needle in hay",
        labels={"team": "blue"}, params={"error": "out of thread"}, maxAttempts=1,
    )  # fmt: skip
    other = live.service.submit(agentId="writer", projectId="evals", target="other", action="sew")
    for task in (first, other):
        live.service.wait_for(task)
    return first, other


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("Project", "search"),
        ("Agent", "reader"),
        ("Label", "team=blue"),
        ("Label", "team"),
        ("Text", "NEEDLE"),
        ("Text", "out of thread"),
        ("Target", "work"),
    ],
)
def test_each_filter_finds_its_task_and_stands_in_the_address(
    visitor: Visitor, two: tuple[str, str], field: str, value: str
) -> None:
    found, other = two
    page = visitor("/ui/tasks")
    if field == "Target":
        page.locator("#more-filters > summary").click()
    page.get_by_label(field, exact=True).fill(value)
    show(page)
    assert parse_qs(urlsplit(page.url).query)[field.lower()] == [value]
    assert found in rows(page)
    assert other not in rows(page)


def test_states_and_times_filter_too(visitor: Visitor, two: tuple[str, str]) -> None:
    found, other = two
    page = visitor("/ui/tasks")
    page.get_by_role("checkbox", name="failed").check()
    show(page)
    assert found in rows(page)
    assert other not in rows(page)
    page.locator("#more-filters > summary").click()
    page.get_by_label("Submitted since (UTC)").fill(NEXT_YEAR)
    show(page)
    expect(page.get_by_text("No task matches")).to_be_visible()
    yesterday = datetime.now(UTC) - timedelta(days=1)
    page.get_by_label("Submitted since (UTC)").fill(f"{yesterday:%Y-%m-%dT%H:%M}")
    page.get_by_label("Submitted before (UTC)").fill(NEXT_YEAR)
    show(page)
    assert found in rows(page)


def test_filters_combine_are_taken_away_and_survive_back_and_sharing(
    visitor: Visitor, two: tuple[str, str]
) -> None:
    found, other = two
    page = visitor("/ui/tasks?project=search")
    page.get_by_label("Agent", exact=True).fill("reader")
    page.get_by_role("checkbox", name="failed").check()
    show(page)
    assert rows(page) == [found]
    shared = page.url
    path = f"{urlsplit(shared).path}?{urlsplit(shared).query}"
    assert rows(visitor(path)) == [found], "the address is enough for another browser"
    page.get_by_role("link", name="project search").click()
    expect(page).not_to_have_url(shared)
    assert "project=" not in page.url
    page.go_back()
    expect(page).to_have_url(shared)
    expect(page.get_by_label("Agent", exact=True)).to_have_value("reader")
    assert rows(page) == [found]
    page.get_by_role("link", name="All tasks", exact=True).click()
    expect(row_of(page, other)).to_be_visible()


def test_a_filter_that_cannot_be_read_says_what_to_correct(visitor: Visitor, watch: Watch) -> None:
    watch.expect("status of 400")
    page = visitor("/ui/tasks?state=tired")
    expect(page.get_by_role("alert")).to_contain_text("Correct the filter")


def test_rows_come_and_change_by_themselves(visitor: Visitor, live: Live, gate: Gate) -> None:
    page = visitor("/ui/tasks?agent=watched")
    expect(page.get_by_text("No task matches")).to_be_visible()
    task = live.service.submit(agentId="watched", params=gate.params)
    row = row_of(page, task)
    expect(row).to_contain_text("running")
    gate.open()
    expect(row).to_contain_text("done")


def test_many_tasks_are_counted_then_cancelled_then_tried_again(
    visitor: Visitor, live: Live, gate: Gate
) -> None:
    tasks = [live.service.submit(agentId="bulk", params=gate.params) for _ in range(3)]
    kept = live.service.submit(agentId="bulk-not", params=gate.params)
    page = visitor("/ui/tasks?agent=bulk")
    page.get_by_role("link", name="Cancel…").click()
    expect(page.get_by_text("3 tasks that are")).to_be_visible()
    assert live.service.task(tasks[0])["state"] != "cancelled", "counting changes nothing"
    page.get_by_role("button", name="Cancel them").click()
    was_done(page, "3")
    for task in tasks:
        live.service.wait_for(task, "cancelled")
    assert live.service.task(kept)["state"] != "cancelled"
    page.get_by_role("link", name="Retry…").click()
    expect(page.get_by_text("3 tasks that are")).to_be_visible()
    page.get_by_role("button", name="Retry them").click()
    was_done(page, "3")
    wait_until(lambda: len(_of_agent(live, "bulk")) == 6, seconds=40)


def _of_agent(live: Live, agent: str) -> list[str]:
    listed = live.service.ask("GET", f"/tasks?agentId={agent}").body["tasks"]
    return [one["taskId"] for one in listed]


def test_older_tasks_are_a_page_away_and_newer_ones_a_way_back(
    visitor: Visitor, live: Live
) -> None:
    batch = {"agentId": "paged", "tasks": [{"action": f"step {number}"} for number in range(40)]}
    for _ in range(2):
        assert live.service.ask("POST", "/tasks/batch", batch).status == 202
    page = visitor("/ui/tasks?agent=paged")
    first = rows(page)
    page.get_by_role("link", name="Older").click()
    expect(page.get_by_role("link", name="Newest")).to_be_visible()
    second = rows(page)
    assert len(first) == 50
    assert len(second) == 30
    assert not set(first) & set(second)
    page.get_by_role("link", name="Newest").click()
    expect(page.locator("#rows tbody tr")).to_have_count(50)
