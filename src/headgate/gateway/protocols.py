"""The shapes of the protocols that clients speak: their errors, keep-alives, streams and headers.

A stream that has to wait is opened here, in its own protocol: an event that begins an answer, and
then one every few seconds, because clients give up a stream of comments. What the provider sends
later continues it: its own beginning is taken out, and what that said is said where it still can.

Rule: nothing that need not change does. Where a stream was not opened here and hides nothing, its
bytes go to the client as they came, the same objects; what is read along is never written back.
Only headers of the lists below pass, in either direction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

import msgspec

from headgate.core.enums import FastEnum
from headgate.providers.http_headers import SECRET_NAME
from headgate.providers.provider import error_in
from headgate.providers.usage import (
    EventRewriter,
    EventStreamReader,
    ReportedUsage,
    event_data,
    is_usage_chunk,
)

Headers = tuple[tuple[bytes, bytes], ...]

CODEX = "codex"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
MAX_RETRY_AFTER_SECONDS = 55
"""Claude Code waits for up to 59 seconds and fails at once where it is told to wait longer."""

_encode = msgspec.json.Encoder().encode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Protocol(FastEnum):
    """What a client speaks, by the endpoint that it asks."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"

    @property
    def kind(self) -> str:
        """The kind of upstream that speaks it."""
        is_anthropic = self in (Protocol.MESSAGES, Protocol.COUNT_TOKENS)
        return "anthropic" if is_anthropic else "openai"

    @property
    def path(self) -> str:
        """Where it is asked, after the version."""
        return _PATHS[self]

    @property
    def is_model_call(self) -> bool:
        """Whether a model answers; to count tokens costs nothing."""
        return self is not Protocol.COUNT_TOKENS

    @property
    def has_streams(self) -> bool:
        """Whether an answer may come as events."""
        return self not in (Protocol.EMBEDDINGS, Protocol.COUNT_TOKENS)


_PATHS = {
    Protocol.CHAT: "/chat/completions",
    Protocol.COMPLETIONS: "/completions",
    Protocol.RESPONSES: "/responses",
    Protocol.EMBEDDINGS: "/embeddings",
    Protocol.MESSAGES: "/messages",
    Protocol.COUNT_TOKENS: "/messages/count_tokens",
}
_PROTOCOLS = {f"/v1{path}": protocol for protocol, path in _PATHS.items()}


def protocol_of(path: str) -> Protocol | None:
    """Return what is spoken at a path without its prefix; None if no model is asked there."""
    return _PROTOCOLS.get(path.removesuffix("/"))


# Errors: whatever it is, the client gets it in the shape that it would get from the provider.


class _Shape(NamedTuple):
    status: int
    anthropic_type: str
    openai_type: str
    openai_code: str | None = None
    is_final: bool = False


class Failure(Enum):
    """Why a call is not answered by a model."""

    REFUSED = _Shape(402, "billing_error", "insufficient_quota", "budget_exceeded", is_final=True)
    TRY_AGAIN = _Shape(429, "rate_limit_error", "rate_limit_error", "rate_limit_exceeded")
    UNAUTHORIZED = _Shape(
        401, "authentication_error", "invalid_request_error", "invalid_api_key", is_final=True
    )
    FORBIDDEN = _Shape(403, "permission_error", "invalid_request_error", "forbidden", is_final=True)
    BAD_REQUEST = _Shape(400, "invalid_request_error", "invalid_request_error", is_final=True)
    WRONG_PROTOCOL = _Shape(
        400, "invalid_request_error", "invalid_request_error", "wrong_protocol", is_final=True
    )
    UNKNOWN_MODEL = _Shape(
        404, "not_found_error", "invalid_request_error", "model_not_found", is_final=True
    )
    NOT_FOUND = _Shape(404, "not_found_error", "invalid_request_error", "not_found", is_final=True)
    TOO_LARGE = _Shape(
        413, "request_too_large", "invalid_request_error", "request_too_large", is_final=True
    )
    UPSTREAM_FAILED = _Shape(502, "api_error", "server_error", "upstream_failed")
    OVERLOADED = _Shape(529, "overloaded_error", "server_error", "server_is_overloaded")
    UNAVAILABLE = _Shape(503, "api_error", "server_error", "unavailable")
    INTERNAL = _Shape(500, "api_error", "server_error", "internal")


