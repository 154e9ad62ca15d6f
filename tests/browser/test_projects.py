"""Projects and agents: weights, shares, pausing, draining, and everything at once."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from browser.live_service import Live
from browser.visiting import Visitor, was_done
from service.support import Gate


def test_a_changed_weight_moves_the_shares(visitor: Visitor, live: Live) -> None:
    other = visitor("/ui/projects/evals")
    target = other.locator("#share-rows li", has_text="search").locator(".beside")
    before = target.inner_text()
    page = visitor("/ui/projects")
    page.get_by_role("link", name="Change search").click()
    page.get_by_label("Weight").fill("30")
    page.get_by_role("button", name="Save").click()
    was_done(page, "its target share was")
    expect(page.locator("#project-now")).to_contain_text("changed")
    expect(target).not_to_have_text(before)
    page.locator("summary", has_text="Back to the file").click()
    page.get_by_role("button", name="Undo the changes").click()
    was_done(page)
    expect(target).to_have_text(before)


def test_a_weight_that_is_none_is_refused_with_the_reason(visitor: Visitor) -> None:
    page = visitor("/ui/projects/evals")
    page.get_by_label("Weight").fill("much")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("alert")).to_contain_text("Not done:")


def test_a_project_is_paused_resumed_and_drained(visitor: Visitor, live: Live, gate: Gate) -> None:
    page = visitor("/ui/projects")
    row = page.locator("#project-rows tr", has_text="switched")
    row.get_by_role("button", name="Pause").click()
    was_done(page, "is paused")
    task = live.service.submit(projectId="switched", agentId="switched-1")
    waiting = visitor(f"/ui/tasks/{task}")
    expect(waiting.locator(".reasons")).to_contain_text("paused")
    row.get_by_role("button", name="Resume").click()
    was_done(page, "is active")
    expect(waiting.locator(".head .state")).to_contain_text("done")
    row.get_by_role("link", name="switched", exact=True).click()
    page.locator("summary", has_text="Drain").click()
    page.get_by_role("button", name="Drain").click()
    was_done(page, "drains")
    refused = live.service.ask(
        "POST", "/tasks", {"projectId": "switched", "agentId": "a", "action": "late"}
    )
    assert refused.status >= 400
    page.get_by_role("button", name="Resume").click()
    was_done(page, "is active")


def test_everything_is_paused_and_resumed(visitor: Visitor, live: Live) -> None:
    page = visitor("/ui/projects")
    page.locator("summary", has_text="Pause everything").click()
    page.locator("form").get_by_role("button", name="Pause everything").click()
    was_done(page, "everything is paused")
    task = live.service.submit()
    overview = visitor("/")
    expect(overview.locator(".attention")).to_contain_text("paused")
    page.get_by_role("button", name="Resume everything").click()
    was_done(page)
    live.service.wait_for(task, "done")
    expect(overview.locator("body")).not_to_contain_text("verything is paused")


def test_the_places_of_an_agent_are_changed(visitor: Visitor, live: Live, gate: Gate) -> None:
    live.service.submit(agentId="placed", params=gate.params)
    page = visitor("/ui/projects?find=placed")
    row = page.locator("#agent-rows tr", has_text="placed")
    row.locator("summary", has_text="Change").click()
    row.get_by_label("Capacity").fill("7")
    row.get_by_role("button", name="Save").click()
    was_done(page, "placed was changed")
    expect(row).to_contain_text("1 of 7")
    expect(page.locator("#lane-rows")).to_contain_text("placed")


def test_a_form_that_is_open_is_not_taken_away_by_news(
    visitor: Visitor, live: Live, gate: Gate
) -> None:
    # What costs nothing need not wait until the first of its kind has told what it cost.
    free: dict[str, Any] = {"agentId": "typed", "costUsd": 0, "params": gate.params}
    live.service.submit(**free)
    page = visitor("/ui/projects?find=typed")
    row = page.locator("#agent-rows tr", has_text="typed")
    row.locator("summary", has_text="Change").click()
    row.get_by_label("Capacity").fill("9")
    lanes = page.locator("#lane-rows tr", has_text="typed")
    live.service.submit(**free)
    expect(lanes.locator("[data-label='In flight']")).to_have_text("2")
    expect(row.get_by_label("Capacity")).to_have_value("9")
