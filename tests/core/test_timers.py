"""Timers fall due in order, each once, and take no more memory than what is live."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.dispatch_state import TIMER_SLACK, Timers

KEYS = st.sampled_from("abcde")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, st.integers(0, 9)),
        st.tuples(st.just("drop"), KEYS, st.just(0)),
        st.tuples(st.just("pop"), st.just(""), st.integers(0, 9)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(STEPS, st.integers(1, 3))
def test_timers_are_a_dictionary_that_is_asked_what_is_due(
    steps: list[tuple[str, str, int]], most: int
) -> None:
    timers: Timers[str] = Timers()
    model: dict[str, float] = {}
    for kind, key, at in steps:
        if kind == "set":
            timers.set(key, float(at))
            model[key] = float(at)
        elif kind == "drop":
            timers.drop(key)
            model.pop(key, None)
        else:
            found = timers.pop_due(float(at), most=most)
            times = [model.pop(name) for name in found]
            assert times == sorted(times)
            assert len(found) == min(most, len(found) + sum(due <= at for due in model.values()))
        assert len(timers) == len(model)
        assert timers.next_at() == min(model.values(), default=None)


def test_what_is_set_again_falls_due_at_the_later_time_only() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("a", 5.0)
    assert timers.pop_due(4.0, most=9) == []
    assert timers.pop_due(5.0, most=9) == ["a"]
    assert timers.next_at() is None


def test_memory_follows_the_live_timers() -> None:
    timers: Timers[int] = Timers()
    for number in range(50_000):
        timers.set(number, 1e9 + number)
        timers.drop(number)
    assert len(timers._heap) <= TIMER_SLACK + 1


def test_one_key_that_is_set_often_takes_no_more_memory() -> None:
    timers: Timers[str] = Timers()
    for number in range(50_000):
        timers.set("a", float(number))
    assert len(timers._heap) <= TIMER_SLACK + 3
