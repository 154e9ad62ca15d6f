"""The ledger's functions on a transaction that somebody else opens, commits or undoes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from budgets.support import drift_of
from headgate.core.budgets.ledger import (
    FINISHED_KEPT_SECONDS,
    Limit,
    Refused,
    ReserveRequest,
    SettleRequest,
)
from headgate.core.budgets.reservations import Call, Reservation, ReservationState
from headgate.core.budgets.scopes import ROOT, Scope, charged_scopes
from headgate.core.budgets.windows import KEPT_BUCKETS, parse_window
from headgate.core.money import MicroUsd, Tokens
from headgate.errors import IllegalSettlementError
from headgate.storage import ledger
from headgate.storage.ledger import MIGRATIONS, PART
from headgate.storage.migrations import migrate
from headgate.storage.postgres import PostgresDatabase
from headgate.storage.sqlite import SqliteDatabase
from headgate.storage.transaction import Database, Transaction

NOW = 1_800_000_000.0
FLOW = Scope("session:eval/workflow:w1")
SESSION = Scope("session:eval")


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    database: Database
    if request.param == "sqlite":
        database = SqliteDatabase(tmp_path / "ledger.db")
    else:
        database = PostgresDatabase(request.getfixturevalue("postgres_url"))
    migrate(database.begin(), PART, MIGRATIONS)
    database.commit()
    yield database
    database.close()


@pytest.fixture
def transaction(database: Database) -> Transaction:
    transaction = database.begin()
    ledger.lock_ledger(transaction)
    return transaction


def reserve(
    name: str, micro_usd: int = 100, *, lease_seconds: float = 60.0, scope: Scope = FLOW
) -> ReserveRequest:
    return ReserveRequest(
        reservation_id=name,
        scopes=charged_scopes(scope),
        micro_usd=MicroUsd(micro_usd),
        tokens=Tokens(0),
        lease_seconds=lease_seconds,
    )


def commit(name: str, micro_usd: int = 100) -> SettleRequest:
    return SettleRequest(reservation_id=name, call=Call.COMMIT, micro_usd=MicroUsd(micro_usd))


def limit(micro_usd: int, window: str = "none") -> Limit:
    return Limit(limit_micro_usd=MicroUsd(micro_usd), window=parse_window(window))


def count(transaction: Transaction, table: str) -> int:
    return int(transaction.read(f"SELECT COUNT(*) FROM {table}")[0][0])


def assert_no_drift(transaction: Transaction) -> None:
    assert drift_of(ledger.audit(transaction)) == {}


def test_what_is_rolled_back_leaves_nothing(database: Database, transaction: Transaction) -> None:
    ledger.set_limit(transaction, SESSION, limit(1_000), NOW)
    ledger.apply_batch(transaction, [reserve("a"), commit("a", 40), reserve("b")], NOW)
    assert count(transaction, "ledger_journal") == 3
    database.rollback()
    transaction = database.begin()
    tables = ("limits", "reservations", "journal", "checkpoint")
    assert [count(transaction, f"ledger_{table}") for table in tables] == [0, 0, 0, 0]
    assert ledger.audit(transaction).kept == {}


def test_what_else_the_transaction_writes_is_one_commit_with_the_ledger(
    database: Database, transaction: Transaction
) -> None:
    transaction.run("CREATE TABLE tasks (id TEXT)")
    transaction.run("INSERT INTO tasks VALUES ('task-1')")
    ledger.apply_batch(transaction, [reserve("task-1")], NOW)
    database.commit()
    transaction = database.begin()
    assert count(transaction, "tasks") == count(transaction, "ledger_reservations") == 1


def test_each_request_of_a_batch_has_its_own_answer(transaction: Transaction) -> None:
    ledger.set_limit(transaction, SESSION, limit(250), NOW)
    requests: list[ledger.Request] = [
        *(reserve("a"), reserve("b"), reserve("c"), commit("nobody")),
        *(commit("a", 30), reserve("d"), reserve("a"), reserve("b", 99)),
    ]
    answers = ledger.apply_batch(transaction, requests, NOW)
    kinds = [type(answer) for answer in answers]
    assert kinds == [
        *(Reservation, Reservation, Refused, IllegalSettlementError),
        *(Reservation, Reservation, Reservation, IllegalSettlementError),
    ]
    assert ledger.accounts(transaction, SESSION, NOW)[0].balance.used_micro_usd == 230
    assert_no_drift(transaction)


def test_a_balance_is_written_once_however_many_requests_change_it(
    transaction: Transaction,
) -> None:
    ledger.apply_batch(transaction, [reserve(f"r{n}", 1) for n in range(300)], NOW)
    assert count(transaction, "ledger_balances") == 3
    assert ledger.accounts(transaction, ROOT, NOW)[0].balance.reserved_micro_usd == 300


def test_no_refusal_is_given_for_want_of_what_due_leases_hold(transaction: Transaction) -> None:
    ledger.set_limit(transaction, ROOT, limit(2_500), NOW)
    many = [reserve(f"r{n}", 1, lease_seconds=10.0) for n in range(2_500)]
    ledger.apply_batch(transaction, many, NOW)
    assert isinstance(ledger.apply_batch(transaction, [reserve("x", 1)], NOW)[0], Refused)
    answer = ledger.apply_batch(transaction, [reserve("y", 2_500)], NOW + 10)[0]
    assert isinstance(answer, Reservation)
    assert_no_drift(transaction)


def test_a_dispatched_lease_that_ends_is_spent(transaction: Transaction) -> None:
    dispatched = SettleRequest(reservation_id="a", call=Call.DISPATCHED)
    ledger.apply_batch(transaction, [reserve("a"), dispatched], NOW)
    assert ledger.expire_due(transaction, NOW + 60) == 1
    late = ledger.apply_batch(transaction, [commit("a", 70)], NOW + 61)[0]
    assert isinstance(late, Reservation)
    assert late.state is ReservationState.COMMITTED
    assert_no_drift(transaction)


def test_old_entries_are_folded_and_what_they_ended_is_forgotten(transaction: Transaction) -> None:
    ledger.apply_batch(transaction, [reserve("old"), commit("old", 40)], NOW)
    live = reserve("live", 7, lease_seconds=7 * 86_400.0)
    ledger.apply_batch(transaction, [live], NOW)
    later = NOW + FINISHED_KEPT_SECONDS + 1
    ledger.apply_batch(transaction, [reserve("new"), commit("new", 5)], later)
    assert not ledger.tidy(transaction, later)
    assert count(transaction, "ledger_journal") == 2
    assert sorted(transaction.read("SELECT id FROM ledger_reservations")) == [("live",), ("new",)]
    assert_no_drift(transaction)
    ledger.apply_batch(transaction, [commit("live", 7)], later)
    assert_no_drift(transaction)


def test_folding_goes_in_steps_and_stops_at_the_first_entry_that_must_stay(
    transaction: Transaction,
) -> None:
    many = [reserve(f"r{n}", lease_seconds=86_400.0) for n in range(5)]
    ledger.apply_batch(transaction, many, NOW)
    ledger.apply_batch(transaction, [reserve("ahead")], NOW + 100)
    ledger.apply_batch(transaction, [reserve("behind")], NOW)
    later = NOW + FINISHED_KEPT_SECONDS + 1
    assert ledger.tidy(transaction, later, most=3)
    assert count(transaction, "ledger_journal") == 4
    assert not ledger.tidy(transaction, later, most=3)
    left = [entry.reservation_id for entry in ledger.journal(transaction, ROOT, since=0, limit=9)]
    assert left == ["behind", "ahead"]
    assert_no_drift(transaction)


def test_what_a_clock_wrote_that_was_ahead_does_not_hold_up_the_journal(
    transaction: Transaction,
) -> None:
    ledger.apply_batch(transaction, [reserve("ahead"), commit("ahead", 1)], NOW + 10**8)
    for number in range(5):
        name = f"r{number}"
        ledger.apply_batch(transaction, [reserve(name), commit(name, 1)], NOW)
    ledger.tidy(transaction, NOW + FINISHED_KEPT_SECONDS + 1)
    assert count(transaction, "ledger_journal") == 0
    assert count(transaction, "ledger_reservations") == 0
    assert_no_drift(transaction)


def test_buckets_that_left_their_window_are_dropped_from_both_sides(
    transaction: Transaction,
) -> None:
    ledger.set_limit(transaction, SESSION, limit(10**9, "rolling:1h"), NOW)
    for hour in range(120):
        name = f"r{hour}"
        at = NOW + hour * 3_600
        ledger.apply_batch(transaction, [reserve(name), commit(name, 1)], at)
    later = NOW + 120 * 3_600
    ledger.tidy(transaction, later)
    assert ledger.purge_buckets(transaction, later) == ROOT
    buckets = "SELECT COUNT(*) FROM ledger_balances WHERE scope = 'session:eval'"
    assert int(transaction.read(buckets)[0][0]) <= KEPT_BUCKETS + 2
    assert_no_drift(transaction)
    assert ledger.accounts(transaction, ROOT, later)[0].balance.spent_micro_usd == 120


def test_the_journal_of_a_scope_is_found_among_those_of_others(transaction: Transaction) -> None:
    other = Scope("session:eval-2")
    requests = [reserve("mine"), *(reserve(f"r{n}", scope=other) for n in range(2_500))]
    ledger.apply_batch(transaction, requests, NOW)
    found = ledger.journal(transaction, SESSION, since=0.0, limit=10)
    assert [entry.reservation_id for entry in found] == ["mine"]
    assert ledger.journal(transaction, SESSION, since=NOW + 1, limit=10) == []
    assert len(ledger.journal(transaction, other, since=0.0, limit=10)) == 10


def test_a_subtree_does_not_reach_its_neighbours(transaction: Transaction) -> None:
    names = ("session:a", "session:a/workflow:w", "session:a-b", "session:a0", "session:b")
    requests = [reserve(name, scope=Scope(name)) for name in names]
    ledger.apply_batch(transaction, requests, NOW)
    found = ledger.accounts(transaction, Scope("session:a"), NOW)
    assert [account.scope for account in found] == ["session:a", "session:a/workflow:w"]
    everything = [account.scope for account in ledger.accounts(transaction, ROOT, NOW)]
    assert everything == ["", "session:a", "session:a-b", "session:a0", "session:b", names[1]]


def test_a_balance_in_which_nothing_is_left_is_dropped_on_both_sides(
    database: Database, transaction: Transaction
) -> None:
    for n in range(10):
        scope = Scope(f"session:eval/run:{n}")
        release = SettleRequest(reservation_id=f"r{n}", call=Call.RELEASE)
        ledger.apply_batch(transaction, [reserve(f"r{n}", n, scope=scope)], NOW)
        ledger.apply_batch(transaction, [release], NOW)
    # The row of the root stays: whoever locks the ledger locks it.
    assert transaction.read("SELECT scope FROM ledger_balances") == [("",)]
    # In steps that part a reservation from its end.
    while ledger.tidy(transaction, NOW + FINISHED_KEPT_SECONDS + 1, most=3):
        assert_no_drift(transaction)
    names = ("journal", "checkpoint", "reservations")
    assert [count(transaction, f"ledger_{name}") for name in names] == [0, 0, 0]
    database.rollback()


def test_of_a_long_journal_the_oldest_is_folded_before_its_time(
    transaction: Transaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_ENTRIES", 10)
    for n in range(10):
        ledger.apply_batch(transaction, [reserve(f"r{n}"), commit(f"r{n}", 40)], NOW + n)
    # Whoever repeats a call within minutes is recognised, however many there are.
    assert not ledger.tidy(transaction, NOW + ledger.LEAST_KEPT_SECONDS)
    assert count(transaction, "ledger_journal") == 20
    later = NOW + 100 + ledger.LEAST_KEPT_SECONDS
    while ledger.tidy(transaction, later, most=4):
        assert_no_drift(transaction)
    assert count(transaction, "ledger_journal") == 10
    assert count(transaction, "ledger_reservations") == 5
    assert_no_drift(transaction)
    assert ledger.accounts(transaction, FLOW, later)[0].balance.spent_micro_usd == 400
