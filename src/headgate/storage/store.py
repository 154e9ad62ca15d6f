"""The contract of a task store: what is kept of tasks, and the only ways in which it changes.

Each method is one atomic step, and its answer means that the step is on disk. Concurrent calls
share a transaction. A step may be tried again after a lost connection, so each recognises its own
work: by the id of a task that the caller made, or by the lease of an attempt. Every method may
raise `StoreUnavailableError`; then nothing of the step counts, or nobody knows: look again.

Two kinds of caller are fenced. Whoever dispatches shows the epoch under which it was elected, and
whoever runs a task shows its lease; a step with an old one changes nothing. Everything that
changes comes back as records, and whoever keeps a picture of the store looks at these.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from headgate.core.admission import QueueLimits, Rejected
from headgate.core.budgets.ledger import Limit, Refused, ReserveRequest, SettleRequest
from headgate.core.budgets.scopes import Scope, Tenant
from headgate.core.estimates import Hold, Kind, Learned
from headgate.core.fair_share import UsageRow
from headgate.core.gates import GateClosure, GatePart
from headgate.core.idempotency import InvalidEntry, KeyRefusal, SubmitEntry, SubmitKey
from headgate.core.lifecycle import Finish, TryAgain, Usage
from headgate.core.rate_limits import RateCharge
from headgate.core.retention import Evicted, Retention, RetentionCut
from headgate.core.task import (
    AttemptReport,
    Choice,
    Lease,
    ProgressReport,
    Submission,
    Task,
    TaskRecord,
    TaskStatus,
    Terms,
)
from headgate.core.task_money import OpenCalls
from headgate.storage.audit import AuditEntry

if TYPE_CHECKING:
    import asyncio


# Which tasks are meant, where there are many; and one page of those that were found.
#
# Rule: a condition that is left out is None, and all that are given must hold. An empty name is
# nobody's: it never comes to mean everybody.


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for the tasks that are meant; no states are all of them.

    `among` are the ids of all that can be meant; others are not even looked at.
    `scope` is a budget that a task is charged to, or one around that. `label` is a key and its
    value, or None for any value. `slot` is the one that a task names or was given. Times are Unix
    seconds of the submit. `text` is looked for in the id, the project, the agent, the action, the
    labels and the error, whatever the case of the letters A to Z.
    """

    states: tuple[TaskStatus, ...] = ()
    agent_id: str | None = None
    project_id: str | None = None
    target: str | None = None
    slot: str | None = None
    provider: str | None = None
    scope: str | None = None
    label: tuple[str, str | None] | None = None
    created_before: float | None = None
    created_after: float | None = None
    text: str | None = None
    among: tuple[str, ...] | None = None

    @property
    def reads_submissions(self) -> bool:
        """Whether what clients sent has to be looked at, which may be large."""
        return self.label is not None or self.text is not None


class TaskQuery(TaskFilter, frozen=True, kw_only=True):
    """Which tasks to list, newest first unless `is_oldest_first`.

    `before` is the `next_before` of the page before, in either order: the next one goes on there.
    """

    before: str | None = None
    limit: int = 100
    is_oldest_first: bool = False


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a list: it ends at the limit, or earlier where the tasks become too large.

    It also ends where enough tasks were looked at, however few of them match. `next_before` is the
    `before` of the page after it; None if this one is the last.
    """

    records: tuple[TaskRecord, ...]
    next_before: str | None = None


# What a task store keeps of workers: agents on other machines, which ask for their tasks.
#
# A worker is a node like any other: one life, with a lease that covers all that it runs. It speaks
# to whichever process of the service it reaches, so what it has is known to the store alone.
#
# Rule: a task that a worker has and does not name is handed out again. So an answer that got lost
# loses no task, and nobody has to remember what was said to whom.

MAX_HANDED_OUT = 50
"""How many tasks one answer has at most; the others are in the next."""

MAX_HANDED_OUT_BYTES = 4 * 2**20
"""What these may have together; a larger one has an answer of its own."""


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """A worker shows that it lives, and says what it runs, by task and attempt.

    `capacity` are all that it has, taken or not; None leaves them as they were. With none it is
    about to leave: what it does not name is taken back, and when nothing is left it is forgotten.
    A visit that `is_patient` waits a moment for others, with which it is written.
    `reports` has how far tasks are, of those that it runs.
    """

    worker_id: str
    agent_id: str
    capacity: int | None
    running: dict[str, int]
    lease_seconds: float
    joins: bool = False
    takes: bool = True
    node_id: str = ""
    is_patient: bool = False
    reports: dict[str, ProgressReport] = {}


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to do; one that is not alive any more must drop everything.

    `tasks` are those to be run, `cancelled` those to be stopped, and `lost` those that are not
    its own any more. With news there is something for the dispatcher to look at. The lease was
    renewed when a claim had `waited_seconds`.
    """

    is_alive: bool
    tasks: tuple[TaskRecord, ...] = ()
    cancelled: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    has_news: bool = False
    waited_seconds: float = 0.0


