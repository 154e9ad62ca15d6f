"""Calls that cannot be understood, each told in one line: what is wrong, and where help is.

Rule: the line names the option or the argument as a person types it, and what may be meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import click

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
