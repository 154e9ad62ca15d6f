"""The routes of webhooks: lists, redelivery, pings, secrets, and what they refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from api.asgi_client import Client, Response
from api.fake_tokens import FakeTokens
from headgate.api.auth import Authenticator
from headgate.engine.webhooks import Webhooks
from headgate.storage.audit import AuditLog
from headgate.storage.deliveries import Alert, Deliveries, Message, SendReport, TryOutcome
from headgate.storage.memory import MemoryTaskStore
from headgate.storage.tokens import new_token
from headgate.testing import VirtualClock

URL = "https://hooks.example/x?key=1"


class Wire:
    """Answers every message as it was told to."""

    def __init__(self) -> None:
        self.report = SendReport(status=204, has_arrived=True)
        self.sent: list[Message] = []

    async def send(
        self, message: Message, body: bytes, secrets: Sequence[str], *, now: float
    ) -> SendReport:
        """Take a message."""
        assert body
        assert secrets
        assert now
        self.sent.append(message)
        return self.report

    async def open(self) -> None:
        """There is nothing to get ready."""

    async def close(self) -> None:
        """There is nothing to close."""


class Stage:
    """An application whose webhooks are in memory."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.store = MemoryTaskStore(clock=self.clock)
        self.wire = Wire()
        self.deliveries = Deliveries(self.store)
        self.client = Client()
        self.client.app.api.webhooks = Webhooks(self.deliveries, self.wire)
        self.client.app.api.audit = AuditLog(self.store)
        tokens = FakeTokens()
        self.client.app.api.auth = Authenticator(tokens)
        new = new_token(name="t", permissions=("admin",), now=tokens.time)
        tokens.kept[new.kept.token.id] = new.kept
        self.token = {"authorization": f"Bearer {new.text}"}
        asyncio.run(self.store.open())

    def secrets(self) -> Response:
        """Ask for the secrets, with a token."""
        return self.client.request("GET", "/webhooks/secret", headers=self.token)

    def file(self, count: int) -> list[str]:
        ids = [f"msg_{number}" for number in range(count)]
        alerts = [
            Alert(
                message_id=name,
                scope=name,
                unit="tokens",
                percent=50,
                limit=1,
                until=None,
                body="{}",
            )
            for name in ids
        ]
        asyncio.run(self.deliveries.alert(alerts, URL))
        return ids

    def end(self, delivery_id: str, *, has_arrived: bool) -> None:
        async def scenario() -> None:
            await self.deliveries.claim([delivery_id], claimed_by="me", seconds=30)
            outcome = TryOutcome(
                id=delivery_id,
                claimed_by="me",
                has_arrived=has_arrived,
                status=204 if has_arrived else 410,
                error=None if has_arrived else "answered 410",
            )
            await self.deliveries.settle(outcome)

        asyncio.run(scenario())


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_webhooks_are_listed_by_state_and_in_pages(stage: Stage) -> None:
    stage.file(3)
    stage.end("msg_0", has_arrived=True)
    stage.end("msg_1", has_arrived=False)
    answer = stage.client.get("/webhooks?limit=2")
    assert answer.status == 200
    assert [one["id"] for one in answer.json["webhooks"]] == ["msg_2", "msg_1"]
    rest = stage.client.get(f"/webhooks?limit=2&cursor={answer.json['nextCursor']}").json
    assert [one["id"] for one in rest["webhooks"]] == ["msg_0"]
    assert "nextCursor" not in rest
    for state, name in (("delivered", "msg_0"), ("dead", "msg_1"), ("pending", "msg_2")):
        found = stage.client.get(f"/webhooks?state={state}").json
        assert [one["id"] for one in found["webhooks"]] == [name]
    assert stage.client.get("/webhooks?task=tsk_2").json["webhooks"][0]["id"] == "msg_2"


def test_one_webhook_shows_its_latest_try(stage: Stage) -> None:
    stage.file(1)
    stage.end("msg_0", has_arrived=False)
    body = stage.client.get("/webhooks/msg_0").json
    assert (body["state"], body["status"], body["error"], body["tries"]) == (
        "dead",
        410,
        "answered 410",
        1,
    )
    assert body["url"] == URL
    assert "taskId" not in body


def test_one_webhook_shows_its_latest_tries_and_a_list_shows_none(stage: Stage) -> None:
    (one,) = stage.file(1)
    webhooks = stage.client.app.api.webhooks
    assert webhooks is not None

    async def tried() -> None:
        for report in (
            SendReport(error="cannot be reached"),
            SendReport(status=200, has_arrived=True, answer="<b>thanks"),
        ):
            stage.wire.report = report
            await webhooks.run_once()
            await webhooks.settled()
            stage.clock.advance(10.0)

    asyncio.run(tried())
    first, second = stage.client.get(f"/webhooks/{one}").json["latestTries"]
    assert (first["error"], first["durationMs"], "status" in first) == (
        "cannot be reached",
        0,
        False,
    )
    assert (second["status"], second["answer"], "error" in second) == (200, "<b>thanks", False)
    assert first["at"] < second["at"]
    assert "latestTries" not in stage.client.get("/webhooks").json["webhooks"][0]


