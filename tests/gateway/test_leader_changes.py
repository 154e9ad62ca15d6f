"""Another node decides: what becomes of calls that wait and run, on two nodes over PostgreSQL.

Both nodes are in this process, each with connections of its own. The first one decides until it
resigns, as a drain does, or until it is cut off from the store for longer than its lease.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import httpx2
import msgspec
import psycopg
import pytest
from structlog.testing import capture_logs

from budgets.fault_proxy import FaultProxy, running_proxy
from budgets.servers import PostgresServer, running_pair
from gateway.billing_upstream import BillingUpstream
from gateway.gateway_service import (
    ANTHROPIC_KEY,
    CHAT,
    MESSAGES,
    RESPONSES,
    GatewayService,
    asking,
    error_of,
    gateway_service,
)
from gateway.test_gateway_isolation import TENANTS, token
from gateway.test_task_calls import claim, ended, submit
from headgate.engine import call_registry
from headgate.engine import node as node_module
from headgate.gateway import gateway as gateway_module
from headgate.gateway import relay
from headgate.gateway.gateway import Patience
from headgate.gateway.relay import FORWARDED_SECONDS, Place, forwarded_mark, key_of_request
from headgate.storage.call_rows import LOST

LEASE_SECONDS = 1.0
BUDGET = """
[scheduler]
node_lease_seconds = 60.0

[projects.team]

