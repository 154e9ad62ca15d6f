"""A rolling restart under load, from an earlier version of this program to the present one.

Two nodes of the earlier version share a database. One after the other is drained and started again
with the present version, whose first start migrates the tables; meanwhile both versions work side
by side. Nothing may be lost, recorded twice or booked wrongly.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import time
from pathlib import Path

from executors.endpoint import running_endpoint
from service.support import ROOT
from torture.nodes import Fleet
from torture.service import Findings, Sandbox, come_to_rest, is_ready, limit_of, new_sandbox, report
from torture.service_audit import look
from torture.service_load import TaskServer, callers, dismiss

EARLIER = "06dc8f5099"
"""The last commit before the tables of running calls."""

WORK_SECONDS = 4.0
FOLDERS = (ROOT, ROOT / "tests")


def sources_of(commit: str, folder: Path) -> Path | None:
    """Write the sources of an earlier version into a folder; None where the history has none."""
    found = subprocess.run(
        ["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=False
    )
    if found.returncode:
        return None
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=found.stdout, check=True)
    return folder / "src"


async def upgrade(sandbox: Sandbox, sources: Path, *, seed: int, seconds: float) -> Findings:
    """Replace the nodes one after the other under load, and look at what is left."""
    findings, task_server = Findings(), TaskServer()
    started = time.monotonic()
    async with running_endpoint(task_server.answer) as endpoint:
        sandbox.write_settings(endpoint.url, rounds=4)
        fleet = Fleet(sandbox)
        for node in fleet.nodes:
            node.variables = {"PYTHONPATH": os.pathsep.join(map(str, (sources, *FOLDERS)))}
        try:
            await fleet.start()
            clients = callers(fleet.ports, findings.memory, seed)
            await asyncio.sleep(seconds)
            for number, (port, node) in enumerate(zip(fleet.ports, fleet.nodes, strict=True)):
                findings.memory.round = number + 1
                findings.exit_code |= await asyncio.to_thread(node.stop)
                node.variables = {}
                node.spawn()
                await is_ready(port, role=None)
                findings.kills["replaced"] = number + 1
                print(f"  node {number + 1} has the present version", flush=True)
                await asyncio.sleep(seconds)
            await dismiss(clients)
            await come_to_rest(fleet.ports)
            findings.exit_code |= await fleet.drain()
        finally:
            fleet.kill()
    executions = [*task_server.executions, *sandbox.traced()]
    findings.executions = len(executions)
    findings.remains = await look(sandbox.store(), findings.memory, executions, limit_of)
    findings.seconds = time.monotonic() - started
    return findings


def run(options: argparse.Namespace) -> bool:
    """Upgrade two nodes, and tell whether all is right."""
    if options.backend and "postgres" not in options.backend:
        return True
    title = f"a rolling restart from {EARLIER}"
    print(f"\n{title}", flush=True)
    with new_sandbox("postgres") as sandbox:
        sources = sources_of(EARLIER, sandbox.folder / "earlier")
        if sources is None:
            print("  left out: the history here does not reach back to it")
            return True
        seconds = max(WORK_SECONDS, options.seconds)
        found = asyncio.run(upgrade(sandbox, sources, seed=options.seed, seconds=seconds))
        is_kept = found.is_right(len(found.kills))
        if not is_kept:
            sandbox.keep_logs()
    report(title, found, is_kept=is_kept)
    return is_kept
