"""Messages: none is missed when a reply gets lost, and none is kept that has been seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate.storage import nodes
from headgate.storage.nodes import Kind, Message
from storage.tables import DIALECTS, Tables, fresh_tables


@pytest.fixture(params=DIALECTS)
def tables(request: pytest.FixtureRequest) -> Iterator[Tables]:
    with fresh_tables(request.param, request) as tables:
        yield tables


def post(tables: Tables, *rows: tuple[str, Kind, str]) -> None:
    tables.do(lambda tx: nodes.post(tx, rows))


def take(tables: Tables, recipient: str, *, seen: int = 0, limit: int = 100) -> list[Message]:
    return tables.do(lambda tx: nodes.take(tx, recipient, seen=seen, limit=limit))


def ids(taken: list[Message]) -> list[str]:
    return [message.task_id for message in taken]


def test_messages_come_in_order_and_only_to_their_recipient(tables: Tables) -> None:
    post(tables, ("n1", Kind.ASSIGNED, "t1"), ("n2", Kind.ASSIGNED, "t2"))
    post(tables, ("n1", Kind.CANCELLED, "t1"))
    taken = take(tables, "n1")
    assert [(message.kind, message.task_id) for message in taken] == [
        (Kind.ASSIGNED, "t1"),
        (Kind.CANCELLED, "t1"),
    ]
    assert ids(take(tables, "n2")) == ["t2"]
    assert take(tables, "n3") == []


def test_a_message_comes_again_until_its_reader_has_seen_it(tables: Tables) -> None:
    post(tables, ("n1", Kind.CHANGED, "t1"), ("n1", Kind.CHANGED, "t2"))
    first = take(tables, "n1")
    assert take(tables, "n1") == first
    post(tables, ("n1", Kind.CHANGED, "t3"))
    assert ids(take(tables, "n1", seen=first[-1].seq)) == ["t3"]
    assert tables.count("messages") == 1


def test_what_was_seen_twice_takes_nothing_with_it_that_came_later(tables: Tables) -> None:
    post(tables, ("n1", Kind.CHANGED, "t1"))
    seen = take(tables, "n1")[-1].seq
    assert take(tables, "n1", seen=seen) == []
    # The reply to that gets lost, and the table was empty in between.
    post(tables, ("n1", Kind.CHANGED, "t2"))
    assert ids(take(tables, "n1", seen=seen)) == ["t2"]


def test_a_step_reads_no_more_than_its_limit(tables: Tables) -> None:
    post(tables, *[("n1", Kind.CHANGED, f"t{number}") for number in range(5)])
    first = take(tables, "n1", limit=2)
    second = take(tables, "n1", seen=first[-1].seq, limit=2)
    assert (ids(first), ids(second)) == (["t0", "t1"], ["t2", "t3"])


def test_the_same_hint_twice_in_one_step_is_left_once(tables: Tables) -> None:
    post(tables, ("n1", Kind.CHANGED, "t1"), ("n1", Kind.CHANGED, "t1"))
    assert ids(take(tables, "n1")) == ["t1"]


def test_nothing_is_left_for_nobody(tables: Tables) -> None:
    post(tables)
    assert tables.count("messages") == 0


def test_whoever_reads_everything_anew_discards_what_it_was_told(tables: Tables) -> None:
    post(tables, ("n1", Kind.CHANGED, "t1"), ("n2", Kind.CHANGED, "t2"))
    tables.do(lambda tx: nodes.discard(tx, "n1"))
    assert take(tables, "n1") == []
    assert ids(take(tables, "n2")) == ["t2"]
