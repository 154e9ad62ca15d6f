"""A Redis that fails over forgets nothing that was granted, behind Sentinels and in a cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import pytest

from budgets.servers import (
    LEDGER_SLOT_KEY,
    SERVICE,
    ClusterService,
    Replicas,
    SentinelService,
    ask,
    free_ports,
    has_redis,
    running_network,
    running_replicas,
    running_valkey,
    wait_until,
)
from budgets.support import assert_ledger_is_right, usd
from budgets.test_redis_server import Load, open_and_close
from headgate.budgets.redis import RedisBudgetTracker
from headgate.budgets.redis_server import RedisPersistenceWarning, parse_url
from headgate.budgets.tracker import LedgerTracker
from headgate.errors import (
    BudgetExceededError,
    IllegalSettlementError,
    InvalidSettingError,
    LedgerUnavailableError,
)

FLOW = "session:eval/workflow:w1"
PATIENCE_SECONDS = 60
TOPOLOGIES = ("sentinel", "cluster")
NEEDS_REDIS = pytest.mark.skipif(
    not has_redis(), reason="no redis-server is here; install Debian's redis-server"
)
PROGRAMS = [pytest.param("valkey"), pytest.param("redis", marks=NEEDS_REDIS)]


@pytest.fixture(params=TOPOLOGIES)
def replicas(request: pytest.FixtureRequest) -> Iterator[Replicas]:
    """Give a primary and two replicas, which a test may harm."""
    with running_replicas(request.param) as service:
        yield service


@asynccontextmanager
async def load_on(url: str, callers: int = 8) -> AsyncIterator[tuple[LedgerTracker, Load]]:
    """Have callers reserve without end; afterwards, what they were granted must be there."""
    async with RedisBudgetTracker(url) as tracker:
        load = Load(tracker)
        workers = [asyncio.create_task(load.run()) for _ in range(callers)]
        try:
            await load.until_more(50)
            yield tracker, load
            await load.until_more(50)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        entries = await tracker.journal(limit=10_000)
        assert set(load.granted) <= {entry.reservation_id for entry in entries}
        await assert_ledger_is_right(tracker)


async def insist_on(tracker: LedgerTracker, name: str) -> None:
    """Reserve under a name until it is granted."""
    refusals: Counter[str] = Counter()
    with failing_with(refusals):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    await tracker.reserve(FLOW, "0.10", reservation_id=name)
                except LedgerUnavailableError as error:
                    refusals[str(error)] += 1
                else:
                    return
                await asyncio.sleep(0.02)


@contextmanager
def failing_with(refusals: Counter[str]) -> Iterator[None]:
    """Where a minute was too short, say what was answered in it."""
    try:
        yield
    except TimeoutError:
        pytest.fail(f"never granted: {dict(refusals)}")


@NEEDS_REDIS
async def test_a_server_of_redis_keeps_a_ledger_as_valkey_does() -> None:
    with running_valkey(program="redis") as server:
        await spend_up_to_a_limit(server.url)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_a_killed_primary_loses_nothing_that_was_granted(topology: str, program: str) -> None:
    with running_replicas(topology, program) as service:
        await spend_up_to_a_limit(f"{service.url}?ledger=other" if topology == "sentinel" else "")
        async with load_on(service.url) as (_, load):
            port = service.wait_for_primary()
            await asyncio.to_thread(service.servers[port].kill)
            await asyncio.to_thread(lambda: service.wait_for_primary(other_than=port))
            await load.until_more(50)
            await asyncio.to_thread(service.servers[port].start)
            await asyncio.to_thread(service.wait_until_whole)


async def spend_up_to_a_limit(url: str) -> None:
    if not url:
        return
    async with RedisBudgetTracker(url) as tracker:
        await tracker.set_budget("session:eval", "1.00")
        token = await tracker.reserve(FLOW, "0.60", dispatched=True)
        await tracker.commit(token, "0.50")
        with pytest.raises(BudgetExceededError):
            await tracker.reserve(FLOW, "0.51")
        held = await tracker.reserve(FLOW, "0.50")
        await tracker.release(held)
        with pytest.raises(IllegalSettlementError):
            await tracker.commit(held, "0.10")
        assert await usd(tracker, "session:eval") == (500_000, 0, 0)
        await assert_ledger_is_right(tracker)


async def test_a_primary_that_was_cut_off_and_comes_back_grants_nothing(replicas: Replicas) -> None:
    async with load_on(replicas.url) as (_, load):
        port = replicas.wait_for_primary()
        replicas.servers[port].stand_still()
        await asyncio.to_thread(lambda: replicas.wait_for_primary(other_than=port))
        await load.until_more(50)
        replicas.servers[port].go_on()
        await asyncio.to_thread(replicas.wait_until_whole)


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_nothing_is_granted_by_a_primary_that_a_majority_does_not_see(topology: str) -> None:
    """The other replica is promoted, and has only what both of them had confirmed."""
    with running_network() as network, running_replicas(topology, network=network) as service:
        async with load_on(service.url) as (_, load):
            port = service.wait_for_primary()
            beside = next(copy for copy in service.copies() if copy != port)
            network.split({port, beside})
            await asyncio.to_thread(lambda: service.wait_for_primary(other_than=port))
            # The former primary has a replica that confirms, the new one has none that does.
            granted = len(load.granted)
            assert ask(beside, "ROLE") is not None
            network.heal()
            await load.until_more(50)
            assert len(load.granted) > granted
            await asyncio.to_thread(service.wait_until_whole)


async def test_nothing_is_granted_until_a_lost_replica_is_given_up(replicas: Replicas) -> None:
    async with RedisBudgetTracker(replicas.url) as tracker:
        await tracker.reserve(FLOW, "0.10")
        port = replicas.wait_for_primary()
        lost = next(copy for copy in replicas.copies() if copy != port)
        # It stays connected, and nobody knows yet that it cannot be promoted.
        replicas.servers[lost].stand_still()
        await insist_on(tracker, "late")
        assert replicas.is_given_up(lost)
        replicas.servers[lost].go_on()
        await asyncio.to_thread(replicas.wait_until_whole)
        await insist_on(tracker, "both again")
        # What was written and not confirmed at first is one reservation all the same.
        assert await usd(tracker) == (0, 300_000, 0)


async def test_what_was_known_already_is_confirmed_before_it_is_said_again(
    replicas: Replicas,
) -> None:
    """A repeated call writes nothing of its own that replicas could lack."""
    async with RedisBudgetTracker(replicas.url) as tracker:
        await tracker.reserve(FLOW, "0.10", reservation_id="first")
        for server in replicas.replicas:
            server.stand_still()
        for _ in range(2):
            with pytest.raises(LedgerUnavailableError, match="nothing was granted"):
                await tracker.reserve(FLOW, "0.20", reservation_id="again")
        for server in replicas.replicas:
            server.go_on()
        await insist_on(tracker, "later")


async def test_a_promoted_replica_that_may_evict_is_refused(replicas: Replicas) -> None:
    async with RedisBudgetTracker(replicas.url) as tracker:
        await tracker.reserve(FLOW, "0.10")
        port = replicas.wait_for_primary()
        others = [copy for copy in replicas.copies() if copy != port]
        set_policy(others, "allkeys-lru")
        replicas.servers[port].kill()
        await until_refused(tracker, "allkeys-lru and may evict what was spent")
        # Both, since two elections may follow one another before it is quiet again.
        set_policy(others, "noeviction")
        await insist_on(tracker, "after")


def set_policy(ports: Sequence[int], policy: str) -> None:
    asked = ("CONFIG", "SET", "maxmemory-policy", policy)
    wait_until(lambda: all(ask(port, *asked) is not None for port in ports))


async def until_refused(tracker: LedgerTracker, problem: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await tracker.reserve(FLOW, "0.10")
            except LedgerUnavailableError as error:
                if problem in str(error):
                    return
            await asyncio.sleep(0.02)


async def test_a_server_that_forgot_confirmed_steps_grants_nothing_to_who_knows(
    replicas: Replicas,
) -> None:
    tracker = RedisBudgetTracker(replicas.url)
    async with tracker:
        for _ in range(3):
            await tracker.reserve(FLOW, "0.10")
        port = replicas.wait_for_primary()
        ask(port, "SET", f"{LEDGER_SLOT_KEY}:steps", 1)
        for _ in range(2):
            with pytest.raises(LedgerUnavailableError, match=r"forgotten steps .*open the ledger"):
                await tracker.reserve(FLOW, "0.10")
        assert await usd_after_opening(replicas.url) == (0, 300_000, 0)
    async with tracker:
        await tracker.reserve(FLOW, "0.10")


async def usd_after_opening(url: str) -> tuple[int, int, int]:
    async with RedisBudgetTracker(url) as tracker:
        return await usd(tracker)


async def test_a_slot_that_moves_to_another_shard_takes_the_ledger_along() -> None:
    with running_replicas("cluster") as service:
        assert isinstance(service, ClusterService)
        async with RedisBudgetTracker(service.url) as tracker:
            await tracker.reserve(FLOW, "0.10")
            former, now = service.wait_for_primary(), service.elsewhere[0]
            await asyncio.to_thread(service.move_slot, former, now, service.copies()[-1])
            await insist_on(tracker, "moved")
            assert await usd(tracker) == (0, 200_000, 0)
            await assert_ledger_is_right(tracker)


async def test_without_a_majority_of_sentinels_nothing_is_granted() -> None:
    with running_replicas("sentinel") as service:
        assert isinstance(service, SentinelService)
        async with RedisBudgetTracker(service.url) as tracker:
            await tracker.reserve(FLOW, "0.10")
            first, *others = service.sentinels
            service.stop_sentinels(others)
            await until_refused(tracker, "1 of 3 Sentinels answer, and 2 must; nothing was granted")
            await until_refused(tracker, "1 of 3 Sentinels answer")
        with pytest.raises(LedgerUnavailableError, match="1 of 3 Sentinels; name at least 2"):
            await open_and_close(f"redis+sentinel://127.0.0.1:{first}/{SERVICE}/0")
        with pytest.raises(LedgerUnavailableError, match="watch no service of this name"):
            await open_and_close(service.url.replace(f"/{SERVICE}/", "/other/"))


async def test_one_sentinel_that_knows_nothing_of_the_service_is_outvoted() -> None:
    with running_replicas("sentinel") as service:
        assert isinstance(service, SentinelService)
        ask(next(iter(service.sentinels)), "SENTINEL", "REMOVE", SERVICE)
        async with RedisBudgetTracker(service.url) as tracker:
            await tracker.reserve(FLOW, "0.10")


async def test_a_snapshot_alone_is_not_enough_for_a_primary_that_restarts(
    replicas: Replicas,
) -> None:
    for copy in replicas.copies():
        ask(copy, "CONFIG", "SET", "save", "3600 1")
        ask(copy, "CONFIG", "SET", "appendonly", "no")
    with pytest.warns(RedisPersistenceWarning, match="has its last snapshot only"):
        await open_and_close(replicas.url)


async def test_a_service_that_takes_writes_without_replicas_is_refused(replicas: Replicas) -> None:
    ask(replicas.wait_for_primary(), "CONFIG", "SET", "min-replicas-to-write", 0)
    with pytest.raises(LedgerUnavailableError, match="set min-replicas-to-write 1"):
        await open_and_close(replicas.url)


async def test_a_url_of_the_wrong_kind_says_which_to_write() -> None:
    a_cluster = pytest.raises(LedgerUnavailableError, match=r"a cluster; write redis\+cluster://")
    with running_valkey("--cluster-enabled", "yes") as server, a_cluster:
        await open_and_close(server.url)
    (port,) = free_ports(1)
    with running_valkey("--port", str(port), "--bind", "127.0.0.1"):
        with pytest.raises(LedgerUnavailableError, match="not a cluster; write redis://"):
            await open_and_close(f"redis+cluster://127.0.0.1:{port}")
        with pytest.raises(LedgerUnavailableError, match="a Sentinel is unavailable"):
            await open_and_close(f"redis+sentinel://127.0.0.1:{port}/{SERVICE}/0")
    with pytest.raises(LedgerUnavailableError, match="0 of 1 Sentinels answer"):
        await open_and_close(f"redis+sentinel://127.0.0.1:{port}/{SERVICE}/0")
    with pytest.raises(LedgerUnavailableError, match="no node of the cluster answers"):
        await open_and_close(f"redis+cluster://127.0.0.1:{port}")


async def test_servers_and_sentinels_may_have_passwords_of_their_own() -> None:
    with running_replicas("sentinel") as service:
        assert isinstance(service, SentinelService)
        for port in service.copies():
            ask(port, "CONFIG", "SET", "masterauth", "server-word")
            ask(port, "CONFIG", "SET", "requirepass", "server-word")
        for port in service.sentinels:
            ask(port, "ACL", "SETUSER", "default", "resetpass", ">sentinel-word")
        hosts = service.url.removeprefix("redis+sentinel://")
        with pytest.raises(LedgerUnavailableError) as caught:
            await open_and_close(f"redis+sentinel://:server-word@{hosts}")
        assert "write it as sentinel_password" in str(caught.value)
        assert "word@" not in str(caught.value)
        with pytest.raises(LedgerUnavailableError) as caught:
            await open_and_close(f"redis+sentinel://:wrong@{hosts}?sentinel_password=sentinel-word")
        assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
        async with RedisBudgetTracker(
            f"redis+sentinel://:server-word@{hosts}?sentinel_password=sentinel-word"
        ) as tracker:
            await insist_on(tracker, "allowed")


GOOD_URLS = [
    (
        "redis+sentinel://s1,s2:26380,[::1]:26381/mymaster/3?ledger=a",
        "sentinel",
        (("s1", 26379), ("s2", 26380), ("::1", 26381)),
        "redis://node:6379/3",
    ),
    (
        "REDIS+SENTINEL://u:p%2Fw@s1/mymaster",
        "sentinel",
        (("s1", 26379),),
        "redis://u:p%2Fw@node:6379/",
    ),
    (
        "rediss+sentinel://s1/m/0?ssl_cert_reqs=none&sentinel_password=x",
        "sentinel",
        (("s1", 26379),),
        "rediss://node:6379/0?ssl_cert_reqs=none",
    ),
    (
        "redis+cluster://:w@n1,n2:7000/0?client_name=hg",
        "cluster",
        (("n1", 6379), ("n2", 7000)),
        "redis://:w@node:6379/0?client_name=hg",
    ),
    ("rediss+cluster://n1", "cluster", (("n1", 6379),), "rediss://node:6379"),
]


@pytest.mark.parametrize(("url", "topology", "hosts", "of_server"), GOOD_URLS)
def test_a_url_names_hosts_and_how_to_reach_a_server(
    url: str, topology: str, hosts: tuple[tuple[str, int], ...], of_server: str
) -> None:
    RedisBudgetTracker(url)
    parsed = parse_url(url)
    assert (parsed.topology, parsed.hosts) == (topology, hosts)
    assert parsed.of_server(("node", 6379)) == of_server


def test_an_address_of_the_new_form_is_in_brackets() -> None:
    assert parse_url("redis+cluster://[::1]").of_server(("::1", 1)) == "redis://[::1]:1"


BAD_URLS = [
    ("redis+sentinel://:secret@s1:26379", "the name of the service follows"),
    ("redis+sentinel://:secret@s1:26379/", "the name of the service follows"),
    ("redis+sentinel://:secret@s1:26379/m/secret", "follows the service, must be a number"),
    ("redis+sentinel://:secret@s1:notaport/m", "a port is a number"),
    ("redis+sentinel://:secret@s1:99999/m", "a port is a number"),
    ("redis+sentinel://:secret@,s1/m", "a port is a number"),
    ("redis+sentinel://:secret@/m", "a port is a number"),
    ("redis+sentinel://s1/m?secret=1", "an option that Redis does not take"),
    ("redis+sentinel://s1/m?ssl_cert_reqs=none", "an option that Redis does not take"),
    ("redis+cluster://:secret@n1/1", "the database 0 alone"),
    ("redis+cluster://n1?sentinel_password=secret", "an option that Redis does not take"),
    ("redis+cluster://:secret@[::1/0", "a port is a number"),
    ("redis+other://:secret@n1", "the scheme must be one of"),
    ("unix+sentinel://:secret@n1/m", "the scheme must be one of"),
]


@pytest.mark.parametrize(("url", "problem"), BAD_URLS)
def test_a_url_that_cannot_be_used_is_refused_without_repeating_it(url: str, problem: str) -> None:
    with pytest.raises(InvalidSettingError, match=problem) as caught:
        RedisBudgetTracker(url)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
