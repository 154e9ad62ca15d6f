"""Tasks as calls of a Python function that the configuration names.

The function of a target gets one argument, the order as a mapping. It returns what can be written
as JSON, or an outcome of its own. An `async def` runs on the loop. A plain function runs on a
thread; a thread cannot be killed, so a call that was given up is left to end by itself, and keeps
one of the target's threads until it does. Those threads never keep the service from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import cast

import msgspec

from headgate.core.lifecycle import NOTHING_USED, Cancelled, Failed, Limited, Outcome, Succeeded
from headgate.core.task import Submission
from headgate.errors import InvalidSettingError
from headgate.executors.executor import (
    MAX_DEPTH,
    OrderView,
    WorkOrder,
    as_json,
    shortened,
    too_large,
)
from headgate.executors.targets import CallableTarget
from headgate.providers.prices import PriceList
from headgate.providers.usage import usage_of

Function = Callable[..., object]
CoroutineFunction = Callable[..., Awaitable[object]]

_NOTHING_RETURNED = Succeeded()
_UNREADABLE = f"result is no JSON that can be read again; nest it at most {MAX_DEPTH} deep"


class CallableExecutor:
    """Calls the function of one target once for each task.

    `setting` is what names the function, where that is no target of the configuration. Whatever
    the function raises is shown to `on_raise`, on the thread of the function.
    """

    def __init__(
        self,
        name: str,
        target: CallableTarget,
        *,
        prices: PriceList,
        setting: str | None = None,
        on_raise: Callable[[BaseException], None] = lambda _error: None,
    ) -> None:
        self._name = name
        self._setting = setting or f"targets.{name}.entry_point"
        self._module, self._attribute = _parsed(target.entry_point, self._setting)
        self._max_bytes = target.max_result_bytes
        self._prices = prices
        self._on_raise = on_raise
        self._threads = asyncio.Semaphore(target.threads)
        self._function: Function = _not_open
        self._coroutine: CoroutineFunction | None = _not_open
        self._encode = msgspec.json.Encoder(enc_hook=_plain_value).encode

    async def open(self) -> None:
        """Import the function, or raise `InvalidSettingError`."""
        function = self._imported()
        self._function = function
        self._coroutine = cast("CoroutineFunction", function) if _is_async(function) else None

    async def close(self) -> None:
        """Do nothing: a thread that is left ends by itself."""

    async def execute(self, order: WorkOrder) -> Outcome:
        """Call the function with the order, and turn what it does into an outcome."""
        return await self.call(OrderView(order))

    async def call(self, /, *arguments: object, **keywords: object) -> Outcome:
        """Call the function, and turn what it returns or raises into an outcome."""
        if self._coroutine is None:
            return await self._on_a_thread(partial(self._function, *arguments, **keywords))
        try:
            value = await self._coroutine(*arguments, **keywords)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                raise
            return self._raised(error)
        return self._returned(value)

    async def _on_a_thread(self, function: Callable[[], object]) -> Outcome:
        await self._threads.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome] = loop.create_future()

        def settle(outcome: Outcome) -> None:
            self._threads.release()
            if not done.done():
                done.set_result(outcome)

        context = contextvars.copy_context()
        work = _Call(lambda: context.run(self._called, function), loop, settle)
        try:
            threading.Thread(target=work, daemon=True, name=f"headgate-{self._name}").start()
        except RuntimeError as error:
            self._threads.release()
            return Failed(error=str(error), is_transient=True, usage=NOTHING_USED)
        return await done

    def _called(self, function: Callable[[], object]) -> Outcome:
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001
            return self._raised(error)
        return self._returned(value)

    def _raised(self, error: BaseException) -> Failed:
        """Return what the function raised as a failure: nothing that it raises ends the service."""
        # Only the interpreter raises this one, when it lets go of a coroutine.
        if isinstance(error, GeneratorExit):
            raise error
        self._on_raise(error)
        return Failed(error=shortened(f"{type(error).__name__}: {error}"), is_transient=True)

    def _returned(self, value: object) -> Outcome:
        if value is None:
            return _NOTHING_RETURNED
        if isinstance(value, Succeeded):
            return self._checked(value)
        if isinstance(value, Failed | Limited | Cancelled):
            return value
        try:
            result = self._encode(value)
        except Exception as error:  # noqa: BLE001  a value may bring its own way of being written
            problem = f"result cannot be written as JSON: {type(error).__name__}: {error}"
            return Failed(error=shortened(problem))
        usage = usage_of(result, self._prices)
        if len(result) > self._max_bytes or as_json(result) is None:
            is_large = len(result) > self._max_bytes
            return Failed(
                error=too_large(self._max_bytes) if is_large else _UNREADABLE, usage=usage
            )
        return Succeeded(result=msgspec.Raw(result), usage=usage)

    def _checked(self, outcome: Succeeded) -> Outcome:
        if outcome.result is None or as_json(bytes(outcome.result)) is not None:
            return outcome
        return Failed(error="result is not JSON", usage=outcome.usage)

    def _imported(self) -> Function:
        try:
            found: object = importlib.import_module(self._module)
        except Exception as error:
            problem = f"{self._module} cannot be imported: {type(error).__name__}: {error}"
            raise InvalidSettingError(self._setting, shortened(problem)) from error
        for part in self._attribute.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            problem = f"{self._module} has no function {self._attribute}"
            raise InvalidSettingError(self._setting, problem)
        return found


class _Call:
    """A call on a thread that always ends with a word to the loop, while there is a loop."""

    def __init__(
        self,
        call: Callable[[], Outcome],
        loop: asyncio.AbstractEventLoop,
        settle: Callable[[Outcome], None],
    ) -> None:
        self._call = call
        self._loop = loop
        self._settle = settle

    def __call__(self) -> None:
        outcome: Outcome = Failed(error="the function ended its thread", is_transient=True)
        try:
            outcome = self._call()
        finally:
            # A loop that is closed says that the service has ended, and nobody waits any more.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._settle, outcome)


def _parsed(entry_point: str, setting: str) -> tuple[str, str]:
    module, _, attribute = entry_point.partition(":")
    names = [*module.split("."), *attribute.split(".")]
    if not all(name.isidentifier() for name in names):
        raise InvalidSettingError(setting, "must be written as package.module:function")
    return module, attribute


def _is_async(function: Function) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004  an object may have an async one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _plain_value(value: object) -> object:
    """Write the responses of the providers' own clients, which are Pydantic models."""
    dump = getattr(value, "model_dump", None)
    if dump is None:
        problem = f"{type(value).__name__} is not a type that JSON has"
        raise TypeError(problem)
    return dump(mode="json")


async def _not_open(*_arguments: object, **_keywords: object) -> object:
    raise RuntimeError("the executor of the function is not open")


# The built-in target: it gives back what it was given, so that a first task can be done.


async def echo(order: OrderView) -> dict[str, Submission]:
    """Return the task as its client wrote it."""
    return {"echo": order.work_order.submission}
