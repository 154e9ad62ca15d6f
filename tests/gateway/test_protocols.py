"""The shapes of the protocols: made here, and read by the SDKs of those who made the protocols."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.answer_shapes import Answer, Tokens, ToolCall, stream
from headgate.gateway.protocols import (
    ErrorAnswer,
    Failure,
    ListedModel,
    Protocol,
    StreamRelay,
    UsedWindow,
    codex_headers,
    error_answer,
    failure_of,
    models_body,
    protocol_of,
    returned_headers,
    upstream_headers,
    upstream_query,
)
from headgate.providers import usage as usages
from headgate.providers.usage import EventStreamReader, ReportedUsage

CANARY = "sk-canary-0123456789"
TOKEN = "hg_0123456789ab_" + "5" * 40
STREAMED = [one for one in Protocol if one.has_streams]
USED = Tokens(input=300, cached=200, cache_write=50, cache_write_1h=20, output=12, reasoning=4)


def answer(*, tool: bool = False, thought: str = "") -> Answer:
    return Answer(
        number=1,
        model="the-model",
        text='Some words: "usage": {} and message_start, é and\ndata: [DONE]',
        thought=thought,
        tool=ToolCall("weather", {"city": "Ghent"}) if tool else None,
        tokens=USED,
    )


def events(protocol: Protocol, said: Answer | None = None, *, asks_usage: bool = True) -> bytes:
    fields: dict[str, Any] = {"stream": True, "model": "the-model", "messages": []}
    if asks_usage:
        fields["stream_options"] = {"include_usage": True}
    pieces = stream(protocol.value, answer() if said is None else said, fields)
    return b"".join([piece.data for piece in pieces])


def relay(protocol: Protocol, *, hides_usage: bool = False) -> StreamRelay:
    return StreamRelay(
        protocol,
        model="asked-model",
        call_id="call-1",
        created_at=1_760_000_000.5,
        hides_usage=hides_usage,
    )


def passed(through: StreamRelay, pieces: Iterable[bytes]) -> bytes:
    return b"".join([through.feed(piece) for piece in pieces]) + through.finish()


@st.composite
def cut(draw: st.DrawFn, text: bytes) -> list[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


# What each protocol is.


@pytest.mark.parametrize(
    ("path", "protocol"),
    [
        ("/v1/chat/completions", Protocol.CHAT),
        ("/v1/completions", Protocol.COMPLETIONS),
        ("/v1/responses", Protocol.RESPONSES),
        ("/v1/embeddings/", Protocol.EMBEDDINGS),
        ("/v1/messages", Protocol.MESSAGES),
        ("/v1/messages/count_tokens", Protocol.COUNT_TOKENS),
        ("/v1/models", None),
        ("/v1/responses/r1", None),
        ("/chat/completions", None),
    ],
)
def test_a_protocol_is_known_by_its_path(path: str, protocol: Protocol | None) -> None:
    assert protocol_of(path) is protocol
    if protocol is not None:
        assert path.rstrip("/") == f"/v1{protocol.path}"


# Errors.


def sdk_error(protocol: Protocol, status: int, body: bytes, headers: object = ()) -> Exception:
    """Return what the SDK of a protocol raises for an answer."""
    answered = httpx2.Response(status, content=body, headers=list(headers))  # type: ignore[call-overload]
    with pytest.raises((openai.APIError, anthropic.APIError)) as caught:
        _ask(protocol, answered)
    return caught.value


def _ask(protocol: Protocol, answered: httpx2.Response, *, is_stream: bool = False) -> Any:
    transport = httpx2.MockTransport(lambda _: answered)
    http = httpx2.Client(transport=transport)
    if protocol.kind == "anthropic":
        claude = anthropic.Anthropic(
            api_key="a", base_url="http://x", max_retries=0, http_client=http
        )
        asked: dict[str, Any] = {"model": "m", "messages": [], "max_tokens": 9}
        if protocol is Protocol.COUNT_TOKENS:
            return claude.messages.count_tokens(model="m", messages=[])
        return claude.messages.stream(**asked) if is_stream else claude.messages.create(**asked)
    gpt = openai.OpenAI(api_key="a", base_url="http://x/v1", max_retries=0, http_client=http)
    if protocol is Protocol.CHAT:
        if is_stream:
            return gpt.chat.completions.stream(model="m", messages=[])
        return gpt.chat.completions.create(model="m", messages=[])
    if protocol is Protocol.RESPONSES:
        if is_stream:
            return gpt.responses.stream(model="m", input="x")
        return gpt.responses.create(model="m", input="x")
    if protocol is Protocol.EMBEDDINGS:
        return gpt.embeddings.create(model="m", input="x")
    if is_stream:
        return gpt.completions.create(model="m", prompt="x", stream=True)
    return gpt.completions.create(model="m", prompt="x")


STATUSES = [
    (Failure.REFUSED, 402, 402),
    (Failure.TRY_AGAIN, 429, 429),
    (Failure.UNAUTHORIZED, 401, 401),
    (Failure.FORBIDDEN, 403, 403),
    (Failure.UNKNOWN_MODEL, 404, 404),
    (Failure.WRONG_PROTOCOL, 400, 400),
    (Failure.TOO_LARGE, 413, 413),
    (Failure.UPSTREAM_FAILED, 502, 502),
    (Failure.OVERLOADED, 503, 529),
    (Failure.UNAVAILABLE, 503, 503),
]


@pytest.mark.parametrize("protocol", Protocol)
@pytest.mark.parametrize(("failure", "openai_status", "anthropic_status"), STATUSES)
def test_an_error_is_the_one_that_the_sdk_knows(
    protocol: Protocol, failure: Failure, openai_status: int, anthropic_status: int
) -> None:
    made = error_answer(protocol, failure, "The budget is empty.", retry_after_seconds=7)
    expected = anthropic_status if protocol.kind == "anthropic" else openai_status
    assert made.status == expected
    error = sdk_error(protocol, made.status, made.body)
    assert "The budget is empty." in str(error)
    body = json.loads(made.body)
    assert (body.get("type") == "error") is (protocol.kind == "anthropic")
    assert body["error"]["message"] == "The budget is empty."
    assert body["error"]["type"]


def headers_of(made: ErrorAnswer) -> dict[bytes, bytes]:
    return dict(made.headers)


@pytest.mark.parametrize("protocol", Protocol)
def test_what_is_final_is_not_tried_again_and_a_pause_is_short(protocol: Protocol) -> None:
    final = error_answer(protocol, Failure.REFUSED, "no", retry_after_seconds=5)
    assert headers_of(final) == {b"x-should-retry": b"false"}
    for seconds, said in ((0.2, b"1"), (7.1, b"8"), (3_600, b"55")):
        again = error_answer(protocol, Failure.TRY_AGAIN, "wait", retry_after_seconds=seconds)
        assert headers_of(again) == {b"retry-after": said}


def test_codex_is_refused_with_a_status_and_a_type_that_it_takes_for_final() -> None:
    made = error_answer(
        Protocol.RESPONSES, Failure.REFUSED, "no", client="codex", resets_at=1_760_000_000.9
    )
    assert made.status == 400
    assert json.loads(made.body)["error"] == {
        "message": "no",
        "type": "usage_limit_reached",
        "code": "usage_limit_reached",
        "param": None,
        "resets_at": 1_760_000_000,
    }


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        (400, Failure.BAD_REQUEST),
        (429, Failure.TRY_AGAIN),
        (529, Failure.OVERLOADED),
        (503, Failure.UNAVAILABLE),
        (500, Failure.UPSTREAM_FAILED),
        (504, Failure.UPSTREAM_FAILED),
        (418, Failure.UPSTREAM_FAILED),
    ],
)
def test_a_providers_error_keeps_its_words(status: int, failure: Failure) -> None:
    assert failure_of(status, b'{"error": {"message": "Too much."}}') == (failure, "Too much.")
    for body in (b"", b"<html>", b'{"error": "x"}', b'{"error": {"message": 5}}', b"[" * 9_000):
        assert failure_of(status, body)[1] == f"the provider answered with status {status}"


# Streams that nothing has to be changed in.


@pytest.mark.parametrize("protocol", STREAMED)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_stream_passes_as_it_came_while_its_usage_is_read(
    protocol: Protocol, data: st.DataObject
) -> None:
    text = events(protocol)
    through = relay(protocol)
    for piece in data.draw(cut(text)):
        assert through.feed(piece) is piece
    assert through.finish() == b""
    assert through.is_over
    assert_used(through.usage)


def assert_used(usage: ReportedUsage | None) -> None:
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (USED.input, USED.output)
    assert usage.cached_tokens == USED.cached


@given(st.lists(st.binary(max_size=100), max_size=10), st.sampled_from(STREAMED))
def test_any_bytes_pass_as_they_came(pieces: list[bytes], protocol: Protocol) -> None:
    assert passed(relay(protocol), pieces) == b"".join(pieces)


# Streams that hide the usage which was asked for here.


@pytest.mark.parametrize("protocol", [Protocol.CHAT, Protocol.COMPLETIONS])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_only_the_chunk_with_the_usage_is_taken_out(
    protocol: Protocol, end: bytes, data: st.DataObject
) -> None:
    text = b": a comment\n\n" + events(protocol)
    kept = [one for one in text.split(b"\n\n") if b'"choices":[]' not in one]
    assert len(kept) == text.count(b"\n\n")
    through = relay(protocol, hides_usage=True)
    out = passed(through, data.draw(cut(text.replace(b"\n", end))))
    assert out == b"\n\n".join(kept).replace(b"\n", end)
    assert through.is_over
    assert_used(through.usage)


CHUNKS = [
    (b'{"choices":[],"usage":{"prompt_tokens":1}}', True),
    (b'{"usage": {"prompt_tokens":1}, "choices": [ ]}', True),
    (b'{"choices":[],"usage":null}', False),
    (b'{"choices":[]}', False),
    (b'{"choices":[{"index":0}],"usage":{"prompt_tokens":1}}', False),
    (b'{"usage":{"prompt_tokens":1}}', False),
    (b'{"choices":[],"usage"', False),
]


@pytest.mark.parametrize(("chunk", "is_hidden"), CHUNKS)
def test_a_chunk_is_hidden_if_it_says_the_usage_and_nothing_else(
    chunk: bytes, is_hidden: bool
) -> None:
    for event in (b"data: %b\n\n" % chunk, b"data:%b\r\n\r\n" % chunk, b"id: 5\ndata: %b" % chunk):
        out = passed(relay(Protocol.CHAT, hides_usage=True), [event])
        assert out == (b"" if is_hidden else event)


def test_a_chunk_in_several_lines_is_one() -> None:
    event = b'data: {"choices":[],\ndata: "usage":{"prompt_tokens":1}}\n\n'
    assert passed(relay(Protocol.CHAT, hides_usage=True), [event]) == b""


@given(st.lists(st.binary(max_size=100), max_size=10), st.sampled_from(STREAMED), st.booleans())
def test_no_bytes_raise_and_cutting_them_changes_nothing(
    pieces: list[bytes], protocol: Protocol, hides: bool
) -> None:
    def opened() -> StreamRelay:
        through = relay(protocol, hides_usage=hides)
        through.open()
        return through

    whole = b"".join(pieces)
    single = [whole[n : n + 1] for n in range(len(whole))]
    assert passed(opened(), pieces) == passed(opened(), [whole]) == passed(opened(), single)


def test_a_long_event_passes_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usages, "MAX_LINE_BYTES", 1_000)
    long = b'data: {"choices":[],"usage":{"x":"%b"}}\r\n\r\n' % (b"y" * 2_000)
    short = b'data: {"choices":[],"usage":{"x":1}}\r\n\r\n'
    for pieces in ([long + short], [long, short], [bytes([one]) for one in long + short]):
        through = relay(Protocol.CHAT, hides_usage=True)
        assert passed(through, pieces) == long


def test_an_endless_event_is_not_kept() -> None:
    through = relay(Protocol.CHAT, hides_usage=True)
    piece = b"x" * 1_000_000
    out = sum(len(through.feed(piece)) for _ in range(20))
    assert out >= 20_000_000 - usages.MAX_LINE_BYTES


# Streams that were opened here.


class Read:
    """What an SDK makes of a stream."""

    def __init__(self, protocol: Protocol, text: bytes) -> None:
        kind = {"content-type": "text/event-stream"}
        answered = httpx2.Response(200, content=text, headers=kind)
        asked = _ask(protocol, answered, is_stream=True)
        self.texts: list[str] = []
        self.message: dict[str, Any] = {}
        if protocol is Protocol.MESSAGES:
            with asked as messages:
                self.texts += list(messages.text_stream)
                self.message = messages.get_final_message().to_dict()
        elif protocol is Protocol.CHAT:
            with asked as chat:
                self.types = [event.type for event in chat]
                self.message = chat.get_final_completion().to_dict()
        elif protocol is Protocol.RESPONSES:
            with asked as responses:
                self.events = list(responses)
                self.types = [event.type for event in self.events]
                self.message = responses.get_final_response().to_dict()
        else:
            chunks = list(asked)
            self.texts = [choice.text for chunk in chunks for choice in chunk.choices]
            self.message = {"usage": chunks[-1].usage.to_dict() if chunks[-1].usage else None}

    @property
    def said(self) -> dict[str, Any]:
        """What was answered, whatever the answer is called."""
        return {name: value for name, value in self.message.items() if name not in _NAMES}


_NAMES = ("id", "model", "created", "created_at")
KEPT_ALIVE = 3


def opened(
    protocol: Protocol, text: bytes, pieces: Sequence[bytes] | None = None, *, hides: bool = False
) -> tuple[bytes, StreamRelay]:
    through = relay(protocol, hides_usage=hides)
    out = through.open() + b"".join([through.keep_alive() for _ in range(KEPT_ALIVE)])
    assert through.open() == b""
    return out + passed(through, [text] if pieces is None else pieces), through


@pytest.mark.parametrize("protocol", STREAMED)
@pytest.mark.parametrize("said", [answer(), answer(tool=True), answer(thought="Let me see.")])
def test_an_sdk_reads_the_same_answer_from_a_stream_that_had_to_wait(
    protocol: Protocol, said: Answer
) -> None:
    text = events(protocol, said)
    out, through = opened(protocol, text)
    waited, plain = Read(protocol, out), Read(protocol, text)
    # What an SDK has no place for at the end of a message, it cannot be told there.
    usage = plain.message.get("usage") or {}
    for name in ("cache_creation", "service_tier"):
        usage.pop(name, None)
    assert waited.said == plain.said
    assert "".join(waited.texts) == "".join(plain.texts)
    assert through.is_over
    assert_used(through.usage)


@pytest.mark.parametrize("protocol", [Protocol.CHAT, Protocol.COMPLETIONS])
def test_an_sdk_that_asked_for_no_usage_gets_none(protocol: Protocol) -> None:
    out, through = opened(protocol, events(protocol), hides=True)
    plain = Read(protocol, events(protocol, asks_usage=False))
    assert Read(protocol, out).said == plain.said
    assert_used(through.usage)


@pytest.mark.parametrize("protocol", STREAMED)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_an_opened_stream_is_the_same_however_it_is_cut(
    protocol: Protocol, end: bytes, data: st.DataObject
) -> None:
    text = events(protocol).replace(b"\n", end)
    whole, _ = opened(protocol, text, hides=True)
    parts, through = opened(protocol, text, data.draw(cut(text)), hides=True)
    assert parts == whole
    assert_used(through.usage)


def test_what_a_message_started_with_is_said_at_its_end() -> None:
    out, _ = opened(Protocol.MESSAGES, events(Protocol.MESSAGES))
    assert out.count(b"event: message_start") == 1
    assert out.count(b"event: ping") >= KEPT_ALIVE
    reader = EventStreamReader()
    reader.feed(out)
    assert_used(reader.reported()[0])


def test_a_later_count_of_a_message_is_the_one_that_holds() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 1}}}
    delta = {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn"},
        "usage": {"input_tokens": None, "output_tokens": 9},
    }
    text = "".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in (start, delta))
    through = relay(Protocol.MESSAGES)
    through.open()
    out = passed(through, [text.encode()])
    found = json.loads(out.partition(b"data: ")[2])
    assert found == {**delta, "usage": {"input_tokens": 5, "output_tokens": 9}}


def sequence(text: bytes) -> Iterator[tuple[str, int]]:
    for event in text.split(b"\n\n")[:-1]:
        fields = json.loads(event.partition(b"data: ")[2])
        yield fields["type"], fields["sequence_number"]


def test_events_of_a_response_are_counted_on() -> None:
    text = events(Protocol.RESPONSES)
    out, _ = opened(Protocol.RESPONSES, text)
    found = list(sequence(out))
    assert [number for _, number in found] == list(range(len(found)))
    kinds = [kind for kind, _ in found]
    assert kinds.count("response.created") == 1
    assert kinds[: KEPT_ALIVE + 2] == ["response.created", *["response.in_progress"] * 4]
    assert kinds[-1] == "response.completed"
    own = [kind for kind, _ in sequence(text) if kind not in kinds[: KEPT_ALIVE + 2]]
    assert kinds[KEPT_ALIVE + 2 :] == own


def test_a_response_has_one_id_from_its_opening_to_its_end() -> None:
    out, _ = opened(Protocol.RESPONSES, events(Protocol.RESPONSES))
    assert Read(Protocol.RESPONSES, out).message["id"] == "resp_call-1"
    assert b'"resp_1"' not in out


def test_a_stored_response_keeps_the_id_under_which_it_is_asked_for_later() -> None:
    text = events(Protocol.RESPONSES)
    through = StreamRelay(Protocol.RESPONSES, call_id="call-1", is_stored=True)
    out = through.open() + through.keep_alive()
    assert out == b": waiting\n\n" * 2
    assert through.feed(text) is text
    read = Read(Protocol.RESPONSES, out + text + through.finish())
    assert read.message == Read(Protocol.RESPONSES, text).message
    assert_used(through.usage)


def test_a_stored_response_that_fails_while_it_waits_begins_before() -> None:
    through = StreamRelay(Protocol.RESPONSES, call_id="call-1", is_stored=True)
    out = through.open() + through.fail(Failure.REFUSED, "No room.")
    kinds = [kind for kind, _ in sequence(out.partition(b"\n\n")[2])]
    assert kinds == ["response.created", "response.failed"]


def test_a_provider_that_counts_no_events_begins_only_once() -> None:
    text = b"".join(
        b'event: %b\ndata: {"type":"%b","response":{"id":"r"}}\n\n' % (kind, kind)
        for kind in (b"response.created", b"response.in_progress", b"response.completed")
    )
    through = relay(Protocol.RESPONSES)
    through.open()
    out = passed(through, [text])
    assert out.count(b"event: ") == 1
    assert through.is_over is False  # It said nothing of a usage.


# Streams that fail after they were opened.


@pytest.mark.parametrize("protocol", STREAMED)
@pytest.mark.parametrize("failure", [Failure.REFUSED, Failure.TRY_AGAIN, Failure.OVERLOADED])
def test_an_sdk_shows_the_error_of_a_stream(protocol: Protocol, failure: Failure) -> None:
    through = relay(protocol)
    out = through.open() + through.keep_alive() + through.fail(failure, "The budget is empty.")
    if protocol is Protocol.RESPONSES:
        failed = list(sequence(out))[-1]
        assert failed == ("response.failed", 3)
        read = b"".join(out.partition(b"event: response.failed")[1:])
        error = json.loads(read.partition(b"data: ")[2])["response"]["error"]
        assert error["message"] == "The budget is empty."
        return
    with pytest.raises((openai.APIError, anthropic.APIError), match="The budget is empty"):
        Read(protocol, out)


def failed_response(failure: Failure, seconds: float | None = None) -> dict[str, str]:
    out = relay(Protocol.RESPONSES).fail(failure, "No room.", retry_after_seconds=seconds)
    error: dict[str, str] = json.loads(out.rpartition(b"data: ")[2])["response"]["error"]
    return error


def test_codex_reads_from_the_error_what_to_do() -> None:
    assert failed_response(Failure.REFUSED)["code"] == "invalid_prompt"
    assert failed_response(Failure.TRY_AGAIN, 20) == {
        "code": "rate_limit_exceeded",
        "message": "No room. Please try again in 20s.",
    }
    assert failed_response(Failure.OVERLOADED)["code"] == "server_is_overloaded"


# Windows, models, headers.


def test_codex_is_shown_the_windows_that_it_knows() -> None:
    windows = [UsedWindow(12.34, 300, 1_760_000_000.9), UsedWindow(250, 10_080)]
    assert codex_headers([*windows, UsedWindow(1, 1)]) == (
        (b"x-codex-primary-used-percent", b"12.3"),
        (b"x-codex-primary-window-minutes", b"300"),
        (b"x-codex-primary-reset-at", b"1760000000"),
        (b"x-codex-secondary-used-percent", b"100.0"),
        (b"x-codex-secondary-window-minutes", b"10080"),
    )
    assert codex_headers([]) == ()


@pytest.mark.parametrize("names", [[], ["fast"], ["fast", "gpt-5", "claude-x"]])
def test_both_sdks_read_the_list_of_models(names: list[str]) -> None:
    models = [ListedModel(name) for name in names]

    def client(*, is_anthropic: bool) -> httpx2.Client:
        body = models_body(models, is_anthropic=is_anthropic)
        return httpx2.Client(
            transport=httpx2.MockTransport(lambda _: httpx2.Response(200, content=body))
        )

    gpt = openai.OpenAI(api_key="a", base_url="http://x", http_client=client(is_anthropic=False))
    claude = anthropic.Anthropic(
        api_key="a", base_url="http://x", http_client=client(is_anthropic=True)
    )
    assert [model.id for model in gpt.models.list()] == names
    assert [model.id for model in claude.models.list()] == names


SENT = [
    b"content-type", b"accept", b"user-agent", b"anthropic-version", b"anthropic-beta",
    b"openai-beta", b"x-stainless-lang", b"X-Stainless-Retry-Count", b"x-claude-code-session-id",
    b"session-id", b"session_id", b"x-session-affinity", b"originator", b"x-codex-turn-metadata",
]  # fmt: skip
KEPT_BACK = [
    b"authorization", b"x-api-key", b"api-key", b"cookie", b"host", b"content-length",
    b"connection", b"transfer-encoding", b"te", b"upgrade", b"proxy-authorization", b"forwarded",
    b"x-forwarded-for", b"x-real-ip", b"x-headgate-project", b"x-headgate-scope",
    b"accept-encoding", b"openai-organization", b"chatgpt-account-id", b"expect", b"via",
    b"x-openai-actor-authorization", b"x-codex-api-key", b"traceparent", b"x-goog-api-key",
]  # fmt: skip


def test_only_what_belongs_upstream_goes_upstream() -> None:
    given_headers = [(name, CANARY.encode()) for name in (*SENT, *KEPT_BACK)]
    sent = upstream_headers(given_headers)
    assert [name for name, _ in sent] == [*SENT, b"accept-encoding"]
    assert sent[-1] == (b"accept-encoding", b"identity")


def test_whose_account_is_billed_is_said_by_the_owner_of_the_key() -> None:
    account = [(b"openai-organization", b"org"), (b"openai-project", b"proj")]
    assert upstream_headers(account, is_own_key=True)[:-1] == account


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*SENT, *KEPT_BACK]) | st.binary(max_size=20),
            st.sampled_from([TOKEN.encode(), b"x " + TOKEN.upper().encode(), b"fine"]),
        )
    )
)
def test_no_token_goes_upstream(given_headers: list[tuple[bytes, bytes]]) -> None:
    sent = upstream_headers(given_headers)
    assert TOKEN.encode() not in repr(sent).lower().encode()
    assert {name for name, _ in sent} <= {*SENT, b"accept-encoding"} | {
        name for name, _ in given_headers if name.lower() in SENT or name.lower().startswith(b"x-")
    }


def test_only_what_is_the_clients_comes_back() -> None:
    answered = [
        (b"content-type", b"application/json"), (b"x-request-id", b"req_1"), (b"retry-after", b"5"),
        (b"anthropic-ratelimit-unified-5h-utilization", b"0.5"),
        (b"x-ratelimit-remaining-tokens", b"9"), (b"x-should-retry", b"true"),
        (b"set-cookie", b"a=b"), (b"content-length", b"5"), (b"transfer-encoding", b"chunked"),
        (b"connection", b"close"), (b"anthropic-organization-id", b"org"), (b"server", b"x"),
        (b"openai-organization", b"org"), (b"cf-ray", b"x"), (b"x-headgate-call-id", b"forged"),
        (b"x-codex-primary-used-percent", b"5"), (b"strict-transport-security", b"max-age=1"),
    ]  # fmt: skip
    assert [name for name, _ in returned_headers(answered, lambda value: value)] == [
        b"content-type",
        b"request-id",
        b"retry-after",
        b"anthropic-ratelimit-unified-5h-utilization",
        b"x-ratelimit-remaining-tokens",
        b"x-should-retry",
    ]


@pytest.mark.parametrize(
    ("query", "sent"),
    [
        (b"", b""),
        (b"beta=true", b"beta=true"),
        (b"limit=1000&after_id=a%20b", b"limit=1000&after_id=a%20b"),
        (b"key=sk-1&beta=true", b"beta=true"),
        (b"api_key=x&access_token=y", b""),
        (f"a={TOKEN}&b=1".encode(), b"b=1"),
    ],
)
def test_a_query_goes_upstream_without_keys(query: bytes, sent: bytes) -> None:
    assert upstream_query(query) == sent


def test_a_relay_is_freed_without_a_search_for_garbage() -> None:
    gc.disable()
    try:
        relay = StreamRelay(Protocol.CHAT, hides_usage=True)
        relay.feed(b"data: {")
        kept = weakref.ref(relay)
        del relay
        assert kept() is None
    finally:
        gc.enable()
