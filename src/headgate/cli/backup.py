"""`headgate backup`: a copy of the store, while the service runs or not."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import click

from headgate.cli.connection import (
    config_option,
    data_option,
    is_same_file,
    json_option,
    own_files,
    settings_of,
    sqlite_store,
    store_option,
)
from headgate.cli.output import print_json
from headgate.errors import InvalidSettingError


@click.command(
    epilog="""\b
Examples:
  headgate backup headgate-$(date +%F).db
  headgate backup /backups/latest.db --force --data /var/lib/headgate
"""
)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@data_option
@config_option
@store_option
@json_option
def backup(
    *,
    file: Path,
    force: bool,
    data: Path | None,
    path: Path | None,
    store_url: str | None,
    as_json: bool,
) -> None:
    """Copy the store to a file.

    The copy has the tasks, budgets, tokens, overrides and the audit log. The service may run
    meanwhile. The file appears only when the copy is complete and checked, and only you can read
    it. Use pg_dump for a store in PostgreSQL.
    """
    from headgate.storage.backup import back_up  # noqa: PLC0415

    settings = settings_of(path, store_url)
    source = sqlite_store(settings, data, does="back up")
    _check_apart(file, own_files(source, data))
    size_bytes = back_up(source, file.absolute(), replaces=force)
    if as_json:
        print_json({"file": str(file), "store": str(source), "bytes": size_bytes})
        return
    click.echo(f"Copied {source} to {file}: {size_bytes:,} bytes, checked")
    if settings.ledger.url is not None and settings.ledger.url != settings.store.url:
        click.echo("headgate: the ledger is outside the store and not in the copy", err=True)


def _check_apart(file: Path, owned: list[Path]) -> None:
    # A service that runs would go on with a file that has no name any more, and lose it.
    if any(is_same_file(file, one) for one in owned):
        raise InvalidSettingError("FILE", f"{file} belongs to the service; name another file")


# `headgate restore`: put a copy of the store in its place.


@click.command(
    epilog="""\b
Examples:
  headgate restore headgate-2026-11-15.db --data /var/lib/headgate
  headgate restore latest.db --force
"""
)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Rename an existing store instead of refusing.")
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
    """Replace the store with a copy that headgate backup made.

    Stop the service first. The command checks the copy before it replaces anything. Tasks that ran
    when the copy was made run again at the next start, as after a crash.
    """
    store = sqlite_store(settings_of(path, store_url), data, does="restore")
    aside = _restore(file.absolute(), store, replaces=force)
    if as_json:
        print_json({"store": str(store), "aside": None if aside is None else str(aside)})
        return
    place = "" if data is None else f" --data {shlex.quote(str(data))}"
    click.echo(f"Restored {store} from {file}. Start the service with headgate up{place}.")
    if aside is not None:
        click.echo(f"The store that was there is now {aside}")


def _restore(copy: Path, store: Path, *, replaces: bool) -> Path | None:
    from headgate.storage.backup import check, put_back  # noqa: PLC0415
    from headgate.storage.data_lock import hold_store  # noqa: PLC0415
    from headgate.storage.sql_store import PARTS  # noqa: PLC0415

    if not copy.is_file():
        raise InvalidSettingError("FILE", f"{copy} is not there; name a copy of a store")
    if is_same_file(copy, store):
        raise InvalidSettingError("FILE", f"{copy} is the store itself; name a copy of it")
    check(copy, PARTS)
    with hold_store(store):
        if store.exists() and not replaces:
            problem = f"{store} exists; give --force to set it aside"
            raise InvalidSettingError("data", problem)
        suffix = time.strftime(".before-%Y%m%dT%H%M%SZ", time.gmtime())
        return put_back(copy, store, aside_suffix=suffix)
