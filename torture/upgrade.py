"""A rolling restart under load, from earlier versions of this program to the present one.

Two nodes of an earlier version share a database. One after the other is drained and started again
with the present version, whose first start migrates the tables; meanwhile both versions work side
by side. Nothing may be lost, recorded twice or booked wrongly. Where the earlier version has the
gateway, clients call through both nodes, and the books are held against the bill of the provider.

Rule: an earlier version is found by what changed after it, as the name of a commit may change.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx2

from executors.endpoint import running_endpoint
from gateway.billing_upstream import BillingUpstream
from gateway.call_load import PRICES, CallClient, Comparison, books, compare, settled
from service.support import ROOT
from torture.gateway import KEYS, SCOPES, UPSTREAMS
from torture.nodes import Fleet
from torture.service import (
    LIMIT_SESSION,
    LIMIT_WORKFLOW,
    Findings,
    Sandbox,
    come_to_rest,
    is_ready,
    new_sandbox,
    report,
)
from torture.service_load import TaskServer, callers, dismiss, settings

WORK_SECONDS = 4.0
ROUNDS = 4
FOLDERS = (ROOT, ROOT / "tests")

CALL_CLIENTS = 6
CALL_PAUSE_SECONDS = 0.1
UPSTREAM_INFLIGHT = 50
LEASES_SECONDS = 150.0
REFUSED_CLEARLY = (429, 502, 503, 504, 529)
FEWEST_SERVED_RATIO = 0.9
CALL_SETTINGS = """
[projects.strict]
reserve = "strict"

[projects.expected]

[projects.open]

[budgets."project:strict"]
limit_usd = "500"

