"""What a request asks of a model: which one, how large the prompt is, how much may come back.

It reads the requests of OpenAI (chat completions, completions, responses, embeddings) and of
Anthropic (messages), by the end of their path, so that gateways with a prefix are read too.

Rule: the prompt is measured and never kept. Text counts by its bytes in UTF-8, of which four are
taken for a token; an image has a size of its own, because its bytes say little about its tokens.
A body is decoded once, whatever is asked of it.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from headgate.providers.prices import CHARACTERS_PER_TOKEN

IMAGE_CHARS = 2_000 * CHARACTERS_PER_TOKEN
ENCODED_CHARS_PER_CHAR = 16
"""How many characters of an encoded document or recording count as one of its text."""

MAX_VALUES = 200_000
"""How many values a body may have; to decode more of them takes seconds."""

_COUNTED_BYTES = 256 * 1024
_ENCODED_AT_LEAST = 256
_IMAGES = {"image": "source", "image_url": "image_url", "input_image": "image_url"}
"""By the type of a block, the field that holds its image."""
_OPEN_TYPES = frozenset(
    ("document", "file", "input_file", "item_reference", "container_upload", "video_url")
)
"""Blocks whose tokens their bytes do not bound: they are packed, or lie with the provider."""
_STORED_FIELDS = frozenset(
    ("file_id", "file_ids", "vector_store_ids", "container", "container_id", "skill_id")
)
"""What names something that lies with the provider, behind the key that the request has.

Items of a response are not among them: SDKs send their ids back with every turn, nobody else can
guess these, and no list has them.
"""
_UNREAD_FIELDS = frozenset(("parameters", "input_schema", "schema", "metadata"))
"""Names in these are of the client's own, and mean nothing to the provider."""
_MARKS = frozenset(("type", "data", "file_data")) | _STORED_FIELDS
"""An object without any of these has nothing but text in it."""
_OPEN_FIELDS = ("previous_response_id", "conversation", "container", "mcp_servers")
_RARE_FIELDS = frozenset(
    (
        *_OPEN_FIELDS,
        *("background", "best_of", "functions", "max_tool_calls", "n", "prompt"),
        *("prompt_cache_key", "service_tier", "speed", "stream_options", "thinking", "tools"),
        "web_search_options",
    )
)
"""All that is read of a body beside what nearly every one has."""
_TOOL_CALLS = frozenset(("tool_use", "server_tool_use", "mcp_tool_use"))
"""Blocks whose `input` is an object that a model gave a tool: text to the model, whatever it says.

All else in such a block is read as in any other, and a body is no block, whatever type it says.
"""
_CLIENT_TOOLS = re.compile(
    r"(?:function|custom|apply_patch|local_shell|computer_use_preview"
    r"|(?:bash|text_editor|computer|memory)_[0-9]+)$"
)
"""Tools that the client runs; all others cost something where the model runs."""
_DATED = re.compile(r"_(?:preview|[0-9]{4}).*$")
_DIGITS = re.compile(r"\s*[0-9]{1,18}\s*", re.ASCII)
_EMBEDDINGS = "/embeddings"
_RESPONSES = "/responses"
_CHAT = "/chat/completions"
_MODEL_PATH = re.compile(r"/(?:completions|responses|embeddings|v1/messages)/?$")
_STREAM_USAGE_PATH = re.compile(r"/completions/?$")
_FREE_PATH = re.compile(
    r"/(?:messages/count_tokens|responses/input_tokens|moderations"
    r"|uploads(?:/[^/]+/(?:parts|complete))?|[^/]+/[^/]+/cancel)/?$"
    # Files of a vector store or a container are kept and indexed for money.
    r"|(?:^(?:/[^/]+)?|/v1)/files/?$"
)
_READING = frozenset(("GET", "HEAD", "OPTIONS", "DELETE"))
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_MAX_NAME_LENGTH = 256
_SYSTEM_ROLES = ("system", "developer")


class Kind(Enum):
    """What a request is to a budget."""

    MODEL_CALL = "it asks a model and costs what that used"
    FREE = "it asks no model"
    OTHER = "nobody here knows what it costs"


