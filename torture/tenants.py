"""A hostile tenant does all that it may, at full speed, while honest ones work beside it.

The honest project `steady` always has work waiting, and so has the hostile one: each must get its
share of the fleet. The honest project `light` submits now and then, and how long its tasks wait for
their start is held against the same without an attack, when civil tenants keep the fleet as busy.
Tasks take 50 to 150 ms, drawn at random. If all took the same time, the sixteen permits would come
free together, and a start would wait for that moment: the quiet p99 was 28 to 92 ms that way, on
the same code.

At the end the books of both are held against what the endpoint has executed: every task that was
acknowledged is done, in its first attempt, and booked to the token.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import random
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.http_load import Client, Connection

from executors.endpoint import Seen, free_port, reply, reply_json, running_endpoint
from headgate.executors.http import ATTEMPT, TASK_ID
from service.support import ROOT, ServiceProcess, environment, family
from torture.service import Sandbox, is_ready, new_sandbox
from torture.tenant_attacks import Orders, Report

BACKENDS = ("sqlite", "postgres")
NODES = {"sqlite": 1, "postgres": 2}
ATTACK_SECONDS = 600.0
QUIET_SECONDS = 60.0
WARM_SECONDS = 5.0
INFLIGHT = 16
TASK_SECONDS = 0.1
TOKENS = 100
BACKLOG = 60
SUBMITTERS = 8
LIGHT_PER_SECOND = 4.0
REST_SECONDS = 120.0
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 20.0
RETRY_SECONDS = 0.1

LEAST_SHARE = 0.5 * 0.95
MOST_SLOWER = 3.0
MOST_MIB = 600
SECRET = "ostrich"
HOSTILE_USD = 1_000
PRICE_USD = TOKENS / 1_000_000

SETTINGS = """
[auth]
required = true

[scheduler]
max_inflight = {inflight}
max_per_agent_inflight = {inflight}
worker_count = {inflight}

[targets.work]
kind = "http"
url = "{url}/work"
default = true

[targets.bomb]
kind = "http"
url = "{url}/bomb"

[prices."torture-*"]
input = 1.0
output = 1.0

[projects.steady]
[projects.light]
[projects.hostile]
[projects.greedy]
[projects.civil]
[projects.calm]

[budgets.root]
limit_usd = "1000000"

[budgets."project:steady"]
limit_usd = "10000"

[budgets."project:hostile"]
limit_usd = "{hostile_usd}"

[budgets."project:greedy"]
limit_usd = "{hostile_usd}"
"""


@dataclass
class Found:
    """What a run did, and what the honest tenants felt."""

    quiet: list[float] = field(default_factory=list)
    attacked: list[float] = field(default_factory=list)
    executed: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    acknowledged: int = 0
    refused: int = 0
    most_mib: float = 0.0
    exit_code: int = 0

    @property
    def share(self) -> float:
        """The part of the fleet that the steady project had, of what it and the hostile one had."""
        own, other = self.executed.get("steady", 0), self.executed.get("hostile", 0)
        return own / max(own + other, 1)

    @property
    def slower(self) -> float:
        """How many times the quiet p99 of a start the attacked one is."""
        return p99(self.attacked) / max(p99(self.quiet), 1e-9)

    def problems(self) -> list[str]:
        """Say which promises were broken."""
        limits = {
            f"share {self.share:.3f} is under {LEAST_SHARE:.3f}": self.share < LEAST_SHARE,
            f"starts are {self.slower:.2f} times as slow": self.slower > MOST_SLOWER,
            f"{self.most_mib:.0f} MiB of memory": self.most_mib > MOST_MIB,
            f"exit code {self.exit_code}": self.exit_code != 0,
        }
        is_broken = [line for line, is_true in limits.items() if is_true]
        return [*is_broken, *self.broken, *self.report.breaches]


class Endpoint:
    """Executes the tasks of all tenants, and remembers when each began."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.started: dict[str, float] = {}
        self.executions: dict[str, list[str]] = {}
        self._bomb = gzip.compress(gzip.compress(bytes(32 << 20)))

    async def answer(self, request: Seen, writer: asyncio.StreamWriter) -> None:
        """Work for a while, and answer; a bomb is for who asks for one."""
        if request.path.startswith("/bomb"):
            twice = {"Content_Encoding": "gzip, gzip", "Content_Type": "application/json"}
            writer.write(reply(200, self._bomb, **twice))
        else:
            project = str(request.json.get("project", "hostile"))
            task_id = request.headers[TASK_ID]
            self.started.setdefault(task_id, time.monotonic())
            self.executions.setdefault(project, []).append(f"{task_id} {request.headers[ATTEMPT]}")
            await asyncio.sleep(TASK_SECONDS * self._random.uniform(0.5, 1.5))
            usage = {"prompt_tokens": TOKENS, "completion_tokens": 0}
            writer.write(reply_json({"model": "torture-1", "usage": usage}))
        with suppress(ConnectionError):
            await writer.drain()

    def count(self) -> dict[str, int]:
        """Return how much of each project was executed so far."""
        return {project: len(each) for project, each in self.executions.items()}


