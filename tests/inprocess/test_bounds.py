"""How long a task can wait: the bound of the equation alone, and the hard one."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import LoadScheduler, SharedResource
from headgate.core.load import longest_wait_ticks
from headgate.errors import InvalidSettingError
from inprocess.fleet import Fleet, in_a_loop

ALPHAS = (0.0, 0.1, 0.25, 0.4, 0.5)
LEAST, MOST = 0.5, 4.0


def wait_of_shallow_beside_deep(fleet: Fleet, *, waiters: int, most_ticks: int) -> int:
    """Keep one lane as deep as may be; return how long a single light task beside it waits."""
    fleet.ask("deep", MOST)
    for _ in range(waiters - 1):
        fleet.ask("deep", MOST)
    fleet.ask("shallow", LEAST)
    for _ in range(most_ticks):
        grant = fleet.release()
        assert grant is not None
        if grant.agent_id == "shallow":
            return grant.wait_ticks
        fleet.ask("deep", MOST)
    raise AssertionError(f"the shallow lane waits for more than {most_ticks} ticks")


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_shallow_lane_beside_a_deep_one_waits_within_the_bound(alpha: float) -> None:
    bound = longest_wait_ticks(alpha=alpha, max_waiters=20, least_weight=LEAST, most_weight=MOST)

    def scenario() -> int:
        fleet = Fleet(alpha=alpha, max_waiters=20)
        return wait_of_shallow_beside_deep(fleet, waiters=20, most_ticks=int(bound) + 1)

    assert in_a_loop(scenario) <= bound


def test_at_half_the_equation_alone_lets_a_shallow_lane_wait_for_thousands_of_ticks() -> None:
    def scenario() -> int:
        return wait_of_shallow_beside_deep(Fleet(alpha=0.5), waiters=20, most_ticks=5_000)

    assert in_a_loop(scenario) > 2_000


@pytest.mark.parametrize("alpha", [*ALPHAS, 0.9])
def test_max_wait_ticks_is_a_hard_bound_for_every_alpha(alpha: float) -> None:
    def scenario() -> int:
        fleet = Fleet(alpha=alpha, max_waiters=20, max_wait_ticks=50)
        return wait_of_shallow_beside_deep(fleet, waiters=20, most_ticks=50 + 20)

    assert in_a_loop(scenario) <= 50 + 20 - 1


def longest_wait(fleet: Fleet, source: random.Random, *, waiters: int, steps: int) -> int:
    """Let a hostile crowd ask: mostly one agent, with weights from the least to the most."""
    fleet.ask("a0")
    for _ in range(steps):
        while sum(fleet.waiting(f"a{n}") for n in range(5)) < waiters:
            agent = 0 if source.random() < 0.8 else source.randrange(5)
            fleet.ask(f"a{agent}", source.choice((LEAST, 1.0, MOST)))
        fleet.release()
    return max(grant.wait_ticks for grant in fleet.grants)


crowds = st.integers(0, 10**6)


@settings(deadline=None, max_examples=40)
@given(crowds, st.sampled_from(ALPHAS), st.integers(2, 12))
def test_no_crowd_makes_a_task_wait_longer_than_the_bound(
    seed: int, alpha: float, waiters: int
) -> None:
    def scenario() -> int:
        fleet = Fleet(alpha=alpha, max_waiters=waiters)
        return longest_wait(fleet, random.Random(seed), waiters=waiters, steps=200)

    bound = longest_wait_ticks(
        alpha=alpha, max_waiters=waiters, least_weight=LEAST, most_weight=MOST
    )
    assert in_a_loop(scenario) <= bound


@settings(deadline=None, max_examples=40)
@given(crowds, st.sampled_from(ALPHAS), st.integers(2, 12), st.integers(1, 30))
def test_no_crowd_passes_the_hard_bound(
    seed: int, alpha: float, waiters: int, max_wait_ticks: int
) -> None:
    def scenario() -> int:
        fleet = Fleet(alpha=alpha, max_waiters=waiters, max_wait_ticks=max_wait_ticks)
        return longest_wait(fleet, random.Random(seed), waiters=waiters, steps=200)

    assert in_a_loop(scenario) <= max_wait_ticks + waiters - 1


BOUNDS = [
    # alpha, waiters, least, most, bound
    (0.00, 100, 1, 1, 100),
    (0.25, 100, 1, 1, 149.5),
    (0.50, 100, 1, 1, 9_900),
    (0.50, 100, 1, 5, 49_500),
    (0.60, 100, 1, 1, inf),
    (0.50, 1, 1, 1, 1),
]


@pytest.mark.parametrize(("alpha", "waiters", "least", "most", "bound"), BOUNDS)
def test_the_bound_is_what_the_documentation_says(
    alpha: float, waiters: int, least: float, most: float, bound: float
) -> None:
    found = longest_wait_ticks(
        alpha=alpha, max_waiters=waiters, least_weight=least, most_weight=most
    )
    assert found == pytest.approx(bound, rel=1e-2)


def made(**settings: object) -> Callable[[], LoadScheduler]:
    return lambda: LoadScheduler(["a"], SharedResource("llm"), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha", [-0.1, 0.51, 1.0, float("nan")])
def test_alpha_outside_the_safe_range_is_refused(alpha: float) -> None:
    with pytest.raises(InvalidSettingError, match="alpha"):
        made(alpha=alpha)()


def test_alpha_above_half_is_allowed_to_whoever_asks_for_it() -> None:
    assert made(alpha=0.9, allow_unsafe_alpha=True)().alpha == 0.9
    assert made(alpha=1.0, allow_unsafe_alpha=True)().alpha == 1.0
    with pytest.raises(InvalidSettingError, match=r"alpha: .*from 0 to 1, not 1\.01"):
        made(alpha=1.01, allow_unsafe_alpha=True)()


def test_at_alpha_one_nothing_but_depth_counts() -> None:
    assert longest_wait_ticks(alpha=1.0, max_waiters=1_000) == inf


def test_alpha_by_number_and_by_name_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="either alpha or optimize_for"):
        made(alpha=0.1, optimize_for="latency")()


def test_a_tuned_alpha_stays_in_the_safe_range() -> None:
    with pytest.raises(InvalidSettingError, match="auto_tune"):
        made(auto_tune=True, allow_unsafe_alpha=True)()
