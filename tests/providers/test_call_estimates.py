"""What a call is to hold: bounds that nothing passes, and expectations that are learned."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.estimates import Basis, Reserve
from headgate.providers.call_estimates import (
    HIDDEN_TOKENS,
    IMAGE_TOKENS,
    MAX_PROJECTS_OF_MODEL,
    SHORT_TOKENS,
    TOOL_TOKENS,
    CallEstimates,
    UnboundedCallError,
    strict_bound,
)
from headgate.providers.prices import Price, PriceList, UnknownPriceError
from headgate.providers.requests import (
    ModelCall,
    ServerTool,
    read_call,
    with_max_tokens,
    with_stream_usage,
)
from headgate.providers.usage import ReportedUsage

# A token of input costs one micro-dollar, in a cache for an hour two, one of output ten.
PRICES = PriceList({"m": Price(input=1, output=10), "claude-opus-4-1": Price(input=1, output=10)})
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def read(path: str, **fields: object) -> ModelCall:
    return read_call(path, json.dumps({"model": "m", **fields}).encode())


IMAGE = {"type": "image", "source": {"type": "base64", "data": "x" * 400}}
FILE = {"type": "input_image", "file_id": "f"}
UPLOAD = {"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}
TOOL_CALL = {"type": "tool_use", "input": {"type": "document", "file_id": "f"}}
FIELDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"stream": True}, {"is_stream": True, "wants_usage": False}),
    (CHAT, {"stream_options": {"include_usage": True}}, {"wants_usage": True}),
    (CHAT, {"stream_options": {"include_usage": False}}, {"wants_usage": False}),
    (CHAT, {"stream": "true", "stream_options": 5}, {"is_stream": False, "wants_usage": False}),
    (RESPONSES, {"background": True}, {"is_background": True}),
    (RESPONSES, {}, {"is_stored": True}),
    (RESPONSES, {"store": False}, {"is_stored": False}),
    (CHAT, {"store": True}, {"is_stored": False}),
    (RESPONSES, {"prompt_cache_key": "k"}, {"cache_key": "k"}),
    (RESPONSES, {"service_tier": "flex"}, {"service_tier": "flex"}),
    (RESPONSES, {"max_tokens": 5}, {"max_tokens": 5, "bound_tokens": None}),
    (RESPONSES, {"max_output_tokens": 5}, {"bound_tokens": 5}),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, {"bound_tokens": 6}),
    (CHAT, {"max_output_tokens": 5}, {"bound_tokens": None}),
    (MESSAGES, {"max_tokens": 5}, {"bound_tokens": 5, "is_message": True}),
    ("/v1/embeddings", {}, {"bound_tokens": 0}),
    (MESSAGES, {"thinking": {"budget_tokens": 9}}, {"thinking_tokens": 9}),
    (MESSAGES, {"speed": "fast"}, {"is_surcharged": True}),
    (MESSAGES, {"tools": [{"name": "f"}]}, {"has_tools": True, "server_tools": ()}),
    (MESSAGES, {"tools": [{"type": "bash_20250124"}]}, {"server_tools": ()}),
    (
        MESSAGES,
        {"tools": [{"type": "web_search_20250305", "max_uses": 3}]},
        {"server_tools": (ServerTool("web_search", 3),)},
    ),
    (
        RESPONSES,
        {"tools": [{"type": "web_search_preview"}, {"type": "function"}, 5], "max_tool_calls": 2},
        {"server_tools": (ServerTool("web_search"),), "max_tool_calls": 2},
    ),
    (
        RESPONSES,
        {"tools": [{"type": "code_interpreter"}, {"type": "file_search"}, {"type": "mcp"}]},
        {
            "server_tools": (
                ServerTool("code_interpreter"),
                ServerTool("file_search"),
                ServerTool("mcp"),
            )
        },
    ),
    (CHAT, {"web_search_options": {}}, {"server_tools": (ServerTool("web_search"),)}),
    (MESSAGES, {"messages": [{"content": [IMAGE, IMAGE]}]}, {"images": 2, "has_open_input": False}),
    (MESSAGES, {"messages": [{"content": [{"type": "document"}]}]}, {"has_open_input": True}),
    (RESPONSES, {"previous_response_id": "r1"}, {"has_open_input": True}),
    (RESPONSES, {"prompt": {"id": "p1"}}, {"has_open_input": True}),
    (RESPONSES, {"input": [{"type": "input_image", "file_id": "f"}]}, {"has_open_input": True}),
    (RESPONSES, {"previous_response_id": None}, {"has_open_input": False}),
    (MESSAGES, {"type": "tool_use", "messages": [UPLOAD]}, {"has_open_input": True}),
    (MESSAGES, {"messages": [{**UPLOAD, "type": "tool_use"}]}, {"has_open_input": True}),
    (RESPONSES, {"type": "tool_use", "input": [FILE]}, {"has_open_input": True}),
    (RESPONSES, {"type": "tool_use", "input": FILE}, {"has_open_input": True}),
    (MESSAGES, {"messages": [{"content": [TOOL_CALL]}]}, {"has_open_input": False}),
]


STORED: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"conversation": "conv_1"}, "conversation"),
    (RESPONSES, {"conversation": {"id": "conv_1"}}, "conversation"),
    (RESPONSES, {"conversation": None}, ""),
    (RESPONSES, {"prompt": {"id": "pmpt_1", "variables": {}}}, "prompt"),
    ("/v1/completions", {"prompt": "say"}, ""),
    (MESSAGES, {"container": "container_1"}, "container"),
    (MESSAGES, {"container": {"id": "container_1"}}, "container"),
    (MESSAGES, {"container": None}, ""),
    (MESSAGES, {"container": {"skills": [{"type": "custom", "skill_id": "s"}]}}, "skill_id"),
    (MESSAGES, {"container": {"skills": [{"type": "anthropic", "skill_id": "pdf"}]}}, ""),
    (
        MESSAGES,
        {"messages": [{"content": [{"type": "container_upload", "file_id": "f"}]}]},
        "file_id",
    ),
    (
        MESSAGES,
        {
            "messages": [
                {"content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}
            ]
        },
        "file_id",
    ),
    (MESSAGES, {"messages": [{"content": [TOOL_CALL]}]}, ""),
    (MESSAGES, {"messages": [{"content": [{**TOOL_CALL, "content": [FILE]}]}]}, "file_id"),
    (MESSAGES, {"messages": [{**UPLOAD, "type": "tool_use"}]}, "file_id"),
    (MESSAGES, {"messages": [{**UPLOAD, **TOOL_CALL}]}, "file_id"),
    (MESSAGES, {"type": "server_tool_use", "messages": [UPLOAD]}, "file_id"),
    (MESSAGES, {"type": "tool_use", "container": "container_1"}, "container"),
    (RESPONSES, {"type": "tool_use", "input": [FILE]}, "file_id"),
    (RESPONSES, {"type": "tool_use", "input": FILE}, "file_id"),
    (RESPONSES, {"input": [{"type": "mcp_tool_use", "input": [FILE]}]}, "file_id"),
    (MESSAGES, {"tools": [{"input_schema": {"properties": {"file_id": {}}}}]}, ""),
    (MESSAGES, {"metadata": {"file_id": "f"}}, ""),
    (CHAT, {"messages": [{"content": [{"type": "file", "file": {"file_id": "f"}}]}]}, "file_id"),
    (CHAT, {"messages": [{"content": [{"type": "text", "text": '{"file_id": "f"}'}]}]}, ""),
    (CHAT, {"tools": [{"function": {"parameters": {"container": "a"}}}]}, ""),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, ""),
    (RESPONSES, {"input": [{"id": "msg_1"}]}, ""),
    (RESPONSES, {"input": [{"id": "msg_1", "role": "user", "content": "hi"}]}, ""),
    (RESPONSES, {"input": [{"type": "input_image", "file_id": "f"}]}, "file_id"),
    (RESPONSES, {"input": [{"type": "input_image", "file_id": None}]}, ""),
    (
        RESPONSES,
        {"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}]},
        "vector_store_ids",
    ),
    (RESPONSES, {"tools": [{"type": "code_interpreter", "container": "cntr_1"}]}, "container"),
    (RESPONSES, {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, ""),
    (
        RESPONSES,
        {"tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["f"]}}]},
        "file_ids",
    ),
    (RESPONSES, {"previous_response_id": "resp_1"}, ""),
]


@pytest.mark.parametrize(("path", "fields", "reference"), STORED)
def test_what_names_something_that_the_provider_keeps_is_found(
    path: str, fields: dict[str, Any], reference: str
) -> None:
    assert read(path, **fields).stored_reference == reference


@pytest.mark.parametrize(("path", "fields", "found"), FIELDS)
def test_what_a_gateway_needs_is_read(
    path: str, fields: dict[str, Any], found: dict[str, Any]
) -> None:
    call = read(path, **fields)
    assert {name: getattr(call, name) for name in found} == found


def test_conversations_with_the_same_beginning_have_the_same_hash() -> None:
    tools = [{"name": "f"}]
    asked = [
        read(MESSAGES, system="s", tools=tools, messages=[1]),
        read(MESSAGES, system="s", tools=tools, messages=[2, 3]),
        read(RESPONSES, instructions="s", tools=tools),
        read(CHAT, tools=tools, messages=[{"role": "system", "content": "s"}, 5]),
    ]
    assert len({call.prefix_hash for call in asked}) == 1
    others = [read(MESSAGES, system="t", tools=tools), read(MESSAGES, system="s")]
    assert not {call.prefix_hash for call in others} & {asked[0].prefix_hash, ""}
    assert read(CHAT, messages=[{"role": "user", "content": "s"}]).prefix_hash == ""


def test_a_client_that_wants_no_usage_can_be_overruled() -> None:
    body = b'{"stream": true, "stream_options": {"include_usage": false}}'
    assert with_stream_usage(CHAT, body) == body
    forced = with_stream_usage(CHAT, body, is_forced=True)
    assert json.loads(forced)["stream_options"] == {"include_usage": True}
    assert with_stream_usage(CHAT, forced, is_forced=True) == forced


CLAMPED = [
    (MESSAGES, b'{ "max_tokens" : 64000,\n "model":"m"}', b'{ "max_tokens" : 100,\n "model":"m"}'),
    (MESSAGES, b'{"max_tokens": 99, "a": 1}', b'{"max_tokens": 99, "a": 1}'),
    (CHAT, b'{"a": 1}', b'{"max_completion_tokens":100,"a": 1}'),
    (CHAT, b"{}", b'{"max_completion_tokens":100}'),
    (CHAT, b'{"max_tokens": 500}', b'{"max_tokens": 100}'),
    (CHAT, b'{"max_tokens": null}', b'{"max_tokens":null,"max_completion_tokens":100}'),
    (RESPONSES, b'{"a": 1}', b'{"max_output_tokens":100,"a": 1}'),
    (
        CHAT,
        b'{"max_tokens": 500, "max_completion_tokens": 600}',
        b'{"max_tokens": 100, "max_completion_tokens": 100}',
    ),
    (
        MESSAGES,
        b'{"max_tokens": 500, "tools": [{"max_tokens": 500}]}',
        b'{"max_tokens":100,"tools":[{"max_tokens": 500}]}',
    ),
    (MESSAGES, b'{"max_tokens": 500, "max_tokens": 7000}', b'{"max_tokens":100}'),
    (
        MESSAGES,
        b'{"text": "\\"max_tokens\\": 500", "max_tokens": 500}',
        b'{"text": "\\"max_tokens\\": 500", "max_tokens": 100}',
    ),
]


@pytest.mark.parametrize(("path", "body", "lowered"), CLAMPED)
def test_a_limit_is_lowered_and_the_rest_stays(path: str, body: bytes, lowered: bytes) -> None:
    assert json.loads(with_max_tokens(path, body, 100)) == json.loads(lowered)
    if re.sub(rb"[0-9]", b"", body) == re.sub(rb"[0-9]", b"", lowered):
        assert with_max_tokens(path, body, 100) == lowered


JSON = st.recursive(
    st.none() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["max_tokens", "type", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(fields=st.dictionaries(st.sampled_from(["max_tokens", "a", "b", "n"]), JSON, max_size=4))
def test_a_lowered_limit_bounds_and_nothing_else_changes(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    after = json.loads(with_max_tokens(MESSAGES, body, 50))
    assert read_call(MESSAGES, json.dumps(after).encode()).bound_tokens in range(51)
    assert {**after, "max_tokens": 0} == {**fields, "max_tokens": 0}


def test_a_bound_counts_bytes_as_tokens_at_the_dearest_rate() -> None:
    call = read(MESSAGES, max_tokens=100, messages=[{"role": "user", "content": "hi"}])
    given_tokens = call.prompt_bytes + HIDDEN_TOKENS
    bound = strict_bound(call, PRICES)
    assert bound.micro_usd == 2 * given_tokens + 10 * 100
    assert bound.tokens == given_tokens + 100


def test_the_hour_of_a_cache_is_only_where_a_protocol_has_one() -> None:
    call = read(CHAT, max_tokens=100)
    assert strict_bound(call, PRICES).micro_usd == call.prompt_bytes + HIDDEN_TOKENS + 1_000


def test_images_tools_and_answers_are_in_the_bound() -> None:
    plain = read(CHAT, max_tokens=100)
    more = read(
        CHAT,
        max_tokens=100,
        n=3,
        tools=[{"type": "function"}],
        messages=[{"content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    )
    beside = more.prompt_bytes - plain.prompt_bytes + TOOL_TOKENS + IMAGE_TOKENS
    difference = strict_bound(more, PRICES).micro_usd - strict_bound(plain, PRICES).micro_usd
    assert difference == beside + 2 * 1_000


def test_searches_are_priced_and_read_everything_again() -> None:
    tools = [{"type": "web_search_20250305", "max_uses": 2}]
    call = read_call(
        MESSAGES,
        json.dumps({"model": "claude-opus-4-1", "max_tokens": 1, "tools": tools}).encode(),
    )
    assert strict_bound(call, PRICES).micro_usd == 2 * 3 * 200_000 + 10 + 2 * 10_000


def test_an_open_length_is_what_the_model_can_hold() -> None:
    body = json.dumps({"model": "claude-opus-4-1"}).encode()
    bound = strict_bound(read_call(CHAT, body), PRICES)
    assert bound.tokens == len(body) + HIDDEN_TOKENS + 200_000


UNBOUNDED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "set max_tokens"),
    (RESPONSES, {"max_tokens": 5}, "set max_tokens"),
    (CHAT, {"max_tokens": 1, "web_search_options": {}}, "without end; set max_uses"),
    (MESSAGES, {"max_tokens": 1, "tools": [{"type": "web_search_20250305"}]}, "without end"),
    (
        RESPONSES,
        {"max_output_tokens": 1, "tools": [{"type": "mcp"}]},
        "no price for the tool 'mcp'",
    ),
    (RESPONSES, {"max_output_tokens": 1, "previous_response_id": "r"}, "window is not known"),
    (MESSAGES, {"max_tokens": 1, "speed": "fast"}, "no price for speed"),
    (CHAT, {"max_tokens": 10**12}, "between 0 and"),
    (CHAT, {"max_tokens": 1, "MAX_TOKENS": 9}, "'MAX_TOKENS' may be read in lower case"),
    (CHAT, {"max_tokens": 1, "max_to\u212aens": 9}, "may be read in lower case"),
    (CHAT, {"max_tokens": 1, "Service_Tier": "priority"}, "'Service_Tier' may be read"),
    (MESSAGES, {"max_tokens": 1, "thinking": {"Budget_tokens": 9}}, "'Budget_tokens' may be"),
    (
        MESSAGES,
        {"max_tokens": 1, "tools": [{"type": "web_search_20250305", "max_uses": 1, "Max_Uses": 9}]},
        "'Max_Uses' may be read",
    ),
]


@pytest.mark.parametrize(("path", "fields", "problem"), UNBOUNDED)
def test_what_cannot_be_bounded_is_refused(path: str, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnboundedCallError, match=problem) as caught:
        strict_bound(read(path, **fields), PRICES)
    assert caught.value.model == "m"


def test_keys_of_other_cases_that_are_like_no_known_one_are_bounded() -> None:
    call = read(CHAT, max_tokens=1, topK=5, Überfluss=1, metadata={"MAX_TOKENS": 9})
    assert strict_bound(call, PRICES).tokens


def test_a_body_that_is_no_object_and_a_model_without_a_price_are_refused() -> None:
    with pytest.raises(UnboundedCallError, match="no JSON object"):
        strict_bound(read_call(CHAT, b"[]"), PRICES)
    with pytest.raises(UnknownPriceError):
        strict_bound(read(CHAT, max_tokens=1), PRICES, model="no-such-model")


def test_thinking_beside_a_limit_is_in_the_bound() -> None:
    thinking = read(MESSAGES, max_tokens=100, thinking={"budget_tokens": 1_000})
    within = read(MESSAGES, max_tokens=100, thinking={"budget_tokens": 50})
    assert strict_bound(thinking, PRICES).tokens - thinking.prompt_bytes - HIDDEN_TOKENS == 1_100
    assert strict_bound(within, PRICES).tokens - within.prompt_bytes - HIDDEN_TOKENS == 100


def usage(given_tokens: int, made: int) -> ReportedUsage:
    return ReportedUsage(model="m", input_tokens=given_tokens, output_tokens=made)


class Holds:
    """Estimates of one project."""

    def __init__(self) -> None:
        self.estimates = CallEstimates()

    def hold(
        self, call: ModelCall, reserve: Reserve = Reserve.EXPECTED, project_id: str = "p"
    ) -> tuple[Basis, int, int]:
        hold = self.estimates.hold(
            call, model="m", project_id=project_id, prices=PRICES, reserve=reserve
        )
        return hold.tokens.basis, hold.tokens.amount, hold.micro_usd.amount

    def learn(self, call: ModelCall, *made: int, given_tokens: int = 0) -> None:
        for one in made:
            self.estimates.learn(call, model="m", project_id="p", usage=usage(given_tokens, one))


def test_nothing_known_and_nothing_bounded_is_a_probe_of_its_input_at_least() -> None:
    call = read(CHAT)
    tokens = -(-call.prompt_chars // 4)
    assert Holds().hold(call) == (Basis.PROBE, tokens, tokens)


def test_a_short_limit_is_held_until_enough_is_known() -> None:
    holds, call = Holds(), read(CHAT, max_tokens=1_000)
    tokens = -(-call.prompt_chars // 4)
    assert holds.hold(call) == (Basis.GIVEN, tokens + 1_000, tokens + 10_000)
    holds.learn(call, *[10] * 19)
    assert holds.hold(call)[0] is Basis.GIVEN
    holds.learn(call, 10)
    basis, amount, micro_usd = holds.hold(call)
    assert basis is Basis.LEARNED
    assert amount == tokens + 12
    assert micro_usd == tokens + 120


def test_a_long_limit_is_no_experience() -> None:
    holds, call = Holds(), read(CHAT, max_tokens=SHORT_TOKENS + 1)
    assert holds.hold(call)[0] is Basis.PROBE
    holds.learn(call, 10)
    assert holds.hold(call)[0] is Basis.LEARNED


def test_a_limit_below_what_is_learned_is_held() -> None:
    holds, call = Holds(), read(CHAT, max_tokens=20)
    holds.learn(read(CHAT), *[500] * 30)
    assert holds.hold(call)[:2] == (Basis.GIVEN, -(-call.prompt_chars // 4) + 20)


def test_another_project_begins_with_what_is_known_of_the_model() -> None:
    holds = Holds()
    holds.learn(read(CHAT), *[500] * 30)
    assert holds.hold(read(CHAT), project_id="other")[0] is Basis.LEARNED


def test_strict_holds_the_bound() -> None:
    call = read(CHAT, max_tokens=100)
    bound = strict_bound(call, PRICES)
    assert Holds().hold(call, Reserve.STRICT) == (Basis.GIVEN, bound.tokens, bound.micro_usd)


def test_embeddings_hold_their_input() -> None:
    call = read_call("/v1/embeddings", b'{"model": "m", "input": "some text"}')
    tokens = -(-call.prompt_chars // 4)
    assert Holds().hold(call) == (Basis.GIVEN, tokens, tokens)


def test_the_tokens_in_a_byte_are_learned_for_each_model() -> None:
    holds = Holds()
    call = read(CHAT, messages=[{"role": "user", "content": "x" * 100_000}], max_tokens=0)
    holds.learn(call, *[0] * 50, given_tokens=call.prompt_chars // 2)
    learned = holds.estimates.input_tokens(call, "m", "p")
    assert abs(learned - call.prompt_chars / 2) < 0.01 * call.prompt_chars
    assert holds.estimates.input_tokens(call, "n", "p") == -(-call.prompt_chars // 4)


def test_no_project_says_for_another_what_its_prompts_make() -> None:
    known, call = CallEstimates(), ModelCall(model="m", prompt_chars=100_000)
    for project_id, given_tokens in (("dear", 190_000), ("usual", 26_000), ("cheap", 24_000)):
        for _ in range(50):
            used = usage(given_tokens, 1)
            known.learn(call, model="m", project_id=project_id, usage=used)
    assert known.input_tokens(call, "m", "dear") > 180_000
    assert known.input_tokens(call, "m", "cheap") < 25_000
    assert known.input_tokens(call, "m", "new") < 27_000, "the median, and not the sum"


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"images": 1}, 150_000),
        ({"has_open_input": True}, 150_000),
        ({"server_tools": (ServerTool("web_search"),)}, 150_000),
        ({}, 10_000_000),
        ({}, 10),
    ],
)
def test_a_prompt_that_says_nothing_of_others_teaches_nothing(
    fields: dict[str, Any], tokens: int
) -> None:
    known, text = CallEstimates(), ModelCall(model="m", prompt_chars=100_000)
    call = ModelCall(model="m", prompt_chars=100_000, **fields)
    known.learn(call, model="m", project_id="p", usage=usage(tokens, 1))
    assert known.input_tokens(text, "m", "p") == 25_000


@settings(deadline=None, max_examples=50)
@given(
    seen=st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**9)), max_size=30),
    chars=st.integers(0, 10**6),
)
def test_no_report_makes_input_free_or_endless(seen: list[tuple[int, int]], chars: int) -> None:
    known = CallEstimates()
    for size, tokens in seen:
        call = ModelCall(model="m", prompt_chars=size)
        known.learn(call, model="m", project_id="p", usage=usage(tokens, 1))
    tokens = known.input_tokens(ModelCall(model="m", prompt_chars=chars), "m", "p")
    assert chars / 64 <= tokens <= 2 * chars + 1


def test_only_so_many_models_are_remembered() -> None:
    known = CallEstimates()
    call = ModelCall(model="m", prompt_chars=100)
    for n in range(3_000):
        known.learn(call, model=f"m{n}", project_id="p", usage=usage(200, 1))
    assert known.input_tokens(call, "m0", "p") == 25
    assert known.input_tokens(call, "m2999", "p") > 25


def test_only_so_many_projects_of_a_model_are_remembered() -> None:
    known, call = CallEstimates(), ModelCall(model="m", prompt_chars=100_000)
    for n in range(MAX_PROJECTS_OF_MODEL + 1):
        used = usage(25_000 if n else 150_000, 1)
        known.learn(call, model="m", project_id=f"p{n}", usage=used)
    assert known.input_tokens(call, "m", "p0") < 26_000
