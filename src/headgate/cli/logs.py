"""Logs of the service: lines for people on a terminal, JSON otherwise, always on standard error.

What the standard library's loggers say goes the same way, so that there is one form of line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, BinaryIO

import msgspec
import structlog
from structlog.typing import EventDict

from headgate.config.settings import LogFormat, LogSettings
from headgate.engine.task_log import TaskLogger

_ENCODER = msgspec.json.Encoder(enc_hook=repr)


def configure_logs(
    settings: LogSettings | None = None,
    *,
    stream: BinaryIO | None = None,
    failing_slots: Collection[str] = (),
) -> None:
    """Set up what the runtime logs with; HEADGATE_LOG_LEVEL goes before the settings.

    A command that draws on standard error gives the `stream` that lines are to go to instead.
    Errors of `failing_slots` are left out: a demonstration has slots that are meant to fail.
    """
    settings = settings or LogSettings()
    level = logging.getLevelNamesMapping().get(
        os.environ.get("HEADGATE_LOG_LEVEL", settings.level).upper(), logging.INFO
    )
    structlog.configure(
        processors=[
            partial(_without_planned, failing_slots),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *_rendering(settings.format),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.BytesLoggerFactory(stream or sys.stderr.buffer),
        cache_logger_on_first_use=True,
    )
    _take_over(logging.getLogger("headgate"), level)
    # A collector that is away is no reason for a traceback with every batch.
    _take_over(logging.getLogger("opentelemetry"), max(level, logging.WARNING), traces=False)


def task_logger() -> TaskLogger:
    """Return what lines about tasks are written with; as JSON, those that come together at once."""
    if isinstance(structlog.get_config()["processors"][-1], structlog.processors.JSONRenderer):
        return QuickLog(sys.stderr.buffer)
    logger: TaskLogger = structlog.get_logger("headgate.tasks").bind()
    return logger


class QuickLog:
    """Writes the same lines as structlog does, in a fraction of its time.

    A task has three of them, which would otherwise be an eighth of all that it costs. Lines are
    kept until the event loop comes round, and then written in one piece.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lines: list[bytes] = []
        self._second = -1
        self._written_second = ""

    def info(self, event: str, **fields: object) -> None:
        """Write a line, soon."""
        if not self._lines:
            asyncio.get_running_loop().call_soon(self._flush)
        fields["event"], fields["level"] = event, "info"
        fields["timestamp"] = self._timestamp()
        self._lines.append(_ENCODER.encode(fields))

    def _timestamp(self) -> str:
        """Write the time; a second has thousands of lines, so its own part is written once."""
        second, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
        if second != self._second:
            written = datetime.fromtimestamp(second, UTC).replace(tzinfo=None).isoformat()
            self._second, self._written_second = second, written
        return f"{self._written_second}.{nanoseconds // 1_000:06}Z"

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        # A log that cannot be written keeps no task from its way.
        with suppress(OSError, ValueError):
            self._stream.write(b"\n".join(lines) + b"\n")
            self._stream.flush()


def is_told(level: int) -> bool:
    """Tell whether lines of this level are written at all."""
    return bool(structlog.get_logger("headgate").bind().is_enabled_for(level))


def _without_planned(
    failing_slots: Collection[str], _logger: object, level: str, event: EventDict
) -> EventDict:
    if level == "error" and event.get("slot") in failing_slots:
        raise structlog.DropEvent
    return event


def _rendering(wanted: LogFormat) -> list[Any]:
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    is_json = not is_terminal if wanted == "auto" else wanted == "json"
    if is_json:
        return [structlog.processors.JSONRenderer(serializer=_encoded)]
    coloured = is_terminal and "NO_COLOR" not in os.environ
    return [structlog.dev.ConsoleRenderer(colors=coloured), _in_bytes]


def _encoded(event: object, **_options: object) -> bytes:
    return _ENCODER.encode(event)


def _in_bytes(_logger: object, _name: str, line: str) -> bytes:
    return line.encode(errors="replace")


class _IntoStructlog(logging.Handler):
    """Says with structlog what a logger of the standard library was told."""

    def __init__(self, *, traces: bool) -> None:
        super().__init__()
        self._traces = traces

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        log = structlog.get_logger(record.name)
        exc_info = record.exc_info if self._traces else None
        log.log(record.levelno, record.getMessage(), exc_info=exc_info)


def _take_over(logger: logging.Logger, level: int, *, traces: bool = True) -> None:
    logger.handlers = [_IntoStructlog(traces=traces)]
    logger.propagate = False
    logger.setLevel(level)


