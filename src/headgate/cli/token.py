"""`headgate token`: make tokens, list them, revoke them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from headgate.cli.connection import (
    Connection,
    chosen_directory,
    connect,
    connection_options,
    json_option,
    write_token,
)
from headgate.cli.output import from_now, moment, print_json, print_json_lines, print_table
from headgate.errors import InvalidFieldError, InvalidSettingError
from headgate.storage.audit import Actor, AuditEntry, Detail
from headgate.storage.tokens import PERMISSIONS

if TYPE_CHECKING:
    from headgate.api.schema.tasks import CreatedTokenBody, NewTokenBody, TokenBody
    from headgate.cli.command_client import CommandClient
    from headgate.config import Settings


TOKEN_PERMISSIONS = ("submit", "read", "cancel", "admin")
USUAL = ("submit", "read", "cancel")
_TOKEN_ID = re.compile("[0-9a-f]{12}")
HEADER = ("id", "name", "permissions", "for", "state", "made", "expires")
SPARE = ("made", "permissions", "expires", "for")


@click.group()
def token() -> None:
    """Create, list and revoke tokens."""


@token.command(
    epilog="""\b
Examples:
  headgate token create ci --expires 90d
  headgate token create coder-1 --agent coder-1 --permission submit --permission read
  export HEADGATE_TOKEN=$(headgate token create nightly --project eval --json | jq -r .token)
  headgate token create operator --offline --data /var/lib/headgate
"""
)
@click.argument("name")
@click.option(
    "--permission",
    "permissions",
    type=click.Choice(TOKEN_PERMISSIONS),
    multiple=True,
    help="A permission of the token; repeat the option for more.  [default: submit, read, cancel]",
)
@click.option("--agent", metavar="NAME", help="Restrict the token to this agent.")
@click.option("--project", metavar="NAME", help="Restrict the token to this project.")
@click.option(
    "--least-priority",
    metavar="N",
    type=int,
    help="The lowest priority number that its tasks may have.",
)
@click.option(
    "--expires", metavar="TIME", type=moment, help="When the token expires: 90d, or a time."
)
@click.option(
    "--offline",
    is_flag=True,
    help="Write to the store without a service; all permissions by default.",
)
@click.option(
    "--config",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With --offline: the settings of the service.",
)
@click.option("--store", "store_url", metavar="URL", help="With --offline: the service's store.")
@connection_options
@json_option
def create(
    *,
    name: str,
    permissions: tuple[str, ...],
    agent: str | None,
    project: str | None,
    least_priority: int | None,
    expires: timedelta | str | None,
    offline: bool,
    path: Path | None,
    store_url: str | None,
    connection: Connection,
    as_json: bool,
) -> None:
    """Create a token and print it once; Headgate never shows it again.

    A token cannot allow more than the token that creates it. If you have lost all tokens, use
    --offline on the machine of the service; with SQLite, stop the service first. A token with all
    permissions is also written to the data directory, where commands find it.
    """
    wish = _wish(
        name=name,
        permissions=permissions,
        agent=agent,
        project=project,
        least_priority=least_priority,
        expires=expires,
    )
    if offline:
        made = _offline(wish, path, store_url, connection, is_chosen=bool(permissions))
    else:
        _check_online(path, store_url)
        made = _online(wish, connection)
    if as_json:
        print_json(made)
    else:
        click.echo(made.token)
        if made.note:
            click.echo(f"headgate: {made.note}", err=True)


@token.command(
    "list",
    epilog="""\b
Examples:
  headgate token list
  headgate token list --json | jq -r 'select(.state == "good") | .name'
""",
)
@connection_options
@json_option
def list_(*, connection: Connection, as_json: bool) -> None:
    """List the tokens, newest first, without their secrets."""
    with connect(connection) as client:
        answer = client.list_tokens()
    if as_json:
        print_json_lines(answer.tokens)
        return
    rows = [_row(one) for one in answer.tokens]
    print_table("Tokens", HEADER, rows, whole=("id",), spare=SPARE)


@token.command(
    epilog="""\b
Examples:
  headgate token revoke 640b5c4e398a
  headgate token revoke ci
