"""Servers and fresh books for the tests of ledgers; tests there may be async functions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from ledgers.servers import PostgresServer, ValkeyServer, running_postgres, running_valkey
from ledgers.support import BACKENDS, TrackerFactory, local_factory, placed_factory, run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """Give the Valkey server that all tests share; a test that stops it starts it again."""
    with running_valkey() as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Give the PostgreSQL server that all tests share; a test that stops it starts it again."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def valkey_url(valkey: ValkeyServer) -> str:
    """Give the URL of a Valkey server without any keys."""
    valkey.flush()
    return valkey.url


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """Give the URL of a schema without any tables."""
    return postgres.new_schema()


def books_on(backend: str, request: pytest.FixtureRequest) -> TrackerFactory:
    """Make fresh books on a backend, starting its server with the first that needs it."""
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
    """Give fresh books on each backend in turn."""
    return books_on(request.param, request)
