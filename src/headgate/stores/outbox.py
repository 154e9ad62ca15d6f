"""The outbox: settlements that a ledger outside the store has yet to be told.

A row is written with the outcome it belongs to, and goes when the ledger has answered. A ledger
that hears of one twice recognises it by its reservation.
"""

from __future__ import annotations

from collections.abc import Sequence

from headgate.core.budgets.books import SettleRequest
from headgate.core.budgets.reservations import Call
from headgate.databases.transaction import Transaction, about

_FORGET = "DELETE FROM ledger_outbox"
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
    transaction.run(*about(transaction.dialect, _FORGET, "reservation_id", reservation_ids))
