"""Deadlines: the text that is accepted, and the moment that is too late."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.lifecycle import (
    EXPIRED_WHILE_QUEUED,
    DeadlineRefused,
    accept_deadline,
    expired,
    parse_rfc3339,
    remaining_seconds,
)
from headgate.core.task import Task, TaskStatus
from headgate.errors import InvalidSettingError

NOON = 1_767_268_800.0  # 2026-01-01T12:00:00Z


@pytest.mark.parametrize(
    ("text", "seconds_after_noon"),
    [
        ("2026-01-01T12:00:00Z", 0.0),
        ("2026-01-01t12:00:00z", 0.0),
        ("2026-01-01 12:00:00Z", 0.0),
        ("2026-01-01T12:00:00+00:00", 0.0),
        ("2026-01-01T12:00:00-00:00", 0.0),
        ("2026-01-01T13:30:00+01:30", 0.0),
        ("2026-01-01T04:00:00-08:00", 0.0),
        ("2026-01-01T12:00:00.25Z", 0.25),
        ("2026-01-01T12:00:00.2500000009Z", 0.25),
        ("2026-01-01T23:59:60Z", 43_200.0),
        ("2026-01-01T15:59:60-08:00", 43_200.0),
    ],
)
def test_rfc_3339_timestamps_are_read(text: str, seconds_after_noon: float) -> None:
    assert parse_rfc3339(text) == NOON + seconds_after_noon


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tomorrow",
        "1767268800",
        "2026-01-01",
        "2026-01-01T12:00Z",
        "2026-01-01T12:00:00",
        "2026-01-01T12:00:00+0100",
        "2026-01-01T12:00:00+01",
        "2026-01-01T12:00:00.Z",
        "2026-01-01T12:00:00,5Z",
        "2026-01-01T12:00:00Z\n",
        " 2026-01-01T12:00:00Z",
        "20260101T120000Z",
        "2026-W01-4T12:00:00Z",
        "2026-02-30T12:00:00Z",
        "2026-13-01T12:00:00Z",
        "2026-01-01T24:00:00Z",
        "2026-01-01T12:60:00Z",
        "2026-01-01T12:00:61Z",
        "2026-01-01T12:00:60Z",
        "2026-01-01T12:00:00+24:00",
        "0000-01-01T12:00:00Z",
        "２０２６-01-01T12:00:00Z",  # noqa: RUF001
    ],
)
def test_everything_else_has_an_invalid_format(text: str) -> None:
    assert parse_rfc3339(text) is None
    assert accept_deadline(text, now=NOON) == DeadlineRefused(message="invalid deadline format")


@given(
    st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30)),  # noqa: DTZ001
    st.integers(-23 * 60 - 59, 23 * 60 + 59),
)
@settings(deadline=None)
def test_reading_undoes_writing_in_any_offset(moment: datetime, offset_minutes: int) -> None:
    zone = timezone(timedelta(minutes=offset_minutes))
    aware = moment.replace(tzinfo=UTC)
    assert parse_rfc3339(aware.astimezone(zone).isoformat()) == aware.timestamp()


@given(st.text() | st.from_regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,20}[Z+-][0-9:]{0,5}"))
@settings(deadline=None)
def test_no_text_makes_the_reader_raise(text: str) -> None:
    assert isinstance(parse_rfc3339(text), float | None)


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("2026-01-01T11:59:59Z", DeadlineRefused(message="deadline is in the past")),
        ("2026-01-01T12:00:00Z", DeadlineRefused(message="deadline is in the past")),
        ("2026-01-01T12:00:00.5Z", NOON + 0.5),
        ("2026-01-02T12:00:00Z", NOON + 86_400),
    ],
)
def test_a_deadline_must_lie_ahead(text: str, accepted: float | DeadlineRefused) -> None:
    assert accept_deadline(text, now=NOON, default_deadline_seconds=60) == accepted


def test_without_a_deadline_the_default_counts_from_now() -> None:
    assert accept_deadline(None, now=NOON, default_deadline_seconds=60) == NOON + 60
    assert accept_deadline(None, now=NOON) is None


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_default_deadline_that_leaves_no_time_is_refused(timeout: float) -> None:
    with pytest.raises(InvalidSettingError, match="default_deadline_seconds"):
        accept_deadline(None, now=NOON, default_deadline_seconds=timeout)


@pytest.mark.parametrize(
    ("deadline", "is_expired", "remaining"),
    [
        (None, False, None),
        (NOON + 1, False, 1.0),
        (NOON, True, 0.0),
        (NOON - 1, True, 0.0),
    ],
)
def test_a_queued_task_is_expired_when_it_has_no_time_left(
    *, deadline: float | None, is_expired: bool, remaining: float | None
) -> None:
    task = Task(id="t", deadline=deadline)
    assert expired(task, NOON) is is_expired
    assert remaining_seconds(task, NOON) == remaining


@pytest.mark.parametrize("status", [s for s in TaskStatus if s is not TaskStatus.QUEUED])
def test_only_queued_tasks_expire_here(status: TaskStatus) -> None:
    assert not expired(Task(id="t", status=status, deadline=NOON - 1), NOON)


@given(st.integers(-100, 100))
@settings(deadline=None)
def test_a_deadline_is_accepted_exactly_if_it_is_not_expired_at_once(offset: int) -> None:
    text = datetime.fromtimestamp(NOON + offset, UTC).isoformat()
    accepted = accept_deadline(text, now=NOON)
    task = Task(id="t", deadline=NOON + offset)
    assert isinstance(accepted, float) is not expired(task, NOON)


def test_the_reason_is_the_one_that_clients_know() -> None:
    assert EXPIRED_WHILE_QUEUED == "deadline exceeded while queued"
