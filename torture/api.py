"""Thousands of requests made from `/openapi.json`, right ones and wrong ones, to a real service.

No answer may be a fault, or have a status, a media type or a shape that is not described.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from service.api_explorer import EXPLORED, MODES, Explorer
from service.support import ServiceProcess, running_service


def run(options: argparse.Namespace) -> bool:
    """Explore every route; tell whether all of them keep to their description."""
    with (
        tempfile.TemporaryDirectory(prefix="hg-") as folder,
        running_service(Path(folder)) as service,
    ):
        return _explore(service, options.examples)


def _explore(service: ServiceProcess, examples: int) -> bool:
    explorer, started, broken = Explorer(service.address), time.monotonic(), 0
    for route in EXPLORED:
        for mode in MODES:
            try:
                explorer.explore(route, mode, examples=examples)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                broken += 1
                print(f"api: {route.method} {route.path}, {mode.value}: {error}")
    explorer.close()
    statuses = ", ".join(f"{status}: {n}" for status, n in sorted(explorer.statuses.items()))
    print(
        f"api: {explorer.statuses.total()} requests to {len(EXPLORED)} routes"
        f" in {time.monotonic() - started:.0f} s ({statuses}), {broken} broken"
    )
    return not broken
