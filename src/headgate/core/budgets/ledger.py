"""The ledger: accounts with their limits and balances, and the one way a request changes them.

Rule: an admission never carries spent + reserved + overrun past a limit, in dollars or in tokens,
in any scope that the request reaches. Limits stop admissions and nothing else: one that is lowered
below what is used leaves every reservation as it is.

A request of zero is held to the same inequality. In a scope that is exactly full it is admitted,
since it takes nothing; in one that is over its limit it is refused, since the work behind it would
add to the overrun.

What Headgate measured is booked in full in every scope. What a tenant claims beyond what it holds,
and beyond what is left in its own limited scopes, counts in its own scopes alone: elsewhere it is
`unaccepted` until an operator accepts or rejects it. All scopes are those of a tenant that is bound
to nothing: its claim is `unaccepted` in the ones that an operator limited (`claimed`).

The journal is the truth and the balances are its sum: `balances_from` is that sum. Every backend
applies requests through `LedgerState`. The one in memory keeps a single one; a database loads the
rows that a batch of requests touches, applies the batch, and writes back what changed. So the
arithmetic of money is here once, whatever keeps the rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import UTC, tzinfo
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from headgate.core.budgets.reservations import (
    LIVE,
    NO_CHANGE,
    NO_LEASE_END,
    Call,
    Charge,
    Delta,
    Reservation,
    ReservationState,
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
from headgate.core.budgets.scopes import Scope, Tenant
from headgate.core.budgets.windows import (
    NO_WINDOW,
    Window,
    bucket_start,
    counted_buckets,
    format_window,
    live_from,
    period_end,
    resets_at,
)
from headgate.core.enums import FastEnum
from headgate.core.money import (
    MAX_BALANCE,
    MAX_RESERVATION_MICRO_USD,
    Columns,
    MicroUsd,
    Tokens,
    format_usd,
    plain_usd,
)
from headgate.errors import (
    AdjustmentError,
    BudgetExceededError,
    BudgetMismatchError,
    IllegalSettlementError,
    InvalidSettingError,
)


class Unit(FastEnum):
    """The two columns of a ledger."""

    MICRO_USD = "micro_usd"
    TOKENS = "tokens"


class HoldRule(FastEnum):
    """How firm an amount is that a request asks for.

    A learned one has a margin, and may shrink to what is left as long as the dearest of its kind
    fits; one whose kind is dearer than the limit holds all that is left, alone. The amount of a
    probe is worked out from the limits, since nobody knows what the work costs; it is no less than
    what is asked for.
    """

    EXACT = "exact"
    LEARNED = "learned"
    PROBE = "probe"


class Flexible(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a ledger may work out by itself where nobody gave an estimate.

    `most_…` is the most that work of this kind has cost, and `likely_…` what half of it has: where
    less is left the work is refused, even if it is dearer than the limit. At most so many
    reservations of a `kind` are live `at_once` where the unit is limited; 0 is no such bound.
    """

    micro_usd: HoldRule = HoldRule.EXACT
    tokens: HoldRule = HoldRule.EXACT
    most_micro_usd: int = 0
    most_tokens: int = 0
    kind: str = ""
    micro_usd_at_once: int = 0
    tokens_at_once: int = 0
    likely_micro_usd: int = 0
    likely_tokens: int = 0

    def rule(self, unit: Unit) -> HoldRule:
        """Return how firm the amount in a unit is."""
        return self.tokens if unit is Unit.TOKENS else self.micro_usd

    def most(self, unit: Unit) -> int:
        """Return the most that work of this kind has cost in a unit."""
        return self.most_tokens if unit is Unit.TOKENS else self.most_micro_usd

    def likely(self, unit: Unit) -> int:
        """Return what half of the work of this kind has cost in a unit; 0 if nobody knows."""
        return self.likely_tokens if unit is Unit.TOKENS else self.likely_micro_usd

    def at_once(self, unit: Unit) -> int:
        """Return how many of the kind may be live where a unit is limited."""
        return self.tokens_at_once if unit is Unit.TOKENS else self.micro_usd_at_once


PROBE_SHARE = 10
"""A probe holds one part in so many of the smallest limit."""

LEAST_SHARE = 100
"""Less than one part in so many of a limit is not enough for work of which nothing is known."""

GUARD_SHARE = 80
"""So much of a limit stays free when learned amounts are held, or the most that one has cost.

One task in twenty costs more than what is held for it, and a few cost much more. With this guard,
and twice as much of it beside others in flight, the end of a budget is passed by less than 1%.
"""


