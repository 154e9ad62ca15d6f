"""The settings as types: one struct for each section of the file, with its defaults and ranges.

A range stands in the type of its key, so that the check, the message and the reference page agree.
Defaults are those of a service on one machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

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
from headgate.core.task import (
    ATTEMPT_SECONDS,
    MAX_ATTEMPT_SECONDS,
    MAX_ATTEMPTS,
    UPSTREAM_PREFIX,
)
from headgate.errors import InvalidSettingError, Problems
from headgate.executors.targets import BUILT_IN_TARGETS, AnyTarget, PullTarget, Resolver, Target
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
    """What applies to all slots."""

    max_slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 4
    """How many slots the file may have."""
    max_consecutive_errors: Annotated[int, Meta(ge=1, le=RANGES["max_consecutive_errors"][1])] = 10
    """After this many failed polls in a row the slot is disabled. After this many unconfirmed wakes
    its wakes are disabled."""
    quota_poll_backoff_cap_minutes: Annotated[
        int, Meta(ge=1, le=RANGES["quota_poll_backoff_cap_minutes"][1])
    ] = 480
    """The longest wait between two polls while they fail. The wait doubles up to this."""
    wake_quota_retry_window_minutes: Minutes = 15
    """How long after a wake Headgate reads the quota every minute to see the new window. If it sees
    none, it then sends the wake once more."""
    wake_catch_up_minutes: Annotated[int, Meta(ge=0, le=MINUTES_PER_DAY)] = 15
    """How late a wake of `wake_times` may be sent after the service was down or busy."""
    adaptive_polling: bool = False
    """Poll up to four times less often while readings stay the same, and more often near a reset.
    """
    max_log_days: Annotated[int, Meta(ge=1, le=3_650)] = 7
    """After how many days Headgate deletes a log file of slots."""


class SlotSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of a provider: where its quota is read, and when its window is opened.

    Write `[[slots]]` before each. Messages name its keys by its name, such as `slots.work.zone`.
    Addresses are https; plain http works only on this machine, because a key goes along. The file
    never contains a key. A slot whose key cannot be read keeps its tasks waiting, says why, and
    tries again each minute.
    """

    name: Annotated[str, Meta(min_length=1, max_length=MAX_SLOT_NAME_LENGTH)]
    """The name that tasks, targets, rate limits and commands use. Each slot has its own."""
    provider: ProviderName
    """The provider of the key: `zai` (the GLM coding plan), `anthropic`, `openai`, or `http-json`
    for any endpoint that reports its quota as JSON."""
    enabled: bool = True
    """Whether Headgate polls and wakes the slot. Tasks of a disabled slot wait."""
    key_env: Text | None = None
    """The environment variable with the key. A slot needs this or `key_file`."""
    key_file: Text | None = None
    """The file with the key and nothing else, at most 16 KiB. Headgate reads it for each request,
    so a new key works within a minute."""
    base_url: Text | None = None
    """The beginning of both addresses; the usual paths of the provider follow. The default is the
    provider's own address. Not for `http-json`."""
    quota_url: Text | None = None
    """The whole address that reports the quota, in place of `base_url`. `http-json` needs it.
    Without it, `anthropic` and `openai` learn the quota from real traffic (see `poll`)."""
    request_url: Text | None = None
    """The whole address that receives a wake, in place of `base_url`. `http-json` needs it to be
    woken."""
    headers: dict[str, str] = {}
    """Headers of each request. `{key}` stands for the key and replaces the provider's own header;
    `{env.NAME}` is filled from the environment."""
    wake_model: Text | None = None
    """The model of a wake, and of a poll with `poll = "request"`. The default is `glm-4-flash`,
    `claude-haiku-4-5` or `gpt-4o-mini`."""
    wake_body: Text | None = None
    """The whole JSON body of a wake, in place of the usual one."""
    wake_modes: tuple[WakeMode, ...] = ()
    """When to wake the slot: any of `interval`, `times` and `after_reset`. Empty, or the word
    `none`, means never."""
    wake_on_start: bool | None = None
    """Whether a start, or `headgate slot resume`, may wake the slot if no window is open. The
    default is yes with `interval` or `after_reset`; without them it is no."""
    wake_interval_minutes: Minutes = 60
    """For `interval`: the time between two wakes."""
    wake_times: tuple[str, ...] = ()
    """For `times`: at most 5 times of day such as `09:00`. Each is used once a day, also when
    clocks change."""
    wake_after_reset_minutes: Minutes = 1
    """For `after_reset`: how long after the end of a window Headgate opens the next."""
    poll: Literal["free", "request"] = "free"
    """Whether Headgate may send requests to learn a quota that only response headers report
    (`anthropic`, `openai` without `quota_url`). With `request` each poll costs one word in and one
    token out, and opens a window. With `free` Headgate learns the quota from real traffic and sends
    nothing."""
    poll_interval_minutes: Minutes = 30
    """How often Headgate reads the quota."""
    zone: Text = "UTC"
    """The time zone of `wake_times`, such as `Europe/Berlin`."""
    limit_type: Text | None = None
    """The type of the quota row that counts. The default is the usual row of the provider."""
    limit_unit: int | str | None = None
    """The unit of the quota row that counts, if several rows have the type. Needs `limit_type`."""
    max_inflight: Permits | None = None
    """How many tasks and calls may use the slot at a time. Without this setting there is no limit.
    """
    projects: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_SLOTS)] | None = None
    """The projects whose tasks may use the slot. Without this setting all projects may use it. For
    other projects the slot does not exist."""
    percent_pointer: str | None = None
    """For `http-json`: the JSON pointer (RFC 6901) to the used percentage in the answer."""
    used_pointer: str | None = None
    """For `http-json`: the JSON pointer to the used amount, if the answer has no percentage."""
    limit_pointer: str | None = None
    """For `http-json`: the JSON pointer to the limit, together with `used_pointer`."""
    reset_pointer: str | None = None
    """For `http-json`: the JSON pointer to the time of the reset."""
    logging: bool = True
    """Whether Headgate writes the slot's requests and responses to the log files of slots. It never
    writes keys."""


