"""What may go wrong around a call of `wrap`, and that its permit, money and answer survive it."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import headgate
from headgate import Budget, Estimate, Grant, LoadScheduler, LocalBudgetTracker
from headgate.budgets.tracker import Amount, ReservationToken
from headgate.core.budgets.scopes import Tenant
from headgate.core.lifecycle import Usage
from headgate.errors import (
    IllegalSettlementError,
    InvalidFieldError,
    InvalidSettingError,
    LedgerUnavailableError,
    PermitTimeoutError,
)
from inprocess.calling import granted, nothing, really, run

DEAR_OR_CHEAP = Estimate(usd=5, model="opus", cheaper=Estimate(usd=1, model="haiku"))


async def two() -> AsyncIterator[int]:
    yield 1
    yield 2


def test_a_plain_function_that_raises_stop_iteration_ends_with_an_error() -> None:
    async def scenario(scheduler: LoadScheduler) -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await headgate.wrap(lambda: next(iter([])), agent_id="a")
        assert scheduler.resource.in_use == 0

    really(scenario, capacity=1)


async def ask(prompt: str, model: str = "opus") -> tuple[str, str | None]:
    return model, granted().model


@pytest.mark.parametrize("args", [("why?",), ("why?", "opus")])
def test_a_cheaper_model_is_used_instead_of_one_by_position_or_by_default(
    args: tuple[str, ...],
) -> None:
    async def scenario(scheduler: LoadScheduler) -> object:
        return await headgate.wrap(ask, *args, agent_id="a", estimate=DEAR_OR_CHEAP)

    budget = Budget(mode="downgrade", limits={"agent:a": 2})
    assert run(scenario, budget=budget) == ("haiku", "haiku")


def test_a_call_that_is_not_downgraded_keeps_the_model_that_it_named() -> None:
    async def scenario(scheduler: LoadScheduler) -> object:
        return await headgate.wrap(ask, "why?", "haiku-3", agent_id="a", estimate=DEAR_OR_CHEAP)

    budget = Budget(mode="downgrade", limits={"agent:a": 9})
    assert run(scenario, budget=budget) == ("haiku-3", "opus")


@pytest.mark.parametrize("limit", [2, 9])
def test_a_function_without_a_model_does_not_run_on_the_money_of_a_cheaper_one(limit: int) -> None:
    async def scenario(scheduler: LoadScheduler) -> int:
        with pytest.raises(InvalidFieldError, match="model: is no argument"):
            await headgate.wrap(nothing, agent_id="a", estimate=DEAR_OR_CHEAP)
        assert scheduler.resource.in_use == 0
        return scheduler.stats()[0].charged_micro_usd

    assert run(scenario, budget=Budget(mode="downgrade", limits={"agent:a": limit})) == 0


def test_a_cheaper_estimate_must_say_for_which_model_it_is() -> None:
    async def scenario(scheduler: LoadScheduler) -> None:
        estimate = Estimate(usd=5, model="opus", cheaper=Estimate(usd=1))
        with pytest.raises(InvalidFieldError, match="does not name its model"):
            await headgate.wrap(ask, "why?", agent_id="a", estimate=estimate)

    run(scenario, budget=Budget(mode="downgrade", limits={"agent:a": 2}))


def test_a_governed_call_inside_of_another_is_refused_at_once_unless_its_wait_is_bounded() -> None:
    @headgate.governed(agent_id="tool")
    async def tool() -> int:
        return 1

    async def agent() -> None:
        with pytest.raises(InvalidFieldError, match="inside of another"):
            await tool()
        with pytest.raises(PermitTimeoutError):
            await headgate.wrap(nothing, agent_id="tool", timeout=1)

    async def stream() -> AsyncIterator[int]:
        with pytest.raises(InvalidFieldError, match="inside of another"):
            await tool()
        yield 1

    async def scenario(scheduler: LoadScheduler) -> None:
        await headgate.wrap(agent, agent_id="agent")
        assert [item async for item in await headgate.wrap(stream, agent_id="agent")] == [1]
        assert await tool() == 1

    run(scenario, capacity=1)


def test_what_a_call_left_behind_is_outside_of_it() -> None:
    left: list[asyncio.Task[None]] = []
    kept: list[Grant] = []

    async def later() -> None:
        await asyncio.sleep(1)
        assert headgate.current_grant() is None
        await headgate.wrap(nothing, agent_id="a")

    async def call() -> None:
        kept.append(granted())
        left.append(asyncio.create_task(later()))

    async def scenario(scheduler: LoadScheduler) -> None:
        await headgate.wrap(call, agent_id="a")
        await left[0]
        with pytest.raises(IllegalSettlementError, match="before the permit is released"):
            kept[0].charge(5)
        assert scheduler.stats()[0].charged_micro_usd == 0

    run(scenario, capacity=1)


def test_a_stream_left_open_in_a_loop_that_has_ended_does_not_stop_the_next() -> None:
    kept: list[object] = []

    async def leave_open() -> None:
        headgate.configure(capacity=1)
        stream = await headgate.wrap(two, agent_id="a")
        kept.append(stream)
        assert await anext(stream) == 1

    async def call() -> int:
        await headgate.wrap(nothing, agent_id="a", timeout=1)
        return headgate.current_scheduler().resource.capacity

    asyncio.run(leave_open())
    assert asyncio.run(call()) == 1
    kept.clear()
    assert headgate.current_scheduler().resource.in_use == 0
    asyncio.run(leave_open())
    assert headgate.configure(capacity=2).resource.in_use == 0
    assert asyncio.run(call()) == 2


def test_a_permit_left_open_in_a_loop_that_has_ended_does_not_stop_the_next() -> None:
    async def leave_open() -> None:
        headgate.configure(capacity=1)
        await headgate.current_scheduler().acquire("a")

    asyncio.run(leave_open())
    asyncio.run(headgate.wrap(nothing, agent_id="a", timeout=1))


def test_a_thread_that_outlives_its_loop_is_waited_for() -> None:
    end = threading.Event()

    def work() -> None:
        end.wait(10)

    async def leave_running() -> None:
        headgate.configure(capacity=1)
        calling = asyncio.create_task(headgate.wrap(work, agent_id="a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not calling.done()

    async def call() -> None:
        await headgate.wrap(nothing, agent_id="a", timeout=1)

    asyncio.run(leave_running())
    with pytest.raises(InvalidSettingError, match="threads of an event loop"):
        asyncio.run(call())
    with pytest.raises(InvalidSettingError, match="threads of an event loop"):
        headgate.configure()
    end.set()
    configure_when_possible()


def configure_when_possible() -> None:
    """Configure as soon as the thread that was told to end has done so."""
    for _ in range(10_000):
        try:
            headgate.configure()
        except InvalidSettingError:
            threading.Event().wait(0.001)
        else:
            return
    raise AssertionError("the thread did not end")


WEIGHED = [
    (("x" * 40_000, "claude-opus-4"), {}),
    (("x" * 40_000,), {}),
    (("x" * 40_000,), {"model": "claude-opus-4"}),
    ((), {"prompt": "x" * 40_000}),
]


@pytest.mark.parametrize(("args", "kwargs"), WEIGHED)
def test_a_prompt_and_a_model_count_however_they_are_given(
    args: tuple[str, ...], kwargs: dict[str, Any]
) -> None:
    async def long(prompt: str, model: str = "claude-opus-4") -> float:
        return granted().weight

    async def scenario(scheduler: LoadScheduler) -> object:
        return await headgate.wrap(long, *args, agent_id="a", **kwargs)

    assert run(scenario) == 50


def test_a_weight_that_was_given_is_not_corrected() -> None:
    async def weigh(cost: int) -> float:
        granted().charge(cost)
        return granted().weight

    async def scenario(scheduler: LoadScheduler) -> list[object]:
        for cost in (1, 1, 1):
            await headgate.wrap(weigh, cost, agent_id="a", task_type="cheap")
        return [
            await headgate.wrap(weigh, cost, agent_id="a", weight=2.0, task_type="dear")
            for cost in (100, 100, 100)
        ]

    assert run(scenario) == [2.0, 2.0, 2.0]


class BrokenLedger(LocalBudgetTracker):
    """A ledger that holds money, and then cannot book it."""

    async def commit(
        self,
        token: ReservationToken | str,  # noqa: ARG002
        actual_usd: Amount = 0,  # noqa: ARG002
        *,
        tokens: int = 0,  # noqa: ARG002
        tenant: Tenant | None = None,  # noqa: ARG002
    ) -> None:
        raise LedgerUnavailableError("gone")


async def precious() -> str:
    return "paid for"


def complain(told: object) -> None:
    raise LookupError("nobody to tell")


def broken_usage(result: object) -> Usage:
    raise LookupError("no usage in it")


@pytest.mark.parametrize(
    ("budget", "usage_of"),
    [
        (Budget(BrokenLedger(), default=Estimate(usd=1)), None),
        (
            Budget(
                mode="alert",
                on_alert=complain,
                limits={"agent:a": "0.5"},
                default=Estimate(usd=1),
            ),
            None,
        ),
        (Budget(default=Estimate(usd=1)), broken_usage),
        (Budget(default=Estimate(usd=1)), lambda _: Usage(micro_usd=-1)),
    ],
)
def test_an_answer_is_not_lost_when_its_cost_cannot_be_booked_or_told(
    budget: Budget, usage_of: Callable[[object], Usage] | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(scheduler: LoadScheduler) -> object:
        result = await headgate.wrap(precious, agent_id="a", usage_of=usage_of)
        assert scheduler.resource.in_use == 0
        return result

    # What an earlier test left open when its loop ended may be collected, and told of, only now.
    gc.collect()
    caplog.clear()
    assert run(scenario, budget=budget) == "paid for"
    assert [line.levelno >= logging.WARNING for line in caplog.records] == [True]


def test_tokens_are_booked_also_where_dollars_are_not_known() -> None:
    async def scenario(scheduler: LoadScheduler) -> tuple[int, int]:
        await headgate.wrap(nothing, agent_id="a", usage_of=lambda _: Usage(tokens=10))
        stats = scheduler.stats()[0]
        return stats.charged_micro_usd, stats.charged_tokens

    budget = Budget(default=Estimate(usd=1, tokens=1_000))
    assert run(scenario, budget=budget) == (1_000_000, 10)
    assert run(scenario) == (0, 10)


def test_arguments_that_wrap_has_itself_are_given_with_a_partial() -> None:
    async def create(*, weight: int, model: str) -> tuple[int, str]:
        return weight, model

    async def scenario(scheduler: LoadScheduler) -> object:
        return await headgate.wrap(functools.partial(create, weight=5), agent_id="a", model="m")

    assert run(scenario) == (5, "m")
