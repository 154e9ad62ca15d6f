"""The ledger in memory: for one process, and the plainest reading of the contract.

No method awaits between reading and writing, so each is atomic in its event loop. Nothing survives
the process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from heapq import heappop, heappush

from headgate.core.accounts import Account, Balance, JournalEntry, Limit, Refused, balances_from
from headgate.core.books import Books, ReserveRequest, SettleRequest
from headgate.core.reservations import LIVE, Call, Reservation
from headgate.core.scopes import Scope, depth, is_within
from headgate.errors import LedgerUnavailableError
from headgate.ledger import FINISHED_KEPT_SECONDS, MAX_ACCOUNTS, Audit, Clock
from headgate.ledgers.zones import zone
from headgate.tracker import LedgerTracker

MAX_ENTRIES = 20_000
MAX_FINISHED = 100_000


class LocalLedger:
    """Books in memory; the journal beyond `MAX_ENTRIES` is folded into a checkpoint."""

    def __init__(self, *, clock: Clock = time.time) -> None:
        self._clock = clock
        self._books = Books(zone)
        self._leases: list[tuple[float, str]] = []
        self._finished: dict[str, float] = {}
        self._journal: deque[JournalEntry] = deque()
        self._checkpoint: Mapping[tuple[Scope, int], Balance] = {}
        self._is_closed = False

    def now(self) -> float:
        """Return the time by which this ledger judges leases and windows."""
        return self._clock()

    async def open(self) -> None:
        """Start with the books as they are."""
        self._is_closed = False

    async def close(self) -> None:
        """Refuse further calls; the books stay in memory."""
        self._is_closed = True

    async def set_limit(self, scope: Scope, limit: Limit) -> None:
        """Replace the limit of a scope; one without any amount removes it."""
        self._begin()
        zone(limit.window.zone)
        if limit.limit_micro_usd is None and limit.limit_tokens is None:
            self._books.limits.pop(scope, None)
        else:
            self._books.limits[scope] = limit

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        """Hold the money in all scopes or in none; a known id gets its answer again."""
        now = self._begin()
        answer = self._books.reserve(request, now)
        self._end(now)
        return answer

    async def settle(self, request: SettleRequest) -> Reservation:
        """Apply a further call, or raise `IllegalSettlementError`."""
        now = self._begin()
        reservation = self._books.settle(request, now)
        self._end(now)
        return reservation

    async def accounts(self, scope: Scope, *, most: int = MAX_ACCOUNTS) -> list[Account]:
        """Return the scope and everything within it that has a limit or a balance."""
        now = self._begin()
        known = set(self._books.limits) | set(self._books.balances)
        within = sorted(
            (name for name in known if is_within(name, scope) and name != scope),
            key=lambda name: (depth(name), name),
        )
        return [self._books.account(name, now) for name in [scope, *within[: most - 1]]]

    async def journal(self, scope: Scope, *, since: float, limit: int) -> list[JournalEntry]:
        """Return the latest entries that charge the scope, newest first."""
        self._begin()
        found: list[JournalEntry] = []
        for entry in reversed(self._journal):
            if len(found) >= limit or entry.at < since:
                break
            if any(charge.scope == scope for charge in entry.charges):
                found.append(entry)
        return found

    async def sweep(self) -> int:
        """Expire all leases that are due, and return how many there were."""
        return self._expire(self._open_books())

    async def audit(self) -> Audit:
        """Return both sides of the promise that balances equal the journal."""
        self._begin()
        kept = {
            (scope, start): balance
            for scope, buckets in self._books.balances.items()
            for start, balance in buckets.items()
        }
        return Audit(
            kept=kept, journalled=balances_from(self._journal, checkpoint=self._checkpoint)
        )

    def _open_books(self) -> float:
        if self._is_closed:
            raise LedgerUnavailableError("the ledger is closed; open it again")
        return self._clock()

    def _begin(self) -> float:
        now = self._open_books()
        self._expire(now)
        return now

    def _expire(self, now: float) -> int:
        expired = 0
        while self._leases and self._leases[0][0] <= now:
            _, reservation_id = heappop(self._leases)
            reservation = self._books.reservations.get(reservation_id)
            # A renewed lease stands in the heap again, further back.
            if reservation is not None and _is_due(reservation, now):
                request = SettleRequest(reservation_id=reservation_id, call=Call.EXPIRE)
                self._books.settle(request, now)
                expired += 1
        self._end(now)
        return expired

    def _end(self, now: float) -> None:
        for reservation in self._books.changed_reservations.values():
            if reservation.state in LIVE:
                heappush(self._leases, (reservation.lease_until, reservation.id))
            else:
                self._finished.pop(reservation.id, None)
                self._finished[reservation.id] = now
        self._journal.extend(self._books.entries)
        self._books.forget_changes()
        self._forget(now)
        if len(self._journal) > 2 * MAX_ENTRIES:
            self._fold()

    def _forget(self, now: float) -> None:
        while self._finished:
            reservation_id, finished_at = next(iter(self._finished.items()))
            is_old = finished_at < now - FINISHED_KEPT_SECONDS
            if not is_old and len(self._finished) <= MAX_FINISHED:
                return
            del self._finished[reservation_id]
            self._books.drop([reservation_id])

    def _fold(self) -> None:
        old = [self._journal.popleft() for _ in range(len(self._journal) - MAX_ENTRIES)]
        self._checkpoint = balances_from(old, checkpoint=self._checkpoint)


def _is_due(reservation: Reservation, now: float) -> bool:
    return reservation.state in LIVE and reservation.lease_until <= now


class LocalBudgetTracker(LedgerTracker):
    """Budgets of one process: the default, with nothing to install and nothing to start."""

    def __init__(self, *, clock: Clock = time.time) -> None:
        super().__init__(LocalLedger(clock=clock))