[budgets."project:team"]
limit_usd = "5"
"""
WITHOUT_ESCROW = "[gateway]\nescrow = false\n"
CHANGES = ("resigned", "cut off")
SHARED_CALLS = 300
LONG = "x" * 60_000
TEAM = f"/p/team{MESSAGES}"


class StoreLink(FaultProxy):
    """The way of one node to the store, which may pass nothing for a while."""

    def __init__(self, socket_path: Path) -> None:
        super().__init__(socket_path, markers=(), seed=1)
        self._passes = asyncio.Event()
        self._passes.set()

    def hold(self) -> None:
        """Pass nothing, and close nothing: what is sent arrives later."""
        self._passes.clear()

    def release(self) -> None:
        """Pass everything."""
        self._passes.set()

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: asyncio.Event
    ) -> None:
        await self._pump(reader, writer)

    async def _replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: asyncio.Event
    ) -> None:
        await self._pump(reader, writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65_536):
            await self._passes.wait()
            writer.write(chunk)
            await writer.drain()

    def through(self, url: str) -> str:
        """Return the address of the same schema by this way."""
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query)) | {"host": "127.0.0.1", "port": str(self.port)}
        query = urlencode(given, quote_via=quote)
        return f"postgresql://postgres@/postgres?{query}"


class TwoNodes:
    """Two nodes before one provider; the first decides."""

    def __init__(
        self, first: GatewayService, second: GatewayService, link: StoreLink, up: BillingUpstream
    ) -> None:
        self.first, self.second = first, second
        self.url = ""
        self.link = link
        self.upstream = up

    async def change(self, kind: str) -> None:
        """Have the second node decide."""
        if kind == "resigned":
            await self.first.service.engine.hand_over()
        else:
            self.link.hold()
        await self.second.until(lambda: self.second.service.engine.dispatcher.is_leading)
        await self.second.until(lambda: self.second.calls._state() is not None)

    async def come_back(self) -> None:
        """Let the first node ask the store again, and wait until it knows who decides."""
        self.link.release()
        await self.first.until(lambda: not self.first.service.engine.dispatcher.is_leading)

    async def begin(self, path: str, *, is_noted: bool) -> asyncio.Task[httpx2.Response]:
        """Have a call run at the first node until `later`, long enough to be noted in the store.

        A node that is cut off cannot say what it has begun within the last second.
        """
        running = self.first.start(path, "[[until later]] one")
        await self.first.until(lambda: len(self.upstream.requests) == 1)
        if is_noted:
            (call,) = self.first.calls._live.values()
            call.change(started_at=(call.record.started_at or 0.0) - 10.0)
            await self.first.calls.note_running()
        return running

    async def check_books(self) -> None:
        """Hold the books of both nodes against the bill, when everything has ended."""
        for one in (self.first, self.second):
            await one.until_idle()
        billed = sum(charge.tokens for charge in self.upstream.bill)
        status = await self.second.status("project:team")
        assert status["spentTokens"] + status["overrunTokens"] == billed
        assert float(status["reservedUsd"]) == 0
        state = self.second.calls._state()
        assert state is not None
        await self.second.until(lambda: not state.in_flight.calls)
        assert not state.in_flight.by_slot
        assert not any(state.in_flight.active.values())


@asynccontextmanager
async def two_nodes(
    folder: Path, server: PostgresServer, text: str = BUDGET, *, inflight: int = 1
) -> AsyncIterator[TwoNodes]:
    """Start two nodes; the first one decides."""
    url = server.new_schema()
    for name in ("first", "second"):
        (folder / name).mkdir()
    async with (
        BillingUpstream() as upstream,
        running_proxy(StoreLink(server.socket_path)) as link,
    ):
        assert isinstance(link, StoreLink)
        async with (
            gateway_service(
                folder / "first",
                text,
                store=link.through(url),
                inflight=inflight,
                running=upstream,
            ) as first,
            gateway_service(
                folder / "second", text, store=url, inflight=inflight, running=upstream
            ) as second,
        ):
            assert first.service.engine.dispatcher.is_leading
            assert not second.service.engine.dispatcher.is_leading
            nodes = TwoNodes(first, second, link, upstream)
            nodes.url = url
            try:
                yield nodes
            finally:
                link.release()


@pytest.fixture(autouse=True)
def _short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "DISPATCHER_LEASE_SECONDS", LEASE_SECONDS)


@pytest.mark.parametrize("escrow", ["", WITHOUT_ESCROW], ids=["escrow", "one by one"])
@pytest.mark.parametrize("kind", CHANGES)
async def test_a_call_that_runs_at_a_node_that_led_has_its_permit_and_is_booked_once(
    tmp_path: Path, postgres: PostgresServer, kind: str, escrow: str
) -> None:
    async with two_nodes(tmp_path, postgres, BUDGET + escrow) as nodes:
        running = await nodes.begin(TEAM, is_noted=kind == "cut off")
        await nodes.change(kind)
        waiting = nodes.second.start(TEAM, "two")
        await nodes.second.until_waiting()
        (own,) = [one for one in nodes.second.calls.live() if one.state.value == "waiting"]
        why = nodes.second.calls.why(own.id)
        assert why is not None
        assert "max_inflight" in why.reasons[0].message
        listed = (await nodes.second.client.get("/calls?state=running")).json()["calls"]
        assert len(listed) == 1
        nodes.upstream.releases.add("later")
        assert (await running).status_code == 200
        await nodes.come_back()
        assert (await waiting).status_code == 200
        assert nodes.upstream.accounts[ANTHROPIC_KEY].most_running == 1
        await nodes.check_books()


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", [MESSAGES, CHAT, RESPONSES])
async def test_a_call_that_waits_keeps_its_place_when_another_node_decides(
    tmp_path: Path, postgres: PostgresServer, kind: str, path: str, *, is_stream: bool
) -> None:
    """Whether its client is at the node that decided, or at another one that passes it on."""
    path = f"/p/team{path}"
    async with two_nodes(tmp_path, postgres) as nodes:
        for one in (nodes.first, nodes.second):
            one.gateway.patience = Patience(open_seconds=0.05, keep_alive_seconds=0.2)
        running = await nodes.begin(path, is_noted=kind == "cut off")
        waiting = []
        for number, node in enumerate((nodes.first, nodes.second)):
            waiting.append(Waiter(node, path, f"[[mark {number}]]", is_stream=is_stream))
            await nodes.first.until_waiting(number + 1)
        ids = [one.id for one in nodes.first.calls.live() if one.state.value == "waiting"]
        for waiter in waiting if is_stream else ():
            await waiter.opened.wait()
        await nodes.change(kind)
        if kind == "cut off":
            await nodes.come_back()
        await nodes.second.until_waiting(2)
        moved = [one.id for one in nodes.second.calls.live() if one.state.value == "waiting"]
        assert sorted(moved) == sorted(ids)
        waiting.append(Waiter(nodes.second, path, "[[mark 2]]", is_stream=is_stream))
        await nodes.second.until_waiting(3)
        nodes.upstream.releases.add("later")
        assert (await running).status_code == 200
        for waiter in waiting:
            text = await waiter.text
            assert "42" in text
            assert text.count('"type":"message_start"') <= 1
            assert text.count('"type":"response.created"') <= 1
            assert "x-headgate-place" not in text
        assert [one.mark for one in nodes.upstream.bill[1:]] == ["0", "1", "2"]
        assert max(account.most_running for account in nodes.upstream.accounts.values()) == 1
        await nodes.check_books()


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("asked", ["first", "second"])
async def test_a_place_that_is_kept_for_a_retry_is_kept_by_the_next_node(
    tmp_path: Path, postgres: PostgresServer, kind: str, asked: str
) -> None:
    """The retry comes to the other node; one that is cut off need not come back for it."""
    text = BUDGET + "[gateway]\nhold_seconds = 1.0\n"
    async with two_nodes(tmp_path, postgres, text) as nodes:
        running = await nodes.begin(TEAM, is_noted=True)
        told = await getattr(nodes, asked).ask(TEAM, "[[mark kept]]")
        assert told.status_code == 429, told.text
        call_id = told.headers["x-headgate-call-id"]
        (before,) = nodes.first.calls.kept()
        await nodes.first.calls.settled(seconds=20.0)
        await nodes.change(kind)
        assert list(nodes.second.calls.kept()) == [before]
        later = Waiter(nodes.second, TEAM, "[[mark later]]", is_stream=True)
        await nodes.second.until_waiting()
        again = nodes.second.start(TEAM, "[[mark kept]]")
        await nodes.second.until_waiting(2)
        why = nodes.second.calls.why(call_id)
        assert why is not None
        assert why.position == 1
        nodes.upstream.releases.add("later")
        while (answer := await again).status_code == 429:
            again = nodes.second.start(TEAM, "[[mark kept]]")
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-headgate-call-id"] == call_id
        assert "42" in await later.text
        assert (await running).status_code == 200
        await nodes.come_back()
        assert not [*nodes.first.calls.kept(), *nodes.second.calls.kept()]
        await nodes.check_books()
        assert await nodes.second.calls._store.places_elsewhere("") == ()


class Waiter:
    """A client that waits for an answer, and says when its stream is open."""

    def __init__(self, node: GatewayService, path: str, prompt: str, *, is_stream: bool) -> None:
        self.opened = asyncio.Event()
        fields = {"store": False} if path.endswith(RESPONSES) else {}
        self._body = asking(path, prompt, is_stream=is_stream, **fields)
        self.text = asyncio.create_task(self._ask(node, path))

    async def _ask(self, node: GatewayService, path: str) -> str:
        text = ""
        async with node.client.stream("POST", path, json=self._body) as answer:
            assert answer.status_code == 200
            assert "x-headgate-place" not in answer.headers
            async for piece in answer.aiter_text():
                text += piece
                self.opened.set()
        return text


@pytest.mark.parametrize("kind", CHANGES)
async def test_the_next_node_knows_what_each_project_has_had_of_its_share(
    tmp_path: Path, postgres: PostgresServer, kind: str
) -> None:
    async with two_nodes(tmp_path, postgres, inflight=2) as nodes:
        running = await nodes.begin(TEAM, is_noted=kind == "cut off")
        for path in (TEAM, TEAM, MESSAGES):
            assert (await nodes.first.ask(path, "[[words 9]]")).status_code == 200
        await nodes.first.calls.settled(seconds=20.0)
        before = nodes.first.calls._state()
        assert before is not None
        used = dict(before.usage.tokens)
        assert used["team"] == 2 * used["default"] > 0
        await nodes.change(kind)
        state = nodes.second.calls._state()
        assert state is not None
        assert state.usage.tokens == used
        assert state.in_flight.reserved["team"] > 0, "what runs elsewhere counts as well"
        nodes.upstream.releases.add("later")
        assert (await running).status_code == 200
        await nodes.come_back()
        await nodes.second.until(lambda: not state.in_flight.calls)
        billed = sum(one.tokens for one in nodes.upstream.bill)
        assert state.usage.tokens == {**used, "team": billed - used["default"]}
        assert state.in_flight.reserved["team"] == 0


@pytest.mark.parametrize("kind", CHANGES)
async def test_projects_have_their_shares_over_a_change_of_the_deciding_node(
    tmp_path: Path, postgres: PostgresServer, kind: str
) -> None:
    weights = {"one": 1, "two": 2, "three": 3}
    text = "[scheduler]\nnode_lease_seconds = 60.0\n"
    for name, weight in weights.items():
        text += f"[projects.{name}]\ncredit_weight = {weight}\n"
    async with two_nodes(tmp_path, postgres, text, inflight=2) as nodes:
        bill = nodes.upstream.bill

        async def client(number: int, project: str) -> None:
            node = (nodes.first, nodes.second)[number % 2]
            while len(bill) < SHARED_CALLS:
                await node.ask(f"/p/{project}{MESSAGES}", f"[[mark {project}]] [[words 9]]")

        clients = [
            asyncio.create_task(client(number, project))
            for number in range(6)
            for project in weights
        ]
        await nodes.first.until(lambda: len(bill) > SHARED_CALLS // 3)
        await nodes.change(kind)
        await nodes.come_back()
        await asyncio.gather(*clients)
        tokens = Counter[str]()
        for charge in bill[:SHARED_CALLS]:
            tokens[charge.mark] += charge.tokens
        for name, weight in weights.items():
            assert abs(tokens[name] / tokens.total() - weight / 6) <= 0.02, tokens


@pytest.mark.parametrize("escrow", ["", WITHOUT_ESCROW], ids=["escrow", "one by one"])
async def test_a_call_of_a_node_that_is_gone_is_lost_and_assumed_until_that_comes_back(
    tmp_path: Path, postgres: PostgresServer, escrow: str
) -> None:
    text = BUDGET.replace("60.0", "2.0") + escrow
    async with two_nodes(tmp_path, postgres, text) as nodes:
        running = await nodes.begin(TEAM, is_noted=True)
        (own,) = nodes.first.calls.live()
        await nodes.change("cut off")
        second = nodes.second

        async def shown() -> dict[str, Any]:
            found: dict[str, Any] = (await second.client.get(f"/calls/{own.id}")).json()
            return found

        async def used() -> dict[str, Any]:
            found: dict[str, Any] = (await second.client.get("/usage")).json()["total"]
            return found

        async def until_shown(state: str) -> dict[str, Any]:
            async with asyncio.timeout(30.0):
                while True:
                    found = await shown()
                    if found.get("state") == state:
                        return found
                    await asyncio.sleep(0.05)

        lost = await until_shown("failed")
        assert lost["error"] == LOST
        usage = lost["usage"]
        assert usage["tokens"] == usage["assumedTokens"] == own.reserved_tokens > 0
        total = await used()
        assert (total["calls"], total["tokens"]) == (1, own.reserved_tokens)
        assert total["assumedTokens"] == own.reserved_tokens
        assert float(total["assumedUsd"]) == own.reserved_micro_usd / 1e6 > 0
        await nodes.come_back()
        nodes.upstream.releases.add("later")
        assert (await running).status_code == 200
        await until_shown("done")
        await nodes.check_books()
        total = await used()
        assert (total["calls"], total["tokens"]) == (1, nodes.upstream.bill[0].tokens)
        assert total["assumedTokens"] == 0


async def test_a_node_that_is_cut_off_from_the_store_grants_nothing_after_its_lease(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """It has money in memory that it could draw on, and permits that the other node has now."""
    async with two_nodes(tmp_path, postgres, inflight=2) as nodes:
        assert (await nodes.first.ask(TEAM, "warm")).status_code == 200
        await nodes.change("cut off")
        late = nodes.first.start(TEAM, "[[mark late]]")
        await nodes.first.until_waiting()
        assert (await nodes.second.ask(TEAM, "[[mark here]]")).status_code == 200
        assert [one.mark for one in nodes.upstream.bill[1:]] == ["here"]
        await nodes.come_back()
        assert (await late).status_code == 200
        await nodes.check_books()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("escrow", ["", WITHOUT_ESCROW], ids=["escrow", "one by one"])
async def test_a_call_whose_money_the_store_does_not_answer_for_ends_in_time_and_costs_nothing(
    tmp_path: Path,
    postgres: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    escrow: str,
    *,
    is_stream: bool,
) -> None:
    monkeypatch.setattr(call_registry, "ADMIT_SECONDS", 0.5)
    async with running_proxy(StoreLink(postgres.socket_path)) as link:
        assert isinstance(link, StoreLink)
        store = link.through(postgres.new_schema())
        async with gateway_service(tmp_path, BUDGET + escrow, store=store) as gateway:
            assert (await gateway.ask(CHAT)).status_code == 200
            link.hold()
            answer = await gateway.ask(f"/p/team{CHAT}", is_stream=is_stream)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert answer.headers.get("x-should-retry") != "false"
            assert error_of(answer)["code"] == "unavailable"
            assert len(gateway.upstream.requests) == 1
            link.release()
            record = await gateway.record(answer)
            assert (record.state.value, record.micro_usd) == ("failed", None)
            assert record.error == error_of(answer)["message"]
            status = await gateway.status("project:team")
            assert (status["spentTokens"], float(status["reservedUsd"])) == (0, 0.0)
            assert (await gateway.ask(f"/p/team{CHAT}")).status_code == 200


async def test_a_call_that_no_node_decides_about_waits_for_one(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    async with two_nodes(tmp_path, postgres) as nodes:
        first = nodes.first.service.engine
        nodes.second.service.engine.node.leader_address = ""
        waiting = nodes.second.start(TEAM, "[[mark one]]")
        assert (await waiting).status_code == 200
        assert first.dispatcher.is_leading
        await first.hand_over()
        answers = await asyncio.gather(
            *(node.ask(TEAM, "two") for node in (nodes.first, nodes.second))
        )
        assert [one.status_code for one in answers] == [200, 200]
        await nodes.check_books()


async def test_a_deciding_node_that_cannot_be_reached_holds_no_call_for_ever(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "CONNECT_SECONDS", 0.3)
    with silent_address() as address, capture_logs() as lines:
        async with two_nodes(tmp_path, postgres) as nodes:
            nodes.second.gateway.patience = Patience(leader_seconds=1.0)
            with psycopg.connect(nodes.url, autocommit=True) as connection:
                for table in ("nodes", "dispatcher"):
                    connection.execute(f"UPDATE {table} SET address = %s", (address,))
            node = nodes.second.service.engine.node
            await nodes.second.until(lambda: node.leader_address == address)
            async with asyncio.timeout(10.0):
                answers = await asyncio.gather(*(nodes.second.ask(TEAM) for _ in range(2)))
            for answer in answers:
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
                assert "can be reached" in error_of(answer)["message"]
            assert not nodes.upstream.requests
    told = [one for one in lines if one["event"] == "the deciding node cannot be reached"]
    assert [one["address"] for one in told] == [address]


@contextmanager
def silent_address() -> Iterator[str]:
    """Return an address at which a connection neither comes about nor is refused."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_node_that_stops_passes_nothing_more_on_and_waits_for_what_it_has(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    async with two_nodes(tmp_path, postgres, inflight=2) as nodes:
        running = nodes.second.start(TEAM, "[[until later]]")
        await nodes.first.until(lambda: len(nodes.upstream.requests) == 1)
        draining = asyncio.create_task(nodes.second.gateway.drain(20.0))
        await nodes.second.until(lambda: nodes.second.gateway._is_stopping)
        refused = await nodes.second.ask(TEAM)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert not draining.done()
        nodes.upstream.releases.add("later")
        assert (await running).status_code == 200
        await draining
        assert len(nodes.upstream.bill) == 1


