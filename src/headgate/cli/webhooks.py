"""`headgate webhooks`: what was told to whom, once more, a ping, and the signing secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import clock_time, from_now, print_json, print_json_lines, print_table

if TYPE_CHECKING:
    from headgate.api.schema.admin import DeliveryBody, DeliveryTryBody, SecretListBody


STATES = ("pending", "delivered", "dead")
TRIES_HEADER = ("tried", "came back", "took", "what the receiver said")
HEADER = ("id", "event", "state", "tries", "address", "next or last", "answer")
SPARE = ("answer", "event", "tries", "next or last", "address")
MOST_CHARACTERS = 60


@click.group()
def webhooks() -> None:
    """List webhooks, send them again, ping an address, rotate the secret."""


@webhooks.command(
    "list",
    epilog="""\b
Examples:
  headgate webhooks list --state dead
  headgate webhooks list --task tsk_01m7fs2skb2415wvpawg4jr96h
  headgate webhooks list --state dead --json | jq -r .id
""",
)
@click.option("--state", type=click.Choice(STATES), help="Only webhooks in this state.")
@click.option("--task", metavar="ID", help="Only the webhook of this task.")
@click.option(
    "--limit", metavar="N", type=click.IntRange(1, 1000), help="How many to list.  [default: 100]"
)
@click.option("--cursor", metavar="ID", help="Start after the webhook with this id.")
@connection_options
@json_option
def list_(
    *,
    state: Literal["pending", "delivered", "dead"] | None,
    task: str | None,
    limit: int | None,
    cursor: str | None,
    connection: Connection,
    as_json: bool,
) -> None:
    """List webhooks, newest first."""
    with connect(connection) as client:
        answer = client.list_webhooks(state=state, task=task, limit=limit, cursor=cursor)
    if as_json:
        print_json_lines(answer.webhooks)
    else:
        rows = [_row(one) for one in answer.webhooks]
        print_table("Webhooks", HEADER, rows, whole=("id",), spare=SPARE)
    if answer.next_cursor is not None:
        click.echo(f"there are more: --cursor {answer.next_cursor}", err=True)


@webhooks.command(
    epilog="""\b
Examples:
  headgate webhooks show msg_01m7fs2skb2415wvpawg4jr96h
"""
)
@click.argument("webhook_id", metavar="ID")
@connection_options
@json_option
def show(*, webhook_id: str, connection: Connection, as_json: bool) -> None:
    """Show a webhook with its whole address and its latest tries."""
    with connect(connection) as client:
        answer = client.get_webhook(webhook_id)
    if as_json:
        print_json(answer)
        return
    print_table(answer.id, HEADER[1:], [_row(answer)[1:]])
    click.echo(f"  {answer.url}")
    if answer.latest_tries:
        tries = [_try_row(one) for one in reversed(answer.latest_tries)]
        print_table("Latest tries", TRIES_HEADER, tries)


@webhooks.command(
    epilog="""\b
Examples:
  headgate webhooks redeliver msg_01m7fs2skb2415wvpawg4jr96h
  headgate webhooks list --state dead --json | jq -r .id \\
    | xargs headgate webhooks redeliver
"""
)
@click.argument("webhook_ids", metavar="ID...", nargs=-1, required=True)
@connection_options
@json_option
def redeliver(*, webhook_ids: tuple[str, ...], connection: Connection, as_json: bool) -> None:
    """Send webhooks again, with a new series of tries."""
    with connect(connection) as client:
        for webhook_id in webhook_ids:
            answer = client.redeliver(webhook_id)
            if as_json:
                print_json_lines([answer])
            else:
                click.echo(f"{answer.id} is sent again")


@webhooks.command(
    epilog="""\b
Examples:
  headgate webhooks ping https://hooks.example/headgate
"""
)
@click.argument("address")
@connection_options
@json_option
@click.pass_context
def ping(context: click.Context, /, *, address: str, connection: Connection, as_json: bool) -> None:
    """Send a signed message to an address now. The exit code is 1 if the address refuses it."""
    with connect(connection, retries=0) as client:
        answer = client.ping_webhook(address)
    if as_json:
        print_json(answer)
    else:
        came = "" if answer.status is None else f" ({answer.status})"
        click.echo(f"Delivered{came}." if answer.delivered else f"Not delivered: {answer.error}")
    context.exit(0 if answer.delivered else 1)


@webhooks.command(
    epilog="""\b
Examples:
  headgate webhooks secret
"""
)
@connection_options
@json_option
def secret(*, connection: Connection, as_json: bool) -> None:
    """Show the secrets that sign webhooks, newest first."""
    with connect(connection) as client:
        _print_secrets(client.webhook_secrets(), as_json=as_json)


@webhooks.command(
    epilog="""\b
Examples:
  headgate webhooks rotate
"""
)
@connection_options
@json_option
def rotate(*, connection: Connection, as_json: bool) -> None:
    """Make a new signing secret; the old one stays valid for a day."""
    # A request that is sent twice would make two.
    with connect(connection, retries=0) as client:
        _print_secrets(client.rotate_webhook_secret(), as_json=as_json)


def _print_secrets(answer: SecretListBody, *, as_json: bool) -> None:
    if as_json:
        print_json_lines(answer.secrets)
        return
    for one in answer.secrets:
        until = "" if one.ends_at is None else f"  signs until {clock_time(one.ends_at)}"
        click.echo(f"{one.secret}{until}")


def _row(one: DeliveryBody) -> tuple[str, ...]:
    at = one.due_at or one.ended_at
    answer = one.error or (str(one.status) if one.status is not None else "")
    return (
        one.id,
        one.event,
        one.state,
        str(one.tries),
        # What follows the question mark often is a secret.
        _short(one.url.partition("?")[0]),
        "" if at is None else from_now(at),
        _short(answer),
    )


def _try_row(one: DeliveryTryBody) -> tuple[str, ...]:
    came_back = one.error or "nothing" if one.status is None else str(one.status)
    return (clock_time(one.at), came_back, f"{one.duration_ms} ms", one.answer or "")


def _short(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"
