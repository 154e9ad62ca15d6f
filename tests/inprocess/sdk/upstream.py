"""What providers answer, written down: whole bodies, and streams that a test can cut anywhere."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable

import msgspec

from executors.endpoint import Seen, reply, reply_json

Answer = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]

INPUT_TOKENS, OUTPUT_TOKENS = 20, 5
TOKENS = INPUT_TOKENS + OUTPUT_TOKENS
TEXT = "forty two"

CHAT = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "gpt-4o-2024-08-06",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": TEXT},
        }
    ],
    "usage": {
        "prompt_tokens": INPUT_TOKENS,
        "completion_tokens": OUTPUT_TOKENS,
        "total_tokens": TOKENS,
    },
}
MESSAGE = {
    "id": "m1",
    "type": "message",
    "role": "assistant",
    "model": "claude-house",
    "content": [{"type": "text", "text": TEXT}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS},
}
RESPONSE = {
    "id": "r1",
    "object": "response",
    "created_at": 1,
    "model": "gpt-4o-2024-08-06",
    "status": "completed",
    "output": [
        {
            "type": "message",
            "id": "o1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": TEXT, "annotations": []}],
        }
    ],
    "parallel_tool_calls": False,
    "tool_choice": "auto",
    "tools": [],
    "usage": {
        "input_tokens": INPUT_TOKENS,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": OUTPUT_TOKENS,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": TOKENS,
    },
}
EMBEDDINGS = {
    "object": "list",
    "model": "gpt-4o",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}],
    "usage": {"prompt_tokens": INPUT_TOKENS, "total_tokens": INPUT_TOKENS},
}


def _chunk(delta: dict[str, str], *, usage: object = None, is_empty: bool = False) -> bytes:
    choices = [] if is_empty else [{"index": 0, "delta": delta, "finish_reason": None}]
    chunk = {
        "id": "c1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "gpt-4o-2024-08-06",
        "choices": choices,
        "usage": usage,
    }
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _event(kind: str, **fields: object) -> bytes:
    data = msgspec.json.encode({"type": kind, **fields})
    return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


CHAT_STREAM_WITHOUT_USAGE = [
    _chunk({"role": "assistant", "content": "forty "}),
    _chunk({"content": "two"}),
    b"data: [DONE]\n\n",
]
CHAT_STREAM = [
    *CHAT_STREAM_WITHOUT_USAGE[:2],
    _chunk({}, usage=CHAT["usage"], is_empty=True),
    b"data: [DONE]\n\n",
]
MESSAGE_STREAM = [
    _event(
        "message_start",
        message={
            **MESSAGE,
            "content": [],
            "stop_reason": None,
            "usage": {"input_tokens": INPUT_TOKENS, "output_tokens": 1},
        },
    ),
    _event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    _event("ping"),
    _event("content_block_delta", index=0, delta={"type": "text_delta", "text": "forty "}),
    _event("content_block_delta", index=0, delta={"type": "text_delta", "text": "two"}),
    _event("content_block_stop", index=0),
    _event(
        "message_delta",
        delta={"stop_reason": "end_turn", "stop_sequence": None},
        usage={"output_tokens": OUTPUT_TOKENS},
    ),
    _event("message_stop"),
]
RESPONSE_STREAM = [
    _event("response.created", response={**RESPONSE, "output": [], "usage": None}),
    _event(
        "response.output_text.delta",
        item_id="o1",
        output_index=0,
        content_index=0,
        delta=TEXT,
        sequence_number=1,
        logprobs=[],
    ),
    _event("response.completed", response=RESPONSE, sequence_number=2),
]


def whole(value: object) -> bytes:
    """Write an answer that comes in one piece."""
    return reply_json(value)


def zipped(value: object) -> bytes:
    """Write the same, compressed."""
    body = gzip.compress(msgspec.json.encode(value))
    return reply(200, body, Content_Type="application/json", Content_Encoding="gzip")


class Stream:
    """Sends events one at a time; `cut_after` so many it is lost, `hang_after` it is silent."""

    def __init__(
        self,
        events: list[bytes],
        *,
        cut_after: int | None = None,
        hang_after: int | None = None,
        coding: str = "identity",
    ) -> None:
        self.events = events
        self.cut_after = cut_after
        self.hang_after = hang_after
        self.coding = coding
        self.sent = 0
        self.hanging = asyncio.Event()
        # Who waits is kept by what it waits for.
        self._over = asyncio.Event()

    async def __call__(self, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
        coding = f"Content-Encoding: {self.coding}\r\n" if self.coding != "identity" else ""
        writer.write(f"{head}{coding}Transfer-Encoding: chunked\r\n\r\n".encode())
        whole = b"".join(self.events)
        pieces = [gzip.compress(whole)] if self.coding == "gzip" else self.events
        for piece in pieces:
            if self.sent == self.cut_after:
                writer.close()
                raise ConnectionError
            if self.sent == self.hang_after:
                self.hanging.set()
                await self._over.wait()
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            self.sent += 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()


class Silence:
    """Never answers."""

    def __init__(self) -> None:
        self._over = asyncio.Event()

    async def __call__(self, _seen: Seen, _writer: asyncio.StreamWriter) -> None:
        await self._over.wait()


def each(*answers: bytes | Answer) -> Answer:
    """Give these answers in turn; an empty one ends the connection without an answer."""
    left = list(answers)

    async def give(seen: Seen, writer: asyncio.StreamWriter) -> None:
        answer = left.pop(0)
        if not isinstance(answer, bytes):
            await answer(seen, writer)
            return
        if not answer:
            raise ConnectionError
        writer.write(answer)
        await writer.drain()

    return give
