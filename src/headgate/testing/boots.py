"""One boot of a host: everything it started between a start and a crash.

A boot travels in a context variable, so whatever a task starts (tasks, timers, callbacks, async
generators) belongs to the boot of that task. The loop asks a boot before each step, and runs
nothing of one that is dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextvars import Context, ContextVar
from typing import Any
from weakref import WeakSet


class Boot:
    """The work of one host from a start to a crash. `crash` ends it through its host."""

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
