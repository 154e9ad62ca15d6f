"""The budget tracker over any ledger.

It checks what comes in, makes ids where the caller made none, and turns refusals into errors.
Amounts enter as dollars and are whole micro-dollars from here on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from math import inf
from types import TracebackType
from typing import Self

from headgate.budget_tracker import (
    DEFAULT_LEASE_SECONDS,
    Amount,
    ReservationToken,
    check_id,
    new_reservation_id,
)
from headgate.core.budgets.accounts import JournalEntry, Limit, Refused, check_founded, exceeded
from headgate.core.budgets.books import ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import Call, Reservation
from headgate.core.budgets.scopes import Scope, charged_scopes, parse_scope
from headgate.core.budgets.windows import Window, parse_window
from headgate.core.money import (
    MicroUsd,
    Tokens,
    to_limit_micro_usd,
    to_limit_tokens,
    to_micro_usd,
    to_tokens,
    to_usd_float,
)
from headgate.errors import InvalidFieldError, InvalidSettingError
from headgate.hold import HeldMoney, hold
from headgate.ledger import MAX_ACCOUNTS, Ledger
from headgate.scope_status import ScopeStatus, status_tree

MAX_LEASE_SECONDS = 7 * 86_400.0
MAX_JOURNAL_ENTRIES = 10_000
NO_MONEY = MicroUsd(0)
NO_TOKENS = Tokens(0)


class LedgerTracker:
    """The budget tracker over any ledger; use it as an async context manager."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def __aenter__(self) -> Self:
        await self.ledger.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.ledger.close()

    async def set_budget(
        self,
        scope: str,
        limit_usd: Amount | None = None,
        limit_tokens: int | None = None,
        window: str | None = None,
    ) -> None:
        """Set or replace the limits of a scope and the window they hold for."""
        limit = _limit(limit_usd, limit_tokens, window)
        await self.ledger.set_limit(parse_scope(scope), limit)

    async def found_budget(
        self,
        scope: str,
        limit_usd: Amount | None = None,
        limit_tokens: int | None = None,
        window: str | None = None,
        *,
        source: str = "the request",
    ) -> Limit:
        """Set the limits of a scope that has none; one that has others: BudgetMismatchError.

        `source` says in that error who wants these. Returns what is in force, so what was given.
        """
        wanted = _limit(limit_usd, limit_tokens, window)
        if not wanted.has_amount:
            raise InvalidSettingError("limit_usd", "give an amount, in dollars or in tokens")
        name = parse_scope(scope)
        in_force = await self.ledger.found_limit(name, wanted)
        check_founded(name, in_force=in_force, wanted=wanted, source=source)
        return in_force

    async def reserve(
        self,
        scope: str,
        amount_usd: Amount = 0,
        *,
        tokens: int = 0,
        reservation_id: str | None = None,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        also: Iterable[str] = (),
        dispatched: bool = False,
    ) -> ReservationToken:
        """Hold an estimate in the scope, its ancestors and `also`, or raise BudgetExceededError."""
        charged = parse_scope(scope)
        further = tuple(parse_scope(name, field="also") for name in also)
        request = ReserveRequest(
            # A retried call must carry the same id, or a lost reply would be booked twice; so the
            # id is made here, once, and never below.
            reservation_id=new_reservation_id()
            if reservation_id is None
            else check_id(reservation_id),
            scopes=charged_scopes(charged, further),
            micro_usd=to_micro_usd(amount_usd),
            tokens=to_tokens(tokens),
            lease_seconds=_lease(lease_seconds),
            dispatched=bool(dispatched),
        )
        answer = await self.ledger.reserve(request)
        if isinstance(answer, Refused):
            raise exceeded(answer)
        return _token(answer, charged)

    def hold(
        self,
        scope: str,
        amount_usd: Amount = 0,
        *,
        tokens: int = 0,
        also: Iterable[str] = (),
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        reservation_id: str | None = None,
        not_charged_on: tuple[type[BaseException], ...] = (),
    ) -> AbstractAsyncContextManager[HeldMoney]:
        """Hold an estimate while the body runs, and settle it when the body ends."""
        return hold(
            self,
            scope,
            amount_usd,
            tokens=tokens,
            also=also,
            lease_seconds=lease_seconds,
            reservation_id=reservation_id,
            not_charged_on=not_charged_on,
        )

    async def dispatched(self, token: ReservationToken | str) -> ReservationToken:
        """Note that the provider is about to be called: from here on the end of the lease costs."""
        return await self._settle(token, Call.DISPATCHED)

    async def extend(
        self, token: ReservationToken | str, lease_seconds: float = DEFAULT_LEASE_SECONDS
    ) -> ReservationToken:
        """Renew the lease of a call that takes longer."""
        return await self._settle(token, Call.EXTEND, lease_seconds=_lease(lease_seconds))

    async def commit(
        self, token: ReservationToken | str, actual_usd: Amount = 0, *, tokens: int = 0
    ) -> None:
        """Book the actual cost in place of the estimate; more than was held is an overrun."""
        cost = to_micro_usd(actual_usd, field="actual_usd")
        await self._settle(token, Call.COMMIT, micro_usd=cost, tokens=to_tokens(tokens))

    async def release(self, token: ReservationToken | str) -> None:
        """Give the money back: the provider cannot have charged."""
        await self._settle(token, Call.RELEASE)

    async def get_spent(self, scope: str) -> float:
        """Return what a scope has spent in its window, overrun included, in dollars."""
        balance = (await self.ledger.accounts(parse_scope(scope), most=1))[0].balance
        return to_usd_float(balance.spent_micro_usd + balance.overrun_micro_usd)

    async def get_budget(self, scope: str) -> float | None:
        """Return the limit of a scope in dollars, None without one."""
        limit = (await self.ledger.accounts(parse_scope(scope), most=1))[0].limit
        if limit is None or limit.limit_micro_usd is None:
            return None
        return to_usd_float(limit.limit_micro_usd)

    async def status(self, scope: str = "") -> ScopeStatus:
        """Return a scope with everything within it, exactly."""
        # One more than is shown tells whether there are more.
        accounts = await self.ledger.accounts(parse_scope(scope), most=MAX_ACCOUNTS + 1)
        return status_tree(accounts, now=self.ledger.now(), most=MAX_ACCOUNTS)

    async def own_status(self, scope: str = "") -> ScopeStatus:
        """Return a scope alone, without what lies within it."""
        accounts = await self.ledger.accounts(parse_scope(scope), most=1)
        return status_tree(accounts, now=self.ledger.now(), most=1)

    async def journal(
        self,
        scope: str = "",
        *,
        since: float = 0.0,
        until: float | None = None,
        limit: int = 100,
    ) -> Sequence[JournalEntry]:
        """Return the latest changes of a scope in a time, newest first."""
        most = max(0, min(limit, MAX_JOURNAL_ENTRIES))
        return await self.ledger.journal(
            parse_scope(scope), since=since, until=inf if until is None else until, limit=most
        )

    async def _settle(
        self,
        token: ReservationToken | str,
        call: Call,
        *,
        micro_usd: MicroUsd = NO_MONEY,
        tokens: Tokens = NO_TOKENS,
        lease_seconds: float = 0.0,
    ) -> ReservationToken:
        request = SettleRequest(
            reservation_id=token.id if isinstance(token, ReservationToken) else check_id(token),
            call=call,
            micro_usd=micro_usd,
            tokens=tokens,
            lease_seconds=lease_seconds,
        )
        reservation = await self.ledger.settle(request)
        scope = token.scope if isinstance(token, ReservationToken) else reservation.scopes[-1]
        return _token(reservation, scope)


def _limit(limit_usd: Amount | None, limit_tokens: int | None, window: str | None) -> Limit:
    return Limit(
        limit_micro_usd=None if limit_usd is None else to_limit_micro_usd(limit_usd),
        limit_tokens=None if limit_tokens is None else to_limit_tokens(limit_tokens),
        window=_window(window),
    )


def _window(text: object) -> Window:
    if text is not None and not isinstance(text, str):
        raise InvalidSettingError("window", "must be a text, as in day or rolling:24h")
    return parse_window(text)


def _lease(seconds: object) -> float:
    is_switch = isinstance(seconds, bool)
    if isinstance(seconds, int | float) and not is_switch and 0 < seconds <= MAX_LEASE_SECONDS:
        return float(seconds)
    problem = f"must be a number, more than 0 and at most {MAX_LEASE_SECONDS:.0f}"
    raise InvalidFieldError("lease_seconds", problem)


def _token(reservation: Reservation, scope: Scope) -> ReservationToken:
    return ReservationToken(
        id=reservation.id,
        scope=scope,
        micro_usd=reservation.micro_usd,
        tokens=reservation.tokens,
        state=reservation.state,
        lease_until=reservation.lease_until,
    )
