"""The lines above and below the panes say whole things in any width, or show where they are cut."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from headgate.http_bodies import LimitsShown, MetricsBody, QueueBody, StatsBody
from headgate.top.banner import Part, cut, key_parts, said_parts, total_parts
from headgate.top.picture import Link, Picture

WIDTHS = (160, 100, 80, 70, 60, 40, 20)


def busy(*, paused: bool = False) -> Picture:
    """Return a picture whose totals need far more than eighty columns."""
    picture = Picture()
    counts = dict.fromkeys(
        ("tasks_submitted", "tasks_completed", "tasks_failed", "tasks_cancelled", "tasks_rejected",
         "tasks_expired", "dispatch_count"),
        0,
    )  # fmt: skip
    picture.stats = StatsBody(
        queue=QueueBody(total_queued=9_876, total_inflight=1_234, agents={}),
        metrics=MetricsBody(**counts, avg_dispatch_latency_ms=83_500.0, agents={}),
        config=LimitsShown(max_queue_size=100_000, max_inflight=20_000),
        paused=paused,
    )
    return picture


def text(parts: list[Part]) -> str:
    return "".join(text for text, _ in parts).rstrip()


@pytest.mark.parametrize("width", WIDTHS)
def test_totals_are_whole_or_left_out(width: int) -> None:
    shown = text(total_parts(busy(), width=width))
    assert cell_len(shown) <= width
    assert shown.endswith(("1 min 23 s", "/min", "1,234", "9,876"))


def test_limits_go_before_figures_do() -> None:
    shown = text(total_parts(busy(), width=80))
    assert shown == "queued 9,876  in flight 1,234  done -/min  failed -/min  wait 1 min 23 s"


def test_a_pause_of_everything_is_said_in_any_width() -> None:
    for width in WIDTHS:
        shown = text(total_parts(busy(paused=True), width=width))
        assert shown.startswith("PAUSED")
        assert cell_len(shown) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_help_and_quit_are_the_keys_that_are_always_told(width: int) -> None:
    shown = text(key_parts(width))
    assert shown.endswith("? help  q quit")
    assert cell_len(shown) <= width


def test_a_line_that_is_too_long_shows_that_it_was_cut() -> None:
    parts = [("connection ", "bold"), ("漢字漢字", "red")]
    assert text(cut(parts, 30)) == "connection 漢字漢字"
    assert text(cut(parts, 14)) == "connection 漢…"
    assert text(cut(parts, 8)) == "connect…"
    assert cut(parts, 0) == []


@pytest.mark.parametrize("link", Link)
def test_what_is_looked_for_is_told_whatever_else_is(link: Link) -> None:
    picture = Picture()
    picture.link, picture.link_problem = link, "no service answers"
    for said in ("", "Sorted by project."):
        shown = text(said_parts(said, picture, is_problem=False, wanted="sup"))
        assert shown.startswith("Only what contains “sup”")
        assert said in shown


def test_a_long_text_to_look_for_leaves_room_for_what_is_said() -> None:
    shown = text(said_parts("Sorted.", Picture(), is_problem=False, wanted="x" * 200))
    assert shown.index("Sorted.") < 70


def test_a_lost_service_is_told_in_words_that_fit() -> None:
    picture = Picture()
    picture.link, picture.link_problem = Link.LOST, "no service answers"
    shown = text(said_parts("", picture, is_problem=False, wanted=""))
    assert shown == "Trying again: no service answers."
