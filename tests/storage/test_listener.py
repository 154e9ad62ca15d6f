"""The listener: nobody who looks whenever called misses anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest

from budgets.servers import PostgresServer
from headgate.errors import InvalidSettingError, StoreUnavailableError
from headgate.storage.postgres import MAX_WATCHERS, PostgresDatabase, PostgresListener

CHANNEL = "told"
PATIENCE_SECONDS = 30.0


class Ear:
    """Counts calls, and lets a test wait for the next one."""

    def __init__(self) -> None:
        self.calls = 0
        self._called = asyncio.Event()

    def __call__(self) -> None:
        self.calls += 1
        self._called.set()

    async def heard(self) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._called.wait()
        self._called.clear()


@asynccontextmanager
async def listening(url: str) -> AsyncIterator[PostgresListener]:
    listener = PostgresListener(url, CHANNEL)
    try:
        yield listener
    finally:
        listener.close()


async def tell(url: str, *payloads: str) -> None:
    """Notify in one transaction."""

    def notify() -> None:
        with psycopg.connect(url) as connection:
            for payload in payloads:
                connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, payload))

    await asyncio.to_thread(notify)


def test_a_watcher_is_called_once_it_is_connected_and_for_each_notification(
    postgres: PostgresServer,
) -> None:
    async def scenario() -> None:
        async with listening(postgres.url) as listener:
            ear = Ear()
            listener.watch("a", ear)
            await ear.heard()
            for _ in range(3):
                await tell(postgres.url, "a")
                await ear.heard()
            assert ear.calls == 4

    asyncio.run(scenario())


def test_each_watcher_hears_what_is_for_it(postgres: PostgresServer) -> None:
    async def scenario() -> None:
        async with listening(postgres.url) as listener:
            first, second = Ear(), Ear()
            listener.watch("a", first)
            await first.heard()
            listener.watch("b", second)
            await tell(postgres.url, "b", "nobody")
            await second.heard()
            assert (first.calls, second.calls) == (1, 1)

    asyncio.run(scenario())


def test_a_notification_comes_with_the_commit_and_not_before(postgres: PostgresServer) -> None:
    async def scenario() -> None:
        database = PostgresDatabase(postgres.url)
        async with listening(postgres.url) as listener:
            early, late = Ear(), Ear()
            listener.watch("a", early)
            await early.heard()
            listener.watch("b", late)
            database.begin().read("SELECT pg_notify(?, ?)", (CHANNEL, "a"))
            await tell(postgres.url, "b")
            await late.heard()
            assert early.calls == 1
            database.commit()
            await early.heard()
        database.close()

    asyncio.run(scenario())


def test_after_a_lost_connection_everybody_is_called_once_more(postgres: PostgresServer) -> None:
    async def scenario() -> None:
        async with listening(postgres.url) as listener:
            first, second = Ear(), Ear()
            listener.watch("a", first)
            await first.heard()
            # Not before: whether the connection is there first is a race.
            listener.watch("b", second)
            postgres.kill()
            postgres.start()
            await first.heard()
            await second.heard()
            await tell(postgres.url, "a")
            await first.heard()

    asyncio.run(scenario())


def test_a_server_that_is_away_at_first_is_waited_for(postgres: PostgresServer) -> None:
    async def scenario() -> None:
        async with listening(postgres.url) as listener:
            ear = Ear()
            postgres.stop()
            try:
                listener.watch("a", ear)
            finally:
                postgres.start()
            await ear.heard()

    asyncio.run(scenario())


def test_a_closed_listener_calls_nobody_until_somebody_watches_again(
    postgres: PostgresServer,
) -> None:
    async def scenario() -> None:
        async with listening(postgres.url) as listener, listening(postgres.url) as other:
            ear, other_ear = Ear(), Ear()
            listener.watch("a", ear)
            other.watch("a", other_ear)
            await ear.heard()
            await other_ear.heard()
            listener.close()
            await tell(postgres.url, "a")
            await other_ear.heard()
            assert ear.calls == 1
            listener.watch("a", ear)
            await ear.heard()

    asyncio.run(scenario())


def test_the_number_of_watchers_has_a_bound(postgres: PostgresServer) -> None:
    async def scenario() -> None:
        async with listening(postgres.url) as listener:
            for number in range(MAX_WATCHERS):
                listener.watch(f"w{number}", Ear())
            listener.watch("w0", Ear())
            with pytest.raises(StoreUnavailableError, match="watch already"):
                listener.watch("one more", Ear())

    asyncio.run(scenario())


def test_a_url_that_is_none_is_refused_without_repeating_its_password() -> None:
    with pytest.raises(InvalidSettingError, match="not a PostgreSQL URL") as caught:
        PostgresListener("postgresql://me:secret@[", CHANNEL)
    assert "secret" not in str(caught.value)
