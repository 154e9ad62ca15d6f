"""Deadlines: which are accepted, and when a waiting task has missed its own.

One boundary everywhere: at its deadline a task has no time left. So a deadline is accepted exactly
if a task with it would not be expired at once.
"""

from __future__ import annotations

import re
from datetime import datetime

import msgspec

from headgate.core.tasks.task import Task, TaskStatus
from headgate.errors import InvalidSettingError

INVALID_FORMAT = "invalid deadline format"
IN_THE_PAST = "deadline is in the past"
EXPIRED_WHILE_QUEUED = "deadline exceeded while queued"

# ISO 8601 has many more forms (week dates, no offset, no colons) that RFC 3339 leaves out.
_RFC_3339 = re.compile(
    r"(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2})[Tt ](?P<minute>[0-9]{2}:[0-9]{2}):(?P<second>[0-9]{2})"
    r"(?P<fraction>\.[0-9]+)?(?P<offset>[Zz]|[+-][0-9]{2}:[0-9]{2})"
)
_LEAP_SECOND = "60"
_SECONDS_PER_DAY = 86400


class DeadlineRefused(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted deadline that cannot be kept, and why."""

    message: str


def parse_rfc3339(text: str) -> float | None:
    """Return the Unix seconds of an RFC 3339 timestamp, or None if it is not one."""
    match = _RFC_3339.fullmatch(text)
    if match is None:
        return None
    is_leap = match["second"] == _LEAP_SECOND
    clock = f"{match['minute']}:{'59' if is_leap else match['second']}{match['fraction'] or ''}"
    try:
        moment = datetime.fromisoformat(f"{match['date']}T{clock}{match['offset'].upper()}")
    except ValueError:
        return None
    return _leap_second_after(moment) if is_leap else moment.timestamp()


def _leap_second_after(moment: datetime) -> float | None:
    # A leap second has no Unix time of its own, and comes only at the end of a day in UTC.
    following = moment.timestamp() + 1
    return following if following % _SECONDS_PER_DAY < 1 else None


def accept_deadline(
    text: str | None, *, now: float, default_timeout_seconds: float | None = None
) -> float | DeadlineRefused | None:
    """Return the deadline of a task submitted now, None for no deadline, or the refusal.

    Without a submitted one the deadline is the default timeout from now, if there is a default.
    """
    if text is None:
        return _default_deadline(now, default_timeout_seconds)
    deadline = parse_rfc3339(text)
    if deadline is None:
        return DeadlineRefused(message=INVALID_FORMAT)
    return deadline if deadline > now else DeadlineRefused(message=IN_THE_PAST)


def expired(task: Task, now: float) -> bool:
    """Tell whether a queued task has missed its deadline, so that it fails without having run.

    Other states are not judged here: the executor keeps the deadline of a task that it has.
    """
    return task.status is TaskStatus.QUEUED and task.deadline is not None and now >= task.deadline


def remaining_seconds(task: Task, now: float) -> float | None:
    """Return the time that a task has left, never less than zero; None is without end."""
    return None if task.deadline is None else max(0.0, task.deadline - now)


def _default_deadline(now: float, timeout_seconds: float | None) -> float | None:
    if timeout_seconds is None:
        return None
    if not timeout_seconds > 0:
        raise InvalidSettingError("default_timeout_seconds", f"must be above 0: {timeout_seconds}")
    return now + timeout_seconds