class Balance(Columns, frozen=True, kw_only=True):
    """What one scope has booked in one bucket. `spent` excludes the overrun."""

    def add(self, other: Delta | Balance) -> Balance:
        """Give this balance with a delta, or another bucket's balance, added to it."""
        return _balance(
            spent_micro_usd=self.spent_micro_usd + other.spent_micro_usd,
            reserved_micro_usd=self.reserved_micro_usd + other.reserved_micro_usd,
            overrun_micro_usd=self.overrun_micro_usd + other.overrun_micro_usd,
            spent_tokens=self.spent_tokens + other.spent_tokens,
            reserved_tokens=self.reserved_tokens + other.reserved_tokens,
            overrun_tokens=self.overrun_tokens + other.overrun_tokens,
            unaccepted_micro_usd=self.unaccepted_micro_usd + other.unaccepted_micro_usd,
            unaccepted_tokens=self.unaccepted_tokens + other.unaccepted_tokens,
        )

    def column(self, unit: Unit) -> tuple[int, int, int]:
        """Return what is spent, reserved and overrun in one unit."""
        if unit is Unit.TOKENS:
            return self.spent_tokens, self.reserved_tokens, self.overrun_tokens
        return self.spent_micro_usd, self.reserved_micro_usd, self.overrun_micro_usd

    def unaccepted(self, unit: Unit) -> int:
        """Return what is claimed in one unit and counts only once it is accepted."""
        return self.unaccepted_tokens if unit is Unit.TOKENS else self.unaccepted_micro_usd

    @property
    def largest(self) -> int:
        """The largest column of what is booked."""
        return max(
            self.spent_micro_usd,
            self.overrun_micro_usd,
            self.unaccepted_micro_usd,
            self.spent_tokens,
            self.overrun_tokens,
            self.unaccepted_tokens,
        )

    @property
    def is_whole(self) -> bool:
        """Whether no column is below zero."""
        return all(amount >= 0 for amount in msgspec.structs.astuple(self))

    @property
    def is_used(self) -> bool:
        """Whether anything at all counts here."""
        # Asked at every booking, so without the calls that would say the same.
        return bool(
            self.spent_micro_usd + self.reserved_micro_usd + self.overrun_micro_usd
            or self.spent_tokens + self.reserved_tokens + self.overrun_tokens
        )

    @property
    def used_micro_usd(self) -> MicroUsd:
        """The dollars that count against a limit."""
        used = self.spent_micro_usd + self.reserved_micro_usd + self.overrun_micro_usd
        return MicroUsd(used)

    @property
    def used_tokens(self) -> Tokens:
        """The tokens that count against a limit."""
        return Tokens(self.spent_tokens + self.reserved_tokens + self.overrun_tokens)


# The sum of two amounts of a unit is one of that unit. Its type would be a call for each of them.
_balance: Callable[..., Balance] = Balance

EMPTY = Balance()


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """What a scope may use within its window; None is no limit in that unit.

    One that a tenant set stops admissions like any other, and lets nobody charge what is above it.
    A ledger sets `counted_since` when the window changes and it no longer knows when older amounts
    were spent: these do not count.
    """

    limit_micro_usd: MicroUsd | None = None
    limit_tokens: Tokens | None = None
    window: Window = NO_WINDOW
    is_by_tenant: bool = False
    counted_since: float | None = None

    def amount(self, unit: Unit) -> int | None:
        """Return the limit in one unit."""
        return self.limit_tokens if unit is Unit.TOKENS else self.limit_micro_usd

    @property
    def has_amount(self) -> bool:
        """Whether it limits anything; a window alone does not."""
        return self.limit_micro_usd is not None or self.limit_tokens is not None


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """A scope as one admission sees it: its limit, and what counts against it at `now`.

    `tz` is the resolved zone of the limit's window. `oldest_bucket` is the earliest counted bucket
    that holds anything; it tells when a rolling window next frees room.
    """

    scope: Scope
    limit: Limit | None = None
    balance: Balance = EMPTY
    oldest_bucket: int | None = None
    tz: tzinfo = UTC

    def with_balance(self, balance: Balance) -> Account:
        """Return the account with another balance; the oldest bucket stays the oldest."""
        return Account(
            scope=self.scope,
            limit=self.limit,
            balance=balance,
            oldest_bucket=self.oldest_bucket,
            tz=self.tz,
        )


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """The first scope, root first, without room for the request, and why; amounts are in `unit`.

    `may_clear` tells whether waiting can help: the request fits the limit itself, and either the
    window frees room at `resets_at` or reservations in flight may yet be given back. With a `kind`
    there is room, but `live` reservations of that kind are as many as may be at once.
    """

    scope: Scope
    unit: Unit
    limit: int
    spent: int
    reserved: int
    overrun: int
    requested: int
    resets_at: int | None
    may_clear: bool
    kind: str = ""
    live: int = 0


