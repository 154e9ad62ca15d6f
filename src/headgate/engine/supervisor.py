"""The supervisor: keeps loops running, and ends them together.

A loop that fails has a fault that nobody foresaw. It is logged once and started again after a
pause that grows, because a service that stops deciding is worse than one that tries again. A loop
with a `Pulse` is also started again when it has ended, or stands in one step for too long.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
import structlog

from headgate.core.retries import Backoff

log = structlog.get_logger("headgate.supervisor")

RESTART_BACKOFF = Backoff(base_seconds=0.5, max_seconds=30.0)
HEALTHY_SECONDS = 60.0

Loop = Callable[[], Coroutine[Any, Any, None]]


class Pulse:
    """The signs of life of a loop, kept by the loop and by whoever starts it again.

    `step_began` is in the time of the event loop, and None between steps; `last_step_at` is in
    Unix seconds. `problem` is empty while the loop does its work.
    """

    __slots__ = ("last_step_at", "problem", "restarts", "step_began")

    def __init__(self) -> None:
        self.step_began: float | None = None
        self.last_step_at: float | None = None
        self.restarts = 0
        self.problem = ""

    def begin(self) -> None:
        """Begin a step, or go on with one."""
        self.step_began = asyncio.get_running_loop().time()

    def wait(self) -> None:
        """Let a step rest for something that has an end of its own."""
        self.step_began = None

    def end(self, now: float) -> None:
        """End a step."""
        self.step_began = None
        self.last_step_at = now

    def step_seconds(self) -> float:
        """Return how long the step has taken that is under way; 0 between steps."""
        if self.step_began is None:
            return 0.0
        return asyncio.get_running_loop().time() - self.step_began

    def started_again(self, problem: str) -> None:
        """Take note that the loop was started again, and why."""
        self.restarts += 1
        self.step_began = None
        self.problem = problem


class Supervisor:
    """Runs loops until it is stopped."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._restarts: dict[str, asyncio.TimerHandle] = {}
        self._watched: dict[str, tuple[Loop, Pulse]] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def start(self, name: str, loop: Loop, pulse: Pulse | None = None) -> None:
        """Run a loop from now on, in place of one that has its name."""
        self.drop(name)
        self._begin(name, loop, pulse, failures=0)
        if pulse is not None:
            self._watched[name] = (loop, pulse)

    def task(self, name: str) -> asyncio.Task[None] | None:
        """Return what runs a loop."""
        return self._tasks.get(name)

    def drop(self, name: str) -> None:
        """End a loop, without waiting for it."""
        self._watched.pop(name, None)
        restart = self._restarts.pop(name, None)
        if restart is not None:
            restart.cancel()
        task = self._tasks.pop(name, None)
        if task is not None and not task.done():
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            task.cancel()

    def restart_stuck(self, longest_seconds: float) -> list[str]:
        """Start again what has ended or stands still, and return the names."""
        restarted = []
        for name, (loop, pulse) in list(self._watched.items()):
            problem = self._problem(name, pulse, longest_seconds)
            if problem:
                log.warning("a loop is started again", loop=name, problem=problem)
                pulse.started_again(problem)
                # The old one may not even hear that it is cancelled, so nobody waits for it.
                self.start(name, loop, pulse)
                restarted.append(name)
        return restarted

    async def stop(self, *, longest_seconds: float | None = None) -> None:
        """End all loops, and wait until they have ended, or for so long."""
        for name in list(self._tasks):
            self.drop(name)
        if not self._leaving:
            return
        _, deaf = await asyncio.wait(self._leaving, timeout=longest_seconds)
        for task in deaf:
            log.warning("a loop does not end, and is left behind", loop=task.get_name())

    def _begin(self, name: str, loop: Loop, pulse: Pulse | None, *, failures: int) -> None:
        self._restarts.pop(name, None)
        runner = asyncio.get_running_loop()
        task = self._tasks[name] = runner.create_task(loop(), name=name)
        # Not a coroutine around the loop, which would be a step more whenever the loop goes on.
        task.add_done_callback(
            partial(self._ended, name, loop, pulse, failures=failures, began_at=runner.time())
        )

    def _ended(
        self,
        name: str,
        loop: Loop,
        pulse: Pulse | None,
        task: asyncio.Task[None],
        *,
        failures: int,
        began_at: float,
    ) -> None:
        """Start a loop that failed again, after a pause."""
        error = None if task.cancelled() else task.exception()
        if error is None or self._tasks.get(name) is not task:
            return
        runner = task.get_loop()
        failures = 1 if runner.time() - began_at > HEALTHY_SECONDS else failures + 1
        log.error(
            "a loop failed and is started again", loop=name, failures=failures, exc_info=error
        )
        if pulse is not None:
            pulse.started_again(f"it failed: {type(error).__name__}")
        seconds = RESTART_BACKOFF.seconds(failures, draw=random.random())  # noqa: S311
        again = partial(self._begin, name, loop, pulse, failures=failures)
        self._restarts[name] = runner.call_later(seconds, again)

    def _problem(self, name: str, pulse: Pulse, longest_seconds: float) -> str:
        if self._tasks[name].done() and name not in self._restarts:
            return "it had ended"
        seconds = pulse.step_seconds()
        return f"it stood still for {seconds:.0f} seconds" if seconds > longest_seconds else ""


