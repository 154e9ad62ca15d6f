"""The unit of work: the rows that one transaction works on, and everything it has to write.

A batch of steps first says what it needs, which is read with one statement each. The steps then
change rows in memory, one after the other, and `write` puts all of it back. Every writer takes the
same lock first, so what was read is still true when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import inf
from types import MappingProxyType
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from headgate.core.admission import QueueLimit, Rejected
from headgate.core.budgets.ledger import LedgerState, ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import Call
from headgate.core.budgets.scopes import Tenant
from headgate.core.estimates import MAX_KINDS, Kind, Learned, Sample
from headgate.core.fair_share import SECONDS_PER_HOUR
from headgate.core.gates import GateClosure, GatePart
from headgate.core.lane_index import NEVER_SERVED
from headgate.core.money import MAX_BALANCE, MicroUsd, Tokens
from headgate.core.rate_limits import RateCharge
from headgate.core.retention import EVICTION_RANKS, StoreSize
from headgate.core.task import (
    NO_PROGRESS,
    Progress,
    Submission,
    Task,
    TaskRecord,
    TaskStatus,
    Terms,
    is_worker,
)
from headgate.errors import IllegalSettlementError
from headgate.storage import ledger, nodes
from headgate.storage.schema import (
    CLOSURES,
    DELIVERY_ROWS,
    ESTIMATE_ROWS,
    INPUTS,
    OUTBOX,
    PARENTS,
    TASK_COLUMNS,
    TASK_ROWS,
    WORKER_TASKS,
)
from headgate.storage.store import DISPATCHER, NOT_SHOWN, Election
from headgate.storage.transaction import Insert, Lookup, Row, Statement, Transaction, about
from headgate.storage.zones import zone

_STATUSES = {status.value: status for status in TaskStatus}


class Spec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a task was submitted with, and the answer it got: one JSON text, never written again.

    `input_bytes` is the size of the submission, which lies beside it.
    """

    task: Task
    terms: Terms
    position: int
    rejected: Rejected | None = None
    input_bytes: int = 0


_encoder = msgspec.json.Encoder()
_specs = msgspec.json.Decoder(Spec)
_progresses = msgspec.json.Decoder(Progress)
_submissions = msgspec.json.Decoder(Submission)
_learned = msgspec.json.Decoder(Learned)

_LEARNED = Lookup(
    lambda dialect: (
        "SELECT kept.project_id, kept.name, kept.action, kept.learned FROM"  # noqa: S608
        f" {dialect.given({'project_id': 'TEXT', 'name': 'TEXT', 'action': 'TEXT'})}"
        " JOIN estimates AS kept ON kept.project_id = given.project_id"
        " AND kept.name = given.name AND kept.action = given.action"
    )
)
_FORGET_KINDS = """
DELETE FROM estimates WHERE project_id = ? AND (name, action) IN
(SELECT name, action FROM estimates WHERE project_id = ? ORDER BY fed_at, name, action LIMIT ?)
"""


class TaskRow:
    """One row of the task table: the `Spec`, and everything that changes.

    One transaction at a time works on it. `spec_text` is empty until a new row is written;
    `submission` is there only where it happens to be known.
    """

    __slots__ = (
        "agent_id",
        "error",
        "id",
        "micro_usd",
        "progress",
        "project_id",
        "result",
        "settled_by",
        "spec",
        "spec_text",
        "status",
        "submission",
        "tokens",
    )

    def __init__(self, spec: Spec) -> None:
        self.id = spec.task.id
        self.project_id = spec.task.project_id
        self.agent_id = spec.task.agent_id
        self.status = spec.task.status
        self.spec = spec
        self.spec_text = ""
        self.progress = NO_PROGRESS
        self.submission: Submission | None = None
        self.settled_by: str | None = None
        self.error: str | None = None
        self.result: str | None = None
        self.tokens: int | None = None
        self.micro_usd: int | None = None

    @property
    def is_in_flight(self) -> bool:
        """Whether an attempt has a permit."""
        # By identity, here and below: to hash a member of an enumeration is a call in itself.
        return self.status is TaskStatus.RUNNING or self.status is TaskStatus.ASSIGNED

    @property
    def is_terminal(self) -> bool:
        """Whether nothing can happen to the task any more."""
        return self.status is not TaskStatus.QUEUED and not self.is_in_flight

    @property
    def is_scheduled(self) -> bool:
        """Whether a waiting task was submitted for later and has had no attempt: it counts apart.

        That is so after its time as well, until it starts.
        """
        return self.spec.task.not_before is not None and not self.progress.attempt

    @property
    def submitted_bytes(self) -> int:
        """What the task takes from its submit on."""
        return size_of(self.written_spec()) + self.spec.input_bytes

    @property
    def result_bytes(self) -> int:
        """What an ended task takes beside that."""
        return size_of(self.result or "") + size_of(self.error or "")

    @property
    def evictable_since(self) -> float | None:
        """When the task ended, if nothing needs it any more."""
        # What `core.retention` says, in fewer words: this is asked at every write.
        return None if self.progress.dependants else self.progress.completed_at

    @property
    def eviction_rank(self) -> int | None:
        """How soon an ended task goes when there are too many; None until it has ended."""
        return None if self.progress.completed_at is None else EVICTION_RANKS[self.status]

    def record(self, submission: Submission = NOT_SHOWN) -> TaskRecord:
        """Return the task as it is now."""
        return TaskRecord(
            task=self._task(),
            terms=self.spec.terms,
            submission=submission,
            progress=self.progress,
            agent_id=self.agent_id,
            position=self.spec.position,
            result=self.result,
            error=self.error,
            tokens=self.tokens,
            micro_usd=self.micro_usd,
        )

    def written_spec(self) -> str:
        """Return the text of what the task was submitted with."""
        if not self.spec_text:
            self.spec_text = _text(self.spec)
        return self.spec_text

    def _task(self) -> Task:
        task, not_before = self.spec.task, self.progress.not_before
        if not_before is None:
            if self.status is task.status:
                return task
            not_before = task.not_before
        return msgspec.structs.replace(task, status=self.status, not_before=not_before)


