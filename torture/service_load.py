"""The clients of a tortured service, and the endpoint that its tasks are executed at.

Clients remember everything that the service has acknowledged, and nothing else: a request whose
answer did not come may have been applied or not. The endpoint lives in the torturing process, so
what it has seen outlives the service.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec
from benchmarks.http_load import Client, Connection

from executors.endpoint import Seen, reply, reply_json
from headgate.executors.http import ATTEMPT, TASK_ID
from service.support import TERMINAL
from torture.service_tasks import Execution, result_of, work_of

CLIENTS = 6
ANSWER_SECONDS = 3.0
PAUSE_SECONDS = 0.03
AGENTS = 5
PROJECTS = ("default", "research", "evals")
TARGETS = ("endpoint", "function")
MODELS = {"endpoint": "torture-1", "other": "unheard-of", "function": None}
"""The targets of tasks that bring no estimate: one is priced, one names a model that has no price,
and one says nothing of what it used."""

WORKFLOWS = 3
MOST_TOKENS = 60
BATCH = 8
SHORT_SECONDS = 0.05
RECENT = 200
PAUSED_RATIO = 0.005

SETTINGS = """
[scheduler]
max_queue_size = 300
max_per_agent = 90
max_inflight = 24
max_per_agent_inflight = 8
worker_count = 24
task_retention_seconds = 86_400
default_deadline_seconds = 8
node_lease_seconds = 2
drain_seconds = 2
retry_base_seconds = 0.05
retry_max_seconds = 0.3

[targets.endpoint]
kind = "http"
url = "{url}/run"
default = true

[targets.function]
kind = "callable"
entry_point = "torture.service_tasks:run"

[targets.other]
kind = "http"
url = "{url}/other"

[prices."torture-*"]
input = 1.0
output = 1.0

[projects.research]
credit_weight = 2.0
max_concurrent_agents = 10

