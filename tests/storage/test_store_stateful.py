"""Any sequence of calls leaves a task store as a plain model has it, also when replies get lost.

The last tests are tests of the tests: stores with a planted bug, which the machine must catch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path

import pytest

from budgets.servers import PostgresServer
from headgate.storage.memory import MemoryDatabase, MemoryTaskStore
from headgate.storage.postgres import PostgresTaskStore
from headgate.storage.sqlite import SqliteTaskStore
from headgate.storage.writer import Fault
from storage.scene import Place
from storage.store_machine import check_against_the_model

pytestmark = pytest.mark.hypothesis


def in_memory() -> Place:
    return Place("memory", lambda clock, ledger: MemoryTaskStore(clock=clock, keeps_ledger=ledger))


def test_the_store_in_memory_does_what_the_model_does() -> None:
    check_against_the_model(in_memory, examples=25, steps=40)


def test_a_step_whose_reply_was_lost_is_done_once() -> None:
    def fresh() -> Place:
        faults = cycle([Fault.REPLY_LOST, None])
        return Place(
            "memory",
            lambda clock, ledger: MemoryTaskStore(
                MemoryDatabase(), clock=clock, keeps_ledger=ledger, faults=lambda: next(faults)
            ),
        )

    check_against_the_model(fresh, examples=25, steps=40)


def test_the_sqlite_store_does_what_the_model_does(tmp_path: Path) -> None:
    numbers = count()

    def fresh() -> Place:
        path = tmp_path / f"{next(numbers)}.db"
        return Place(
            "sqlite", lambda clock, ledger: SqliteTaskStore(path, clock=clock, keeps_ledger=ledger)
        )

    check_against_the_model(fresh, examples=6, steps=20)


def test_the_postgres_store_does_what_the_model_does(postgres: PostgresServer) -> None:
    def fresh() -> Place:
        url = postgres.new_schema()
        return Place(
            "postgres",
            lambda clock, ledger: PostgresTaskStore(url, clock=clock, keeps_ledger=ledger),
        )

    check_against_the_model(fresh, examples=3, steps=20)


def ignores_the_fence(_row: object, _line: object) -> bool:
    return True


def writes_nothing(*_arguments: object, **_amounts: object) -> None:
    """Stand in for a step that is forgotten."""


@pytest.mark.parametrize(
    ("place", "bug"),
    [
        ("assign._is_as_planned", ignores_the_fence),
        ("assign.leave_queue", writes_nothing),
        ("finish.release_parents", writes_nothing),
        ("finish.free_permit", writes_nothing),
        ("finish.leave_queue", writes_nothing),
        ("unit_of_work.Counters.fly", writes_nothing),
        ("unit_of_work.UnitOfWork.settle_money", writes_nothing),
    ],
)
def test_a_planted_bug_is_caught(
    place: str, bug: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"headgate.storage.{place}", bug)
    # What the machine finds first may be an assertion, or an error of the store itself.
    with pytest.raises(Exception, match=r"."):
        check_against_the_model(in_memory, examples=200, steps=40, shrinks=False)
