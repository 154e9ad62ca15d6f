"""The ids of runs, offered by the Tab key: read from the names of folders and nothing else."""

from __future__ import annotations

from pathlib import Path

import click

from headgate.cli.places.data_directory import default_directory

MOST_OFFERED = 50
RUNS = "runs"
LAST = "last"


def offered_runs(
    context: click.Context,
    parameter: click.Parameter,  # noqa: ARG001 - click gives it
    incomplete: str,
) -> list[str]:
    """Return the ids that begin like this, the newest first, and the word for the newest."""
    data: Path | None = context.params.get("data") or default_directory()
    try:
        names = [] if data is None else [path.name for path in (data / RUNS).iterdir()]
    except OSError:
        names = []
    found = [LAST, *sorted((name for name in names if not name.startswith(".")), reverse=True)]
    return [name for name in found if name.startswith(incomplete)][:MOST_OFFERED]