def slots_by_name(written: object) -> dict[str, object]:
    """Return the tables of `[[slots]]` by name, in their order, or raise `InvalidSettingError`.

    From here on a slot goes by its name, in messages too. Only a table whose name cannot be used
    is called by its place in the file.
    """
    if not isinstance(written, list):
        problem = 'is a list of tables; begin each with [[slots]] and write its name = "…" there'
        raise InvalidSettingError(SLOTS, problem)
    named: dict[str, object] = {}
    found = Problems(InvalidSettingError)
    for place, table in enumerate(written):
        with found.collected():
            name = _name_of(table, place)
            if name in named:
                problem = f"{name!r} is the name of an earlier slot; each needs its own"
                raise InvalidSettingError(_name_key(place), problem)
            check_keyless((SLOTS, name), table, "name its variable, key_env, or a key_file")
            named[name] = _with_modes(table)
    found.check()
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
    problem = f"must be a string of 1 to {MAX_SLOT_NAME_LENGTH} characters, all of them printable"
    raise InvalidSettingError(_name_key(place), problem)


def _name_key(place: int) -> str:
    return key_path(SLOTS, f"[{place}]", "name")


def check_keyless(where: tuple[str, str], table: Mapping[str, object], advice: str) -> None:
    """Refuse a table in which somebody has written a key of a provider itself."""
    for key in sorted(_KEYS_THEMSELVES & table.keys()):
        problem = f"a key is not written into the file; {advice}"
        raise InvalidSettingError(key_path(*where, key), problem)


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
    """How tasks are admitted, chosen, run and kept.

    A number outside its range is refused. Only a reload takes a 0 where the range begins above it:
    it keeps the value that was in force, and says so.
    """

    enabled: bool = True
    """Whether the service accepts and starts tasks."""
    strategy: LanePolicy = LanePolicy.FEWEST_IN_FLIGHT
    """Which lane of a project goes first: with `fair-fifo` the lane whose agent has the fewest
    tasks in flight, with `load` the lane with the longest and oldest queue."""
    optimize_for: OptimizeFor | None = None
    """With `load`: prefer the oldest tasks (`latency`), the longest queue (`throughput`), or both
    (`balanced`)."""
    alpha: Annotated[float, Meta(ge=0, le=MOST_UNSAFE_ALPHA)] | None = None
    """The same as `optimize_for`, as a number: with 0 only the age of the oldest task counts, with
    1 only the length of the queue. Give `alpha` or `optimize_for`. The default is 0.25; a value
    above 0.5 needs `allow_unsafe_alpha`."""
    allow_unsafe_alpha: bool = False
    """Whether `alpha` may be above 0.5. With such an alpha, a lane with a short queue may wait up
    to `max_wait_ticks`. Not allowed with `auto_tune`."""
    auto_tune: bool = False
    """Whether the service adjusts `alpha` from the waits that it observes, starting at the given
    value."""
    max_wait_ticks: Annotated[int, Meta(ge=1, le=MAX_COUNT)] = 1_000
    """A lane goes first once this many tasks have ended while it waited."""
    max_queue_size: QueueLength = 1_000
    """How many tasks may wait in all. The service refuses further tasks."""
    queue_share: QueueShare = 8.0
    """How many tasks of one project may wait, as a multiple of the free capacity of the queue."""
    max_per_agent: QueueLength = 100
    """How many tasks may wait for one agent, in each project."""
    max_scheduled: QueueLength = 10_000
    """How many tasks with a `notBefore` may wait outside the queue. One project may have at most
    `queue_share` times as many as are still free."""
    max_inflight: Permits = 20
    """How many tasks may be in flight, over all agents and nodes."""
    max_per_agent_inflight: Permits = 10
    """How many tasks an agent without a `capacity` may have in flight."""
    worker_count: Workers = 20
    """How many tasks this node runs at once."""
    task_retention_seconds: Seconds = TASK_RETENTION_SECONDS
    """How long after its end Headgate deletes a task."""
    max_ended_tasks: EndedTasks = MAX_ENDED_TASKS
    """The most ended tasks stored, about 1 KiB each. Beyond that, Headgate deletes tasks of the
    project with the most ended tasks: first refused, then cancelled and successful, last failed
    tasks."""
    max_store_bytes: StoreBytes | None = None
    """The largest size of the store. Above nine tenths of this size, Headgate deletes ended tasks;
    above this size, it refuses new tasks with 507. Without this setting the disk of an SQLite file
    is the limit."""
    default_deadline_seconds: Seconds | None = None
    """The deadline of a task that names none, counted from the time at which the task may start.
    Without this setting such a task has no deadline."""
    attempt_timeout_seconds: Annotated[float, Meta(ge=0.001, le=MAX_ATTEMPT_SECONDS)] = (
        ATTEMPT_SECONDS
    )
    """How long one attempt may take, unless the task has a `timeoutSeconds`."""
    tick_seconds: Annotated[float, Meta(ge=0.01, le=3_600)] = 5.0
    """How often the dispatcher looks for work when nothing wakes it."""
    usage_window_hours: Hours = 24
    """The rolling window of shares, of `global_budget` and of each `budget_limit`."""
    global_budget: Annotated[int, Meta(ge=0, le=MAX_LIMIT_TOKENS)] = 0
    """How many tokens all projects together may use in the usage window; 0 means no limit."""
    default_tokens: Annotated[int, Meta(ge=1, le=MAX_RESERVATION_TOKENS)] = DEFAULT_TOKENS
    """How many tokens work without an estimate counts in its project's share, for each unit of
    weight. These tokens do not count in budgets and usage."""
    reserve: Reserve = Reserve.EXPECTED
    """How much to reserve for work without an estimate, once costs of its kind are known: with
    `expected` a quantile of the known costs, with `strict` the highest one."""
    share_unit: Literal["tokens", "usd"] = "tokens"
    """The unit in which the shares of projects are counted, for tasks and calls."""
    estimate_quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = DEFAULT_QUANTILE
    """The quantile that `reserve = "expected"` uses."""
    max_attempts: Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)] = 1
    """How many attempts may fail before the task fails, unless the task sets `maxAttempts`."""
    max_lag_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)] = 1_000_000
    """The most tokens that a project is owed when it comes back after a pause."""
    priority_ageing_seconds: SecondsOrNone = 0.0
    """Waiting this long is worth one step of priority. With 0 priority is strict."""
    node_lease_seconds: Annotated[float, Meta(ge=1, le=3_600)] = 10.0
    """A node that gives no sign for this long counts as lost, and its tasks start elsewhere."""
    worker_lease_seconds: Annotated[float, Meta(ge=1, le=3_600)] = 30.0
    """A worker that gives no sign for this long counts as lost, and its tasks start elsewhere."""
    max_result_bytes: Annotated[int, Meta(ge=1, le=64 * 2**20)] = 2**20
    """The largest result that Headgate stores."""
    drain_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    """How long a stop waits for running tasks before it cancels them."""
    retry_base_seconds: Seconds = 1.0
    """The wait after the first failed attempt. The wait doubles after each further failed attempt.
    """
    retry_max_seconds: Seconds = 60.0
    """The longest wait after a failed attempt."""

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
    """What an agent type, a target or a slot may use in any minute, hour or day.

    Windows slide: a limit per minute applies to any period of 60 seconds. At least one limit is
    needed. A name `upstream:NAME` limits the calls of an upstream.
    """

    kind: RateKind | None = None
    """What the name refers to: an agent type, a target or a slot. Needed only if more than one of
    them has this name. A name that none of them has refers to an agent type."""
    tokens_per_minute: Rate | None = None
    """Tokens in any minute."""
    tokens_per_hour: Rate | None = None
    """Tokens in any hour."""
    tokens_per_day: Rate | None = None
    """Tokens in any day."""
    requests_per_minute: Rate | None = None
    """Attempts in any minute."""
    requests_per_hour: Rate | None = None
    """Attempts in any hour."""
    requests_per_day: Rate | None = None
    """Attempts in any day."""


class ProjectSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share, the cap and the budget of one project.

    A name has letters, digits and `. _ @ + -`. The project `default` always exists.
    """

    name: str = ""
    """A name for people."""
    credit_weight: Annotated[float, Meta(ge=0, le=MAX_WEIGHT)] = 1.0
    """The project's share, relative to the other projects."""
    max_concurrent_agents: Permits | None = None
    """How many tasks of the project may be in flight. Without this setting there is no cap."""
    budget_limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT_TOKENS)] | None = None
    """Tokens in the usage window: the budget of the scope `project:NAME`."""
    reserve: Reserve | None = None
    """How much to reserve for the project's calls. Overrides `gateway.reserve`."""
    status: ProjectStatus = ProjectStatus.ACTIVE
    """An `active` project gets agents. A `draining` project finishes its tasks and accepts no new
    ones. The tasks of a `paused` or `archived` project wait."""

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
    """The capacity of one agent, its type, and whether it takes tasks that name no agent.

    An agent that is not declared is created by its first task and takes only its own. Where no
    declared agent accepts open tasks, the agent `built-in` runs the tasks that name none, up to
    `scheduler.max_inflight` at once. It has no workers, so an open task of a `pull` target waits
    for a declared agent.
    """

    capacity: Permits | None = None
    """How many tasks the agent may have in flight. The default is
    `scheduler.max_per_agent_inflight`."""
    type: str = ""
    """The type of the agent, which rate limits can name."""
    accepts_open: bool = True
    """Whether the agent runs tasks that name no agent."""
    target: Text | None = None
    """The target of the agent's tasks that name no target. With `pull`, the agent's workers run
    them."""
    status: Standing = Standing.ACTIVE
    """A `paused` agent starts nothing. A `draining` agent finishes its tasks and accepts no new
    ones."""

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
    """The limits of one scope, and the window that they count for.

    A scope is a path such as `session:eval-1/workflow:w1`; `root` is everything together. A scope
    has one budget: a `budget_limit` of the project `search` and `[budgets."project:search"]` are
    refused together, and so are `global_budget` and `[budgets.root]`. A budget that leaves the file
    ends with the next reload or start; one that was set with `headgate budget set` stays.
    """

    limit_usd: Dollars | None = None
    """The most dollars that may be spent, such as `"50.00"`. A budget needs this or `limit_tokens`.
    """
    limit_tokens: Annotated[int, Meta(ge=0, le=MAX_LIMIT_TOKENS)] | None = None
    """The most tokens that may be used."""
    window: str = "none"
    """The time that the limits count for: `none`, `day`, `week` or `month`, with a zone if you like
    (`week@Europe/Berlin`), or `rolling:24h`."""
    reserve: Reserve | None = None
    """How much to reserve in this budget for calls. The default is the setting of their project. If
    several budgets apply, `strict` in any of them wins."""


class PriceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What models of a pattern cost, in dollars for a million tokens, from 0 to 1,000,000.

    These prices override the published ones that come with Headgate. A pattern is the name of a
    model as it is sent to the provider, with `*`, `?` and `[abc]` as in file names. The most
    specific pattern counts: the name itself, then the longest text before the first wildcard.
    `acme/gpt-5*` is for one provider; a pattern without `/` is for every provider.
    """

    input: Dollars
    """The price of the prompt, such as `"1.25"`."""
    output: Dollars
    """The price of the answer; 0 for embeddings, whose answers cost nothing."""
    cached_input: Dollars | None = None
    """The price of the part of the prompt that is read from a cache. The default is `input`."""
    cache_write: Dollars | None = None
    """The price of the part of the prompt that is written to a cache. The default is `input`."""

    def to_price(self) -> Price:
        """Return the price as the price list takes it."""
        return Price(**msgspec.structs.asdict(self))


# The gateway: `[gateway]` for all calls, `[upstreams.NAME]` for each provider that they go to, and
# `[models.NAME]` for each name of a model that stands for others.

UPSTREAMS = "upstreams"
UpstreamKind = Literal["anthropic", "openai"]
PassthroughKeys = Literal["loopback", "always", "never"]
BASE_URLS: dict[UpstreamKind, str] = {
    "anthropic": "https://api.anthropic.com",
    "openai": "https://api.openai.com/v1",
}


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What applies to all calls of models that agents send through this service.

    A reload changes this, upstreams and models for calls that come from then on.
    """

    enabled: bool = True
    """Whether the gateway accepts calls."""
    reserve: Reserve = Reserve.EXPECTED
    """How much to reserve for the output of a call: with `expected` what such calls usually need,
    with `strict` the `max_tokens` of the call. A project, a budget or a header may override this.
    """
    clamp: bool = False
    """Whether Headgate may lower the `max_tokens` of a `strict` call if the budget has no room for
    all of them."""
    max_wait_seconds: Seconds = 21_600.0
    """How long a call may wait. After that, Headgate refuses the call and names the reason."""
    hold_seconds: Seconds = 240.0
    """How long the connection of a waiting call without streaming stays open. After that, the call
    gets a 429, and Headgate keeps its position in the queue for a while."""
    escrow: bool = True
    """Whether Headgate reserves slices of a budget for many calls at once. With `false` each call
    has its own reservation."""
    passthrough_keys: PassthroughKeys = "loopback"
    """Whether Headgate forwards a client's own key to an upstream without a configured key: for
    clients on this machine (`loopback`), for all clients (`always`), or `never`."""


class UpstreamSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A provider that calls go to: its protocol, address, keys and models.

    The upstreams `anthropic` and `openai` always exist, with the keys in `ANTHROPIC_API_KEY` and
    `OPENAI_API_KEY`; a table of that name replaces the built-in one. The file never contains a key.
    An upstream that leaves the file takes no new calls.
    """

    kind: UpstreamKind
    """The protocol of the upstream."""
    base_url: Text | None = None
    """The upstream's address, as clients of its protocol write it. The default is
    `https://api.anthropic.com` or `https://api.openai.com/v1`. With a configured key the address
    must be https, except on this machine."""
    key_env: Text | None = None
    """The environment variable with the upstream's key. Not allowed together with `slots`."""
    slots: tuple[Text, ...] = ()
    """The slots whose keys the upstream uses, with their quota windows. Headgate chooses one slot
    for each call. Calls go to `base_url`; the addresses of the slots are for quotas and wakes."""
    models: tuple[Text, ...] = ()
    """The names of the models whose calls go to this upstream, with `*`, `?` and `[abc]` as in file
    names. The default is the usual model names of its kind."""
    max_inflight: Permits = 50
    """How many calls may be in flight at the upstream, over all keys."""
    headers: dict[str, str] = {}
    """Headers of each call; `{env.NAME}` is filled from the environment. Headgate adds the header
    of the key itself."""

    @property
    def has_key(self) -> bool:
        """Whether it has a key of its own, so that those of clients do not go there."""
        return self.key_env is not None or bool(self.slots)

    @property
    def url(self) -> str:
        """Where it is, without a slash at the end."""
        return (self.base_url or BASE_URLS[self.kind]).rstrip("/")

    @property
    def api_url(self) -> str:
        """What stands before `/models`, `/messages` and `/chat/completions`.

        A base URL of OpenAI's protocol has its version in it, one of Anthropic's usually has not.
        """
        if self.kind == "openai":
            return self.url
        return f"{self.url.removesuffix('/v1')}/v1"


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name that clients may ask for, and what it stands for.

    It overrides the `models` of upstreams.
    """

    route: Annotated[tuple[Text, ...], Meta(min_length=1)]
    """The members of the route in order, each `upstream/model` such as
    `anthropic/claude-haiku-4-5`. If a member is closed, exhausted or failing, Headgate uses the
    next one."""

    @property
    def members(self) -> tuple[tuple[str, str], ...]:
        """The upstream and the model of each member; checked settings have both."""
        parts = (member.partition("/") for member in self.route)
        return tuple((upstream, model) for upstream, _, model in parts)


def upstream_target(name: str) -> str:
    """Return what calls to an upstream have for a target, in rate limits and reasons."""
    return f"{UPSTREAM_PREFIX}{name}"


BUILT_IN_UPSTREAMS: dict[str, UpstreamSettings] = {
    "anthropic": UpstreamSettings(kind="anthropic", key_env="ANTHROPIC_API_KEY"),
    "openai": UpstreamSettings(kind="openai", key_env="OPENAI_API_KEY"),
}
"""The upstreams that are there unless the file has others of these names.

