"""Headers and times, as tables: what providers send, and what it means."""

from __future__ import annotations

from datetime import UTC, tzinfo
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.slots.quota import QuotaFailure, QuotaFailureKind, QuotaLimit, QuotaReport
from headgate.core.slots.slot import SlotConfig, SlotRow
from headgate.core.slots.steps import is_news, observe
from headgate.core.slots.wakes import WakeConfig
from headgate.providers import quota_apis
from headgate.providers.provider import build_provider
from headgate.providers.quota_apis import duration_seconds, epoch_ms, reset_time
from providers.trails import CLOCK, NOW, endpoint_at

SHANGHAI = ZoneInfo("Asia/Shanghai")
A = "anthropic-ratelimit-"
X = "x-ratelimit-"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("6m0s", 360.0),
        ("1s", 1.0),
        ("12ms", 0.012),
        ("1h30m", 5_400.0),
        ("1d2h3m4s", 93_784.0),
        ("7m12.5s", 432.5),
        ("0s", 0.0),
        ("", None),
        ("6 m", None),
        ("-1s", None),
        ("1x", None),
        ("s", None),
        ("12", None),
        ("9" * 70 + "s", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    found = duration_seconds(text)
    assert found == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("value", "zone", "seconds"),
    [
        (None, UTC, None),
        ("", UTC, None),
        (0, UTC, None),
        (-5, UTC, None),
        ("0", UTC, None),
        (90, UTC, NOW + 90),
        ("90", UTC, NOW + 90),
        (0.5, UTC, NOW + 0.5),
        (99_999_999, UTC, NOW + 99_999_999),
        (100_000_000, UTC, 100_000_000.0),
        (1_771_177_008, UTC, 1_771_177_008.0),
        ("1771177008", UTC, 1_771_177_008.0),
        (1_771_177_008_218, UTC, 1_771_177_008.218),
        ("6m0s", UTC, NOW + 360),
        ("2026-01-01T05:00:00Z", SHANGHAI, NOW + 5 * 3_600),
        ("2026-01-01T13:00:00+08:00", UTC, NOW + 5 * 3_600),
        ("2026-01-01T13:00:00", SHANGHAI, NOW + 5 * 3_600),
        ("2026-01-01 13:00:00", SHANGHAI, NOW + 5 * 3_600),
    ],
)
def test_a_reset_is_read_in_every_way_that_it_is_written(
    value: object, zone: tzinfo, seconds: float | None
) -> None:
    assert reset_time(value, now=NOW, zone=zone) == seconds


@pytest.mark.parametrize(
    "value",
    ["soon", True, [], {}, 1e300, 10**400, float("nan"), "nan", "1e300", "0001-01-01T00:00:00"],
)
def test_what_is_no_time_is_said_to_be_none(value: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - some are those of the standard library
        reset_time(value, now=NOW, zone=UTC)


@given(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=40))
@settings(deadline=None, max_examples=300)
def test_no_value_raises_anything_but_that(value: object) -> None:
    try:
        found = reset_time(value, now=NOW, zone=UTC)
    except ValueError:
        return
    assert found is None or (epoch_ms(found) or 0) > 0


def shown(rows: tuple[QuotaLimit, ...]) -> list[tuple[str, object, float | None, float | None]]:
    return [
        (
            row.type,
            row.unit,
            None if row.percent_used is None else round(row.percent_used, 3),
            None
            if row.next_reset_epoch_ms is None
            else round(row.next_reset_epoch_ms / 1_000 - NOW, 3),
        )
        for row in rows
    ]


def test_the_rates_of_an_anthropic_key() -> None:
    headers = {
        f"{A}requests-limit": "50", f"{A}requests-remaining": "49",
        f"{A}requests-reset": "2026-01-01T00:00:02Z",
        f"{A}tokens-limit": "40000", f"{A}tokens-remaining": "10000",
        f"{A}tokens-reset": "2026-01-01T00:01:00Z",
        f"{A}input-tokens-limit": "30000", f"{A}input-tokens-remaining": "0",
        f"{A}input-tokens-reset": "2026-01-01T00:00:30Z",
        f"{A}output-tokens-remaining": "8000",
    }  # fmt: skip
    report = quota_apis.anthropic_rows_of(headers, NOW)
    assert report.unreadable == ()
    assert shown(report.limits) == [
        ("RATE_LIMIT", "tokens",         75.0, 60.0),
        ("RATE_LIMIT", "input-tokens",  100.0, 30.0),
        ("RATE_LIMIT", "output-tokens",  None, None),
        ("RATE_LIMIT", "requests",        2.0,  2.0),
    ]  # fmt: skip


