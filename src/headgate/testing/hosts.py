"""Hosts: groups of tasks that live and crash together.

A crash is not a cancellation. It falls between two awaits, and of everything the host started
nothing runs afterwards: no `except`, no `finally`, no callback, no timer. Hosts should meet only
where real ones do, at a store or a network that outlives them: a crashed host that waited at a
queue shared with others takes with it the wake-up it was given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, copy_context
from functools import partial
from typing import Any, TypeVar

from headgate.errors import InvalidSettingError
from headgate.testing.boots import Boot, put_into
from headgate.testing.failures import HostCrashedError
from headgate.testing.loop import SimulatedLoop

T = TypeVar("T")


class Host:
    """A simulated machine: start work on it with `spawn`, lose all of it with `crash`."""

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
