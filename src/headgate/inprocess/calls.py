"""Functions that wait for a permit: `configure`, `wrap`, `governed`, and the calls under way.

There is one scheduler for the process, made by `configure` or by the first call. Functions may be
async or plain, which run in a thread, and may return iterators, which hold their permit until they
are exhausted. A scheduler in use is not replaced, unless its event loop has ended: nobody could
ever free the permits that were left open in it.

Rules: a thread cannot be cancelled. A call that was keeps its permit, and its money, until the
thread has come to its end; otherwise more of them would run than there are permits. And what was
answered is paid for: it reaches whoever asked, also if its cost cannot be booked or read.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from headgate.budgets.tracker import BudgetTracker
from headgate.core.lifecycle import Usage
from headgate.core.load import estimate_weight
from headgate.core.snapshot import Agent
from headgate.core.task import Task
from headgate.errors import InvalidFieldError, InvalidSettingError
from headgate.inprocess.budget import Budget, Estimate
from headgate.inprocess.permits import Grant, SharedResource, current_grant, granted_to
from headgate.inprocess.scheduler import DEFAULT_MAX_WAITERS, LoadScheduler
from headgate.inprocess.streams import GovernedStream, ThreadedIterator

DEFAULT_CAPACITY = 3
Result = TypeVar("Result")
UsageOf = Callable[[Any], Usage | None]

MAX_THREADS = 256
PROMPTS = ("prompt", "messages", "input", "contents", "system")

_log = logging.getLogger("headgate.inprocess")
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
    timeout: float | None = None,  # noqa: ASYNC109  of the wait for a permit, not of the call
    estimate: Estimate | None = None,
    usage_of: UsageOf | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401  whatever the function returns
    """Call a function, async or plain, when the agent has a permit; return what it returns.

    Further arguments are the function's own; those that are named as one of these are given with
    `functools.partial`. Without `weight` it follows from the function's `model` and prompt, if it
    has them. An iterator comes back as an async one that holds the permit until it is exhausted or
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
    """Decorate a function so that each call of it waits for a permit, as `wrap` does.

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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._running: set[Future[Any]] = set()
        self._unfinished: set[asyncio.Task[None]] = set()

    def use_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on in an event loop; after one that has ended, not before its threads have."""
        if loop is not self._loop:
            if self.has_ended:
                self._check_threads()
            self._loop = loop

    @property
    def has_ended(self) -> bool:
        """Whether their event loop is closed: nobody can end what was left open in it."""
        return self._loop is not None and self._loop.is_closed()

    def check_replaceable(self) -> None:
        """Refuse to be replaced while there are any."""
        if self.has_ended:
            self._check_threads()
        elif self.scheduler.is_busy:
            problem = "calls are under way; configure before the first"
            raise InvalidSettingError("configure", problem)

    def close(self) -> None:
        """Let the threads end that have nothing to do."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None

    async def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], how: How
    ) -> Any:  # noqa: ANN401  whatever the function returns
        """Call a function when it has a permit; a stream keeps the permit that it was opened in."""
        _check_not_nested(how)
        kind = how.task_type or str(getattr(function, "__qualname__", type(function).__name__))
        weight, estimated = how.weight, None
        if weight is None:
            estimated = _estimated_weight(named_arguments(function, args, kwargs))
            weight = estimated * self.weights.factor(kind)
        grant = await self.scheduler.acquire(
            how.agent_id,
            task=Task(agent_id=how.agent_id, weight=weight, target=kind),
            timeout=how.timeout,
            estimate=how.estimate,
        )
        return await _Call(self, grant, kind, estimated, how).run(function, args, kwargs)

    def start_thread(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run a plain function beside the event loop; as many at once as there are permits."""
        if self._threads is None:
            workers = min(self.scheduler.resource.capacity, MAX_THREADS)
            self._threads = ThreadPoolExecutor(workers, thread_name_prefix="headgate-call")
        run = contextvars.copy_context().run
        future = self._threads.submit(run, _tellable, function)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return asyncio.wrap_future(future)

    def finish_later(self, ending: Coroutine[Any, Any, None]) -> None:
        """Let something come to its end that nobody waits for any more."""
        task = asyncio.get_running_loop().create_task(ending)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)

    def _check_threads(self) -> None:
        if any(not future.done() for future in tuple(self._running)):
            problem = "threads of an event loop that has ended still run; wait for their end"
            raise InvalidSettingError("configure", problem)


