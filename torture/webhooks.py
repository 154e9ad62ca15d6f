"""A service whose tasks are to be told to a bad receiver is killed at random moments.

At the end the receiver is good, what waits for a later try is sent again, and what it was told is
held against the tasks: each that ended is told of, under one id, with one body, and rightly signed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from benchmarks.http_load import Client

from executors.endpoint import free_port
from headgate.storage.unit_of_work import TASK_EVENTS, message_id
from service.support import TERMINAL, ServiceProcess
from torture.service import BACKENDS, Sandbox, come_to_rest, is_ready, new_sandbox
from torture.webhook_receiver import Receiver, told_state

CLIENTS = 4
PAUSE_SECONDS = 0.02
ANSWER_SECONDS = 3.0
WORK_SECONDS = (0.2, 1.6)
START_SECONDS = 1.0
STARTING_RATIO = 0.2
SETTLE_SECONDS = 120.0
SOON_SECONDS = 20.0
KILLS_PER_LINE = 10

SETTINGS = """
[scheduler]
max_queue_size = 8
max_per_agent = 3
worker_count = 4
task_retention_seconds = 86_400
default_deadline_seconds = 20
node_lease_seconds = 2
drain_seconds = 2

[targets.function]
kind = "callable"
entry_point = "torture.service_tasks:run"

