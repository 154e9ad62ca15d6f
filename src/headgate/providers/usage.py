"""What a call to a model used, as its response says.

It reads the shapes of OpenAI (chat completions, responses, embeddings) and of Anthropic (messages),
whole or as a stream of events. Rule: nothing that a provider sends raises anything here. What
cannot be read is unknown, and whoever books it takes what was reserved; a model without a price has
known tokens and an unknown cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from headgate.core.lifecycle import UNKNOWN_USAGE, Usage
from headgate.core.money import MAX_RESERVATION_MICRO_USD, to_tokens
from headgate.core.text import Steps, at_once
from headgate.errors import CallerError
from headgate.providers.content_coding import ContentCodingError, ContentDecoder, coding_of
from headgate.providers.prices import PriceList

_MENTION = b'"usage"'
_DATA = b"data:"
_DONE = b"[DONE]"
_STOP = b"message_stop"
_LAST_TYPES = frozenset(
    ("message_stop", "response.completed", "response.incomplete", "response.failed")
)


class CountedTokens(NamedTuple):
    """What a response says of its model and its tokens."""

    model: str
    input_tokens: int
    output_tokens: int


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct):
    """The counts of all shapes; a response has some of them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _Response(msgspec.Struct):
    model: object = None
    usage: _Counts | None = None


class _Event(msgspec.Struct):
    """One event of a stream; its usage may lie in the message or the response that it reports."""

    type: object = None
    model: object = None
    usage: _Counts | None = None
    message: _Response | None = None
    response: _Response | None = None


class _Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as they are priced: the input counts everything, from the cache or not."""

    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int


# Some proxies write counts as 900000.0, or as texts.
_responses = msgspec.json.Decoder(_Response, strict=False)
_events = msgspec.json.Decoder(_Event, strict=False)
_LINES_BYTES = 4 * 1024
"""How much of a stream is read before others have their turn; each byte may end a line."""
# A body is somebody else's: it may be no JSON, no UTF-8, or nested until the stack ends.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def usage_of(
    body: bytes | msgspec.Raw, prices: PriceList, *, priced_as: str | None = None
) -> Usage:
    """Return what the body of a response says was used: JSON, or server-sent events.

    It costs what the model that answered costs, or the one that `priced_as` names.
    """
    return at_once(usage_steps(body, prices, priced_as=priced_as))


def usage_steps(
    body: bytes | msgspec.Raw, prices: PriceList, *, priced_as: str | None = None
) -> Steps[Usage]:
    """Do the same in slices."""
    body = bytes(body)
    if _MENTION not in body:
        return UNKNOWN_USAGE
    try:
        return _priced(_responses.decode(body), prices, priced_as)
    except _UNREADABLE:
        lines = _Lines()
    for start in range(0, len(body), _LINES_BYTES):
        lines.feed(body[start : start + _LINES_BYTES])
        yield
    return lines.usage(prices, priced_as)[0]


class StreamedUsage:
    """What the events of a stream say, line by line; a later count replaces an earlier one.

    `is_over` tells whether the last event has come: counts before it may not be all.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._merged = _Response()

    def read(self, line: bytes) -> None:
        """Read one line of the stream, without its end."""
        if not line.startswith(_DATA):
            return
        data = line.removeprefix(_DATA)
        if _MENTION in data or _STOP in data:
            self._read_event(data)
        elif data.strip() == _DONE:
            self.is_over = True

    def usage(self, prices: PriceList, *, priced_as: str | None = None) -> Usage:
        """Return what was used by what was read so far."""
        return _priced(self._merged, prices, priced_as)

    def counts(self) -> CountedTokens | None:
        """Return what went in and came out by what was read so far."""
        return _counted(self._merged)

    def _read_event(self, data: bytes) -> None:
        try:
            event = _events.decode(data)
        except _UNREADABLE:
            return
        found = (event.message, event.response, _Response(model=event.model, usage=event.usage))
        for response in found:
            if response is not None:
                _merge(self._merged, response)
        if isinstance(event.type, str) and event.type in _LAST_TYPES:
            self.is_over = True