class ServerTool(msgspec.Struct, frozen=True):
    """A tool that the provider runs, for money or tokens of its own: `web_search`, `mcp`."""

    kind: str
    max_uses: int | None = None


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call to a model, as far as order and money depend on it.

    `max_tokens` is None where the request leaves the length of a response open, and `answers` says
    how many may be made. `bound_tokens` is the limit that the provider keeps to: another protocol's
    field bounds nothing. `prompt_bytes` are no fewer than the tokens of the prompt, unless it
    `has_open_input`, or images. The provider keeps one that `is_stored` under the id of its
    response, for later requests; `previous_id` names such a one. `prefix_hash` tells what
    conversations with the same system prompt and tools have in common. `miswritten_key` is one that
    is written like a field that is read here but for its case: some providers take it for that
    field. `stored_reference` is a field or type that names something else that the provider keeps.
    What is not `is_readable` is no JSON object.
    """

    model: str
    prompt_chars: int
    max_tokens: int | None = None
    answers: int = 1
    bound_tokens: int | None = None
    prompt_bytes: int = 0
    images: int = 0
    has_open_input: bool = False
    has_tools: bool = False
    server_tools: tuple[ServerTool, ...] = ()
    max_tool_calls: int | None = None
    thinking_tokens: int = 0
    is_stream: bool = False
    wants_usage: bool = False
    is_background: bool = False
    is_stored: bool = False
    is_message: bool = False
    is_surcharged: bool = False
    is_readable: bool = True
    service_tier: str = ""
    cache_key: str = ""
    prefix_hash: str = ""
    previous_id: str = ""
    miswritten_key: str = ""
    stored_reference: str = ""

    def output_tokens(self, open_tokens: int) -> int:
        """Return how much may come back, where an open answer is taken to be so long."""
        return self.answers * (open_tokens if self.max_tokens is None else self.max_tokens)


def kind_of(method: str, path: str) -> Kind:
    """Say whether a request costs something, by its method and path."""
    if method.upper() in _READING:
        return Kind.FREE
    if _MODEL_PATH.search(path):
        return Kind.MODEL_CALL
    return Kind.FREE if _FREE_PATH.search(path) else Kind.OTHER


def most_values(body: bytes) -> int:
    """Return how many values a body has at most, at a glance; text may look like many."""
    return body.count(b",") + body.count(b"{") + body.count(b"[")


def has_too_many_values(body: bytes) -> bool:
    """Tell whether a body has more values than are decoded here; commas in text are none."""
    if most_values(body) <= MAX_VALUES:
        return False
    values = at = 0
    is_text = False
    # One step takes a moment only, so that others have their turn in between.
    while at < len(body) and values <= MAX_VALUES:
        piece = body[at : at + _COUNTED_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            # An escape is not parted.
            piece = body[at : at + _COUNTED_BYTES + 1]
        at += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        values += most_values(b"".join(parts[1::2] if is_text else parts[::2]))
        is_text ^= len(parts) % 2 == 0
    return values > MAX_VALUES


def read_call(path: str, body: bytes) -> ModelCall:
    """Read what a request asks for; what cannot be read is an unnamed model and a long prompt."""
    try:
        fields = msgspec.json.decode(body)
    except _UNREADABLE:
        fields = None
    if not isinstance(fields, dict):
        size = len(body)
        return ModelCall(model="", prompt_chars=size, prompt_bytes=size, is_readable=False)
    endpoint = _endpoint_of(path[-LONGEST_END:])
    measure = _Measure()
    measure.add(fields)
    tools = fields.get("tools")
    tools = tools if isinstance(tools, list) else []
    max_tokens: int | None = 0 if endpoint.is_embedding else None
    bound_tokens = max_tokens
    if not endpoint.is_embedding:
        for name in _LIMITS:
            limit = _whole(fields[name]) if name in fields else None
            if limit is None:
                continue
            # Which of several limits holds is the provider's to say.
            max_tokens = limit if max_tokens is None else max(max_tokens, limit)
            if name in endpoint.limits:
                bound_tokens = limit if bound_tokens is None else max(bound_tokens, limit)
    call = ModelCall(
        model=_text(fields, "model"),
        prompt_chars=measure.size,
        max_tokens=max_tokens,
        bound_tokens=bound_tokens,
        prompt_bytes=len(body),
        images=measure.images,
        has_open_input=measure.is_open,
        is_stream=fields.get("stream") is True,
        is_stored=endpoint.keeps_responses and fields.get("store") is not False,
        is_message=endpoint.is_message,
        prefix_hash=_prefix_hash(fields, tools),
        stored_reference=_stored_reference(fields) if measure.may_refer else "",
    )
    names = "".join(fields)
    if not (names.islower() and names.isascii()) and (key := _miswritten(fields, _READ_FIELDS)):
        call = msgspec.structs.replace(call, miswritten_key=key)
    return call if fields.keys().isdisjoint(_RARE_FIELDS) else _with_rare(call, fields, tools)


def _miswritten(fields: dict[str, Any], known: frozenset[str]) -> str:
    """Return a key that some providers read as a known one, though its case is another."""
    return next((key for key in fields if key not in known and key.casefold() in known), "")


def _with_rare(call: ModelCall, fields: dict[str, Any], tools: list[Any]) -> ModelCall:
    """Add what most requests say nothing of."""
    options, thinking = fields.get("stream_options"), fields.get("thinking")
    thinking_tokens = _whole(thinking.get("budget_tokens")) if isinstance(thinking, dict) else None
    is_template = isinstance(fields.get("prompt"), dict)
    reference = "prompt" if is_template else "conversation" if fields.get("conversation") else ""
    parts = (options, thinking, *tools)
    inner = (_miswritten(one, _READ_PARTS) for one in parts if isinstance(one, dict))
    return msgspec.structs.replace(
        call,
        miswritten_key=call.miswritten_key or next((key for key in inner if key), ""),
        stored_reference=call.stored_reference or reference,
        answers=_answers(fields),
        has_open_input=call.has_open_input
        or is_template
        or any(fields.get(name) for name in _OPEN_FIELDS),
        has_tools=bool(tools) or "functions" in fields,
        server_tools=_server_tools(fields, tools),
        max_tool_calls=_whole(fields.get("max_tool_calls")),
        thinking_tokens=thinking_tokens or 0,
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
        is_background=fields.get("background") is True,
        is_surcharged=fields.get("speed") == "fast",
        service_tier=_text(fields, "service_tier"),
        cache_key=_text(fields, "prompt_cache_key"),
        previous_id=_text(fields, "previous_response_id"),
    )


def with_model(body: bytes, model: str) -> bytes:
    """Return the body with another model, and all else as it was."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "model": model})


