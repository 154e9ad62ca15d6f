"""Shares, deficits and exhausted budgets, as tables and laws."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.fair_share import BudgetManager

WEIGHTS = st.dictionaries(
    st.sampled_from("abcdefgh"), st.floats(min_value=0.01, max_value=1000), min_size=1
)
USAGE = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 10**12))


@pytest.mark.parametrize(
    ("weights", "ratios"),
    [
        ({"a": 2.0, "b": 1.0}, {"a": 2 / 3, "b": 1 / 3}),
        ({"a": 1.0, "b": 1.0, "c": 2.0}, {"a": 0.25, "b": 0.25, "c": 0.5}),
        ({"a": 5.0, "b": 0.0}, {"a": 1.0, "b": 0.0}),
        ({"a": 0.0, "b": 0.0}, {}),
        ({}, {}),
    ],
)
def test_target_ratio_is_weight_over_total_weight(
    weights: dict[str, float], ratios: dict[str, float]
) -> None:
    assert BudgetManager().calculate_target_ratios(weights) == ratios


@given(WEIGHTS)
@settings(deadline=None)
def test_target_ratios_are_fractions_that_sum_to_one(weights: dict[str, float]) -> None:
    ratios = BudgetManager().calculate_target_ratios(weights)
    assert ratios.keys() == weights.keys()
    assert all(0.0 <= ratio <= 1.0 for ratio in ratios.values())
    assert sum(ratios.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("weights", "usage", "deficits"),
    [
        # Nothing spent: the targets are the deficits.
        ({"a": 3.0, "b": 1.0}, {}, {"a": 0.75, "b": 0.25}),
        ({"a": 3.0, "b": 1.0}, {"a": 0, "b": 0}, {"a": 0.75, "b": 0.25}),
        # Spent evenly: who should have had more is behind, the other is ahead.
        ({"a": 3.0, "b": 1.0}, {"a": 50, "b": 50}, {"a": 0.25, "b": -0.25}),
        ({"a": 3.0, "b": 1.0}, {"a": 75, "b": 25}, {"a": 0.0, "b": 0.0}),
        # A project without usage has used nothing.
        ({"a": 1.0, "b": 1.0}, {"a": 10}, {"a": -0.5, "b": 0.5}),
        # Usage of a project without a weight counts in the total only.
        ({"a": 1.0, "b": 1.0}, {"a": 10, "z": 10}, {"a": 0.0, "b": 0.5}),
        ({"a": 0.0}, {"a": 10}, {}),
    ],
)
def test_deficit_is_target_minus_actual(
    weights: dict[str, float], usage: dict[str, int], deficits: dict[str, float]
) -> None:
    assert BudgetManager().calculate_deficits(weights, usage) == deficits


@given(WEIGHTS, USAGE)
@settings(deadline=None)
def test_deficits_of_projects_with_weights_cancel_out(
    weights: dict[str, float], usage: dict[str, int]
) -> None:
    known = {project: used for project, used in usage.items() if project in weights}
    deficits = BudgetManager().calculate_deficits(weights, known)
    assert sum(deficits.values()) == pytest.approx(0.0 if sum(known.values()) else 1.0)


@given(WEIGHTS, USAGE)
@settings(deadline=None)
def test_deficits_order_projects_as_the_schedulers_sort_key_does(
    weights: dict[str, float], usage: dict[str, int]
) -> None:
    total_weight, total_usage = sum(weights.values()), sum(usage.values()) or 1
    deficits = BudgetManager().calculate_deficits(weights, usage)
    for project, deficit in deficits.items():
        sort_key = usage.get(project, 0) / total_usage - weights[project] / total_weight
        assert -deficit == sort_key


def test_arguments_are_not_changed() -> None:
    weights, usage = {"a": 1.0}, {"a": 0}
    BudgetManager().calculate_deficits(weights, usage)["a"] = 9.0
    assert (weights, usage) == ({"a": 1.0}, {"a": 0})


@pytest.mark.parametrize(
    ("budget", "used", "exhausted"),
    [
        (None, 0, False),
        (None, 10**18, False),
        (100, 99, False),
        (100, 100, True),
        (100, 101, True),
        (0, 0, True),
    ],
)
def test_a_budget_is_exhausted_when_usage_reaches_it(
    *, budget: int | None, used: int, exhausted: bool
) -> None:
    assert BudgetManager(budget).is_global_budget_exhausted(used) is exhausted
    assert BudgetManager(global_budget=budget).global_budget == budget
    assert BudgetManager().is_project_budget_exhausted(used, budget) is exhausted
