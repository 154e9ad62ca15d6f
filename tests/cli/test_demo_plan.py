"""What the agents of the demonstration submit: the same from the same seed, and not too much."""

from __future__ import annotations

from itertools import islice, pairwise

from headgate.cli.up_demo import (
    KINDS,
    LEAST_GAP_SECONDS,
    NEARLY_USED_UP,
    PAUSED,
    SEED,
    TASKS_PER_SECOND,
    USED_UP,
    PlannedTask,
    plan,
)

MANY = 3_000


def tasks(seed: int = SEED) -> list[PlannedTask]:
    return list(islice(plan(seed), MANY))


def test_one_seed_gives_one_plan_and_another_seed_another() -> None:
    assert tasks() == tasks()
    assert tasks(2) != tasks()


def test_tasks_come_in_the_order_of_their_time_and_depend_on_earlier_ones() -> None:
    found = tasks()
    assert all(one.at_seconds <= after.at_seconds for one, after in pairwise(found))
    assert [one.number for one in found] == list(range(MANY))
    assert all(parent < one.number for one in found for parent in one.parents)
    assert any(one.parents for one in found)


def test_no_task_depends_on_one_that_is_cancelled_or_refused() -> None:
    found = tasks()
    ended = {one.number for one in found if one.is_cancelled or "on_exhausted" in one.fields}
    assert ended
    assert not any(ended & set(one.parents) for one in found)


def test_no_more_than_a_few_tasks_come_in_a_second() -> None:
    times = [one.at_seconds for one in tasks() if one.at_seconds > 0]
    assert all(after - at >= 0.99 * LEAST_GAP_SECONDS for at, after in pairwise(times))
    assert TASKS_PER_SECOND * 0.8 < len(times) / times[-1] < TASKS_PER_SECOND * 1.2


def test_the_beginning_shows_everything_that_may_be_the_matter() -> None:
    opening = [one for one in tasks() if one.at_seconds == 0]
    scopes = [scope for one in opening for scope in one.fields.get("scopes") or ()]
    assert {USED_UP, NEARLY_USED_UP} <= set(scopes)
    assert any(one.fields.get("project_id") == PAUSED for one in opening)
    assert [one.hook for one in opening].count("gone") == 1


def test_most_tasks_succeed_and_some_fail_recover_or_are_cancelled() -> None:
    found = tasks()
    courses = [(one.fields["params"] or {})["course"] for one in found]
    assert courses.count("succeeds") > 0.8 * MANY
    assert courses.count("fails") > 0.02 * MANY
    assert courses.count("recovers") > 0.02 * MANY
    assert 0 < sum(one.is_cancelled for one in found) < 0.05 * MANY
    assert {one.fields["action"] for one in found} >= {kind.action for kind in KINDS}
