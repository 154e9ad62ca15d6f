"""`headgate calls`: calls through the gateway, those that wait and run and those that ended."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import (
    length_of,
    naming_unknown,
    past_moment,
    print_json,
    print_json_lines,
    print_tables,
    tell_more,
)
from headgate.core.call import CALL_PREFIX
from headgate.core.text import printable

if TYPE_CHECKING:
    from headgate.api.schema.calls import CallAmountBody, CallBody, CallTokensBody
    from headgate.client.sync_client import SyncClient


STATES = ("waiting", "running", "done", "failed", "refused", "cancelled")
HEADER = ("call", "state", "project", "agent", "model", "key", "waited", "tokens", "cost")
SPARE = ("waited", "key", "project", "agent", "tokens", "model")
DEFAULT_LIMIT = 20
MOST_AT_ONCE = 1_000

Filter = dict[str, str | int | None]


class CallGroup(click.Group):
    """A group that takes the id of a call for `show` of it."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; the id of a call stands for `show` with that id."""
        if args[0].startswith(CALL_PREFIX):
            args = ["show", *args]
        return super().resolve_command(ctx, args)


@click.group(
    cls=CallGroup,
    invoke_without_command=True,
    epilog="""\b
Examples:
  headgate calls
  headgate calls --state waiting --project evals
  headgate calls --model claude-sonnet-4-5 --since 2h --all --json | jq -r .usage.usd
  headgate calls call-01m7fs2skb2415wvpawg4jr96h
  headgate why call-01m7fs2skb2415wvpawg4jr96h
""",
)
@click.option("--project", "project_id", metavar="NAME", help="Only calls of this project.")
@click.option("--agent", "agent_id", metavar="NAME", help="Only calls of this agent.")
@click.option("--model", metavar="NAME", help="Only calls for this model, as clients name it.")
@click.option("--upstream", metavar="NAME", help="Only calls to this upstream.")
@click.option("--slot", metavar="NAME", help="Only calls with this key.")
@click.option("--task", "task_id", metavar="ID", help="Only calls of this task.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(STATES),
    help="Only calls in this state; repeat the option for more.",
)
@click.option(
    "--since",
    metavar="TIME",
    type=past_moment,
    help="Only calls made since then: 2h ago, or 2030-01-31T18:00:00Z.",
)
@click.option(
    "--until", metavar="TIME", type=past_moment, help="Only calls made before: 2h ago, or a time."
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, MOST_AT_ONCE),
    default=DEFAULT_LIMIT,
    show_default=True,
    help="How many to list.",
)
@click.option("--all", "is_all", is_flag=True, help="List all of them.")
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Write each call as one line of JSON.")
@click.pass_context
def calls(
    context: click.Context,
    /,
    *,
    project_id: str | None,
    agent_id: str | None,
    model: str | None,
    upstream: str | None,
    slot: str | None,
    task_id: str | None,
    states: tuple[str, ...],
    since: str | None,
    until: str | None,
    limit: int,
    is_all: bool,
    connection: Connection,
    as_json: bool,
) -> None:
    """List calls through the gateway, newest first, or show one.

    The list includes calls that wait or run. headgate why CALL says what a call waits for.
    """
    if context.invoked_subcommand is not None:
        return
    which: Filter = {
        "projectId": project_id,
        "agentId": agent_id,
        "model": model,
        "upstream": upstream,
        "slot": slot,
        "taskId": task_id,
        "state": ",".join(states) or None,
        "since": since,
        "until": until,
    }
    with connect(connection) as client:
        # One more than is shown tells whether there are more.
        listed = _found(client, which, limit=None if is_all else limit + 1)
        found = naming_unknown(listed, client, project=project_id, agent=agent_id)
        shown = found if is_all else islice(found, limit)
        if as_json:
            print_json_lines(shown)
        else:
            print_tables(
                "Calls",
                HEADER,
                map(row_of, shown),
                empty=f"No calls at {client.url}",
                whole=("call",),
                spare=SPARE,
            )
        if not is_all:
            tell_more(found, limit)


@calls.command(
    epilog="""\b
Examples:
  headgate calls show call-01m7fs2skb2415wvpawg4jr96h
  headgate calls show call-01m7fs2skb2415wvpawg4jr96h --json | jq .usage
"""
)
@click.argument("call_id", metavar="CALL")
@connection_options
@json_option
def show(*, call_id: str, connection: Connection, as_json: bool) -> None:
    """Show everything about a call."""
    print_call(call_id, connection, as_json=as_json)


