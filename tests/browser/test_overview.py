"""The overview: the figures move by themselves, and what needs attention is on top."""

from __future__ import annotations

from playwright.sync_api import expect

from browser.live_service import Live
from browser.visiting import Visitor
from service.support import Gate


def test_the_figures_and_charts_are_drawn_and_follow_what_happens(
    visitor: Visitor, live: Live, gate: Gate
) -> None:
    page = visitor("/")
    in_flight = page.locator(".tile", has_text="In flight").locator("data")
    before = int(in_flight.get_attribute("value") or 0)
    tasks = [live.service.submit(params=gate.params) for _ in range(2)]
    expect(in_flight).to_have_attribute("value", str(before + 2))
    gate.open()
    for task in tasks:
        live.service.wait_for(task)
    expect(in_flight).to_have_attribute("value", str(before))
    expect(page.locator("canvas").first).to_be_visible()


def test_what_was_opened_stays_open_when_the_figures_are_drawn_anew(
    visitor: Visitor, live: Live
) -> None:
    page = visitor("/")
    page.locator("summary", has_text="Show as a table").click()
    with page.expect_response(lambda answer: "hx-request" in answer.request.headers):
        live.service.submit()
    expect(page.locator("summary", has_text="Show as a table").locator("..")).to_have_attribute(
        "open", ""
    )
