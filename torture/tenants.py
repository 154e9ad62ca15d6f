"""A hostile tenant does all that it may, at full speed, while honest ones work beside it.

The honest project `steady` always has work waiting, and so has the hostile one: each must get its
share of the fleet. The honest project `light` submits now and then, and how long its tasks wait for
their start is held against the same without an attack, when civil tenants keep the fleet as busy.
Tasks take 50 to 150 ms, drawn at random. If all took the same time, the sixteen permits would come
free together, and a start would wait for that moment: the quiet p99 was 28 to 92 ms that way, on
the same code.

The honest project `caller` makes calls of models through the gateway, and each must be answered.
The hostile tenant calls as well: it keeps the provider busy, has calls fail, and holds streams that
it does not read. Without an attack civil tenants keep the provider as busy.

At the end the books are held against what the endpoint has executed: every task that was
acknowledged is done, in its first attempt, and booked to the token. Those of `caller` are held
against the bill of the provider.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import random
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from benchmarks.http_load import Client, Connection

from executors.endpoint import Seen, free_port, reply, reply_json, running_endpoint
from gateway.billing_upstream import BillingUpstream, Plan, Request
from gateway.call_load import settled
from headgate.executors.http import ATTEMPT, TASK_ID
from headgate.gateway.routing import CIRCUIT_SECONDS
from service.support import ROOT, ServiceProcess, environment, family
from torture.service import Sandbox, is_ready, new_sandbox
from torture.tenant_attacks import (
    CALL_SECONDS,
    CHAT,
    MODEL,
    RESPONSES,
    Orders,
    Report,
    Trouble,
    chat,
    short_call,
)

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
CALLS_PER_SECOND = 4.0
CALLS_INFLIGHT = 12
SLOW_INFLIGHT = 3
CIVIL_CALLERS = 20
"""More than the provider takes at a time, so that its permits are always taken."""
REST_SECONDS = 120.0
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 20.0
RETRY_SECONDS = 0.1

LEAST_SHARE = 0.5 * 0.95
MOST_SLOWER = 3.0
MOST_CALL_SECONDS = CALL_SECONDS[1]
"""A permit is not taken back, so a call may wait until one of another tenant ends: where it takes
no longer than that, it need not be compared with the time without an attack.
"""

MOST_WAIT_SECONDS = 0.8 * CIRCUIT_SECONDS
"""A circuit that opens has the next honest call wait longer."""

MOST_MIB = 600
SECRET = "ostrich"
KEY = f"sk-{SECRET}-of-the-provider"
PAUSE_ASKED_SECONDS = 30
SERVER_ERRORS = (500, 501, 502, 503)
LONG_TEXT = ("word" * 1_000 + " ") * 200
LONG_PACE_SECONDS = 0.04
"""A stream of eight seconds, and of more than the buffers of an unread connection take."""
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
[projects.caller]
[projects.civil-caller]
[projects.hostile-caller]
[projects.failing-caller]

[projects.slow-caller]
max_concurrent_agents = {slow_inflight}

[upstreams.openai]
kind = "openai"
base_url = "{upstream_url}"
key_env = "TORTURE_KEY"
models = ["*"]
max_inflight = {calls_inflight}

[budgets.root]
limit_usd = "1000000"

[budgets."project:steady"]
limit_usd = "10000"

[budgets."project:hostile"]
limit_usd = "{hostile_usd}"

[budgets."project:greedy"]
limit_usd = "{hostile_usd}"

[budgets."project:caller"]
limit_usd = "10000"

[budgets."project:hostile-caller"]
limit_usd = "{hostile_usd}"

[budgets."project:slow-caller"]
limit_usd = "{hostile_usd}"
"""


