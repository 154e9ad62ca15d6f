"""`headgate slots`: how much of each quota is used, wakes by hand, the log, and slots alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headgate.cli.key_slots.fake_provider import fake_provider
from headgate.cli.key_slots.log import log
from headgate.cli.key_slots.running import run
from headgate.cli.output import print_json, print_json_lines, print_table
from headgate.cli.places.connection import Connection, connect, connection_options, json_option
from headgate.core.texts.printable import printable

if TYPE_CHECKING:
    from headgate.bodies.slots import SlotBody

WARM_SECONDS = 60.0


def _given(_: click.Context, __: click.Parameter, name: str | None) -> str | None:
    if name == "":
        message = "must not be empty; headgate slots status lists the names"
        raise click.BadParameter(message)
    return name


_name_argument = click.argument("name", callback=_given)


@click.group()
def slots() -> None:
    """Show key slots and wake them, switch them, read their log, run them alone."""


@slots.command(
    epilog="""\b
Examples:
  headgate slots status
  headgate slots status work
  headgate slots status --json | jq -r 'select(.state == "exhausted") | .name'
"""
)
@click.argument("name", required=False, callback=_given)
@connection_options
@json_option
def status(*, name: str | None, connection: Connection, as_json: bool) -> None:
    """Print quotas, resets and the next wakes.

    A line for each slot; with NAME, everything that is known of that one.
    """
    with connect(connection) as client:
        if name is not None:
            _print_one(client.slot(name), as_json=as_json)
            return
        found = client.slots().slots
    if as_json:
        print_json_lines(found)
    elif found:
        from headgate.cli.key_slots.view import HEADER, WHOLE, holds_of, row_of  # noqa: PLC0415

        print_table("Slots", HEADER, [row_of(one) for one in found], whole=WHOLE)
        for line in holds_of(found):
            click.echo(line)
    else:
        click.echo("no slots are configured; [[slots]] in the settings file makes one", err=True)


@slots.command(
    epilog="""\b
Examples:
  headgate slots warm work
  headgate slots warm work --json | jq -r .resetsAt
"""
)
@_name_argument
@connection_options
@json_option
def warm(*, name: str, connection: Connection, as_json: bool) -> None:
    """Open the window of a slot now.

    Refused while it is open, and while the slot is disabled, paused, exhausted, being read or
    being confirmed.
    """
    # A wake that is sent twice may cost twice.
    with connect(connection, retries=0, timeout_seconds=WARM_SECONDS) as client:
        answer = client.warm_slot(name, timeout_seconds=WARM_SECONDS)
    if as_json:
        print_json(answer)
    else:
        click.echo(printable(f"{answer.name}: {_warmed(answer)}"))


@slots.command(
    epilog="""\b
Examples:
  headgate slots enable work
"""
)
@_name_argument
@connection_options
@json_option
def enable(*, name: str, connection: Connection, as_json: bool) -> None:
    """Poll and wake a slot again.

    Whatever had disabled it, except the settings; its errors are forgotten.
    """
    with connect(connection) as client:
        answer = client.enable_slot(name)
    _print_switched(answer, as_json=as_json)


@slots.command(
    epilog="""\b
Examples:
  headgate slots disable work
"""
)
@_name_argument
@connection_options
@json_option
def disable(*, name: str, connection: Connection, as_json: bool) -> None:
    """Leave a slot alone; its tasks wait.

    It is neither polled nor woken until it is enabled again.
    """
    with connect(connection) as client:
        answer = client.disable_slot(name)
    _print_switched(answer, as_json=as_json)


slots.add_command(log)
slots.add_command(run)
slots.add_command(fake_provider)


def _print_one(slot: SlotBody, *, as_json: bool) -> None:
    if as_json:
        print_json(slot)
        return
    from headgate.cli.key_slots.view import lines_of  # noqa: PLC0415

    click.echo("\n".join(lines_of(slot)))


def _print_switched(slot: SlotBody, *, as_json: bool) -> None:
    if as_json:
        print_json(slot)
        return
    standing = "enabled" if slot.enabled else slot.disabled_reason or "disabled"
    click.echo(printable(f"{slot.name} is {standing}"))


def _warmed(slot: SlotBody) -> str:
    from headgate.cli.times import countdown  # noqa: PLC0415

    if slot.wake_pending or slot.resets_at is None:
        return f"a wake was sent; headgate slots status {slot.name} says when it is confirmed"
    return f"a wake was sent and confirmed; the window resets in {countdown(slot.resets_at)}"