def counted_tokens(body: bytes | msgspec.Raw | None) -> CountedTokens | None:
    """Return what went in and came out by the body of a response; None if it does not say."""
    text = b"" if body is None else bytes(body)
    if _MENTION not in text:
        return None
    try:
        response = _responses.decode(text)
    except _UNREADABLE:
        return None
    return _counted(response)


def _counted(response: _Response) -> CountedTokens | None:
    tokens = None if response.usage is None else _tokens(response.usage)
    if tokens is None:
        return None
    model = response.model if isinstance(response.model, str) else ""
    return CountedTokens(model, tokens.input_tokens, tokens.output_tokens)


def _merge(merged: _Response, later: _Response) -> None:
    merged.model = later.model or merged.model
    if merged.usage is None or later.usage is None:
        merged.usage = later.usage or merged.usage
        return
    for name in _Counts.__struct_fields__:
        count = getattr(later.usage, name)
        if count is not None:
            setattr(merged.usage, name, count)


def _priced(response: _Response, prices: PriceList, priced_as: str | None = None) -> Usage:
    tokens = None if response.usage is None else _tokens(response.usage)
    if tokens is None:
        return UNKNOWN_USAGE
    model = response.model if isinstance(response.model, str) else ""
    named = model or priced_as or None
    try:
        total = to_tokens(to_tokens(tokens.input_tokens) + to_tokens(tokens.output_tokens))
    except CallerError:
        # It has used something, though nobody can have used that.
        return Usage(model=named)
    micro_usd = _micro_usd(priced_as or model, tokens, prices)
    return Usage(tokens=total, micro_usd=micro_usd, model=named, is_priced=micro_usd is not None)


def _micro_usd(model: str, tokens: _Tokens, prices: PriceList) -> int | None:
    try:
        cost = prices.cost(model, **msgspec.structs.asdict(tokens))
    except CallerError:
        return None
    # A ledger refuses a larger amount, and then the task could not be settled at all.
    return cost.micro_usd if cost.micro_usd <= MAX_RESERVATION_MICRO_USD else None


def _tokens(counts: _Counts) -> _Tokens | None:
    """Read the counts of whichever shape they have."""
    if counts.prompt_tokens is not None:
        return _whole_input(
            counts, counts.prompt_tokens, counts.completion_tokens, counts.prompt_tokens_details
        )
    if counts.input_tokens is None:
        return None if counts.total_tokens is None else _only_total(counts.total_tokens)
    if counts.cache_creation_input_tokens is None and counts.cache_read_input_tokens is None:
        return _whole_input(
            counts, counts.input_tokens, counts.output_tokens, counts.input_tokens_details
        )
    return _input_beside_cache(counts, counts.input_tokens)


def _only_total(total: int) -> _Tokens:
    """Read a total alone; nobody knows how much of it was output, which costs most."""
    return _Tokens(input_tokens=0, output_tokens=total, cache_read_tokens=0, cache_write_tokens=0)


def _whole_input(
    counts: _Counts, given: int, produced: int | None, details: _Details | None
) -> _Tokens | None:
    """OpenAI: the input includes what the cache gave, and a total may count hidden output."""
    if produced is None and counts.total_tokens is None:
        return None
    beyond = 0 if counts.total_tokens is None else counts.total_tokens - given
    cached = 0 if details is None else details.cached_tokens or 0
    # A negative count stays as it is, to be refused; the larger of two is what may be charged.
    output = beyond if produced is None else produced if produced < 0 else max(produced, beyond)
    return _Tokens(
        input_tokens=given, output_tokens=output, cache_read_tokens=cached, cache_write_tokens=0
    )


def _input_beside_cache(counts: _Counts, given: int) -> _Tokens | None:
    """Anthropic: the input is what came neither from the cache nor went into it."""
    if counts.output_tokens is None:
        return None
    written, read = counts.cache_creation_input_tokens or 0, counts.cache_read_input_tokens or 0
    if min(given, written, read) < 0:
        return None
    return _Tokens(
        input_tokens=given + written + read,
        output_tokens=counts.output_tokens,
        cache_read_tokens=read,
        cache_write_tokens=written,
    )