@dataclass
class Found:
    """What a run did, and what the honest tenants felt."""

    quiet: list[float] = field(default_factory=list)
    attacked: list[float] = field(default_factory=list)
    quiet_calls: list[float] = field(default_factory=list)
    attacked_calls: list[float] = field(default_factory=list)
    longest_wait: float = 0.0
    calls: int = 0
    billed_tokens: int = 0
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

    @property
    def slower_calls(self) -> float:
        """How many times the quiet p99 of a call the attacked one is."""
        return p99(self.attacked_calls) / max(p99(self.quiet_calls), 1e-9)

    def problems(self) -> list[str]:
        """Say which promises were broken."""
        limits = {
            f"share {self.share:.3f} is under {LEAST_SHARE:.3f}": self.share < LEAST_SHARE,
            f"starts are {self.slower:.2f} times as slow": self.slower > MOST_SLOWER,
            f"calls are {self.slower_calls:.2f} times as slow": (
                self.slower_calls > MOST_SLOWER and p99(self.attacked_calls) > MOST_CALL_SECONDS
            ),
            f"a call waited {self.longest_wait:.1f} s": self.longest_wait > MOST_WAIT_SECONDS,
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


def trouble_in(request: Request) -> Plan | None:
    """Return what the provider does with a call that asks for trouble; None if it does not."""
    match request.fields.get("user"):
        case Trouble.DOWN:
            return Plan(status=SERVER_ERRORS[request.number % len(SERVER_ERRORS)])
        case Trouble.LIMITED:
            return Plan(status=429, retry_after=f"{PAUSE_ASKED_SECONDS}")
        case Trouble.TOO_LARGE:
            return Plan(status=429, message=f"Request too large for {request.model}")
        case Trouble.NO_MODEL:
            return Plan(status=400, message=f"{request.model} is no model")
        case Trouble.CUT:
            return Plan(fault="cut", after_events=request.number % 5)
        case Trouble.LONG:
            return Plan(text=LONG_TEXT, pace_seconds=LONG_PACE_SECONDS)
        case _:
            return None


class Honest:
    """An honest tenant, who tries again where it is told to."""

    def __init__(self, ports: Sequence[int], token: str, project: str, endpoint: Endpoint) -> None:
        self.project = project
        self.sent_at: dict[str, float] = {}
        self.refused = 0
        self._clients = [Client("127.0.0.1", port) for port in ports]
        self._ports, self._token = ports, token
        self.headers = {"Authorization": f"Bearer {token}"}
        self._endpoint = endpoint
        self._connections: dict[int, Connection] = {}
        self._turn = 0
        self._submitting = 0

    @property
    def url(self) -> str:
        """The address of the first node."""
        return f"http://127.0.0.1:{self._ports[0]}"

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

    async def keep_calling(self) -> None:
        """Always have calls waiting, over some connections."""
        async with asyncio.TaskGroup() as group:
            for number in range(CIVIL_CALLERS):
                group.create_task(self._call_for(random.Random(number)))

    async def _call_for(self, source: random.Random) -> None:
        other = Honest(self._ports, self._token, self.project, self._endpoint)
        try:
            while True:
                await other.ask("POST", CHAT, short_call(source))
        finally:
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
                head = client.head(method, path, len(content), self.headers)
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


class Caller:
    """An honest tenant, who makes calls of models now and then: whole, streamed and stored."""

    project = "caller"

    def __init__(self, ports: Sequence[int], token: str) -> None:
        self.seconds: list[float] = []
        """How long each answered call took."""

        self.longest_wait = 0.0
        self.problems: list[str] = []
        self.call_ids: list[str] = []
        self.response_ids: list[str] = []
        self.made = 0
        self._is_over = False
        self._clients = [
            httpx2.AsyncClient(
                base_url=f"http://127.0.0.1:{port}",
                headers={"Authorization": f"Bearer {token}"},
                timeout=ANSWER_SECONDS,
            )
            for port in ports
        ]

    async def come_by(self, source: random.Random) -> None:
        """Make a call now and then, to one node after the other, until told to stop."""
        while not self._is_over:
            await asyncio.sleep(source.expovariate(CALLS_PER_SECOND))
            client = self._clients[self.made % len(self._clients)]
            self.made += 1
            try:
                await self._call(client, self.made)
            except httpx2.HTTPError as error:
                self.problems.append(f"call {self.made} was not answered: {error!r}")

    async def stop(self, coming: asyncio.Task[None]) -> None:
        """Make no more calls, once the last one is answered."""
        self._is_over = True
        await coming
        for client in self._clients:
            await client.aclose()

    async def _call(self, client: httpx2.AsyncClient, number: int) -> None:
        word = f"{SECRET}-{number}"
        prompt = f"[[mark {self.project}-{number}]] [[say {word}]]"
        kind = ("whole", "stream", "response")[number % 3]
        path, body = CHAT, chat(prompt, stream=kind == "stream")
        if kind == "response":
            path, body = RESPONSES, {"model": MODEL, "input": prompt, "max_output_tokens": 10}
        since = time.monotonic()
        answer = await client.post(path, json=body)
        seconds = time.monotonic() - since
        is_whole = kind != "stream" or answer.text.rstrip().endswith("data: [DONE]")
        if answer.status_code != 200 or word not in answer.text or not is_whole:
            self.problems.append(f"call {number}: {answer.status_code} {answer.text[-200:]}")
            return
        self.seconds.append(seconds)
        waited = int(answer.headers["x-headgate-waited-ms"]) / 1_000
        self.longest_wait = max(self.longest_wait, waited)
        self.call_ids.append(answer.headers["x-headgate-call-id"])
        if kind == "response":
            self.response_ids.append(answer.json()["id"])


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
    async with running_endpoint(endpoint.answer) as server, BillingUpstream(KEY) as upstream:
        upstream.decide = trouble_in
        # Their bodies are large, and the bill is all that is asked for.
        upstream.requests = deque(maxlen=0)
        text = SETTINGS.format(
            url=server.url,
            upstream_url=upstream.openai_url,
            inflight=INFLIGHT,
            calls_inflight=CALLS_INFLIGHT,
            slow_inflight=SLOW_INFLIGHT,
            hostile_usd=HOSTILE_USD,
        )
        sandbox.write_text(text)
        ports = [free_port() for _ in range(nodes)]
        services = [sandbox.service(port, f"node-{port}") for port in ports]
        for service in services:
            service.variables = {"TORTURE_KEY": KEY}
        try:
            for service, port in zip(services, ports, strict=True):
                service.spawn()
                await is_ready(port, role=None)
            operator = Honest(ports, token_in(sandbox.folder), "operator", endpoint)
            steady, light, civil, calm, civil_caller = [
                Honest(ports, await _token(operator, projectId=name), name, endpoint)
                for name in ("steady", "light", "civil", "calm", "civil-caller")
            ]
            caller = Caller(ports, await _token(operator, projectId=Caller.project))
            calling = asyncio.create_task(caller.come_by(random.Random(seed)))
            watch = Watch(services)
            busy = [
                asyncio.create_task(each)
                for each in (watch.run(), light.come_by(random.Random(seed)))
            ]
            # Two others keep the fleet busy meanwhile: who has worked before is owed less later.
            quiet = [asyncio.create_task(each.keep_busy()) for each in (civil, calm)]
            quiet.append(asyncio.create_task(civil_caller.keep_calling()))
            print(f"  {min(QUIET_SECONDS, seconds):.0f} s without an attack", flush=True)
            found.quiet, found.quiet_calls = await asyncio.gather(
                _starts(light, endpoint, min(QUIET_SECONDS, seconds)),
                _calls(caller, min(QUIET_SECONDS, seconds)),
            )
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
                both_token=await _token(operator, projectId="hostile", agentId="mallory"),
                deep_token=await _token(operator, projectId="hostile"),
                caller_token=await _token(operator, projectId="hostile-caller"),
                failing_token=await _token(operator, projectId="failing-caller"),
                slow_token=await _token(operator, projectId="slow-caller"),
                agent_id="mallory",
                own_project="hostile",
                greedy_project="greedy",
                their_tasks=list(calm.sent_at)[:3],
                their_calls=caller.call_ids[:3],
                their_responses=caller.response_ids[:3],
                secret=SECRET,
                seed=seed,
            )
            async with HostileTenant(orders, found):
                busy.append(asyncio.create_task(steady.keep_busy()))
                await asyncio.sleep(WARM_SECONDS)
                before = endpoint.count()
                found.attacked, found.attacked_calls = await asyncio.gather(
                    _starts(light, endpoint, seconds), _calls(caller, seconds)
                )
                found.executed = {
                    name: count - before.get(name, 0) for name, count in endpoint.count().items()
                }
            await caller.stop(calling)
            await _ended(busy)
            await _audit(found, operator, (steady, light), endpoint)
            await _audit_calls(found, operator, caller, upstream)
            found.most_mib = watch.most_mib
            found.refused = steady.refused + light.refused
            codes = [await asyncio.to_thread(service.stop) for service in services]
            found.exit_code = max(codes)
            for tenant in (operator, steady, light, civil, calm, civil_caller):
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


