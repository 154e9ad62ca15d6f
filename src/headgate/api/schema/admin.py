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
ReserveText = Literal["expected", "strict"]
ProjectStatusText = Literal["active", "paused", "draining", "archived"]


class ProjectBody(msgspec.Struct, kw_only=True, rename="camel"):
    """A project as it is in force; `overridden` names what is not as the file says.

    One that is not `configured` has left the file, and is gone when it has no tasks. Shares are
    parts of 1, a positive deficit is owed work, and `tokens` were used in the window of fair share;
    only the node that dispatches knows them.
    """

    id: str
    name: str
    """A name for people."""
    credit_weight: float
    """Its share relative to the others."""
    max_concurrent_agents: int | None
    """How many of its tasks may be in flight."""
    budget_limit: int | None
    """Tokens in the usage window."""
    status: ProjectStatusText
    queued: int
    inflight: int
    configured: bool
    overridden: list[str]
    target_share: float | None = None
    """The share that it should have, as a part of 1."""
    actual_share: float | None = None
    """The share that it has."""
    deficit: float | None = None
    """The difference. More than 0 is owed work."""
    tokens: int | None = None
    """Tokens that it used in the usage window."""


class AgentBody(msgspec.Struct, kw_only=True, rename="camel"):
    """An agent as it is in force; one that is not `configured` came with its first task."""

    id: str
    type: str
    """What rate limits count by."""
    capacity: int
    """How many tasks it may have in flight."""
    accepts_open: bool
    """Whether the agent gets tasks that name no agent."""
    status: StandingText
    queued: int
    inflight: int
    configured: bool
    overridden: list[str]
    built_in: bool = False
    """True for the agent that gets tasks without an agent while no declared agent accepts them."""
    closures: list[ClosureBody] = []
    """The closures that stop its tasks from starting."""


class TargetBody(msgspec.Struct, kw_only=True, rename="camel"):
    """A target as it is in force; of headers and variables only the names are shown."""

    id: str
    kind: str
    """What it is: `http`, `command`, `callable` or another kind."""
    status: StandingText
    default: bool
    """Whether tasks that name no target go here."""
    slot: str | None
    provider: str | None
    estimate_usd: str | None = None
    """Dollars reserved for a task without an estimate."""
    estimate_tokens: int | None = None
    """The same in tokens."""
    headers: list[str]
    """The names of its headers."""
    env: list[str]
    """The names of its variables."""
    configured: bool
    overridden: list[str]
    closures: list[ClosureBody] = []
    """The closures that stop its tasks from starting."""


class BudgetBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What a scope may use; the empty scope is the root."""

    scope: str
    limit_usd: str | None
    limit_tokens: int | None
    window: str
    overridden: list[str]
    closures: list[ClosureBody] = []
    """The closures that stop its tasks from starting."""
    reserve: str | None = None
    """How much calls reserve in this budget, `expected` or `strict`, if it says so itself."""


class ModelBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A model of the gateway: the upstream models it goes to, tried in order, and what it costs.

    A name with `*` is a pattern. Without prices, none is known: a budget in dollars refuses it.
    """

    name: str
    route: list[str]
    """The upstream models it goes to, tried in order."""
    is_alias: bool = False
    """Whether `[models]` names it; otherwise it is a pattern of an upstream."""
    input_usd_per_million: str | None = None
    """Dollars for a million tokens of the prompt, if known."""
    output_usd_per_million: str | None = None
    """Dollars for a million tokens of the answer, if known."""


class ModelListBody(msgspec.Struct, kw_only=True):
    """The models that the settings name, and `*` for all others if an upstream takes them."""

    models: list[ModelBody]
    """Aliases first, then the patterns of upstreams, then `*`."""


class ClosureListBody(msgspec.Struct, kw_only=True):
    """All closures that stop tasks from starting, by kind and name."""

    closures: list[ClosureBody]
    """All closures that stop tasks from starting, at most 1,000."""
    count: int


Openable = Literal["slot", "target", "agent", "budget"]
"""What can be opened before its time."""


