"""A token for whoever has lost all of them: written to the store itself, without a service.

Whoever can open the store could change everything in it anyway, so nobody is asked who they are. On
SQLite the lock on the data directory keeps this apart from a service that runs.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from headgate.audit import Actor, AuditEntry, Detail
from headgate.cli.places.data_directory import data_directory
from headgate.cli.places.token_file import write_token
from headgate.errors import InvalidFieldError, InvalidSettingError
from headgate.tokens import PERMISSIONS

if TYPE_CHECKING:
    from headgate.bodies.tasks import CreatedTokenBody, NewTokenBody
    from headgate.settings import Settings

OFFLINE = Actor(name="(offline)")


def create_offline(
    wish: dict[str, Any], *, path: Path | None, data: Path | None, store_url: str | None
) -> CreatedTokenBody:
    """Make a token in the store of these settings; one that may do everything goes into the file.

    What may be wished for is what a service would grant to whoever may do everything.
    """
    from headgate.data_lock import hold_directory  # noqa: PLC0415
    from headgate.extras import naming_extras  # noqa: PLC0415
    from headgate.settings import load_settings, settings_file  # noqa: PLC0415
    from headgate.wiring import held_folder  # noqa: PLC0415

    with naming_extras("headgate token create"):
        settings = load_settings(settings_file(path), os.environ, {"store.url": store_url})
        directory = (data or data_directory()).absolute()
        _check_founded(settings, directory)
        folder = held_folder(settings, directory)
        with nullcontext() if folder is None else hold_directory(folder):
            made = asyncio.run(_create(_wish(wish), settings, directory))
    # A lesser one would take the operator's key away from the commands of this machine.
    is_whole = set(made.permissions) == set(PERMISSIONS) and made.least_priority is None
    problem = write_token(directory, made.token) if is_whole else None
    if problem is not None:
        click.echo(f"headgate: {directory / 'token'} could not be written: {problem}", err=True)
    return made


def _check_founded(settings: Settings, directory: Path) -> None:
    """Refuse to found a store: a token in one that no service uses is for nothing."""
    from headgate.wiring import is_shared, sqlite_file  # noqa: PLC0415

    if is_shared(settings):
        return
    if settings.store.url == "memory:":
        raise InvalidSettingError("store.url", "a store in memory keeps no tokens")
    store = sqlite_file(settings, directory)
    if not store.is_file():
        problem = f"there is no store at {store}; name the service's --data, --config or --store"
        raise InvalidSettingError("--offline", problem)


def _wish(wish: dict[str, Any]) -> NewTokenBody:
    from headgate.bodies.tasks import NewTokenBody  # noqa: PLC0415

    try:
        return msgspec.convert(wish, NewTokenBody)
    except msgspec.ValidationError as error:
        raise InvalidFieldError("token", str(error)) from None


async def _create(wish: NewTokenBody, settings: Settings, directory: Path) -> CreatedTokenBody:
    from headgate.stores.administering.tokens import SqlTokens  # noqa: PLC0415
    from headgate.web.handlers.tokens import created_body, wished_token  # noqa: PLC0415
    from headgate.wiring import build_store  # noqa: PLC0415

    store = build_store(settings, data=directory, keeps_books=True)
    await store.open()
    try:
        tokens = SqlTokens(store)
        new = wished_token(wish, knows_project=settings.projects.__contains__, now=tokens.now())
        token = new.kept.token
        detail: Detail = {"name": token.name, "permissions": list(token.permissions)}
        await tokens.add(
            new.kept,
            AuditEntry(actor=OFFLINE, action="token.create", subject=token.id, detail=detail),
        )
        return created_body(new, tokens.now())
    finally:
        await store.close()
