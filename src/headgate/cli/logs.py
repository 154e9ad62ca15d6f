"""Logs of the service: lines for people on a terminal, JSON otherwise, always on standard error.

What the standard library's loggers say goes the same way, so that there is one form of line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
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

    def info(self, event: str, **fields: object) -> None:
        """Write a line, soon."""
        now = datetime.now(UTC).replace(tzinfo=None).isoformat(timespec="microseconds")
        if not self._lines:
            asyncio.get_running_loop().call_soon(self._flush)
        line = {**fields, "event": event, "level": "info", "timestamp": now + "Z"}
        self._lines.append(_ENCODER.encode(line))

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
