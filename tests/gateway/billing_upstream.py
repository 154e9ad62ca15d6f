"""A provider that keeps a bill: what the books of a gateway are held against.

It serves on the loopback interface, speaks both protocols, whole and streamed, and knows several
keys. For each request that it accepts it writes down what it charges, and whether it told so: an
answer that was cut, or whose client had gone, is charged as well.

What it answers depends on the request alone. A prompt may say what to answer, in its latest words
of a user: `[[say TEXT]]`, `[[words 50]]`, `[[think 20]]`, `[[tool NAME {"a": 1}]]` (where the
request has that tool, and until it has a result), `[[pace 0.1]]` seconds between two events,
`[[delay 2]]` seconds before the head, `[[until NAME]]` a test adds that to `releases`,
`[[mark NAME]]` for the bill, `[[fail 429]]` for the first request with that mark. So every client
can ask for it. Other faults are scripted by key, for all keys, or by a function.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import httptools
import msgspec

from gateway.answer_shapes import (
    Answer,
    Json,
    Piece,
    Tokens,
    ToolCall,
    count_tokens,
    error_body,
    error_event,
    models_body,
    stream,
    whole_body,
    words_of,
)

Fault = Literal[
    "drop", "cut", "stall", "garbage", "no-usage", "wrong-type", "huge", "endless", "error-event"
]
"""`drop` ends the connection before the head, `cut` after it, `stall` sends no more and waits.

`wrong-type` calls the answer HTML, `huge` says its text many thousand times, `endless` never
stops, `error-event` fails in the middle of a stream.
"""
Protocol = Literal[
    "chat", "completions", "responses", "embeddings", "messages", "count_tokens", "other"
]

TEXT = "The answer is 42."
MODELS = ("claude-haiku-4-5", "claude-sonnet-5", "gpt-5", "gpt-5-mini", "text-embedding-3-small")
HUGE_REPEATS = 500_000
HUGE_STREAM_REPEATS = 20_000
ENDLESS_REPEATS = 1 << 40
KEPT_REQUESTS = 2_000
MOST_TOKENS = 1_000_000
RELEASE_SECONDS = 0.02
KEPT_RESPONSES = 1_000
CACHE_LEAST_TOKENS = 1_024
CACHE_STEP_TOKENS = 128
_PROTOCOLS: dict[str, Protocol] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/images/generations": "other",
}
_PROMPT_FIELDS = ("system", "instructions", "tools", "messages", "input", "prompt")
_MAX_TOKENS_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_DIRECTIVE = re.compile(
    r"\[\[(say|words|think|tool|pace|delay|until|mark|fail)\s+(.+?)\]\]", re.DOTALL
)
_GARBAGE = b"\x00\xffnot what you think {{{\n\n"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the provider does with one request."""

    text: str = TEXT
    thought: str = ""
    tool: ToolCall | None = None
    status: int = 200
    message: str = "scripted by a test"
    error: Json = {}
    """Fields of the error body, instead of the usual ones."""
    retry_after: str | None = None
    headers: dict[str, str] = {}
    """Further headers of the answer; what they say need not be true."""
    usage: Json | None = None
    """Told instead of what is charged."""
    fault: Fault | None = None
    after_events: int = 3
    """How much of a stream comes before `cut`, `stall`, `garbage` and `error-event`."""
    is_charged: bool = True
    """Whether an answer that did not come whole costs anything."""
    delay_seconds: float = 0.0
    until: str = ""
    """What has to be released before the head goes out."""
    pace_seconds: float = 0.0
    mark: str = ""
    fails_once: bool = False
    """Whether only the first request with this mark has this status."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it came; names of headers are in lower case."""

    number: int
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    fields: Json
    protocol: Protocol | None

    @property
    def path(self) -> str:
        """The path without the query."""
        return urlsplit(self.target).path

    @property
    def key(self) -> str:
        """The key that came along; empty without one."""
        bearer = self.headers.get("authorization", "").removeprefix("Bearer ")
        return self.headers.get("x-api-key") or bearer

    @property
    def model(self) -> str:
        """The model that is asked for."""
        return str(self.fields.get("model", ""))

    @property
    def is_stream(self) -> bool:
        """Whether the answer is to be streamed."""
        return bool(self.fields.get("stream")) and self.protocol not in {"embeddings", "other"}

    @property
    def max_tokens(self) -> int | None:
        """The longest answer that the client takes."""
        given = [self.fields[name] for name in _MAX_TOKENS_FIELDS if self.fields.get(name)]
        return int(given[0]) if given else None

    @property
    def is_sound(self) -> bool:
        """Whether it names a model, and limits that are numbers a provider takes."""
        given = [self.fields[name] for name in _MAX_TOKENS_FIELDS if name in self.fields]
        has_limits = all(type(one) is int and 0 < one <= MOST_TOKENS for one in given)
        return has_limits and isinstance(self.fields.get("model"), str)

    @property
    def tool_names(self) -> set[str]:
        """The names of the tools that may be called."""
        tools = [tool for tool in self.fields.get("tools") or () if isinstance(tool, dict)]
        return {str(tool.get("name") or tool.get("function", {}).get("name")) for tool in tools}

    @property
    def turns(self) -> list[Any]:
        """The conversation, oldest first."""
        given = self.fields.get("messages") or self.fields.get("input")
        given = given or self.fields.get("prompt") or []
        return given if isinstance(given, list) else [{"role": "user", "content": given}]

    def latest_words(self) -> tuple[str, bool]:
        """Return what the user said last, and whether a tool has answered since."""
        has_result = False
        for turn in reversed(self.turns):
            if not isinstance(turn, dict):
                continue
            content = turn.get("content")
            blocks = content if isinstance(content, list) else [{"text": content}]
            blocks = [block for block in blocks if isinstance(block, dict)]
            has_result |= turn.get("role") == "tool"
            has_result |= str(turn.get("type", "")).endswith("_call_output")
            has_result |= any(block.get("type") == "tool_result" for block in blocks)
            texts = [str(block["text"]) for block in blocks if block.get("text")]
            if turn.get("role") == "user" and texts:
                return "\n".join(texts), has_result
        return "", has_result