def to_task_row(row: Row) -> TaskRow:
    """Read the columns of a task, in the order of the schema."""
    read = TaskRow(_specs.decode(row[2]))
    read.spec_text = row[2]
    read.agent_id = row[3]
    read.status = _STATUSES[row[4]]
    read.progress = _progresses.decode(row[5])
    read.settled_by, read.error, read.result, read.tokens, read.micro_usd = row[8:13]
    return read


def from_task_row(row: TaskRow) -> Row:
    """Write the columns of a task, in the order of the schema."""
    return (
        row.id,
        row.project_id,
        row.written_spec(),
        row.agent_id,
        row.status._value_,
        _text(row.progress),
        row.evictable_since,
        row.eviction_rank,
        row.settled_by,
        row.error,
        row.result,
        row.tokens,
        row.micro_usd,
    )


def parents_in(spec_text: str) -> tuple[str, ...]:
    """Return what a task depends on; most texts need not be read for that."""
    if '"depends_on"' not in spec_text:
        return ()
    return _specs.decode(spec_text).terms.depends_on


def submission_text(submission: Submission) -> str:
    """Write what is to be done."""
    return _text(submission)


def to_submission(text: str) -> Submission:
    """Read what is to be done."""
    return _submissions.decode(text)


def size_of(text: str) -> int:
    """Return how many bytes a text takes."""
    return len(text) if text.isascii() else len(text.encode())


def states_of(statuses: tuple[TaskStatus, ...]) -> list[str]:
    """Write states as the column has them."""
    return [status.value for status in statuses]


def _text(value: object) -> str:
    return _encoder.encode(value).decode()


QUEUED = "queued"
SCHEDULED = "scheduled"
"""How many of the tasks that wait were submitted for later."""

LIVE_BYTES = "live_bytes"
ENDED_BYTES = "ended_bytes"
CALL_BYTES = "call_bytes"
"""What tasks take that have not ended, those that have, and ended calls."""

TICK = "tick"
SUBMITTED = "submitted"
STARTED = "started"
EXPIRED = "expired"
WAIT_MS = "wait_ms"
ENDED = {
    TaskStatus.DONE: "completed",
    TaskStatus.FAILED: "failed",
    TaskStatus.CANCELLED: "cancelled",
    TaskStatus.REJECTED: "rejected",
}
KEPT = {name: f"kept_{status.value}" for status, name in ENDED.items()}
"""The counters of ended tasks that are still there, by what is counted when one ends."""

REJECTED_BY = {limit: f"rejected_by_{limit.value}" for limit in QueueLimit}
"""How many tasks each limit of the queue has kept out."""

HAPPENINGS = (SUBMITTED, *ENDED.values(), EXPIRED, STARTED, WAIT_MS)
"""What is counted for the whole store and for each lane."""

OPEN_LANE = ""


def _counters(
    table: str, key: dict[str, str], added: tuple[str, ...], highest: tuple[str, ...] = ()
) -> Insert:
    amounts = [(name, "BIGINT") for name in (*added, *highest)]
    return Insert(
        table=table,
        columns=(*key.items(), *amounts),
        key=tuple(key),
        added=tuple([name for name in added if name not in _AMOUNTS]),
        bounded=tuple([name for name in added if name in _AMOUNTS]),
        highest=highest,
    )


_AMOUNTS = frozenset(
    (
        *("tokens", "assumed_tokens", "unpriced_tokens", "forgiven"),
        *("micro_usd", "assumed_micro_usd", "priced_micro_usd"),
    )
)
"""The columns that grow by what tasks used or claim, and not by one."""


COUNTERS = _counters("counters", {"name": "TEXT"}, ("amount",))
LANES = _counters(
    "lanes",
    {"agent_id": "TEXT", "project_id": "TEXT"},
    ("queued", "inflight", "scheduled", *HAPPENINGS),
    ("served_tick",),
)
_PLACES = {name: place for place, name in enumerate(HAPPENINGS, start=3)}
_NEW_LANE = (0,) * (3 + len(HAPPENINGS))
PROJECTS = _counters(
    "project_counts",
    {"project_id": "TEXT"},
    (
        *("queued", "scheduled", "live_bytes", "ended", "ended_bytes", "refused"),
        *("calls", "call_bytes"),
    ),
)
USAGE = _counters(
    "project_usage",
    {"project_id": "TEXT", "hour": "BIGINT"},
    ("tokens", "micro_usd", "started", "completed", "forgiven"),
)
USED = _counters(
    "usage_rows",
    {
        "hour": "BIGINT",
        **dict.fromkeys(("project_id", "agent_id", "model", "slot"), "TEXT"),
    },
    (
        *("tasks", "attempts", "calls", "tokens", "micro_usd"),
        *("assumed_tokens", "assumed_micro_usd", "unpriced_tokens"),
    ),
)
USED_IN_ALL = _counters(
    "usage_totals",
    {"project_id": "TEXT", "model": "TEXT"},
    (
        *("tokens", "micro_usd", "assumed_tokens", "assumed_micro_usd"),
        *("unpriced_tokens", "priced_micro_usd", "overruns"),
    ),
)
RATES = _counters("rate_counts", {"limit_id": "TEXT", "bucket": "BIGINT"}, ("amount",))


