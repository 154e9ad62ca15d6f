"""A deterministic event loop over virtual time, with hosts on it that crash between two awaits.

A run is a function of the program and the seed. From the inside out: the boot of a host, the queue
of ready callbacks, what a crash leaves behind, the errors, the clock, the loop, the hosts, and
`simulate`, which runs a program on all of it.
"""

from __future__ import annotations

import asyncio
import atexit
import heapq
import math
import warnings
from asyncio import tasks as asyncio_tasks
from bisect import insort
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, TypeVarTuple, Unpack
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from headgate.errors import HeadgateError, InvalidSettingError


class Boot:
    """The work of one host from a start to a crash. `crash` ends it through its host.

    A boot travels in a context variable, so whatever a task starts (tasks, timers, callbacks, async
    generators) belongs to the boot of that task. The loop asks a boot before each step, and runs
    nothing of one that is dead.
    """

    def __init__(self, host_name: str, crash: Callable[[], None]) -> None:
        self.host_name = host_name
        self.crash = crash
        self.dead = False
        self.steps = 0
        self.crash_at_step: int | None = None
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.generators: WeakSet[AsyncGenerator[Any, Any]] = WeakSet()

    @property
    def crash_is_due(self) -> bool:
        """True once the boot has taken the steps that it was given."""
        return self.crash_at_step is not None and self.steps >= self.crash_at_step

    def may_step(self) -> bool:
        """Crash now if that is due, and tell whether the boot still runs."""
        if not self.dead and self.crash_is_due:
            self.crash()
        return not self.dead

    def count_step(self) -> None:
        """Count one step that was taken, and crash right after it if that is due."""
        self.steps += 1
        self.may_step()


_CURRENT: ContextVar[Boot | None] = ContextVar("headgate_boot", default=None)


def boot_of(context: Context | None) -> Boot | None:
    """Return the boot that a context belongs to; None stands for the current context."""
    return _CURRENT.get() if context is None else context.get(_CURRENT)


def put_into(context: Context, boot: Boot) -> None:
    """Make a context belong to a boot."""
    context.run(_CURRENT.set, boot)


class Entry(NamedTuple):
    """A callback and the boot it belongs to; None is outside of every host."""

    handle: asyncio.Handle
    boot: Boot | None

    @property
    def is_void(self) -> bool:
        """True if it was cancelled, or if its host has crashed since."""
        return self.handle.cancelled() or (self.boot is not None and self.boot.dead)


class ReadyQueue:
    """Holds ready callbacks and chooses the next one.

    Without a generator of random numbers they run in the order they came, as in asyncio. With one,
    any task that is ready may be next. Plain callbacks keep their order among each other, because
    asyncio promises it; between tasks it promises nothing, and that is what a seed explores.
    """

    def __init__(self, random: Random | None) -> None:
        self._random = random
        self._plain: deque[Entry] = deque()
        self._steps: list[tuple[int, int, Entry]] = []
        self._pushed = 0
        self._numbers: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._plain) + len(self._steps)

    def push(self, entry: Entry, callback: Callable[..., object] | None = None) -> None:
        """Add a callback; `callback` tells whether it is the step of a task."""
        task = getattr(callback, "__self__", None)
        if self._random is None or not isinstance(task, asyncio.Task):
            self._plain.append(entry)
            return
        self._pushed += 1
        # Sorted by the task's number, not by arrival: a task group cancels its tasks in the order
        # of a set, which changes from process to process.
        insort(self._steps, (self._number_of(task), self._pushed, entry))

    def pop(self) -> Entry:
        """Take out the callback that runs next."""
        choices = len(self._steps) + bool(self._plain)
        chosen = self._random.randrange(choices) if self._random and choices > 1 else 0
        return self._steps.pop(chosen)[2] if chosen < len(self._steps) else self._plain.popleft()

    def _number_of(self, task: asyncio.Task[Any]) -> int:
        return self._numbers.setdefault(task, self._pushed)


KEPT_SIMULATIONS = 8
_CLOSE_ATTEMPTS = 100


