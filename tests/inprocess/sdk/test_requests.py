"""What is read from requests: the model, the size of the prompt, and how much may come back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.providers.requests import (
    IMAGE_CHARS,
    Kind,
    ModelCall,
    kind_of,
    read_call,
    text_size,
    with_model,
    with_stream_usage,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("POST", "/v1/chat/completions", Kind.MODEL_CALL),
        ("POST", "/openai/deployments/d/chat/completions", Kind.MODEL_CALL),
        ("POST", "/v1/completions", Kind.MODEL_CALL),
        ("POST", "/v1/responses", Kind.MODEL_CALL),
        ("POST", "/v1/embeddings", Kind.MODEL_CALL),
        ("POST", "/v1/messages", Kind.MODEL_CALL),
        ("POST", "/anthropic/v1/messages/", Kind.MODEL_CALL),
        ("GET", "/v1/models", Kind.FREE),
        ("GET", "/v1/responses/r1", Kind.FREE),
        ("DELETE", "/v1/responses/r1", Kind.FREE),
        ("POST", "/v1/responses/r1/cancel", Kind.FREE),
        ("POST", "/v1/responses/input_tokens", Kind.FREE),
        ("POST", "/v1/messages/count_tokens", Kind.FREE),
        ("POST", "/v1/moderations", Kind.FREE),
        ("POST", "/v1/files", Kind.FREE),
        ("POST", "/files", Kind.FREE),
        ("POST", "/openai/files", Kind.FREE),
        ("POST", "/gateway/openai/v1/files", Kind.FREE),
        ("POST", "/v1/vector_stores/vs_1/files", Kind.OTHER),
        ("POST", "/v1/containers/c1/files", Kind.OTHER),
        ("POST", "/v1/uploads/u1/parts", Kind.FREE),
        ("POST", "/v1/messages/batches", Kind.OTHER),
        ("POST", "/v1/threads/t1/messages", Kind.OTHER),
        ("POST", "/v1/images/generations", Kind.OTHER),
        ("POST", "/v1/batches", Kind.OTHER),
        ("POST", "/", Kind.OTHER),
    ],
)
def test_the_kind_of_a_request(method: str, path: str, kind: Kind) -> None:
    assert kind_of(method, path) is kind


@pytest.mark.parametrize(
    ("path", "fields", "max_tokens"),
    [
        ("/v1/chat/completions", {"max_tokens": 7}, 7),
        ("/v1/chat/completions", {"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ("/v1/chat/completions", {"max_tokens": 9, "max_completion_tokens": 1}, 9),
        ("/v1/messages", {"max_tokens": 9, "max_output_tokens": 1}, 9),
        ("/v1/messages", {"max_tokens": 9.0}, 9),
        ("/v1/messages", {"max_tokens": "9"}, 9),
        ("/v1/messages", {"max_tokens": "9.5"}, None),
        ("/v1/messages", {"max_tokens": "9" * 5_000}, None),
        ("/v1/messages", {"max_tokens": 1e400}, None),
        ("/v1/chat/completions", {"max_tokens": None}, None),
        ("/v1/chat/completions", {"max_tokens": -1}, None),
        ("/v1/chat/completions", {"max_tokens": True}, None),
        ("/v1/responses", {"max_output_tokens": 8}, 8),
        ("/v1/messages", {"max_tokens": 5}, 5),
        ("/v1/embeddings", {}, 0),
    ],
)
def test_how_much_may_come_back(path: str, fields: dict[str, Any], max_tokens: int | None) -> None:
    asked = read_call(path, msgspec.json.encode({"model": "m", **fields}))
    assert (asked.model, asked.max_tokens) == ("m", max_tokens)


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": 3.0}, 3),
        ({"n": 0}, 1),
        ({"n": None}, 1),
        ({"n": 2, "best_of": 5}, 5),
        ({"prompt": "one"}, 1),
        ({"prompt": ["one"] * 4}, 4),
        ({"prompt": []}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": ["one", "two"], "n": 3}, 6),
        ({"prompt": {"id": "p1"}}, 1),
    ],
)
def test_how_many_answers_may_come_back(fields: dict[str, Any], answers: int) -> None:
    asked = read_call("/v1/completions", msgspec.json.encode({"max_tokens": 7, **fields}))
    assert (asked.max_tokens, asked.answers) == (7, answers)
    assert asked.output_tokens(4_096) == 7 * answers


def test_open_answers_count_as_the_default_each() -> None:
    assert read_call("/v1/chat/completions", b'{"n": 50}').output_tokens(4_096) == 50 * 4_096
    assert read_call("/v1/embeddings", b'{"n": 50}').output_tokens(4_096) == 0


@pytest.mark.parametrize("body", [b"", b"no json", b"[1]", b"\xff", b"[" * 100_000])
def test_what_cannot_be_read_is_an_unnamed_model_with_all_of_it_for_a_prompt(body: bytes) -> None:
    size = len(body)
    assert read_call("/v1/messages", body) == ModelCall(
        model="", prompt_chars=size, prompt_bytes=size, is_readable=False
    )


PDF = "JVBERi0" * 100


@pytest.mark.parametrize(
    ("content", "size"),
    [
        ("four", 4),
        ("vier €", 8),
        ([1, 2, 3], 12),
        ({"role": "user", "content": [{"type": "text", "text": "abc"}]}, 11 + 4 + 8 + 4 + 3),
        ({"a" * 1_000: 0.5}, 1_000),
        (
            {"type": "image_url", "image_url": {"url": "data:" + "x" * 100_000}},
            4 + 9 + 9 + IMAGE_CHARS,
        ),
        ({"type": "image", "source": {"data": "x" * 100_000}}, 4 + 5 + 6 + IMAGE_CHARS),
        ({"type": "image", "text": "x" * 100_000}, 4 + 5 + 4 + 100_000),
        ({"source": {"type": "base64", "data": PDF}}, 6 + 4 + 6 + 4 + 700 // 16),
        ({"source": {"type": "text", "data": "a b " * 100}}, 6 + 4 + 4 + 4 + 400),
        ({"input_audio": {"data": PDF, "format": "wav"}}, 11 + 4 + 700 // 16 + 6 + 3),
        ({"data": PDF}, 4 + 700),
        ({"file": {"file_data": PDF}}, 4 + 9 + 700 // 16),
        (
            [{"type": "tool_use", "input": {"type": "base64", "data": PDF}}],
            4 + 8 + 5 + 4 + 6 + 4 + 700,
        ),
        ([None, True, 1.5], 0),
    ],
)
def test_the_size_of_a_prompt(content: object, size: int) -> None:
    assert text_size(content) == size


@settings(max_examples=50)
@given(JSON)
def test_any_content_has_a_size(content: object) -> None:
    assert text_size(content) >= 0


@settings(max_examples=30)
@given(st.dictionaries(st.text(), JSON, max_size=3))
def test_another_model_changes_nothing_else(fields: dict[str, Any]) -> None:
    body = msgspec.json.encode({**fields, "model": "dear"})
    assert msgspec.json.decode(with_model(body, "cheap")) == {
        **msgspec.json.decode(body),
        "model": "cheap",
    }


ASKED = {"include_usage": True}


@pytest.mark.parametrize(
    ("path", "fields", "options"),
    [
        ("/v1/chat/completions", {"stream": True}, ASKED),
        ("/v1/chat/completions", {"stream": True, "stream_options": None}, ASKED),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"a": 1}}, {"a": 1} | ASKED),
        (
            "/v1/chat/completions",
            {"stream": True, "stream_options": {"include_usage": False}},
            {"include_usage": False},
        ),
        ("/v1/chat/completions", {"stream": False}, None),
        ("/v1/chat/completions", {}, None),
        ("/v1/responses", {"stream": True}, None),
        ("/v1/messages", {"stream": True}, None),
    ],
)
def test_usage_is_asked_for_only_where_a_stream_would_not_tell(
    path: str, fields: dict[str, Any], options: object
) -> None:
    written = msgspec.json.decode(with_stream_usage(path, msgspec.json.encode(fields)))
    assert written.get("stream_options") == options
    assert {**written, "stream_options": 0} == {**fields, "stream_options": 0}


def test_a_body_that_is_no_object_stays_as_it_is() -> None:
    assert with_stream_usage("/v1/chat/completions", b"[]") == b"[]"


RARE_FIELDS = (
    *("background", "best_of", "container", "conversation", "functions", "max_tool_calls"),
    *("mcp_servers", "n", "prompt", "prompt_cache_key", "service_tier", "speed"),
    *("stream_options", "thinking", "tools", "web_search_options"),
)


@pytest.mark.parametrize("name", RARE_FIELDS)
@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages", "/embeddings"])
def test_a_rare_field_that_says_nothing_changes_nothing(path: str, name: str) -> None:
    fields: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "max_tokens": 7,
        "max_output_tokens": 9,
        "stream": True,
    }
    plain = read_call(path, msgspec.json.encode(fields))
    body = msgspec.json.encode({**fields, name: None})
    with_field = read_call(path, body)
    assert with_field.has_tools is (name == "functions")
    assert with_field == msgspec.structs.replace(
        plain,
        prompt_chars=plain.prompt_chars + len(name),
        prompt_bytes=len(body),
        has_tools=with_field.has_tools,
    )
