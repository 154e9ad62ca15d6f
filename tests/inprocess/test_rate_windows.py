"""Both rate windows: the restarting one to the letter, the sliding one without its gap."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.inprocess.rate_windows import RateLimitWindow, SlidingRateLimitWindow
from headgate.testing import VirtualClock

WINDOWS = [RateLimitWindow, SlidingRateLimitWindow]
LENGTHS = [("per_minute", 60), ("per_hour", 3600), ("per_day", 86400)]


def test_fields_come_in_the_documented_order() -> None:
    window = RateLimitWindow("claude", "per_minute", 100, 7, 123.0)
    assert dataclasses.astuple(window)[:5] == ("claude", "per_minute", 100, 7, 123.0)
    names = [entry.name for entry in dataclasses.fields(RateLimitWindow)]
    assert names == [
        "agent_type",
        "limit_type",
        "max_tokens",
        "current_tokens",
        "window_start",
        "clock",
    ]


def test_the_clock_is_no_part_of_a_windows_value() -> None:
    first = RateLimitWindow("claude", "per_minute", 100, 0, 5.0, clock=VirtualClock(1.0))
    second = RateLimitWindow("claude", "per_minute", 100, 0, 5.0, clock=VirtualClock(2.0))
    assert first == second
    assert "clock" not in repr(first)


@pytest.mark.parametrize("window_class", WINDOWS)
def test_a_window_without_a_start_starts_now(
    window_class: type[RateLimitWindow | SlidingRateLimitWindow],
) -> None:
    clock = VirtualClock(1000.0)
    assert window_class("claude", "per_minute", 100, clock=clock).window_start == 1000.0
    given_start = window_class("claude", "per_minute", 100, window_start=400.0, clock=clock)
    assert given_start.window_start == 400.0


@pytest.mark.parametrize("window_class", WINDOWS)
def test_the_clock_is_time_time_unless_one_is_given(
    window_class: type[RateLimitWindow | SlidingRateLimitWindow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = time.time()
    assert before <= window_class("claude", "per_minute", 1).window_start <= time.time()
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    window = window_class("claude", "per_minute", 1)
    window.record(1)
    assert (window.window_start, window.is_exceeded()) == (5000.0, True)
    monkeypatch.setattr(time, "time", lambda: 5100.0)
    assert not window.is_exceeded()


@pytest.mark.parametrize("window_class", WINDOWS)
@pytest.mark.parametrize(("limit_type", "seconds"), LENGTHS)
def test_each_limit_type_has_its_length(
    window_class: type[RateLimitWindow | SlidingRateLimitWindow], limit_type: str, seconds: int
) -> None:
    assert window_class("claude", limit_type, 100).window_seconds == seconds


def test_an_unknown_limit_type_is_a_key_error() -> None:
    window = RateLimitWindow("claude", "per_week", 100)
    with pytest.raises(KeyError):
        _ = window.window_seconds
    with pytest.raises(KeyError):
        window.record(1)
    with pytest.raises(KeyError):
        SlidingRateLimitWindow("claude", "per_week", 100)


@pytest.mark.parametrize(
    ("after_seconds", "tokens", "window_start"),
    [
        (0.0, 50, 1000.0),
        (60.0, 50, 1000.0),  # at its very end the window still counts
        (60.5, 10, 1060.5),  # past it, the record starts a new one at its own time
        (500.0, 10, 1500.0),
    ],
)
def test_record_restarts_an_expired_window_at_the_time_of_the_record(
    after_seconds: float, tokens: int, window_start: float
) -> None:
    clock = VirtualClock(1000.0)
    window = RateLimitWindow("claude", "per_minute", 100, clock=clock)
    window.record(40)
    clock.advance(after_seconds)
    window.record(10)
    assert (window.current_tokens, window.window_start) == (tokens, window_start)


@pytest.mark.parametrize(
    ("tokens", "after_seconds", "exceeded"),
    [
        (99, 0.0, False),
        (100, 0.0, True),
        (101, 0.0, True),
        (100, 60.0, True),
        (100, 60.5, False),
    ],
)
def test_a_limit_is_exceeded_when_it_is_reached_in_a_live_window(
    *, tokens: int, after_seconds: float, exceeded: bool
) -> None:
    clock = VirtualClock(1000.0)
    window = RateLimitWindow("claude", "per_minute", 100, clock=clock)
    window.record(tokens)
    clock.advance(after_seconds)
    assert window.is_exceeded() is exceeded


def test_asking_never_resets_the_counter() -> None:
    clock = VirtualClock(1000.0)
    window = RateLimitWindow("claude", "per_minute", 100, clock=clock)
    window.record(100)
    clock.advance(61)
    assert not window.is_exceeded()
    assert window.seconds_until_reset() == 0.0
    assert (window.current_tokens, window.window_start) == (100, 1000.0)


@pytest.mark.parametrize(
    ("tokens", "after_seconds", "remaining"),
    [(0, 0.0, 60.0), (500, 15.0, 45.0), (0, 60.0, 0.0), (0, 90.0, 0.0)],
)
def test_seconds_until_reset_reports_the_boundary_whatever_the_count(
    tokens: int, after_seconds: float, remaining: float
) -> None:
    clock = VirtualClock(1000.0)
    window = RateLimitWindow("claude", "per_minute", 100, clock=clock)
    window.record(tokens)
    clock.advance(after_seconds)
    assert window.seconds_until_reset() == remaining


def _admitted_around_a_boundary(
    window_class: type[RateLimitWindow | SlidingRateLimitWindow],
) -> int:
    """Ask before each token, as fast as possible, just before and just after a window's end."""
    clock = VirtualClock(1000.0)
    window = window_class("claude", "per_minute", 100, clock=clock)
    admitted = 0
    for wait_seconds in (59.5, 1.0):
        clock.advance(wait_seconds)
        for _ in range(1000):
            if not window.is_exceeded():
                window.record(1)
                admitted += 1
    return admitted


