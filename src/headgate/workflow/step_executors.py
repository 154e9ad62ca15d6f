"""Executors of steps that say themselves what is done: commands and functions.

The request of a step is the input of its task. Rule: variables are put in here and live as long as
the attempt; what cannot be filled or started has surely cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from headgate.core.lifecycle import (
    NOTHING_USED,
    SHORTEST_PAUSE_SECONDS,
    Failed,
    Limited,
    Outcome,
    pause_seconds,
)
from headgate.errors import InvalidSettingError
from headgate.executors.callable import CallableExecutor
from headgate.executors.command import PASSED_ON, Child, Children, variables_of
from headgate.executors.executor import Executor, WorkOrder, shortened
from headgate.executors.targets import MAX_OUTPUT_BYTES
from headgate.providers.prices import PriceList
from headgate.workflow import step_requests
from headgate.workflow.placeholders import EnvPlaceholder
from headgate.workflow.step_requests import CallRequest, CommandRequest, Variables

OWN_PREFIX = "step:"
"""How the names begin under which steps run that need no target."""

STEP_LABEL = "step"
RUN_LABEL = "run"
"""The labels under which a task tells what it belongs to; a step cannot take them."""

KILL_GRACE_SECONDS = 5.0

AnyRequest = TypeVar("AnyRequest")


class WithinTimeout:
    """Has a step that meets nothing but an overload end at its timeout.

    An attempt that is told to come back later costs nothing and is made again, so it could go on
    for ever. How long an endpoint has been overloaded is counted for all of its steps together:
    what waited behind those that gave up has waited as long. A limit that names its end is
    waited for, however long that takes.
    """

    def __init__(self, executor: Executor, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.executor = executor
        self._clock = clock
        self._overload: _Overload | None = None

    async def open(self) -> None:
        """Make the executor ready."""
        await self.executor.open()

    async def close(self) -> None:
        """Let go of what it shares."""
        await self.executor.close()

    async def execute(self, order: WorkOrder) -> Outcome:
        """Do the work, unless the endpoint was overloaded too long and wants to be left alone."""
        began, known = self._clock(), self._overload
        if known is not None and began < known.until and known.outlasts(order, began):
            return known.timed_out(order)
        outcome = await self.executor.execute(order)
        if not isinstance(outcome, Limited):
            self._overload = None
            return outcome
        if _has_end(outcome):
            return outcome
        now, pause = self._clock(), pause_seconds(outcome, order.attempt)
        since = began if self._overload is None else self._overload.since
        met = self._overload = _Overload(since=since, until=now + pause, error=outcome.error)
        if met.outlasts(order, now):
            return met.timed_out(order)
        if order.attempt_seconds is not None:
            left = since + order.attempt_seconds - now
            pause = max(SHORTEST_PAUSE_SECONDS, min(pause, left))
        return msgspec.structs.replace(outcome, retry_after_seconds=pause)


class _Overload(msgspec.Struct, frozen=True, kw_only=True):
    """Since when an endpoint is overloaded, until when it wants to be left alone, and its words."""

    since: float
    until: float
    error: str

    def outlasts(self, order: WorkOrder, now: float) -> bool:
        return order.attempt_seconds is not None and now - self.since >= order.attempt_seconds

    def timed_out(self, order: WorkOrder) -> Failed:
        error = f"timed out after {order.attempt_seconds:g} s: {self.error}"
        return Failed(error=shortened(error), is_transient=True, usage=NOTHING_USED)


def _has_end(limited: Limited) -> bool:
    seconds = limited.retry_after_seconds
    is_named = seconds is not None and seconds >= SHORTEST_PAUSE_SECONDS
    return is_named and not limited.is_overload


class CommandSteps:
    """Runs the commands of all steps."""

    def __init__(self, folder: Path, variables: Variables, prices: PriceList) -> None:
        self._folder = folder
        self._variables = variables
        self._children = Children(prices=prices, hidden=variables)
        self._is_open = False
        environ = variables.environ
        self._passed_on = {name: environ[name] for name in PASSED_ON if name in environ}

    async def open(self) -> None:
        """See whether children can be made to end with the run; asked for each step, seen once."""
        if not self._is_open:
            self._is_open = True
            await self._children.open()

    async def close(self) -> None:
        """End what the last steps have left running."""
        await self._children.close()

    async def execute(self, order: WorkOrder) -> Outcome:
        """Run the command; a cancellation ends its whole group before it goes on."""
        try:
            child = self._child(request_of(order, CommandRequest), order)
        except InvalidSettingError as error:
            return self._children.not_started(str(error), is_transient=False)
        return await self._children.run(child)

    def _child(self, request: CommandRequest, order: WorkOrder) -> Child:
        setting = setting_of(order)
        fill = self._variables.filled
        cwd = "" if request.cwd is None else fill(request.cwd, f"{setting}.cwd")
        own = {name: fill(text, f"{setting}.env.{name}") for name, text in request.env.items()}
        return Child(
            command=tuple([fill(part, f"{setting}.command") for part in request.command]),
            environ=self._passed_on | self._passed(request, setting) | own | variables_of(order),
            cwd=str(self._folder / cwd),
            stdin=(request.stdin or "").encode(errors="replace"),
            max_output_bytes=MAX_OUTPUT_BYTES,
            kill_grace_seconds=KILL_GRACE_SECONDS,
        )

    def _passed(self, request: CommandRequest, setting: str) -> dict[str, str]:
        environ = self._variables.environ
        return {
            name: self._variables.filled((EnvPlaceholder(name=name),), f"{setting}.pass_env")
            for name in request.pass_env
            if name in environ
        }


class CallSteps:
    """Calls one Python function with what the step gives it, and with nothing of its task.

    A mapping is given as keyword arguments, any other value as one argument.
    """

    def __init__(self, executor: CallableExecutor) -> None:
        self._executor = executor

    async def open(self) -> None:
        """Import the function, or raise `InvalidSettingError`."""
        await self._executor.open()

    async def close(self) -> None:
        """Do nothing: a thread that is left ends by itself."""
        await self._executor.close()

    async def execute(self, order: WorkOrder) -> Outcome:
        """Call the function with what the step gives it."""
        given = request_of(order, CallRequest).given
        if given is msgspec.UNSET:
            return await self._executor.call()
        if isinstance(given, dict):
            return await self._executor.call(**given)
        return await self._executor.call(given)


class WrongSteps:
    """Fails what could not even be asked for, with the words for it."""

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def execute(self, order: WorkOrder) -> Outcome:
        """Say what is wrong; trying again cannot help."""
        given = order.submission.input
        error = msgspec.json.decode(given) if given else "the step cannot be asked for"
        return Failed(error=str(error), usage=NOTHING_USED)


def setting_of(order: WorkOrder) -> str:
    """Return what errors call the step of an order."""
    return f"steps.{order.submission.labels.get(STEP_LABEL, '')}"


def request_of(order: WorkOrder, kind: type[AnyRequest]) -> AnyRequest:
    """Return what a step asks for."""
    given = order.submission.input
    request = step_requests.decoded(given) if given else None
    if not isinstance(request, kind):
        problem = f"task {order.task_id} has no request of a {kind.__name__}"
        raise TypeError(problem)
    return request