def print_call(call_id: str, connection: Connection, *, as_json: bool) -> None:
    """Ask the service for a call, and print all of it."""
    from headgate.api.schema.calls import CallBody  # noqa: PLC0415
    from headgate.client.requests import resource_path  # noqa: PLC0415

    path = resource_path("calls", call_id, field_name="call_id")
    with connect(connection) as client:
        call = client.request("GET", path, response_type=CallBody)
    if as_json:
        print_json(call)
    else:
        click.echo("\n".join(lines_of(call)))


def _found(client: SyncClient, which: Filter, *, limit: int | None) -> Iterator[CallBody]:
    """Give as many calls as are wanted, or all; a page may be shorter than it could be."""
    from headgate.api.schema.calls import CallListBody  # noqa: PLC0415

    cursor, left = None, limit
    while left is None or left:
        query: Filter = {
            **which,
            "cursor": cursor,
            "limit": min(left or MOST_AT_ONCE, MOST_AT_ONCE),
        }
        page = client.request("GET", "/calls", response_type=CallListBody, query=query)
        yield from page.calls
        cursor = page.next_cursor
        if cursor is None:
            return
        left = None if left is None else max(0, left - page.count)


def row_of(call: CallBody) -> tuple[str, ...]:
    """Return one line of a table of calls."""
    return (
        call.call_id,
        call.state.value,
        call.project_id,
        call.agent_id,
        call.model,
        call.slot or "",
        length_of(waited_seconds(call)),
        "" if call.usage is None else f"{call.usage.tokens:,}",
        "" if call.usage is None else _dollars(call.usage.usd, call),
    )


def waited_seconds(call: CallBody, now: datetime | None = None) -> float:
    """Return how long a call has waited; one that still waits, until now."""
    if call.waited_ms is not None:
        return call.waited_ms / 1000
    return max(0.0, ((now or datetime.now(UTC)) - call.created_at).total_seconds())


def lines_of(call: CallBody) -> list[str]:
    """Return everything that is set of a call, a line for each field."""
    import msgspec  # noqa: PLC0415

    given = [(field.name, getattr(call, field.name)) for field in msgspec.structs.fields(call)]
    shown = [(name, _value(name, value, call)) for name, value in given if name not in _ELSEWHERE]
    shown.append(("waited", length_of(waited_seconds(call))))
    shown = [(name, text) for name, text in shown if text]
    width = max(len(name) for name, _ in shown)
    return [f"{name.replace('_', ' '):<{width}}  {text}" for name, text in shown]


_ELSEWHERE = ("waited_ms", "is_unpriced")
"""Fields that are shown in other words, or beside what they are about."""


def _value(name: str, value: object, call: CallBody) -> str:
    from headgate.cli.output import clock_time, from_now  # noqa: PLC0415

    if value is None or value in ("", (), False):
        return ""
    if name == "reported":
        return _reported(value)  # type: ignore[arg-type]
    if name in ("reserved", "usage"):
        return _amount(value, call)  # type: ignore[arg-type]
    if isinstance(value, datetime):
        return f"{clock_time(value)} ({from_now(value)})"
    if isinstance(value, tuple):
        return printable(", ".join(str(one) for one in value))
    if value is True:
        return "yes"
    return printable(str(getattr(value, "value", value)))


def _reported(said: CallTokensBody) -> str:
    parts = (
        (said.input_tokens, "in"),
        (said.cached_tokens, "of them cached"),
        (said.cache_write_tokens, "written to the cache"),
        (said.output_tokens, "out"),
        (said.reasoning_tokens, "of them reasoning"),
    )
    return ", ".join(f"{tokens:,} {word}" for tokens, word in parts if tokens is not None)


def _dollars(usd: str, call: CallBody) -> str:
    """Write an amount as budgets do; none of a model without a price is not one of nothing."""
    from headgate.core.money import format_usd, read_usd  # noqa: PLC0415

    return "unpriced" if call.is_unpriced and not float(usd) else format_usd(read_usd(usd))


_BASES = {
    "given": "the most that the request allows",
    "learned": "what such calls usually need",
    "probe": "a probe: what such calls need was not known",
}
"""Where a reserved amount comes from, in words."""


def _amount(amount: CallAmountBody, call: CallBody) -> str:
    text = f"{amount.tokens:,} tokens, {_dollars(amount.usd, call)}"
    if amount.basis:
        return f"{text}, {_BASES.get(amount.basis, amount.basis)}"
    if not amount.assumed_tokens and amount.assumed_usd is None:
        return text
    assumed = f"{amount.assumed_tokens:,} tokens, {_dollars(amount.assumed_usd or '0', call)}"
    return f"{text} (assumed {assumed})"
