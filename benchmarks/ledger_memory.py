"""The memory of Redis after a million lifecycles, beside that after the first hundred thousand."""

from __future__ import annotations

import asyncio
import time

from benchmarks.ledger import lifecycles
from benchmarks.options import Options
from benchmarks.report import Row, table
from budgets.servers import ValkeyServer, running_valkey
from headgate.budgets.connect import connect_budget

FIRST = 100_000
ALL = 1_000_000
CALLERS = 256
MOST_RATIO = 2.0
# Snapshots instead of the append-only file: a million lifecycles need no copy on disk here.
SETTINGS = ("--appendonly", "no", "--save", "86400", "1000000000")


async def fill(server: ValkeyServer) -> list[tuple[int, int]]:
    """Return the bytes that the server uses after each hundred thousand lifecycles."""
    used: list[tuple[int, int]] = []
    async with connect_budget(server.url) as tracker:
        for done in range(FIRST, ALL + FIRST, FIRST):
            await lifecycles(tracker, FIRST, CALLERS)
            with server.client() as client:
                used.append((done, client.info("memory")["used_memory"]))
    return used


def run(_options: Options) -> bool:
    started = time.monotonic()
    with running_valkey(*SETTINGS) as server:
        used = asyncio.run(fill(server))
    rows: list[Row] = [
        (f"{done:,}", f"{size / 1e6:.1f}", f"{size / used[0][1]:.2f}") for done, size in used
    ]
    table("ledger_memory: memory of Redis", ("lifecycles", "MB", "ratio to first"), rows)
    ratio = max(size for _, size in used) / used[0][1]
    seconds = time.monotonic() - started
    print(f"target: at most {MOST_RATIO:.0f} times the first; {ratio:.2f} in {seconds:.0f} s")
    return ratio <= MOST_RATIO