def test_the_windows_of_an_anthropic_plan_come_first_and_the_shortest_before_all() -> None:
    headers = {
        f"{A}requests-limit": "50", f"{A}requests-remaining": "50",
        f"{A}unified-status": "allowed", f"{A}unified-reset": str(int(NOW) + 7200),
        f"{A}unified-7d-utilization": "0.3", f"{A}unified-7d-reset": str(int(NOW) + 400_000),
        f"{A}unified-5h-utilization": "0.42", f"{A}unified-5h-reset": str(int(NOW) + 7200),
        f"{A}unified-7d_oi-utilization": "0.02", f"{A}unified-overage-status": "rejected",
        f"{A}unified-fallback-percentage": "0.5",
    }  # fmt: skip
    report = quota_apis.anthropic_rows_of(headers, NOW)
    assert shown(report.limits) == [
        ("UNIFIED_LIMIT", "5h",     42.0,   7_200.0),
        ("UNIFIED_LIMIT", "7d",     30.0, 400_000.0),
        ("UNIFIED_LIMIT", "7d_oi",   2.0,      None),
        ("RATE_LIMIT",    "requests", 0.0,     None),
    ]  # fmt: skip
    assert quota_apis.anthropic_used_up_until(headers, NOW) is None


def test_of_several_windows_that_refuse_the_last_reset_counts() -> None:
    headers = {
        f"{A}unified-status": "rejected", f"{A}unified-reset": str(int(NOW) + 60),
        f"{A}unified-5h-utilization": "0.99", f"{A}unified-5h-status": "rejected",
        f"{A}unified-5h-reset": str(int(NOW) + 60),
        f"{A}unified-7d-utilization": "1.0", f"{A}unified-7d-status": "rejected",
        f"{A}unified-7d-reset": "2026-01-03T00:00:00Z",
    }  # fmt: skip
    assert quota_apis.anthropic_used_up_until(headers, NOW) == NOW + 2 * 86_400
    assert shown(quota_apis.anthropic_rows_of(headers, NOW).limits)[0][2] == 100.0


def test_the_rates_of_an_openai_key() -> None:
    headers = {
        f"{X}limit-requests": "60", f"{X}remaining-requests": "59", f"{X}reset-requests": "1s",
        f"{X}limit-tokens": "150000", f"{X}remaining-tokens": "149984",
        f"{X}reset-tokens": "6m0s",
    }  # fmt: skip
    assert shown(quota_apis.openai_rows_of(headers, NOW).limits) == [
        ("RATE_LIMIT", "tokens",   0.011, 360.0),
        ("RATE_LIMIT", "requests", 1.667,   1.0),
    ]  # fmt: skip


def test_limits_below_zero_are_none_and_plain_seconds_are_read() -> None:
    headers = {
        f"{X}limit-tokens": "-1", f"{X}remaining-tokens": "-1", f"{X}reset-tokens": "0",
        f"{X}limit-requests": "10", f"{X}remaining-requests": "5", f"{X}reset-requests": "30",
    }  # fmt: skip
    report = quota_apis.openai_rows_of(headers, NOW)
    assert shown(report.limits) == [("RATE_LIMIT", "requests", 50.0, 30.0)]
    assert report.unreadable == ()


def test_a_header_that_makes_no_sense_is_named_and_the_others_count() -> None:
    headers = {
        f"{X}limit-tokens": "many", f"{X}remaining-tokens": "5", f"{X}reset-tokens": "later",
        f"{X}remaining-requests": "inf",
    }  # fmt: skip
    report = quota_apis.openai_rows_of(headers, NOW)
    assert shown(report.limits) == [("RATE_LIMIT", "tokens", None, None)]
    assert report.unreadable == (
        "x-ratelimit-limit-tokens is no number",
        "x-ratelimit-reset-tokens is no time",
        "x-ratelimit-remaining-requests is no number",
    )


