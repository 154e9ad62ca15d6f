"""`headgate top`: the state of a service, live in this terminal, or once as JSON."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import click

from headgate.cli.connection import (
    Connection,
    accepted_service,
    connect,
    connection_options,
    json_option,
)
from headgate.cli.main import EXIT_INTERNAL
from headgate.cli.output import is_drawable, is_terminal, print_json
from headgate.errors import InvalidSettingError

if TYPE_CHECKING:
    from headgate.client.sync_client import SyncClient


TIMEOUT_SECONDS = 10.0


@click.command(
    epilog="""\b
Examples:
  headgate top
  headgate top --url https://fleet.example.org
  ssh -t fleet headgate top
  headgate top --json | jq '.projects[] | {id, targetShare, actualShare}'
"""
)
@connection_options
@json_option
@click.pass_context
def top(context: click.Context, /, *, connection: Connection, as_json: bool) -> None:
    """Show live what runs, what waits and why, and the costs.

    Press ? for the keys, q to quit. The token needs the permission read. With a token that is
    restricted to a project or agent, top shows only that project or agent. With --json it
    prints one snapshot and ends.
    """
    if as_json:
        with connect(connection) as client:
            print_json(_numbers(client))
        return
    _check_terminal()
    with connect(connection, retries=0, timeout_seconds=TIMEOUT_SECONDS) as client:
        # Before anything is drawn: what is wrong with the address or the token is one line then.
        client.stats()
    context.exit(asyncio.run(shown(*accepted_service(connection))))


def _check_terminal() -> None:
    others = "use --json, headgate stats or headgate watch instead"
    if not is_terminal() or not is_terminal(sys.stdin):
        raise InvalidSettingError("headgate top", f"needs a terminal; {others}")
    if not is_terminal(sys.stderr):
        # Textual draws there, so that a file would be filled and the terminal stay empty.
        problem = "needs a terminal, and draws on its standard error"
        advice = f"leave that to the terminal, or {others}"
        raise InvalidSettingError("headgate top", f"{problem}; {advice}")
    if not is_drawable():
        problem = f"needs a terminal that can be drawn on, and TERM is {os.environ['TERM']}"
        raise InvalidSettingError("headgate top", f"{problem}; {others}")


def _numbers(client: SyncClient) -> dict[str, object]:
    """Return what the panes show, each by its name."""
    from headgate.cli.top.service_state import RUNNING_STATES, WAITING_STATES  # noqa: PLC0415

    return {
        "stats": client.stats(),
        "projects": client.list_projects().projects,
        "lanes": client.lanes().lanes,
        "running": _tasks(client, RUNNING_STATES),
        "waiting": _tasks(client, WAITING_STATES),
        "budgets": client.budget_status(),
        "slots": client.slots().slots,
        "calls": _calls(client),
    }


def _calls(client: SyncClient) -> object:
    from headgate.api.schema.calls import CallListBody  # noqa: PLC0415
    from headgate.cli.top.service_state import (  # noqa: PLC0415
        LIVE_CALLS,
        MAX_CALLS,
        calls_by_upstream,
    )

    found = client.request(
        "GET",
        "/calls",
        response_type=CallListBody,
        query={"state": LIVE_CALLS, "limit": MAX_CALLS},
    )
    return calls_by_upstream(found.calls)


def _tasks(client: SyncClient, states: str) -> object:
    from headgate.cli.top.service_state import ShownTasks, query_of_tasks  # noqa: PLC0415

    query = query_of_tasks(states)
    return client.request("GET", "/tasks", response_type=ShownTasks, query=query).tasks


async def shown(url: str, token: str | None) -> int:
    """Show a service until the screen is left, and return the exit code."""
    from headgate.cli import slot, task_view, why  # noqa: PLC0415
    from headgate.cli.top.app import Texts, Top  # noqa: PLC0415  textual takes its time to load
    from headgate.client.client import Client  # noqa: PLC0415

    texts = Texts(task=task_view.lines_of, why=why.lines_of, slot=slot.lines_of)
    async with Client(url, token=token, timeout_seconds=TIMEOUT_SECONDS, retries=0) as client:
        screen = Top(client, texts)
        await screen.run_async(mouse=False)
    return EXIT_INTERNAL if screen.return_code else 0