def with_stream_usage(path: str, body: bytes, *, is_forced: bool = False) -> bytes:
    """Return the body with `stream_options.include_usage`, if a stream would not tell otherwise.

    A client that asks for no usage is left alone, unless it is forced.
    """
    if not _STREAM_USAGE_PATH.search(path):
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        options = msgspec.json.decode(
            fields.get("stream_options", b"null"), type=dict[str, Any] | None
        )
    except _UNREADABLE:
        return body
    options = options or {}
    is_asked = options.get("include_usage") is True if is_forced else "include_usage" in options
    if bytes(fields.get("stream", b"")) != b"true" or is_asked:
        return body
    return msgspec.json.encode({**fields, "stream_options": {**options, "include_usage": True}})


def with_max_tokens(path: str, body: bytes, max_tokens: int) -> bytes:
    """Return the body with responses of at most so many tokens, and all else byte for byte.

    A lower limit that the body has stays; where it has none, the one that its protocol knows is
    added. Only where a body names a limit more than once its other bytes may move.
    """
    limits = _limits_of(path.rstrip("/"))
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    given = [name for name in limits if bytes(fields.get(name, b"null")) != b"null"]
    lowered = {
        name: max_tokens for name in given if (_limit(fields[name]) or max_tokens + 1) > max_tokens
    }
    if not given:
        lowered = {limits[0]: max_tokens}
    for name, limit in lowered.items():
        body = _with_number(body, fields, name, limit)
    return body


