"""What a client does for one call, without doing it: send, pause, listen, as steps.

A generator says what is to be done next and is told what came of it. So retries and waiting are
written once, and the two clients only carry out steps, one with threads' time and one with asyncio.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeVar

import msgspec

from headgate.client import calls
from headgate.client.calls import Call
from headgate.client.replies import NOT_REACHED, Reply, error_of, read_answer
from headgate.core.events import TaskEvent
from headgate.core.retries import Backoff
from headgate.core.task import TERMINAL, TaskStatus
from headgate.core.task_view import TaskSnapshot
from headgate.errors import (
    ServiceError,
    ServiceLimitError,
    ServiceUnavailableError,
    WaitTimeoutError,
)

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


# Reading a stream of server-sent events: bytes in any pieces become messages, and those events.
#
# Rule: what a stream makes the client keep is bounded. A message that is longer ends the stream, as
# if the connection had broken.

MAX_MESSAGE_BYTES = 64 * 2**20
SILENCE_SECONDS = 60.0
"""The service gives a sign of life more often; one that is silent for longer has gone."""


class StreamOverError(Exception):
    """The service says that nothing more will come: the task had ended when it was last seen."""


class Message(NamedTuple):
    """One message of a stream; `id` is what a later stream goes on after.

    One without data says nothing but that.
    """

    id: str
    data: bytes


class MessageReader:
    """Takes the bytes of a stream, and gives the messages that are complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._size = 0
        self._data: list[bytes] = []
        self._id = ""
        self._has_id = False

    def feed(self, piece: bytes) -> list[Message]:
        """Return the messages that end within this piece."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        found = [message for line in lines if (message := self._line(line.rstrip(b"\r")))]
        if len(self._rest) + self._size > MAX_MESSAGE_BYTES:
            raise ServiceUnavailableError("an event is too long", code="bad_answer")
        return found

    def _line(self, line: bytes) -> Message | None:
        if not line:
            return self._finished()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value)
        elif name == b"id":
            self._id = value.decode("utf-8", "replace")
            self._has_id = True
        return None

    def _finished(self) -> Message | None:
        data = b"\n".join(self._data)
        is_message = bool(data) or self._has_id
        self._data, self._size, self._has_id = [], 0, False
        return Message(self._id, data) if is_message else None


class _Standing(msgspec.Struct):
    """What every message about a task says, be it an event or a snapshot."""

    state: TaskStatus | None = None
    attempt: int | None = None


_EVENTS = msgspec.json.Decoder(TaskEvent)
_STANDINGS = msgspec.json.Decoder(_Standing)


def event_of(message: Message) -> TaskEvent | None:
    """Return the event of a message; None if it has none, or none that this version knows."""
    try:
        return _EVENTS.decode(message.data)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return None


def is_news(message: Message, seen: TaskSnapshot) -> bool:
    """Tell whether a message says that a task is no longer as it was seen."""
    standing = _standing(message)
    if standing.state is None:
        return False
    return (standing.state, standing.attempt) != (seen.state, seen.attempt)


def is_last(message: Message) -> bool:
    """Tell whether nothing can follow in the stream of a task."""
    return _standing(message).state in TERMINAL


def _standing(message: Message) -> _Standing:
    try:
        return _STANDINGS.decode(message.data)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return _Standing()


# Taking up a stream of events again after it broke: after which event, when, and how often.

_STREAM_BACKOFF = Backoff(base_seconds=0.5, max_seconds=15.0)


class Following:
    """What a client remembers of a stream from one connection to the next."""

    def __init__(
        self, last_event_id: str | None, patience_seconds: float, *, clock: Callable[[], float]
    ) -> None:
        self.last_event_id = last_event_id
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._failures = 0
        self._lost_at: float | None = None

    def saw(self, message: Message) -> None:
        """Note a message: the stream works, and goes on after it."""
        self.last_event_id = message.id or self.last_event_id
        self._failures = 0
        self._lost_at = None

    def ended(self) -> float:
        """Note that the service ended the stream, and return how long to wait."""
        return self._pause_seconds()

    def failed(self, error: ServiceError) -> float:
        """Return how long to wait after an error, or raise it if waiting does not help."""
        if not isinstance(error, (ServiceLimitError, ServiceUnavailableError)):
            raise error
        if self._lost_at is None:
            self._lost_at = self._clock()
        if self._clock() - self._lost_at >= self._patience_seconds:
            raise error
        return max(self._pause_seconds(), error.retry_after_seconds or 0.0)

    def _pause_seconds(self) -> float:
        self._failures += 1
        return _STREAM_BACKOFF.seconds(self._failures, draw=random.random())  # noqa: S311 - spreads load
