"""What the query of a list is read as, and what of it is refused."""

from __future__ import annotations

import pytest

from headgate.api.callers import LOCAL
from headgate.api.errors import ApiError
from headgate.api.schema.admin import TaskFilterBody
from headgate.api.tasks import ENDED, LIVE, cancel_filter, read_query, retry_filter
from headgate.core.task import TaskStatus
from headgate.errors import InvalidTaskError
from headgate.storage.store import TaskQuery

READ: list[tuple[dict[str, str], TaskQuery]] = [
    ({}, TaskQuery()),
    ({"target": "t", "slot": "s", "provider": "p"}, TaskQuery(target="t", slot="s", provider="p")),
    ({"target": "", "label": "", "text": "", "createdAfter": ""}, TaskQuery()),
    ({"scope": "team:x/run:y"}, TaskQuery(scope="team:x/run:y")),
    ({"order": "oldest"}, TaskQuery(is_oldest_first=True)),
    ({"order": "newest"}, TaskQuery()),
    ({"label": "run=7"}, TaskQuery(label=("run", "7"))),
    ({"label": "run=a=b"}, TaskQuery(label=("run", "a=b"))),
    ({"label": "run="}, TaskQuery(label=("run", ""))),
    ({"label": "run"}, TaskQuery(label=("run", None))),
    ({"text": "a b"}, TaskQuery(text="a b")),
    (
        {"createdAfter": "1970-01-01T00:01:40Z", "createdBefore": "1970-01-01T01:01:40+01:00"},
        TaskQuery(created_after=100.0, created_before=100.0),
    ),
]


@pytest.mark.parametrize(("given", "wanted"), READ, ids=[str(given) for given, _ in READ])
def test_a_query_is_read(given: dict[str, str], wanted: TaskQuery) -> None:
    assert read_query(given) == wanted


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("order", "random"),
        ("label", "=7"),
        ("label", "a\0b"),
        ("label", "k" * 400),
        ("text", "a\0b"),
        ("text", "x" * 201),
        ("createdAfter", "yesterday"),
        ("createdAfter", "2026-01-31T12:00:00"),
        ("createdBefore", "2026-13-31T12:00:00Z"),
        ("target", "a\nb"),
        ("lable", "run=7"),
    ],
)
def test_what_cannot_be_looked_for_is_refused(field: str, value: str) -> None:
    with pytest.raises((ApiError, InvalidTaskError)) as raised:
        read_query({field: value})
    assert field in str(raised.value)


def test_bulk_work_takes_the_same_filters() -> None:
    body = TaskFilterBody(label="run", text="oops", slot="s", provider="p")
    for read, states in ((cancel_filter, LIVE), (retry_filter, ENDED)):
        wanted = read(body, LOCAL)
        assert (wanted.label, wanted.text, wanted.slot) == (("run", None), "oops", "s")
        assert set(wanted.states) <= set(states)
    assert TaskStatus.DONE not in retry_filter(body, LOCAL).states
