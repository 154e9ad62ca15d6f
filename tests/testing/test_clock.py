"""The clock moves only when told; only its wall can go back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import InvalidSettingError
from headgate.testing import DEFAULT_START, VirtualClock


def test_a_clock_starts_where_it_is_told_and_stands_still() -> None:
    clock = VirtualClock(1000.0)
    assert (clock(), clock(), clock.monotonic()) == (1000.0, 1000.0, 0.0)
    assert VirtualClock()() == DEFAULT_START


def test_advancing_moves_the_wall_and_the_monotonic_reading_alike() -> None:
    clock = VirtualClock(1000.0)
    clock.advance(2.5)
    assert (clock(), clock.monotonic()) == (1002.5, 2.5)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_time_cannot_pass_backwards(seconds: float) -> None:
    with pytest.raises(InvalidSettingError):
        VirtualClock().advance(seconds)


def test_setting_the_wall_back_leaves_the_monotonic_reading_alone() -> None:
    clock = VirtualClock(1000.0)
    clock.advance(10)
    clock.set_back(3600)
    assert (clock(), clock.monotonic()) == (-2590.0, 10.0)


@given(st.lists(st.floats(min_value=0, max_value=1e6), max_size=20))
@settings(deadline=None)
def test_advancing_to_a_reading_reaches_it_exactly_and_never_goes_back(
    readings: list[float],
) -> None:
    clock = VirtualClock()
    for reading in readings:
        before = clock.monotonic()
        clock.advance_to(reading)
        assert clock.monotonic() == max(before, reading)
