"""`headgate worker`: runs tasks of one agent on this machine, for a service elsewhere.

The first Ctrl-C (or SIGTERM) takes no more tasks and lets what runs finish; the second stops it,
and the service gives it to others; the third ends the process at once. After SIGTERM there is a
time for that: who sends it kills the process in the end, and what it had would be lost with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headgate.cli.connection import Connection, accepted_service, connection_options
from headgate.errors import InvalidSettingError
from headgate.redaction import hide_process

if TYPE_CHECKING:
    from headgate.client.worker import Worker
    from headgate.executors.executor import Executor


_LOG = logging.getLogger("headgate.worker")
EXIT_AT_ONCE = 130
MAX_PLACES = 1_000
MAX_DRAIN_SECONDS = 86_400.0


@click.command(
    epilog="""\b
Examples:
  headgate worker --agent coder-1 --run my_tasks:work
  headgate worker --agent coder-1 --command 'review-agent --json' --capacity 4
  headgate worker --agent coder-1 --run my_tasks:work --url https://headgate.example
"""
)
@click.option(
    "--agent", "agent_id", metavar="NAME", required=True, help="The agent whose tasks to run."
)
@click.option(
    "--run",
    "entry_point",
    metavar="MODULE:FUNCTION",
    help="A Python function to call for each task.",
)
@click.option(
    "--command",
    metavar="COMMAND",
    help="A program to run for each task; it reads the task as JSON.",
)
@click.option(
    "--capacity",
    metavar="N",
    type=click.IntRange(1, MAX_PLACES),
    default=1,
    show_default=True,
    help="How many tasks to run at once.",
)
@click.option(
    "--drain-seconds",
    metavar="SECONDS",
    type=click.FloatRange(0.0, MAX_DRAIN_SECONDS),
    default=25.0,
    show_default=True,
    help="After SIGTERM, how long tasks may still run before they return to the queue.",
)
@connection_options
def worker(
    *,
    agent_id: str,
    entry_point: str | None,
    command: str | None,
    capacity: int,
    drain_seconds: float,
    connection: Connection,
) -> None:
    """Fetch the tasks of an agent from a service and run them here.

    Workers get the tasks of pull targets. Shares, budgets and limits apply as for all other tasks.
    """
    executor = _executor(entry_point, command, capacity)
    hide_process()
    _tell_what_is_logged(_LOG)
    asyncio.run(_work(connection, executor, agent_id, capacity, drain_seconds=drain_seconds))


def _executor(entry_point: str | None, command: str | None, capacity: int) -> Executor:
    from headgate.executors.build import build_executor  # noqa: PLC0415
    from headgate.executors.callable import CallableExecutor  # noqa: PLC0415
    from headgate.executors.targets import CallableTarget, CommandTarget  # noqa: PLC0415
    from headgate.providers.prices import PriceList  # noqa: PLC0415

    if (entry_point is None) == (command is None):
        raise InvalidSettingError("headgate worker", "give --run or --command, one of the two")
    if entry_point is not None:
        # A console script does not look where it is called.
        sys.path.insert(0, str(Path.cwd()))
        function = CallableTarget(entry_point=entry_point, threads=capacity)
        return CallableExecutor(
            "worker", function, prices=PriceList(), setting="--run", on_raise=_log_raised
        )
    target = CommandTarget(command=_words(command or ""))
    try:
        return build_executor("worker", target, environ=os.environ, clock=lambda: 0.0)
    except InvalidSettingError as error:
        # Nobody has written a target: whoever calls it knows the option.
        raise InvalidSettingError("--command", error.problem) from None


def _log_raised(error: BaseException) -> None:
    _LOG.error("the function raised an exception", exc_info=error)


def _words(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise InvalidSettingError("--command", f"cannot be read: {error}") from None
    if not words:
        raise InvalidSettingError("--command", "must begin with the name of a program")
    return words


async def _work(
    connection: Connection,
    executor: Executor,
    agent_id: str,
    capacity: int,
    *,
    drain_seconds: float,
) -> None:
    from headgate.client.client import Client  # noqa: PLC0415
    from headgate.client.worker import ServiceConnection, Worker  # noqa: PLC0415

    url, token = accepted_service(connection)
    async with Client(url, token=token, retries=0) as client:
        line = ServiceConnection(client, agent_id, notify=_tell)
        work = Worker(line, executor, agent_id=agent_id, capacity=capacity)
        _handle_signals(work, drain_seconds)
        takes = f"takes tasks of {agent_id} from {url}, {capacity} at once"
        await work.run(opened=lambda: _tell(takes))
        _tell(f"has finished {work.finished} {'task' if work.finished == 1 else 'tasks'}")


class _Told(logging.Handler):
    """Tells a person what the worker logs; a fault is told with where it lies."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, and a traceback where there is one."""
        _tell(self.format(record))


def _tell_what_is_logged(logger: logging.Logger) -> None:
    logger.handlers = [_Told()]
    logger.propagate = False
    logger.setLevel(logging.INFO)


def _tell(line: str) -> None:
    click.echo(f"headgate worker: {line}", err=True)


def _handle_signals(work: Worker, drain_seconds: float) -> None:
    asked = 0

    def stop(number: signal.Signals) -> None:
        nonlocal asked
        asked += 1
        if asked == 1 and number == signal.SIGTERM:
            _tell(f"finishes what runs within {drain_seconds:g} seconds, and hands back the rest")
            work.drain(drain_seconds)
        elif asked == 1:
            _tell("finishes what runs; Ctrl-C again gives it back")
            work.drain()
        elif asked == 2:  # noqa: PLR2004
            work.give_up()
        else:
            sys.stderr.flush()
            os._exit(EXIT_AT_ONCE)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
