"""Who dispatches: one node at a time, under an epoch that never comes again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import StaleEpochError
from headgate.storage import nodes
from headgate.storage.memory import MemoryDatabase
from headgate.storage.store import Election, Node
from storage.tables import DIALECTS, Tables, fresh_tables

LEASE_SECONDS = 3.0


@pytest.fixture(params=DIALECTS)
def tables(request: pytest.FixtureRequest) -> Iterator[Tables]:
    with fresh_tables(request.param, request) as tables:
        yield tables


def elect(tables: Tables, node_id: str, *, now: float) -> Election:
    return tables.do(lambda tx: nodes.elect(tx, node_id, now=now, lease_seconds=LEASE_SECONDS))


def check(tables: Tables, epoch: int, *, now: float) -> str:
    return tables.do(lambda tx: nodes.check_epoch(tx, epoch, now))


def resign(tables: Tables, node_id: str) -> None:
    tables.do(lambda tx: nodes.resign(tx, node_id))


def dispatcher(tables: Tables) -> str:
    return tables.do(lambda tx: nodes.to_election(tx.read(nodes.READ_LEADER)).node_id)


def assert_stale(tables: Tables, epoch: int, *, now: float, why: str = "is over") -> None:
    with pytest.raises(StaleEpochError, match=why):
        nodes.check_epoch(tables.database.begin(), epoch, now)
    tables.database.rollback()


def test_the_first_to_ask_is_elected_and_the_others_learn_who_it_is(tables: Tables) -> None:
    assert dispatcher(tables) == nodes.NOBODY
    won = elect(tables, "n1", now=0.0)
    assert won == Election(node_id="n1", epoch=1, lease_until=3.0)
    assert elect(tables, "n2", now=1.0) == won
    assert dispatcher(tables) == "n1"


def test_renewing_keeps_the_epoch(tables: Tables) -> None:
    elect(tables, "n1", now=0.0)
    renewed = elect(tables, "n1", now=2.0)
    assert (renewed.epoch, renewed.lease_until) == (1, 5.0)
    assert elect(tables, "n2", now=4.9).node_id == "n1"


def test_another_takes_over_when_the_lease_has_ended(tables: Tables) -> None:
    elect(tables, "n1", now=0.0)
    assert elect(tables, "n2", now=2.9).node_id == "n1"
    taken_over = elect(tables, "n2", now=3.0)
    assert (taken_over.node_id, taken_over.epoch) == ("n2", 2)
    assert elect(tables, "n1", now=3.1) == taken_over


def test_a_busy_dispatcher_is_kept_under_its_epoch_alone(tables: Tables) -> None:
    def keep(node_id: str, epoch: int, now: float) -> None:
        tables.do(lambda tx: nodes.keep_leading(tx, node_id, epoch, now=now, lease_seconds=3.0))

    elect(tables, "n1", now=0.0)
    keep("n1", 1, 2.0)
    assert check(tables, 1, now=4.9) == "n1"
    # Neither another node, nor another epoch, nor a lease that has ended, nor one that resigned.
    for node_id, epoch, now in (("n2", 1, 4.0), ("n1", 2, 4.0), ("n1", 1, 5.0)):
        keep(node_id, epoch, now)
        assert_stale(tables, 1, now=5.0)
    elect(tables, "n1", now=5.0)
    resign(tables, "n1")
    keep("n1", 2, 5.1)
    assert dispatcher(tables) == nodes.NOBODY


def test_a_dispatcher_that_renews_too_late_starts_a_new_epoch(tables: Tables) -> None:
    elect(tables, "n1", now=0.0)
    assert elect(tables, "n1", now=3.0).epoch == 2
    assert_stale(tables, 1, now=3.1)


def test_an_epoch_is_good_until_its_lease_ends(tables: Tables) -> None:
    elect(tables, "n1", now=0.0)
    assert check(tables, 1, now=2.9) == "n1"
    assert_stale(tables, 1, now=3.0, why="nobody dispatches now")


def test_an_epoch_of_the_past_or_of_the_future_is_stale(tables: Tables) -> None:
    assert_stale(tables, 0, now=0.0)
    elect(tables, "n1", now=0.0)
    elect(tables, "n2", now=3.0)
    assert_stale(tables, 1, now=4.0, why="node n2 dispatches under epoch 2")
    assert_stale(tables, 3, now=4.0)


def test_whoever_resigns_need_not_be_waited_for(tables: Tables) -> None:
    elect(tables, "n1", now=0.0)
    resign(tables, "n1")
    assert dispatcher(tables) == nodes.NOBODY
    assert_stale(tables, 1, now=1.0)
    taken_over = elect(tables, "n2", now=1.0)
    assert (taken_over.node_id, taken_over.epoch) == ("n2", 2)


def test_only_the_dispatcher_can_resign(tables: Tables) -> None:
    elect(tables, "n1", now=0.0)
    resign(tables, "n2")
    assert check(tables, 1, now=1.0) == "n1"


def test_where_one_process_can_be_alive_nobody_waits_for_an_earlier_one(tables: Tables) -> None:
    elect(tables, "n1", now=0.0)
    tables.do(lambda tx: nodes.depose_others(tx, "n1"))
    assert check(tables, 1, now=1.0) == "n1"
    tables.do(lambda tx: nodes.depose_others(tx, "n2"))
    assert elect(tables, "n2", now=1.0).epoch == 2


def test_the_address_of_the_dispatcher_is_that_of_its_node(tables: Tables) -> None:
    node = Node(id="n1", capacity=1, address="http://10.0.0.1:7420")
    tables.do(lambda tx: nodes.join(tx, node, 10.0))
    elect(tables, "n1", now=0.0)
    assert elect(tables, "n2", now=1.0).address == "http://10.0.0.1:7420"


NODES = st.sampled_from(["n1", "n2", "n3"])
MOVES = st.lists(st.tuples(NODES, st.booleans(), st.floats(0.0, 4.0)), max_size=30)


@settings(max_examples=100, deadline=None)
@given(moves=MOVES)
def test_no_two_nodes_ever_hold_the_same_epoch_nor_does_one_come_again(
    moves: list[tuple[str, bool, float]],
) -> None:
    tables = Tables(MemoryDatabase())
    holders: dict[int, str] = {}
    now, last_epoch = 0.0, 0
    for node_id, resigns, pause_seconds in moves:
        now += pause_seconds
        if resigns:
            resign(tables, node_id)
            continue
        result = elect(tables, node_id, now=now)
        assert result.lease_until > now
        assert result.epoch >= last_epoch
        assert holders.setdefault(result.epoch, result.node_id) == result.node_id
        assert check(tables, result.epoch, now=now) == result.node_id
        last_epoch = result.epoch


def test_a_node_that_takes_no_tasks_learns_who_dispatches_and_does_not_stand(
    tables: Tables,
) -> None:
    tables.do(lambda tx: nodes.join(tx, Node(id="idle", capacity=0), lease_until=1_000.0))
    nobody = elect(tables, "idle", now=1.0)
    assert (nobody.node_id, nobody.epoch) == ("", 0)
    first = elect(tables, "n1", now=2.0)
    assert elect(tables, "idle", now=3.0).node_id == first.node_id
    late = first.lease_until + 1.0
    assert elect(tables, "idle", now=late).node_id == ""
    assert elect(tables, "n2", now=late).epoch == first.epoch + 1
