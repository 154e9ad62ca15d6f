"""The `headgate` command: its groups, and the edge at which every error becomes one line.

Exit codes: 0 success, 1 the work failed, 2 the input or the call was wrong, 3 no service answers,
4 the token does not allow it, 5 what was waited for took too long, 70 a fault of Headgate's own,
130 interrupted. `headgate run` has 3 of its own: a budget is used up.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import headgate
from headgate.errors import (
    CallerError,
    HeadgateError,
    NotAllowedError,
    ServiceError,
    ServiceUnavailableError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    import asyncio

# Arguments that are no text: refused by name before a command begins.
#
# What is not UTF-8 comes as a string that cannot be written anywhere. Rule: no command sees one, so
# none fails of it half-way.

Callback = Callable[[click.Context, click.Parameter, Any], Any]


def checked(command: click.Command) -> click.Command:
    """Have a command, and those in it, refuse arguments that are not UTF-8."""
    for parameter in command.params:
        parameter.callback = _checking(parameter.callback)
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            checked(inner)
    return command


def _checking(then: Callback | None) -> Callback:
    def check(context: click.Context, parameter: click.Parameter, value: Any) -> Any:  # noqa: ANN401
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, (str, Path)) and not _is_utf8(str(one)):
                message = "is not UTF-8"
                raise click.BadParameter(message, context, parameter)
        return value if then is None else then(context, parameter, value)

    return check


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# What Ctrl-C leaves half made is dropped without a word.
#
# An event loop without its parts and a coroutine that nobody awaited complain as they are
# dropped, in many lines, and whoever pressed Ctrl-C can do nothing about them.


def forget(interruption: BaseException) -> None:
    """Drop what was going on when a command was interrupted, in silence."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error: BaseException | None = interruption
            while error is not None:
                traceback.clear_frames(error.__traceback__)
                error = error.__context__
            gc.collect()
    finally:
        sys.unraisablehook = before


# What the exit code of a command tells a script; the command line reference has the list.

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_UNAVAILABLE = 3
EXIT_EXHAUSTED = 3
"""Of `headgate run` alone, where a service that does not answer is a failure."""
EXIT_NOT_ALLOWED = 4
EXIT_TIMEOUT = 5
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130


COMMANDS = {
    "audit": "Print who changed what, newest first.",
    "backup": "Copy the store to a file: tasks, budgets, tokens, overrides and the audit log.",
    "budget": "Set budgets and see what is spent, across all who share a ledger.",
    "cancel": "Cancel tasks, whether they wait or run.",
    "closures": "List what keeps tasks from starting: who closed it, since when and until when.",
    "completion": "Print a script that completes commands and options with the Tab key.",
    "config": "Check the settings, show where each comes from, print an example.",
    "decide": "Print which agent runs which task, and why the others wait.",
    "demo": "Run a simulated fleet: three projects, six agents, one noisy.",
    "doctor": (
        "Check settings, directory, store, ledger, disk, clock, targets, slots, token and port."
    ),
    "estimates": "Print what is known of the cost of each kind of work, the latest first.",
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

MODULES = {
    "closures": "pause",
    "restore": "backup",
    "resume": "pause",
    "retry": "cancel",
    "top": "top.command",
}
"""Commands that share a module with their counterpart, and the one with a package of its own."""


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
            module = import_module(f"headgate.cli.{MODULES.get(cmd_name, cmd_name)}")
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
    from headgate.core.text import printable  # noqa: PLC0415  few commands complain

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


# Calls that cannot be understood, each told in one line: what is wrong, and where help is.
#
# Rule: the line names the option or the argument as a person types it, and what may be meant.

_HELP_PAGE: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""What newer versions of click raise for a group without a command: its message is a page."""


def is_help_page(error: click.ClickException) -> bool:
    """Tell whether nothing is wrong but that a group was called without one of its commands."""
    return isinstance(error, _HELP_PAGE)


def line_of(error: click.ClickException) -> str:
    """Return what is wrong with a call, and which page of help tells more."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    page = "" if context is None else f" (see {context.command_path} --help)"
    return _problem(error) + page


def _problem(error: click.ClickException) -> str:
    match error:
        case click.MissingParameter(param=click.Parameter() as parameter):
            return f"{_name(parameter)} is missing{_choices(parameter)}"
        case click.BadParameter(param=click.Parameter() as parameter):
            return f"{_name(parameter)}: {_plain(error.message)}"
        case click.NoSuchOption():
            return f"there is no option {error.option_name}{_meant(error.possibilities or ())}"
        case click.UsageError(ctx=click.Context(command=click.Group() as group) as context):
            name = getattr(error, "command_name", None)
            if name is not None:
                close = get_close_matches(name, group.list_commands(context))
                return f"there is no command {name}{_meant(close)}"
    return _plain(error.format_message())


def _name(parameter: click.Parameter) -> str:
    """Return an option with its dashes, or an argument as the usage has it, without brackets."""
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    return parameter.human_readable_name.removesuffix("...").strip("[]")


def _choices(parameter: click.Parameter) -> str:
    if not isinstance(parameter.type, click.Choice):
        return ""
    return f"; give one of {', '.join(map(str, parameter.type.choices))}"


def _meant(close: Sequence[str]) -> str:
    return f"; did you mean {close[0]}?" if close else ""


def _plain(message: str) -> str:
    """Return a message as part of a line: without a capital of a sentence, and a full stop."""
    first = message[:1].lower() if message[1:2].islower() else message[:1]
    return (first + message[1:]).removesuffix(".")


# The event loop of commands that run an engine, and what makes their interpreter fit for it.


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the fastest loop that is installed; None is the usual one."""
    try:
        import uvloop  # noqa: PLC0415
    except ModuleNotFoundError:
        return None
    factory: Any = uvloop.new_event_loop
    return factory  # type: ignore[no-any-return]


def tune_interpreter() -> None:
    """Have threads change more often, and what is loaded not be searched for garbage."""
    # The writer's thread asks for its turn after every statement. With the default it waits five
    # milliseconds for it whenever the event loop is busy.
    sys.setswitchinterval(0.001)
    # A backlog of many small objects makes full collections long, and none of it is garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
