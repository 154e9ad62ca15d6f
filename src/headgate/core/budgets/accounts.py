"""Accounts: what a scope has used, what it may use, and whether a request still fits.

Rule: an admission never carries spent + reserved + overrun past a limit, in dollars or in tokens,
in any scope that the request reaches. Limits stop admissions and nothing else: one that is lowered
below what is used leaves every reservation as it is.

A request of zero is held to the same inequality. In a scope that is exactly full it is admitted,
since it takes nothing; in one that is over its limit it is refused, since the work behind it would
add to the overrun.

The journal is the truth and the balances are its sum: `balances_from` is that sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, tzinfo
from enum import Enum

import msgspec

from headgate.core.budgets.reservations import Call, Charge, Delta, Settlement
from headgate.core.budgets.scopes import Scope
from headgate.core.budgets.windows import (
    NO_WINDOW,
    Window,
    bucket_start,
    format_window,
    live_from,
    resets_at,
)
from headgate.core.money import Columns, MicroUsd, Tokens, format_usd
from headgate.errors import BudgetExceededError, BudgetMismatchError


class Unit(Enum):
    """The two columns of the books."""

    MICRO_USD = "micro_usd"
    TOKENS = "tokens"


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
        )

    def column(self, unit: Unit) -> tuple[int, int, int]:
        """Return what is spent, reserved and overrun in one unit."""
        if unit is Unit.TOKENS:
            return self.spent_tokens, self.reserved_tokens, self.overrun_tokens
        return self.spent_micro_usd, self.reserved_micro_usd, self.overrun_micro_usd

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
    """What a scope may use within its window; None is no limit in that unit."""

    limit_micro_usd: MicroUsd | None = None
    limit_tokens: Tokens | None = None
    window: Window = NO_WINDOW

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
    """The first scope, root first, that cannot hold the request, and why; amounts are in `unit`.

    `may_clear` tells whether waiting can help: the request fits the limit itself, and either the
    window frees room at `resets_at` or reservations in flight may yet be given back.
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


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One call that changed the books: the same delta for each balance that it charged.

    The journal only grows; a backend adds its own sequence.
    """

    at: float
    reservation_id: str
    call: Call
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
        if start < earliest or not bucket.is_used:
            continue
        balance = bucket if oldest is None else balance.add(bucket)
        oldest = start if oldest is None else min(oldest, start)
    return Account(scope=scope, limit=limit, balance=balance, oldest_bucket=oldest, tz=tz)


def first_refusal(
    accounts: Sequence[Account], *, micro_usd: MicroUsd, tokens: Tokens, now: float
) -> Refused | None:
    """Give the first account, root first, that cannot hold the request; None if all of them can.

    Within one scope dollars are asked about before tokens.
    """
    for account in accounts:
        limit, balance = account.limit, account.balance
        if limit is None:
            continue
        most_usd, most_tokens = limit.limit_micro_usd, limit.limit_tokens
        if most_usd is not None and balance.used_micro_usd + micro_usd > most_usd:
            return _refused(
                account,
                limit.window,
                now,
                unit=Unit.MICRO_USD,
                limit=most_usd,
                requested=micro_usd,
            )
        if most_tokens is not None and balance.used_tokens + tokens > most_tokens:
            return _refused(
                account, limit.window, now, unit=Unit.TOKENS, limit=most_tokens, requested=tokens
            )
    return None


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
    )


def limit_text(limit: Limit) -> str:
    """Write a limit for people: `$50.00`, `$5.00 and 2,000 tokens (day)`, `none`."""
    amounts = [] if limit.limit_micro_usd is None else [format_usd(limit.limit_micro_usd)]
    if limit.limit_tokens is not None:
        amounts.append(f"{limit.limit_tokens:,} tokens")
    window = "" if limit.window == NO_WINDOW else f" ({format_window(limit.window)})"
    return f"{' and '.join(amounts)}{window}" if amounts else "none"


def check_founded(
    scope: Scope,
    *,
    in_force: Limit,
    wanted: Limit,
    source: str = "the request",
    change: str = "",
) -> None:
    """Refuse a limit that was to be founded where another one is in force.

    `change` is the command that would set it where the books are.
    """
    if in_force != wanted:
        raise BudgetMismatchError(
            scope=scope,
            existing=limit_text(in_force),
            wanted=limit_text(wanted),
            source=source,
            change=change or f"headgate budget set {scope or 'root'}",
        )


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


def journal_entry(settlement: Settlement, call: Call, *, at: float) -> JournalEntry | None:
    """Give the journal row of a call, None if nothing happened.

    Renewing a lease is no row: it moves neither money nor state, and comes with every heartbeat.
    """
    if settlement.is_repeat or call is Call.EXTEND:
        return None
    return JournalEntry(
        at=at,
        reservation_id=settlement.reservation.id,
        call=call,
        charges=settlement.reservation.charges,
        delta=settlement.delta,
    )


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
    account: Account, window: Window, now: float, *, unit: Unit, limit: int, requested: int
) -> Refused:
    spent, reserved, overrun = account.balance.column(unit)
    frees_at = resets_at(window, now, account.tz, oldest_bucket=account.oldest_bucket)
    # The best that reservations in flight can do is to be given back, all of them.
    could_be_released = spent + overrun + requested <= limit
    return Refused(
        scope=account.scope,
        unit=unit,
        limit=limit,
        spent=spent,
        reserved=reserved,
        overrun=overrun,
        requested=requested,
        resets_at=frees_at,
        may_clear=requested <= limit and (frees_at is not None or could_be_released),
    )