class ProjectCount:
    """How many tasks of a project wait, how many of these for later, and what its tasks take.

    Its ended calls are counted beside them.
    """

    __slots__ = (
        "call_bytes",
        "calls",
        "ended",
        "ended_bytes",
        "live_bytes",
        "queued",
        "refused",
        "scheduled",
    )

    def __init__(self, *row: int) -> None:
        sums = row or (0, 0, 0, 0, 0, 0, 0, 0)
        self.queued, self.scheduled, self.live_bytes = sums[:3]
        self.ended, self.ended_bytes, self.refused = sums[3:6]
        self.calls, self.call_bytes = sums[6:]

    def row(self) -> tuple[int, ...]:
        """Return the counts in the order of the table."""
        first = (self.queued, self.scheduled, self.live_bytes)
        ended = (self.ended, self.ended_bytes, self.refused)
        return (*first, *ended, self.calls, self.call_bytes)


_NOTHING_COUNTED = ProjectCount()


class Counters:
    """What one transaction adds to lanes, counters, usage and rate counts, as one sum a row.

    The sums are written at the end: one row update each, however many steps changed it. The step
    that changes a task changes its counts in the same transaction, so the counts always equal what
    the rows say, and nothing that is retried is counted twice.
    """

    __slots__ = (
        "_hour",
        "_lanes",
        "_rates",
        "_usage",
        "_used",
        "projects",
        "totals",
    )

    def __init__(self, now: float) -> None:
        self.totals: dict[str, int] = {QUEUED: 0, SCHEDULED: 0, LIVE_BYTES: 0, ENDED_BYTES: 0}
        self.projects: dict[str, ProjectCount] = {}
        self._hour = int(now) // SECONDS_PER_HOUR * SECONDS_PER_HOUR
        self._lanes: dict[tuple[str, str], list[int]] = {}
        self._usage: dict[str, list[int]] = {}
        self._used: dict[tuple[str, str, str, str], list[int]] = {}
        self._rates: dict[tuple[str, int], int] = {}

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        self.totals[name] = self.totals.get(name, 0) + amount

    def happen(
        self,
        name: str,
        agent_id: str | None,
        project_id: str,
        amount: int = 1,
        *,
        is_kept: bool = True,
    ) -> None:
        """Count something that happened to a task, for the store and for the lane."""
        self.count(name, amount)
        self._lane(agent_id or OPEN_LANE, project_id)[_PLACES[name]] += amount
        if is_kept and name in KEPT:
            self.count(KEPT[name], amount)

    def queue(
        self, agent_id: str | None, project_id: str, amount: int, *, is_scheduled: bool = False
    ) -> None:
        """Count tasks into or out of the lane that they wait in."""
        lane, project = self._lane(agent_id or OPEN_LANE, project_id), self.project(project_id)
        lane[0] += amount
        project.queued += amount
        self.totals[QUEUED] += amount
        if is_scheduled:
            lane[2] += amount
            project.scheduled += amount
            self.totals[SCHEDULED] += amount

    def queued_in(self, agent_id: str, project_id: str) -> int:
        """Return how many tasks came into a lane, without those that were submitted for later."""
        lane = self._lanes.get((agent_id, project_id), _NEW_LANE)
        return lane[0] - lane[2]

    def take_up(self, project_id: str, size_bytes: int) -> None:
        """Count what a task takes that has not ended."""
        self.project(project_id).live_bytes += size_bytes
        self.totals[LIVE_BYTES] += size_bytes

    def keep(self, project_id: str, tasks: int, size_bytes: int, *, refused: int = 0) -> None:
        """Count ended tasks in, or out, with what they take."""
        project = self.project(project_id)
        project.ended += tasks
        project.ended_bytes += size_bytes
        project.refused += refused
        self.totals[ENDED_BYTES] += size_bytes

    def keep_calls(self, project_id: str, calls: int, size_bytes: int) -> None:
        """Count ended calls in, or out, with what they take."""
        project = self.project(project_id)
        project.calls += calls
        project.call_bytes += size_bytes
        self.count(CALL_BYTES, size_bytes)

    def project(self, project_id: str) -> ProjectCount:
        """Return what is added to the counts of a project."""
        found = self.projects.get(project_id)
        if found is None:
            found = self.projects[project_id] = ProjectCount()
        return found

    def fly(self, agent_id: str | None, project_id: str, amount: int) -> None:
        """Count permits that are taken or freed."""
        self._lane(agent_id or OPEN_LANE, project_id)[1] += amount

    def serve(self, agent_id: str | None, project_id: str, tick: int) -> None:
        """Note when a lane was last served."""
        lane = self._lane(agent_id or OPEN_LANE, project_id)
        lane[-1] = max(lane[-1], tick)

    def spend(self, project_id: str, *, tokens: int, micro_usd: int) -> None:
        """Add to what a project used in this hour."""
        sums = self._usage_of(project_id)
        sums[0] += tokens
        sums[1] += micro_usd

    def use(
        self,
        key: tuple[str, str, str],
        *,
        is_over: bool,
        tokens: int,
        micro_usd: int,
        assumed_tokens: int,
        assumed_micro_usd: int,
        unpriced_tokens: int = 0,
        priced_micro_usd: int = 0,
        is_overrun: bool = False,
        slot: str = "",
        is_call: bool = False,
        calls: int = 1,
    ) -> None:
        """Add an attempt to what a project, an agent and a model used; its task may be over.

        A call is no attempt, and counts by itself, or as so many `calls`. The assumed amounts are
        the part of the others that nobody reported, and the priced one is the part of the dollars
        that the price list knows. Unpriced are the tokens of a model of which nobody knows the
        price. An overrun cost more than was reserved.
        """
        whole_key = (*key, slot)
        sums = self._used.get(whole_key)
        if sums is None:
            sums = self._used[whole_key] = [0] * 10
        sums[0] += is_over
        sums[1] += not is_call
        sums[2] += calls if is_call else 0
        sums[3] += tokens
        sums[4] += micro_usd
        sums[5] += assumed_tokens
        sums[6] += assumed_micro_usd
        sums[7] += unpriced_tokens
        sums[8] += priced_micro_usd
        sums[9] += is_overrun

    def start(self, project_id: str, amount: int = 1) -> None:
        """Count tasks of a project that were started."""
        self._usage_of(project_id)[2] += amount

    def complete(self, project_id: str) -> None:
        """Count a task of a project that was done."""
        self._usage_of(project_id)[3] += 1

    def forgive(self, project_id: str, tokens: int) -> None:
        """Add to the lag that a project was forgiven in this hour."""
        self._usage_of(project_id)[4] += min(tokens, MAX_BALANCE)

    def charge(self, charges: Iterable[RateCharge]) -> None:
        """Add to the counts of rate limits."""
        for charge in charges:
            key = (charge.limit_id, charge.bucket)
            self._rates[key] = self._rates.get(key, 0) + charge.amount

    def rows(self) -> list[tuple[Insert, list[Row]]]:
        """Return all sums as rows to be written."""
        hour = self._hour
        return [
            (COUNTERS, [*self._counts()]),
            (LANES, [(*key, *sums) for key, sums in self._lanes.items()]),
            (PROJECTS, [(project_id, *one.row()) for project_id, one in self.projects.items()]),
            (USAGE, [(project_id, hour, *sums) for project_id, sums in self._usage.items()]),
            (USED, [(hour, *key, *sums[:-2]) for key, sums in self._used.items()]),
            (USED_IN_ALL, self._used_in_all()),
            (RATES, [(*key, amount) for key, amount in self._rates.items()]),
        ]

    def _used_in_all(self) -> list[Row]:
        """Return what projects and models used, whichever agents did and with which keys."""
        found: dict[tuple[str, str], list[int]] = {}
        for (project_id, _, model, _), (_, _, _, *amounts) in self._used.items():
            sums = found.setdefault((project_id, model), [0] * len(amounts))
            for place, amount in enumerate(amounts):
                sums[place] += amount
        return [(*key, *sums) for key, sums in found.items()]

    def _counts(self) -> Iterator[Row]:
        for name, amount in self.totals.items():
            if amount:
                yield name, amount

    def _lane(self, agent_id: str, project_id: str) -> list[int]:
        key = (agent_id, project_id)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = [*_NEW_LANE, NEVER_SERVED]
        return lane

    def _usage_of(self, project_id: str) -> list[int]:
        sums = self._usage.get(project_id)
        if sums is None:
            sums = self._usage[project_id] = [0, 0, 0, 0, 0]
        return sums


