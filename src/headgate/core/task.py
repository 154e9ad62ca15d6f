"""The task, and the one table of moves that a task can make.

Two documents describe a task's life; here it is one. What the fair-share scheduler calls READY is
what the task service calls `queued`. Every change of state goes through `move`, so a state that
the table does not allow cannot come about.
"""

from __future__ import annotations

import math
import re
from enum import Enum
from typing import NamedTuple

import msgspec

from headgate.core.budgets.ledger import Unit
from headgate.core.enums import LenientEnum
from headgate.core.estimates import Hold, Kind, Sample, believed
from headgate.core.text import printable
from headgate.errors import IllegalTransitionError


class TaskStatus(LenientEnum):
    """Where a task is on its way. `QUEUED` is another name for `READY`."""

    READY = "queued"
    QUEUED = "queued"
    ASSIGNED = "assigned"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class Task(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One unit of work, as much of it as a decision needs.

    `agent_id` None leaves the task open to any agent of the project. A lower `priority` goes
    first. `weight` is a proxy for cost, used where no tokens are known. A `provider` leaves open
    which of its slots the task uses, unless it names a `slot`. Times are Unix seconds; a tick is
    one unit of work completed. What it holds in dollars is known with `has_usd_estimate`. One that
    `has_claims` came from somebody whose word is not taken as given: its weight and its estimate
    may raise what it holds and counts, and lower it no further than what is known of its kind.

    One that `is_call` is a call through the gateway: it waits and is decided like any other task,
    takes no permit of a node or worker, and is not stored. With a `parent_id` a running task makes
    it, which holds the permits of its agent and project already. One that `is_free` asks no model,
    and one that `has_money` was granted before and goes elsewhere: no budget keeps either out.
    """

    id: str = ""
    """Not empty, unique. Lower ids go first where all else is equal."""
    project_id: str = "default"
    """The project that it counts for."""
    agent_id: str | None = None
    """The only agent that may run it; None leaves it open."""
    priority: int = 0
    """Lower goes first."""
    weight: float = 1.0
    """A proxy for cost, where no tokens are known."""
    status: TaskStatus = TaskStatus.READY
    """Only a queued task gets an agent."""
    created_at: float = 0.0
    """Unix seconds."""
    enqueued_tick: int = 0
    """The tick at which it was queued."""
    estimate_tokens: int | None = None
    """What it is expected to cost."""
    deadline: float | None = None
    """Unix seconds. The decision does not look at it."""
    not_before: float | None = None
    """Unix seconds before which it may not start."""
    scopes: tuple[str, ...] = ()
    """The budget scopes that it is charged to, as paths."""
    target: str | None = None
    """Where it is executed."""
    slot: str | None = None
    """The provider key that it uses."""
    provider: str | None = None
    """Whose slots it may use, if it names none."""
    has_usd_estimate: bool = False
    """Whether it brought an estimate in dollars, and so need not wait for the first of its kind."""
    has_claims: bool = False
    """Whether its weight and estimate are a tenant's claim, which may raise what it holds and lower
    it only to what is known of its kind."""
    is_call: bool = False
    """A call through the gateway: it takes a permit of its upstream, and none of a node, a worker
    or `max_inflight`."""
    parent_id: str | None = None
    """The running task that makes the call, which already has the permits of its agent and project.
    """
    is_free: bool = False
    """It asks no model, so no budget keeps it out."""
    has_money: bool = False
    """Its money is held already, so no budget keeps it out."""

    @property
    def is_bound_by_budgets(self) -> bool:
        """Whether a budget may keep it out; a call of a running task draws on what that holds."""
        return not (self.is_free or self.has_money or self.parent_id is not None)


TRANSITIONS: dict[TaskStatus, dict[TaskStatus, str]] = {
    TaskStatus.QUEUED: {
        TaskStatus.ASSIGNED: "the dispatcher gave it an agent",
        TaskStatus.FAILED: "its deadline passed while queued",
        TaskStatus.CANCELLED: "cancelled before it started",
        TaskStatus.REJECTED: "refused at admission",
    },
    TaskStatus.ASSIGNED: {
        TaskStatus.RUNNING: "a node took it",
        TaskStatus.QUEUED: "its node was lost before it started",
        TaskStatus.FAILED: "it could not be started",
        TaskStatus.CANCELLED: "cancelled before it ran",
    },
    TaskStatus.RUNNING: {
        TaskStatus.DONE: "it succeeded",
        TaskStatus.FAILED: "it failed, or its deadline passed",
        TaskStatus.CANCELLED: "cancelled while running",
        TaskStatus.QUEUED: "its node was lost, or it is tried again",
    },
    TaskStatus.DONE: {},
    TaskStatus.FAILED: {},
    TaskStatus.CANCELLED: {},
    TaskStatus.REJECTED: {},
}

TERMINAL = frozenset(status for status, moves in TRANSITIONS.items() if not moves)


def check_move(task_id: str, current: TaskStatus, wanted: TaskStatus) -> None:
    """Raise `IllegalTransitionError` unless the table has this move."""
    moves = TRANSITIONS[current]
    if wanted not in moves:
        raise IllegalTransitionError(
            subject=f"task {task_id or '(no id)'}",
            current=current.value,
            wanted=wanted.value,
            allowed=tuple(status.value for status in moves),
        )


def move(task: Task, wanted: TaskStatus) -> Task:
    """Return the task in its new state, or refuse the move."""
    check_move(task.id, task.status, wanted)
    return msgspec.structs.replace(task, status=wanted)


def transition_diagram() -> str:
    """Draw the table as a Mermaid state diagram; the documentation shows this text."""
    lines = ["stateDiagram-v2", f"    [*] --> {TaskStatus.QUEUED.value}"]
    for current, moves in TRANSITIONS.items():
        lines += [f"    {current.value} --> {to.value}: {why}" for to, why in moves.items()]
    lines += [f"    {status.value} --> [*]" for status in TRANSITIONS if status in TERMINAL]
    return "\n".join(lines)


# What is kept of an attempt after which its task was tried again.
#
# The record has the latest attempt; of those before it these notes remain, so that any node can
# tell the whole way of a task, also after a restart. They are for people: no later decision reads
# them. Rule: their number and their texts are bounded, because they lie in a row that every step
# writes. A task that ends with its first attempt has none.

MAX_PAST_ATTEMPTS = 10
"""How many are kept of a task, the latest; earlier ones are only counted."""

MAX_ERROR_CHARACTERS = 300
_CUT = "…"


class PastAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt that has ended; one that its node never began has no `started_at`.

    `tokens` and `micro_usd` are what it was booked at, and `assumed_…` the part of it for which
    nobody gave a figure.
    """

    attempt: int
    started_at: float | None = None
    ended_at: float
    error: str | None = None
    agent_id: str | None = None
    slot: str | None = None
    node_id: str | None = None
    tokens: int = 0
    micro_usd: int = 0
    assumed_tokens: int = 0
    assumed_micro_usd: int = 0


def with_latest(attempts: tuple[PastAttempt, ...], ended: PastAttempt) -> tuple[PastAttempt, ...]:
    """Return the notes of a task with one more; the earliest makes room for it."""
    return (*attempts, ended)[-MAX_PAST_ATTEMPTS:]


def beginning_of(error: str | None) -> str | None:
    """Return as much of an error as a note holds."""
    if error is None or len(error) <= MAX_ERROR_CHARACTERS:
        return error
    return error[: MAX_ERROR_CHARACTERS - 1] + _CUT


# Why an attempt was started when it was: how its project and its lane stood at that moment.
#
# The numbers are those that the round compared, so that they say later what nobody could work out
# any more. Rule: nothing is decided by them.


class LaneRule(Enum):
    """Why a lane went before the others of its project."""

    FEWEST_IN_FLIGHT = "fewest_inflight"
    HIGHEST_LOAD = "highest_load"
    LONGEST_WAIT = "longest_wait"
    AGENT_IN_TURN = "agent_in_turn"


_LANE_WORDS = {
    LaneRule.FEWEST_IN_FLIGHT: "the agent with the fewest tasks in flight came first",
    LaneRule.HIGHEST_LOAD: "the one with the highest load came first",
    LaneRule.LONGEST_WAIT: "it had waited as long as a lane may",
    LaneRule.AGENT_IN_TURN: "it was its agent's turn",
}


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The grounds of one start."""

    projects: int = 1
    """How many projects had work that could start."""
    target_share: float | None = None
    """The share that this project should have. Left out without rivals."""
    actual_share: float | None = None
    """The share that it had, with what was reserved. Left out without rivals."""
    is_guaranteed: bool = False
    """Whether it had started nothing in the window."""
    lanes: int = 1
    """How many of its lanes had tasks."""
    rule: LaneRule = LaneRule.FEWEST_IN_FLIGHT
    """The rule that chose the lane: `fewest_inflight`, `highest_load` or `longest_wait`."""
    ready: int = 1
    """How many tasks of the lane could start."""

    def sentences(self, project_id: str) -> list[str]:
        """Return the grounds for people, the widest first."""
        said = [self._project(project_id), self._lane(), self._place()]
        return [one for one in said if one] or ["Nothing else could start then."]

    def _project(self, project_id: str) -> str:
        if self.target_share is None or self.actual_share is None:
            return ""
        if self.is_guaranteed:
            return (
                f"Project {project_id} had started nothing in the window yet, "
                f"so of {self.projects} projects with work it went first."
            )
        return (
            f"Of {self.projects} projects with work, {project_id} stood lowest against its share "
            f"of those that could start something: it had {_percent(self.actual_share)} of their "
            f"tokens, and its target among them is {_percent(self.target_share)}."
        )

    def _lane(self) -> str:
        if self.lanes == 1:
            return ""
        return f"Of the {self.lanes} lanes of the project, {_LANE_WORDS[self.rule]}."

    def _place(self) -> str:
        if self.ready == 1:
            return ""
        return f"In its lane it was the first of {self.ready} tasks that could start."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# The stored task: the task of the decision, and everything around it that the decision ignores.
#
# `Task` is what is decided about. `Terms` say how failure, exhaustion and parents are treated, and
# `Submission` is the work itself, which only the executor reads. A `TaskRecord` is all of it, with
# what has become of the task so far.

MAX_ATTEMPTS = 100
MAX_ATTEMPT_SECONDS = 7 * 86_400.0
ATTEMPT_SECONDS = 3_600.0
"""How long an attempt of a task may take that does not say."""

WORKER_PREFIX = "worker-"
"""How the names of workers begin, and of no node: so a task in flight tells where it is."""

UPSTREAM_PREFIX = "upstream:"
"""How the targets of calls begin, and of no task: the name of the upstream follows."""

MAX_LOSSES = 5
"""How often a task may lose its node while it runs; then it is taken to be what kills them."""


def is_worker(node_id: str | None) -> bool:
    """Tell whether a node is the worker of an agent, and not a process of the service."""
    return node_id is not None and node_id.startswith(WORKER_PREFIX)


class OnExhausted(LenientEnum):
    """What a task does when a budget cannot hold it now but will be able to later."""

    WAIT = "wait"
    REJECT = "reject"


class OnParentFailure(LenientEnum):
    """What a task does when one that it depends on did not succeed."""

    FAIL = "fail"
    RUN = "run"


class Terms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The conditions of a task; the estimate in dollars is held beside that in tokens.

    `max_attempts` counts executions that failed by themselves: neither a lost node nor a
    provider's rate limit costs one. `callback_url` is told of the end of the task. With
    `names_slot` its slot or provider is its own word, and not that of its target. An attempt that
    takes longer than `attempt_seconds` is stopped and counts as failed; None is no such limit.
    Every attempt at a task with `cost_micro_usd` costs that, whatever the work reports. `action`
    names what kind of work it is, among all that its target does, for estimates. An estimate of
    None is one that nobody gave.
    """

    estimate_micro_usd: int | None = None
    action: str = ""
    max_attempts: int = 1
    on_exhausted: OnExhausted = OnExhausted.WAIT
    on_parent_failure: OnParentFailure = OnParentFailure.FAIL
    depends_on: tuple[str, ...] = ()
    callback_url: str | None = None
    names_slot: bool = False
    attempt_seconds: float | None = None
    cost_micro_usd: int | None = None


DEFAULT_TERMS = Terms()


NO_JSON = msgspec.Raw()
"""Stands for JSON that is not there; it is the only empty one, and counts as false."""


class Submission(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What is to be done, as the client said it. `params` and `input` are JSON, kept unread."""

    action: str = ""
    tab_id: str | None = None
    selector: str | None = None
    ref: str | None = None
    params: msgspec.Raw = NO_JSON
    input: msgspec.Raw = NO_JSON
    labels: dict[str, str] = {}
    retry_of: str | None = None
    traceparent: str | None = None


class Draft(NamedTuple):
    """A task that can be submitted; it has no id yet."""

    task: Task
    terms: Terms
    submission: Submission


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Who may write to a task in flight: one life of one node, for one attempt.

    The attempt is the fence. Every assignment has a number of its own, so what an earlier holder
    writes fits no row.
    """

    node_id: str
    attempt: int


def reservation_name(task_id: str, attempt: int, epoch: int) -> str:
    """Return what the money of an attempt is held under."""
    return f"{task_id}:{attempt}:{epoch}"


def task_holding(reservation_id: str) -> str:
    """Return the task whose attempt holds the money of this name."""
    return reservation_id.rsplit(":", 2)[0]


MAX_REPORT_CHARACTERS = 200


class ProgressReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far an attempt says that it is; `at` is when the store heard of it, in Unix seconds."""

    fraction: float | None = None
    text: str = ""
    at: float = 0.0

    def bounded(self) -> ProgressReport:
        """Return what is kept of it: a fraction from 0 to 1, and one short printable line."""
        fraction = self.fraction
        if fraction is not None:
            fraction = None if math.isnan(fraction) else min(1.0, max(0.0, fraction))
        text = printable(" ".join(self.text[: 4 * MAX_REPORT_CHARACTERS].split()))
        if len(text) > MAX_REPORT_CHARACTERS:
            text = f"{text[: MAX_REPORT_CHARACTERS - 1]}…"
        return ProgressReport(fraction=fraction, text=text, at=self.at)


class AttemptReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt at a task reports."""

    task_id: str
    attempt: int
    report: ProgressReport


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a task has come: the counts behind retries, and its latest attempt.

    `waiting_for` counts parents that have not ended, `dependants` the tasks that wait for this
    one. `used_…` is what all attempts were booked at, and `assumed_…` the part of it for which
    nobody gave a figure, so that what was held was booked. `share_tokens` is what the latest
    attempt counts in the share of its project, which is not its budget. `hold` is how the amounts
    that it reserved came about, where nobody gave them, and `reported_…` what is known of its cost;
    `is_priced` of one that was priced from a provider's answer, `is_claimed` of one that a tenant
    merely states, `is_unpriced` of a success whose dollars nobody knows. `node_id` is set while the
    task is in flight, and only then. `slot` is the one that was chosen for the latest attempt, of a
    task that names a provider, and `choice` why it was started. `attempts` has the latest of those
    after which it was tried again. `whole_attempt` is the latest that could make calls and was
    booked at all that it held, so that those of its calls which are written later are paid for.
    `report` is what the attempt in flight last said of itself.
    """

    attempt: int = 0
    failures: int = 0
    losses: int = 0
    rate_limit_hits: int = 0
    not_before: float | None = None
    waiting_for: int = 0
    dependants: int = 0
    node_id: str | None = None
    reservation_id: str | None = None
    reserved_tokens: int = 0
    reserved_micro_usd: int = 0
    share_tokens: int = 0
    hold: Hold | None = None
    reported_tokens: int | None = None
    reported_micro_usd: int | None = None
    is_priced: bool = False
    is_claimed: bool = False
    is_unpriced: bool = False
    used_tokens: int = 0
    used_micro_usd: int = 0
    started_at: float | None = None
    completed_at: float | None = None
    cancel_requested: bool = False
    slot: str | None = None
    assumed_tokens: int = 0
    assumed_micro_usd: int = 0
    choice: Choice | None = None
    attempts: tuple[PastAttempt, ...] = ()
    whole_attempt: int = 0
    report: ProgressReport | None = None


NO_PROGRESS = Progress()


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task as the store keeps it; `result` is the text of its JSON, kept as it came.

    `position` is how many tasks waited when it was submitted, itself included.
    """

    task: Task
    terms: Terms = DEFAULT_TERMS
    submission: Submission = Submission()
    progress: Progress = NO_PROGRESS
    agent_id: str | None = None
    position: int = 0
    result: str | None = None
    error: str | None = None
    tokens: int | None = None
    micro_usd: int | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether nothing can happen to the task any more."""
        return self.task.status in TERMINAL

    @property
    def was_refused(self) -> bool:
        """Whether the task was turned away when it came: of what it was to do nothing is kept."""
        return self.task.status is TaskStatus.REJECTED and not self.position

    @property
    def lease(self) -> Lease | None:
        """The lease of a task in flight."""
        node_id = self.progress.node_id
        if node_id is None:
            return None
        return Lease(node_id=node_id, attempt=self.progress.attempt)


def kind_of(task: Task, terms: Terms) -> Kind:
    """Return the kind of work that a task is, for what is learned of its cost."""
    if task.target is None:
        return Kind(task.project_id, terms.action)
    return Kind(task.project_id, task.target, terms.action)


def sample_of(progress: Progress, terms: Terms, *, is_done: bool, booked_micro_usd: int) -> Sample:
    """Return what the latest attempt of a task tells of its kind of work, once it has ended.

    What a tenant claims of it teaches no more than was held; and of tokens, where none were, no
    more than it counts in the share of its project, since what is learned counts in rate limits.
    """
    # A cost that the task came with says nothing of what the work costs.
    is_fixed = terms.cost_micro_usd is not None
    probed = () if progress.hold is None else progress.hold.probed
    if progress.is_unpriced and booked_micro_usd:
        # It named a model without a price. So the work has a cost, and does not run for nothing.
        probed = tuple([unit for unit in probed if unit is not Unit.MICRO_USD])
    micro_usd, tokens = progress.reported_micro_usd, progress.reported_tokens
    if progress.is_claimed:
        micro_usd = believed(micro_usd, held=progress.reserved_micro_usd)
        tokens = believed(tokens, held=progress.reserved_tokens or progress.share_tokens)
    return Sample(
        micro_usd=None if is_fixed else micro_usd,
        tokens=tokens,
        held_micro_usd=progress.reserved_micro_usd,
        held_tokens=progress.reserved_tokens,
        # What a target answers is its own word, not a provider's; so no other project learns of it.
        is_done=is_done,
        probed=probed,
    )


def slot_of(record: TaskRecord) -> str | None:
    """Return the slot of the latest attempt: the one that was chosen, or that the task names."""
    return record.progress.slot or record.task.slot


def waits_since(record: TaskRecord) -> float | None:
    """Return since when the latest attempt could have started; None if nobody knows."""
    task = record.task
    if record.progress.attempt == 1:
        return max(task.created_at, task.not_before or 0.0)
    return task.not_before


# The W3C trace context: the one header by which a trace goes from process to process.

_TRACEPARENT = re.compile(r"00-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}")


def read_traceparent(text: str) -> str | None:
    """Return a header that can be passed on; None for anything else, as the standard has it."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None or not int(found["trace"], 16) or not int(found["span"], 16):
        return None
    return text
