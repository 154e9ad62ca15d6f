"""The gateway under load: its books against the bill of a provider, its shares, and kills.

Calls of random shapes come from many clients over three projects: streams, clients that leave or
come back, failures, cuts, caches, answers without usage. What is booked is compared with the bill,
call by call. Then three projects saturate an upstream, and have their shares. Then the service is
killed in the middle of calls, again and again: whatever the provider has billed is booked, nothing
stays reserved, and no strict limit is passed. Last, two nodes on PostgreSQL change places: the one
that decides is killed, stopped past its lease, and drained, and the same holds.

A fourth of the kills that other checks get: each needs a start under load.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

import httpx2

from executors.endpoint import free_port
from gateway.billing_upstream import BillingUpstream
from gateway.call_load import (
    PRICES,
    PROJECTS,
    CallClient,
    books,
    compare,
    faults,
    in_parallel,
    price_of,
    project_of,
    settled,
)
from headgate.engine.escrow import HEADROOM_DRAWS
from service.support import ServiceProcess
from torture.nodes import Fleet
from torture.service import Sandbox, is_ready, new_sandbox

BACKENDS = ("sqlite", "postgres")
CLIENTS = 50
KILL_CLIENTS = 20
KILLS_PART = 4
SLICES = 2
"""How many slices a project has: in its own scope, and with the tight one."""

FAULT_RATIO = 0.1
LIMIT_USD = 500.0
TIGHT_MICRO_USD_PER_CALL = 15
"""So that the limit is reached before all calls are made."""

TIGHT = "run:tight"
WITHOUT_ESCROW = "[gateway]\nescrow = false\n"
WEIGHTS = {"one": 1, "two": 2, "three": 3}
SHARE_CLIENTS = 30
SHARE_SECONDS = 12.0
SHARE_TOLERANCE = 0.02
WORK_SECONDS = 0.8
CATCH_SECONDS, LOOK_SECONDS = 10.0, 0.005
"""A kill waits this long for a request that the provider works on."""
LEASES_SECONDS = 150.0
OVERRUN_USD = 0.1
"""What the calls that are under way at once can be above their estimates."""

NODES_CHANGE = "two nodes change places"
FALLS = ("kill", "stop", "drain")
KILLS_PER_FALL = 10

KEYS = {"TORTURE_KEY_1": "key-one", "TORTURE_KEY_2": "key-two", "TORTURE_KEY_3": "key-three"}
UPSTREAMS = """
[[slots]]
name = "one"
provider = "openai"
base_url = "{url}"
key_env = "TORTURE_KEY_1"

[[slots]]
name = "two"
provider = "openai"
base_url = "{url}"
key_env = "TORTURE_KEY_2"

[upstreams.openai]
kind = "openai"
base_url = "{url}/v1"
slots = ["one", "two"]

