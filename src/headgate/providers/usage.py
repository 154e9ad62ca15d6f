"""What a call to a model used, as its response says.

It reads the shapes of OpenAI (chat completions, responses, embeddings) and of Anthropic (messages),
whole or as a stream of events. Rule: nothing that a provider sends raises anything here. What
cannot be read is unknown, and whoever books it takes what was reserved; a model without a price has
known tokens and an unknown cost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from headgate.core.lifecycle import UNKNOWN_USAGE, Usage
from headgate.core.money import MAX_RESERVATION_TOKENS
from headgate.core.text import Steps, at_once
from headgate.errors import CallerError
from headgate.providers.content_coding import ContentCodingError, ContentDecoder, coding_of
from headgate.providers.prices import PriceList

_EVENTS = "text/event-stream"
_MENTION = b'"usage"'
_SILENT_MENTION = b'"usage":null'
_DATA = b"data:"
_DONE = b"[DONE]"
_STOP = b"message_stop"
_RESPONSE = b'"response'
_LAST_TYPES = frozenset(
    ("message_stop", "response.completed", "response.incomplete", "response.failed")
)
_MAX_DATA_LINES = 64
"""An event of more lines is not read; providers write one."""


class CountedTokens(NamedTuple):
    """What a response says of its model and its tokens."""

    model: str
    input_tokens: int
    output_tokens: int


class ReportedUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a response says it used, to the token.

    The input counts everything, from the cache or not. `cache_write_tokens` are kept for minutes,
    `cache_write_1h_tokens` for an hour. `server_tool_requests` are searches of the web that the
    provider made, `file_searches` those in stored files. `service_tier` is the one that is billed.
    """

    model: str = ""
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    cache_write_1h_tokens: int = 0
    reasoning_tokens: int = 0
    audio_input_tokens: int = 0
    audio_output_tokens: int = 0
    server_tool_requests: int = 0
    file_searches: int = 0
    service_tier: str = ""
    is_surcharged: bool = False

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.input_tokens + self.output_tokens

    def cost(self, prices: PriceList, *, priced_as: str | None = None) -> Usage:
        """Return what it is booked at: as the model that answered, or as `priced_as`.

        A model without a price has known tokens and an unknown cost, and so has a counting that
        nobody can have used.
        """
        named = self.model or priced_as or None
        total = self.input_tokens + self.output_tokens
        if self.input_tokens < 0 or self.output_tokens < 0 or total > MAX_RESERVATION_TOKENS:
            # It has used something, though nobody can have used that.
            return Usage(model=named)
        micro_usd = self._micro_usd(priced_as or self.model, prices)
        is_priced = micro_usd is not None
        return Usage(tokens=total, micro_usd=micro_usd, model=named, is_priced=is_priced)

    def _micro_usd(self, model: str, prices: PriceList) -> int | None:
        if self.is_surcharged:
            return None
        beside = self._beside()
        try:
            is_plain = not (beside or self.cached_tokens or self.cache_write_tokens)
            if is_plain and not prices.has_own_costs:
                lengths = (self.output_tokens,)
                return prices.plain_costs(
                    model, input_tokens=self.input_tokens, output_tokens=lengths
                )[0]
            # A ledger refuses a larger amount, and then the task could not be settled at all.
            return prices.cost(
                model,
                input_tokens=self.input_tokens,
                output_tokens=self.output_tokens,
                cache_read_tokens=self.cached_tokens,
                cache_write_tokens=self.cache_write_tokens,
                # Prices of one's own may know no more than these.
                **beside,
            ).micro_usd
        except CallerError:
            return None

    def _beside(self) -> dict[str, Any]:
        """Return what is billed beside plain tokens and the cache."""
        if not (
            self.cache_write_1h_tokens
            or self.audio_input_tokens
            or self.audio_output_tokens
            or self.server_tool_requests
            or self.file_searches
            or self.service_tier
        ):
            return {}
        beside: dict[str, Any] = {
            "cache_write_1h_tokens": self.cache_write_1h_tokens,
            "audio_input_tokens": self.audio_input_tokens,
            "audio_output_tokens": self.audio_output_tokens,
            "web_searches": self.server_tool_requests,
            "file_searches": self.file_searches,
            "service_tier": self.service_tier,
        }
        return {name: value for name, value in beside.items() if value}

    @property
    def is_possible(self) -> bool:
        """Whether somebody can have used that."""
        given, made = self.input_tokens, self.output_tokens
        return (
            given >= 0 <= made
            and self.cached_tokens >= 0
            and given + made <= MAX_RESERVATION_TOKENS
        )


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    audio_tokens: object = None


