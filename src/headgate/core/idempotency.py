"""Submissions under a key: the same key gets the same answer, however often it is sent.

What is kept is what became of each task, and not the text of an answer: that is written from it
each time. Rule: what became of a task is kept unless there was no room for it. So a request with
its key may be sent again until all of its tasks were taken, and none of them is taken twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from headgate.core.admission import Rejected
from headgate.core.task import TaskStatus

KEPT_SECONDS = 86_400.0
"""How long a key is kept at least."""

MAX_KEYS = 10_000_000
MAX_KEPT_BYTES = 4 * 2**30
"""What is kept in all; beyond that a new key is refused, because none may be forgotten early."""

MAX_KEY_LENGTH = 255
KEY_RULE = f"1 to {MAX_KEY_LENGTH} visible ASCII characters"

OWNER_SHARE = 1 / 4
"""How much of what is kept in all one token may take, so that none keeps others from theirs."""


def is_key(text: str) -> bool:
    """Tell whether a text can be a key."""
    is_visible = text.isascii() and text.isprintable() and " " not in text
    return is_visible and 0 < len(text) <= MAX_KEY_LENGTH


class SubmitKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key of one caller, with the digest of the request that it was sent with.

    `owner` is the id of the caller's token; empty where none is asked for, and all are one caller.
    """

    owner: str
    name: str
    digest: str


class TakenEntry(msgspec.Struct, frozen=True, kw_only=True, tag="taken"):
    """A task that was stored, as it was then."""

    task_id: str
    state: TaskStatus
    position: int
    created_at: float
    warning: str = ""


class RejectedEntry(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    """A task for which there was no room; it may be tried again. With an id it is stored."""

    task_id: str | None
    rejected: Rejected


class OrphanEntry(msgspec.Struct, frozen=True, kw_only=True, tag="orphan"):
    """A task that depends on one that was not known; nothing was stored."""

    parent_id: str


class InvalidEntry(msgspec.Struct, frozen=True, kw_only=True, tag="invalid", omit_defaults=True):
    """A task that cannot be taken as it is; `is_whole` if that goes for the whole request."""

    code: str
    field: str
    message: str
    is_whole: bool = False


SubmitEntry = TakenEntry | RejectedEntry | OrphanEntry | InvalidEntry
"""What became of one task of a request."""


class KeyRefusal(Enum):
    """Why nothing was done under a key."""

    MISMATCH = "mismatch"
    FULL = "full"


def is_kept(entries: Sequence[SubmitEntry]) -> bool:
    """Tell whether this is an answer for good: something was taken, or nothing ever could be."""
    if any(isinstance(entry, TakenEntry) for entry in entries):
        return True
    return not any(isinstance(entry, RejectedEntry) for entry in entries)


def to_try_again(
    kept: Sequence[SubmitEntry], sent: Sequence[object | InvalidEntry]
) -> tuple[int, ...]:
    """Return the places of the tasks that had no room, in a request that is sent again.

    There are none if the request as a whole would not be taken any more: then what is kept stays.
    """
    if len(kept) != len(sent):
        return ()
    return tuple([place for place, entry in enumerate(kept) if isinstance(entry, RejectedEntry)])