@given(
    st.dictionaries(
        st.sampled_from(
            [f"{A}unified-{w}-{p}" for w in ("5h", "7d", "99z") for p in ("utilization", "reset")]
            + [f"{A}tokens-{p}" for p in ("limit", "remaining", "reset")]
            + [f"{X}{p}-tokens" for p in ("limit", "remaining", "reset")]
        ),
        st.text(max_size=20) | st.floats().map(str) | st.integers().map(str),
    )
)
@settings(deadline=None, max_examples=300)
def test_no_headers_raise_anything(headers: dict[str, str]) -> None:
    for dialect in (quota_apis.ANTHROPIC, quota_apis.OPENAI):
        report = dialect.rows_of(headers, NOW)
        assert all(row.percent_used is None or row.percent_used >= 0 for row in report.limits)
        dialect.used_up_until(headers, NOW)


PLAN = {
    f"{A}unified-5h-utilization": "0.25",
    f"{A}unified-5h-reset": "1771177008",
    f"{A}unified-5h-status": "allowed",
}
REFUSING = PLAN | {f"{A}unified-5h-status": "rejected", f"{A}unified-status": "rejected"}
RATES = {f"{X}limit-tokens": "100", f"{X}remaining-tokens": "25", f"{X}reset-tokens": "6m0s"}


@pytest.mark.parametrize(
    ("name", "status", "headers", "percent", "resets_at"),
    [
        ("anthropic", 200, PLAN, 25.0, 1_771_177_008.0),
        ("anthropic", 500, PLAN, 25.0, 1_771_177_008.0),
        ("anthropic", 200, RATES, None, None),
        ("anthropic", 401, {}, None, None),
        ("anthropic", 429, {}, None, None),
        ("openai", 200, RATES, 75.0, NOW + 360),
        ("openai", 429, RATES, 75.0, NOW + 360),
        ("openai", 200, PLAN, None, None),
        ("zai", 200, PLAN | RATES, None, None),
        ("http-json", 200, PLAN | RATES, None, None),
    ],
)
def test_a_response_to_anybody_tells_the_quota_in_its_headers_or_nothing(
    name: str,
    status: int,
    headers: dict[str, str],
    percent: float | None,
    resets_at: float | None,
) -> None:
    provider = build_provider(name, endpoint_at(name, "https://p.test"), clock=CLOCK)
    found = provider.read_response(status, headers, NOW)
    if percent is None:
        assert found is None
        return
    assert isinstance(found, QuotaReport)
    assert found.limits[0].percent_used == percent
    assert found.limits[0].next_reset_epoch_ms == epoch_ms(resets_at)


def test_a_refusal_of_a_window_that_is_used_up_says_until_when() -> None:
    provider = build_provider("anthropic", endpoint_at("anthropic", "https://p.test"), clock=CLOCK)
    found = provider.read_response(429, REFUSING, NOW)
    assert isinstance(found, QuotaFailure)
    assert (found.kind, found.resets_at) == (QuotaFailureKind.EXHAUSTED, 1_771_177_008.0)


NAMES = st.sampled_from(sorted({*PLAN, *RATES, f"{A}tokens-remaining", f"{A}tokens-reset"}))


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(["anthropic", "openai"]),
    st.integers(100, 599),
    st.dictionaries(NAMES, st.text(max_size=80)),
)
def test_no_header_of_real_traffic_breaks_anything(
    name: str, status: int, headers: dict[str, str]
) -> None:
    provider = build_provider(name, endpoint_at(name, "https://p.test"), clock=CLOCK)
    answer = provider.read_response(status, headers, NOW)
    config = SlotConfig(name="work", provider=name, wake=WakeConfig(quota_from="traffic"))
    if answer is not None:
        row = SlotRow(name="work")
        is_news(config, row, answer, NOW)
        changed, done = observe({"work": row}, NOW, config=config, answer=answer, at=NOW)
        assert (done.row,) == changed or not changed