class Charge(msgspec.Struct, kw_only=True):
    """A line of the bill: one request that was accepted."""

    number: int
    key: str
    model: str
    protocol: Protocol
    is_stream: bool
    mark: str = ""
    input_tokens: int = 0
    """Everything that came in, cached or not."""
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    cache_write_1h_tokens: int = 0
    output_tokens: int = 0
    """With what was thought; of a stream that was left or cut, up to there."""
    reasoning_tokens: int = 0
    was_told: bool = False
    """Whether the final usage went out, as it is here, while the client was there."""
    end: Literal["open", "whole", "cut", "left"] = "open"

    @property
    def tokens(self) -> int:
        """Everything that is charged."""
        return self.input_tokens + self.output_tokens


class Account:
    """One key: what it is charged, what it shall answer next, and the headers of its answers."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.script: deque[Plan] = deque()
        """What its next requests get, before anything else that is scripted."""
        self.headers: dict[str, str] = {}
        """Headers of each of its answers, such as those of `unified_headers`."""
        self.max_running: int | None = None
        """Beyond this many requests at once, one more gets a 429."""
        self.accepted = 0
        self.running = 0
        self.most_running = 0
        self.statuses: Counter[int] = Counter()
        self.cached: set[bytes] = set()

    def fail(
        self,
        status: int,
        *,
        times: int = 1,
        retry_after: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Refuse the next requests of this key with a status."""
        plan = Plan(status=status, retry_after=retry_after, headers=headers or {})
        self.script.extend([plan] * times)


