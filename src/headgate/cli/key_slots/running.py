"""`headgate slots run`: slots alone, without API, dispatcher or tasks."""

from __future__ import annotations

from pathlib import Path

import click

from headgate.cli.places.connection import json_option
from headgate.cli.places.store import config_option, data_option, store_option


@click.command(
    epilog="""\b
Examples:
  headgate slots run
  headgate slots run --config slots.toml --data ./slots
  headgate slots run --json 2>> slots.log
"""
)
@config_option
@data_option
@store_option
@json_option
def run(*, path: Path | None, data: Path | None, store_url: str | None, as_json: bool) -> None:
    """Poll and wake slots, and do nothing else.

    What happens is written to standard error, with --json as lines of JSON. The settings are read
    again when their file changes. Ctrl-C ends it.
    """
    from headgate.extras import naming_extras  # noqa: PLC0415  not for a list of commands

    with naming_extras("headgate slots run"):
        from headgate.cli.key_slots.alone import run_alone  # noqa: PLC0415

        run_alone(path, data, store_url, as_json=as_json)
