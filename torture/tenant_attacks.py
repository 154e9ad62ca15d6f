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
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from enum import StrEnum

import msgspec
from benchmarks.http_load import read_answer

NICENESS = 19
"""An attacker has processors of its own; here it takes those of the service only while idle."""

STREAMS, IDLE, SLOW_HEADS, SLOW_READERS = 250, 4_096, 60, 20
FLOODS, DEEP, READS = 4, 220, 4
CALLS, FAILING_CALLS, CUT_CALLS, LIMITED_CALLS = 20, 40, 2, 40
SLOW_CALLS, LEFT_CALLS, OVERSIZED_CALLS = 20, 4, 2
OTHER_FILES = 1_024
"""Descriptors for everything else than idle connections, of which there are fewer if need be."""

PAUSE_SECONDS = 0.2
BURST_SECONDS = 1.0
ANSWER_SECONDS = 20.0
READ_BYTES = 1 << 16
MAX_BREACHES = 20
NESTED = b"[" * (1 << 20)
DEEP_PARTS, PART_SECONDS, DEEP_REST_SECONDS = 4, 0.25, 2.0
"""A deep body comes in parts, and after it a connection rests: many are under way at once, and
their bytes are not so many that they alone keep everything else out.
"""

FAR = "2030-01-01T00:00:00Z"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MODEL, LIMITED_MODEL = "torture-1", "torture-limited"
"""The model of everybody's calls, and one that nobody else calls: a provider that limits a model
limits it for all.
"""

LARGE_PROMPT = "x" * 250_000
CALL_SECONDS = 0.1, 0.3
"""How long the provider works on an ordinary call, at least and at most."""

UNPRINTABLE_MODELS = ("torture-1\n", "torture-1\r\nX-Evil: 1", "torture-1\x00", "m" * 100_000)
SPEAKING_MODELS = (
    "Your credit balance is too low",
    "Request too large",
    "Insufficient credits",
    "../../../admin",
)
"""What a provider repeats of these may sound like its own words."""

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


class Trouble(StrEnum):
    """What a call asks the provider for, in its field `user`: to fail in one of these ways."""

    DOWN = "down"
    LIMITED = "limited"
    TOO_LARGE = "too-large"
    NO_MODEL = "no-model"
    CUT = "cut"
    LONG = "long"


def chat(prompt: str, **fields: object) -> dict[str, object]:
    """Return the body of a call."""
    turns = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": turns, "max_tokens": 100, **fields}


def short_call(source: random.Random) -> dict[str, object]:
    """Return a call that the provider works on for a moment."""
    return chat(f"[[delay {source.uniform(*CALL_SECONDS):.3f}]]")