class BillingUpstream:
    """The provider; `url` is what an Anthropic client calls its base, `openai_url` an OpenAI one's.

    With `keys` it knows these alone; without, every key that comes has an account.
    """

    def __init__(self, *keys: str, models: tuple[str, ...] = MODELS) -> None:
        self.models = models
        self.list_faults: dict[str, int] = {}
        """The status with which keys are refused the list of models."""

        self.accounts = {key: Account(key) for key in keys}
        self.bill: list[Charge] = []
        self.script: deque[Plan] = deque()
        """What the next requests get, whatever their key."""
        self.decide: Callable[[Request], Plan | None] = lambda _: None
        """Decides what is not in a script; with None the prompt decides."""
        self.releases: set[str] = set()
        """What is waited for no longer; another thread may add to it."""
        self.finishes_generating = False
        """Whether a stream whose client has gone is charged to its end."""
        self.requests: deque[Request] = deque(maxlen=KEPT_REQUESTS)
        self.changed = asyncio.Event()
        """Set with each request and each end of one; whoever waits for it clears it."""
        self.port = 0
        self._knows_all = bool(keys)
        self._number = 0
        self._failed: set[tuple[str, int]] = set()
        self._refused: list[tuple[str, str]] = []
        self._responses: dict[tuple[str, str], Json] = {}
        """What is kept, by the key that made it and its id: no other key finds it."""

        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    @property
    def url(self) -> str:
        """The address, without a slash at its end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def openai_url(self) -> str:
        """The address with the version, as OpenAI's clients want it."""
        return f"{self.url}/v1"

    async def __aenter__(self) -> Self:
        """Serve on a free port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        """End every connection."""
        assert self._server is not None
        self._server.close()
        tasks = [connection.abort() for connection in list(self._connections)]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    def account(self, key: str) -> Account:
        """Return the account of a key, which must be known or is made."""
        if key not in self.accounts and not self._knows_all:
            self.accounts[key] = Account(key)
        return self.accounts[key]

    def charged(self, *, key: str | None = None, mark: str | None = None) -> list[Charge]:
        """Return the lines of the bill of a key, or with a mark."""
        return [
            charge
            for charge in self.bill
            if key in {None, charge.key} and mark in {None, charge.mark}
        ]

    def refused(self, *, mark: str) -> list[str]:
        """Return the keys whose requests with a mark were refused as their prompt asked."""
        return [key for failed, key in self._refused if failed == mark]

    def next_number(self) -> int:
        """Number a request; its answer has the number in its id."""
        self._number += 1
        return self._number

    def observe(self, connection: _Connection, *, is_open: bool) -> None:
        """Know a connection as long as it is open."""
        (self._connections.add if is_open else self._connections.discard)(connection)
        self.changed.set()

    async def answer(self, request: Request, connection: _Connection) -> None:
        """Answer one request, and charge it if it is accepted."""
        self.requests.append(request)
        self.changed.set()
        try:
            if request.protocol is None:
                self._answer_free(request, connection)
            elif self._knows_all and request.key not in self.accounts:
                error = error_body(request.protocol, 401, "this key is not known")
                connection.send_json(401, error)
            elif (earlier := request.fields.get("previous_response_id")) and (
                (request.key, earlier) not in self._responses
            ):
                error = error_body(request.protocol, 400, f"previous response {earlier} not found")
                connection.send_json(400, error)
            elif not request.is_sound:
                error = error_body(request.protocol, 400, "the body is no JSON, or names no model")
                connection.send_json(400, error)
            else:
                await self._answer_account(request, self.account(request.key), connection)
        finally:
            self.changed.set()

    def _answer_free(self, request: Request, connection: _Connection) -> None:
        path, method = request.path, request.method
        is_anthropic = "anthropic-version" in request.headers
        if method == "HEAD":
            connection.send_json(200, {})
        elif path == "/v1/models" and method == "GET":
            status = 401 if self._knows_all and request.key not in self.accounts else 200
            status = self.list_faults.get(request.key, status)
            body = models_body(self.models, is_anthropic=is_anthropic)
            error = error_body("messages" if is_anthropic else "chat", status, "no list for it")
            connection.send_json(status, body if status == 200 else error)
        elif path.startswith("/v1/responses/") and (
            found := self._responses.get((request.key, identity := path.rpartition("/")[2]))
        ):
            if method == "DELETE":
                del self._responses[request.key, identity]
                found = {"id": identity, "object": "response", "deleted": True}
            connection.send_json(200, found)
        else:
            error = error_body("messages" if is_anthropic else "chat", 404, f"no {method} {path}")
            connection.send_json(404, error)

    async def _answer_account(
        self, request: Request, account: Account, connection: _Connection
    ) -> None:
        plan = self._plan(request, account)
        if account.max_running is not None and account.running >= account.max_running:
            plan = Plan(status=429, retry_after="1", message="too many requests at once")
        account.running += 1
        account.most_running = max(account.most_running, account.running)
        try:
            if plan.delay_seconds:
                await connection.pause(plan.delay_seconds)
            while plan.until and plan.until not in self.releases and not connection.gone.is_set():
                await connection.pause(RELEASE_SECONDS)
            account.statuses[plan.status] += 1
            headers = {"request-id": f"req_{request.number}", **account.headers, **plan.headers}
            if plan.retry_after is not None:
                headers["retry-after"] = plan.retry_after
            assert request.protocol is not None
            if plan.status != 200:
                error = error_body(request.protocol, plan.status, plan.message)
                error["error"] |= plan.error
                connection.send_json(plan.status, error, headers)
            elif request.protocol == "count_tokens":
                count = {"input_tokens": _input_tokens(request)}
                connection.send_json(200, count, headers)
            else:
                await self._answer_charged(request, account, plan, headers, connection)
        finally:
            account.running -= 1

    def _plan(self, request: Request, account: Account) -> Plan:
        if request.protocol == "count_tokens":
            return Plan()
        if account.script:
            return account.script.popleft()
        if self.script:
            return self.script.popleft()
        plan = self.decide(request) or plan_of_prompt(request)
        if plan.fails_once:
            failed = (plan.mark, plan.status)
            if failed in self._failed:
                return msgspec.structs.replace(plan, status=200, retry_after=None)
            self._failed.add(failed)
            self._refused.append((plan.mark, account.key))
        return plan

    async def _answer_charged(
        self,
        request: Request,
        account: Account,
        plan: Plan,
        headers: dict[str, str],
        connection: _Connection,
    ) -> None:
        assert request.protocol is not None
        answer = _answer(request, account, plan)
        tokens = answer.tokens
        charge = Charge(
            number=request.number,
            key=account.key,
            model=request.model,
            protocol=request.protocol,
            is_stream=request.is_stream,
            mark=plan.mark,
            input_tokens=tokens.input,
            cached_tokens=tokens.cached,
            cache_write_tokens=tokens.cache_write,
            cache_write_1h_tokens=tokens.cache_write_1h,
        )
        if plan.is_charged or plan.fault not in {"drop", "cut", "stall", "garbage"}:
            account.accepted += 1
            self.bill.append(charge)
        headers["content-type"] = "text/event-stream" if request.is_stream else "application/json"
        if plan.fault == "wrong-type":
            headers["content-type"] = "text/html"
        try:
            if plan.fault == "drop":
                connection.abort()
                charge.end = "cut"
            elif request.is_stream:
                await self._send_stream(request, answer, plan, charge, headers, connection)
            else:
                await self._send_whole(request, answer, plan, charge, headers, connection)
        finally:
            if charge.end == "open":
                charge.end = "left"
            if charge.end == "left" and self.finishes_generating:
                charge.output_tokens = tokens.output
            charge.reasoning_tokens = min(tokens.reasoning, charge.output_tokens)

    async def _send_whole(
        self,
        request: Request,
        answer: Answer,
        plan: Plan,
        charge: Charge,
        headers: dict[str, str],
        connection: _Connection,
    ) -> None:
        assert request.protocol is not None
        # It was generated before the first byte of it went out, and is charged in full.
        charge.output_tokens = answer.tokens.output
        body = whole_body(request.protocol, answer, request.fields)
        if request.protocol == "responses" and request.fields.get("store", True):
            self._responses[request.key, body["id"]] = body
            while len(self._responses) > KEPT_RESPONSES:
                del self._responses[next(iter(self._responses))]
            if request.fields.get("background"):
                body = body | {"status": "queued", "usage": None}
        data = _GARBAGE if plan.fault == "garbage" else msgspec.json.encode(body)
        if plan.fault in {"cut", "stall", "endless"}:
            connection.send_head(200, headers, length=len(data))
            connection.write(data[: len(data) // 2])
            if plan.fault == "cut":
                connection.end_early()
                charge.end = "cut"
            else:
                await connection.gone.wait()
            return
        connection.send_head(200, headers, length=len(data))
        connection.write(data)
        await connection.flushed()
        if not connection.gone.is_set():
            charge.was_told = answer.has_usage and plan.usage is None and plan.fault != "garbage"
            charge.end = "whole"

    async def _send_stream(
        self,
        request: Request,
        answer: Answer,
        plan: Plan,
        charge: Charge,
        headers: dict[str, str],
        connection: _Connection,
    ) -> None:
        assert request.protocol is not None
        connection.send_head(200, headers, length=None)
        pieces: Iterator[Piece] = stream(request.protocol, answer, request.fields)
        fault = plan.fault if plan.fault in {"cut", "stall", "garbage", "error-event"} else None
        for index, piece in enumerate(pieces):
            if connection.gone.is_set():
                return
            if fault is not None and index >= plan.after_events:
                break
            connection.write_chunk(piece.data)
            charge.output_tokens = piece.output_tokens
            charge.was_told |= piece.tells and plan.usage is None
            if plan.pace_seconds:
                await connection.pause(plan.pace_seconds)
            else:
                await connection.flushed()
        else:
            connection.write_chunk(b"")
            await connection.flushed()
            charge.end = "left" if connection.gone.is_set() else "whole"
            return
        charge.end = "cut"
        if fault == "stall":
            await connection.gone.wait()
            charge.end = "left"
        elif fault == "cut":
            await connection.flushed()
            connection.end_early()
        else:
            is_garbage = fault == "garbage"
            data = _GARBAGE if is_garbage else error_event(request.protocol, plan.message)
            connection.write_chunk(data)
            connection.write_chunk(b"")


@contextmanager
def upstream_in_thread(*keys: str) -> Iterator[BillingUpstream]:
    """Run a provider on a loop of its own, for tests that are not asynchronous."""
    upstream = BillingUpstream(*keys)
    loop = asyncio.new_event_loop()
    started = threading.Event()
    over = asyncio.Event()

    async def serve() -> None:
        async with upstream:
            started.set()
            await over.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name="billing upstream", daemon=True)
    thread.start()
    try:
        assert started.wait(10)
        yield upstream
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)


def plan_of_prompt(request: Request) -> Plan:
    """Read what a prompt asks for."""
    said, has_result = request.latest_words()
    given: dict[str, Any] = {}
    for name, value in _DIRECTIVE.findall(said):
        if name == "say":
            given["text"] = value
        elif name == "words":
            given["text"] = "".join(f"word{index} " for index in range(int(value)))
        elif name == "think":
            given["thought"] = "".join(f"thought{index} " for index in range(int(value)))
        elif name == "pace":
            given["pace_seconds"] = float(value)
        elif name == "delay":
            given["delay_seconds"] = float(value)
        elif name in {"mark", "until"}:
            given[name] = value
        elif name == "fail":
            given |= {"status": int(value), "fails_once": True}
            given["retry_after"] = "1" if value == "429" else None
        elif not has_result:
            tool, _, arguments = value.partition(" ")
            if tool in request.tool_names:
                # Some clients quote what they were given.
                plain = arguments.replace('\\"', '"') or "{}"
                given["tool"] = ToolCall(tool, msgspec.json.decode(plain, type=dict[str, Any]))
                given["text"] = ""
    return Plan(**given)


def unified_headers(
    *,
    five_hours: float,
    resets_at: float,
    week: float = 0.0,
    week_resets_at: float | None = None,
    status: str = "allowed",
) -> dict[str, str]:
    """Return the headers of an answer on a subscription key; use is between 0 and 1."""
    week_reset = resets_at if week_resets_at is None else week_resets_at
    name = "anthropic-ratelimit-unified"
    return {
        f"{name}-status": status,
        f"{name}-reset": f"{resets_at:.0f}",
        f"{name}-5h-utilization": f"{five_hours:.2f}",
        f"{name}-5h-reset": f"{resets_at:.0f}",
        f"{name}-5h-status": "rejected" if five_hours >= 1 else "allowed",
        f"{name}-7d-utilization": f"{week:.2f}",
        f"{name}-7d-reset": f"{week_reset:.0f}",
        f"{name}-7d-status": "rejected" if week >= 1 else "allowed",
    }


def openai_headers(
    *, requests: int, remaining_requests: int, tokens: int, remaining_tokens: int, reset: str = "1s"
) -> dict[str, str]:
    """Return the rate headers of an answer of OpenAI's."""
    return {
        "x-ratelimit-limit-requests": str(requests),
        "x-ratelimit-remaining-requests": str(remaining_requests),
        "x-ratelimit-reset-requests": reset,
        "x-ratelimit-limit-tokens": str(tokens),
        "x-ratelimit-remaining-tokens": str(remaining_tokens),
        "x-ratelimit-reset-tokens": reset,
    }


