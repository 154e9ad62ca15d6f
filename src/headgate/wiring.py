"""Wiring: from settings to a service whose parts are connected. The one place that names classes.

Nothing is opened here: building a service touches neither disk nor network, so that a wrong
setting is found before anything has happened.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from headgate.administration import Administration
from headgate.administration.bulk import BulkWork
from headgate.administration.watching import SettingsWatch, Upkeep
from headgate.audit import AuditLog
from headgate.bodies.tasks import LimitsShown
from headgate.core.dispatch.desk_settings import DeskSettings
from headgate.core.projects import ProjectStatus, Standing
from headgate.dashboard.attaching import attach_dashboard
from headgate.databases.child import ChildStarter
from headgate.errors import InvalidSettingError
from headgate.executor import Executor
from headgate.executors.build import build_executor
from headgate.executors.targets import PullTarget, Target
from headgate.intake import Defaults, Draining, Intake
from headgate.ledger import Ledger
from headgate.ledgers.connect import connect_budget
from headgate.metrics.service import Beside, ServiceMetrics
from headgate.runtime.engine import Engine, EngineSettings
from headgate.runtime.key_slots.slots import Slots
from headgate.runtime.telling.webhooks import Webhooks
from headgate.settings import AgentSettings, ProjectSettings, Settings, budgets, rate_limits
from headgate.settings.origin import Loaded, loaded_from
from headgate.slot_wiring import SlotKeys, attach_slots
from headgate.stores.administering.audit_trail import StoredAudit
from headgate.stores.administering.tokens import SqlTokens
from headgate.stores.books import StoreLedger
from headgate.stores.looking.usage_rows import SqlUsage
from headgate.stores.sql_store import SqlTaskStore
from headgate.stores.telling.counts import DeliveryCounts
from headgate.telemetry import Telemetry, build_telemetry
from headgate.tokens import Tokens
from headgate.tracker import LedgerTracker
from headgate.usage_report import UsageReports
from headgate.web.app import App
from headgate.web.app import build_app as build_web_app
from headgate.web.entrance import Entrance, EntranceRules, is_loopback
from headgate.webhook_wiring import attach_webhooks, callback_check

STORE_FILE = "headgate.db"
POSTGRES_SCHEMES = ("postgresql", "postgres")


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A built service: the engine, and what reads the tasks that clients send.

    `settings` are those that it was started with; `administration` has those in force.
    """

    engine: Engine
    intake: Intake
    settings: Settings
    administration: Administration
    bulk: BulkWork
    audit: AuditLog
    tokens: Tokens
    tracker: LedgerTracker
    usage: UsageReports
    slots: Slots
    webhooks: Webhooks | None = None
    telemetry: Telemetry | None = None


class Parts:
    """How settings become parts, with the variables and the keys that targets refer to."""

    def __init__(
        self, environ: Mapping[str, str], telemetry: Telemetry | None, slot_keys: SlotKeys
    ) -> None:
        self._environ = environ
        self._telemetry = telemetry
        self._slot_keys = slot_keys

    def engine_settings(self, settings: Settings, *, is_paused: bool) -> EngineSettings:
        """Return the part of the settings that the engine goes by."""
        return engine_settings(settings, is_paused=is_paused)

    def executors(self, targets: Mapping[str, Target]) -> dict[str, Executor]:
        """Return an executor for each target; none of them is open."""
        executors = build_executors(targets, self._environ, self._slot_keys)
        if self._telemetry is None:
            return executors
        return {name: self._telemetry.traced(name, one) for name, one in executors.items()}


