"""The dispatcher: what runs next, what has to wait and why, and what can never run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from engine.one_service import Service, play
from engine.simulated_work import DONE, FOREVER_SECONDS, always, in_turn
from headgate.core.budgets.ledger import Limit
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.budgets.windows import parse_window
from headgate.core.lifecycle import Failed, Outcome, Succeeded, Usage
from headgate.core.money import Tokens
from headgate.core.rate_limits import RateLimit
from headgate.core.snapshot import Agent, Project
from headgate.core.task import OnExhausted, OnParentFailure, TaskRecord, TaskStatus
from headgate.engine.dispatcher import (
    MAX_UNKNOWN_WRITES,
    NEWS_PAUSE_SECONDS,
    Dispatcher,
    news_pause_seconds,
)
from headgate.engine.supervisor import DISPATCHER_FAILS, NO_DISPATCHER
from headgate.errors import IllegalTransitionError, StoreUnavailableError
from headgate.executors.executor import WorkOrder
from headgate.storage.store import Backlog, Expiration, News
from headgate.storage.writer import Fault

FAILS = Failed(error="it is wrong")
S = Scope("session:s")


def test_a_queued_task_expires_within_a_second_of_its_deadline() -> None:
    async def scenario(service: Service) -> tuple[TaskRecord, float]:
        await service.submit()
        deadline = service.now() + 7
        record = await service.ended(await service.submit(deadline=deadline))
        return record, service.now() - deadline

    record, seconds = play(scenario, always(FOREVER_SECONDS), max_inflight=1)
    assert record.task.status is TaskStatus.FAILED
    assert record.error == "deadline exceeded while queued"
    assert 0 <= seconds <= 1.0


def test_a_task_that_is_ended_keeps_no_other_from_starting() -> None:
    async def scenario(service: Service) -> float:
        store, at = service.engine.store, service.now() + 5
        drop = store.drop

        async def drop_slowly(epoch: int, drops: Sequence[Expiration]) -> list[TaskRecord]:
            await asyncio.sleep(20)
            return await drop(epoch, drops)

        store.drop = drop_slowly  # type: ignore[method-assign]
        parent = await service.submit()
        await service.submit(deadline=at, depends_on=(parent,))
        await service.running(await service.submit(not_before=at))
        return service.now() - at

    assert play(scenario, always(FOREVER_SECONDS)) <= 1.0


def test_a_task_that_waits_for_its_time_or_a_parent_expires_too() -> None:
    async def scenario(service: Service) -> None:
        now = service.now()
        parent = await service.submit()
        tasks = [
            await service.submit(deadline=now + 3, not_before=now + 50),
            await service.submit(deadline=now + 3, depends_on=(parent,)),
        ]
        for task_id in tasks:
            assert (await service.ended(task_id)).error == "deadline exceeded while queued"
        assert service.now() - now <= 4.1

    play(scenario, always(FOREVER_SECONDS))


def test_a_queued_task_is_cancelled_at_once_and_never_runs() -> None:
    async def scenario(service: Service) -> None:
        await service.submit()
        task_id = await service.submit()
        record = await service.engine.cancel(task_id)
        assert record is not None
        assert record.task.status is TaskStatus.CANCELLED
        await asyncio.sleep(30)
        assert task_id not in service.ordered()
        with pytest.raises(IllegalTransitionError):
            await service.engine.cancel(task_id)
        assert await service.engine.cancel("unknown") is None

    play(scenario, always(9.0), max_inflight=1)


def test_news_that_a_change_at_this_node_overtook_brings_no_task_back() -> None:
    async def scenario(service: Service) -> bool:
        await service.submit()
        task_id = await service.submit()
        store, dispatcher = service.engine.store, service.engine.dispatcher
        news, queued = store.news, await store.get(task_id)
        assert queued is not None

        async def read_before_the_cancel(epoch: int, *, all_workers: bool = True) -> News:
            store.news = news  # type: ignore[method-assign]
            await service.engine.cancel(task_id)
            return News(records=(queued,), nodes=(await news(epoch, all_workers=all_workers)).nodes)

        store.news = read_before_the_cancel  # type: ignore[method-assign]
        dispatcher.refresh()
        await asyncio.sleep(10)
        state = dispatcher.dispatch_state
        return state is not None and task_id in state.waiting

    assert not play(scenario, always(FOREVER_SECONDS), max_inflight=1)


def test_news_is_read_at_once_and_then_gathers_for_a_moment() -> None:
    async def scenario(service: Service) -> list[float]:
        await service.submit()
        store, dispatcher = service.engine.store, service.engine.dispatcher
        queued, news = await store.get(await service.submit()), store.news
        assert queued is not None
        reads: list[float] = []

        async def noted(epoch: int, *, all_workers: bool = True) -> News:
            reads.append(service.now())
            return News(records=(queued,), nodes=(await news(epoch, all_workers=all_workers)).nodes)

        await asyncio.sleep(1.5)
        store.news = noted  # type: ignore[method-assign]
        began = service.now()
        for _ in range(100):
            dispatcher.refresh()
            await asyncio.sleep(NEWS_PAUSE_SECONDS / 50)
        await asyncio.sleep(2 * NEWS_PAUSE_SECONDS)
        return [read - began for read in reads]

    first, *later = play(scenario, always(FOREVER_SECONDS), max_inflight=1)
    assert first < NEWS_PAUSE_SECONDS / 2
    assert 1 <= len(later) <= 3


@pytest.mark.parametrize(("records", "pauses"), [(1, 1), (8, 1), (16, 2), (500, 4)])
def test_news_gathers_for_longer_while_much_of_it_comes(records: int, pauses: float) -> None:
    assert news_pause_seconds(records) == NEWS_PAUSE_SECONDS * pauses


def test_a_task_starts_at_its_time_and_not_before() -> None:
    async def scenario(service: Service) -> float:
        started = service.now()
        await service.running(await service.submit(not_before=started + 20))
        return service.now() - started

    assert 20 <= play(scenario) <= 20.2


def test_a_chain_of_tasks_runs_one_after_the_other() -> None:
    async def scenario(service: Service) -> None:
        first = await service.submit()
        second = await service.submit(depends_on=(first,))
        third = await service.submit(depends_on=(first, second))
        why = await service.engine.why(third)
        assert why is not None
        assert [reason.message for reason in why.reasons] == [
            "2 of the tasks that it depends on have not ended"
        ]
        await service.ended(third)
        assert service.ordered() == [first, second, third]

    play(scenario)


@pytest.mark.parametrize(
    ("on_parent_failure", "status", "error"),
    [
        (OnParentFailure.FAIL, TaskStatus.FAILED, "parent {} is failed"),
        (OnParentFailure.RUN, TaskStatus.DONE, None),
    ],
)
def test_a_parent_that_fails_takes_its_dependants_along_unless_they_run_all_the_same(
    on_parent_failure: OnParentFailure, status: TaskStatus, error: str | None
) -> None:
    async def scenario(service: Service) -> None:
        parent = await service.submit()
        child = await service.submit(depends_on=(parent,), on_parent_failure=on_parent_failure)
        grandchild = await service.submit(depends_on=(child,))
        record = await service.ended(child)
        assert record.task.status is status
        assert record.error == (None if error is None else error.format(parent))
        expected = f"parent {child} is failed" if error else None
        assert (await service.ended(grandchild)).error == expected
        late = await service.submit(depends_on=(parent,))
        assert (await service.ended(late)).error == f"parent {parent} is failed"

    play(scenario, in_turn((1.0, FAILS), (1.0, DONE)))


def test_a_cancelled_parent_takes_its_dependants_along() -> None:
    async def scenario(service: Service) -> None:
        await service.submit()
        parent = await service.submit()
        child = await service.submit(depends_on=(parent,))
        await service.engine.cancel(parent)
        assert (await service.ended(child)).error == f"parent {parent} is cancelled"

    play(scenario, always(9.0), max_inflight=1)


def test_an_exhausted_budget_with_a_window_makes_tasks_wait_with_a_time() -> None:
    budgets = {S: Limit(limit_tokens=Tokens(100), window=parse_window("rolling:1h"))}

    async def scenario(service: Service) -> None:
        await service.ended(await service.submit(scopes=(S,)))
        waits = await service.submit(scopes=(S,))
        rejected = await service.submit(scopes=(S,), on_exhausted=OnExhausted.REJECT)
        record = await service.ended(rejected, within_seconds=1)
        assert record.task.status is TaskStatus.REJECTED
        assert "Budget exceeded" in (record.error or "")
        why = await service.engine.why(waits)
        assert why is not None
        (reason,) = why.reasons
        assert reason.until is not None
        assert 3_500 <= reason.until - service.now() <= 3_800
        await asyncio.sleep(reason.until - service.now() - 1.0)
        assert waits not in service.ordered()
        record = await service.ended(waits, within_seconds=5)
        assert record.task.status is TaskStatus.DONE

    play(scenario, always(1.0, Succeeded(usage=Usage(tokens=100))), budgets=budgets)


@pytest.mark.parametrize("scope", [S, ROOT])
def test_without_a_window_tasks_wait_for_what_is_in_flight_and_are_then_refused(
    scope: Scope,
) -> None:
    async def scenario(service: Service) -> list[TaskRecord]:
        tasks = [await service.submit(scopes=(S,)) for _ in range(4)]
        return [await service.ended(task_id) for task_id in tasks]

    usages = [Succeeded(usage=Usage(tokens=tokens)) for tokens in (10, 100)]
    work = in_turn(*((5.0, outcome) for outcome in usages))
    records = play(scenario, work, budgets={scope: Limit(limit_tokens=Tokens(200))})
    states = Counter(record.task.status for record in records)
    assert states == {TaskStatus.DONE: 2, TaskStatus.REJECTED: 2}


def test_what_an_attempt_gives_back_starts_those_who_waited_for_it() -> None:
    async def scenario(service: Service) -> float:
        tasks = [await service.submit(scopes=(S,)) for _ in range(3)]
        started = service.now()
        for task_id in tasks:
            assert (await service.ended(task_id)).task.status is TaskStatus.DONE
        return service.now() - started

    outcome = Succeeded(usage=Usage(tokens=10))
    seconds = play(scenario, always(5.0, outcome), budgets={S: Limit(limit_tokens=Tokens(120))})
    assert 15.0 <= seconds <= 15.5


def test_a_task_that_no_budget_can_ever_hold_is_refused_at_once() -> None:
    async def scenario(service: Service) -> TaskRecord:
        task_id = await service.submit(scopes=(S,), estimate_tokens=500)
        return await service.ended(task_id, within_seconds=1)

    record = play(scenario, budgets={S: Limit(limit_tokens=Tokens(200))})
    assert record.task.status is TaskStatus.REJECTED


@pytest.mark.parametrize("unit", ["requests", "tokens"])
def test_a_rate_limit_is_never_passed_and_everything_runs_in_the_end(unit: str) -> None:
    limit = RateLimit(
        kind="target",
        name="t",
        unit="requests" if unit == "requests" else "tokens",
        most=5 if unit == "requests" else 500,
        window_seconds=60,
    )
    times: list[float] = []

    async def scenario(service: Service) -> None:
        def work(_order: WorkOrder) -> tuple[float, Outcome]:
            times.append(service.now())
            return 0.1, Succeeded(usage=Usage(tokens=100))

        service.executor.work = work
        tasks = [await service.submit(target="t") for _ in range(17)]
        for task_id in tasks:
            await service.ended(task_id)

    play(scenario, rate_limits=(limit,))
    assert len(times) == 17
    for first in times:
        assert sum(first <= at < first + 60 for at in times) <= 5
    assert times[-1] - times[0] <= 3 * 62


def test_no_cap_on_places_is_ever_passed_and_none_is_left_unused() -> None:
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()

    async def scenario(service: Service) -> float:
        execute = service.executor.execute

        async def counted(order: WorkOrder) -> Outcome:
            names = ("all", order.agent_id, order.project_id)
            now.update(names)
            for name in names:
                most[name] = max(most[name], now[name])
            try:
                return await execute(order)
            finally:
                now.subtract(names)

        service.executor.execute = counted  # type: ignore[method-assign]
        started = service.now()
        tasks = [
            await service.submit(project_id=project, agent_id=agent)
            for agent in ("a", "b", "c", None)
            for project in ("x", "y")
            for _ in range(6)
        ]
        for task_id in tasks:
            await service.ended(task_id)
        return service.now() - started

    seconds = play(
        scenario,
        always(1.0),
        projects=(
            Project(id="x", max_concurrent_agents=None),
            Project(id="y", max_concurrent_agents=2),
        ),
        agents=(Agent(id="any", capacity=2),),
        max_inflight=6,
        max_per_agent_inflight=2,
    )
    assert most["all"] == 6
    assert most["y"] == 2
    assert (most["any"], most["a"], most["b"], most["c"]) == (2, 2, 2, 2)
    assert seconds <= 14


def test_projects_get_their_shares() -> None:
    """Weights of two to one give two starts to one."""

    async def scenario(service: Service) -> Counter[str]:
        for _ in range(300):
            await service.submit(project_id="x")
            await service.submit(project_id="y")
        while len(service.executor.orders) < 300:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        return Counter(order.project_id for order in service.executor.orders[:300])

    counts = play(
        scenario,
        always(1.0, Succeeded(usage=Usage(tokens=100))),
        projects=(
            Project(id="x", credit_weight=2.0, max_concurrent_agents=None),
            Project(id="y", credit_weight=1.0, max_concurrent_agents=None),
        ),
        max_inflight=6,
    )
    assert abs(counts["x"] - 200) <= 6


def test_no_lane_starves_beside_a_full_one() -> None:
    async def scenario(service: Service) -> int:
        for _ in range(100):
            await service.submit(agent_id="busy")
        late = await service.submit(agent_id="late", priority=0)
        await service.running(late)
        return service.ordered().index(late)

    assert play(scenario, always(1.0), max_inflight=2) <= 4


def test_a_dispatcher_that_fails_again_and_again_is_told_of_until_it_works() -> None:
    async def scenario(service: Service) -> None:
        dispatcher = service.engine.dispatcher
        assert service.engine.health().is_ready
        whole = dispatcher._read_news

        async def broken(*_: object) -> None:
            raise RuntimeError("nobody foresaw this")

        dispatcher._read_news = broken  # type: ignore[method-assign, assignment]
        dispatcher.refresh()
        for _ in range(20):
            await asyncio.sleep(0.1)
            health = service.engine.health()
            assert (health.is_ready, health.parts["dispatcher"]) == (False, DISPATCHER_FAILS)
        dispatcher._read_news = whole  # type: ignore[method-assign]
        await asyncio.sleep(60)
        assert service.engine.health().is_ready

    play(scenario)


def test_a_node_that_knows_no_dispatcher_is_not_ready() -> None:
    async def scenario(service: Service) -> None:
        service.engine.node.leader_id = ""
        service.engine.dispatcher.step_down()
        assert service.engine.health().parts["dispatcher"] == NO_DISPATCHER
        await asyncio.sleep(10)
        assert service.engine.health().is_ready

    play(scenario)


def test_while_the_store_is_away_nothing_starts_and_it_goes_on_by_itself() -> None:
    async def scenario(service: Service) -> None:
        await service.ended(await service.submit())
        service.fault = lambda: Fault.REFUSED
        with pytest.raises(StoreUnavailableError):
            await service.submit()
        await asyncio.sleep(20)
        health = service.engine.health()
        assert (health.is_ready, bool(health.problem)) == (False, True)
        assert len(service.executor.orders) == 1
        service.fault = lambda: None
        await asyncio.sleep(2)
        assert service.engine.health().is_ready
        record = await service.ended(await service.submit(), within_seconds=5)
        assert record.task.status is TaskStatus.DONE

    play(scenario)


def _lose_the_next_answer(service: Service) -> None:
    """Commit twice and answer neither: the caller gets an error for what is on disk."""
    left = [Fault.REPLY_LOST, Fault.REPLY_LOST]
    service.fault = lambda: left.pop() if left else None


def test_a_task_whose_acknowledgement_got_lost_runs_all_the_same() -> None:
    async def scenario(service: Service) -> None:
        await asyncio.sleep(0.1)
        _lose_the_next_answer(service)
        with pytest.raises(StoreUnavailableError):
            await service.submit()
        await asyncio.sleep(3)
        assert len(service.executor.orders) == 1

    play(scenario, tick_seconds=1e6)


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_client_that_hangs_up_does_not_hide_its_task(steps: int) -> None:
    async def scenario(service: Service) -> None:
        asking = asyncio.create_task(service.submit())
        for _ in range(steps):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.sleep(3)
        found = (await service.engine.totals()).submitted
        assert len(service.executor.orders) == found

    play(scenario, tick_seconds=1e6, seed=steps)


def test_a_cancel_whose_answer_got_lost_lets_dependants_go_on() -> None:
    async def scenario(service: Service) -> None:
        running = await service.submit()
        parent = await service.submit()
        child = await service.submit(depends_on=(parent,), on_parent_failure=OnParentFailure.RUN)
        await service.running(running)
        _lose_the_next_answer(service)
        with pytest.raises(StoreUnavailableError):
            await service.engine.cancel(parent)
        await service.ended(child)

    play(scenario, always(5.0), max_inflight=1, tick_seconds=1e6)


def test_a_task_whose_assignment_nobody_heard_of_is_started() -> None:
    async def scenario(service: Service) -> None:
        await asyncio.sleep(0.1)
        store = service.engine.store
        assign = store.assign

        async def lost(*args: object) -> object:
            _lose_the_next_answer(service)
            store.assign = assign  # type: ignore[method-assign]
            return await assign(*args)  # type: ignore[arg-type]

        store.assign = lost  # type: ignore[method-assign, assignment]
        # Not planned before it is stored: the answer to the submit would be lost as well.
        task_id = await service.submit(not_before=service.now() + 1)
        record = await service.ended(task_id, within_seconds=10)
        assert (record.task.status, record.progress.attempt) == (TaskStatus.DONE, 1)

    play(scenario)


def test_what_changes_while_the_backlog_is_read_is_seen() -> None:
    async def scenario(service: Service) -> None:
        running = await service.submit()
        await service.running(running)
        store = service.engine.store
        backlog = store.backlog

        async def slow(epoch: int) -> Backlog:
            found = await backlog(epoch)
            await asyncio.sleep(4)
            return found

        store.backlog = slow  # type: ignore[method-assign]
        service.engine.dispatcher._start_anew()
        await asyncio.sleep(1)
        waiting = await service.submit()
        await service.ended(running)
        assert (await service.ended(waiting, within_seconds=8)).task.status is TaskStatus.DONE
        dispatch_state = service.engine.dispatcher.dispatch_state
        assert dispatch_state is not None
        assert (len(dispatch_state.in_flight), len(dispatch_state.waiting)) == (0, 0)

    play(scenario, always(2.0), max_inflight=1, tick_seconds=1e6)


def test_more_doubts_than_are_worth_asking_about_make_the_state_anew() -> None:
    async def scenario(service: Service) -> None:
        dispatcher = service.engine.dispatcher
        task_id = await service.submit()
        await service.running(task_id)
        before = dispatcher.dispatch_state
        for number in range(MAX_UNKNOWN_WRITES + 1):
            dispatcher.recheck(f"t{number}")
        await asyncio.sleep(2)
        assert dispatcher.dispatch_state is not None
        assert dispatcher.dispatch_state is not before
        assert dispatcher.dispatch_state.in_flight.on_node(service.engine.node.node_id) == [task_id]

    play(scenario, always(FOREVER_SECONDS))


def test_a_loop_that_fails_starts_again_from_the_store() -> None:
    async def scenario(service: Service) -> None:
        store = service.engine.store
        assign = store.assign

        async def broken(*_args: object) -> object:
            store.assign = assign  # type: ignore[method-assign]
            raise LookupError("a fault that nobody foresaw")

        store.assign = broken  # type: ignore[method-assign, assignment]
        tasks = [await service.submit() for _ in range(3)]
        for task_id in tasks:
            record = await service.ended(task_id, within_seconds=10)
            assert record.task.status is TaskStatus.DONE

    play(scenario, max_inflight=3)


def test_since_when_one_node_decides_is_known_wherever_it_is() -> None:
    """What a node had under way is lost with it, but not what this one had itself."""

    async def scenario(service: Service) -> None:
        engine = service.engine
        dispatcher = Dispatcher(engine.store, engine.settings.dispatch, start=lambda _: None)
        dispatcher.become_leader("n", 1)
        began = service.now()
        steps = (
            ("", 1, "own"),
            ("next", 2, "own"),
            ("next", 3, "own"),
            ("", 3, "own"),
            ("other", 4, "now"),
            ("next", 5, "now"),
        )
        for node_id, at_epoch, expected in steps:
            await asyncio.sleep(10)
            dispatcher.follow(node_id, at_epoch)
            since = began if expected == "own" else service.now()
            assert dispatcher.decided_since == since, (node_id, at_epoch)
        await asyncio.sleep(10)
        dispatcher.become_leader("n", 6)
        assert dispatcher.decided_since == service.now()

    play(scenario)