class ErrorAnswer(NamedTuple):
    """An error as it goes to a client that has no headers yet; its body is JSON."""

    status: int
    body: bytes
    headers: Headers


def error_answer(
    protocol: Protocol,
    failure: Failure,
    message: str,
    *,
    client: str = "",
    code: str | None = None,
    resets_at: float | None = None,
    retry_after_seconds: float | None = None,
) -> ErrorAnswer:
    """Return an error in the shape of a protocol.

    A refusal for good is 402 with `x-should-retry: false`; Codex tries a 402 five times and takes a
    400 for final, and it knows a limit by its type and the time when it resets.
    """
    shape = failure.value
    status = shape.status
    is_codex = client == CODEX and protocol.kind == "openai"
    if failure is Failure.OVERLOADED and protocol.kind == "openai":
        status = 503
    elif failure is Failure.REFUSED and is_codex:
        status = 400
    headers: list[tuple[bytes, bytes]] = []
    if shape.is_final:
        headers.append((b"x-should-retry", b"false"))
    elif retry_after_seconds is not None:
        headers.append((b"retry-after", b"%d" % _pause(retry_after_seconds)))
    body = _error_fields(protocol, failure, message, code)
    if failure is Failure.REFUSED and is_codex:
        body["error"] |= {"type": "usage_limit_reached", "code": code or "usage_limit_reached"}
        body["error"] |= {"resets_at": None if resets_at is None else int(resets_at)}
    return ErrorAnswer(status, _encode(body), tuple(headers))


