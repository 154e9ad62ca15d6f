"""Two nodes on a primary with a synchronous standby, which takes over again and again under load.

Every other time the primary is killed outright. The times between it is only cut off: it comes back
and takes changes, while the other one does so too, until somebody ends it. Nothing that clients
were told may be lost, nothing is recorded twice, and no book may differ from its journal.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from budgets.servers import PostgresPair, running_pair
from torture.nodes import Fleet, torture_fleet
from torture.service import Findings, Sandbox, is_ready, report

SPLIT_SECONDS = 1.0
MOST_SECONDS = 30.0
"""How long nothing may be dispatched: to copy the database, and to notice what has changed."""


@dataclass
class FailoverFindings(Findings):
    """What was found, and after how long work went on."""

    outages: dict[str, list[float]] = field(default_factory=dict)

    def is_right(self, kills: int) -> bool:
        """Tell whether every promise was kept, in time, and enough was done to say so."""
        is_in_time = all(max(each) <= MOST_SECONDS for each in self.outages.values())
        return super().is_right(kills) and is_in_time


async def torture(
    sandbox: Sandbox, pair: PostgresPair, *, failovers: int, seed: int
) -> FailoverFindings:
    """Let the servers change places under load, and look at what is left."""
    findings = FailoverFindings()

    async def fail_over(fleet: Fleet, is_odd: bool) -> None:  # noqa: FBT001
        await _fail_over(fleet, pair, findings, "cut off" if is_odd else "killed")

    await torture_fleet(sandbox, findings, fail_over, rounds=failovers, seed=seed)
    return findings


async def _fail_over(
    fleet: Fleet, pair: PostgresPair, findings: FailoverFindings, kind: str
) -> None:
    began = time.monotonic()
    if kind == "killed":
        await asyncio.to_thread(pair.fail_over)
    else:
        await asyncio.to_thread(pair.split)
        await asyncio.sleep(SPLIT_SECONDS)
    await asyncio.to_thread(pair.rejoin)
    for port in fleet.ports:
        await is_ready(port, role=None)
    seconds = time.monotonic() - began
    findings.outages.setdefault(kind, []).append(seconds)
    findings.kills[kind] = findings.kills.get(kind, 0) + 1
    count = sum(findings.kills.values())
    tasks = len(findings.memory.acknowledged)
    print(f"  {count}: the primary was {kind}; {seconds:.1f} s, {tasks:,} tasks taken", flush=True)


def run(options: argparse.Namespace) -> bool:
    """Torture two nodes on a pair of servers, and tell whether all is right."""
    if options.backend and "postgres" not in options.backend:
        return True
    title = "two nodes on a primary and its standby"
    print(f"\n{title}", flush=True)
    with TemporaryDirectory(prefix="hg-") as folder, running_pair() as pair:
        sandbox = Sandbox(Path(folder), pair.url)
        found = asyncio.run(torture(sandbox, pair, failovers=options.failovers, seed=options.seed))
        is_kept = found.is_right(options.failovers)
        if not is_kept:
            sandbox.keep_logs()
    report(title, found, is_kept=is_kept)
    for kind, times in found.outages.items():
        print(f"  work went on after, {kind:<8} {min(times):.1f} to {max(times):.1f} s")
    return is_kept
