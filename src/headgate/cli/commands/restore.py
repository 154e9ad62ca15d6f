"""`headgate restore`: put a copy of the store in its place."""

from __future__ import annotations

import time
from pathlib import Path

import click

from headgate.cli.output import print_json
from headgate.cli.places.connection import json_option
from headgate.cli.places.store import (
    config_option,
    data_option,
    is_same_file,
    settings_of,
    sqlite_store,
    store_option,
)
from headgate.errors import InvalidSettingError


@click.command(
    epilog="""\b
Examples:
  headgate restore headgate-2026-11-15.db --data /var/lib/headgate
  headgate restore latest.db --force
"""
)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Set a store that is there aside, under another name.")
@data_option
@config_option
@store_option
@json_option
def restore(
    *,
    file: Path,
    force: bool,
    data: Path | None,
    path: Path | None,
    store_url: str | None,
    as_json: bool,
) -> None:
    """Put a copy that headgate backup made in place of the store.

    The service must not run. The copy is checked first. What was running when it was made is taken
    back at the next start, as after a crash; so it may run a second time.
    """
    store = sqlite_store(settings_of(path, store_url), data, does="restore")
    aside = _restore(file.absolute(), store, replaces=force)
    if as_json:
        print_json({"store": str(store), "aside": None if aside is None else str(aside)})
        return
    click.echo(f"{store}: restored from {file}; start the service with headgate up")
    if aside is not None:
        click.echo(f"what was there before is {aside}")


def _restore(copy: Path, store: Path, *, replaces: bool) -> Path | None:
    from headgate.data_lock import hold_directory  # noqa: PLC0415
    from headgate.databases.sqlite_backup import check, put_back  # noqa: PLC0415
    from headgate.stores.schema import PARTS  # noqa: PLC0415

    if not copy.is_file():
        raise InvalidSettingError("FILE", f"{copy} is not there; name a copy of a store")
    if is_same_file(copy, store):
        raise InvalidSettingError("FILE", f"{copy} is the store itself; name a copy of it")
    check(copy, PARTS)
    with hold_directory(store.parent):
        if store.exists() and not replaces:
            problem = f"{store} exists; give --force to set it aside"
            raise InvalidSettingError("data", problem)
        suffix = time.strftime(".before-%Y%m%dT%H%M%SZ", time.gmtime())
        return put_back(copy, store, aside_suffix=suffix)
