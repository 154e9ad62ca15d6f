"""Ids of tasks: they tell their time, and each is larger than the one before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.storage.task_ids import TaskIds, first_id_at, seconds_of

MILLISECONDS = st.integers(min_value=0, max_value=2**47)


@given(st.lists(MILLISECONDS, max_size=30))
def test_ids_grow_whatever_the_clock_does(times: list[int]) -> None:
    ids = TaskIds()
    made = [ids.new(milliseconds / 1_000) for milliseconds in times]
    assert made == sorted(set(made))
    assert {len(one) for one in made} <= {len(first_id_at(0.0))}


@given(MILLISECONDS)
def test_an_id_tells_the_time_that_it_was_made_at(milliseconds: int) -> None:
    ids = TaskIds()
    for made in (ids.new(milliseconds / 1_000), ids.new(milliseconds / 1_000)):
        told = seconds_of(made)
        assert told is not None
        # A fraction of a second is not exact in binary.
        assert abs(told * 1_000 - milliseconds) <= 1
        assert made >= first_id_at(told)
