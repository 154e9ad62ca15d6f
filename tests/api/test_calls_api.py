"""The routes of calls: waiting, running and ended ones in one list, and whose they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from api.asgi_client import Response, answer_of
from executors.endpoint import reply_json, running_endpoint
from headgate.api.app import App
from headgate.app import Service, build_app, build_service
from headgate.config import load_settings
from headgate.core.budgets.escrow import Amounts
from headgate.core.budgets.ledger import Refused, Unit
from headgate.core.budgets.scopes import Scope
from headgate.core.call import CallRecord, CallState
from headgate.core.estimates import NOTHING, Basis, Estimate, Hold, given
from headgate.core.gates import GateClosure
from headgate.engine.call_registry import CallDraft, CallEnd, Calls, LiveCall, Route
from headgate.storage.call_rows import CallStore, EndedCall

UNKNOWN = "call-01m7fs2skb2415wvpawg4jr96h"
CLOSED = GateClosure(kind="target", name="upstream:openai", why="it is down")


class Gateway:
    """A service whose calls a test makes."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.app: App = build_app(service)
        self._entered: list[LiveCall] = []

    @property
    def calls(self) -> Calls:
        assert self.service.engine.calls is not None
        return self.service.engine.calls

    @property
    def store(self) -> CallStore:
        assert self.service.engine.call_store is not None
        return self.service.engine.call_store

    def record(self, **fields: Any) -> CallRecord:
        now = self.service.engine.now()
        ours: dict[str, Any] = {
            "id": self.calls.new_call_id(),
            "project_id": "default",
            "agent_id": "codex",
            "model": "gpt-5",
            "upstream": "openai",
            "protocol": "responses",
            "created_at": now,
        }
        return CallRecord(**{**ours, **fields})

    async def ended(self, **fields: Any) -> CallRecord:
        now = self.service.engine.now()
        ours: dict[str, Any] = {
            "state": CallState.DONE,
            "started_at": now + 0.25,
            "ended_at": now + 1.0,
            "slot": "work",
            "status": 200,
            "tries": 1,
            "tokens": 70,
            "micro_usd": 1_234_567,
        }
        record = self.record(**{**ours, **fields})
        await self.store.finish([EndedCall(record=record, share=Amounts(tokens=70))])
        return record

    def entered(self, tokens: Estimate = NOTHING, **fields: Any) -> LiveCall:
        """Let a call wait, or have its turn at once."""
        record = self.record(**fields)
        hold = Hold(micro_usd=given(0), tokens=tokens)
        live = self.calls.enter(
            CallDraft(
                record=record,
                route=Route(upstream=record.upstream, model=record.model),
                hold=lambda: hold,
                estimate_tokens=10,
            )
        )
        self._entered.append(live)
        return live

    def leave(self) -> None:
        """Have the clients of all calls go."""
        for live in self._entered:
            if not live.is_over:
                self.calls.go_away(live, "", seconds=0.0)

    async def get(self, path: str, token: str = "") -> Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return await answer_of(self.app, "GET", path, headers=headers)

    async def page(self, query: str = "", token: str = "") -> list[str]:
        answer = await self.get(f"/calls?{query}", token)
        assert answer.status == 200, answer.body
        return [call["callId"] for call in answer.json["calls"]]

    async def token(self, **bounds: str) -> str:
        body = {"name": f"bound to {bounds}", "permissions": ["read"], **bounds}
        answer = await answer_of(self.app, "POST", "/tokens", json.dumps(body).encode())
        assert answer.status == 201, answer.body
        return str(answer.json["token"])


@asynccontextmanager
async def running() -> AsyncIterator[Gateway]:
    """Run a service in memory until it dispatches."""
    settings = load_settings(
        None, {}, {"store.url": "memory:", "dashboard.mode": "off", "webhooks.enabled": False}
    )
    async with asyncio.timeout(30):
        service = build_service(settings, data=Path(), environ={})
        await service.engine.start()
        try:
            while service.engine.dispatcher.dispatch_state is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
            gateway = Gateway(service)
            yield gateway
            gateway.leave()
        finally:
            await service.engine.stop(drain_seconds=1.0)


