"""The `headgate` command: its groups, and the edge at which every error becomes one line.

Exit codes: 0 success, 1 the work failed, 2 the input or the call was wrong, 3 no service answers,
4 the token does not allow it, 5 what was waited for took too long, 6 a budget is used up, 70 a
fault of Headgate's own, 130 interrupted.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

    from click.shell_completion import CompletionItem

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
EXIT_NOT_ALLOWED = 4
EXIT_TIMEOUT = 5
EXIT_EXHAUSTED = 6
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130


GROUPS = {
    "Work": {
        "submit": "Submit one task and print its id, or many tasks from lines of JSON.",
        "tasks": "List tasks, newest first.",
        "show": "Show everything about a task.",
        "why": "Explain why a task or a call waits.",
        "watch": "Print events as they happen: of all tasks, or of one task until it ends.",
        "cancel": "Cancel waiting or running tasks.",
        "retry": "Submit ended tasks again, as new tasks.",
        "run": "Run a workflow from a file, within its budgets.",
        "runs": "List the runs of workflows, or show one with its steps.",
        "worker": "Fetch the tasks of an agent from a service and run them here.",
    },
    "Money": {
        "budget": "Set budgets, see what is spent, correct what is booked.",
        "usage": "Show the tokens and dollars that tasks and calls have used.",
        "estimates": "Show what each kind of work is expected to cost.",
    },
    "Keys and models": {
        "slot": "Show key slots and their quotas; warm, change, pause and drain slots.",
        "model": "Show the models of the gateway: where their calls go, what they cost.",
        "calls": "List calls through the gateway, newest first, or show one.",
    },
    "Operate": {
        "init": "Write a small settings file with comments.",
        "up": "Start the service.",
        "stats": "Show what waits, what runs, what is paused, and the limits in force.",
        "top": "Show live what runs, what waits and why, and the costs.",
        "closures": "List what is closed, so that its tasks wait: why, by whom, until when.",
        "service": "Pause and resume the whole service.",
        "project": "List, change, pause, resume and drain projects.",
        "agent": "List, change, pause, resume and drain agents.",
        "target": "List, change, pause, resume and drain targets.",
        "token": "Create, list and revoke tokens.",
        "webhooks": "List webhooks, send them again, ping an address, rotate the secret.",
        "metrics": "List all metrics; print a Grafana dashboard and Prometheus alerts.",
        "audit": "Show who changed what, newest first.",
        "config": "Check the settings, show where each comes from, print an example.",
        "reload": "Make the service read its settings file again; print what changed.",
        "doctor": "Check settings, store, ledger, disk, clock, keys, token and port.",
        "backup": "Copy the store to a file.",
        "restore": "Replace the store with a copy that headgate backup made.",
    },
    "Develop": {
        "decide": "Print which agent runs which task of a snapshot, and why the others wait.",
        "simulate": "Watch fair shares in a simulated fleet: no key, no service.",
        "fake-provider": "Start a fake provider to try the gateway and key slots with.",
        "completion": "Print a script that completes commands, options and names with Tab.",
    },
}
"""The commands by what people do. A summary stands here too, so that a list loads no command."""

COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}

MODULES = {
    "agent": "resources",
    "closures": "service",
    "model": "resources",
    "project": "resources",
    "restore": "backup",
    "retry": "cancel",
    "target": "resources",
    "top": "top.command",
}
"""The module of a command where it is not the one of its name."""

_STARTED = "project|agent|target|slot"
VERBS = {
    "list": f"{_STARTED}|model|budget|token list",
    "set": "project|agent|target|slot|budget set NAME",
    "pause": f"service pause, or headgate {_STARTED} pause NAME",
    "resume": f"service resume, or headgate {_STARTED} resume NAME",
    "drain": f"{_STARTED} drain NAME",
    "warm": "slot warm NAME",
}
"""What people do to a named thing, and how they write it: `headgate project pause evals`."""

MODEL_IN_FILE = "[models] in the settings file sets the route of a name; then run headgate reload"
MODEL_STARTS = (
    "A model itself cannot be {done}: headgate slot {verb} is for a key, and headgate project "
    "{verb} for a project"
)
NOT_HERE = {
    ("model", "set"): MODEL_IN_FILE,
    ("model", "pause"): MODEL_STARTS.format(done="paused", verb="pause"),
    ("model", "resume"): MODEL_STARTS.format(done="paused", verb="resume"),
    ("model", "drain"): MODEL_STARTS.format(done="drained", verb="drain"),
}
"""What to do instead where a noun does not have a verb that others have."""

SYNONYMS = {"remove": "delete", "rm": "delete", "add": "set", "create": "set", "unset": "delete"}
"""Verbs of other programs, and ours for the same."""


COMPLETE_VARIABLE = "_HEADGATE_COMPLETE"
"""Set by a shell that asks what the Tab key completes."""


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
        """Return the names of all commands, in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command from the module of its name."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            from headgate.cli.completion import with_names  # noqa: PLC0415  not for a list
            from headgate.cli.output import with_utc_option  # noqa: PLC0415

            name = cmd_name.replace("-", "_")
            module = import_module(f"headgate.cli.{MODULES.get(cmd_name, name)}")
            command = with_utc_option(with_names(checked(getattr(module, name))))
            self.add_command(command, cmd_name)
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

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        """Return the commands that begin like this, without loading them."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415  few calls complete

        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        return [
            CompletionItem(name, help=COMMANDS[name])
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 - as click has it
        formatter: click.HelpFormatter,
    ) -> None:
        """Write the commands by what people do, without loading them."""
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(headgate.__version__, "-V", "--version", message="headgate %(version)s")
def cli() -> None:
    """Decide which AI-agent task runs next, on whose quota, and within whose budget.

    Commands talk to the service at http://127.0.0.1:7420 unless --url, HEADGATE_URL or --data names
    another.
    """


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line with these arguments, and return its exit code."""
    if COMPLETE_VARIABLE in os.environ:
        from headgate.cli.completion import prepare  # noqa: PLC0415  few calls complete

        prepare()
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
        # Python 3.11 wraps Ctrl-C within `__set_name__`, as modules are loaded, in a RuntimeError.
        if isinstance(error.__cause__, KeyboardInterrupt):
            forget(error)
            return EXIT_INTERRUPTED
        return _report(error)
    # A command that ends by `context.exit` has a code; others end with 0.
    return code if isinstance(code, int) else 0


