"""Results stay while something needs them, then for their time; usage stays 30 days."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.retention import (
    StoredResult,
    evictable_at,
    may_evict,
    next_eviction_at,
    usage_kept_since,
)
from headgate.core.task import TERMINAL, TaskStatus

DONE = TaskStatus.DONE

RESULTS = st.builds(
    StoredResult,
    status=st.sampled_from(TaskStatus),
    completed_at=st.none() | st.floats(0, 1e6),
    dependants=st.integers(0, 2),
    undelivered_webhooks=st.integers(0, 2),
    resumable=st.booleans(),
)


@pytest.mark.parametrize(
    ("age_seconds", "ttl_seconds", "evicted"),
    [
        (0, 300, False),
        (299.5, 300, False),
        (300, 300, True),
        (301, 300, True),
        (300, 600, False),  # a raised TTL holds for results that are already there
        (0, 0, True),
    ],
)
def test_a_result_goes_when_its_time_is_over(
    *, age_seconds: float, ttl_seconds: float, evicted: bool
) -> None:
    result = StoredResult(status=DONE, completed_at=1000.0)
    now = 1000.0 + age_seconds
    assert may_evict(result, now=now, ttl_seconds=ttl_seconds) is evicted


@pytest.mark.parametrize(
    ("result", "needed_by"),
    [
        (StoredResult(status=DONE, completed_at=0.0), ()),
        (StoredResult(status=DONE, completed_at=0.0, dependants=1), ("dependants",)),
        (
            StoredResult(status=DONE, completed_at=0.0, undelivered_webhooks=2),
            ("undelivered webhooks",),
        ),
        (StoredResult(status=DONE, completed_at=0.0, resumable=True), ("resumable run",)),
    ],
)
def test_a_result_that_is_needed_stays_whatever_its_age(
    result: StoredResult, needed_by: tuple[str, ...]
) -> None:
    assert result.needed_by == needed_by
    assert may_evict(result, now=1e12) is not bool(needed_by)


@pytest.mark.parametrize("status", list(TaskStatus))
def test_only_terminal_tasks_are_evicted(status: TaskStatus) -> None:
    result = StoredResult(status=status, completed_at=0.0)
    assert may_evict(result, now=1e12) is (status in TERMINAL)


def test_a_task_without_a_completion_time_stays() -> None:
    assert not may_evict(StoredResult(status=DONE), now=1e12)


def test_the_next_eviction_is_that_of_the_oldest_result_that_nothing_needs() -> None:
    results = [
        StoredResult(status=DONE, completed_at=10.0, dependants=1),
        StoredResult(status=TaskStatus.FAILED, completed_at=30.0),
        StoredResult(status=DONE, completed_at=20.0),
        StoredResult(status=TaskStatus.RUNNING),
    ]
    assert next_eviction_at(results, ttl_seconds=300) == 320.0
    assert next_eviction_at([]) is None


@given(RESULTS, st.floats(0, 1e5))
@settings(deadline=None)
def test_a_result_may_go_at_its_eviction_time_and_not_before(
    result: StoredResult, ttl_seconds: float
) -> None:
    at = evictable_at(result, ttl_seconds=ttl_seconds)
    if at is None:
        assert not may_evict(result, now=1e12, ttl_seconds=ttl_seconds)
    else:
        assert may_evict(result, now=at, ttl_seconds=ttl_seconds)
        assert not may_evict(result, now=at - 1, ttl_seconds=ttl_seconds)


@given(st.lists(RESULTS, max_size=10))
@settings(deadline=None)
def test_at_the_next_eviction_time_something_may_go_and_before_it_nothing(
    results: list[StoredResult],
) -> None:
    at = next_eviction_at(results)
    if at is None:
        assert not any(may_evict(result, now=1e12) for result in results)
    else:
        assert any(may_evict(result, now=at) for result in results)
        assert not any(may_evict(result, now=at - 1) for result in results)


def test_usage_stays_for_thirty_days() -> None:
    assert usage_kept_since(100 * 86_400.0) == 70 * 86_400.0