REFUSALS_PER_SECOND = 100
"""How many refusals of one project are kept in a second; the others are only counted."""

SAMPLE_SECONDS = 1.0
MAX_TAKEN_BYTES = 2**20
"""After so long, or so much that was added, the room that is left is measured again."""

WRITTEN_TWICE = 2
"""New rows lie in the log of the database and in its table for a while."""


class Disk:
    """What whoever writes knows of the room that is left, and of refusals in this second.

    Each batch that adds tasks looks first. What they take counts at once, so however many share a
    transaction, all of them together fit. While little is left, it is measured each time.
    """

    def __init__(self) -> None:
        self._size = StoreSize(used_bytes=0)
        self._measured_at = -inf
        self._taken_bytes = 0
        self._refusals: dict[str, int] = {}
        self._second = 0

    @property
    def size(self) -> StoreSize:
        """How large the store is, with all that was taken since it was measured."""
        size, taken = self._size, self._taken_bytes
        if not taken:
            return size
        free = size.free_bytes
        return msgspec.structs.replace(
            size,
            used_bytes=size.used_bytes + taken,
            free_bytes=None if free is None else max(0, free - WRITTEN_TWICE * taken),
        )

    def look(self, transaction: Transaction, now: float, max_bytes: int | None) -> None:
        """Measure how large the store is, unless that was done just now."""
        is_new = 0 <= now - self._measured_at < SAMPLE_SECONDS and max_bytes == self._size.max_bytes
        is_new = is_new and not transaction.was_full
        if not is_new or self._taken_bytes > MAX_TAKEN_BYTES or self._size.excess_bytes:
            self.measure(transaction, now, max_bytes)

    def measure(self, transaction: Transaction, now: float, max_bytes: int | None) -> StoreSize:
        """Measure how large the store is."""
        measured = transaction.measure(is_limited=max_bytes is not None)
        self._size = msgspec.structs.replace(measured, max_bytes=max_bytes)
        self._measured_at, self._taken_bytes = now, 0
        return self._size

    def take(self, size_bytes: int) -> None:
        """Count what a new task takes."""
        self._taken_bytes += size_bytes

    def may_keep_refusal(self, project_id: str, now: float) -> bool:
        """Count a refusal, and tell whether it may be kept."""
        second = int(now)
        if second != self._second:
            self._second, self._refusals = second, {}
        count = self._refusals[project_id] = self._refusals.get(project_id, 0) + 1
        return count <= REFUSALS_PER_SECOND


