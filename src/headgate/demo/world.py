"""What the service of the demonstration works with: a place where tasks are done, and a receiver.

Both are one server on the loopback interface. A task says itself how long it takes and what comes
of it. Those that bring the key of a slot use its window at the fake provider, and are turned away
when that is used up. Rule: nothing here reaches another machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import msgspec

from headgate.executors.headers import ATTEMPT
from headgate.testing.fake_answers import FakeAnswer, json_answer
from headgate.testing.fake_provider import LOOPBACK, FakeProvider
from headgate.web.http.server import serve

MAX_SECONDS = 20.0
MODEL = "demo-model"
OUTPUT_SHARE = 0.2
DRAIN_SECONDS = 0.2

_BEARER = "Bearer "


class WorkBody(msgspec.Struct, kw_only=True):
    """What a task says of itself; what it leaves out is short and succeeds."""

    kind: str = "work"
    of: str = "something"
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] = 0.5
    tokens: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 500
    course: Literal["succeeds", "fails", "recovers"] = "succeeds"


class DemoWorld:
    """Does tasks and takes webhooks; `provider` has the windows of the keys that tasks bring."""

    def __init__(self, provider: FakeProvider) -> None:
        self._provider = provider

    async def serve_request(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        """Answer one request."""
        message = await receive()
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        answer = await self.answer(scope["path"], headers, message.get("body", b""))
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(answer.body)).encode()),
            *((name.encode(), value.encode()) for name, value in answer.headers.items()),
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": head})
        await send({"type": "http.response.body", "body": answer.body})

    async def answer(self, path: str, headers: dict[str, str], body: bytes) -> FakeAnswer:
        """Return the answer to a request, when the work that it asks for is done."""
        match path:
            case "/work":
                return await self._worked(headers, body)
            case "/hooks/taken":
                return FakeAnswer(status=204)
            case "/hooks/gone":
                return FakeAnswer(status=410)
            case _:
                return json_answer({"error": f"there is nothing at {path}"}, status=404)

    async def _worked(self, headers: dict[str, str], body: bytes) -> FakeAnswer:
        try:
            work = msgspec.json.decode(body, type=WorkBody)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return json_answer({"error": str(error)}, status=400)
        refused = self._refused(headers.get("authorization", "").removeprefix(_BEARER))
        if refused is not None:
            return refused
        await asyncio.sleep(work.seconds)
        return _result(work, is_first=headers.get(ATTEMPT) == "1")

    def _refused(self, key: str) -> FakeAnswer | None:
        """Use the window of a key; return a refusal if nothing is left of it."""
        if not key:
            return None
        window = self._provider.window(key)
        if not window.is_used_up:
            window.use()
            return None
        left_seconds = max(1, round((window.resets_at or 0.0) - time.time()))
        error = {"error": "the quota of this key is used up"}
        return json_answer(error, status=429, headers={"retry-after": str(left_seconds)})


def _result(work: WorkBody, *, is_first: bool) -> FakeAnswer:
    if work.course == "fails":
        return json_answer({"error": f"there was nothing to find in {work.of}"}, status=422)
    if work.course == "recovers" and is_first:
        return json_answer({"error": "the model did not answer in time"}, status=500)
    output = round(work.tokens * OUTPUT_SHARE)
    usage = {"prompt_tokens": work.tokens - output, "completion_tokens": output}
    text = f"{work.kind} is done: {work.of}."
    return json_answer({"model": MODEL, "text": text, "usage": usage})


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:  # noqa: ANN401 - an ASGI application
    """Serve an application on a free port of this machine, and give its address."""
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(
            app,
            host=LOOPBACK,
            port=0,
            on_ready=lambda _, port: ready.set_result(port),
            drain_seconds=DRAIN_SECONDS,
        )
    )
    await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
    try:
        if serving.done():
            serving.result()
        yield f"http://{LOOPBACK}:{ready.result()}"
    finally:
        serving.cancel()
        await asyncio.wait((serving,))
