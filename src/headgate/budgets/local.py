"""The ledger in memory: for one process, and the plainest reading of the contract.

Each method is one step under one lock, and awaits nothing within it: it is atomic, for callers of
one event loop and for threads that have a loop each. Nothing survives the process.
"""

from __future__ import annotations

import time
from collections import deque
from heapq import heappop, heappush
from math import inf
from threading import Lock

from msgspec.structs import replace

from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.ledger import (
    EMPTY,
    FINISHED_KEPT_SECONDS,
    MAX_ACCOUNTS,
    Account,
    Adjustment,
    AdjustRequest,
    Audit,
    Balance,
    Clock,
    JournalEntry,
    LedgerState,
    Limit,
    Refused,
    ReserveRequest,
    SettleRequest,
    WindowChange,
    balances_from,
)
from headgate.core.budgets.reservations import LIVE, Call, Reservation, weight_of
from headgate.core.budgets.scopes import Scope, depth, is_within
from headgate.core.budgets.windows import KEPT_BUCKETS, live_from
from headgate.errors import LedgerUnavailableError
from headgate.storage.zones import zone

NO_LIMIT = Limit()
MAX_ENTRIES = 20_000
MAX_FINISHED = 100_000
# Upkeep is done in small steps by every call. A call books few entries, so these keep ahead.
FOLDED_PER_CALL = 16
PURGED_PER_CALL = 8


