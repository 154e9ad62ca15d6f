"""Reading from a server that is slow: pages are told soon, and what takes long may take long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest

from headgate.errors import StoreError
from headgate.storage import postgres
from headgate.storage.postgres import PostgresTaskStore
from headgate.storage.store import TaskQuery
from headgate.storage.transaction import Transaction


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[PostgresTaskStore]:
    store = PostgresTaskStore(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def patience(transaction: Transaction) -> tuple[str, str]:
    lock, statement = transaction.read_all(
        [("SHOW lock_timeout", ()), ("SHOW statement_timeout", ())]
    )
    return str(lock[0][0]), str(statement[0][0])


async def test_a_question_gives_up_soon_unless_it_is_a_long_one(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        assert await store.ask(patience) == ("1s", "3s")
        assert await store.ask(patience, is_long=True) == ("10s", "30s")


async def test_a_locked_table_holds_nobody_for_long(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "READ_LOCK_SECONDS", 0.05)
    async with opened(postgres_url) as store:
        await store.find(TaskQuery())
        with psycopg.connect(postgres_url) as other:
            other.execute("LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE")
            for _ in range(12):
                with pytest.raises(StoreError, match="lock timeout"):
                    await store.find(TaskQuery())
            other.rollback()
        assert (await store.find(TaskQuery())).records == ()
