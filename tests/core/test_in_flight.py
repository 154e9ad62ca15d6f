"""Places are taken and given back one by one, and the sums are those of what is in flight."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.dispatch_state import InFlightAttempt, InFlightAttempts
from headgate.core.task import Task


def attempt(
    task_id: str, *, project_id: str = "p", node_id: str = "n1", tokens: int = 7
) -> InFlightAttempt:
    return InFlightAttempt(Task(id=task_id, project_id=project_id), 1, "a", node_id, tokens)


ONE = st.builds(
    attempt,
    st.sampled_from([f"t{number}" for number in range(8)]),
    project_id=st.sampled_from(["p", "q"]),
    node_id=st.sampled_from(["n1", "n2", "gone"]),
    tokens=st.integers(0, 100),
)


@settings(deadline=None)
@given(st.lists(ONE, max_size=40))
def test_the_sums_are_those_of_what_is_in_flight(steps: list[InFlightAttempt]) -> None:
    """A task that is named again lands first."""
    in_flight = InFlightAttempts()
    in_flight.set_node("n1", 5)
    in_flight.set_node("n2", 3)
    model: dict[str, InFlightAttempt] = {}
    for step in steps:
        known = model.pop(step.task.id, None)
        if known is not None:
            in_flight.remove(known)
        else:
            in_flight.add(step)
            model[step.task.id] = step
        _check(in_flight, model)


def _check(in_flight: InFlightAttempts, model: dict[str, InFlightAttempt]) -> None:
    projects = Counter(each.task.project_id for each in model.values())
    nodes = Counter(each.node_id for each in model.values())
    tokens: Counter[str] = Counter()
    for each in model.values():
        tokens[each.task.project_id] += each.tokens
    assert len(in_flight) == len(model)
    assert Counter(in_flight.active) == projects
    assert +Counter(in_flight.reserved) == +tokens
    assert in_flight.free_capacity() == max(0, 5 - nodes["n1"]) + max(0, 3 - nodes["n2"])
    assert in_flight.nodes() == set(nodes)
    for node_id in nodes:
        assert sorted(in_flight.on_node(node_id)) == sorted(
            each.task.id for each in model.values() if each.node_id == node_id
        )


@pytest.mark.parametrize(
    ("places", "used", "expected"),
    [
        ({"n1": 2, "n2": 2}, [], "n1"),
        ({"n1": 2, "n2": 3}, [], "n2"),
        ({"n1": 2, "n2": 2}, ["n1"], "n2"),
        ({"n1": 0, "n2": 1}, [], "n2"),
    ],
)
def test_the_next_task_goes_to_the_node_with_the_most_free_places(
    places: dict[str, int], used: list[str], expected: str
) -> None:
    in_flight = InFlightAttempts()
    for node_id, count in places.items():
        in_flight.set_node(node_id, count)
    for number, node_id in enumerate(used):
        in_flight.add(attempt(f"t{number}", node_id=node_id))
    assert in_flight.node_for_next() == expected


WORKERS = ("worker-1", "worker-2", "worker-3")
CHANGE = st.one_of(
    st.tuples(st.just("offers"), st.sampled_from(WORKERS), st.integers(0, 3)),
    st.tuples(st.just("starts"), st.sampled_from(WORKERS), st.just(0)),
    st.tuples(st.just("ends"), st.sampled_from(WORKERS), st.just(0)),
    st.tuples(st.just("goes"), st.sampled_from(WORKERS), st.just(0)),
)


@settings(deadline=None)
@given(st.lists(CHANGE, max_size=40))
def test_what_is_free_at_workers_is_what_they_offer_and_do_not_use(
    changes: list[tuple[str, str, int]],
) -> None:
    in_flight = InFlightAttempts()
    offered: dict[str, int] = {}
    running: list[InFlightAttempt] = []
    for number, (what, worker, capacity) in enumerate(changes):
        own = [one for one in running if one.node_id == worker]
        if what == "offers":
            in_flight.set_worker(worker, capacity, agent_id="a")
            offered[worker] = capacity
        elif what == "starts":
            running.append(attempt(f"t{number}", node_id=worker))
            in_flight.add(running[-1])
        elif what == "ends" and own:
            running.remove(own[0])
            in_flight.remove(own[0])
        elif what == "goes":
            in_flight.drop_node(worker)
            offered.pop(worker, None)
        used = Counter(one.node_id for one in running)
        free = {name: places - used[name] for name, places in offered.items()}
        assert in_flight.free_at_workers("a") == sum(max(0, each) for each in free.values())
        assert in_flight.worker_totals() == (len(offered), sum(offered.values()))
        if free:
            assert free[in_flight.node_for_next("a")] == max(free.values())


def test_workers_take_turns() -> None:
    in_flight = InFlightAttempts()
    for worker in WORKERS:
        in_flight.set_worker(worker, 1, agent_id="a")
    served = []
    for number in range(6):
        one = attempt(f"t{number}", node_id=in_flight.node_for_next("a"))
        in_flight.add(one)
        in_flight.remove(one)
        served.append(one.node_id)
    assert served == [*WORKERS, *WORKERS]


def test_a_node_with_more_tasks_than_places_takes_none_from_the_others() -> None:
    in_flight = InFlightAttempts()
    in_flight.set_node("n1", 0)
    in_flight.set_node("n2", 2)
    in_flight.add(attempt("t1", node_id="n1"))
    assert in_flight.free_capacity() == 2


def test_a_node_that_is_gone_has_no_places_and_keeps_its_tasks_until_they_land() -> None:
    in_flight = InFlightAttempts()
    in_flight.set_node("n1", 4)
    lost = attempt("t1")
    in_flight.add(lost)
    in_flight.drop_node("n1")
    assert (in_flight.free_capacity(), in_flight.on_node("n1")) == (0, ["t1"])
    in_flight.remove(lost)
    assert (in_flight.nodes(), len(in_flight)) == (set(), 0)


def test_nodes_that_came_and_went_leave_nothing_behind() -> None:
    in_flight = InFlightAttempts()
    for number in range(100):
        node_id = f"n{number}"
        in_flight.set_node(node_id, 1)
        one = attempt("t1", node_id=node_id)
        in_flight.add(one)
        in_flight.remove(one)
        in_flight.drop_node(node_id)
    assert (in_flight.capacity, in_flight._used) == ({}, {})