class Orders(msgspec.Struct, frozen=True):
    """Whom to attack, with what, and what belongs to others."""

    ports: list[int]
    project_token: str
    greedy_token: str
    agent_token: str
    both_token: str
    deep_token: str
    caller_token: str
    failing_token: str
    slow_token: str
    agent_id: str
    own_project: str
    greedy_project: str
    their_tasks: list[str]
    their_calls: list[str]
    their_responses: list[str]
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

    async def run(self, *, open_files: int) -> None:
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
            self._meddle_with_calls,
            self._trespass,
            self._retry,
            self._garbage,
            *[self._stream] * STREAMS,
            *[self._idle] * min(IDLE, open_files - OTHER_FILES),
            *[self._slow_head] * SLOW_HEADS,
            *[self._slow_reader] * SLOW_READERS,
            self._odd_models,
            *[self._call] * CALLS,
            *[self._failing_call] * FAILING_CALLS,
            *[self._cut_call] * CUT_CALLS,
            *[self._limited_call] * LIMITED_CALLS,
            *[self._slow_call] * SLOW_CALLS,
            *[self._left_call] * LEFT_CALLS,
            *[self._oversized_call] * OVERSIZED_CALLS,
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
        # With a token of its own, or what it has in hand would keep the other attacks out.
        async with self._session(self._orders.deep_token) as session:
            await asyncio.sleep(self._random.uniform(0.0, DEEP_REST_SECONDS))
            await session.ask("POST", "/tasks", NESTED, parts=DEEP_PARTS)

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
        requests: list[tuple[str, str, object]] = []
        for task_id in self._orders.their_tasks:
            requests += [
                ("GET", f"/tasks/{task_id}", None),
                ("GET", f"/tasks/{task_id}/why", None),
                ("POST", f"/tasks/{task_id}/cancel", {}),
                ("POST", f"/tasks/{task_id}/retry", {}),
                ("POST", "/tasks", self._task() | {"dependsOn": [task_id]}),
            ]
        await self._try_in_vain(self._orders.project_token, requests)

    async def _meddle_with_calls(self) -> None:
        """Touch the calls and the stored responses of the other."""
        requests: list[tuple[str, str, object]] = []
        for call_id in self._orders.their_calls:
            requests += [
                ("GET", f"/calls/{call_id}", None),
                ("GET", f"/calls/{call_id}/why", None),
            ]
        for response_id in self._orders.their_responses:
            continued = {"model": MODEL, "input": "x", "previous_response_id": response_id}
            requests += [
                ("GET", f"{RESPONSES}/{response_id}", None),
                ("GET", f"{RESPONSES}/{response_id}/input_items", None),
                ("DELETE", f"{RESPONSES}/{response_id}", None),
                ("POST", RESPONSES, continued),
            ]
        await self._try_in_vain(self._orders.caller_token, requests)

    async def _trespass(self) -> None:
        """Go beyond a token that is bound to a project and an agent, then use it to its bounds."""
        own = self._orders
        task = self._task() | {"agentId": own.agent_id}
        scope = f"{self._own_scope()}/agent:{own.agent_id}"
        name = f"{self._random.random()}"
        held = {"id": name, "usd": "0", "tokens": 0}
        foreign: list[tuple[str, str, object]] = [
            ("POST", "/tasks", task | {"agentId": "m1"}),
            ("POST", "/tasks", task | {"projectId": own.greedy_project}),
            ("POST", "/tasks", task | {"scopes": [f"project:{own.greedy_project}/session:1"]}),
            ("POST", "/agents/m1/claim", {"capacity": 1, "waitSeconds": 0}),
            ("POST", "/budgets/create", {"scope": self._own_scope(), "limitUsd": "1"}),
            ("POST", "/budgets/reserve", held | {"scope": f"project:{own.greedy_project}"}),
            ("POST", f"/p/{own.greedy_project}{CHAT}", chat("x")),
            ("POST", f"/p/{own.own_project}/m1{CHAT}", chat("x")),
        ]
        await self._try_in_vain(own.both_token, foreign)
        async with self._session(own.both_token) as session:
            for _ in range(20):
                await session.ask("POST", "/tasks", self._task() | {"agentId": own.agent_id})
            await session.ask("POST", "/budgets/reserve", held | {"scope": scope})
            claim = {"usd": "1000000", "tokens": 10**12}
            await session.ask("POST", "/budgets/commit", {"id": name, "scope": scope} | claim)

    async def _try_in_vain(self, token: str, requests: Iterable[tuple[str, str, object]]) -> None:
        async with self._session(token) as session:
            for method, path, body in requests:
                status, _ = await session.ask(method, path, body)
                if status < 300:
                    sent = msgspec.json.encode(body)[:100].decode(errors="replace")
                    self._breach(f"{method} {path} was not refused, but {status}: {sent}")

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

    # Those on the gateway.

    async def _call(self) -> None:
        """Keep the provider busy."""
        async with self._session(self._orders.caller_token) as session:
            for _ in range(20):
                await session.ask("POST", CHAT, short_call(self._random))
            await session.ask("POST", CHAT, chat("x", user=Trouble.TOO_LARGE))

    async def _failing_call(self) -> None:
        """Have calls of one project fail in a row, all at once; no circuit may open for that."""
        async with self._session(self._orders.failing_token) as session:
            for _ in range(20):
                await asyncio.sleep(BURST_SECONDS - time.monotonic() % BURST_SECONDS)
                await session.ask("POST", CHAT, chat("x", user=Trouble.DOWN))

    async def _limited_call(self) -> None:
        """Have a large body wait for a model that its provider has limited, and leave."""
        async with self._session(self._orders.caller_token) as session:
            body = chat(LARGE_PROMPT, model=LIMITED_MODEL, user=Trouble.LIMITED)
            await session.ask("POST", CHAT, body)

    async def _cut_call(self) -> None:
        """Have the provider cut a stream."""
        token = self._orders.caller_token
        async with self._stream_of(token, Trouble.CUT) as reader, asyncio.timeout(ANSWER_SECONDS):
            await reader.read()

    async def _left_call(self) -> None:
        """Leave a stream after its first bytes."""
        token = self._orders.slow_token
        async with self._stream_of(token, Trouble.LONG) as reader, asyncio.timeout(ANSWER_SECONDS):
            await reader.read(1_000)

    async def _slow_call(self) -> None:
        """Take a stream more slowly than it comes."""
        async with self._stream_of(self._orders.slow_token, Trouble.LONG) as reader:
            async with asyncio.timeout(3 * ANSWER_SECONDS):
                while await reader.read(4_096):  # noqa: ASYNC110
                    await asyncio.sleep(0.5)

    @asynccontextmanager
    async def _stream_of(self, token: str, trouble: Trouble) -> AsyncIterator[asyncio.StreamReader]:
        """Begin a call whose answer is streamed, over a connection with small buffers."""
        reader, writer = await self.connect(receive_bytes=4_096)
        try:
            body = msgspec.json.encode(chat("x", user=trouble, stream=True))
            writer.write(self.head("POST", CHAT, token, len(body)) + body)
            yield reader
        finally:
            writer.transport.abort()

    async def _oversized_call(self) -> None:
        """Send a body of which nobody knows the length, until it is refused."""
        _, writer = await self.connect()
        try:
            head = self.head("POST", CHAT, self._orders.caller_token)
            writer.write(head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
            for _ in range(64):
                writer.writelines((b"%x\r\n" % len(NESTED), NESTED, b"\r\n"))
                async with asyncio.timeout(ANSWER_SECONDS):
                    await writer.drain()
                await asyncio.sleep(0.1)
            self._breach("a call of 64 MiB was not refused")
        finally:
            writer.transport.abort()

    async def _odd_models(self) -> None:
        calls = [chat("x", model=model) for model in UNPRINTABLE_MODELS]
        calls += [chat("x", model=model, user=Trouble.NO_MODEL) for model in SPEAKING_MODELS]
        named = [("POST", CHAT, call) for call in calls]
        await self._try_in_vain(self._orders.caller_token, named)

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

    async def connect(
        self, *, receive_bytes: int = 0
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a node; the system keeps so many bytes that nobody reads, or the usual."""
        connection = socket.socket()
        connection.setblocking(False)  # noqa: FBT003 - as it is named
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                address = ("127.0.0.1", self._random.choice(self._orders.ports))
                await asyncio.get_running_loop().sock_connect(connection, address)
                return await asyncio.open_connection(
                    sock=connection, limit=receive_bytes or READ_BYTES
                )
        except BaseException:
            connection.close()
            raise

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

    async def ask(
        self, method: str, path: str, body: object = None, *, parts: int = 1
    ) -> tuple[int, bytes]:
        """Send a request, its body in parts, and return the status and the body of its answer."""
        content = body if isinstance(body, bytes) else b""
        if body is not None and not isinstance(body, bytes):
            content = msgspec.json.encode(body)
        self._writer.write(self._attacker.head(method, path, self._token, len(content)))
        size = len(content) // parts
        for number in range(parts - 1):
            self._writer.write(content[number * size : (number + 1) * size])
            await asyncio.sleep(PART_SECONDS)
        self._writer.write(content[(parts - 1) * size :])
        async with asyncio.timeout(ANSWER_SECONDS):
            head, text = await read_answer(self._reader)
        status = int(head[9:12])
        self._attacker.heard(path, status, text)
        if b"connection: close" in head:
            raise EOFError
        return status, text


async def attack(open_files: int) -> None:
    """Attack until standard input is closed, with so many descriptors at most."""
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    attacker = Attacker(orders)
    running = asyncio.create_task(attacker.run(open_files=open_files))
    stopped = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
    await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        await running
    print(msgspec.json.encode(attacker.report()).decode(), flush=True)
    # Thousands of connections are not worth closing one by one.
    os._exit(0)


def main() -> None:
    os.nice(NICENESS)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    open_files = min(most, 8_192)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, most))
    asyncio.run(attack(open_files))


if __name__ == "__main__":
    main()
