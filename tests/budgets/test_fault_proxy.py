"""Replies get lost, requests get lost, and still every amount is booked once."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from budgets.fault_proxy import FaultProxy, running_proxy
from budgets.lost_replies import Outcome, lose_replies
from budgets.proxied import Proxied, proxied_postgres, proxied_redis
from budgets.servers import PostgresServer, ValkeyServer
from budgets.support import assert_ledger_is_right, usd
from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.reservations import Call

DROPS = 150
CALLERS = 8


@pytest.fixture(params=["redis", "postgres"])
def proxied(request: pytest.FixtureRequest) -> Proxied:
    """Give a fresh ledger behind a proxy, and the way to it past it."""
    if request.param == "redis":
        server: ValkeyServer = request.getfixturevalue("valkey")
        server.flush()
        return proxied_redis(server)
    database: PostgresServer = request.getfixturevalue("postgres")
    return proxied_postgres(database)


async def test_no_amount_is_booked_twice_whatever_replies_are_lost(proxied: Proxied) -> None:
    proxy = proxied.proxy(seed=7)
    async with running_proxy(proxy):
        async with proxied.through(proxy) as tracker:
            proxy.harm(drop_reply=0.5, cut_request=0.05, delay_reply=0.05)
            outcome = await lose_replies(tracker, proxy, drops=DROPS, callers=CALLERS, seed=7)
            proxy.heal()
        assert outcome.wrong_answers == []
        assert proxy.dropped_replies >= DROPS
    async with proxied.direct() as tracker:
        await assert_each_call_was_booked_once(tracker, outcome)


async def assert_each_call_was_booked_once(tracker: LedgerTracker, outcome: Outcome) -> None:
    sums = (outcome.spent_micro_usd, outcome.reserved_micro_usd, outcome.overrun_micro_usd)
    assert await usd(tracker) == sums
    rows = await tracker.journal(limit=10_000)
    reserves = [row.reservation_id for row in rows if row.call is Call.RESERVE]
    assert len(reserves) == len(set(reserves)) == outcome.lifecycles
    commits = [row.reservation_id for row in rows if row.call is Call.COMMIT]
    assert len(commits) == len(set(commits))
    await assert_ledger_is_right(tracker)


async def test_a_connection_that_is_cut_is_made_again_without_a_restart(proxied: Proxied) -> None:
    proxy = proxied.proxy(seed=1)
    async with running_proxy(proxy), proxied.through(proxy) as tracker:
        outcome = Outcome()
        for number in range(20):
            await proxy.close_connections()
            reserve = partial(tracker.reserve, "", "0.01", reservation_id=f"r{number}")
            await outcome.insist(reserve)
        assert await outcome.insist(lambda: usd(tracker)) == (0, 200_000, 0)


async def test_the_proxy_passes_everything_on_and_loses_only_marked_replies(tmp_path: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line.upper())
        writer.close()

    path = tmp_path / "echo.sock"
    server = await asyncio.start_unix_server(echo, str(path))
    proxy = FaultProxy(path, markers=(b"lose",), seed=1)
    proxy.harm(drop_reply=1.0)
    async with server, running_proxy(proxy):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"keep\n")
        assert await reader.readline() == b"KEEP\n"
        writer.write(b"lose\n")
        assert await reader.read() == b""
        assert proxy.dropped_replies == 1
        writer.close()
        await writer.wait_closed()
