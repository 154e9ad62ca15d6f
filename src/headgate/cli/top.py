"""`headgate top`: the figures of a service, live in this terminal."""

from __future__ import annotations

import asyncio
import sys

import click

from headgate.cli.connection import Connection, connect, connection_options, found_service
from headgate.cli.exit_codes import EXIT_INTERNAL
from headgate.cli.output import is_terminal
from headgate.cli.up import naming_extras
from headgate.errors import InvalidSettingError

TIMEOUT_SECONDS = 10.0


@click.command(
    epilog="""\b
Examples:
  headgate top
  headgate top --url https://fleet.example.org
  ssh -t fleet headgate top
"""
)
@connection_options
@click.pass_context
def top(context: click.Context, /, *, connection: Connection) -> None:
    """Show who runs, who waits and why, and what it costs, live.

    Press ? for the keys, q to leave. It needs a token with the permission read, and for projects
    one with admin.
    """
    if not is_terminal() or sys.stdin is None or not sys.stdin.isatty():
        problem = "needs a terminal; use headgate stats, headgate tasks or headgate watch instead"
        raise InvalidSettingError("headgate top", problem)
    with connect(connection, retries=0, timeout_seconds=TIMEOUT_SECONDS) as client:
        # Before anything is drawn: what is wrong with the address or the token is one line then.
        client.stats()
    context.exit(asyncio.run(shown(*found_service(connection))))


async def shown(url: str, token: str | None) -> int:
    """Show a service until the screen is left, and return the exit code."""
    with naming_extras("headgate top"):
        import httpx2  # noqa: F401, PLC0415  without it the client is an error of another kind

        from headgate.client.async_client import Client  # noqa: PLC0415
        from headgate.top.app import Texts, Top  # noqa: PLC0415  textual takes its time to load

    from headgate.cli import slots_view, task_view, why  # noqa: PLC0415

    texts = Texts(task=task_view.lines_of, why=why.lines_of, slot=slots_view.lines_of)
    async with Client(url, token=token, timeout_seconds=TIMEOUT_SECONDS, retries=0) as client:
        screen = Top(client, texts)
        await screen.run_async(mouse=False)
    return EXIT_INTERNAL if screen.return_code else 0