MAX_ROWS = 20_000


class Counted(Protocol):
    """A database that counts the transactions which it began and which it committed."""

    @property
    def begun(self) -> int:
        """How many were begun."""

    @property
    def committed(self) -> int:
        """How many of these are on disk."""


class RowCache:
    """Rows of unfinished tasks by id, as this process last wrote them; the oldest make room.

    It saves reading them again, only in a store that one process writes to, and even then the
    database is asked each time whether somebody else wrote to it. A transaction takes rows out of
    the cache and puts them back when it has written everything. They count once that transaction is
    known to have been committed; if it was not, or nobody knows, they are dropped and read again.
    """

    def __init__(self, database: Counted, *, most: int = MAX_ROWS) -> None:
        self._database = database
        self._most = most
        self._rows: dict[str, TaskRow] = {}
        self._written: dict[str, TaskRow] = {}
        self._moment = (0, 0)
        self._connection: Transaction | None = None
        self._version = 0

    def begin(self, transaction: Transaction) -> None:
        """Find out which rows still are as they were, at the start of every step."""
        database = self._database
        moment = (database.begun, database.committed)
        if moment != self._moment:
            self._end(moment)
        version: int = transaction.read("PRAGMA data_version")[0][0]
        # The number means something only on the connection that it comes from.
        if transaction is not self._connection or version != self._version:
            self._rows.clear()
        self._connection, self._version = transaction, version

    def take(self, task_id: str) -> TaskRow | None:
        """Take a row out, if it is here."""
        return self._written.pop(task_id, None) or self._rows.pop(task_id, None)

    def put(self, row: TaskRow) -> None:
        """Put a row in that this transaction has written, or found as it is."""
        self._written[row.id] = row

    def _end(self, moment: tuple[int, int]) -> None:
        begun, committed = self._moment
        if moment == (begun + 1, committed + 1):
            self._rows.update(self._written)
            for task_id in list(islice(self._rows, max(0, len(self._rows) - self._most))):
                del self._rows[task_id]
        self._written.clear()
        self._moment = moment


# Filing a delivery, in the transaction of what it tells of. A task with a receiver has one
# delivery, under an id that is made from its own, so the receiver is told of one end, whichever
# step ended the task and however often that step is run.

MESSAGE_PREFIX = "msg_"
TASK_EVENTS = {
    "done": "task.completed",
    "failed": "task.failed",
    "cancelled": "task.cancelled",
    "rejected": "task.rejected",
}
"""The event of each state in which a task ends."""

PENDING = "pending"
"""The state of a delivery that is still to be tried."""


def message_id(task_id: str) -> str:
    """Return the id of the message that tells of the end of a task."""
    return MESSAGE_PREFIX + task_id.replace("tsk_", "")


