"""Waits double up to a maximum, and a pause always has its end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.retries import (
    Backoff,
    Pause,
    RateLimitPolicy,
    Wait,
    after_rate_limit,
    after_tokens_exhausted,
    doubled_seconds,
    rate_limit_wait_seconds,
)
from headgate.errors import InvalidSettingError

DRAWS = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize(
    ("hits", "seconds"), [(1, 60), (2, 120), (3, 240), (4, 300), (5, 300), (10_000, 300)]
)
def test_rate_limit_waits_double_from_one_minute_to_five(hits: int, seconds: float) -> None:
    assert rate_limit_wait_seconds(hits) == seconds


@pytest.mark.parametrize(
    ("hits", "decision"),
    [
        (1, Wait(until=1060.0)),
        (2, Wait(until=1120.0)),
        (3, Wait(until=1240.0)),
        (4, Pause(resume_at=1300.0)),
        (5, Pause(resume_at=1300.0)),
    ],
)
def test_after_three_tries_the_task_pauses_with_a_resume_time(
    hits: int, decision: Wait | Pause
) -> None:
    assert after_rate_limit(hits, now=1000.0) == decision


def test_a_policy_of_ones_own_decides() -> None:
    policy = RateLimitPolicy(base_seconds=1, max_seconds=8, tries=0)
    assert after_rate_limit(1, now=0.0, policy=policy) == Pause(resume_at=1.0)
    assert rate_limit_wait_seconds(5, policy) == 8


def test_a_task_without_tokens_pauses_five_minutes() -> None:
    assert after_tokens_exhausted(now=1000.0) == Pause(resume_at=1300.0)
    assert after_tokens_exhausted(now=1000.0, pause_seconds=7) == Pause(resume_at=1007.0)


@pytest.mark.parametrize(
    ("attempt", "draw", "spread", "seconds"),
    [
        (1, 0.0, 0.5, 1.0),
        (1, 0.5, 0.5, 0.75),
        (3, 0.0, 0.5, 4.0),
        (3, 0.5, 1.0, 2.0),
        (3, 0.9, 0.0, 4.0),
        (7, 0.0, 0.5, 60.0),
        (7, 0.5, 0.5, 45.0),
    ],
)
def test_jitter_takes_off_its_share_of_the_wait(
    attempt: int, draw: float, spread: float, seconds: float
) -> None:
    assert Backoff(spread=spread).seconds(attempt, draw=draw) == seconds


@given(st.integers(1, 10**9), DRAWS, st.floats(0, 1))
@settings(deadline=None)
def test_a_wait_stays_between_its_spread_and_the_maximum(
    attempt: int, draw: float, spread: float
) -> None:
    full = doubled_seconds(attempt, base=1.0, maximum=60.0)
    seconds = Backoff(spread=spread).seconds(attempt, draw=draw)
    assert full * (1 - spread) <= seconds <= full <= 60.0


@given(st.integers(1, 5000), st.floats(0.001, 1e6), st.floats(1, 1e6))
@settings(deadline=None)
def test_a_later_attempt_never_waits_less(attempt: int, base: float, factor: float) -> None:
    maximum = base * factor
    wait = doubled_seconds(attempt, base=base, maximum=maximum)
    assert base <= wait <= doubled_seconds(attempt + 1, base=base, maximum=maximum) <= maximum


@pytest.mark.parametrize("draw", [-0.1, 1.0, float("nan")])
def test_a_draw_outside_its_range_is_refused(draw: float) -> None:
    with pytest.raises(InvalidSettingError, match="draw"):
        Backoff().seconds(1, draw=draw)


@pytest.mark.parametrize("attempt", [0, -1])
def test_attempts_count_from_one(attempt: int) -> None:
    with pytest.raises(InvalidSettingError, match="attempt"):
        rate_limit_wait_seconds(attempt)


@pytest.mark.parametrize(
    ("field", "settings_given"),
    [
        ("base_seconds", {"base_seconds": 0.0}),
        ("max_seconds", {"base_seconds": 10.0, "max_seconds": 5.0}),
        ("spread", {"spread": 1.5}),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(
    field: str, settings_given: dict[str, float]
) -> None:
    with pytest.raises(InvalidSettingError, match=field):
        Backoff(**settings_given)


def test_a_negative_number_of_tries_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match="tries"):
        RateLimitPolicy(tries=-1)
