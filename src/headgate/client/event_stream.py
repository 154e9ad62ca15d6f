"""Reading a stream of server-sent events: bytes in any pieces become messages, and those events.

Rule: what a stream makes the client keep is bounded. A message that is longer ends the stream, as
if the connection had broken.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from headgate.core.tasks.events import TaskEvent
from headgate.core.tasks.task import TERMINAL, TaskStatus
from headgate.errors import ServiceUnavailableError
from headgate.task_snapshot import TaskSnapshot

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
