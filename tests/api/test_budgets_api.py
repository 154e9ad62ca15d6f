"""Budgets over HTTP: the same answers for the same id, exact amounts, and budgets of one's own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from api.asgi_client import Client, Response, answer_of
from api.fake_tokens import FakeTokens
from headgate.api import budgets, shares
from headgate.api.auth import Authenticator
from headgate.api.submission import MAX_SCOPES
from headgate.budgets.local import LocalLedger
from headgate.budgets.tracker import LedgerTracker
from headgate.core.lifecycle import Usage
from headgate.errors import LedgerUnavailableError
from headgate.storage.audit import AuditLog
from headgate.storage.memory import MemoryTaskStore
from headgate.storage.sql_store import SqlTaskStore, StoreLedger
from headgate.storage.tokens import UNBOUND, Bounds, Permission, new_token
from headgate.storage.usage import UsageReports
from headgate.testing import VirtualClock
from storage.scene import HERE, Place, Scene, fresh_place

KINDS = ("store", "outside")
IN_SEARCH = "project:search/session:s"


class Bank:
    """An application with budgets behind it."""

    def __init__(self, tracker: LedgerTracker, clock: VirtualClock, store: SqlTaskStore) -> None:
        self.client = Client()
        self.tracker = tracker
        self.clock = clock
        self.tokens = FakeTokens()
        self.client.app.api.tracker = tracker
        self.client.app.api.auth = Authenticator(self.tokens)
        self.client.app.api.audit = AuditLog(store)

    def token(self, *permissions: Permission, bounds: Bounds = UNBOUND) -> str:
        new = new_token(name="t", permissions=permissions, now=self.tokens.time, bounds=bounds)
        self.tokens.kept[new.kept.token.id] = new.kept
        return new.text

    async def ask(self, verb: str, token: str = "", **body: object) -> Response:
        sent = json.dumps(body).encode()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        path = f"/budgets/{verb}"
        return await answer_of(self.client.app, "POST", path, sent, headers=headers)

    async def status(self, scope: str = "", token: str = "") -> Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        query = f"?scope={scope}" if scope else ""
        path = f"/budgets/status{query}"
        return await answer_of(self.client.app, "GET", path, headers=headers)


@asynccontextmanager
async def bank(kind: str) -> AsyncIterator[Bank]:
    clock = VirtualClock()
    store = MemoryTaskStore(clock=clock)
    await store.open()
    ledger = LocalLedger(clock=clock) if kind == "outside" else StoreLedger(store)
    try:
        yield Bank(LedgerTracker(ledger), clock, store)
    finally:
        await store.close()


Check = Callable[[Bank], Awaitable[None]]


@pytest.mark.parametrize("kind", KINDS)
async def test_money_is_held_dispatched_and_booked(kind: str) -> None:
    async with bank(kind) as it:
        await it.tracker.set_budget("project:search", limit_usd="1.00")
        held = await it.ask("reserve", id="r1", scope=IN_SEARCH, usd="0.25", tokens=10)
        assert held.status == 200
        assert held.json | {"leaseUntil": ""} == {
            "id": "r1",
            "scope": IN_SEARCH,
            "state": "held",
            "isLive": True,
            "usd": "0.25",
            "tokens": 10,
            "leaseUntil": "",
        }
        sent = await it.ask("dispatched", id="r1", scope=IN_SEARCH)
        assert sent.json["state"] == "dispatched"
        booked = await it.ask("commit", id="r1", scope=IN_SEARCH, usd=0.1, tokens=7)
        assert booked.json == {"id": "r1", "scope": IN_SEARCH, "state": "committed"}
        status = (await it.status("project:search")).json
        assert (status["spentUsd"], status["reservedUsd"], status["remainingUsd"]) == (
            "0.10",
            "0.00",
            "0.90",
        )
        assert status["children"][0] == {
            "scope": IN_SEARCH,
            "window": "none",
            "spentUsd": "0.10",
            "reservedUsd": "0.00",
            "overrunUsd": "0.00",
            "spentTokens": 7,
            "reservedTokens": 0,
            "overrunTokens": 0,
            "burnUsdPerHour": "0.60",
            "burnTokensPerHour": 42,
            "burnMeasuredSeconds": 600,
        }


@pytest.mark.parametrize("kind", KINDS)
async def test_a_budget_is_founded_once_and_another_limit_is_told_of_the_first(kind: str) -> None:
    async with bank(kind) as it:
        wanted = {"scope": "session:s", "limitUsd": "1.00", "window": "day"}
        founded = {"scope": "session:s", "limitUsd": "1.00", "window": "day"}
        for _ in range(2):
            answer = await it.ask("create", **wanted)
            assert (answer.status, answer.json) == (200, founded)
        refused = await it.ask("create", scope="session:s", limitUsd=2, limitTokens=5)
        assert (refused.status, refused.json["code"]) == (409, "budget_mismatch")
        assert refused.json["details"] == {
            "scope": "session:s",
            "existing": "$1.00 (day)",
            "wanted": "$2.00 and 5 tokens",
        }
        assert "the limit is $1.00 (day), and the request says $2.00" in refused.json["error"]
        assert (await it.status("session:s")).json["limitUsd"] == "1.00"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"scope": "session:s"}, "limitUsd"),
        ({"scope": "session:s", "limitUsd": "-1"}, "limitUsd"),
        ({"scope": "session:s", "limitTokens": -1}, "limitTokens"),
        ({"scope": "session:s", "limitUsd": 1, "window": "hourly"}, "window"),
        ({"scope": "no scope", "limitUsd": 1}, "scope"),
    ],
)
async def test_a_budget_that_cannot_be_founded_is_refused_by_its_field(
    fields: dict[str, object], field: str
) -> None:
    async with bank("store") as it:
        refused = await it.ask("create", "", **fields)
        assert (refused.status, refused.json["code"]) == (400, "invalid_field")
        assert refused.json["details"]["field"] == field


async def test_what_others_submit_is_not_limited_by_whoever_may_submit() -> None:
    async with bank("store") as it:
        submitter, admin = it.token("submit"), it.token("submit", "admin")
        reader = it.token("read")
        bound = it.token("submit", bounds=Bounds(project_id="search"))
        for token, scope, status in (
            (submitter, "session:s", 200),
            (submitter, "project:search/session:s", 200),
            (submitter, "", 403),
            (submitter, "project:search", 403),
            (bound, "project:search", 403),
            (bound, "project:search/run:r", 200),
            (bound, "session:other", 403),
            (reader, "session:third", 403),
            (admin, "project:search", 200),
            (admin, "", 200),
        ):
            answer = await it.ask("create", token, scope=scope, limitUsd=9)
            assert answer.status == status, (scope, answer.json)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_same_id_gets_the_same_answer(kind: str) -> None:
    async with bank(kind) as it:
        for verb, fields in (
            ("reserve", {"usd": "0.3"}),
            ("dispatched", {}),
            ("commit", {"usd": "0.2"}),
        ):
            first = await it.ask(verb, id="r", scope="session:s", **fields)
            again = await it.ask(verb, id="r", scope="session:s", **fields)
            assert (first.status, first.json) == (200, again.json)
        assert (await it.status("session:s")).json["spentUsd"] == "0.20"
        other = await it.ask("commit", id="r", scope="session:s", usd="0.21")
        assert (other.status, other.problem["code"]) == (409, "reservation_conflict")
        changed = await it.ask("reserve", id="r", scope="session:s", usd="0.31")
        assert changed.problem["code"] == "reservation_conflict"
        assert "reservation 'r' is committed" in changed.problem["error"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_full_budget_is_402_with_its_figures(kind: str) -> None:
    async with bank(kind) as it:
        await it.tracker.set_budget("project:search", limit_usd="1", window="day")
        await it.ask("reserve", id="r1", scope=IN_SEARCH, usd="0.75")
        answer = await it.ask("reserve", id="r2", scope=IN_SEARCH, usd="0.250001")
        assert (answer.status, answer.problem["code"]) == (402, "budget_exceeded")
        assert answer.problem["retryable"] is False
        details = answer.problem["details"]
        assert details.pop("resetsAt").endswith("T00:00:00Z")
        assert details == {
            "scope": "project:search",
            "unit": "usd",
            "limit": "1.00",
            "used": "0.75",
            "spent": "0.00",
            "reserved": "0.75",
            "overrun": "0.00",
            "requested": "0.250001",
            "mayClear": True,
        }
        assert (await it.ask("release", id="r1", scope=IN_SEARCH)).json["state"] == "released"
        assert (await it.ask("reserve", id="r2", scope=IN_SEARCH, usd="0.250001")).status == 200


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bound_token_is_told_no_figures_of_budgets_that_are_not_its_own(kind: str) -> None:
    async with bank(kind) as it:
        await it.tracker.set_budget("", limit_usd="7.77", window="day")
        await it.tracker.set_budget("project:search", limit_usd="5.55")
        operator = it.token("admin", "submit")
        await it.ask("reserve", operator, id="r", scope="project:other", usd="7.01")
        for bounds, scope, kept in (
            (Bounds(project_id="search"), IN_SEARCH, ("", "usd")),
            (Bounds(agent_id="evil"), "project:search/agent:evil", ("project:search", "usd")),
        ):
            usd = "1" if not kept[0] else "6"
            if kept[0]:
                await it.ask("release", operator, id="r", scope="project:other")
            mine = it.token("submit", bounds=bounds)
            answer = await it.ask("reserve", mine, id="r2", scope=scope, usd=usd)
            details = answer.problem["details"]
            assert (answer.status, details["scope"], details["unit"]) == (402, *kept)
            assert set(details) == {"scope", "unit", "resetsAt", "mayClear"}
            for figure in ("7.77", "7.01", "5.55", "0.76"):
                assert figure not in answer.body.decode()
        # Of its own budget it is told all.
        mine = it.token("submit", bounds=Bounds(project_id="search"))
        answer = await it.ask("reserve", mine, id="r2", scope=IN_SEARCH, usd="6")
        assert answer.problem["details"]["limit"] == "5.55"
        # But it cannot change the limit, and an operator can.
        assert "ask an operator" in answer.problem["error"]
        answer = await it.ask("reserve", operator, id="r3", scope=IN_SEARCH, usd="6")
        assert "raise the limit" in answer.problem["error"]


async def test_tokens_are_refused_in_tokens() -> None:
    async with bank("store") as it:
        await it.tracker.set_budget("session:s", limit_tokens=10)
        answer = await it.ask("reserve", id="r", scope="session:s", tokens=11)
        details = answer.problem["details"]
        assert (details["unit"], details["limit"], details["requested"]) == ("tokens", 10, 11)
        assert (details["resetsAt"], details["mayClear"]) == (None, False)
        assert (details["scope"], details["used"]) == ("session:s", 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lease_that_ends_gives_back_what_was_held_and_books_what_was_sent(
    kind: str,
) -> None:
    async with bank(kind) as it:
        for name, dispatched in (("held", False), ("sent", True)):
            await it.ask(
                "reserve", id=name, scope="session:s", usd=1, leaseSeconds=5, dispatched=dispatched
            )
        it.clock.advance(6.0)
        status = (await it.status("session:s")).json
        assert (status["reservedUsd"], status["spentUsd"]) == ("0.00", "1.00")
        late = await it.ask("dispatched", id="held", scope="session:s")
        expired = {"id": "held", "scope": "session:s", "state": "expired"}
        assert (late.status, late.problem["details"]) == (409, expired)
        assert (await it.ask("commit", id="sent", scope="session:s", usd="0.5")).status == 200
        assert (await it.status("session:s")).json["spentUsd"] == "0.50"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_extended_lease_ends_later_and_never_sooner(kind: str) -> None:
    async with bank(kind) as it:
        name = {"id": "r", "scope": "session:s"}
        held = await it.ask("reserve", **name, usd=1, leaseSeconds=5)
        it.clock.advance(4.0)
        longer = await it.ask("extend", **name, leaseSeconds=5)
        assert (longer.status, longer.json["state"], longer.json["usd"]) == (200, "held", "1.00")
        assert longer.json["leaseUntil"] > held.json["leaseUntil"]
        shorter = await it.ask("extend", **name, leaseSeconds=1)
        assert shorter.json == longer.json
        it.clock.advance(4.0)
        assert (await it.status("session:s")).json["reservedUsd"] == "1.00"
        it.clock.advance(2.0)
        late = await it.ask("extend", **name)
        assert (late.status, late.problem["code"]) == (409, "reservation_conflict")
        assert late.problem["details"] == {**name, "state": "expired"}
        assert "'r'" in late.problem["error"]
        unknown = await it.ask("extend", id="other", scope="session:s")
        assert (unknown.status, unknown.problem["code"]) == (404, "not_found")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_id_is_one_within_its_scope(kind: str) -> None:
    async with bank(kind) as it:
        await it.ask("reserve", id="r", scope="session:a", usd=1)
        assert (await it.ask("release", id="r", scope="session:b")).status == 404
        assert (await it.ask("reserve", id="r", scope="session:b", usd=2)).json["usd"] == "2.00"
        assert (await it.ask("release", id="r", scope="Session:a")).status == 200


async def test_what_a_task_holds_cannot_be_settled_here(request: pytest.FixtureRequest) -> None:
    place: Place = fresh_place("memory", request)
    async with place.scene() as scene:
        record = await scene.run("t1")
        it = Bank(LedgerTracker(StoreLedger(scene.store)), scene.clock, scene.store)
        reservation_id = record.progress.reservation_id
        for scope in ("session:s", "", "project:search"):
            answer = await it.ask("release", id=reservation_id, scope=scope)
            assert (answer.status, answer.problem["code"]) == (404, "not_found")
        status = (await it.status("session:s")).json
        assert status["reservedTokens"] == 100
        await scene.settle("t1")


@pytest.mark.parametrize(
    ("verb", "body", "field"),
    [
        ("reserve", {"scope": "session:s"}, "id"),
        ("reserve", {"id": "r"}, "scope"),
        ("reserve", {"id": "", "scope": "session:s"}, "id"),
        ("reserve", {"id": "r" * 129, "scope": "session:s"}, "id"),
        ("reserve", {"id": "a\nb", "scope": "session:s"}, "id"),
        ("reserve", {"id": "r", "scope": "nonsense"}, "scope"),
        ("reserve", {"id": "r", "scope": "session:s", "usd": "ten"}, "usd"),
        ("reserve", {"id": "r", "scope": "session:s", "usd": -1}, "usd"),
        ("reserve", {"id": "r", "scope": "session:s", "usd": "1e99"}, "usd"),
        ("reserve", {"id": "r", "scope": "session:s", "tokens": -1}, "tokens"),
        ("reserve", {"id": "r", "scope": "session:s", "tokens": 1.5}, "tokens"),
        ("reserve", {"id": "r", "scope": "session:s", "leaseSeconds": 0}, "leaseSeconds"),
        ("reserve", {"id": "r", "scope": "session:s", "leaseSeconds": 1e9}, "leaseSeconds"),
        ("reserve", {"id": "r", "scope": "session:s", "also": ["?"]}, "also"),
        ("reserve", {"id": "r", "scope": "session:s", "leaseSecond": 5}, "leaseSecond"),
        ("commit", {"id": "r", "scope": "session:s", "usd": "x"}, "usd"),
        ("release", {"id": 5, "scope": "session:s"}, "id"),
        ("extend", {"id": "r", "scope": "session:s", "leaseSeconds": 0}, "leaseSeconds"),
        ("extend", {"id": "r", "scope": "session:s", "leaseSeconds": 604_801}, "leaseSeconds"),
        ("extend", {"id": "r", "scope": "session:s", "leaseSeconds": "5"}, "leaseSeconds"),
        ("extend", {"id": "r", "scope": "session:s", "leaseSecond": 5}, "leaseSecond"),
    ],
)
async def test_bad_input_is_refused_by_the_name_of_its_field(
    verb: str, body: dict[str, Any], field: str
) -> None:
    async with bank("store") as it:
        answer = await it.ask(verb, **body)
        assert answer.status == 400, answer.body
        assert answer.problem["details"] == {"field": field}
        status = (await it.status()).json
        assert (status["reservedUsd"], status.get("children", [])) == ("0.00", [])


async def test_a_body_that_is_no_object_is_refused() -> None:
    async with bank("store") as it:
        for body in (b"", b"[]", b"null", b"{", b"\xff"):
            answer = await answer_of(it.client.app, "POST", "/budgets/reserve", body)
            assert (answer.status, answer.problem["code"]) == (400, "bad_json"), body


async def test_a_caller_that_is_bound_touches_budgets_of_its_own() -> None:
    async with bank("store") as it:
        token = it.token("submit", "read", bounds=Bounds(project_id="search"))
        assert (await it.ask("reserve", token, id="r", scope=IN_SEARCH, usd=1)).status == 200
        for verb in ("reserve", "dispatched", "extend", "commit", "release"):
            for scope in ("", "project:other", "session:s"):
                answer = await it.ask(verb, token, id="r", scope=scope)
                assert (answer.status, answer.problem["code"]) == (403, "forbidden")
        also = await it.ask("reserve", token, id="r2", scope=IN_SEARCH, also=["project:other"])
        assert also.status == 403
        assert (await it.status("project:other", token)).status == 403
        assert (await it.status("", token)).json["scope"] == "project:search"
        agent = it.token("read", bounds=Bounds(agent_id="a"))
        assert (await it.status("", agent)).json["scope"] == "agent:a"
        assert (await it.status("project:search/agent:a", agent)).status == 200
        assert (await it.status("project:search", agent)).status == 403


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("bounds", "scope"),
    [
        (Bounds(project_id="alpha"), "project:alpha"),
        (Bounds(agent_id="evil"), "project:beta/agent:evil"),
        (Bounds(project_id="alpha", agent_id="evil"), "project:alpha/agent:evil"),
    ],
)
async def test_a_claim_of_a_bound_token_takes_nothing_from_others(
    kind: str, bounds: Bounds, scope: str
) -> None:
    async with bank(kind) as it:
        await it.tracker.set_budget("", limit_usd="1000")
        mine = it.token("submit", "read", bounds=bounds)
        # A limit that it sets for itself does not widen what it may claim.
        own = f"{scope}/session:s" if scope == "project:alpha" else scope
        created = await it.ask("create", mine, scope=own, limitUsd="1000000")
        assert created.status == 200
        held = await it.ask("reserve", mine, id="r", scope=own, usd="0")
        assert held.status == 200
        booked = await it.ask("commit", mine, id="r", scope=own, usd="1000000")
        assert booked.status == 200
        root = await it.tracker.own_status("")
        assert root.remaining_micro_usd == 1_000_000_000
        assert root.unaccepted_micro_usd == 1_000_000_000_000
        assert (await it.tracker.own_status(own)).overrun_micro_usd == 1_000_000_000_000
        refused = await it.ask("reserve", mine, id="r2", scope=own, usd="0.01")
        assert refused.status == 402
        others = it.token("submit", bounds=Bounds(project_id="honest"))
        held = await it.ask("reserve", others, id="r", scope="project:honest", usd="1000")
        assert held.status == 200


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("bounds", "own", "scope"),
    [
        (Bounds(agent_id="a"), "agent:a", "project:search/agent:a"),
        (
            *(Bounds(project_id="search", agent_id="a"), "project:search/agent:a"),
            "project:search/run:1/agent:a",
        ),
    ],
)
async def test_what_an_agents_token_holds_is_charged_to_its_own_budget(
    kind: str, bounds: Bounds, own: str, scope: str
) -> None:
    async with bank(kind) as it:
        await it.tracker.set_budget(own, limit_usd="1")
        mine = it.token("submit", "read", bounds=bounds)
        for name, usd, status in (("1", "0.75", 200), ("2", "0.5", 402), ("3", "0.25", 200)):
            held = await it.ask("reserve", mine, id=name, scope=scope, usd=usd)
            assert held.status == status
        assert (await it.ask("commit", mine, id="1", scope=scope, usd="0.7")).status == 200
        books = (await it.status(own, mine)).json
        assert (books["spentUsd"], books["reservedUsd"]) == ("0.70", "0.25")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_token_that_is_bound_to_nothing_carries_no_limit_to_minus(kind: str) -> None:
    async with bank(kind) as it:
        await it.tracker.set_budget("", limit_usd="999")
        bob, scope = it.token("submit", "read", "cancel"), "project:alpha"
        await it.ask("reserve", bob, id="honest", scope=scope, usd="1")
        await it.ask("commit", bob, id="honest", scope=scope, usd="3")
        shown = (await it.status("", bob)).json
        assert (shown["spentUsd"], shown["overrunUsd"]) == ("1.00", "2.00")
        await it.ask("reserve", bob, id="r", scope=scope, usd="0")
        booked = await it.ask("commit", bob, id="r", scope=scope, usd="1000000")
        assert booked.status == 200
        shown = (await it.status("", bob)).json
        assert (shown["remainingUsd"], shown["unacceptedUsd"]) == ("0.00", "999004.00")
        own = (await it.status(scope, bob)).json
        assert own["overrunUsd"] == "1000002.00"
        assert "unacceptedUsd" not in own


@pytest.mark.parametrize("kind", KINDS)
async def test_an_operators_word_is_booked_in_full(kind: str) -> None:
    async with bank(kind) as it:
        await it.tracker.set_budget("", limit_usd="1000")
        operator = it.token("admin", "submit")
        await it.ask("reserve", operator, id="r", scope="project:alpha", usd="0")
        await it.ask("commit", operator, id="r", scope="project:alpha", usd="1001")
        assert (await it.tracker.own_status("")).remaining_micro_usd == -1_000_000


@pytest.mark.parametrize("kind", KINDS)
async def test_an_operator_decides_about_a_claim_and_undoes_a_booking(kind: str) -> None:
    async with bank(kind) as it:
        await it.tracker.set_budget("", limit_usd="1000")
        mine = it.token("submit", "read", bounds=Bounds(project_id="alpha"))
        operator = it.token("admin", "read")
        await it.ask("reserve", mine, id="r", scope="project:alpha", usd="1")
        await it.ask("commit", mine, id="r", scope="project:alpha", usd="1000000")
        shown = (await it.status("", operator)).json
        assert (shown["unacceptedUsd"], shown["remainingUsd"]) == ("999999.00", "999.00")
        for _ in range(2):
            accepted = await it.ask(
                "adjust", operator, id="a", scope="", action="accept", usd="5", reason="invoice"
            )
            assert accepted.status == 200
            assert accepted.json["overrunUsd"] == "5.00"
            assert accepted.json["unacceptedUsd"] == "999994.00"
        rejected = await it.ask(
            "adjust", operator, id="b", scope="", action="reject", reason="a lie"
        )
        assert "unacceptedUsd" not in rejected.json
        undone = await it.ask(
            "adjust", operator, id="c", scope="project:alpha", usd="-999999", reason="the same"
        )
        assert (undone.json["spentUsd"], undone.json["overrunUsd"]) == ("1.00", "0.00")
        assert it.client.engine.asked_budgets == 4
        # What was sent twice was done once, and stands in the audit log once.
        rows = (await it.client.app.api.audit.page()).rows
        assert [row.action for row in rows] == ["budget.adjust", "budget.reject", "budget.accept"]
        assert b"invoice" in bytes(rows[2].detail)
        # Its journal shows the tenant what was decided about its own scope, and of no other.
        journal = await it.tracker.journal("project:alpha")
        assert [entry.call.value for entry in journal][:2] == ["adjust", "commit"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"reason": " "}, "reason"),
        ({"reason": "x" * 501}, "reason"),
        ({"id": ""}, "id"),
        ({"usd": "0"}, "usd"),
        ({"usd": "-0.01"}, "usd"),
        ({"usd": "1e30"}, "usd"),
        ({"action": "accept", "tokens": 1}, "tokens"),
        ({"action": "accept", "usd": "-1"}, "usd"),
        ({"action": "forget"}, "action"),
        ({"scope": "no scope"}, "scope"),
    ],
)
async def test_a_wrong_adjustment_is_refused_by_its_field(
    change: dict[str, object], field: str
) -> None:
    async with bank("store") as it:
        body = {"id": "a", "scope": "", "usd": "1", "reason": "because"}
        if "action" in change:
            del body["usd"]
        refused = await it.ask("adjust", it.token("admin"), **(body | change))
        assert (refused.status, refused.json["details"]["field"]) == (400, field)


async def test_only_an_operator_adjusts_and_an_id_means_one_thing() -> None:
    async with bank("store") as it:
        body = {"id": "a", "scope": "", "usd": "1", "reason": "because"}
        assert (await it.ask("adjust", it.token("submit", "read", "cancel"), **body)).status == 403
        operator = it.token("admin")
        assert (await it.ask("adjust", operator, **body)).status == 200
        again = await it.ask("adjust", operator, **(body | {"usd": "2"}))
        assert (again.status, again.json["code"]) == (409, "reservation_conflict")


async def test_changes_need_submit_and_looking_needs_read() -> None:
    async with bank("store") as it:
        reads, submits = it.token("read"), it.token("submit")
        for verb in ("reserve", "dispatched", "extend", "commit"):
            assert (await it.ask(verb, reads, id="r", scope="session:s")).status == 403
            assert (await it.ask(verb, submits, id="r", scope="session:s")).status == 200
        assert (await it.status("session:s", submits)).status == 403
        assert (await it.status("session:s", reads)).status == 200


async def test_while_the_ledger_is_away_nothing_is_granted() -> None:
    async with bank("outside") as it:
        await it.tracker.ledger.close()
        answer = await it.ask("reserve", id="r", scope="session:s")
        assert (answer.status, answer.problem["code"]) == (503, "unavailable")
        with pytest.raises(LedgerUnavailableError):
            await it.tracker.status("session:s")


async def used(scene: Scene) -> Client:
    """Give an application over a store with two settled tasks, one at an assumed price."""
    for task_id, model, micro_usd in (("t1", "large", 1_500_000), ("t2", "small", None)):
        await scene.submit(task_id)
        await scene.assign(task_id, micro_usd=1_500_000)
        cost = Usage(tokens=70, micro_usd=micro_usd, model=model)
        await scene.settle(task_id, cost=cost, node_id=HERE)
    client = Client()
    client.app.api.usage = UsageReports(scene.store)
    return client


async def test_usage_is_shown_by_project_agent_model_and_day(
    request: pytest.FixtureRequest,
) -> None:
    async with fresh_place("memory", request).scene() as scene:
        client = await used(scene)
        answer = await answer_of(client.app, "GET", "/usage?by=model")
        same = {
            "tasks": 1,
            "attempts": 1,
            "calls": 0,
            "tokens": 70,
            "usd": "1.50",
            "assumedTokens": 0,
        }
        assert answer.json["rows"] == [
            {"key": "large", **same, "assumedUsd": "0.00"},
            {"key": "small", **same, "assumedUsd": "1.50"},
        ]
        total = answer.json["total"]
        assert (total["usd"], total["assumedUsd"]) == ("3.00", "1.50")
        for by, key in (("project", "search"), ("agent", "coder")):
            rows = (await answer_of(client.app, "GET", f"/usage?by={by}")).json["rows"]
            assert [row["key"] for row in rows] == [key]
        (day,) = (await answer_of(client.app, "GET", "/usage?by=day")).json["rows"]
        path = f"/usage?by=day&until={day['key']}"
        assert (await answer_of(client.app, "GET", path)).json["rows"] == []
        assert (await answer_of(client.app, "GET", "/usage")).json["by"] == "project"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("by=hour", "by"),
        ("since=yesterday", "since"),
        ("until=2026-13-01", "until"),
        ("since=2026-01-02&until=2026-01-01", "until"),
        ("sinse=2026-01-01", "sinse"),
    ],
)
async def test_a_wrong_question_for_usage_is_refused(
    query: str, field: str, request: pytest.FixtureRequest
) -> None:
    async with fresh_place("memory", request).scene() as scene:
        client = await used(scene)
        answer = await answer_of(client.app, "GET", f"/usage?{query}")
        assert (answer.status, answer.problem["details"]) == (400, {"field": field})


@pytest.mark.parametrize("kind", KINDS)
async def test_a_tenant_charges_a_bounded_number_of_scopes_and_others_are_not_counted(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "MAX_OWN_SCOPES", 10)
    monkeypatch.setattr(budgets, "MAX_OWN_SCOPES", 10)
    async with bank(kind) as it:
        mine = it.token("submit", bounds=Bounds(project_id="search"))
        agents = it.token("submit", bounds=Bounds(project_id="search", agent_id="a"))
        operator = it.token("admin", "submit")
        # What is in the ledger before this node is asked counts as well.
        await it.tracker.commit(await it.tracker.reserve("project:search/run:old", "0.1"), "0.1")
        first = [f"project:search/run:{n}" for n in range(8)]
        held = await it.ask("reserve", mine, id="1", scope="project:search", also=first)
        assert held.status == 200
        again = await it.ask("reserve", mine, id="2", scope="project:search", also=first)
        assert again.status == 200
        for verb, token, scope in (
            ("reserve", mine, "project:search/run:new"),
            ("create", mine, "project:search/run:new"),
            ("reserve", agents, "project:search/agent:a"),
        ):
            given: dict[str, object] = {"limitUsd": "1"} if verb == "create" else {"id": "3"}
            refused = await it.ask(verb, token, scope=scope, **given)
            assert (refused.status, refused.json["code"]) == (429, "limit_reached")
            assert refused.json["details"] == {"yours": 10, "most": 10}
            assert "the project search charges 10 scopes" in refused.json["error"]
        assert (await it.ask("reserve", mine, id="4", scope="project:search/run:old")).status == 200
        theirs = it.token("submit", bounds=Bounds(project_id="honest"))
        assert (await it.ask("reserve", theirs, id="1", scope="project:honest/run:1")).status == 200
        many = [f"project:search/run:{n}" for n in range(40)]
        taken = await it.ask("reserve", operator, id="5", scope="project:search", also=many)
        assert taken.status == 200


async def test_a_reservation_of_a_tenant_names_as_many_scopes_as_a_task() -> None:
    async with bank("store") as it:
        mine = it.token("submit", bounds=Bounds(project_id="search"))
        also = [f"project:search/run:{n}" for n in range(MAX_SCOPES + 1)]
        fits = await it.ask("reserve", mine, id="1", scope="project:search", also=also[1:])
        assert fits.status == 200
        refused = await it.ask("reserve", mine, id="1", scope="project:search", also=also)
        assert refused.status == 400
        assert refused.json["error"] == "field 'also': has 17 entries, at most 16 are charged"


async def test_the_scopes_of_a_tenants_reservation_have_a_bounded_length() -> None:
    async with bank("store") as it:
        mine = it.token("submit", bounds=Bounds(project_id="search"))
        operator = it.token("admin", "submit")
        also = [f"project:search/run:{n}{'x' * 100}/step:{'y' * 100}" for n in range(16)]
        refused = await it.ask("reserve", mine, id="1", scope="project:search", also=also)
        assert (refused.status, refused.json["details"]["field"]) == (400, "also")
        assert "at most 4,096 are charged" in refused.json["error"]
        taken = await it.ask("reserve", operator, id="1", scope="project:search", also=also)
        assert taken.status == 200


def test_scopes_that_nobody_uses_are_forgotten_and_those_of_the_ledger_are_not() -> None:
    clock = VirtualClock()
    counted = shares.OwnScopes(clock)
    assert counted.is_to_be_read("search")
    counted.read("search", ["a", "b"])
    assert counted.take("search", [f"run:{n}" for n in range(shares.MAX_OWN_SCOPES - 2)])
    assert not counted.take("search", ["new"])
    assert counted.take("search", ["a", "run:1"])
    assert not counted.is_to_be_read("search")
    clock.advance(shares.READ_AGAIN_SECONDS)
    assert counted.is_to_be_read("search")
    counted.read("search", ["a"])
    # One is gone from the ledger; tasks that charge the others may still wait.
    assert counted.take("search", ["new"])
    assert not counted.take("search", ["newer"])
    clock.advance(shares.UNUSED_SECONDS)
    counted.read("search", ["a"])
    assert counted.count("search") == 1


def test_a_node_remembers_a_bounded_number_of_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_COUNTED_SCOPES", 10)
    counted = shares.OwnScopes(VirtualClock())
    for n in range(5):
        counted.read(f"tenant {n}", [])
        assert counted.take(f"tenant {n}", [f"run:{k}" for k in range(4)])
    assert [counted.count(f"tenant {n}") for n in range(5)] == [0, 0, 0, 4, 4]
    assert counted.is_to_be_read("tenant 0")
