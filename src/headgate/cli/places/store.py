"""Which SQLite file a command is about, by the same settings as the service goes by."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headgate.cli.places.connection import TOKEN_FILE
from headgate.cli.places.data_directory import data_directory
from headgate.errors import InvalidSettingError

if TYPE_CHECKING:
    from headgate.settings import Settings

STORE_SIDES = ("", "-wal", "-shm", "-journal")
"""What SQLite writes beside the file of a store, in any of its ways to work."""

config_option = click.option(
    "--config", "path", metavar="FILE", type=click.Path(path_type=Path), help="The settings."
)
data_option = click.option(
    "--data",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The data directory of the service.  [default: the XDG data directory]",
)
store_option = click.option("--store", "store_url", metavar="URL", help="As of headgate up.")


def settings_of(path: Path | None, store_url: str | None) -> Settings:
    """Return the settings that the service would start with."""
    from headgate.settings import load_settings, settings_file  # noqa: PLC0415

    given = {} if store_url is None else {"store.url": store_url}
    return load_settings(settings_file(path), os.environ, given)


def sqlite_store(settings: Settings, data: Path | None, *, does: str) -> Path:
    """Return the file of the store; another kind of store is refused with what to do instead."""
    from headgate.wiring import is_shared, sqlite_file  # noqa: PLC0415

    if is_shared(settings):
        problem = f"the tasks are in PostgreSQL, which headgate does not {does}; use {_TOOLS[does]}"
        raise InvalidSettingError("store.url", problem)
    if settings.store.url == "memory:":
        raise InvalidSettingError("store.url", f"a store in memory has nothing to {does}")
    return sqlite_file(settings, (data or data_directory()).absolute())


def own_files(store: Path, data: Path | None) -> list[Path]:
    """List what a service lives from: the store with its side files, locks and tokens."""
    from headgate.cli.places.token_file import PREVIOUS  # noqa: PLC0415
    from headgate.data_lock import LOCK_NAME  # noqa: PLC0415

    folders = {store.parent, (data or data_directory()).absolute()}
    names = (LOCK_NAME, TOKEN_FILE, PREVIOUS)
    sides = [store.with_name(f"{store.name}{side}") for side in STORE_SIDES]
    return sides + [folder / name for folder in sorted(folders) for name in names]


def is_same_file(path: Path, other: Path) -> bool:
    """Tell whether two names are of one file, or would be if there were one."""
    try:
        return path.samefile(other)
    except OSError:
        return path.resolve() == other.resolve()


_TOOLS = {"back up": "pg_dump", "restore": "pg_restore"}
