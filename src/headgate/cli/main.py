"""The `headgate` command: its groups, and the edge at which every error becomes one line.

Exit codes: 0 success, 1 the work failed, 2 the input or the call was wrong, 3 no service answers,
4 the token does not allow it, 5 what was waited for took too long, 70 a fault of Headgate's own,
130 interrupted. `headgate run` has 3 of its own: a budget is used up.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

import headgate
from headgate.cli.arguments import checked
from headgate.cli.exit_codes import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_NOT_ALLOWED,
    EXIT_TIMEOUT,
    EXIT_UNAVAILABLE,
)
from headgate.cli.interruption import forget
from headgate.core.texts.printable import printable
from headgate.errors import (
    CallerError,
    HeadgateError,
    NotAllowedError,
    ServiceError,
    ServiceUnavailableError,
    WaitTimeoutError,
)

COMMANDS = {
    "audit": "Print who changed what, newest first.",
    "backup": "Copy the store to a file: tasks, budgets, tokens, overrides and the audit log.",
    "budget": "Set budgets and see what is spent, across all who share a ledger.",
    "cancel": "Cancel tasks, whether they wait or run.",
    "completion": "Print a script that completes commands and options with the Tab key.",
    "config": "Check the settings, show where each comes from, print an example.",
    "decide": "Print which agent runs which task, and why the others wait.",
    "demo": "Run a simulated fleet: three projects, six agents, one noisy.",
    "doctor": (
        "Check settings, directory, store, books, disk, clock, targets, slots, token and port."
    ),
    "pause": "Start nothing new, until it is resumed; tasks are still taken.",
    "reload": "Have the service read its settings file again, and print what changed.",
    "restore": "Put a copy that headgate backup made in place of the store.",
    "resume": "Start tasks again that a pause held.",
    "retry": "Submit again what tasks that ended were to do, as new tasks.",
    "run": "Run a workflow from a file, with nothing spent beyond its budgets.",
    "runs": "List the runs of workflows, or show one with its steps.",
    "show": "Print everything that is known of a task.",
    "slots": "Show key slots and wake them, switch them, read their log, run them alone.",
    "stats": "Print what waits, what runs, what has happened, and the limits in force.",
    "submit": "Submit a task and print its id, or many from lines of JSON.",
    "tasks": "List tasks, newest first.",
    "token": "Make tokens, list them and revoke them.",
    "top": "Show who runs, who waits and why, and what it costs, live in this terminal.",
    "up": "Start the service: API and dispatcher in one process.",
    "usage": "Print what tasks have used: tokens and dollars.",
    "watch": "Print events of all tasks as they happen, or of one until it has ended.",
    "webhooks": "Show webhooks and send them again, ping an address, rotate the signing secret.",
    "why": "Print every rule that keeps a task waiting, the longest first.",
    "worker": "Take tasks of an agent from a service, and run them here.",
}
"""Each is in the module of its name. What it does is said here too, so that a list loads none."""


class _ReaderGoneError(Exception):
    """What reads from the pipe that is written to has ended."""


@contextmanager
def _told_apart() -> Iterator[None]:
    """Tell a reader that has gone apart, as click would make it an error."""
    try:
        yield
    except BrokenPipeError:
        raise _ReaderGoneError from None


class LazyGroup(click.Group):
    """A group whose commands are loaded when they are called, so that each starts fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command from the module of its name."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            module = import_module(f"headgate.cli.commands.{cmd_name}")
            self.add_command(checked(getattr(module, cmd_name)), cmd_name)
        return super().get_command(ctx, cmd_name)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401 - as click has it
    ) -> click.Context:
        """Read the arguments, which may write a page of help."""
        with _told_apart():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command."""
        with _told_apart():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(headgate.__version__, "-V", "--version", message="headgate %(version)s")
def cli() -> None:
    """Decide which AI-agent task runs next, on whose quota, and inside whose budget."""


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line with these arguments, and return its exit code."""
    try:
        code = cli.main(arguments, prog_name="headgate", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt) as interruption:
        forget(interruption)
        return EXIT_INTERRUPTED
    except (BrokenPipeError, _ReaderGoneError):
        # The reader has gone, as `headgate decide … | head` does; there is nobody to tell.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001
        return _report(error)
    # A command that ends by `context.exit` has a code; others end with 0.
    return code if isinstance(code, int) else 0


def _report(error: Exception) -> int:
    """Tell a person in one line what went wrong, and return the exit code for it."""
    if isinstance(error, click.ClickException):
        return _report_call(error)
    if isinstance(error, HeadgateError):
        _complain(_line_of(error))
        return _code_of(error)
    if isinstance(error, OSError):
        _complain(f"cannot read or write: {error.strerror or error}")
        return EXIT_FAILED
    return _report_own_fault(error)


def _report_call(error: click.ClickException) -> int:
    # Most calls are right, and load none of this.
    from headgate.cli.wrong_calls import is_help_page, line_of  # noqa: PLC0415

    if is_help_page(error):
        error.show()
    else:
        _complain(line_of(error))
    return error.exit_code


def _code_of(error: HeadgateError) -> int:
    match error:
        case NotAllowedError():
            return EXIT_NOT_ALLOWED
        case ServiceUnavailableError():
            return EXIT_UNAVAILABLE
        case WaitTimeoutError():
            return EXIT_TIMEOUT
        case CallerError():
            return EXIT_BAD_INPUT
        case _:
            return EXIT_FAILED


def _line_of(error: HeadgateError) -> str:
    """Return what is wrong; of a fault of the service also what its log knows it by."""
    if isinstance(error, ServiceError) and error.code == "internal":
        return f"{error} (request {error.request_id})"
    return str(error)


def _complain(line: str) -> None:
    """Write one line to standard error, whatever characters a hostile input has put into it."""
    click.echo(f"headgate: {printable(line)}", err=True)


def _report_own_fault(error: Exception) -> int:
    if os.environ.get("HEADGATE_DEBUG"):
        traceback.print_exception(error)
    click.echo(
        f"headgate: internal error, please report it: {type(error).__name__}: {error} "
        "(HEADGATE_DEBUG=1 shows where)",
        err=True,
    )
    return EXIT_INTERNAL