def _report(error: Exception) -> int:
    """Tell a person in one line what went wrong, and return the exit code for it."""
    if isinstance(error, click.ClickException):
        return _report_call(error)
    if isinstance(error, HeadgateError):
        _complain(_line_of(error))
        for other in error.others if isinstance(error, CallerError) else ():
            _complain(str(other))
        return _code_of(error)
    if isinstance(error, OSError):
        _complain(f"cannot read or write: {error.strerror or error}")
        return EXIT_FAILED
    if isinstance(error, ModuleNotFoundError):
        return _report_missing(error)
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
    if not isinstance(error, ServiceError):
        return str(error)
    from headgate.client.responses import IN_COMMANDS, IN_PROGRAMS  # noqa: PLC0415

    if error.code == "internal":
        return f"{error} (request {error.request_id})"
    return str(error).replace(IN_PROGRAMS, IN_COMMANDS)


def _complain(line: str) -> None:
    """Write one line to standard error, whatever characters a hostile input has put into it."""
    from headgate.cli.output import with_local_times  # noqa: PLC0415  few commands complain
    from headgate.core.text import printable  # noqa: PLC0415

    click.echo(f"headgate: {printable(with_local_times(line))}", err=True)


def _report_missing(error: ModuleNotFoundError) -> int:
    from headgate.extras import missing_package  # noqa: PLC0415

    problem = missing_package(error)
    if problem is None:
        return _report_own_fault(error)
    _complain(f"this {problem}")
    return EXIT_BAD_INPUT


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
            near = next(iter(error.possibilities or ()), "")
            return f"there is no option {error.option_name}{_meant(near)}"
        case click.UsageError(ctx=click.Context(command=click.Group() as group) as context):
            name = getattr(error, "command_name", None)
            if name is not None:
                return f"there is no command {name}{_hint(name, group, context)}"
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


def _hint(name: str, group: click.Group, context: click.Context) -> str:
    """Return what may be meant: of what a verb is, a command like it, or which ones there are."""
    from headgate.core.text import nearest  # noqa: PLC0415  few commands complain

    commands = group.list_commands(context)
    is_root = context.parent is None
    if is_root and name in VERBS:
        return f"; say what to {name}: headgate {VERBS[name]}"
    meant = SYNONYMS.get(name, "")
    is_verb = name in VERBS or name in SYNONYMS
    near = meant if meant in commands else "" if is_verb else nearest(name, commands)
    if near or is_root:
        return _meant(near)
    instead = NOT_HERE.get((context.info_name or "", meant or name), "")
    return f"; the commands of {context.command_path} are {', '.join(commands)}" + (
        f". {instead}" if instead else ""
    )


def _meant(near: str) -> str:
    from headgate.core.text import did_you_mean  # noqa: PLC0415  few commands complain

    return f"; {did_you_mean(near)}" if near else ""


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


MMAP_THRESHOLD_BYTES = 128 * 1024
_M_MMAP_THRESHOLD = -3


def tune_interpreter() -> None:
    """Have threads change more often, garbage searched for rarely, and large blocks given back."""
    # The writer's thread asks for its turn after every statement. With the default it waits five
    # milliseconds for it whenever the event loop is busy.
    sys.setswitchinterval(0.001)
    # A backlog of many small objects makes full collections long, and hardly any of it is garbage:
    # they are rare. What is new is looked at in small portions, since the event loop stands still
    # meanwhile, for one to two microseconds an object.
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 10, 1_000)
    # As soon as a large block is freed, glibc takes blocks of up to its size from the heap, where
    # those of bodies leave holes: a third of the heap was free and kept. With a fixed threshold
    # each is the system's again when it is freed. Other allocators have no such function.
    if sys.platform == "linux":
        with suppress(AttributeError, ImportError, OSError):
            from ctypes import CDLL  # noqa: PLC0415

            CDLL(None).mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