class Remains:
    """The tasks and async generators that a crash left, kept so that their clean-up does not run.

    Python closes a suspended coroutine before it frees it, and closing runs its `finally` blocks:
    the very thing that a crash must not do. So the remains are kept for the next few simulations,
    long enough for a test to look at the state that the crash left. Then, outside of any
    simulation, they are closed, and whatever that raises or warns about is ignored.
    """

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []
        self._generators: list[AsyncGenerator[Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._tasks or self._generators)

    def add_task(self, task: asyncio.Task[Any]) -> None:
        """Take a task out of its loop's sight and keep it as it is."""
        # Otherwise the runner would cancel it at the end, and wait for it in vain.
        asyncio_tasks._unregister_task(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.append(task)

    def add_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Keep an async generator that nobody will iterate further."""
        self._generators.append(generator)

    def mark_as_seen(self) -> None:
        """Read the exceptions of tasks that had failed: whoever would have looked is gone."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()

    def discard(self) -> None:
        """Close everything, quietly: what clean-up code says now is said after the end."""
        self.mark_as_seen()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for task in self._tasks:
                _close(task)
            self._tasks.clear()
            self._generators.clear()


def _close(task: asyncio.Task[Any]) -> None:
    coroutine = task.get_coro()
    # Each await in its clean-up code stops a close once more.
    for _ in range(_CLOSE_ATTEMPTS):
        with suppress(Exception, asyncio.CancelledError):
            coroutine.close()
            return


_kept: deque[Remains] = deque()


def keep(remains: Remains) -> None:
    """Keep the remains of one more simulation, and discard those of the oldest."""
    if remains:
        _kept.append(remains)
    while len(_kept) > KEPT_SIMULATIONS:
        _kept.popleft().discard()


@atexit.register
def _discard_all() -> None:
    while _kept:
        _kept.popleft().discard()


# What a simulation can end with besides its result. Only the harness raises these.
#
#     HeadgateError
#     └── SimulationError
#         ├── DeadlockError          nothing is ready and no timer is set: it would wait for ever
#         ├── StepLimitError         more steps than allowed: something spins
#         ├── UnhandledError         a callback or a forgotten task raised, and nobody saw it
#         ├── NotSimulatedError      the program asked for threads, which no seed can order
#         └── HostCrashedError       the awaited work was on a host that crashed


class SimulationError(HeadgateError):
    """The base of every failure of a simulation."""


class DeadlockError(SimulationError):
    """Every task waits for something that no task and no timer will bring about."""

    def __init__(self, at_seconds: float, waiting: tuple[str, ...]) -> None:
        tasks = ", ".join(waiting) if waiting else "no task at all"
        super().__init__(
            f"deadlock after {at_seconds:g} s: nothing is ready and no timer is set; "
            f"waiting: {tasks}"
        )
        self.at_seconds = at_seconds
        self.waiting = waiting


class StepLimitError(SimulationError):
    """The simulation took more steps than `max_steps`."""

    def __init__(self, at_seconds: float, max_steps: int) -> None:
        super().__init__(
            f"more than {max_steps} steps, now at {at_seconds:g} s: "
            "look for a loop that never waits, or raise max_steps"
        )
        self.at_seconds = at_seconds
        self.max_steps = max_steps


class UnhandledError(SimulationError):
    """An exception that asyncio would only have logged; its cause is the exception itself."""


class NotSimulatedError(SimulationError):
    """The program asked the loop for something outside the simulation."""

    def __init__(self, wanted: str, *, wanted_for: str) -> None:
        super().__init__(
            f"a simulated loop has no {wanted} (asked for by {wanted_for}); "
            "give the program a fake instead"
        )
        self.wanted = wanted
        self.wanted_for = wanted_for


class HostCrashedError(SimulationError):
    """The host crashed before the awaited work was finished."""

    def __init__(self, host: str) -> None:
        super().__init__(f"host {host} crashed before this work was finished")
        self.host = host


DEFAULT_START = 1_767_225_600.0
"""2026-01-01T00:00:00Z, where a simulation begins unless it is told otherwise."""


class VirtualClock:
    """A clock that moves only when it is told to.

    Called, it gives Unix seconds, as `time.time` does; its `monotonic` starts at zero and is the
    counterpart of `time.monotonic`. The wall may be set, also backwards; the monotonic reading
    never goes back.
    """

    def __init__(self, start: float = DEFAULT_START) -> None:
        self._wall_at_zero = start
        self._elapsed_seconds = 0.0

    def __call__(self) -> float:
        """Return the time of day, in Unix seconds."""
        return self._wall_at_zero + self._elapsed_seconds

    def monotonic(self) -> float:
        """Return the seconds passed since the clock was made."""
        return self._elapsed_seconds

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if not seconds >= 0:
            raise InvalidSettingError("seconds", f"time cannot pass by {seconds}; use set_back")
        self._elapsed_seconds += seconds

    def advance_to(self, monotonic_seconds: float) -> None:
        """Let time pass up to a monotonic reading, exactly; an earlier reading changes nothing."""
        # Adding a difference could miss the reading by a rounding error, and the timer with it.
        self._elapsed_seconds = max(self._elapsed_seconds, monotonic_seconds)

    def set_back(self, seconds: float) -> None:
        """Move the wall back by `seconds` (forward if negative) while no time passes."""
        self._wall_at_zero -= seconds


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
    disturb the order of tasks. `steps` counts the callbacks that ran. Once `ending` is set, no host
    crashes any more, because the runner waits for every task that it cancels.

    Time jumps to the next timer. Nothing here reads a real clock or the process's random numbers,
    one callback runs at a time, and what would hang is an error.
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


T = TypeVar("T")


class Host:
    """A simulated machine: start work on it with `spawn`, lose all of it with `crash`.

    A crash is not a cancellation. It falls between two awaits, and of everything the host started
    nothing runs afterwards: no `except`, no `finally`, no callback, no timer. Hosts should meet
    only where real ones do, at a store or a network that outlives them: a crashed host that waited
    at a queue shared with others takes with it the wake-up it was given.
    """

    def __init__(self, loop: SimulatedLoop, name: str) -> None:
        self.name = name
        self.crashes = 0
        self._loop = loop
        self._boot = Boot(name, self.crash)
        self._spawned = 0
        # A dict, because the order in which outcomes fail is part of the schedule.
        self._outcomes: dict[asyncio.Future[Any], None] = {}

    @property
    def steps(self) -> int:
        """The steps taken since the host was last started."""
        return self._boot.steps

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start work on the host, which starts the host again if it has crashed.

        The future has the outcome; it raises `HostCrashedError` if the host crashes first, and
        cancelling it cancels the work.
        """
        context = copy_context()
        put_into(context, self._boot)
        self._spawned += 1
        task = self._loop.create_task(work, name=f"{self.name}/{self._spawned}", context=context)
        outcome: asyncio.Future[T] = self._loop.create_future()
        self._outcomes[outcome] = None
        self._loop.watch(outcome)
        # An empty context belongs to no host, so that a crash does not silence these two.
        outcome.add_done_callback(partial(self._forget, task), context=Context())
        task.add_done_callback(partial(_settle, outcome), context=Context())
        return outcome

    def crash(self) -> None:
        """Stop everything on the host for good, without any clean-up.

        A task that crashes its own host still runs to its next await. While the simulation ends,
        this does nothing.
        """
        if self._loop.ending:
            return
        boot, self._boot = self._boot, Boot(self.name, self.crash)
        boot.dead = True
        self.crashes += 1
        self._loop.abandon(boot)
        self._loop.record("crash", host=self.name)
        outcomes, self._outcomes = self._outcomes, {}
        for outcome in outcomes:
            _fail(outcome, HostCrashedError(self.name))

    def crash_after(self, steps: int) -> None:
        """Crash once the host has taken this many steps from now; 0 is before the next one.

        A step is what runs between two awaits. For a random crash, draw from `loop.random`.
        """
        if steps < 0:
            raise InvalidSettingError("steps", f"must be 0 or more, not {steps}")
        self._boot.crash_at_step = self._boot.steps + steps

    def _forget(self, task: asyncio.Task[T], outcome: asyncio.Future[T]) -> None:
        self._outcomes.pop(outcome, None)
        if outcome.cancelled():
            task.cancel()


def _settle(outcome: asyncio.Future[T], task: asyncio.Task[T]) -> None:
    error = None if task.cancelled() else task.exception()
    if outcome.done():
        return
    if task.cancelled():
        outcome.cancel()
    elif error is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


def _fail(outcome: asyncio.Future[Any], error: Exception) -> None:
    if not outcome.done():
        outcome.set_exception(error)
        # Reading it marks it as seen: a crash that nobody waits for is no failure.
        outcome.exception()


@dataclass(frozen=True)
class Simulation(Generic[T]):
    """What came out: the result, the recorded events, the virtual seconds and the steps it took."""

    result: T
    trace: tuple[TraceEvent, ...]
    seconds: float
    steps: int


def simulate(
    main: Callable[[SimulatedLoop], Coroutine[Any, Any, T]],
    *,
    seed: int | None = 0,
    start: float = DEFAULT_START,
    max_steps: int = DEFAULT_MAX_STEPS,
) -> Simulation[T]:
    """Run `main(loop)` on a fresh `SimulatedLoop`, and cancel at its end what it left running."""
    loop = SimulatedLoop(seed=seed, start=start, max_steps=max_steps)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            result = runner.run(main(loop))
            loop.check()
        finally:
            loop.ending = True
        seconds, steps = loop.time(), loop.steps
    return Simulation(result, tuple(loop.trace), seconds, steps)
