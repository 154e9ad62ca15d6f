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
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec

from headgate.errors import InvalidSettingError
from headgate.testing import fake_answers
from headgate.testing.fake_answers import Dialect, FakeAnswer, json_answer, refusal
from headgate.testing.fake_script import (
    MAX_LATENCY_MS,
    FakeKind,
    FakeScript,
    FakeStep,
    FakeUse,
    FakeUses,
)
from headgate.testing.fake_window import FakeWindow

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
}


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
        from headgate.web.http.server import serve  # noqa: PLC0415 - what it needs is an extra

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
        """End; requests that wait are left without an answer."""
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

    def answer(self, request: FakeRequest) -> tuple[FakeAnswer | None, float]:
        """Return the answer to a request, and the seconds that it takes; None drops it."""
        if request.path.startswith("/fake/"):
            return self._controlled(request), 0.0
        self.seen.append(request)
        on, dialect = _place(request)
        if on is None:
            return refusal(404, f"there is nothing at {request.method} {request.path}"), 0.0
        if not self._takes(request.key):
            return refusal(401, "token expired or incorrect"), self.latency_ms / 1_000
        return self._answered(request, on, dialect)

    def _takes(self, key: str) -> bool:
        if self._key is not None:
            return hmac.compare_digest(key.encode(), self._key.encode())
        return bool(key) and (key in self._windows or len(self._windows) < MAX_KEYS)

    def _answered(
        self, request: FakeRequest, on: FakeUse, dialect: Dialect
    ) -> tuple[FakeAnswer | None, float]:
        window = self.window(request.key)
        step = self._script.take(on) or FakeStep(kind="ok", latency_ms=self.latency_ms)
        seconds = step.latency_ms / 1_000
        match step.kind:
            case "ok":
                return self._good(window, on, dialect), seconds
            case "drop":
                return None, seconds
            case "timeout":
                return None, MAX_LATENCY_MS / 1_000
            case _:
                now = self._clock()
                return fake_answers.scripted_answer(step, window, dialect, now=now), seconds

    def _good(self, window: FakeWindow, on: FakeUse, dialect: Dialect) -> FakeAnswer:
        now = self._clock()
        if on == "quota":
            if dialect == "plain":
                return fake_answers.plain_answer(window)
            return fake_answers.quota_answer(
                window, started_at=self._started_at, now=now, has_credits=self._has_credits
            )
        if window.is_used_up:
            return fake_answers.used_up_answer(window, dialect, now=now)
        window.use()
        return fake_answers.completion_answer(window, dialect, now=now)

    def _controlled(self, request: FakeRequest) -> FakeAnswer:
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
                    return refusal(404, f"there is {known}")
        except (msgspec.MsgspecError, InvalidSettingError, UnicodeDecodeError) as error:
            return refusal(400, str(error))
        return json_answer(self._state())

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
        answer, seconds = self.answer(request)
        if seconds:
            await asyncio.sleep(seconds)
        if answer is None:
            return
        given = {
            "content-type": "application/json",
            "content-length": str(len(answer.body)),
            **answer.headers,
        }
        head = [(name.encode(), value.encode()) for name, value in given.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": head})
        await send({"type": "http.response.body", "body": answer.body})


def _place(request: FakeRequest) -> tuple[FakeUse | None, Dialect]:
    if request.method == "GET" and request.path in QUOTA_PATHS:
        return "quota", QUOTA_PATHS[request.path]
    if request.method == "POST" and request.path in REQUEST_PATHS:
        return "request", REQUEST_PATHS[request.path]
    return None, "plain"
