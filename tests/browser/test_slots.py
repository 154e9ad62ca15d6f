"""Slots: warmed against the provider, disabled, enabled, and what they have told."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from browser.live_service import Live
from browser.visiting import Visitor, was_done
from service.fake_providers import requests_of


def state(page: Page) -> str:
    """Return the state of the slot whose page this is, as it is drawn."""
    return page.locator("#slot-now .head .state").first.inner_text()


def test_a_cold_slot_is_warmed_and_an_open_one_is_left_alone(visitor: Visitor, live: Live) -> None:
    page = visitor("/ui/slots")
    card = page.locator("section.slot", has_text="morning")
    expect(card).to_contain_text("cold")
    wakes = requests_of(live.provider)[1]
    card.locator("summary", has_text="Warm now").click()
    card.get_by_role("button", name="Send the wake").click()
    was_done(page)
    page.goto(live.url("/ui/slots/morning"))
    now = page.locator("#slot-now")
    expect(now.locator(".head .state").first).to_contain_text("open")
    expect(now).to_contain_text("resets")
    assert requests_of(live.provider)[1] == wakes + 1
    expect(page.get_by_role("heading", name="Log")).to_be_visible()
    expect(now).to_contain_text("wake")
    page.locator("summary", has_text="Warm now").click()
    page.get_by_role("button", name="Send the wake").click()
    expect(page.locator("main > .flash")).to_contain_text("Not done:")
    assert requests_of(live.provider)[1] == wakes + 1


def test_a_disabled_slot_holds_its_tasks_until_it_is_enabled(visitor: Visitor, live: Live) -> None:
    page = visitor("/ui/slots/spare")
    page.locator("summary", has_text="Disable").click()
    page.get_by_role("button", name="Disable it").click()
    was_done(page)
    expect(page.locator("#slot-now .head .state").first).to_contain_text("paused")
    task = live.service.submit(slot="spare")
    waiting = visitor(f"/ui/tasks/{task}")
    expect(waiting.locator(".reasons")).to_contain_text("spare")
    overview = visitor("/")
    expect(overview.locator(".attention")).to_contain_text("spare")
    page.locator("summary", has_text="Enable").click()
    page.get_by_role("button", name="Enable it").click()
    was_done(page)
    expect(page.locator("#slot-now .head .state").first).not_to_contain_text("paused")
    expect(waiting.locator(".head .state")).to_contain_text("done")
