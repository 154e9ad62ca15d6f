"""Tasks that are planned while they are being stored: sooner, and never against the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from engine.one_service import Service, dispatch_settings, play
from engine.simulated_work import always
from headgate.core.admission import QueueLimits
from headgate.core.dispatch_state import DispatchState
from headgate.core.gates import GateClosure
from headgate.core.idempotency import SubmitKey
from headgate.core.slots.slot import SlotStanding
from headgate.core.task import Submission, Task, TaskRecord, TaskStatus, Terms
from headgate.engine.engine import Engine, Submitted
from headgate.errors import LedgerUnavailableError, StoreUnavailableError
from headgate.storage.store import Assignment, NewTask, Queued, TurnedAway
from headgate.storage.writer import Fault

IDLE_SECONDS = 0.1
TASK = Task(id="tsk_new", project_id="x", target="")


def test_an_idle_service_plans_a_task_before_its_submit_is_answered() -> None:
    async def scenario(service: Service) -> None:
        await asyncio.sleep(IDLE_SECONDS)
        store = service.engine.store
        assign = store.assign
        submitting = asyncio.create_task(service.submit())
        had_answer: list[bool] = []

        async def watched(*args: object) -> object:
            had_answer.append(submitting.done())
            return await assign(*args)  # type: ignore[arg-type]

        store.assign = watched  # type: ignore[method-assign, assignment]
        record = await service.ended(await submitting)
        assert (record.task.status, record.progress.attempt) == (TaskStatus.DONE, 1)
        assert had_answer == [False]

    # In the order of a real loop: shuffled, the submit may be answered before the plan is made.
    play(scenario, seed=None)


def test_a_task_that_is_turned_away_leaves_nothing_behind() -> None:
    async def scenario(service: Service) -> None:
        await asyncio.sleep(IDLE_SECONDS)
        assert isinstance(await _submit(service.engine), TurnedAway)
        await asyncio.sleep(1)
        _has_nothing(service)

    play(scenario, limits=QueueLimits(max_queue=0, max_per_agent=None))


def test_a_task_that_the_store_never_got_leaves_nothing_behind() -> None:
    async def scenario(service: Service) -> None:
        await asyncio.sleep(IDLE_SECONDS)
        store = service.engine.store
        submit = store.submit

        def refused(_new: NewTask) -> None:
            raise LedgerUnavailableError("full")

        store.submit = refused  # type: ignore[method-assign, assignment]
        with pytest.raises(StoreUnavailableError):
            await _submit(service.engine)
        store.submit = submit  # type: ignore[method-assign]
        _has_nothing(service)

    play(scenario)


def test_a_task_whose_submit_failed_leaves_nothing_behind() -> None:
    async def scenario(service: Service) -> None:
        await asyncio.sleep(IDLE_SECONDS)
        faults = iter([Fault.REFUSED])
        service.fault = lambda: next(faults, None)
        with pytest.raises(StoreUnavailableError):
            await _submit(service.engine)
        await asyncio.sleep(3)
        _has_nothing(service)

    play(scenario, tick_seconds=1e6)


@pytest.mark.parametrize(
    ("task", "terms"),
    [
        (Task(id="tsk_new", not_before=5.0), Terms()),
        (TASK, Terms(depends_on=("tsk_parent",))),
    ],
)
def test_a_task_that_has_to_wait_for_something_is_not_planned_early(
    task: Task, terms: Terms
) -> None:
    dispatch_state = DispatchState(dispatch_settings())
    assert not dispatch_state.observe_early(task, terms, 1.0)
    assert not dispatch_state.waiting


def test_a_task_is_not_planned_early_while_others_wait() -> None:
    dispatch_state = DispatchState(dispatch_settings())
    dispatch_state.observe(TaskRecord(task=Task(id="tsk_old", project_id="x")), 1.0)
    assert not dispatch_state.observe_early(TASK, Terms(), 1.0)
    assert list(dispatch_state.waiting) == ["tsk_old"]


def test_a_task_is_planned_early_past_others_that_a_gate_holds() -> None:
    async def scenario(service: Service) -> None:
        hold = GateClosure(kind="slot", name="work", why="used up")
        closed = SlotStanding(name="work", provider="zai", closure=hold)
        service.engine.dispatcher.set_slots((closed,))
        await _submit(service.engine, id="tsk_held", slot="work")
        await asyncio.sleep(IDLE_SECONDS)
        asking = _submit(service.engine)
        assert list(_dispatch_state(service).waiting) == ["tsk_held", TASK.id], "it is expected"
        await asking
        await service.ended(TASK.id)
        assert service.ordered() == [TASK.id]

    play(scenario)


def test_an_id_that_waits_already_is_not_planned_early_again() -> None:
    async def scenario(service: Service) -> None:
        hold = GateClosure(kind="slot", name="work", why="used up")
        closed = SlotStanding(name="work", provider="zai", closure=hold)
        service.engine.dispatcher.set_slots((closed,))
        await _submit(service.engine, slot="work")
        known = _dispatch_state(service).waiting[TASK.id]
        await asyncio.sleep(IDLE_SECONDS)
        asking = _submit(service.engine, slot="work")
        assert _dispatch_state(service).waiting[TASK.id] is known
        await asking
        assert list(_dispatch_state(service).waiting) == [TASK.id]

    play(scenario)


def test_an_expected_task_is_given_a_slot_of_its_provider() -> None:
    async def scenario(service: Service) -> None:
        service.engine.dispatcher.set_slots((_slot("work", 80.0), _slot("home", 10.0)))
        await asyncio.sleep(IDLE_SECONDS)
        asking = _submit(service.engine, provider="zai")
        assert list(_dispatch_state(service).waiting) == [TASK.id], "it is expected"
        await asking
        record = await service.ended(TASK.id)
        assert (record.task.slot, record.progress.slot) == (None, "home")
        assert [order.slot for order in service.executor.orders] == ["home"]

    play(scenario, seed=None)


@pytest.mark.parametrize("fields", [{"slot": "work"}, {"provider": "zai"}])
def test_an_expected_task_waits_for_a_slot_that_is_closed(fields: dict[str, Any]) -> None:
    async def scenario(service: Service) -> None:
        hold = GateClosure(kind="slot", name="work", until=service.now() + 60, why="used up")
        closed = SlotStanding(name="work", provider="zai", closure=hold)
        service.engine.dispatcher.set_slots((closed,))
        await asyncio.sleep(IDLE_SECONDS)
        asking = _submit(service.engine, **fields)
        assert list(_dispatch_state(service).waiting) == [TASK.id], "it is expected"
        assert isinstance(await asking, Queued)
        await asyncio.sleep(5)
        assert (list(_dispatch_state(service).waiting), service.ordered()) == ([TASK.id], [])
        service.engine.dispatcher.set_slots((_slot("work", 0.0),))
        await service.ended(TASK.id)

    play(scenario)


@pytest.mark.parametrize("seed", range(5))
def test_a_task_that_is_cancelled_before_its_submit_is_answered_ends_once(seed: int) -> None:
    async def scenario(service: Service) -> None:
        await asyncio.sleep(IDLE_SECONDS)
        asking = _submit(service.engine)
        for _ in range(seed):
            await asyncio.sleep(0)
        await service.engine.cancel(TASK.id)
        await asking
        record = await service.ended(TASK.id)
        assert record.task.status is TaskStatus.CANCELLED
        await asyncio.sleep(1)
        assert (len(_dispatch_state(service).waiting), len(_dispatch_state(service).in_flight)) == (
            0,
            0,
        )
        assert len(service.ordered()) <= 1

    play(scenario, seed=seed)


@pytest.mark.parametrize("steps", range(8))
def test_a_client_that_hangs_up_hides_no_task_that_waits(steps: int) -> None:
    async def scenario(service: Service) -> None:
        await service.running(await service.submit())
        await asyncio.sleep(IDLE_SECONDS)
        asking = _submit(service.engine)
        assert list(_dispatch_state(service).waiting) == [TASK.id], (
            "it is expected, and has no place"
        )
        for _ in range(steps):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.sleep(1)
        is_stored = await service.engine.get(TASK.id) is not None
        assert (TASK.id in _dispatch_state(service).waiting) is is_stored
        await asyncio.sleep(30)
        assert (TASK.id in service.ordered()) is is_stored

    play(scenario, always(5.0), max_inflight=1, tick_seconds=1e6, seed=steps)


@pytest.mark.parametrize("seed", range(5))
def test_a_dispatcher_that_is_deposed_meanwhile_leaves_the_task_to_the_next_one(seed: int) -> None:
    async def scenario(service: Service) -> None:
        await asyncio.sleep(IDLE_SECONDS)
        asking = _submit(service.engine)
        for _ in range(seed):
            await asyncio.sleep(0)
        service.engine.dispatcher.step_down()
        await asking
        record = await service.ended(TASK.id, within_seconds=60)
        assert (record.progress.attempt, service.ordered()) == (1, [TASK.id])

    play(scenario, seed=seed)


def test_a_plan_of_an_old_epoch_costs_the_task_nothing() -> None:
    async def scenario(service: Service) -> None:
        await asyncio.sleep(IDLE_SECONDS)
        store, assign = service.engine.store, service.engine.store.assign

        async def stale(epoch: int, lines: Sequence[Assignment]) -> object:
            store.assign = assign  # type: ignore[method-assign]
            return await assign(epoch - 1, lines)

        store.assign = stale  # type: ignore[method-assign, assignment]
        assert isinstance(await _submit(service.engine), Queued)
        record = await service.ended(TASK.id, within_seconds=60)
        assert (record.progress.attempt, service.ordered()) == (1, [TASK.id])

    play(scenario, seed=None)


def test_an_id_that_has_run_is_not_run_again() -> None:
    async def scenario(service: Service) -> None:
        await asyncio.sleep(IDLE_SECONDS)
        await _submit(service.engine)
        await service.ended(TASK.id)
        await asyncio.sleep(IDLE_SECONDS)
        again = await _submit(service.engine)
        assert isinstance(again, Queued)
        assert again.record.task.status is TaskStatus.DONE
        await asyncio.sleep(1)
        assert service.ordered() == [TASK.id]
        assert (len(_dispatch_state(service).waiting), len(_dispatch_state(service).in_flight)) == (
            0,
            0,
        )

    play(scenario)


def test_a_task_that_is_on_its_way_is_not_overtaken() -> None:
    async def scenario(service: Service) -> None:
        await asyncio.sleep(IDLE_SECONDS)
        engine, created_at = service.engine, service.now()
        first = Task(id="tsk_first", project_id="x", target="", created_at=created_at)
        key = SubmitKey(owner="", name="k", digest="d")
        keyed = engine.submit_keyed(key, [(first, Terms(), Submission(action="work"))])
        second = _submit(engine, created_at=created_at + 0.001)
        await asyncio.gather(keyed, second)
        await service.ended(TASK.id)
        assert service.ordered() == ["tsk_first", TASK.id]

    # In the order of a real loop: shuffled, answers come one after the other.
    play(scenario, max_inflight=1, seed=None)


def test_of_tasks_that_come_together_the_most_urgent_starts_first() -> None:
    async def scenario(service: Service) -> None:
        await asyncio.sleep(IDLE_SECONDS)
        engine = service.engine
        asking = [_submit(engine, id=f"tsk_{one}", priority=one) for one in (3, 1, 2)]
        await asyncio.gather(*asking)
        for one in (1, 2, 3):
            await service.ended(f"tsk_{one}")
        assert service.ordered() == ["tsk_1", "tsk_2", "tsk_3"]

    # In the order of a real loop: shuffled, answers come one after the other.
    play(scenario, max_inflight=1, seed=None)


def test_a_task_that_waits_is_known_as_it_was_stored() -> None:
    async def scenario(service: Service) -> None:
        await service.running(await service.submit())
        await asyncio.sleep(IDLE_SECONDS)
        dispatch_state = _dispatch_state(service)
        dispatch_state.tick -= 5
        asking = _submit(service.engine)
        assert dispatch_state.waiting[TASK.id].task.enqueued_tick == dispatch_state.tick
        answer = await asking
        assert isinstance(answer, Queued)
        # The dispatch state and the caller are both told of the answer, in either order.
        await asyncio.sleep(IDLE_SECONDS)
        assert dispatch_state.waiting[TASK.id].task == answer.record.task
        assert answer.record.task.enqueued_tick > dispatch_state.tick

    play(scenario, always(5.0), max_inflight=1)


def _slot(name: str, percent: float) -> SlotStanding:
    return SlotStanding(name=name, provider="zai", percent_used=percent)


def _dispatch_state(service: Service) -> DispatchState:
    dispatch_state = service.engine.dispatcher.dispatch_state
    assert dispatch_state is not None
    return dispatch_state


def _new(task: Task, terms: Terms) -> NewTask:
    limits = QueueLimits(max_queue=None, max_per_agent=None)
    return NewTask(task=task, terms=terms, submission=Submission(), limits=limits, node_id="n")


def _submit(engine: Engine, **fields: Any) -> asyncio.Future[Submitted]:
    task = msgspec.structs.replace(TASK, **fields)
    return engine.submit(task, Terms(), Submission(action="work"))


def _has_nothing(service: Service) -> None:
    dispatch_state = _dispatch_state(service)
    assert (len(dispatch_state.waiting), len(dispatch_state.in_flight)) == (0, 0)
    assert not service.executor.orders
