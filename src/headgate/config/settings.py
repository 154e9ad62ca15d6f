"""The settings as types: one struct for each section of the file, with its defaults and ranges.

A range stands in the type of its key, so that the check, the message and the reference page agree.
Defaults are those of a service on one machine.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, inspect

from headgate.config.messages import key_path, table_expected
from headgate.core.admission import LEAST_QUEUE_SHARE, MOST_QUEUE_SHARE, QueueLimits
from headgate.core.budgets.windows import MAX_ROLLING_HOURS, Window, WindowKind
from headgate.core.estimates import DEFAULT_QUANTILE, Reserve
from headgate.core.lifecycle import RetryPolicy
from headgate.core.load import MOST_ALPHA, MOST_UNSAFE_ALPHA, resolve_alpha
from headgate.core.money import MAX_LIMIT_TOKENS, MAX_RESERVATION_TOKENS
from headgate.core.rate_limits import RateKind
from headgate.core.retention import MAX_ENDED_TASKS, TASK_RETENTION_SECONDS, Retention
from headgate.core.retries import Backoff
from headgate.core.slots.wakes import MINUTES_PER_DAY, RANGES, WakeMode
from headgate.core.snapshot import (
    DEFAULT_TOKENS,
    MAX_COUNT,
    MAX_WEIGHT,
    Agent,
    AgentState,
    LanePolicy,
    Project,
    ProjectStatus,
    Standing,
    with_built_in_agent,
)
from headgate.core.task import ATTEMPT_SECONDS, MAX_ATTEMPT_SECONDS, MAX_ATTEMPTS
from headgate.errors import InvalidSettingError
from headgate.executors.targets import PULL, PULL_NAME, PullTarget, Target
from headgate.providers.prices import Price

# The settings of key slots: `[quota]` for all of them, and a table of `[[slots]]` for each.
#
# A key is never written into the file: a slot names the variable or the file that holds it.

SLOTS = "slots"
MAX_SLOTS = 10_000
MAX_SLOT_NAME_LENGTH = 32
NEVER = "none"
_KEYS_THEMSELVES = frozenset({"key", "api_key", "token"})

ProviderName = Literal["zai", "anthropic", "openai", "http-json"]
Minutes = Annotated[int, Meta(ge=1, le=MINUTES_PER_DAY)]


class QuotaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds for all slots."""

    max_slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 4
    max_consecutive_errors: Annotated[int, Meta(ge=1, le=RANGES["max_consecutive_errors"][1])] = 10
    quota_poll_backoff_cap_minutes: Annotated[
        int, Meta(ge=1, le=RANGES["quota_poll_backoff_cap_minutes"][1])
    ] = 480
    wake_quota_retry_window_minutes: Minutes = 15
    wake_catch_up_minutes: Annotated[int, Meta(ge=0, le=MINUTES_PER_DAY)] = 15
    adaptive_polling: bool = False
    max_log_days: Annotated[int, Meta(ge=1, le=3_650)] = 7


class SlotSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of a provider: where it is asked, when it is polled, when it is woken.

    `base_url` stands for both addresses, `quota_url` and `request_url` for one each. The pointers
    (RFC 6901) find the numbers in the answer of an `http-json` provider. `poll` says whether a
    quota that only headers of responses tell may be asked for with requests, which cost.
    `projects` are those whose tasks may use the slot; without it all may.
    """

    name: Annotated[str, Meta(min_length=1, max_length=MAX_SLOT_NAME_LENGTH)]
    provider: ProviderName
    enabled: bool = True
    key_env: Text | None = None
    key_file: Text | None = None
    base_url: Text | None = None
    quota_url: Text | None = None
    request_url: Text | None = None
    headers: dict[str, str] = {}
    wake_model: Text | None = None
    wake_body: Text | None = None
    wake_modes: tuple[WakeMode, ...] = ()
    wake_on_start: bool | None = None
    wake_interval_minutes: Minutes = 60
    wake_times: tuple[str, ...] = ()
    wake_after_reset_minutes: Minutes = 1
    poll: Literal["free", "request"] = "free"
    poll_interval_minutes: Minutes = 30
    zone: Text = "UTC"
    limit_type: Text | None = None
    limit_unit: int | str | None = None
    projects: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_SLOTS)] | None = None
    percent_pointer: str | None = None
    used_pointer: str | None = None
    limit_pointer: str | None = None
    reset_pointer: str | None = None
    logging: bool = True


def slots_by_name(written: object) -> dict[str, object]:
    """Return the tables of `[[slots]]` by name, in their order, or raise `InvalidSettingError`.

    From here on a slot goes by its name, in messages too. Only a table whose name cannot be used
    is called by its place in the file.
    """
    if not isinstance(written, list):
        problem = 'is a list of tables; begin each with [[slots]] and write its name = "…" there'
        raise InvalidSettingError(SLOTS, problem)
    named: dict[str, object] = {}
    for place, table in enumerate(written):
        name = _name_of(table, place)
        if name in named:
            problem = f"{name!r} is the name of an earlier slot; each needs its own"
            raise InvalidSettingError(_name_key(place), problem)
        _check_keyless(name, table)
        named[name] = _with_modes(table)
    return named


def _name_of(table: object, place: int) -> str:
    if not isinstance(table, dict):
        raise table_expected((SLOTS, f"[{place}]"), table)
    if "name" not in table:
        raise InvalidSettingError(_name_key(place), "is missing; write it")
    name = table["name"]
    if isinstance(name, str) and 0 < len(name) <= MAX_SLOT_NAME_LENGTH and name.isprintable():
        if name.strip() == name:
            return name
        raise InvalidSettingError(_name_key(place), "has spaces at its ends; take them out")
    problem = f"must be a text of 1 to {MAX_SLOT_NAME_LENGTH} characters, all of them printable"
    raise InvalidSettingError(_name_key(place), problem)


def _name_key(place: int) -> str:
    return key_path(SLOTS, f"[{place}]", "name")


def _check_keyless(name: str, table: dict[str, object]) -> None:
    for key in sorted(_KEYS_THEMSELVES & table.keys()):
        problem = "a key is not written into the file; name its variable, key_env, or a key_file"
        raise InvalidSettingError(key_path(SLOTS, name, key), problem)


def _with_modes(table: dict[str, object]) -> dict[str, object]:
    is_never = table.get("wake_modes") in (NEVER, [NEVER])
    return table | {"wake_modes": []} if is_never else table


DEFAULT_PROJECT = "default"
DEFAULT_PORT = 7420
ONE_YEAR_SECONDS = 365 * 86_400

Dollars = str | int | float
Permits = Annotated[int, Meta(ge=1, le=1_000_000)]
QueueLength = Annotated[int, Meta(ge=1, le=1_000_000_000)]
EndedTasks = Annotated[int, Meta(ge=1, le=100_000_000)]
StoreBytes = Annotated[int, Meta(ge=16 * 2**20, le=2**50)]
QueueShare = Annotated[float, Meta(ge=LEAST_QUEUE_SHARE, le=MOST_QUEUE_SHARE)]
Workers = Annotated[int, Meta(ge=1, le=10_000)]
Seconds = Annotated[float, Meta(ge=0.001, le=ONE_YEAR_SECONDS)]
SecondsOrNone = Annotated[float, Meta(ge=0, le=ONE_YEAR_SECONDS)]
Hours = Annotated[int, Meta(ge=1, le=MAX_ROLLING_HOURS)]
Rate = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Text = Annotated[str, Meta(min_length=1, max_length=2_000)]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "text"]
OptimizeFor = Literal["latency", "balanced", "throughput"]
DashboardMode = Literal["on", "read-only", "off"]


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tasks are admitted, chosen, run and kept."""

    enabled: bool = True
    strategy: LanePolicy = LanePolicy.FEWEST_IN_FLIGHT
    optimize_for: OptimizeFor | None = None
    alpha: Annotated[float, Meta(ge=0, le=MOST_UNSAFE_ALPHA)] | None = None
    allow_unsafe_alpha: bool = False
    auto_tune: bool = False
    max_wait_ticks: Annotated[int, Meta(ge=1, le=MAX_COUNT)] = 1_000
    max_queue_size: QueueLength = 1_000
    queue_share: QueueShare = 8.0
    max_per_agent: QueueLength = 100
    max_scheduled: QueueLength = 10_000
    max_inflight: Permits = 20
    max_per_agent_inflight: Permits = 10
    worker_count: Workers = 20
    task_retention_seconds: Seconds = TASK_RETENTION_SECONDS
    max_ended_tasks: EndedTasks = MAX_ENDED_TASKS
    max_store_bytes: StoreBytes | None = None
    default_deadline_seconds: Seconds | None = None
    attempt_timeout_seconds: Annotated[float, Meta(ge=0.001, le=MAX_ATTEMPT_SECONDS)] = (
        ATTEMPT_SECONDS
    )
    tick_seconds: Annotated[float, Meta(ge=0.01, le=3_600)] = 5.0
    usage_window_hours: Hours = 24
    global_budget: Annotated[int, Meta(ge=0, le=MAX_LIMIT_TOKENS)] = 0
    default_tokens: Annotated[int, Meta(ge=1, le=MAX_RESERVATION_TOKENS)] = DEFAULT_TOKENS
    reserve: Reserve = Reserve.EXPECTED
    estimate_quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = DEFAULT_QUANTILE
    max_attempts: Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)] = 1
    max_lag_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)] = 1_000_000
    priority_ageing_seconds: SecondsOrNone = 0.0
    node_lease_seconds: Annotated[float, Meta(ge=1, le=3_600)] = 10.0
    worker_lease_seconds: Annotated[float, Meta(ge=1, le=3_600)] = 30.0
    max_result_bytes: Annotated[int, Meta(ge=1, le=64 * 2**20)] = 2**20
    drain_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    retry_base_seconds: Seconds = 1.0
    retry_max_seconds: Seconds = 60.0

    @property
    def resolved_alpha(self) -> float:
        """The alpha of the load policy, whichever way it was given."""
        most = MOST_UNSAFE_ALPHA if self.allow_unsafe_alpha else MOST_ALPHA
        return resolve_alpha(alpha=self.alpha, optimize_for=self.optimize_for, most=most)

    @property
    def queue_limits(self) -> QueueLimits:
        """How many tasks may wait."""
        return QueueLimits(
            max_queue=self.max_queue_size,
            max_per_agent=self.max_per_agent,
            queue_share=self.queue_share,
            max_scheduled=self.max_scheduled,
            max_store_bytes=self.max_store_bytes,
        )

    @property
    def retention(self) -> Retention:
        """How long ended tasks are kept, how many, and how much the store may take."""
        return Retention(
            seconds=self.task_retention_seconds,
            max_tasks=self.max_ended_tasks,
            max_store_bytes=self.max_store_bytes,
        )

    @property
    def retry_policy(self) -> RetryPolicy:
        """How long tasks wait before another try."""
        base, longest = self.retry_base_seconds, self.retry_max_seconds
        return RetryPolicy(backoff=Backoff(base_seconds=base, max_seconds=longest))

    @property
    def usage_window(self) -> Window:
        """The window of shares, of `global_budget` and of each project's `budget_limit`."""
        return Window(kind=WindowKind.ROLLING, hours=self.usage_window_hours)


class RateLimitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent type, a target or a slot may use; once loaded, `kind` is always known."""

    kind: RateKind | None = None
    tokens_per_minute: Rate | None = None
    tokens_per_hour: Rate | None = None
    tokens_per_day: Rate | None = None
    requests_per_minute: Rate | None = None
    requests_per_hour: Rate | None = None
    requests_per_day: Rate | None = None


class ProjectSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share, the cap and the budget of one project."""

    name: str = ""
    credit_weight: Annotated[float, Meta(ge=0, le=MAX_WEIGHT)] = 1.0
    max_concurrent_agents: Permits | None = None
    budget_limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT_TOKENS)] | None = None
    status: ProjectStatus = ProjectStatus.ACTIVE

    def to_project(self, project_id: str) -> Project:
        """Return the project as the decision knows it; it has no cap unless one is set."""
        return Project(
            id=project_id,
            name=self.name,
            credit_weight=self.credit_weight,
            max_concurrent_agents=self.max_concurrent_agents,
            budget_limit=self.budget_limit,
            status=self.status,
        )


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The capacity of one agent, its type, and whether it takes tasks that name none."""

    capacity: Permits | None = None
    type: str = ""
    accepts_open: bool = True
    target: Text | None = None
    status: Standing = Standing.ACTIVE

    def to_agent(self, agent_id: str, scheduler: SchedulerSettings) -> Agent:
        """Return the agent as the decision knows it."""
        capacity = scheduler.max_per_agent_inflight if self.capacity is None else self.capacity
        return Agent(
            id=agent_id,
            agent_type=self.type,
            capacity=capacity,
            accepts_open=self.accepts_open and self.status is not Standing.DRAINING,
            state=AgentState.PAUSED if self.status is Standing.PAUSED else AgentState.IDLE,
        )


class BudgetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one scope, and the window that they hold for."""

    limit_usd: Dollars | None = None
    limit_tokens: Annotated[int, Meta(ge=0, le=MAX_LIMIT_TOKENS)] | None = None
    window: str = "none"


class PriceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What models of a pattern cost, in dollars for a million tokens."""

    input: Dollars
    output: Dollars
    cached_input: Dollars | None = None
    cache_write: Dollars | None = None

    def to_price(self) -> Price:
        """Return the price as the price list takes it."""
        return Price(**msgspec.structs.asdict(self))


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the API is served."""

    host: Text = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = DEFAULT_PORT
    advertise: Text | None = None


class AuthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is let in: whether this machine needs a token too, and which hosts and pages are ours."""

    required: bool = False
    allowed_hosts: tuple[Text, ...] = ()
    allowed_origins: tuple[Text, ...] = ()


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is told of tasks that ended and of budgets, and which private addresses that may be."""

    enabled: bool = True
    allow: tuple[Text, ...] = ()
    alerts_url: Text | None = None
    try_timeout_seconds: Annotated[float, Meta(ge=0.1, le=60)] = 10.0
    concurrency: Annotated[int, Meta(ge=1, le=256)] = 32


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What keeps the tasks; without a URL, an SQLite file in the data directory.

    `process` says whether a process of its own writes; None leaves it to the machine.
    """

    url: Text | None = None
    process: bool | None = None

    @property
    def writes_in_process(self) -> bool:
        """Whether a process of its own writes: unless said, where it has a core to itself."""
        if self.url is not None and self.url.startswith("memory:"):
            return False
        return cores() > 1 if self.process is None else self.process


class LedgerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What keeps the ledger; without a URL, the store does."""

    url: Text | None = None


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is logged, and in which form; `auto` is text on a terminal and JSON elsewhere."""

    level: LogLevel = "info"
    format: LogFormat = "auto"


class TelemetrySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether spans are made; where they go is said by the variables of OpenTelemetry."""

    otel: bool = False


class DashboardSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether pages for people are served, and whether anything can be changed from them."""

    mode: DashboardMode = "on"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was configured, decoded and checked."""

    scheduler: SchedulerSettings = SchedulerSettings()
    rate_limits: dict[str, RateLimitSettings] = {}
    targets: dict[str, Target] = {}
    projects: dict[str, ProjectSettings] = {}
    agents: dict[str, AgentSettings] = {}
    budgets: dict[str, BudgetSettings] = {}
    prices: dict[str, PriceSettings] = {}
    quota: QuotaSettings = QuotaSettings()
    slots: dict[str, SlotSettings] = {}
    server: ServerSettings = ServerSettings()
    auth: AuthSettings = AuthSettings()
    webhooks: WebhookSettings = WebhookSettings()
    store: StoreSettings = StoreSettings()
    ledger: LedgerSettings = LedgerSettings()
    log: LogSettings = LogSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    dashboard: DashboardSettings = DashboardSettings()

    @property
    def default_target(self) -> str | None:
        """The target of a task that names none: the one marked so, or the only one there is.

        The target that is always there counts only where no other is.
        """
        marked = [name for name, target in self.targets.items() if target.default]
        if marked:
            return marked[0]
        own = [name for name in self.targets if name != PULL_NAME] or list(self.targets)
        taking = [name for name in own if self.targets[name].status is not Standing.DRAINING]
        only = taking or own
        return only[0] if len(only) == 1 else None

    @property
    def all_targets(self) -> dict[str, Target]:
        """All targets by name, with the one that is always there."""
        return {PULL_NAME: PULL, **self.targets}

    @property
    def pull_targets(self) -> frozenset[str]:
        """The targets whose tasks only workers run."""
        targets = self.all_targets.items()
        return frozenset(name for name, target in targets if isinstance(target, PullTarget))

    @property
    def price_overrides(self) -> dict[str, Price]:
        """What models cost that the published prices do not say, or say otherwise."""
        return {pattern: price.to_price() for pattern, price in self.prices.items()}

    @property
    def agent_targets(self) -> dict[str, str]:
        """The targets of agents whose tasks go there unless they say otherwise."""
        agents = self.agents.items()
        return {name: agent.target for name, agent in agents if agent.target is not None}

    def core_projects(self) -> tuple[Project, ...]:
        """Return all projects as the decision knows them, in the order of the file."""
        return tuple(project.to_project(name) for name, project in self.projects.items())

    def core_agents(self) -> tuple[Agent, ...]:
        """Return the agents as the decision knows them: those of the file, in its order.

        Where none of them accepts open tasks, the built-in agent follows.
        """
        agents = self.agents.items()
        declared = tuple(agent.to_agent(name, self.scheduler) for name, agent in agents)
        return with_built_in_agent(declared, capacity=self.scheduler.max_inflight)


TABLES: dict[str, type[msgspec.Struct]] = {
    "scheduler": SchedulerSettings,
    "quota": QuotaSettings,
    "server": ServerSettings,
    "auth": AuthSettings,
    "webhooks": WebhookSettings,
    "store": StoreSettings,
    "ledger": LedgerSettings,
    "log": LogSettings,
    "telemetry": TelemetrySettings,
    "dashboard": DashboardSettings,
}
"""The sections that are one table each; environment variables reach these."""

NAMED_TABLES = ("rate_limits", "targets", "projects", "agents", "budgets", "prices", "slots")
"""The sections that have a table for each name; that of a slot is written inside."""


def _begins_above_zero(info: inspect.Type) -> bool:
    members = info.types if isinstance(info, inspect.UnionType) else (info,)
    return any(getattr(member, "ge", None) for member in members)


ZERO_KEEPS = frozenset(
    field.name
    for field in msgspec.structs.fields(SchedulerSettings)
    if _begins_above_zero(inspect.type_info(field.type))
)
"""The keys of `[scheduler]` whose least value is above 0.

A start refuses a 0 there. A file that is read again keeps what was by it.
"""
