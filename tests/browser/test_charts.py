"""The charts of the overview: which range they show, what is hidden, and how new figures arrive."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from browser.live_service import Live
from browser.visiting import Visitor

BEGIN = 1_790_000_000
HOUR_POINTS = 720
FETCH_MS = {"hour": 5_000, "day": 60_000}
COLUMNS = ("queued", "inflight", "completed", "failed", "waitAverage", "wait95", "spentUsd")
# Over which part of the width something has the colour of the first line, and up to where.
DRAWN = """(canvas) => {
  const name = getComputedStyle(document.documentElement).getPropertyValue("--wait").trim();
  const wanted = [1, 3, 5].map((at) => parseInt(name.slice(at, at + 2), 16));
  const {width, height} = canvas;
  const seen = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const columns = new Set();
  for (let at = 0; at < width * height; at += 1) {
    if (wanted.every((one, nth) => seen[4 * at + nth] === one)) columns.add(at % width);
  }
  return {share: columns.size / width, last: Math.max(...columns) / width};
}"""


# What is written on a canvas, and how far it lies outside of it at the worst.
NOTED = """
window.overhang = 0;
window.labels = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const {e, f} = this.getTransform();
  const box = this.measureText(text);
  const left = x + e - box.actualBoundingBoxLeft;
  const right = x + e + box.actualBoundingBoxRight;
  const top = y + f - box.actualBoundingBoxAscent;
  const bottom = y + f + box.actualBoundingBoxDescent;
  window.labels.push(text);
  window.overhang = Math.max(
    window.overhang, -left, right - this.canvas.width, -top, bottom - this.canvas.height,
  );
  return write.apply(this, arguments);
};
"""


def figures(points: int, step_seconds: int = 5, **last: float | None) -> dict[str, Any]:
    """Return figures as the service gives them, with the last one of some columns chosen."""
    columns: dict[str, Any] = {name: [1 + at % 7 for at in range(points)] for name in COLUMNS}
    for name, value in last.items():
        columns[name][-1] = value
    at = [BEGIN + step_seconds * place for place in range(points)]
    return {**columns, "at": at, "stepSeconds": step_seconds}


class Figures:
    """Answers for /ui/history in place of the service, one range at a time."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.of: dict[str, dict[str, Any]] = {"hour": figures(20), "day": figures(20, 60)}

    def answer(self, route: Route) -> None:
        """Answer with the figures of the range that is asked for."""
        (chosen,) = parse_qs(urlsplit(route.request.url).query)["range"]
        self.asked.append(chosen)
        route.fulfill(json=self.of[chosen])


@pytest.fixture
def history() -> Figures:
    """Give the figures that the charts will fetch."""
    return Figures()


@pytest.fixture
def page(visitor: Visitor, live: Live, history: Figures) -> Page:
    """Open the overview at a time that goes on when a test says so."""
    one = visitor(None)
    one.route("**/ui/history?*", history.answer)
    one.clock.install()
    return one


def legend(page: Page, chart: str) -> Locator:
    """Return the words below a chart."""
    return page.locator(f"[data-chart={chart}] .u-legend")


def series(page: Page, label: str) -> Locator:
    """Return one line of a legend, by its name."""
    return page.locator(".u-legend .u-series", has_text=label)


def test_hour_and_day_are_chosen_fetched_and_marked(
    page: Page, live: Live, history: Figures
) -> None:
    history.of = {"hour": figures(20, queued=5), "day": figures(20, 60, queued=70)}
    page.goto(live.url())
    expect(series(page, "queued")).to_have_text(re.compile("queued5$"))
    day, hour = (page.get_by_role("button", name=name, exact=True) for name in ("Day", "Hour"))
    day.click()
    expect(series(page, "queued")).to_have_text(re.compile("queued70$"))
    assert (day.get_attribute("aria-pressed"), hour.get_attribute("aria-pressed")) == (
        "true",
        "false",
    )
    hour.click()
    expect(series(page, "queued")).to_have_text(re.compile("queued5$"))
    assert history.asked == ["hour", "day", "hour"]


@pytest.mark.parametrize("chosen", ["hour", "day"])
def test_new_figures_are_fetched_and_drawn_at_the_pace_of_the_range(
    page: Page, live: Live, history: Figures, chosen: str
) -> None:
    # Each range ends with a number of its own, so that what is drawn says which has come.
    history.of["hour"] = figures(20, inflight=11)
    history.of[chosen] = figures(20, inflight=44)
    page.goto(live.url())
    page.get_by_role("button", name=chosen.title(), exact=True).click()
    expect(series(page, "in flight")).to_have_text(re.compile("in flight44$"))
    history.of[chosen] = figures(21, inflight=88)
    with page.expect_response("**/ui/history?*"):
        page.clock.fast_forward(FETCH_MS[chosen])
    page.clock.run_for(100)
    expect(series(page, "in flight")).to_have_text(re.compile("in flight88$"))
    expect(page.locator("[data-chart] canvas")).to_have_count(4)