[budgets."project:expected"]
limit_usd = "500"
"""


class Change(NamedTuple):
    """What came with a version; the earlier version is the parent of the commit with it.

    `search` is the option of `git log` for the commits whose difference has it. The latest of them
    counts, unless the change `is_first`.
    """

    title: str
    search: str
    folder: str
    is_first: bool = False


CHANGES = (
    Change("the tables of calls", "-SCREATE TABLE running_calls", "src/headgate", is_first=True),
    Change("nodes signed calls", "-Sdef forwarded_mark", "src/headgate/gateway", is_first=True),
    Change("the latest change of tables", "-G(CREATE|ALTER) TABLE", "src/headgate"),
)


class NoHistoryError(Exception):
    """This is no checkout, or one whose history is cut off: no fault of the program."""


def earlier_commit(change: Change, root: Path = ROOT) -> str | None:
    """Return the commit before a change, or None if the whole history has none.

    Raises:
        NoHistoryError: There is no git, no checkout, or only the end of its history.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != root.resolve():
        raise NoHistoryError("this is no git checkout")
    commits = _git(root, "log", "--format=%H", change.search, "--", change.folder).split()
    if commits:
        commit = commits[-1 if change.is_first else 0]
        earlier = _git(root, "rev-parse", "--verify", "--quiet", f"{commit}^")
        if earlier:
            return earlier
    if _git(root, "rev-parse", "--is-shallow-repository") == "true":
        raise NoHistoryError("the history of this clone is cut off before it")
    return None


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints; nothing if it refuses."""
    try:
        found = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, check=False, text=True
        )
    except FileNotFoundError:
        raise NoHistoryError("git is not installed") from None
    return "" if found.returncode else found.stdout.strip()


def sources_of(commit: str, folder: Path) -> Path:
    """Write the sources of an earlier version into a folder."""
    found = subprocess.run(
        ["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=True
    )
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=found.stdout, check=True)
    return folder / "src"


@dataclass
class UpgradeFindings(Findings):
    """What was found of tasks, and of calls where the earlier version serves them."""

    answers: Counter[int] = field(default_factory=Counter)
    books: Comparison | None = None
    held: list[str] = field(default_factory=list)

    def is_right(self, kills: int) -> bool:
        """Tell whether every promise was kept, to tasks and to calls."""
        return super().is_right(kills) and (self.books is None or self._are_calls_right(self.books))

    def _are_calls_right(self, found: Comparison) -> bool:
        # Status 0 is a connection that nobody took: its node is being replaced.
        answered = self.answers.total() - self.answers[0]
        is_clear = self.answers.keys() <= {0, 200, *REFUSED_CLEARLY}
        is_served = self.answers[200] >= FEWEST_SERVED_RATIO * answered > 0
        return is_clear and is_served and not (found.wrong or found.below or self.held)


async def upgrade(sandbox: Sandbox, sources: Path, *, seed: int, seconds: float) -> UpgradeFindings:
    """Replace the nodes one after the other under load, and look at what is left."""
    findings, task_server = UpgradeFindings(), TaskServer()
    async with AsyncExitStack() as servers:
        endpoint = await servers.enter_async_context(running_endpoint(task_server.answer))
        text = settings(
            endpoint.url, rounds=ROUNDS, limit_session=LIMIT_SESSION, limit_workflow=LIMIT_WORKFLOW
        )
        upstream = None
        if (sources / "headgate" / "gateway").is_dir():
            upstream = await servers.enter_async_context(BillingUpstream())
            upstream.finishes_generating = True
            upstreams = UPSTREAMS.format(url=upstream.url, inflight=UPSTREAM_INFLIGHT)
            text += CALL_SETTINGS + upstreams + PRICES
            os.environ.update(KEYS)
        sandbox.write_text(text)
        fleet = Fleet(sandbox)
        for node in fleet.nodes:
            node.variables = {"PYTHONPATH": os.pathsep.join(map(str, (sources, *FOLDERS)))}
        try:
            await fleet.start()
            clients = callers(fleet.ports, findings.memory, seed)
            call_clients = [] if upstream is None else _call_clients(fleet.ports, seed)
            calling = [asyncio.create_task(one.run(1_000_000)) for one in call_clients]
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
            await dismiss(calling)
            await dismiss(clients)
            await come_to_rest(fleet.ports)
            findings.answers = sum((one.statuses for one in call_clients), Counter())
            if upstream is not None:
                await _look_at_calls(findings, fleet.ports[0], upstream)
            findings.exit_code |= await fleet.drain()
        finally:
            fleet.kill()
    await findings.look(sandbox, task_server)
    return findings


def _call_clients(ports: Sequence[int], seed: int) -> list[CallClient]:
    """Return clients of which each calls one node."""
    return [
        CallClient(
            f"http://127.0.0.1:{ports[number % len(ports)]}",
            seed * 1_000 + number,
            pause_seconds=CALL_PAUSE_SECONDS,
        )
        for number in range(CALL_CLIENTS)
    ]


async def _look_at_calls(findings: UpgradeFindings, port: int, upstream: BillingUpstream) -> None:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        statuses = await settled(client, SCOPES, LEASES_SECONDS)
        findings.held = [name for name, one in statuses.items() if float(one["reservedUsd"])]
        findings.books = compare(await books(client), upstream.bill)


def run(options: argparse.Namespace) -> bool:
    """Upgrade two nodes from each earlier version asked for, and tell whether all is right."""
    if options.backend and "postgres" not in options.backend:
        return True
    seen: set[str] = set()
    kept = [_upgraded(change, options, seen) for change in CHANGES[-options.versions :]]
    return all(kept)


def _upgraded(change: Change, options: argparse.Namespace, seen: set[str]) -> bool:
    title = f"a rolling restart from before {change.title}"
    print(f"\n{title}", flush=True)
    try:
        commit = earlier_commit(change)
    except NoHistoryError as error:
        print(f"  left out: {error}")
        return True
    if commit is None:
        print(f"  BROKEN: the history has no {change.search} in {change.folder}")
        return False
    if commit in seen:
        print("  the same version as above")
        return True
    seen.add(commit)
    with new_sandbox("postgres") as sandbox:
        sources = sources_of(commit, sandbox.folder / "earlier")
        seconds = max(WORK_SECONDS, options.seconds)
        found = asyncio.run(upgrade(sandbox, sources, seed=options.seed, seconds=seconds))
        is_kept = found.is_right(len(found.kills))
        if not is_kept:
            sandbox.keep_logs()
    report(f"{title} ({commit[:10]})", found, is_kept=is_kept)
    if found.books is not None:
        _report_calls(found, found.books)
    return is_kept


def _report_calls(found: UpgradeFindings, result: Comparison) -> None:
    answers = ", ".join(
        f"{count:,} x {status or 'not connected'}"
        for status, count in sorted(found.answers.items())
    )
    exact = f"{result.exact:,} of {result.marks:,} calls exact"
    print(f"  calls answered              {answers}")
    print(
        f"  billed, booked tokens       {result.billed_tokens:,}, {result.booked_tokens:,}; {exact}"
    )
    for line in (*result.wrong[:5], *result.below[:5], *found.held):
        print(f"    {line}")
