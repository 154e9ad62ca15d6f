"""Forgiving: lag that a project is not owed any more is remembered as if it had been used.

An amount that is added twice would be forgiven twice, and a dispatcher has no id to give it. So
each call of a dispatcher has a number, higher than the last one, and what comes again is left out.
"""

from __future__ import annotations

import msgspec

from headgate.databases.transaction import Transaction
from headgate.stores.tallies import Tallies

LAST_PARDON = "last_pardon"
_CALLS_PER_EPOCH = 2**32


class Pardon(msgspec.Struct, frozen=True):
    """One call of a dispatcher: its epoch, its number, and the tokens of each project."""

    epoch: int
    number: int
    tokens: dict[str, int]


def forgive(transaction: Transaction, pardon: Pardon, now: float) -> None:
    """Add forgiven tokens to the usage of projects, unless this very call has done so before."""
    mark = pardon.epoch * _CALLS_PER_EPOCH + pardon.number
    sql = "SELECT amount FROM counters WHERE name = ?"
    rows = transaction.read(sql, (LAST_PARDON,))
    last = rows[0][0] if rows else 0
    if mark <= last:
        return
    tallies = Tallies(now)
    tallies.count(LAST_PARDON, mark - last)
    for project_id, tokens in pardon.tokens.items():
        tallies.forgive(project_id, tokens)
    tallies.write(transaction)
