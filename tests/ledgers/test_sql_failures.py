"""What the ledgers in SQL do when their database does not answer: grant nothing, then recover."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw
import psycopg
import pytest

from headgate.errors import BudgetExceededError, LedgerUnavailableError, StoreError
from headgate.ledgers.postgres import PostgresBudgetTracker
from headgate.ledgers.sql_ledger import SqlLedger
from headgate.ledgers.sqlite import SqliteBudgetTracker
from headgate.testing import VirtualClock
from headgate.tracker import LedgerTracker
from ledgers.servers import running_postgres
from ledgers.support import assert_books_are_right, usd

FLOW = "session:eval/workflow:w1"


async def run_sql(tracker: LedgerTracker, sql: str) -> None:
    """Run a statement on the connection of a tracker."""
    assert isinstance(tracker.ledger, SqlLedger)
    await tracker.ledger.writer.submit(lambda transaction: transaction.read(sql))


async def test_a_locked_file_grants_nothing_and_recovers(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with SqliteBudgetTracker(path, busy_timeout_seconds=0.02) as tracker:
        other = apsw.Connection(str(path))
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerUnavailableError, match="locked"):
            await tracker.reserve(FLOW, "0.10")
        other.execute("ROLLBACK")
        other.close()
        await tracker.reserve(FLOW, "0.10")
        assert (await usd(tracker)).reserved == 100_000


async def test_a_full_disk_grants_nothing_and_recovers(tmp_path: Path) -> None:
    async with SqliteBudgetTracker(tmp_path / "ledger.db") as tracker:
        await tracker.reserve(FLOW, "0.10")
        await run_sql(tracker, "PRAGMA max_page_count = 1")
        answers = await asyncio.gather(
            *[tracker.reserve(FLOW, "0.10") for _ in range(400)], return_exceptions=True
        )
        refused = [answer for answer in answers if isinstance(answer, LedgerUnavailableError)]
        assert refused
        assert "full" in str(refused[0])
        granted = len(answers) - len(refused)
        await run_sql(tracker, "PRAGMA max_page_count = 100000")
        assert (await usd(tracker)).reserved == 100_000 * (1 + granted)
        await tracker.reserve(FLOW, "0.10")
        await assert_books_are_right(tracker)


async def test_books_of_a_newer_program_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with SqliteBudgetTracker(path) as tracker:
        await run_sql(tracker, "UPDATE headgate_schema SET version = 99")
    with pytest.raises(StoreError, match=r"ledger tables are at version 99, .* newer headgate"):
        await SqliteBudgetTracker(path).ledger.open()


async def test_two_trackers_on_one_file_never_pass_the_limit_together(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with SqliteBudgetTracker(path) as first, SqliteBudgetTracker(path) as second:
        await first.set_budget("session:eval", limit_usd="1.00")
        answers = await asyncio.gather(
            *[tracker.reserve(FLOW, "0.01") for tracker in (first, second) for _ in range(100)],
            return_exceptions=True,
        )
        refused = [answer for answer in answers if isinstance(answer, BudgetExceededError)]
        assert len(refused) == 100
        assert (await usd(second, "session:eval")).reserved == 1_000_000


class Load:
    """Callers that spend a cent at a time, whatever happens to the server."""

    def __init__(self, tracker: LedgerTracker) -> None:
        self.tracker = tracker
        self.acknowledged = 0
        self.unavailable = 0
        self.is_over = False
        self._progress = asyncio.Event()

    async def spend(self, name: int) -> None:
        number = 0
        while not self.is_over:
            number += 1
            try:
                token = await self.tracker.reserve(FLOW, "0.01", reservation_id=f"{name}-{number}")
                await self.tracker.commit(token, "0.01")
                self.acknowledged += 1
                self._progress.set()
            except LedgerUnavailableError:
                self.unavailable += 1

    async def until_more_was_spent(self) -> None:
        for _ in range(50):
            self._progress.clear()
            await self._progress.wait()


async def test_a_database_that_restarts_under_load_loses_and_doubles_nothing() -> None:
    with running_postgres(is_durable=True) as server:
        async with PostgresBudgetTracker(server.url) as tracker:
            load = Load(tracker)
            spenders = [asyncio.create_task(load.spend(name)) for name in range(16)]
            for _ in range(2):
                await load.until_more_was_spent()
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            await load.until_more_was_spent()
            load.is_over = True
            await asyncio.gather(*spenders)
            # A commit whose answer was lost may stand, but only for a call that was told so.
            cents = (await usd(tracker)).spent // 10_000
            assert load.acknowledged <= cents <= load.acknowledged + load.unavailable
            await assert_books_are_right(tracker)


async def test_an_unreachable_server_is_named_and_nothing_is_left_running(
    tmp_path: Path,
) -> None:
    tracker = PostgresBudgetTracker(f"postgresql://postgres@/books?host={tmp_path}")
    with pytest.raises(LedgerUnavailableError, match=r"PostgreSQL: .* nothing was granted"):
        await tracker.ledger.open()
    with pytest.raises(LedgerUnavailableError, match="closed"):
        await tracker.reserve(FLOW, "0.10")


async def test_books_that_somebody_else_locks_are_waited_for_only_so_long(
    postgres_url: str,
) -> None:
    async with PostgresBudgetTracker(postgres_url, lock_timeout_seconds=0.05) as tracker:
        with psycopg.connect(postgres_url) as other:
            other.execute("SELECT 1 FROM ledger_balances WHERE scope = '' FOR UPDATE")
            with pytest.raises(LedgerUnavailableError, match="lock timeout"):
                await tracker.reserve(FLOW, "0.10")
        await tracker.reserve(FLOW, "0.10")
        assert (await usd(tracker)).reserved == 100_000


async def test_a_server_that_turned_read_only_grants_nothing_and_recovers(
    postgres_url: str,
) -> None:
    async with PostgresBudgetTracker(postgres_url) as tracker:
        with psycopg.connect(postgres_url, autocommit=True) as other:
            await tracker.reserve(FLOW, "0.10")
            other.execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " RAISE SQLSTATE '25006' USING MESSAGE = 'read-only'; END $$"
            )
            other.execute(
                "CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON ledger_balances"
                " FOR EACH STATEMENT EXECUTE FUNCTION refuse()"
            )
            with pytest.raises(LedgerUnavailableError, match="read-only"):
                await tracker.reserve(FLOW, "0.10")
            other.execute("DROP TRIGGER refuse ON ledger_balances")
        await tracker.reserve(FLOW, "0.10")
        assert (await usd(tracker)).reserved == 200_000


async def test_the_servers_clock_decides_unless_one_is_given(postgres_url: str) -> None:
    clock = VirtualClock()
    async with PostgresBudgetTracker(postgres_url, clock=clock) as tracker:
        await tracker.status()
        assert tracker.ledger.now() == clock()
    async with PostgresBudgetTracker(postgres_url) as tracker:
        with psycopg.connect(postgres_url) as other:
            row = other.execute("SELECT EXTRACT(EPOCH FROM clock_timestamp())").fetchone()
        assert row is not None
        await tracker.status()
        assert abs(tracker.ledger.now() - float(row[0])) < 10.0


async def test_an_operation_that_fails_on_the_server_spoils_nobody_in_its_transaction(
    postgres_url: str,
) -> None:
    async with PostgresBudgetTracker(postgres_url) as tracker:
        answers = await asyncio.gather(
            tracker.reserve(FLOW, "0.10"),
            run_sql(tracker, "SELECT * FROM nowhere"),
            tracker.reserve(FLOW, "0.10"),
            return_exceptions=True,
        )
        assert [isinstance(answer, Exception) for answer in answers] == [False, True, False]
        assert (await usd(tracker)).reserved == 200_000
