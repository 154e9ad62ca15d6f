"""What keeps the tables of a task store from growing: everything in them ends, and then goes.

An ended task goes when its time is over, or when there are too many, or when the store needs its
room, and nothing needs it any more; the row says since when that is so, except for a webhook: until
a first try its body is made from the task. What is too much is taken from the project that has
most, and of that its ended calls go before its tasks. The rest goes by age: usage by its own times,
rate counts after their window, closures with their time, and lanes that are empty and were not
served for long, or never: anybody can make a lane by naming an agent. What had happened in a lane
is added to a sum of its project.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import msgspec

from headgate.core.budgets.ledger import Account, SettleRequest
from headgate.core.budgets.reservations import Call
from headgate.core.budgets.scopes import Tenant
from headgate.core.lane_index import NEVER_SERVED
from headgate.core.rate_limits import BUCKETS_PER_WINDOW
from headgate.core.retention import (
    BY_AGE,
    BY_NUMBER,
    BY_SIZE,
    EVICTION_ORDER,
    EVICTION_RANKS,
    MAX_ENDED_CALLS,
    MAX_REFUSALS,
    SHARES_KEPT_SECONDS,
    Evicted,
    Retention,
    RetentionCut,
    StoreSize,
    cut_of,
    excess,
    usage_kept_since,
)
from headgate.core.task import Progress, TaskStatus, task_holding
from headgate.storage import call_rows, ledger, task_calls, usage
from headgate.storage.schema import CUTS, TASK_BYTES
from headgate.storage.task_ids import seconds_of
from headgate.storage.transaction import Access, Dialect, Lookup, Transaction, about
from headgate.storage.unit_of_work import ENDED, HAPPENINGS, KEPT, Counters, parents_in

LANE_KEPT_TICKS = 10_000

MAX_EVICTED_BYTES = 8 * 2**20
"""What the tasks of one step may have together: to delete a page costs as much as to write it."""

FREE_PAGES_KEPT = 1_024
FREE_SHARE_KEPT = 0.1
MAX_PAGES_GIVEN_BACK = 500
"""Of the free pages of an SQLite file: how many stay, and how many go in one step."""

_INCREMENTAL = 2

_IS_UNTOLD = (
    "SELECT 1 FROM deliveries WHERE deliveries.id = 'msg_' || replace(tasks.id, 'tsk_', '')"
    " AND deliveries.state = 'pending' AND NOT EXISTS"
    " (SELECT 1 FROM delivery_bodies WHERE delivery_bodies.id = deliveries.id)"
)
_OLDEST = (
    f"SELECT tasks.id, tasks.project_id, {TASK_BYTES} FROM tasks"  # noqa: S608
    " WHERE eviction_rank = ? AND project_id = ?"
    " AND evictable_since IS NOT NULL AND evictable_since <= ?"
    f" AND NOT EXISTS ({_IS_UNTOLD}) ORDER BY evictable_since, id LIMIT ?"
)
# With when the oldest ended that may go, by the ways in which tasks end: so of hundreds of projects
# only those are asked further that have something to delete.
_OLDEST_OF = (
    "(SELECT MIN(evictable_since) FROM tasks WHERE tasks.eviction_rank = {rank}"
    " AND tasks.project_id = project_counts.project_id)"
)
_PROJECTS = (
    "SELECT project_id, ended, ended_bytes, refused, live_bytes, calls, call_bytes, "  # noqa: S608
    + ", ".join(_OLDEST_OF.format(rank=EVICTION_RANKS[status]) for status in EVICTION_ORDER)
    + " FROM project_counts WHERE ended > 0 OR calls > 0 ORDER BY project_id"
)
_FORGET_PROJECTS = (
    "DELETE FROM project_counts WHERE queued = 0 AND scheduled = 0 AND live_bytes = 0"
    " AND ended = 0 AND ended_bytes = 0 AND refused = 0 AND calls = 0 AND call_bytes = 0"
)
_DELETE = Lookup(
    lambda dialect: f"DELETE FROM tasks WHERE id IN {dialect.texts} RETURNING id, spec",  # noqa: S608
    one="DELETE FROM tasks WHERE id = ? RETURNING id, spec",
)
_CUTS = "SELECT setting, amount, task_id FROM retention_cuts"
_PURGE_RATES = (
    "DELETE FROM rate_counts WHERE bucket < (SELECT MAX(newest.bucket) FROM rate_counts AS newest"
    " WHERE newest.limit_id = rate_counts.limit_id) - ?"
)
_IDLE_LANES = (
    " FROM lanes WHERE queued = 0 AND inflight = 0"  # noqa: S608
    # An agent that takes open tasks has work, and yet no lane of its own that is served.
    f" AND ((served_tick = {NEVER_SERVED} AND started = 0 AND completed = 0) OR served_tick <"
    " (SELECT COALESCE(MAX(amount), 0) FROM counters WHERE name = 'tick') - ?)"
)
_FOLD_LANES = (
    f"INSERT INTO forgotten_lanes (project_id, {', '.join(HAPPENINGS)}) SELECT project_id, "
    + ", ".join(f"CAST(SUM({name}) AS BIGINT)" for name in HAPPENINGS)
    + f"{_IDLE_LANES} GROUP BY project_id ON CONFLICT (project_id) DO UPDATE SET "
    + ", ".join(f"{name} = forgotten_lanes.{name} + excluded.{name}" for name in HAPPENINGS)
)
_PURGE_LANES = f"DELETE{_IDLE_LANES}"
_FORGET_INPUTS = about("DELETE FROM task_inputs", "id")
_FORGET_CHILDREN = about("DELETE FROM task_parents", "parent_id")
_PART = Lookup(
    lambda dialect: (
        "DELETE FROM task_parents WHERE (parent_id, task_id) IN"  # noqa: S608
        " (SELECT given.parent_id, given.task_id FROM"
        f" {dialect.given({'parent_id': 'TEXT', 'task_id': 'TEXT'})})"
    )
)


def evict(
    transaction: Transaction,
    now: float,
    *,
    retention: Retention,
    limit: int,
    size: StoreSize | None = None,
) -> Evicted:
    """Delete ended tasks that nothing needs and ended calls, as many as one step may.

    `size` is how large the store is; what it has too much of goes, as well.
    """
    step = _Eviction(transaction, limit)
    projects = [Kept(*row) for row in transaction.read(_PROJECTS)]
    ended_by = now - retention.seconds
    for project in projects:
        for status, oldest in zip(EVICTION_ORDER, project.oldest, strict=True):
            if oldest is not None and oldest <= ended_by:
                step.delete(project, status, ended_by=ended_by, most=limit)
    step.cut(BY_AGE, retention)
    for project in projects:
        too_many = project.refused - MAX_REFUSALS
        step.delete(project, TaskStatus.REJECTED, ended_by=now, most=too_many)
    step.skip_cut()
    if retention.max_tasks is not None:
        too_many = excess(sum(project.ended for project in projects), retention)
        step.delete_too_many(projects, now, too_many)
    step.cut(BY_NUMBER, retention)
    step.delete_calls(projects, now)
    if size is not None:
        step.delete_too_large(projects, now, size.excess_bytes - step.deleted_bytes)
        step.cut(BY_SIZE, retention)
    step.count_out()
    has_more = step.is_full
    # Also where some went: a busy service at its cap deletes a few at every step.
    if not has_more and transaction.dialect is Dialect.SQLITE:
        has_more = _give_back_pages(transaction)
    return Evicted(tasks=step.deleted_tasks, calls=step.deleted_calls, has_more=has_more, size=size)


def _give_back_pages(transaction: Transaction) -> bool:
    """Shorten the file by some of its free pages; return whether there are more to give back.

    A part stays free: what is deleted now is written again soon, and a page that was given back
    would have to be asked for again.
    """
    statements = [
        (f"PRAGMA {name}", ()) for name in ("auto_vacuum", "page_count", "freelist_count")
    ]
    (mode,), (pages,), (free,) = (rows[0] for rows in transaction.read_all(statements))
    surplus = free - max(FREE_PAGES_KEPT, int(pages * FREE_SHARE_KEPT))
    if mode != _INCREMENTAL or surplus <= 0:
        return False
    transaction.read(f"PRAGMA incremental_vacuum({min(surplus, MAX_PAGES_GIVEN_BACK)})")
    return bool(surplus > MAX_PAGES_GIVEN_BACK)


class Kept:
    """What is kept of the ended tasks of a project, and what those take that have not ended.

    Its ended calls are beside them. `oldest` is when the first task ended that nothing needs, for
    each way to end.
    """

    __slots__ = (
        "call_bytes",
        "calls",
        "ended",
        "ended_bytes",
        "live_bytes",
        "oldest",
        "project_id",
        "refused",
    )

    def __init__(
        self,
        project_id: str,
        ended: int,
        ended_bytes: int,
        refused: int,
        live_bytes: int,
        kept_calls: int,
        call_bytes: int,
        *oldest: float | None,
    ) -> None:
        self.project_id = project_id
        self.ended = ended
        self.ended_bytes = ended_bytes
        self.refused = refused
        self.live_bytes = live_bytes
        self.calls = kept_calls
        self.call_bytes = call_bytes
        self.oldest = oldest


def _first_by(projects: Sequence[Kept], amount: Callable[[Kept], int]) -> tuple[Kept, int]:
    """Return the project that has most, and how much it may lose until it has so no more."""
    first = max(projects, key=amount)
    rest = max((amount(one) for one in projects if one is not first), default=0)
    return first, max(1, amount(first) - rest)


class _Eviction:
    """One step of deleting, bounded in tasks and calls, and in bytes."""

    def __init__(self, transaction: Transaction, limit: int) -> None:
        self._transaction = transaction
        self._limit = limit
        self._by_status: dict[TaskStatus, int] = {}
        self._counters = Counters(0.0)
        self._last_id = ""
        self.deleted_tasks = 0
        self.deleted_calls = 0
        self.deleted_bytes = 0

    @property
    def deleted(self) -> int:
        """How many rows this step has deleted."""
        return self.deleted_tasks + self.deleted_calls

    @property
    def is_full(self) -> bool:
        """Whether this step has done as much as one may."""
        return self.deleted >= self._limit or self.deleted_bytes >= MAX_EVICTED_BYTES

    def delete_too_many(self, projects: Sequence[Kept], now: float, excess: int) -> None:
        """Delete so many tasks, each of the project that has most then."""
        found = list(projects)
        while excess > 0 and found and not self.is_full:
            first, lead = _first_by(found, lambda one: one.ended)
            deleted = self._delete_first(first, now, most=min(excess, lead))
            excess -= deleted
            if not deleted:
                # What is left of it is needed by somebody.
                found.remove(first)

    def delete_calls(self, projects: Sequence[Kept], now: float) -> None:
        """Delete calls that are too old, and what are too many of the project that has most."""
        by_id = {one.project_id: one for one in projects}
        if not self.is_full and by_id:
            most = self._limit - self.deleted
            rows = call_rows.delete_old(self._transaction, self._counters, now, most=most)
            task_calls.delete_old(self._transaction, now)
            self._count_calls(by_id, rows)
        too_many = sum(one.calls for one in projects) - MAX_ENDED_CALLS
        while too_many > 0 and not self.is_full:
            first, lead = _first_by(projects, lambda one: one.calls)
            deleted = self._delete_calls_of(first, most=min(too_many, lead))
            if not deleted:
                break
            too_many -= deleted

    def _delete_calls_of(self, project: Kept, *, most: int, most_bytes: float = inf) -> int:
        rows = call_rows.delete_oldest_of(
            self._transaction,
            self._counters,
            project.project_id,
            most=min(most, self._limit - self.deleted),
            most_bytes=min(most_bytes, MAX_EVICTED_BYTES - self.deleted_bytes),
        )
        self._count_calls({project.project_id: project}, rows)
        return len(rows)

    def _count_calls(self, projects: dict[str, Kept], rows: Sequence[tuple[str, int]]) -> None:
        for project_id, size_bytes in rows:
            project = projects.get(project_id)
            if project is not None:
                project.calls -= 1
                project.call_bytes -= size_bytes
            self.deleted_bytes += size_bytes
        self.deleted_calls += len(rows)

    def delete_too_large(self, projects: Sequence[Kept], now: float, excess_bytes: int) -> None:
        """Delete what takes so much, each of the project that takes most then, its calls first."""
        found = list(projects)
        ends_at = self.deleted_bytes + excess_bytes
        while self.deleted_bytes < ends_at and found and not self.is_full:
            first, lead = _first_by(
                found, lambda one: one.ended_bytes + one.live_bytes + one.call_bytes
            )
            most_bytes = min(ends_at - self.deleted_bytes, lead)
            if first.calls and self._delete_calls_of(
                first, most=self._limit, most_bytes=most_bytes
            ):
                continue
            if not self._delete_first(first, now, most=self._limit, most_bytes=most_bytes):
                found.remove(first)

    def _delete_first(
        self, project: Kept, now: float, *, most: int, most_bytes: int | None = None
    ) -> int:
        """Delete what goes first of a project, and return how many."""
        for status in EVICTION_ORDER:
            deleted = self.delete(project, status, ended_by=now, most=most, most_bytes=most_bytes)
            if deleted:
                return deleted
        return 0

    def delete(
        self,
        project: Kept,
        status: TaskStatus,
        *,
        ended_by: float,
        most: int,
        most_bytes: int | None = None,
    ) -> int:
        """Delete the oldest of a project that ended so, and return how many."""
        most = min(most, self._limit - self.deleted)
        if most <= 0 or self.is_full:
            return 0
        asked = (EVICTION_RANKS[status], project.project_id, ended_by, most)
        ids: list[str] = []
        size, enough_bytes = 0, inf if most_bytes is None else most_bytes
        for task_id, _, size_bytes in self._transaction.read(_OLDEST, asked):
            if self.deleted_bytes >= MAX_EVICTED_BYTES or size >= enough_bytes:
                break
            ids.append(task_id)
            size += size_bytes
            self.deleted_bytes += size_bytes
        if not ids:
            return 0
        rows = self._transaction.read(_DELETE, ids)
        self._transaction.run(_FORGET_INPUTS, ids)
        self._transaction.run(_FORGET_CHILDREN, ids)
        pairs = [(parent, task_id) for task_id, spec in rows for parent in parents_in(spec)]
        if pairs:
            self._transaction.run(_PART, pairs)
        self._count(project, status, len(ids), size)
        ours = (task_id for task_id in ids if seconds_of(task_id) is not None)
        self._last_id = max(self._last_id, *ours, "")
        return len(ids)

    def _count(self, project: Kept, status: TaskStatus, tasks: int, size_bytes: int) -> None:
        refused = tasks if status is TaskStatus.REJECTED else 0
        project.ended -= tasks
        project.ended_bytes -= size_bytes
        project.refused -= refused
        self.deleted_tasks += tasks
        self._by_status[status] = self._by_status.get(status, 0) + tasks
        self._counters.keep(project.project_id, -tasks, -size_bytes, refused=-refused)

    def cut(self, setting: str, retention: Retention) -> None:
        """Note how far a setting has deleted, if it has."""
        if self._last_id:
            row = (setting, retention.value_of(setting), self._last_id)
            self._transaction.insert(CUTS, [row])
        self._last_id = ""

    def skip_cut(self) -> None:
        """Note nothing of what was deleted: a refusal that goes early is as if it never was."""
        self._last_id = ""

    def count_out(self) -> None:
        """Count what was deleted out of what is kept."""
        for status, many in self._by_status.items():
            self._counters.count(KEPT[ENDED[status]], -many)
        if self.deleted:
            self._transaction.insert_all(self._counters.rows())


def deleted_by(transaction: Transaction, *, task_id: str) -> RetentionCut | None:
    """Return what deleted a task that is not there; None of one that never was."""
    if seconds_of(task_id) is None:
        return None
    cuts = [
        RetentionCut(setting=setting, value=amount, task_id=last)
        for setting, amount, last in transaction.read(_CUTS)
    ]
    return cut_of(task_id, cuts)


def purge(transaction: Transaction, now: float) -> None:
    """Forget counts that are too old to matter."""
    hour = int(usage_kept_since(now, kept_seconds=SHARES_KEPT_SECONDS))
    transaction.run("DELETE FROM project_usage WHERE hour < ?", (hour,))
    usage.purge(transaction, now)
    transaction.run("DELETE FROM gate_closures WHERE closed_until <= ?", (now,))
    transaction.run(_PURGE_RATES, (2 * BUCKETS_PER_WINDOW,))
    transaction.run(_FORGET_PROJECTS, ())
    for statement in (_FOLD_LANES, _PURGE_LANES):
        transaction.run(statement, (LANE_KEPT_TICKS,))


# Money that a task holds has no lease of its own: whatever ends the attempt settles it in the same
# transaction. So a live reservation without an attempt is left over from another configuration or
# from a fault, and nobody else would ever end it.

HOLDERS_PER_STEP = 500

_HOLDERS = about("SELECT state, progress FROM tasks", "id")
_IN_FLIGHT = frozenset({TaskStatus.ASSIGNED.value, TaskStatus.RUNNING.value})
_progresses = msgspec.json.Decoder(Progress)


def end_orphans(transaction: Transaction, now: float, *, after: str = "") -> str:
    """End reservations whose task does not hold them any more, for some after the given one.

    Returns the reservation to go on after, empty at the end.
    """
    found = ledger.without_lease(transaction, after=after, most=HOLDERS_PER_STEP)
    if not found:
        return ""
    task_ids = list({task_holding(one.id) for one in found})
    held = {
        _progresses.decode(progress).reservation_id
        for state, progress in transaction.read(_HOLDERS, task_ids)
        if state in _IN_FLIGHT
    }
    ledger.end_now(transaction, [one for one in found if one.id not in held], now)
    return found[-1].id if len(found) == HOLDERS_PER_STEP else ""


# The scopes that have a limit, with what they have used, some at a time.

MOST_READ = 500


class SqlAccounts:
    """Reads the accounts with limits from the ledger beside the tasks."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def after(self, scope: str | None) -> list[Account]:
        """Return the next accounts behind a scope, from the first on; none at the end."""
        now = self._access.now()
        question = partial(ledger.limited_accounts, now=now, after=scope, most=MOST_READ)
        return await self._access.ask(question)


# The outbox: settlements that a ledger outside the store has yet to be told.
#
# A row is written with the outcome it belongs to, and goes when the ledger has answered. A ledger
# that hears of one twice recognises it by its reservation.

_FORGET = about("DELETE FROM ledger_outbox", "reservation_id")
_READ = (
    "SELECT reservation_id, call, micro_usd, tokens, claimed_for_project, claimed_for_agent"
    " FROM ledger_outbox"
    " ORDER BY reservation_id LIMIT ?"
)


def unsent(transaction: Transaction, *, limit: int) -> list[SettleRequest]:
    """Return settlements that have not been answered."""
    return [
        SettleRequest(
            reservation_id=row[0],
            call=Call(row[1]),
            micro_usd=row[2],
            tokens=row[3],
            # No claim has no project, not even an empty one.
            tenant=None if row[4] is None else Tenant(project_id=row[4] or None, agent_id=row[5]),
        )
        for row in transaction.read(_READ, (limit,))
    ]


def forget(transaction: Transaction, reservation_ids: Sequence[str]) -> None:
    """Forget settlements that the ledger has answered."""
    transaction.run(_FORGET, reservation_ids)
