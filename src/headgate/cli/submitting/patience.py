"""Waiting for room: a submission that finds none is tried again until there is some."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

import click

from headgate.core.tasks.retries import Backoff
from headgate.core.texts.printable import printable
from headgate.errors import ServiceError, ServiceLimitError, ServiceUnavailableError

BACKOFF = Backoff(base_seconds=1.0, max_seconds=30.0)

Result = TypeVar("Result")


def until_room(act: Callable[[], Result], *, patient: bool) -> Result:
    """Do something; if patience is wanted, until the service has room for it and answers."""
    attempt = 0
    while True:
        try:
            return act()
        except (ServiceLimitError, ServiceUnavailableError) as error:
            if not patient:
                raise
            attempt += 1
            wait(attempt, error)


def wait(attempt: int, why: ServiceError | str) -> None:
    """Wait before another try, longer each time, and say so the first time."""
    if attempt == 1:
        click.echo(f"headgate: waiting: {printable(str(why))}", err=True)
    asked = why.retry_after_seconds if isinstance(why, ServiceError) else None
    drawn = BACKOFF.seconds(attempt, draw=random.random())  # noqa: S311 - spreads load, no secret
    time.sleep(max(drawn, asked or 0.0))
