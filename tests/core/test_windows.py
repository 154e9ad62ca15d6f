"""The laws of windows: what counts, until when, and how much memory it takes."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.rate_limits import BUCKETS_PER_WINDOW, SlidingCount, is_expired, seconds_left
from headgate.errors import InvalidAmountError

WINDOW = 60.0
START = 1_767_225_600.0

# Quarter seconds are exact in binary, so the laws can be stated without a tolerance.
GAPS = st.lists(st.integers(0, 4 * 20).map(lambda quarters: quarters / 4), max_size=60)
EVENTS = st.lists(
    st.tuples(st.integers(0, 4 * 20).map(lambda quarters: quarters / 4), st.integers(1, 10)),
    max_size=60,
)


def _times(gaps: list[float]) -> list[float]:
    return list(accumulate(gaps, initial=START))[1:]


@pytest.mark.parametrize(
    ("elapsed", "expired", "left"),
    [
        (-5.0, False, 65.0),
        (0.0, False, 60.0),
        (59.5, False, 0.5),
        (60.0, False, 0.0),
        (60.5, True, 0.0),
        (1000.0, True, 0.0),
    ],
)
def test_a_restarting_window_is_over_only_past_its_end(
    *, elapsed: float, expired: bool, left: float
) -> None:
    now = START + elapsed
    assert is_expired(window_start=START, window_seconds=WINDOW, now=now) is expired
    assert seconds_left(window_start=START, window_seconds=WINDOW, now=now) == left


@pytest.mark.parametrize(
    ("after_seconds", "total"),
    [
        # Recorded half a second into its bucket, which is one second long.
        (0.0, 7),
        (59.0, 7),
        (60.0, 7),
        (60.25, 7),
        (60.5, 0),
        (10_000.0, 0),
    ],
)
def test_a_bucket_counts_until_all_of_it_has_left_the_window(
    after_seconds: float, total: int
) -> None:
    recorded_at = START + 0.5
    count = SlidingCount(window_seconds=WINDOW).record(recorded_at, 7)
    assert count.total(recorded_at + after_seconds) == total


def test_requests_count_one_each_and_tokens_by_weight() -> None:
    empty = SlidingCount(window_seconds=WINDOW)
    assert empty.record(START).record(START).total(START) == 2
    assert empty.record(START, 500).record(START + 1, 700).total(START + 1) == 1200


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(InvalidAmountError):
        SlidingCount(window_seconds=WINDOW).record(START, -1)


def test_recording_leaves_the_old_count_as_it_was() -> None:
    before = SlidingCount(window_seconds=WINDOW).record(START, 5)
    before.record(START, 5)
    assert before.total(START) == 5


@pytest.mark.parametrize(
    ("needed", "wait_seconds"),
    [
        (0, 0.0),
        (10, 0.0),
        (11, 61.0),  # needs the first 30 to leave
        (40, 61.0),
        (41, 71.0),  # needs the second 30, recorded 10 s later, as well
        (70, 71.0),
        (71, 81.0),
        (100, 81.0),
        (101, None),  # more than the limit itself never fits
    ],
)
def test_room_is_when_enough_has_left(needed: int, wait_seconds: float | None) -> None:
    count = SlidingCount(window_seconds=WINDOW)
    for after_seconds in (0, 10, 20):
        count = count.record(START + after_seconds, 30)
    room_at = count.room_at(needed, limit=100, now=START + 20)
    if wait_seconds is None:
        assert room_at is None
    else:
        assert room_at == max(START + 20, START + wait_seconds)


def test_next_release_is_when_the_oldest_bucket_leaves() -> None:
    empty = SlidingCount(window_seconds=WINDOW)
    assert empty.next_release_at(START) is None
    count = empty.record(START).record(START + 30)
    assert count.next_release_at(START + 30) == START + 61
    assert count.next_release_at(START + 61) == START + 91
    assert count.next_release_at(START + 91) is None


@given(st.lists(st.tuples(st.integers(-200, 200), st.integers(0, 10)), max_size=60))
def test_what_is_counted_is_the_sum_of_the_buckets_whatever_the_clock_does(
    events: list[tuple[int, int]],
) -> None:
    count, now = SlidingCount(window_seconds=WINDOW), START
    for seconds, weight in events:
        now += seconds
        count = count.record(now, weight)
        fresh = SlidingCount(window_seconds=WINDOW, buckets=count.buckets)
        assert count == fresh
        assert count.total(now) == sum(amount for _, amount in fresh.at(now).buckets)


@given(EVENTS, st.integers(1, 40))
@settings(deadline=None)
def test_no_stretch_of_the_windows_length_holds_more_than_the_limit(
    events: list[tuple[float, int]], limit: int
) -> None:
    count = SlidingCount(window_seconds=WINDOW)
    admitted: list[tuple[float, int]] = []
    for now, (_, weight) in zip(_times([gap for gap, _ in events]), events, strict=True):
        if count.room_at(weight, limit=limit, now=now) == now:
            count = count.record(now, weight)
            admitted.append((now, weight))
    for begin, _ in admitted:
        inside = sum(weight for at, weight in admitted if begin <= at <= begin + WINDOW)
        assert inside <= limit


@given(EVENTS, st.integers(1, 40), st.integers(0, 40))
@settings(deadline=None)
def test_room_comes_at_the_promised_time_and_not_before(
    events: list[tuple[float, int]], limit: int, needed: int
) -> None:
    count, now = SlidingCount(window_seconds=WINDOW), START
    for gap, weight in events:
        now += gap
        count = count.record(now, weight)
    room_at = count.room_at(needed, limit=limit, now=now)
    if room_at is None:
        assert needed > limit
        return
    assert count.total(room_at) + needed <= limit
    if room_at > now:
        assert count.total(max(now, room_at - 0.25)) + needed > limit


@given(EVENTS)
@settings(deadline=None)
def test_the_total_is_at_least_the_window_and_at_most_one_bucket_more(
    events: list[tuple[float, int]],
) -> None:
    count, now, recorded = SlidingCount(window_seconds=WINDOW), START, list[tuple[float, int]]()
    for gap, weight in events:
        now += gap
        count = count.record(now, weight)
        recorded.append((now, weight))
    lately = sum(weight for at, weight in recorded if at >= now - WINDOW)
    with_one_bucket = sum(
        weight for at, weight in recorded if at >= now - WINDOW - count.bucket_seconds
    )
    assert lately <= count.total(now) <= with_one_bucket


@given(GAPS)
@settings(deadline=None)
def test_memory_is_bounded_by_the_number_of_buckets(gaps: list[float]) -> None:
    count = SlidingCount(window_seconds=WINDOW)
    for now in _times(gaps):
        count = count.record(now)
        assert len(count.buckets) <= BUCKETS_PER_WINDOW + 1


def test_ten_thousand_records_keep_sixty_one_buckets() -> None:
    count = SlidingCount(window_seconds=WINDOW)
    for tenth in range(10_000):
        count = count.record(START + tenth / 10)
    assert len(count.buckets) == BUCKETS_PER_WINDOW + 1


@given(EVENTS, st.floats(min_value=0, max_value=1e9))
@settings(deadline=None)
def test_a_clock_that_goes_back_frees_no_room(
    events: list[tuple[float, int]], back_seconds: float
) -> None:
    count, now = SlidingCount(window_seconds=WINDOW), START
    for gap, weight in events:
        now += gap
        count = count.record(now, weight)
    before = count.total(now)
    assert count.total(now - back_seconds) == before
    assert count.record(now - back_seconds, 5).total(now - back_seconds) == before + 5


@pytest.mark.parametrize("back_seconds", [0.5, 30.0, 59.0, 61.0, 3600.0, 86_400.0 * 365])
def test_after_a_clock_went_back_what_was_counted_still_counts_for_a_window(
    back_seconds: float,
) -> None:
    now = START - back_seconds
    count = SlidingCount(window_seconds=WINDOW).record(START, 5).at(now)
    assert count.total(now + WINDOW) == 5


@pytest.mark.parametrize("back_seconds", [0.5, 30.0, 59.0, 61.0, 3600.0, 86_400.0 * 365])
def test_a_clock_that_went_back_is_overcome_within_two_windows(back_seconds: float) -> None:
    now = START - back_seconds
    count = SlidingCount(window_seconds=WINDOW).record(START, 5).at(now)
    assert count.total(now + 2 * WINDOW + 2 * count.bucket_seconds) == 0
