"""Who dispatches: one row with a node, an epoch and a lease.

Rule: an epoch belongs to one node, for one unbroken lease, and never comes again. Whoever is
elected anew, be it the same node after its lease has ended, gets the next number. So a step that
shows the epoch of the row, before the lease in it ends, comes from the one dispatcher that has
seen everything since it read the backlog.
"""

from __future__ import annotations

from headgate.databases.transaction import Transaction
from headgate.errors import StaleEpochError
from headgate.store import Election

NOBODY = ""

_READ = "SELECT node_id, epoch, lease_until, address FROM dispatcher WHERE only_row = 1"
_WRITE = (
    "INSERT INTO dispatcher (only_row, node_id, epoch, lease_until, address)"
    " VALUES (1, ?, ?, ?, ?) ON CONFLICT (only_row) DO UPDATE SET node_id = excluded.node_id,"
    " epoch = excluded.epoch, lease_until = excluded.lease_until, address = excluded.address"
)
# The epoch stays, so that the next one is a new one.
_RESIGN = "UPDATE dispatcher SET node_id = '', lease_until = 0, address = '' WHERE node_id = ?"
_DEPOSE = "UPDATE dispatcher SET node_id = '', lease_until = 0, address = '' WHERE node_id <> ?"


def elect(transaction: Transaction, node_id: str, *, now: float, lease_seconds: float) -> Election:
    """Become the dispatcher if nobody is, stay it if the node is; return who it is."""
    last = _last(transaction)
    has_holder = last.lease_until > now
    if has_holder and last.node_id != node_id:
        return last
    elected = Election(
        node_id=node_id,
        epoch=last.epoch if has_holder else last.epoch + 1,
        lease_until=now + lease_seconds,
        address=_address(transaction, node_id),
    )
    row = (elected.node_id, elected.epoch, elected.lease_until, elected.address)
    transaction.run(_WRITE, row)
    return elected


def resign(transaction: Transaction, node_id: str) -> None:
    """Stop being the dispatcher; a node that is not changes nothing."""
    transaction.run(_RESIGN, (node_id,))


def depose_others(transaction: Transaction, node_id: str) -> None:
    """Let nobody else dispatch, where only one process can be alive at a time."""
    transaction.run(_DEPOSE, (node_id,))


def check_epoch(transaction: Transaction, epoch: int, now: float) -> str:
    """Return the node that dispatches under this epoch, or raise `StaleEpochError`."""
    last = _last(transaction)
    if last.epoch == epoch and last.lease_until > now:
        return last.node_id
    problem = f"epoch {epoch} is over, {_holder(last, now)}; stand for election again"
    raise StaleEpochError(problem)


def dispatcher_node(transaction: Transaction) -> str:
    """Return the node that was elected last, or `NOBODY` if it has resigned.

    Its lease may have ended. Then nobody needs to be told anything: whoever is elected next reads
    everything anew.
    """
    return _last(transaction).node_id


def _last(transaction: Transaction) -> Election:
    rows = transaction.read(_READ)
    if not rows:
        return Election(node_id=NOBODY, epoch=0, lease_until=0.0)
    node_id, epoch, lease_until, address = rows[0]
    return Election(node_id=node_id, epoch=epoch, lease_until=lease_until, address=address)


def _address(transaction: Transaction, node_id: str) -> str:
    rows = transaction.read("SELECT address FROM nodes WHERE id = ?", (node_id,))
    return rows[0][0] if rows else ""


def _holder(last: Election, now: float) -> str:
    if last.lease_until <= now:
        return "nobody dispatches now"
    return f"node {last.node_id} dispatches under epoch {last.epoch} now"