# What a response says was used, read from its bytes while they pass by.
#
# Rule: the bytes go to whoever asked as they come; what is kept of them is bounded. Of a stream
# that is one line and the counts, of another body the body, up to a limit. What was not read to
# its end, or cannot be read, leaves the usage unknown, or at least so much.

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_LINE_BYTES = 8 * 1024 * 1024
MAX_STREAM_BYTES = 1024 * 1024 * 1024
"""A stream is read along with for so long; the longest that a model writes are a few megabytes."""


class ResponseReader:
    """Reads along with one response; one that cannot be decoded has an unknown usage."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._decoder: ContentDecoder | None = None
        with suppress(ContentCodingError):
            self._decoder = ContentDecoder(coding_of(headers), max_bytes=MAX_STREAM_BYTES)
        kind = headers.get("content-type", "").lower()
        self._content: _Lines | _Body | None = None
        if kind.startswith("text/event-stream"):
            self._content = _Lines()

    @property
    def has_more(self) -> bool:
        """Whether there is something left to read before further bytes come; feed nothing then."""
        return self._decoder is not None and self._decoder.has_more

    def feed(self, chunk: bytes) -> None:
        """Read the next bytes, as they came over the wire: one slice of all that waits."""
        if self._decoder is None:
            return
        try:
            self._read(self._decoder.feed(chunk))
        except ContentCodingError:
            self._decoder = None

    def usage(self, prices: PriceList, *, priced_as: str) -> tuple[Usage, bool]:
        """Return what was used as far as it is known, and whether that is all of it."""
        if self._decoder is None or self._content is None:
            return UNKNOWN_USAGE, False
        return self._content.usage(prices, priced_as)

    def counts(self) -> CountedTokens | None:
        """Return what went in and came out, if all of it was read."""
        if self._decoder is None or self._content is None:
            return None
        return self._content.counts()

    def _read(self, piece: bytes) -> None:
        if self._content is None:
            # Some gateways send events under another type, or none; JSON begins otherwise.
            piece = piece.lstrip()
            if not piece:
                return
            self._content = _Body() if piece.startswith(b"{") else _Lines()
        self._content.feed(piece)


class _Body:
    """A body that is one JSON value."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._bytes = 0

    def feed(self, piece: bytes) -> None:
        self._bytes += len(piece)
        if self._bytes <= MAX_BODY_BYTES:
            self._parts.append(piece)
        else:
            self._parts.clear()

    def usage(self, prices: PriceList, priced_as: str) -> tuple[Usage, bool]:
        usage = usage_of(b"".join(self._parts), prices, priced_as=priced_as)
        return usage, True

    def counts(self) -> CountedTokens | None:
        return counted_tokens(b"".join(self._parts))


class _Lines:
    """A body of server-sent events."""

    def __init__(self) -> None:
        self._streamed = StreamedUsage()
        self._line = bytearray()
        self._is_skipping = False

    def feed(self, piece: bytes) -> None:
        for part in piece.splitlines(keepends=True):
            is_ended = part.endswith((b"\n", b"\r"))
            if len(self._line) + len(part) > MAX_LINE_BYTES:
                self._is_skipping = True
                self._line.clear()
            if not self._is_skipping:
                self._line += part
            if is_ended:
                self._end_line()

    def usage(self, prices: PriceList, priced_as: str | None) -> tuple[Usage, bool]:
        self._end_line()
        return self._streamed.usage(prices, priced_as=priced_as), self._streamed.is_over

    def counts(self) -> CountedTokens | None:
        return self._streamed.counts() if self._streamed.is_over else None

    def _end_line(self) -> None:
        self._streamed.read(bytes(self._line).rstrip(b"\r\n"))
        self._line.clear()
        self._is_skipping = False