def build_service(
    settings: Settings,
    *,
    data: Path,
    environ: Mapping[str, str],
    loaded: Loaded | None = None,
    starter: ChildStarter | None = None,
) -> Service:
    """Build everything that settings describe; `data` is where an SQLite store lies.

    `loaded` says how these settings were read, so that they can be read again. With a `starter` a
    process of its own writes to the store.
    """
    ledger = _ledger(settings)
    store = build_store(settings, data=data, keeps_books=ledger is None, starter=starter)
    telemetry = build_telemetry(environ) if settings.telemetry.otel else None
    slot_keys = SlotKeys(settings, environ)
    parts = Parts(environ, telemetry, slot_keys)
    executors = parts.executors(settings.targets)
    engine = Engine(
        store,
        executors,
        engine_settings(settings),
        ledger=ledger,
    )
    if telemetry is not None:
        engine.workers.watch(telemetry.pulled)
    webhooks = attach_webhooks(
        engine, store, settings, ledger=ledger, is_alone=not is_shared(settings)
    )
    administration = _administration(
        engine,
        store,
        loaded or loaded_from(settings),
        parts,
        executors=executors,
        ledger=ledger,
    )
    administration.listen(lambda settings, _is_paused: slot_keys.reconfigure(settings))
    slot_work = attach_slots(
        engine, store, settings, environ, data=data, is_shared=is_shared(settings)
    )
    administration.listen(lambda settings, _is_paused: slot_work.reconfigure(settings))
    return Service(
        engine=engine,
        intake=build_intake(settings),
        settings=settings,
        administration=administration,
        bulk=BulkWork(engine, store),
        audit=StoredAudit(store),
        webhooks=webhooks,
        tokens=SqlTokens(store),
        tracker=LedgerTracker(StoreLedger(store) if engine.ledger is None else engine.ledger),
        usage=SqlUsage(store),
        slots=slot_work.slots,
        telemetry=telemetry,
    )


def _administration(
    engine: Engine,
    store: SqlTaskStore,
    loaded: Loaded,
    parts: Parts,
    *,
    executors: dict[str, Executor],
    ledger: Ledger | None,
) -> Administration:
    administration = Administration(
        engine, store, parts, loaded, executors=executors, ledger=ledger
    )
    engine.before_start(administration.prepare)
    upkeep = Upkeep(administration, is_shared=is_shared(loaded.settings))
    engine.also_run("administration", upkeep.run)
    origin = loaded.origin
    if origin is not None and origin.path is not None:
        engine.also_run("settings", SettingsWatch(administration, origin.path).run)
    return administration


def limits_shown(settings: Settings) -> LimitsShown:
    """Return the limits that clients may see."""
    scheduler = settings.scheduler
    return LimitsShown(
        strategy=scheduler.strategy.value,
        max_queue_size=scheduler.max_queue_size,
        max_per_agent=scheduler.max_per_agent,
        max_inflight=scheduler.max_inflight,
        max_per_agent_inflight=scheduler.max_per_agent_inflight,
        result_ttl_seconds=scheduler.result_ttl_seconds,
        worker_count=scheduler.worker_count,
    )


def build_app(service: Service) -> App:
    """Return the HTTP application of a service."""
    limits = limits_shown(service.settings)
    app = build_web_app(service.engine, intake=service.intake, limits=limits)

    def come_into_force(settings: Settings, is_paused: bool) -> None:  # noqa: FBT001
        app.api.intake, app.api.limits = build_intake(settings), limits_shown(settings)
        app.api.is_paused = is_paused

    service.administration.listen(come_into_force)
    app.api.administration = service.administration
    app.api.bulk = service.bulk
    app.api.audit = service.audit
    app.api.webhooks = service.webhooks
    app.api.entrance = Entrance(service.tokens, entrance_rules(service.settings))
    app.api.tokens = service.tokens
    app.api.tracker = service.tracker
    app.api.usage = service.usage
    app.api.workers = service.engine.workers
    app.api.slots = service.slots
    app.api.metrics = _metrics(service, app)
    app.api.telemetry = service.telemetry
    app.api.outlook, app.api.history = service.engine.outlook, service.engine.history
    attach_dashboard(app, service.settings.dashboard.mode)
    return app


def _metrics(service: Service, app: App) -> ServiceMetrics:
    store = service.engine.store
    beside = Beside(
        tracker=service.tracker,
        streams=lambda: app.api.streams,
        slots=service.slots.statuses,
    )
    if isinstance(store, SqlTaskStore):
        writer = store.writer
        beside = beside._replace(
            writer_queue=lambda: writer.queue_length, deliveries=DeliveryCounts(store).read
        )
    return ServiceMetrics(service.engine, beside)