class Honest:
    """An honest tenant, who tries again where it is told to."""

    def __init__(self, ports: Sequence[int], token: str, project: str, endpoint: Endpoint) -> None:
        self.project = project
        self.sent_at: dict[str, float] = {}
        self.refused = 0
        self._clients = [Client("127.0.0.1", port) for port in ports]
        self._ports, self._token = ports, token
        self._headers = {"Authorization": f"Bearer {token}"}
        self._endpoint = endpoint
        self._connections: dict[int, Connection] = {}
        self._turn = 0
        self._submitting = 0

    async def keep_busy(self) -> None:
        """Always have work waiting, over some connections."""
        async with asyncio.TaskGroup() as group:
            for _ in range(SUBMITTERS):
                group.create_task(self.submit_for())

    async def submit_for(self) -> None:
        """Submit whenever less waits than should, on a connection of its own."""
        other = Honest(self._ports, self._token, self.project, self._endpoint)
        other.sent_at = self.sent_at
        try:
            while True:
                done = len(self._endpoint.executions.get(self.project, ()))
                if len(self.sent_at) + self._submitting - done < BACKLOG:
                    self._submitting += 1
                    try:
                        await other.submit()
                    finally:
                        self._submitting -= 1
                else:
                    await asyncio.sleep(0.01)
        finally:
            self.refused += other.refused
            other.hang_up()

    async def come_by(self, source: random.Random) -> None:
        """Submit a task now and then."""
        while True:
            await asyncio.sleep(source.expovariate(LIGHT_PER_SECOND))
            await self.submit()

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Send a request, to one node after the other."""
        content = b"" if body is None else msgspec.json.encode(body)
        self._turn = (self._turn + 1) % len(self._clients)
        client = self._clients[self._turn]
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                connection = self._connections.get(self._turn)
                if connection is None:
                    connection = self._connections[self._turn] = await client.connect()
                head = client.head(method, path, len(content), self._headers)
                status, answer = await connection.request(head, content)
        except (OSError, EOFError, TimeoutError):
            self.hang_up(self._turn)
            raise
        return status, msgspec.json.decode(answer)

    def hang_up(self, turn: int | None = None) -> None:
        """Close a connection, or all."""
        for each in list(self._connections) if turn is None else [turn]:
            connection = self._connections.pop(each, None)
            if connection is not None:
                connection.close()

    async def submit(self) -> None:
        """Submit a task until it is taken; its time runs from the first try."""
        sent_at = time.monotonic()
        task = {
            "action": "work",
            "agentId": f"{self.project}-{SECRET}",
            "params": {"project": self.project, SECRET: SECRET},
        }
        while True:
            try:
                status, answer = await self.ask("POST", "/tasks", task)
            except (OSError, EOFError, TimeoutError):
                # Whether it was taken is not known, so it is not one of ours.
                self.refused += 1
                return
            if status == 202:
                self.sent_at[answer["taskId"]] = sent_at
                return
            self.refused += 1
            await asyncio.sleep(RETRY_SECONDS)


class Watch:
    """Looks at the memory of the nodes while they work."""

    def __init__(self, nodes: Sequence[ServiceProcess]) -> None:
        self._nodes = nodes
        self.most_mib = 0.0

    async def run(self) -> None:
        """Look again and again."""
        while True:
            for node in self._nodes:
                with suppress(OSError):
                    used = sum(pss_kib(pid) for pid in family(node.pid)) / 1024
                    self.most_mib = max(self.most_mib, used)
            await asyncio.sleep(LOOK_SECONDS)


async def torture(sandbox: Sandbox, *, nodes: int, seconds: float, seed: int) -> Found:
    """Run the quiet phase and the attack on one system, and look at what is left."""
    found, endpoint = Found(), Endpoint(seed)
    async with running_endpoint(endpoint.answer) as server:
        sandbox.write_text(
            SETTINGS.format(url=server.url, inflight=INFLIGHT, hostile_usd=HOSTILE_USD)
        )
        ports = [free_port() for _ in range(nodes)]
        services = [sandbox.service(port, f"node-{port}") for port in ports]
        try:
            for service, port in zip(services, ports, strict=True):
                service.spawn()
                await is_ready(port, role=None)
            operator = Honest(ports, token_in(sandbox.folder), "operator", endpoint)
            steady, light, civil, calm = [
                Honest(ports, await _token(operator, projectId=name), name, endpoint)
                for name in ("steady", "light", "civil", "calm")
            ]
            watch = Watch(services)
            busy = [
                asyncio.create_task(each)
                for each in (watch.run(), light.come_by(random.Random(seed)))
            ]
            # Two others keep the fleet busy meanwhile: who has worked before is owed less later.
            quiet = [asyncio.create_task(each.keep_busy()) for each in (civil, calm)]
            print(f"  {min(QUIET_SECONDS, seconds):.0f} s without an attack", flush=True)
            found.quiet = await _starts(light, endpoint, min(QUIET_SECONDS, seconds))
            await _ended(quiet)
            await _until(partial(_has_caught_up, endpoint.executions["calm"], calm.sent_at))
            print(
                f"  {seconds:.0f} s of attack, p99 before {p99(found.quiet) * 1e3:.1f} ms",
                flush=True,
            )
            orders = Orders(
                ports=ports,
                project_token=await _token(operator, projectId="hostile"),
                greedy_token=await _token(operator, projectId="greedy"),
                agent_token=await _token(operator, agentId="mallory"),
                agent_id="mallory",
                own_project="hostile",
                greedy_project="greedy",
                their_tasks=list(calm.sent_at)[:3],
                secret=SECRET,
                seed=seed,
            )
            async with HostileTenant(orders, found):
                busy.append(asyncio.create_task(steady.keep_busy()))
                await asyncio.sleep(WARM_SECONDS)
                before = endpoint.count()
                found.attacked = await _starts(light, endpoint, seconds)
                found.executed = {
                    name: count - before.get(name, 0) for name, count in endpoint.count().items()
                }
            await _ended(busy)
            await _audit(found, operator, (steady, light), endpoint)
            found.most_mib = watch.most_mib
            found.refused = steady.refused + light.refused
            codes = [await asyncio.to_thread(service.stop) for service in services]
            found.exit_code = max(codes)
            for tenant in (operator, steady, light, civil, calm):
                tenant.hang_up()
        finally:
            for service in services:
                service.kill()
    return found


async def _starts(light: Honest, endpoint: Endpoint, seconds: float) -> list[float]:
    """Return how long the tasks of the light tenant waited that it submitted in this time."""
    await asyncio.sleep(WARM_SECONDS)
    known = set(light.sent_at)
    await asyncio.sleep(seconds)
    wanted = {task_id: at for task_id, at in light.sent_at.items() if task_id not in known}
    await _until(lambda: wanted.keys() <= endpoint.started.keys())
    return [endpoint.started.get(task_id, time.monotonic()) - at for task_id, at in wanted.items()]


async def _audit(
    found: Found, operator: Honest, tenants: Sequence[Honest], endpoint: Endpoint
) -> None:
    """Hold what honest tenants were told against what was executed and booked."""
    # It was idle all the time, and such connections are closed.
    operator.hang_up()
    for tenant in tenants:
        executions = endpoint.executions[tenant.project]
        await _until(partial(_has_caught_up, executions, tenant.sent_at))
        await asyncio.sleep(10 * TASK_SECONDS)
        found.acknowledged += len(tenant.sent_at)
        executed = [line.split()[0] for line in executions]
        lost = set(tenant.sent_at) - set(executed)
        found.broken += [f"acknowledged and not executed: {task_id}" for task_id in sorted(lost)]
        found.broken += [f"attempted again: {line}" for line in executions if line[-2:] != " 1"]
        if len(executed) != len(set(executed)):
            found.broken.append(f"{len(executed) - len(set(executed))} tasks executed twice")
        for task_id in tenant.sent_at:
            status, task = await operator.ask("GET", f"/tasks/{task_id}")
            if status != 200 or task["state"] != "done":
                found.broken.append(f"{task_id}: {status} {task.get('state')}")
        _, books = await operator.ask("GET", f"/budgets/status?scope=project:{tenant.project}")
        spent = {name: books[f"{name}Tokens"] for name in ("spent", "reserved", "overrun")}
        booked = spent["spent"] + spent["overrun"]
        usd = float(books["spentUsd"]) + float(books["overrunUsd"])
        if booked != TOKENS * len(executed) or spent["reserved"]:
            found.broken.append(f"books of {tenant.project}: {spent} for {len(executed)} tasks")
        if abs(usd - PRICE_USD * len(executed)) > 1e-6:
            found.broken.append(f"books of {tenant.project}: ${usd} for {len(executed)} tasks")


class HostileTenant:
    """The hostile tenant in a process of its own, for as long as the context lasts."""

    def __init__(self, orders: Orders, found: Found) -> None:
        self._orders = orders
        self._found = found
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "torture.tenant_attacks"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment(),
            cwd=ROOT,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._orders) + b"\n")
        await self._process.stdin.drain()

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        output, _errors = await self._process.communicate(b"")
        if self._process.returncode:
            self._found.broken.append(f"the attacker ended with {self._process.returncode}")
        else:
            self._found.report = msgspec.json.decode(output, type=Report)


def _has_caught_up(executions: Sequence[str], sent: Mapping[str, float]) -> bool:
    return len(executions) >= len(sent)


async def _until(condition: Callable[[], bool]) -> None:
    """Wait until something is so, or for long enough; then the audit will tell."""
    for _ in range(int(REST_SECONDS / LOOK_SECONDS)):
        if condition():
            return
        await asyncio.sleep(LOOK_SECONDS)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
            raise end


async def _token(operator: Honest, **bounds: str) -> str:
    name = f"{SECRET} {secrets.token_hex(4)}"
    wish = {"name": name, "permissions": ["submit", "read", "cancel"], **bounds}
    status, answer = await operator.ask("POST", "/tokens", wish)
    if status != 201:
        problem = f"no token: {answer}"
        raise RuntimeError(problem)
    return str(answer["token"])


def token_in(folder: Path) -> str:
    """Return the token that the first start has written."""
    return (folder / "data" / "token").read_text().strip()


def p50(values: Sequence[float]) -> float:
    """Return the time that every second one exceeds."""
    return sorted(values)[len(values) // 2] if values else float("inf")


def p99(values: Sequence[float]) -> float:
    """Return the time that one in a hundred exceeds."""
    return sorted(values)[int(len(values) * 0.99)] if values else float("inf")


def pss_kib(pid: int) -> int:
    """Return the memory of a process; what it shares counts in parts."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def run(options: argparse.Namespace) -> bool:
    """Let a hostile tenant loose on each store, and tell whether the others felt nothing."""
    seconds = options.seconds or ATTACK_SECONDS
    kept = []
    for backend in [name for name in options.backend or BACKENDS if name in BACKENDS]:
        print(f"\ntenants on {backend}, nodes: {NODES[backend]}", flush=True)
        with new_sandbox(backend) as sandbox:
            found = asyncio.run(
                torture(sandbox, nodes=NODES[backend], seconds=seconds, seed=options.seed)
            )
            if found.problems():
                sandbox.keep_logs()
        report(backend, found)
        kept.append(not found.problems())
    return all(kept)


def report(backend: str, found: Found) -> None:
    """Print what was done and felt."""
    answers = ", ".join(f"{n:,} x {code}" for code, n in sorted(found.report.answers.items()))
    print(f"\ntenants on {backend}: {'BROKEN' if found.problems() else 'kept'}")
    print(f"  hostile answers             {answers}; {found.report.unanswered:,} never came")
    print(f"  executed under attack       {found.executed}")
    print(f"  share of the steady one     {found.share:.3f} (at least {LEAST_SHARE:.3f})")
    for name, times in (("quiet", found.quiet), ("attacked", found.attacked)):
        line = f"{p50(times) * 1e3:.1f} and {p99(times) * 1e3:.1f} ms of {len(times):,}"
        print(f"  {f'p50, p99 of a start, {name}':<30} {line}")
    print(f"  times as slow               {found.slower:.2f} (at most {MOST_SLOWER})")
    print(f"  most memory of a node       {found.most_mib:.0f} MiB (at most {MOST_MIB})")
    print(f"  honest tasks acknowledged   {found.acknowledged:,}; tried again {found.refused:,}")
    for line in found.problems()[:10]:
        print(f"  BROKEN {line}")
