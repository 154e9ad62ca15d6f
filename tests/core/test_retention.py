"""Results stay while something needs them, then for their time; usage stays 400 days."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.retention import (
    BY_AGE,
    BY_NUMBER,
    EVICTION_ORDER,
    Retention,
    RetentionCut,
    StoredResult,
    StoreSize,
    cut_of,
    evictable_at,
    excess,
    may_evict,
    next_eviction_at,
    reserve_of,
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
    ("age_seconds", "retention_seconds", "evicted"),
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
    *, age_seconds: float, retention_seconds: float, evicted: bool
) -> None:
    result = StoredResult(status=DONE, completed_at=1000.0)
    now = 1000.0 + age_seconds
    assert may_evict(result, now=now, retention_seconds=retention_seconds) is evicted


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
    assert next_eviction_at(results, retention_seconds=300) == 320.0
    assert next_eviction_at([]) is None


@given(RESULTS, st.floats(0, 1e5))
@settings(deadline=None)
def test_a_result_may_go_at_its_eviction_time_and_not_before(
    result: StoredResult, retention_seconds: float
) -> None:
    at = evictable_at(result, retention_seconds=retention_seconds)
    if at is None:
        assert not may_evict(result, now=1e12, retention_seconds=retention_seconds)
    else:
        assert may_evict(result, now=at, retention_seconds=retention_seconds)
        assert not may_evict(result, now=at - 1, retention_seconds=retention_seconds)


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


AGE = RetentionCut(setting=BY_AGE, value=7.0, task_id="tsk_03")
NUMBER = RetentionCut(setting=BY_NUMBER, value=9.0, task_id="tsk_05")


@pytest.mark.parametrize(
    ("task_id", "cuts", "deleted_by"),
    [
        ("tsk_03", (), None),
        ("tsk_03", (AGE,), AGE),
        ("tsk_04", (AGE,), None),
        ("tsk_04", (AGE, NUMBER), NUMBER),
        ("tsk_02", (NUMBER, AGE), AGE),  # it would have gone by its age alone
        ("tsk_06", (AGE, NUMBER), None),  # newer than both, so it never was
    ],
)
def test_an_id_up_to_a_cut_is_one_that_was_deleted(
    task_id: str, cuts: tuple[RetentionCut, ...], deleted_by: RetentionCut | None
) -> None:
    assert cut_of(task_id, cuts) == deleted_by


@pytest.mark.parametrize(
    ("kept", "max_tasks", "too_many"), [(5, 5, 0), (7, 5, 2), (0, 5, 0), (7, None, 0)]
)
def test_only_what_is_above_the_number_is_too_many(
    kept: int, max_tasks: int | None, too_many: int
) -> None:
    assert excess(kept, Retention(max_tasks=max_tasks)) == too_many


def test_every_end_has_its_turn_and_failures_go_last() -> None:
    assert set(EVICTION_ORDER) == TERMINAL
    assert EVICTION_ORDER[-1] is TaskStatus.FAILED


def test_by_default_a_million_ended_tasks_stay_for_seven_days() -> None:
    assert Retention() == Retention(seconds=604_800.0, max_tasks=1_000_000)


def test_usage_stays_for_four_hundred_days() -> None:
    assert usage_kept_since(500 * 86_400.0) == 100 * 86_400.0


MIB = 2**20
ROOMS = [
    # used  free  reserve  max    room  excess  is full
    (50,    None, 0,       None,  None, 0,      False),
    (50,    500,  64,      None,  436,  0,      False),
    (50,    100,  64,      None,  36,   28,     False),  # deletes before anybody is refused
    (50,    64,   64,      None,  0,    64,     True),
    (50,    0,    64,      None,  0,    128,    True),
    (80,    None, 0,       100,   20,   0,      False),
    (95,    None, 0,       100,   5,    5,      False),
    (100,   None, 0,       100,   0,    10,     True),
    (120,   500,  64,      100,   0,    30,     True),
    (50,    64,   64,      100,   0,    64,     True),
]  # fmt: skip


@pytest.mark.parametrize(("used", "free", "reserve", "most", "room", "excess", "is_full"), ROOMS)
def test_a_store_deletes_before_it_refuses_and_keeps_a_reserve(
    used: int,
    free: int | None,
    reserve: int,
    most: int | None,
    room: int | None,
    excess: int,
    is_full: bool,
) -> None:
    size = StoreSize(
        used_bytes=used * MIB,
        free_bytes=None if free is None else free * MIB,
        reserve_bytes=reserve * MIB,
        max_bytes=None if most is None else most * MIB,
    )
    assert size.room_bytes == (None if room is None else room * MIB)
    assert size.excess_bytes == excess * MIB
    assert bool(size.problem) == is_full


def test_a_small_disk_has_a_small_reserve() -> None:
    assert reserve_of(2**40) == 64 * MIB
    assert reserve_of(32 * MIB) == 4 * MIB
