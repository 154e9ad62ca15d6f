"""Servers that the tests share, each started with the first test that needs it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings
from jinja2 import Environment

from budgets.servers import PostgresServer, ValkeyServer, running_postgres, running_valkey

# How long an example takes says how busy the machine is, and nothing about the code. Examples are
# the same in every run, so that a failure is that of a change; `make explore` looks for others.
settings.register_profile("headgate", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("headgate")

# Every application and every client would read all authorities that the system trusts, which takes
# longer than many a test. Nothing that tests connect to is vouched for by one of them.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "authority.pem")

# Commands look for a token where the service of this user keeps its own, which none of ours knows;
# and what one of them kept there would be in the way of that service.
os.environ["XDG_DATA_HOME"] = os.devnull

# What a shell without job control starts in the background is deaf to SIGINT, and so are the
# commands that tests start and interrupt. Handlers are not inherited: those begin as usual.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are gathered, and none in what was gathered.

    All of it lives as long as the process. Half the time of gathering went into looking, and a test
    that collects garbage looked through everything again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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


@pytest.fixture(scope="session", autouse=True)
def templates_compiled_once() -> Iterator[None]:
    """Compile a template once in a process, and not for each application that a test builds.

    A service builds one application. Of the time of a test that builds one and draws a page, two
    thirds went into compiling.
    """
    compile_template = Environment.compile
    compiled: dict[tuple[object, ...], object] = {}

    def compile_once(
        environment: Environment, source: str, name: str | None = None, filename: str | None = None
    ) -> object:
        key = (source, name, filename, environment.undefined, environment.trim_blocks)
        if key not in compiled:
            compiled[key] = compile_template(environment, source, name, filename)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Environment, "compile", compile_once)
        yield


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
