"""Doing one thing to each of several tasks: what becomes of one does not keep the next from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click
import msgspec

from headgate.cli.exit_codes import EXIT_FAILED
from headgate.core.texts.printable import printable
from headgate.errors import LimitReachedError, NotAllowedError, RequestRefusedError, ServiceError

Act = Callable[[str], tuple[msgspec.Struct, str]]
"""Does it to one task, and returns the answer and a few words about it."""


def for_each(task_ids: Sequence[str], act: Act, *, as_json: bool) -> int:
    """Do it to each, tell what became of it, and return the exit code.

    A task of its own that is refused raises, as any command's input does; a service that does not
    answer, or does not allow it, ends the list.
    """
    if len(task_ids) == 1:
        _tell(task_ids[0], act(task_ids[0]), as_json=as_json)
        return 0
    refused = 0
    for task_id in task_ids:
        try:
            _tell(task_id, act(task_id), as_json=as_json)
        except NotAllowedError:
            raise
        except (RequestRefusedError, LimitReachedError) as error:
            refused += 1
            _tell_refused(task_id, error, as_json=as_json)
    return EXIT_FAILED if refused else 0


def _tell(task_id: str, outcome: tuple[msgspec.Struct, str], *, as_json: bool) -> None:
    answer, words = outcome
    click.echo(msgspec.json.encode(answer) if as_json else f"{printable(task_id)} {words}")


def _tell_refused(task_id: str, error: Exception, *, as_json: bool) -> None:
    code = error.code if isinstance(error, ServiceError) else ""
    if as_json:
        click.echo(msgspec.json.encode({"taskId": task_id, "code": code, "error": str(error)}))
    else:
        click.echo(f"headgate: {printable(f'{task_id}: {error}')}", err=True)
