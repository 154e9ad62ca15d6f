"""What keeps the tables of a task store from growing: everything in them ends, and then goes.

An ended task goes when its time is over, or when there are too many, and nothing needs it any more;
the row says since when that is so, except for a webhook: until a first try its body is made from
the task. The rest goes by age: usage by its own times, rate counts after their window, closures
with their time, and lanes that are empty and were not served for long, or never: anybody can make
a lane by naming an agent. What had happened in a lane is added to a sum of its project.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from headgate.core.budgets.ledger import Account, SettleRequest
from headgate.core.budgets.reservations import Call
from headgate.core.budgets.scopes import Tenant
from headgate.core.lane_index import NEVER_SERVED
from headgate.core.rate_limits import BUCKETS_PER_WINDOW
from headgate.core.retention import (
    BY_AGE,
    BY_NUMBER,
    EVICTION_ORDER,
    EVICTION_RANKS,
    SHARES_KEPT_SECONDS,
    Evicted,
    Retention,
    RetentionCut,
    cut_of,
    excess,
    usage_kept_since,
)
from headgate.core.task import Progress, TaskStatus, task_holding
from headgate.storage import ledger, usage
from headgate.storage.schema import CUTS
from headgate.storage.task_ids import seconds_of
from headgate.storage.transaction import Access, Dialect, Lookup, Transaction, about
from headgate.storage.unit_of_work import COUNTERS, ENDED, HAPPENINGS, KEPT, parents_in

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
    "SELECT id, octet_length(spec) + octet_length(progress) + COALESCE(octet_length(result), 0)"  # noqa: S608
    " + COALESCE(octet_length(error), 0) + COALESCE((SELECT octet_length(submission)"
    " FROM task_inputs AS given WHERE given.id = tasks.id), 0) FROM tasks"
    " WHERE eviction_rank = ? AND evictable_since IS NOT NULL AND evictable_since <= ?"
    f" AND NOT EXISTS ({_IS_UNTOLD}) ORDER BY evictable_since, id LIMIT ?"
)
_DELETE = Lookup(
    lambda dialect: f"DELETE FROM tasks WHERE id IN {dialect.texts} RETURNING id, spec",  # noqa: S608
    one="DELETE FROM tasks WHERE id = ? RETURNING id, spec",
)
_KEPT = about("SELECT COALESCE(SUM(amount), 0) FROM counters", "name")
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


def evict(transaction: Transaction, now: float, *, retention: Retention, limit: int) -> Evicted:
    """Delete ended tasks that nothing needs, as many as one step may."""
    step = _Eviction(transaction, limit)
    for status in EVICTION_ORDER:
        step.delete(status, ended_by=now - retention.seconds, most=limit)
    step.cut(BY_AGE, retention)
    if retention.max_tasks is not None and not step.is_full:
        kept = int(transaction.read(_KEPT, list(KEPT.values()))[0][0])
        too_many = excess(kept - step.deleted, retention)
        for status in EVICTION_ORDER:
            too_many -= step.delete(status, ended_by=now, most=too_many)
        step.cut(BY_NUMBER, retention)
    step.count_out()
    has_more = step.is_full
    # Also where some went: a busy service at its cap deletes a few at every step.
    if not has_more and transaction.dialect is Dialect.SQLITE:
        has_more = _give_back_pages(transaction)
    return Evicted(tasks=step.deleted, has_more=has_more)


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


class _Eviction:
    """One step of deleting, bounded in tasks and in bytes."""

    def __init__(self, transaction: Transaction, limit: int) -> None:
        self._transaction = transaction
        self._limit = limit
        self._bytes = 0
        self._by_status: dict[TaskStatus, int] = {}
        self._last_id = ""
        self.deleted = 0

    @property
    def is_full(self) -> bool:
        """Whether this step has done as much as one may."""
        return self.deleted >= self._limit or self._bytes >= MAX_EVICTED_BYTES

    def delete(self, status: TaskStatus, *, ended_by: float, most: int) -> int:
        """Delete the oldest that ended so, and return how many."""
        most = min(most, self._limit - self.deleted)
        if most <= 0 or self.is_full:
            return 0
        found = self._transaction.read(_OLDEST, (EVICTION_RANKS[status], ended_by, most))
        ids: list[str] = []
        for task_id, size_bytes in found:
            if self.is_full:
                break
            ids.append(task_id)
            self._bytes += size_bytes
        if not ids:
            return 0
        rows = self._transaction.read(_DELETE, ids)
        self._transaction.run(_FORGET_INPUTS, ids)
        self._transaction.run(_FORGET_CHILDREN, ids)
        pairs = [(parent, task_id) for task_id, spec in rows for parent in parents_in(spec)]
        if pairs:
            self._transaction.run(_PART, pairs)
        self.deleted += len(ids)
        self._by_status[status] = self._by_status.get(status, 0) + len(ids)
        ours = (task_id for task_id in ids if seconds_of(task_id) is not None)
        self._last_id = max(self._last_id, *ours, "")
        return len(ids)

    def cut(self, setting: str, retention: Retention) -> None:
        """Note how far a setting has deleted, if it has."""
        if self._last_id:
            row = (setting, retention.value_of(setting), self._last_id)
            self._transaction.insert(CUTS, [row])
        self._last_id = ""

    def count_out(self) -> None:
        """Count what was deleted out of what is kept."""
        gone = [(KEPT[ENDED[status]], -many) for status, many in self._by_status.items()]
        self._transaction.insert(COUNTERS, gone)


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
            # Whoever is bound to nothing claims nothing that is not its own.
            tenant=Tenant(project_id=row[4], agent_id=row[5]) if row[4] or row[5] else None,
        )
        for row in transaction.read(_READ, (limit,))
    ]


def forget(transaction: Transaction, reservation_ids: Sequence[str]) -> None:
    """Forget settlements that the ledger has answered."""
    transaction.run(_FORGET, reservation_ids)
