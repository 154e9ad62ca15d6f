"""PostgreSQL: how a connection looks things up, and how it says that there is none."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from math import inf
from pathlib import Path

import pytest

from headgate.core.budgets.ledger import Limit, ReserveRequest
from headgate.core.budgets.scopes import Scope, charged_scopes
from headgate.core.budgets.windows import parse_window
from headgate.core.money import MicroUsd, Tokens
from headgate.errors import LedgerUnavailableError, StoreError
from headgate.storage import ledger
from headgate.storage.migrations import migrate
from headgate.storage.postgres import (
    CONNECT_WAITS_SECONDS,
    LOCK_TIMEOUT_SECONDS,
    PostgresDatabase,
    PostgresReader,
    PostgresTransaction,
    task_database,
)
from headgate.storage.sql_store import StoreLedger
from headgate.storage.transaction import Dialect, json_rows
from storage.scene import AWAY, fresh_place


def test_rows_are_looked_up_by_key_even_when_the_plan_was_made_for_an_empty_table(
    postgres_url: str,
) -> None:
    database = PostgresDatabase(postgres_url)
    transaction = database.begin()
    transaction.run("CREATE TABLE words (word TEXT PRIMARY KEY)")
    given = Dialect.POSTGRES.given({"word": "TEXT"})
    look_up = f"EXPLAIN SELECT * FROM words WHERE word IN (SELECT given.word FROM {given})"
    plan = "\n".join(row[0] for row in transaction.read(look_up, (json_rows([("gate",)]),)))
    assert "Seq Scan" not in plan
    assert "Index" in plan
    database.close()


def test_a_connection_is_made_beside_thousands_of_others(postgres_url: str) -> None:
    """`select` knows no descriptor from 1,024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4_096), hard))
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1_100):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        database = PostgresDatabase(postgres_url)
        opened.callback(database.close)
        assert database.begin().read("SELECT 1", ()) == [(1,)]


def test_a_server_that_stays_away_is_waited_for_once(tmp_path: Path) -> None:
    database = PostgresDatabase(f"postgresql://me@/ledger?host={tmp_path}")
    took_seconds = []
    for _ in range(2):
        asked_at = time.monotonic()
        with pytest.raises(LedgerUnavailableError, match="PostgreSQL: ") as refused:
            database.begin()
        assert "granted" not in str(refused.value), "nobody has asked for anything yet"
        took_seconds.append(time.monotonic() - asked_at)
    first, second = took_seconds
    assert first >= sum(CONNECT_WAITS_SECONDS)
    assert second < first


def test_a_reader_sees_one_state_and_cannot_write(postgres_url: str) -> None:
    writer, reader = PostgresDatabase(postgres_url), PostgresReader(postgres_url)
    writer.begin().run("CREATE TABLE words (word TEXT PRIMARY KEY)")
    writer.commit()
    looking = reader.begin()
    assert looking.read("SELECT COUNT(*) FROM words") == [(0,)]
    writer.begin().run("INSERT INTO words VALUES ('gate')")
    writer.commit()
    assert looking.read("SELECT COUNT(*) FROM words") == [(0,)]
    with pytest.raises(StoreError, match="read-only"):
        looking.write("INSERT INTO words VALUES ('weir')")
    reader.close()
    writer.close()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Awaitable[object]], Awaitable[int]]:
    """Count the round trips of a step."""
    trips = 0
    wait = PostgresTransaction._wait

    def counted(transaction: PostgresTransaction) -> None:
        nonlocal trips
        trips += 1
        wait(transaction)

    async def taken(step: Awaitable[object]) -> int:
        nonlocal trips
        trips = 0
        await step
        return trips

    monkeypatch.setattr(PostgresTransaction, "_wait", counted)
    # A transaction that a busy machine has kept waiting is not followed by one more trip.
    monkeypatch.setattr("headgate.storage.postgres.LOCK_WAIT_SECONDS", inf)
    return taken


async def test_a_step_takes_few_round_trips_while_it_has_the_lock(
    taken: Callable[[Awaitable[object]], Awaitable[int]], request: pytest.FixtureRequest
) -> None:
    """All nodes wait for the one that has the lock, and a busy machine is slow at each of them."""
    async with fresh_place("postgres", request).scene() as scene:
        await scene.join_away()
        await scene.set_limit("project:search", 1_000)
        found = {
            "submit": await taken(scene.submit("t1")),
            "news": await taken(scene.store.news(scene.epoch)),
            "assign": await taken(scene.assign("t1", node_id=AWAY)),
            "collect": await taken(scene.store.collect(AWAY)),
            "settle": await taken(scene.settle("t1", node_id=AWAY)),
        }
    assert found == {"submit": 1, "news": 1, "assign": 3, "collect": 4, "settle": 5}