class _Counts(msgspec.Struct):
    """The counts of all shapes; a response has some of them.

    What was added later is any object: a strange value leaves the tokens known.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: object = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: object = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation: object = None
    server_tool_use: object = None
    speed: object = None


_NO_OUTPUT = msgspec.Raw()


class _Response(msgspec.Struct):
    model: object = None
    usage: _Counts | None = None
    service_tier: object = None
    output: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class _Event(msgspec.Struct):
    """One event of a stream; its usage may lie in the message or the response that it reports."""

    type: object = None
    model: object = None
    usage: _Counts | None = None
    service_tier: object = None
    message: _Response | None = None
    response: _Response | None = None


class _Item(msgspec.Struct):
    type: object = None


# Some proxies write counts as 900000.0, or as texts.
_responses = msgspec.json.Decoder(_Response, strict=False)
_events = msgspec.json.Decoder(_Event, strict=False)
_items = msgspec.json.Decoder(list[_Item])
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
        lines = EventStreamReader()
    for start in range(0, len(body), _LINES_BYTES):
        lines.feed(body[start : start + _LINES_BYTES])
        yield
    return lines.usage(prices, priced_as)[0]


class _Mention(msgspec.Struct):
    """Where a result may tell of usage: at its top, or in what a command has printed."""

    usage: msgspec.Raw = msgspec.Raw()
    stdout: object = None


_mentions = msgspec.json.Decoder(_Mention)


def tells_unknown_usage(result: bytes | msgspec.Raw) -> bool:
    """Tell whether a result that no usage was found in has a `usage` of some other shape."""
    result = bytes(result)
    if b"usage" not in result:
        return False
    try:
        found = _mentions.decode(result)
    except _UNREADABLE:
        return False
    if isinstance(found.stdout, str):
        return tells_unknown_usage(found.stdout.encode(errors="replace"))
    # A text may be how something is used, and an empty object tells nothing.
    return bytes(found.usage)[:1] == b"{" and bytes(found.usage) != b"{}"


class StreamedUsage:
    """What the events of a stream say, line by line; a later count replaces an earlier one.

    `is_over` tells whether the last event has come: counts before it may not be all.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._merged = _Response()
        self._data: list[bytes] = []

    @property
    def is_between_events(self) -> bool:
        """Whether nothing was read of the event that comes next."""
        return not self._data

    def read(self, line: bytes) -> None:
        """Read one line of the stream, without its end."""
        if not line.startswith(_DATA):
            if not line:
                self._data.clear()
            return
        data = line.removeprefix(_DATA)
        # An event may have several lines of data, which are one text.
        if len(self._data) < _MAX_DATA_LINES:
            self._data.append(data)
        if len(self._data) > 1:
            data = b"\n".join(self._data)
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

    def reported(self) -> ReportedUsage | None:
        """Return all that is said of the usage by what was read so far."""
        return _reported(self._merged)

    def _read_event(self, data: bytes) -> None:
        try:
            event = _events.decode(data)
        except _UNREADABLE:
            return
        own = _Response(model=event.model, usage=event.usage, service_tier=event.service_tier)
        for response in (event.message, event.response, own):
            if response is not None:
                _merge(self._merged, response)
        if isinstance(event.type, str) and event.type in _LAST_TYPES:
            self.is_over = True


def counted_tokens(body: bytes | msgspec.Raw | None) -> CountedTokens | None:
    """Return what went in and came out by the body of a response; None if it does not say."""
    response = _read_response(body)
    return None if response is None else _counted(response)


def reported_usage(body: bytes | msgspec.Raw | None) -> ReportedUsage | None:
    """Return all that the body of a response says it used; None if it does not say."""
    response = _read_response(body)
    return None if response is None else _reported(response)


