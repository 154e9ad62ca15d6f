"""How clients ask for lists of tasks."""

from __future__ import annotations

from datetime import UTC, datetime

from headgate.client import calls


def test_every_filter_is_sent_under_its_name_in_the_api() -> None:
    since = datetime(2026, 1, 31, 12, tzinfo=UTC)
    call = calls.list_tasks(
        {"agent_id": "a b", "label": "k=v", "created_after": since, "text": None, "omit": "params"},
        limit=5,
    )
    assert call.path == (
        "/tasks?agentId=a+b&label=k%3Dv&createdAfter=2026-01-31T12%3A00%3A00%2B00%3A00"
        "&omit=params&limit=5"
    )
    assert calls.list_tasks({}).path == "/tasks"
