"""Which resets slide with the time, and so are none; and which only look so."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.slots.polling import due_wake, is_rate
from headgate.core.slots.quota import QuotaLimit, QuotaReport
from headgate.core.slots.slot import Reading, SlotConfig, SlotReading, SlotRow, read_answer, slides
from headgate.core.slots.steps import begin, claim_poll, poll_done
from headgate.core.slots.wakes import SlotSchedule, WakeConfig, WakeMode

NOW = 1_771_176_960.0
MINUTE, HOUR = 60.0, 3_600.0
CONFIG = SlotConfig(
    name="work",
    provider="zai",
    wake=WakeConfig(wake_modes=frozenset({WakeMode.AFTER_RESET}), poll_interval_minutes=30),
)


def reading(now: float, left: float | None, percent: float = 7.0) -> Reading:
    reset_ms = None if left is None else round((now + left) * 1_000)
    limit = QuotaLimit(type="TOKENS_LIMIT", percentage=percent, next_reset_epoch_ms=reset_ms)
    read = read_answer(CONFIG, QuotaReport(limits=(limit,)), now)
    assert isinstance(read, Reading)
    return read


def kept(now: float, left: float | None) -> SlotRow:
    before = reading(now, left)
    schedule = SlotSchedule(next_reset_epoch_ms=before.reset_ms)
    return SlotRow(name="work", schedule=schedule, reading=before.kept)


@pytest.mark.parametrize(
    ("passed", "left_before", "left", "is_sliding"),
    [
        (30 * MINUTE, 0.06, 0.06, True),
        (30 * MINUTE, 1, 45, True),
        (MINUTE, -5, -5, True),
        (2 * MINUTE, 10 * MINUTE, 10 * MINUTE, True),
        (30 * MINUTE, 3 * HOUR, 3 * HOUR, True),
        (30 * MINUTE, 3 * HOUR, 2.5 * HOUR, False),
        (10, 5 * MINUTE, 5 * MINUTE, False),
        (10, 5 * MINUTE, 5 * MINUTE - 10, False),
        (30 * MINUTE, 10 * MINUTE, 4.9 * HOUR, False),
        (6 * HOUR, 2 * HOUR, 2 * HOUR, False),
        (30 * MINUTE, None, 5, False),
        (30 * MINUTE, 5, None, False),
    ],
)
def test_a_reset_slides_if_it_moves_as_the_time_does(
    passed: float, left_before: float | None, left: float | None, is_sliding: bool
) -> None:
    assert slides(CONFIG, reading(NOW + passed, left), kept(NOW, left_before)) is is_sliding


@settings(deadline=None)
@given(
    passed=st.floats(min_value=1, max_value=8 * HOUR),
    left=st.floats(min_value=-HOUR, max_value=5 * HOUR),
    apart=st.floats(min_value=-29, max_value=29),
)
def test_one_reset_told_twice_never_slides(passed: float, left: float, apart: float) -> None:
    again = reading(NOW + passed, left - passed + apart)
    assert not slides(CONFIG, again, kept(NOW, left))


@settings(deadline=None)
@given(
    left=st.floats(min_value=1, max_value=5 * HOUR),
    opened_after=st.floats(min_value=0, max_value=HOUR),
    read_after=st.floats(min_value=0, max_value=4 * HOUR),
)
def test_a_new_window_of_five_hours_never_slides(
    left: float, opened_after: float, read_after: float
) -> None:
    ends = left + opened_after + 5 * HOUR
    passed = left + opened_after + read_after
    assert not slides(CONFIG, reading(NOW + passed, ends - passed), kept(NOW, left))


def test_a_window_of_a_plan_never_slides_however_its_reset_moves() -> None:
    before, opened_again = window_of_plan(NOW, 100.0), window_of_plan(NOW + 2 * MINUTE, 1.0)
    schedule = SlotSchedule(next_reset_epoch_ms=before.reset_ms)
    row = SlotRow(name="work", schedule=schedule, reading=before.kept)
    assert slides(CONFIG, reading(NOW + 2 * MINUTE, 2 * MINUTE), kept(NOW, 2 * MINUTE))
    assert not slides(CONFIG, opened_again, row)


def test_a_key_with_a_window_of_a_plan_is_no_rate_once_its_reset_was_answered() -> None:
    read = window_of_plan(NOW, 1.0)
    schedule = SlotSchedule(next_reset_epoch_ms=read.reset_ms, last_reset_marker=read.reset_ms)
    assert not is_rate(SlotRow(name="work", schedule=schedule, reading=read.kept))


def window_of_plan(now: float, percent: float) -> Reading:
    """Return what a key of a plan tells: a window of its own, and a rate beside it."""
    window = QuotaLimit(
        type="UNIFIED_LIMIT",
        unit="5h",
        percentage=percent,
        next_reset_epoch_ms=round((now + 2 * MINUTE) * 1_000),
    )
    rate = QuotaLimit(type="RATE_LIMIT", unit="tokens", usage=10.0, remaining=9.0)
    read = read_answer(CONFIG, QuotaReport(limits=(window, rate)), now)
    assert isinstance(read, Reading)
    return read


def test_a_sliding_reset_is_never_due() -> None:
    rows = {"work": SlotRow(name="work")}
    now = NOW
    for _ in range(50):
        for step in (
            partial(begin, config=CONFIG),
            partial(claim_poll, config=CONFIG, claim_id=str(now), seconds=90.0, force=True),
            partial(
                poll_done,
                config=CONFIG,
                claim_id=str(now),
                answer=QuotaReport(limits=reading(now, 0.06).kept.limits),
            ),
        ):
            changed, _answer = step(rows, now)
            rows.update({row.name: row for row in changed})
        assert now == NOW or due_wake(CONFIG, rows["work"], now + 10 * MINUTE) is None
        now += 30 * MINUTE


@pytest.mark.parametrize(
    ("before", "percent", "is_again"),
    [
        (SlotReading(read_at=NOW, resets_at=NOW + 1, is_exhausted=True), 100, True),
        (SlotReading(read_at=NOW, resets_at=NOW + HOUR, is_exhausted=True), 100, False),
        (SlotReading(read_at=NOW, resets_at=NOW + 1), 100, False),
        (SlotReading(read_at=NOW, resets_at=NOW + 1, is_exhausted=True), 99, False),
        (None, 100, False),
    ],
)
def test_used_up_again_is_what_is_used_up_after_a_reset(
    before: SlotReading | None, percent: float, is_again: bool
) -> None:
    limit = QuotaLimit(type="TOKENS_LIMIT", percentage=percent)
    read = read_answer(CONFIG, QuotaReport(limits=(limit,)), NOW + MINUTE, before)
    assert isinstance(read, Reading)
    assert read.kept.is_used_up_again is is_again


@pytest.mark.parametrize(
    ("left", "is_exhausted"),
    [(600, True), (None, True), (-1, True), (-15 * MINUTE, True), (-15 * MINUTE - 1, False)],
)
def test_a_window_is_believed_used_up_for_a_quarter_of_an_hour_after_its_reset(
    left: float | None, is_exhausted: bool
) -> None:
    assert reading(NOW, left, percent=100.0).kept.is_exhausted is is_exhausted