The variable of their key may be unset; a call then needs a key that its client brings along.
"""

OPTIONAL_KEYS = frozenset(upstream.key_env for upstream in BUILT_IN_UPSTREAMS.values())
"""The variables of keys that nobody has to set, whether they are written into the file or not."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the API is served."""

    host: Text = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = DEFAULT_PORT
    """The port to listen on; 0 picks a free one."""
    advertise: Text | None = None
    """The address at which other nodes reach this node, such as `http://10.0.0.5:7420`. The default
    is the address on which the node listens."""


class AuthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether this machine needs a token too, and which hosts and pages may send requests."""

    required: bool = False
    """Whether requests need a token on a loopback address too. On any other address they always
    need one."""
    allowed_hosts: tuple[Text, ...] = ()
    """Hosts that the `Host` header may name, in addition to this machine. On an address that is not
    loopback, an empty list allows every host."""
    allowed_origins: tuple[Text, ...] = ()
    """Pages of other sites that may send requests, such as `https://headgate.example`."""


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where webhooks may go, and how they are sent."""

    enabled: bool = True
    """Whether webhooks are sent. If not, a task with a `callbackUrl` is refused."""
    allow: tuple[Text, ...] = ()
    """Private networks (`10.0.0.0/8`) and host names to which webhooks may be sent."""
    alerts_url: Text | None = None
    """The address that gets a message when a budget has used 50, 80 or 100 percent of its limit."""
    try_timeout_seconds: Annotated[float, Meta(ge=0.1, le=60)] = 10.0
    """How long one try to deliver a webhook may take in all."""
    concurrency: Annotated[int, Meta(ge=1, le=256)] = 32
    """How many webhooks a node sends at a time, at most a quarter of them to one host."""


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store of the tasks."""

    url: Text | None = None
    """Where tasks are stored: `sqlite:///path`, `postgresql://host/database`, or `memory:`, which
    loses them when the service stops. The default is an SQLite file in the data directory."""
    domain: str = ""
    """The name of this system, such as `evals`, if several separate systems share one PostgreSQL
    database. Each has its own dispatcher, projects, budgets and tokens. The default is a single
    system."""
    process: bool | None = None
    """Whether a separate process writes to the store. The default is yes with more than one core.
    Set `false` if other programs use all cores."""

    @property
    def writes_in_process(self) -> bool:
        """Whether a process of its own writes: unless said, where it has a core to itself."""
        if self.url is not None and self.url.startswith("memory:"):
            return False
        return cores() > 1 if self.process is None else self.process


class LedgerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ledger of the budgets."""

    url: Text | None = None
    """Where budgets are stored: a URL as for the store, `redis://host:6379/0`,
    `redis+sentinel://host:26379,host2:26379/service/0` or `redis+cluster://host:6379`. By default
    the store has the budgets, and writes a task and its money in one transaction."""


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is logged to standard error, and in which form."""

    level: LogLevel = "info"
    """The lowest level that is logged. `HEADGATE_LOG_LEVEL` overrides it. With `warning` the log
    has no lines about tasks."""
    format: LogFormat = "auto"
    """Lines for people (`text`) or JSON. `auto` is text on a terminal and JSON elsewhere."""


class TelemetrySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether spans are made. The variables of OpenTelemetry say where they go."""

    otel: bool = False
    """Whether Headgate makes OpenTelemetry spans of tasks and calls. Needs `pip install
    'headgate[otel]'`."""


class DashboardSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether pages for people are served, and whether they can change anything."""

    mode: DashboardMode = "on"
    """Whether Headgate serves the dashboard at `/`. With `read-only` nobody can change anything
    from its pages."""


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
    gateway: GatewaySettings = GatewaySettings()
    upstreams: dict[str, UpstreamSettings] = {}
    models: dict[str, ModelSettings] = {}
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

        The targets that are always there count only where no other is.
        """
        marked = [name for name, target in self.targets.items() if target.default]
        if marked:
            return marked[0]
        own = [name for name in self.targets if name not in BUILT_IN_TARGETS] or list(self.targets)
        taking = [name for name in own if self.targets[name].status is not Standing.DRAINING]
        only = taking or own
        return only[0] if len(only) == 1 else None

    @property
    def all_targets(self) -> dict[str, Target]:
        """All targets by name, with those that are always there."""
        return {**BUILT_IN_TARGETS, **self.targets}

    @property
    def all_upstreams(self) -> dict[str, UpstreamSettings]:
        """All upstreams by name: those of the file in its order, then the built-in ones."""
        return self.upstreams | {
            name: upstream
            for name, upstream in BUILT_IN_UPSTREAMS.items()
            if name not in self.upstreams
        }

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
    "gateway": GatewaySettings,
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

NAMED_TABLES = (
    "rate_limits",
    "targets",
    "projects",
    "agents",
    "budgets",
    "prices",
    SLOTS,
    UPSTREAMS,
    "models",
)
"""The sections that have a table for each name; that of a slot is written inside."""

SECTIONS: dict[str, type[msgspec.Struct]] = {
    **{f"[{name}]": kind for name, kind in TABLES.items()},
    "[projects.NAME]": ProjectSettings,
    "[agents.NAME]": AgentSettings,
    "[rate_limits.NAME]": RateLimitSettings,
    '[budgets."SCOPE"]': BudgetSettings,
    '[prices."PATTERN"]': PriceSettings,
    "[[slots]]": SlotSettings,
    "[upstreams.NAME]": UpstreamSettings,
    "[models.NAME]": ModelSettings,
    "[targets.NAME]": AnyTarget,
    **{f'kind = "{kind.__struct_config__.tag}"': kind for kind in get_args(Target)},
    "resolver": Resolver,
}
"""Every table of the file, as it is written; `headgate config explain` goes by it."""


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