def _input_tokens(request: Request) -> int:
    return sum(count_tokens(request.fields.get(name)) for name in _PROMPT_FIELDS)


def _answer(request: Request, account: Account, plan: Plan) -> Answer:
    text, tool = plan.text, plan.tool
    thought = words_of(plan.thought)
    words = words_of(text)
    arguments = words_of(msgspec.json.encode(tool.arguments).decode()) if tool else []
    repeats = {"huge": HUGE_STREAM_REPEATS, "endless": ENDLESS_REPEATS}.get(plan.fault or "", 1)
    most = request.max_tokens
    is_cut_short = repeats == 1 and most is not None
    is_cut_short &= len(thought) + len(words) + len(arguments) > (most or 0)
    if is_cut_short:
        assert most is not None
        thought = thought[:most]
        words = words[: most - len(thought)]
        tool, arguments = None, []
    if not request.is_stream and repeats > 1:
        words = words * HUGE_REPEATS
        repeats = 1
    if request.protocol == "embeddings":
        thought, words, arguments = [], [], []
    output = len(thought) + repeats * len(words) + len(arguments)
    return Answer(
        number=request.number,
        model=request.model,
        text="".join(words),
        thought="".join(thought),
        tool=tool,
        is_cut_short=is_cut_short,
        tokens=_tokens(request, account, output=output, reasoning=len(thought)),
        usage=plan.usage,
        has_usage=plan.fault != "no-usage",
        repeats=repeats,
    )


