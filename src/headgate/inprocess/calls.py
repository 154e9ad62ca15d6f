"""One import for programs that only want their calls governed: `configure`, `wrap`, `governed`.

There is one scheduler for the process, made by `configure` or by the first call. Functions may be
async or plain, which run in a thread, and may return iterators, which hold their place until they
are exhausted.

Rule: a thread cannot be cancelled. A call that was keeps its place, and its money, until the thread
has come to its end; otherwise more of them would run than there are places.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
)
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from headgate.budget_tracker import BudgetTracker
from headgate.core.model_weights import estimate_weight
from headgate.core.outcomes import Usage
from headgate.core.projects import Agent
from headgate.core.tasks import Task
from headgate.errors import InvalidSettingError
from headgate.inprocess.budget import Budget, Estimate
from headgate.inprocess.grants import Grant, granted_to
from headgate.inprocess.resource import SharedResource
from headgate.inprocess.scheduler import DEFAULT_MAX_WAITERS, LoadScheduler
from headgate.inprocess.streams import GovernedStream
from headgate.inprocess.weights import WeightEstimates, prompt_chars_of

Result = TypeVar("Result")
UsageOf = Callable[[Any], Usage | None]

DEFAULT_CAPACITY = 3
MAX_THREADS = 256
PROMPTS = ("prompt", "messages", "input", "contents", "system")
END = object()


class How(msgspec.Struct, frozen=True, kw_only=True):
    """Under which terms a function is called."""

    agent_id: str
    weight: float | None = None
    task_type: str | None = None
    timeout: float | None = None
    estimate: Estimate | None = None
    usage_of: UsageOf | None = None


class Calls:
    """Calls of functions under one scheduler, with weights that follow their cost."""

    def __init__(self, scheduler: LoadScheduler) -> None:
        self.scheduler = scheduler
        self.weights = WeightEstimates()
        self._threads: ThreadPoolExecutor | None = None
        self._unfinished: set[asyncio.Task[None]] = set()

    async def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], how: How
    ) -> Any:  # noqa: ANN401  whatever the function returns
        """Call a function when it has a place; a stream keeps the place that it was opened in."""
        kind = how.task_type or str(getattr(function, "__qualname__", type(function).__name__))
        weight = _plain_weight(how.weight, kwargs)
        task = Task(agent_id=how.agent_id, weight=weight * self.weights.factor(kind))
        grant = await self.scheduler.acquire(
            how.agent_id, task=task, timeout=how.timeout, estimate=how.estimate
        )
        if grant.model is not None and isinstance(kwargs.get("model"), str):
            kwargs = {**kwargs, "model": grant.model}
        call = _Call(self, grant, kind, weight, how.usage_of)
        return await call.run(function, args, kwargs)

    def start_thread(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run a plain function beside the event loop; as many at once as there are places."""
        if self._threads is None:
            workers = min(self.scheduler.resource.capacity, MAX_THREADS)
            self._threads = ThreadPoolExecutor(workers, thread_name_prefix="headgate-call")
        run = contextvars.copy_context().run
        return asyncio.get_running_loop().run_in_executor(self._threads, run, function)

    def finish_later(self, ending: Coroutine[Any, Any, None]) -> None:
        """Let something come to its end that nobody waits for any more."""
        task = asyncio.get_running_loop().create_task(ending)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)


class _Call:
    """One call under way: which place it has, and the thread that it runs in, if it does."""

    def __init__(
        self, calls: Calls, grant: Grant, kind: str, weight: float, usage_of: UsageOf | None
    ) -> None:
        self._calls = calls
        self._grant = grant
        self._kind = kind
        self._weight = weight
        self._usage_of = usage_of
        self._thread: asyncio.Future[Any] | None = None

    async def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        """Call the function; however it ends, the place is freed after it."""
        try:
            with granted_to(self._grant):
                if _is_async(function):
                    result = function(*args, **kwargs)
                else:
                    result = await self._in_thread(functools.partial(function, *args, **kwargs))
                if inspect.isawaitable(result):
                    result = await result
            if isinstance(result, AsyncIterator):
                return GovernedStream(result, self._end)
            if isinstance(result, Iterator):
                return GovernedStream(self._pulled(result), self._end)
            self._measure(result)
        except BaseException as error:
            await self._end(error)
            raise
        await self._end(None)
        return result

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        thread = self._thread = self._calls.start_thread(function)
        return await asyncio.shield(thread)

    async def _pulled(self, source: Iterator[Any]) -> AsyncGenerator[Any, None]:
        """Iterate a plain iterator, each step in a thread."""
        while (item := await self._in_thread(functools.partial(next, source, END))) is not END:
            yield item

    def _measure(self, result: object) -> None:
        usage = None if self._usage_of is None else self._usage_of(result)
        if usage is not None and usage.micro_usd is not None:
            self._grant.charge(Decimal(usage.micro_usd).scaleb(-6), tokens=usage.tokens)

    async def _end(self, error: BaseException | None) -> None:
        if self._thread is not None and not self._thread.done():
            self._calls.finish_later(self._end_after(self._thread, error))
            return
        cost = self._grant.charged_micro_usd
        if cost is not None:
            self._calls.weights.observe(self._kind, weight=self._weight, cost=cost)
        await self._calls.scheduler.release(self._grant, error=error)

    async def _end_after(self, thread: asyncio.Future[Any], error: BaseException | None) -> None:
        try:
            await asyncio.wait({thread})
            # Nobody is left to be told of its error, and asyncio would log it as lost.
            thread.exception()
        finally:
            await self._calls.scheduler.release(self._grant, error=error)


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

    Without `agents` anybody may ask. One that is in use cannot be replaced.
    """
    global _calls  # noqa: PLW0603  one scheduler for the process is the point
    if _calls is not None and (_calls.scheduler.queued or _calls.scheduler.resource.in_use):
        raise InvalidSettingError("configure", "calls are under way; configure before the first")
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
    return scheduler


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

    Further arguments are the function's own. Without `weight` it follows from the function's
    `model` and prompt, if it has them. An iterator comes back as an async one that holds the
    place until it is exhausted or closed. `timeout` is for the wait, in seconds. `usage_of` reads
    the cost from the result; a function may also report to `current_grant()`.
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
    return _calls


def _is_async(function: Callable[..., Any]) -> bool:
    """Say whether calling it only makes a coroutine, or an async iterator.

    A decorator of an SDK may hide that; what it decorates tells.
    """
    for one in (function, inspect.unwrap(function), type(function).__call__):
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            return True
    return False


def _plain_weight(weight: float | None, kwargs: dict[str, Any]) -> float:
    if weight is not None:
        return weight
    model = kwargs.get("model")
    if not isinstance(model, str):
        return 1.0
    return estimate_weight(model, prompt_chars_of(*(kwargs.get(name) for name in PROMPTS)))
