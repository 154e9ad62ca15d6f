"""The books: limits, balances and reservations, and the one way in which a request changes them.

Every ledger applies requests through `Books`. The one in memory keeps a single `Books`; a database
loads the rows that a batch of requests touches, applies the batch, and writes back what changed.
So the arithmetic of money is here once, whatever keeps the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import tzinfo
from math import inf
from typing import Protocol

import msgspec

from headgate.core.budgets.accounts import (
    EMPTY,
    Account,
    Balance,
    JournalEntry,
    Limit,
    Refused,
    charges_at,
    first_refusal,
    journal_entry,
    read_account,
)
from headgate.core.budgets.reservations import (
    Call,
    Charge,
    Delta,
    Reservation,
    Settlement,
    commit,
    expire,
    extend,
    mark_dispatched,
    release,
    reserve,
    reserve_again,
    unknown_reservation,
)
from headgate.core.budgets.scopes import Scope
from headgate.core.budgets.windows import NO_WINDOW
from headgate.core.money import MicroUsd, Tokens

ZoneResolver = Callable[[str], tzinfo]
"""Turns the name of a zone into the zone; reading zone data is for the edge."""


class ReserveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Hold amounts in all these scopes, root first, or in none."""

    reservation_id: str
    scopes: tuple[Scope, ...]
    micro_usd: MicroUsd
    tokens: Tokens
    lease_seconds: float
    dispatched: bool = False


class SettleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A further call on a reservation; the amounts go with commit, the lease with extend."""

    reservation_id: str
    call: Call
    micro_usd: MicroUsd = MicroUsd(0)
    tokens: Tokens = Tokens(0)
    lease_seconds: float = 0.0


class Books:
    """Limits, balances by bucket, and reservations; with a record of what was changed.

    `entries`, `changed_balances` and `changed_reservations` grow until `forget_changes`.

    Books that are read for one batch, applied `at` one moment, keep the accounts that they have
    summed up, and carry them on from request to request. Their limits and balances are loaded
    before the first request.
    """

    def __init__(self, zone: ZoneResolver, *, at: float | None = None) -> None:
        self.limits: dict[Scope, Limit] = {}
        self.balances: dict[Scope, dict[int, Balance]] = {}
        self.reservations: dict[str, Reservation] = {}
        self.entries: list[JournalEntry] = []
        self.changed_balances: set[tuple[Scope, int]] = set()
        self.changed_reservations: dict[str, Reservation] = {}
        self._zone = zone
        self._at = at
        self._carried: dict[Scope, Account] = {}
        self._charges: dict[tuple[Scope, ...], tuple[Charge, ...]] = {}

    def account(self, scope: Scope, now: float) -> Account:
        """Return a scope as an admission at `now` sees it."""
        if now != self._at:
            return self._read(scope, now)
        account = self._carried.get(scope)
        if account is None:
            account = self._carried[scope] = self._read(scope, now)
        return account

    def _read(self, scope: Scope, now: float) -> Account:
        limit = self.limits.get(scope)
        window = NO_WINDOW if limit is None else limit.window
        zone = self._zone(window.zone)
        return read_account(scope, limit, self.balances.get(scope, {}), now=now, tz=zone)

    def reserve(self, request: ReserveRequest, now: float) -> Reservation | Refused:
        """Hold the money, say which scope cannot hold it, or repeat the answer of a known id."""
        known = self.reservations.get(request.reservation_id)
        if known is not None:
            return reserve_again(
                known,
                scopes=request.scopes,
                micro_usd=request.micro_usd,
                tokens=request.tokens,
                dispatched=request.dispatched,
            ).reservation
        accounts = [self.account(scope, now) for scope in request.scopes]
        refused = first_refusal(
            accounts, micro_usd=request.micro_usd, tokens=request.tokens, now=now
        )
        if refused is not None:
            return refused
        settlement = reserve(
            reservation_id=request.reservation_id,
            charges=self._charges_at(request.scopes, accounts, now),
            micro_usd=request.micro_usd,
            tokens=request.tokens,
            lease_until=now + request.lease_seconds,
            dispatched=request.dispatched,
        )
        return self._book(settlement, Call.RESERVE, now)

    def settle(self, request: SettleRequest, now: float) -> Reservation:
        """Apply a further call; an illegal one raises `IllegalSettlementError`."""
        reservation = self.reservations.get(request.reservation_id)
        if reservation is None:
            raise unknown_reservation(request.reservation_id, request.call)
        return self._book(_settlement(reservation, request, now), request.call, now)

    def forget_changes(self) -> None:
        """Start a new record of what is changed."""
        self.entries = []
        self.changed_balances = set()
        self.changed_reservations = {}

    def drop(self, reservation_ids: Iterable[str]) -> None:
        """Forget reservations that were settled long ago; their ids are unknown from now on."""
        for reservation_id in reservation_ids:
            self.reservations.pop(reservation_id, None)

    def _book(self, settlement: Settlement, call: Call, now: float) -> Reservation:
        reservation = settlement.reservation
        if settlement.is_repeat:
            return reservation
        self.reservations[reservation.id] = reservation
        self.changed_reservations[reservation.id] = reservation
        entry = journal_entry(settlement, call, at=now)
        if entry is not None:
            self.entries.append(entry)
            for charge in entry.charges:
                self._add(charge.scope, charge.bucket_start, entry.delta)
        return reservation

    def _add(self, scope: Scope, start: int, delta: Delta) -> None:
        buckets = self.balances.get(scope)
        if buckets is None:
            buckets = self.balances[scope] = {}
        balance = buckets[start] = buckets.get(start, EMPTY).add(delta)
        self.changed_balances.add((scope, start))
        account = self._carried.get(scope)
        if account is None:
            return
        if account.oldest_bucket == start and len(buckets) == 1 and balance.is_used:
            self._carried[scope] = account.with_balance(balance)
        elif account.oldest_bucket is not None and account.oldest_bucket < start:
            # Whether the bucket counts is settled by an older one that does.
            self._carried[scope] = account.with_balance(account.balance.add(delta))
        else:
            del self._carried[scope]

    def _charges_at(
        self, scopes: tuple[Scope, ...], accounts: Sequence[Account], now: float
    ) -> tuple[Charge, ...]:
        if now != self._at:
            return charges_at(accounts, now=now)
        charges = self._charges.get(scopes)
        if charges is None:
            charges = self._charges[scopes] = charges_at(accounts, now=now)
        return charges


def _settlement(reservation: Reservation, request: SettleRequest, now: float) -> Settlement:
    match request.call:
        case Call.DISPATCHED:
            return mark_dispatched(reservation)
        case Call.EXTEND:
            return extend(reservation, lease_until=now + request.lease_seconds)
        case Call.COMMIT:
            return commit(reservation, micro_usd=request.micro_usd, tokens=request.tokens)
        case Call.RELEASE:
            return release(reservation)
        case Call.EXPIRE:
            return expire(reservation, now=now)
        case Call.RESERVE:
            problem = "reserve is a request of its own"
            raise ValueError(problem)


# The contract of a ledger: what keeps the books of a budget, in memory or in a database.
#
# A ledger applies each request in one atomic step. Before it does, it expires the leases that are
# due, so that no job is needed to free what a crashed caller held. A ledger that cannot be asked
# raises `LedgerUnavailableError` and has granted nothing.

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

    async def create_limit(self, scope: Scope, limit: Limit) -> Limit:
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