LOG_EVENTS = {
    "a budget that was set by hand has ended": (
        "The settings file now has different limits; `problem` has both."
    ),
    "a call failed": (
        "A bug in the gateway. The client got an error, and Headgate books the "
        "reservation of the call."
    ),
    "a call was lost": (
        "The process that ran a call was killed. Headgate books the reservation of the call."
    ),
    "a call was not kept": (
        "The end of a call could not be stored. When its lease ends, its reservation is booked."
    ),
    "a key has no credit left": (
        "The provider says that the credit of a key is used up. Headgate closes the key for ten "
        "minutes and uses the next one. `said` has the provider's words."
    ),
    "a key was refused": "A provider refused a key with 401 or 403. Check the variable or file.",
    "a key was refused, and its slot could not be disabled": (
        "A provider refused the key of a slot, and the store did not answer."
    ),
    "a key cannot be read": (
        "The variable or the file of a key is gone; calls are refused until it is there again."
    ),
    "a loop does not end, and is left behind": (
        "A loop did not stop in time when the service ended. The process ends without it."
    ),
    "a loop failed and is started again": (
        "A bug in the service. The loop goes on after a pause that grows."
    ),
    "a loop is started again": "A loop of a slot had ended or stood still; `problem` says which.",
    "a lost governed call could not be booked": (
        "The worker of a `headgate.ray` call is gone. The ledger books the call when the lease of "
        "its reservation ends."
    ),
    "a provider could not be closed": (
        "A bug in the service, while a slot left the settings or the service stopped."
    ),
    "a provider failed": (
        "A bug in the service, while a provider was asked; it counts as a poll or a wake that "
        "failed."
    ),
    "a report of progress was not taken": (
        "The progress that a function reported cannot be read or sent. The task goes on."
    ),
    "a slice of a budget was not turned": (
        "The spending of calls could not be written. Headgate tries again, and no call draws on "
        "the slice meanwhile."
    ),
    "a webhook could not be sent": "A bug in the service; the webhook is tried again.",
    "a webhook was not settled": "The result of a try could not be stored; Headgate tries again.",
    "a zero keeps what was; the next start refuses it": (
        "A reloaded file has a 0 where the range begins above it."
    ),
    "an attempt was not started": (
        "The ledger did not answer, or the reservation is gone. The task is decided again."
    ),
    "an executor could not be closed": (
        "A bug in the service, while a target left the settings or the service stopped."
    ),
    "an outcome cannot be stored": "The answer of a target cannot be stored; the task fails.",
    "an upstream did not list its models": (
        "`GET /v1/models` goes without the models of this upstream for a while."
    ),
    "an upstream is sent without its headers": (
        "A variable in `headers` of the upstream is not set."
    ),
    "another node dispatches now": "This node is no longer the dispatcher.",
    "budget alerts filed": "Budgets have reached 50, 80 or 100 percent; Headgate sends a webhook.",
    "budgets were not looked at": "The ledger could not be read for alerts; it is tried again.",
    "changes of settings were not looked for": (
        "The store did not answer when settings were compared with other nodes; it is tried again."
    ),
    "dispatching": "This node has read all tasks, and is the dispatcher from now on.",
    "ended tasks were not deleted": (
        "The store did not answer when ended tasks were to be deleted; it is tried again."
    ),
    "executor raised": "A bug in the executor of a target; the task fails.",
    "few files may be open, so few connections too": (
        "The limit on open files is low (`ulimit -n`). A part is kept for the store, targets "
        "and commands."
    ),
    "has drained": "Projects, agents or targets that left the settings have no tasks any more.",
    "headgate slot list, warm, pause and resume cannot reach this": (
        "`headgate slot run` could not make the socket in its data directory; it goes on without."
    ),
    "left without telling the store": (
        "The service stops while the store does not answer. Its lease ends by itself."
    ),
    "lines of the slot log were dropped": (
        "The log of slots could not keep up, or could not be written; `dropped` counts all "
        "since the start."
    ),
    "money was not settled": (
        "The ledger did not accept the settlement of a call; the end of the lease settles it."
    ),
    "others took the tasks of this node": (
        "This node gave no sign of life for too long, and another node has its tasks. This node "
        "stops those that it still runs."
    ),
    "out of file descriptors": (
        "A task could not begin and is tried again. Raise the limit on open files (`ulimit "
        "-n`), or lower `max_inflight`."
    ),
    "projects without settings have tasks; they drain": (
        "Tasks wait for projects that the file does not name; they run to their end."
    ),
    "recovered tasks of a lost node": (
        "A node has given no sign of life; its tasks are queued again."
    ),
    "request": "A request was answered.",
    "settings changed": "Somebody changed a setting through the API.",
    "settings reloaded": "The file was read again, by SIGHUP or by `headgate slot run`.",
    "settings were not reloaded": "A bug in the service, at SIGHUP.",
    "settings were not reloaded; nothing has changed": "SIGHUP found a file that is wrong.",
    "settlements are left in the outbox": (
        "A node stopped while the ledger did not answer; the next start sends them."
    ),
    "settlements wait for the ledger": (
        "The costs of attempts could not be sent to the ledger; Headgate tries again."
    ),
    "settlements wait for the store": (
        "The end of an attempt could not be stored; Headgate tries again."
    ),
    "slots can be read again": "The store answers again.",
    "slots cannot be read; nothing is sent until they can": (
        "The store does not answer. Polls and wakes wait."
    ),
    "targets without settings have tasks; these wait": (
        "Tasks are for targets that the file does not name; put these back, or cancel the tasks."
    ),
    "task cancelled": "A task was cancelled.",
    "task completed": "A task succeeded; `run_ms` is its last attempt.",
    "task dispatched": (
        "An attempt was given to an agent; `wait_ms` is since the task was submitted."
    ),
    "task expired": "The deadline of a task passed while it waited.",
    "task failed": (
        "A task failed for good; `error` is why, in one line of at most 300 characters, without "
        "what looks like a secret."
    ),
    "task rejected": "A queue was full, or no budget has room for the task.",
    "task retrying": "An attempt ended, and the task waits for another.",
    "task submitted": "A task was accepted.",
    "the body of a call that waits stays in memory": "A temporary file could not be written.",
    "the clock has jumped; all slots look at once": "The clock was set, or the machine slept.",
    "the cost of a governed call could not be booked": (
        "The governor of a `headgate.ray` call is gone. The ledger books the estimate of the call "
        "when the lease of its reservation ends."
    ),
    "the deciding node cannot be reached": (
        "This node cannot pass calls on to the dispatcher at `address`. Check `server.advertise` "
        "there, and the firewall. Logged once an address."
    ),
    "the demonstration has stopped; the service goes on without it": (
        "A bug in the simulated fleet of `headgate up --demo`."
    ),
    "the driver of Ray ended": (
        "The process that talks to a Ray cluster ended. Another one starts with the next task."
    ),
    "the file contradicts a change at another node": (
        "A changed settings file contradicts an override that was made through the API."
    ),
    "the file contradicts what was changed beside it": (
        "The settings file contradicts an override that was made through the API."
    ),
    "the file could not be taken now; tried again": (
        "The settings file has changed, and the store does not answer."
    ),
    "the file was refused; nothing has changed": "The settings file has changed, and is wrong.",
    "the free capacity of a Ray cluster is unknown": (
        "Headgate starts no new tasks of this target until the cluster answers. Logged once."
    ),
    "the lease of money in use has ended": (
        "A lease was not renewed in time, although the work goes on. The reservation counts as "
        "spent until the work reports its cost."
    ),
    "the ledger is unavailable": "The ledger outside the store does not answer. Logged once.",
    "the ledger is told of settlements again": "The ledger answers again.",
    "the ledger refused a settlement": (
        "The ledger had closed a reservation before; it stays as it is."
    ),
    "the ledger was not told of new budgets; tried again": (
        "Budgets have changed, and the ledger does not answer."
    ),
    "the lock on the data directory cannot be restored": (
        "The lock file is gone and cannot be written again; Headgate keeps trying."
    ),
    "the lock on the data directory was deleted; it is there again": (
        "Somebody deleted the lock file while the service ran; Headgate wrote it again and holds "
        "the lock."
    ),
    "the previous dispatcher does not answer": (
        "Another node decides now. Clients whose calls ran at the previous one get a 503."
    ),
    "the process that writes cannot be started": (
        "The machine has no room for another process; it is tried again."
    ),
    "the process that writes has ended": (
        "It was killed (a negative code is the signal), or the problem says why; another one is "
        "started."
    ),
    "the slot log cannot be written; slots go on without it": (
        "Logged once: the disk is full, or the file of the day has reached 256 MiB."
    ),
    "the slot log is written again": (
        "Lines are missing in between; `dropped` counts all since the start."
    ),
    "the store is unavailable": "The store does not answer. Logged once for each problem.",
    "the store has no room for new tasks": (
        "The disk or `max_store_bytes` is used up. Logged once, with what to do."
    ),
    "the store has room for new tasks again": "The store accepts new tasks again.",
    "token refused": (
        "A request had a token that is not valid; `since_last` counts such requests that were not "
        "logged."
    ),
    "usage in an unknown shape": (
        "A result has a `usage` that cannot be read, so the reservation is booked. Logged "
        "once for each target."
    ),
    "webhook delivered": "A webhook has arrived.",
    "webhook failed": "A try of a webhook failed; `is_given_up` says that it was the last.",
    "webhooks under way are tried again when their claims have ended": (
        "The service stops with tries under way."
    ),
    "webhooks wait for the store": "The store did not answer for webhooks; it is tried again.",
}
"""What each line of the service means, by its `event`; the reference is made from it."""
