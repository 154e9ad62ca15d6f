"""Fairness over many grants: shares reach their targets, and nobody starves.

The bound on a project's wait is stated once, in `most_grants_between`, and tested on the loads
that break schedulers: tasks that always fail, a project that comes back, a lane that floods, work
that reports no tokens.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import Agent, AssignAction, Project, Task
from headgate.core.dispatch_state import DispatchSettings, DispatchState
from headgate.core.fair_share import WaitingLane, expected_rank
from headgate.core.lifecycle import Usage, share_of
from headgate.core.snapshot import LanePolicy, SchedulerState, tokens_charged
from headgate.core.task import Progress, TaskRecord, TaskStatus, Terms
from headgate.testing.fleet import SimulatedFleet, Workload
from snapshots import agents, snapshot

GRANTS = 10_000
LAG = 50_000


def service_options(**fields: object) -> SchedulerState:
    """Everything that the service turns on."""
    values: dict[str, object] = {
        "charge_in_round": True,
        "project_started": {},
        "lane_policy": LanePolicy.FEWEST_IN_FLIGHT,
        "max_lag_tokens": LAG,
    }
    return snapshot(**(values | fields))


def costs(low: int, high: int) -> Callable[[random.Random], Task]:
    return lambda randomness: Task(estimate_tokens=randomness.randint(low, high))


def project(name: str, weight: float = 1.0) -> Project:
    return Project(id=name, credit_weight=weight, max_concurrent_agents=None)


def run(fleet: SimulatedFleet, grants: int = GRANTS) -> list[AssignAction]:
    while len(fleet.grants) < grants:
        fleet.step()
    return fleet.grants


def shares(fleet: SimulatedFleet) -> dict[str, float]:
    tokens = {name: fleet.used[name] + fleet.reserved[name] for name in fleet.used}
    return {name: used / sum(tokens.values()) for name, used in tokens.items()}


def longest_wait(grants: list[AssignAction], name: str, *, after: int = 0) -> int:
    """Return the most grants in a row that went to others."""
    longest = waited = 0
    for action in grants[after:]:
        waited = 0 if action.project_id == name else waited + 1
        longest = max(longest, waited)
    return longest


def most_grants_between(
    *, projects: int, share: float, cheapest: int, dearest: int, lag: int = LAG
) -> int:
    """State the bound: how many grants may go to others before an eligible project is served.

    A project that joins is owed at most `lag`, and one that stays at most about its dearest task
    more; so none can be further ahead than all the others' debts together, and each token granted
    to others brings it closer by its share of that token.
    """
    return math.ceil(projects * (lag + dearest) / (share * cheapest)) + 2 * projects


@pytest.mark.parametrize("crew", [1, 7, 40])
def test_shares_are_within_one_percent_for_equal_costs(crew: int) -> None:
    weights = {"x": 1.0, "y": 2.0, "z": 5.0, "w": 0.5}
    workloads = [
        Workload(project=project(name, weight), make=costs(1_000, 1_000), backlog=60)
        for name, weight in weights.items()
    ]
    fleet = SimulatedFleet(workloads, agents(crew), service_options())
    run(fleet)
    for name, share in shares(fleet).items():
        assert share == pytest.approx(weights[name] / sum(weights.values()), abs=0.01)


@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=5)
def test_shares_are_within_two_percent_for_skewed_costs(seed: int) -> None:
    weights = {"x": 1.0, "y": 2.0, "z": 5.0}
    workloads = [
        Workload(
            project=project("x", 1.0),
            make=costs(10, 5_000),
            rounds=lambda randomness: randomness.randint(1, 9),
        ),
        Workload(project=project("y", 2.0), make=costs(1_000, 1_000)),
        Workload(
            project=project("z", 5.0),
            make=lambda randomness: Task(
                estimate_tokens=20_000 if randomness.random() < 0.05 else 100
            ),
        ),
    ]
    fleet = SimulatedFleet(workloads, agents(12), service_options(), seed=seed)
    run(fleet)
    for name, share in shares(fleet).items():
        assert share == pytest.approx(weights[name] / sum(weights.values()), abs=0.02)


def test_tasks_dearer_than_the_clamp_do_not_bend_the_shares() -> None:
    weights = {"dear": 1.0, "x": 1.0, "y": 2.0}
    workloads = [
        Workload(project=project("dear", 1.0), make=costs(10 * LAG, 10 * LAG)),
        Workload(project=project("x", 1.0), make=costs(1_000, 1_000), backlog=60),
        Workload(project=project("y", 2.0), make=costs(1_000, 1_000), backlog=60),
    ]
    fleet = SimulatedFleet(workloads, agents(4), service_options())
    run(fleet)
    for name, share in shares(fleet).items():
        assert share == pytest.approx(weights[name] / sum(weights.values()), abs=0.02)


def test_a_light_project_that_had_one_dear_task_does_not_bend_the_shares_of_others() -> None:
    dear = iter([4 * LAG])
    workloads = [
        Workload(
            project=project("background", 1e-6),
            make=lambda _: Task(estimate_tokens=next(dear, 1_000)),
        ),
        Workload(project=project("x", 3.0), make=costs(1_000, 1_000)),
        Workload(project=project("y", 2.0), make=costs(1_000, 1_000)),
    ]
    fleet = SimulatedFleet(workloads, agents(3), service_options())
    grants = run(fleet)
    counts = {name: sum(a.project_id == name for a in grants) for name in ("x", "y")}
    assert counts["x"] / counts["y"] == pytest.approx(1.5, rel=0.02)


def test_work_that_says_it_is_free_does_not_take_every_grant() -> None:
    workloads = [
        Workload(project=project("free"), make=lambda _: Task(estimate_tokens=0)),
        Workload(project=project("paying"), make=costs(100, 100)),
    ]
    fleet = SimulatedFleet(workloads, agents(1), service_options())
    bound = most_grants_between(projects=2, share=0.5, cheapest=1, dearest=100, lag=0)
    assert longest_wait(run(fleet), "paying") <= bound


def test_work_without_tokens_is_shared_by_weight() -> None:
    workloads = [
        Workload(project=project("x"), make=lambda _: Task(weight=1.0)),
        Workload(project=project("y"), make=lambda _: Task(weight=4.0)),
    ]
    fleet = SimulatedFleet(workloads, agents(5), service_options())
    grants = run(fleet)
    counts = {name: sum(a.project_id == name for a in grants) for name in ("x", "y")}
    assert counts["x"] / counts["y"] == pytest.approx(4.0, rel=0.02)


def test_a_project_whose_tasks_always_fail_does_not_starve_the_others() -> None:
    workloads = [
        Workload(project=project("broken"), make=costs(1_000, 1_000), fails=True),
        Workload(project=project("fine"), make=costs(1_000, 1_000)),
    ]
    fleet = SimulatedFleet(workloads, agents(1), service_options())
    grants = run(fleet)
    assert longest_wait(grants, "fine") <= 2
    assert shares(fleet)["broken"] == pytest.approx(0.5, abs=0.01)
    by_completion = SimulatedFleet(
        workloads, agents(1), service_options(project_started=None, max_lag_tokens=None)
    )
    assert longest_wait(run(by_completion), "fine") > 9_000


def test_a_returning_project_does_not_starve_the_others() -> None:
    """Away for 3,000 rounds, it is owed the clamp and no more."""
    workloads = [
        Workload(project=project("steady"), make=costs(1_000, 1_000)),
        Workload(
            project=project("returning"),
            make=costs(1_000, 1_000),
            present=lambda number: number > 3_000,
        ),
    ]
    clamped = SimulatedFleet(workloads, agents(1), service_options())
    grants = run(clamped)
    bound = most_grants_between(projects=2, share=0.5, cheapest=1_000, dearest=1_000)
    assert longest_wait(grants, "steady") <= bound
    assert longest_wait(grants, "returning", after=3_001) <= bound
    unclamped = SimulatedFleet(workloads, agents(1), service_options(max_lag_tokens=None))
    assert longest_wait(run(unclamped), "steady") > 2_500


@given(
    seed=st.integers(0, 2**32),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 8.0]), min_size=2, max_size=5),
    lag=st.sampled_from([2_000, 20_000]),
)
@settings(deadline=None, max_examples=15)
def test_no_project_waits_longer_than_the_bound(seed: int, weights: list[float], lag: int) -> None:
    cheapest, dearest = 500, 2_000
    workloads = [
        Workload(
            project=project(f"p{number}", weight),
            make=costs(cheapest, dearest),
            # Everybody but the first comes and goes.
            present=(lambda n, k=number: k == 0 or (n // (97 * k)) % 3 != 1),  # type: ignore[misc]
        )
        for number, weight in enumerate(weights)
    ]
    fleet = SimulatedFleet(workloads, agents(3), service_options(max_lag_tokens=lag), seed=seed)
    grants = run(fleet, 2_000)
    bound = most_grants_between(
        projects=len(weights),
        share=weights[0] / sum(weights),
        cheapest=cheapest,
        dearest=dearest,
        lag=lag,
    )
    assert longest_wait(grants, "p0") <= bound


def lane_waits(policy: LanePolicy, max_wait_ticks: int | None) -> tuple[int, int]:
    """Return the longest wait of a shallow lane beside a flooding one, and the bound on it."""
    turns = iter(range(10**9))
    flood = Workload(
        project=project("p"),
        backlog=400,
        make=lambda _: Task(
            agent_id="quiet" if next(turns) % 200 == 0 else "loud", estimate_tokens=10, weight=5.0
        ),
    )
    crew = [Agent(id="loud", capacity=2), Agent(id="quiet", capacity=2)]
    options = service_options(
        lane_policy=policy, max_wait_ticks=max_wait_ticks, alpha=0.5, max_inflight=1
    )
    fleet = SimulatedFleet([flood], crew, options)
    longest = waited = 0
    for _ in range(4_000):
        waiting = any(task.agent_id == "quiet" for task in fleet.index)
        for action in fleet.step():
            waited = 0 if action.agent_id == "quiet" or not waiting else waited + 1
            longest = max(longest, waited)
    return longest, (max_wait_ticks or 0) + len(crew)


def test_a_flooding_lane_does_not_starve_a_quiet_one_by_fewest_in_flight() -> None:
    longest, _ = lane_waits(LanePolicy.FEWEST_IN_FLIGHT, None)
    assert longest <= 1


def test_a_flooding_lane_does_not_starve_a_quiet_one_by_load_with_a_bound() -> None:
    unbounded, _ = lane_waits(LanePolicy.HIGHEST_LOAD, None)
    longest, bound = lane_waits(LanePolicy.HIGHEST_LOAD, 20)
    assert longest <= bound < unbounded


def test_the_same_seed_gives_the_same_day() -> None:
    def day() -> list[AssignAction]:
        workloads = [
            Workload(
                project=project(name), make=costs(100, 9_000), rounds=lambda r: r.randint(1, 9)
            )
            for name in ("x", "y")
        ]
        return run(SimulatedFleet(workloads, agents(4), service_options(), seed=7), 2_000)

    assert day() == day()


# Claims: what a task says whose submitter is not trusted. Two equal projects, the dispatch state of
# the service, virtual time. One says nothing; the other says whatever it likes.

CLAIMED_GRANTS = 1_000
CLAIMS = st.fixed_dictionaries(
    {},
    optional={
        "weight": st.floats(0, 1) | st.sampled_from([1.0, 5.0]),
        "estimate_tokens": st.integers(0, 2_000),
        "priority": st.integers(-1_000, 0),
    },
)
TERMS = st.builds(
    Terms,
    estimate_micro_usd=st.none() | st.integers(0, 10**6),
    action=st.sampled_from(["", "a", "b", "c"]),
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(CLAIMS, TERMS), min_size=1, max_size=4),
    st.sampled_from([None, 0, 500, 3_000]),
    st.floats(0.2, 3.0),
)
def test_no_claim_takes_the_share_of_an_equal_project(
    said: list[tuple[dict[str, Any], Terms]], measured: int | None, seconds: float
) -> None:
    state = DispatchState(
        DispatchSettings(
            projects=(project("honest"), project("hostile")),
            agents=(Agent(id="any", capacity=10),),
            max_inflight=10,
        )
    )
    state.in_flight.set_node("n", 10)
    names = (f"t{number}" for number in itertools.count())

    def queue(name: str) -> None:
        number = len(grants)
        fields, terms = said[number % len(said)] if name == "hostile" else ({}, Terms())
        task = Task(id=next(names), project_id=name, created_at=now, has_claims=True, **fields)
        state.observe(TaskRecord(task=task, terms=terms), now)

    now, grants = 1_767_225_600.0, Counter[str]()
    for name in ("honest", "hostile"):
        for _ in range(20):
            queue(name)
    while grants.total() < CLAIMED_GRANTS:
        planned = state.plan(now, most=100)
        for one in planned:
            grants[one.task.project_id] += 1
            queue(one.task.project_id)
        now += seconds
        for one in planned:
            cost = Usage(tokens=measured)
            started = Progress(attempt=one.attempt, share_tokens=one.share_tokens)
            tokens = share_of(started, cost, seconds=seconds, is_done=True)
            progress = msgspec.structs.replace(
                started, share_tokens=tokens, reported_tokens=measured
            )
            done = msgspec.structs.replace(one.task, status=TaskStatus.DONE)
            state.observe(TaskRecord(task=done, terms=one.terms, progress=progress), now)
    assert grants["honest"] >= 0.475 * grants.total()


@pytest.mark.parametrize(
    ("task", "default_tokens", "learned", "expected"),
    [
        (Task(weight=0.5), 1_000, 9_000, 500),
        (Task(weight=0), 1_000, 0, 1),
        (Task(estimate_tokens=0), 1_000, 0, 1),
        (Task(weight=0, has_claims=True), 1_000, 0, 1_000),
        (Task(weight=3, has_claims=True), 1_000, 0, 3_000),
        (Task(estimate_tokens=0, has_claims=True), 1_000, 0, 1_000),
        (Task(estimate_tokens=0, has_claims=True), 1_000, 9_000, 9_000),
        (Task(estimate_tokens=20_000, has_claims=True), 1_000, 9_000, 20_000),
        # Neither the project nor its rate limits need be the tenant's own.
        (Task(estimate_tokens=10**12, has_claims=True), 1_000, 9_000, 90_000),
        (Task(weight=1e9, has_claims=True), 1_000, 0, 10_000),
        # A share is a sum of many, and fits a column however heavy its tasks are.
        (Task(weight=1e9), 10**12, 0, 10**12),
        (Task(weight=1e9, has_claims=True), 10**12, 0, 10**12),
    ],
)
def test_what_a_task_is_charged(
    task: Task, default_tokens: int, learned: int, expected: int
) -> None:
    assert tokens_charged(task, default_tokens, learned=learned) == expected


@pytest.mark.parametrize(
    ("cost", "seconds", "is_done", "is_claim", "expected"),
    [
        (Usage(), 5.0, True, False, 1_000),
        (Usage(tokens=70), 5.0, True, False, 70),
        (Usage(tokens=7_000), 5.0, False, False, 7_000),
        (Usage(tokens=0), 5.0, True, False, 1_000),
        (Usage(tokens=0), 5.0, False, False, 1_000),
        (Usage(tokens=0), 0.25, False, False, 250),
        (Usage(tokens=0), 0.0, False, False, 0),
        (Usage(tokens=0), -1.0, False, False, 0),
        (Usage(tokens=70), 5.0, True, True, 1_000),
        (Usage(tokens=7_000), 5.0, True, True, 7_000),
        # A project need not be the tenant's own.
        (Usage(tokens=10**12), 5.0, True, True, 10_000),
        (Usage(tokens=10**12), 5.0, True, False, 10**12),
    ],
)
def test_what_an_attempt_counts_once_it_has_ended(
    cost: Usage, seconds: float, is_done: bool, is_claim: bool, expected: int
) -> None:
    progress = Progress(share_tokens=1_000)
    found = share_of(progress, cost, seconds=seconds, is_done=is_done, is_claim=is_claim)
    assert found == expected


def lane(waiting: int, *, project: str = "a", served: float = 1.0) -> WaitingLane:
    return WaitingLane(project, waiting, (served, 0.0))


NINE = [lane(1, served=one) for one in (*range(5), *range(6, 10))]
RANKS = [
    # Alone, its place in its lane is all there is.
    (1, [], {"a": 1.0}, 1),
    (7, [], {"a": 1.0}, 7),
    # Lanes of a project take turns, and the one that was served longest ago goes first.
    (1, NINE, {"a": 1.0}, 6),
    (2, NINE, {"a": 1.0}, 11),
    (3, [lane(100)], {"a": 1.0}, 6),
    (3, [lane(100, served=9)], {"a": 1.0}, 5),
    (3, [lane(1), lane(100)], {"a": 1.0}, 7),
    # Projects start by their weights, however many lanes they have.
    (1, [lane(100, project="b")], {"a": 1.0, "b": 1.0}, 2),
    (1, [lane(100, project="b", served=9)], {"a": 1.0, "b": 1.0}, 1),
    (1, [lane(50, project="b"), lane(50, project="b")], {"a": 1.0, "b": 1.0}, 2),
    (4, [lane(100, project="b")], {"a": 1.0, "b": 3.0}, 16),
    (4, [lane(100, project="b")], {"a": 2.0, "b": 1.0}, 6),
    (4, [lane(2, project="b")], {"a": 1.0, "b": 3.0}, 6),
    (1, [lane(10), lane(10, project="b")], {"a": 1.0, "b": 1.0}, 4),
    (1, [lane(10, project="b"), lane(10, project="c")], {"a": 1.0, "b": 1.0, "c": 1.0}, 3),
    # One without a weight goes last; where none has one, all are equal.
    (1, [lane(5, project="b")], {"a": 0.0, "b": 1.0}, 6),
    (1, [lane(5, project="b")], {"a": 1.0, "b": 0.0}, 1),
    (2, [lane(5, project="b")], {"a": 0.0, "b": 0.0}, 4),
]


@pytest.mark.parametrize(("position", "others", "weights", "rank"), RANKS)
def test_whoever_waits_is_told_of_all_that_goes_first(
    position: int, others: list[WaitingLane], weights: dict[str, float], rank: int
) -> None:
    own = lane(position, served=5)
    assert expected_rank(position, own, others, weights) == rank
