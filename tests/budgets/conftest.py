"""Fresh ledgers for the tests of ledgers."""

from __future__ import annotations

from pathlib import Path

import pytest

from budgets.support import BACKENDS, TrackerFactory, local_factory, placed_factory


def ledger_on(backend: str, request: pytest.FixtureRequest) -> TrackerFactory:
    """Make a fresh ledger on a backend, starting its server with the first that needs it."""
    if backend == "local":
        return local_factory()
    if backend == "sqlite":
        path: Path = request.getfixturevalue("tmp_path") / "ledger.db"
        return placed_factory("sqlite", "SqliteBudgetTracker", str(path), f"sqlite:///{path}")
    if backend == "redis":
        url: str = request.getfixturevalue("valkey_url")
        return placed_factory("redis", "RedisBudgetTracker", url, url)
    url = request.getfixturevalue("postgres_url")
    return placed_factory("postgres", "PostgresBudgetTracker", url, url)


@pytest.fixture(params=BACKENDS)
def tracker_factory(request: pytest.FixtureRequest) -> TrackerFactory:
    """Give a fresh ledger on each backend in turn."""
    return ledger_on(request.param, request)