# Whether a node does its work, and which of its parts does not.
#
# Rule: what a driver says may name hosts and paths, so it goes to the log; whoever asks is told
# which part fails, in words of our own.

OK = "ok"
STORE_FAILS = "the store is unavailable; the log of this node says why"
LEDGER_FAILS = "the ledger is unavailable; the log of this node says why"
IS_LOADING = "the tasks are still being read"
DISPATCHER_FAILS = "it failed and is started again; the log of this node says why"
NO_DESCRIPTORS = (
    "no file descriptor is left; raise the limit on open files (ulimit -n), or lower max_inflight"
)
NO_DISPATCHER = "this node knows of none; one is elected within seconds"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine does its work, and what is in the way.

    `parts` has the store, the ledger, the dispatcher and the file descriptors, each with its
    problem or `ok`. With a `shortage` it does all its work, except for what that names.
    """

    is_ready: bool
    role: str
    problem: str = ""
    shortage: str = ""
    parts: dict[str, str] = {}


def judge(
    *,
    phase: str,
    is_leading: bool,
    is_loaded: bool,
    knows_leader: bool,
    has_fault: bool,
    store_problem: str,
    dispatcher_problem: str,
    ledger_problem: str,
    is_out_of_descriptors: bool,
    shortage: str = "",
) -> Health:
    """Return the health of a node; `phase` is why it does not work even if all parts do.

    `has_fault` says that the last round of the dispatcher failed in a way that nobody foresaw.
    """
    # The dispatcher uses both. Of the store alone the node tells too, within seconds.
    fails = bool(store_problem or (dispatcher_problem and not ledger_problem))
    parts = {
        "store": STORE_FAILS if fails else OK,
        "ledger": LEDGER_FAILS if ledger_problem else OK,
        "dispatcher": OK,
        "descriptors": NO_DESCRIPTORS if is_out_of_descriptors else OK,
    }
    if has_fault:
        parts["dispatcher"] = DISPATCHER_FAILS
    elif is_leading and not is_loaded:
        parts["dispatcher"] = IS_LOADING
    elif not is_leading and not knows_leader:
        parts["dispatcher"] = NO_DISPATCHER
    problem = phase or next((words for words in parts.values() if words != OK), "")
    role = "dispatcher" if is_leading else "node"
    if shortage and parts["store"] == OK:
        parts["store"] = shortage
    return Health(is_ready=not problem, role=role, problem=problem, shortage=shortage, parts=parts)
