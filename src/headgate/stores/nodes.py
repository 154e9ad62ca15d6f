"""Which nodes are alive: one row a life, with a lease that the node renews while it lives.

The lease of a node covers all that it runs; tasks have none of their own.

Rule: a life ends once. When somebody has acted on the end of a lease, or the node itself has asked
too late, the row is gone, and a node without a row is not alive. So a clock that is set back
revives nobody, and a process that comes back joins under a new id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from headgate.core.tasks.records import is_worker
from headgate.databases.transaction import Dialect, Transaction, json_rows
from headgate.errors import LimitReachedError
from headgate.store import Beat, Node

FORGOTTEN_AFTER_SECONDS = 86_400.0
"""When nodes that died with nothing to run are forgotten, counted from the end of their lease."""

FORGOTTEN_AFTER_LEASES = 3
"""The same for workers, in leases: a client that never says its name joins with every claim."""

MAX_WORKERS_PER_AGENT = 1_000
"""How many workers of an agent may be alive."""

# A repeat of a join whose answer got lost finds the row, and changes nothing.
_JOIN = (
    "INSERT INTO nodes (id, places, address, lease_until) VALUES (?, ?, ?, ?)"
    " ON CONFLICT (id) DO NOTHING"
)
_RENEW = "UPDATE nodes SET places = ?, lease_until = ? WHERE id = ? AND lease_until > ?"
_LIVE = (
    "SELECT id, places, address, lease_until, COALESCE(workers.agent_id, '') FROM nodes"
    " LEFT JOIN workers ON workers.node_id = nodes.id WHERE lease_until > ? ORDER BY id"
)
_IS_WORKER = "id IN (SELECT workers.node_id FROM workers)"
_ALIVE_NODES = f"SELECT 1 FROM nodes WHERE NOT {_IS_WORKER} AND lease_until > ? LIMIT 1"  # noqa: S608
_SERVE = (
    "INSERT INTO workers (node_id, agent_id, lease_seconds, offered_until) VALUES (?, ?, ?, ?)"
    " ON CONFLICT (node_id) DO NOTHING"
)
_OFFER = (
    "SELECT places, offered_until FROM nodes JOIN workers ON workers.node_id = nodes.id"
    " WHERE id = ? AND agent_id = ? AND lease_until > ?"
)
_OTHERS = (
    "SELECT COUNT(*) FROM workers JOIN nodes ON nodes.id = workers.node_id"
    " WHERE agent_id = ? AND node_id <> ? AND lease_until > ?"
)
_LONG_DEAD_NODES = f"SELECT id FROM nodes WHERE lease_until <= ? AND NOT {_IS_WORKER}"  # noqa: S608
_LONG_DEAD_WORKERS = (
    "SELECT id FROM nodes JOIN workers ON workers.node_id = nodes.id"
    " WHERE lease_until + ? * lease_seconds <= ?"
)
_GRACE = (
    "UPDATE nodes SET lease_until = ? + (SELECT workers.lease_seconds FROM workers"  # noqa: S608
    f" WHERE workers.node_id = nodes.id) WHERE {_IS_WORKER}"
    " AND lease_until < ? + (SELECT workers.lease_seconds FROM workers"
    " WHERE workers.node_id = nodes.id)"
)


def join(transaction: Transaction, node: Node, lease_until: float) -> None:
    """Take up a node under an id that no life had before."""
    transaction.run(_JOIN, (node.id, node.places, node.address, lease_until))
    rows = transaction.read(_LONG_DEAD_NODES, (lease_until - FORGOTTEN_AFTER_SECONDS,))
    _forget(transaction, [row[0] for row in rows])


def join_worker(
    transaction: Transaction, worker: Node, *, now: float, lease_seconds: float
) -> None:
    """Take up a worker of an agent; `LimitReachedError` if that has as many as may be."""
    ((others,),) = transaction.read(_OTHERS, (worker.agent_id, worker.id, now))
    if others >= MAX_WORKERS_PER_AGENT:
        problem = f"agent {worker.agent_id!r} has {others} workers"
        problem += "; a worker that claims again says its workerId"
        raise LimitReachedError(problem)
    lease_until = now + lease_seconds
    transaction.run(_SERVE, (worker.id, worker.agent_id, lease_seconds, lease_until))
    transaction.run(_JOIN, (worker.id, worker.places, worker.address, lease_until))
    # A worker that joins sees to the workers: their leases end also where those of nodes do not.
    rows = transaction.read(_LONG_DEAD_WORKERS, (float(FORGOTTEN_AFTER_LEASES), now))
    _forget(transaction, [row[0] for row in rows])


class Offer(NamedTuple):
    """How many places a worker has offered, and until when that counts."""

    places: int
    until: float


def offer_of(transaction: Transaction, worker_id: str, agent_id: str, now: float) -> Offer | None:
    """Return what a worker of this agent that is alive has offered; None if there is none."""
    rows = transaction.read(_OFFER, (worker_id, agent_id, now))
    return Offer(*rows[0]) if rows else None


def renew_worker(
    transaction: Transaction, worker_id: str, *, places: int, lease_until: float, offers: bool
) -> None:
    """Renew the lease of a worker, and its offer if it makes one."""
    transaction.run(
        "UPDATE nodes SET places = ?, lease_until = ? WHERE id = ?",
        (places, lease_until, worker_id),
    )
    if offers:
        transaction.run(
            "UPDATE workers SET offered_until = ? WHERE node_id = ?", (lease_until, worker_id)
        )


def give_grace(transaction: Transaction, now: float) -> None:
    """Renew the leases of all workers, if no process of the service was there to renew them.

    Whoever comes first after an outage does this: workers that went on working have lost nothing.
    """
    if not transaction.read(_ALIVE_NODES, (now,)):
        transaction.run(_GRACE, (now, now))


def forget_others(transaction: Transaction, node_id: str) -> None:
    """Take out every other node, where only one process can be alive at a time; workers stay."""
    others = f"SELECT id FROM nodes WHERE id <> ? AND NOT {_IS_WORKER}"  # noqa: S608
    rows = transaction.read(others, (node_id,))
    _forget(transaction, [row[0] for row in rows])


def beat(
    transaction: Transaction, node_id: str, *, places: int, now: float, lease_seconds: float
) -> Beat:
    """Renew a lease that has not ended; otherwise the node is not alive, now or later."""
    lease_until = now + lease_seconds
    if transaction.write(_RENEW, (places, lease_until, node_id, now)):
        return Beat(is_alive=True, lease_until=lease_until)
    _forget(transaction, [node_id])
    return Beat(is_alive=False, lease_until=0.0)


def leave(transaction: Transaction, node_id: str) -> None:
    """Take a node out, with what it was told and has not read."""
    _forget(transaction, [node_id])


def live(transaction: Transaction, now: float) -> tuple[Node, ...]:
    """Return the nodes whose lease has not ended, by id."""
    rows = transaction.read(_LIVE, (now,))
    return tuple(
        Node(
            id=node_id,
            places=places,
            address=address,
            lease_until=lease_until,
            agent_id=agent_id,
        )
        for node_id, places, address, lease_until, agent_id in rows
    )


def lease_ended(transaction: Transaction, node_ids: Iterable[str], now: float) -> set[str]:
    """Return which of these nodes are not alive, and see to it that they stay so."""
    asked = set(node_ids)
    rows = transaction.read(_alive_sql(transaction.dialect), (_texts(asked), now))
    ended = asked - {row[0] for row in rows}
    _forget(transaction, sorted(ended))
    return ended


def _forget(transaction: Transaction, node_ids: Sequence[str]) -> None:
    if node_ids:
        texts = _texts(node_ids)
        transaction.run(_delete_sql(transaction.dialect, "nodes", "id"), (texts,))
        transaction.run(_delete_sql(transaction.dialect, "messages", "recipient"), (texts,))
        workers = [(node_id,) for node_id in node_ids if is_worker(node_id)]
        if workers:
            transaction.run(
                _delete_sql(transaction.dialect, "workers", "node_id"), (json_rows(workers),)
            )


def _texts(values: Iterable[str]) -> str:
    return json_rows([(value,) for value in values])


@cache
def _alive_sql(dialect: Dialect) -> str:
    given = dialect.given({"id": "TEXT"})
    return (
        f"SELECT id FROM nodes WHERE id IN (SELECT given.id FROM {given})"  # noqa: S608
        " AND lease_until > ?"
    )


@cache
def _delete_sql(dialect: Dialect, table: str, column: str) -> str:
    given = dialect.given({"id": "TEXT"})
    return f"DELETE FROM {table} WHERE {column} IN (SELECT given.id FROM {given})"  # noqa: S608
