"""An event loop in which time jumps to the next timer, and a seed decides who goes first.

The rule it keeps: a run is a function of the program and the seed. Nothing here reads a real clock
or the process's random numbers, one callback runs at a time, and what would hang is an error.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context
from dataclasses import dataclass, field
from random import Random
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack
from weakref import WeakSet, WeakValueDictionary

from headgate.testing.boots import Boot, boot_of, put_into
from headgate.testing.clock import DEFAULT_START, VirtualClock
from headgate.testing.failures import (
    DeadlockError,
    NotSimulatedError,
    StepLimitError,
    UnhandledError,
)
from headgate.testing.ready import Entry, ReadyQueue
from headgate.testing.remains import Remains, keep

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

DEFAULT_MAX_STEPS = 1_000_000
_TASKS_NAMED = 10


@dataclass(frozen=True)
class TraceEvent:
    """One recorded event: seconds since the start, the host (or ""), what happened, and details."""

    at_seconds: float
    host: str
    event: str
    details: dict[str, object] = field(default_factory=dict)


class SimulatedLoop(asyncio.BaseEventLoop):
    """An asyncio event loop over a `VirtualClock`; it has neither sockets nor threads.

    `seed` None keeps asyncio's order of ready callbacks; any number shuffles the tasks among them.
    `random` is for the program: the same seed gives the same numbers, and drawing from it does not
    disturb the order of tasks. `steps` counts the callbacks that ran. Once `ending` is
    set, no host crashes any more, because the runner waits for every task that it cancels.
    """

    _stopping: bool
    _asyncgens: WeakSet[AsyncGenerator[Any, Any]]

    def __init__(
        self,
        *,
        seed: int | None = 0,
        start: float = DEFAULT_START,
        max_steps: int = DEFAULT_MAX_STEPS,
    ) -> None:
        super().__init__()
        self.clock = VirtualClock(start)
        self.random = Random(f"program {seed}")  # noqa: S311
        self.trace: list[TraceEvent] = []
        self.steps = 0
        self.ending = False
        self.max_steps = max_steps
        self._step_limit = max_steps
        self._queue = ReadyQueue(None if seed is None else Random(f"order {seed}"))  # noqa: S311
        self._timers: list[tuple[float, int, Entry]] = []
        self._timers_set = 0
        self._timers_void = 0
        self._remains = Remains()
        self._unhandled: dict[str, Any] | None = None
        self._watched: WeakValueDictionary[int, asyncio.Future[Any]] = WeakValueDictionary()
        self._watched_count = 0

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self.clock.monotonic()

    def record(self, event: str, **details: object) -> None:
        """Add an event to the trace, with the virtual time and the current host."""
        boot = boot_of(None)
        host = "" if boot is None else boot.host_name
        self.trace.append(TraceEvent(self.time(), host, event, details))

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Let a callback run at the present virtual time."""
        self._refuse_if_closed()
        handle = asyncio.Handle(callback, args, self, context)
        self._queue.push(Entry(handle, boot_of(context)), callback)
        return handle

    # There is one thread, but the runner's handler of Ctrl-C calls this one.
    call_soon_threadsafe = call_soon

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Let a callback run when virtual time has come to `when`."""
        self._refuse_if_closed()
        if math.isnan(when):
            raise ValueError("a timer needs a time, not NaN")
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, Entry(handle, boot_of(context))))
        return handle

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
        **options: bool | None,
    ) -> asyncio.Task[T]:
        """Start a task; it belongs to the host of the task that started it."""
        boot = boot_of(context) or boot_of(None)
        if boot is not None and context is not None and boot_of(context) is None:
            put_into(context, boot)
        task = super().create_task(coro, name=name, context=context, **options)
        self.watch(task)
        if boot is not None:
            self._adopt(task, boot)
        return task

    def run_in_executor(
        self,
        executor: Executor | None,  # noqa: ARG002
        func: Callable[[Unpack[Ts]], T],
        *args: *Ts,  # noqa: ARG002
    ) -> NoReturn:
        """Refuse: no seed decides when a thread ends."""
        raise NotSimulatedError("threads", wanted_for=getattr(func, "__qualname__", repr(func)))

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Let the simulation fail where asyncio would write a line to the log."""
        if self.is_closed():
            super().default_exception_handler(context)
        elif self._unhandled is None:
            self._unhandled = context

    def watch(self, future: asyncio.Future[Any]) -> None:
        """Let `check` fail if this future has failed by then and nobody has seen it."""
        self._watched_count += 1
        self._watched[self._watched_count] = future

    def check(self) -> None:
        """Raise what asyncio would only have logged, now or when it frees a forgotten task."""
        self._raise_unhandled()
        self._remains.mark_as_seen()
        for future in list(self._watched.values()):
            if future.done() and future._log_traceback:
                raise UnhandledError("a task failed and nobody looked") from future.exception()

    def abandon(self, boot: Boot) -> None:
        """Never resume anything of a dead boot."""
        for task in boot.tasks:
            self._remains.add_task(task)
        for generator in boot.generators:
            self._asyncgens.discard(generator)
            self._remains.add_generator(generator)

    def close(self) -> None:
        """Close the loop; a task that even cancelling did not end is left as it is."""
        if self.is_closed():
            return
        super().close()
        for task in asyncio.all_tasks(self):
            self._remains.add_task(task)
        self._timers.clear()
        keep(self._remains)

    def _run_once(self) -> None:
        if self._stopping and not self._queue:
            return
        self._refuse_to_spin()
        entry = self._next_entry()
        self.steps += 1
        entry.handle._run()
        if entry.boot is not None:
            entry.boot.count_step()
        self._raise_unhandled()

    def _next_entry(self) -> Entry:
        while True:
            self._wake_due_timers()
            while self._queue:
                entry = self._queue.pop()
                if not entry.is_void and (entry.boot is None or entry.boot.may_step()):
                    return entry
            self._jump_to_next_timer()

    def _wake_due_timers(self) -> None:
        now = self.clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._queue.push(heapq.heappop(self._timers)[2])

    def _jump_to_next_timer(self) -> None:
        while self._timers and self._timers[0][2].is_void:
            heapq.heappop(self._timers)
        when = self._timers[0][0] if self._timers else math.inf
        if when == math.inf:
            raise DeadlockError(self.time(), self._waiting_tasks())
        self.clock.advance_to(when)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:  # noqa: ARG002
        # A program that sets and cancels a long timeout each round must not pile up timers.
        self._timers_void += 1
        if self._timers_void > len(self._timers) // 2 + 100:
            self._timers = [timer for timer in self._timers if not timer[2].is_void]
            heapq.heapify(self._timers)
            self._timers_void = 0

    def _refuse_to_spin(self) -> None:
        if self.steps >= self._step_limit:
            # The runner still has to cancel what is left, so that has a limit of its own.
            self._step_limit += self.max_steps
            raise StepLimitError(self.time(), self.max_steps)

    def _raise_unhandled(self) -> None:
        unhandled, self._unhandled = self._unhandled, None
        if unhandled is not None:
            raise UnhandledError(unhandled["message"]) from unhandled.get("exception")

    def _adopt(self, task: asyncio.Task[Any], boot: Boot) -> None:
        if boot.dead:
            self._remains.add_task(task)
        else:
            boot.tasks.add(task)

    def _asyncgen_firstiter_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        super()._asyncgen_firstiter_hook(agen)  # type: ignore[misc]
        boot = boot_of(None)
        if boot is not None:
            boot.generators.add(agen)

    def _waiting_tasks(self) -> tuple[str, ...]:
        names = sorted(task.get_name() for task in asyncio.all_tasks(self))
        more = (f"and {len(names) - _TASKS_NAMED} more",) if len(names) > _TASKS_NAMED else ()
        return (*names[:_TASKS_NAMED], *more)

    def _refuse_if_closed(self) -> None:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
