"""What people read of a hold: times by the calendar, money in dollars."""

from __future__ import annotations

import pytest

from headgate.core.reasons import (
    BudgetShort,
    GateClosed,
    NotYetDue,
    NoWorker,
    RateLimited,
    Reason,
    WorkersFull,
)
from headgate.errors import FAR, utc_time

NEW_YEAR = 1_767_225_600.0
CLOCK = "2026-01-01 00:00:00 UTC"


@pytest.mark.parametrize(
    ("hold", "message"),
    [
        (NotYetDue(until=NEW_YEAR), f"it may not start before {CLOCK}"),
        (
            RateLimited(agent_type="browser", until=NEW_YEAR),
            f"agents of type browser are rate limited until {CLOCK}",
        ),
        (
            GateClosed(kind="slot", name="work", until=NEW_YEAR, resets_at=NEW_YEAR + 60),
            f"slot work is closed, resets at 2026-01-01 00:01:00 UTC, until {CLOCK}",
        ),
        (GateClosed(kind="scope", name=""), "scope root is closed"),
        (
            BudgetShort(scope="team:a", unit="micro_usd", room=50_000, requested=100_000),
            "needs $0.10, but budget team:a has $0.05 left",
        ),
        (
            BudgetShort(scope="", unit="tokens", room=1_200, requested=3_000_000),
            "needs 3,000,000 tokens, but budget root has 1,200 tokens left",
        ),
        (
            NoWorker(agent_id="a", since=NEW_YEAR),
            f"no worker of agent a is connected, since {CLOCK}",
        ),
        (
            WorkersFull(agent_id="a", capacity=2, since=NEW_YEAR),
            f"all 2 permits of agent a's workers are taken, since {CLOCK}",
        ),
    ],
)
def test_a_reason_is_said_in_words(hold: Reason, message: str) -> None:
    assert hold.message == message


@pytest.mark.parametrize("seconds", [1e18, float("inf"), float("nan"), -1e18])
def test_a_time_that_no_calendar_reaches_is_far_away(seconds: float) -> None:
    assert utc_time(seconds) == FAR