def _read_response(body: bytes | msgspec.Raw | None) -> _Response | None:
    text = b"" if body is None else bytes(body)
    if _MENTION not in text:
        return None
    try:
        return _responses.decode(text)
    except _UNREADABLE:
        return None


def _counted(response: _Response) -> CountedTokens | None:
    usage = _usage(response)
    if usage is None:
        return None
    return CountedTokens(usage.model, usage.input_tokens, usage.output_tokens)


def _reported(response: _Response) -> ReportedUsage | None:
    usage = _usage(response)
    return usage if usage is not None and usage.is_possible else None


def _merge(merged: _Response, later: _Response) -> None:
    merged.model = later.model or merged.model
    merged.service_tier = later.service_tier or merged.service_tier
    if len(bytes(later.output)) > len(bytes(merged.output)):
        merged.output = later.output.copy()
    if merged.usage is None or later.usage is None:
        merged.usage = later.usage or merged.usage
        return
    for name in _Counts.__struct_fields__:
        count = getattr(later.usage, name)
        if count is not None:
            setattr(merged.usage, name, count)


def _priced(response: _Response, prices: PriceList, priced_as: str | None = None) -> Usage:
    usage = _usage(response)
    return UNKNOWN_USAGE if usage is None else usage.cost(prices, priced_as=priced_as)


def _usage(response: _Response) -> ReportedUsage | None:
    """Read the counts of whichever shape they have."""
    counts = response.usage
    if counts is None:
        return None
    if counts.prompt_tokens is not None:
        usage = _whole_input(
            counts, counts.prompt_tokens, counts.completion_tokens, counts.prompt_tokens_details
        )
    elif counts.input_tokens is None:
        # Nobody knows how much of a total was output, which costs most.
        total = counts.total_tokens
        usage = None if total is None else ReportedUsage(input_tokens=0, output_tokens=total)
    elif counts.cache_creation_input_tokens is None and counts.cache_read_input_tokens is None:
        usage = _whole_input(
            counts, counts.input_tokens, counts.output_tokens, counts.input_tokens_details
        )
    else:
        usage = _input_beside_cache(counts, counts.input_tokens)
    if usage is None:
        return None
    tier, model = response.service_tier, response.model
    model = model if isinstance(model, str) else ""
    has_tools = counts.server_tool_use is not None or response.output != _NO_OUTPUT
    if tier is None and counts.speed is None and not has_tools:
        # Most responses say no more.
        return msgspec.structs.replace(usage, model=model)
    return msgspec.structs.replace(
        usage,
        model=model,
        service_tier=tier if isinstance(tier, str) else "",
        is_surcharged=counts.speed == "fast",
        server_tool_requests=_count(counts.server_tool_use, "web_search_requests")
        + _calls(response.output, "web_search_call"),
        file_searches=_calls(response.output, "file_search_call"),
    )


def _whole_input(
    counts: _Counts, given: int, produced: int | None, details: _Details | None
) -> ReportedUsage | None:
    """OpenAI: the input includes what the cache gave, and a total may count hidden output."""
    if produced is None and counts.total_tokens is None:
        return None
    beyond = 0 if counts.total_tokens is None else counts.total_tokens - given
    # A negative count stays as it is, to be refused; the larger of two is what may be charged.
    output = beyond if produced is None else produced if produced < 0 else max(produced, beyond)
    made = counts.completion_tokens_details or counts.output_tokens_details
    if details is None and not made:
        return ReportedUsage(input_tokens=given, output_tokens=output)
    heard = 0 if details is None else _whole(details.audio_tokens)
    return ReportedUsage(
        input_tokens=given,
        output_tokens=output,
        cached_tokens=0 if details is None else details.cached_tokens or 0,
        reasoning_tokens=min(_count(made, "reasoning_tokens"), max(output, 0)),
        audio_input_tokens=min(heard, max(given, 0)),
        audio_output_tokens=min(_count(made, "audio_tokens"), max(output, 0)),
    )