def _pause(seconds: float) -> int:
    return max(1, min(-int(-seconds // 1), MAX_RETRY_AFTER_SECONDS))


def _error_fields(
    protocol: Protocol, failure: Failure, message: str, code: str | None
) -> dict[str, Any]:
    shape = failure.value
    if protocol.kind == "anthropic":
        return {"type": "error", "error": {"type": shape.anthropic_type, "message": message}}
    error = {
        "message": message,
        "type": shape.openai_type,
        "param": "model" if failure in (Failure.UNKNOWN_MODEL, Failure.WRONG_PROTOCOL) else None,
        "code": code or shape.openai_code,
    }
    return {"error": error}


_BY_STATUS = {
    400: Failure.BAD_REQUEST,
    401: Failure.UNAUTHORIZED,
    402: Failure.REFUSED,
    403: Failure.FORBIDDEN,
    404: Failure.UNKNOWN_MODEL,
    413: Failure.TOO_LARGE,
    422: Failure.BAD_REQUEST,
    429: Failure.TRY_AGAIN,
    503: Failure.UNAVAILABLE,
    529: Failure.OVERLOADED,
}


def failure_of(status: int, body: bytes) -> tuple[Failure, str]:
    """Return what a provider's error is to a client, and its message."""
    failure = _BY_STATUS.get(status, Failure.UPSTREAM_FAILED)
    return failure, error_in(body).said or f"the provider answered with status {status}"


# The list of models, in both shapes.


class ListedModel(NamedTuple):
    """A model that can be asked for."""

    id: str
    owner: str = "headgate"
    created_at: int = 0


def models_body(models: Sequence[ListedModel], *, is_anthropic: bool) -> bytes:
    """Return the list of models as OpenAI or as Anthropic writes it."""
    if not is_anthropic:
        listed = [
            {"id": one.id, "object": "model", "created": one.created_at, "owned_by": one.owner}
            for one in models
        ]
        return _encode({"object": "list", "data": listed})
    shown = [
        {"type": "model", "id": one.id, "display_name": one.id, "created_at": _BEGINNING}
        for one in models
    ]
    first, last = (models[0].id, models[-1].id) if models else (None, None)
    return _encode({"data": shown, "has_more": False, "first_id": first, "last_id": last})


_BEGINNING = "1970-01-01T00:00:00Z"


# Windows that Codex shows to its user.


class UsedWindow(NamedTuple):
    """How much of a window is used, how long it is, and when it resets in Unix seconds."""

    used_percent: float
    window_minutes: int
    reset_at: float | None = None


def codex_headers(windows: Sequence[UsedWindow]) -> Headers:
    """Return the headers from which Codex reads its limits: the first window, and the second."""
    found: list[tuple[bytes, bytes]] = []
    for name, window in zip((b"primary", b"secondary"), windows, strict=False):
        prefix = b"x-codex-" + name
        percent = min(max(window.used_percent, 0.0), 100.0)
        found.append((prefix + b"-used-percent", f"{percent:.1f}".encode()))
        found.append((prefix + b"-window-minutes", b"%d" % window.window_minutes))
        if window.reset_at is not None:
            found.append((prefix + b"-reset-at", b"%d" % int(window.reset_at)))
    return tuple(found)


# Streams.

_WHOLE_END = (b"\n\n", b"\r\n\r\n")
_SEQUENCE = re.compile(rb'("sequence_number"\s*:\s*)([0-9]{1,18})')
_BEGINNINGS = ("response.created", "response.in_progress", "response.queued")


class StreamRelay:
    """One stream to a client: opened here if it has to wait, then what the provider sends.

    `feed` gives what goes to the client for what came from the provider, in any pieces. With
    `hides_usage` the chunk is taken out that tells the usage of a chat, because it was asked for
    here and not by the client. `usage` is what was said so far, and `is_over` whether the last
    event came. An event of more than 8 MiB passes as it is.

    All events of a response must have one id, and SDKs check it: after an opening it is the one
    that was made here. A response that `is_stored` is asked for later under the id of its provider;
    so its stream is kept alive with comments, and passes unchanged.
    """

    def __init__(
        self,
        protocol: Protocol,
        *,
        model: str = "",
        call_id: str = "",
        created_at: float = 0.0,
        hides_usage: bool = False,
        is_stored: bool = False,
    ) -> None:
        self.protocol = protocol
        self.is_open = False
        self._model = model
        self._call_id = call_id
        self._created_at = int(created_at)
        self._hides_usage = hides_usage and protocol in (Protocol.CHAT, Protocol.COMPLETIONS)
        self._is_stored = is_stored and protocol is Protocol.RESPONSES
        self._provider_id = b""
        self._reader = EventStreamReader()
        self._events = EventRewriter()
        self._sequence = 0
        self._shift: int | None = None
        self._start_usage: dict[str, Any] | None = None

    # What is made here, while the call waits or when it fails.

    @property
    def events(self) -> int:
        """How many events were sent that have a number; -1 while it is not open."""
        return self._sequence if self.is_open else -1

    def go_on(self, events: int) -> None:
        """Go on with a stream that was opened elsewhere, after so many events."""
        self.is_open = True
        self._sequence = events

    def open(self) -> bytes:
        """Return the events that begin an answer; the rest of the stream continues them."""
        if self.is_open:
            return b""
        self.is_open = True
        if self._is_stored:
            return _COMMENT
        if self.protocol is Protocol.MESSAGES:
            return _named({"type": "message_start", "message": self._message()}) + _PING
        if self.protocol is Protocol.RESPONSES:
            return self._progress("response.created") + self._progress("response.in_progress")
        return self._empty_chunk()

    def keep_alive(self) -> bytes:
        """Return the event that says that the stream lives; it is opened if it was not."""
        if not self.is_open:
            return self.open()
        if self._is_stored:
            return _COMMENT
        if self.protocol is Protocol.MESSAGES:
            return _PING
        if self.protocol is Protocol.RESPONSES:
            return self._progress("response.in_progress")
        return self._empty_chunk()

    def fail(
        self,
        failure: Failure,
        message: str,
        *,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> bytes:
        """Return the events that end a stream whose headers are out with an error."""
        if self.protocol is Protocol.RESPONSES:
            return self._failed_response(failure, message, code, retry_after_seconds)
        fields = _error_fields(self.protocol, failure, message, code)
        if self.protocol.kind == "anthropic":
            return b"event: error\ndata: %b\n\n" % _encode(fields)
        return b"data: %b\n\ndata: [DONE]\n\n" % _encode(fields)

    # What the provider sends.

    @property
    def usage(self) -> ReportedUsage | None:
        """All that was said of the usage so far."""
        return self._reader.reported()[0]

    @property
    def is_over(self) -> bool:
        """Whether the last event came, so that the usage is all of it."""
        return self._reader.is_over

    def feed(self, piece: bytes) -> bytes:
        """Return what goes to the client for the next bytes of the provider."""
        self._reader.feed(piece)
        if self._is_stored or not (self.is_open or self._hides_usage):
            return piece
        if self._events.is_between:
            if self._passes(piece):
                return piece
            if b"\r" not in piece and piece.find(b"\n\n") == len(piece) - 2 >= 0:
                # It is one whole event, as most pieces are.
                return self._event(piece)
        return self._events.feed(piece, self._event)

    def finish(self) -> bytes:
        """Return what is left for the client when the provider has sent everything."""
        self._reader.reported()
        return self._events.finish(self._event)

    def _passes(self, piece: bytes) -> bool:
        """Whether whole events can be seen to stay as they are, at a glance."""
        if not piece.endswith(_WHOLE_END):
            return False
        if self.protocol is Protocol.MESSAGES:
            return self._start_usage is not None and b"message_" not in piece
        if self.protocol is Protocol.RESPONSES:
            return False
        return not self._hides_usage or piece.count(b'"usage"') == piece.count(b'"usage":null')

    def _event(self, event: bytes) -> bytes:
        """Return one whole event as the client is to see it; empty if it is not."""
        if self.protocol is Protocol.MESSAGES:
            return self._message_event(event)
        if self.protocol is Protocol.RESPONSES:
            return self._response_event(event)
        return b"" if self._hides_usage and is_usage_chunk(event) else event

    def _message_event(self, event: bytes) -> bytes:
        if b"message_" not in event:
            return event
        fields = _fields_of(event)
        kind = fields.get("type")
        if kind == "message_start":
            message = fields.get("message")
            usage = message.get("usage") if isinstance(message, dict) else None
            self._start_usage = usage if isinstance(usage, dict) else {}
            return b""
        if kind != "message_delta" or not self._start_usage:
            return event
        usage = fields.get("usage")
        later = usage if isinstance(usage, dict) else {}
        said = {name: value for name, value in later.items() if value is not None}
        return _named({**fields, "usage": {**later, **self._start_usage, **said}})

    def _response_event(self, event: bytes) -> bytes:
        if b'"response"' in event:
            fields = _fields_of(event)
            response = fields.get("response")
            if isinstance(response, dict) and isinstance(response.get("id"), str):
                self._provider_id = _encode(response["id"])
            if self._shift is None and fields.get("type") in _BEGINNINGS:
                return b""
        if self._provider_id and self._provider_id in event:
            event = event.replace(self._provider_id, b'"resp_%b"' % self._call_id.encode())
        found = _SEQUENCE.search(event)
        if found is None:
            return event
        number = int(found[2])
        if self._shift is None:
            self._shift = self._sequence - number
        self._sequence = number + self._shift + 1
        start, end = found.span(2)
        return b"%b%d%b" % (event[:start], number + self._shift, event[end:])

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._call_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": 0,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": f"resp_{self._call_id}",
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": None,
        }

    def _progress(self, kind: str) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        response = self._response("in_progress")
        return _named({"type": kind, "sequence_number": number, "response": response})

    def _empty_chunk(self) -> bytes:
        """Return a chunk with one choice that says nothing: programs read the first of each."""
        is_chat = self.protocol is Protocol.CHAT
        said = {"delta": {"content": ""}} if is_chat else {"text": ""}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": None}
        chunk: dict[str, Any] = {
            "id": f"chatcmpl-{self._call_id}" if is_chat else f"cmpl-{self._call_id}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": self._created_at,
            "model": self._model,
            "choices": [choice],
        }
        return b"data: %b\n\n" % _encode(chunk)

    def _failed_response(
        self, failure: Failure, message: str, code: str | None, retry_after_seconds: float | None
    ) -> bytes:
        """Codex takes `invalid_prompt` for final, and reads from the message when to try again."""
        shape = failure.value
        # Nothing fails that has not begun.
        begun = b"" if self._sequence else self._progress("response.created")
        if shape.is_final:
            code = "invalid_prompt"
        elif retry_after_seconds is not None:
            code = "rate_limit_exceeded"
            message = f"{message} Please try again in {_pause(retry_after_seconds)}s."
        error = {"code": code or shape.openai_code, "message": message}
        response = {**self._response("failed"), "error": error}
        number, self._sequence = self._sequence, self._sequence + 1
        fields = {"type": "response.failed", "sequence_number": number, "response": response}
        return begun + _named(fields)


_COMMENT = b": waiting\n\n"
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def _named(fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), _encode(fields))


def _fields_of(event: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(event_data(event))
    except _UNREADABLE:
        return {}
    return fields if isinstance(fields, dict) and isinstance(fields.get("type"), str) else {}


# Headers. What is on no list stays here: a header of tomorrow may hold a key.

_SENT = frozenset(
    b"accept anthropic-beta anthropic-dangerous-direct-browser-access anthropic-version"
    b" content-encoding content-type conversation-id conversation_id idempotency-key openai-beta"
    b" originator session-id session_id user-agent version x-app x-client-request-id"
    b" x-session-affinity x-session-id".split()
)
_SENT_PREFIXES = (b"x-stainless-", b"x-claude-code-", b"x-codex-", b"x-openai-")
_OWN_KEY_SENT = frozenset((b"openai-organization", b"openai-project"))
"""Whose account is billed is said by whoever owns the key."""
_RETURNED = frozenset(
    b"content-type openai-model openai-processing-ms openai-version request-id"
    b" retry-after retry-after-ms x-codex-turn-state x-models-etag x-reasoning-included"
    b" x-should-retry".split()
)
_PLAIN_VALUES = frozenset((b"application/json", b"text/event-stream"))
"""What most answers are, and no key is."""
_RETURNED_PREFIXES = (b"anthropic-ratelimit-", b"x-ratelimit-")
_HEADGATE_TOKEN = re.compile(rb"hg_(?:[0-9a-f]{12}|task)_", re.IGNORECASE)
_IDENTITY = (b"accept-encoding", b"identity")


def upstream_headers(
    headers: Iterable[tuple[bytes, bytes]], *, is_own_key: bool = False
) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request that go upstream; whoever sends it adds the key.

    Answers are asked for without a coding, since what streams is read along. With `is_own_key` the
    client's own key is used, and it may say which of its accounts is billed.
    """
    sent = [
        (name, value)
        for name, value in headers
        if (name in _SENT or _is_sent(name, is_own_key=is_own_key))
        and not (b"_" in value and _HEADGATE_TOKEN.search(value))
    ]
    sent.append(_IDENTITY)
    return sent


def _is_sent(name: bytes, *, is_own_key: bool) -> bool:
    name = name.lower()
    if name in _SENT or (is_own_key and name in _OWN_KEY_SENT):
        return True
    return name.startswith(_SENT_PREFIXES) and not SECRET_NAME.search(name.decode("latin-1"))


def returned_headers(
    headers: Iterable[tuple[bytes, bytes]], hidden: Callable[[bytes], bytes]
) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer that go back to the client; its length is made anew.

    Their names are in lower case. What they say goes on without keys, which are `hidden`, and the
    body without its coding. The provider's own id of the request is `request-id`, because this
    service has one, too.
    """
    found: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name in _RETURNED or name.startswith(_RETURNED_PREFIXES):
            found.append((name, value if value in _PLAIN_VALUES else hidden(value)))
        elif name == b"x-request-id":
            found.append((b"request-id", hidden(value)))
    return found


def upstream_query(query: bytes) -> bytes:
    """Return the query of a request as it goes upstream: without what looks like a key."""
    if not query:
        return query
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    kept = [
        (name, value)
        for name, value in pairs
        if not SECRET_NAME.search(name) and not _HEADGATE_TOKEN.search(value.encode())
    ]
    return query if len(kept) == len(pairs) else urlencode(kept).encode()