def test_the_restarting_window_lets_twice_the_limit_through_at_a_boundary() -> None:
    assert _admitted_around_a_boundary(RateLimitWindow) == 200


def test_the_sliding_window_lets_the_limit_through_at_a_boundary() -> None:
    assert _admitted_around_a_boundary(SlidingRateLimitWindow) == 100


def test_the_sliding_window_frees_room_as_tokens_leave_it() -> None:
    clock = VirtualClock(1020.0)
    window = SlidingRateLimitWindow("claude", "per_minute", 100, clock=clock)
    window.record(60)
    clock.advance(30)
    window.record(40)
    assert (window.is_exceeded(), window.seconds_until_reset()) == (True, 31.0)
    clock.advance(31)
    assert (window.is_exceeded(), window.seconds_until_reset()) == (False, 0.0)
    assert window.current_tokens == 40


def test_room_for_many_tokens_may_be_further_away_or_never_come() -> None:
    clock = VirtualClock(1020.0)
    window = SlidingRateLimitWindow("claude", "per_minute", 100, clock=clock)
    window.record(60)
    clock.advance(30)
    window.record(30)
    waits = [window.seconds_until_room(tokens) for tokens in (10, 70, 100, 101)]
    assert waits == [0.0, 31.0, 61.0, math.inf]


def test_a_sliding_limit_of_zero_is_always_exceeded() -> None:
    window = SlidingRateLimitWindow("claude", "per_minute", 0, clock=VirtualClock())
    assert (window.is_exceeded(), window.seconds_until_reset()) == (True, math.inf)


def test_tokens_given_at_the_start_count_from_the_given_start() -> None:
    clock = VirtualClock(1020.0)
    window = SlidingRateLimitWindow("claude", "per_minute", 100, 100, 1000.0, clock=clock)
    assert (window.current_tokens, window.seconds_until_reset()) == (100, 41.0)
    assert repr(window) == (
        "SlidingRateLimitWindow(agent_type='claude', limit_type='per_minute', "
        "max_tokens=100, current_tokens=100)"
    )


@pytest.mark.parametrize("back_seconds", [0.5, 30.0, 3600.0, 86_400.0 * 365])
def test_a_clock_that_goes_back_frees_nothing_and_heals(back_seconds: float) -> None:
    clock = VirtualClock()
    window = SlidingRateLimitWindow("claude", "per_minute", 100, clock=clock)
    window.record(100)
    clock.set_back(back_seconds)
    assert window.is_exceeded()
    wait_seconds = window.seconds_until_reset()
    assert 60 <= wait_seconds <= 122
    clock.advance(wait_seconds)
    assert not window.is_exceeded()


@given(
    st.lists(st.integers(0, 4 * 30).map(lambda quarters: quarters / 4), max_size=100),
    st.integers(1, 10),
    st.sampled_from(LENGTHS),
)
@settings(deadline=None)
def test_sliding_callers_that_ask_first_never_pass_the_limit_in_any_stretch(
    gaps: list[float], limit: int, length: tuple[str, int]
) -> None:
    limit_type, seconds = length
    clock = VirtualClock()
    window = SlidingRateLimitWindow("claude", limit_type, limit, clock=clock)
    admitted: list[float] = []
    for gap in gaps:
        clock.advance(gap * seconds / 60)
        if not window.is_exceeded():
            window.record(1)
            admitted.append(clock())
    for begin in admitted:
        assert sum(begin <= at <= begin + seconds for at in admitted) <= limit


@given(st.lists(st.integers(0, 4 * 30).map(lambda quarters: quarters / 4), max_size=60))
@settings(deadline=None)
def test_waiting_as_long_as_the_sliding_window_says_is_enough(gaps: list[float]) -> None:
    clock = VirtualClock()
    window = SlidingRateLimitWindow("claude", "per_minute", 3, clock=clock)
    for gap in gaps:
        clock.advance(gap)
        window.record(1)
        exceeded = window.is_exceeded()
        wait_seconds = window.seconds_until_reset()
        assert (wait_seconds > 0) is exceeded
        clock.advance(wait_seconds)
        assert not window.is_exceeded()
