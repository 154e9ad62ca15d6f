"""Which nodes are alive: a life is renewed, late if need be, until somebody ends it for good."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from headgate.storage import nodes
from headgate.storage.nodes import FORGOTTEN_AFTER_SECONDS, Kind
from headgate.storage.store import Beat, Node
from storage.tables import DIALECTS, Tables, fresh_tables

LEASE_SECONDS = 10.0


@pytest.fixture(params=DIALECTS)
def tables(request: pytest.FixtureRequest) -> Iterator[Tables]:
    with fresh_tables(request.param, request) as tables:
        yield tables


def join(tables: Tables, node_id: str, *, now: float, capacity: int = 4) -> None:
    node = Node(id=node_id, capacity=capacity, address=f"http://{node_id}")
    tables.do(lambda tx: nodes.join(tx, node, now + LEASE_SECONDS))


def beat(
    tables: Tables, node_id: str, *, now: float, capacity: int = 4, is_leaving: bool = False
) -> Beat:
    renew = partial(nodes.beat, capacity=capacity, now=now, lease_seconds=LEASE_SECONDS)
    return tables.do(lambda tx: renew(tx, node_id, is_leaving=is_leaving))


def live(tables: Tables, *, now: float) -> list[str]:
    return [node.id for node in tables.do(lambda tx: nodes.live(tx, now))]


def ended(tables: Tables, *node_ids: str, now: float) -> set[str]:
    return tables.do(lambda tx: nodes.end_lives(tx, node_ids, now))


def test_a_node_is_alive_up_to_the_end_of_its_lease(tables: Tables) -> None:
    join(tables, "n1", now=0.0)
    assert live(tables, now=9.9) == ["n1"]
    assert live(tables, now=10.0) == []


def test_everything_that_is_known_of_a_live_node_comes_back(tables: Tables) -> None:
    join(tables, "n1", now=0.0, capacity=7)
    assert tables.do(lambda tx: nodes.live(tx, 1.0)) == (
        Node(id="n1", capacity=7, address="http://n1", lease_until=10.0),
    )


def test_a_beat_renews_the_lease_and_the_places(tables: Tables) -> None:
    join(tables, "n1", now=0.0)
    assert beat(tables, "n1", now=5.0, capacity=2) == Beat(is_alive=True, lease_until=15.0)
    (node,) = tables.do(lambda tx: nodes.live(tx, 14.0))
    assert (node.capacity, node.lease_until) == (2, 15.0)


def test_a_node_that_leaves_offers_nothing_once_another_can_dispatch(tables: Tables) -> None:
    def offered() -> dict[str, int]:
        return {one.id: one.capacity for one in tables.do(lambda tx: nodes.live(tx, 1.0))}

    join(tables, "dead", now=-20.0)
    join(tables, "idle", now=0.0, capacity=0)
    join(tables, "n1", now=0.0)
    worker = Node(id="worker-w", capacity=4, address="", agent_id="a")
    tables.do(lambda tx: nodes.join_worker(tx, worker, now=0.0, lease_seconds=LEASE_SECONDS))
    assert not beat(tables, "n1", now=1.0, is_leaving=True).has_heir
    assert offered()["n1"] == 4
    join(tables, "n2", now=1.0)
    assert not beat(tables, "n1", now=1.0).has_heir, "who stays asks for none"
    assert beat(tables, "n1", now=1.0, is_leaving=True).has_heir
    assert offered()["n1"] == 0
    assert not beat(tables, "n2", now=1.0, is_leaving=True).has_heir, "the first has left to it"
    assert offered()["n2"] == 4
    tables.do(lambda tx: nodes.leave(tx, "n2"))
    assert not beat(tables, "n1", now=1.0, is_leaving=True).has_heir
    assert offered()["n1"] == 4


def keep(tables: Tables, node_id: str, *, now: float) -> None:
    tables.do(lambda tx: nodes.keep(tx, node_id, now=now, lease_seconds=LEASE_SECONDS))


def test_a_beat_that_comes_late_renews_a_lease_on_whose_end_nobody_acted(tables: Tables) -> None:
    join(tables, "n1", now=0.0)
    assert live(tables, now=50.0) == []
    assert beat(tables, "n1", now=50.0) == Beat(is_alive=True, lease_until=60.0)
    assert live(tables, now=59.0) == ["n1"]


@pytest.mark.parametrize("now", [50.0, 5.0])
def test_a_life_that_somebody_ended_is_over_at_any_time(tables: Tables, now: float) -> None:
    join(tables, "n1", now=0.0)
    assert ended(tables, "n1", now=10.0) == {"n1"}
    # Not even a clock that is set back brings it to life again.
    assert not beat(tables, "n1", now=now).is_alive
    keep(tables, "n1", now=now)
    assert live(tables, now=now) == []


def test_to_ask_who_is_alive_ends_nobody(tables: Tables) -> None:
    join(tables, "n1", now=0.0)
    assert tables.do(lambda tx: nodes.not_alive(tx, ["n1"], 10.0)) == {"n1"}
    assert beat(tables, "n1", now=11.0).is_alive


def test_the_lease_of_a_busy_node_is_kept_and_what_it_offers_stays(tables: Tables) -> None:
    join(tables, "n1", now=0.0)
    beat(tables, "n1", now=1.0, capacity=0)
    for now in (5.0, 30.0):
        keep(tables, "n1", now=now)
        (node,) = tables.do(partial(nodes.live, now=now))
        assert (node.capacity, node.lease_until) == (0, now + LEASE_SECONDS)


def test_a_node_that_left_is_not_kept(tables: Tables) -> None:
    join(tables, "n1", now=0.0)
    tables.do(lambda tx: nodes.leave(tx, "n1"))
    keep(tables, "n1", now=1.0)
    assert tables.count("nodes") == 0


@pytest.mark.parametrize("is_kept", [False, True])
def test_whoever_is_back_first_gives_the_others_time_if_nobody_was_there(
    tables: Tables, *, is_kept: bool
) -> None:
    join(tables, "gone", now=-20.0)
    join(tables, "n1", now=0.0)
    join(tables, "n2", now=1.0)
    if is_kept:
        keep(tables, "n1", now=100.0)
    else:
        beat(tables, "n1", now=100.0)
    assert live(tables, now=101.0) == ["n1", "n2"]
    assert live(tables, now=110.0) == []


def test_nobody_is_given_time_while_another_was_there(tables: Tables) -> None:
    for node_id, now in (("n1", 0.0), ("n2", 0.0), ("n3", 95.0)):
        join(tables, node_id, now=now)
    beat(tables, "n1", now=100.0)
    assert live(tables, now=100.0) == ["n1", "n3"]


def test_a_node_that_never_joined_is_not_alive(tables: Tables) -> None:
    assert not beat(tables, "n1", now=0.0).is_alive
    assert ended(tables, "n1", now=0.0) == {"n1"}


def test_whoever_was_found_dead_stays_dead(tables: Tables) -> None:
    join(tables, "n1", now=0.0)
    join(tables, "n2", now=5.0)
    assert ended(tables, "n1", "n2", "n3", now=12.0) == {"n1", "n3"}
    assert not beat(tables, "n1", now=8.0).is_alive
    assert beat(tables, "n2", now=8.0).is_alive


def test_nobody_is_asked_about_nobody(tables: Tables) -> None:
    assert ended(tables, now=0.0) == set()


def test_joining_twice_is_joining_once(tables: Tables) -> None:
    join(tables, "n1", now=0.0)
    beat(tables, "n1", now=5.0)
    join(tables, "n1", now=0.0)
    assert live(tables, now=12.0) == ["n1"]


def test_a_node_that_left_is_gone_with_its_messages(tables: Tables) -> None:
    join(tables, "n1", now=0.0)
    rows = [("n1", Kind.ASSIGNED, "t1"), ("n2", Kind.ASSIGNED, "t2")]
    tables.do(lambda tx: nodes.post(tx, rows))
    tables.do(lambda tx: nodes.leave(tx, "n1"))
    assert live(tables, now=1.0) == []
    assert tables.count("messages") == 1


def test_where_one_process_can_be_alive_the_earlier_ones_are_dead(tables: Tables) -> None:
    for node_id in ("n1", "n2", "n3"):
        join(tables, node_id, now=0.0)
    tables.do(lambda tx: nodes.forget_others(tx, "n3"))
    assert ended(tables, "n1", "n2", "n3", now=1.0) == {"n1", "n2"}


def test_nodes_that_died_long_ago_are_forgotten_when_another_joins(tables: Tables) -> None:
    join(tables, "n1", now=0.0)
    join(tables, "n2", now=100.0)
    join(tables, "n3", now=FORGOTTEN_AFTER_SECONDS + 50.0)
    assert tables.count("nodes") == 2
