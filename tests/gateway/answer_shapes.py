"""What providers answer, in the shape of each protocol: whole bodies, streams, errors, usage.

An answer is the same for the same request and number, and a stream is made of pieces that know how
many output tokens the client has had so far, so that whoever sends them can bill a part of it.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

Json = dict[str, Any]

CREATED_AT = 1_760_000_000
CREATED_TEXT = "2025-10-09T08:53:20Z"
EMBEDDING_LENGTH = 8
SIGNATURE = "c2lnbmVk"
_WORD = re.compile(r"\S+\s*|\s+")
_ANTHROPIC_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OPENAI_ERRORS: dict[int, tuple[str, str | None]] = {
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    429: ("requests", "rate_limit_exceeded"),
}


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer costs: `input` is everything that came in, cached or not."""

    input: int = 0
    cached: int = 0
    cache_write: int = 0
    cache_write_1h: int = 0
    output: int = 0
    """With what was thought."""
    reasoning: int = 0


class ToolCall(msgspec.Struct, frozen=True):
    """A tool that the model wants to have called."""

    name: str
    arguments: Json


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a model says to one request, before it has the shape of a protocol."""

    number: int
    model: str
    text: str
    thought: str = ""
    tool: ToolCall | None = None
    is_cut_short: bool = False
    """`max_tokens` was too small for all of it."""
    tokens: Tokens
    usage: Json | None = None
    """Sent instead of the true one."""
    has_usage: bool = True
    repeats: int = 1
    """How often a stream sends its text; the tokens are those of all of it."""


class Piece(NamedTuple):
    """A part of a stream: its bytes, the output tokens up to here, whether it tells the usage."""

    data: bytes
    output_tokens: int = 0
    tells: bool = False


def words_of(text: str) -> list[str]:
    """Split a text into tokens, which together are the text."""
    return _WORD.findall(text)


def count_tokens(value: object) -> int:
    """Count the tokens of a part of a request: four bytes of JSON each."""
    return 0 if value is None else len(msgspec.json.encode(value)) // 4 + 1


def event(value: Json, *, named: bool = False) -> bytes:
    """Write an event of a stream."""
    name = b"event: " + str(value["type"]).encode() + b"\n" if named else b""
    return name + b"data: " + msgspec.json.encode(value) + b"\n\n"


def error_body(protocol: str, status: int, message: str) -> Json:
    """Return an error, as the provider of this protocol words it."""
    if protocol in {"messages", "count_tokens"}:
        kind = _ANTHROPIC_ERRORS.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req"}
    usual = ("server_error" if status >= 500 else "invalid_request_error", None)
    kind, code = _OPENAI_ERRORS.get(status, usual)
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_event(protocol: str, message: str) -> bytes:
    """Return what a stream says when the provider fails in the middle of it."""
    if protocol == "messages":
        return event(error_body(protocol, 529, message), named=True)
    if protocol == "responses":
        failed = {"id": "resp", "object": "response", "status": "failed", "output": []}
        error = {"code": "server_error", "message": message}
        return event(
            {"type": "response.failed", "response": {**failed, "error": error}}, named=True
        )
    return event(error_body(protocol, 500, message))


def models_body(models: Iterable[str], *, is_anthropic: bool) -> Json:
    """List models in the shape of one of the two protocols."""
    names = list(models)
    if not is_anthropic:
        owned = {"object": "model", "created": CREATED_AT, "owned_by": "billing-upstream"}
        return {"object": "list", "data": [{"id": name, **owned} for name in names]}
    data = [
        {"type": "model", "id": name, "display_name": name, "created_at": CREATED_TEXT}
        for name in names
    ]
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
    return {"data": data, "has_more": False, **ends}


def whole_body(protocol: str, answer: Answer, fields: Json) -> Json:
    """Return an answer that is not streamed."""
    return _WHOLE[protocol](answer, fields)


def stream(protocol: str, answer: Answer, fields: Json) -> Iterator[Piece]:
    """Return a streamed answer, piece by piece."""
    return _STREAMED[protocol](answer, fields)


# Chat completions, and the completions before them.


def _chat_usage(answer: Answer) -> Json:
    if answer.usage is not None:
        return answer.usage
    tokens = answer.tokens
    return {
        "prompt_tokens": tokens.input,
        "completion_tokens": tokens.output,
        "total_tokens": tokens.input + tokens.output,
        "prompt_tokens_details": {"cached_tokens": tokens.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": tokens.reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _chat_head(answer: Answer, kind: str) -> Json:
    return {
        "id": f"chatcmpl-{answer.number}",
        "object": kind,
        "created": CREATED_AT,
        "model": answer.model,
        "system_fingerprint": "fp_billing",
    }


def _finish(answer: Answer) -> str:
    if answer.is_cut_short:
        return "length"
    return "tool_calls" if answer.tool else "stop"


def _whole_chat(answer: Answer, _: Json) -> Json:
    message: Json = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if answer.tool is not None:
        message["tool_calls"] = [_chat_tool(answer, _arguments(answer.tool))]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(answer)}
    body = {**_chat_head(answer, "chat.completion"), "choices": [choice]}
    return {**body, "usage": _chat_usage(answer)} if answer.has_usage else body


def _chat_tool(answer: Answer, arguments: str) -> Json:
    assert answer.tool is not None
    function = {"name": answer.tool.name, "arguments": arguments}
    return {"id": f"call_{answer.number}", "type": "function", "function": function}


def _streamed_chat(answer: Answer, fields: Json) -> Iterator[Piece]:
    head = _chat_head(answer, "chat.completion.chunk")
    wants_usage = bool((fields.get("stream_options") or {}).get("include_usage"))
    silent = {"usage": None} if wants_usage else {}

    def chunk(delta: Json, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event({**head, "choices": [choice], **silent})

    so_far = answer.tokens.reasoning
    yield Piece(chunk({"role": "assistant", "content": "", "refusal": None}), so_far)
    for word in _repeated(answer):
        so_far += 1
        yield Piece(chunk({"content": word}), so_far)
    if answer.tool is not None:
        yield Piece(chunk({"tool_calls": [{"index": 0, **_chat_tool(answer, "")}]}), so_far)
        for part in words_of(_arguments(answer.tool)):
            so_far += 1
            function = {"index": 0, "function": {"arguments": part}}
            yield Piece(chunk({"tool_calls": [function]}), so_far)
    yield Piece(chunk({}, _finish(answer)), answer.tokens.output)
    if wants_usage and answer.has_usage:
        told = event({**head, "choices": [], "usage": _chat_usage(answer)})
        yield Piece(told, answer.tokens.output, tells=True)
    yield Piece(b"data: [DONE]\n\n", answer.tokens.output)


def _whole_completion(answer: Answer, _: Json) -> Json:
    finish = "length" if answer.is_cut_short else "stop"
    choice = {"index": 0, "text": answer.text, "logprobs": None, "finish_reason": finish}
    body = {**_chat_head(answer, "text_completion"), "choices": [choice]}
    return {**body, "usage": _chat_usage(answer)} if answer.has_usage else body


def _streamed_completion(answer: Answer, fields: Json) -> Iterator[Piece]:
    head = _chat_head(answer, "text_completion")
    wants_usage = bool((fields.get("stream_options") or {}).get("include_usage"))
    silent = {"usage": None} if wants_usage else {}
    so_far = answer.tokens.reasoning
    for word in _repeated(answer):
        so_far += 1
        choice = {"index": 0, "text": word, "logprobs": None, "finish_reason": None}
        yield Piece(event({**head, "choices": [choice], **silent}), so_far)
    finish = "length" if answer.is_cut_short else "stop"
    choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": finish}
    yield Piece(event({**head, "choices": [choice], **silent}), answer.tokens.output)
    if wants_usage and answer.has_usage:
        told = event({**head, "choices": [], "usage": _chat_usage(answer)})
        yield Piece(told, answer.tokens.output, tells=True)
    yield Piece(b"data: [DONE]\n\n", answer.tokens.output)


# Responses.


def _response_usage(answer: Answer) -> Json:
    if answer.usage is not None:
        return answer.usage
    tokens = answer.tokens
    return {
        "input_tokens": tokens.input,
        "input_tokens_details": {"cached_tokens": tokens.cached},
        "output_tokens": tokens.output,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
        "total_tokens": tokens.input + tokens.output,
    }


def _response_items(answer: Answer) -> list[Json]:
    items: list[Json] = []
    if answer.thought:
        summary = [{"type": "summary_text", "text": answer.thought}]
        items.append({"type": "reasoning", "id": f"rs_{answer.number}", "summary": summary})
    if answer.text:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{answer.number}",
                "status": "completed",
                "role": "assistant",
                "content": [part],
            }
        )
    if answer.tool is not None:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{answer.number}",
                "call_id": f"call_{answer.number}",
                "status": "completed",
                "name": answer.tool.name,
                "arguments": _arguments(answer.tool),
            }
        )
    return items


def _response(answer: Answer, fields: Json, *, status: str, items: list[Json]) -> Json:
    is_over = status != "in_progress"
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": CREATED_AT,
        "status": status,
        "error": None,
        "incomplete_details": reason,
        "instructions": None,
        "max_output_tokens": fields.get("max_output_tokens"),
        "model": answer.model,
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": bool(fields.get("store", True)),
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": _response_usage(answer) if is_over and answer.has_usage else None,
        "metadata": {},
    }


def _whole_response(answer: Answer, fields: Json) -> Json:
    status = "incomplete" if answer.is_cut_short else "completed"
    return _response(answer, fields, status=status, items=_response_items(answer))


def _streamed_response(answer: Answer, fields: Json) -> Iterator[Piece]:
    number = 0

    def send(kind: str, **given: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number - 1, **given}, named=True)

    begun = _response(answer, fields, status="in_progress", items=[])
    yield Piece(send("response.created", response=begun))
    yield Piece(send("response.in_progress", response=begun))
    so_far = 0
    for index, item in enumerate(_response_items(answer)):
        at = {"output_index": index, "item_id": item["id"]}
        kind = item["type"]
        empty: Json = {"reasoning": {"summary": []}, "message": {"content": []}}
        opened = {**item, **empty.get(kind, {"arguments": ""})}
        if kind != "reasoning":
            opened["status"] = "in_progress"
        yield Piece(send("response.output_item.added", output_index=index, item=opened), so_far)
        if kind == "reasoning":
            at |= {"summary_index": 0}
            part = {"type": "summary_text", "text": ""}
            yield Piece(send("response.reasoning_summary_part.added", **at, part=part), so_far)
            for word in words_of(answer.thought):
                so_far += 1
                said = send("response.reasoning_summary_text.delta", **at, delta=word)
                yield Piece(said, so_far)
            done = send("response.reasoning_summary_text.done", **at, text=answer.thought)
            yield Piece(done, so_far)
            part = {"type": "summary_text", "text": answer.thought}
            yield Piece(send("response.reasoning_summary_part.done", **at, part=part), so_far)
        elif kind == "message":
            at |= {"content_index": 0}
            empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield Piece(send("response.content_part.added", **at, part=empty), so_far)
            for word in _repeated(answer):
                so_far += 1
                said = send("response.output_text.delta", **at, delta=word, logprobs=[])
                yield Piece(said, so_far)
            text = send("response.output_text.done", **at, text=answer.text, logprobs=[])
            yield Piece(text, so_far)
            full = {**empty, "text": answer.text}
            yield Piece(send("response.content_part.done", **at, part=full), so_far)
        else:
            for word in words_of(item["arguments"]):
                so_far += 1
                said = send("response.function_call_arguments.delta", **at, delta=word)
                yield Piece(said, so_far)
            done = send("response.function_call_arguments.done", **at, arguments=item["arguments"])
            yield Piece(done, so_far)
        yield Piece(send("response.output_item.done", output_index=index, item=item), so_far)
    whole = _whole_response(answer, fields)
    ended = send(f"response.{whole['status']}", response=whole)
    yield Piece(ended, answer.tokens.output, tells=answer.has_usage)


# Messages.


def _message_usage(answer: Answer) -> Json:
    if answer.usage is not None:
        return answer.usage
    tokens = answer.tokens
    written = tokens.cache_write + tokens.cache_write_1h
    return {
        "input_tokens": tokens.input - tokens.cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": tokens.cached,
        "cache_creation": {
            "ephemeral_5m_input_tokens": tokens.cache_write,
            "ephemeral_1h_input_tokens": tokens.cache_write_1h,
        },
        "output_tokens": tokens.output,
        "service_tier": "standard",
    }


def _message_blocks(answer: Answer) -> list[Json]:
    blocks: list[Json] = []
    if answer.thought:
        blocks.append({"type": "thinking", "thinking": answer.thought, "signature": SIGNATURE})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    if answer.tool is not None:
        identity = {"id": f"toolu_{answer.number}", "name": answer.tool.name}
        blocks.append({"type": "tool_use", **identity, "input": answer.tool.arguments})
    return blocks


def _stop_reason(answer: Answer) -> str:
    if answer.is_cut_short:
        return "max_tokens"
    return "tool_use" if answer.tool else "end_turn"


def _message_head(answer: Answer) -> Json:
    identity = {"id": f"msg_{answer.number}", "type": "message", "role": "assistant"}
    return {**identity, "model": answer.model, "stop_sequence": None}


def _whole_message(answer: Answer, _: Json) -> Json:
    stop = {"content": _message_blocks(answer), "stop_reason": _stop_reason(answer)}
    body = {**_message_head(answer), **stop}
    return {**body, "usage": _message_usage(answer)} if answer.has_usage else body


def _streamed_message(answer: Answer, _: Json) -> Iterator[Piece]:
    usage = _message_usage(answer)
    begun: Json = {**_message_head(answer), "content": [], "stop_reason": None}
    if answer.has_usage:
        begun["usage"] = {**usage, "output_tokens": 1}
    yield Piece(event({"type": "message_start", "message": begun}, named=True), 1)
    yield Piece(event({"type": "ping"}, named=True), 1)
    so_far = 0
    for index, block in enumerate(_message_blocks(answer)):
        at = {"index": index}
        kind = block["type"]
        opened = {
            "thinking": {"type": kind, "thinking": "", "signature": ""},
            "text": {"type": kind, "text": ""},
            "tool_use": {**block, "input": {}},
        }[kind]
        start = {"type": "content_block_start", **at, "content_block": opened}
        yield Piece(event(start, named=True), so_far)
        for delta in _message_deltas(answer, block):
            so_far += delta["type"] != "signature_delta"
            given = {"type": "content_block_delta", **at, "delta": delta}
            yield Piece(event(given, named=True), so_far)
        yield Piece(event({"type": "content_block_stop", **at}, named=True), so_far)
    ended: Json = {"type": "message_delta"}
    ended["delta"] = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
    if answer.has_usage:
        ended["usage"] = usage
    yield Piece(event(ended, named=True), answer.tokens.output, tells=answer.has_usage)
    yield Piece(event({"type": "message_stop"}, named=True), answer.tokens.output)


def _message_deltas(answer: Answer, block: Json) -> Iterator[Json]:
    if block["type"] == "thinking":
        for word in words_of(answer.thought):
            yield {"type": "thinking_delta", "thinking": word}
        yield {"type": "signature_delta", "signature": SIGNATURE}
    elif block["type"] == "text":
        for word in _repeated(answer):
            yield {"type": "text_delta", "text": word}
    else:
        for part in words_of(msgspec.json.encode(block["input"]).decode()):
            yield {"type": "input_json_delta", "partial_json": part}


# What is not streamed.


def _whole_embeddings(answer: Answer, fields: Json) -> Json:
    given = fields.get("input", "")
    texts = given if isinstance(given, list) and isinstance(given[0], str | list) else [given]
    data = []
    for index, text in enumerate(texts):
        digest = sha256(msgspec.json.encode(text)).digest()[:EMBEDDING_LENGTH]
        numbers = [byte / 256 for byte in digest]
        packed = base64.b64encode(struct.pack(f"<{EMBEDDING_LENGTH}f", *numbers)).decode()
        vector = packed if fields.get("encoding_format") == "base64" else numbers
        data.append({"object": "embedding", "index": index, "embedding": vector})
    count = answer.tokens.input
    usage = answer.usage or {"prompt_tokens": count, "total_tokens": count}
    body = {"object": "list", "data": data, "model": answer.model}
    return {**body, "usage": usage} if answer.has_usage else body


def _whole_image(answer: Answer, _: Json) -> Json:
    body = {"created": CREATED_AT, "data": [{"b64_json": base64.b64encode(b"image").decode()}]}
    return {**body, "usage": _response_usage(answer)} if answer.has_usage else body


def _repeated(answer: Answer) -> Iterator[str]:
    words = words_of(answer.text)
    for _ in range(answer.repeats):
        yield from words


def _arguments(tool: ToolCall) -> str:
    return msgspec.json.encode(tool.arguments).decode()


_WHOLE = {
    "chat": _whole_chat,
    "completions": _whole_completion,
    "responses": _whole_response,
    "messages": _whole_message,
    "embeddings": _whole_embeddings,
    "other": _whole_image,
}
_STREAMED = {
    "chat": _streamed_chat,
    "completions": _streamed_completion,
    "responses": _streamed_response,
    "messages": _streamed_message,
}
