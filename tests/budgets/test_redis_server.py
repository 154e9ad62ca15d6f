"""A server that is unfit is refused, and one that fails grants nothing and recovers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from redis import Redis

from budgets.servers import ValkeyServer, running_valkey
from budgets.support import assert_ledger_is_right, usd
from headgate.budgets import redis_server
from headgate.budgets.redis import RedisBudgetTracker, RedisLedger
from headgate.budgets.redis_server import RedisPersistenceWarning
from headgate.budgets.tracker import LedgerTracker
from headgate.errors import InvalidSettingError, LedgerUnavailableError

FLOW = "session:eval/workflow:w1"


@pytest.fixture
def own_valkey() -> Iterator[ValkeyServer]:
    """Give a server that a test may harm."""
    with running_valkey() as server:
        yield server


def admin(server: ValkeyServer) -> Redis:
    return cast("Redis", server.client())


@asynccontextmanager
async def opened(
    server: ValkeyServer, *, accepts_unseen_policy: bool = False
) -> AsyncIterator[LedgerTracker]:
    """Open a tracker that gives up soon."""
    ledger = RedisLedger(
        server.url, deadline_seconds=1.5, accepts_unseen_policy=accepts_unseen_policy
    )
    async with LedgerTracker(ledger) as tracker:
        yield tracker


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_may_evict_is_refused(valkey: ValkeyServer, policy: str) -> None:
    with admin(valkey) as client:
        client.config_set("maxmemory-policy", policy)
        try:
            with pytest.raises(LedgerUnavailableError, match=f"{policy}.*set it to noeviction"):
                async with RedisBudgetTracker(valkey.url):
                    pytest.fail("opened")
        finally:
            client.config_set("maxmemory-policy", "noeviction")


async def test_a_server_that_begins_to_evict_is_noticed(
    own_valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(own_valkey) as tracker:
        await tracker.reserve(FLOW, "0.10")
        with admin(own_valkey) as client:
            client.config_set("maxmemory-policy", "allkeys-random")
        monkeypatch.setattr(redis_server, "CHECKED_EVERY_SECONDS", -1.0)
        with pytest.raises(LedgerUnavailableError, match="allkeys-random"):
            await tracker.reserve(FLOW, "0.10")
        with admin(own_valkey) as client:
            client.config_set("maxmemory-policy", "noeviction")
        await tracker.reserve(FLOW, "0.10")


async def test_a_server_without_persistence_opens_with_a_warning() -> None:
    warns = pytest.warns(RedisPersistenceWarning, match="a restart forgets what was spent")
    with running_valkey("--appendonly", "no") as server, warns:
        await open_and_close(server.url)
    with running_valkey("--appendonly", "no", "--save", "3600 1") as server:
        await open_and_close(server.url)


async def open_and_close(url: str) -> None:
    async with RedisBudgetTracker(url):
        pass


async def test_where_config_is_forbidden_info_tells_the_policy(own_valkey: ValkeyServer) -> None:
    with admin(own_valkey) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.execute_command("ACL SETUSER default -config")
        with pytest.raises(LedgerUnavailableError, match=r"allkeys-lru.*set it to noeviction"):
            await open_and_close(own_valkey.url)
        client.execute_command("ACL SETUSER default +config")
        client.config_set("maxmemory-policy", "noeviction")
        client.execute_command("ACL SETUSER default -config")
        await open_and_close(own_valkey.url)


async def test_where_nothing_tells_the_policy_the_user_must_accept_that(
    own_valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with admin(own_valkey) as client:
        client.execute_command("ACL SETUSER default -config")
    monkeypatch.setattr(redis_server, "POLICY_FIELD", "hidden_by_the_host")
    with pytest.raises(LedgerUnavailableError, match="accepts_unseen_policy=True"):
        await open_and_close(own_valkey.url)
    async with opened(own_valkey, accepts_unseen_policy=True) as tracker:
        await tracker.reserve(FLOW, "0.10")


async def test_an_old_server_is_refused(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "OLDEST_VERSION", (99, 0))
    with pytest.raises(LedgerUnavailableError, match=r"is too old; use 6\.2 or newer"):
        await open_and_close(valkey_url)


async def test_a_replica_is_refused_at_the_start_and_grants_nothing_later(
    own_valkey: ValkeyServer,
) -> None:
    async with opened(own_valkey) as tracker:
        token = await tracker.reserve(FLOW, "0.10")
        with admin(own_valkey) as client:
            client.replicaof("127.0.0.1", "1")
        for _ in range(2):
            with pytest.raises(LedgerUnavailableError, match="replica"):
                await tracker.reserve(FLOW, "0.10")
        with pytest.raises(LedgerUnavailableError, match="connect to its primary"):
            await open_and_close(own_valkey.url)
        with admin(own_valkey) as client:
            client.replicaof("NO", "ONE")
        await tracker.commit(token, "0.10")
        assert await usd(tracker) == (100_000, 0, 0)


async def test_out_of_memory_grants_nothing_and_recovers(own_valkey: ValkeyServer) -> None:
    async with opened(own_valkey) as tracker:
        token = await tracker.reserve(FLOW, "0.10")
        with admin(own_valkey) as client:
            client.config_set("maxmemory", "1mb")
        calls = [tracker.reserve(FLOW, "0.10") for _ in range(5)]
        answers = await asyncio.gather(*calls, tracker.commit(token, "0.1"), return_exceptions=True)
        assert {type(answer) for answer in answers} == {LedgerUnavailableError}
        assert "out of memory" in str(answers[0])
        with admin(own_valkey) as client:
            client.config_set("maxmemory", "0")
        assert await usd(tracker) == (0, 100_000, 0)
        await tracker.commit(token, "0.10")
        await assert_ledger_is_right(tracker)


async def test_a_flushed_script_is_loaded_again(valkey: ValkeyServer, valkey_url: str) -> None:
    async with RedisBudgetTracker(valkey_url) as tracker:
        for _ in range(3):
            with admin(valkey) as client:
                client.script_flush()
            await tracker.reserve(FLOW, "0.10")
        assert await usd(tracker) == (0, 300_000, 0)


class Load:
    """Callers that reserve without end, and what they were granted."""

    def __init__(self, tracker: LedgerTracker) -> None:
        self.granted: list[str] = []
        self._tracker = tracker
        self._grew = asyncio.Event()

    async def run(self) -> None:
        while True:
            self._grew.set()
            try:
                self.granted.append((await self._tracker.reserve(FLOW, "0.000001")).id)
                # A failover takes seconds, and the journal is asked for 10,000 entries at most.
                await asyncio.sleep(0.05)
            except LedgerUnavailableError:
                await asyncio.sleep(0.01)

    async def until_more(self, count: int) -> None:
        wanted = len(self.granted) + count
        async with asyncio.timeout(30):
            while len(self.granted) < wanted:
                self._grew.clear()
                await self._grew.wait()


async def test_a_server_restarted_under_load_loses_nothing_that_was_acknowledged() -> None:
    with running_valkey("--appendfsync", "always") as server:
        async with opened(server) as tracker:
            load = Load(tracker)
            workers = [asyncio.create_task(load.run()) for _ in range(8)]
            for _ in range(3):
                await load.until_more(50)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            await load.until_more(50)
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            entries = await tracker.journal(limit=10_000)
            assert set(load.granted) <= {entry.reservation_id for entry in entries}
            await assert_ledger_is_right(tracker)


async def test_a_server_that_is_down_is_said_to_be_and_is_found_again(
    own_valkey: ValkeyServer,
) -> None:
    async with opened(own_valkey) as tracker:
        own_valkey.stop()
        with pytest.raises(LedgerUnavailableError, match="Redis is unavailable"):
            await tracker.reserve(FLOW, "0.10")
        own_valkey.start()
        await tracker.reserve(FLOW, "0.10")
    own_valkey.stop()
    with pytest.raises(LedgerUnavailableError, match="Redis is unavailable"):
        await open_and_close(own_valkey.url)
    own_valkey.start()


async def test_a_server_that_does_not_answer_is_given_up(own_valkey: ValkeyServer) -> None:
    async with opened(own_valkey) as tracker:
        with admin(own_valkey) as client:
            client.client_pause(2_500)
            with pytest.raises(LedgerUnavailableError, match=r"did not answer within 1\.5 seconds"):
                await tracker.reserve(FLOW, "0.10", reservation_id="paused")
            client.client_unpause()
        # The tries may all have been applied by now; together they are one reservation.
        await tracker.reserve(FLOW, "0.10", reservation_id="paused")
        assert await usd(tracker) == (0, 100_000, 0)


async def test_a_server_that_lost_the_ledger_grants_nothing_until_it_is_opened_again(
    valkey: ValkeyServer, valkey_url: str
) -> None:
    tracker = RedisBudgetTracker(valkey_url)
    async with tracker:
        await tracker.set_budget("session:eval", "1.00")
        valkey.flush()
        with pytest.raises(LedgerUnavailableError, match="lost this ledger"):
            await tracker.reserve(FLOW, "100.00")
        with pytest.raises(LedgerUnavailableError, match="lost this ledger"):
            await tracker.journal()
    async with tracker:
        await tracker.reserve(FLOW, "100.00")


async def test_a_password_is_not_shown() -> None:
    url = "redis://user:secret-word@127.0.0.1:1/0"
    with pytest.raises(LedgerUnavailableError) as caught:
        await open_and_close(url)
    assert "secret-word" not in str(caught.value)
    assert "\n" not in str(caught.value)


# Each has "secret" where a password, or a part of one that was not encoded, may stand.
BAD_URLS = [
    ("redis://:secret@h:notaport/0", "a port is a number"),
    ("redis://:secret@h:99999/0", "a port is a number"),
    ("redis://:secret/word@h:6379/0", "a port is a number"),
    ("redis://:secret@[::1/0", "a port is a number"),
    ("redis://:secret@h/notdb", "the database.*must be a number"),
    ("redis://:secret@h/0/secret", "the database.*must be a number"),
    ("redis://:secret@h/0?foo=secret", "an option that Redis does not take"),
    ("redis://h/0?secret=1", "an option that Redis does not take"),
    ("redis://h/0?db=secret", "an option that Redis does not take"),
    ("redis://h/0?ssl_cert_reqs=none", "an option that Redis does not take"),
    ("rediss://h/0?ssl_cert_reqs=secret", "an option that Redis does not take"),
    ("unix:///run/redis.sock?foo=secret", "an option that Redis does not take"),
    ("http://:secret@h/0", "the scheme must be one of"),
]


@pytest.mark.parametrize(("url", "problem"), BAD_URLS)
def test_a_url_that_cannot_be_used_is_refused_in_one_line_without_repeating_it(
    url: str, problem: str
) -> None:
    with pytest.raises(InvalidSettingError, match=problem) as caught:
        RedisBudgetTracker(url)
    assert caught.value.field == "url"
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


GOOD_URLS = [
    "redis://h",
    "redis://h/",
    "redis://user:p%2Fw@h:6379/15?ledger=team-a&socket_connect_timeout=2&decode_responses=true",
    "redis://[::1]:6379/0?client_name=headgate&health_check_interval=30",
    "rediss://h:6379/0?ssl_cert_reqs=none&ssl_check_hostname=false",
    "unix://user:word@/run/redis.sock?db=3",
]


@pytest.mark.parametrize("url", GOOD_URLS)
def test_a_url_with_options_that_redis_takes_is_accepted(url: str) -> None:
    RedisBudgetTracker(url)
