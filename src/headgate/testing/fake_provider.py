"""A provider of keys to try slots with, without a key: it serves on the loopback interface only.

It speaks as z.ai does, and at other addresses as Anthropic and OpenAI do, and plainly. A request
opens the window of its key; what else it shall do is scripted, in a program with `next`, or over
HTTP with `POST /fake/next`.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from headgate.errors import InvalidSettingError

# What a fake provider does instead of answering well: errors, delays, nonsense, silence.

MAX_STEPS = 1_000
MAX_LATENCY_MS = 3_600_000
HUGE_BODY_BYTES = 256 << 10

FakeKind = Literal[
    "ok", "401", "403", "404", "408", "429", "500", "502", "503", "504", "529",
    "exhausted", "weekly", "garbage", "wrong-shape", "huge", "redirect", "drop", "timeout",
]  # fmt: skip
"""`timeout` keeps a request waiting for an hour, `drop` closes the connection unanswered."""


FakeUse = Literal["quota", "request"]
"""What a request does with a quota: it reads it, or it uses it."""
FakeUses = Literal["any", "quota", "request"]


class FakeStep(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """The response to the next requests, `times` of them.

    `on` says which requests it is for: those that read the quota, those that use it, or any.
    """

    kind: FakeKind
    retry_after: Annotated[str, Meta(max_length=100)] | int | None = None
    times: Annotated[int, Meta(ge=1, le=MAX_STEPS)] = 1
    latency_ms: Annotated[int, Meta(ge=0, le=MAX_LATENCY_MS)] = 0
    message: Annotated[str, Meta(max_length=10_000)] | None = None
    on: FakeUses = "any"


class FakeScript:
    """Steps in their order; a request takes the first that is for it."""

    def __init__(self) -> None:
        self._steps: deque[FakeStep] = deque()

    @property
    def steps(self) -> tuple[FakeStep, ...]:
        """What is still to come."""
        return tuple(self._steps)

    def add(self, step: FakeStep) -> None:
        """Add a step, `times` over."""
        if len(self._steps) + step.times > MAX_STEPS:
            raise InvalidSettingError("times", f"no more than {MAX_STEPS} responses can wait")
        self._steps.extend([msgspec.structs.replace(step, times=1)] * step.times)

    def clear(self) -> None:
        """Forget what is still to come."""
        self._steps.clear()

    def take(self, on: FakeUse) -> FakeStep | None:
        """Take the step of a request; None if there is none, and it is answered well."""
        for step in self._steps:
            if step.on in ("any", on):
                self._steps.remove(step)
                return step
        return None


# The quota window of one key of a fake provider: cold, opened by use, used up, over.
#
# It is cold until a request opens it. From then on it has a reset time, which no further request
# moves; when that has come, it is cold again.

FULL_PERCENT = 100.0


class FakeWindow:
    """One window after the other, by the clock that is given."""

    def __init__(
        self,
        *,
        seconds: float,
        clock: Callable[[], float],
        first_percent: float = 0.0,
        percent_per_request: float = 1.0,
    ) -> None:
        self.seconds = seconds
        self.first_percent = first_percent
        self.percent_per_request = percent_per_request
        self.opened = 0
        self._clock = clock
        self._resets_at: float | None = None
        self._percent = 0.0

    @property
    def resets_at(self) -> float | None:
        """The Unix second at which the window that is open ends; None if none is."""
        if self._resets_at is not None and self._clock() >= self._resets_at:
            self.end()
        return self._resets_at

    @property
    def percent(self) -> float:
        """How much of the window is used; 0 while it is cold."""
        return self._percent if self.resets_at is not None else 0.0

    @property
    def is_used_up(self) -> bool:
        """Whether a further request would be refused."""
        return self.percent >= FULL_PERCENT

    def use(self) -> None:
        """Take one request, which opens the window if it is cold."""
        self.begin()
        self._percent = min(self._percent + self.percent_per_request, FULL_PERCENT)

    def begin(self) -> None:
        """Open the window, unless it is open."""
        if self.resets_at is None:
            self.opened += 1
            self._resets_at = self._clock() + self.seconds
            self._percent = self.first_percent

    def end(self) -> None:
        """Close the window; the key is cold."""
        self._resets_at = None

    def set_percent(self, percent: float) -> None:
        """Say how much of the window is used, which opens it."""
        self.begin()
        self._percent = percent


# How a fake provider words its responses: as z.ai does, as Anthropic and OpenAI do, and plainly.

Dialect = Literal["zai", "anthropic", "openai", "responses", "plain"]
"""`responses` is OpenAI's second protocol, with the headers and refusals of the first."""

