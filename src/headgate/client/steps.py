"""What a client does for one call, without doing it: send, pause, listen, as steps.

A generator says what is to be done next and is told what came of it. So retries and waiting are
written once, and the two clients only carry out steps, one with threads' time and one with asyncio.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from headgate.client import calls
from headgate.client.calls import Call
from headgate.client.replies import NOT_REACHED, Reply, error_of, read_answer
from headgate.core.tasks.retries import Backoff
from headgate.core.tasks.task import TERMINAL
from headgate.errors import (
    ServiceError,
    ServiceLimitError,
    ServiceUnavailableError,
    WaitTimeoutError,
)
from headgate.task_snapshot import TaskSnapshot

LONGEST_PAUSE_SECONDS = 30.0
LISTEN_SECONDS = 60.0
TRIED_AGAIN = (502, 503, 504)
NO_BUDGET = 402

_BACKOFF = Backoff(base_seconds=0.25, max_seconds=8.0)
_POLLING = Backoff(base_seconds=0.1, max_seconds=2.0, spread=0.2)

Answered = TypeVar("Answered")


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Listen:
    """Wait until a task is no longer as it was last seen, as its events tell, for a while."""

    seen: TaskSnapshot
    seconds: float


Step = Call[Any] | Pause | Listen
Outcome = Reply | ServiceError | bool | None
"""Of a call: what came back, or why nothing did. Of listening: whether it worked."""
Steps = Generator[Step, Outcome, Answered]


def attempts(call: Call[Answered], *, retries: int) -> Steps[Answered]:
    """Send a call until it is answered, or refused for good, or was tried often enough."""
    for attempt in count(1):
        error, reply = _parted((yield call))
        if error is None and reply is not None:
            return read_answer(reply, call.answer)
        wait = None if error is None else pause_seconds(call, error, attempt)
        if error is not None and (wait is None or attempt > retries):
            raise error
        yield Pause(wait or 0.0)
    raise AssertionError  # pragma: no cover - the count has no end


def pause_seconds(call: Call[Any], error: ServiceError, attempt: int) -> float | None:
    """Return how long to wait before a call is sent again; None if it is not to be."""
    if not _may_help(call, error):
        return None
    drawn = _BACKOFF.seconds(attempt, draw=random.random())  # noqa: S311 - spreads load, no secret
    wanted = max(drawn, error.retry_after_seconds or 0.0)
    return wanted if wanted <= LONGEST_PAUSE_SECONDS else None


def _may_help(call: Call[Any], error: ServiceError) -> bool:
    # A budget does not fill up again within seconds, as a queue empties.
    is_full = isinstance(error, ServiceLimitError) and error.status != NO_BUDGET
    if is_full or error.code == NOT_REACHED:
        return True
    is_passing = error.status == 0 or error.status in TRIED_AGAIN
    return call.is_repeatable and is_passing and isinstance(error, ServiceUnavailableError)


def _parted(outcome: Outcome) -> tuple[ServiceError | None, Reply | None]:
    if isinstance(outcome, Reply):
        return error_of(outcome), outcome
    assert isinstance(outcome, ServiceError), outcome  # noqa: S101 - of a call nothing else comes
    return outcome, None


def next_change(
    task_id: str,
    seen: TaskSnapshot | None,
    *,
    retries: int,
    clock: Callable[[], float],
    until: float | None,
) -> Steps[TaskSnapshot]:
    """Return a task when it is no longer as it was seen; at once if it was not seen yet.

    Events say when to look, and looking says what is so. Where there are no events, because a
    proxy keeps them back, looking alone does.
    """
    for look in count(1):
        if seen is not None:
            yield from _until_news(seen, look, clock=clock, until=until)
        snapshot = yield from attempts(calls.get(task_id), retries=retries)
        if seen is None or is_changed(snapshot, seen):
            return snapshot
        if until is not None and clock() >= until:
            line = f"task {task_id} is still {snapshot.state.value}; it goes on"
            raise WaitTimeoutError(line, code="wait_timeout", task_id=task_id)
        if look > 1:
            # Events that promise a change which cannot be seen must not make this spin.
            yield Pause(_POLLING.seconds(look, draw=random.random()))  # noqa: S311
    raise AssertionError  # pragma: no cover - the count has no end


def _until_news(
    seen: TaskSnapshot, look: int, *, clock: Callable[[], float], until: float | None
) -> Steps[None]:
    left = LISTEN_SECONDS if until is None else max(0.0, until - clock())
    if left and not (yield Listen(seen, min(left, LISTEN_SECONDS))):
        yield Pause(min(left, _POLLING.seconds(look, draw=random.random())))  # noqa: S311


def is_changed(now: TaskSnapshot, before: TaskSnapshot) -> bool:
    """Tell whether a task has moved on."""
    return (now.state, now.attempt) != (before.state, before.attempt)


def has_ended(task: TaskSnapshot) -> bool:
    """Tell whether a task is in a state that it cannot leave."""
    return task.state in TERMINAL