async def test_a_call_is_shown_with_its_times_its_key_and_its_cost() -> None:
    async with running() as gateway:
        record = await gateway.ended(
            model="fast",
            upstream_model="gpt-5",
            is_stream=True,
            scopes=("session:s",),
            client="codex",
            session="5a1f",
            key_rule="It has the most headroom.",
            input_tokens=50,
            cached_tokens=10,
            output_tokens=20,
            reserved_tokens=90,
            reserved_micro_usd=2_000_000,
            reserved_basis="learned",
            assumed_tokens=5,
            assumed_micro_usd=4_567,
        )
        answer = await gateway.get(f"/calls/{record.id}")
        assert answer.status == 200
        body = answer.json
        times = [body.pop(name) for name in ("createdAt", "startedAt", "endedAt")]
        assert all(time.endswith("Z") for time in times)
        assert body == {
            "callId": record.id,
            "state": "done",
            "projectId": "default",
            "agentId": "codex",
            "model": "fast",
            "upstream": "openai",
            "upstreamModel": "gpt-5",
            "protocol": "responses",
            "isStream": True,
            "scopes": ["session:s"],
            "client": "codex",
            "session": "5a1f",
            "waitedMs": 250,
            "slot": "work",
            "keyRule": "It has the most headroom.",
            "status": 200,
            "tries": 1,
            "reported": {"inputTokens": 50, "cachedTokens": 10, "outputTokens": 20},
            "reserved": {"tokens": 90, "usd": "2.00", "basis": "learned"},
            "usage": {
                "tokens": 70,
                "usd": "1.234567",
                "assumedTokens": 5,
                "assumedUsd": "0.004567",
            },
        }


async def test_a_list_has_waiting_running_and_ended_calls_newest_first() -> None:
    async with running() as gateway:
        first = await gateway.ended()
        live = gateway.entered(agent_id="a")
        assert live.turn.done()
        await gateway.calls.admit(live)
        gateway.calls.close(CLOSED)
        waiting = gateway.entered()
        last = await gateway.ended(state=CallState.FAILED, slot="spare")
        everything = [last.id, waiting.id, live.id, first.id]
        for query, expected in (
            ("", everything),
            ("limit=1000", everything),
            ("state=waiting", [waiting.id]),
            ("state=running,waiting", [waiting.id, live.id]),
            ("state=running&state=done", [first.id]),
            ("state=failed,running", [last.id, live.id]),
            ("agentId=a", [live.id]),
            ("slot=spare", [last.id]),
            ("upstream=openai&model=gpt-5", everything),
            ("model=other", []),
            (f"cursor={waiting.id}", [live.id, first.id]),
            ("until=2001-01-01T00:00:00Z", []),
            ("since=2001-01-01T00:00:00Z&projectId=default", everything),
            ("taskId=tsk_1", []),
        ):
            assert await gateway.page(query) == expected, query


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
async def test_pages_of_live_and_ended_calls_have_each_call_once(limit: int) -> None:
    async with running() as gateway:
        gateway.calls.close(CLOSED)
        expected = []
        for number in range(9):
            is_live = number % 3 == 1
            record = gateway.entered().record if is_live else await gateway.ended()
            expected.append(record.id)
        found: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            answer = await gateway.get(f"/calls?limit={limit}&cursor={cursor}")
            assert answer.json["count"] == len(answer.json["calls"]) <= limit
            found += [call["callId"] for call in answer.json["calls"]]
            cursor = answer.json.get("nextCursor")
        assert found == expected[::-1]


async def test_a_call_that_ends_is_there_at_every_moment() -> None:
    async with running() as gateway:
        live = gateway.entered()
        await gateway.calls.admit(live)
        gateway.calls.end(live, CallEnd(state=CallState.DONE, status=200, tokens=1, micro_usd=1))
        for _ in range(2):
            assert (await gateway.get(f"/calls/{live.id}")).json["state"] == "done"
            assert await gateway.page("state=done") == [live.id]
            await gateway.calls.settled(seconds=10.0)
        assert (await gateway.store.get(live.id)) is not None


async def test_why_names_what_keeps_a_call_waiting() -> None:
    async with running() as gateway:
        gateway.calls.close(CLOSED)
        first, second = gateway.entered(), gateway.entered()
        for position, call in ((1, first), (2, second)):
            body = (await gateway.get(f"/calls/{call.id}/why")).json
            assert (body["callId"], body["state"]) == (call.id, "waiting")
            assert body["position"] == position
            (reason,) = body["reasons"]
            assert reason["detail"]["name"] == "upstream:openai"
        ended = await gateway.ended(key_rule="It is the only one.")
        assert (await gateway.get(f"/calls/{ended.id}/why")).json == {
            "callId": ended.id,
            "state": "done",
            "slot": "work",
            "keyRule": "It is the only one.",
        }


