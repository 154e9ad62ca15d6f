"""Why a task waits, as typed values.

A task that got no agent gets a reason instead of silence. Each reason is a small record: a
`reason` tag and fields for programs, a `message` for people.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

import msgspec

from headgate.core.budgets.scopes import ROOT_NAME
from headgate.core.money import amount_of
from headgate.errors import first_of_kind, utc_time


class Lasting(IntEnum):
    """What ends a reason, those that last longest first."""

    SOMEBODY_ACTS = 0
    A_TIME_COMES = 1
    PARENTS_END = 2
    OTHERS_MAKE_ROOM = 3


class Reason(msgspec.Struct, frozen=True, kw_only=True, tag_field="reason"):
    """The base of all reasons; `line` is the message with the fields left open."""

    line: ClassVar[str] = ""
    lasts: ClassVar[Lasting] = Lasting.SOMEBODY_ACTS

    @property
    def message(self) -> str:
        """One line for a person."""
        return self.line.format_map(msgspec.structs.asdict(self))

    @property
    def awaited(self) -> str:
        """What happens at the time that a reason names, to go on from "before"."""
        return "it may start"


def expiry_warning(reason: Reason, deadline: float | None) -> str:
    """Say that a task expires before what it waits for; empty if it does not, or nobody knows."""
    until: float | None = getattr(reason, "until", None)
    if deadline is None or until is None or until < deadline:
        return ""
    return (
        f"the task expires at {utc_time(deadline)}, before {reason.awaited} at {utc_time(until)};"
        " submit it with a later deadline, or without one"
    )


class Cap(Reason, frozen=True, kw_only=True, omit_defaults=True):
    """A reason that a setting causes.

    `setting` is the key as the file writes it, with its value; `is_default` says that nobody set
    it. Without a `setting` nobody knows which it is: a snapshot has no settings.
    """

    setting: str = ""
    is_default: bool = False

    @property
    def message(self) -> str:
        """One line for a person, with the setting that could be changed."""
        line = self.line.format_map(msgspec.structs.asdict(self))
        if not self.setting:
            return line
        return f"{line}; {self.setting} {'is the default' if self.is_default else 'was set'}"


class GlobalBudgetExhausted(Reason, frozen=True, kw_only=True, tag="global_budget"):
    """All projects together have used the global token budget."""

    lasts = Lasting.A_TIME_COMES
    line = "the global budget is used up ({used} of {limit} tokens)"
    used: int
    limit: int


class EverythingPaused(Reason, frozen=True, kw_only=True, tag="paused"):
    """An administrator has paused the whole service; nothing new starts."""

    line = "the service is paused; headgate service resume ends this"


class ProjectUnknown(Reason, frozen=True, kw_only=True, tag="project_unknown"):
    """The task names a project that the snapshot does not have."""

    line = "project {project_id} does not exist"
    project_id: str


class ProjectNotActive(Reason, frozen=True, kw_only=True, tag="project_paused"):
    """The project is paused or archived."""

    line = "project {project_id} is {status}"
    project_id: str
    status: str


class NotYetDue(Reason, frozen=True, kw_only=True, tag="not_before"):
    """The task asked not to start before a time."""

    lasts = Lasting.A_TIME_COMES
    until: float

    @property
    def message(self) -> str:
        """One line for a person."""
        return f"it may not start before {utc_time(self.until)}"


class GateClosed(Reason, frozen=True, kw_only=True, tag="gate_closed"):
    """A scope, target, slot or provider that the task passes through is closed.

    Of a slot it has how much of the quota is used, and when that resets, where this is known.
    """

    lasts = Lasting.A_TIME_COMES
    kind: str
    name: str
    until: float | None = None
    why: str = ""
    percent_used: float | None = None
    resets_at: float | None = None

    @property
    def message(self) -> str:
        """One line for a person; what is unknown is left out."""
        because = f": {self.why}" if self.why else ""
        until = f", until {utc_time(self.until)}" if self.until is not None else ""
        return f"{self.kind} {self.name or ROOT_NAME} is closed{because}{self._quota}{until}"

    @property
    def awaited(self) -> str:
        """What happens at the time that a reason names."""
        if self.kind == "scope":
            return f"the window of budget {self.name or ROOT_NAME} opens"
        return f"{self.kind} {self.name} opens"

    @property
    def _quota(self) -> str:
        """What the reason itself does not say of the quota."""
        said = ""
        if self.percent_used is not None and f"{self.percent_used:g}%" not in self.why:
            said = f", {self.percent_used:g}% used"
        if self.resets_at is not None and self.resets_at != self.until:
            said += f", resets at {utc_time(self.resets_at)}"
        return said


class ProjectBudgetExhausted(Reason, frozen=True, kw_only=True, tag="project_budget"):
    """The project has used its token budget for the window."""

    lasts = Lasting.A_TIME_COMES
    line = "project {project_id} has used {used} of {limit} tokens"
    project_id: str
    used: int
    limit: int


class ProjectConcurrencyReached(Cap, frozen=True, kw_only=True, tag="project_concurrency"):
    """The project has as many tasks in flight as it may."""

    lasts = Lasting.OTHERS_MAKE_ROOM
    line = "project {project_id} has {active} of {limit} tasks in flight"
    project_id: str
    active: int
    limit: int


class InflightCapReached(Cap, frozen=True, kw_only=True, tag="inflight_cap"):
    """As many tasks are in flight, over all agents, as may be."""

    lasts = Lasting.OTHERS_MAKE_ROOM
    line = "{inflight} of {limit} tasks are in flight"
    inflight: int
    limit: int


class NodesFull(Cap, frozen=True, kw_only=True, tag="nodes_full"):
    """The nodes of the service run as many tasks as they can."""

    lasts = Lasting.OTHERS_MAKE_ROOM
    line = "all {capacity} permits of the service's nodes are taken"
    nodes: int
    capacity: int

    @property
    def message(self) -> str:
        """One line for a person."""
        return super().message if self.capacity else "no node of the service takes tasks"


class UpstreamFull(Cap, frozen=True, kw_only=True, tag="upstream_full"):
    """As many calls are in flight at an upstream as may be."""

    lasts = Lasting.OTHERS_MAKE_ROOM
    line = "upstream {upstream} is busy, with {inflight} of {limit} calls in flight"
    upstream: str
    inflight: int
    limit: int


class ClientAway(Reason, frozen=True, kw_only=True, tag="client_away"):
    """The client of a call was asked to come back, or has gone; its place is kept for a while."""

    lasts = Lasting.A_TIME_COMES
    until: float

    @property
    def message(self) -> str:
        """One line for a person."""
        return f"its client is not connected; its position is kept until {utc_time(self.until)}"


class RateLimited(Reason, frozen=True, kw_only=True, tag="rate_limit"):
    """The agents that could run the task are of a type that is rate limited."""

    lasts = Lasting.A_TIME_COMES
    agent_type: str
    until: float

    @property
    def message(self) -> str:
        """One line for a person."""
        return f"agents of type {self.agent_type} are rate limited until {utc_time(self.until)}"


class AgentFull(Cap, frozen=True, kw_only=True, tag="agent_full"):
    """The agent that the task names has no free permit."""

    lasts = Lasting.OTHERS_MAKE_ROOM
    line = "agent {agent_id} has {inflight} of {capacity} permits in use"
    agent_id: str
    inflight: int
    capacity: int


class AgentUnavailable(Reason, frozen=True, kw_only=True, tag="agent_unavailable"):
    """The agent that the task names takes no work, or does not exist."""

    line = "agent {agent_id} is {state}"
    agent_id: str
    state: str


class NoIdleAgent(Reason, frozen=True, kw_only=True, tag="no_idle_agent"):
    """No agent that takes open tasks is idle."""

    lasts = Lasting.OTHERS_MAKE_ROOM
    line = "no agent that takes open tasks is idle"


class LaneBehind(Reason, frozen=True, kw_only=True, tag="lane_behind"):
    """Nothing forbids the task; other work went first."""

    lasts = Lasting.OTHERS_MAKE_ROOM
    line = "the lane of {agent} in {project_id} is behind others ({given_first} went first)"
    project_id: str
    agent: str
    given_first: int


class ParentsPending(Reason, frozen=True, kw_only=True, tag="parents_pending"):
    """Tasks that this one depends on have not ended."""

    lasts = Lasting.PARENTS_END
    line = "{count} of the tasks that it depends on have not ended"
    count: int
    parents: tuple[str, ...] = ()


class BudgetShort(Reason, frozen=True, kw_only=True, tag="budget_short"):
    """A scope has some room left, but less than this task needs."""

    lasts = Lasting.A_TIME_COMES
    scope: str
    unit: str
    room: int
    requested: int
    until: float | None = None

    @property
    def message(self) -> str:
        """One line for a person."""
        room, needed = amount_of(self.room, self.unit), amount_of(self.requested, self.unit)
        return f"needs {needed}, but budget {self.scope or ROOT_NAME} has {room} left"

    @property
    def awaited(self) -> str:
        """What happens at the time that a reason names."""
        return f"the window of budget {self.scope or ROOT_NAME} opens"


class FirstOfKind(Reason, frozen=True, kw_only=True, tag="first_of_kind"):
    """Nobody knows what this kind of work costs, so the first of it must end before others."""

    lasts = Lasting.OTHERS_MAKE_ROOM
    project_id: str
    target: str
    in_flight: int
    unit: str = "micro_usd"

    @property
    def message(self) -> str:
        """One line for a person."""
        return first_of_kind(self.in_flight, self.unit)


class NoWorker(Reason, frozen=True, kw_only=True, tag="no_worker"):
    """Only a worker of the agent can run the task, and none is connected."""

    agent_id: str
    since: float | None = None

    @property
    def message(self) -> str:
        """One line for a person; a worker that was never there has not left."""
        return f"no worker of {_agent(self.agent_id)} is connected{_since(self.since)}"


class WorkersFull(Reason, frozen=True, kw_only=True, tag="workers_full"):
    """Only a worker of the agent can run the task, and all of them have enough to do."""

    lasts = Lasting.OTHERS_MAKE_ROOM
    agent_id: str
    capacity: int
    since: float | None = None

    @property
    def message(self) -> str:
        """One line for a person."""
        taken = f"all {self.capacity} permits of {_agent(self.agent_id)}'s workers are taken"
        return taken + _since(self.since)


class NoAgentPulls(Reason, frozen=True, kw_only=True, tag="no_agent_pulls"):
    """Only a worker can run the task, it names no agent, and no declared one accepts open tasks."""

    line = (
        "it waits for a worker and names no agent, and no declared agent accepts open tasks; "
        "declare one with [agents.NAME] and start its worker, or submit the task with agentId"
    )


def _agent(agent_id: str) -> str:
    return f"agent {agent_id}" if agent_id else "any agent that is free for open tasks"


def _since(seconds: float | None) -> str:
    return "" if seconds is None else f", since {utc_time(seconds)}"