class Adjustment(FastEnum):
    """What an operator can do to a balance: change what is booked, accept or reject a claim."""

    ADJUST = "adjust"
    ACCEPT = "accept"
    REJECT = "reject"


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One call that changed the ledger: the same delta for each balance that it charged.

    A claim that is not accepted everywhere has one for the scopes of each kind; an adjustment has
    one for each bucket. The journal only grows; a backend adds its own sequence.
    """

    at: float
    reservation_id: str
    call: Call | Adjustment
    charges: tuple[Charge, ...]
    delta: Delta


def read_account(
    scope: Scope, limit: Limit | None, buckets: Mapping[int, Balance], *, now: float, tz: tzinfo
) -> Account:
    """Sum the buckets of a scope that count at `now`."""
    window = limit.window if limit is not None else NO_WINDOW
    earliest = live_from(window, now, tz)
    balance, oldest = EMPTY, None
    for start, bucket in buckets.items():
        if start < earliest or bucket == EMPTY:
            continue
        balance = bucket if balance is EMPTY else balance.add(bucket)
        if bucket.is_used:
            oldest = start if oldest is None else min(oldest, start)
    return Account(scope=scope, limit=limit, balance=balance, oldest_bucket=oldest, tz=tz)


def amounts_to_hold(
    accounts: Sequence[Account], request: ReserveRequest, *, now: float, live: int = 0
) -> tuple[MicroUsd, Tokens] | Refused:
    """Return what a request holds in all accounts, or the first of them, root first, without room.

    Within one scope dollars are asked about before tokens. `live` is how many reservations of the
    kind of a flexible request there are.
    """
    flexible = request.flexible
    if flexible is None:
        refused = first_refusal(
            accounts, micro_usd=request.micro_usd, tokens=request.tokens, now=now
        )
        return (request.micro_usd, request.tokens) if refused is None else refused
    most: dict[Unit, int] = {}
    tightest: dict[Unit, Account] = {}
    for account in accounts:
        for unit in Unit:
            limit = None if account.limit is None else account.limit.amount(unit)
            if limit is None:
                if account.balance.column(unit)[1] + request.amount(unit) > MAX_BALANCE:
                    return _overfull(account, now, unit=unit, requested=request.amount(unit))
                continue
            answer = _hold_in(account, unit, limit, request, flexible, now)
            if isinstance(answer, Refused):
                return answer
            if unit not in most or answer < most[unit]:
                most[unit], tightest[unit] = answer, account
    for unit, account in tightest.items():
        at_once = flexible.at_once(unit)
        if at_once and live >= at_once:
            return _too_many(account, unit, most[unit], flexible.kind, live, now)
    usd = most.get(Unit.MICRO_USD, request.micro_usd)
    tokens = most.get(Unit.TOKENS, request.tokens)
    return MicroUsd(usd), Tokens(tokens)


def _hold_in(
    account: Account,
    unit: Unit,
    limit: int,
    request: ReserveRequest,
    flexible: Flexible,
    now: float,
) -> int | Refused:
    """Return what one scope with a limit would let a request hold in a unit."""
    spent, reserved, overrun = account.balance.column(unit)
    left = limit - spent - reserved - overrun
    rule, asked = flexible.rule(unit), request.amount(unit)
    needed = room_needed(asked, flexible, unit, limit=limit, is_shared=reserved > 0)
    if left < needed.now:
        # A probe asks for nothing by itself.
        requested = needed.now if rule is HoldRule.PROBE else asked
        return _refused(
            account, now, unit=unit, limit=limit, requested=requested, least=needed.alone
        )
    if rule is HoldRule.PROBE:
        return max(asked, min(-(-limit // PROBE_SHARE), left, MAX_RESERVATION_MICRO_USD))
    return min(asked, left)


class RoomNeeded(NamedTuple):
    """What must be left in a scope for a request: now, and when all others have given back."""

    now: int
    alone: int


def room_needed(
    asked: int, flexible: Flexible | None, unit: Unit, *, limit: int, is_shared: bool
) -> RoomNeeded:
    """Return what must be left of a limit in a unit; with `is_shared` others hold some of it."""
    rule = HoldRule.EXACT if flexible is None else flexible.rule(unit)
    if flexible is None or rule is HoldRule.EXACT:
        return RoomNeeded(asked, asked)
    # Limits and amounts are whole numbers, and shares of them are rounded up.
    least = max(1, -(-limit // LEAST_SHARE))
    if rule is HoldRule.PROBE:
        least = max(least, asked)
        return RoomNeeded(least, least)
    most = flexible.most(unit)
    guard = min(most, -(-limit // GUARD_SHARE))
    # What is asked for has a margin. Without it, the dearest of its kind must still fit; of work
    # that is dearer than the limit itself, one at a time has all that is left, unless it is known
    # to cost more than that.
    shrunk = max(least, most if most <= limit else flexible.likely(unit))
    alone = min(max(asked, guard), shrunk)
    if not is_shared:
        return RoomNeeded(alone, alone)
    whole = asked + 2 * guard
    return RoomNeeded(min(whole, shrunk) if most <= limit else whole, alone)


def first_refusal(
    accounts: Sequence[Account], *, micro_usd: MicroUsd, tokens: Tokens, now: float
) -> Refused | None:
    """Give the first account, root first, without room for these amounts; None if all have some."""
    for account in accounts:
        limit, balance = account.limit, account.balance
        most_usd = most_tokens = None
        if limit is not None:
            most_usd, most_tokens = limit.limit_micro_usd, limit.limit_tokens
        if most_usd is None:
            if balance.reserved_micro_usd + micro_usd > MAX_BALANCE:
                return _overfull(account, now, unit=Unit.MICRO_USD, requested=micro_usd)
        elif balance.used_micro_usd + micro_usd > most_usd:
            return _refused(account, now, unit=Unit.MICRO_USD, limit=most_usd, requested=micro_usd)
        if most_tokens is None:
            if balance.reserved_tokens + tokens > MAX_BALANCE:
                return _overfull(account, now, unit=Unit.TOKENS, requested=tokens)
        elif balance.used_tokens + tokens > most_tokens:
            return _refused(account, now, unit=Unit.TOKENS, limit=most_tokens, requested=tokens)
    return None


def _overfull(account: Account, now: float, *, unit: Unit, requested: int) -> Refused:
    """Return the refusal of a scope without a limit that holds as much as a ledger can count."""
    refused = _refused(account, now, unit=unit, limit=MAX_BALANCE, requested=requested)
    # What is held comes back, whatever was spent.
    return msgspec.structs.replace(refused, resets_at=None, may_clear=True)


def counted_kind(accounts: Iterable[Account], flexible: Flexible) -> str:
    """Return the kind that a reservation counts for: where a bounded unit is limited, else none."""
    bounded = [unit for unit in Unit if flexible.at_once(unit)]
    limits = [account.limit for account in accounts if account.limit is not None]
    is_counted = any(limit.amount(unit) is not None for limit in limits for unit in bounded)
    return flexible.kind if is_counted else ""


def exceeded(refused: Refused) -> BudgetExceededError:
    """Return the error that says the same as a refusal."""
    return BudgetExceededError(
        scope=refused.scope,
        unit=refused.unit.value,
        limit=refused.limit,
        spent=refused.spent,
        reserved=refused.reserved,
        overrun=refused.overrun,
        requested=refused.requested,
        resets_at=refused.resets_at,
        may_clear=refused.may_clear,
        kind=refused.kind,
        live=refused.live,
        is_overfull=refused.limit == MAX_BALANCE,
    )


def limit_text(limit: Limit) -> str:
    """Write a limit for people: `$50.00`, `$5.00 and 2,000 tokens (day)`, `none`."""
    amounts = [] if limit.limit_micro_usd is None else [format_usd(limit.limit_micro_usd)]
    if limit.limit_tokens is not None:
        amounts.append(f"{limit.limit_tokens:,} tokens")
    window = "" if limit.window == NO_WINDOW else f" ({format_window(limit.window)})"
    return f"{' and '.join(amounts)}{window}" if amounts else "none"


def check_created(
    scope: Scope,
    *,
    in_force: Limit,
    wanted: Limit,
    source: str = "the request",
    change: str = "",
    ledger: str = "",
) -> None:
    """Refuse a limit that was to be created where another one is in force.

    `change` is the command that would set it; without one it is made, for the ledger at an address.
    """
    ledgers_own = {"is_by_tenant": wanted.is_by_tenant, "counted_since": wanted.counted_since}
    if msgspec.structs.replace(in_force, **ledgers_own) != wanted:
        raise BudgetMismatchError(
            scope=scope,
            existing=limit_text(in_force),
            wanted=limit_text(wanted),
            source=source,
            change=change or _set_command(scope, wanted, ledger),
        )


def _set_command(scope: Scope, limit: Limit, ledger: str) -> str:
    parts = [f"headgate budget set {scope or 'root'}"]
    if limit.limit_micro_usd is not None:
        parts.append(f"--limit-usd {plain_usd(limit.limit_micro_usd)}")
    if limit.limit_tokens is not None:
        parts.append(f"--limit-tokens {limit.limit_tokens}")
    if limit.window != NO_WINDOW:
        parts.append(f"--window {format_window(limit.window)}")
    return " ".join([*parts, f"--ledger {ledger}"] if ledger else parts)


def charges_at(accounts: Iterable[Account], *, now: float) -> tuple[Charge, ...]:
    """Give the balances that a reservation made at `now` weighs on, in the order given."""
    return tuple(
        Charge(
            scope=account.scope,
            bucket_start=bucket_start(account.limit.window, now, account.tz)
            if account.limit is not None
            else 0,
        )
        for account in accounts
    )


class WindowChange:
    """Where amounts of a scope belong when its window changes.

    Each one that the journal knows goes to the bucket of the new window at the time at which it was
    reserved, whether it is still held, was settled, or may yet be corrected. Rule: amounts, times
    and ids stay as they are; a balance stays the sum of its entries.

    A correction by an operator goes along unless it takes more than the new bucket has: it may have
    corrected what was spent before. What is held and was reserved before the journal begins counts
    as reserved now. Everything else from before the journal begins stays where it is.
    """

    def __init__(
        self, scope: Scope, before: Window, after: Window, *, now: float, zone: ZoneResolver
    ) -> None:
        self.scope = scope
        self.starts = counted_buckets(after, now, zone(after.zone))
        self._before = before
        self._zone = zone

    @property
    def earliest(self) -> int:
        """The time from which on everything counts."""
        return self.starts[0]

    @property
    def current(self) -> int:
        """The bucket of the present."""
        return self.starts[-1]

    def bucket_at(self, at: float) -> int | None:
        """Return the bucket of a time; None before the window."""
        found = bisect_right(self.starts, at)
        return self.starts[found - 1] if found else None

    def charges(self, charges: tuple[Charge, ...], start: int) -> tuple[Charge, ...]:
        """Return charges with another bucket of the scope."""
        return tuple(
            Charge(scope=one.scope, bucket_start=start) if one.scope == self.scope else one
            for one in charges
        )

    def bucket_in(self, charges: Iterable[Charge]) -> int | None:
        """Return the bucket of the scope that is charged; None if the scope is not."""
        return next((one.bucket_start for one in charges if one.scope == self.scope), None)

    def counted_since(self, folded: Mapping[int, Balance], journal_from: float) -> float | None:
        """Return from when on everything counts; None where that is the whole window.

        `folded` are the buckets of the scope as far as the journal does not know their entries.
        """
        if journal_from <= self.earliest:
            return None
        is_unknown = any(
            balance.is_used and start < self.earliest and self._may_reach(start)
            for start, balance in folded.items()
        )
        return journal_from if is_unknown else None

    def _may_reach(self, start: int) -> bool:
        """Tell whether an old bucket may hold amounts of the new window."""
        if not start:
            return True
        try:
            ends_at = period_end(self._before, start, self._zone(self._before.zone))
        except InvalidSettingError:
            # Another machine knew the zone; its name is no reason to keep a budget as it is.
            return True
        return ends_at is None or ends_at > self.earliest


class Part(NamedTuple):
    """What one call adds to some of the balances of a reservation."""

    charges: tuple[Charge, ...]
    delta: Delta


def claimed(
    settlement: Settlement, tenant: Tenant, own: Iterable[tuple[Account, Charge]], *, now: float
) -> list[Part]:
    """Return what a commit adds to balances, if it is a claim of a tenant.

    `own` are its own scopes among those charged. A claim may pass what was held by the least that
    is left in those of them that an operator limited, in either unit. The rest is not accepted yet:
    of a tenant that is bound, in the scopes that are not its own; of one that is not, in those that
    an operator limited in that unit, so that it carries none of them to minus.
    """
    charges, delta = settlement.reservation.charges, settlement.delta
    if not (delta.overrun_micro_usd or delta.overrun_tokens):
        return [Part(charges, delta)]
    left = left_to_claim(own, now=now)
    left_usd, left_tokens = left[Unit.MICRO_USD], left[Unit.TOKENS]
    usd_waiting = max(0, delta.overrun_micro_usd - min(left_usd.values(), default=0))
    tokens_waiting = max(0, delta.overrun_tokens - min(left_tokens.values(), default=0))
    if not (usd_waiting or tokens_waiting):
        return [Part(charges, delta)]
    usd_waits: Container[Scope] = left_usd
    tokens_wait: Container[Scope] = left_tokens
    if tenant.is_bound:
        others = {one.scope for one in charges if not tenant.may_charge(one.scope)}
        usd_waits = tokens_wait = others
    parts: dict[tuple[int, int], list[Charge]] = {}
    for charge in charges:
        usd = usd_waiting if charge.scope in usd_waits else 0
        tokens = tokens_waiting if charge.scope in tokens_wait else 0
        parts.setdefault((usd, tokens), []).append(charge)
    return [
        Part(tuple(some), _partly_accepted(delta, usd=usd, tokens=tokens))
        for (usd, tokens), some in parts.items()
    ]


def _partly_accepted(delta: Delta, *, usd: int, tokens: int) -> Delta:
    return msgspec.structs.replace(
        delta,
        overrun_micro_usd=MicroUsd(delta.overrun_micro_usd - usd),
        overrun_tokens=Tokens(delta.overrun_tokens - tokens),
        unaccepted_micro_usd=MicroUsd(usd),
        unaccepted_tokens=Tokens(tokens),
    )


def left_to_claim(
    accounts: Iterable[tuple[Account, Charge]], *, now: float
) -> dict[Unit, dict[Scope, int]]:
    """Return what is left, by unit, in each of a tenant's own scopes that an operator limited.

    A limit that a tenant set does not count, or it would say how much it may claim. Nothing is left
    of a window that has passed since the money was held, as nothing of it would count there.
    """
    found: dict[Unit, dict[Scope, int]] = {unit: {} for unit in Unit}
    for account, charge in accounts:
        limit = account.limit
        if limit is None or limit.is_by_tenant:
            continue
        is_over = charge.bucket_start < live_from(limit.window, now, account.tz)
        for unit in Unit:
            amount = limit.amount(unit)
            if amount is not None:
                left = 0 if is_over else max(0, amount - sum(account.balance.column(unit)))
                found[unit][account.scope] = left
    return found


def adjusted(
    buckets: Mapping[int, Balance], request: AdjustRequest, *, current: int
) -> dict[int, Delta]:
    """Return what an adjustment adds to each bucket that counts, or raise `AdjustmentError`.

    What is added goes into the current bucket. What is taken away goes from the newest ones first,
    of the overrun before the rest; claims are accepted and rejected oldest first.
    """
    changes: dict[int, dict[str, int]] = {}
    columns: tuple[str, ...]

    def change(start: int, unit: Unit, column: str, amount: int) -> None:
        deltas = changes.setdefault(start, {})
        name = f"{column}_{unit.value}"
        deltas[name] = deltas.get(name, 0) + amount

    for unit in Unit:
        asked = request.amount(unit)
        if request.call is Adjustment.ADJUST:
            amount = asked or 0
            if amount >= 0:
                change(current, unit, "spent", amount)
                continue
            wanted, columns, order = -amount, ("overrun", "spent"), sorted(buckets, reverse=True)
        else:
            columns, order = ("unaccepted",), sorted(buckets)
            wanted = sum(one.unaccepted(unit) for one in buckets.values())
            wanted = wanted if asked is None else asked
        missing = wanted
        for start in order:
            for column in columns:
                there: int = getattr(buckets[start], f"{column}_{unit.value}")
                taken = min(missing, max(0, there))
                if taken:
                    change(start, unit, column, -taken)
                    missing -= taken
                    if request.call is Adjustment.ACCEPT:
                        change(start, unit, "overrun", taken)
        if missing:
            raise AdjustmentError(
                scope=request.scope,
                call=request.call.value,
                unit=unit.value,
                wanted=wanted,
                there=wanted - missing,
            )
    return {start: _delta(**deltas) for start, deltas in changes.items() if any(deltas.values())}


_delta: Callable[..., Delta] = Delta


def balances_from(
    entries: Iterable[JournalEntry],
    *,
    checkpoint: Mapping[tuple[Scope, int], Balance] | None = None,
) -> dict[tuple[Scope, int], Balance]:
    """Sum the journal into balances by scope and bucket, onto those of a checkpoint if given."""
    balances = dict(checkpoint or {})
    for entry in entries:
        for charge in entry.charges:
            key = (charge.scope, charge.bucket_start)
            balances[key] = balances.get(key, EMPTY).add(entry.delta)
    return balances


def _refused(
    account: Account,
    now: float,
    *,
    unit: Unit,
    limit: int,
    requested: int,
    least: int | None = None,
) -> Refused:
    spent, reserved, overrun = account.balance.column(unit)
    window = NO_WINDOW if account.limit is None else account.limit.window
    frees_at = resets_at(window, now, account.tz, oldest_bucket=account.oldest_bucket)
    needed = requested if least is None else least
    # The best that reservations in flight can do is to be given back, all of them.
    could_be_released = spent + overrun + needed <= limit
    return Refused(
        scope=account.scope,
        unit=unit,
        limit=limit,
        spent=spent,
        reserved=reserved,
        overrun=overrun,
        requested=requested,
        resets_at=frees_at,
        may_clear=needed <= limit and (frees_at is not None or could_be_released),
    )


def _too_many(
    account: Account, unit: Unit, requested: int, kind: str, live: int, now: float
) -> Refused:
    limit = account.limit.amount(unit) if account.limit is not None else None
    refused = _refused(account, now, unit=unit, limit=limit or 0, requested=requested)
    # The others of the kind end, and say what they cost.
    return msgspec.structs.replace(refused, kind=kind, live=live, resets_at=None, may_clear=True)


ZoneResolver = Callable[[str], tzinfo]
"""Turns the name of a zone into the zone; reading zone data is for the edge."""


class ReserveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Reserve amounts in all these scopes, root first, or in none.

    Without a lease the money is held until it is settled, however long that takes. That is for
    whoever keeps the holder in the same transactions, as a task store does: the end of a task, or
    of the node that runs it, settles its money.
    """

    reservation_id: str
    scopes: tuple[Scope, ...]
    micro_usd: MicroUsd
    tokens: Tokens
    lease_seconds: float | None
    dispatched: bool = False
    flexible: Flexible | None = None

    def amount(self, unit: Unit) -> int:
        """Return what is asked for in a unit."""
        return self.tokens if unit is Unit.TOKENS else self.micro_usd

    @property
    def exact_amounts(self) -> tuple[MicroUsd | None, Tokens | None]:
        """The amounts that a repeat must have in common; those of a flexible unit may differ."""
        flexible = self.flexible
        if flexible is None:
            return self.micro_usd, self.tokens
        return (
            self.micro_usd if flexible.micro_usd is HoldRule.EXACT else None,
            self.tokens if flexible.tokens is HoldRule.EXACT else None,
        )

    def lease_until(self, now: float) -> float:
        """Return when the lease ends of a reservation that is made now."""
        return NO_LEASE_END if self.lease_seconds is None else now + self.lease_seconds


class SettleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A further call on a reservation; the amounts go with commit, the lease with extend.

    The amounts are those that Headgate measured or takes as given, unless they are the claim of a
    `tenant`.
    """

    reservation_id: str
    call: Call
    micro_usd: MicroUsd = MicroUsd(0)
    tokens: Tokens = Tokens(0)
    lease_seconds: float = 0.0
    tenant: Tenant | None = None

    def lease_until(self, now: float) -> float:
        """Return when a lease ends that is renewed now."""
        return now + self.lease_seconds


class UnheldCost(NamedTuple):
    """A cost that nothing is held for: it is committed on a reservation of nothing."""

    reserve: ReserveRequest
    commit: SettleRequest

    @classmethod
    def of(
        cls,
        name: str,
        scopes: tuple[Scope, ...],
        *,
        micro_usd: int,
        tokens: int,
        lease_seconds: float | None = None,
    ) -> UnheldCost:
        """Return what books a cost under a name of its own."""
        return cls(
            ReserveRequest(
                reservation_id=name,
                scopes=scopes,
                micro_usd=MicroUsd(0),
                tokens=Tokens(0),
                lease_seconds=lease_seconds,
                dispatched=True,
            ),
            SettleRequest(
                reservation_id=name,
                call=Call.COMMIT,
                micro_usd=MicroUsd(micro_usd),
                tokens=Tokens(tokens),
            ),
        )


class AdjustRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Change what is booked in one scope, and in no other, or decide about what is claimed there.

    It is remembered like a settled reservation, under an id of its own. To accept or reject None
    is all that is claimed.
    """

    reservation_id: str
    scope: Scope
    call: Adjustment
    micro_usd: int | None = 0
    tokens: int | None = 0

    def amount(self, unit: Unit) -> int | None:
        """Return the amount in a unit."""
        return self.tokens if unit is Unit.TOKENS else self.micro_usd

    def check_same(self, known: Reservation) -> None:
        """Refuse an id that stands for something else."""
        asked = (self.micro_usd, self.tokens)
        kept = (known.actual_micro_usd, known.actual_tokens)
        is_same = all(want is None or want == have for want, have in zip(asked, kept, strict=True))
        if not is_same or known.kind != self.call.value or known.scopes[0] != self.scope:
            raise IllegalSettlementError(
                subject=f"adjustment {self.reservation_id}",
                current="made",
                wanted=f"{self.call.value}ed with other parameters",
                allowed=(),
                advice="its id was used with other parameters, use a new id",
            )

    def made(self, changes: Mapping[int, Delta], current: int, now: float) -> Reservation:
        """Return what is remembered of it."""
        usd, tokens = self._total(changes, Unit.MICRO_USD), self._total(changes, Unit.TOKENS)
        return Reservation(
            id=self.reservation_id,
            charges=tuple([Charge(scope=self.scope, bucket_start=one) for one in changes])
            or (Charge(scope=self.scope, bucket_start=current),),
            micro_usd=MicroUsd(0),
            tokens=Tokens(0),
            lease_until=now,
            state=ReservationState.COMMITTED,
            actual_micro_usd=MicroUsd(usd),
            actual_tokens=Tokens(tokens),
            kind=self.call.value,
        )

    def _total(self, changes: Mapping[int, Delta], unit: Unit) -> int:
        asked = self.amount(unit)
        if asked is not None:
            return asked
        name = f"unaccepted_{unit.value}"
        total: int = sum(getattr(delta, name) for delta in changes.values())
        return -total


