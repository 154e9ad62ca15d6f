"""What a decision is made from, and what it returns.

A snapshot is immutable and complete: the same snapshot gives the same plan. The order of
`projects` and of `agents` is part of the input, because it settles ties; the order of `tasks` and
of every mapping is not. The first eight fields are the whole of plain fair share. Each further
one is off by default and repairs one thing that fair share alone gets wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from headgate.core.budgets.scopes import parse_scope
from headgate.core.enums import LenientEnum
from headgate.core.gates import GateClosure
from headgate.core.lifecycle import MOST_CLAIMED_SHARE
from headgate.core.load import MOST_UNSAFE_ALPHA
from headgate.core.money import MAX_RESERVATION_TOKENS
from headgate.core.task import Task, TaskStatus
from headgate.errors import InvalidScopeError, InvalidSnapshotError

# Projects and agents: who has a share, and who does the work.


class ProjectStatus(LenientEnum):
    """ACTIVE and DRAINING projects get agents; a DRAINING project accepts no new tasks."""

    ACTIVE = "active"
    PAUSED = "paused"
    DRAINING = "draining"
    ARCHIVED = "archived"


WORKING = (ProjectStatus.ACTIVE, ProjectStatus.DRAINING)


class Standing(LenientEnum):
    """Whether an agent or a target works: PAUSED starts nothing, DRAINING takes nothing new."""

    ACTIVE = "active"
    PAUSED = "paused"
    DRAINING = "draining"


class Project(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A share of the fleet: a weight, a cap on concurrent work, a token budget for the window."""

    id: str
    """Not empty, unique."""
    name: str = ""
    """For people."""
    credit_weight: float = 1.0
    """Its share relative to the others; zero or more."""
    max_concurrent_agents: int | None = 2
    """The most agents at work for it; None is no cap."""
    budget_limit: int | None = None
    """Tokens for the window; None is no budget."""
    status: ProjectStatus = ProjectStatus.ACTIVE
    """Only an active or draining project gets agents."""


class AgentState(LenientEnum):
    """An IDLE agent gets tasks; a BUSY agent only with `agent_inflight` and a free permit."""

    IDLE = "idle"
    STARTING = "starting"
    BUSY = "busy"
    PAUSED = "paused"
    ERROR = "error"