@pytest.mark.parametrize("name", [UNKNOWN, "call-", "tsk_1", "call-x%2F..", "x" * 500])
@pytest.mark.parametrize("end", ["", "/why"])
async def test_what_is_no_call_is_not_found(name: str, end: str) -> None:
    async with running() as gateway:
        answer = await gateway.get(f"/calls/{name}{end}")
        assert (answer.status, answer.problem["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    "query",
    [
        "state=queued",
        "limit=0",
        "cursor=tsk_1",
        "since=yesterday",
        "model=" + "x" * 300,
        "model=a%0Ab",
        "projectId=" + "x" * 500,
    ],
)
async def test_a_query_that_means_nothing_is_refused_with_its_field(query: str) -> None:
    async with running() as gateway:
        answer = await gateway.get(f"/calls?{query}")
        assert answer.status == 400
        assert answer.problem["details"] == {"field": query.partition("=")[0]}


async def test_what_belongs_to_others_is_not_there() -> None:
    async with running() as gateway:
        gateway.calls.close(CLOSED)
        mine = await gateway.ended(agent_id="mine", token_id="tok_other")
        theirs = await gateway.ended(agent_id="theirs")
        waiting, foreign = gateway.entered(agent_id="mine"), gateway.entered(agent_id="theirs")
        token = await gateway.token(agentId="mine")
        assert await gateway.page("", token) == [waiting.id, mine.id]
        shown = await gateway.get(f"/calls/{mine.id}", token)
        assert shown.status == 200
        assert "tokenId" not in shown.json
        assert (await gateway.get(f"/calls/{waiting.id}/why", token)).status == 200
        for other in (theirs.id, foreign.id):
            for end in ("", "/why"):
                assert (await gateway.get(f"/calls/{other}{end}", token)).status == 404
        assert (await gateway.get("/calls?agentId=theirs", token)).status == 403
        elsewhere = await gateway.token(agentId="nobody")
        assert await gateway.page("", elsewhere) == []


async def test_figures_of_budgets_that_are_not_its_own_are_hidden_from_a_bound_token() -> None:
    error = (
        "Budget exceeded: 1000 tokens requested, 500 tokens remaining"
        " (scope project:default, limit 9000 tokens); more room at 09:00"
    )
    async with running() as gateway:
        record = await gateway.ended(state=CallState.REFUSED, error=error, agent_id="mine")
        assert (await gateway.get(f"/calls/{record.id}")).json["error"] == error
        token = await gateway.token(agentId="mine")
        shown = await gateway.get(f"/calls/{record.id}", token)
        assert "500" not in shown.json["error"]


async def test_without_the_permission_to_read_there_is_nothing_to_see() -> None:
    async with running() as gateway:
        body = {"name": "submits", "permissions": ["submit"]}
        answer = await answer_of(gateway.app, "POST", "/tokens", json.dumps(body).encode())
        for path in ("/calls", f"/calls/{UNKNOWN}", f"/calls/{UNKNOWN}/why"):
            assert (await gateway.get(path, answer.json["token"])).status == 403


async def test_a_node_that_does_not_dispatch_asks_the_one_that_does() -> None:
    async with running() as gateway, running_endpoint(reply_json({"calls": []})) as endpoint:
        ended = await gateway.ended()
        node = gateway.service.engine.node
        gateway.service.engine.dispatcher.step_down()
        node.leader_address = endpoint.url
        paths = [
            "/calls?limit=3&state=waiting",
            f"/calls/{UNKNOWN}",
            f"/calls/{UNKNOWN}/why",
        ]
        for path in paths:
            assert (await gateway.get(path)).json == {"calls": []}
        assert [seen.path for seen in endpoint.seen] == paths
        # What has ended any node can show.
        assert await gateway.page("state=done") == [ended.id]
        assert (await gateway.get(f"/calls/{ended.id}")).json["callId"] == ended.id
        assert (await gateway.get(f"/calls/{ended.id}/why")).json["state"] == "done"
        assert len(endpoint.seen) == len(paths)
        node.leader_address = ""
        answer = await gateway.get("/calls")
        assert (answer.status, answer.problem["code"]) == (503, "not_dispatching")


async def test_usage_counts_calls_by_their_key() -> None:
    async with running() as gateway:
        await gateway.ended()
        await gateway.ended(slot="spare", micro_usd=5)
        rows = (await gateway.get("/usage?by=slot")).json["rows"]
        assert [(row["key"], row["calls"], row["attempts"]) for row in rows] == [
            ("work", 1, 0),
            ("spare", 1, 0),
        ]


@pytest.mark.parametrize(
    ("tokens", "is_hopeless"),
    [
        (given(400), False),
        (given(401), True),
        # Without its margin a learned amount fits when others have given back what they hold.
        (Estimate(basis=Basis.LEARNED, amount=500, most=400, samples=20), False),
        (Estimate(basis=Basis.LEARNED, amount=500, most=401, samples=20), True),
    ],
)
async def test_a_call_is_hopeless_if_its_budget_is_spent_until_later(
    tokens: Estimate, *, is_hopeless: bool
) -> None:
    async with running() as gateway:
        state, now = gateway.service.engine.dispatcher.dispatch_state, gateway.service.engine.now()
        live = gateway.entered(tokens, scopes=("session:s",))
        assert state is not None
        assert live.planned is not None
        refused = Refused(
            scope=Scope("session:s"),
            unit=Unit.TOKENS,
            limit=1_000,
            spent=600,
            reserved=200,
            overrun=0,
            requested=tokens.amount,
            resets_at=int(now) + 86_400,
            may_clear=True,
        )
        assert state.refuse(live.planned, live.waiting_record(), refused, now) is None
        assert (gateway.calls.hopeless(live, now + 60.0) is not None) is is_hopeless
        gateway.leave()