def _with_number(body: bytes, fields: dict[str, msgspec.Raw], name: str, number: int) -> bytes:
    key = b'"%s"' % name.encode()
    # A key that is there once, and belongs to the body itself, is that of the body.
    found = re.findall(key + rb"\s*:\s*" + re.escape(bytes(fields.get(name, b""))), body)
    if name not in fields:
        start = body.index(b"{") + 1
        end = b"," if fields else b""
        return body[:start] + key + b":%d" % number + end + body[start:]
    if body.count(key) == 1 and len(found) == 1:
        value = bytes(fields[name])
        changed = found[0].removesuffix(value) + b"%d" % number
        return body.replace(found[0], changed, 1)
    fields[name] = msgspec.Raw(b"%d" % number)
    return msgspec.json.encode(fields)


def _limit(raw: msgspec.Raw) -> int | None:
    return _whole(msgspec.json.decode(raw))


def text_size(content: object, *, is_plain: bool = False) -> int:
    """Measure a prompt, in characters that make tokens; if it is plain, all of it is text."""
    measure = _Measure()
    measure.add(content, is_plain=is_plain)
    return measure.size


class _Measure:
    """The size of what a prompt holds, and what its bytes say little about."""

    def __init__(self) -> None:
        self.size = 0
        self.images = 0
        self.is_open = False
        self.may_refer = False
        """Whether a name is there of something that may lie with the provider."""

    def add(self, content: object, *, is_plain: bool = False) -> None:
        size = 0
        waiting: list[object] = [content]
        while waiting:
            value = waiting.pop()
            # Nearly all are text.
            if type(value) is str or isinstance(value, str):
                size += len(value) if value.isascii() else _bytes_of(value)
            elif isinstance(value, dict):
                names = "".join(value)
                size += len(names) if names.isascii() else _bytes_of(names)
                if is_plain or value.keys().isdisjoint(_MARKS):
                    waiting += value.values()
                else:
                    self._add_object(value, waiting, is_body=value is content)
            elif isinstance(value, list):
                waiting += value
            elif type(value) is int:
                # A prompt may be given in tokens, as numbers.
                size += CHARACTERS_PER_TOKEN
        self.size += size

    def _add_object(self, value: dict[str, Any], waiting: list[object], *, is_body: bool) -> None:
        """Measure what is no text in an object; what is left to be measured waits."""
        kind = value.get("type")
        kind = kind if isinstance(kind, str) else ""
        has_arguments = kind in _TOOL_CALLS and not is_body
        image = _IMAGES.get(kind)
        if not value.keys().isdisjoint(_STORED_FIELDS):
            self.may_refer = True
            self.is_open |= "file_id" in value
        if kind in _OPEN_TYPES:
            self.is_open = True
        for name, field in value.items():
            if has_arguments and name == "input" and isinstance(field, dict):
                self.add(field, is_plain=True)
            elif name == image:
                self.size += IMAGE_CHARS
                self.images += 1
                self.may_refer |= isinstance(field, dict) and "file_id" in field
            elif (
                name in ("data", "file_data")
                and isinstance(field, str)
                and _may_be_encoded(name, value)
                and _is_encoded(field)
            ):
                self.size += len(field) // ENCODED_CHARS_PER_CHAR
            else:
                waiting.append(field)


def _stored_reference(fields: dict[str, Any]) -> str:
    """Return what in a body names something that lies with the provider; empty without any."""
    waiting: list[object] = [fields]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            kind = value.get("type")
            has_arguments = isinstance(kind, str) and kind in _TOOL_CALLS and value is not fields
            for name, field in value.items():
                if has_arguments and name == "input" and isinstance(field, dict):
                    continue
                # Whoever made the skills that come with the provider has them from there.
                is_public = name == "skill_id" and kind == "anthropic"
                if name in _STORED_FIELDS and _has_id(field) and not is_public:
                    return str(name)
                if name not in _UNREAD_FIELDS:
                    waiting.append(field)
    return ""


