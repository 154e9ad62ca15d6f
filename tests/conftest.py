"""Servers that the tests share, each started with the first test that needs it."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import settings

from ledgers.servers import PostgresServer, ValkeyServer, running_postgres, running_valkey

# How long an example takes says how busy the machine is, and nothing about the code. Examples are
# the same in every run, so that a failure is that of a change; `make explore` looks for others.
settings.register_profile("headgate", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("headgate")

# What a shell without job control starts in the background is deaf to SIGINT, and so are the
# commands that tests start and interrupt. Handlers are not inherited: those begin as usual.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def logs_of_one_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no test that sets up logs decide where another one's go.

    A logger that was kept with its first line would go on as it was set up then, whatever is set
    up or captured later.
    """
    configure = structlog.configure

    def configure_for_one_test(**given: Any) -> None:
        configure(**{**given, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", configure_for_one_test)
    yield
    if structlog.is_configured():
        structlog.reset_defaults()


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
