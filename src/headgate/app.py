"""Wiring: from settings to a service whose parts are connected. The one place that names classes.

Nothing is opened here: building a service touches neither disk nor network, so that a wrong
setting is found before anything has happened.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from headgate.api.api import Api
from headgate.api.app import App
from headgate.api.auth import Authenticator, AuthRules, is_loopback
from headgate.api.bulk import BulkWork
from headgate.api.schema.tasks import LimitsBody
from headgate.api.shares import Shares
from headgate.api.submission import SubmissionParser
from headgate.budgets.connect import connect_budget
from headgate.budgets.tracker import LedgerTracker
from headgate.config import (
    Settings,
    SlotSettings,
    budgets,
    rate_limits,
)
from headgate.config.loading import Loaded, loaded_from
from headgate.config.messages import key_path
from headgate.config.reload import ConfigUpkeep, FileWatcher, LiveConfig
from headgate.config.settings import upstream_target
from headgate.config.slot_keys import SlotKeys, endpoint_of, read_key, slot_config
from headgate.core.budgets.ledger import Ledger
from headgate.core.dispatch_state import DispatchSettings
from headgate.core.gates import GatePart
from headgate.core.slots.slot import SlotConfig
from headgate.core.snapshot import Standing
from headgate.dashboard.dashboard import attach_dashboard
from headgate.engine.budget_alerts import (
    LEDGER_LOOK_SECONDS,
    LOOK_SECONDS,
    BudgetAlerts,
    LedgerAccounts,
)
from headgate.engine.engine import CallParts, Engine, EngineSettings
from headgate.engine.slots.slot import SlotSetup, SlotStatus
from headgate.engine.slots.slot_log import LOG_FOLDER, SlotLog
from headgate.engine.slots.slots import Slots
from headgate.engine.webhooks import Webhooks
from headgate.errors import InvalidSettingError
from headgate.executors.build import build_executors
from headgate.executors.executor import Executor
from headgate.executors.targets import (
    Target,
    free_failures,
    free_targets,
    remote_targets,
    target_estimates,
)
from headgate.executors.templates import VARIABLE, Environment, ObserveSlot
from headgate.extras import naming_extras
from headgate.gateway.gateway import Gateway
from headgate.gateway.routing import Upstreams
from headgate.metrics import Beside, ServiceMetrics
from headgate.providers.endpoints import ProviderEndpoint
from headgate.providers.http_headers import check_header_value
from headgate.providers.prices import PriceList
from headgate.providers.provider import Provider, build_provider
from headgate.storage.audit import AuditLog
from headgate.storage.call_rows import CallStore
from headgate.storage.deliveries import Deliveries, DeliveryCounts
from headgate.storage.maintenance import SqlAccounts
from headgate.storage.slot_rows import SlotStore
from headgate.storage.sql_store import SqlTaskStore, StoreLedger
from headgate.storage.task_calls import TaskCallStore
from headgate.storage.tokens import TokenStore
from headgate.storage.usage import UsageReports
from headgate.storage.writer import ChildStarter
from headgate.telemetry import Telemetry, build_telemetry
from headgate.webhooks.guard import UrlGuard, parse_allow_list
from headgate.webhooks.sender import WebhookSender

STORE_FILE = "headgate.db"
POSTGRES_SCHEMES = ("postgresql", "postgres")


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A built service: the engine that runs tasks, and what the API needs around it.

    `settings` are those that it was started with; `config` has those in force.
    """

    engine: Engine
    settings: Settings
    config: LiveConfig
    api: Api
    gateway: Gateway | None = None
    telemetry: Telemetry | None = None


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
    ledger = build_ledger(settings)
    store = build_store(settings, data=data, keeps_ledger=ledger is None, starter=starter)
    telemetry = build_telemetry(environ) if settings.telemetry.otel else None
    slot_keys = SlotKeys(settings, environ)
    slots = build_slots(settings, store, environ, data=data, is_shared=is_shared(settings))
    prices = PriceList(settings.price_overrides)
    assembly = ServiceParts(environ, telemetry, slot_keys, slots.slots.observe, prices)
    executors = assembly.executors(settings.all_targets)
    call_parts = CallParts(StoreLedger(store), CallStore(store), TaskCallStore(store))
    engine = Engine(store, executors, engine_settings(settings), ledger=ledger, calls=call_parts)
    if telemetry is not None:
        engine.workers.watch(telemetry.pulled)
    webhooks = attach_webhooks(
        engine, store, settings, ledger=ledger, is_alone=not is_shared(settings)
    )
    config = attach_config(
        engine,
        store,
        loaded or loaded_from(settings),
        assembly,
        executors=executors,
        ledger=ledger,
    )
    config.listen(lambda settings, _is_paused: slot_keys.reconfigure(settings))
    config.listen(lambda settings, _is_paused: prices.change(settings.price_overrides))
    attach_slots(engine, slots)
    config.listen(lambda settings, _is_paused: slots.reconfigure(settings))
    api = build_api(
        engine,
        store,
        settings,
        config,
        prices=prices,
        slots=slots.slots,
        webhooks=webhooks,
        telemetry=telemetry,
    )
    gateway = build_gateway(
        api, settings, config, environ, slot_keys, observe_slot=slots.slots.observe, folder=data
    )
    return Service(
        engine=engine,
        settings=settings,
        config=config,
        api=api,
        gateway=gateway,
        telemetry=telemetry,
    )