def _has_id(field: object) -> bool:
    """Tell whether the value of a field is an id, or has some."""
    if isinstance(field, dict):
        field = field.get("id")
    elif isinstance(field, list):
        return any(isinstance(one, str) for one in field)
    return isinstance(field, str)


def _may_be_encoded(name: str, beside: dict[str, Any]) -> bool:
    """Whether a field is where providers take documents and recordings."""
    is_data = beside.get("type") == "base64" or "format" in beside
    return name == "file_data" or (name == "data" and is_data)


def _is_encoded(text: str) -> bool:
    start = text[:_ENCODED_AT_LEAST]
    return len(start) == _ENCODED_AT_LEAST and start.isascii() and not re.search(r"\s", start)


def _bytes_of(text: str) -> int:
    return len(text.encode(errors="replace"))


_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_READ_FIELDS = _RARE_FIELDS | frozenset(
    (*_LIMITS, "model", "stream", "store", "messages", "input", "instructions", "system")
)
_READ_PARTS = frozenset(("type", "max_uses", "budget_tokens", "include_usage"))
"""What is read of thinking, of the options of a stream and of a tool."""


class _Endpoint(NamedTuple):
    limits: tuple[str, ...]
    is_embedding: bool
    keeps_responses: bool
    is_message: bool


LONGEST_END = 100
"""So many characters at the end of a path say which endpoint it is."""


@lru_cache(maxsize=256)
def _endpoint_of(path: str) -> _Endpoint:
    """Return what the path of a request says of it."""
    path = path.rstrip("/")
    return _Endpoint(
        limits=_limits_of(path),
        is_embedding=path.endswith(_EMBEDDINGS),
        keeps_responses=path.endswith(_RESPONSES),
        is_message=path.endswith("/messages"),
    )


def _limits_of(path: str) -> tuple[str, ...]:
    """Return the limits that a protocol knows, the one to set first."""
    if path.endswith(_RESPONSES):
        return ("max_output_tokens",)
    return ("max_completion_tokens", "max_tokens") if path.endswith(_CHAT) else ("max_tokens",)


def _answers(fields: dict[str, Any]) -> int:
    """Return how many answers are made: as many as are asked for, to each prompt."""
    each = max(_whole(fields.get("n")) or 1, _whole(fields.get("best_of")) or 1)
    prompts = fields.get("prompt")
    if not isinstance(prompts, list):
        return each
    # A prompt may be given as a list of tokens.
    is_one = any(type(prompt) is int for prompt in prompts)
    return each if is_one else each * max(len(prompts), 1)


def _server_tools(fields: dict[str, Any], tools: list[Any]) -> tuple[ServerTool, ...]:
    found: list[ServerTool] = []
    for tool in tools:
        if not isinstance(tool, dict):
            continue
        kind = tool.get("type")
        if isinstance(kind, str) and not _CLIENT_TOOLS.match(kind):
            name = _DATED.sub("", kind)[:_MAX_NAME_LENGTH]
            found.append(ServerTool(name, _whole(tool.get("max_uses"))))
    if fields.get("web_search_options") is not None:
        found.append(ServerTool("web_search"))
    if fields.get("mcp_servers"):
        found.append(ServerTool("mcp"))
    return tuple(found)


def _prefix_hash(fields: dict[str, Any], tools: list[Any]) -> str:
    """Return a hash of system prompt and tools, which a provider caches; empty without both."""
    system = fields.get("system") or fields.get("instructions")
    messages = fields.get("messages") or fields.get("input")
    if system is None and isinstance(messages, list) and messages:
        first = messages[0]
        if isinstance(first, dict) and first.get("role") in _SYSTEM_ROLES:
            system = first.get("content")
    if not system and not tools:
        return ""
    try:
        return blake2b(msgspec.json.encode((system, tools)), digest_size=8).hexdigest()
    except _UNENCODABLE:
        return ""


_UNENCODABLE = (*_UNREADABLE, UnicodeEncodeError)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _whole(value: object) -> int | None:
    """Read a count as a provider might: a number that is whole, or its digits."""
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and value >= 0 else None
