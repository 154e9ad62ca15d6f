"""The routes of slots, over real slots in memory: what they show, wake, switch and refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from itertools import count

import pytest

from api.asgi_client import Client, answer_of
from api.fake_app import fake_app
from headgate.api import slots as slot_routes
from headgate.core.slots.quota import (
    QuotaFailure,
    QuotaFailureKind,
    QuotaLimit,
    QuotaReport,
    WakeAnswer,
)
from headgate.core.slots.slot import SlotConfig
from headgate.core.slots.wakes import WakeConfig, WakeMode
from headgate.engine.slots.slot import SlotSetup
from headgate.engine.slots.slot_log import SlotTrail
from headgate.engine.slots.slots import Slots
from headgate.providers.provider import Call
from headgate.storage.audit import AuditLog
from headgate.storage.memory import MemoryTaskStore
from headgate.storage.slot_rows import SlotStore
from headgate.testing import VirtualClock

KEY = "sk-secret-of-the-slot"
NOW = 1_800_000_000.0


class Key:
    """A provider's key whose quota is what a test says."""

    def __init__(self) -> None:
        self.quota: QuotaReport | QuotaFailure = report()
        self.wakes: list[Call] = []
        self.answers: asyncio.Event | None = None

    async def read_quota(self, call: Call) -> QuotaReport | QuotaFailure:
        """Tell the quota."""
        assert call.key == KEY
        return self.quota

    def read_response(
        self, status: int, headers: Mapping[str, str], now: float
    ) -> QuotaReport | QuotaFailure | None:
        """Tell the used percentage of a header of its own."""
        used = headers.get("x-used")
        return None if used is None else report(float(used), now + status)

    async def wake(self, call: Call) -> WakeAnswer:
        """Take a wake, which opens nothing by itself."""
        self.wakes.append(call)
        if self.answers is not None:
            await self.answers.wait()
        return WakeAnswer()

    async def close(self) -> None:
        """There is nothing to close."""


def report(percentage: float = 0.0, resets_at: float | None = None) -> QuotaReport:
    reset_ms = None if resets_at is None else int(resets_at * 1000)
    row = QuotaLimit(
        type="TOKENS_LIMIT", unit=3, percentage=percentage, next_reset_epoch_ms=reset_ms
    )
    return QuotaReport(level="pro", limits=(row,))


class Stage:
    """An application with two slots, `work` and one that the settings disable."""

    def __init__(self) -> None:
        self.clock = VirtualClock(NOW)
        self.store = MemoryTaskStore(clock=self.clock)
        self.key = Key()
        self.client = Client()
        self.client.engine.time = NOW
        ids = count()
        self.slots = Slots(
            SlotStore(self.store),
            (self.setup("work"), self.setup("resting", is_enabled=False)),
            trail_of=SlotTrail,
            make_id=lambda: f"id{next(ids)}",
        )
        self.client.app.api.slots = self.slots
        asyncio.run(self._open())

    def setup(self, name: str, *, is_enabled: bool = True) -> SlotSetup:
        wake = WakeConfig(wake_modes=frozenset({WakeMode.AFTER_RESET}))
        config = SlotConfig(
            name=name, provider="zai", wake=wake, is_enabled=is_enabled, key_digest=name
        )
        return SlotSetup(config=config, provider=self.key, read_key=lambda: KEY)

    def actions(self) -> list[tuple[str, str]]:
        page = asyncio.run(AuditLog(self.store).page())
        return [(row.action, row.subject) for row in page.rows]

    async def _open(self) -> None:
        await self.store.open()
        await self.slots.prepare()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    asyncio.run(stage.store.close())


def test_slots_are_listed_in_the_order_of_the_file(stage: Stage) -> None:
    answer = stage.client.get("/slots")
    assert (answer.status, answer.json["count"]) == (200, 2)
    states = [(one["name"], one["state"], one["enabled"]) for one in answer.json["slots"]]
    assert states == [("work", "unknown", True), ("resting", "disabled", False)]


def test_a_service_without_slots_has_an_empty_list(stage: Stage) -> None:
    stage.client.app.api.slots = fake_app().api.slots
    assert stage.client.get("/slots").json == {"slots": [], "count": 0}
    assert stage.client.get("/slots/work").status == 404
    assert stage.client.post("/slots/work/warm").status == 404


@pytest.mark.parametrize("path", ["", "/warm", "/enable", "/disable"])
def test_a_slot_that_is_not_there_is_not_found(stage: Stage, path: str) -> None:
    url = f"/slots/no%20slot{path}"
    answer = stage.client.post(url) if path else stage.client.get(url)
    assert (answer.status, answer.problem["code"]) == (404, "not_found")
    assert answer.problem["error"].startswith("there is no slot 'no slot'")
    assert stage.actions() == []


def test_a_cold_slot_is_woken_and_the_wake_is_pending(stage: Stage) -> None:
    answer = stage.client.post("/slots/work/warm")
    assert answer.status == 202
    assert answer.json["wakePending"] is True
    assert answer.json["nextWake"]["mode"] == "retry"
    assert len(stage.key.wakes) == 1
    assert stage.actions() == [("slot.warm", "work")]
    again = stage.client.post("/slots/work/warm")
    assert (again.status, again.problem["code"]) == (409, "slot_unavailable")
    assert again.problem["details"]["reason"]
    assert len(stage.key.wakes) == 1


