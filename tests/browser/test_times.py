"""Times of a page: in the zone of the visitor, with its name, and in UTC for the service."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from browser.live_service import Live
from browser.visiting import Visitor

BERLIN = {"timezone_id": "Europe/Berlin"}
LOCAL = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d CES?T")


def test_times_are_local_with_the_name_of_the_zone(visitor: Visitor, live: Live) -> None:
    task = live.service.submit()
    live.service.wait_for(task, "done")
    page = visitor(f"/ui/tasks/{task}", **BERLIN)
    first = page.locator(".timeline time").first
    expect(first).to_have_text(LOCAL)
    expect(page.locator(".foot")).to_contain_text(
        re.compile(r"times are in CES?T \(Europe/Berlin\)")
    )
    shown = first.evaluate(
        """(one) => one.textContent.slice(0, 16) === new Date(one.dateTime)
             .toLocaleString("sv-SE", {timeZone: "Europe/Berlin"}).slice(0, 16)"""
    )
    assert shown
    expect(page.locator("main")).not_to_contain_text(re.compile(r"\d:\d\d:\d\d UTC"))


def test_what_is_drawn_later_is_local_too(visitor: Visitor, live: Live) -> None:
    page = visitor("/ui/tasks", **BERLIN)
    task = live.service.submit()
    row = page.locator("tr", has=page.locator(f"a[href='/ui/tasks/{task}']"))
    expect(row.locator("time").first).to_have_attribute("title", LOCAL)


def test_what_somebody_wrote_is_left_as_it_is(visitor: Visitor, live: Live) -> None:
    task = live.service.submit(params={"note": "2026-01-31 12:00 UTC"})
    live.service.wait_for(task, "done")
    page = visitor(f"/ui/tasks/{task}", **BERLIN)
    expect(page.locator(".timeline time").first).to_have_text(LOCAL)
    expect(page.locator("pre", has_text="note").first).to_contain_text("2026-01-31 12:00 UTC")


def test_a_filter_by_time_is_filled_in_local_and_sent_in_utc(visitor: Visitor) -> None:
    page = visitor("/ui/tasks", timezone_id="America/New_York")
    page.locator("summary", has_text="time").click()
    since = page.get_by_label("Submitted since (E")
    since.fill("2026-01-31T07:30")
    page.get_by_role("button", name="Show").click()
    expect(page).to_have_url(re.compile(r"since=2026-01-31T12%3A30"))
    expect(page.get_by_label("Submitted since (E")).to_have_value("2026-01-31T07:30")


def test_fractions_of_a_second_stay(visitor: Visitor) -> None:
    page = visitor("/ui/tasks", **BERLIN)
    shown = page.evaluate(
        """() => {
             const one = document.body.appendChild(document.createElement("p"));
             one.textContent = "2026-01-31 12:00:01.250 UTC";
             document.dispatchEvent(new CustomEvent("htmx:afterSettle", {detail: {target: one}}));
             return one.textContent;
           }"""
    )
    assert shown == "2026-01-31 13:00:01.250 CET"


def test_in_utc_nothing_is_written_anew(visitor: Visitor, live: Live) -> None:
    task = live.service.submit()
    live.service.wait_for(task, "done")
    page = visitor(f"/ui/tasks/{task}", timezone_id="UTC")
    expect(page.locator(".timeline time").first).to_have_text(re.compile("UTC$"))
    expect(page.locator(".foot")).to_contain_text("times are in UTC")
