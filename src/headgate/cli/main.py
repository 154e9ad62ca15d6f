"""The `headgate` command: its groups, and the edge at which every error becomes one line.

Exit codes: 0 success, 1 the work failed, 2 the input or the call was wrong, 70 a fault of
Headgate's own, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module

import click

import headgate
from headgate.cli.output import printable
from headgate.errors import CallerError, HeadgateError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130

COMMANDS = ("budget", "config", "decide", "demo", "up")
"""Each is in the module of its name."""


class LazyGroup(click.Group):
    """A group whose commands are loaded when they are called, so that each starts fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands."""
        return sorted({*COMMANDS, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command from the module of its name."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            module = import_module(f"headgate.cli.{cmd_name}")
            self.add_command(getattr(module, cmd_name), cmd_name)
        return super().get_command(ctx, cmd_name)


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
        cli.main(arguments, prog_name="headgate", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone, as `headgate decide … | head` does; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001
        return _report(error)
    return 0


def _report(error: Exception) -> int:
    """Tell a person in one line what went wrong, and return the exit code for it."""
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, HeadgateError):
        _complain(str(error))
        return EXIT_BAD_INPUT if isinstance(error, CallerError) else EXIT_FAILED
    if isinstance(error, OSError):
        _complain(f"cannot read or write: {error.strerror or error}")
        return EXIT_FAILED
    return _report_own_fault(error)


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
