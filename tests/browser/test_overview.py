"""The overview: the figures move by themselves, and what needs attention is on top."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import expect

from browser.live_service import Live
from browser.visiting import Gate, Visitor


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


def test_a_wait_is_told_in_its_own_unit(visitor: Visitor, live: Live) -> None:
    names = ("queued", "inflight", "completed", "failed", "spentUsd")
    columns: dict[str, Any] = {name: [0, 0] for name in names}
    columns |= {"at": [1_790_000_000, 1_790_000_005], "stepSeconds": 5}
    columns |= {"waitAverage": [1, 0.0067], "wait95": [1, 150]}
    page = visitor(None)
    page.route("**/ui/history?*", lambda route: route.fulfill(json=columns))
    page.goto(live.url())
    legend = page.locator("[data-chart=wait] .u-legend")
    expect(legend).to_have_text(re.compile(r"average6\.7 ms95 %2\.5 min"))


def test_what_was_opened_stays_open_when_the_figures_are_drawn_anew(
    visitor: Visitor, live: Live
) -> None:
    page = visitor("/")
    page.locator("summary", has_text="The same as a table").click()
    with page.expect_response(lambda answer: "hx-request" in answer.request.headers):
        live.service.submit()
    expect(page.locator("summary", has_text="The same as a table").locator("..")).to_have_attribute(
        "open", ""
    )
