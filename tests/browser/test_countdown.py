"""Times to come are counted down in the words of the server, and by its clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Page

from browser.live_service import Live
from browser.visiting import Visitor
from headgate.core.text import duration

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
STEP = timedelta(seconds=1)
HOUR, DAY = 3_600, 86_400
SECONDS = (
    *(1, 1.4, 2, 9.4, 9.94, 9.96, 10, 10.6, 59, 59.4, 60, 61, 61.9, 119, 120, 600, 601),
    *(HOUR - 1, HOUR, HOUR + 59, HOUR + 60, DAY - 1, DAY, DAY + 59, DAY + HOUR, 40.5 * DAY),
)
# A page that was just drawn: the time of the server, and what is still to come.
DRAW = """([now, moments]) => {
  const place = document.createElement("p");
  place.dataset.now = now;
  for (const moment of moments) {
    const one = document.createElement("time");
    one.dateTime = moment;
    one.dataset.countdown = "";
    place.append(one);
  }
  document.querySelector("main").replaceChildren(place);
  document.dispatchEvent(new Event("htmx:afterSwap"));
}"""


@pytest.fixture
def page(visitor: Visitor, live: Live) -> Page:
    """Open a page that counts down, at a time that stands still."""
    one = visitor(None)
    one.clock.install(time=NOON)
    one.goto(live.url("/ui/slots"))
    one.clock.pause_at(NOON + timedelta(minutes=1))
    return one


def after_a_second(page: Page, ahead: list[float], *, server_now: datetime) -> list[str]:
    """Draw times that are so far ahead when a second has gone by, and return what is read then."""
    moments = [server_now + STEP + timedelta(seconds=seconds) for seconds in ahead]
    page.evaluate(DRAW, [server_now.isoformat(), [one.isoformat() for one in moments]])
    page.clock.run_for(1_000)
    return page.locator("time[data-countdown]").all_inner_texts()


def visitor_now(page: Page) -> datetime:
    """Return the time on the clock of the visitor."""
    return datetime.fromtimestamp(page.evaluate("Date.now()") / 1000, UTC)


def test_the_words_are_those_of_the_server(page: Page) -> None:
    read = after_a_second(page, [*SECONDS], server_now=visitor_now(page))
    assert read == [f"in {duration(seconds)}" for seconds in SECONDS]


@pytest.mark.parametrize("wrong", [timedelta(hours=5), timedelta(minutes=-20)], ids=str)
def test_a_wrong_clock_of_the_visitor_changes_nothing(page: Page, wrong: timedelta) -> None:
    read = after_a_second(page, [90, 7_200], server_now=visitor_now(page) - wrong)
    assert read == ["in 1 min 30 s", "in 2 h"]


def test_what_has_come_is_due_now(page: Page) -> None:
    assert after_a_second(page, [-60, 0, 0.9], server_now=visitor_now(page)) == ["due now"] * 3


def test_each_second_counts(page: Page) -> None:
    assert after_a_second(page, [62], server_now=visitor_now(page)) == ["in 1 min 2 s"]
    read = []
    for _ in range(4):
        page.clock.run_for(1_000)
        read += page.locator("time[data-countdown]").all_inner_texts()
    assert read == ["in 1 min 1 s", "in 1 min", "in 59 s", "in 58 s"]


@pytest.mark.parametrize("jump", [timedelta(hours=1), timedelta(hours=-1)], ids=str)
def test_a_clock_that_is_set_while_a_page_is_open_changes_nothing_and_the_server_is_asked(
    page: Page, jump: timedelta
) -> None:
    assert after_a_second(page, [90], server_now=visitor_now(page)) == ["in 1 min 30 s"]
    page.evaluate("document.querySelector('[data-now]').setAttribute('hx-get', '/ui/slots')")
    page.evaluate("""() => {
      window.asked = 0;
      document.addEventListener("sse:changed", () => { window.asked += 1; });
    }""")
    page.clock.set_system_time(visitor_now(page) + jump)
    page.clock.run_for(3_000)
    assert page.locator("time[data-countdown]").all_inner_texts() == ["in 1 min 30 s"]
    assert page.evaluate("window.asked") == 1
    assert after_a_second(page, [80], server_now=visitor_now(page) - jump) == ["in 1 min 20 s"]
