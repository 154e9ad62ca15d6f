"""A fake provider with the least possible cost, which every measured gateway stands in front of.

    python -m benchmarks.gateway_upstream PORT

It speaks OpenAI's chat completions: one fixed answer, or a stream of 200 chunks. Each chunk is
written by itself, as tokens of a model arrive, but as fast as the event loop turns. A model named
`held` stops after the first chunk, so that others wait behind it.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import httptools
import msgspec
import uvloop

MODEL = "gpt-4o-mini"
HELD_MODEL = "held"
CHUNKS = 200
USAGE = {"prompt_tokens": 160, "completion_tokens": CHUNKS, "total_tokens": 160 + CHUNKS}
_ABOUT = {"id": "chatcmpl-benchmark", "created": 1_700_000_000, "model": MODEL}


def _whole(content: dict[str, object]) -> bytes:
    body = msgspec.json.encode(content)
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return b"HTTP/1.1 200 OK\r\n" + head.encode() + body


def _event(content: bytes) -> bytes:
    event = b"data: " + content + b"\n\n"
    return f"{len(event):x}\r\n".encode() + event + b"\r\n"


def _chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return _event(
        msgspec.json.encode({**_ABOUT, "object": "chat.completion.chunk", "choices": [choice]})
    )


ANSWER = _whole(
    {
        **_ABOUT,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "All is well. " * 20},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }
)
MODELS = _whole({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "fake"}]})
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
STREAM = (
    STREAM_HEAD + _chunk({"role": "assistant", "content": ""}),
    *[_chunk({"content": f" word{number}"}) for number in range(CHUNKS - 2)],
    _chunk({}, "stop"),
)
USAGE_CHUNK = _event(
    msgspec.json.encode(
        {**_ABOUT, "object": "chat.completion.chunk", "choices": [], "usage": USAGE}
    )
)
STREAM_END = _event(b"[DONE]") + b"0\r\n\r\n"


class _Asked(msgspec.Struct):
    model: str
    stream: bool = False


class UpstreamProtocol(asyncio.Protocol):
    """One connection; its requests are answered one after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._decoder = msgspec.json.Decoder(_Asked)
        self._transport: asyncio.Transport | None = None
        self._body = b""
        self._left: list[bytes] = []
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._left = []

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._left:
            self._write_next()

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._transport is None:
            return
        if not self._body:
            self._transport.write(MODELS)
            return
        asked = self._decoder.decode(self._body)
        if asked.model == HELD_MODEL:
            self._transport.write(STREAM[0])
        elif asked.stream:
            has_usage = b"include_usage" in self._body
            end = USAGE_CHUNK + STREAM_END if has_usage else STREAM_END
            self._left = [*STREAM, end][::-1]
            self._write_next()
        else:
            self._transport.write(ANSWER)

    def _write_next(self) -> None:
        if self._transport is None or self._is_paused:
            return
        self._transport.write(self._left.pop())
        if self._left:
            # What is written in one turn of the loop leaves in one piece.
            self._loop.call_soon(self._write_next)


async def serve(port: int) -> None:
    """Answer on a port of this machine until the process is ended."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: UpstreamProtocol(loop), "127.0.0.1", port, backlog=1_024
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