def _tokens(request: Request, account: Account, *, output: int, reasoning: int) -> Tokens:
    """Count what comes in, and how much of it the cache of this key has.

    Anthropic caches what a client marks, here the system prompt and the tools, and charges the
    writing; OpenAI caches long beginnings of its own accord.
    """
    fields = request.fields
    beginning = [fields.get(name) for name in ("system", "instructions", "tools")]
    if not any(beginning):
        beginning = request.turns[:1]
    prefix = msgspec.json.encode([request.model, *beginning])
    length = sum(map(count_tokens, beginning))
    cached = write = write_1h = 0
    if request.protocol == "messages":
        if b'"cache_control"' in request.body:
            if prefix in account.cached:
                cached = length
            elif b'"1h"' in request.body:
                write_1h = length
            else:
                write = length
            account.cached.add(prefix)
    elif length >= CACHE_LEAST_TOKENS:
        cached = length // CACHE_STEP_TOKENS * CACHE_STEP_TOKENS if prefix in account.cached else 0
        account.cached.add(prefix)
    return Tokens(
        input=_input_tokens(request),
        cached=cached,
        cache_write=write,
        cache_write_1h=write_1h,
        output=output,
        reasoning=reasoning,
    )


class _Connection(asyncio.Protocol):
    """Reads the requests of one connection, answers them in turn, and notices when it is left."""

    def __init__(self, upstream: BillingUpstream) -> None:
        self.gone = asyncio.Event()
        self._upstream = upstream
        self._parser = httptools.HttpRequestParser(self)
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._writable = asyncio.Event()
        self._writable.set()
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._upstream.observe(self, is_open=True)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def connection_lost(self, _: Exception | None) -> None:
        self.gone.set()
        self._writable.set()
        self._upstream.observe(self, is_open=False)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.send_json(426, {"error": {"message": "no WebSockets here"}})
        except httptools.HttpParserError:
            self._transport.abort()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def on_message_begin(self) -> None:
        self._target, self._headers, self._body = b"", {}, bytearray()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if "upgrade" in self._headers:
            return
        body = bytes(self._body)
        try:
            fields = msgspec.json.decode(body) if body else {}
        except (msgspec.MsgspecError, RecursionError):
            fields = {}
        method = self._parser.get_method().decode()
        target = self._target.decode("latin-1")
        protocol = _PROTOCOLS.get(urlsplit(target).path) if method == "POST" else None
        self._requests.put_nowait(
            Request(
                number=self._upstream.next_number(),
                method=method,
                target=target,
                headers=self._headers,
                body=body,
                fields=fields if isinstance(fields, dict) else {},
                protocol=protocol,
            )
        )

    async def _serve(self) -> None:
        leaving = asyncio.ensure_future(self.gone.wait())
        try:
            while not self.gone.is_set():
                coming = asyncio.ensure_future(self._requests.get())
                await asyncio.wait({coming, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    return
                await self._upstream.answer(coming.result(), self)
        finally:
            leaving.cancel()
            self._transport.close()

    def abort(self) -> asyncio.Task[None]:
        """End the connection at once, and return what it was busy with."""
        self._transport.abort()
        self.gone.set()
        return self._task

    def end_early(self) -> None:
        """Send what is written, and end the connection before the answer is whole."""
        self._transport.close()
        self.gone.set()

    def send_head(self, status: int, headers: dict[str, str], *, length: int | None) -> None:
        """Write the head of an answer; without a length it comes in chunks."""
        size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        lines = [f"HTTP/1.1 {status} Status", size]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.write("\r\n".join((*lines, "\r\n")).encode("latin-1"))

    def send_json(self, status: int, body: Json, headers: dict[str, str] | None = None) -> None:
        """Write a whole answer."""
        data = msgspec.json.encode(body)
        given = {"content-type": "application/json", **(headers or {})}
        self.send_head(status, given, length=len(data))
        # Nothing follows the head of an answer to HEAD.
        if self._parser.get_method() != b"HEAD":
            self.write(data)

    def write(self, data: bytes) -> None:
        """Write bytes as they are."""
        if not self.gone.is_set():
            self._transport.write(data)

    def write_chunk(self, data: bytes) -> None:
        """Write a chunk; an empty one is the last."""
        self.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def flushed(self) -> None:
        """Wait while the client reads too slowly, and let it go if it goes."""
        await self._writable.wait()
        await asyncio.sleep(0)

    async def pause(self, seconds: float) -> None:
        """Wait, or until the client is gone."""
        try:
            async with asyncio.timeout(seconds):
                await self.gone.wait()
        except TimeoutError:
            pass
