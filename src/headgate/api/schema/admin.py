"""The JSON of administration, as one struct for each body; service and clients import them both.

In a change, a field that is left out stays as it is; null takes the value away, which leaves the
default. `reset` names fields that are to be as the file says again.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from headgate.core.task_view import ClosureBody

StandingText = Literal["active", "paused", "draining"]
ProjectStatusText = Literal["active", "paused", "draining", "archived"]


class ProjectBody(msgspec.Struct, kw_only=True, rename="camel"):
    """A project as it is in force; `overridden` names what is not as the file says.

    One that is not `configured` has left the file, and is gone when it has no tasks. Shares are
    parts of 1, a positive deficit is owed work, and `tokens` were used in the window of fair share;
    only the node that dispatches knows them.
    """

    id: str
    name: str
    credit_weight: float
    max_concurrent_agents: int | None
    budget_limit: int | None
    status: ProjectStatusText
    queued: int
    inflight: int
    configured: bool
    overridden: list[str]
    target_share: float | None = None
    actual_share: float | None = None
    deficit: float | None = None
    tokens: int | None = None


class AgentBody(msgspec.Struct, kw_only=True, rename="camel"):
    """An agent as it is in force; one that is not `configured` came with its first task.

    The one that is `builtIn` takes tasks that name no agent, while no declared agent accepts them.
    """

    id: str
    type: str
    capacity: int
    accepts_open: bool
    status: StandingText
    queued: int
    inflight: int
    configured: bool
    overridden: list[str]
    built_in: bool = False
    closures: list[ClosureBody] = []


class TargetBody(msgspec.Struct, kw_only=True, rename="camel"):
    """A target as it is in force; of headers and variables only the names are shown."""

    id: str
    kind: str
    status: StandingText
    default: bool
    slot: str | None
    provider: str | None
    headers: list[str]
    env: list[str]
    configured: bool
    overridden: list[str]
    closures: list[ClosureBody] = []


class BudgetBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What a scope may use; the empty scope is the root."""

    scope: str
    limit_usd: str | None
    limit_tokens: int | None
    window: str
    overridden: list[str]
    closures: list[ClosureBody] = []


class ClosureListBody(msgspec.Struct, kw_only=True):
    """Everything that keeps tasks from starting, by kind and name."""

    closures: list[ClosureBody]
    count: int


Openable = Literal["slot", "target", "agent", "budget"]
"""What can be opened before its time."""


class OpenBody(msgspec.Struct, kw_only=True):
    """What is to be opened; the name of a budget is its scope, and empty that of the root."""

    kind: Openable
    name: str = ""


class ProjectListBody(msgspec.Struct, kw_only=True):
    """All projects, in the order of the file."""

    projects: list[ProjectBody]


class AgentListBody(msgspec.Struct, kw_only=True):
    """The agents that are configured, or that have tasks now."""

    agents: list[AgentBody]


class TargetListBody(msgspec.Struct, kw_only=True):
    """All targets, in the order of the file."""

    targets: list[TargetBody]


class BudgetListBody(msgspec.Struct, kw_only=True):
    """The budgets that are configured or were set here."""

    budgets: list[BudgetBody]


class PatchBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A change of something that is configured."""

    reset: list[str] = []


class ProjectPatchBody(PatchBody, kw_only=True, omit_defaults=True, rename="camel"):
    """A change of a project."""

    credit_weight: float | UnsetType | None = UNSET
    max_concurrent_agents: int | UnsetType | None = UNSET
    budget_limit: int | UnsetType | None = UNSET
    status: ProjectStatusText | UnsetType | None = UNSET


class AgentPatchBody(PatchBody, kw_only=True, omit_defaults=True, rename="camel"):
    """A change of an agent."""

    type: str | UnsetType | None = UNSET
    capacity: int | UnsetType | None = UNSET
    accepts_open: bool | UnsetType | None = UNSET
    status: StandingText | UnsetType | None = UNSET


class TargetPatchBody(PatchBody, kw_only=True, omit_defaults=True, rename="camel"):
    """A change of a target."""

    status: StandingText | UnsetType | None = UNSET


class BudgetPatchBody(PatchBody, kw_only=True, omit_defaults=True, rename="camel"):
    """A change of a budget; a budget without limits is none."""

    limit_usd: str | int | float | UnsetType | None = UNSET
    limit_tokens: int | UnsetType | None = UNSET
    window: str | UnsetType | None = UNSET


class ChangeBody(msgspec.Struct, kw_only=True):
    """One key that changed."""

    key: str
    before: Any = msgspec.field(name="from", default=None)
    after: Any = msgspec.field(name="to", default=None)


class ReloadBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What a reload changed, and what is written otherwise and waits for a restart.

    `kept` are keys of the scheduler that a zero leaves as they were; the next start refuses it.
    """

    changed: list[ChangeBody]
    needs_restart: list[ChangeBody]
    kept: list[str] = []


class LastReloadBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """When a node last read its settings again, for whom, and what that changed.

    `problem` says why the file could not be used; then nothing has changed.
    """

    at: datetime
    by: str
    changed: list[ChangeBody]
    problem: str = ""


class SettingBody(msgspec.Struct, kw_only=True, rename="camel"):
    """One value in force, and where it was read: a file, a variable, `option`, `default`.

    What was changed beside the file is of the origin `override`.
    """

    key: str
    value: Any
    origin: str