def test_a_line_that_was_hidden_stays_hidden_with_new_figures_and_another_theme(
    page: Page, live: Live, history: Figures
) -> None:
    page.goto(live.url())
    line = series(page, "failed")
    line.locator("th").click()
    expect(line).to_have_class(re.compile("u-off"))
    history.of["hour"] = figures(21, completed=42)
    page.clock.fast_forward(FETCH_MS["hour"])
    page.clock.run_for(100)
    expect(series(page, "completed")).to_have_text(re.compile("completed42$"))
    expect(line).to_have_class(re.compile("u-off"))
    page.get_by_role("button", name="Change between light and dark").click()
    expect(line).to_have_class(re.compile("u-off"))
    line.locator("th").click()
    expect(line).not_to_have_class(re.compile("u-off"))


def test_an_hour_of_figures_with_gaps_is_drawn(page: Page, live: Live, history: Figures) -> None:
    history.of["hour"] = figures(HOUR_POINTS, queued=3)
    history.of["hour"]["queued"][180:360] = [None] * 180
    page.goto(live.url())
    expect(series(page, "queued")).to_have_text(re.compile("queued3$"))
    drawn = page.locator("[data-chart=depth] canvas").evaluate(DRAWN)
    assert 0.5 < drawn["share"] < 0.75, "an axis at the left, and a gap of a quarter"


def test_the_first_figure_of_a_service_stands_at_the_right_end(
    page: Page, live: Live, history: Figures
) -> None:
    history.of["hour"] = figures(1, inflight=0)
    page.goto(live.url())
    expect(series(page, "queued")).to_have_text(re.compile("queued1$"))
    drawn = page.locator("[data-chart=depth] canvas").evaluate(DRAWN)
    assert 0.9 < drawn["last"] < 1.0


def test_figures_that_come_when_another_range_was_chosen_are_not_drawn(
    page: Page, live: Live, history: Figures
) -> None:
    history.of["day"] = figures(20, 60, queued=70)
    page.goto(live.url())
    expect(series(page, "queued")).to_be_visible()
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/ui/history?range=hour", hold)
    with page.expect_request("**/ui/history?range=hour"):
        page.clock.fast_forward(FETCH_MS["hour"])
    page.get_by_role("button", name="Day", exact=True).click()
    expect(series(page, "queued")).to_have_text(re.compile("queued70$"))
    with page.expect_response("**/ui/history?range=hour"):
        held[0].fulfill(json=history.of["hour"])
    page.clock.run_for(100)
    expect(series(page, "queued")).to_have_text(re.compile("queued70$"))


def test_a_wait_is_told_in_its_own_unit(page: Page, live: Live, history: Figures) -> None:
    history.of["hour"] = figures(2, waitAverage=0.0067, wait95=150)
    page.goto(live.url())
    expect(legend(page, "wait")).to_have_text(re.compile(r"average6\.7 ms95 %2\.5 min"))


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("size", [0.00012, 7.0, 123_456_789.0])
def test_no_label_of_an_axis_is_cut_off(
    visitor: Visitor, live: Live, history: Figures, width: int, size: float
) -> None:
    history.of["hour"] = figures(40)
    for name in COLUMNS:
        history.of["hour"][name] = [size * (1 + at % 7) for at in range(40)]
    page = visitor(None, viewport={"width": width, "height": 900})
    page.add_init_script(NOTED)
    page.route("**/ui/history?*", history.answer)
    page.goto(live.url())
    expect(page.locator("[data-chart] canvas")).to_have_count(4)
    expect(series(page, "queued")).to_be_visible()
    assert page.evaluate("window.labels.length") > 8
    assert page.evaluate("window.overhang") <= 0


def test_the_times_of_charts_are_local(visitor: Visitor, live: Live, history: Figures) -> None:
    page = visitor(None, timezone_id="Asia/Kolkata")
    page.route("**/ui/history?*", history.answer)
    page.goto(live.url())
    last = datetime.fromtimestamp(history.of["hour"]["at"][-1], ZoneInfo("Asia/Kolkata"))
    expect(legend(page, "depth")).to_contain_text(f"{last:%H:%M}")
