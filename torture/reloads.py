"""A service is reloaded a thousand times while clients submit: no task lost, no limit passed."""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
import time
from pathlib import Path

import structlog

from budgets.servers import running_postgres
from config.reload_load import Findings, reload_under_load

BACKENDS = ("memory", "sqlite", "postgres")


def run(options: argparse.Namespace) -> bool:
    """Reload over each backend, print what came of it, and tell whether all was kept."""
    # Two lines a task would be more than anybody reads.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    chosen = [name for name in options.backend or BACKENDS if name in BACKENDS]
    kept = [_tell(name, options.reloads) for name in chosen]
    return all(kept)


def _tell(backend: str, reloads: int) -> bool:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = _reloaded(backend, Path(folder), reloads)
    problems = found.problems()
    print(
        f"reloads/{backend}: {found.reloads} reloads, {len(found.taken)} tasks,"
        f" {time.monotonic() - started:.0f} s; {'; '.join(problems) or 'nothing broken'}"
    )
    return not problems


def _reloaded(backend: str, folder: Path, reloads: int) -> Findings:
    if backend == "postgres":
        with running_postgres() as server:
            url = server.new_database()
            return asyncio.run(reload_under_load(folder, reloads=reloads, store=url))
    store = "memory:" if backend == "memory" else f"sqlite:///{folder}/headgate.db"
    return asyncio.run(reload_under_load(folder, reloads=reloads, store=store))
