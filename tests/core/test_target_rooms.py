"""Targets that say how much they have room for: no more starts there, and why says so."""

from __future__ import annotations

import pytest

from core.dispatch_model import START, queued, settings, state_of
from headgate.core.dispatch_state import ROOM_UNKNOWN, STARTING_SECONDS, DispatchState
from headgate.core.gates import GateClosure, GatePart
from headgate.core.rate_limits import RateLimit
from headgate.core.reasons import GateClosed
from headgate.core.snapshot import Agent
from headgate.core.why import reasons

AGENTS = (Agent(id="a", capacity=10, accepts_open=True),)
FULL = "the cluster is full"
REMOTE = frozenset({"cluster"})


def at_cluster(*names: str) -> DispatchState:
    """Return a state in which tasks wait for a target that says its room, and one for another."""
    tasks = [queued(name, target="cluster") for name in names]
    here = queued("other", target="here")
    return state_of(*tasks, here, remote_targets=REMOTE, agents=AGENTS, max_inflight=10)


def planned(state: DispatchState) -> set[str]:
    return {line.task.id for line in state.plan(START, most=100)}


def why(state: DispatchState, task_id: str) -> list[str]:
    found = (reason.detail for reason in reasons(state, task_id, START))
    return [reason.why for reason in found if isinstance(reason, GateClosed)]


def test_nothing_starts_before_the_target_has_said_its_room() -> None:
    state = at_cluster("t1")
    assert planned(state) == {"other"}
    assert why(state, "t1") == [ROOM_UNKNOWN]


def test_no_more_start_than_there_is_room_for() -> None:
    state = at_cluster("t1", "t2", "t3")
    state.rooms.set("cluster", 2, "", START)
    assert planned(state) == {"t1", "t2", "other"}
    state.rooms.set("cluster", 0, FULL, START)
    assert planned(state) == set()
    assert why(state, "t3") == [FULL]
    state.rooms.set("cluster", 1, "", START)
    assert planned(state) == {"t3"}


@pytest.mark.parametrize(
    ("needs", "others", "left"),
    [
        ({"num_cpus": 1.0}, {"num_cpus": 1.0}, 1),
        ({"num_cpus": 1.5}, {"num_cpus": 1.0}, 0),
        # It may be on a node of its own, so less is counted for the other than there may be.
        ({"num_cpus": 0.5}, {"num_cpus": 1.0}, 1),
        ({"num_cpus": 1.0}, {"num_gpus": 1.0}, 3),
        ({"num_cpus": 0.0}, {"num_cpus": 1.0}, 3),
    ],
)
def test_what_starts_at_a_target_takes_from_the_others_of_its_pool(
    needs: dict[str, float], others: dict[str, float], left: int
) -> None:
    state = state_of(remote_targets=REMOTE | {"second", "elsewhere"})
    state.rooms.set("cluster", 2, "", START, pool="one", needs=needs)
    state.rooms.set("second", 3, "", START, pool="one", needs=others)
    state.rooms.set("elsewhere", 3, "", START, pool="two", needs=others)
    assert takes(state, "cluster") == 2
    assert takes(state, "second") == left
    assert takes(state, "elsewhere") == 3


def test_a_start_counts_until_the_pool_knows_of_it() -> None:
    tasks = [queued(name, target="cluster") for name in ("t1", "t2", "t3", "t4")]
    state = state_of(*tasks, remote_targets=REMOTE, agents=AGENTS, max_inflight=10)

    def say(free: int, *arrived: str, at: float = START) -> None:
        needs = {"num_cpus": 1.0}
        state.rooms.set("cluster", free, "", at, pool="one", needs=needs, arrived=arrived)

    say(2)
    assert planned(state) == {"t1", "t2"}
    # It has said this before it knew of both, or of the second.
    say(2)
    assert planned(state) == set()
    say(2, "t1")
    assert planned(state) == {"t3"}
    # What another node has started is not told here.
    say(1, at=START + STARTING_SECONDS + 1)
    assert planned(state) == {"t4"}


def takes(state: DispatchState, target: str) -> int:
    """Return how many can begin at a target before it is full."""
    return sum(state.rooms.take(target, START) for _ in range(5))


def test_two_targets_of_one_pool_start_no_more_than_it_has_room_for() -> None:
    tasks = [
        queued(f"{target}{n}", target=target) for target in ("cluster", "second") for n in "12"
    ]
    remote = REMOTE | {"second"}
    state = state_of(*tasks, remote_targets=remote, agents=AGENTS, max_inflight=10)
    for target in sorted(remote):
        state.rooms.set(target, 2, "", START, pool="one", needs={"num_cpus": 1.0})
    assert len(planned(state)) == 2


def test_what_a_rate_limit_stops_takes_no_room() -> None:
    limit = RateLimit(kind="target", name="cluster", unit="requests", most=1, window_seconds=60)
    tasks = [queued(name, target="cluster") for name in ("t1", "t2")]
    state = state_of(*tasks, remote_targets=REMOTE, agents=AGENTS, rate_limits=(limit,))
    state.rooms.set("cluster", 2, "", START)
    assert planned(state) == {"t1"}
    later = START + 2 * limit.window_seconds
    state.fall_due(later)
    assert [line.task.id for line in state.plan(later, most=100)] == ["t2"]


def test_a_target_that_says_nothing_is_not_bounded() -> None:
    state = at_cluster("t1", "t2", "t3")
    state.rooms.set("cluster", None, "", START)
    assert planned(state) == {"t1", "t2", "t3", "other"}


def test_room_opens_nothing_that_something_else_closed() -> None:
    state = at_cluster("t1")
    state.close(GateClosure(kind="target", name="cluster", until=START + 60, why="429"), START)
    state.rooms.set("cluster", 5, "", START)
    assert planned(state) == {"other"}
    state.open(GatePart("target", "cluster"))
    assert planned(state) == {"t1"}


def test_a_target_that_leaves_the_settings_is_bounded_no_more() -> None:
    state = at_cluster("t1")
    state.refit(settings(agents=AGENTS))
    assert planned(state) == {"t1", "other"}