def test_an_open_window_is_left_alone(stage: Stage) -> None:
    stage.key.quota = report(7.0, NOW + 3600)
    answer = stage.client.post("/slots/work/warm")
    assert (answer.status, answer.problem["code"]) == (409, "window_open")
    assert answer.problem["details"] == {"slot": "work", "resetsAt": "2027-01-15T09:00:00Z"}
    assert answer.problem["retryable"] is False
    assert stage.key.wakes == []
    shown = stage.client.get("/slots/work").json
    assert (shown["state"], shown["percentUsed"]) == ("open", 7.0)
    assert shown["resetsAt"] == "2027-01-15T09:00:00Z"


def test_a_used_up_slot_is_unavailable_and_says_until_when(stage: Stage) -> None:
    stage.key.quota = report(100.0, NOW + 3600)
    answer = stage.client.post("/slots/work/warm")
    assert (answer.status, answer.problem["code"]) == (409, "slot_unavailable")
    assert answer.problem["details"]["until"] == "2027-01-15T09:00:00Z"
    assert answer.problem["error"].endswith("until 2027-01-15 09:00:00 UTC")
    shown = stage.client.get("/slots/work").json
    assert shown["state"] == "exhausted"
    assert "100%" in shown["waitReason"]
    assert shown["waitUntil"] == "2027-01-15T09:00:00Z"


def test_a_disabled_slot_is_not_woken(stage: Stage) -> None:
    assert stage.client.post("/slots/resting/warm").problem["code"] == "slot_unavailable"
    disabled = stage.client.post("/slots/work/disable")
    assert (disabled.status, disabled.json["state"]) == (200, "paused")
    assert disabled.json["waitReason"]
    assert stage.client.post("/slots/work/warm").problem["code"] == "slot_unavailable"
    enabled = stage.client.post("/slots/work/enable")
    assert (enabled.status, enabled.json["enabled"]) == (200, True)
    assert stage.client.post("/slots/work/warm").status == 202
    assert [action for action, _ in stage.actions()] == [
        "slot.warm",
        "slot.enable",
        "slot.disable",
    ]


def test_enabling_brings_back_what_a_refused_key_disabled(stage: Stage) -> None:
    stage.key.quota = QuotaFailure(kind=QuotaFailureKind.REFUSED, code=401)
    assert stage.client.post("/slots/work/warm").problem["code"] == "slot_unavailable"
    shown = stage.client.get("/slots/work").json
    assert (shown["state"], shown["enabled"]) == ("disabled", False)
    assert "401" in shown["disabledReason"]
    assert stage.client.post("/slots/work/enable").json["enabled"] is True


def test_enabling_does_not_go_over_the_settings(stage: Stage) -> None:
    answer = stage.client.post("/slots/resting/enable")
    assert (answer.status, answer.json["enabled"]) == (200, False)
    assert answer.json["disabledReason"] == "disabled in the configuration"


def test_a_provider_that_does_not_answer_is_not_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_routes, "WARM_SECONDS", 0.05)

    async def warm() -> int:
        stage.key.answers = asyncio.Event()
        answer = await answer_of(stage.client.app, "POST", "/slots/work/warm", b"")
        assert answer.json["wakePending"] is True
        stage.key.answers.set()
        return answer.status

    assert asyncio.run(warm()) == 202
    assert len(stage.key.wakes) == 1


def test_no_answer_has_a_key_in_it(stage: Stage) -> None:
    stage.key.quota = QuotaFailure(kind=QuotaFailureKind.REJECTED, message=f"bad {KEY}", code=400)
    answers = [stage.client.post("/slots/work/warm"), stage.client.get("/slots")]
    assert all(KEY.encode() not in answer.body for answer in answers)


def test_the_log_of_a_slot_is_told_as_far_as_there_is_one(stage: Stage) -> None:
    assert stage.client.get("/slots/work/log").json == {"lines": [], "count": 0}
    assert stage.client.get("/slots/none/log").status == 404
    assert stage.client.get("/slots/work/log?limit=0").status == 400
    assert stage.client.get("/slots/work/log?limitt=1").status == 400


def test_whoever_may_read_sees_slots_and_only_admins_change_them() -> None:
    needs = {(route.method, route.path): route.needs for route in slot_routes.ROUTES}
    assert needs == {
        ("GET", "/slots"): "read",
        ("GET", "/slots/{id}"): "read",
        ("GET", "/slots/{id}/log"): "admin",
        ("POST", "/slots/{id}/warm"): "admin",
        ("POST", "/slots/{id}/observe"): "admin",
        ("POST", "/slots/{id}/enable"): "admin",
        ("POST", "/slots/{id}/disable"): "admin",
    }


def test_a_response_that_somebody_else_got_is_learned_from(stage: Stage) -> None:
    told = {"status": 200, "headers": {"X-Used": "40"}}
    answer = stage.client.post("/slots/work/observe", told)
    assert (answer.status, answer.json["name"]) == (202, "work")
    assert stage.client.post("/slots/nowhere/observe", told).status == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"headers": {}}, "status"),
        ({"status": 200}, "headers"),
        ({"status": 99, "headers": {}}, "status"),
        ({"status": 200, "headers": {"a": 1}}, "headers"),
        ({"status": 200, "headers": {f"h{n}": "" for n in range(65)}}, "headers"),
    ],
)
def test_a_response_that_cannot_be_one_is_refused(
    body: dict[str, object], field: str, stage: Stage
) -> None:
    answer = stage.client.post("/slots/work/observe", body)
    assert answer.status == 400
    assert field in answer.problem["error"]
