"""The share of each project: the one that it should have, and the one that it had."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.fair_share import shares
from headgate.core.snapshot import Project


def projects(weights: dict[str, float]) -> list[Project]:
    return [Project(id=name, credit_weight=weight) for name, weight in weights.items()]


@pytest.mark.parametrize(
    ("weights", "tokens", "expected"),
    [
        ({"a": 3.0, "b": 1.0}, {"a": 50, "b": 50}, {"a": (0.75, 0.5), "b": (0.25, 0.5)}),
        ({"a": 1.0, "b": 1.0}, {}, {"a": (0.5, 0.0), "b": (0.5, 0.0)}),
        ({"a": 0.0, "b": 0.0}, {"a": 9}, {"a": (0.5, 1.0), "b": (0.5, 0.0)}),
        ({"a": 1.0}, {"a": 1, "gone": 3}, {"a": (1.0, 0.25)}),
        ({}, {"gone": 3}, {}),
    ],
)
def test_a_share_is_the_part_of_the_weights_and_of_the_tokens(
    weights: dict[str, float], tokens: dict[str, int], expected: dict[str, tuple[float, float]]
) -> None:
    found = shares(projects(weights), tokens)
    assert {one.project_id: (one.target, one.actual) for one in found} == expected
    assert all(one.deficit == one.target - one.actual for one in found)


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 100), min_size=1))
def test_targets_make_one_whole(weights: dict[str, int]) -> None:
    given_weights = {name: float(weight) for name, weight in weights.items()}
    assert sum(one.target for one in shares(projects(given_weights), {})) == pytest.approx(1.0)
