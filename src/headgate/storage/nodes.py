"""Which nodes are alive: one row a life, with a lease that the node renews while it lives.

The lease of a node covers all that it runs; tasks have none of their own.

Rule: a life ends once, when somebody acts on the end of its lease: whoever takes its tasks back
deletes the row, and a node without a row is not alive. So a clock that is set back revives nobody
who was acted on, and such a process joins under a new id. A lease that has ended and that nobody
acted on can be renewed: the node comes late, and has lost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple, cast

from headgate.core.gates import GateKind, GatePart
from headgate.core.task import is_worker
from headgate.errors import LimitReachedError, StaleEpochError
from headgate.storage.store import Beat, Election, Node
from headgate.storage.transaction import Dialect, Insert, Row, Statement, Transaction, about

FORGOTTEN_AFTER_SECONDS = 86_400.0
"""When nodes that died with nothing to run are forgotten, counted from the end of their lease."""

FORGOTTEN_AFTER_LEASES = 3
"""The same for workers, in leases: a client that never says its name joins with every claim."""

MAX_WORKERS_PER_AGENT = 10_000
"""How many workers of an agent may be alive."""

# A repeat of a join whose answer got lost finds the row, and changes nothing.
_JOIN = (
    "INSERT INTO nodes (id, capacity, address, lease_until) VALUES (?, ?, ?, ?)"
    " ON CONFLICT (id) DO NOTHING"
)
_RENEW = "UPDATE nodes SET capacity = ?, lease_until = ? WHERE id = ? AND lease_until > ?"
_RENEW_LATE = "UPDATE nodes SET capacity = ?, lease_until = ? WHERE id = ?"
# It says nothing of capacity, so that one which is leaving goes on leaving.
_KEEP = "UPDATE nodes SET lease_until = ? WHERE id = ? AND lease_until > ?"
_KEEP_LATE = "UPDATE nodes SET lease_until = ? WHERE id = ?"
_LIVE = (
    "SELECT id, capacity, address, lease_until, COALESCE(workers.agent_id, '') FROM nodes"
    " LEFT JOIN workers ON workers.node_id = nodes.id WHERE lease_until > ? ORDER BY id"
)
_CHANGED_WORKERS = about(
    "SELECT id, capacity, address, lease_until, agent_id FROM nodes"
    " JOIN workers ON workers.node_id = nodes.id",
    "id",
)
_WORKER_TOTALS = (
    "SELECT COUNT(*), COALESCE(SUM(capacity), 0) FROM workers"
    " JOIN nodes ON nodes.id = workers.node_id WHERE lease_until > ?"
)
_IS_WORKER = "id IN (SELECT workers.node_id FROM workers)"
_LIVE_NODES = (
    "SELECT id, capacity, address, lease_until, '' FROM nodes"  # noqa: S608
    f" WHERE lease_until > ? AND NOT {_IS_WORKER} ORDER BY id"
)
_ALIVE_NODES = f"SELECT 1 FROM nodes WHERE NOT {_IS_WORKER} AND lease_until > ? LIMIT 1"  # noqa: S608
_HEIRS = (
    f"SELECT 1 FROM nodes WHERE NOT {_IS_WORKER} AND id <> ? AND capacity > 0"  # noqa: S608
    " AND lease_until > ? LIMIT 1"
)
_SERVE = (
    "INSERT INTO workers (node_id, agent_id, lease_seconds, offered_until) VALUES (?, ?, ?, ?)"
    " ON CONFLICT (node_id) DO NOTHING"
)
_KNOWN_WORKERS = about(
    "SELECT id, agent_id, capacity, address, lease_until, lease_seconds, offered_until FROM nodes"
    " JOIN workers ON workers.node_id = nodes.id",
    "id",
)
_LIVE_OF_AGENT = (
    "SELECT COUNT(*) FROM workers JOIN nodes ON nodes.id = workers.node_id"
    " WHERE agent_id = ? AND lease_until > ?"
)
_RENEW_WORKERS = Insert(
    table="nodes",
    columns=(
        ("id", "TEXT"),
        ("capacity", "INTEGER"),
        ("address", "TEXT"),
        ("lease_until", "DOUBLE PRECISION"),
    ),
    key=("id",),
    updated=("capacity", "lease_until"),
)
_RENEW_OFFERS = Insert(
    table="workers",
    columns=(
        ("node_id", "TEXT"),
        ("agent_id", "TEXT"),
        ("lease_seconds", "DOUBLE PRECISION"),
        ("offered_until", "DOUBLE PRECISION"),
    ),
    key=("node_id",),
    updated=("offered_until",),
)
_LONG_DEAD_NODES = f"SELECT id FROM nodes WHERE lease_until <= ? AND NOT {_IS_WORKER}"  # noqa: S608
_LONG_DEAD_WORKERS = (
    "SELECT id FROM nodes JOIN workers ON workers.node_id = nodes.id"
    " WHERE lease_until + ? * lease_seconds <= ?"
)
_LEASES = about("SELECT id, lease_until FROM nodes", "id")
_FORGET_NODES = about("DELETE FROM nodes", "id")
_FORGET_MESSAGES = about("DELETE FROM messages", "recipient")
_FORGET_WORKERS = about("DELETE FROM workers", "node_id")
# Those that were alive when the node that comes late was last heard of.
_GRACE_NODES = f"UPDATE nodes SET lease_until = ? WHERE NOT {_IS_WORKER} AND lease_until > ?"  # noqa: S608
_GRACE_WORKERS = (
    "UPDATE nodes SET lease_until = ? + (SELECT workers.lease_seconds FROM workers"  # noqa: S608
    f" WHERE workers.node_id = nodes.id) WHERE {_IS_WORKER}"
    " AND lease_until < ? + (SELECT workers.lease_seconds FROM workers"
    " WHERE workers.node_id = nodes.id)"
)


def join(transaction: Transaction, node: Node, lease_until: float) -> None:
    """Take up a node under an id that no life had before."""
    transaction.run(_JOIN, (node.id, node.capacity, node.address, lease_until))
    rows = transaction.read(_LONG_DEAD_NODES, (lease_until - FORGOTTEN_AFTER_SECONDS,))
    _forget(transaction, [row[0] for row in rows])


class KnownWorker(NamedTuple):
    """A worker as its rows have it: what it has offered, and until when that counts."""

    id: str
    agent_id: str
    capacity: int
    address: str
    lease_until: float
    lease_seconds: float
    offered_until: float


def known_workers(transaction: Transaction, worker_ids: Sequence[str]) -> dict[str, KnownWorker]:
    """Return those of some workers that have a row, by id; their leases may have ended."""
    rows = transaction.read(_KNOWN_WORKERS, worker_ids)
    return {row[0]: KnownWorker(*row) for row in rows}


class Room:
    """How many workers of an agent are alive, counted once for all that visit together."""

    def __init__(self, transaction: Transaction, now: float) -> None:
        self._transaction = transaction
        self._now = now
        self._alive: dict[str, int] = {}
        self._has_forgotten = False

    def check(self, agent_id: str) -> None:
        """Raise `LimitReachedError` if an agent has as many as may be."""
        self._forget_long_dead()
        alive = self._alive.get(agent_id)
        if alive is None:
            ((alive,),) = self._transaction.read(_LIVE_OF_AGENT, (agent_id, self._now))
            self._alive[agent_id] = alive
        if alive >= MAX_WORKERS_PER_AGENT:
            problem = f"agent {agent_id!r} has {alive} workers"
            problem += "; a worker that claims again says its workerId"
            raise LimitReachedError(problem)

    def take(self, agent_id: str) -> None:
        """Count one more."""
        self._alive[agent_id] += 1

    def _forget_long_dead(self) -> None:
        # A worker that joins sees to the workers: their leases end also where those of nodes do
        # not.
        if not self._has_forgotten:
            self._has_forgotten = True
            leases = (float(FORGOTTEN_AFTER_LEASES), self._now)
            rows = self._transaction.read(_LONG_DEAD_WORKERS, leases)
            _forget(self._transaction, [row[0] for row in rows])


def join_worker(
    transaction: Transaction, worker: Node, *, now: float, lease_seconds: float
) -> KnownWorker:
    """Take up a worker of an agent under an id that no life had before."""
    until = now + lease_seconds
    transaction.run(_SERVE, (worker.id, worker.agent_id, lease_seconds, until))
    transaction.run(_JOIN, (worker.id, worker.capacity, worker.address, until))
    known = (worker.id, worker.agent_id, worker.capacity, worker.address)
    return KnownWorker(*known, until, lease_seconds, until)


class Renewal(NamedTuple):
    """A lease that a worker renews, and its offer."""

    worker: KnownWorker
    capacity: int
    lease_until: float
    offered_until: float


def renew_workers(transaction: Transaction, renewals: Sequence[Renewal]) -> None:
    """Renew the leases of workers, and their offers where they make one."""
    leases = [
        (one.worker.id, one.capacity, one.worker.address, one.lease_until) for one in renewals
    ]
    offers = [
        (one.worker.id, one.worker.agent_id, one.worker.lease_seconds, one.offered_until)
        for one in renewals
        if one.offered_until != one.worker.offered_until
    ]
    if leases:
        transaction.insert(_RENEW_WORKERS, leases)
    if offers:
        transaction.insert(_RENEW_OFFERS, offers)


def give_grace(transaction: Transaction, now: float) -> None:
    """Renew the leases of all workers, if no process of the service was there to renew them.

    Whoever comes first after an outage does this: workers that went on working have lost nothing.
    """
    if not transaction.read(_ALIVE_NODES, (now,)):
        keep_workers(transaction, now)


def keep_workers(transaction: Transaction, now: float) -> None:
    """Renew the leases of all workers: nobody can hear them."""
    transaction.run(_GRACE_WORKERS, (now, now))


def forget_others(transaction: Transaction, node_id: str) -> None:
    """Take out every other node, where only one process can be alive at a time; workers stay."""
    others = f"SELECT id FROM nodes WHERE id <> ? AND NOT {_IS_WORKER}"  # noqa: S608
    rows = transaction.read(others, (node_id,))
    _forget(transaction, [row[0] for row in rows])


def beat(
    transaction: Transaction,
    node_id: str,
    *,
    capacity: int,
    now: float,
    lease_seconds: float,
    is_leaving: bool = False,
) -> Beat:
    """Renew the lease of a node, late if need be, unless somebody has acted on its end.

    One that leaves offers nothing any more if another can dispatch. Both are one step: of nodes
    that leave at the same time, the last one stays the one that can.
    """
    lease_until = now + lease_seconds
    has_heir = is_leaving and bool(transaction.read(_HEIRS, (node_id, now)))
    if has_heir:
        capacity = 0
    is_alive = transaction.write(_RENEW, (capacity, lease_until, node_id, now))
    if not is_alive:
        _give_others_time(transaction, node_id, now=now, lease_seconds=lease_seconds)
        is_alive = transaction.write(_RENEW_LATE, (capacity, lease_until, node_id))
    return Beat(
        is_alive=bool(is_alive),
        lease_until=lease_until if is_alive else 0.0,
        has_heir=has_heir,
    )


def keep(transaction: Transaction, node_id: str, *, now: float, lease_seconds: float) -> None:
    """Renew the lease of a node whose loop is busy; one that left or was lost stays so."""
    lease_until = now + lease_seconds
    if not transaction.write(_KEEP, (lease_until, node_id, now)):
        _give_others_time(transaction, node_id, now=now, lease_seconds=lease_seconds)
        transaction.run(_KEEP_LATE, (lease_until, node_id))


def _give_others_time(
    transaction: Transaction, node_id: str, *, now: float, lease_seconds: float
) -> None:
    """Renew the leases of others, if a node comes late and nobody at all was in time.

    The store was away, or everything stood still. Whoever is back first must not take the others
    for lost: they are given the time to come back, too. Those that were gone before stay so.
    """
    rows = transaction.read("SELECT lease_until FROM nodes WHERE id = ?", (node_id,))
    if rows and not transaction.read(_ALIVE_NODES, (now,)):
        keep_workers(transaction, now)
        gone_since = rows[0][0] - lease_seconds
        transaction.run(_GRACE_NODES, (now + lease_seconds, gone_since))


def leave(transaction: Transaction, node_id: str) -> None:
    """Take a node out, with what it was told and has not read."""
    _forget(transaction, [node_id])


def live(transaction: Transaction, now: float) -> tuple[Node, ...]:
    """Return the nodes whose lease has not ended, by id."""
    return to_nodes(transaction.read(*live_statement(now)))


def live_statement(now: float) -> Statement:
    """Return what reads the nodes whose lease has not ended."""
    return _LIVE, (now,)


def live_nodes_statement(now: float) -> Statement:
    """Return what reads the nodes of the service whose lease has not ended."""
    return _LIVE_NODES, (now,)


def worker_totals_statement(now: float) -> Statement:
    """Return what counts the workers whose lease has not ended, and their capacity."""
    return _WORKER_TOTALS, (now,)


def workers_among(transaction: Transaction, worker_ids: Sequence[str], now: float) -> list[Node]:
    """Return those of some workers whose lease has not ended."""
    found = to_nodes(transaction.read(_CHANGED_WORKERS, worker_ids)) if worker_ids else ()
    return [worker for worker in found if worker.lease_until > now]


def to_nodes(rows: Sequence[Row]) -> tuple[Node, ...]:
    """Read nodes."""
    return tuple(
        Node(
            id=node_id,
            capacity=capacity,
            address=address,
            lease_until=lease_until,
            agent_id=agent_id,
        )
        for node_id, capacity, address, lease_until, agent_id in rows
    )


def not_alive(transaction: Transaction, node_ids: Iterable[str], now: float) -> set[str]:
    """Return which of these nodes are not alive now; one that comes late may be again."""
    asked = set(node_ids)
    return without_lease(transaction.read(*leases_statement(asked)), asked, now)


def leases_statement(node_ids: Iterable[str]) -> Statement:
    """Return what reads the leases of nodes."""
    return _LEASES, list(node_ids)


def without_lease(rows: Sequence[Row], node_ids: Iterable[str], now: float) -> set[str]:
    """Return which of these nodes are not alive, as their leases say."""
    return set(node_ids) - {node_id for node_id, lease_until in rows if lease_until > now}


def end_lives(transaction: Transaction, node_ids: Iterable[str], now: float) -> set[str]:
    """Return which of these nodes are not alive, and see to it that they stay so."""
    ended = not_alive(transaction, node_ids, now)
    if ended:
        _forget(transaction, sorted(ended))
    return ended


def _forget(transaction: Transaction, node_ids: Sequence[str]) -> None:
    if node_ids:
        transaction.run(_FORGET_NODES, node_ids)
        transaction.run(_FORGET_MESSAGES, node_ids)
        workers = [node_id for node_id in node_ids if is_worker(node_id)]
        if workers:
            transaction.run(_FORGET_WORKERS, workers)


# Who dispatches: one row with a node, an epoch and a lease.
#
# Rule: an epoch belongs to one node, for one unbroken lease, and never comes again. Whoever is
# elected anew, be it the same node after its lease has ended, gets the next number. So a step that
# shows the epoch of the row, before the lease in it ends, comes from the one dispatcher that has
# seen everything since it read the backlog.

NOBODY = ""

READ_LEADER = "SELECT node_id, epoch, lease_until, address FROM dispatcher WHERE only_row = 1"
_WRITE = (
    "INSERT INTO dispatcher (only_row, node_id, epoch, lease_until, address)"
    " VALUES (1, ?, ?, ?, ?) ON CONFLICT (only_row) DO UPDATE SET node_id = excluded.node_id,"
    " epoch = excluded.epoch, lease_until = excluded.lease_until, address = excluded.address"
)
_KEEP_LEADING = (
    "UPDATE dispatcher SET lease_until = ? WHERE node_id = ? AND epoch = ? AND lease_until > ?"
)
# The epoch stays, so that the next one is a new one.
_RESIGN = "UPDATE dispatcher SET node_id = '', lease_until = 0, address = '' WHERE node_id = ?"
_DEPOSE = "UPDATE dispatcher SET node_id = '', lease_until = 0, address = '' WHERE node_id <> ?"


def elect(transaction: Transaction, node_id: str, *, now: float, lease_seconds: float) -> Election:
    """Become the dispatcher if nobody is, stay it if the node is; return who it is.

    A node that takes no tasks does not stand: it has been told not to, or is leaving.
    """
    last = _last(transaction)
    has_holder = last.lease_until > now
    if has_holder and last.node_id != node_id:
        return last
    rows = transaction.read("SELECT capacity, address FROM nodes WHERE id = ?", (node_id,))
    capacity, address = rows[0] if rows else (None, "")
    if capacity == 0:
        return last if has_holder else Election(node_id=NOBODY, epoch=last.epoch, lease_until=0.0)
    elected = Election(
        node_id=node_id,
        epoch=last.epoch if has_holder else last.epoch + 1,
        lease_until=now + lease_seconds,
        address=address,
    )
    row = (elected.node_id, elected.epoch, elected.lease_until, elected.address)
    transaction.run(_WRITE, row)
    return elected


def keep_leading(
    transaction: Transaction, node_id: str, epoch: int, *, now: float, lease_seconds: float
) -> None:
    """Renew the lease of a dispatcher whose loop is busy; one that is over is not begun again."""
    transaction.run(_KEEP_LEADING, (now + lease_seconds, node_id, epoch, now))


def resign(transaction: Transaction, node_id: str) -> None:
    """Stop being the dispatcher; a node that is not changes nothing."""
    transaction.run(_RESIGN, (node_id,))


def depose_others(transaction: Transaction, node_id: str) -> None:
    """Let nobody else dispatch, where only one process can be alive at a time."""
    transaction.run(_DEPOSE, (node_id,))


def check_epoch(transaction: Transaction, epoch: int, now: float) -> str:
    """Return the node that dispatches under this epoch, or raise `StaleEpochError`."""
    return check_election(_last(transaction), epoch, now)


def check_election(last: Election, epoch: int, now: float) -> str:
    """Return the node that was elected under this epoch, or raise `StaleEpochError`."""
    if last.epoch == epoch and last.lease_until > now:
        return last.node_id
    problem = f"epoch {epoch} is over, {_holder(last, now)}; stand for election again"
    raise StaleEpochError(problem)


def _last(transaction: Transaction) -> Election:
    return to_election(transaction.read(READ_LEADER))


def to_election(rows: Sequence[Row]) -> Election:
    """Read who was elected last; nobody, if nobody ever was."""
    if not rows:
        return Election(node_id=NOBODY, epoch=0, lease_until=0.0)
    node_id, epoch, lease_until, address = rows[0]
    return Election(node_id=node_id, epoch=epoch, lease_until=lease_until, address=address)


def _holder(last: Election, now: float) -> str:
    if last.lease_until <= now:
        return "nobody dispatches now"
    return f"node {last.node_id} dispatches under epoch {last.epoch} now"


# Messages between nodes: which tasks the dispatcher or another node is to look at.
#
# A message carries no facts, only the id of a task whose row has them; so it does no harm when one
# comes twice, and the reader takes the row for what it is by then.
#
# Rule: a message is forgotten only when its reader shows that it has the answer it came with. A
# reply can get lost after the commit, and what was deleted with it would be missed for good. So a
# reader hands in the last number that it has seen, and what is beyond that is read again.

CHANNEL = "headgate"
"""Where PostgreSQL tells all nodes at once; what it says is the recipient."""


def channel_here(name: str) -> str:
    """Return SQL for a channel of this schema: a database has one of a name for all of them."""
    schema = "COALESCE(current_schema(), '')"
    return f"CASE {schema} WHEN 'public' THEN '{name}' ELSE '{name}.' || left({schema}, 50) END"


MAX_TAKEN = 1_000

_POST = Insert(
    table="messages", columns=(("recipient", "TEXT"), ("kind", "TEXT"), ("task_id", "TEXT"))
)
_NOTIFY = f"SELECT pg_notify({channel_here(CHANNEL)}, ?)"
_FORGET = "DELETE FROM messages WHERE recipient = ? AND seq <= ?"
_READ_MESSAGES = (
    "SELECT seq, kind, task_id FROM messages WHERE recipient = ? AND seq > ? ORDER BY seq LIMIT ?"
)


class Kind(Enum):
    """What there is to see at the task that a message names."""

    CHANGED = "changed"
    ASSIGNED = "assigned"
    CANCELLED = "cancelled"
    OPENED = "opened"
    """Not of a task: somebody opened a gate, whose part the message names."""


class Message(NamedTuple):
    """One hint; its number grows from each message to the next, whoever they are for."""

    seq: int
    kind: Kind
    task_id: str

    @property
    def is_of_task(self) -> bool:
        """Whether it names a task, and not a part of a gate."""
        return self.kind is not Kind.OPENED


def part_text(part: GatePart) -> str:
    """Return a part of a gate as a message carries it."""
    return f"{part.kind}:{part.name}"


def read_part(text: str) -> GatePart:
    """Return the part that a message carries."""
    kind, _, name = text.partition(":")
    return GatePart(cast("GateKind", kind), name)


def post(transaction: Transaction, rows: Iterable[tuple[str, Kind, str]]) -> None:
    """Leave messages, each for a recipient; PostgreSQL tells them when the transaction commits."""
    # A task that changed more than once in a transaction is still looked at once.
    distinct = dict.fromkeys(rows)
    transaction.insert(_POST, [(recipient, kind.value, task) for recipient, kind, task in distinct])
    call(transaction, {row[0] for row in distinct})


def call(transaction: Transaction, recipients: Iterable[str]) -> None:
    """Have recipients look for themselves; only PostgreSQL has anybody to tell."""
    if transaction.dialect is Dialect.POSTGRES:
        for recipient in sorted(recipients):
            transaction.run(_NOTIFY, (recipient,))


def take(
    transaction: Transaction, recipient: str, *, seen: int, limit: int = MAX_TAKEN
) -> list[Message]:
    """Forget messages up to the number `seen`, and return the next ones in their order."""
    forget(transaction, recipient, seen=seen)
    return to_messages(transaction.read(*messages_statement(recipient, seen=seen, limit=limit)))


def forget(transaction: Transaction, recipient: str, *, seen: int) -> None:
    """Forget messages up to the number `seen`."""
    transaction.run(_FORGET, (recipient, seen))


def messages_statement(recipient: str, *, seen: int, limit: int = MAX_TAKEN) -> Statement:
    """Return what reads the messages after the number `seen`."""
    return _READ_MESSAGES, (recipient, seen, limit)


def to_messages(rows: Sequence[Row]) -> list[Message]:
    """Read messages."""
    return [Message(seq, Kind(kind), task_id) for seq, kind, task_id in rows]


def discard(transaction: Transaction, recipient: str) -> None:
    """Forget all messages for a recipient that reads everything anew, or that is gone."""
    transaction.run("DELETE FROM messages WHERE recipient = ?", (recipient,))
