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
from headgate.core.task_view import ClosureBody, HeldBody, TaskSnapshot
from headgate.storage.tokens import Permission

Details = dict[str, str | int | float | bool | None]


class SubmittedBody(msgspec.Struct, omit_defaults=True, rename="camel"):
    """The answer to a task that was taken; `warning` if it expires before what it waits for."""

    task_id: str
    state: TaskStatus
    position: int
    created_at: datetime
    warning: str = ""


class BatchEntryBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What became of one task of a batch; without `task_id` nothing was stored."""

    task_id: str | None = None
    state: TaskStatus | None = None
    position: int | None = None
    warning: str | None = None
    code: str | None = None
    error: str | None = None
    retryable: bool | None = None


class SubmittedBatchBody(msgspec.Struct):
    """The answer to a batch; `submitted` counts the tasks that were taken."""

    tasks: list[BatchEntryBody]
    submitted: int


class TaskListBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One page of tasks; `next_cursor` is there if there is a further page."""

    tasks: list[TaskSnapshot]
    count: int
    next_cursor: str | None = None


class CancelledBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The answer to a cancel: `cancelled`, or `cancelling` while the executor still stops."""

    status: str
    task_id: str


class ReasonBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One rule that keeps a task waiting; `detail` has its fields, with its name as `reason`.

    `warning` is there if the task expires before the rule lets it go.
    """

    detail: dict[str, Any]
    message: str
    until: float | None = None
    held_by: tuple[str, ...] = ()
    held_by_others: int = 0
    warning: str = ""


class SlotRoomBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """How much of the quota of a slot is used, and when it resets, as far as that is known."""

    name: str
    provider: str | None = None
    percent_used: float | None = None
    resets_at: datetime | None = None


class WhyBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """Every rule that keeps a task waiting; a task that does not wait has none.

    `slot` is the one that the task names or was given, `slots` those that it may be given.
    `would_hold` is what its next attempt reserves.
    """

    task_id: str
    state: TaskStatus
    reasons: tuple[ReasonBody, ...]
    would_hold: tuple[HeldBody, ...] = ()
    slot: SlotRoomBody | None = None
    slots: tuple[SlotRoomBody, ...] = ()


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
    total_inflight: int
    agents: dict[str, AgentCountBody]


class AgentMetricsBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What has happened to tasks, in all or of one agent."""

    tasks_submitted: int
    tasks_completed: int
    tasks_failed: int
    tasks_cancelled: int
    tasks_rejected: int
    tasks_expired: int
    dispatch_count: int
    avg_dispatch_latency_ms: float


class MetricsBody(AgentMetricsBody, kw_only=True, rename="camel"):
    """What has happened since the store was created, with the agents that had work recently."""

    agents: dict[str, AgentMetricsBody]


class RecentBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The starts of the last minutes, and how long they had waited since they could have come."""

    seconds: float
    dispatch_count: int
    average_wait_seconds: float | None = None


class StoreBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What the store takes, and what is free for it, as far as that is known or bounded.

    New work may take `room_bytes`; the rest of what is free is for ending and deleting tasks.
    `problem` says why there is no room.
    """

    used_bytes: int
    free_bytes: int | None = None
    room_bytes: int | None = None
    max_bytes: int | None = None
    problem: str | None = None


class StatsBody(msgspec.Struct, kw_only=True):
    """The answer of `/scheduler/stats`; only the node that dispatches knows `recent`.

    How large the `store` is, is shown to tokens that are bound to nothing.
    """

    queue: QueueBody
    metrics: MetricsBody
    config: LimitsBody
    paused: bool = False
    recent: RecentBody | None = None
    store: StoreBody | None = None


class ReadyBody(msgspec.Struct, kw_only=True):
    """The answer of a node that is well: its parts are `ok`, each by itself.

    One whose `status` is `degraded` works, but takes no new tasks; `store` says why.
    """

    status: str
    role: str | msgspec.UnsetType = msgspec.UNSET
    paused: bool | msgspec.UnsetType = msgspec.UNSET
    store: str | msgspec.UnsetType = msgspec.UNSET
    ledger: str | msgspec.UnsetType = msgspec.UNSET
    dispatcher: str | msgspec.UnsetType = msgspec.UNSET
    descriptors: str | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The JSON of a refusal: what Headgate says of it, and the same as problem details (RFC 9457).

    Programs go by `code`, whose meaning `type` and `title` name. `detail` is the text of `error`,
    and after it what to do, where something can be done.
    """

    code: str
    error: str
    retryable: bool
    details: Details = {}
    request_id: str = ""
    task_id: str | msgspec.UnsetType = msgspec.UNSET
    type: str = ""
    title: str = ""
    status: int = 0
    detail: str = ""
    instance: str = ""


class NewTokenBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A token to create; without a time it does not expire."""

    name: str
    permissions: list[Permission]
    expires_at: datetime | None = None
    agent_id: str | None = None
    project_id: str | None = None
    least_priority: int | None = None


class TokenBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A token as everybody may see it who administers tokens."""

    id: str
    name: str
    permissions: tuple[Permission, ...]
    state: Literal["good", "expired", "revoked"]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    agent_id: str | None = None
    project_id: str | None = None
    least_priority: int | None = None


class CreatedTokenBody(TokenBody, kw_only=True, omit_defaults=True, rename="camel"):
    """A token that was made; its text is shown this once.

    `note` says what its owner may not expect; most tokens have none.
    """

    token: str
    note: str = ""


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
    """An amount to hold in a scope, in its ancestors, and in the scopes `also` named."""

    id: str
    scope: str
    usd: str | int | float = 0
    tokens: int = 0
    also: list[str] = []
    lease_seconds: float = 60.0
    dispatched: bool = False


class ReservationNameBody(msgspec.Struct, kw_only=True, rename="camel"):
    """A reservation that is to be dispatched or released."""

    id: str
    scope: str


class ExtendBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A reservation whose lease is to last so much longer from now on."""

    id: str
    scope: str
    lease_seconds: float = 60.0


class CommitBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What the work of a reservation has cost."""

    id: str
    scope: str
    usd: str | int | float = 0
    tokens: int = 0


class AdjustBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What an operator does to one scope, and to no other, and why.

    `adjust` adds to what is booked, or takes away what is negative. `accept` and `reject` decide
    about what tenants claim; without amounts, about all of it.
    """

    id: str
    scope: str
    action: Literal["adjust", "accept", "reject"] = "adjust"
    usd: str | int | float | None = None
    tokens: int | None = None
    reason: str


class ReservationBody(msgspec.Struct, kw_only=True, rename="camel"):
    """A reservation as it stands; while it is live, the provider may be called on it."""

    id: str
    scope: str
    state: str
    is_live: bool
    usd: str
    tokens: int
    lease_until: datetime


class SettledBody(msgspec.Struct, kw_only=True, rename="camel"):
    """A reservation that is over."""

    id: str
    scope: str
    state: Literal["committed", "released"]


class BudgetStatusBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A scope with what it may use, and everything within it; what has no limit names none.

    The burn rate is what it spent lately, scaled to an hour; `exhausted_at` is when the first of
    its own limits is reached at that rate, if it is one to go by. `waiting` counts the tasks that
    it has no room for. `unaccepted` is what tenants claim beyond their own limits; it does not
    count until an operator accepts it.
    """

    scope: str
    window: str
    spent_usd: str
    reserved_usd: str
    overrun_usd: str
    limit_usd: str | None = None
    remaining_usd: str | None = None
    spent_tokens: int
    reserved_tokens: int
    overrun_tokens: int
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    unaccepted_usd: str | None = None
    unaccepted_tokens: int = 0
    resets_at: datetime | None = None
    burn_usd_per_hour: str | None = None
    burn_tokens_per_hour: int | None = None
    burn_measured_seconds: int | None = None
    exhausted_at: datetime | None = None
    waiting: int = 0
    closures: list[ClosureBody] = []
    is_truncated: bool = False
    children: list[BudgetStatusBody] = []


class UsageRowBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What the tasks of one project, agent, model or day have used, as `key` says.

    The assumed amounts are the part of the others that nobody reported.
    """

    key: str
    tasks: int
    attempts: int
    tokens: int
    usd: str
    assumed_tokens: int
    assumed_usd: str


class UsageBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What was used in a time, by project, agent, model or day, and in all."""

    by: str
    since: datetime
    until: datetime
    rows: list[UsageRowBody]
    total: UsageRowBody


class LearnedBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What is known of the cost of a kind of work in one unit.

    `usual` is what the share `quantile` of the answer does not exceed, `holds` what the next task
    without an estimate reserves; neither is there before the first sample. `silent` is work that
    succeeds and never reports this unit.
    """

    samples: int
    usual: float | None = None
    largest: float | None = None
    holds: float | None = None
    silent: bool = False


class KindBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A kind of work: a project, a target or model, and an action.

    Without an action it is all work of the target, without a project that of all projects as far as
    it was priced.
    """

    project_id: str = ""
    target: str
    action: str = ""
    last_fed: datetime
    usd: LearnedBody
    tokens: LearnedBody


class EstimatesBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What is known of the cost of work, the kinds that were fed last first."""

    quantile: float
    reserve: str
    kinds: list[KindBody]
    is_truncated: bool = False
