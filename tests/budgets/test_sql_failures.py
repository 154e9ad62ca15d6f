"""What the ledgers in SQL do when their database does not answer: grant nothing, then recover."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import apsw
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from budgets.servers import PostgresServer, running_postgres
from budgets.support import assert_ledger_is_right, usd
from headgate.budgets.connect import connect_budget
from headgate.budgets.postgres import PostgresBudgetTracker
from headgate.budgets.sql import SqlLedger
from headgate.budgets.sqlite import SqliteBudgetTracker
from headgate.budgets.tracker import LedgerTracker
from headgate.errors import (
    BudgetExceededError,
    InvalidSettingError,
    LedgerUnavailableError,
    StoreError,
)
from headgate.storage.postgres import translated
from headgate.testing import VirtualClock

FLOW = "session:eval/workflow:w1"
READ_ONLY = r"PostgreSQL: .*; the server is read-only, nothing was granted"


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
        await assert_ledger_is_right(tracker)


async def test_a_ledger_of_a_newer_program_is_refused(tmp_path: Path) -> None:
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


def test_a_url_of_a_ledger_in_memory_is_refused_as_a_file() -> None:
    with pytest.raises(InvalidSettingError, match="use memory:"):
        connect_budget("sqlite:///:memory:")


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
            await assert_ledger_is_right(tracker)


async def test_an_unreachable_server_is_named_and_nothing_is_left_running(
    tmp_path: Path,
) -> None:
    tracker = PostgresBudgetTracker(f"postgresql://postgres@/ledger?host={tmp_path}")
    with pytest.raises(LedgerUnavailableError, match=r"PostgreSQL: .*"):
        await tracker.ledger.open()
    with pytest.raises(LedgerUnavailableError, match="closed"):
        await tracker.reserve(FLOW, "0.10")


async def test_a_ledger_that_somebody_else_locks_is_waited_for_only_so_long(
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


async def test_a_database_made_read_only_grants_nothing_and_recovers(
    postgres: PostgresServer,
) -> None:
    url = postgres.new_database()
    database = conninfo_to_dict(url)["dbname"]
    async with PostgresBudgetTracker(url) as tracker:
        await tracker.reserve(FLOW, "0.10")
        with psycopg.connect(postgres.url, autocommit=True) as other:
            alter = f"ALTER DATABASE {database} SET default_transaction_read_only"
            other.execute(f"{alter} = on".encode())
            await tracker.ledger.close()
            await tracker.ledger.open()
            with pytest.raises(LedgerUnavailableError, match=READ_ONLY):
                await tracker.reserve(FLOW, "0.10")
            other.execute(f"{alter} = off".encode())
        await tracker.reserve(FLOW, "0.10")
        assert (await usd(tracker)).reserved == 200_000


async def test_a_ledger_cannot_be_made_where_the_url_says_read_only(postgres_url: str) -> None:
    url = f"{postgres_url}%20-cdefault_transaction_read_only%3Don"
    with pytest.raises(LedgerUnavailableError, match=READ_ONLY):
        await PostgresBudgetTracker(url).ledger.open()


async def test_a_standby_grants_nothing_until_it_is_promoted() -> None:
    with running_postgres() as server:
        async with PostgresBudgetTracker(server.url) as tracker:
            await tracker.reserve(FLOW, "0.10")
            server.stop()
            (server.socket_path.parent / "data" / "standby.signal").touch()
            server.start()
            with pytest.raises(LedgerUnavailableError, match=READ_ONLY):
                await tracker.reserve(FLOW, "0.10")
            with psycopg.connect(server.url, autocommit=True) as other:
                with pytest.raises(psycopg.errors.FeatureNotSupported) as refused:
                    other.execute("BEGIN READ WRITE")
                assert isinstance(translated(refused.value, other), LedgerUnavailableError)
                other.execute("SELECT pg_promote()")
            await tracker.reserve(FLOW, "0.10")
            assert (await usd(tracker)).reserved == 200_000


async def test_a_role_that_may_not_create_tables_uses_those_that_exist(
    postgres: PostgresServer,
) -> None:
    url = postgres.new_database()
    async with PostgresBudgetTracker(url) as tracker:
        await tracker.reserve(FLOW, "0.10")
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("CREATE ROLE clerk LOGIN")
        owner.execute(
            "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO clerk"
        )
    async with PostgresBudgetTracker(url.replace("postgres@", "clerk@")) as tracker:
        token = await tracker.reserve(FLOW, "0.20")
        await tracker.commit(token, "0.20")
        assert await usd(tracker) == (200_000, 100_000, 0)


@pytest.mark.parametrize("step_seconds", [3_600.0, -3_600.0])
async def test_a_wall_clock_that_is_set_ends_no_lease(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, step_seconds: float
) -> None:
    unset, step = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: unset() + step[0])
    async with (
        PostgresBudgetTracker(postgres_url) as steady,
        PostgresBudgetTracker(postgres_url) as tracker,
    ):
        await steady.reserve(FLOW, "0.10", lease_seconds=600.0)
        await tracker.status()
        step[0] = step_seconds
        assert abs(tracker.ledger.now() - unset()) < 60.0
        await tracker.reserve(FLOW, "0.10", lease_seconds=600.0)
        assert await tracker.ledger.sweep() == 0
        step[0] = 0.0
        assert await steady.ledger.sweep() == 0
        assert (await usd(steady)).reserved == 200_000


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


def test_a_malformed_url_is_refused_without_its_password() -> None:
    with pytest.raises(InvalidSettingError) as refusal:
        PostgresBudgetTracker("postgresql://user:secret@[")
    assert "secret" not in str(refusal.value)
