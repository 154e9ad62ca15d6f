"""`headgate backup`: a copy of the store, while the service runs or not."""

from __future__ import annotations

from pathlib import Path

import click

from headgate.cli.output import print_json
from headgate.cli.places.connection import json_option
from headgate.cli.places.store import (
    config_option,
    data_option,
    is_same_file,
    own_files,
    settings_of,
    sqlite_store,
    store_option,
)
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
    """Copy the store to a file: tasks, budgets, tokens, overrides and the audit log.

    The service may run meanwhile. The copy is checked before it gets its name, and only its owner
    can read it. A store in PostgreSQL is copied with pg_dump.
    """
    from headgate.databases.sqlite_backup import back_up  # noqa: PLC0415

    settings = settings_of(path, store_url)
    source = sqlite_store(settings, data, does="back up")
    _check_apart(file, own_files(source, data))
    size_bytes = back_up(source, file.absolute(), replaces=force)
    if as_json:
        print_json({"file": str(file), "store": str(source), "bytes": size_bytes})
        return
    click.echo(f"{file}: {size_bytes:,} bytes of {source}, checked")
    if settings.ledger.url is not None and settings.ledger.url != settings.store.url:
        click.echo("headgate: the books are outside the store and not in the copy", err=True)


def _check_apart(file: Path, owned: list[Path]) -> None:
    # A service that runs would go on with a file that has no name any more, and lose it.
    if any(is_same_file(file, one) for one in owned):
        raise InvalidSettingError("FILE", f"{file} belongs to the service; name another file")
