"""Reading a provider's quota answer: good rows, unknown rows, refusals and nonsense."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.slots.quota import (
    QuotaFailure,
    QuotaFailureKind,
    QuotaLimit,
    QuotaReport,
    driving_limit,
    failure_of,
    read_limits,
    read_quota,
    reset_time_in,
)

SHANGHAI = ZoneInfo("Asia/Shanghai")

TIME_ROW: dict[str, object] = {
    "type": "TIME_LIMIT",
    "unit": 5,
    "number": 1,
    "usage": 1000,
    "currentValue": 10,
    "remaining": 990,
    "nextResetTime": 1772259238997,
    "usageDetails": [{"modelCode": "search-prime", "usage": 0}],
}
TOKENS_ROW: dict[str, object] = {
    "type": "TOKENS_LIMIT",
    "unit": 3,
    "number": 5,
    "percentage": 7,
    "nextResetTime": 1771177008218,
}
COLD_ROW: dict[str, object] = {"type": "TOKENS_LIMIT", "unit": 3, "number": 5, "percentage": 0}
WEEK_CREDITS: dict[str, object] = {"type": "CREDIT_LIMIT", "unit": 6, "number": 1}
HOUR_CREDITS: dict[str, object] = {"type": "CREDIT_LIMIT", "unit": 3, "number": 5}
UNKNOWN_ROW: dict[str, object] = {"type": "MOON_LIMIT", "unit": "fortnight", "phase": "full"}


def envelope(*rows: object, code: object = 200) -> dict[str, object]:
    data = {"level": "pro", "limits": list(rows)}
    return {"code": code, "msg": "ok", "success": True, "data": data}


def report(*rows: object) -> QuotaReport:
    found = read_limits(list(rows))
    assert isinstance(found, QuotaReport)
    return found


def chosen_type(found: QuotaLimit | QuotaFailure) -> tuple[str, object]:
    assert isinstance(found, QuotaLimit)
    return found.type, found.unit


def test_a_warm_answer_is_read() -> None:
    found = read_quota(envelope(TIME_ROW, TOKENS_ROW), UTC)
    assert isinstance(found, QuotaReport)
    assert found.level == "pro"
    assert found.unreadable == ()
    assert found.limits[1] == QuotaLimit(
        type="TOKENS_LIMIT", unit=3, number=5, percentage=7, next_reset_epoch_ms=1771177008218
    )


def test_a_cold_key_has_no_reset_time() -> None:
    limit = driving_limit(report(TIME_ROW, COLD_ROW))
    assert isinstance(limit, QuotaLimit)
    assert limit.next_reset_epoch_ms is None


def test_unknown_types_and_units_are_kept() -> None:
    assert report(UNKNOWN_ROW).limits == (QuotaLimit(type="MOON_LIMIT", unit="fortnight"),)


def test_numbers_written_as_text_are_read() -> None:
    row = TOKENS_ROW | {"percentage": "7.5", "nextResetTime": "1771177008218"}
    limit = report(row).limits[0]
    assert (limit.percentage, limit.next_reset_epoch_ms) == (7.5, 1771177008218)


@pytest.mark.parametrize("no_time", [0, -1, 10**30, None])
def test_a_reset_time_that_is_no_time_is_none(no_time: object) -> None:
    assert report(TOKENS_ROW | {"nextResetTime": no_time}).limits[0].next_reset_epoch_ms is None


def test_a_percentage_that_is_no_number_is_none() -> None:
    assert report(TOKENS_ROW | {"percentage": float("nan")}).limits[0].percent_used is None


@pytest.mark.parametrize(
    ("row", "percent"),
    [(TOKENS_ROW, 7.0), (TIME_ROW, 1.0), (UNKNOWN_ROW, None), (TIME_ROW | {"usage": 0}, None)],
)
def test_percent_used_is_told_or_computed(row: dict[str, object], percent: float | None) -> None:
    assert report(row).limits[0].percent_used == percent


@pytest.mark.parametrize(
    ("rows", "row_type", "row_unit", "expected"),
    [
        ((TIME_ROW, TOKENS_ROW), None, None, ("TOKENS_LIMIT", 3)),
        ((HOUR_CREDITS, TOKENS_ROW), None, None, ("TOKENS_LIMIT", 3)),
        ((TIME_ROW, WEEK_CREDITS, HOUR_CREDITS), None, None, ("CREDIT_LIMIT", 3)),
        ((TIME_ROW, WEEK_CREDITS), None, None, ("TIME_LIMIT", 5)),
        ((UNKNOWN_ROW, TIME_ROW), None, None, ("MOON_LIMIT", "fortnight")),
        ((TOKENS_ROW, TIME_ROW), "TIME_LIMIT", None, ("TIME_LIMIT", 5)),
        ((TOKENS_ROW, WEEK_CREDITS, HOUR_CREDITS), "CREDIT_LIMIT", None, ("CREDIT_LIMIT", 3)),
        ((TOKENS_ROW, WEEK_CREDITS, HOUR_CREDITS), "CREDIT_LIMIT", 6, ("CREDIT_LIMIT", 6)),
        ((TOKENS_ROW, WEEK_CREDITS), "CREDIT_LIMIT", None, ("CREDIT_LIMIT", 6)),
        ((TOKENS_ROW, WEEK_CREDITS), "CREDIT_LIMIT", "6", ("CREDIT_LIMIT", 6)),
    ],
)
def test_the_row_that_drives_wakes(
    rows: tuple[object, ...],
    row_type: str | None,
    row_unit: int | str | None,
    expected: tuple[str, object],
) -> None:
    found = driving_limit(report(*rows), row_type=row_type, row_unit=row_unit)
    assert chosen_type(found) == expected


def test_a_configured_row_that_is_missing_is_not_replaced_by_another() -> None:
    found = driving_limit(report(TIME_ROW, TOKENS_ROW), row_type="CREDIT_LIMIT")
    assert isinstance(found, QuotaFailure)
    assert found.kind is QuotaFailureKind.GARBAGE
    assert "TIME_LIMIT unit 5, TOKENS_LIMIT unit 3" in found.message


def test_an_answer_without_rows_drives_nothing() -> None:
    assert isinstance(driving_limit(report()), QuotaFailure)


def test_a_bad_row_is_named_and_the_others_count() -> None:
    found = report(TOKENS_ROW, {"unit": 3}, 17)
    assert len(found.limits) == 1
    assert [problem.split(":")[0] for problem in found.unreadable] == ["limits[1]", "limits[2]"]
    assert chosen_type(driving_limit(found)) == ("TOKENS_LIMIT", 3)


def test_the_first_row_does_not_stand_in_for_one_that_could_not_be_read() -> None:
    found = driving_limit(report(TIME_ROW, TOKENS_ROW | {"nextResetTime": "soon"}))
    assert isinstance(found, QuotaFailure)
    assert "nextResetTime" in found.message


@pytest.mark.parametrize(
    "body",
    [
        None,
        "<html>",
        [],
        {},
        {"code": 200},
        {"code": None, "data": {"limits": []}},
        {"code": 200, "data": None},
        {"code": 200, "data": {}},
        {"code": 200, "data": {"limits": None}},
        {"code": 200, "data": {"limits": {"type": "TOKENS_LIMIT"}}},
        envelope("row"),
        envelope({"type": None}),
        {1: 2},
    ],
)
def test_nonsense_is_a_failure_of_its_own_kind(body: object) -> None:
    found = read_quota(body, UTC)
    assert isinstance(found, QuotaFailure)
    assert found.kind is QuotaFailureKind.GARBAGE
    assert found.message


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (401, QuotaFailureKind.REFUSED),
        ("401", QuotaFailureKind.REFUSED),
        (403, QuotaFailureKind.REFUSED),
        (408, QuotaFailureKind.TIMEOUT),
        (429, QuotaFailureKind.THROTTLED),
        (500, QuotaFailureKind.SERVER_ERROR),
        (503, QuotaFailureKind.SERVER_ERROR),
        (1310, QuotaFailureKind.EXHAUSTED),
        ("1316", QuotaFailureKind.EXHAUSTED),
        (1113, QuotaFailureKind.REJECTED),
        (404, QuotaFailureKind.REJECTED),
    ],
)
def test_the_envelopes_own_code_tells_failures_apart(code: object, kind: QuotaFailureKind) -> None:
    found = read_quota(envelope(TOKENS_ROW, code=code), UTC)
    assert isinstance(found, QuotaFailure)
    assert (found.kind, found.code) == (kind, int(str(code)))


def test_an_answer_that_says_it_failed_is_a_failure_though_its_code_is_good() -> None:
    found = read_quota(envelope(TOKENS_ROW) | {"success": False}, UTC)
    assert isinstance(found, QuotaFailure)
    assert found.kind is QuotaFailureKind.REJECTED


def test_a_code_that_is_no_number_is_garbage() -> None:
    assert failure_of({"a": 1}, None, UTC).kind is QuotaFailureKind.GARBAGE
    assert failure_of("invalid_api_key", "no", UTC).kind is QuotaFailureKind.GARBAGE


@pytest.mark.parametrize("code", [1310, 1316])
def test_exhaustion_tells_its_reset_time(code: int) -> None:
    message = "Usage limit reached. Your limit will reset at 2026-08-14 18:30:00"
    failure = failure_of(code, message, SHANGHAI)
    assert failure.kind is QuotaFailureKind.EXHAUSTED
    assert failure.resets_at == datetime(2026, 8, 14, 10, 30, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("message", "expected_utc"),
    [
        ("reset at 2026-08-14 18:30:00", "2026-08-14T10:30:00"),
        ("reset at 2026-08-14 18:30", "2026-08-14T10:30:00"),
        ("reset at 2026-08-14T18:30:05.123, sorry", "2026-08-14T10:30:05"),
        ("reset at 2026/8/4 8:30:00.", "2026-08-04T00:30:00"),
        ("reset at 2026-08-14T18:30:00Z", "2026-08-14T18:30:00"),
        ("reset at 2026-08-14 18:30:00 UTC", "2026-08-14T18:30:00"),
        ("reset at 2026-08-14 18:30:00+02:00", "2026-08-14T16:30:00"),
        ("reset at 2026-08-14 18:30:00 -0530", "2026-08-15T00:00:00"),
        ("将在 2026-08-14 18:30:00 重置", "2026-08-14T10:30:00"),
        ("hit at 2026-08-14 13:30:00, resets 2026-08-14 18:30:00", "2026-08-14T10:30:00"),
        ("resets 2026-08-14 18:30:00, was hit 2026-08-14 13:30:00", "2026-08-14T10:30:00"),
        ("id 2026-13-40 99:99:99, resets 2026-08-14 18:30:00", "2026-08-14T10:30:00"),
        ("resets 2026-08-14 18:30:00+99:00", None),
        ("resets 2026-02-30 18:30:00", None),
        ("resets 2026-08-14", None),
        ("resets in 5 hours", None),
        ("", None),
    ],
)
def test_a_reset_time_is_found_in_a_message(message: str, expected_utc: str | None) -> None:
    found = reset_time_in(message, SHANGHAI)
    if expected_utc is None:
        assert found is None
    else:
        assert found == datetime.fromisoformat(expected_utc).replace(tzinfo=UTC).timestamp()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ("code", "success", "data", "limits", "type", "unit", "percentage", "nextResetTime")
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=100)
@given(body=json_values)
def test_no_answer_raises(body: object) -> None:
    found = read_quota(body, UTC)
    if isinstance(found, QuotaReport):
        driving_limit(found)


@settings(deadline=None, max_examples=100)
@given(rows=st.lists(json_values, max_size=4))
def test_no_row_raises_and_none_is_lost(rows: list[object]) -> None:
    found = read_quota(envelope(*rows), UTC)
    if isinstance(found, QuotaReport):
        assert len(found.limits) + len(found.unreadable) == len(rows)


@settings(deadline=None, max_examples=200)
@given(message=st.text(alphabet="0123456789-/: T+Z.", max_size=40))
def test_no_message_raises(message: str) -> None:
    found = reset_time_in(message, SHANGHAI)
    assert found is None or isinstance(found, float)


@pytest.mark.parametrize("units", [(6, 3), (3, 6)])
def test_of_two_rows_of_tokens_that_of_hours_drives_wakes(units: tuple[int, int]) -> None:
    rows = tuple(QuotaLimit(type="TOKENS_LIMIT", unit=unit) for unit in units)
    driving = driving_limit(QuotaReport(limits=rows))
    assert isinstance(driving, QuotaLimit)
    assert driving.unit == 3
