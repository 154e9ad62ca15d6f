"""Deliveries over every store: filed with the end of a task, claimed, tried, ended, forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from headgate.core.admission import QueueLimits
from headgate.core.retention import Retention
from headgate.core.task import Submission, TaskStatus, Terms
from headgate.storage import deliveries
from headgate.storage.audit import Actor, AuditEntry, AuditLog
from headgate.storage.deliveries import (
    TOO_MANY,
    Alert,
    Choice,
    Claim,
    Deliveries,
    Delivery,
    DeliveryQuery,
    DeliveryState,
    Message,
    NothingLeft,
    TryOutcome,
)
from headgate.storage.store import Expiration, TurnedAway
from headgate.storage.unit_of_work import message_id
from storage.scene import FAILED, Place, Scene

URL = "https://hooks.example/done?key=1"
HOOK = Terms(callback_url=URL)
ME, OTHER = "me", "other"

Body = Callable[[Scene, Deliveries], Coroutine[Any, Any, None]]


@asynccontextmanager
async def on_stage(
    place: Place, *, evicts: bool = False
) -> AsyncIterator[tuple[Scene, Deliveries]]:
    async with place.scene(evicts=evicts) as scene:
        yield scene, Deliveries(scene.store)


def play(place: Place, body: Body, *, evicts: bool = False) -> None:
    async def scenario() -> None:
        async with on_stage(place, evicts=evicts) as (scene, deliveries):
            await body(scene, deliveries)

    asyncio.run(scenario())


async def claimed(deliveries: Deliveries, *ids: str, by: str = ME) -> Claim:
    wanted = ids or [one.id for one in await deliveries.due(limit=10)]
    return await deliveries.claim(wanted, claimed_by=by, seconds=30.0)


async def only(deliveries: Deliveries) -> Delivery:
    (found,) = (await deliveries.find(DeliveryQuery())).deliveries
    return found


def failed(message: Message, *, by: str = ME, due_at: float | None, body: str = "{}") -> TryOutcome:
    return TryOutcome(
        id=message.id,
        claimed_by=by,
        has_arrived=False,
        status=500,
        error="answered 500",
        due_at=due_at,
        body=body,
    )


def arrived(message: Message, *, by: str = ME) -> TryOutcome:
    return TryOutcome(id=message.id, claimed_by=by, has_arrived=True, status=204)


def test_each_way_in_which_a_task_ends_files_one_delivery(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        for task_id in ("t1-done", "t2-failed", "t3-running", "t4-queued", "t5-late"):
            await scene.submit(task_id, terms=HOOK)
        await scene.submit("t6-child", terms=HOOK, depends_on=("t2-failed",))
        for task_id in ("t1-done", "t2-failed", "t3-running"):
            await scene.assign(task_id)
        full = QueueLimits(max_queue=1, max_per_agent=1)
        assert isinstance(
            await scene.ask(scene.new("t7-full", terms=HOOK, limits=full)), TurnedAway
        )
        await scene.settle("t1-done")
        await scene.settle("t1-done")
        await scene.settle("t2-failed", FAILED)
        await scene.cancel("t3-running")
        await scene.settle("t3-running", FAILED)
        await scene.cancel("t4-queued")
        await scene.cancel("t4-queued")
        late = Expiration(task_id="t5-late", status=TaskStatus.FAILED, error="deadline")
        await scene.store.drop(scene.epoch, [late])
        await scene.submit("t8-born-failed", terms=HOOK, depends_on=("t2-failed",))
        await scene.submit("t9-none")
        await scene.cancel("t9-none")
        found = (await deliveries.find(DeliveryQuery())).deliveries
        events = {one.task_id: one.event for one in found}
        assert events == {
            "t1-done": "task.completed",
            "t2-failed": "task.failed",
            "t3-running": "task.failed",
            "t4-queued": "task.cancelled",
            "t5-late": "task.failed",
            "t6-child": "task.failed",
            "t7-full": "task.rejected",
            "t8-born-failed": "task.failed",
        }
        assert all(one.id == message_id(one.task_id) for one in found)
        assert all(one.url == URL and one.tries == 0 for one in found)

    play(place, body)


def test_what_is_told_is_the_task_as_it_ended(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        submission = Submission(action="click", labels={"a": "b"})
        await scene.submit("tsk_1", terms=HOOK, submission=submission)
        await scene.assign("tsk_1")
        await scene.settle("tsk_1", result=msgspec.Raw(b'{"found": 3}'))
        (message,) = (await claimed(deliveries)).messages
        assert (message.id, message.task_id, message.event) == ("msg_1", "tsk_1", "task.completed")
        text = await deliveries.body(message)
        assert text is not None
        told = msgspec.json.decode(text)
        assert (told["taskId"], told["state"], told["result"]) == ("tsk_1", "done", {"found": 3})
        assert (told["callbackUrl"], told["labels"]) == (URL, {"a": "b"})
        assert await deliveries.body(message) == text

    play(place, body)


def test_one_sender_at_a_time_has_a_delivery(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        await scene.run("t1", terms=HOOK)
        await scene.settle("t1")
        (message,) = (await claimed(deliveries)).messages
        assert await deliveries.due(limit=10) == []
        assert (await claimed(deliveries, message.id, by=OTHER)).messages == ()
        await scene.let_time_pass(31)
        assert len((await claimed(deliveries, by=OTHER)).messages) == 1
        await deliveries.settle(failed(message, due_at=1.0))
        assert (await only(deliveries)).tries == 0, "the first sender has lost its claim"
        await deliveries.settle(arrived(message))
        found = await only(deliveries)
        assert (found.state, found.tries, found.status) == (DeliveryState.DELIVERED, 1, 204)
        await deliveries.settle(failed(message, by=OTHER, due_at=None))
        assert (await only(deliveries)).state is DeliveryState.DELIVERED

    play(place, body)


def test_a_try_that_fails_keeps_what_was_sent_and_lets_the_task_go(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        await scene.run("t1", terms=HOOK)
        await scene.settle("t1")
        await scene.let_time_pass(1_000)
        assert (await scene.store.evict(Retention(seconds=-1), limit=10)).tasks == 0
        (message,) = (await claimed(deliveries)).messages
        text = await deliveries.body(message)
        assert text is not None
        due_at = scene.clock() + 5
        await deliveries.settle(failed(message, due_at=due_at, body=text))
        found = await only(deliveries)
        assert (found.due_at, found.error, found.tries) == (due_at, "answered 500", 1)
        assert (await scene.store.evict(Retention(seconds=-1), limit=10)).tasks == 1
        assert await deliveries.body(message) == text
        assert await deliveries.due(limit=10) == []
        await scene.let_time_pass(5)
        (again,) = (await claimed(deliveries)).messages
        assert (again.id, again.tries) == (message.id, 1)
        await deliveries.settle(arrived(again))
        assert await deliveries.body(message) is None

    play(place, body, evicts=True)


def test_a_delivered_task_goes_with_its_time(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        await scene.run("t1", terms=HOOK)
        await scene.settle("t1")
        (message,) = (await claimed(deliveries)).messages
        await deliveries.settle(arrived(message))
        again = await deliveries.redeliver(message.id)
        assert isinstance(again, Delivery)
        assert (again.state, again.tries) == (DeliveryState.PENDING, 0)
        assert (await scene.store.evict(Retention(seconds=-1), limit=10)).tasks == 0
        (message,) = (await claimed(deliveries)).messages
        await deliveries.settle(arrived(message))
        assert (await scene.store.evict(Retention(seconds=-1), limit=10)).tasks == 1
        assert isinstance(await deliveries.redeliver(message.id), NothingLeft)
        assert await deliveries.redeliver("msg_none") is None

    play(place, body, evicts=True)


def test_what_was_given_up_can_be_sent_again_after_its_task_has_gone(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        await scene.run("t1", terms=HOOK)
        await scene.settle("t1")
        (message,) = (await claimed(deliveries)).messages
        await deliveries.settle(failed(message, due_at=None, body='{"kept":1}'))
        found = await only(deliveries)
        assert (found.state, found.due_at) == (DeliveryState.DEAD, None)
        assert (await scene.store.evict(Retention(seconds=-1), limit=10)).tasks == 1
        await scene.let_time_pass(86_400)
        assert isinstance(await deliveries.redeliver(message.id), Delivery)
        (again,) = (await claimed(deliveries)).messages
        assert await deliveries.body(again) == '{"kept":1}'
        under_way = await deliveries.redeliver(message.id)
        assert isinstance(under_way, Delivery)
        assert await deliveries.due(limit=10) == [], "one that is being sent goes on"

    play(place, body, evicts=True)


def test_claims_end_with_their_sender(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        for task_id in ("t1", "t2"):
            await scene.run(task_id, terms=HOOK)
            await scene.settle(task_id)
        await claimed(deliveries, "msg_t1")
        await claimed(deliveries, "msg_t2", by=OTHER)
        await deliveries.release(ME)
        assert [one.id for one in await deliveries.due(limit=10)] == ["msg_t1"]
        await deliveries.release(None)
        assert len(await deliveries.due(limit=10)) == 2

    play(place, body)


def test_hosts_without_a_place_are_passed_over(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        for number, host in enumerate(("slow.example", "slow.example", "fast.example:81")):
            await scene.run(f"t{number}", terms=Terms(callback_url=f"http://{host}/"))
            await scene.settle(f"t{number}")
            await scene.let_time_pass(1)
        found = await deliveries.due(limit=2)
        assert [(one.id, one.host) for one in found] == [
            ("msg_t0", "slow.example"),
            ("msg_t1", "slow.example"),
        ]
        for choice in (
            Choice(busy_hosts=("slow.example", "x")),
            Choice(busy_sites=("slow.example", "x.test")),
            Choice(only_hosts=("fast.example", "x")),
        ):
            found = await deliveries.due(choice, limit=2)
            assert [(one.id, one.host) for one in found] == [("msg_t2", "fast.example")]
        for choice in (Choice(only_hosts=()), Choice(busy_sites=("example",))):
            assert await deliveries.due(choice, limit=2) == []

    play(place, body)


def test_deliveries_are_listed_in_pages_by_state_and_task(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        for number in range(5):
            await scene.run(f"t{number}", terms=HOOK)
            await scene.settle(f"t{number}")
        for message in (await claimed(deliveries, "msg_t1", "msg_t3")).messages:
            await deliveries.settle(arrived(message))
        page = await deliveries.find(DeliveryQuery(limit=2))
        assert [one.task_id for one in page.deliveries] == ["t4", "t3"]
        page = await deliveries.find(DeliveryQuery(limit=3, before=page.next_before))
        assert [one.task_id for one in page.deliveries] == ["t2", "t1", "t0"]
        assert page.next_before is None
        done = await deliveries.find(DeliveryQuery(state=DeliveryState.DELIVERED))
        assert [one.task_id for one in done.deliveries] == ["t3", "t1"]
        one = await deliveries.find(DeliveryQuery(task_id="t2"))
        assert [found.id for found in one.deliveries] == ["msg_t2"]
        assert await deliveries.get("msg_t2") == one.deliveries[0]
        assert await deliveries.get("msg_t9") is None

    play(place, body)


def test_secrets_are_made_at_need_and_overlap_for_a_day(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        (first,) = await deliveries.secrets()
        assert first.secret.startswith("whsec_")
        assert await deliveries.secrets() == (first,)
        await scene.run("t1", terms=HOOK)
        await scene.settle("t1")
        assert (await claimed(deliveries)).secrets == (first.secret,)
        new, old = await deliveries.rotate()
        assert (old.secret, old.ends_at) == (first.secret, scene.clock() + 86_400)
        assert (new.secret != old.secret, new.ends_at) == (True, None)
        await scene.let_time_pass(31)
        assert (await claimed(deliveries)).secrets == (new.secret, old.secret)
        await scene.let_time_pass(86_400)
        assert await deliveries.secrets() == (new,)

    play(place, body)


def test_however_often_secrets_are_rotated_few_are_kept(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        made = []
        for _ in range(12):
            await scene.let_time_pass(1)
            made.append((await deliveries.rotate())[0])
        found = await deliveries.secrets()
        assert [one.secret for one in found] == [one.secret for one in reversed(made[-8:])]

    play(place, body)


def an_alert(percent: int, *, limit: int = 100, until: float | None = None) -> Alert:
    return Alert(
        message_id=f"msg_alert_{percent}_{limit}_{until}",
        scope="project:x",
        unit="tokens",
        percent=percent,
        limit=limit,
        until=until,
        body='{"percent":1}',
    )


def test_an_alert_is_filed_once_in_its_window(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        ends_at = scene.clock() + 100
        both = [an_alert(50, until=ends_at), an_alert(80, until=ends_at)]
        assert await deliveries.alert(both, URL) == 2
        assert await deliveries.alert(both, URL) == 0
        assert await deliveries.alert([an_alert(50, until=ends_at + 5)], URL) == 0
        await scene.let_time_pass(100)
        assert await deliveries.alert([an_alert(50, until=ends_at + 100)], URL) == 1
        assert await deliveries.alert([an_alert(50, limit=200, until=ends_at + 100)], URL) == 1
        for message in (await claimed(deliveries)).messages:
            assert (message.event, message.task_id) == ("budget.alert", "")
            assert await deliveries.body(message) == '{"percent":1}'

    play(place, body)


def test_an_alert_without_a_window_is_filed_once(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        assert await deliveries.alert([an_alert(100)], URL) == 1
        await scene.let_time_pass(10_000_000)
        assert await deliveries.alert([an_alert(100)], URL) == 0

    play(place, body)


def test_what_ended_is_forgotten_by_age_number_and_size(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "MAX_DELIVERED", 2)
    monkeypatch.setattr(deliveries, "MAX_DEAD", 3)
    monkeypatch.setattr(deliveries, "MAX_DEAD_BYTES", 250)
    # Shorter than usage rows are kept, which the audit at the end sums up.
    monkeypatch.setattr(deliveries, "DEAD_KEPT_SECONDS", 10 * 86_400.0)

    async def body(scene: Scene, deliveries: Deliveries) -> None:
        for number in range(8):
            await scene.run(f"t{number}", terms=HOOK)
            await scene.settle(f"t{number}")
            (message,) = (await claimed(deliveries)).messages
            outcome = (
                arrived(message) if number < 4 else failed(message, due_at=None, body="x" * 100)
            )
            await deliveries.settle(outcome)
            await scene.let_time_pass(1)
        await scene.run("t8", terms=HOOK)
        await scene.settle("t8")
        assert await deliveries.purge() == 4
        assert await deliveries.purge() == 0
        left = (await deliveries.find(DeliveryQuery())).deliveries
        assert [one.task_id for one in left] == ["t8", "t7", "t6", "t3", "t2"]
        await scene.let_time_pass(86_400)
        assert await deliveries.purge() == 2
        await scene.let_time_pass(10 * 86_400)
        assert await deliveries.purge() == 2
        assert (await only(deliveries)).state is DeliveryState.PENDING

    play(place, body)


def test_a_delivery_is_filed_with_the_end_or_not_at_all(place: Place) -> None:
    """The two are one transaction: a step that is undone leaves neither."""

    async def body(scene: Scene, deliveries: Deliveries) -> None:
        await scene.run("t1", terms=HOOK)
        assert await scene.is_stale(scene.settlement("t1", attempt=7))
        assert (await deliveries.find(DeliveryQuery())).deliveries == ()
        records = await scene.settle("t1")
        assert records[0].terms.callback_url == URL
        assert (await only(deliveries)).task_id == "t1"

    play(place, body)


def test_beyond_a_number_those_that_are_due_last_are_given_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "MAX_PENDING", 3)

    async def body(scene: Scene, deliveries: Deliveries) -> None:
        for number in range(5):
            await scene.run(f"t{number}", terms=HOOK)
            await scene.settle(f"t{number}")
        for message in (await claimed(deliveries, "msg_t1", "msg_t3")).messages:
            await deliveries.settle(failed(message, due_at=1e10))
        under_way = await claimed(deliveries, "msg_t4")
        assert await deliveries.purge() == 2
        found = {one.id: one for one in (await deliveries.find(DeliveryQuery())).deliveries}
        dead = {name for name, one in found.items() if one.state is DeliveryState.DEAD}
        assert dead == {"msg_t1", "msg_t3"}, "first tries come first"
        assert found["msg_t1"].error == TOO_MANY
        assert found["msg_t1"].ended_at is not None
        assert await deliveries.purge() == 0
        assert isinstance(await deliveries.redeliver("msg_t1"), Delivery)
        await deliveries.settle(arrived(under_way.messages[0]))

    play(place, body)


@pytest.mark.parametrize(
    ("bound", "state"),
    [
        ("MAX_PENDING", DeliveryState.PENDING),
        ("MAX_PENDING_BYTES", DeliveryState.PENDING),
        ("MAX_DEAD", DeliveryState.DEAD),
        ("MAX_DEAD_BYTES", DeliveryState.DEAD),
        ("MAX_DELIVERED", DeliveryState.DELIVERED),
    ],
)
def test_a_project_that_has_too_many_deliveries_loses_its_own(
    place: Place, bound: str, state: DeliveryState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, bound, 400 if "BYTES" in bound else 4)

    async def body(scene: Scene, deliveries: Deliveries) -> None:
        # The one of the honest project is the first that would have to go by time alone.
        projects = ["honest", *["hostile"] * 6]
        if state is DeliveryState.PENDING:
            projects.reverse()
        for number, project in enumerate(projects):
            await scene.run(f"{project}-{number}", project_id=project, terms=HOOK)
            await scene.settle(f"{project}-{number}")
            (message,) = (await claimed(deliveries)).messages
            due_at = 1e10 + number if state is DeliveryState.PENDING else None
            outcome = failed(message, due_at=due_at, body="x" * 100)
            is_sent = state is DeliveryState.DELIVERED
            await deliveries.settle(arrived(message) if is_sent else outcome)
            await scene.let_time_pass(1)
        assert await deliveries.purge() == 3
        left = (await deliveries.find(DeliveryQuery(state=state))).deliveries
        assert [one.task_id.split("-")[0] for one in left].count("honest") == 1
        assert len(left) == 4

    play(place, body)


@pytest.mark.parametrize(
    ("amounts", "most", "each"),
    [([], 5, 0), ([3], 5, 3), ([9], 5, 5), ([1, 9], 5, 4), ([9, 9], 5, 2), ([1, 2, 99], 9, 6)],
)
def test_those_that_have_most_keep_what_others_leave(
    amounts: list[int], most: int, each: int
) -> None:
    assert deliveries.level(amounts, most) == each


def test_beyond_a_size_those_that_are_due_last_are_given_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "MAX_PENDING_BYTES", 250)

    async def body(scene: Scene, deliveries: Deliveries) -> None:
        for number in range(4):
            await scene.run(f"t{number}", terms=HOOK)
            await scene.settle(f"t{number}")
            (message,) = (await claimed(deliveries)).messages
            await deliveries.settle(failed(message, due_at=1e10 + number, body="x" * 100))
        assert await deliveries.purge() == 2
        pending = await deliveries.find(DeliveryQuery(state=DeliveryState.PENDING))
        assert {one.id for one in pending.deliveries} == {"msg_t0", "msg_t1"}

    play(place, body)


def test_a_change_and_who_made_it_are_one_commit(place: Place) -> None:
    async def body(scene: Scene, deliveries: Deliveries) -> None:
        def entry(action: str) -> AuditEntry:
            return AuditEntry(actor=Actor(name="x"), action=action)

        await scene.run("t1", terms=HOOK)
        await scene.settle("t1")
        await deliveries.redeliver("msg_t1", entry("redeliver"))
        await deliveries.redeliver("msg_none", entry("of nothing"))
        await deliveries.rotate(entry("rotate"))
        await deliveries.secrets(entry("show"))
        rows = (await AuditLog(scene.store).page()).rows
        assert [row.action for row in rows] == ["show", "rotate", "redeliver"]

    play(place, body)
