"""A page that is not up to date says so and why, and is live again when it can be."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from browser.visiting import Visitor
from browser.watching import Watch
from service.support import running_service

BACK_MS = 20_000
REFRESH = "htmx.trigger('#rows', 'sse:changed')"


def free_port() -> int:
    """Return a port that a service can have again after it was killed."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        return int(place.getsockname()[1])


def test_a_page_tells_of_an_outage_and_goes_on_after_it(
    browser: Browser, watch: Watch, tmp_path: Path
) -> None:
    for part in ("net::ERR_", "answered 503", "status of 503"):
        watch.expect(part)
    with (
        running_service(tmp_path, port=free_port()) as service,
        browser.new_page() as page,
    ):
        watch.look_at(page)
        page.goto(service.address)
        expect(page.get_by_text("Nothing has been submitted yet")).to_be_visible()
        outage = page.locator("#live-state")
        expect(outage).to_be_hidden()
        service.kill()
        expect(outage).to_be_visible()
        service.start()
        service.submit()
        expect(outage).to_be_hidden(timeout=BACK_MS)
        expect(page.get_by_text("Nothing has been submitted yet")).to_have_count(0)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, "your token may not see this any more; log in again"),
        (404, "what this page shows is gone"),
        (418, "the service answered 418"),
        (503, "the service has trouble"),
    ],
)
def test_a_page_that_is_refused_says_what_was_answered(
    visitor: Visitor, watch: Watch, status: int, said: str
) -> None:
    for part in (f"answered {status}", f"status of {status}", f"Status Error Code {status}"):
        watch.expect(part)
    page = visitor("/ui/tasks?agent=nobody")
    page.route("**/ui/tasks?agent=nobody", lambda route: route.fulfill(status=status, body=""))
    page.evaluate(REFRESH)
    expect(page.locator("#live-state")).to_have_text(f"▲ not up to date: {said}")
    page.unroute("**/ui/tasks?agent=nobody")
    page.evaluate(REFRESH)
    expect(page.locator("#live-state")).to_be_hidden()