class LedgerState:
    """Limits, balances by bucket, and reservations; with a record of what was changed.

    A balance in which nothing is booked, held or claimed any more is dropped: of one that is among
    the `changed_balances` and is not there, nothing is to be kept.

    `entries`, `changed_balances` and `changed_reservations` grow until `forget_changes`.

    One that is read for a batch, applied `at` one moment, keeps the accounts that it has summed up,
    and carries them on from request to request. Its limits and balances are loaded before the first
    request.
    """

    def __init__(self, zone: ZoneResolver, *, at: float | None = None) -> None:
        self.limits: dict[Scope, Limit] = {}
        self.balances: dict[Scope, dict[int, Balance]] = {}
        self.reservations: dict[str, Reservation] = {}
        self.live_kinds: dict[str, int] = {}
        self.entries: list[JournalEntry] = []
        self.changed_balances: set[tuple[Scope, int]] = set()
        self.changed_reservations: dict[str, Reservation] = {}
        self._zone = zone
        self._at = at
        # No column can reach its most before so much more is booked.
        self._room = MAX_BALANCE
        self._has_full = False
        self._carried: dict[Scope, Account] = {}
        self._charges: dict[tuple[Scope, ...], tuple[Charge, ...]] = {}

    def load_balance(self, scope: Scope, start: int, balance: Balance) -> None:
        """Take a balance as it is kept."""
        self.balances.setdefault(scope, {})[start] = balance
        self._room = min(self._room, MAX_BALANCE - balance.largest)

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
        """Reserve the money, say which scope has no room, or repeat the answer of a known id."""
        known = self.reservations.get(request.reservation_id)
        flexible = request.flexible
        if known is not None:
            micro_usd, tokens = request.exact_amounts
            return reserve_again(
                known,
                scopes=request.scopes,
                micro_usd=known.micro_usd if micro_usd is None else micro_usd,
                tokens=known.tokens if tokens is None else tokens,
                dispatched=request.dispatched,
            ).reservation
        accounts = [self.account(scope, now) for scope in request.scopes]
        live = 0 if flexible is None else self.live_kinds.get(flexible.kind, 0)
        amounts = amounts_to_hold(accounts, request, now=now, live=live)
        if isinstance(amounts, Refused):
            return amounts
        settlement = reserve(
            reservation_id=request.reservation_id,
            charges=self._charges_at(request.scopes, accounts, now),
            micro_usd=amounts[0],
            tokens=amounts[1],
            lease_until=request.lease_until(now),
            dispatched=request.dispatched,
            kind="" if flexible is None else counted_kind(accounts, flexible),
        )
        return self._record(settlement, Call.RESERVE, now)

    def carry_over(self, request: ReserveRequest, now: float) -> Reservation:
        """Hold on to what was admitted before under another name, whatever the limits say by now.

        It is for money in flight whose reservation was just committed at what others spent of it.
        """
        accounts = [self.account(scope, now) for scope in request.scopes]
        settlement = reserve(
            reservation_id=request.reservation_id,
            charges=self._charges_at(request.scopes, accounts, now),
            micro_usd=request.micro_usd,
            tokens=request.tokens,
            lease_until=request.lease_until(now),
            dispatched=request.dispatched,
        )
        return self._record(settlement, Call.RESERVE, now)

    def settle(self, request: SettleRequest, now: float) -> Reservation:
        """Apply a further call; an illegal one raises `IllegalSettlementError`."""
        reservation = self.reservations.get(request.reservation_id)
        if reservation is None:
            raise unknown_reservation(request.reservation_id, request.call)
        settlement = _settlement(reservation, request, now)
        if request.tenant is None or settlement.is_repeat:
            return self._record(settlement, request.call, now)
        own = [
            (self.account(charge.scope, now), charge)
            for charge in reservation.charges
            if request.tenant.may_charge(charge.scope)
        ]
        parts = claimed(settlement, request.tenant, own, now=now)
        return self._record(settlement, request.call, now, parts)

    def adjust(self, request: AdjustRequest, now: float) -> Reservation:
        """Change a balance by the word of an operator, or raise a `CallerError`."""
        known = self.reservations.get(request.reservation_id)
        if known is not None:
            request.check_same(known)
            return known
        limit = self.limits.get(request.scope)
        window = NO_WINDOW if limit is None else limit.window
        tz = self._zone(window.zone)
        current, earliest = bucket_start(window, now, tz), live_from(window, now, tz)
        buckets = self.balances.get(request.scope, {})
        counted = {start: one for start, one in buckets.items() if start >= earliest}
        changes = adjusted(counted, request, current=current)
        made = request.made(changes, current, now)
        parts = [
            Part((Charge(scope=request.scope, bucket_start=start),), delta)
            for start, delta in changes.items()
        ]
        return self._record(Settlement(reservation=made), request.call, now, parts)

    def move(self, scope: Scope, start: int, to: int, delta: Delta) -> None:
        """Move an amount from one bucket of a scope to another."""
        if delta != NO_CHANGE:
            self._add(scope, start, delta.negated)
            self._add(scope, to, delta)

    def forget_changes(self) -> None:
        """Start a new record of what is changed."""
        self.entries = []
        self.changed_balances = set()
        self.changed_reservations = {}

    def drop(self, reservation_ids: Iterable[str]) -> None:
        """Forget reservations that were settled long ago; their ids are unknown from now on."""
        for reservation_id in reservation_ids:
            self.reservations.pop(reservation_id, None)

    def _record(
        self,
        settlement: Settlement,
        call: Call | Adjustment,
        now: float,
        parts: Sequence[Part] | None = None,
    ) -> Reservation:
        """Book the delta of a settlement in all its charges, or in parts what differs in them."""
        reservation = settlement.reservation
        if settlement.is_repeat:
            return reservation
        if reservation.kind:
            self._count_kind(reservation)
        self.reservations[reservation.id] = reservation
        self.changed_reservations[reservation.id] = reservation
        if call is Call.EXTEND:
            # Renewing a lease is no entry: it moves neither money nor state, and is frequent.
            return reservation
        if reservation.state not in LIVE:
            # No column grows by more than what was held and what it came to.
            usd, tokens = reservation.actual_micro_usd or 0, reservation.actual_tokens or 0
            booked = reservation.micro_usd + reservation.tokens + abs(usd) + abs(tokens)
            self._room -= booked
            if self._room < 0:
                self._measure_room(booked)
        for charges, counted in parts or ((reservation.charges, settlement.delta),):
            delta = self._bounded(charges, counted) if self._has_full else counted
            self.entries.append(
                JournalEntry(
                    at=now, reservation_id=reservation.id, call=call, charges=charges, delta=delta
                )
            )
            # What moves no amount leaves no balance behind, however many scopes it names.
            if delta != NO_CHANGE:
                for charge in charges:
                    self._add(charge.scope, charge.bucket_start, delta)
        return reservation

    def _measure_room(self, booked: int) -> None:
        """Find out how much more can be booked, after what is about to be."""
        balances = (one for buckets in self.balances.values() for one in buckets.values())
        room = MAX_BALANCE - max((balance.largest for balance in balances), default=0)
        self._has_full = room <= 0
        self._room = room - booked

    def _bounded(self, charges: tuple[Charge, ...], delta: Delta) -> Delta:
        """Return what is added to balances of which a column may have reached its most.

        Such a column grows no more, in any of these balances, and the journal has what is added.
        So a call never fails for what was booked before it.
        """
        columns = msgspec.structs.asdict(delta)
        for charge in charges:
            balance = self.balances.get(charge.scope, {}).get(charge.bucket_start, EMPTY)
            for name, amount in columns.items():
                if amount > 0 and getattr(balance, name) >= MAX_BALANCE:
                    columns[name] = 0
        return _delta(**columns)

    def _count_kind(self, reservation: Reservation) -> None:
        before = self.reservations.get(reservation.id)
        was_live = before is not None and before.state in LIVE
        change = (reservation.state in LIVE) - was_live
        if change:
            live = self.live_kinds.get(reservation.kind, 0) + change
            # One that is read for a batch knows only of the kinds that its requests name.
            self.live_kinds[reservation.kind] = max(0, live)
            if live <= 0:
                del self.live_kinds[reservation.kind]

    def _add(self, scope: Scope, start: int, delta: Delta) -> None:
        buckets = self.balances.get(scope)
        if buckets is None:
            buckets = self.balances[scope] = {}
        balance = buckets[start] = buckets.get(start, EMPTY).add(delta)
        self.changed_balances.add((scope, start))
        # Most have an amount in one of these, and need no look at the others.
        if not (balance.spent_micro_usd or balance.reserved_micro_usd) and balance == EMPTY:
            del buckets[start]
            if not buckets:
                del self.balances[scope]
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
            return extend(reservation, lease_until=request.lease_until(now))
        case Call.COMMIT:
            return commit(reservation, micro_usd=request.micro_usd, tokens=request.tokens)
        case Call.RELEASE:
            return release(reservation)
        case Call.EXPIRE:
            return expire(reservation, now=now)
        case Call.RESERVE:
            problem = "reserve is a request of its own"
            raise ValueError(problem)


# The contract of a ledger: what keeps budgets, in memory or in a database.
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
    """Keeps budgets; every method may raise `LedgerUnavailableError`."""

    async def open(self) -> None:
        """Connect, and bring the schema up to date."""

    async def close(self) -> None:
        """Let go of everything; calls under way end with `LedgerUnavailableError`."""

    async def set_limit(self, scope: Scope, limit: Limit) -> None:
        """Replace the limit of a scope; one without any amount removes it."""

    async def create_limit(self, scope: Scope, limit: Limit) -> Limit:
        """Set the limit of a scope that has none, and return the one that is in force then.

        Of several who create one at once exactly one is first, and all get its limit. One without
        any amount creates nothing, and is returned where there is none.
        """

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        """Reserve the money in all scopes or in none; a known id gets its answer again."""

    async def settle(self, request: SettleRequest) -> Reservation:
        """Apply a further call, or raise `IllegalSettlementError`."""

    async def adjust(self, request: AdjustRequest) -> Reservation:
        """Change a balance by the word of an operator, or raise a `CallerError`."""

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
