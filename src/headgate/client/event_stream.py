"""A stream of events: bytes in any pieces become messages, those become events.

Rule: what a stream makes the client keep is bounded. A message that is too long ends the stream, as
if the connection had broken.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from headgate.core.events import TaskEvent
from headgate.core.retries import Backoff
from headgate.core.task import TERMINAL, TaskStatus
from headgate.core.task_view import TaskSnapshot
from headgate.errors import ServiceError, ServiceLimitError, ServiceUnavailableError

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


class _TaskState(msgspec.Struct):
    """What every message about a task says, be it an event or a snapshot."""

    state: TaskStatus | None = None
    attempt: int | None = None


_BACKOFF = Backoff(base_seconds=0.5, max_seconds=15.0)
_EVENTS = msgspec.json.Decoder(TaskEvent)
_STATES = msgspec.json.Decoder(_TaskState)


def event_of(message: Message) -> TaskEvent | None:
    """Return the event of a message; None if it has none, or none that this version knows."""
    try:
        return _EVENTS.decode(message.data)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return None


def is_news(message: Message, seen: TaskSnapshot) -> bool:
    """Tell whether a message says that a task is no longer as it was seen."""
    said = _state(message)
    if said.state is None:
        return False
    return (said.state, said.attempt) != (seen.state, seen.attempt)


def is_last(message: Message) -> bool:
    """Tell whether nothing can follow in the stream of a task."""
    return _state(message).state in TERMINAL


def _state(message: Message) -> _TaskState:
    try:
        return _STATES.decode(message.data)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return _TaskState()


class Reconnector:
    """Takes a broken stream up again: after which event, when, and until when it tries."""

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
        return _BACKOFF.seconds(self._failures, draw=random.random())  # noqa: S311 - spreads load
