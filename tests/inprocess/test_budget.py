"""Budgets of agents, teams and sessions: what cannot be held does not run, in every mode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from headgate import Budget, Estimate, LoadScheduler, SharedResource, Task
from headgate.budgets.local import LocalBudgetTracker
from headgate.budgets.tracker import LedgerTracker
from headgate.errors import (
    BudgetExceededError,
    InvalidScopeError,
    InvalidSettingError,
    LedgerUnavailableError,
    PermitTimeoutError,
    SchedulerClosedError,
)
from headgate.inprocess.budget import BudgetPassed
from headgate.testing import SimulatedLoop, simulate

T = TypeVar("T")


def run(scenario: Callable[[LedgerTracker, SimulatedLoop], Awaitable[T]]) -> T:
    """Run a scenario in virtual time, on a fresh ledger."""

    async def main(loop: SimulatedLoop) -> T:
        async with LocalBudgetTracker(clock=loop.clock) as tracker:
            return await scenario(tracker, loop)

    return simulate(main).result


def scheduler_of(budget: Budget, capacity: int = 4) -> LoadScheduler:
    return LoadScheduler(None, SharedResource("llm", capacity), budget=budget)


async def call(
    scheduler: LoadScheduler, agent: str, usd: float, actual: float | None = None
) -> str:
    try:
        async with scheduler.acquire(agent, estimate=Estimate(usd=usd)) as grant:
            await asyncio.sleep(1)
            if actual is not None:
                grant.charge(actual)
    except BudgetExceededError as refusal:
        return refusal.scope
    return "ran"


def test_a_call_is_charged_to_its_agent_its_team_its_session_and_its_task() -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> list[float]:
        budget = Budget(tracker, session="eval", teams={"a": "search"})
        scheduler = scheduler_of(budget)
        task = Task(scopes=("workflow:w1",))
        async with scheduler.acquire("a", task=task, estimate=Estimate(usd=2)) as grant:
            grant.charge("1.25", tokens=10)
        scopes = ("agent:a", "team:search", "session:eval", "workflow:w1", "")
        (stats,) = scheduler.stats()
        assert (stats.charged_micro_usd, stats.charged_tokens) == (1_250_000, 10)
        return [await tracker.get_spent(scope) for scope in scopes]

    assert run(scenario) == [1.25] * 5


@pytest.mark.parametrize("scope", ["agent:a", "team:search", "session:eval"])
def test_each_of_agent_team_and_session_can_refuse(scope: str) -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> list[str]:
        limits = {scope: "1.00"}
        budget = Budget(tracker, session="eval", teams={"a": "search"}, limits=limits)
        scheduler = scheduler_of(budget)
        outcomes = await asyncio.gather(*(call(scheduler, "a", 0.6) for _ in range(3)))
        assert scheduler.resource.in_use == 0
        return outcomes

    assert sorted(run(scenario)) == sorted(["ran", scope, scope])


def test_in_mode_wait_a_call_waits_for_what_others_give_back() -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> tuple[list[str], float]:
        budget = Budget(tracker, mode="wait", limits={"agent:a": 1})
        scheduler = scheduler_of(budget)
        calls = (call(scheduler, "a", 0.9, actual=0.1) for _ in range(2))
        return await asyncio.gather(*calls), await tracker.get_spent("agent:a")

    assert run(scenario) == (["ran", "ran"], 0.2)


def test_in_mode_wait_a_call_waits_for_the_window_without_a_permit() -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> float:
        await tracker.set_budget("agent:a", "1.00", window="day")
        budget = Budget(tracker, mode="wait", clock=loop.clock)
        scheduler = scheduler_of(budget, capacity=1)
        await asyncio.sleep(23 * 3_600)
        assert await call(scheduler, "a", 1.0) == "ran"
        waiting = asyncio.create_task(call(scheduler, "a", 1.0))
        await asyncio.sleep(60)
        assert await call(scheduler, "b", 1.0) == "ran"
        assert await waiting == "ran"
        return loop.time()

    assert 86_400 <= run(scenario) < 86_400 + 10


def test_in_mode_wait_a_call_that_can_never_fit_is_refused() -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> str:
        budget = Budget(tracker, mode="wait", limits={"agent:a": 1})
        return await call(scheduler_of(budget), "a", 2)

    assert run(scenario) == "agent:a"


def test_in_mode_wait_the_timeout_counts_the_wait_for_money_too() -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> float:
        await tracker.set_budget("agent:a", "1.00", window="day")
        scheduler = scheduler_of(Budget(tracker, mode="wait", clock=loop.clock))
        await call(scheduler, "a", 1.0)
        begun = loop.time()
        with pytest.raises(PermitTimeoutError):
            await scheduler.acquire("a", estimate=Estimate(usd=1), timeout=30)
        assert scheduler.resource.in_use == scheduler.queued == 0
        return loop.time() - begun

    assert run(scenario) == pytest.approx(30)


def test_a_shutdown_refuses_who_waits_for_money() -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> None:
        await tracker.set_budget("agent:a", "1.00", window="day")
        scheduler = scheduler_of(Budget(tracker, mode="wait", clock=loop.clock))
        await call(scheduler, "a", 1.0)
        waiting = asyncio.create_task(call(scheduler, "a", 1.0))
        await asyncio.sleep(1)
        assert await scheduler.shutdown() == 0
        with pytest.raises(SchedulerClosedError):
            await waiting

    run(scenario)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_submitted_task_survives_who_waited_for_its_money(is_cancelled: bool) -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> list[float]:
        await tracker.set_budget("agent:a", "1.00", window="day")
        scheduler = scheduler_of(Budget(tracker, mode="wait", clock=loop.clock))
        await call(scheduler, "a", 1.0)
        await scheduler.submit_task("a", Task(weight=7))

        async def ask() -> float:
            estimate = Estimate(usd=1)
            async with scheduler.acquire("a", estimate=estimate, timeout=60) as grant:
                return grant.weight

        asking = asyncio.create_task(ask())
        await asyncio.sleep(30)
        assert scheduler.queued == 0
        if is_cancelled:
            asking.cancel()
        (outcome,) = await asyncio.gather(asking, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError if is_cancelled else PermitTimeoutError)
        assert scheduler.queued == 1
        await tracker.set_budget("agent:a", "3.00", window="day")
        return [await ask(), await ask()]

    assert run(scenario) == [7.0, 1.0]


def test_in_mode_downgrade_the_cheaper_model_that_the_caller_named_is_used() -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> list[str | None]:
        budget = Budget(tracker, mode="downgrade", limits={"agent:a": "1.50"})
        scheduler = scheduler_of(budget)
        estimate = Estimate(usd=1, model="opus", cheaper=Estimate(usd="0.2", model="haiku"))
        models = []
        for _ in range(3):
            async with scheduler.acquire("a", estimate=estimate) as grant:
                models.append(grant.model)
        with pytest.raises(BudgetExceededError) as caught:
            await scheduler.acquire("a", estimate=estimate)
        assert caught.value.requested == 1_000_000
        return models

    assert run(scenario) == ["opus", "haiku", "haiku"]


def test_in_mode_alert_everything_runs_is_booked_and_told_of_once() -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> float:
        told: list[BudgetPassed] = []
        budget = Budget(tracker, mode="alert", limits={"agent:a": 1}, on_alert=told.append)
        scheduler = scheduler_of(budget)
        for _ in range(4):
            assert await call(scheduler, "a", 0.5) == "ran"
        assert [str(one) for one in told] == ["agent:a has spent $1.00 of $1.00"]
        return await tracker.get_spent("agent:a")

    assert run(scenario) == 2.0


def test_a_limit_that_the_ledger_has_refuses_in_mode_alert_too() -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> str:
        await tracker.set_budget("agent:a", 1)
        budget = Budget(tracker, mode="alert", on_alert=lambda _: None)
        return await call(scheduler_of(budget), "a", 2)

    assert run(scenario) == "agent:a"


def test_calls_without_an_estimate_begin_with_one_that_holds_a_tenth() -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> tuple[list[int], float]:
        scheduler = scheduler_of(Budget(tracker, limits={"agent:a": "0.50"}), capacity=50)
        held: list[int] = []

        async def ask() -> None:
            async with scheduler.acquire("a") as grant:
                assert grant.held is not None
                held.append(grant.held.micro_usd)
                await asyncio.sleep(1)
                grant.charge("0.02")

        await asyncio.gather(*(ask() for _ in range(20)))
        assert scheduler.resource.in_use == 0
        return held, await tracker.get_spent("agent:a")

    held, spent = run(scenario)
    # The first holds a tenth of the limit; the next four times what it cost, then ever less.
    assert held[:3] == [50_000, 80_000, 80_000]
    assert held[-1] < 30_000
    assert spent == pytest.approx(0.4)


def test_a_limited_scope_is_not_passed_by_calls_without_an_estimate() -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> list[str]:
        budget = Budget(tracker, limits={"agent:a": "0.50"})
        scheduler = scheduler_of(budget, capacity=50)

        async def ask() -> str:
            try:
                async with scheduler.acquire("a") as grant:
                    await asyncio.sleep(1)
                    grant.charge("0.10")
            except BudgetExceededError:
                return "refused"
            return "ran"

        outcomes = await asyncio.gather(*(ask() for _ in range(20)))
        assert await tracker.get_spent("agent:a") <= 0.6
        return outcomes

    assert 4 <= run(scenario).count("ran") <= 6


def test_what_a_call_gives_in_one_unit_only_is_learned_in_the_other() -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> tuple[int, int]:
        await tracker.set_budget("agent:a", limit_usd=1, limit_tokens=1_000)
        scheduler = scheduler_of(Budget(tracker))
        async with scheduler.acquire("a", task=Task(estimate_tokens=100)) as grant:
            assert grant.held is not None
            return grant.held.micro_usd, grant.held.tokens

    assert run(scenario) == (100_000, 100)


def test_work_that_never_says_what_it_cost_books_nothing_and_runs_in_parallel() -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> tuple[float, float]:
        scheduler = scheduler_of(Budget(tracker, limits={"agent:a": "0.50"}), capacity=50)

        async def ask() -> None:
            async with scheduler.acquire("a"):
                await asyncio.sleep(1)

        await asyncio.gather(*(ask() for _ in range(30)))
        return await tracker.get_spent("agent:a"), loop.time()

    spent, seconds = run(scenario)
    assert spent == 0
    assert seconds < 6


def test_a_probe_that_fails_without_a_word_books_what_it_held() -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> float:
        scheduler = scheduler_of(Budget(tracker, limits={"agent:a": "0.50"}))
        with pytest.raises(ConnectionError):
            async with scheduler.acquire("a"):
                raise ConnectionError
        return await tracker.get_spent("agent:a")

    assert run(scenario) == pytest.approx(0.05)


def test_an_agent_whose_name_is_no_scope_is_refused_and_keeps_no_permit() -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> None:
        scheduler = scheduler_of(Budget(tracker))
        with pytest.raises(InvalidScopeError, match="agent_id"):
            await scheduler.acquire("no name", estimate=Estimate(usd=1))
        assert scheduler.resource.in_use == 0

    run(scenario)


def test_a_ledger_that_does_not_answer_grants_nothing() -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> None:
        scheduler = scheduler_of(Budget(tracker))
        await tracker.ledger.close()
        with pytest.raises(LedgerUnavailableError):
            await scheduler.acquire("a", estimate=Estimate(usd=1))
        assert scheduler.resource.in_use == scheduler.queued == 0

    run(scenario)


def test_a_body_that_raises_is_booked_in_full_unless_it_cannot_have_been_charged() -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> float:
        scheduler = scheduler_of(Budget(tracker, not_charged_on=(ConnectionError,)))
        for error in (LookupError(), ConnectionError()):
            with pytest.raises(type(error)):
                async with scheduler.acquire("a", estimate=Estimate(usd=1)):
                    raise error
        async with scheduler.acquire("a", estimate=Estimate(usd=1)) as grant:
            grant.not_charged()
        (stats,) = scheduler.stats()
        assert stats.charged_micro_usd == 1_000_000
        return await tracker.get_spent("agent:a")

    assert run(scenario) == 1.0


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("task", [None, Task(weight=2)])
def test_a_cancel_at_any_step_of_asking_for_money_leaves_neither_permit_nor_money(
    steps: int, task: Task | None
) -> None:
    async def scenario(tracker: LedgerTracker, _loop: SimulatedLoop) -> None:
        scheduler = scheduler_of(Budget(tracker, limits={"agent:a": 5}))

        async def ask() -> None:
            async with scheduler.acquire("a", task=task, estimate=Estimate(usd=1)) as grant:
                grant.not_charged()
                await asyncio.sleep(1)

        asking = asyncio.create_task(ask())
        for _ in range(steps):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        # The permit is free at once; the money goes back without anybody waiting for it.
        await asyncio.sleep(1)
        status = await tracker.status("agent:a")
        assert status.reserved_micro_usd == 0
        assert scheduler.resource.in_use == scheduler.queued == 0

    run(scenario)


def test_a_ledger_at_a_url_is_opened_by_the_first_call_and_closed_with_the_scheduler() -> None:
    async def scenario(_tracker: LedgerTracker, _loop: SimulatedLoop) -> None:
        budget = Budget("memory:", limits={"session:s": 1}, session="s")
        scheduler = scheduler_of(budget)
        assert await call(scheduler, "a", 1) == "ran"
        assert await budget.tracker.get_budget("session:s") == 1.0
        await scheduler.shutdown()
        with pytest.raises(LedgerUnavailableError):
            await budget.tracker.get_spent("")

    run(scenario)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidSettingError, match="mode"):
        Budget(mode="ignore")  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match="on_alert"):
        Budget(mode="alert")
