"""The task runner: each attempt has its own end, and whatever that is, it is settled once."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import msgspec
import pytest
from structlog.testing import capture_logs

from engine.one_service import Service, play
from engine.simulated_work import DONE, FOREVER_SECONDS, always, in_turn
from headgate.core.budgets.ledger import Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.lifecycle import Failed, Limited, Outcome, Succeeded, Usage
from headgate.core.money import Tokens
from headgate.core.task import TaskRecord, TaskStatus
from headgate.engine.task_runner import SETTLE_SECONDS
from headgate.executors.executor import WorkOrder
from headgate.storage.writer import Fault

BROKEN = Failed(error="it broke", is_transient=True)


def test_a_task_is_done_with_its_result_and_its_cost() -> None:
    result = msgspec.Raw(b'{"ok":true}')
    outcome = Succeeded(result=result, usage=Usage(tokens=7, micro_usd=5))

    async def scenario(service: Service) -> TaskRecord:
        return await service.ended(await service.submit())

    record = play(scenario, always(1.0, outcome))
    assert record.task.status is TaskStatus.DONE
    assert (record.result, record.tokens, record.micro_usd) == (bytes(result).decode(), 7, 5)


def test_usage_in_an_unknown_shape_is_logged_once_for_a_target() -> None:
    outcome = Succeeded(result=msgspec.Raw(b'{"usage":{"units":7}}'))

    async def scenario(service: Service) -> list[TaskRecord]:
        return [await service.ended(await service.submit()) for _ in range(2)]

    with capture_logs() as lines:
        records = play(scenario, always(1.0, outcome))
    told = [line for line in lines if line["event"] == "usage in an unknown shape"]
    assert [line["task_id"] for line in told] == [records[0].task.id]
    assert [record.tokens for record in records] == [100, 100], "what was reserved is booked"


def test_a_task_that_is_submitted_to_an_idle_service_starts_at_once() -> None:
    async def scenario(service: Service) -> float:
        started = service.now()
        await service.ended(await service.submit())
        return service.now() - started

    assert play(scenario, always(0.0)) <= 0.1


@pytest.mark.parametrize("stop_seconds", [0.0, 0.5])
def test_a_task_that_runs_past_its_deadline_is_stopped_and_failed(stop_seconds: float) -> None:
    async def scenario(service: Service) -> tuple[TaskRecord, float]:
        started = service.now()
        record = await service.ended(await service.submit(deadline=started + 5))
        assert service.executor.stopped == [record.task.id]
        return record, service.now() - started

    record, seconds = play(scenario, always(FOREVER_SECONDS), stop_seconds=stop_seconds)
    assert record.task.status is TaskStatus.FAILED
    assert record.error == "deadline exceeded while running"
    assert record.tokens == 100, "what nobody knows is booked as reserved"
    assert 5 <= seconds <= 5.2 + stop_seconds


def test_the_deadline_counts_from_the_submission_not_from_the_attempt() -> None:
    async def scenario(service: Service) -> tuple[TaskRecord, float]:
        started = service.now()
        task_id = await service.submit(deadline=started + 10, max_attempts=9)
        return await service.ended(task_id), service.now() - started

    record, seconds = play(scenario, in_turn((4.0, BROKEN), (FOREVER_SECONDS, DONE)))
    assert record.error == "deadline exceeded while running"
    assert seconds <= 10.2


def test_cancelling_a_running_task_waits_for_its_executor_and_settles_once() -> None:
    async def scenario(service: Service) -> TaskRecord | None:
        task_id = await service.submit()
        await service.running(task_id)
        started = service.now()
        record = await service.engine.cancel(task_id)
        assert 2.0 <= service.now() - started <= 2.2
        assert service.executor.stopped == [task_id]
        assert (await service.engine.totals()).cancelled == 1
        return record

    record = play(scenario, always(FOREVER_SECONDS), stop_seconds=2.0)
    assert record is not None
    assert record.task.status is TaskStatus.CANCELLED
    assert record.tokens == 100, "unknown usage is assumed, never zero"


def test_two_cancels_of_a_running_task_have_one_effect() -> None:
    async def scenario(service: Service) -> None:
        task_id = await service.submit()
        await service.running(task_id)
        both = await asyncio.gather(service.engine.cancel(task_id), service.engine.cancel(task_id))
        assert [record and record.task.status for record in both] == [TaskStatus.CANCELLED] * 2
        assert service.executor.stopped == [task_id]

    play(scenario, always(FOREVER_SECONDS), stop_seconds=1.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_cancel_at_the_moment_of_the_start_settles_all_the_same(seed: int) -> None:
    """Whether the attempt has begun or not."""

    async def scenario(service: Service) -> TaskRecord | None:
        task_id = await service.submit()
        for _ in range(seed):
            await asyncio.sleep(0)
        return await service.engine.cancel(task_id)

    record = play(scenario, always(FOREVER_SECONDS), seed=seed)
    assert record is not None
    assert record.task.status is TaskStatus.CANCELLED


def test_an_attempt_that_is_cancelled_before_its_first_step_never_begins() -> None:
    async def scenario(service: Service) -> TaskRecord:
        runner = service.engine.runner
        start = runner.start

        def start_and_cancel(record: TaskRecord) -> None:
            start(record)
            assert runner.cancel(record.task.id)

        service.engine.dispatcher._start = start_and_cancel
        return await service.ended(await service.submit())

    record = play(scenario, always(FOREVER_SECONDS))
    assert (record.task.status, record.tokens) == (TaskStatus.CANCELLED, 0)


def test_an_attempt_that_somebody_wanted_cancelled_before_it_came_here_never_begins() -> None:
    async def scenario(service: Service) -> TaskRecord:
        start = service.engine.runner.start

        def start_cancelled(record: TaskRecord) -> None:
            progress = msgspec.structs.replace(record.progress, cancel_requested=True)
            start(msgspec.structs.replace(record, progress=progress))

        service.engine.dispatcher._start = start_cancelled
        record = await service.ended(await service.submit())
        assert service.ordered() == []
        return record

    assert play(scenario).task.status is TaskStatus.CANCELLED


def test_transient_failures_are_tried_again_with_growing_pauses_until_attempts_run_out() -> None:
    times: list[float] = []

    async def scenario(service: Service) -> TaskRecord:
        def work(_order: WorkOrder) -> tuple[float, Outcome]:
            times.append(service.now())
            return 0.0, BROKEN

        service.executor.work = work
        return await service.ended(await service.submit(max_attempts=4))

    record = play(scenario)
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert (record.task.status, record.error, len(times)) == (TaskStatus.FAILED, "it broke", 4)
    for pause, longest in zip(pauses, (1.0, 2.0, 4.0), strict=True):
        assert longest / 2 <= pause <= longest + 0.1


def test_a_task_that_succeeds_at_the_second_try_is_done() -> None:
    async def scenario(service: Service) -> TaskRecord:
        return await service.ended(await service.submit(max_attempts=2))

    record = play(scenario, in_turn((0.5, BROKEN), (0.5, DONE)))
    assert (record.task.status, record.progress.attempt) == (TaskStatus.DONE, 2)


def test_a_failure_that_will_not_go_away_is_not_tried_again() -> None:
    async def scenario(service: Service) -> TaskRecord:
        return await service.ended(await service.submit(max_attempts=9))

    record = play(scenario, always(0.5, Failed(error="it is wrong")))
    assert (record.error, record.progress.attempt) == ("it is wrong", 1)


@pytest.mark.parametrize(
    ("mine", "other_on_it", "other_elsewhere"),
    [
        ({"target": "t"}, {"target": "t"}, {"target": "u"}),
        ({"target": "t", "slot": "s"}, {"target": "u", "slot": "s"}, {"target": "t"}),
    ],
)
def test_a_providers_429_pauses_its_target_or_slot_and_costs_no_attempt(
    mine: dict[str, str], other_on_it: dict[str, str], other_elsewhere: dict[str, str]
) -> None:
    async def scenario(service: Service) -> TaskRecord:
        limited = await service.submit(max_attempts=1, **mine)
        await asyncio.sleep(1.0)
        held = await service.submit(**other_on_it)
        free = await service.submit(**other_elsewhere)
        assert (await service.ended(free, within_seconds=2)).task.status is TaskStatus.DONE
        why = await service.engine.why(held)
        assert why is not None
        (reason,) = why.reasons
        assert reason.until == pytest.approx(service.now(), abs=30)
        assert held not in service.ordered()
        started = service.now()
        await service.ended(held)
        assert 26 <= service.now() - started <= 30
        return await service.ended(limited)

    outcome = Limited(retry_after_seconds=30.0, slot=mine.get("slot"))
    record = play(scenario, in_turn((0.5, outcome), (0.5, DONE)))
    assert (record.task.status, record.progress.failures) == (TaskStatus.DONE, 0)


def test_a_slot_that_a_task_names_is_not_closed_by_what_its_target_says() -> None:
    async def scenario(service: Service) -> None:
        limited = await service.submit(target="t", slot="s")
        await asyncio.sleep(1.0)
        (closure,) = await service.engine.closures()
        assert (closure.kind, closure.name, closure.cause) == ("target", "t", "target")
        free = await service.submit(target="u", slot="s")
        assert (await service.ended(free, within_seconds=2)).task.status is TaskStatus.DONE
        await service.ended(limited)

    outcome = Limited(retry_after_seconds=30.0)
    play(scenario, in_turn((0.5, outcome), (0.5, DONE)))


def test_what_a_rate_limited_attempt_held_is_given_back() -> None:
    budgets = {Scope("session:s"): Limit(limit_tokens=Tokens(100))}

    async def scenario(service: Service) -> TaskRecord:
        return await service.ended(await service.submit(scopes=("session:s",)))

    outcome = Limited(retry_after_seconds=3.0)
    record = play(scenario, in_turn((0.5, outcome), (0.5, DONE)), budgets=budgets)
    assert record.task.status is TaskStatus.DONE


def test_an_executor_with_a_fault_fails_its_task_and_nothing_else() -> None:
    def broken(_order: WorkOrder) -> tuple[float, Outcome]:
        raise LookupError("a fault of its own")

    async def scenario(service: Service) -> TaskRecord:
        return await service.ended(await service.submit(max_attempts=5))

    record = play(scenario, broken)
    assert record.error == "the executor failed: LookupError: a fault of its own"


def test_a_result_that_is_too_large_fails_its_task_and_is_still_paid_for() -> None:
    outcome = Succeeded(result=msgspec.Raw(b'"' + b"x" * 99 + b'"'), usage=Usage(tokens=7))

    async def scenario(service: Service) -> TaskRecord:
        return await service.ended(await service.submit())

    record = play(scenario, always(0.1, outcome), max_result_bytes=100)
    assert (record.error, record.tokens) == ("result is larger than 100 bytes", 7)


def test_a_target_that_nobody_else_could_know_fails_its_task_and_costs_nothing() -> None:
    async def scenario(service: Service) -> TaskRecord:
        service.engine.store.is_shared = False  # type: ignore[misc]
        return await service.ended(await service.submit(target="gone"))

    record = play(scenario)
    assert record.error == "target 'gone' is not configured on this node"
    assert (record.tokens, record.micro_usd) == (0, 0)


def test_a_stop_lets_short_work_finish_and_queues_long_work_again() -> None:
    async def scenario(service: Service) -> None:
        short = await service.submit()
        await service.running(short)
        service.executor.work = always(FOREVER_SECONDS)
        long = await service.submit()
        await service.running(long)
        engine = service.engine
        service.engines.remove(engine)
        await engine.stop(drain_seconds=5.0)
        service.engine = service.new_engine()
        await service.engine.store.open()
        assert (await service.get(short)).task.status is TaskStatus.DONE
        again = await service.get(long)
        assert (again.task.status, again.progress.losses) == (TaskStatus.QUEUED, 1)
        service.executor.work = always(1.0)
        await service.engine.start()
        assert (await service.ended(long)).task.status is TaskStatus.DONE

    play(scenario, always(2.0))


@pytest.mark.parametrize("stop_seconds", [1.0, FOREVER_SECONDS])
def test_work_that_will_not_stop_is_left_behind_and_taken_back(stop_seconds: float) -> None:
    async def scenario(service: Service) -> bool:
        task_id = await service.submit()
        await service.running(task_id)
        engine = service.engine
        service.engines.remove(engine)
        started = service.now()
        await engine.stop(drain_seconds=1.0)
        assert service.now() - started <= 1.0 + SETTLE_SECONDS + 1.0
        service.executor.work = always(1.0)
        service.engine = service.new_engine()
        await service.engine.start()
        record = await service.ended(task_id)
        assert (record.task.status, record.progress.losses) == (TaskStatus.DONE, 1)
        return engine.runner.has_left_behind

    has_left_behind = play(scenario, always(FOREVER_SECONDS), stop_seconds=stop_seconds)
    assert has_left_behind == (stop_seconds == FOREVER_SECONDS)


def test_a_settlement_is_offered_until_the_store_takes_it() -> None:
    async def scenario(service: Service) -> TaskRecord:
        task_id = await service.submit()
        await service.running(task_id)
        service.fault = lambda: Fault.REFUSED
        await asyncio.sleep(6.0)
        service.fault = lambda: None
        record = await service.ended(task_id)
        assert service.ordered() == [task_id]
        return record

    record = play(scenario, always(1.0), node_lease_seconds=60.0)
    assert (record.task.status, record.progress.attempt) == (TaskStatus.DONE, 1)


def test_a_stop_with_a_store_that_is_gone_comes_to_an_end() -> None:
    async def scenario(service: Service) -> float:
        await service.running(await service.submit())
        service.fault = lambda: Fault.REFUSED
        started = service.now()
        service.engines.remove(service.engine)
        await service.engine.stop(drain_seconds=1.0)
        service.fault = lambda: None
        return service.now() - started

    assert play(scenario, always(FOREVER_SECONDS)) <= 30