def build_app(service: Service) -> App:
    """Return the HTTP application of a service: the API, and the dashboard if it is on."""
    app = App(service.api)
    if service.gateway is not None:
        app.serve_gateway(service.gateway)
    attach_dashboard(app, service.settings.dashboard.mode)
    return app


def build_gateway(
    api: Api,
    settings: Settings,
    config: LiveConfig,
    environ: Mapping[str, str],
    slot_keys: SlotKeys,
    *,
    observe_slot: ObserveSlot,
    folder: Path,
) -> Gateway | None:
    """Return what answers in the protocols of providers; it follows the settings in force."""
    calls = api.engine.calls
    if calls is None:
        return None
    upstreams = Upstreams(settings, environ, slot_keys)
    gateway = Gateway(api, calls, upstreams, settings, observe_slot=observe_slot, folder=folder)
    calls.choose_key = gateway.sessions.choose
    calls.tasks.offer = gateway.offer_to_tasks
    calls.tasks.max_wait_seconds = lambda: gateway.settings.max_wait_seconds
    config.listen(lambda settings, _is_paused: gateway.reconfigure(settings))
    return gateway


# The store and the ledger.


def build_store(
    settings: Settings, *, data: Path, keeps_ledger: bool, starter: ChildStarter | None = None
) -> SqlTaskStore:
    """Return the store that the URL names; the modules of the others are not loaded."""
    url = settings.store.url
    scheme = "" if url is None else urlsplit(url).scheme
    if url is not None and scheme in POSTGRES_SCHEMES:
        with naming_extras("store.url"):
            from headgate.storage.postgres import PostgresTaskStore  # noqa: PLC0415

        return PostgresTaskStore(
            url, keeps_ledger=keeps_ledger, starter=starter, domain=settings.store.domain
        )
    if scheme == "memory":
        from headgate.storage.memory import MemoryTaskStore  # noqa: PLC0415

        return MemoryTaskStore(keeps_ledger=keeps_ledger)
    from headgate.storage.sqlite import SqliteTaskStore  # noqa: PLC0415

    path = sqlite_file(settings, data)
    return SqliteTaskStore(path, keeps_ledger=keeps_ledger, starter=starter)


def sqlite_file(settings: Settings, data: Path) -> Path:
    """Return the file of an SQLite store."""
    url = settings.store.url
    if url is None:
        return data / STORE_FILE
    from headgate.budgets.connect import sqlite_path  # noqa: PLC0415

    if urlsplit(url).scheme != "sqlite":
        problem = f"has the scheme {urlsplit(url).scheme!r}; use sqlite, postgresql or memory"
        raise InvalidSettingError("store.url", problem)
    return sqlite_path(url)


def is_shared(settings: Settings) -> bool:
    """Tell whether several processes may use the store at a time."""
    url = settings.store.url
    return url is not None and urlsplit(url).scheme in POSTGRES_SCHEMES


def held_file(settings: Settings, data: Path) -> Path | None:
    """Return the file that one process at a time may use; None if the store is in none."""
    url = settings.store.url
    is_file = url is None or urlsplit(url).scheme == "sqlite"
    return sqlite_file(settings, data) if is_file else None


