"""What keeps the tables of a task store from growing: everything in them ends, and then goes.

A result goes when its time is over and nothing needs it any more; the row says since when that is
so, except for a webhook: until a first try its body is made from the task. The rest goes by age:
usage after thirty days, rate counts after their window, closures with their time, and lanes that
are empty and were not served for long, or never: anybody can make a lane by naming an agent. What
had happened in a lane is added to a sum of its project.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from headgate.core.budgets.ledger import Account, SettleRequest
from headgate.core.budgets.reservations import Call
from headgate.core.lane_index import NEVER_SERVED
from headgate.core.rate_limits import BUCKETS_PER_WINDOW
from headgate.core.retention import usage_kept_since
from headgate.storage import ledger, usage
from headgate.storage.transaction import Access, Lookup, Transaction, about
from headgate.storage.unit_of_work import HAPPENINGS, parents_in

LANE_KEPT_TICKS = 10_000

_EVICT = (
    "DELETE FROM tasks WHERE id IN (SELECT id FROM tasks WHERE evictable_since IS NOT NULL"
    " AND evictable_since < ? AND NOT EXISTS (SELECT 1 FROM deliveries WHERE deliveries.id ="
    " 'msg_' || replace(tasks.id, 'tsk_', '') AND deliveries.state = 'pending' AND NOT EXISTS"
    " (SELECT 1 FROM delivery_bodies WHERE delivery_bodies.id = deliveries.id))"
    " ORDER BY evictable_since LIMIT ?) RETURNING id, spec"
)
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


def evict(transaction: Transaction, *, completed_before: float, limit: int) -> int:
    """Forget ended tasks that nothing needs, oldest first, and return how many."""
    rows = transaction.read(_EVICT, (completed_before, limit))
    if rows:
        ids = [task_id for task_id, _ in rows]
        transaction.run(_FORGET_INPUTS, ids)
        transaction.run(_FORGET_CHILDREN, ids)
        pairs = [(parent, task_id) for task_id, spec in rows for parent in parents_in(spec)]
        if pairs:
            transaction.run(_PART, pairs)
    return len(rows)


def purge(transaction: Transaction, now: float) -> None:
    """Forget counts that are too old to matter."""
    transaction.run("DELETE FROM project_usage WHERE hour < ?", (int(usage_kept_since(now)),))
    usage.purge(transaction, now)
    transaction.run("DELETE FROM gate_closures WHERE closed_until <= ?", (now,))
    transaction.run(_PURGE_RATES, (2 * BUCKETS_PER_WINDOW,))
    for statement in (_FOLD_LANES, _PURGE_LANES):
        transaction.run(statement, (LANE_KEPT_TICKS,))


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
    "SELECT reservation_id, call, micro_usd, tokens FROM ledger_outbox"
    " ORDER BY reservation_id LIMIT ?"
)


def unsent(transaction: Transaction, *, limit: int) -> list[SettleRequest]:
    """Return settlements that have not been answered."""
    return [
        SettleRequest(
            reservation_id=reservation_id, call=Call(call), micro_usd=micro_usd, tokens=tokens
        )
        for reservation_id, call, micro_usd, tokens in transaction.read(_READ, (limit,))
    ]


def forget(transaction: Transaction, reservation_ids: Sequence[str]) -> None:
    """Forget settlements that the ledger has answered."""
    transaction.run(_FORGET, reservation_ids)
