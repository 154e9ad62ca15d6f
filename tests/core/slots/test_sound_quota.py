"""What a provider tells and cannot mean: it is named, and neither kept nor acted upon."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.slots.quota import (
    MAX_AHEAD_SECONDS,
    MAX_ROWS,
    QuotaFailure,
    QuotaFailureKind,
    QuotaLimit,
    QuotaReport,
    read_limits,
)
from headgate.core.slots.slot import Reading, SlotConfig, read_answer

NOW = 1_800_000_000.0
CONFIG = SlotConfig(name="work", provider="zai")


def read(**fields: object) -> Reading | QuotaFailure:
    report = read_limits([{"type": "TOKENS_LIMIT", "unit": 3, **fields}])
    return read_answer(CONFIG, report, NOW)


NONSENSE: list[dict[str, object]] = [
    {"percentage": "inf"},
    {"percentage": "-inf"},
    {"percentage": 1e308},
    {"percentage": -1},
    {"usage": "nan", "currentValue": 1},
    {"usage": 1e-300, "currentValue": 1e300},
    {"usage": 10, "currentValue": -1},
    {"remaining": "inf"},
    {"nextResetTime": 253_402_300_799_000},
    {"nextResetTime": int((NOW + MAX_AHEAD_SECONDS) * 1000) + 1},
]


@pytest.mark.parametrize("fields", NONSENSE)
def test_a_row_that_makes_no_sense_is_garbage_and_named(fields: dict[str, object]) -> None:
    found = read(**fields)
    assert isinstance(found, QuotaFailure)
    assert found.kind is QuotaFailureKind.GARBAGE
    assert "TOKENS_LIMIT: " in found.message
    assert len(found.message) < 200


@pytest.mark.parametrize(
    "fields",
    [
        {"percentage": 0},
        {"percentage": 131.5},
        {"usage": 0, "currentValue": 5},
        {"nextResetTime": int((NOW + 31 * 86_400) * 1000)},
        {"nextResetTime": 1},
    ],
)
def test_a_row_that_makes_sense_is_kept(fields: dict[str, object]) -> None:
    assert isinstance(read(**fields), Reading)


def test_the_other_rows_still_count() -> None:
    rows = ({"type": "TOKENS_LIMIT", "percentage": 7}, {"type": "MOON", "percentage": "inf"})
    found = read_answer(CONFIG, read_limits([*rows]), NOW)
    assert isinstance(found, Reading)
    assert [limit.type for limit in found.kept.limits] == ["TOKENS_LIMIT"]


def test_an_exhaustion_until_no_time_has_none() -> None:
    answer = QuotaFailure(kind=QuotaFailureKind.EXHAUSTED, resets_at=NOW + 2 * MAX_AHEAD_SECONDS)
    found = read_answer(CONFIG, answer, NOW)
    assert isinstance(found, Reading)
    assert (found.kept.resets_at, found.reset_ms, found.kept.is_exhausted) == (None, None, True)


def test_no_answer_has_more_rows_than_are_read() -> None:
    found = read_limits([{"type": f"ROW_{number}"} for number in range(1_500)])
    assert isinstance(found, QuotaReport)
    assert len(found.limits) == MAX_ROWS


figures = st.floats() | st.none()


@settings(deadline=None, max_examples=200)
@given(
    percentage=figures,
    usage=figures,
    current_value=figures,
    reset_ms=st.integers(-(10**18), 10**18) | st.none(),
)
def test_whatever_is_kept_can_be_shown(
    percentage: float | None,
    usage: float | None,
    current_value: float | None,
    reset_ms: int | None,
) -> None:
    limit = QuotaLimit(
        type="TOKENS_LIMIT",
        percentage=percentage,
        usage=usage,
        current_value=current_value,
        next_reset_epoch_ms=reset_ms,
    )
    found = read_answer(CONFIG, QuotaReport(limits=(limit,)), NOW)
    if isinstance(found, Reading):
        percent, resets_at = found.kept.percent_used, found.kept.resets_at
        assert percent is None or 0 <= percent <= 10_000
        assert resets_at is None or resets_at <= NOW + MAX_AHEAD_SECONDS
