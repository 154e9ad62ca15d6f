"""Calls of functions under one scheduler: async ones and plain ones, which run in a thread.

Rules: a thread cannot be cancelled. A call that was keeps its place, and its money, until the
thread has come to its end; otherwise more of them would run than there are places. And what was
answered is paid for: it reaches whoever asked, also if its cost cannot be booked or read.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from headgate.core.model_weights import estimate_weight
from headgate.core.tasks.outcomes import Usage
from headgate.core.tasks.task import Task
from headgate.errors import InvalidFieldError, InvalidSettingError
from headgate.inprocess.arguments import named_arguments, with_model
from headgate.inprocess.budget import Estimate
from headgate.inprocess.grants import Grant, current_grant, granted_to
from headgate.inprocess.scheduler import LoadScheduler
from headgate.inprocess.streams import GovernedStream, ThreadedIterator
from headgate.inprocess.weights import WeightEstimates, prompt_chars_of

Result = TypeVar("Result")
UsageOf = Callable[[Any], Usage | None]

MAX_THREADS = 256
PROMPTS = ("prompt", "messages", "input", "contents", "system")

_log = logging.getLogger("headgate.inprocess")


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
        """Refuse that others take their place while there are any."""
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
        """Call a function when it has a place; a stream keeps the place that it was opened in."""
        _check_not_nested(how)
        kind = how.task_type or str(getattr(function, "__qualname__", type(function).__name__))
        weight, estimated = how.weight, None
        if weight is None:
            estimated = _estimated_weight(named_arguments(function, args, kwargs))
            weight = estimated * self.weights.factor(kind)
        grant = await self.scheduler.acquire(
            how.agent_id,
            task=Task(agent_id=how.agent_id, weight=weight),
            timeout=how.timeout,
            estimate=how.estimate,
        )
        return await _Call(self, grant, kind, estimated, how).run(function, args, kwargs)

    def start_thread(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run a plain function beside the event loop; as many at once as there are places."""
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
    """One call under way: which place it has, and the thread that it runs in, if it does."""

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
        """Call the function; however it ends, the place is freed after it."""
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
        await self._end_answer(None, is_whole=True)
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

    async def _end_answer(self, error: BaseException | None, *, is_whole: bool) -> None:
        """Book what an answer used, and free its place."""
        try:
            self._charge(is_whole=is_whole)
        except Exception:  # noqa: BLE001  nothing is known of what `usage_of` returned
            _log.warning("usage_of gave what cannot be booked", exc_info=True)
        await self._end(error)

    def _with_granted_model(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put the cheaper model in place, where that is what was held for.

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
            source, self._grant, read=self._read, end=self._end_answer, original=original
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
            "must be given for a governed call inside of another, which keeps its place meanwhile: "
            "enough of them would wait for each other for ever; better, govern only the inner one"
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
