"""What a program says of a task becomes the JSON that the service reads."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from headgate.api.submission import TASK_FIELDS
from headgate.client.requests import TaskFields, camel, new_call, task_body, task_query
from headgate.errors import InvalidFieldError

NOW = datetime(2027, 1, 15, 8, tzinfo=UTC)


def test_a_program_can_say_all_that_the_api_takes() -> None:
    names = {camel(name) for name in TaskFields.__annotations__}
    estimate = {"estimateTokens", "estimateUsd"}
    assert names - estimate == set(TASK_FIELDS) - {"estimate"}
    assert estimate < names


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({"action": "x", "agent_id": "a"}, {"action": "x", "agentId": "a"}),
        ({"action": "x", "priority": None}, {"action": "x"}),
        ({"priority": 0, "params": {}}, {"priority": 0, "params": {}}),
        ({"estimate_usd": Decimal("0.10")}, {"estimate": {"usd": "0.10"}}),
        ({"estimate_tokens": 5, "estimate_usd": 1}, {"estimate": {"tokens": 5, "usd": 1}}),
        ({"cost_usd": Decimal("0.07")}, {"costUsd": "0.07"}),
        ({"deadline": timedelta(minutes=10)}, {"deadline": "2027-01-15T08:10:00Z"}),
        ({"not_before": NOW}, {"notBefore": "2027-01-15T08:00:00Z"}),
        ({"deadline": "2030-01-01T00:00:00Z"}, {"deadline": "2030-01-01T00:00:00Z"}),
    ],
)
def test_fields_become_json(fields: Any, body: dict[str, object]) -> None:
    assert msgspec.json.decode(msgspec.json.encode(task_body(fields, now=NOW))) == body


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"dedline": "x"}, "dedline"),
        ({"deadline": datetime(2030, 1, 1)}, "deadline"),  # noqa: DTZ001 - what is refused
    ],
)
def test_what_the_service_could_not_read_is_refused_by_name(fields: Any, field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        task_body(fields, now=NOW)
    assert caught.value.field == field


def test_every_filter_is_sent_under_its_name_in_the_api() -> None:
    since = datetime(2026, 1, 31, 12, tzinfo=UTC)
    query = task_query(
        {"agent_id": "a b", "label": "k=v", "created_after": since, "text": None, "omit": "params"},
        limit=5,
    )
    assert new_call("GET", "/tasks", response_type=bytes, query=query).path == (
        "/tasks?agentId=a+b&label=k%3Dv&createdAfter=2026-01-31T12%3A00%3A00%2B00%3A00"
        "&omit=params&limit=5"
    )
    assert new_call("GET", "/tasks", response_type=bytes, query=task_query({})).path == "/tasks"