async def _calls(caller: Caller, seconds: float) -> list[float]:
    """Return how long the calls of the caller took in this time."""
    await asyncio.sleep(WARM_SECONDS)
    known = len(caller.seconds)
    await asyncio.sleep(seconds)
    return caller.seconds[known:]


async def _audit_calls(
    found: Found, operator: Honest, caller: Caller, upstream: BillingUpstream
) -> None:
    """Hold the books of the caller against the bill of the provider."""
    scope = f"project:{caller.project}"
    async with httpx2.AsyncClient(base_url=operator.url, headers=operator.headers) as client:
        books = (await settled(client, (scope,), REST_SECONDS))[scope]
    bill = [one.tokens for one in upstream.bill if one.mark.startswith(f"{caller.project}-")]
    found.calls, found.billed_tokens = len(caller.seconds), sum(bill)
    found.longest_wait = caller.longest_wait
    found.broken += caller.problems
    if len(bill) != caller.made:
        found.broken.append(f"{caller.made} calls of {scope}, {len(bill)} lines of the bill")
    booked = books["spentTokens"] + books["overrunTokens"]
    usd = float(books["spentUsd"]) + float(books["overrunUsd"])
    is_settled = not books["reservedTokens"] and float(books["reservedUsd"]) == 0
    is_exact = booked == sum(bill) and abs(usd - sum(bill) / 1_000_000) < 1e-6
    if not (is_exact and is_settled):
        found.broken.append(f"books of {scope}: {books} for {sum(bill)} billed tokens")


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
    _report_times("a start", found.quiet, found.attacked, found.slower)
    bound = f", or {MOST_CALL_SECONDS * 1e3:.0f} ms"
    _report_times("a call", found.quiet_calls, found.attacked_calls, found.slower_calls, bound)
    print(
        f"  longest wait of a call      {found.longest_wait:.2f} s (at most {MOST_WAIT_SECONDS:g})"
    )
    print(f"  honest calls answered       {found.calls:,}; billed {found.billed_tokens:,} tokens")
    print(f"  most memory of a node       {found.most_mib:.0f} MiB (at most {MOST_MIB})")
    print(f"  honest tasks acknowledged   {found.acknowledged:,}; tried again {found.refused:,}")
    for line in found.problems()[:10]:
        print(f"  BROKEN {line}")


def _report_times(
    what: str, quiet: Sequence[float], attacked: Sequence[float], slower: float, bound: str = ""
) -> None:
    for name, times in (("quiet", quiet), ("attacked", attacked)):
        line = f"{p50(times) * 1e3:.1f} and {p99(times) * 1e3:.1f} ms of {len(times):,}"
        print(f"  {f'p50, p99 of {what}, {name}':<30} {line}")
    print(f"  {f'times as slow, {what}':<27} {slower:.2f} (at most {MOST_SLOWER}{bound})")