class Agent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named actor with a lane in each project and `capacity` permits for tasks in flight."""

    id: str
    """What tasks and `agent_inflight` name it by."""
    name: str = ""
    """For people."""
    agent_type: str = ""
    """The key of `rate_limited`."""
    state: AgentState = AgentState.IDLE
    """An idle agent gets tasks; a busy agent only with `agent_inflight` and a free permit."""
    capacity: int = 1
    """Permits for tasks in flight, where `agent_inflight` is given."""
    accepts_open: bool = True
    """Whether the agent gets tasks that name no agent."""


BUILT_IN_AGENT = "built-in"
RESERVED = (
    "'built-in' is reserved for Headgate's own agent, which takes tasks that name no agent; "
    "use another name"
)


def with_built_in_agent(agents: tuple[Agent, ...], *, capacity: int) -> tuple[Agent, ...]:
    """Add the built-in agent where none of these accepts open tasks.

    A paused agent that accepts them still counts: its open tasks wait for it to be resumed.
    """
    if any(agent.accepts_open for agent in agents):
        return agents
    return (*agents, Agent(id=BUILT_IN_AGENT, capacity=capacity))


DEFAULT_TOKENS = 1_000
MAX_WEIGHT = 1e9
MIN_CREDIT_WEIGHT = 1e-6
MAX_COUNT = 10**15
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_PRIORITY = 10**9


COUNTS = (
    "project_token_usage",
    "project_active_agent_counts",
    "tasks_completed_in_window",
    "project_reserved",
    "project_started",
    "project_forgiven",
    "agent_inflight",
    "worker_permits",
    "upstream_permits",
)


class LanePolicy(LenientEnum):
    """Which lane of a project goes first."""

    FEWEST_IN_FLIGHT = "fair-fifo"
    HIGHEST_LOAD = "load"


# Not frozen: each assignment makes one, and making a frozen one takes six times as long.
@dataclass(slots=True, unsafe_hash=True)
class AssignAction:
    """One idle agent and the READY task it is to run."""

    agent_id: str
    task_id: str
    project_id: str


@dataclass(frozen=True)
class SchedulerState:
    """Everything that the scheduler needs to know, at one moment.

    The first eight fields are all of plain fair share; each further one is off by default.
    """

    projects: list[Project]
    """All projects. Their order settles ties."""
    tasks: list[Task]
    """All tasks, or the queued ones, in any order. Ids are needed, and unique."""
    agents: list[Agent]
    """All agents. Their order settles ties."""
    project_token_usage: dict[str, int]
    """Project id to tokens used in the window."""
    project_active_agent_counts: dict[str, int]
    """Project id to agents at work for it."""
    tasks_completed_in_window: dict[str, int]
    """Project id to tasks completed. None completed means that its guarantee is due."""
    global_budget: int | None = None
    """Tokens for all projects together; None is no cap."""
    global_tokens_used: int = 0
    """Tokens used by all projects together."""
    charge_in_round: bool = False
    """Each assignment adds the task's tokens to its project's usage at once."""
    default_tokens: int = DEFAULT_TOKENS
    """Tokens charged for each unit of weight where a task has no estimate."""
    project_reserved: dict[str, int] = field(default_factory=dict)
    """Project id to tokens reserved for work in flight. They count as used."""
    project_started: dict[str, int] | None = None
    """Project id to tasks started in the window. If given, the guarantee asks for a start."""
    agent_inflight: dict[str, int] | None = None
    """Agent id to tasks in flight. If given, agents have `capacity` permits."""
    max_inflight: int | None = None
    """The most tasks in flight over all agents."""
    lane_policy: LanePolicy | None = None
    """`fair-fifo` (`FEWEST_IN_FLIGHT`) or `load` (`HIGHEST_LOAD`). None asks the agents in turn."""
    tick: int = 0
    """The present tick: how many tasks have ended so far."""
    alpha: float = 0.25
    """The trade-off of the load policy, from 0 (oldest first) to 1 (only depth counts). Above 0.5 a
    shallow lane may wait for ever."""
    lane_served: dict[str, dict[str, float]] = field(default_factory=dict)
    """Project id to agent id to the tick at which that lane was last served. The open lane is the
    agent `""`; decimals order the grants of one tick."""
    max_wait_ticks: int | None = None
    """A lane that has waited this many ticks goes first."""
    max_lag_tokens: int | None = None
    """The most tokens that a project can be owed when it joins."""
    projects_present: list[str] | None = None
    """The projects of the last round. The others join now; None means that all do."""
    project_forgiven: dict[str, int] = field(default_factory=dict)
    """Project id to lag forgiven so far, from `Scheduler.forgive`."""
    priority_ageing_seconds: float = 0.0
    """Waiting this long is worth one step of priority; 0 is strict priority."""
    now: float | None = None
    """Unix seconds. Needed where a task has `not_before`."""
    closed_gates: list[GateClosure] = field(default_factory=list)
    """Scopes, targets and slots whose tasks cannot start."""
    rate_limited: dict[str, float] = field(default_factory=dict)
    """Agent type to the Unix seconds until which it is limited. An entry counts as long as it is
    there."""
    pull_targets: frozenset[str] = frozenset()
    """Targets whose tasks only workers of their agents can run. Needs a `lane_policy`."""
    worker_permits: dict[str, int] = field(default_factory=dict)
    """Agent id to the free permits of its workers."""
    upstream_permits: dict[str, int] = field(default_factory=dict)
    """Target of calls to the free permits of its upstream. A target that is missing has no limit.
    """
    capped_agents: frozenset[str] = frozenset()
    """Agents whose model calls also need permits of their `capacity`."""


def tokens_charged(task: Task, default_tokens: int, *, learned: int = 0) -> int:
    """Return what the task counts as: its estimate, or its weight where tokens are unknown.

    Work that reports no tokens must still count, or two projects of it would never be fair; and
    nothing is free, or a project of free work would take every grant. So what a task merely claims
    counts for no less than a task that says nothing, nor than what is `learned` of its kind; and
    for no more than `MOST_CLAIMED_SHARE` times that, because others have the project and its rate
    limits, too.
    """
    if task.estimate_tokens is not None and not task.has_claims:
        return max(1, task.estimate_tokens)
    weighted = min(math.ceil(task.weight * default_tokens), MAX_RESERVATION_TOKENS)
    if task.has_claims:
        known = max(default_tokens, learned)
        return max(known, min(max(weighted, task.estimate_tokens or 0), MOST_CLAIMED_SHARE * known))
    return max(1, weighted)


def is_due(task: Task, now: float | None) -> bool:
    """Say whether the task may start at `now`, as far as its own `not_before` goes."""
    return task.not_before is None or now is None or task.not_before <= now


def check_snapshot(state: SchedulerState) -> None:
    """Raise `InvalidSnapshotError`, naming the field, unless a decision can be made."""
    for problem in _problems(state):
        raise problem


def _problems(state: SchedulerState) -> Iterator[InvalidSnapshotError]:
    yield from _id_problems("projects", (project.id for project in state.projects))
    yield from _id_problems("tasks", (task.id for task in state.tasks))
    yield from _agent_problems(state)
    for name in COUNTS:
        yield from _count_problems(name, getattr(state, name) or {})
    for position, closure in enumerate(state.closed_gates):
        if closure.kind == "scope":
            yield from _scope_problems(f"closed_gates[{position}].name", closure.name)
    for position, project in enumerate(state.projects):
        weight = project.credit_weight
        if weight != 0 and not MIN_CREDIT_WEIGHT <= weight <= MAX_WEIGHT:
            problem = f"must be 0, or between {MIN_CREDIT_WEIGHT} and {MAX_WEIGHT:.0f}"
            yield InvalidSnapshotError(f"projects[{position}].credit_weight", problem)
    for position, task in enumerate(state.tasks):
        yield from _task_problems(f"tasks[{position}]", task, state.now)
    yield from _option_problems(state)


def _id_problems(name: str, ids: Iterable[str]) -> Iterator[InvalidSnapshotError]:
    seen: set[str] = set()
    for position, identifier in enumerate(ids):
        if not identifier:
            yield InvalidSnapshotError(f"{name}[{position}].id", "is empty; give it an id")
        if identifier in seen:
            problem = f"{identifier!r} is there twice; ids must be unique"
            yield InvalidSnapshotError(f"{name}[{position}].id", problem)
        seen.add(identifier)


def _task_problems(name: str, task: Task, now: float | None) -> Iterator[InvalidSnapshotError]:
    if not 0 <= task.weight <= MAX_WEIGHT:
        yield InvalidSnapshotError(f"{name}.weight", f"must be between 0 and {MAX_WEIGHT:.0f}")
    for position, scope in enumerate(task.scopes):
        yield from _scope_problems(f"{name}.scopes[{position}]", scope)
    if task.estimate_tokens is not None and not 0 <= task.estimate_tokens <= MAX_COUNT:
        yield InvalidSnapshotError(f"{name}.estimate_tokens", f"must be between 0 and {MAX_COUNT}")
    if abs(task.priority) > MAX_PRIORITY:
        yield InvalidSnapshotError(f"{name}.priority", f"must be within {MAX_PRIORITY} of 0")
    if not math.isfinite(task.created_at):
        yield InvalidSnapshotError(f"{name}.created_at", "must be a finite number of seconds")
    if task.not_before is not None and now is None and task.status is TaskStatus.READY:
        yield InvalidSnapshotError("now", f"is needed because {name} has not_before; set it")


def _agent_problems(state: SchedulerState) -> Iterator[InvalidSnapshotError]:
    for position, agent in enumerate(state.agents):
        if not agent.id:
            yield InvalidSnapshotError(f"agents[{position}].id", "is empty; give it an id")
        if agent.capacity < 0:
            yield InvalidSnapshotError(f"agents[{position}].capacity", "must be zero or more")


def _count_problems(name: str, counts: Mapping[str, int]) -> Iterator[InvalidSnapshotError]:
    for key, value in counts.items():
        if not 0 <= value <= MAX_COUNT:
            yield InvalidSnapshotError(f"{name}[{key!r}]", f"must be between 0 and {MAX_COUNT}")


def _scope_problems(name: str, text: str) -> Iterator[InvalidSnapshotError]:
    # A second spelling of a scope would slip past the gate that the first one closes.
    try:
        scope = parse_scope(text, field=name)
    except InvalidScopeError as error:
        yield InvalidSnapshotError(name, error.problem)
        return
    if scope != text:
        yield InvalidSnapshotError(name, f"must be written as {scope!r}")


def _option_problems(state: SchedulerState) -> Iterator[InvalidSnapshotError]:
    for name in ("default_tokens", "max_inflight", "max_wait_ticks", "max_lag_tokens"):
        value = getattr(state, name)
        if value is not None and not 0 <= value <= MAX_COUNT:
            yield InvalidSnapshotError(name, f"must be between 0 and {MAX_COUNT}")
    if state.pull_targets and state.lane_policy is None:
        yield InvalidSnapshotError("pull_targets", "needs a lane_policy; set one")
    ageing = state.priority_ageing_seconds
    if not (math.isfinite(ageing) and ageing >= 0):
        yield InvalidSnapshotError("priority_ageing_seconds", "must be a number, zero or more")
    if not 0.0 <= state.alpha <= MOST_UNSAFE_ALPHA:
        yield InvalidSnapshotError("alpha", f"must be between 0 and {MOST_UNSAFE_ALPHA:g}")


def decode_snapshot(text: bytes) -> SchedulerState:
    """Read a snapshot from JSON whose keys are the field names of `SchedulerState`."""
    try:
        raw = msgspec.json.decode(text.removeprefix(BYTE_ORDER_MARK))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidSnapshotError("snapshot", f"is not JSON: {error}") from None
    except RecursionError:
        raise InvalidSnapshotError("snapshot", "is nested too deeply") from None
    if not isinstance(raw, dict):
        raise InvalidSnapshotError("snapshot", "must be a JSON object")
    for key in raw:
        if key not in SchedulerState.__dataclass_fields__:
            raise InvalidSnapshotError(key, "is not a field of a snapshot; remove or correct it")
    return _convert(raw)


def _convert(raw: dict[str, object]) -> SchedulerState:
    try:
        state = msgspec.convert(raw, SchedulerState)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at ")
        field_name = place.strip("`").removeprefix("$").removeprefix(".") or "snapshot"
        raise InvalidSnapshotError(field_name, problem) from None
    check_snapshot(state)
    return state