def host_of(url: str) -> str:
    """Return the host of an address, by which senders share their permits; empty if it has none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def delivery_row(
    delivery_id: str,
    *,
    event: str,
    url: str,
    now: float,
    task_id: str = "",
    project_id: str = "",
) -> Row:
    """Return the row of a delivery that nobody has tried and that is due now."""
    what = (delivery_id, task_id, event, url, host_of(url))
    return (*what, PENDING, 0, now, now, None, None, None, None, project_id)


SHORT_SUBMISSION = 2_000
"""Longer ones are read again rather than kept in memory until the task starts."""

_TAKE_FROM_WORKER = "DELETE FROM worker_tasks WHERE node_id = ? AND task_id = ?"
_TASKS = about(f"SELECT {', '.join(TASK_COLUMNS)} FROM tasks", "id")  # noqa: S608
_INPUTS = about("SELECT id, submission FROM task_inputs", "id")
_CHILDREN = about("SELECT parent_id, task_id FROM task_parents", "parent_id")
_LANES = about("SELECT agent_id, project_id, queued - scheduled FROM lanes", "agent_id")
_PROJECT_COUNTS = about(
    "SELECT project_id, queued, scheduled, live_bytes, ended, ended_bytes, refused, calls,"
    " call_bytes FROM project_counts",
    "project_id",
)
_COUNTERS = about("SELECT name, amount FROM counters", "name")


Need = tuple[Statement, Callable[[Sequence[Row]], None]]
"""A statement that reads something, and what keeps it."""

NO_CLAIMS: Mapping[str, Tenant] = MappingProxyType({})


class UnitOfWork:
    """What one transaction has read, and what it will write."""

    def __init__(
        self,
        transaction: Transaction,
        now: float,
        *,
        keeps_ledger: bool,
        disk: Disk,
        cache: RowCache | None = None,
    ) -> None:
        self.transaction = transaction
        self.disk = disk
        self._cache = cache
        self.now = now
        self.keeps_ledger = keeps_ledger
        self.counters = Counters(now)
        self.ledger = LedgerState(zone)
        self._rows: dict[str, TaskRow | None] = {}
        self._changed: dict[str, TaskRow] = {}
        self._submissions: dict[str, Submission] = {}
        self._inputs: list[Row] = []
        self._parents: dict[str, list[str]] = {}
        self._closures: dict[GatePart, GateClosure] = {}
        self._outbox: list[Row] = []
        self._deliveries: list[Row] = []
        self._messages: list[tuple[str, nodes.Kind, str]] = []
        self._called: set[str] = set()
        self._given: list[Row] = []
        self._taken: list[Row] = []
        self._before: dict[str, int] = {}
        self._queued_in_lane: dict[tuple[str, str], int] = {}
        self._projects: dict[str, ProjectCount] = {}
        self._ended: list[TaskRow] = []
        self._election: Election | None = None
        self._samples: list[tuple[Kind, Sample]] = []

    def read(self, *needs: Iterable[Need]) -> None:
        """Read all that is needed in one round trip: everybody waits while this one has the lock.

        With few processors for many, each round trip is two waits for one of them.
        """
        wanted = [need for some in needs for need in some]
        if wanted:
            found = self.transaction.read_all([statement for statement, _ in wanted])
            for (_, keep), rows in zip(wanted, found, strict=True):
                keep(rows)

    def load(self, task_ids: Iterable[str]) -> None:
        """Read the rows of tasks that are not here yet."""
        self.read(self.need_rows(task_ids))

    def need_rows(self, task_ids: Iterable[str]) -> list[Need]:
        """Return what reads the rows of tasks that are not here yet."""
        wanted = [task_id for task_id in dict.fromkeys(task_ids) if task_id not in self._rows]
        self._rows.update(dict.fromkeys(wanted))
        if self._cache is not None and wanted:
            wanted = self._take_cached(self._cache, wanted)
        return [((_TASKS, wanted), self._keep_rows)] if wanted else []

    def _keep_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._rows[row[0]] = to_task_row(row)

    def _take_cached(self, cache: RowCache, task_ids: list[str]) -> list[str]:
        """Take rows from the cache, and return which are not in it."""
        missing: list[str] = []
        for task_id in task_ids:
            row = self._rows[task_id] = cache.take(task_id)
            if row is None:
                missing.append(task_id)
            elif row.submission is not None:
                self._submissions[task_id] = row.submission
        return missing

    def load_submissions(self, task_ids: Iterable[str]) -> None:
        """Read what tasks were given to do."""
        self.read(self.need_submissions(task_ids))

    def need_submissions(self, task_ids: Iterable[str]) -> list[Need]:
        """Return what reads the tasks' submissions that are not here yet."""
        wanted = [task_id for task_id in task_ids if task_id not in self._submissions]
        return [((_INPUTS, wanted), self._keep_submissions)] if wanted else []

    def _keep_submissions(self, rows: Sequence[Row]) -> None:
        self._submissions.update((task_id, to_submission(text)) for task_id, text in rows)

    def need_counts(self, *, project_ids: Iterable[str], agent_ids: Iterable[str]) -> list[Need]:
        """Return what reads how many tasks wait, in all, of these projects, for these agents."""
        return [
            ((_COUNTERS, [QUEUED, SCHEDULED, TICK, ENDED_BYTES, CALL_BYTES]), self._keep_counters),
            ((_LANES, list(set(agent_ids))), self._keep_lanes),
            ((_PROJECT_COUNTS, list(set(project_ids))), self._keep_projects),
        ]

    def _keep_counters(self, rows: Sequence[Row]) -> None:
        self._before = {row[0]: row[1] for row in rows}

    def _keep_lanes(self, rows: Sequence[Row]) -> None:
        self._queued_in_lane = {(agent, project): queued for agent, project, queued in rows}

    def _keep_projects(self, rows: Sequence[Row]) -> None:
        self._projects = {row[0]: ProjectCount(*row[1:]) for row in rows}

    def need_election(self) -> list[Need]:
        """Return what reads who dispatches, unless that is known."""
        return (
            [] if self._election is not None else [((nodes.READ_LEADER, ()), self._keep_election)]
        )

    def _keep_election(self, rows: Sequence[Row]) -> None:
        self._election = nodes.to_election(rows)

    @property
    def election(self) -> Election:
        """Who was elected last.

        Its lease may have ended. Then nobody needs to be told anything: whoever is elected next
        reads everything anew.
        """
        found = self._election
        if found is None:
            found = self._election = nodes.to_election(self.transaction.read(nodes.READ_LEADER))
        return found

    def load_ledger(
        self,
        reserves: Sequence[ReserveRequest],
        held: Iterable[TaskRow],
        claims: Mapping[str, Tenant] = NO_CLAIMS,
    ) -> None:
        """Read the balances and reservations that these requests and tasks in flight touch.

        `claims` are of tenants, by task.
        """
        if not self.keeps_ledger:
            return
        settles = [
            SettleRequest(
                reservation_id=row.progress.reservation_id,
                call=Call.RELEASE,
                tenant=claims.get(row.id),
            )
            for row in held
            if row.is_in_flight and row.progress.reservation_id
        ]
        if reserves or settles:
            self.ledger = ledger.load(self.transaction, [*reserves, *settles], self.now)

    def row(self, task_id: str) -> TaskRow | None:
        """Return the row of a task, None if there is none."""
        if task_id not in self._rows:
            self.load([task_id])
        return self._rows[task_id]

    def rows(self, task_ids: Iterable[str]) -> list[TaskRow]:
        """Return the rows of tasks, without those that do not exist."""
        wanted = list(dict.fromkeys(task_ids))
        self.load(wanted)
        return [row for task_id in wanted if (row := self._rows[task_id]) is not None]

    def submission(self, task_id: str) -> Submission:
        """Return what a task was given to do, if it was loaded."""
        return self._submissions.get(task_id, NOT_SHOWN)

    def count(self, name: str) -> int:
        """Return a counter of the store as it is now."""
        return self._before.get(name, 0) + self.counters.totals.get(name, 0)

    def waiting_of(self, project_id: str) -> tuple[int, int]:
        """Return how many tasks of a project wait now, and how many of these for later."""
        before, added = self._project_before(project_id), self.counters.project(project_id)
        return before.queued + added.queued, before.scheduled + added.scheduled

    def live_bytes_of(self, project_id: str) -> int:
        """Return what the tasks of a project take now that have not ended."""
        added = self.counters.project(project_id)
        return self._project_before(project_id).live_bytes + added.live_bytes

    def _project_before(self, project_id: str) -> ProjectCount:
        return self._projects.get(project_id, _NOTHING_COUNTED)

    def queued_in(self, agent_id: str, project_id: str) -> int:
        """Return how many tasks wait now in a lane, without those that were submitted for later."""
        before = self._queued_in_lane.get((agent_id, project_id), 0)
        return before + self.counters.queued_in(agent_id, project_id)

    def tick(self) -> int:
        """Return how many attempts have ended."""
        return self.count(TICK)

    def children(self, parents: Sequence[TaskRow]) -> list[tuple[TaskRow, TaskRow]]:
        """Return pairs of a task and one that depends on it, and have their other parents ready."""
        ids = [row.id for row in parents]
        rows = self.transaction.read(_CHILDREN, ids)
        pairs = [(row[0], row[1]) for row in rows]
        pairs += [(parent, child) for parent in ids for child in self._parents.get(parent, ())]
        self.load(child for _, child in pairs)
        found = [(self._rows[parent], self._rows[child]) for parent, child in pairs]
        both = [(parent, child) for parent, child in found if parent and child]
        self.load(name for _, child in both for name in child.spec.terms.depends_on)
        return both

    def add(self, row: TaskRow, submission: Submission, text: str) -> None:
        """Store a new task; `text` is its submission as it is written."""
        self._rows[row.id] = row
        self._changed[row.id] = row
        self._submissions[row.id] = submission
        self._inputs.append((row.id, text))
        self.counters.take_up(row.project_id, row.submitted_bytes)
        if len(text) <= SHORT_SUBMISSION:
            row.submission = submission

    def change(self, row: TaskRow) -> None:
        """Have a row written that is not as it was."""
        self._changed[row.id] = row

    def end(self, row: TaskRow) -> None:
        """Count a task as one that has ended, with all that it takes when this is written."""
        self.counters.happen(ENDED[row.status], row.agent_id, row.project_id)
        self._ended.append(row)

    def depend(self, row: TaskRow, parent_ids: Iterable[str]) -> None:
        """Store which tasks a new one depends on."""
        for parent_id in parent_ids:
            self._parents.setdefault(parent_id, []).append(row.id)

    def close_gate(self, closure: GateClosure) -> None:
        """Remember a closed gate; one that is closed for longer stays so."""
        known = self._closures.get(closure.part) or _closure(self.transaction, closure.part)
        if known is None or _closes_longer(closure, known):
            self._closures[closure.part] = closure

    def settle_money(
        self,
        reservation_id: str | None,
        *,
        tokens: int,
        micro_usd: int,
        tenant: Tenant | None = None,
    ) -> None:
        """Book what an attempt cost, here or at the ledger outside; nothing gives it all back."""
        if not reservation_id:
            return
        call = Call.COMMIT if tokens or micro_usd else Call.RELEASE
        if not self.keeps_ledger:
            # Without a project an empty text says that it is a claim all the same.
            bound = (None, None) if tenant is None else (tenant.project_id or "", tenant.agent_id)
            self._outbox.append((reservation_id, call.value, micro_usd, tokens, *bound))
            return
        request = SettleRequest(
            reservation_id=reservation_id,
            call=call,
            micro_usd=MicroUsd(micro_usd),
            tokens=Tokens(tokens),
            tenant=tenant,
        )
        # The ledger may have closed it, or forgotten it a day after its lease ended: then what was
        # held is booked already, and the task must end all the same.
        with suppress(IllegalSettlementError):
            self.ledger.settle(request, self.now)

    def learn(self, kind: Kind, sample: Sample) -> None:
        """Learn what a kind of work costs from an attempt that ended."""
        self._samples.append((kind, sample))

    def mark_dispatched(self, reservation_id: str | None) -> bool:
        """Note that the provider is about to be called; False if the money is not held any more."""
        if not reservation_id or not self.keeps_ledger:
            return True
        request = SettleRequest(reservation_id=reservation_id, call=Call.DISPATCHED)
        try:
            self.ledger.settle(request, self.now)
        except IllegalSettlementError:
            return False
        return True

    def file_delivery(self, row: TaskRow, url: str) -> None:
        """File what tells an address of the end of a task."""
        event = TASK_EVENTS[row.status.value]
        filed = delivery_row(
            message_id(row.id),
            event=event,
            url=url,
            now=self.now,
            task_id=row.id,
            project_id=row.project_id,
        )
        self._deliveries.append(filed)

    def notify(self, node_id: str, kind: nodes.Kind, task_id: str) -> None:
        """Leave a message for a node; a worker looks at the tasks that it has."""
        if is_worker(node_id):
            self._called.add(node_id)
        else:
            self._messages.append((node_id, kind, task_id))

    def give_to_worker(self, node_id: str, task_id: str) -> None:
        """Note that a worker has a task."""
        self._given.append((node_id, task_id))

    def take_from_worker(self, node_id: str, task_id: str) -> None:
        """Note that a worker does not have a task any more."""
        self._taken.append((node_id, task_id))

    def call(self, recipient: str) -> None:
        """Have a recipient look for itself when this is written."""
        self._called.add(recipient)

    def notify_dispatcher(self, rows: Iterable[TaskRow], *, by: str) -> None:
        """Have the dispatcher look at tasks, unless it is the node that changed them.

        While nobody dispatches nobody is told: whoever is elected next reads everything.
        """
        changed = [row.id for row in rows]
        if changed and self.election.node_id not in (nodes.NOBODY, by):
            self._messages += [(DISPATCHER, nodes.Kind.CHANGED, task_id) for task_id in changed]

    def notify_dispatcher_of_worker(self, worker_id: str) -> None:
        """Have the dispatcher look at a worker that joins, leaves, or takes more or fewer tasks."""
        if self.election.node_id != nodes.NOBODY:
            self._messages.append((DISPATCHER, nodes.Kind.CHANGED, worker_id))

    def write(self) -> None:
        """Write everything that the steps have changed."""
        transaction = self.transaction
        for ended in self._ended:
            size_bytes = ended.submitted_bytes
            self.counters.take_up(ended.project_id, -size_bytes)
            is_refused = ended.status is TaskStatus.REJECTED
            kept_bytes = size_bytes + ended.result_bytes
            self.counters.keep(ended.project_id, 1, kept_bytes, refused=int(is_refused))
        inserts = [
            (TASK_ROWS, [from_task_row(row) for row in self._changed.values()]),
            (INPUTS, self._inputs),
            (PARENTS, [(parent, child) for parent, its in self._parents.items() for child in its]),
            (CLOSURES, closure_rows(self._closures.values())),
            (OUTBOX, self._outbox),
            (DELIVERY_ROWS, self._deliveries),
            *self.counters.rows(),
            (WORKER_TASKS, self._given),
        ]
        if self.keeps_ledger:
            ledger.drop_emptied(transaction, self.ledger)
            inserts += ledger.changed_rows(self.ledger, self.now)
        if self._samples:
            inserts.append((ESTIMATE_ROWS, learned_rows(transaction, self._samples, self.now)))
        # A task that one worker gives up and another gets is taken from the first one first.
        for pair in self._taken:
            transaction.run(_TAKE_FROM_WORKER, pair)
        transaction.insert_all(inserts)
        if self._messages:
            nodes.post(transaction, self._messages)
        if self._called:
            nodes.call(transaction, self._called)
        if self._cache is not None:
            for row in self._rows.values():
                if row is not None and not row.is_terminal:
                    self._cache.put(row)


