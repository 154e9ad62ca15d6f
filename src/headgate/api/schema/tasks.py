"""The JSON that a service and its clients exchange, as one struct for each body.

Both sides import them, so they cannot drift apart. Rule: plain data only; what a body means is
decided above, and what a client does not know of a newer service it passes over.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

from headgate.core.retention import MAX_ENDED_TASKS, TASK_RETENTION_SECONDS
from headgate.core.task import TaskStatus
from headgate.core.task_view import ClosureBody, HeldBody, ProgressBody, TaskSnapshot
from headgate.storage.tokens import Permission

Details = dict[str, str | int | float | bool | None]


class SubmittedBody(msgspec.Struct, omit_defaults=True, rename="camel"):
    """The answer to a task that was taken."""

    task_id: str
    state: TaskStatus
    position: int
    """How many tasks wait, this one included."""
    created_at: datetime
    warning: str = ""
    """What will go wrong: the task expires before what it waits for, or a budget is not defined."""


class BatchEntryBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What became of one task of a batch; without `task_id` nothing was stored."""

    task_id: str | None = None
    """The id of the task. Left out if nothing was stored."""
    state: TaskStatus | None = None
    position: int | None = None
    warning: str | None = None
    """What will go wrong with the task."""
    code: str | None = None
    """The code of the refusal."""
    error: str | None = None
    """Why it was refused."""
    retryable: bool | None = None
    """Whether it may be taken later."""


class SubmittedBatchBody(msgspec.Struct):
    """The answer to a batch; `submitted` counts the tasks that were taken."""

    tasks: list[BatchEntryBody]
    """An entry for each task, in their order."""
    submitted: int
    """How many were taken."""


class TaskListBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One page of tasks; `next_cursor` is there if there is a further page."""

    tasks: list[TaskSnapshot]
    """The tasks, in the order asked for."""
    count: int
    next_cursor: str | None = None


class CancelledBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The answer to a cancel: `cancelled`, or `cancelling` while the executor still stops."""

    status: str
    """`cancelled`, or `cancelling` while the executor still stops."""
    task_id: str


class ReasonBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One reason why a task waits."""

    detail: dict[str, Any]
    """The fields of the rule, with its name as `reason`."""
    message: str
    """The reason in a sentence."""
    until: datetime | None = None
    """When the reason ends, if that is known."""
    held_by: tuple[str, ...] = ()
    """Tasks and calls that occupy what this one waits for."""
    held_by_others: int = 0
    """How many more tasks and calls occupy what this one waits for."""
    warning: str = ""
    """A warning if the deadline of the task is before the end of this reason."""


class SlotRoomBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """How much of the quota of a slot is used, and when it resets, as far as that is known."""

    name: str
    provider: str | None = None
    percent_used: float | None = None
    """How much of the quota is used."""
    resets_at: datetime | None = None
    """When the window resets."""


class WhyBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """Every reason why a task waits; a task that does not wait has none."""

    task_id: str
    state: TaskStatus
    reasons: tuple[ReasonBody, ...]
    """Every reason why the task waits, the longest wait first."""
    would_hold: tuple[HeldBody, ...] = ()
    """What its next attempt reserves."""
    slot: SlotRoomBody | None = None
    """The slot that it names or got."""
    slots: tuple[SlotRoomBody, ...] = ()
    """The slots that it may get."""
    progress: ProgressBody | None = None
    """How far a task that runs says that it is."""


class LimitsBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The limits in force, as `/scheduler/stats` shows them; a limit of None is none."""

    strategy: str = "fair-fifo"
    max_queue_size: int | None = 1000
    queue_share: float = 8
    max_per_agent: int | None = 100
    max_scheduled: int | None = 10_000
    max_inflight: int | None = 20
    max_per_agent_inflight: int | None = 10
    task_retention_seconds: float = TASK_RETENTION_SECONDS
    max_ended_tasks: int = MAX_ENDED_TASKS
    max_store_bytes: int | None = None
    worker_count: int = 20

    def __post_init__(self) -> None:
        # Clients that count seconds in whole numbers cannot read 604800.0.
        seconds = self.task_retention_seconds
        if seconds == int(seconds):
            msgspec.structs.force_setattr(self, "task_retention_seconds", int(seconds))


class AgentCountBody(msgspec.Struct):
    """What one agent has waiting and in flight, over all projects."""

    queued: int = 0
    inflight: int = 0


class QueueBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What waits and runs now; the agent "" has the tasks that any agent may take."""

    total_queued: int
    """Tasks that wait."""
    total_inflight: int
    """Tasks that are assigned or run."""
    agents: dict[str, AgentCountBody]
    """Both counts for each agent that has any. The agent `""` has open tasks."""


class AgentMetricsBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What has happened to tasks, in all or of one agent."""

    tasks_submitted: int
    """Tasks that were taken."""
    tasks_completed: int
    """Tasks that succeeded."""
    tasks_failed: int
    """Tasks that failed, expired ones included."""
    tasks_cancelled: int
    """Tasks that were cancelled."""
    tasks_rejected: int
    """Tasks that were refused."""
    tasks_expired: int
    """Tasks whose deadline passed while they waited."""
    dispatch_count: int
    """Attempts that were started."""
    avg_dispatch_latency_ms: float
    """The mean time from submit to start, in milliseconds."""


class MetricsBody(AgentMetricsBody, kw_only=True, rename="camel"):
    """What has happened since the store was created, with the agents that had work recently."""

    agents: dict[str, AgentMetricsBody]
    """The same for each of the 200 busiest agents with recent work, and `other` for the rest."""


class RecentBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The starts of the last minutes, and how long they had waited since they could have come."""

    seconds: float
    """The time that this counts, at most five minutes."""
    dispatch_count: int
    """Attempts that were started in it."""
    average_wait_seconds: float | None = None
    """How long they had waited on average since they could have started."""


class StoreBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """The bytes that the store uses, and the bytes that are free, if they are known."""

    used_bytes: int
    """The bytes that the store uses."""
    free_bytes: int | None = None
    """The bytes that are free for the store."""
    room_bytes: int | None = None
    """The free bytes that new tasks may use."""
    max_bytes: int | None = None
    """The limit of the store, `max_store_bytes`."""
    problem: str | None = None
    """Why the store has no room."""


class CallCountsBody(msgspec.Struct, frozen=True, kw_only=True):
    """How many calls wait and run now."""

    waiting: int
    """Calls that wait for their turn, a key or money."""
    running: int
    """Calls that are at an upstream."""


class StoppedBody(msgspec.Struct, frozen=True, kw_only=True):
    """A project, agent or target that starts nothing, or takes nothing new."""

    kind: Literal["project", "agent", "target"]
    """What it is."""
    name: str
    """Its name."""
    status: Literal["paused", "draining"]
    """`paused` if it starts nothing, `draining` if it accepts no new tasks."""


class StatsBody(msgspec.Struct, kw_only=True):
    """The answer of `/scheduler/stats`."""

    queue: QueueBody
    """What waits and runs now."""
    metrics: MetricsBody
    """What has happened since the store was created."""
    config: LimitsBody
    """The limits in force; the names are those of the settings."""
    paused: bool = False
    """Whether everything is paused."""
    stopped: list[StoppedBody] = []
    """The projects, agents and targets that are paused or drain, at most 100. A bound token sees
    its own project and agent."""
    closures: int | None = None
    """How many closures stop tasks from starting. Answers to bound tokens leave it out."""
    recent: RecentBody | None = None
    """The last five minutes. Only the node that dispatches knows them."""
    store: StoreBody | None = None
    """How large the store is. Only tokens that are bound to nothing see it."""
    calls: CallCountsBody | None = None
    """The calls that wait and run at the gateway. Only the node that dispatches knows them."""


class ReadyBody(msgspec.Struct, kw_only=True):
    """The answer of a node that is well: its parts are `ok`, each by itself."""

    status: str
    """`ready`, or `degraded` if the node works but accepts no new tasks."""
    role: str | msgspec.UnsetType = msgspec.UNSET
    """`dispatcher` or `follower`."""
    paused: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether everything is paused."""
    store: str | msgspec.UnsetType = msgspec.UNSET
    """`ok`, or what is wrong."""
    ledger: str | msgspec.UnsetType = msgspec.UNSET
    """`ok`, or what is wrong."""
    dispatcher: str | msgspec.UnsetType = msgspec.UNSET
    """`ok`, or what is wrong: it still reads the tasks, it fails, or no node dispatches."""
    descriptors: str | msgspec.UnsetType = msgspec.UNSET
    """`ok`, or that no more files can be opened."""


class ErrorBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The JSON of a refusal: what Headgate says of it, and the same as problem details (RFC 9457).

    Programs go by `code`, whose meaning `type` and `title` name. `detail` is the text of `error`,
    and after it what to do, where something can be done.
    """

    code: str
    """For programs: one of the error codes."""
    error: str
    """For people: what is wrong, in one line."""
    retryable: bool
    """Whether the same request may be taken later."""
    details: Details = {}
    """Facts about this case, such as the name of a `field`."""
    request_id: str = ""
    """The `X-Request-Id` of the answer, which the log of the service has too."""
    task_id: str | msgspec.UnsetType = msgspec.UNSET
    """The task that was refused and stored as rejected."""
    type: str = ""
    """`urn:headgate:error:` and the code."""
    title: str = ""
    """The meaning of the code."""
    status: int = 0
    """The HTTP status."""
    detail: str = ""
    """The text of `error`, and what to do."""
    instance: str = ""
    """`urn:headgate:request:` and the request id."""


class NewTokenBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A token to create; without a time it does not expire."""

    name: str
    """A name for people, 1 to 64 printable characters."""
    permissions: list[Permission]
    """One or more of `submit`, `read`, `cancel` and `admin`."""
    expires_at: datetime | None = None
    """When it ends. Without it the token does not expire."""
    agent_id: str | None = None
    """The one agent that it is for."""
    project_id: str | None = None
    """The one project that it is for."""
    least_priority: int | None = None
    """The most urgent priority of its tasks. Lower goes first."""


class TokenBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A token as everybody may see it who administers tokens."""

    id: str
    name: str
    """A name for people."""
    permissions: tuple[Permission, ...]
    """What it allows."""
    state: Literal["good", "expired", "revoked"]
    """`good`, `expired` or `revoked`."""
    created_at: datetime
    expires_at: datetime | None = None
    """When it ends."""
    revoked_at: datetime | None = None
    """When it was revoked."""
    agent_id: str | None = None
    """The one agent that it is for."""
    project_id: str | None = None
    """The one project that it is for."""
    least_priority: int | None = None
    """The most urgent priority of its tasks."""


class CreatedTokenBody(TokenBody, kw_only=True, omit_defaults=True, rename="camel"):
    """A token that was made; its text is shown this once."""

    token: str
    """Its text, shown this once."""
    note: str = ""
    """What its owner may not expect."""


class TokenListBody(msgspec.Struct, kw_only=True):
    """All tokens that are remembered, the newest first."""

    tokens: list[TokenBody]


class CreateBudgetBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """The limits of a scope that is to have some and has none yet."""

    scope: str
    limit_usd: str | int | float | None = None
    limit_tokens: int | None = None
    window: str = "none"


class BudgetLimitBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """The limits of a scope that are in force."""

    scope: str
    limit_usd: str | None = None
    limit_tokens: int | None = None
    window: str


class ReserveBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """An amount to reserve in a scope, in its ancestors, and in the scopes that `also` names."""

    id: str
    """A name of your own, 1 to 128 printable characters, unique within the scope."""
    scope: str
    """Where the amount is reserved, with all ancestors. Empty is the root."""
    usd: str | int | float = 0
    """Dollars, as a string or a number. Exact to the micro-dollar; a smaller rest is rounded up."""
    tokens: int = 0
    """A whole number of tokens."""
    also: list[str] = []
    """Further scopes, with all their ancestors. Without `admin` at most 16."""
    lease_seconds: float = 60.0
    """How long the reservation lasts from now on, up to 7 days."""
    dispatched: bool = False
    """Whether the provider is called at once."""


class ReservationNameBody(msgspec.Struct, kw_only=True, rename="camel"):
    """A reservation that is to be dispatched or released."""

    id: str
    scope: str


class ExtendBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A reservation whose lease is to last so much longer from now on."""

    id: str
    scope: str
    lease_seconds: float = 60.0
    """How long it lasts from now on, up to 7 days."""


class CommitBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What the work of a reservation has cost."""

    id: str
    scope: str
    usd: str | int | float = 0
    """Dollars that the work has cost."""
    tokens: int = 0
    """Tokens that the work has used."""


class AdjustBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What an operator does to one scope, and to no other, and why."""

    id: str
    """A name of your own. The same request again changes nothing more."""
    scope: str
    action: Literal["adjust", "accept", "reject"] = "adjust"
    """`adjust` (the default), `accept` or `reject`."""
    usd: str | int | float | None = None
    """For `adjust`: dollars to add, or to take away if negative. Otherwise how much of the claim,
    and all of it without `usd` and `tokens`."""
    tokens: int | None = None
    """The same in tokens."""
    reason: str
    """Why, in 1 to 500 characters. The audit log records it."""


class ReservationBody(msgspec.Struct, kw_only=True, rename="camel"):
    """A reservation as it stands; while it is live, the provider may be called on it."""

    id: str
    scope: str
    state: str
    is_live: bool
    """Whether you may call the provider on it."""
    usd: str
    tokens: int
    lease_until: datetime
    """When its lease ends."""


class ReleaseBody(msgspec.Struct, kw_only=True):
    """Why an operator gives the money of a reservation back."""

    reason: str = ""
    """Why; the audit log records it."""