class OpenBody(msgspec.Struct, kw_only=True):
    """What is to be opened; the name of a budget is its scope, and empty that of the root."""

    kind: Openable
    """`slot`, `target`, `agent` or `budget`."""
    name: str = ""
    """Its name; for a budget the scope, empty for the root."""


class ProjectListBody(msgspec.Struct, kw_only=True):
    """All projects, in the order of the file."""

    projects: list[ProjectBody]
    """All projects, in the order of the file."""


class AgentListBody(msgspec.Struct, kw_only=True):
    """The agents that are configured, or that have tasks now."""

    agents: list[AgentBody]
    """The agents that are configured, or that have tasks now."""


class TargetListBody(msgspec.Struct, kw_only=True):
    """All targets, in the order of the file."""

    targets: list[TargetBody]
    """All targets, in the order of the file."""


class BudgetListBody(msgspec.Struct, kw_only=True):
    """The budgets that are configured or were set here."""

    budgets: list[BudgetBody]
    """The budgets that are configured or were set here."""


class PatchBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A change of something that is configured."""

    reset: list[str] = []


class ProjectPatchBody(PatchBody, kw_only=True, omit_defaults=True, rename="camel"):
    """A change of a project."""

    credit_weight: float | UnsetType | None = UNSET
    """Its share relative to the others."""
    max_concurrent_agents: int | UnsetType | None = UNSET
    """How many of its tasks may be in flight."""
    budget_limit: int | UnsetType | None = UNSET
    """Tokens in the usage window."""
    status: ProjectStatusText | UnsetType | None = UNSET


class AgentPatchBody(PatchBody, kw_only=True, omit_defaults=True, rename="camel"):
    """A change of an agent."""

    type: str | UnsetType | None = UNSET
    """What rate limits count by."""
    capacity: int | UnsetType | None = UNSET
    """How many tasks it may have in flight."""
    accepts_open: bool | UnsetType | None = UNSET
    """Whether the agent gets tasks that name no agent."""
    status: StandingText | UnsetType | None = UNSET


class TargetPatchBody(PatchBody, kw_only=True, omit_defaults=True, rename="camel"):
    """A change of a target."""

    slot: str | UnsetType | None = UNSET
    """The key slot of its tasks."""
    provider: str | UnsetType | None = UNSET
    """In place of a slot: the provider whose slots they get."""
    estimate_usd: str | int | float | UnsetType | None = UNSET
    """Dollars reserved for a task without an estimate."""
    estimate_tokens: int | UnsetType | None = UNSET
    """The same in tokens."""
    status: StandingText | UnsetType | None = UNSET


class SlotPatchBody(PatchBody, kw_only=True, omit_defaults=True, rename="camel"):
    """A change of a key slot."""

    max_inflight: int | UnsetType | None = UNSET
    """How many tasks and calls may use it at a time."""


class BudgetPatchBody(PatchBody, kw_only=True, omit_defaults=True, rename="camel"):
    """A change of a budget; a budget without limits is none."""

    limit_usd: str | int | float | UnsetType | None = UNSET
    limit_tokens: int | UnsetType | None = UNSET
    window: str | UnsetType | None = UNSET
    reserve: ReserveText | UnsetType | None = UNSET
    """How much calls reserve in this budget."""


class ChangeBody(msgspec.Struct, kw_only=True):
    """One key that changed."""

    key: str
    """The key."""
    before: Any = msgspec.field(name="from", default=None)
    """The value before."""
    after: Any = msgspec.field(name="to", default=None)
    """The value now."""


class ReloadBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What a reload changed, and what is written otherwise and waits for a restart."""

    changed: list[ChangeBody]
    """The keys that changed. Secrets are hidden."""
    needs_restart: list[ChangeBody]
    """Keys that wait for a restart."""
    kept: list[str] = []
    """Keys that a 0 leaves as they were. The next start refuses it."""
    warnings: list[str] = []
    """Budgets that limit nothing, since their project does not exist."""


class LastReloadBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """When a node last read its settings again, for whom, and what that changed."""

    at: datetime
    """When."""
    by: str
    """Who asked for it."""
    changed: list[ChangeBody]
    """What changed."""
    problem: str = ""
    """Why the file could not be used."""


