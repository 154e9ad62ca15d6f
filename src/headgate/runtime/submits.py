"""Submits: new tasks on their way to the store, and who is told what came of them.

The dispatcher may be shown a task before the store has answered. Rule: only while no other is on
its way. One that was sent before waits already, though the desk does not know of it yet, and would
be overtaken; and of those that come together none is planned before all of them are there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from headgate.core.tasks.submit_keys import KeyRefusal
from headgate.runtime.dispatcher import Dispatcher
from headgate.store import (
    KeyedAnswer,
    KeyedSubmit,
    NewTask,
    Queued,
    TaskStore,
    TurnedAway,
    UnknownParent,
)

Submitted = Queued | TurnedAway | UnknownParent


class Submits:
    """Sends new tasks; the dispatcher sees what is stored, also when nobody awaits the answer."""

    def __init__(
        self, store: TaskStore, dispatcher: Dispatcher, *, show: Callable[[Submitted], None]
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._show = show
        self._unanswered = 0
        self._expected: str | None = None

    def send(self, new: NewTask) -> asyncio.Future[Submitted]:
        """Send a task; where there is nothing else to do, it is planned at once."""
        task_id = new.task.id
        if self._unanswered:
            self._unexpect()
        # Before it is sent: a plan that is made at once shares its transaction.
        elif self._dispatcher.expect(new):
            self._expected = task_id
        try:
            future = self._store.submit(new)
        except BaseException:
            self._unexpect()
            raise
        self._unanswered += 1
        # Not by whoever awaits the answer: a client that hangs up must not hide its task.
        future.add_done_callback(partial(self._answered, task_id))
        return future

    def send_keyed(self, keyed: KeyedSubmit) -> asyncio.Future[KeyedAnswer | KeyRefusal]:
        """Send the tasks of a request that has a key."""
        future = self._store.submit_keyed(keyed)
        self._unanswered += 1
        self._unexpect()
        ids = [one.task.id for one in keyed.tasks if isinstance(one, NewTask)]
        future.add_done_callback(partial(self._answered_keyed, ids))
        return future

    def _unexpect(self) -> None:
        """Take back what was expected, unless it is planned; its answer shows it as it is."""
        if self._expected is not None:
            self._dispatcher.unexpect(self._expected)
            self._expected = None

    def _answered(self, task_id: str, future: asyncio.Future[Submitted]) -> None:
        self._unanswered -= 1
        was_expected = task_id == self._expected
        if was_expected:
            self._expected = None
        if future.cancelled() or future.exception() is not None:
            # It may be on disk all the same.
            self._dispatcher.doubt(task_id)
            return
        if was_expected:
            # If it still waits, then as what it is, and not as what it was thought to be.
            self._dispatcher.unexpect(task_id)
        self._show(future.result())

    def _answered_keyed(
        self, task_ids: list[str], future: asyncio.Future[KeyedAnswer | KeyRefusal]
    ) -> None:
        self._unanswered -= 1
        if future.cancelled() or future.exception() is not None:
            for task_id in task_ids:
                self._dispatcher.doubt(task_id)
            return
        answer = future.result()
        if isinstance(answer, KeyedAnswer):
            for outcome in answer.fresh:
                self._show(outcome)