[upstreams.anthropic]
kind = "anthropic"
base_url = "{url}"
key_env = "TORTURE_KEY_3"
max_inflight = {inflight}
"""


@dataclass
class Findings:
    """What a run found; the lines of `broken` are promises that were not kept."""

    facts: dict[str, object] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def check(self, line: str, *, is_so: bool) -> None:
        """Note a promise that was not kept."""
        if not is_so:
            self.broken.append(line)


class Stage:
    """A service that runs, its provider, and a client."""

    def __init__(
        self, service: ServiceProcess, upstream: BillingUpstream, port: int, sandbox: Sandbox
    ) -> None:
        self.service = service
        self.upstream = upstream
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.sandbox = sandbox
        self.client = httpx2.AsyncClient(base_url=self.url, timeout=60.0)

    async def start(self) -> None:
        """Start the service, and wait until it works."""
        self.service.spawn()
        await is_ready(self.port)


@asynccontextmanager
async def stage(sandbox: Sandbox, projects: str, *, inflight: int = 50) -> AsyncIterator[Stage]:
    """Serve with a provider that bills."""
    os.environ.update(KEYS)
    async with BillingUpstream() as upstream:
        upstreams = UPSTREAMS.format(url=upstream.url, inflight=inflight)
        sandbox.write_text(projects + upstreams + PRICES)
        port = free_port()
        found = Stage(sandbox.service(port), upstream, port, sandbox)
        try:
            await found.start()
            async with found.client:
                yield found
        finally:
            await asyncio.to_thread(found.service.kill)


def tight_usd(options: argparse.Namespace) -> float:
    """Return the limit of the scopes that are used up."""
    return float(options.calls * TIGHT_MICRO_USD_PER_CALL) / 1e6


def budgets(options: argparse.Namespace) -> str:
    """Return projects with limits: one strict, one by what is expected, one without any."""
    text = '[projects.strict]\nreserve = "strict"\n[projects.expected]\n[projects.open]\n'
    for project in ("strict", "expected"):
        text += f'[budgets."project:{project}"]\nlimit_usd = "{LIMIT_USD}"\n'
        text += f'[budgets."project:{project}/{TIGHT}"]\nlimit_usd = "{tight_usd(options):.6f}"\n'
    return text


SCOPES = tuple(f"project:{one}" for one in PROJECTS)
TIGHT_SCOPES = tuple(f"project:{one}/{TIGHT}" for one in ("strict", "expected"))


async def books_against_bill(
    sandbox: Sandbox, options: argparse.Namespace, *, more: str = ""
) -> Findings:
    """Make calls of random shapes, and compare; `more` settings may be given."""
    findings = Findings()
    async with stage(sandbox, budgets(options) + more) as here:
        here.upstream.decide = faults(options.seed, FAULT_RATIO)
        here.upstream.finishes_generating = True
        seeds = range(options.seed * 1_000, options.seed * 1_000 + CLIENTS)
        clients = [CallClient(here.url, seed, tight=TIGHT) for seed in seeds]
        started = time.monotonic()
        await in_parallel(clients, -(-options.calls // CLIENTS))
        seconds = time.monotonic() - started
        statuses = await settled(here.client, SCOPES + TIGHT_SCOPES, LEASES_SECONDS)
        found = await books(here.client)
        result = compare(found, here.upstream.bill)
        answers: dict[int, int] = {}
        for one in clients:
            for status, count in one.statuses.items():
                answers[status] = answers.get(status, 0) + count
        findings.facts = {
            "calls": f"{sum(one.made for one in clients):,} in {seconds:.0f} s",
            "answers": dict(sorted(answers.items())),
            "clients left": sum(one.left for one in clients),
            "lines of the bill": len(here.upstream.bill),
            "exact to the token": f"{result.exact:,} of {result.marks:,}",
            "assumed": result.assumed,
            "billed, booked tokens": f"{result.billed_tokens:,}, {result.booked_tokens:,}",
        }
        findings.broken += [f"booked otherwise than told: {one}" for one in result.wrong[:5]]
        findings.broken += [f"booked below the bill: {one}" for one in result.below[:5]]
        findings.check("hardly anything was exact", is_so=result.exact > 0.7 * result.marks)
        _check_budgets(findings, statuses, here.upstream, tight=tight_usd(options))
        for scope in TIGHT_SCOPES:
            used = float(statuses[scope]["spentUsd"])
            findings.check(
                f"{scope} was hardly used: {used}", is_so=used > 0.3 * tight_usd(options)
            )
    return findings


def _check_budgets(
    findings: Findings, statuses: dict[str, Any], upstream: BillingUpstream, *, tight: float
) -> None:
    for scope, status in statuses.items():
        spent, overrun = float(status["spentUsd"]), float(status["overrunUsd"])
        reserved = float(status["reservedUsd"])
        findings.check(f"{scope}: ${reserved} stay reserved", is_so=reserved == 0)
        project = scope.partition("/")[0].removeprefix("project:")
        limit = tight if scope.endswith(TIGHT) else LIMIT_USD
        if project != "open":
            findings.check(f"{scope}: {status} passes the limit", is_so=spent <= limit)
        if project == "strict":
            findings.check(f"{scope}: {status} has an overrun", is_so=overrun == 0)
        elif project == "expected" and scope.endswith(TIGHT):
            is_small = spent + overrun <= limit + OVERRUN_USD
            findings.check(f"{scope}: {status} is far above", is_so=is_small)
        if scope in SCOPES:
            bill = [one for one in upstream.bill if project_of(one) == project]
            billed = sum(map(price_of, bill)) / 1e6
            findings.facts[f"billed, booked in {project}"] = (
                f"${billed:.4f}, ${spent + overrun:.4f}"
            )
            # Each call is booked in whole micro-dollars.
            is_covered = spent + overrun >= billed - len(bill) / 1e6
            findings.check(f"{scope}: billed ${billed}, and booked {status}", is_so=is_covered)


async def shares(sandbox: Sandbox, options: argparse.Namespace, *, more: str = "") -> Findings:
    """Have three projects saturate an upstream, and look at the tokens that each got."""
    findings = Findings()
    text = "".join(
        f"[projects.{name}]\ncredit_weight = {weight}\n" for name, weight in WEIGHTS.items()
    )
    async with stage(sandbox, text + more, inflight=4) as here:
        source = random.Random(options.seed)
        ends_at = time.monotonic() + SHARE_SECONDS

        async def client(project: str) -> None:
            async with httpx2.AsyncClient(base_url=here.url, timeout=60.0) as session:
                while time.monotonic() < ends_at:
                    prompt = f"[[words {source.randrange(5, 60)}]] [[delay 0.01]]"
                    body = {"model": "claude-sonnet-5", "max_tokens": 100}
                    turns = [{"role": "user", "content": prompt}]
                    path = f"/p/{project}/v1/messages"
                    await session.post(path, json={**body, "messages": turns})

        began = time.time() + 1.0
        async with asyncio.TaskGroup() as group:
            for project in WEIGHTS:
                for _ in range(SHARE_CLIENTS):
                    group.create_task(client(project))
        ended = began - 1.0 + SHARE_SECONDS - 1.0
        tokens = await _tokens_between(here.client, began, ended)
        total = sum(tokens.values())
        got = {name: tokens[name] / total for name in WEIGHTS}
        findings.facts = {"tokens": tokens, "shares": {n: f"{v:.4f}" for n, v in got.items()}}
        for name, weight in WEIGHTS.items():
            wanted = weight / sum(WEIGHTS.values())
            is_fair = abs(got[name] - wanted) <= SHARE_TOLERANCE
            findings.check(f"{name} got {got[name]:.4f} instead of {wanted:.4f}", is_so=is_fair)
    return findings


async def _tokens_between(client: httpx2.AsyncClient, began: float, ended: float) -> dict[str, int]:
    tokens = dict.fromkeys(WEIGHTS, 0)
    async for one in _calls(client):
        at = _seconds(one.get("startedAt"))
        if began <= at <= ended and one.get("usage"):
            tokens[one["projectId"]] += one["usage"]["tokens"]
    return tokens


async def _calls(client: httpx2.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    """Yield every call that the service knows, newest first."""
    cursor: dict[str, str] = {}
    while True:
        page = (await client.get("/calls", params={"limit": "1000", **cursor})).json()
        for one in page["calls"]:
            yield one
        if not page.get("nextCursor"):
            return
        cursor = {"cursor": page["nextCursor"]}


async def _check_overbooked(
    findings: Findings,
    client: httpx2.AsyncClient,
    upstream: BillingUpstream,
    statuses: Any,  # noqa: ANN401
    kills: int,
) -> None:
    """Hold what was booked beyond the bill against what kills may book at most.

    Each client has one call in flight. A slice has a headroom of a few draws like its largest, or
    twice what was drawn since its last turn, and no client draws twice in that time.
    """
    largest = dict.fromkeys(PROJECTS, 0.0)
    async for one in _calls(client):
        held = float((one.get("reserved") or {}).get("usd", 0))
        largest[one["projectId"]] = max(largest[one["projectId"]], held)
    draws = KILL_CLIENTS + max(SLICES * HEADROOM_DRAWS, 2 * KILL_CLIENTS)
    for project in PROJECTS:
        status = statuses[f"project:{project}"]
        booked = float(status["spentUsd"]) + float(status["overrunUsd"])
        bill = [one for one in upstream.bill if project_of(one) == project]
        beyond = booked - sum(map(price_of, bill)) / 1e6
        most = kills * draws * largest[project]
        findings.facts[f"beyond the bill in {project}"] = (
            f"${beyond:.4f}, ${beyond / kills:.4f} a kill; a call held ${largest[project]:.4f}"
        )
        line = f"{project}: ${beyond} were booked beyond the bill, and may be ${most}"
        findings.check(line, is_so=beyond <= most)


def _seconds(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0


async def kills(sandbox: Sandbox, options: argparse.Namespace, *, more: str = "") -> Findings:
    """Kill the service in the middle of calls, and compare its budgets with the bill."""
    findings = Findings()
    count = max(1, options.kills // KILLS_PART)
    source = random.Random(options.seed)
    async with stage(sandbox, budgets(options) + more) as here:
        here.upstream.decide = faults(options.seed, FAULT_RATIO)
        here.upstream.finishes_generating = True
        seeds = range(options.seed * 2_000, options.seed * 2_000 + KILL_CLIENTS)
        clients = [CallClient(here.url, one, tight=TIGHT, pause_seconds=0.1) for one in seeds]
        running = [asyncio.create_task(one.run(1_000_000)) for one in clients]
        caught = 0
        for number in range(count):
            await asyncio.sleep(source.uniform(0.2, WORK_SECONDS))
            caught += await _running_at(here.upstream)
            await asyncio.to_thread(here.service.kill)
            await here.start()
            if (number + 1) % 10 == 0:
                print(f"  {number + 1} kills, {len(here.upstream.bill):,} lines", flush=True)
        await asyncio.sleep(WORK_SECONDS)
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        statuses = await settled(here.client, SCOPES + TIGHT_SCOPES, LEASES_SECONDS)
        _check_budgets(findings, statuses, here.upstream, tight=tight_usd(options))
        await _check_overbooked(findings, here.client, here.upstream, statuses, count)
        facts = {
            "kills": count,
            "requests at the provider then": caught,
            "calls": f"{sum(one.made for one in clients):,}",
            "lines of the bill": len(here.upstream.bill),
        }
        findings.facts = facts | findings.facts
        findings.check("no kill caught a call", is_so=caught > 0)
        code = await asyncio.to_thread(here.service.stop)
        findings.check(f"exit code {code} after the drain", is_so=code == 0)
    return findings


async def changes(sandbox: Sandbox, options: argparse.Namespace, *, more: str = "") -> Findings:
    """Have two nodes change places in the middle of calls, and compare budgets with the bill."""
    findings = Findings()
    os.environ.update(KEYS)
    count = max(len(FALLS), options.kills // KILLS_PER_FALL)
    async with BillingUpstream() as upstream:
        upstream.decide = faults(options.seed, FAULT_RATIO)
        upstream.finishes_generating = True
        upstreams = UPSTREAMS.format(url=upstream.url, inflight=50)
        sandbox.write_text(budgets(options) + more + upstreams + PRICES)
        fleet = Fleet(sandbox)
        try:
            await fleet.start()
            seeds = range(options.seed * 3_000, options.seed * 3_000 + KILL_CLIENTS)
            urls = [f"http://127.0.0.1:{port}" for port in fleet.ports]
            clients = [
                CallClient(urls[seed % len(urls)], seed, tight=TIGHT, pause_seconds=0.1)
                for seed in seeds
            ]
            running = [asyncio.create_task(one.run(1_000_000)) for one in clients]
            slowest = dict.fromkeys(FALLS, 0.0)
            for number in range(count):
                kind = FALLS[number % len(FALLS)]
                await asyncio.sleep(WORK_SECONDS)
                seconds = await getattr(fleet, f"{kind}_dispatcher")()
                slowest[kind] = max(slowest[kind], seconds)
            await asyncio.sleep(WORK_SECONDS)
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            async with httpx2.AsyncClient(base_url=urls[0], timeout=60.0) as client:
                statuses = await settled(client, SCOPES + TIGHT_SCOPES, LEASES_SECONDS)
                _check_budgets(findings, statuses, upstream, tight=tight_usd(options))
                await _check_overbooked(findings, client, upstream, statuses, count)
            code = await fleet.drain()
            findings.check(f"exit code {code} after the drain", is_so=code == 0)
        finally:
            fleet.kill()
        answers: Counter[int] = sum((one.statuses for one in clients), Counter())
        findings.facts = {
            "changes": count,
            "slowest": {kind: f"{seconds:.1f} s" for kind, seconds in slowest.items()},
            "calls": f"{sum(one.made for one in clients):,}",
            "answers": dict(sorted(answers.items())),
            "lines of the bill": len(upstream.bill),
        } | findings.facts
    return findings


async def _running_at(upstream: BillingUpstream) -> int:
    """Return how many requests the provider works on, as soon as there is one."""
    for _ in range(int(CATCH_SECONDS / LOOK_SECONDS)):
        if running := sum(account.running for account in upstream.accounts.values()):
            return running
        await asyncio.sleep(LOOK_SECONDS)
    return 0


Check = Callable[[Sandbox, argparse.Namespace], Awaitable[Findings]]
CHECKS: dict[str, Check] = {
    "books against the bill": books_against_bill,
    "shares of a saturated upstream": shares,
    "kills": kills,
    NODES_CHANGE: changes,
}
WITHOUT: dict[str, Check] = {
    "books against the bill, without escrow": partial(books_against_bill, more=WITHOUT_ESCROW),
    "shares of a saturated upstream, without escrow": partial(shares, more=WITHOUT_ESCROW),
    "kills, without escrow": partial(kills, more=WITHOUT_ESCROW),
    f"{NODES_CHANGE}, without escrow": partial(changes, more=WITHOUT_ESCROW),
}


def run(options: argparse.Namespace) -> bool:
    """Torture the gateway on each store, print what was found, and tell whether all is right."""
    backends = [name for name in options.backend or BACKENDS if name in BACKENDS]
    checks = {**(CHECKS if options.escrow != "off" else {})}
    checks |= WITHOUT if options.escrow != "on" else {}
    kept = [
        _tortured(name, title, check, options)
        for name in backends
        for title, check in checks.items()
        if name == "postgres" or not title.startswith(NODES_CHANGE)
    ]
    return all(kept)


def _tortured(backend: str, title: str, check: Check, options: argparse.Namespace) -> bool:
    print(f"\ngateway on {backend}: {title}", flush=True)
    started = time.monotonic()
    with new_sandbox(backend) as sandbox:
        found = asyncio.run(_run(check, sandbox, options))
        if found.broken:
            sandbox.keep_logs()
    is_kept = not found.broken
    seconds = time.monotonic() - started
    print(f"\n{backend}, {title}: {'kept' if is_kept else 'BROKEN'} ({seconds:.0f} s)")
    for name, value in found.facts.items():
        print(f"  {name:<30} {value}")
    for line in found.broken:
        print(f"  broken: {line}")
    return is_kept


async def _run(check: Check, sandbox: Sandbox, options: argparse.Namespace) -> Findings:
    return await check(sandbox, options)
