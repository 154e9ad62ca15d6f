"""The spend over time is what was booked for tasks: every attempt once, however it ended."""

from __future__ import annotations

import asyncio

import pytest

from engine.one_service import LOOK_SECONDS, Service, play
from engine.simulated_work import FOREVER_SECONDS, always, in_turn
from headgate.core.lifecycle import Failed, Outcome, RetryPolicy, Succeeded, Usage
from headgate.core.retries import Backoff
from headgate.core.task import Progress, Task, TaskRecord, TaskStatus
from headgate.engine.engine import Engine
from headgate.engine.events import EventFeed
from headgate.testing import Host

COST = 70_000
AGAIN = Failed(error="again", is_transient=True)
PATIENT = RetryPolicy(backoff=Backoff(base_seconds=60.0))


def spent(engine: Engine) -> int:
    """Return the sum of all steps, the one under way included."""
    engine.history.run_once()
    return sum(step.spent_micro_usd for step in engine.history.hour)


async def until_it_waits_again(service: Service, task_id: str) -> None:
    async with asyncio.timeout(60.0):
        while (await service.get(task_id)).progress.failures == 0:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)


async def charted_and_booked(service: Service, *task_ids: str) -> tuple[int, int]:
    records = [await service.get(task_id) for task_id in task_ids]
    return spent(service.engine), sum(one.progress.used_micro_usd for one in records)


@pytest.mark.parametrize(
    ("outcome", "micro_usd"),
    [
        (Succeeded(usage=Usage(micro_usd=30)), 30),
        (Failed(error="it broke", usage=Usage(micro_usd=30)), 30),
        (Succeeded(usage=Usage(micro_usd=0)), 0),
    ],
)
def test_what_an_end_books_is_charted(outcome: Outcome, micro_usd: int) -> None:
    async def scenario(service: Service) -> tuple[int, int]:
        task_id = await service.submit()
        await service.ended(task_id)
        return await charted_and_booked(service, task_id)

    assert play(scenario, always(1.0, outcome)) == (micro_usd, micro_usd)


def test_work_that_is_cancelled_is_charted_at_what_was_held() -> None:
    async def scenario(service: Service) -> tuple[int, int]:
        task_id = await service.submit(cost_micro_usd=COST)
        await service.running(task_id)
        await service.engine.cancel_soon(task_id)
        await service.ended(task_id)
        return await charted_and_booked(service, task_id)

    assert play(scenario, always(FOREVER_SECONDS)) == (COST, COST)


def test_an_attempt_is_charted_when_it_ends_and_not_again_with_its_task() -> None:
    async def scenario(service: Service) -> list[tuple[int, int]]:
        task_id = await service.submit(cost_micro_usd=COST, max_attempts=3)
        await until_it_waits_again(service, task_id)
        waiting = await charted_and_booked(service, task_id)
        await service.ended(task_id)
        return [waiting, await charted_and_booked(service, task_id)]

    work = in_turn((1.0, AGAIN), (1.0, AGAIN), (1.0, Succeeded()))
    assert play(scenario, work) == [(COST, COST), (3 * COST, 3 * COST)]


def test_a_retry_that_is_cancelled_while_it_waits_costs_nothing_more() -> None:
    async def scenario(service: Service) -> tuple[int, int]:
        task_id = await service.submit(cost_micro_usd=COST, max_attempts=3)
        await until_it_waits_again(service, task_id)
        await service.engine.cancel_soon(task_id)
        await service.ended(task_id)
        return await charted_and_booked(service, task_id)

    assert play(scenario, always(1.0, AGAIN)) == (COST, COST)


def test_a_node_that_takes_over_charts_what_is_booked_from_then_on() -> None:
    """One task waits for its next attempt then, and one is in it."""

    async def scenario(service: Service) -> tuple[int, int]:
        first, other = service.engine, await service.start_another()
        cancelled = await service.submit(cost_micro_usd=COST, max_attempts=3)
        goes_on = await service.submit(cost_micro_usd=COST, max_attempts=3)
        await until_it_waits_again(service, cancelled)
        await until_it_waits_again(service, goes_on)
        service.engines.remove(first)
        await first.stop(drain_seconds=0.0)
        service.engine = other
        while other.dispatcher.dispatch_state is None:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        _, before = await charted_and_booked(service, cancelled, goes_on)
        await other.cancel_soon(cancelled)
        await service.ended(goes_on)
        charted, booked = await charted_and_booked(service, cancelled, goes_on)
        assert before == 2 * COST
        return charted, booked - before

    work = in_turn((1.0, AGAIN), (1.0, AGAIN), (3.0, Succeeded()))
    assert play(scenario, work, policy=PATIENT) == (COST, COST)


def test_a_task_of_a_lost_node_is_charted_once() -> None:
    async def scenario(service: Service) -> tuple[int, int]:
        host = Host(service.loop, "other")
        service.engines.remove(await service.start_another(host))
        await asyncio.sleep(2)
        tasks = [await service.submit(cost_micro_usd=COST) for _ in range(4)]
        await asyncio.sleep(1)
        host.crash()
        for task_id in tasks:
            await service.ended(task_id)
        return await charted_and_booked(service, *tasks)

    charted, booked = play(scenario, always(5.0), capacity=3, node_lease_seconds=10.0)
    assert charted == booked > 4 * COST


def record(status: TaskStatus, attempt: int, *, used: int, last: int = 0) -> TaskRecord:
    return TaskRecord(
        task=Task(id="t", project_id="p", status=status, created_at=1.0),
        progress=Progress(attempt=attempt, used_micro_usd=used),
        micro_usd=last,
    )


QUEUED, RUNNING, CANCELLED = TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.CANCELLED
FIRST_SEEN: list[tuple[str, TaskRecord | None, TaskRecord, int]] = [
    ("loaded in flight", record(RUNNING, 2, used=5), record(CANCELLED, 2, used=8, last=3), 3),
    ("loaded in the queue", record(QUEUED, 1, used=5), record(CANCELLED, 1, used=5, last=5), 0),
    ("loaded, then started", record(QUEUED, 1, used=5), record(RUNNING, 2, used=5, last=5), 0),
    ("missed between two attempts", record(RUNNING, 1, used=0), record(RUNNING, 2, used=4), 4),
    ("never seen, in flight", None, record(RUNNING, 2, used=5, last=5), 0),
    ("never seen, tried again", None, record(QUEUED, 2, used=5, last=3), 3),
]


@pytest.mark.parametrize(("case", "loaded", "seen", "booked"), FIRST_SEEN)
def test_an_event_tells_what_was_booked_since_the_task_was_last_looked_at(
    case: str, loaded: TaskRecord | None, seen: TaskRecord, booked: int
) -> None:
    feed = EventFeed(lambda: 1.0)
    feed.open(1)
    if loaded is not None:
        feed.load((loaded,))
    feed.observe((seen,))
    assert [one.booked_micro_usd for one in feed.since(feed.first)] == [booked]