@pytest.mark.parametrize("kind", CHANGES)
async def test_a_call_of_a_task_that_waits_goes_on_at_the_next_node(
    tmp_path: Path, postgres: PostgresServer, kind: str
) -> None:
    """Its token is good there. What its task held is booked: a call that was lost may be in it."""
    target = '[targets.pull]\nkind = "pull"\ngateway = true\n'
    async with two_nodes(tmp_path, postgres, BUDGET + target) as nodes:
        first = nodes.first
        task_id = await submit(first, "pull", projectId="team", estimate={"tokens": 500})
        worker, access = await claim(first, task_id)
        running = await nodes.begin(TEAM, is_noted=kind == "cut off")
        headers = {"authorization": f"Bearer {access['token']}"}
        waiting = first.start(MESSAGES, "[[mark task]]", headers=headers)
        await first.until_waiting()
        await nodes.change(kind)
        await nodes.come_back()
        await nodes.second.until_waiting()
        nodes.upstream.releases.add("later")
        assert (await running).status_code == 200
        answer = await waiting
        assert answer.status_code == 200, answer.text
        body = {"workerId": worker, "attempt": 1}
        done = await nodes.second.client.post(f"/tasks/{task_id}/complete", json=body)
        assert done.status_code == 200, done.text
        record = await ended(nodes.second, task_id)
        assert record.tokens == 500
        await first.until_idle()
        status = await nodes.second.status("project:team")
        (other,) = [one for one in nodes.upstream.bill if one.mark != "task"]
        assert status["spentTokens"] + status["overrunTokens"] == 500 + other.tokens
        assert float(status["reservedUsd"]) == 0


