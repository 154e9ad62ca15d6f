"""What a request asks of a model: which one, how large the prompt is, how much may come back.

It reads the requests of OpenAI (chat completions, completions, responses, embeddings) and of
Anthropic (messages), by the end of their path, so that gateways with a prefix are read too.

Rule: the prompt is measured and never kept. Text counts by its bytes in UTF-8, of which four are
taken for a token; an image has a size of its own, because its bytes say little about its tokens.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import msgspec

from headgate.providers.prices import CHARACTERS_PER_TOKEN

IMAGE_CHARS = 2_000 * CHARACTERS_PER_TOKEN
ENCODED_CHARS_PER_CHAR = 16
"""How many characters of an encoded document or recording count as one of its text."""

_ENCODED_AT_LEAST = 256
_IMAGES = {"image": "source", "image_url": "image_url", "input_image": "image_url"}
"""By the type of a block, the field that holds its image."""
_TOOL_CALLS = frozenset(("tool_use", "server_tool_use", "mcp_tool_use"))
_DIGITS = re.compile(r"\s*[0-9]{1,18}\s*", re.ASCII)
_EMBEDDINGS = "/embeddings"
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


class Kind(Enum):
    """What a request is to a budget."""

    MODEL_CALL = "it asks a model and costs what that used"
    FREE = "it asks no model"
    OTHER = "nobody here knows what it costs"


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call to a model, as far as order and money depend on it.

    `max_tokens` is None where the request leaves the length of a response open, and `answers` says
    how many may be made.
    """

    model: str
    prompt_chars: int
    max_tokens: int | None = None
    answers: int = 1

    def output_tokens(self, open_tokens: int) -> int:
        """Return how much may come back, where an open answer is taken to be so long."""
        return self.answers * (open_tokens if self.max_tokens is None else self.max_tokens)


class _Fields(msgspec.Struct):
    """The fields that matter, whatever they hold; a provider judges the rest."""

    model: object = None
    max_tokens: object = None
    max_completion_tokens: object = None
    max_output_tokens: object = None
    n: object = None
    best_of: object = None
    prompt: object = None


_fields = msgspec.json.Decoder(_Fields)


def kind_of(method: str, path: str) -> Kind:
    """Say whether a request costs something, by its method and path."""
    if method.upper() in _READING:
        return Kind.FREE
    if _MODEL_PATH.search(path):
        return Kind.MODEL_CALL
    return Kind.FREE if _FREE_PATH.search(path) else Kind.OTHER


def read_call(path: str, body: bytes) -> ModelCall:
    """Read what a request asks for; what cannot be read is an unnamed model and a long prompt."""
    try:
        fields, content = _fields.decode(body), msgspec.json.decode(body)
    except _UNREADABLE:
        return ModelCall(model="", prompt_chars=len(body))
    is_embedding = path.rstrip("/").endswith(_EMBEDDINGS)
    return ModelCall(
        model=fields.model if isinstance(fields.model, str) else "",
        prompt_chars=text_size(content),
        max_tokens=0 if is_embedding else _max_tokens(fields),
        answers=_answers(fields),
    )


def with_model(body: bytes, model: str) -> bytes:
    """Return the body with another model, and all else as it was."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "model": model})


def with_stream_usage(path: str, body: bytes) -> bytes:
    """Return the body with `stream_options.include_usage`, if a stream would not tell otherwise."""
    if not _STREAM_USAGE_PATH.search(path):
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        options = msgspec.json.decode(
            fields.get("stream_options", b"null"), type=dict[str, Any] | None
        )
    except _UNREADABLE:
        return body
    if bytes(fields.get("stream", b"")) != b"true" or "include_usage" in (options or {}):
        return body
    return msgspec.json.encode(
        {**fields, "stream_options": {**(options or {}), "include_usage": True}}
    )


def text_size(content: object, *, is_plain: bool = False) -> int:
    """Measure a prompt, in characters that make tokens; if it is plain, all of it is text."""
    size = 0
    waiting: list[object] = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            size += _bytes_of(value)
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            size += sum(map(_bytes_of, value))
            if is_plain:
                waiting += value.values()
            else:
                size += _size_beside(value, waiting)
        elif type(value) is int:
            # A prompt may be given in tokens, as numbers.
            size += CHARACTERS_PER_TOKEN
    return size


def _size_beside(value: dict[str, Any], waiting: list[object]) -> int:
    """Return the size of what is no text in an object; what is left to be measured waits."""
    kind = value.get("type")
    kind = kind if isinstance(kind, str) else ""
    if kind in _TOOL_CALLS:
        # What a tool is given is text to the model, whatever it looks like.
        return text_size(list(value.values()), is_plain=True)
    image = _IMAGES.get(kind)
    size = 0
    for name, field in value.items():
        if name == image:
            size += IMAGE_CHARS
        elif isinstance(field, str) and _may_be_encoded(name, value) and _is_encoded(field):
            size += len(field) // ENCODED_CHARS_PER_CHAR
        else:
            waiting.append(field)
    return size


def _may_be_encoded(name: str, beside: dict[str, Any]) -> bool:
    """Whether a field is where providers take documents and recordings."""
    is_data = beside.get("type") == "base64" or "format" in beside
    return name == "file_data" or (name == "data" and is_data)


def _is_encoded(text: str) -> bool:
    start = text[:_ENCODED_AT_LEAST]
    return len(start) == _ENCODED_AT_LEAST and start.isascii() and not re.search(r"\s", start)


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def _max_tokens(fields: _Fields) -> int | None:
    """Return the largest limit that is named: which of them holds is the provider's to say."""
    named = (fields.max_completion_tokens, fields.max_output_tokens, fields.max_tokens)
    limits = [limit for limit in map(_whole, named) if limit is not None]
    return max(limits, default=None)


def _answers(fields: _Fields) -> int:
    """Return how many answers are made: as many as are asked for, to each prompt."""
    each = max(_whole(fields.n) or 1, _whole(fields.best_of) or 1)
    prompts = fields.prompt
    if not isinstance(prompts, list):
        return each
    # A prompt may be given as a list of tokens.
    is_one = any(type(prompt) is int for prompt in prompts)
    return each if is_one else each * max(len(prompts), 1)


def _whole(value: object) -> int | None:
    """Read a count as a provider might: a number that is whole, or its digits."""
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and value >= 0 else None