[projects.evals]
max_concurrent_agents = 6
budget_limit = 1_000_000
"""


class End(NamedTuple):
    """How a task was seen to have ended."""

    state: str
    attempt: int
    completed_at: str


@dataclass
class Memory:
    """What the service has told its clients, and what they are to ask for now."""

    round: int = 0
    brings_estimates: bool = True
    longest_seconds: float = 0.5
    long_ratio: float = 0.25
    acknowledged: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    ended: dict[str, End] = field(default_factory=dict)
    recent: list[str] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    unanswered: int = 0

    def acknowledge(self, task_id: str) -> None:
        self.acknowledged.add(task_id)
        self.recent = [*self.recent[-RECENT:], task_id]


class Caller:
    """One client, which goes from node to node and never gives up."""

    def __init__(self, ports: Sequence[int], memory: Memory, source: random.Random) -> None:
        self._nodes = [Client("127.0.0.1", port) for port in ports]
        self._memory = memory
        self._random = source
        self._node = self._nodes[0]
        self._connection: Connection | None = None

    async def run(self) -> None:
        """Ask for one thing after the other, until cancelled."""
        while True:
            try:
                await self._step()
            except (OSError, EOFError, ValueError):
                self._memory.unanswered += 1
                self._hang_up()
                await asyncio.sleep(PAUSE_SECONDS)
            await asyncio.sleep(self._random.uniform(0.0, 2 * PAUSE_SECONDS))

    async def _step(self) -> None:
        kind, recent = self._random.random(), self._memory.recent
        if kind < 0.55 or not recent:
            await self._submit()
        elif kind < 0.7:
            await self._submit_batch()
        elif kind < 0.82:
            await self._cancel(self._random.choice(recent[-20:]))
        else:
            await self._look(self._random.choice(recent))

    async def _submit(self) -> None:
        _, answer = await self._ask("POST", "/tasks", self._task())
        # One that was turned away is stored as well, and says under which id.
        if "taskId" in answer:
            self._memory.acknowledge(answer["taskId"])

    async def _submit_batch(self) -> None:
        tasks = [self._task() for _ in range(self._random.randint(1, BATCH))]
        _, answer = await self._ask("POST", "/tasks/batch", {"agentId": "agent-0", "tasks": tasks})
        for entry in answer.get("tasks", ()):
            if entry.get("taskId"):
                self._memory.acknowledge(entry["taskId"])

    async def _cancel(self, task_id: str) -> None:
        _, answer = await self._ask("POST", f"/tasks/{task_id}/cancel", {})
        if answer.get("status") == "cancelled":
            self._memory.cancelled.add(task_id)

    async def _look(self, task_id: str) -> None:
        status, answer = await self._ask("GET", f"/tasks/{task_id}")
        if status == 200 and answer["state"] in TERMINAL:
            end = End(answer["state"], answer.get("attempt", 0), answer["completedAt"])
            self._memory.ended.setdefault(task_id, end)

    async def _ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        content = b"" if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                connection = await self._connected()
                head = self._node.head(method, path, len(content))
                status, answer = await connection.request(head, content)
        except TimeoutError as error:
            raise ConnectionError from error
        self._memory.statuses[status] = self._memory.statuses.get(status, 0) + 1
        return status, msgspec.json.decode(answer)

    async def _connected(self) -> Connection:
        if self._connection is None:
            self._node = self._random.choice(self._nodes)
            self._connection = await self._node.connect()
        return self._connection

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _task(self) -> dict[str, object]:
        source, recent = self._random, self._memory.recent
        tokens = source.randint(1, MOST_TOKENS)
        task: dict[str, object] = {
            "agentId": f"agent-{source.randrange(AGENTS)}",
            "projectId": source.choice(PROJECTS),
            "action": "work",
            "target": source.choice(TARGETS),
            "params": {"seconds": self._seconds(), "tokens": tokens},
            "scopes": [f"{session_of(self._memory.round)}/workflow:w{source.randrange(WORKFLOWS)}"],
            "maxAttempts": source.randint(1, 3),
            "onExhausted": source.choice(("wait", "reject")),
        }
        if self._memory.brings_estimates:
            task["estimate"] = {"tokens": tokens, "usd": f"0.{tokens:06}"}
        else:
            target = source.choice(tuple(MODELS))
            params = {"seconds": self._seconds(), "tokens": tokens, "model": MODELS[target]}
            task |= {"target": target, "params": params}
        if source.random() < 0.1:
            seconds = source.uniform(0.1, 1.5)
            task["deadline"] = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
        if recent and source.random() < 0.15:
            parents = {source.choice(recent[-10:]) for _ in range(source.randint(1, 3))}
            task["dependsOn"] = sorted(parents)
            task["onParentFailure"] = source.choice(("fail", "run"))
        return task

    def _seconds(self) -> float:
        is_long = self._random.random() < self._memory.long_ratio
        return self._memory.longest_seconds if is_long else SHORT_SECONDS


class TaskServer:
    """Executes tasks that come over HTTP, and remembers each time."""

    def __init__(self) -> None:
        self.executions: list[Execution] = []

    async def answer(self, request: Seen, writer: asyncio.StreamWriter) -> None:
        """Work for a while, and answer."""
        execution = Execution(request.headers[TASK_ID], int(request.headers[ATTEMPT]))
        self.executions.append(execution)
        work = work_of(execution, request.json)
        await asyncio.sleep(work.seconds)
        draw = random.Random(f"{execution}").random()
        if draw < PAUSED_RATIO:
            writer.write(reply(429, b"slow down", Retry_After="0.1"))
        elif work.fails:
            writer.write(reply(500 if draw < 0.5 else 400, b"it fails at times"))
        else:
            writer.write(reply_json(result_of(execution, work)))
        # The service may have been killed meanwhile.
        with suppress(ConnectionError):
            await writer.drain()


def session_of(number: int) -> str:
    """Name the budget that the tasks of one round share."""
    return f"session:round-{number}"


def settings(url: str, *, rounds: int, limit_session: int, limit_workflow: int) -> str:
    """Write the settings of a tortured service: small budgets for each round, small limits."""
    budgets = [
        _budget(scope, limit)
        for number in range(rounds)
        for scope, limit in (
            (session_of(number), limit_session),
            *(
                (f"{session_of(number)}/workflow:w{index}", limit_workflow)
                for index in range(WORKFLOWS)
            ),
        )
    ]
    return SETTINGS.format(url=url) + "\n".join(budgets)


def _budget(scope: str, limit: int) -> str:
    return f'[budgets."{scope}"]\nlimit_usd = "0.{limit:06}"\nlimit_tokens = {limit}\n'


def callers(ports: Sequence[int], memory: Memory, seed: int) -> list[asyncio.Task[None]]:
    """Start the clients."""
    return [
        asyncio.create_task(Caller(ports, memory, random.Random(f"{seed}:{number}")).run())
        for number in range(CLIENTS)
    ]


async def dismiss(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Stop the clients, and raise what one of them did not expect."""
    for task in tasks:
        task.cancel()
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
            raise end
