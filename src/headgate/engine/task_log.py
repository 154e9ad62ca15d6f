"""The log of tasks: one line for each step of a task, from the feed of the node that dispatches.

Rule: a line says which task, whose, how far and how long; never what it was given or what came
back. Why it failed is told as well, because whoever asks may come when the task is deleted. The
error of an attempt is written by its target, which may repeat what it was given: what looks like a
secret is taken out, the rest is one line of bounded length, and all of it is kept with the task.
"""

from __future__ import annotations

from typing import Protocol

from headgate.core.events import EventKind
from headgate.core.lifecycle import EXPIRED_WHILE_QUEUED
from headgate.core.task import TaskRecord, beginning_of
from headgate.core.text import printable
from headgate.engine.events import Happening
from headgate.redaction import redacted

Facts = dict[str, object]

MAX_READ_CHARACTERS = 4_000
"""How much of an error is looked at for secrets; the log has its beginning."""


class TaskLogger(Protocol):
    """Writes lines of the level info."""

    def info(self, event: str, **fields: object) -> object:
        """Write a line."""


class TaskLog:
    """Writes what the feed tells; a log that cannot be written keeps no task from its way."""

    def __init__(self, log: TaskLogger) -> None:
        self._log = log

    def __call__(self, happening: Happening, record: TaskRecord) -> None:
        """Write the line of an event."""
        try:
            _WRITERS[happening.kind](self._log, _facts(happening), happening, record)
        except (OSError, ValueError):
            return


def _submitted(log: TaskLogger, facts: Facts, _: Happening, __: TaskRecord) -> None:
    log.info("task submitted", **facts)


def _dispatched(log: TaskLogger, facts: Facts, happening: Happening, record: TaskRecord) -> None:
    wait_ms = _ms(record.task.created_at, happening.at)
    log.info("task dispatched", **facts, target=record.task.target, wait_ms=wait_ms)


def _retrying(log: TaskLogger, facts: Facts, _: Happening, __: TaskRecord) -> None:
    log.info("task retrying", **facts)


def _completed(log: TaskLogger, facts: Facts, happening: Happening, record: TaskRecord) -> None:
    run_ms = _ms(record.progress.started_at, happening.at)
    log.info("task completed", **facts, run_ms=run_ms)


def _failed(log: TaskLogger, facts: Facts, happening: Happening, record: TaskRecord) -> None:
    if happening.error == EXPIRED_WHILE_QUEUED:
        log.info("task expired", **facts, error=happening.error)
        return
    run_ms = _ms(record.progress.started_at, happening.at)
    log.info("task failed", **facts, run_ms=run_ms, error=_told(happening.error))


def _cancelled(log: TaskLogger, facts: Facts, _: Happening, __: TaskRecord) -> None:
    log.info("task cancelled", **facts)


def _rejected(log: TaskLogger, facts: Facts, happening: Happening, _: TaskRecord) -> None:
    log.info("task rejected", **facts, error=happening.error)


_WRITERS = {
    EventKind.QUEUED: _submitted,
    EventKind.RUNNING: _dispatched,
    EventKind.RETRYING: _retrying,
    EventKind.COMPLETED: _completed,
    EventKind.FAILED: _failed,
    EventKind.CANCELLED: _cancelled,
    EventKind.REJECTED: _rejected,
}


def _facts(happening: Happening) -> Facts:
    return {
        "task_id": happening.task_id,
        "agent_id": happening.agent_id,
        "project_id": happening.project_id,
        "attempt": happening.attempt,
    }


def _told(error: str | None) -> str:
    """Return an error as the log may have it; only so much of it is looked at."""
    if error is None:
        return ""
    # Cut last: what is left of half a secret does not look like one any more.
    text = " ".join(redacted(error[:MAX_READ_CHARACTERS]).split())
    return printable(beginning_of(text) or "")


def _ms(since: float | None, at: float) -> int | None:
    return None if since is None else max(0, round((at - since) * 1_000))
