"""Targets that say how much they have room for: no more starts there, and why says so."""

from __future__ import annotations

from core.dispatch_model import START, queued, settings, state_of
from headgate.core.dispatch_state import ROOM_UNKNOWN, DispatchState
from headgate.core.gates import GateClosure, GatePart
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