async def test_a_task_whose_call_was_lost_elsewhere_is_booked_at_what_it_held(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """A third node ends the task; it never decides, and knows that another one does by now."""
    text = BUDGET + '[targets.pull]\nkind = "pull"\ngateway = true\n'
    async with two_nodes(tmp_path, postgres, text) as nodes:
        (tmp_path / "third").mkdir()
        async with gateway_service(
            tmp_path / "third",
            text,
            store=nodes.url,
            running=nodes.upstream,
            options={"scheduler.enabled": False},
        ) as third:
            task_id = await submit(nodes.first, "pull", projectId="team", estimate={"tokens": 500})
            worker, access = await claim(third, task_id)
            headers = {"authorization": f"Bearer {access['token']}"}
            assert (await third.ask(MESSAGES, headers=headers)).status_code == 200
            lost = third.start(MESSAGES, "[[until never]]", headers=headers)
            await third.until(lambda: len(nodes.upstream.requests) == 2)
            await nodes.change("cut off")
            second = nodes.second.service.engine.node
            await third.until(lambda: third.service.engine.node.leader_id == second.node_id)
            lost.cancel()
            body = {"workerId": worker, "attempt": 1}
            done = await third.client.post(f"/tasks/{task_id}/complete", json=body)
            assert done.status_code == 200, done.text
            record = await ended(third, task_id)
            assert record.tokens == 500, "the call may have been billed"


@pytest.mark.timeout(180)
async def test_a_failover_of_the_database_ends_no_call_and_books_each_once(tmp_path: Path) -> None:
    """Whichever node decides after it: one call runs meanwhile, and one waits behind it."""
    with running_pair() as pair:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
        options: Any = {"store": pair.url, "inflight": 1}
        async with (
            BillingUpstream() as upstream,
            gateway_service(tmp_path / "first", BUDGET, running=upstream, **options) as first,
            gateway_service(tmp_path / "second", BUDGET, running=upstream, **options) as second,
        ):
            nodes = (first, second)
            running = first.start(TEAM, "[[until later]]")
            await first.until(lambda: len(upstream.requests) == 1)
            waiting = second.start(TEAM, "[[mark waits]]")
            await first.until_waiting()
            await asyncio.to_thread(pair.fail_over)
            await asyncio.to_thread(pair.rejoin)
            await first.until(lambda: any(one.calls._state() is not None for one in nodes))
            upstream.releases.add("later")
            assert (await running).status_code == 200
            answer = await waiting
            assert answer.status_code == 200, answer.text
            assert upstream.accounts[ANTHROPIC_KEY].most_running == 1
            for one in nodes:
                await one.until_idle()
            billed = sum(charge.tokens for charge in upstream.bill)
            # What could not be written while the database was away is written again.
            async with asyncio.timeout(30):
                while True:
                    status = await second.status("project:team")
                    booked = status["spentTokens"] + status["overrunTokens"]
                    if booked >= billed and float(status["reservedUsd"]) == 0:
                        break
                    await asyncio.sleep(0.05)
            assert booked == billed


async def test_a_client_cannot_have_its_calls_taken_for_one_that_was_booked(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """A node believes no client that a request was passed on, and tells no client a place."""
    async with two_nodes(tmp_path, postgres) as nodes:
        headers = {"x-headgate-forwarded": "1"}
        answer: httpx2.Response = await nodes.second.ask(TEAM, headers=headers)
        assert answer.status_code == 200
        assert "x-headgate-place" not in answer.headers
        headers["x-headgate-place"] = answer.headers.get("x-headgate-place", "")
        ids = {answer.headers["x-headgate-call-id"]}
        for _ in range(2):
            answer = await nodes.first.ask(TEAM, headers=headers)
            assert answer.status_code == 200
            ids.add(answer.headers["x-headgate-call-id"])
        assert len(ids) == len(nodes.upstream.bill) == 3
        await nodes.change("resigned")
        await nodes.check_books()


class Sent:
    """What one node sends another with a request that it passes on."""

    def __init__(self, node: GatewayService, secret: bytes) -> None:
        self.now = node.service.engine.now()
        self._secret = secret
        self.key = "sk-ant-one"
        self.body = msgspec.json.encode(asking(TEAM))

    def headers(self, call_id: str, *, created_ago: float = 0.0, marked_ago: float = 0.0) -> Any:
        """Return the headers of a request with a place."""
        request_key = key_of_request(f"POST {TEAM}", b"", self.key.encode(), self.body)
        place = Place(call_id, self.now - created_ago).signed(self._secret, request_key)
        mark = forwarded_mark(f"POST {TEAM}", self.now - marked_ago, self._secret)
        return {"x-headgate-place": place.decode(), "x-headgate-forwarded": mark.decode()}

    async def ask(self, node: GatewayService, headers: Any, **other: str) -> str:
        """Send a request; return the id of its call."""
        headers = headers | {"x-api-key": other.get("key", self.key)}
        path, body = other.get("path", TEAM), other.get("body", self.body)
        answer = await node.client.post(path, content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return str(answer.headers["x-headgate-call-id"])


async def test_a_place_is_good_for_its_request_only_and_for_a_while(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    async with two_nodes(tmp_path, postgres) as nodes:
        first = nodes.first
        sent = Sent(first, await first.calls.tasks.secret_for("places of calls"))
        wait = first.gateway.settings.max_wait_seconds
        good = sent.headers("call-1")
        assert await sent.ask(first, good, path=MESSAGES) != "call-1"
        assert await sent.ask(first, good, path=f"{TEAM}?beta=true") != "call-1"
        assert await sent.ask(first, good, key="sk-ant-two") != "call-1"
        assert await sent.ask(first, good, body=sent.body.decode() + " ") != "call-1"
        assert await sent.ask(first, good | {"x-headgate-forwarded": "1"}) != "call-1"
        late = sent.headers("call-1", marked_ago=FORWARDED_SECONDS + 60)
        assert await sent.ask(first, late) != "call-1"
        old = sent.headers("call-1", created_ago=wait + FORWARDED_SECONDS + 60)
        assert await sent.ask(first, old) != "call-1"
        assert await sent.ask(first, good) == "call-1"


@pytest.mark.parametrize("created_ago", [0.0, 60.0])
async def test_a_place_whose_call_has_ended_gives_another_one_its_position_and_not_its_id(
    tmp_path: Path, postgres: PostgresServer, created_ago: float
) -> None:
    """Whether the node that decides has it in memory, or the store alone knows of it."""
    async with two_nodes(tmp_path, postgres) as nodes:
        first = nodes.first
        sent = Sent(first, await first.calls.tasks.secret_for("places of calls"))
        headers = sent.headers("call-1", created_ago=created_ago)
        assert await sent.ask(first, headers) == "call-1"
        await first.until_idle()
        await first.calls.settled(seconds=20.0)
        if created_ago:
            first.calls._latest.clear()
        other = await sent.ask(first, headers)
        assert other != "call-1"
        await first.until_idle()
        record = first.calls.get(other)
        assert record is not None
        assert record.created_at == sent.now - created_ago
        assert len(nodes.upstream.bill) == 2
        billed = sum(charge.tokens for charge in nodes.upstream.bill)
        await first.calls.settled(seconds=20.0)
        status = await first.status("project:team")
        assert status["spentTokens"] + status["overrunTokens"] == billed


async def test_a_client_cannot_make_up_a_place(tmp_path: Path, postgres: PostgresServer) -> None:
    async with two_nodes(tmp_path, postgres) as nodes:
        forged = {"x-headgate-place": "call-0;1.0;-1;00", "x-headgate-forwarded": "1"}
        answer: httpx2.Response = await nodes.first.ask(TEAM, headers=forged)
        assert answer.status_code == 200
        assert answer.headers["x-headgate-call-id"] != "call-0"


async def test_what_a_node_passes_on_counts_there_for_whoever_sent_it(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """Behind a proxy all tenants have one address."""
    async with two_nodes(tmp_path, postgres, TENANTS) as nodes:
        one, other = await token(nodes.first, "a"), await token(nodes.first, "b")
        nodes.second.service.api.shares.bytes.most = 1 << 20
        running = nodes.first.start(MESSAGES, "[[until later]]", headers=one)
        await nodes.first.until(lambda: len(nodes.upstream.requests) == 1)
        hostile = [
            nodes.second.start(MESSAGES, f"{number} " + LONG, headers=one) for number in range(20)
        ]
        await nodes.first.until(
            lambda: sum(call.done() for call in hostile) + nodes.first.waiting == len(hostile)
        )
        before = nodes.first.waiting
        assert 0 < before < len(hostile)
        honest = nodes.second.start(MESSAGES, LONG, headers=other)
        await nodes.first.until(lambda: honest.done() or nodes.first.waiting > before)
        assert not honest.done(), honest.result().text
        nodes.upstream.releases.add("later")
        assert {(await call).status_code for call in (running, honest)} == {200}
        assert {(await call).status_code for call in hostile} == {200, 429}


async def test_a_node_passes_on_what_comes_while_it_cannot_look_up_who_sends_it(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "ENDED_SECONDS", 0.1)
    async with two_nodes(tmp_path, postgres, TENANTS) as nodes:
        known, unknown = await token(nodes.second, "a"), await token(nodes.second, "b")
        await nodes.change("resigned")
        assert (await nodes.first.ask(MESSAGES, headers=known)).status_code == 200
        nodes.link.hold()
        answer = await nodes.first.ask(MESSAGES, headers=unknown)
        assert answer.status_code == 200, answer.text
