"""When a webhook is tried again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.engine.webhooks import MOST_TRIES, WAITS_SECONDS, next_try_at

MINUTE, HOUR = 60.0, 3_600.0


@pytest.mark.parametrize(
    ("tries", "wait"),
    [
        (1, 5.0),
        (2, 5 * MINUTE),
        (3, 30 * MINUTE),
        (4, 2 * HOUR),
        (5, 5 * HOUR),
        (6, 10 * HOUR),
        (7, 14 * HOUR),
        (8, None),
        (9, None),
    ],
)
def test_the_wait_after_each_failed_try(tries: int, wait: float | None) -> None:
    expected = None if wait is None else 1_000.0 + wait
    assert next_try_at(tries, now=1_000.0, draw=0.0) == expected


@pytest.mark.parametrize(
    ("asked", "wait"),
    [(None, 5.0), (0.0, 5.0), (4.0, 5.0), (60.0, 60.0), (1e9, 14 * HOUR)],
)
def test_a_receiver_gets_the_time_that_it_asks_for_within_bounds(
    asked: float | None, wait: float
) -> None:
    assert next_try_at(1, now=0.0, draw=0.0, asked_seconds=asked) == wait


@given(
    st.integers(1, MOST_TRIES - 1),
    st.floats(0, 1, exclude_max=True),
    st.none() | st.floats(0, 1e12),
)
@settings(deadline=None)
def test_a_wait_is_never_shorter_than_the_table_and_hardly_longer(
    tries: int, draw: float, asked: float | None
) -> None:
    at = next_try_at(tries, now=0.0, draw=draw, asked_seconds=asked)
    least = WAITS_SECONDS[tries - 1]
    assert at is not None
    assert least <= at <= max(least * 1.1, min(asked or 0.0, 14 * HOUR))
