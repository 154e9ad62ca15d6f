"""Whether the ledger answers, as those who use it see it.

Whatever is asked of the ledger tells, and the last answer counts. Where nobody asks for a while, a
loop does, so that a ledger which is back is known to be back before there is work for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from math import inf
from typing import TypeVar

import structlog

from headgate.core.budgets.accounts import Account, JournalEntry, Limit, Refused
from headgate.core.budgets.books import ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import Reservation
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.errors import LedgerUnavailableError, StoreError
from headgate.ledger import MAX_ACCOUNTS, Audit, Ledger

log = structlog.get_logger("headgate.ledger")

LOOK_SECONDS = 5.0
RETRY_SECONDS = 1.0
ANSWER_SECONDS = 3.0

Result = TypeVar("Result")


class WatchedLedger:
    """A ledger that passes everything on, and remembers what was in the way of the last call."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.problem = ""

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await self.run_once()
            await asyncio.sleep(RETRY_SECONDS if self.problem else LOOK_SECONDS)

    async def run_once(self) -> None:
        """Ask for one account; what comes of it is noted, and a new problem logged."""
        before = self.problem
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self.accounts(ROOT, most=1)
        except TimeoutError:
            self.problem = f"the ledger has not answered within {ANSWER_SECONDS:.0f} seconds"
        except StoreError as error:
            self.problem = str(error) or self.problem
        if self.problem and not before:
            log.warning("the ledger cannot be asked", problem=self.problem)

    async def open(self) -> None:
        """Connect, and bring the schema up to date."""
        await self._noted(self._ledger.open())

    async def close(self) -> None:
        """Let go of everything."""
        await self._ledger.close()

    async def set_limit(self, scope: Scope, limit: Limit) -> None:
        """Replace the limit of a scope; one without any amount removes it."""
        await self._noted(self._ledger.set_limit(scope, limit))

    async def found_limit(self, scope: Scope, limit: Limit) -> Limit:
        """Set the limit of a scope that has none, and return the one that is in force then."""
        return await self._noted(self._ledger.found_limit(scope, limit))

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        """Hold the money in all scopes or in none; a known id gets its answer again."""
        return await self._noted(self._ledger.reserve(request))

    async def settle(self, request: SettleRequest) -> Reservation:
        """Apply a further call, or raise `IllegalSettlementError`."""
        return await self._noted(self._ledger.settle(request))

    async def accounts(self, scope: Scope, *, most: int = MAX_ACCOUNTS) -> list[Account]:
        """Return the scope and everything within it that has a limit or a balance, root first."""
        return await self._noted(self._ledger.accounts(scope, most=most))

    async def journal(
        self, scope: Scope, *, since: float, until: float = inf, limit: int
    ) -> list[JournalEntry]:
        """Return the latest entries of a time that charge the scope, newest first."""
        found = self._ledger.journal(scope, since=since, until=until, limit=limit)
        return await self._noted(found)

    async def sweep(self) -> int:
        """Expire all leases that are due, and return how many there were."""
        return await self._noted(self._ledger.sweep())

    async def audit(self) -> Audit:
        """Return both sides of the promise that balances equal the journal."""
        return await self._noted(self._ledger.audit())

    def now(self) -> float:
        """Return the time by which this ledger judges leases and windows."""
        return self._ledger.now()

    async def _noted(self, call: Awaitable[Result]) -> Result:
        try:
            result = await call
        except LedgerUnavailableError as error:
            self.problem = str(error) or "the ledger cannot be asked"
            raise
        self.problem = ""
        return result