TOKENS_PER_WINDOW = 1_000_000
WEEK_SECONDS = 7 * 86_400.0
MONTH_SECONDS = 30 * 86_400.0
_BEIJING = timezone(timedelta(hours=8))
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
_CODES = {"exhausted": 1316, "weekly": 1310}
_TOO_MANY = 429


class FakeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One response over HTTP."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = {}


def json_response(
    document: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> FakeResponse:
    """Return a response whose body is JSON."""
    return FakeResponse(status=status, body=msgspec.json.encode(document), headers=headers or {})


def quota_response(
    window: FakeWindow, *, started_at: float, now: float, has_credits: bool
) -> FakeResponse:
    """Return what z.ai says of a key: a row that drives wakes, and one that does not."""
    limits = _credit_rows(window, started_at, now) if has_credits else _rows(window, started_at)
    data = {"level": "pro", "limits": limits}
    return json_response(
        {"code": 200, "msg": "Operation successful", "success": True, "data": data}
    )


def plain_response(window: FakeWindow) -> FakeResponse:
    """Return the quota as an address of one's own might tell it."""
    resets_at = window.resets_at
    told = None if resets_at is None else datetime.fromtimestamp(resets_at, UTC).isoformat()
    quota = {"percent": window.percent, "used": _used(window), "limit": TOKENS_PER_WINDOW}
    return json_response({"quota": {**quota, "resetsAt": told}})


def completion_response(window: FakeWindow, dialect: Dialect, *, now: float) -> FakeResponse:
    """Return the response to a request that was carried out."""
    headers = limit_headers(window, dialect, now=now)
    if dialect == "anthropic":
        content = [{"type": "text", "text": "Hi"}]
        usage = {"input_tokens": 8, "output_tokens": 1}
        message = {"type": "message", "role": "assistant", "content": content, "usage": usage}
        return json_response(message, headers=headers)
    if dialect == "responses":
        return json_response(_response("completed", [_said("completed")]), headers=headers)
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}}
    usage = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
    return json_response({"choices": [choice], "usage": usage}, headers=headers)


