"""PostgreSQL: how a connection looks things up, and how it says that there is none."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from pathlib import Path

import pytest

from headgate.errors import LedgerUnavailableError, StoreError
from headgate.storage.postgres import (
    CONNECT_WAITS_SECONDS,
    PostgresDatabase,
    PostgresReader,
    PostgresTransaction,
)
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


async def test_a_step_takes_few_round_trips_while_it_has_the_lock(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """All nodes wait for the one that has the lock, and a busy machine is slow at each of them."""
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
