"""Wiring: from settings to a service whose parts are connected. The one place that names classes.

Nothing is opened here: building a service touches neither disk nor network, so that a wrong
setting is found before anything has happened.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from headgate.core.desk_settings import DeskSettings
from headgate.errors import InvalidSettingError
from headgate.executor import Executor
from headgate.executors.build import build_executor
from headgate.intake import Defaults, Intake
from headgate.ledger import Ledger
from headgate.ledgers.connect import connect_budget
from headgate.runtime.engine import Engine, EngineSettings
from headgate.settings import Settings, budgets, rate_limits
from headgate.store import TaskStore
from headgate.web.api import LimitsShown
from headgate.web.app import App
from headgate.web.app import build_app as build_web_app

STORE_FILE = "headgate.db"
POSTGRES_SCHEMES = ("postgresql", "postgres")


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A built service: the engine, and what reads the tasks that clients send."""

    engine: Engine
    intake: Intake
    settings: Settings


def build_service(settings: Settings, *, data: Path, environ: Mapping[str, str]) -> Service:
    """Build everything that settings describe; `data` is where an SQLite store lies."""
    ledger = _ledger(settings)
    engine = Engine(
        build_store(settings, data=data, keeps_books=ledger is None),
        build_executors(settings, environ),
        engine_settings(settings),
        ledger=ledger,
    )
    return Service(engine=engine, intake=build_intake(settings), settings=settings)


def build_app(service: Service) -> App:
    """Return the HTTP application of a service."""
    scheduler = service.settings.scheduler
    limits = LimitsShown(
        strategy=scheduler.strategy.value,
        max_queue_size=scheduler.max_queue_size,
        max_per_agent=scheduler.max_per_agent,
        max_inflight=scheduler.max_inflight,
        max_per_agent_inflight=scheduler.max_per_agent_inflight,
        result_ttl_seconds=scheduler.result_ttl_seconds,
        worker_count=scheduler.worker_count,
    )
    return build_web_app(service.engine, intake=service.intake, limits=limits)


def engine_settings(settings: Settings) -> EngineSettings:
    """Return the part of the settings that the engine goes by."""
    scheduler = settings.scheduler
    return EngineSettings(
        desk=desk_settings(settings),
        is_enabled=scheduler.enabled,
        limits=scheduler.queue_limits,
        budgets=budgets(settings),
        policy=scheduler.retry_policy,
        places=scheduler.worker_count,
        lease_seconds=scheduler.lease_seconds,
        tick_seconds=scheduler.tick_seconds,
        result_ttl_seconds=scheduler.result_ttl_seconds,
        max_result_bytes=scheduler.max_result_bytes,
    )


def desk_settings(settings: Settings) -> DeskSettings:
    """Return the part of the settings that decisions go by.

    A project's budget is a scope of the ledger, and its closed gate is what holds tasks. Asking
    for it a second time in the decision would only be a second opinion.
    """
    scheduler = settings.scheduler
    projects = settings.core_projects()
    return DeskSettings(
        projects=tuple(msgspec.structs.replace(one, budget_limit=None) for one in projects),
        agents=settings.core_agents(),
        rate_limits=rate_limits(settings),
        lane_policy=scheduler.strategy,
        alpha=scheduler.resolved_alpha,
        auto_tune=scheduler.auto_tune,
        max_wait_ticks=scheduler.max_wait_ticks,
        priority_ageing_seconds=scheduler.priority_ageing_seconds,
        default_tokens=scheduler.default_tokens,
        default_micro_usd=scheduler.default_cost_micro_usd,
        max_inflight=scheduler.max_inflight,
        max_per_agent_inflight=scheduler.max_per_agent_inflight,
        max_lag_tokens=scheduler.max_lag_tokens,
        usage_window_hours=scheduler.usage_window_hours,
    )


def build_intake(settings: Settings) -> Intake:
    """Return what turns requests into tasks."""
    scheduler = settings.scheduler
    return Intake(
        projects=settings.projects,
        targets={name: target.slot for name, target in settings.targets.items()},
        default_target=settings.default_target,
        defaults=Defaults(
            timeout_seconds=scheduler.default_timeout_seconds,
            max_attempts=scheduler.max_attempts,
        ),
    )


def build_executors(settings: Settings, environ: Mapping[str, str]) -> dict[str, Executor]:
    """Return the executor of every target."""
    return {
        name: build_executor(name, target, environ=environ, clock=time.time)
        for name, target in settings.targets.items()
    }


def build_store(settings: Settings, *, data: Path, keeps_books: bool) -> TaskStore:
    """Return the store that the URL names; the modules of the others are not loaded."""
    url = settings.store.url
    scheme = "" if url is None else urlsplit(url).scheme
    if url is not None and scheme in POSTGRES_SCHEMES:
        from headgate.stores.postgres import PostgresTaskStore  # noqa: PLC0415

        return PostgresTaskStore(url, keeps_books=keeps_books)
    if scheme == "memory":
        from headgate.stores.memory import MemoryTaskStore  # noqa: PLC0415

        return MemoryTaskStore(keeps_books=keeps_books)
    from headgate.stores.sqlite import SqliteTaskStore  # noqa: PLC0415

    return SqliteTaskStore(sqlite_file(settings, data), keeps_books=keeps_books)


def sqlite_file(settings: Settings, data: Path) -> Path:
    """Return the file of an SQLite store."""
    url = settings.store.url
    if url is None:
        return data / STORE_FILE
    from headgate.ledgers.connect import sqlite_path  # noqa: PLC0415

    if urlsplit(url).scheme != "sqlite":
        problem = f"has the scheme {urlsplit(url).scheme!r}; use sqlite, postgresql or memory"
        raise InvalidSettingError("store.url", problem)
    return sqlite_path(url)


def is_shared(settings: Settings) -> bool:
    """Tell whether several processes may use the store at a time."""
    url = settings.store.url
    return url is not None and urlsplit(url).scheme in POSTGRES_SCHEMES


def held_folder(settings: Settings, data: Path) -> Path | None:
    """Return the folder that one process at a time may use; None if the store lies in none."""
    url = settings.store.url
    is_file = url is None or urlsplit(url).scheme == "sqlite"
    return sqlite_file(settings, data).parent if is_file else None


def _ledger(settings: Settings) -> Ledger | None:
    url = settings.ledger.url
    return None if url is None or url == settings.store.url else connect_budget(url).ledger
