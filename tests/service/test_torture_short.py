"""A short form of `make torture`: services are killed and stopped; nothing is lost or doubled.

Their databases fail over, too, and an earlier version is replaced by the present one under load.
"""

from __future__ import annotations

import pytest

from torture_runs import assert_no_broken_promise

KILLS = 3
CHECKS = (
    ("service", "--backend", "sqlite", "--estimates", "given"),
    ("service", "--backend", "sqlite", "--estimates", "none"),
    ("service", "--backend", "postgres", "--estimates", "given"),
    ("service", "--backend", "redis", "--estimates", "none"),
    ("nodes", "--backend", "postgres"),
    ("webhooks", "--backend", "sqlite"),
    ("gateway", "--backend", "sqlite", "--calls", "300", "--escrow", "on"),
)


@pytest.mark.timeout(240)
def test_services_that_are_killed_or_stopped_keep_every_promise() -> None:
    rest = ("--kills", str(KILLS))
    assert_no_broken_promise([(*check, *rest) for check in CHECKS], seconds=200)


FAILOVERS = (
    ("failover",),
    ("redis_failover", "--backend", "sentinel"),
    ("redis_failover", "--backend", "cluster"),
    ("upgrade", "--versions", "1"),
)


@pytest.mark.timeout(240)
def test_failovers_and_a_rolling_upgrade_keep_every_promise() -> None:
    rest = ("--failovers", "2")
    assert_no_broken_promise([(*check, *rest) for check in FAILOVERS], seconds=200)