def learned_rows(
    transaction: Transaction, samples: Sequence[tuple[Kind, Sample]], now: float
) -> list[Row]:
    """Return what is known of these kinds of work with the samples added, as rows to write.

    A new kind takes the place of those of its project that were fed longest ago, beyond a number.
    """
    fed = {one: None for kind, sample in samples for one in sample.kinds(kind)}
    found = transaction.read(_LEARNED, [tuple(kind) for kind in fed])
    known = {Kind(*row[:3]): _learned.decode(row[3]) for row in found}
    new = [kind for kind in fed if kind not in known]
    for project_id in {kind.project_id for kind in new}:
        _forget_kinds(transaction, project_id, sum(one.project_id == project_id for one in new))
    for kind, sample in samples:
        for one in sample.kinds(kind):
            sample.feed(known.setdefault(one, Learned()), is_own=one == kind)
    return [(*kind, now, _text(known[kind])) for kind in fed]


def _forget_kinds(transaction: Transaction, project_id: str, more: int) -> None:
    sql = "SELECT COUNT(*) FROM estimates WHERE project_id = ?"
    excess = transaction.read(sql, (project_id,))[0][0] + more - MAX_KINDS
    if excess > 0:
        transaction.run(_FORGET_KINDS, (project_id, project_id, excess))


