"""Logs of the service: lines for people on a terminal, JSON otherwise, always on standard error."""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure_logs() -> None:
    """Set up what the runtime logs with; HEADGATE_LOG_LEVEL is info unless it says otherwise."""
    is_terminal = sys.stderr.isatty()
    level = logging.getLevelNamesMapping().get(
        os.environ.get("HEADGATE_LOG_LEVEL", "info").upper(), logging.INFO
    )
    renderer = (
        structlog.dev.ConsoleRenderer(colors="NO_COLOR" not in os.environ)
        if is_terminal
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