class _Call:
    """One call under way: which permit it has, and the thread that it runs in, if it does."""

    def __init__(
        self, calls: Calls, grant: Grant, kind: str, estimated: float | None, how: How
    ) -> None:
        self._grant = grant
        self._calls = calls
        self._kind = kind
        self._estimated = estimated
        self._how = how
        self._usage_of = how.usage_of
        self._usage: Usage | None = None
        self._is_measured = True
        self._thread: asyncio.Future[Any] | None = None
        self._pulled: Iterator[Any] | None = None

    async def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        """Call the function; however it ends, the permit is freed after it."""
        try:
            args, kwargs = self._with_granted_model(function, args, kwargs)
            with granted_to(self._grant):
                if _is_async(function):
                    result = function(*args, **kwargs)
                else:
                    result = await self._in_thread(functools.partial(function, *args, **kwargs))
                if inspect.isawaitable(result):
                    result = await result
                stream = self._streamed(result)
        except BaseException as error:
            await self._end(error)
            raise
        if stream is not None:
            return stream
        self._read(result)
        await self._end_response(None, is_whole=True)
        return result

    def _read(self, item: object) -> None:
        """Keep what a result, or an item of one, says of what was used."""
        if self._usage_of is None:
            return
        try:
            usage = self._usage_of(item)
        except Exception:  # noqa: BLE001  it is not ours
            _log.warning("usage_of failed; the estimate is booked", exc_info=True)
            self._usage_of = self._usage = None
            return
        if usage is not None and (usage.micro_usd, usage.tokens) != (None, None):
            self._usage = usage

    async def _end_response(self, error: BaseException | None, *, is_whole: bool) -> None:
        """Book what an answer used, and free its permit."""
        try:
            self._charge(is_whole=is_whole)
        except Exception:  # noqa: BLE001  nothing is known of what `usage_of` returned
            _log.warning("usage_of gave what cannot be booked", exc_info=True)
        await self._end(error)

    def _with_granted_model(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Use the cheaper model, where that is what was held for.

        Whether it could be is asked of every call: a budget is short when nobody is looking.
        """
        budget = self._calls.scheduler.budget
        if budget is None or budget.mode != "downgrade":
            return args, kwargs
        wanted = budget.estimate_of(self._grant, self._how.estimate)
        if wanted.cheaper is None:
            return args, kwargs
        try:
            _check_models(wanted.cheaper)
            replaced = with_model(function, args, kwargs, self._grant.model)
        except InvalidFieldError:
            self._grant.not_charged()
            raise
        return (args, kwargs) if self._grant.model == wanted.model else replaced

    def _streamed(self, result: object) -> GovernedStream[Any] | None:
        source: AsyncIterator[Any]
        if isinstance(result, AsyncIterator):
            source = result
        elif isinstance(result, Iterator):
            self._pulled = result
            source = ThreadedIterator(result, self._in_thread, self._is_in_thread)
        elif isinstance(result, AsyncIterable) and not isinstance(result, Iterable):
            # What can be iterated both ways is a collection, not an answer on its way.
            source = aiter(result)
        else:
            return None
        original = None if isinstance(result, Iterator) else result
        return GovernedStream(
            source, self._grant, read=self._read, end=self._end_response, original=original
        )

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        thread = self._thread = self._calls.start_thread(function)
        return await asyncio.shield(thread)

    def _is_in_thread(self) -> bool:
        return self._thread is not None and not self._thread.done()

    def _charge(self, *, is_whole: bool) -> None:
        """Report what was used; of a stream that was cut off, not less than is held for it."""
        usage, held = self._usage, self._grant.held
        if usage is None:
            return
        micro_usd, tokens = usage.micro_usd, usage.tokens
        self._is_measured = is_whole and micro_usd is not None
        if held is not None:
            if micro_usd is None or not is_whole:
                micro_usd = max(micro_usd or 0, held.micro_usd)
            if not is_whole:
                tokens = max(tokens or 0, held.tokens)
        self._grant.charge(Decimal(micro_usd or 0).scaleb(-6), tokens=tokens)

    async def _end(self, error: BaseException | None) -> None:
        thread = self._thread
        if thread is not None and not thread.done():
            self._calls.finish_later(self._end_after(thread, error))
            return
        cost = self._grant.charged_micro_usd
        if cost is not None and self._estimated is not None and self._is_measured:
            self._calls.weights.observe(self._kind, weight=self._estimated, cost=cost)
        await self._release(error)

    async def _end_after(self, thread: asyncio.Future[Any], error: BaseException | None) -> None:
        try:
            await asyncio.wait({thread})
            # Nobody is left to be told of its error, and asyncio would log it as lost.
            thread.exception()
            close = getattr(self._pulled, "close", None)
            if close is not None:
                await asyncio.wait({closing := self._calls.start_thread(close)})
                closing.exception()
        finally:
            await self._release(error)

    async def _release(self, error: BaseException | None) -> None:
        try:
            await self._calls.scheduler.release(self._grant, error=error)
        except Exception as problem:  # noqa: BLE001  a tracker may be anybody's
            _log.warning("a call has ended, and what it cost may not be booked: %s", problem)


def _tellable(function: Callable[[], Result]) -> Result:
    """Call a function in a thread; a future cannot be told of a `StopIteration`."""
    try:
        return function()
    except StopIteration as error:
        raise RuntimeError("the function raised StopIteration") from error


def _check_not_nested(how: How) -> None:
    if how.timeout is None and current_grant() is not None:
        problem = (
            "must be given for a governed call inside of another, which keeps its permit meanwhile"
            ": enough of them would wait for each other for ever; better, govern only the inner one"
        )
        raise InvalidFieldError("timeout", problem)


def _check_models(cheaper: Estimate | None) -> None:
    while cheaper is not None:
        if cheaper.model is None:
            raise InvalidFieldError("estimate", "has a cheaper one that does not name its model")
        cheaper = cheaper.cheaper


def _is_async(function: Callable[..., Any]) -> bool:
    """Say whether calling it only makes a coroutine, or an async iterator.

    A function that hides it runs in a thread, and the coroutine that it returns is awaited here.
    """
    for one in (function, type(function).__call__):
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            return True
    return False


def _estimated_weight(arguments: dict[str, Any]) -> float:
    model = arguments.get("model")
    if not isinstance(model, str):
        return 1.0
    return estimate_weight(model, prompt_chars_of(*(arguments.get(name) for name in PROMPTS)))


# What a function is called with, by the names of its parameters.
#
# A model and a prompt may be given by position or by keyword, be a default, or come from a
# partial; what a function says of itself tells which is which.
#
# Rule: nothing is guessed. Of a function that does not say what it takes only keywords are known,
# and where there is no `model` to replace, that is an error: the dear one would run on the money
# that was held for the cheap one.

MODEL = "model"
SPREAD = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def named_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included."""
    bound = _bound(function, args, kwargs)
    if bound is None:
        return kwargs
    further = _further(bound)
    named = {name: value for name, value in bound.arguments.items() if name != further}
    return named if further is None else {**bound.arguments[further], **named}


def with_model(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: str | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with another model instead, or say that it has none."""
    bound = _bound(function, args, kwargs)
    if bound is None:
        if MODEL in kwargs:
            return args, {**kwargs, MODEL: model}
        raise _no_model(function)
    own = bound.signature.parameters.get(MODEL)
    further = _further(bound)
    if own is not None and own.kind not in SPREAD:
        bound.arguments[MODEL] = model
    elif further is not None and MODEL in bound.arguments[further]:
        bound.arguments[further] = {**bound.arguments[further], MODEL: model}
    else:
        raise _no_model(function)
    return bound.args, bound.kwargs


def _bound(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments | None:
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        # It has no signature, or arguments that do not fit, which the call itself will tell.
        return None
    bound.apply_defaults()
    return bound


def _further(bound: inspect.BoundArguments) -> str | None:
    """Return the name of the parameter that takes all other keywords, if there is one."""
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return name
    return None


def _no_model(function: Callable[..., Any]) -> InvalidFieldError:
    name = getattr(function, "__qualname__", type(function).__name__)
    problem = f"is no argument of {name}, so a cheaper one cannot be used instead; let it take one"
    return InvalidFieldError(MODEL, problem)


# What a call weighs: by its model and the length of its prompt, corrected by what it really cost.
#
# The correction is the cost per weight of a type of task, as a moving average, beside that of all
# types. A type that costs twice as much as its weight says counts twice as much from then on.
#
# Rule: a correction is bounded, and so is what is remembered: a weight must not be driven to
# nothing or beyond all others by one odd call, nor memory by names that never come again.

STEP = 0.2
LEAST_FACTOR, MOST_FACTOR = 0.1, 10.0
MAX_TYPES = 1_024
MAX_PARTS = 10_000


class WeightEstimates:
    """By how much the weights of each type of call are off, from the measured cost."""

    def __init__(self) -> None:
        self._averages: OrderedDict[str, float] = OrderedDict()
        self._overall: float | None = None

    def factor(self, task_type: str) -> float:
        """Return by how much calls of a type cost more than their weight says; 1 if unknown."""
        average = self._averages.get(task_type)
        if average is None or not self._overall:
            return 1.0
        return min(max(average / self._overall, LEAST_FACTOR), MOST_FACTOR)

    def observe(self, task_type: str, *, weight: float, cost: float) -> None:
        """Note what a call of a type cost, in any unit that is always the same.

        `weight` is the one before correction, or the correction would be corrected in turn.
        """
        if weight <= 0 or cost < 0:
            return
        rate = cost / weight
        self._averages[task_type] = _moved(self._averages.get(task_type), rate)
        self._averages.move_to_end(task_type)
        self._overall = _moved(self._overall, rate)
        if len(self._averages) > MAX_TYPES:
            self._averages.popitem(last=False)


def prompt_chars_of(*prompts: object) -> int:
    """Count the characters of prompts: texts, and texts anywhere in lists and mappings of them."""
    chars, waiting = 0, list(prompts)
    for _ in range(MAX_PARTS):
        if not waiting:
            break
        part = waiting.pop()
        if isinstance(part, str):
            chars += len(part)
        elif isinstance(part, Mapping):
            waiting.extend(part.values())
        elif isinstance(part, list | tuple):
            waiting.extend(part)
    return chars


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + STEP * (value - average)