def _input_beside_cache(counts: _Counts, given: int) -> ReportedUsage | None:
    """Anthropic: the input is what came neither from the cache nor went into it."""
    if counts.output_tokens is None:
        return None
    written, read = counts.cache_creation_input_tokens or 0, counts.cache_read_input_tokens or 0
    if min(given, written, read) < 0:
        return None
    for_an_hour = min(_count(counts.cache_creation, "ephemeral_1h_input_tokens"), written)
    made = counts.output_tokens_details
    return ReportedUsage(
        input_tokens=given + written + read,
        output_tokens=counts.output_tokens,
        cached_tokens=read,
        cache_write_tokens=written - for_an_hour,
        cache_write_1h_tokens=for_an_hour,
        reasoning_tokens=min(_count(made, "reasoning_tokens"), max(counts.output_tokens, 0)),
    )


def _count(values: object, name: str) -> int:
    return _whole(values.get(name)) if isinstance(values, dict) else 0


def _whole(value: object) -> int:
    return value if type(value) is int and 0 < value <= MAX_RESERVATION_TOKENS else 0


def _calls(output: msgspec.Raw, kind: str) -> int:
    """Count what the provider's own tools did, as the list of what came out shows it."""
    text = bytes(output)
    if not text or kind.encode() not in text:
        return 0
    try:
        return sum(item.type == kind for item in _items.decode(output))
    except _UNREADABLE:
        return 0


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
        self._content: EventStreamReader | _Body | None = None
        if kind.startswith(_EVENTS):
            self._content = EventStreamReader()

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

    def reported(self) -> tuple[ReportedUsage | None, bool]:
        """Return all that was said of the usage so far, and whether that is all of it."""
        if self._decoder is None or self._content is None:
            return None, False
        return self._content.reported()

    def _read(self, piece: bytes) -> None:
        if self._content is None:
            # Some gateways send events under another type, or none; JSON begins otherwise.
            piece = piece.lstrip()
            if not piece:
                return
            self._content = _Body() if piece.startswith(b"{") else EventStreamReader()
        self._content.feed(piece)


def reported_in(body: bytes, headers: Mapping[str, str]) -> tuple[ReportedUsage | None, bool]:
    """Return what a whole response says of its usage, and whether that is all of it.

    Its coding was taken off before.
    """
    is_json = body.startswith(b"{") and len(body) <= MAX_BODY_BYTES
    if is_json and not headers.get("content-type", "").lower().startswith(_EVENTS):
        return reported_usage(body), True
    reader = ResponseReader({**headers, "content-encoding": ""})
    reader.feed(body)
    while reader.has_more:
        reader.feed(b"")
    return reader.reported()


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

    def reported(self) -> tuple[ReportedUsage | None, bool]:
        return reported_usage(b"".join(self._parts)), True


class EventStreamReader:
    """Reads along with server-sent events, fed as they come, in any pieces.

    Most pieces are whole events that can tell nothing: those are passed over unread.
    """

    def __init__(self) -> None:
        self._streamed = StreamedUsage()
        self._line = bytearray()
        self._is_skipping = False
        self._is_half_end = False

    @property
    def is_over(self) -> bool:
        """Whether the last event has come."""
        return self._streamed.is_over

    def feed(self, piece: bytes) -> None:
        """Read the next bytes of the stream, decoded."""
        if (
            piece.endswith((b"\n\n", b"\r\n\r\n"))
            and not self._line
            and not self._is_skipping
            and not self._is_half_end
            and self._streamed.is_between_events
            and _tells_nothing(piece)
        ):
            return
        if self._is_half_end and piece.startswith(b"\n"):
            # The line ended with the piece before, of which this is the second half.
            piece = piece[1:]
        if piece:
            self._is_half_end = piece.endswith(b"\r")
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
        """Return what was used as far as it is known, and whether that is all of it."""
        self._end_line()
        return self._streamed.usage(prices, priced_as=priced_as), self._streamed.is_over

    def counts(self) -> CountedTokens | None:
        """Return what went in and came out, if all of it was read."""
        return self._streamed.counts() if self._streamed.is_over else None

    def reported(self) -> tuple[ReportedUsage | None, bool]:
        """Return all that was said of the usage so far, and whether that is all of it."""
        self._end_line()
        return self._streamed.reported(), self._streamed.is_over

    def _end_line(self) -> None:
        self._streamed.read(bytes(self._line).rstrip(b"\r\n"))
        self._line.clear()
        self._is_skipping = False