"""
)
@click.argument("token_ids", metavar="ID|NAME...", nargs=-1, required=True)
@connection_options
@json_option
def revoke(*, token_ids: tuple[str, ...], connection: Connection, as_json: bool) -> None:
    """Revoke tokens, by id or name: at this node at once, at others within five seconds."""
    with connect(connection) as client:
        for token_id in _ids_of(client, token_ids):
            answer = client.revoke_token(token_id)
            if as_json:
                print_json_lines([answer])
            else:
                click.echo(f"{answer.id} {answer.name} is revoked")


def _ids_of(client: CommandClient, given: Sequence[str]) -> list[str]:
    """Return the ids of tokens; who may list them may name them."""
    if all(map(_TOKEN_ID.fullmatch, given)):
        return list(given)
    ids = {one.name: one.id for one in client.list_tokens().tokens if one.state == "good"}
    return [ids.get(name, name) for name in given]


def _wish(
    *,
    name: str,
    permissions: tuple[str, ...],
    agent: str | None,
    project: str | None,
    least_priority: int | None,
    expires: timedelta | str | None,
) -> dict[str, Any]:
    ends_at = datetime.now(UTC) + expires if isinstance(expires, timedelta) else expires
    wish = {
        "name": name,
        "permissions": permissions or USUAL,
        "agentId": agent,
        "projectId": project,
        "leastPriority": least_priority,
        "expiresAt": ends_at,
    }
    return {key: value for key, value in wish.items() if value is not None}


def _online(wish: dict[str, Any], connection: Connection) -> CreatedTokenBody:
    from headgate.api.schema.tasks import CreatedTokenBody  # noqa: PLC0415
    from headgate.cli.resources import PROJECTS  # noqa: PLC0415

    # A request that is sent twice would make two.
    with (
        connect(connection, retries=0) as client,
        PROJECTS.naming_known(client, wish.get("projectId", ""), "unknown_project"),
    ):
        return client.request("POST", "/tokens", response_type=CreatedTokenBody, body=wish)


def _check_online(path: Path | None, store_url: str | None) -> None:
    for option, value in (("--config", path), ("--store", store_url)):
        if value is not None:
            raise InvalidFieldError(
                option, "goes with --offline; otherwise name the service's --url"
            )


def _offline(
    wish: dict[str, Any],
    path: Path | None,
    store_url: str | None,
    connection: Connection,
    *,
    is_chosen: bool,
) -> CreatedTokenBody:

    if connection.url is not None or connection.token is not None:
        raise InvalidFieldError("--offline", "asks no service; leave out --url and --token")
    is_bound = "agentId" in wish or "projectId" in wish
    if not is_chosen and not is_bound:
        wish = wish | {"permissions": TOKEN_PERMISSIONS}
    return create_offline(wish, path=path, data=connection.data, store_url=store_url)


def _row(one: TokenBody) -> tuple[str, ...]:
    bounds = (
        ("agent", one.agent_id),
        ("project", one.project_id),
        ("priority from", one.least_priority),
    )
    return (
        one.id,
        one.name,
        ", ".join(one.permissions),
        ", ".join(f"{kind} {value}" for kind, value in bounds if value is not None) or "all",
        one.state,
        from_now(one.created_at),
        "never" if one.expires_at is None else from_now(one.expires_at),
    )


# A token for whoever has lost all of them: written to the store itself, without a service.
#
# Whoever can open the store could change everything in it anyway, so nobody is asked who they
# are. On SQLite the lock on the data directory keeps this apart from a service that runs.

OFFLINE = Actor(name="(offline)")


def create_offline(
    wish: dict[str, Any], *, path: Path | None, data: Path | None, store_url: str | None
) -> CreatedTokenBody:
    """Make a token in the store of these settings; one that may do everything goes into the file.

    What may be wished for is what a service would grant to whoever may do everything.
    """
    from headgate.app import held_file  # noqa: PLC0415
    from headgate.config import load_settings, settings_file  # noqa: PLC0415
    from headgate.storage.data_lock import hold_store  # noqa: PLC0415

    settings = load_settings(settings_file(path), os.environ, {"store.url": store_url})
    directory = chosen_directory(data)
    _check_created(settings, directory)
    file = held_file(settings, directory)
    with nullcontext() if file is None else hold_store(file):
        import asyncio  # noqa: PLC0415  slow to load

        made = asyncio.run(_create(_offline_wish(wish), settings, directory))
    # A lesser one would take the operator's key away from the commands of this machine.
    is_whole = set(made.permissions) == set(PERMISSIONS) and made.least_priority is None
    problem = write_token(directory, made.token) if is_whole else None
    if problem is not None:
        click.echo(f"headgate: {directory / 'token'} could not be written: {problem}", err=True)
    return made


def _check_created(settings: Settings, directory: Path) -> None:
    """Refuse to found a store: a token in one that no service uses is for nothing."""
    from headgate.app import is_shared, sqlite_file  # noqa: PLC0415

    if is_shared(settings):
        return
    if settings.store.url == "memory:":
        raise InvalidSettingError("store.url", "a store in memory keeps no tokens")
    store = sqlite_file(settings, directory)
    if not store.is_file():
        problem = f"there is no store at {store}; name the service's --data, --config or --store"
        raise InvalidSettingError("--offline", problem)


def _offline_wish(wish: dict[str, Any]) -> NewTokenBody:
    from headgate.api.schema.tasks import NewTokenBody  # noqa: PLC0415

    try:
        return msgspec.convert(wish, NewTokenBody)
    except msgspec.ValidationError as error:
        raise InvalidFieldError("token", str(error)) from None


async def _create(wish: NewTokenBody, settings: Settings, directory: Path) -> CreatedTokenBody:
    from headgate.api.tokens import created_body, token_for  # noqa: PLC0415
    from headgate.app import build_store  # noqa: PLC0415
    from headgate.storage.tokens import TokenStore  # noqa: PLC0415

    store = build_store(settings, data=directory, keeps_ledger=True)
    await store.open()
    try:
        tokens = TokenStore(store)
        new = token_for(wish, knows_project=settings.projects.__contains__, now=tokens.now())
        token = new.kept.token
        detail: Detail = {"name": token.name, "permissions": list(token.permissions)}
        await tokens.add(
            new.kept,
            AuditEntry(actor=OFFLINE, action="token.create", subject=token.id, detail=detail),
        )
        return created_body(new, tokens.now())
    finally:
        await store.close()