def build_ledger(settings: Settings) -> Ledger | None:
    """Return the ledger outside the store; None if the store keeps it."""
    url = settings.ledger.url
    return None if url is None or url == settings.store.url else connect_budget(url).ledger


# The engine and the settings that it goes by.


class ServiceParts:
    """How settings become parts of the engine, with the variables and keys of the targets."""

    def __init__(
        self,
        environ: Mapping[str, str],
        telemetry: Telemetry | None,
        slot_keys: SlotKeys,
        observe_slot: ObserveSlot,
        prices: PriceList,
    ) -> None:
        self._prices = prices
        self._environ = environ
        self._telemetry = telemetry
        self._slot_keys = slot_keys
        self._observe_slot = observe_slot

    def engine_settings(self, settings: Settings, *, is_paused: bool) -> EngineSettings:
        """Return the part of the settings that the engine goes by."""
        return engine_settings(settings, is_paused=is_paused)

    def executors(self, targets: Mapping[str, Target]) -> dict[str, Executor]:
        """Return an executor for each target; none of them is open."""
        executors = build_executors(
            targets,
            self._environ,
            self._slot_keys,
            prices=self._prices,
            observe_slot=self._observe_slot,
        )
        if self._telemetry is None:
            return executors
        return {name: self._telemetry.traced(name, one) for name, one in executors.items()}


def attach_config(
    engine: Engine,
    store: SqlTaskStore,
    loaded: Loaded,
    assembly: ServiceParts,
    *,
    executors: dict[str, Executor],
    ledger: Ledger | None,
) -> LiveConfig:
    """Have an engine go by the settings in force, and watch the file and the other nodes."""
    config = LiveConfig(engine, store, assembly, loaded, executors=executors, ledger=ledger)
    engine.before_start(config.prepare)
    upkeep = ConfigUpkeep(config, is_shared=is_shared(loaded.settings))
    engine.also_run("overrides", upkeep.run)
    origin = loaded.origin
    if origin is not None and origin.path is not None:
        engine.also_run("settings", FileWatcher(config, origin.path).run)
    return config


def engine_settings(settings: Settings, *, is_paused: bool = False) -> EngineSettings:
    """Return the part of the settings that the engine goes by."""
    scheduler = settings.scheduler
    return EngineSettings(
        dispatch=dispatch_settings(settings, is_paused=is_paused),
        is_enabled=scheduler.enabled,
        limits=scheduler.queue_limits,
        budgets=budgets(settings),
        policy=scheduler.retry_policy,
        capacity=scheduler.worker_count,
        node_lease_seconds=scheduler.node_lease_seconds,
        worker_lease_seconds=scheduler.worker_lease_seconds,
        tick_seconds=scheduler.tick_seconds,
        retention=scheduler.retention,
        max_result_bytes=scheduler.max_result_bytes,
        free_failures=free_failures(settings.all_targets),
    )


def dispatch_settings(settings: Settings, *, is_paused: bool = False) -> DispatchSettings:
    """Return the part of the settings that decisions go by.

    A project's budget is a scope of the ledger, and its closed gate is what holds tasks. Asking
    for it a second time in the decision would only be a second opinion.
    """
    scheduler = settings.scheduler
    projects = settings.core_projects()
    return DispatchSettings(
        projects=tuple(msgspec.structs.replace(one, budget_limit=None) for one in projects),
        agents=settings.core_agents(),
        rate_limits=rate_limits(settings),
        lane_policy=scheduler.strategy,
        alpha=scheduler.resolved_alpha,
        auto_tune=scheduler.auto_tune,
        max_wait_ticks=scheduler.max_wait_ticks,
        priority_ageing_seconds=scheduler.priority_ageing_seconds,
        default_tokens=scheduler.default_tokens,
        free_targets=free_targets(settings.all_targets),
        target_estimates=target_estimates(settings.all_targets),
        estimate_quantile=scheduler.estimate_quantile,
        reserve=scheduler.reserve,
        max_inflight=scheduler.max_inflight,
        max_per_agent_inflight=scheduler.max_per_agent_inflight,
        max_lag_tokens=scheduler.max_lag_tokens,
        usage_window_hours=scheduler.usage_window_hours,
        paused_targets=tuple(
            name for name, target in settings.targets.items() if target.status is Standing.PAUSED
        ),
        is_paused=is_paused,
        pull_targets=settings.pull_targets,
        remote_targets=remote_targets(settings.targets),
        is_shared_by_usd=scheduler.share_unit == "usd",
        capped_agents=frozenset(
            name for name, agent in settings.agents.items() if agent.capacity is not None
        ),
        upstream_permits={
            upstream_target(name): one.max_inflight for name, one in settings.all_upstreams.items()
        },
        upstream_slots={
            upstream_target(name): one.slots
            for name, one in settings.all_upstreams.items()
            if one.slots
        },
        slot_permits={
            name: one.max_inflight
            for name, one in settings.slots.items()
            if one.max_inflight is not None
        },
    )


