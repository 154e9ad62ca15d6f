"""Calls: waiting with a reason, running, ended, found by a filter, and one with all of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from playwright.sync_api import expect

from browser.live_service import Live
from browser.visiting import PHONE, Visitor
from service.support import Answer, wait_until

PATH = "/p/asking/{agent}/v1/chat/completions"


def ask(live: Live, agent: str, prompt: str) -> Answer:
    """Make a call, and wait for its answer."""
    body = {"model": "gpt-5", "messages": [{"role": "user", "content": prompt}]}
    return live.service.ask("POST", PATH.format(agent=agent), body)


def calls(live: Live, query: str) -> list[str]:
    """Return the ids of calls."""
    found = live.service.ask("GET", f"/calls?projectId=asking&{query}").body["calls"]
    return [str(one["callId"]) for one in found]


@contextmanager
def one_runs_and_one_waits(live: Live, mark: str) -> Iterator[list[Future[Answer]]]:
    """Have a call run until the end, or until somebody lets it go, and one wait behind it."""
    with ThreadPoolExecutor(2) as pool:
        try:
            futures = [pool.submit(ask, live, "first", f"[[until {mark}]]")]
            wait_until(lambda: calls(live, "state=running"), seconds=40)
            futures.append(pool.submit(ask, live, "second", f"[[until {mark}]]"))
            wait_until(lambda: calls(live, "state=waiting"), seconds=40)
            yield futures
        finally:
            live.upstream.releases.add(mark)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_waits_says_why_and_moves_on_by_itself(
    visitor: Visitor, live: Live, scheme: str
) -> None:
    page = visitor("/ui/calls?project=asking", color_scheme=scheme)
    with one_runs_and_one_waits(live, f"go-{scheme}") as futures:
        waiting = page.get_by_role("region", name="Calls that wait")
        expect(waiting).to_contain_text("max_inflight")
        expect(waiting).to_contain_text("number 1 of its agent")
        expect(page.get_by_role("region", name="Calls that run")).to_contain_text("first")
        live.upstream.releases.add(f"go-{scheme}")
        assert [one.result().status for one in futures] == [200, 200]
        latest = page.get_by_role("region", name="Calls that have ended")
        expect(latest.locator("tbody tr").first).to_contain_text("done")
        expect(waiting).to_have_count(0)


def test_a_waiting_call_explains_itself_on_a_phone(visitor: Visitor, live: Live) -> None:
    with one_runs_and_one_waits(live, "phone"):
        (waiting,) = calls(live, "state=waiting")
        page = visitor(f"/ui/calls/{waiting}", viewport=PHONE)
        expect(page.get_by_role("heading", name="Why it waits")).to_be_visible()
        expect(page.locator(".reasons")).to_contain_text("max_inflight")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        live.upstream.releases.add("phone")
        expect(page.locator(".timeline")).to_contain_text("The client got 200.")
        expect(page.get_by_role("heading", name="Why it waits")).to_have_count(0)


def test_calls_are_filtered_and_lead_to_one(visitor: Visitor, live: Live) -> None:
    assert ask(live, "found", "hello").status == 200
    page = visitor("/ui/calls")
    page.get_by_label("Agent").fill("found")
    page.get_by_role("button", name="Show", exact=True).click()
    rows = page.get_by_role("region", name="Calls that have ended").locator("tbody tr")
    expect(rows).to_have_count(1)
    page.get_by_label("refused").check()
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_text("No call matches")).to_be_visible()
    page.locator(".chip", has_text="refused").click()
    rows.locator("th a").click()
    expect(page.locator(".facts")).to_contain_text("found")
    expect(page.locator("#call-now")).to_contain_text("Reported by the upstream")
    page.get_by_role("link", name="Raw JSON").click()
    expect(page.locator("body")).to_contain_text('"callId"')


def test_the_overview_counts_calls(visitor: Visitor, live: Live) -> None:
    page = visitor("/")
    with one_runs_and_one_waits(live, "overview"):
        tile = page.locator(".tile", has_text="Calls")
        expect(tile.locator(".figure")).to_have_text("1")
        expect(tile).to_contain_text("1 waiting")
    tile.get_by_role("link").click()
    expect(page).to_have_url(live.url("/ui/calls"))