def stream_response(window: FakeWindow, dialect: Dialect, *, now: float) -> FakeResponse:
    """Return the same response as a stream of events."""
    events: list[dict[str, object]]
    if dialect == "anthropic":
        start = {"type": "message", "id": "msg_fake", "role": "assistant", "content": []}
        usage = {"input_tokens": 8, "output_tokens": 1}
        events = [
            {"type": "message_start", "message": {**start, "model": "fake", "usage": usage}},
            {"type": "content_block_start", "index": 0, "content_block": _text_block("")},
            {"type": "content_block_delta", "index": 0, "delta": _text_block("Hi", "text_delta")},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
            {"type": "message_stop"},
        ]
        lines = _named_events(events)
    elif dialect == "responses":
        lines = _named_events(_response_events())
    else:
        chunk = {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "model": "fake"}
        said = {"index": 0, "delta": {"role": "assistant", "content": "Hi"}}
        last = {"index": 0, "delta": {}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
        events = [
            {**chunk, "choices": [said]},
            {**chunk, "choices": [last]},
            {**chunk, "choices": [], "usage": usage},
        ]
        lines = [*(f"data: {_json(one)}\n\n" for one in events), "data: [DONE]\n\n"]
    headers = {**limit_headers(window, dialect, now=now), "content-type": "text/event-stream"}
    return FakeResponse(body="".join(lines).encode(), headers=headers)


def _named_events(events: Sequence[Mapping[str, object]]) -> list[str]:
    return [f"event: {one['type']}\ndata: {_json(one)}\n\n" for one in events]


def _response(status: str, output: list[dict[str, object]]) -> dict[str, object]:
    """Return a response in OpenAI's second protocol; only a whole one tells its usage."""
    usage = {
        "input_tokens": 8,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 9,
    }
    return {
        "id": "resp_fake",
        "object": "response",
        "created_at": 0,
        "model": "fake",
        "status": status,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage if output else None,
    }


def _said(status: str) -> dict[str, object]:
    content = [_output_text("Hi")] if status == "completed" else []
    message = {"type": "message", "id": "msg_fake", "role": "assistant"}
    return {**message, "status": status, "content": content}


def _output_text(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": []}


def _response_events() -> list[dict[str, object]]:
    begun, place = _response("in_progress", []), {"output_index": 0}
    part = {**place, "item_id": "msg_fake", "content_index": 0}
    events: list[dict[str, object]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", **place, "item": _said("in_progress")},
        {"type": "response.content_part.added", **part, "part": _output_text("")},
        {"type": "response.output_text.delta", **part, "delta": "Hi"},
        {"type": "response.output_text.done", **part, "text": "Hi"},
        {"type": "response.content_part.done", **part, "part": _output_text("Hi")},
        {"type": "response.output_item.done", **place, "item": _said("completed")},
        {"type": "response.completed", "response": _response("completed", [_said("completed")])},
    ]
    return [{**one, "sequence_number": number} for number, one in enumerate(events)]


def _text_block(text: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": text}


def _json(document: object) -> str:
    return msgspec.json.encode(document).decode()


def used_up_response(
    window: FakeWindow,
    dialect: Dialect,
    *,
    now: float,
    is_weekly: bool = False,
    message: str | None = None,
) -> FakeResponse:
    """Return the refusal of a key whose window is used up."""
    resets_at = now + WEEK_SECONDS if is_weekly else window.resets_at or now + window.seconds
    retry_after = {"retry-after": str(max(round(resets_at - now), 0))}
    if dialect in ("openai", "responses"):
        error = {"code": "insufficient_quota", "message": message or "You exceeded your quota."}
        return json_response({"error": error}, status=_TOO_MANY)
    if dialect == "anthropic":
        error = {"type": "rate_limit_error", "message": message or "This plan's limit is reached."}
        headers = {**_unified(resets_at, FULL_PERCENT, "rejected"), **retry_after}
        return json_response({"type": "error", "error": error}, status=_TOO_MANY, headers=headers)
    until = datetime.fromtimestamp(resets_at, _BEIJING).strftime(_TIME_FORMAT)
    text = message or f"Usage limit reached. Your limit will reset at {until}"
    code = _CODES["weekly" if is_weekly else "exhausted"]
    return json_response({"error": {"code": str(code), "message": text}}, status=_TOO_MANY)


def limit_headers(window: FakeWindow, dialect: Dialect, *, now: float) -> dict[str, str]:
    """Return the rate-limit headers of a dialect; some have none."""
    left = str(TOKENS_PER_WINDOW - _used(window))
    resets_at = window.resets_at or now
    if dialect == "anthropic":
        return {
            **_unified(resets_at, window.percent, "allowed"),
            "anthropic-ratelimit-tokens-limit": str(TOKENS_PER_WINDOW),
            "anthropic-ratelimit-tokens-remaining": left,
            "anthropic-ratelimit-tokens-reset": _rfc3339(now + 60),
        }
    if dialect in ("openai", "responses"):
        seconds = max(round(resets_at - now), 0)
        return {
            "x-ratelimit-limit-tokens": str(TOKENS_PER_WINDOW),
            "x-ratelimit-remaining-tokens": left,
            "x-ratelimit-reset-tokens": f"{seconds // 60}m{seconds % 60}s",
        }
    return {}


def error_response(
    status: int, message: str, headers: dict[str, str] | None = None
) -> FakeResponse:
    """Return a refusal, in the shape that z.ai gives it."""
    return json_response(
        {"code": status, "msg": message, "success": False}, status=status, headers=headers
    )


def scripted_response(
    step: FakeStep, window: FakeWindow, dialect: Dialect, *, now: float
) -> FakeResponse:
    """Return the response of a step."""
    message = step.message or f"scripted {step.kind}"
    match step.kind:
        case "exhausted" | "weekly":
            is_weekly = step.kind == "weekly"
            return used_up_response(
                window, dialect, now=now, is_weekly=is_weekly, message=step.message
            )
        case "garbage" | "wrong-shape" | "huge":
            return _nonsense(step.kind, message)
        case "redirect":
            location = f"https://login.example.com/{message.replace(' ', '-')}?key=secret"
            return FakeResponse(status=302, headers={"location": location})
        case _:
            asked = step.retry_after
            headers = {} if asked is None else {"retry-after": str(asked)}
            return error_response(int(step.kind), message, headers)


def _nonsense(kind: Literal["garbage", "wrong-shape", "huge"], message: str) -> FakeResponse:
    if kind == "garbage":
        return FakeResponse(body=f"<html>{message}</html>".encode())
    if kind == "huge":
        return json_response({"data": message + "x" * HUGE_BODY_BYTES})
    return json_response({"code": 200, "success": True, "data": {"limits": message}})


def _rows(window: FakeWindow, started_at: float) -> list[dict[str, object]]:
    month = {
        "type": "TIME_LIMIT",
        "unit": 5,
        "number": 1,
        "usage": 1000,
        "currentValue": 10,
        "remaining": 990,
        "percentage": 1,
        "nextResetTime": _ms(started_at + MONTH_SECONDS),
        "usageDetails": [{"modelCode": "search-prime", "usage": 10}],
    }
    return [month, _window_row("TOKENS_LIMIT", window)]


def _credit_rows(window: FakeWindow, started_at: float, now: float) -> list[dict[str, object]]:
    weeks = int((now - started_at) // WEEK_SECONDS) + 1
    week = {
        "type": "CREDIT_LIMIT",
        "unit": 6,
        "number": 1,
        "usage": 140_000,
        "currentValue": 1_400 * window.opened,
        "percentage": min(window.opened, FULL_PERCENT),
        "nextResetTime": _ms(started_at + weeks * WEEK_SECONDS),
    }
    return [_window_row("CREDIT_LIMIT", window), week]


def _window_row(row_type: str, window: FakeWindow) -> dict[str, object]:
    number = max(round(window.seconds / 3_600), 1)
    row: dict[str, object] = {"type": row_type, "unit": 3, "number": number}
    row["percentage"] = round(window.percent, 2)
    resets_at = window.resets_at
    return row if resets_at is None else {**row, "nextResetTime": _ms(resets_at)}


def _unified(resets_at: float, percent: float, status: str) -> dict[str, str]:
    prefix = "anthropic-ratelimit-unified"
    return {
        f"{prefix}-status": status,
        f"{prefix}-reset": str(round(resets_at)),
        f"{prefix}-representative-claim": "five_hour",
        f"{prefix}-5h-status": status,
        f"{prefix}-5h-utilization": f"{percent / FULL_PERCENT:.4f}",
        f"{prefix}-5h-reset": str(round(resets_at)),
    }


def _used(window: FakeWindow) -> int:
    return round(TOKENS_PER_WINDOW * window.percent / FULL_PERCENT)


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _ms(seconds: float) -> int:
    return round(seconds * 1_000)


LOOPBACK = "127.0.0.1"
WINDOW_MINUTES = 300.0
MAX_KEYS = 1_000
MAX_SEEN = 1_000
DRAIN_SECONDS = 0.2

QUOTA_PATHS: dict[str, Dialect] = {"/api/monitor/usage/quota/limit": "zai", "/quota": "plain"}
REQUEST_PATHS: dict[str, Dialect] = {
    "/api/coding/paas/v4/chat/completions": "zai",
    "/v1/messages": "anthropic",
    "/v1/chat/completions": "openai",
    "/v1/responses": "responses",
}
COUNT_PATH = "/v1/messages/count_tokens"


def _wall_clock() -> float:
    return time.time()


class FakeRequest(NamedTuple):
    """A request as it came; the names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def key(self) -> str:
        """The key that it brought; empty if none."""
        return self.headers.get("x-api-key") or self.headers.get("authorization", "").removeprefix(
            "Bearer "
        )

    @property
    def is_stream(self) -> bool:
        """Whether its response is to come as a stream of events."""
        try:
            fields = msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False
        return isinstance(fields, dict) and fields.get("stream") is True


class WindowChange(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """What `POST /fake/window` asks for: all windows open or cold, and how much is used."""

    is_open: bool | None = msgspec.field(default=None, name="open")
    percent: Annotated[float, msgspec.Meta(ge=0, le=1_000)] | None = None


class FakeProvider:
    """Serves until it is stopped. Without a `key` it takes any; every key has its own window."""

    def __init__(
        self,
        *,
        port: int = 0,
        window_minutes: float = WINDOW_MINUTES,
        percent: float = 0.0,
        percent_per_request: float = 1.0,
        latency_ms: int = 0,
        is_warm: bool = False,
        has_credits: bool = False,
        key: str | None = None,
        clock: Callable[[], float] = _wall_clock,
    ) -> None:
        self.port = port
        self.seen: deque[FakeRequest] = deque(maxlen=MAX_SEEN)
        self.latency_ms = latency_ms
        self._script = FakeScript()
        self._windows: dict[str, FakeWindow] = {}
        self._new_window = partial(
            FakeWindow,
            seconds=60.0 * window_minutes,
            clock=clock,
            first_percent=percent,
            percent_per_request=percent_per_request,
        )
        self._is_warm = is_warm
        self._has_credits = has_credits
        self._key = key
        self._clock = clock
        self._started_at = clock()
        self._serving: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where it serves."""
        return f"http://{LOOPBACK}:{self.port}"

    async def start(self) -> None:
        """Serve; with port 0, on one that is free."""
        from headgate.api.http.server import serve  # noqa: PLC0415 - what it needs is an extra

        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve(
                self._serve,
                host=LOOPBACK,
                port=self.port,
                on_ready=lambda _, port: ready.set_result(port),
                drain_seconds=DRAIN_SECONDS,
            )
        )
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        self.port = ready.result()
        self._serving = serving

    async def stop(self) -> None:
        """End; requests that wait are left without a response."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.cancel()
            await asyncio.wait((serving,))

    async def __aenter__(self) -> FakeProvider:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def next(
        self,
        kind: FakeKind,
        *,
        retry_after: str | int | None = None,
        times: int = 1,
        latency_ms: int = 0,
        message: str | None = None,
        on: FakeUses = "any",
    ) -> None:
        """Say how the next requests are answered."""
        self._script.add(
            FakeStep(
                kind=kind,
                retry_after=retry_after,
                times=times,
                latency_ms=latency_ms,
                message=message,
                on=on,
            )
        )

    def window(self, key: str) -> FakeWindow:
        """Return the window of a key, which is made when it is first asked for."""
        if key not in self._windows:
            self._windows[key] = self._new_window()
            if self._is_warm:
                self._windows[key].begin()
        return self._windows[key]

    def requests(self, on: FakeUse) -> list[FakeRequest]:
        """Return the last requests that read the quota, or those that used it."""
        paths = QUOTA_PATHS if on == "quota" else REQUEST_PATHS
        return [request for request in self.seen if request.path in paths]

    def respond(self, request: FakeRequest) -> tuple[FakeResponse | None, float]:
        """Return the response to a request, and the seconds that it takes; None drops it."""
        if request.path.startswith("/fake/"):
            return self._controlled(request), 0.0
        self.seen.append(request)
        on, dialect = _endpoint_of(request)
        if request.path == COUNT_PATH and request.method == "POST" and self._takes(request.key):
            # To count opens no window and uses nothing.
            return json_response({"input_tokens": 8}), self.latency_ms / 1_000
        if on is None:
            return error_response(404, f"there is nothing at {request.method} {request.path}"), 0.0
        if not self._takes(request.key):
            return error_response(401, "token expired or incorrect"), self.latency_ms / 1_000
        return self._response_to(request, on, dialect)

    def _takes(self, key: str) -> bool:
        if self._key is not None:
            return hmac.compare_digest(key.encode(), self._key.encode())
        return bool(key) and (key in self._windows or len(self._windows) < MAX_KEYS)

    def _response_to(
        self, request: FakeRequest, on: FakeUse, dialect: Dialect
    ) -> tuple[FakeResponse | None, float]:
        window = self.window(request.key)
        step = self._script.take(on) or FakeStep(kind="ok", latency_ms=self.latency_ms)
        seconds = step.latency_ms / 1_000
        match step.kind:
            case "ok":
                return self._good(window, on, dialect, is_stream=request.is_stream), seconds
            case "drop":
                return None, seconds
            case "timeout":
                return None, MAX_LATENCY_MS / 1_000
            case _:
                now = self._clock()
                return scripted_response(step, window, dialect, now=now), seconds

    def _good(
        self, window: FakeWindow, on: FakeUse, dialect: Dialect, *, is_stream: bool
    ) -> FakeResponse:
        now = self._clock()
        if on == "quota":
            if dialect == "plain":
                return plain_response(window)
            return quota_response(
                window, started_at=self._started_at, now=now, has_credits=self._has_credits
            )
        if window.is_used_up:
            return used_up_response(window, dialect, now=now)
        window.use()
        make = stream_response if is_stream else completion_response
        return make(window, dialect, now=now)

    def _controlled(self, request: FakeRequest) -> FakeResponse:
        try:
            match request.method, request.path:
                case "POST", "/fake/next":
                    self._script.add(msgspec.json.decode(request.body, type=FakeStep))
                case "POST", "/fake/window":
                    self._change(msgspec.json.decode(request.body, type=WindowChange))
                case "DELETE", "/fake/next":
                    self._script.clear()
                case "GET", "/fake/state":
                    pass
                case _:
                    known = "POST or DELETE /fake/next, POST /fake/window, GET /fake/state"
                    return error_response(404, f"there is {known}")
        except (msgspec.MsgspecError, InvalidSettingError, UnicodeDecodeError) as error:
            return error_response(400, str(error))
        return json_response(self._state())

    def _change(self, change: WindowChange) -> None:
        for window in self._windows.values():
            if change.is_open is False:
                window.end()
            elif change.is_open:
                window.begin()
            if change.percent is not None:
                window.set_percent(change.percent)

    def _state(self) -> dict[str, object]:
        windows = [
            {"percent": one.percent, "resetsAt": one.resets_at, "opened": one.opened}
            for one in self._windows.values()
        ]
        return {
            "windows": windows,
            "quotaRequests": len(self.requests("quota")),
            "modelRequests": len(self.requests("request")),
            "next": self._script.steps,
        }

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        message = await receive()
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        request = FakeRequest(scope["method"], scope["path"], headers, message.get("body", b""))
        response, seconds = self.respond(request)
        if seconds:
            await asyncio.sleep(seconds)
        if response is None:
            return
        given = {
            "content-type": "application/json",
            "content-length": str(len(response.body)),
            **response.headers,
        }
        head = [(name.encode(), value.encode()) for name, value in given.items()]
        await send({"type": "http.response.start", "status": response.status, "headers": head})
        await send({"type": "http.response.body", "body": response.body})


def _endpoint_of(request: FakeRequest) -> tuple[FakeUse | None, Dialect]:
    if request.method == "GET" and request.path in QUOTA_PATHS:
        return "quota", QUOTA_PATHS[request.path]
    if request.method == "POST" and request.path in REQUEST_PATHS:
        return "request", REQUEST_PATHS[request.path]
    return None, "plain"