def read_learned(transaction: Transaction) -> tuple[tuple[Kind, Learned], ...]:
    """Return all that is known of kinds of work, those that were fed longest ago first."""
    sql = "SELECT project_id, name, action, learned FROM estimates ORDER BY fed_at"
    return tuple([(Kind(*row[:3]), _learned.decode(row[3])) for row in transaction.read(sql)])


def read_submissions(transaction: Transaction, task_ids: Sequence[str]) -> dict[str, Submission]:
    """Read what tasks were given to do."""
    rows = transaction.read(_INPUTS, task_ids)
    return {task_id: to_submission(text) for task_id, text in rows}


def closure_rows(closures: Iterable[GateClosure]) -> list[Row]:
    """Return closed gates as rows that replace what was known of them."""
    return [
        (
            closure.kind,
            closure.name,
            closure.until,
            closure.why,
            closure.cause,
            closure.by,
            closure.task_id,
            closure.since,
        )
        for closure in closures
    ]


def _closure(transaction: Transaction, part: GatePart) -> GateClosure | None:
    sql = "SELECT closed_until, why FROM gate_closures WHERE kind = ? AND name = ?"
    rows = transaction.read(sql, part)
    if not rows:
        return None
    return GateClosure(kind=part.kind, name=part.name, until=rows[0][0], why=rows[0][1])


def _closes_longer(closure: GateClosure, known: GateClosure) -> bool:
    if closure.until is None or known.until is None:
        return closure.until is None
    return closure.until > known.until