class SettingBody(msgspec.Struct, kw_only=True, rename="camel"):
    """One value in force, and where it was read: a file, a variable, `option`, `default`."""

    key: str
    """The key."""
    value: Any
    """The value in force. Secrets are hidden."""
    origin: str
    """Where it comes from: a file, a variable, `option`, `default` or `override`."""


class OverrideBody(msgspec.Struct, kw_only=True, rename="camel"):
    """One key that was changed beside the file: to what, from what the file says, when, by whom."""

    key: str
    """The key."""
    kind: str
    """The kind of thing."""
    name: str
    """Its name."""
    field: str
    """Its field."""
    value: Any
    """The value in force."""
    file_value: Any
    """What the file says."""
    at: datetime
    """When it was changed."""
    by: str
    """Who changed it."""


class VariableBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """An environment variable that the settings refer to, without its value."""

    name: str
    """Its name."""
    is_set: bool
    """Whether the node was started with it."""
    problem: str = ""
    """Why its value is not a key, if the settings expect a key."""


class SettingsBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """The settings of a node as they are in force, and what became of the file."""

    file: str | None = None
    """The settings file."""
    settings: list[SettingBody]
    """One page of settings."""
    matching: int
    """How many settings match in all."""
    next_cursor: str | None = None
    overrides: list[OverrideBody]
    """What was changed beside the file."""
    needs_restart: list[ChangeBody]
    """What the file says otherwise and waits for a restart."""
    variables: list[VariableBody] = []
    """The environment variables that the settings refer to."""
    last_reload: LastReloadBody | None = None
    """The last reload of this node since its start."""


class SwitchBody(msgspec.Struct, kw_only=True):
    """Whether everything is paused."""

    paused: bool
    """Whether everything is paused."""


class TaskFilterBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """Which tasks are meant."""

    agent_id: str | None = None
    project_id: str | None = None
    state: list[str] = []
    """A list of states. The default is what can be cancelled, or what did not succeed."""
    target: str | None = None
    """Tasks for this target."""
    slot: str | None = None
    provider: str | None = None
    scope: str | None = None
    """Tasks charged to this budget, or to one within it."""
    label: str | None = None
    """Tasks with this label, as `key=value`, or as `key` for any value."""
    created_before: datetime | None = None
    """Tasks submitted before then."""
    created_after: datetime | None = None
    """Tasks submitted since then."""
    text: str | None = None
    """Tasks with this text in the id, project, agent, action, labels or error."""
    confirm: bool = False
    """Without it the tasks are only counted."""
    limit: int = 1000
    """How many tasks one request works on, 1 to 10,000. The default is 1,000."""


class BulkCancelBody(msgspec.Struct, kw_only=True):
    """What became of the tasks that matched; while `remaining` is not 0, ask again."""

    matched: int
    """How many tasks matched."""
    cancelled: int = 0
    """How many were cancelled or asked to stop."""
    skipped: int = 0
    """How many had changed meanwhile."""
    remaining: int = 0
    """How many are left. Send the same request again."""


class BulkRetryBody(msgspec.Struct, kw_only=True):
    """What became of the tasks that matched; while `remaining` is not 0, ask again."""

    matched: int
    """How many tasks matched."""
    retried: int = 0
    """How many were submitted again."""
    skipped: int = 0
    """How many had changed, or could not be taken."""
    remaining: int = 0
    """How many are left. Send the same request again."""


class AuditEntryBody(msgspec.Struct, kw_only=True, rename="camel"):
    """One change: who made it, when, and the old and new values."""

    seq: int
    """Its number."""
    at: datetime
    """When."""
    actor: str
    """Who: a token, `(file)` or `(signal)`."""
    token_id: str
    action: str
    """What was done."""
    subject: str
    """What was changed."""
    detail: Any
    """The values before and after."""
    request_id: str
    """The request."""


class AuditListBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One page of changes, newest first; `next_cursor` is there if there is a further page."""

    entries: list[AuditEntryBody]
    """The changes, newest first."""
    count: int
    next_cursor: str | None = None


# The JSON of lanes, and the journal of a budget.


class LaneBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What one agent has in one project; the agent "" is the lane that any agent may take from."""

    project_id: str
    agent_id: str
    """The agent. An empty name means the open lane, whose tasks any agent may get."""
    queued: int
    inflight: int
    ready: int | None = None
    """How many tasks wait for nothing but a permit. Only the node that dispatches knows it."""
    oldest_wait_seconds: float | None = None
    """How long the first task has waited, at the node that dispatches."""
    load: float | None = None
    """Its load among the lanes of its project, 0 to 1, at the node that dispatches. Left out if all
    its tasks wait for something else."""


class LaneListBody(msgspec.Struct, kw_only=True):
    """The lanes with work, the longest wait first; `count` is all that match, listed or not."""

    lanes: list[LaneBody]
    """The lanes with work, the longest wait first, up to 1,000."""
    count: int
    strategy: str
    """Which lane of a project goes first."""


class JournalEntryBody(msgspec.Struct, kw_only=True, rename="camel"):
    """One change of the ledger: what it added to each of `scopes`; amounts may be negative."""

    at: datetime
    """When."""
    reservation_id: str
    """The reservation."""
    call: str
    """`reserve`, `dispatched`, `commit`, `release`, `expire`, `adjust`, `accept` or `reject`."""
    scopes: list[str]
    """The scopes that it changed."""
    spent_usd: str
    """What it added to the dollars spent; may be negative."""
    reserved_usd: str
    """What it added to the dollars reserved."""
    overrun_usd: str
    """What it added to the overrun."""
    spent_tokens: int
    """What it added to the tokens spent."""
    reserved_tokens: int
    """What it added to the tokens reserved."""
    overrun_tokens: int
    """What it added to the overrun in tokens."""
    unaccepted_usd: str
    """What it added to the claims in dollars."""
    unaccepted_tokens: int
    """What it added to the claims in tokens."""


class JournalBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One page of changes, newest first; `next_cursor` is there if there is a further page."""

    scope: str
    entries: list[JournalEntryBody]
    """The changes, newest first."""
    count: int
    next_cursor: str | None = None


# The JSON of webhooks that a service and its clients exchange, as one struct for each body.
#
# Both sides import them, so they cannot drift apart.


class DeliveryTryBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One try of a webhook, at the time at which it ended: a status, or why there is none."""

    at: datetime
    """When it ended."""
    duration_ms: int
    """How long it took."""
    status: int | None = None
    """The status that came back."""
    error: str | None = None
    """Why there is none."""
    answer: str | None = None
    """The beginning of what the receiver said."""


class DeliveryBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One webhook: its event, its receiver, its tries, and the result of the last try."""

    id: str
    """The id of the message, which receivers see as `webhook-id`."""
    event: str
    """What it is about."""
    state: Literal["pending", "delivered", "dead"]
    """`pending`, `delivered` or `dead`."""
    url: str
    """The address."""
    task_id: str | None = None
    tries: int
    """How often it was tried."""
    created_at: datetime
    due_at: datetime | None = None
    """When it is tried next, or when another node may try it."""
    ended_at: datetime | None = None
    """When it was delivered or given up."""
    status: int | None = None
    """The status of the latest try."""
    error: str | None = None
    """Why the latest try failed."""
    latest_tries: tuple[DeliveryTryBody, ...] = ()
    """Its latest 10 tries, oldest first. Lists leave them out."""


class DeliveryListBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One page of webhooks; `next_cursor` is there if there is a further page."""

    webhooks: list[DeliveryBody]
    """The webhooks, newest first."""
    count: int
    next_cursor: str | None = None


class PingBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The address that is to get a message which says nothing."""

    url: str
    """The address."""


class PingedBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What became of a ping: the status that came back, or why there is none."""

    delivered: bool
    """Whether the receiver took it."""
    status: int | None = None
    """The status that came back."""
    error: str | None = None
    """Why there is none."""


class SecretBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A signing secret; one with `ends_at` was replaced and signs until then."""

    secret: str
    """The secret."""
    created_at: datetime
    ends_at: datetime | None = None
    """When it stops signing, if it was replaced."""


class SecretListBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The secrets that sign now, the newest first."""

    secrets: list[SecretBody]
    """The secrets that sign now, the newest first."""