class LeaseBody(msgspec.Struct, kw_only=True, rename="camel"):
    """For how long from now on an operator keeps a reservation."""

    lease_seconds: float
    reason: str = ""
    """Why; the audit log records it."""


class ReleasedBody(msgspec.Struct, kw_only=True):
    """A reservation that an operator has released; `id` is the one that the journal shows."""

    id: str
    state: Literal["released"] = "released"


class SettledBody(msgspec.Struct, kw_only=True, rename="camel"):
    """A reservation that is over."""

    id: str
    scope: str
    state: Literal["committed", "released"]


class BudgetStatusBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A scope with its limits and balances; a scope without a limit has no limit field."""

    scope: str
    """The path of the scope; `""` is `root`."""
    window: str
    spent_usd: str
    """Dollars spent within what was reserved."""
    reserved_usd: str
    """Dollars reserved now."""
    overrun_usd: str
    """Dollars spent beyond what was reserved."""
    limit_usd: str | None = None
    remaining_usd: str | None = None
    """The limit less all three."""
    spent_tokens: int
    """Tokens spent within what was reserved."""
    reserved_tokens: int
    """Tokens reserved now."""
    overrun_tokens: int
    """Tokens spent beyond what was reserved."""
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    """The limit less all three."""
    unaccepted_usd: str | None = None
    """Dollars that tenants claim beyond their own limits. They do not count until an operator
    accepts them."""
    unaccepted_tokens: int = 0
    """The same in tokens."""
    resets_at: datetime | None = None
    """When the window next frees room."""
    counted_since: datetime | None = None
    """What was spent before does not count, though it may lie in the window: the window was changed
    when the journal no longer had its time."""
    burn_usd_per_hour: str | None = None
    """Dollars spent lately, scaled to an hour."""
    burn_tokens_per_hour: int | None = None
    """Tokens spent lately, scaled to an hour."""
    burn_measured_seconds: int | None = None
    """The time that the rate was measured over: ten minutes of steady spending, or an hour."""
    burn_is_steady: bool = False
    """Whether spending goes on, which `exhaustedAt` needs."""
    exhausted_at: datetime | None = None
    """When the first of its limits is reached at that rate. Left out if its window frees room
    before, or spending is not steady."""
    waiting: int = 0
    """How many tasks and calls wait for it."""
    closures: list[ClosureBody] = []
    """Why they wait, and since when."""
    is_truncated: bool = False
    """Whether there are more than the 10,000 scopes that one answer has."""
    children: list[BudgetStatusBody] = []
    """The same for each scope within it."""


class UsageRowBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What one project, agent, model, slot or day has used."""

    key: str
    """The name of the project, agent, model or slot, or the day."""
    tasks: int
    """Tasks that ended."""
    attempts: int
    """Attempts that ended."""
    calls: int = 0
    """Calls through the gateway that no task made."""
    tokens: int
    usd: str
    assumed_tokens: int
    """The part of the tokens that nobody reported."""
    assumed_usd: str
    """The part of the dollars that nobody reported."""


class UsageBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What was used in a time, by project, agent, model, slot or day, and in all."""

    by: str
    """What the rows are: `project`, `agent`, `model`, `slot` or `day`."""
    since: datetime
    """From when."""
    until: datetime
    """Until when."""
    rows: list[UsageRowBody]
    """The rows: days in order, everything else by cost."""
    total: UsageRowBody
    """All rows together."""


class LearnedBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What is known of the cost of a kind of work in one unit."""

    samples: int
    """How many costs are known."""
    usual: float | None = None
    """What the share `quantile` of them does not exceed."""
    largest: float | None = None
    """The largest of them."""
    holds: float | None = None
    """What the next task without an estimate reserves, where its budgets have room."""
    silent: bool = False
    """True for work that succeeds and never reports this unit."""


class KindBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A kind of work: a project, a target or model, and an action.

    Without an action it is all work of the target, without a project that of all projects as far as
    it was priced.
    """

    project_id: str = ""
    target: str
    """The target or model."""
    action: str = ""
    """The action. Without one, all work of the target."""
    last_fed: datetime
    """When the latest cost came."""
    usd: LearnedBody
    """What is known of its dollars."""
    tokens: LearnedBody
    """What is known of its tokens."""


class EstimatesBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What is known of the cost of work, the kinds that were fed last first."""

    quantile: float
    """The quantile of the settings."""
    reserve: str
    """`expected` or `strict`, as the settings say."""
    kinds: list[KindBody]
    """What is known, the latest first."""
    is_truncated: bool = False
    """Whether there are more than 500 kinds."""
