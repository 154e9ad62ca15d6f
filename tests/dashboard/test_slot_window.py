"""From when to when the window of a slot is drawn."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dashboard.test_attention import slot
from headgate.core.slots.status import QuotaLimitBody
from headgate.dashboard.slots import window_of

NOW = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


def hours(number: float) -> datetime:
    return NOW + timedelta(hours=number)


def five_hours(resets_at: datetime | None) -> list[QuotaLimitBody]:
    other = QuotaLimitBody(type="TIME_LIMIT", unit=5, number=1.0, resets_at=hours(700))
    return [other, QuotaLimitBody(type="TOKENS_LIMIT", unit=3, number=5.0, resets_at=resets_at)]


@pytest.mark.parametrize(
    ("fields", "begins", "elapsed"),
    [
        ({}, None, None),
        ({"resets_at": hours(-1), "limits": five_hours(hours(-1))}, None, None),
        ({"resets_at": hours(4)}, None, None),
        ({"resets_at": hours(4), "limits": five_hours(hours(4))}, hours(-1), 0.2),
        ({"resets_at": hours(6), "limits": five_hours(hours(6))}, None, None),
        (
            {"resets_at": hours(3), "last_wake_at": hours(-1), "last_confirmed_at": hours(-0.9)},
            hours(-1),
            0.25,
        ),
        ({"resets_at": hours(3), "last_wake_at": hours(-1)}, None, None),
        (
            {"resets_at": hours(3), "last_wake_at": hours(-1), "last_confirmed_at": hours(-2)},
            None,
            None,
        ),
        (
            {
                "resets_at": hours(3),
                "limits": five_hours(hours(3)),
                "last_wake_at": hours(-9),
                "last_confirmed_at": hours(-9),
            },
            hours(-2),
            0.4,
        ),
    ],
    ids=[
        "none is open",
        "it has ended",
        "nothing tells when it began",
        "the provider tells its length",
        "a length that cannot be",
        "a wake opened it",
        "a wake that was not confirmed",
        "a wake that was sent after the last confirmation",
        "the wake was that of an earlier window",
    ],
)
def test_a_window_begins_with_its_wake_or_its_whole_length_ago(
    fields: dict[str, Any], begins: datetime | None, elapsed: float | None
) -> None:
    window = window_of(slot(**fields), NOW.timestamp())
    if begins is None:
        assert window is None
    else:
        assert window is not None
        assert window.begins_at == begins.timestamp()
        assert window.elapsed == pytest.approx(elapsed)