class LocalLedger:
    """A ledger in memory; a journal that is old or long is folded into a checkpoint.

    Buckets that left their window long ago are dropped, from both sides of the audit at once.
    """

    def __init__(self, *, clock: Clock = time.time) -> None:
        self._clock = clock
        self._lock = Lock()
        self._state = LedgerState(zone)
        self._leases: list[tuple[float, str]] = []
        self._finished: dict[str, float] = {}
        self._journal: deque[JournalEntry] = deque()
        self._checkpoint: dict[tuple[Scope, int], Balance] = {}
        self._folded_buckets: deque[tuple[Scope, int]] = deque()
        self._is_closed = False

    def now(self) -> float:
        """Return the time by which this ledger judges leases and windows."""
        return self._clock()

    async def open(self) -> None:
        """Start with the ledger as it is."""
        self._is_closed = False

    async def close(self) -> None:
        """Refuse further calls; the ledger stays in memory."""
        self._is_closed = True

    async def set_limit(self, scope: Scope, limit: Limit) -> None:
        """Replace the limit of a scope; one without any amount removes it."""
        zone(limit.window.zone)
        with self._lock:
            self._set_limit(scope, limit, self._begin())

    async def create_limit(self, scope: Scope, limit: Limit) -> Limit:
        """Set the limit of a scope that has none, and return the one that is in force then."""
        zone(limit.window.zone)
        with self._lock:
            now = self._begin()
            if scope not in self._state.limits and limit.has_amount:
                self._set_limit(scope, limit, now)
            return self._state.limits.get(scope, limit)

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        """Hold the money in all scopes or in none; a known id gets its answer again."""
        with self._lock:
            now = self._begin()
            answer = self._state.reserve(request, now)
            self._end(now)
        return answer

    async def settle(self, request: SettleRequest) -> Reservation:
        """Apply a further call, or raise `IllegalSettlementError`."""
        with self._lock:
            now = self._begin()
            reservation = self._state.settle(request, now)
            self._end(now)
        return reservation

    async def adjust(self, request: AdjustRequest) -> Reservation:
        """Change a balance by the word of an operator, or raise a `CallerError`."""
        with self._lock:
            now = self._begin()
            reservation = self._state.adjust(request, now)
            self._end(now)
        return reservation

    async def accounts(self, scope: Scope, *, most: int = MAX_ACCOUNTS) -> list[Account]:
        """Return the scope and everything within it that has a limit or a balance."""
        with self._lock:
            now = self._begin()
            known = set(self._state.limits) | set(self._state.balances)
            within = sorted(
                (name for name in known if is_within(name, scope) and name != scope),
                key=lambda name: (depth(name), name),
            )
            return [self._state.account(name, now) for name in [scope, *within[: most - 1]]]

    async def journal(
        self, scope: Scope, *, since: float, until: float = inf, limit: int
    ) -> list[JournalEntry]:
        """Return the latest entries of a time that charge the scope, newest first."""
        found: list[JournalEntry] = []
        with self._lock:
            self._begin()
            for entry in reversed(self._journal):
                if len(found) >= limit or entry.at < since:
                    break
                if entry.at <= until and any(one.scope == scope for one in entry.charges):
                    found.append(entry)
        return found

    async def sweep(self) -> int:
        """Expire all leases that are due, and return how many there were."""
        with self._lock:
            return self._expire(self._open_ledger())

    async def audit(self) -> Audit:
        """Return both sides of the promise that balances equal the journal."""
        with self._lock:
            self._begin()
            kept = {
                (scope, start): balance
                for scope, buckets in self._state.balances.items()
                for start, balance in buckets.items()
            }
            journalled = balances_from(self._journal, checkpoint=self._checkpoint)
        return Audit(kept=kept, journalled=journalled)

    def _set_limit(self, scope: Scope, limit: Limit, now: float) -> None:
        limits = self._state.limits
        before = limits.get(scope, NO_LIMIT)
        if not limit.has_amount:
            limits.pop(scope, None)
            return
        counted_since = before.counted_since
        if before.window != limit.window:
            counted_since = self._change_window(
                WindowChange(scope, before.window, limit.window, now=now, zone=zone), now
            )
        limits[scope] = replace(limit, counted_since=counted_since)

    def _change_window(self, change: WindowChange, now: float) -> float | None:
        """Move what the journal knows into the buckets of another window."""
        state, scope, moved = self._state, change.scope, dict[str, int | None]()
        corrections: list[int] = []
        for place, entry in enumerate(self._journal):
            start = change.bucket_in(entry.charges)
            if start is None:
                continue
            if isinstance(entry.call, Adjustment):
                corrections.append(place)
                continue
            if entry.call is Call.RESERVE:
                moved[entry.reservation_id] = change.bucket_at(entry.at)
            self._move_entry(place, change, moved.get(entry.reservation_id))
        for place in corrections:
            entry = self._journal[place]
            start = change.bucket_at(entry.at)
            there = state.balances.get(scope, {}).get(start or 0, EMPTY).add(entry.delta)
            if there.is_whole:
                self._move_entry(place, change, start)
        for reservation in list(state.reservations.values()):
            start = change.bucket_in(reservation.charges)
            if start is None:
                continue
            is_forgotten = reservation.id not in moved and reservation.state in LIVE
            to = change.current if is_forgotten else moved.get(reservation.id)
            if to is None or to == start:
                continue
            if is_forgotten:
                held = weight_of(reservation)
                state.move(scope, start, to, held)
                for key, delta in (((scope, start), held.negated), ((scope, to), held)):
                    self._checkpoint[key] = self._checkpoint.get(key, EMPTY).add(delta)
                self._folded_buckets.append((scope, to))
            charges = change.charges(reservation.charges, to)
            state.reservations[reservation.id] = replace(reservation, charges=charges)
        state.forget_changes()
        folded = {start: one for (name, start), one in self._checkpoint.items() if name == scope}
        return change.counted_since(folded, self._journal_from(now))

    def _journal_from(self, now: float) -> float:
        """Return since when the journal has every entry."""
        # As long as one that was folded for want of room is younger, those after it fill it.
        is_full = len(self._journal) >= MAX_ENTRIES - FOLDED_PER_CALL
        kept_from = now if is_full else now - FINISHED_KEPT_SECONDS
        return min(kept_from, self._journal[0].at) if self._journal else kept_from

    def _move_entry(self, place: int, change: WindowChange, to: int | None) -> None:
        entry = self._journal[place]
        start = change.bucket_in(entry.charges)
        if to is None or start is None or to == start:
            return
        self._journal[place] = replace(entry, charges=change.charges(entry.charges, to))
        self._state.move(change.scope, start, to, entry.delta)

    def _open_ledger(self) -> float:
        if self._is_closed:
            raise LedgerUnavailableError("the ledger is closed; open it again")
        return self._clock()

    def _begin(self) -> float:
        now = self._open_ledger()
        self._expire(now)
        return now

    def _expire(self, now: float) -> int:
        expired = 0
        while self._leases and self._leases[0][0] <= now:
            _, reservation_id = heappop(self._leases)
            reservation = self._state.reservations.get(reservation_id)
            # A renewed lease stands in the heap again, further back.
            if reservation is not None and _is_due(reservation, now):
                request = SettleRequest(reservation_id=reservation_id, call=Call.EXPIRE)
                self._state.settle(request, now)
                expired += 1
        self._end(now)
        return expired

    def _end(self, now: float) -> None:
        for reservation in self._state.changed_reservations.values():
            if reservation.state in LIVE:
                heappush(self._leases, (reservation.lease_until, reservation.id))
            else:
                self._finished.pop(reservation.id, None)
                self._finished[reservation.id] = now
        self._journal.extend(self._state.entries)
        self._state.forget_changes()
        self._forget(now)
        self._fold(now)
        self._purge(now)

    def _forget(self, now: float) -> None:
        while self._finished:
            reservation_id, finished_at = next(iter(self._finished.items()))
            is_old = finished_at < now - FINISHED_KEPT_SECONDS
            if not is_old and len(self._finished) <= MAX_FINISHED:
                return
            del self._finished[reservation_id]
            self._state.drop([reservation_id])

    def _fold(self, now: float) -> None:
        for _ in range(FOLDED_PER_CALL):
            is_long = len(self._journal) > MAX_ENTRIES
            if not is_long and not self._starts_before(now - FINISHED_KEPT_SECONDS):
                return
            entry = self._journal.popleft()
            for charge in entry.charges:
                key = (charge.scope, charge.bucket_start)
                if charge.bucket_start and key not in self._checkpoint:
                    self._folded_buckets.append(key)
                summed = self._checkpoint[key] = self._checkpoint.get(key, EMPTY).add(entry.delta)
                # One that has a window is looked at, and dropped, with the folded buckets.
                if not charge.bucket_start and summed == EMPTY:
                    del self._checkpoint[key]

    def _starts_before(self, moment: float) -> bool:
        return bool(self._journal) and self._journal[0].at < moment

    def _purge(self, now: float) -> None:
        for _ in range(min(PURGED_PER_CALL, len(self._folded_buckets))):
            scope, start = self._folded_buckets.popleft()
            if not self._is_over(scope, start, now):
                # The next call looks at the next one, so a long window does not block others.
                self._folded_buckets.append((scope, start))
                return
            del self._checkpoint[scope, start]
            buckets = self._state.balances.get(scope, {})
            if buckets.pop(start, None) is not None and not buckets:
                del self._state.balances[scope]

    def _is_over(self, scope: Scope, start: int, now: float) -> bool:
        """Whether nothing is in a bucket, or it left its window long ago; all of it is folded."""
        limit = self._state.limits.get(scope)
        buckets = self._state.balances.get(scope, {})
        balance = buckets.get(start, EMPTY)
        if self._checkpoint[scope, start] != balance:
            return False
        if balance == EMPTY:
            return True
        if limit is None or balance.reserved_micro_usd or balance.reserved_tokens:
            return False
        first_live = live_from(limit.window, now, zone(limit.window.zone))
        if start >= first_live - FINISHED_KEPT_SECONDS:
            return False
        return sum(1 for other in buckets if other > start) >= KEPT_BUCKETS


def _is_due(reservation: Reservation, now: float) -> bool:
    return reservation.state in LIVE and reservation.lease_until <= now


class LocalBudgetTracker(LedgerTracker):
    """Budgets of one process: the default, with nothing to install and nothing to start."""

    def __init__(self, *, clock: Clock = time.time) -> None:
        super().__init__(LocalLedger(clock=clock))