def _tells_nothing(events: bytes) -> bool:
    """Whether whole events neither count anything nor end the stream, at a glance."""
    if _STOP in events or _DONE in events:
        return False
    if _MENTION not in events:
        return True
    # Where usage was asked for, each chunk before the last has an empty one.
    is_silent = events.count(_MENTION) == events.count(_SILENT_MENTION)
    return is_silent and _RESPONSE not in events


# Usage that somebody on the way asked for: who did not ask for it gets the stream without it.
#
# A stream of chat completions tells its usage in a chunk without choices, and programs that read
# `choices[0]` of every chunk break on it.

EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
MOST_END_BYTES = 4
_LINE_END = re.compile(rb"\r\n|\n|\r")


def event_data(event: bytes) -> bytes:
    """Return the data of one whole event of a stream."""
    lines = [
        line[5:].removeprefix(b" ") for line in _LINE_END.split(event) if line.startswith(_DATA)
    ]
    return lines[0] if len(lines) == 1 else b"\n".join(lines)


class _Chunk(msgspec.Struct):
    choices: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    usage: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


_chunks = msgspec.json.Decoder(_Chunk)


def is_usage_chunk(event: bytes) -> bool:
    """Whether a chunk tells the usage of a chat, and nothing else."""
    if _MENTION not in event:
        return False
    try:
        chunk = _chunks.decode(event_data(event))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    is_empty = re.fullmatch(rb"\[\s*\]", bytes(chunk.choices)) is not None
    return is_empty and bytes(chunk.usage).startswith(b"{")


Rewrite = Callable[[bytes], bytes]
"""Returns one whole event as it is to be seen; empty if it is not."""


class EventRewriter:
    """Cuts a stream that comes in any pieces into events, and has each rewritten when it is whole.

    One that is longer than a line may be goes on unread.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._is_passing = False

    @property
    def is_between(self) -> bool:
        """Whether the next byte begins an event."""
        return not self._held and not self._is_passing

    def feed(self, piece: bytes, rewrite: Rewrite) -> bytes:
        """Return what is to be seen of the stream so far, and was not returned before."""
        held = self._held
        # An end may have begun in what was looked through before.
        scan = max(len(held) - MOST_END_BYTES, 0)
        held += piece
        shown: list[bytes] = []
        start = 0
        while True:
            end = EVENT_END.search(held, max(scan, start))
            # The end of a line may be cut in two.
            if end is None or (end.end() == len(held) and held.endswith(b"\r")):
                break
            event = bytes(held[start : end.end()])
            start = end.end()
            is_unread = self._is_passing or len(event) > MAX_LINE_BYTES
            shown.append(event if is_unread else rewrite(event))
            self._is_passing = False
        del held[:start]
        if self._is_passing or len(held) > MAX_LINE_BYTES:
            self._is_passing = True
            # What might be the half of an end stays until the other half is there.
            cut = len(held.rstrip(b"\r\n"))
            shown.append(bytes(held[:cut]))
            del held[:cut]
        return b"".join(shown)

    def finish(self, rewrite: Rewrite) -> bytes:
        """Return the rest of a stream that ends without an empty line."""
        rest, self._held = bytes(self._held), bytearray()
        return rest if self._is_passing or not rest else rewrite(rest)


class UsageHider:
    """Takes the chunk of the usage out of a stream of chat completions; all else stays as it is."""

    def __init__(self) -> None:
        self._events = EventRewriter()

    def feed(self, piece: bytes) -> bytes:
        """Return what is to be seen of the stream so far, and was not returned before."""
        return self._events.feed(piece, _without_usage)

    def finish(self) -> bytes:
        """Return the rest of a stream that ends without an empty line."""
        return self._events.finish(_without_usage)


def _without_usage(event: bytes) -> bytes:
    return b"" if is_usage_chunk(event) else event