class Overdue(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at a worker that has had its time."""

    task_id: str
    attempt: int


NOT_SHOWN = Submission()
"""What stands in a record for a submission that was not asked for."""

DISPATCHER = "dispatcher"
"""The recipient of what the elected dispatcher is to look at."""

MAX_PAGE_BYTES = 2**20
"""What the tasks of one page may have together; a larger one has a page of its own."""


class StoreStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """The base of steps, which cross to a process that writes as JSON with a tag."""


class StoreAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The base of what comes of steps, which crosses as an array with a tag."""


class NewTask(StoreStep, frozen=True, kw_only=True, tag="new"):
    """A task to be queued, under an id that the caller made, with the limits that it must fit.

    Where there is no room for it, it is stored as rejected, unless `keeps_refusal` is off.
    `warning` is what its submitter is told, if it is taken.
    """

    task: Task
    terms: Terms
    submission: Submission
    limits: QueueLimits
    node_id: str = ""
    keeps_refusal: bool = True
    warning: str = ""


class Queued(StoreAnswer, frozen=True, kw_only=True, tag="queued"):
    """The task is stored; `position` counts the tasks that wait, itself included.

    One whose parent has failed already is stored as failed, and says so in its record.
    """

    record: TaskRecord
    position: int
    warning: str = ""


class TurnedAway(StoreAnswer, frozen=True, kw_only=True, tag="turned away"):
    """There is no room for the task; it is stored as rejected, if its refusal is to be kept."""

    record: TaskRecord
    rejected: Rejected

    @property
    def kept_id(self) -> str | None:
        """The id under which the refusal is stored; None if it is not."""
        return self.record.task.id if self.record.is_terminal else None


class UnknownParent(StoreAnswer, frozen=True, kw_only=True, tag="unknown parent"):
    """The task depends on one that the store does not have; nothing is stored."""

    parent_id: str


class KeyedSubmit(StoreStep, frozen=True, kw_only=True, tag="keyed"):
    """The tasks of one request, to be stored once under a key; those that are wrong say so."""

    key: SubmitKey
    tasks: tuple[NewTask | InvalidEntry, ...]


class KeyedAnswer(StoreAnswer, frozen=True, kw_only=True, tag="keyed"):
    """What became of the tasks of a request; `fresh` is what this very call has stored."""

    entries: tuple[SubmitEntry, ...]
    fresh: tuple[Queued | TurnedAway | UnknownParent, ...] = ()
    is_replay: bool = True


class Assignment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a plan: which attempt at which task goes to which agent, on which node.

    `starts` writes the task as running at once, on the dispatcher's own node. `reserve` is None
    where the ledger is outside the store: then `tokens` and `micro_usd` are reserved already.
    `slot` is set if one was chosen for the attempt. How the amounts came about, and what was the
    `choice`, is kept with the task.
    """

    task_id: str
    attempt: int
    agent_id: str
    node_id: str
    starts: bool
    reservation_id: str
    share_tokens: int
    tokens: int = 0
    micro_usd: int = 0
    hold: Hold | None = None
    reserve: ReserveRequest | None = None
    rate_charges: tuple[RateCharge, ...] = ()
    tick: int = 0
    slot: str | None = None
    choice: Choice | None = None


class Plan(StoreStep, frozen=True, tag="plan"):
    """What a dispatcher wants assigned, under the epoch in which it was elected."""

    epoch: int
    assignments: Sequence[Assignment]


class Assigned(StoreAnswer, frozen=True, kw_only=True, tag="assigned"):
    """The task is in flight; where it was started its record carries the submission."""

    record: TaskRecord


class NotAssigned(StoreAnswer, frozen=True, kw_only=True, tag="not assigned"):
    """A budget refused, or the task is no longer as the plan saw it.

    `record` is the task as it is now; None if it is gone altogether.
    """

    task_id: str
    record: TaskRecord | None
    refused: Refused | None = None


class Settlement(StoreStep, frozen=True, kw_only=True, tag="settlement"):
    """What came of an attempt: the next step, the money, and a pause that the provider asked for.

    A cost of nothing gives the reservation back; what is unknown of it is booked as it was held.
    `result` is JSON. `node_id` is the node that writes it for a worker; others need not say so.
    With a `tenant` the cost is its claim, and counts as far as that may charge. Where the attempt
    could make calls through the gateway, `open_calls` is set, and what its calls have used together
    is its cost.
    """

    task_id: str
    lease: Lease
    step: Finish | TryAgain
    cost: Usage
    result: str | None = None
    closure: GateClosure | None = None
    node_id: str = ""
    tenant: Tenant | None = None
    open_calls: OpenCalls | None = None


class Settled(StoreAnswer, frozen=True, kw_only=True, tag="settled"):
    """The attempt is over. `records` are all tasks that this changed, the settled one first."""

    records: tuple[TaskRecord, ...]


class Cancellation(StoreStep, frozen=True, tag="cancel"):
    """Somebody wants a task cancelled, and asked this node; the `entry` says who."""

    task_id: str
    node_id: str
    entry: AuditEntry | None = None


class CancelAnswer(StoreAnswer, frozen=True, kw_only=True, tag="cancelled"):
    """The task after a cancel, then those that ended with it.

    `had_ended` says that the task was over before, and nothing was changed.
    """

    records: tuple[TaskRecord, ...]
    had_ended: bool = False


class StaleLease(StoreAnswer, frozen=True, kw_only=True, tag="stale"):
    """The lease has been given to another attempt; nothing was changed."""

    task_id: str


class Expiration(msgspec.Struct, frozen=True, kw_only=True):
    """A queued task that is to end without having run, and why."""

    task_id: str
    status: TaskStatus
    error: str


class Heir(msgspec.Struct, frozen=True, kw_only=True):
    """The node that goes on with attempts whose work outlives a node: those at some targets."""

    node_id: str
    targets: frozenset[str] = frozenset()

    def has(self, record: TaskRecord) -> bool:
        """Tell whether an attempt is this node's now."""
        is_its = record.progress.node_id == self.node_id and record.task.target in self.targets
        return is_its and record.task.status is TaskStatus.RUNNING


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one process that runs tasks; a process that lost its lease comes back as new.

    `agent_id` is the agent that a worker serves, and empty for a node of the service.
    """

    id: str
    capacity: int
    address: str = ""
    lease_until: float = 0.0
    agent_id: str = ""


class Election(msgspec.Struct, frozen=True, kw_only=True):
    """Who dispatches, and until when unless it renews."""

    node_id: str
    epoch: int
    lease_until: float
    address: str = ""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a sign of life; a node that is not alive any more must drop what it runs.

    `has_heir` tells a node that leaves whether another one can dispatch.
    """

    is_alive: bool
    lease_until: float
    has_heir: bool = False


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """What is renewed for a node while its loop is busy; `epoch` is None unless it dispatches."""

    node_id: str
    lease_seconds: float
    epoch: int | None = None
    dispatcher_lease_seconds: float = 0.0


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What a node was told: tasks that it now runs, and those of its tasks to be cancelled."""

    started: tuple[TaskRecord, ...] = ()
    cancelled: tuple[str, ...] = ()


class LaneCount(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent has in one project, and what has happened there; "" is the open lane.

    Of what is queued, `scheduled` was submitted for later and has not started.
    What happened is counted where the task was then: in its lane while it waits, with the agent
    that took it afterwards. A lane without any work for long is forgotten with its counts.
    """

    project_id: str
    agent_id: str
    queued: int = 0
    inflight: int = 0
    scheduled: int = 0
    submitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    expired: int = 0
    started: int = 0
    wait_ms: int = 0
    served_tick: int = -1


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a dispatcher starts from, as of one moment."""

    records: tuple[TaskRecord, ...]
    lanes: tuple[LaneCount, ...]
    usage: tuple[UsageRow, ...]
    rate_counts: tuple[RateCharge, ...]
    closures: tuple[GateClosure, ...]
    nodes: tuple[Node, ...]
    tick: int
    learned: tuple[tuple[Kind, Learned], ...] = ()


class WorkerTotals(NamedTuple):
    """How many workers are alive, and how many tasks they take together."""

    workers: int
    capacity: int


NO_WORKERS = WorkerTotals(0, 0)


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What changed at other nodes since the dispatcher last asked, and whether that is not all.

    `nodes` are all that are alive, or all but those workers that have not changed; `gone_workers`
    have changed and are not alive, and `workers` counts those that are.
    """

    records: tuple[TaskRecord, ...] = ()
    gone: tuple[str, ...] = ()
    closures: tuple[GateClosure, ...] = ()
    opened: tuple[GatePart, ...] = ()
    nodes: tuple[Node, ...] = ()
    has_all_workers: bool = True
    gone_workers: tuple[str, ...] = ()
    workers: WorkerTotals = NO_WORKERS
    has_more: bool = False


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of the whole store: what waits and runs by lane, and what has happened so far.

    `forgotten` has what happened in lanes that were forgotten, one sum a project.
    The limits of the queue have kept out what they are named for in `rejected`.
    """

    lanes: tuple[LaneCount, ...]
    submitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    rejected_by_global: int = 0
    rejected_by_project: int = 0
    rejected_by_agent: int = 0
    rejected_by_scheduled: int = 0
    rejected_by_project_scheduled: int = 0
    rejected_by_project_store: int = 0
    expired: int = 0
    started: int = 0
    wait_ms: int = 0
    forgotten: tuple[LaneCount, ...] = ()


class TaskStore(Protocol):
    """Keeps tasks, in memory or in a database; `now` is the clock that all nodes go by."""

    @property
    def is_shared(self) -> bool:
        """Whether several processes may use the store at a time."""

    def now(self) -> float:
        """Return the time by which this store judges leases and deadlines."""

    async def open(self) -> None:
        """Connect, and bring the schema up to date; a newer one than the program's is refused."""

    async def close(self) -> None:
        """Finish what was asked for, then let go of everything."""

    def submit(self, new: NewTask) -> asyncio.Future[Queued | TurnedAway | UnknownParent]:
        """Store a task if it may wait; the same id again gets its answer again."""

    def submit_keyed(self, keyed: KeyedSubmit) -> asyncio.Future[KeyedAnswer | KeyRefusal]:
        """Store the tasks of a request and keep the answer; the same key gets its answer again."""

    def cancel(
        self, task_id: str, *, node_id: str, entry: AuditEntry | None = None
    ) -> Awaitable[CancelAnswer | None]:
        """Cancel what waits, and ask the node of what runs; None if there is no such task.

        `node_id` is the node that asks; one that dispatches is not told of its own change. The
        `entry` of the audit log is written with the cancel, and not for a task that had ended.
        """

    def settle(self, settlement: Settlement) -> Awaitable[Settled | StaleLease]:
        """Write the end of an attempt: the outcome, the money, the freed permit, all at once."""

    def get(self, task_id: str) -> Awaitable[TaskRecord | None]:
        """Return a task with all that is known of it."""

    async def among(self, task_ids: Sequence[str], owner: TaskQuery) -> frozenset[str]:
        """Return which of these tasks there are of the agent and the project of a query."""

    async def find(self, query: TaskQuery) -> TaskPage:
        """List tasks in the order of the query, as many as fit on one page."""

    async def closures(self) -> tuple[GateClosure, ...]:
        """Return what answers of targets and providers, and words of workers, have closed."""

    async def open_gate(self, part: GatePart, entry: AuditEntry | None = None) -> bool:
        """Open a part before its time, and note who did; say whether it was closed here."""

    async def totals(self) -> Totals:
        """Count what waits, what runs and what has happened."""

    async def evict(self, retention: Retention, *, limit: int) -> Evicted:
        """Delete ended tasks that nothing needs, up to a number and a size at a time."""

    async def deleted_by(self, task_id: str) -> RetentionCut | None:
        """Return which setting deleted a task that is not there; None of one that never was."""

    async def join(self, node: Node, *, lease_seconds: float) -> None:
        """Take up a node; from now on tasks may be assigned to it.

        Where only one process can have the store, every earlier node is gone and is taken out.
        """

    async def beat(
        self, node_id: str, *, capacity: int, lease_seconds: float, is_leaving: bool = False
    ) -> Beat:
        """Renew the lease of a node and of everything that it runs.

        A lease that has ended is renewed as well, unless somebody has acted on its end. A node
        that is leaving offers its capacity only for as long as no other one can dispatch.
        """

    def keep_alive(self, life: Life | None) -> None:
        """Have leases renewed also while this loop is busy; None ends that.

        Each call is a sign of the loop. Where it gives none for too long, nothing is renewed.
        """

    async def leave(self, node_id: str) -> None:
        """Take a node out that runs nothing any more."""

    async def collect(self, node_id: str) -> Collected:
        """Start the tasks that are assigned to a node, and return them with what to cancel."""

    def watch(self, recipient: str, callback: Callable[[], None]) -> None:
        """Call back in this event loop when a node or the dispatcher may have been told something.

        A store that no other process shares never calls; whoever watches looks now and then, too.
        """

    def unwatch(self, recipient: str | None = None) -> None:
        """Call nobody back any more, or no more for this recipient."""

    async def elect(self, node_id: str, *, lease_seconds: float) -> Election:
        """Become or stay the dispatcher if nobody else is, and return who is."""

    async def resign(self, node_id: str) -> None:
        """Stop being the dispatcher, so that another need not wait for the lease to end."""

    async def backlog(self, epoch: int) -> Backlog:
        """Return everything that has not ended, to a dispatcher that starts."""

    async def news(self, epoch: int, *, all_workers: bool = True) -> News:
        """Return what other nodes changed since the last call, and forget that it was news.

        A fleet may have thousands of workers; without all of them only what changed is told.
        """

    def assign(
        self, epoch: int, assignments: Sequence[Assignment]
    ) -> Awaitable[list[Assigned | NotAssigned]]:
        """Take tasks, capacity and money for a plan, each line wholly or not at all."""

    async def drop(self, epoch: int, drops: Sequence[Expiration]) -> list[TaskRecord]:
        """End queued tasks without running them, and return all that changed."""

    async def recover(
        self, epoch: int, task_ids: Sequence[str], *, heir: Heir | None = None
    ) -> list[TaskRecord]:
        """Take tasks back from nodes whose lease has ended, and return all that changed.

        What an heir can go on with runs on, as its attempt.
        """

    async def forgive(self, epoch: int, tokens: dict[str, int]) -> None:
        """Remember lag that was forgiven to projects now."""

    async def set_limits(self, limits: dict[Scope, Limit]) -> tuple[Scope, ...]:
        """Set the budgets that the configuration names, and remove those that it named before.

        Budgets that were set otherwise stay. Return the scopes that lost theirs; where the ledger
        is outside the store, only the names are kept here.
        """

    async def outbox(self, *, limit: int) -> list[SettleRequest]:
        """Return settlements that a ledger outside the store has yet to be told."""

    async def sent(self, reservation_ids: Sequence[str]) -> None:
        """Forget settlements that the ledger has answered."""

    async def visit(self, visit: Visit) -> Orders:
        """Renew the lease of a worker, start what is assigned to it, and say what it is to do."""

    async def give_up(self, epoch: int, overdue: Sequence[Overdue]) -> list[TaskRecord]:
        """End attempts that a worker has neither ended nor stopped in time."""

    async def report(self, reports: Sequence[AttemptReport]) -> None:
        """Keep how far attempts say they are; of one that is over nothing is kept."""
