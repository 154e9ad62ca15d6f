"""A page that loses its service says so, and is live again when the service is back."""

from __future__ import annotations

import socket
from pathlib import Path

from playwright.sync_api import Browser, expect

from browser.watching import Watch
from service.support import running_service

BACK_MS = 20_000


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