class OverrideBody(msgspec.Struct, kw_only=True, rename="camel"):
    """One key that was changed beside the file: to what, from what the file says, when, by whom.

    `kind`, `name` and `field` are what a change that resets it names.
    """

    key: str
    kind: str
    name: str
    field: str
    value: Any
    file_value: Any
    at: datetime
    by: str


class SettingsBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """The settings of a node as they are in force, and what became of the file.

    `settings` is one page of them, of `matching` in all; `next_cursor` is there if there is a
    further page. `needs_restart` is what the file says otherwise and does not hold yet.
    """

    file: str | None = None
    settings: list[SettingBody]
    matching: int
    next_cursor: str | None = None
    overrides: list[OverrideBody]
    needs_restart: list[ChangeBody]
    last_reload: LastReloadBody | None = None


class SwitchBody(msgspec.Struct, kw_only=True):
    """Whether everything is paused."""

    paused: bool


class TaskFilterBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """Which tasks are meant; without `confirm` they are only counted.

    `scope` is a budget that they are charged to, or one around that. `label` is written as
    `key=value`, or as `key` for any value. `limit` is how many are worked on
    in one request.
    """

    agent_id: str | None = None
    project_id: str | None = None
    state: list[str] = []
    target: str | None = None
    slot: str | None = None
    provider: str | None = None
    scope: str | None = None
    label: str | None = None
    created_before: datetime | None = None
    created_after: datetime | None = None
    text: str | None = None
    confirm: bool = False
    limit: int = 1000


class BulkCancelBody(msgspec.Struct, kw_only=True):
    """What became of the tasks that matched; while `remaining` is not 0, ask again."""

    matched: int
    cancelled: int = 0
    skipped: int = 0
    remaining: int = 0


class BulkRetryBody(msgspec.Struct, kw_only=True):
    """What became of the tasks that matched; while `remaining` is not 0, ask again."""

    matched: int
    retried: int = 0
    skipped: int = 0
    remaining: int = 0


class AuditEntryBody(msgspec.Struct, kw_only=True, rename="camel"):
    """One change: who made it, what it was, and from what to what."""

    seq: int
    at: datetime
    actor: str
    token_id: str
    action: str
    subject: str
    detail: Any
    request_id: str


class AuditListBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One page of changes, newest first; `next_cursor` is there if there is a further page."""

    entries: list[AuditEntryBody]
    count: int
    next_cursor: str | None = None


# The JSON of lanes, and the journal of a budget.


class LaneBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What one agent has in one project; the agent "" is the lane that any agent may take from.

    `ready`, `oldest_wait_seconds` and `load` are known at the node that dispatches. A lane whose
    tasks all wait for something else has no load.
    """

    project_id: str
    agent_id: str
    queued: int
    inflight: int
    ready: int | None = None
    oldest_wait_seconds: float | None = None
    load: float | None = None


class LaneListBody(msgspec.Struct, kw_only=True):
    """The lanes with work, the longest wait first; `count` is all that match, listed or not."""

    lanes: list[LaneBody]
    count: int
    strategy: str


class JournalEntryBody(msgspec.Struct, kw_only=True, rename="camel"):
    """One change of the ledger: what it added to each of `scopes`; amounts may be negative."""

    at: datetime
    reservation_id: str
    call: str
    scopes: list[str]
    spent_usd: str
    reserved_usd: str
    overrun_usd: str
    spent_tokens: int
    reserved_tokens: int
    overrun_tokens: int
    unaccepted_usd: str
    unaccepted_tokens: int


class JournalBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One page of changes, newest first; `next_cursor` is there if there is a further page."""

    scope: str
    entries: list[JournalEntryBody]
    count: int
    next_cursor: str | None = None


# The JSON of webhooks that a service and its clients exchange, as one struct for each body.
#
# Both sides import them, so they cannot drift apart.


class DeliveryTryBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One try of a webhook, at the time at which it ended: a status, or why there is none."""

    at: datetime
    duration_ms: int
    status: int | None = None
    error: str | None = None
    answer: str | None = None


class DeliveryBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One webhook: what it tells to whom, how often it was tried, and what came of the last try.

    `due_at` is there while it is pending; while it is being sent, it is when that is given up.
    `latest_tries`, the oldest first, are there where one webhook is asked for, and not in lists.
    """

    id: str
    event: str
    state: Literal["pending", "delivered", "dead"]
    url: str
    task_id: str | None = None
    tries: int
    created_at: datetime
    due_at: datetime | None = None
    ended_at: datetime | None = None
    status: int | None = None
    error: str | None = None
    latest_tries: tuple[DeliveryTryBody, ...] = ()


class DeliveryListBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One page of webhooks; `next_cursor` is there if there is a further page."""

    webhooks: list[DeliveryBody]
    count: int
    next_cursor: str | None = None


class PingBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The address that is to get a message which says nothing."""

    url: str


class PingedBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What became of a ping: the status that came back, or why there is none."""

    delivered: bool
    status: int | None = None
    error: str | None = None


class SecretBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A signing secret; one with `ends_at` was replaced and signs until then."""

    secret: str
    created_at: datetime
    ends_at: datetime | None = None


class SecretListBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The secrets that sign now, the newest first."""

    secrets: list[SecretBody]