_MANY_ENTRIES = """
    INSERT INTO ledger_journal
        (at, reservation_id, call, charges, spent_micro_usd, reserved_micro_usd,
         overrun_micro_usd, spent_tokens, reserved_tokens, overrun_tokens)
    SELECT CAST(? AS DOUBLE PRECISION), 'r' || number, made.call,
        '[["",0],["project:search",0]]', made.spent, made.reserved, 0, 0, 0, 0
    FROM generate_series(1, 25000) AS number
    CROSS JOIN (VALUES ('reserve', 0, 10), ('expire', 10, -10)) AS made(call, spent, reserved)
"""
_MANY_RESERVATIONS = """
    INSERT INTO ledger_reservations
        (id, state, lease_until, charges, micro_usd, tokens, dispatched_at_once, finished_at)
    SELECT 'r' || number, 'assumed', 0, '[["",0],["project:search",0]]', 10, 0, 1,
        CAST(? AS DOUBLE PRECISION)
    FROM generate_series(1, 25000) AS number
"""
_THEIR_BALANCES = """
    INSERT INTO ledger_balances VALUES ('', 0, 250000, 0, 0, 0, 0, 0),
        ('project:search', 0, 250000, 0, 0, 0, 0, 0)
    ON CONFLICT (scope, bucket_start) DO UPDATE SET spent_micro_usd = excluded.spent_micro_usd
"""


@pytest.mark.parametrize("has_statistics", [False, True])
async def test_a_change_of_window_reads_a_long_journal_once(
    taken: Callable[[Awaitable[object]], Awaitable[int]],
    request: pytest.FixtureRequest,
    postgres_url: str,
    has_statistics: bool,
) -> None:
    """However many reservations are open, they are moved by a few statements of the server."""
    place = fresh_place("postgres", request)
    scope = Scope("project:search")
    async with place.scene() as scene:
        database = PostgresDatabase(postgres_url)
        transaction = database.begin()
        transaction.run(_MANY_ENTRIES, (place.clock(),))
        transaction.run(_MANY_RESERVATIONS, (place.clock(),))
        transaction.run(_THEIR_BALANCES)
        if has_statistics:
            transaction.run("ANALYZE ledger_journal, ledger_reservations")
        database.commit()
        database.close()
        day = Limit(limit_micro_usd=MicroUsd(300_000), window=parse_window("day"))
        asked_at = time.monotonic()
        assert await taken(scene.store.set_limits({scope: day})) < 30
        assert time.monotonic() - asked_at < 20
        (account,) = await StoreLedger(scene.store).accounts(scope)
        assert account.balance.spent_micro_usd == 250_000


def test_the_rest_of_a_batch_looks_rows_up_by_key_after_a_change_of_window(
    postgres_url: str,
) -> None:
    database = task_database(postgres_url, LOCK_TIMEOUT_SECONDS)
    transaction = database.begin()
    migrate(transaction, ledger.PART, ledger.MIGRATIONS)
    names = (
        *("enable_hashjoin", "enable_mergejoin", "enable_seqscan", "enable_nestloop"),
        # A server before 17 does not know the last one.
        *("idle_in_transaction_session_timeout", "transaction_timeout"),
    )
    settings = ", ".join(f"current_setting('{name}', true)" for name in names)
    before = transaction.read(f"SELECT {settings}")
    assert before[0][:3] == ("off", "off", "off")
    request = ReserveRequest(
        reservation_id="r",
        scopes=charged_scopes(Scope("project:search")),
        micro_usd=MicroUsd(10),
        tokens=Tokens(0),
        lease_seconds=60.0,
    )
    ledger.apply_batch(transaction, [request], 1_000_000.0)
    day = Limit(limit_micro_usd=MicroUsd(300_000), window=parse_window("day"))
    ledger.set_limit(transaction, Scope("project:search"), day, 1_000_000.0)
    assert transaction.read(f"SELECT {settings}") == before
    database.close()
