"""Places are taken and given back one by one, and the sums are those of what is in flight."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.dispatch_state import InFlightAttempt, InFlightAttempts
from headgate.core.task import Task


def flight(
    task_id: str, *, project_id: str = "p", node_id: str = "n1", tokens: int = 7
) -> InFlightAttempt:
    return InFlightAttempt(Task(id=task_id, project_id=project_id), 1, "a", node_id, tokens)


ONE = st.builds(
    flight,
    st.sampled_from([f"t{number}" for number in range(8)]),
    project_id=st.sampled_from(["p", "q"]),
    node_id=st.sampled_from(["n1", "n2", "gone"]),
    tokens=st.integers(0, 100),
)


@settings(deadline=None)
@given(st.lists(ONE, max_size=40))
def test_the_sums_are_those_of_what_is_in_flight(steps: list[InFlightAttempt]) -> None:
    """A task that is named again lands first."""
    flights = InFlightAttempts()
    flights.set_node("n1", 5)
    flights.set_node("n2", 3)
    model: dict[str, InFlightAttempt] = {}
    for step in steps:
        known = model.pop(step.task.id, None)
        if known is not None:
            flights.remove(known)
        else:
            flights.add(step)
            model[step.task.id] = step
        _check(flights, model)


def _check(flights: InFlightAttempts, model: dict[str, InFlightAttempt]) -> None:
    projects = Counter(each.task.project_id for each in model.values())
    nodes = Counter(each.node_id for each in model.values())
    tokens: Counter[str] = Counter()
    for each in model.values():
        tokens[each.task.project_id] += each.tokens
    assert len(flights) == len(model)
    assert Counter(flights.active) == projects
    assert +Counter(flights.reserved) == +tokens
    assert flights.free_capacity() == max(0, 5 - nodes["n1"]) + max(0, 3 - nodes["n2"])
    assert flights.nodes() == set(nodes)
    for node_id in nodes:
        assert sorted(flights.on_node(node_id)) == sorted(
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
    flights = InFlightAttempts()
    for node_id, count in places.items():
        flights.set_node(node_id, count)
    for number, node_id in enumerate(used):
        flights.add(flight(f"t{number}", node_id=node_id))
    assert flights.node_for_next() == expected


def test_a_node_with_more_tasks_than_places_takes_none_from_the_others() -> None:
    flights = InFlightAttempts()
    flights.set_node("n1", 0)
    flights.set_node("n2", 2)
    flights.add(flight("t1", node_id="n1"))
    assert flights.free_capacity() == 2


def test_a_node_that_is_gone_has_no_places_and_keeps_its_tasks_until_they_land() -> None:
    flights = InFlightAttempts()
    flights.set_node("n1", 4)
    lost = flight("t1")
    flights.add(lost)
    flights.drop_node("n1")
    assert (flights.free_capacity(), flights.on_node("n1")) == (0, ["t1"])
    flights.remove(lost)
    assert (flights.nodes(), len(flights)) == (set(), 0)


def test_nodes_that_came_and_went_leave_nothing_behind() -> None:
    flights = InFlightAttempts()
    for number in range(100):
        node_id = f"n{number}"
        flights.set_node(node_id, 1)
        one = flight("t1", node_id=node_id)
        flights.add(one)
        flights.remove(one)
        flights.drop_node(node_id)
    assert (flights.capacity, flights._used) == ({}, {})
