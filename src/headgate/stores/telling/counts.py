"""How many webhooks are still to be delivered, and how many nobody will deliver any more."""

from __future__ import annotations

from headgate.databases.access import Access
from headgate.databases.transaction import Transaction

# Both are counted in an index, however many were delivered.
_PENDING = "SELECT COUNT(*) FROM deliveries WHERE due_at IS NOT NULL"
_DEAD = "SELECT COUNT(*) FROM deliveries WHERE state = 'dead' AND ended_at IS NOT NULL"


class DeliveryCounts:
    """Counts the webhooks of a store by their state."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def read(self) -> dict[str, int]:
        """Return the counts of those that were not delivered."""
        return await self._access.ask(_counts)


def _counts(transaction: Transaction) -> dict[str, int]:
    pending, dead = (transaction.read(sql, ())[0][0] for sql in (_PENDING, _DEAD))
    return {"pending": int(pending), "dead": int(dead)}