[webhooks]
allow = ["127.0.0.0/8"]
try_timeout_seconds = 1
"""


@dataclass
class Findings:
    """What a run did, and what was wrong afterwards."""

    kills: int = 0
    acknowledged: set[str] = field(default_factory=set)
    states: Counter[str] = field(default_factory=Counter)
    came: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    redelivered: int = 0
    twice: int = 0
    broken: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0

    def is_right(self, kills: int) -> bool:
        """Tell whether every promise was kept, and enough was done to say so."""
        is_enough = self.kills >= kills and len(self.acknowledged) > kills
        return is_enough and not any(self.broken.values())


async def torture(sandbox: Sandbox, *, kills: int, seed: int) -> Findings:
    """Kill a service under load, let everything be told, and compare."""
    findings, receiver = Findings(), Receiver(seed)
    source, started = random.Random(seed), time.monotonic()
    sandbox.write_text(SETTINGS)
    port = free_port()
    service = sandbox.service(port)
    serving = asyncio.create_task(receiver.serve())
    clients = [
        asyncio.create_task(_submit(port, receiver, findings, random.Random(f"{seed}:{number}")))
        for number in range(CLIENTS)
    ]
    try:
        for number in range(kills):
            await _run_and_kill(service, port, source, receiver)
            findings.kills = number + 1
            _tell(findings)
        service.spawn()
        await is_ready(port)
        await _dismiss(clients)
        receiver.is_good = True
        await come_to_rest([port])
        await _send_the_rest(port, findings)
        await _compare(port, receiver, findings)
        findings.broken["secrets in the log"] = [
            line for line in service.log_path.read_text().splitlines() if "CANARY" in line
        ]
    finally:
        await _dismiss([*clients, serving])
        service.kill()
    findings.seconds = time.monotonic() - started
    return findings


async def _run_and_kill(
    service: ServiceProcess, port: int, source: random.Random, receiver: Receiver
) -> None:
    service.spawn()
    if source.random() < STARTING_RATIO:
        await asyncio.sleep(source.uniform(0.0, START_SECONDS))
    else:
        await is_ready(port)
        if not receiver.secrets:
            answer = await _ask(port, "GET", "/webhooks/secret")
            receiver.secrets = [one["secret"] for one in answer.get("secrets", ())]
        await asyncio.sleep(source.uniform(*WORK_SECONDS))
    service.kill()


async def _submit(port: int, receiver: Receiver, findings: Findings, draws: random.Random) -> None:
    """Submit and cancel without pause; only what was acknowledged is remembered."""
    while True:
        with suppress(OSError, EOFError, ValueError, TimeoutError):
            body = {
                "agentId": f"a{draws.randrange(4)}",
                "action": "work",
                "params": {"seconds": 0.05, "tokens": 1},
                "callbackUrl": receiver.url,
            }
            answer = await _ask(port, "POST", "/tasks", body)
            if "taskId" in answer:
                findings.acknowledged.add(answer["taskId"])
                if draws.random() < 0.1:
                    await _ask(port, "POST", f"/tasks/{answer['taskId']}/cancel", {})
        await asyncio.sleep(PAUSE_SECONDS)


async def _send_the_rest(port: int, findings: Findings) -> None:
    """Have everything tried now that waits for a later try, until nothing waits."""
    ends_at = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < ends_at:
        page = await _ask(port, "GET", "/webhooks?state=pending&limit=1000")
        dead = await _ask(port, "GET", "/webhooks?state=dead&limit=1000")
        if not page["webhooks"] and not dead["webhooks"]:
            return
        # What is due soon may arrive meanwhile, and must not be sent once more.
        soon = datetime.now(UTC) + timedelta(seconds=SOON_SECONDS)
        later = [one for one in page["webhooks"] if datetime.fromisoformat(one["dueAt"]) > soon]
        for one in [*later, *dead["webhooks"]]:
            await _ask(port, "POST", f"/webhooks/{one['id']}/redeliver", {})
            findings.redelivered += 1
        await asyncio.sleep(1.0)


async def _compare(port: int, receiver: Receiver, findings: Findings) -> None:
    broken = findings.broken
    for name in ("not ended", "never told", "another id", "another body", "another event"):
        broken[name] = []
    for task_id in sorted(findings.acknowledged):
        task = await _ask(port, "GET", f"/tasks/{task_id}")
        state = task.get("state", "gone")
        findings.states[state] += 1
        told = receiver.told.get(task_id)
        if state not in TERMINAL:
            broken["not ended"].append(task_id)
        elif told is None or not told.taken:
            broken["never told"].append(f"{task_id} is {state}")
        else:
            findings.twice += told.taken > 1
            if told.message_ids != {message_id(task_id)}:
                broken["another id"].append(task_id)
            if len(told.bodies) != 1 or told_state(told) != [state]:
                broken["another body"].append(task_id)
            if told.events != {TASK_EVENTS[state]}:
                broken["another event"].append(task_id)
    broken["wrongly signed"] = ["…"] * receiver.forged
    broken["redirects followed"] = ["…"] * receiver.redirected
    findings.came = sum(told.came for told in receiver.told.values())
    findings.answers, findings.restarts = dict(receiver.answers), receiver.restarts


async def _ask(port: int, method: str, path: str, body: object = None) -> dict[str, Any]:
    content = b"" if body is None else msgspec.json.encode(body)
    async with asyncio.timeout(ANSWER_SECONDS):
        client = Client("127.0.0.1", port)
        connection = await client.connect()
        try:
            head = client.head(method, path, len(content))
            _, answer = await connection.request(head, content)
        finally:
            connection.close()
    decoded: dict[str, Any] = msgspec.json.decode(answer)
    return decoded


async def _dismiss(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _tell(findings: Findings) -> None:
    if findings.kills % KILLS_PER_LINE == 0:
        acknowledged = len(findings.acknowledged)
        print(f"  {findings.kills} kills, {acknowledged:,} tasks acknowledged", flush=True)


def run(options: argparse.Namespace) -> bool:
    """Torture a service on each store, print what was found, and tell whether all is right."""
    is_right = True
    for backend in options.backend or BACKENDS:
        if backend not in BACKENDS:
            continue
        print(f"\nwebhooks on {backend}", flush=True)
        with new_sandbox(backend) as sandbox:
            found = asyncio.run(torture(sandbox, kills=options.kills, seed=options.seed))
            is_kept = found.is_right(options.kills)
            if not is_kept:
                sandbox.keep_logs()
        is_right &= is_kept
        report(f"webhooks on {backend}", found, is_kept=is_kept)
    return is_right


def report(title: str, found: Findings, *, is_kept: bool) -> None:
    """Print what a run did and found."""
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(found.states.items()))
    answers = ", ".join(f"{count:,} x {kind}" for kind, count in sorted(found.answers.items()))
    print(f"\n{title}: {'kept' if is_kept else 'BROKEN'} ({found.seconds:.0f} s)")
    print(f"  kills                       {found.kills}")
    print(f"  tasks acknowledged          {len(found.acknowledged):,} ({states})")
    print(f"  messages that came          {found.came:,} ({answers})")
    print(f"  restarts of the receiver    {found.restarts}")
    print(f"  sent again at the end       {found.redelivered:,}")
    print(f"  told more than once         {found.twice:,}")
    for promise, broken in found.broken.items():
        print(f"  {promise:<27} {len(broken)}")
        for line in broken[:5]:
            print(f"    {line}")
