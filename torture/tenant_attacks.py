"""The hostile tenant: everything that its tokens let it try, at full speed, until told to stop.

It runs in a process of its own. Its orders are one line of JSON on standard input; when that is
closed it stops, and prints what it has done. It counts as a breach whatever answer it should not
have got: something of the other tenant, or a fault of the service.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import sys
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

NICENESS = 19
"""An attacker has processors of its own; here it takes those of the service only while idle."""

STREAMS, IDLE, SLOW_HEADS, SLOW_READERS = 250, 1_000, 60, 20
FLOODS, DEEP, READS = 4, 12, 4
PAUSE_SECONDS = 0.2
ANSWER_SECONDS = 20.0
MAX_BREACHES = 20
NESTED = b"[" * (1 << 20)
FAR = "2030-01-01T00:00:00Z"
READ_PATHS = (
    "/tasks?limit=1000",
    "/tasks?limit=1000&text=a",
    "/budgets/status",
    "/budgets/journal?limit=1000",
    "/usage?by=agent",
    "/estimates",
    "/metrics",
    "/scheduler/lanes",
    "/scheduler/stats",
    "/projects",
    "/slots",
    "/openapi.json",
)
GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01",
    b"GET /tasks HTTP/9.9\r\n\r\n",
    b"POST /tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"A" * 70_000,
)


class Orders(msgspec.Struct, frozen=True):
    """Whom to attack, with what, and what belongs to others."""

    ports: list[int]
    project_token: str
    greedy_token: str
    agent_token: str
    agent_id: str
    own_project: str
    greedy_project: str
    their_tasks: list[str]
    secret: str
    seed: int


class Report(msgspec.Struct):
    """What was done, and what should not have been possible."""

    answers: dict[str, int] = {}
    breaches: list[str] = []
    unanswered: int = 0


class Attacker:
    """One hostile tenant on all nodes."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._random = random.Random(orders.seed)
        self._answers: Counter[str] = Counter()
        self._breaches: list[str] = []
        self._unanswered = 0
        self._own: list[str] = []

    def report(self) -> Report:
        """Return what was done so far."""
        return Report(dict(self._answers), self._breaches, self._unanswered)

    async def run(self) -> None:
        """Do everything at once, until cancelled."""
        attacks: list[Callable[[], Awaitable[None]]] = [
            *[self._flood] * FLOODS,
            *[self._deep] * DEEP,
            *[self._read] * READS,
            self._fill_future,
            self._claims,
            self._bombs,
            self._scopes,
            self._work,
            self._meddle,
            self._retry,
            self._garbage,
            *[self._stream] * STREAMS,
            *[self._idle] * IDLE,
            *[self._slow_head] * SLOW_HEADS,
            *[self._slow_reader] * SLOW_READERS,
        ]
        async with asyncio.TaskGroup() as group:
            for attack in attacks:
                group.create_task(self._again(attack))

    async def _again(self, attack: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(self._random.uniform(0.0, 2.0))
        while True:
            try:
                await attack()
            except (OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError):
                self._unanswered += 1
            await asyncio.sleep(self._random.uniform(0.0, PAUSE_SECONDS))

    # Each attack holds one connection and uses it for a while; `_again` brings it back.

    async def _flood(self) -> None:
        async with self._session() as session:
            for _ in range(100):
                status, body = await session.ask("POST", "/tasks", self._task())
                if status == 202:
                    self._own = [*self._own[-200:], msgspec.json.decode(body)["taskId"]]
                if self._random.random() < 0.1:
                    tasks = [self._task() for _ in range(50)]
                    await session.ask("POST", "/tasks/batch", {"agentId": "m", "tasks": tasks})

    async def _fill_future(self) -> None:
        async with self._session() as session:
            for _ in range(50):
                task = self._task() | {"notBefore": FAR, "params": {"x": "y" * 100_000}}
                await session.ask("POST", "/tasks", task)

    async def _deep(self) -> None:
        async with self._session() as session:
            await session.ask("POST", "/tasks", NESTED)

    async def _read(self) -> None:
        async with self._session() as session:
            for _ in range(50):
                await session.ask("GET", self._random.choice(READ_PATHS))

    async def _bombs(self) -> None:
        """Have the endpoint answer what grows when it is decoded."""
        async with self._session(self._orders.greedy_token) as session:
            for _ in range(20):
                task = {"agentId": "m", "action": f"b{self._random.random()}", "target": "bomb"}
                await session.ask("POST", "/tasks", task)

    async def _claims(self) -> None:
        """Claim a fortune, in a project of its own: it is the end of what that one may do."""
        scope = f"project:{self._orders.greedy_project}"
        async with self._session(self._orders.greedy_token) as session:
            for _ in range(50):
                name = {"id": f"{self._random.random()}", "scope": scope}
                await session.ask("POST", "/budgets/reserve", name | {"usd": "0", "tokens": 0})
                claim = {"usd": "1000000", "tokens": 10**12}
                await session.ask("POST", "/budgets/commit", name | claim)

    async def _scopes(self) -> None:
        async with self._session() as session:
            for _ in range(100):
                scope = f"{self._own_scope()}/session:{self._random.randrange(3_000)}"
                await session.ask("POST", "/budgets/create", {"scope": scope, "limitUsd": "1"})
                held = {"id": f"{self._random.random()}", "scope": scope, "usd": "0.0001"}
                await session.ask("POST", "/budgets/reserve", held)

    async def _work(self) -> None:
        """Work for its own agent, and say the worst of what was done."""
        own, agent = self._orders, self._orders.agent_id
        async with self._session(own.agent_token) as session:
            task = {"action": "pull", "target": "pull", "projectId": own.greedy_project}
            await session.ask("POST", "/tasks", task)
            offer: dict[str, object] = {"capacity": 5, "waitSeconds": 0}
            for _ in range(5):
                status, body = await session.ask("POST", f"/agents/{agent}/claim", offer)
                if status != 200:
                    return
                claimed = msgspec.json.decode(body)
                offer["workerId"] = claimed["workerId"]
                for each in claimed["tasks"]:
                    told = {"workerId": claimed["workerId"], "attempt": each["attempt"]}
                    usage = {"usd": "1000000", "model": "m" * self._random.choice((5, 100_000))}
                    place = f"/tasks/{each['taskId']}"
                    if self._random.random() < 0.5:
                        await session.ask("POST", f"{place}/complete", told | {"usage": usage})
                    else:
                        fail = {"error": "x", "retryable": True, "retryAfterSeconds": 86_400}
                        await session.ask("POST", f"{place}/fail", told | fail)

    async def _meddle(self) -> None:
        """Touch what belongs to the other; nothing of it may be there."""
        async with self._session() as session:
            for task_id in self._orders.their_tasks:
                for method, path, body in (
                    ("GET", f"/tasks/{task_id}", None),
                    ("GET", f"/tasks/{task_id}/why", None),
                    ("POST", f"/tasks/{task_id}/cancel", {}),
                    ("POST", f"/tasks/{task_id}/retry", {}),
                    ("POST", "/tasks", self._task() | {"dependsOn": [task_id]}),
                ):
                    status, _ = await session.ask(method, path, body)
                    if status < 300:
                        self._breach(f"{method} {path} of the other answered {status}")

    async def _retry(self) -> None:
        async with self._session() as session:
            for task_id in self._own[-50:]:
                await session.ask("POST", f"/tasks/{task_id}/retry", {})
            await session.ask("POST", "/tasks/retry", {"state": ["failed", "rejected"]})

    async def _garbage(self) -> None:
        reader, writer = await self.connect()
        try:
            writer.write(self._random.choice(GARBAGE))
            async with asyncio.timeout(ANSWER_SECONDS):
                await reader.read(1_000)
        finally:
            writer.close()

    async def _stream(self) -> None:
        reader, writer = await self.connect()
        try:
            writer.write(self.head("GET", "/events", self._orders.project_token))
            await reader.readuntil(b"\r\n\r\n")
            # It never reads on.
            await asyncio.sleep(60.0)
        finally:
            writer.close()

    async def _idle(self) -> None:
        reader, writer = await self.connect()
        try:
            async with asyncio.timeout(60.0):
                await reader.read(1)
        finally:
            writer.close()

    async def _slow_head(self) -> None:
        _, writer = await self.connect()
        try:
            for letter in b"POST /tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 100:
                writer.write(bytes([letter]))
                await writer.drain()
                await asyncio.sleep(0.5)
        finally:
            writer.close()

    async def _slow_reader(self) -> None:
        _, writer = await self.connect()
        try:
            head = self.head("GET", "/tasks?limit=1000", self._orders.project_token)
            for _ in range(20):
                writer.write(head)
                async with asyncio.timeout(5.0):
                    await writer.drain()
                await asyncio.sleep(0.5)
        finally:
            writer.transport.abort()

    def _task(self) -> dict[str, object]:
        source = self._random
        task: dict[str, object] = {
            "agentId": f"m{source.randrange(50)}",
            "action": f"a{source.randrange(100_000)}",
            "target": "work",
            "params": {"x": "y" * source.choice((0, 0, 100, 50_000))},
        }
        tricks: tuple[dict[str, object], ...] = (
            {"costUsd": "0"},
            {"weight": 0},
            {"estimate": {"tokens": 0, "usd": "0"}},
            {"priority": -(10**6)},
            {"maxAttempts": 10},
            {"onExhausted": "wait"},
            {"labels": {"l": "x" * 1_000}},
            {"callbackUrl": "http://127.0.0.1:9/"},
            {"scopes": [f"{self._own_scope()}/session:{source.randrange(3_000)}"]},
        )
        for trick in tricks:
            if source.random() < 0.3:
                task |= trick
        return task

    def _own_scope(self) -> str:
        return f"project:{self._orders.own_project}"

    def _session(self, token: str = "") -> Session:
        return Session(self, token or self._orders.project_token)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a node."""
        async with asyncio.timeout(ANSWER_SECONDS):
            return await asyncio.open_connection(
                "127.0.0.1", self._random.choice(self._orders.ports)
            )

    def head(self, method: str, path: str, token: str, length: int = 0) -> bytes:
        """Write the head of a request."""
        return (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    def heard(self, path: str, status: int, body: bytes) -> None:
        """Count an answer, and look for what should not be in it."""
        self._answers[str(status)] += 1
        if self._orders.secret.encode() in body:
            self._breach(f"{path} tells of the other")
        if status == 500:
            self._breach(f"{path} answered 500: {body[:200]!r}")

    def _breach(self, line: str) -> None:
        if len(self._breaches) < MAX_BREACHES:
            self._breaches.append(line)


class Session:
    """One connection that asks one thing after the other."""

    def __init__(self, attacker: Attacker, token: str) -> None:
        self._attacker = attacker
        self._token = token
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> Session:
        self._reader, self._writer = await self._attacker.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Send a request, and return its status and body."""
        content = body if isinstance(body, bytes) else b""
        if body is not None and not isinstance(body, bytes):
            content = msgspec.json.encode(body)
        self._writer.write(self._attacker.head(method, path, self._token, len(content)) + content)
        async with asyncio.timeout(ANSWER_SECONDS):
            head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
            status = int(head[9:12])
            start = head.index(b"content-length:") + 15
            text = await self._reader.readexactly(int(head[start : head.index(b"\r", start)]))
        self._attacker.heard(path, status, text)
        if b"connection: close" in head:
            raise EOFError
        return status, text


async def attack() -> None:
    """Attack until standard input is closed."""
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    attacker = Attacker(orders)
    running = asyncio.create_task(attacker.run())
    stopped = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
    await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        await running
    print(msgspec.json.encode(attacker.report()).decode(), flush=True)
    # A thousand connections are not worth closing one by one.
    os._exit(0)


def main() -> None:
    os.nice(NICENESS)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8_192), most))
    asyncio.run(attack())


if __name__ == "__main__":
    main()
