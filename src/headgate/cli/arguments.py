"""Arguments that are no text: refused by name before a command begins.

What is not UTF-8 comes as a string that cannot be written anywhere. Rule: no command sees one, so
none fails of it half-way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

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