# Slots: providers, keys, what the rules go by. A slot whose key or headers cannot be had is no
# reason not to start. It is set up all the same, and says at its first use what is missing.


class SlotParts:
    """Sets slots up; a slot whose endpoint is as it was keeps its provider and its connections."""

    def __init__(
        self, environ: Mapping[str, str], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._environ = environ
        self._clock = clock
        self._providers: dict[str, tuple[str, ProviderEndpoint, Provider]] = {}

    def setups(self, settings: Settings) -> tuple[SlotSetup, ...]:
        """Return all slots of the settings with what they need, in the order of the file.

        A provider that is in none of the setups any more is left to whoever got it to close.
        """
        setups = tuple(self._setup(settings, slot) for slot in settings.slots.values())
        self._providers = {name: self._providers[name] for name in settings.slots}
        return setups

    def _setup(self, settings: Settings, slot: SlotSettings) -> SlotSetup:
        endpoint, problem = self._endpoint(slot)
        reader = _reader(slot, self._environ, problem)
        config_for = _configurer(settings, slot)
        return SlotSetup(
            config=config_for(_key_or_none(reader)),
            provider=self._provider(slot, endpoint),
            read_key=reader,
            is_logging=slot.logging,
            key_place=slot.key_env or slot.key_file or "",
            key_mark=partial(file_mark, slot.key_file),
            config_for=config_for,
        )

    def _endpoint(self, slot: SlotSettings) -> tuple[ProviderEndpoint, InvalidSettingError | None]:
        endpoint = endpoint_of(slot)
        try:
            headers, hidden = _filled_headers(slot, self._environ)
        except InvalidSettingError as error:
            return msgspec.structs.replace(endpoint, headers={}), error
        return msgspec.structs.replace(endpoint, headers=headers, secrets=hidden), None

    def _provider(self, slot: SlotSettings, endpoint: ProviderEndpoint) -> Provider:
        known = self._providers.get(slot.name)
        if known is not None and known[:2] == (slot.provider, endpoint):
            return known[2]
        setting = key_path("slots", slot.name)
        provider = build_provider(slot.provider, endpoint, setting=setting, clock=self._clock)
        self._providers[slot.name] = (slot.provider, endpoint, provider)
        return provider


class SlotWork:
    """The slots of a service, or of a command that runs nothing else, with their log."""

    def __init__(
        self,
        settings: Settings,
        store: SqlTaskStore,
        environ: Mapping[str, str],
        *,
        data: Path,
        is_shared: bool,
    ) -> None:
        self._parts = SlotParts(environ)
        self.log = SlotLog(data / LOG_FOLDER, max_log_days=settings.quota.max_log_days)
        self.slots = Slots(
            SlotStore(store),
            self._parts.setups(settings),
            trail_of=self.log.trail,
            make_id=partial(secrets.token_hex, 8),
            latest_lines=self.log.latest,
            is_shared=is_shared,
        )

    def reconfigure(self, settings: Settings) -> None:
        """Go by other settings."""
        self.log.max_log_days = settings.quota.max_log_days
        self.slots.reconfigure(self._parts.setups(settings))

    async def run(self) -> None:
        """Run the slots until cancelled; what is to be logged is on disk then."""
        try:
            await self.slots.run()
        finally:
            await asyncio.to_thread(self.log.close)


def build_slots(
    settings: Settings,
    store: SqlTaskStore,
    environ: Mapping[str, str],
    *,
    data: Path,
    is_shared: bool,
) -> SlotWork:
    """Return the slots of the settings: open the store, then `slots.prepare` and `run` them."""
    return SlotWork(settings, store, environ, data=data, is_shared=is_shared)


def attach_slots(engine: Engine, work: SlotWork) -> None:
    """Have an engine run slots, and decide by how much room they have."""
    engine.before_start(work.slots.prepare)
    engine.also_run("slots", work.run)
    engine.feed.subscribe(paused_slots=work.slots.read_soon)
    work.slots.listen(engine.dispatcher.set_slots)


def file_mark(name: str | None) -> object:
    """Return what changes whenever a file does, without reading it; None if it is not there."""
    if name is None:
        return None
    try:
        found = Path(name).expanduser().stat()
    except (OSError, ValueError, RuntimeError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _reader(
    slot: SlotSettings, environ: Mapping[str, str], problem: InvalidSettingError | None
) -> Callable[[], str]:
    # A function with its names inside shows nothing of the environment, as a partial would.
    def read() -> str:
        if problem is not None:
            raise InvalidSettingError(problem.field, problem.problem)
        return read_key(slot, environ)

    return read


def _configurer(settings: Settings, slot: SlotSettings) -> Callable[[str | None], SlotConfig]:
    def config_for(key: str | None) -> SlotConfig:
        return slot_config(settings, slot, key)

    return config_for


def _key_or_none(reader: Callable[[], str]) -> str | None:
    try:
        return reader()
    except InvalidSettingError:
        return None


def _filled_headers(
    slot: SlotSettings, environ: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the headers as they are sent, and what the environment gave, to be told nobody."""
    environment = Environment(environ)
    filled: dict[str, str] = {}
    given: list[str] = []
    for name, text in slot.headers.items():
        setting = key_path("slots", slot.name, "headers", name)
        parts = VARIABLE.split(text)
        parts[1::2] = [environment.value(one, setting=setting) for one in parts[1::2]]
        given += parts[1::2]
        filled[name] = "".join(parts)
        check_header_value(filled[name], setting)
    return filled, tuple(given)


# Webhooks: what judges addresses, what delivers, and what notices used-up budgets.

SWITCHED_OFF = "webhooks are switched off; set webhooks.enabled = true"


def attach_webhooks(
    engine: Engine,
    store: SqlTaskStore,
    settings: Settings,
    *,
    ledger: Ledger | None,
    is_alone: bool,
) -> Webhooks | None:
    """Have an engine deliver webhooks and notice budgets, as far as the settings say so."""
    given = settings.webhooks
    if not given.enabled:
        return None
    guard = UrlGuard(parse_allow_list(given.allow))
    webhooks = Webhooks(
        Deliveries(store),
        WebhookSender(
            guard, timeout_seconds=given.try_timeout_seconds, max_connections=given.concurrency
        ),
        concurrency=given.concurrency,
        timeout_seconds=given.try_timeout_seconds,
        is_alone=is_alone,
    )
    engine.feed.subscribe(records=webhooks.observe)
    engine.also_run("webhooks", webhooks.run)
    if given.alerts_url is not None:
        _check_alerts_url(guard, given.alerts_url)
        accounts = SqlAccounts(store) if ledger is None else LedgerAccounts(ledger)
        alerts = BudgetAlerts(
            webhooks.deliveries,
            accounts.after,
            url=given.alerts_url,
            leads=lambda: engine.dispatcher.is_leading,
            filed=webhooks.wake,
            look_seconds=LOOK_SECONDS if ledger is None else LEDGER_LOOK_SECONDS,
        )
        engine.also_run("budget alerts", alerts.run)
    return webhooks


def callback_check(settings: Settings) -> Callable[[str], str | None]:
    """Return what says why a task cannot have an address told of its end."""
    if not settings.webhooks.enabled:
        return _switched_off
    return UrlGuard(parse_allow_list(settings.webhooks.allow)).problem_with


def _switched_off(_url: str) -> str:
    return SWITCHED_OFF


def _check_alerts_url(guard: UrlGuard, url: str) -> None:
    problem = guard.problem_with(url)
    if problem is not None:
        raise InvalidSettingError("webhooks.alerts_url", problem)


# The API.


def build_api(
    engine: Engine,
    store: SqlTaskStore,
    settings: Settings,
    config: LiveConfig,
    *,
    prices: PriceList,
    slots: Slots,
    webhooks: Webhooks | None,
    telemetry: Telemetry | None,
) -> Api:
    """Return what the handlers of requests share; it follows the settings in force."""
    shares, tokens = Shares(), TokenStore(store)
    usage = UsageReports(store)
    tracker = LedgerTracker(StoreLedger(store) if engine.ledger is None else engine.ledger)
    metrics = build_metrics(engine, store, tracker, usage, slots, shares)
    api = Api(
        engine=engine,
        config=config,
        submission_parser=build_submission_parser(settings),
        limits=limits_body(settings),
        auth=Authenticator(tokens, auth_rules(settings)),
        tokens=tokens,
        audit=AuditLog(store),
        bulk=BulkWork(engine, store),
        tracker=metrics.budgets.observe(tracker),
        usage=usage,
        prices=prices,
        slots=slots,
        webhooks=webhooks,
        metrics=metrics,
        shares=shares,
        telemetry=telemetry,
    )

    def follow(settings: Settings, is_paused: bool) -> None:  # noqa: FBT001
        api.submission_parser = build_submission_parser(settings)
        api.limits = limits_body(settings)
        api.is_paused = is_paused

    config.listen(follow)
    return api


def limits_body(settings: Settings) -> LimitsBody:
    """Return the limits that clients may see."""
    scheduler = settings.scheduler
    return LimitsBody(
        strategy=scheduler.strategy.value,
        max_queue_size=scheduler.max_queue_size,
        queue_share=scheduler.queue_share,
        max_per_agent=scheduler.max_per_agent,
        max_scheduled=scheduler.max_scheduled,
        max_inflight=scheduler.max_inflight,
        max_per_agent_inflight=scheduler.max_per_agent_inflight,
        task_retention_seconds=scheduler.task_retention_seconds,
        max_ended_tasks=scheduler.max_ended_tasks,
        max_store_bytes=scheduler.max_store_bytes,
        worker_count=scheduler.worker_count,
    )


def auth_rules(settings: Settings) -> AuthRules:
    """Return whom the service lets in; whatever is not surely loopback needs tokens."""
    server, auth = settings.server, settings.auth
    on_loopback = is_loopback(server.host)
    hosts = {host.lower() for host in auth.allowed_hosts}
    # Other nodes ask this one under the name that it gives them.
    if server.advertise is not None and (hosts or on_loopback):
        hosts.add(urlsplit(server.advertise).netloc.lower())
    if hosts:
        hosts.add(server.host.lower())
    return AuthRules(
        is_loopback=on_loopback,
        needs_token=auth.required or not on_loopback,
        hosts=frozenset(hosts),
        origins=frozenset(origin.lower() for origin in auth.allowed_origins),
    )


def build_submission_parser(settings: Settings) -> SubmissionParser:
    """Return what turns requests into tasks."""
    return SubmissionParser.from_settings(settings, callback_check(settings))


def _slot_statuses(engine: Engine, slots: Slots) -> tuple[SlotStatus, ...]:
    """Return the slots with what closes them beside their own quota, where this node dispatches."""
    state = engine.dispatcher.dispatch_state
    if state is None:
        return slots.statuses()
    found = []
    for status in slots.statuses():
        timed = state.closures.timed.get(GatePart("slot", status.config.name))
        standing = status.standing
        if timed is not None and standing.closure is None:
            standing = msgspec.structs.replace(standing, closure=timed)
            status = msgspec.structs.replace(status, standing=standing)  # noqa: PLW2901
        found.append(status)
    return tuple(found)


def build_metrics(
    engine: Engine,
    store: SqlTaskStore,
    tracker: LedgerTracker,
    usage: UsageReports,
    slots: Slots,
    shares: Shares,
) -> ServiceMetrics:
    """Return all metrics of a service."""
    beside = Beside(
        tracker=tracker,
        usage=usage,
        streams=lambda: shares.streams.taken,
        slots=partial(_slot_statuses, engine, slots),
        writer_queue=lambda: store.writer.queue_length,
        deliveries=DeliveryCounts(store).read,
    )
    return ServiceMetrics(engine, beside)
