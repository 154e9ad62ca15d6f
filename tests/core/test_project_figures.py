"""Project figures are sums over a rolling window of hours."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.fair_share import ProjectUsage, UsageRow, hour_of

HOUR = 3_600
START = 1_767_225_600


@pytest.mark.parametrize(
    ("now", "expected"), [(START, START), (START + 3_599.9, START), (START - 0.1, START - HOUR)]
)
def test_an_hour_starts_on_the_hour(now: float, expected: int) -> None:
    assert hour_of(now) == expected


@pytest.mark.parametrize(
    ("age_seconds", "tokens"),
    [(0, 5), (2 * HOUR, 5), (3 * HOUR - 1, 5), (3 * HOUR, 0), (50 * HOUR, 0)],
)
def test_an_hour_counts_until_all_of_it_is_older_than_the_window(
    age_seconds: int, tokens: int
) -> None:
    figures = ProjectUsage(window_hours=2)
    figures.add("p", START, tokens=5, started=1, completed=1, forgiven=5)
    figures.roll(START + age_seconds)
    assert (figures.tokens["p"], figures.forgiven["p"]) == (tokens, tokens)
    assert (figures.started["p"], figures.completed["p"]) == (bool(tokens), bool(tokens))


def test_figures_go_on_from_the_rows_that_were_kept() -> None:
    rows = [
        UsageRow(project_id="p", hour=START, tokens=3, started=2, completed=1, forgiven=4),
        UsageRow(project_id="p", hour=START + HOUR, tokens=5),
        UsageRow(project_id="q", hour=START - 99 * HOUR, tokens=7),
    ]
    figures = ProjectUsage(window_hours=24, rows=rows)
    figures.roll(START + HOUR)
    assert figures.tokens == {"p": 8, "q": 0}
    assert (figures.started["p"], figures.completed["p"], figures.forgiven["p"]) == (2, 1, 4)


EVENTS = st.lists(st.tuples(st.sampled_from("pq"), st.integers(0, 5 * HOUR), st.integers(0, 9)))


@settings(deadline=None)
@given(EVENTS, st.integers(1, 4))
def test_the_sums_are_those_of_the_hours_within_the_window(
    events: list[tuple[str, int, int]], window_hours: int
) -> None:
    figures = ProjectUsage(window_hours=window_hours)
    now, seen = START, list[tuple[str, int, int]]()
    for project_id, seconds, tokens in events:
        now += seconds
        figures.roll(now)
        figures.add(project_id, now, tokens=tokens)
        seen.append((project_id, hour_of(now), tokens))
        oldest = hour_of(now) - window_hours * HOUR
        for name, total in figures.tokens.items():
            assert total == sum(
                amount for owner, hour, amount in seen if owner == name and hour >= oldest
            )