def entrance_rules(settings: Settings) -> EntranceRules:
    """Return whom the service lets in; whatever is not surely loopback needs tokens."""
    server, auth = settings.server, settings.auth
    on_loopback = is_loopback(server.host)
    hosts = {host.lower() for host in auth.allowed_hosts}
    # Other nodes ask this one under the name that it gives them.
    if server.advertise is not None and (hosts or on_loopback):
        hosts.add(urlsplit(server.advertise).netloc.lower())
    if hosts:
        hosts.add(server.host.lower())
    return EntranceRules(
        is_loopback=on_loopback,
        needs_token=auth.required or not on_loopback,
        hosts=frozenset(hosts),
        origins=frozenset(origin.lower() for origin in auth.allowed_origins),
    )


def engine_settings(settings: Settings, *, is_paused: bool = False) -> EngineSettings:
    """Return the part of the settings that the engine goes by."""
    scheduler = settings.scheduler
    return EngineSettings(
        desk=desk_settings(settings, is_paused=is_paused),
        is_enabled=scheduler.enabled,
        limits=scheduler.queue_limits,
        budgets=budgets(settings),
        policy=scheduler.retry_policy,
        places=scheduler.worker_count,
        lease_seconds=scheduler.lease_seconds,
        worker_lease_seconds=scheduler.worker_lease_seconds,
        tick_seconds=scheduler.tick_seconds,
        result_ttl_seconds=scheduler.result_ttl_seconds,
        max_result_bytes=scheduler.max_result_bytes,
    )


def desk_settings(settings: Settings, *, is_paused: bool = False) -> DeskSettings:
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
        paused_targets=tuple(
            name for name, target in settings.targets.items() if target.status is Standing.PAUSED
        ),
        is_paused=is_paused,
        pull_targets=settings.pull_targets,
    )


def build_intake(settings: Settings) -> Intake:
    """Return what turns requests into tasks."""
    scheduler = settings.scheduler
    return Intake(
        projects=settings.projects,
        targets={name: target.slot for name, target in settings.all_targets.items()},
        default_target=settings.default_target,
        agent_targets=settings.agent_targets,
        target_providers={
            name: target.provider
            for name, target in settings.all_targets.items()
            if target.provider is not None
        },
        slots={name: slot.provider for name, slot in settings.slots.items()},
        defaults=Defaults(
            timeout_seconds=scheduler.default_timeout_seconds,
            max_attempts=scheduler.max_attempts,
        ),
        draining=Draining(
            projects=_having(settings.projects, ProjectStatus.DRAINING),
            agents=_having(settings.agents, Standing.DRAINING),
            targets=_having(settings.targets, Standing.DRAINING),
        ),
        check_url=callback_check(settings),
    )


def build_executors(
    targets: Mapping[str, Target], environ: Mapping[str, str], slot_keys: SlotKeys
) -> dict[str, Executor]:
    """Return the executor of every target; what workers pull has none."""
    return {
        name: build_executor(name, target, environ=environ, clock=time.time, slot_keys=slot_keys)
        for name, target in targets.items()
        if not isinstance(target, PullTarget)
    }


def build_store(
    settings: Settings, *, data: Path, keeps_books: bool, starter: ChildStarter | None = None
) -> SqlTaskStore:
    """Return the store that the URL names; the modules of the others are not loaded."""
    url = settings.store.url
    scheme = "" if url is None else urlsplit(url).scheme
    if url is not None and scheme in POSTGRES_SCHEMES:
        from headgate.stores.postgres import PostgresTaskStore  # noqa: PLC0415

        return PostgresTaskStore(url, keeps_books=keeps_books, starter=starter)
    if scheme == "memory":
        from headgate.stores.memory import MemoryTaskStore  # noqa: PLC0415

        return MemoryTaskStore(keeps_books=keeps_books)
    from headgate.stores.sqlite import SqliteTaskStore  # noqa: PLC0415

    path = sqlite_file(settings, data)
    return SqliteTaskStore(path, keeps_books=keeps_books, starter=starter)


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


def _having(
    tables: Mapping[str, ProjectSettings | AgentSettings | Target], status: Enum
) -> frozenset[str]:
    return frozenset(name for name, one in tables.items() if one.status is status)
