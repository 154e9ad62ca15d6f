"""The feed tells every change of a task once and in order, whatever comes twice, late or never."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.one_service import Service, play
from engine.simulated_work import DONE, FOREVER_SECONDS, always, in_turn
from headgate.core.admission import QueueLimits
from headgate.core.events import MAX_ERROR_CHARACTERS, EventKind, TaskEvent
from headgate.core.lifecycle import Failed, Limited
from headgate.core.task import Progress, Submission, Task, TaskRecord, TaskStatus, Terms
from headgate.engine import events
from headgate.engine.engine import Engine
from headgate.engine.events import EventFeed, event_of
from headgate.errors import NotDispatchingError
from headgate.storage.store import TurnedAway
from headgate.storage.writer import Fault

NOW = 1_000.0
QUEUED, RUNNING, DONE_ = TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.DONE


def record(
    task_id: str, status: TaskStatus, attempt: int = 0, *, error: str | None = None
) -> TaskRecord:
    return TaskRecord(
        task=Task(id=task_id, agent_id="a", project_id="p", status=status, created_at=NOW),
        progress=Progress(attempt=attempt, started_at=NOW + 1, completed_at=NOW + 2),
        error=error,
    )


def open_feed(size: int = 100) -> EventFeed:
    feed = EventFeed(lambda: NOW, size=size)
    feed.open(1)
    return feed


def told(feed: EventFeed) -> list[str]:
    return [f"{one.task_id} {one.kind.value}" for one in feed.since(feed.first)]


def test_an_event_has_the_fields_that_clients_rely_on() -> None:
    feed = open_feed()
    feed.observe([record("t", TaskStatus.FAILED, 2, error="it broke")])
    (happening,) = feed.since(feed.first)
    event = event_of(happening, feed.event_id(1))
    assert event == TaskEvent(
        id=f"{feed.life}-1",
        kind=EventKind.FAILED,
        time=event.time,
        task_id="t",
        agent_id="a",
        project_id="p",
        state=TaskStatus.FAILED,
        attempt=2,
        error="it broke",
    )
    assert event.time.timestamp() == NOW + 2


WAYS = [
    (QUEUED, 0, "task.queued"),
    (TaskStatus.ASSIGNED, 1, "task.running"),
    (RUNNING, 1, "task.running"),
    (QUEUED, 1, "task.retrying"),
    (DONE_, 1, "task.completed"),
    (TaskStatus.FAILED, 1, "task.failed"),
    (TaskStatus.CANCELLED, 0, "task.cancelled"),
    (TaskStatus.REJECTED, 0, "task.rejected"),
]


@pytest.mark.parametrize(("status", "attempt", "kind"), WAYS)
def test_every_state_has_its_name(status: TaskStatus, attempt: int, kind: str) -> None:
    feed = open_feed()
    feed.observe([record("t", status, attempt)])
    assert told(feed) == [f"t {kind}"]


def test_to_be_assigned_and_to_run_is_one_event() -> None:
    feed = open_feed()
    feed.observe([record("t", TaskStatus.ASSIGNED, 1), record("t", RUNNING, 1)])
    assert told(feed) == ["t task.running"]


def test_nothing_is_kept_of_a_long_error() -> None:
    feed = open_feed()
    feed.observe([record("t", TaskStatus.FAILED, 1, error="x" * 10_000)])
    (happening,) = feed.since(1)
    assert len(happening.error or "") == MAX_ERROR_CHARACTERS


def test_a_feed_that_is_closed_sees_nothing() -> None:
    feed = EventFeed(lambda: NOW)
    feed.observe([record("t", QUEUED)])
    assert (told(feed), feed.is_open) == ([], False)


STEPS = [(QUEUED, 0), (RUNNING, 1), (QUEUED, 1), (RUNNING, 2), (DONE_, 2)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, len(STEPS) - 1)), max_size=60))
def test_each_step_is_told_once_and_in_order_whatever_comes_late_or_twice(
    shown: list[tuple[int, int]],
) -> None:
    feed = open_feed()
    furthest: dict[str, int] = {}
    expected: list[tuple[str, int]] = []
    for number, step in shown:
        task_id = f"t{number}"
        feed.observe([record(task_id, *STEPS[step])])
        if step > furthest.get(task_id, -1):
            furthest[task_id] = step
            expected.append((task_id, step))
    found = [(one.task_id, STEPS.index((one.status, one.attempt))) for one in feed.since(1)]
    assert found == expected


@settings(deadline=None)
@given(
    size=st.integers(1, 12),
    events=st.integers(0, 40),
    seen=st.integers(0, 45),
    lives=st.integers(0, 2),
)
def test_whoever_resumes_gets_exactly_what_came_after_or_is_told_that_some_is_missing(
    size: int, events: int, seen: int, lives: int
) -> None:
    feed = open_feed(size)
    for _ in range(lives):
        feed.observe([record("old", QUEUED)])
        feed.start_anew(lambda _task_id: False)
    before = feed.next - 1
    feed.observe([record(f"t{n}", QUEUED) for n in range(events)])
    place = feed.position_after(feed.event_id(before + seen))
    is_there = seen <= events and events - seen <= size
    assert (place is not None) == is_there
    if place is not None:
        assert [one.task_id for one in feed.since(place)] == [f"t{n}" for n in range(seen, events)]


@pytest.mark.parametrize(
    "sent", ["", "-", "x", "1-1", "{life}-", "{life}-x", "{life}--1", "{life}-9" * 30, "{life}-٣"]
)
def test_an_id_that_was_never_given_resumes_nothing(sent: str) -> None:
    feed = open_feed()
    feed.observe([record("t", QUEUED)])
    assert feed.position_after(sent.replace("{life}", feed.life)) is None


def test_a_new_life_begins_with_an_empty_ring_and_another_name() -> None:
    feed = open_feed()
    feed.observe([record("t", QUEUED)])
    last = feed.event_id(1)
    feed.start_anew(lambda _task_id: True)
    assert (told(feed), feed.position_after(last)) == ([], None)
    feed.observe([record("t", QUEUED), record("t", RUNNING, 1)])
    assert told(feed) == ["t task.running"]


def test_what_is_remembered_of_tasks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_ENDED", 3)
    feed = open_feed()
    for n in range(10):
        feed.observe([record(f"t{n}", QUEUED), record(f"t{n}", DONE_, 1)])
    assert len(feed._ranks) == 3
    feed.observe([record("waits", QUEUED)])
    feed.forget("waits")
    feed.start_anew(lambda _task_id: False)
    assert len(feed._ranks) == 3


async def test_whoever_waits_is_woken_and_others_cost_nothing() -> None:
    feed = open_feed()
    waiting = asyncio.create_task(feed.wait())
    await asyncio.sleep(0)
    feed.observe([record("t", QUEUED)])
    async with asyncio.timeout(30):
        await waiting
    again = asyncio.create_task(feed.wait())
    await asyncio.sleep(0)
    assert not again.done()
    feed.close()
    async with asyncio.timeout(30):
        await again


def story(engine: Engine, task_id: str) -> list[str]:
    feed = engine.feed
    kinds = [one.kind.value for one in feed.since(feed.first) if one.task_id == task_id]
    return [kind.removeprefix("task.") for kind in kinds]


def test_the_whole_way_of_a_task_is_told_with_its_retries() -> None:
    async def scenario(service: Service) -> None:
        task_id = await service.submit(max_attempts=3)
        await service.ended(task_id)
        assert story(service.engine, task_id) == [
            "queued", "running", "retrying", "running", "retrying", "running", "completed",
        ]  # fmt: skip

    fails = Failed(error="broken", is_transient=True)
    limited = Limited(retry_after_seconds=2.0)
    play(scenario, in_turn((1.0, fails), (1.0, limited), (1.0, DONE)))


def test_the_end_of_a_task_without_a_run_is_told_too() -> None:
    async def scenario(service: Service) -> None:
        blocker = await service.submit()
        await service.running(blocker)
        cancelled = await service.submit()
        expired = await service.submit(deadline=service.now() + 3)
        child = await service.submit(depends_on=(expired,))
        await service.engine.cancel(cancelled)
        await service.ended(child)
        assert story(service.engine, cancelled) == ["queued", "cancelled"]
        assert story(service.engine, expired) == ["queued", "failed"]
        assert story(service.engine, child) == ["queued", "failed"]

    play(scenario, always(FOREVER_SECONDS), max_inflight=1)


def test_a_task_that_is_turned_away_is_told_as_rejected_on_every_node() -> None:
    async def scenario(service: Service) -> None:
        other = await service.start_another()
        rejected = []
        for engine in (service.engine, other):
            task = Task(created_at=service.now(), project_id="x", target="")
            answer = await engine.submit(task, Terms(), Submission(action="work"))
            assert isinstance(answer, TurnedAway)
            rejected.append(answer.record.task.id)
        await asyncio.sleep(5)
        assert [story(service.engine, task_id) for task_id in rejected] == [["rejected"]] * 2

    play(scenario, limits=QueueLimits(max_queue=0, max_per_agent=None))


def test_the_dispatcher_tells_what_happens_on_other_nodes_and_they_send_clients_to_it() -> None:
    async def scenario(service: Service) -> None:
        other = await service.start_another()
        tasks = [await service.submit() for _ in range(6)]
        for task_id in tasks:
            await service.ended(task_id)
        await asyncio.sleep(5)
        assert set(tasks) - set(service.ordered())
        for task_id in tasks:
            assert story(service.engine, task_id) == ["queued", "running", "completed"]
        assert service.engine.events() is service.engine.feed
        with pytest.raises(NotDispatchingError):
            other.events()

    play(scenario, always(1.0), capacity=2)


def test_after_an_outage_listeners_are_told_to_look_again() -> None:
    async def scenario(service: Service) -> None:
        feed = service.engine.feed
        task_id = await service.submit()
        last = feed.event_id(feed.next - 1)
        service.fault = lambda: Fault.REFUSED
        await asyncio.sleep(20)
        service.fault = lambda: None
        await service.ended(task_id)
        assert feed.position_after(last) is None

    play(scenario, always(5.0))


def test_a_node_that_dispatches_no_more_ends_its_feed() -> None:
    async def scenario(service: Service) -> None:
        engine = service.engine
        life = engine.feed.life
        await engine.node.end()
        assert (engine.feed.is_open, engine.feed.life != life) == (False, True)

    play(scenario)
