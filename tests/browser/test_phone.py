"""On a phone everything is reached, and a list shows more than a task or two."""

from __future__ import annotations

from playwright.sync_api import FloatRect, Locator, expect

from browser.live_service import Live
from browser.screens import NAVIGATION
from browser.visiting import PHONE, Visitor
from service.support import Gate

MAX_CARD_HEIGHT = 160


def box(one: Locator) -> FloatRect:
    """Return where something is drawn; a region that is drawn anew now is asked again."""
    found = None
    while found is None:
        expect(one).to_be_visible()
        found = one.bounding_box()
    return found


def test_the_whole_navigation_is_seen(visitor: Visitor) -> None:
    links = visitor("/", viewport=PHONE).locator(".top nav a")
    expect(links).to_have_count(len(NAVIGATION))
    for link in links.all():
        place = box(link)
        assert place["x"] >= 0
        assert place["x"] + place["width"] <= PHONE["width"]


def test_a_task_is_a_small_card_with_its_state_beside_its_id(
    visitor: Visitor, live: Live, gate: Gate
) -> None:
    live.service.wait_for(live.service.submit(agentId="phone", params={"error": "no"}), "failed")
    runs = live.service.submit(agentId="phone", params=gate.params, labels={"team": "blue"})
    live.service.wait_for(runs, "running")
    page = visitor("/ui/tasks?agent=phone", viewport=PHONE)
    row = page.locator("#rows tbody tr", has_text="running")
    name, state = box(row.locator("th")), box(row.locator(".state"))
    assert abs(name["y"] + name["height"] / 2 - state["y"] - state["height"] / 2) < state["height"]
    assert state["x"] > name["x"]
    assert box(row)["height"] < MAX_CARD_HEIGHT
    expect(row.locator("[data-label=Used]")).to_be_hidden()
    expect(row.locator(".error")).to_have_count(0)
    failed = page.locator("#rows tbody tr", has_text="failed")
    expect(failed.locator(".error")).to_be_visible()


def test_a_project_is_a_small_card_with_its_buttons(visitor: Visitor) -> None:
    page = visitor("/ui/projects?find=narrow", viewport=PHONE)
    row = page.locator("#project-rows tbody tr")
    assert box(row)["height"] < MAX_CARD_HEIGHT + 60
    expect(row.get_by_role("button", name="Pause")).to_be_in_viewport()
