"""One import for programs that only want their calls governed: `configure`, `wrap`, `governed`.

There is one scheduler for the process, made by `configure` or by the first call. Functions may be
async or plain, which run in a thread, and may return iterators, which hold their place until they
are exhausted.

Rule: one that is in use is not replaced, unless its event loop has ended: nobody could ever free
the places that were left open in it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from typing import Any

from headgate.budget_tracker import BudgetTracker
from headgate.core.projects import Agent
from headgate.inprocess.budget import Budget, Estimate
from headgate.inprocess.calls import Calls, How, UsageOf
from headgate.inprocess.resource import SharedResource
from headgate.inprocess.scheduler import DEFAULT_MAX_WAITERS, LoadScheduler

DEFAULT_CAPACITY = 3

_calls: Calls | None = None


def configure(
    *,
    capacity: int = DEFAULT_CAPACITY,
    optimize_for: str | None = None,
    alpha: float | None = None,
    auto_tune: bool = True,
    agents: Iterable[Agent | str] | None = None,
    max_waiters: int = DEFAULT_MAX_WAITERS,
    max_wait_ticks: int | None = None,
    budget: Budget | BudgetTracker | str | None = None,
) -> LoadScheduler:
    """Make the scheduler that `wrap` and `governed` use, and return it.

    Without `agents` anybody may ask. One that is in use cannot be replaced; `shutdown` of the one
    before closes what it has opened.
    """
    global _calls  # noqa: PLW0603  one scheduler for the process is the point
    former = _calls
    if former is not None:
        former.check_replaceable()
    scheduler = LoadScheduler(
        agents,
        SharedResource("calls", capacity),
        optimize_for=optimize_for,
        alpha=alpha,
        auto_tune=auto_tune,
        max_waiters=max_waiters,
        max_wait_ticks=max_wait_ticks,
        budget=budget,
    )
    _calls = Calls(scheduler)
    if former is not None:
        former.close()
    return current_scheduler()


def current_scheduler() -> LoadScheduler:
    """Return the scheduler of `wrap` and `governed`, made with the defaults if there is none."""
    return _current_calls().scheduler


async def wrap(
    function: Callable[..., Any],
    /,
    *args: Any,  # noqa: ANN401
    agent_id: str,
    weight: float | None = None,
    task_type: str | None = None,
    timeout: float | None = None,  # noqa: ASYNC109  of the wait for a place, not of the call
    estimate: Estimate | None = None,
    usage_of: UsageOf | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401  whatever the function returns
    """Call a function, async or plain, when the agent has a place; return what it returns.

    Further arguments are the function's own; those that are named as one of these are given with
    `functools.partial`. Without `weight` it follows from the function's `model` and prompt, if it
    has them. An iterator comes back as an async one that holds the place until it is exhausted or
    closed. `timeout` is for the wait, in seconds; a call inside of another needs one. `usage_of`
    reads the cost from the result, or from the items of a stream, of which the last that tells
    counts; a function may also report to `current_grant()`.
    """
    how = How(
        agent_id=agent_id,
        weight=weight,
        task_type=task_type,
        timeout=timeout,
        estimate=estimate,
        usage_of=usage_of,
    )
    return await _current_calls().call(function, args, kwargs, how)


def governed(
    *,
    agent_id: str,
    weight: float | None = None,
    task_type: str | None = None,
    timeout: float | None = None,
    estimate: Estimate | None = None,
    usage_of: UsageOf | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function so that each call of it waits for a place, as `wrap` does.

    An async generator function stays one; every other function becomes async.
    """
    how = How(
        agent_id=agent_id,
        weight=weight,
        task_type=task_type,
        timeout=timeout,
        estimate=estimate,
        usage_of=usage_of,
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return await _current_calls().call(function, args, kwargs, how)

        @functools.wraps(function)
        async def stream(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:  # noqa: ANN401
            async with await _current_calls().call(function, args, kwargs, how) as items:
                async for item in items:
                    yield item

        return stream if inspect.isasyncgenfunction(function) else call

    return decorate


def _current_calls() -> Calls:
    if _calls is None:
        configure()
    assert _calls is not None  # noqa: S101  it was made above
    # Outside of a loop there is nothing to go on in.
    with suppress(RuntimeError):
        _calls.use_in(asyncio.get_running_loop())
    return _calls