def test_one_that_was_given_up_is_sent_again(stage: Stage) -> None:
    stage.file(1)
    stage.end("msg_0", has_arrived=False)
    answer = stage.client.post("/webhooks/msg_0/redeliver", {})
    assert answer.status == 202
    assert (answer.json["state"], answer.json["tries"]) == ("pending", 0)


def test_one_that_arrived_and_is_forgotten_cannot_be_sent_again(stage: Stage) -> None:
    stage.file(1)
    stage.end("msg_0", has_arrived=True)
    answer = stage.client.post("/webhooks/msg_0/redeliver", {})
    assert (answer.status, answer.problem["code"]) == (409, "conflict")


@pytest.mark.parametrize(
    ("report", "body"),
    [
        (SendReport(status=200, has_arrived=True), {"delivered": True, "status": 200}),
        (
            SendReport(status=500, error="answered 500"),
            {"delivered": False, "status": 500, "error": "answered 500"},
        ),
        (
            SendReport(error="cannot be reached: no route"),
            {"delivered": False, "error": "cannot be reached: no route"},
        ),
        (
            SendReport(status=410, error="answered 410", is_final=True),
            {"delivered": False, "status": 410, "error": "answered 410"},
        ),
    ],
)
def test_a_ping_says_what_happened(
    stage: Stage, report: SendReport, body: dict[str, object]
) -> None:
    stage.wire.report = report
    answer = stage.client.post("/webhooks/ping", {"url": URL})
    assert (answer.status, answer.json) == (200, body)
    (sent,) = stage.wire.sent
    assert (sent.url, sent.event) == (URL, "ping")


def test_an_address_that_may_not_be_reached_is_refused_by_its_field(stage: Stage) -> None:
    stage.wire.report = SendReport(error="the address 10.0.0.1 may not be reached", is_final=True)
    answer = stage.client.post("/webhooks/ping", {"url": "http://10.0.0.1/"})
    assert (answer.status, answer.problem["details"]) == (400, {"field": "url"})


def test_secrets_are_shown_and_rotated_and_not_cached(stage: Stage) -> None:
    first = stage.secrets()
    assert first.headers["cache-control"] == "no-store"
    (secret,) = first.json["secrets"]
    assert secret["secret"].startswith("whsec_")
    rotated = stage.client.post("/webhooks/secret/rotate", {})
    assert rotated.headers["cache-control"] == "no-store"
    new, old = rotated.json["secrets"]
    assert old["secret"] == secret["secret"]
    assert "endsAt" in old
    assert "endsAt" not in new
    assert stage.secrets().json == rotated.json


def test_secrets_are_shown_to_nobody_without_a_token(stage: Stage) -> None:
    answer = stage.client.get("/webhooks/secret")
    assert (answer.status, answer.problem["code"]) == (401, "unauthorized")
    assert asyncio.run(AuditLog(stage.store).page()).rows == ()


def test_who_changes_something_is_noted_in_the_same_commit(stage: Stage) -> None:
    stage.file(1)
    stage.end("msg_0", has_arrived=False)
    stage.client.post("/webhooks/msg_0/redeliver", {})
    stage.client.post("/webhooks/msg_none/redeliver", {})
    stage.secrets()
    stage.client.post("/webhooks/secret/rotate", {})
    rows = asyncio.run(AuditLog(stage.store).page()).rows
    assert [(row.action, row.subject) for row in rows] == [
        ("webhook.secret.rotate", ""),
        ("webhook.secret.show", ""),
        ("webhook.redeliver", "msg_0"),
    ]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/webhooks?state=lost", None, 400, "invalid_field"),
        ("GET", "/webhooks?limit=0", None, 400, "invalid_field"),
        ("GET", "/webhooks?limit=1001", None, 400, "invalid_field"),
        ("GET", "/webhooks?cursor=a%20b", None, 400, "invalid_field"),
        ("GET", "/webhooks?cursr=msg_1", None, 400, "unknown_field"),
        ("GET", "/webhooks/msg_none", None, 404, "not_found"),
        ("GET", "/webhooks/%00", None, 404, "not_found"),
        ("POST", "/webhooks/msg_none/redeliver", b"", 404, "not_found"),
        ("POST", "/webhooks/ping", b"", 400, "bad_json"),
        ("POST", "/webhooks/ping", b"{}", 400, "missing_field"),
        ("POST", "/webhooks/ping", b'{"url": ""}', 400, "invalid_field"),
        ("POST", "/webhooks/ping", b'{"url": 1}', 400, "invalid_field"),
        ("GET", "/webhooks/ping", None, 405, "method_not_allowed"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_code(
    stage: Stage, method: str, path: str, body: bytes | None, status: int, code: str
) -> None:
    answer = stage.client.request(method, path, *([] if body is None else [body]))
    assert (answer.status, answer.problem["code"]) == (status, code)


def test_a_service_without_webhooks_says_so(stage: Stage) -> None:
    stage.client.app.api.webhooks = None
    answer = stage.client.get("/webhooks")
    assert answer.status == 503
    assert "webhooks.enabled" in answer.problem["error"]
