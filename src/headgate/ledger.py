"""The contract of a ledger: what keeps the books of a budget, in memory or in a database.

A ledger applies each request in one atomic step. Before it does, it expires the leases that are
due, so that no job is needed to free what a crashed caller held. A ledger that cannot be asked
raises `LedgerUnavailableError` and has granted nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Protocol

import msgspec

from headgate.core.budgets.accounts import Account, Balance, JournalEntry, Limit, Refused
from headgate.core.budgets.books import ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import Reservation
from headgate.core.budgets.scopes import Scope

Clock = Callable[[], float]
"""Returns Unix seconds."""

FINISHED_KEPT_SECONDS = 86_400.0
"""How long the id of a settled reservation is remembered, so that a late repeat is recognised."""

MAX_ACCOUNTS = 10_000
"""How many scopes of a subtree are read at most."""


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The balances as they are kept, and as the journal with its checkpoint sums up to."""

    kept: Mapping[tuple[Scope, int], Balance]
    journalled: Mapping[tuple[Scope, int], Balance]


class Ledger(Protocol):
    """Keeps the books; every method may raise `LedgerUnavailableError`."""

    async def open(self) -> None:
        """Connect, and bring the schema up to date."""

    async def close(self) -> None:
        """Let go of everything; calls under way end with `LedgerUnavailableError`."""

    async def set_limit(self, scope: Scope, limit: Limit) -> None:
        """Replace the limit of a scope; one without any amount removes it."""

    async def found_limit(self, scope: Scope, limit: Limit) -> Limit:
        """Set the limit of a scope that has none, and return the one that is in force then.

        Of several who found at once exactly one is first, and all get its limit. One without any
        amount founds nothing, and is returned where there is none.
        """

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        """Hold the money in all scopes or in none; a known id gets its answer again."""

    async def settle(self, request: SettleRequest) -> Reservation:
        """Apply a further call, or raise `IllegalSettlementError`."""

    async def accounts(self, scope: Scope, *, most: int = MAX_ACCOUNTS) -> list[Account]:
        """Return the scope and everything within it that has a limit or a balance, root first.

        The scope itself always comes first, known or not; so `most` 1 reads that one alone.
        """

    async def journal(
        self, scope: Scope, *, since: float, until: float = inf, limit: int
    ) -> list[JournalEntry]:
        """Return the latest entries of a time that charge the scope, newest first."""

    async def sweep(self) -> int:
        """Expire all leases that are due, and return how many there were."""

    async def audit(self) -> Audit:
        """Return both sides of the promise that balances equal the journal."""

    def now(self) -> float:
        """Return the time by which this ledger judges leases and windows."""
