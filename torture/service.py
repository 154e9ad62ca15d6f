"""A service under load is killed at random moments and started again, over the same data.

Clients submit, cancel and look without pause. The service is killed while it starts, while it works
and while it drains; and so is the process that writes for it, while the service goes on. At the end
it is left alone until everything has ended, and then its tables are held against what clients were
told and what was executed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.http_load import Client

from budgets.servers import running_postgres, running_valkey
from executors.endpoint import free_port, running_endpoint
from headgate.app import build_store
from headgate.budgets.redis import RedisLedger
from headgate.config import Settings, load_settings
from headgate.storage.sql_store import SqlTaskStore
from service.support import ServiceProcess
from torture.service_audit import LedgerState, Remains, ledger_outside, look
from torture.service_load import Memory, TaskServer, callers, dismiss, settings
from torture.service_tasks import Execution, traced

BACKENDS = ("sqlite", "postgres", "redis")
"""Where the tasks are; with `redis` they are in SQLite, and their ledger on the server."""

KILLS_PER_ROUND = 2
LIMIT_SESSION = 5_000
LIMIT_WORKFLOW = 2_200
READY_SECONDS = 20.0
REST_SECONDS = 90.0
LEASES_SECONDS = 120.0
LOOK_SECONDS = 0.05
RESTING_LOOKS = 20
STARTING_RATIO, WRITING_RATIO, DRAINING_RATIO = 0.25, 0.25, 0.15
START_SECONDS, WORK_SECONDS, DRAIN_SECONDS = 1.0, 1.2, 0.6
KILLS_PER_LINE = 10
INTERNAL_ERROR = 500


@dataclass
class Findings:
    """What a run did to a service, and what it found."""

    kills: dict[str, int] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    remains: Remains = field(default_factory=Remains)
    executions: int = 0
    exit_code: int = 0
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def is_right(self, kills: int) -> bool:
        """Tell whether every promise was kept, and enough was done to say so."""
        is_enough = sum(self.kills.values()) >= kills and self.executions > kills
        has_faults = self.exit_code != 0 or INTERNAL_ERROR in self.memory.statuses
        return is_enough and not has_faults and self.remains.is_right()

    async def look(self, sandbox: Sandbox, task_server: TaskServer) -> None:
        """Look at what a service has left that runs no longer."""
        executions = [*task_server.executions, *sandbox.traced()]
        self.executions = len(executions)
        outside = await sandbox.ledger()
        store = sandbox.store()
        self.remains = await look(store, self.memory, executions, limit_of, outside=outside)
        self.seconds = time.monotonic() - self.started


class Sandbox:
    """The data of one service: a folder for its files, and where its tasks are kept."""

    def __init__(
        self, folder: Path, store_url: str | None = None, ledger_url: str | None = None
    ) -> None:
        self.folder = folder
        self._store_url = store_url
        self._ledger_url = ledger_url
        self._config = folder / "torture.toml"

    def write_settings(self, url: str, *, rounds: int) -> None:
        """Write what the service is started with."""
        text = settings(
            url, rounds=rounds, limit_session=LIMIT_SESSION, limit_workflow=LIMIT_WORKFLOW
        )
        self.write_text(text)

    def write_text(self, text: str) -> None:
        """Write other settings than those of the load here."""
        self._config.write_text(text)

    def service(self, port: int, name: str = "node") -> ServiceProcess:
        """Return a service over this data; it does not run yet."""
        folder = self.folder / name
        folder.mkdir()
        arguments = ["--config", str(self._config), "--data", str(self.folder / "data")]
        if self._store_url is not None:
            arguments += ["--store", self._store_url]
        if self._ledger_url is not None:
            arguments += ["--ledger", self._ledger_url]
        return ServiceProcess(folder, *arguments, port=port)

    def traced(self) -> list[Execution]:
        """Return what nodes have executed in their own processes."""
        folders = [path for path in self.folder.iterdir() if path.is_dir()]
        return [execution for folder in folders for execution in traced(folder)]

    def keep_logs(self) -> None:
        """Save what the nodes have printed from being deleted with the sandbox."""
        for path in self.folder.glob("*/service.log"):
            kept = Path(tempfile.gettempdir()) / f"{self.folder.name}-{path.parent.name}.log"
            kept.write_bytes(path.read_bytes())
            print(f"  the log of a node is in {kept}")

    def store(self) -> SqlTaskStore:
        """Return the tables without any service."""
        given = {} if self._store_url is None else {"store.url": self._store_url}
        loaded: Settings = load_settings(self._config, {}, given)
        store = build_store(loaded, data=self.folder / "data", keeps_ledger=True)
        assert isinstance(store, SqlTaskStore)
        return store

    async def ledger(self) -> LedgerState | None:
        """Return the ledger that is outside the store, as it is when every lease has ended."""
        if self._ledger_url is None:
            return None
        return await ledger_outside(RedisLedger(self._ledger_url, clock=_when_leases_have_ended))


def _when_leases_have_ended() -> float:
    return time.time() + LEASES_SECONDS


@contextmanager
def new_sandbox(backend: str) -> Iterator[Sandbox]:
    """Give an empty sandbox for a service; a server is durable, or a kill would prove nothing."""
    with tempfile.TemporaryDirectory(prefix="hg-") as name:
        if backend == "sqlite":
            yield Sandbox(Path(name))
            return
        if backend == "redis":
            with running_valkey() as valkey:
                yield Sandbox(Path(name), ledger_url=valkey.url)
            return
        with running_postgres(is_durable=True) as postgres:
            yield Sandbox(Path(name), postgres.url)


async def torture(
    sandbox: Sandbox, *, kills: int, seed: int, brings_estimates: bool = True
) -> Findings:
    """Kill a service under load, let it come to rest, and look at what it left."""
    findings, task_server = Findings(), TaskServer()
    findings.memory.brings_estimates = brings_estimates
    source = random.Random(seed)
    async with running_endpoint(task_server.answer) as endpoint:
        sandbox.write_settings(endpoint.url, rounds=kills // KILLS_PER_ROUND + 2)
        port = free_port()
        service = sandbox.service(port)
        clients = callers([port], findings.memory, seed)
        try:
            for number in range(kills):
                findings.memory.round = number // KILLS_PER_ROUND
                kind = await _run_and_kill(service, port, source)
                findings.kills[kind] = findings.kills.get(kind, 0) + 1
                _tell(number + 1, findings)
            service.spawn()
            await is_ready(port)
            await asyncio.sleep(WORK_SECONDS)
            await dismiss(clients)
            await come_to_rest([port])
            findings.exit_code = await asyncio.to_thread(service.stop)
        finally:
            await dismiss(clients)
            service.kill()
    await findings.look(sandbox, task_server)
    return findings


async def _run_and_kill(service: ServiceProcess, port: int, source: random.Random) -> str:
    """Start the service, and kill it at a random moment of a random part of its life."""
    service.spawn()
    draw = source.random()
    if draw < STARTING_RATIO:
        await asyncio.sleep(source.uniform(0.0, START_SECONDS))
        service.kill()
        return "starting"
    await is_ready(port)
    await asyncio.sleep(source.uniform(0.0, WORK_SECONDS))
    if draw < STARTING_RATIO + WRITING_RATIO:
        os.kill(service.writer_pid, signal.SIGKILL)
        await asyncio.sleep(source.uniform(0.0, WORK_SECONDS))
        service.kill()
        return "writing"
    if draw > 1 - DRAINING_RATIO:
        service.send(signal.SIGTERM)
        await asyncio.sleep(source.uniform(0.0, DRAIN_SECONDS))
        service.kill()
        return "draining"
    service.kill()
    return "working"


async def is_ready(port: int, *, role: str | None = "dispatcher") -> None:
    """Wait until a node does its work, in a role if one is named."""

    def is_so(answer: dict[str, Any]) -> bool:
        return answer.get("status") == "ready" and role in (None, answer["role"])

    await until(port, "/readyz", is_so, READY_SECONDS)


async def come_to_rest(ports: list[int]) -> None:
    """Wait until nothing has waited or run for a while: a last request may be on its way."""
    looks = 0

    def is_at_rest(stats: dict[str, Any]) -> bool:
        nonlocal looks
        queue = stats.get("queue", {"totalQueued": 1})
        looks = 0 if queue["totalQueued"] or queue["totalInflight"] else looks + 1
        return looks > RESTING_LOOKS

    for port in ports:
        await until(port, "/scheduler/stats", is_at_rest, REST_SECONDS)


async def until(
    port: int, path: str, condition: Callable[[dict[str, Any]], bool], seconds: float
) -> None:
    """Ask a node until its answer is as wanted, or the time is over; then the audit will tell."""
    client = Client("127.0.0.1", port)
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        try:
            async with asyncio.timeout(2.0):
                answer = await client.get(path)
            if isinstance(answer, dict) and condition(answer):
                return
        except (OSError, EOFError, ValueError, TimeoutError):
            pass
        await asyncio.sleep(LOOK_SECONDS)


def limit_of(scope: str) -> int | None:
    """Return the limit that a scope was given, in either unit."""
    if not scope.startswith("session:"):
        return None
    return LIMIT_WORKFLOW if "/" in scope else LIMIT_SESSION


def _tell(number: int, findings: Findings) -> None:
    if number % KILLS_PER_LINE == 0:
        memory = findings.memory
        print(f"  {number} kills, {len(memory.acknowledged):,} tasks acknowledged", flush=True)


def run(options: argparse.Namespace) -> bool:
    """Torture a service on each store, print what was found, and tell whether all is right."""
    backends = [name for name in options.backend or BACKENDS if name in BACKENDS]
    estimates = ("given", "none") if options.estimates == "both" else (options.estimates,)
    kept = [_tortured(name, options, estimates=each) for each in estimates for name in backends]
    return all(kept)


def _tortured(backend: str, options: argparse.Namespace, *, estimates: str) -> bool:
    title = f"service on {backend}, estimates {estimates}"
    print(f"\n{title}", flush=True)
    with new_sandbox(backend) as sandbox:
        found = asyncio.run(
            torture(
                sandbox,
                kills=options.kills,
                seed=options.seed,
                brings_estimates=estimates == "given",
            )
        )
        is_kept = found.is_right(options.kills)
        # Without probes nothing would be shown of them.
        is_kept &= estimates == "given" or found.remains.probes > 0
        if not is_kept:
            sandbox.keep_logs()
    report(title, found, is_kept=is_kept)
    return is_kept


def report(title: str, found: Findings, *, is_kept: bool) -> None:
    """Print what a run did and found."""
    remains, memory = found.remains, found.memory
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.kills.items()))
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(remains.states.items()))
    answers = ", ".join(
        f"{count:,} x {status}" for status, count in sorted(memory.statuses.items())
    )
    print(f"\n{title}: {'kept' if is_kept else 'BROKEN'} ({found.seconds:.0f} s)")
    print(f"  kills                       {sum(found.kills.values())} ({kinds})")
    print(f"  answers                     {answers}; {memory.unanswered:,} never came")
    print(f"  tasks acknowledged          {len(memory.acknowledged):,}")
    print(f"  tasks stored                {remains.tasks:,} ({states})")
    print(f"  executions                  {found.executions:,} of {remains.attempts:,} attempts")
    for promise, broken in remains.broken().items():
        print(f"  {promise:<27} {len(broken)}")
        for line in broken[:5]:
            print(f"    {line}")
    if remains.probes:
        print(f"  probes of an unknown price  {remains.probes:,}")
    print(f"  highest ratio of a limit    {remains.highest_ratio:.6f}")
    print(f"  exit code after the drain   {found.exit_code}")
