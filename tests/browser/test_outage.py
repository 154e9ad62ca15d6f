"""A page that is not up to date says so and why, and is live again when it can be."""

from __future__ import annotations

from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect

from browser.live_service import Live
from browser.silent_line import silent_line
from browser.visiting import Visitor
from browser.watching import Watch
from budgets.servers import PostgresServer
from executors.endpoint import free_port
from headgate.dashboard.live import MOST_LOOK_SECONDS, REFRESH_SECONDS
from headgate.dashboard.session import TOKEN
from service.support import ServiceProcess, running_service, wait_until

BACK_MS = 40_000
REFUSED_MS = 15_000
OPEN_MS = 10_000
SILENT_MS = 25_000
TIMEOUT_MS = 10_000
SHARE_OF_PAGES = 167
"""So many of 200 pages one token has open, at most."""

AWAY = "The store is unavailable now."
REFRESH = "htmx.trigger('#rows', 'sse:changed')"


def listen(service: ServiceProcess, token: str) -> tuple[HTTPConnection, bytes]:
    """Have a page open, as the service sees it, and return the first thing that it is told."""
    connection = HTTPConnection(urlsplit(service.address).netloc, timeout=10)
    connection.request("GET", "/ui/live", headers={"Cookie": f"{TOKEN}={token}"})
    return connection, connection.getresponse().readline()


def test_a_page_too_many_says_so_and_is_live_when_others_are_closed(
    visitor: Visitor, live: Live
) -> None:
    wish = {"name": "a crowd", "permissions": ["read"]}
    token = live.service.ask("POST", "/tokens", wish).body["token"]
    crowd = [listen(live.service, token)[0] for _ in range(SHARE_OF_PAGES)]
    page = visitor(None, is_let_in=False)
    page.context.add_cookies([{"name": TOKEN, "value": token, "url": live.url()}])
    page.clock.install()
    with page.expect_response(lambda answer: "hx-request" in answer.request.headers):
        page.goto(live.url("/ui/tasks"))
    told = page.locator("#live-state")
    expect(told).to_have_text(
        "▲ not up to date: this node has 167 open pages, 167 of them yours: your share of 200;"
        " end some of them, or try again later"
    )
    expect(told).to_be_visible()
    for one in crowd:
        one.close()
    wait_until(lambda: is_heard(live.service, token), seconds=20.0)
    page.clock.fast_forward(REFUSED_MS)
    expect(told).to_be_hidden()


def is_heard(service: ServiceProcess, token: str) -> bool:
    """Tell whether one more page may be open."""
    connection, line = listen(service, token)
    connection.close()
    return line.startswith(b"retry:")


def test_a_page_tells_of_an_outage_and_goes_on_after_it(
    browser: Browser, watch: Watch, tmp_path: Path
) -> None:
    for part in ("net::ERR_", "answered 503", "status of 503", "Error Code 503"):
        watch.expect(part)
    # The service dispatches again when the lease of the process that was killed has run out.
    (tmp_path / "headgate.toml").write_text("[scheduler]\nnode_lease_seconds = 1\n")
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
        nothing = page.get_by_text("Nothing has been submitted yet")
        expect(nothing).to_have_count(0, timeout=BACK_MS)
        expect(outage).to_be_hidden()


def test_a_form_that_is_sent_into_an_outage_stays_as_it_was_filled_in(
    browser: Browser, watch: Watch, tmp_path: Path
) -> None:
    # A busy machine starts the service again so late that the page has looked for it by itself.
    for part in ("net::ERR_", "htmx:sendError", "htmx:afterRequest"):
        watch.expect(part)
    (tmp_path / "headgate.toml").write_text("[projects.beta]\n")
    with (
        running_service(tmp_path, port=free_port()) as service,
        browser.new_page() as page,
    ):
        watch.look_at(page)
        page.goto(f"{service.address}/ui/projects/beta")
        page.get_by_label("Weight").fill("7")
        service.kill()
        expect(page.locator("#live-state")).to_be_visible()
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("alert")).to_contain_text("Not sent: the service does not answer")
        expect(page.get_by_label("Weight")).to_have_value("7")
        service.start()
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_text("project beta was changed: Weight 7")).to_be_visible()


def test_a_page_whose_line_fell_silent_says_so_and_takes_another(
    visitor: Visitor, live: Live, watch: Watch
) -> None:
    for part in ("htmx:timeout", "htmx:afterRequest"):
        watch.expect(part)
    assert SILENT_MS / 1000 > MOST_LOOK_SECONDS + REFRESH_SECONDS, "a page that nobody tells much"
    page = visitor(None)
    page.clock.install()
    with silent_line(live.service.address) as line:
        page.goto(f"{line.address}/ui/tasks?agent=came-over-a-new-line")
        told = page.locator("#live-state")
        expect(page.get_by_text("No task matches")).to_be_visible()
        assert page.evaluate("htmx.config.timeout") == TIMEOUT_MS
        page.evaluate("htmx.config.timeout = 2000")
        line.fall_silent()
        page.clock.fast_forward(SILENT_MS)
        expect(told).to_have_text("▲ not up to date: the service does not answer")
        expect(told).to_be_visible()
        live.service.submit(agentId="came-over-a-new-line")
        line.take_new()

        def is_shown() -> bool:
            # The browser has further lines that are as dead, and tries each of them first.
            page.clock.fast_forward(OPEN_MS)
            return page.locator("#rows tbody tr").count() == 1

        wait_until(is_shown, seconds=BACK_MS / 1000)
        expect(told).to_be_hidden()
        page.close()


def test_pages_outlive_an_outage_of_the_store_each_in_its_way(
    browser: Browser, watch: Watch, tmp_path: Path, postgres: PostgresServer, postgres_url: str
) -> None:
    for part in ("answered 503", "status of 503"):
        watch.expect(part)
    with (
        running_service(tmp_path, "--store", postgres_url) as service,
        browser.new_page() as page,
        browser.new_page() as other,
    ):
        watch.look_at(page)
        watch.look_at(other)
        service.wait_for(service.submit())
        page.goto(service.address)
        notice = page.locator(".attention", has_text="The store has a problem")
        unknown = page.get_by_text("unknown while the store is unreachable")
        expect(page.locator("#budgets")).to_be_visible()
        expect(notice).to_have_count(0)
        postgres.stop()
        try:
            expect(notice).to_be_visible(timeout=BACK_MS)
            expect(unknown.first).to_be_visible()
            expect(page.locator("#live-state")).to_be_hidden()
            other.goto(f"{service.address}/ui/tasks")
            expect(other.locator("h1")).to_have_text(AWAY)
        finally:
            postgres.start()
        expect(notice).to_have_count(0, timeout=BACK_MS)
        expect(unknown).to_have_count(0, timeout=BACK_MS)
        expect(other.locator("h1")).to_have_text("Tasks", timeout=BACK_MS)
        service.submit()
        expect(page.locator("#live-state")).to_be_hidden()


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
