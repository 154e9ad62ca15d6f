"""The lag clamp: after it, nobody is owed more than the bound, and nobody is forgiven too much."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.fair_share import forgiven_lag

HALVES = [0.5, 0.5]


@pytest.mark.parametrize(
    ("usage", "targets", "bound", "forgiven"),
    [
        ([0, 0], HALVES, 100, [0, 0]),
        ([1_000, 0], HALVES, 500, [0, 0]),
        ([1_000, 0], HALVES, 100, [0, 800]),
        ([1_000, 0, 0], [0.5, 0.25, 0.25], 100, [0, 300, 300]),
        ([1_000, 0], [0.0, 1.0], 100, [0, 900]),
        ([7], [1.0], 0, [0]),
        ([], [], 10, []),
    ],
)
def test_what_is_owed_beyond_the_bound_is_forgiven(
    usage: list[int], targets: list[float], bound: int, forgiven: list[int]
) -> None:
    assert forgiven_lag(usage, targets, joins=[True] * len(usage), max_lag_tokens=bound) == forgiven


@pytest.mark.parametrize(
    ("usage", "joins", "forgiven"),
    [
        ([1_000, 0], [False, True], [0, 900]),
        ([1_000, 950], [False, True], [0, 0]),
        ([1_000, 0], [False, False], [0, 0]),
        ([0, 1_000], [False, True], [0, 0]),
    ],
)
def test_only_a_project_that_joins_is_forgiven(
    usage: list[int], joins: list[bool], forgiven: list[int]
) -> None:
    assert forgiven_lag(usage, HALVES, joins=joins, max_lag_tokens=100) == forgiven


@given(
    projects=st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 9)), min_size=1, max_size=8),
    bound=st.integers(0, 10**6),
)
@settings(deadline=None)
def test_afterwards_nobody_is_owed_more_than_the_bound(
    projects: list[tuple[int, int]], bound: int
) -> None:
    usage = [used for used, _ in projects]
    weight = sum(share for _, share in projects)
    targets = [share / weight for _, share in projects]
    forgiven = forgiven_lag(usage, targets, joins=[True] * len(usage), max_lag_tokens=bound)
    after = [used + more for used, more in zip(usage, forgiven, strict=True)]
    owed = [share * sum(after) - used for share, used in zip(targets, after, strict=True)]
    assert max(owed) <= bound + len(projects)
    for debt, more in zip(owed, forgiven, strict=True):
        assert more == 0 or debt >= bound - len(projects)
