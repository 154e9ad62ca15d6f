"""A short form of `make torture`: services are killed and stopped; nothing is lost or doubled."""

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
