"""The budget tracker over any ledger.

It checks what comes in, makes ids where the caller made none, and turns refusals into errors.
Amounts enter as dollars and are whole micro-dollars from here on.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import ContextVar
from decimal import Decimal
from math import inf
from types import TracebackType
from typing import Any, Literal, Protocol, Self, get_args
from weakref import ref

import msgspec

from headgate.budgets.status import ScopeStatus, has_limit, status_steps, status_tree
from headgate.budgets.waiting import BudgetQueue, queue_of, tell_freed
from headgate.core.budgets.ledger import (
    MAX_ACCOUNTS,
    Adjustment,
    AdjustRequest,
    Flexible,
    JournalEntry,
    Ledger,
    Limit,
    Refused,
    ReserveRequest,
    SettleRequest,
    check_created,
    exceeded,
)
from headgate.core.budgets.reservations import LIVE, Call, Reservation, ReservationState
from headgate.core.budgets.scopes import ROOT, Scope, Tenant, charged_scopes, parse_scope
from headgate.core.budgets.windows import Window, parse_window
from headgate.core.estimates import Hold
from headgate.core.money import (
    MicroUsd,
    Tokens,
    to_limit_micro_usd,
    to_limit_tokens,
    to_micro_usd,
    to_signed_micro_usd,
    to_signed_tokens,
    to_tokens,
    to_usd_float,
)
from headgate.core.text import Steps, at_once
from headgate.errors import (
    HeadgateError,
    IllegalSettlementError,
    InvalidFieldError,
    InvalidSettingError,
    LedgerUnavailableError,
)

# The contract of a budget tracker: reserve before the work, commit or release after it.

Amount = Decimal | int | str | float
OnExhausted = Literal["wait", "reject"]
"""What a call does where a budget has no room now, and may have it later."""

DEFAULT_LEASE_SECONDS = 60.0
MAX_ID_LENGTH = 200


class ReservationToken(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller keeps between reserve and commit: the id, and how the reservation stands.

    A reserve that was repeated late may find its reservation over; `is_live` says whether the
    provider may still be called on it.
    """

    id: str
    scope: Scope
    micro_usd: MicroUsd
    tokens: Tokens
    state: ReservationState
    lease_until: float

    @property
    def is_live(self) -> bool:
        """Whether the money is still reserved."""
        return self.state in LIVE


class BudgetTracker(Protocol):
    """Tracks cumulative cost against budgets, across everybody who shares the same ledger."""

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
        flexible: Flexible | None = None,
    ) -> ReservationToken:
        """Reserve an estimate in the scope, its ancestors and `also`, or raise BudgetExceededError.

        Amounts count as given, also zero, unless `flexible` says that they are learned or unknown.
        """

    async def dispatched(self, token: ReservationToken | str) -> ReservationToken:
        """Record that the caller is about to call the provider."""

    async def extend(
        self, token: ReservationToken | str, lease_seconds: float = DEFAULT_LEASE_SECONDS
    ) -> ReservationToken:
        """Renew the lease of a reservation."""

    async def commit(
        self, token: ReservationToken | str, actual_usd: Amount = 0, *, tokens: int = 0
    ) -> None:
        """Book the actual cost in place of the estimate."""

    async def release(self, token: ReservationToken | str) -> None:
        """Release the money, because the provider cannot have charged."""

    async def get_spent(self, scope: str) -> float:
        """Return what a scope has spent in its window, overrun included, in dollars."""

    async def get_budget(self, scope: str) -> float | None:
        """Return the limit of a scope in dollars, None without one."""

    async def set_budget(
        self,
        scope: str,
        limit_usd: Amount | None = None,
        limit_tokens: int | None = None,
        window: str | None = None,
    ) -> None:
        """Set or replace the limits of a scope and their window."""

    async def status(self, scope: str = "") -> ScopeStatus:
        """Return the exact balances of a scope and of the scopes inside it."""

    async def journal(
        self,
        scope: str = "",
        *,
        since: float = 0.0,
        until: float | None = None,
        limit: int = 100,
    ) -> Sequence[JournalEntry]:
        """Return the latest changes of a scope in a period, newest first."""


def check_id(reservation_id: object) -> str:
    """Return a reservation id that every backend can keep, or say what is wrong with it."""
    if not isinstance(reservation_id, str) or not reservation_id:
        raise InvalidFieldError("reservation_id", "must be a string that is not empty")
    if len(reservation_id) > MAX_ID_LENGTH or not reservation_id.isprintable():
        problem = f"must be printable and at most {MAX_ID_LENGTH} characters long"
        raise InvalidFieldError("reservation_id", problem)
    return reservation_id


def new_reservation_id() -> str:
    """Return an id that nobody else makes; later ones sort later, which databases keep cheaply."""
    return f"{time.time_ns() // 1_000:014x}{secrets.token_hex(9)}"


# Holding money around one call to a provider: reserve, renew, and settle however the call ends.
#
# Rule: what the provider may have charged is booked. A body that reports its cost has it committed;
# one that says nothing is taken to have used all that was reserved. Money goes back only when the
# provider cannot have charged, which the body knows, or the kind of its error says.
#
# The settlement outlives a cancellation, within bounds. If the ledger cannot be asked then, the end
# of the lease decides, and that books the reservation in full.

SETTLE_SECONDS = 10.0
"""How long a settlement may take before the lease is left to decide."""

RENEWALS_PER_LEASE = 3
MAX_RENEWALS = 10_000


class ActiveReservation:
    """Money held while a body runs; the body reports here what became of it.

    `renewal_error` is set when the lease could not be renewed: the money may be booked in full
    before the body ends, and its commit then corrects that.
    """

    def __init__(
        self, token: ReservationToken, tracker: BudgetTracker, hold: Hold | None = None
    ) -> None:
        self.tracker = tracker
        self.hold = hold
        self.reported_tokens: int | None = None
        self.reservation_id = token.id
        self.micro_usd = token.micro_usd
        self.tokens = token.tokens
        self.renewal_error: HeadgateError | None = None
        self.is_over = False
        self.is_assumed = False
        self._charged: tuple[MicroUsd, Tokens] | None = None
        self._is_free = False

    def charge(
        self, actual_usd: Amount, *, tokens: int | None = None, is_assumed: bool = False
    ) -> None:
        """Report the total cost of the call; a later report replaces an earlier one.

        Tokens that are not reported are taken to be those that were reserved. Nothing is learned
        from a cost that is only assumed.
        """
        cost = to_micro_usd(actual_usd, field="actual_usd")
        self.is_assumed = is_assumed
        self.reported_tokens = None if tokens is None or is_assumed else to_tokens(tokens)
        self._charged = (cost, self.tokens if tokens is None else to_tokens(tokens))

    def not_charged(self) -> None:
        """Report that the provider cannot have charged; a reported charge has precedence."""
        self._is_free = True

    @property
    def reported_micro_usd(self) -> int | None:
        """The cost that was reported, None without a report."""
        return None if self._charged is None or self.is_assumed else self._charged[0]

    @property
    def is_given_back(self) -> bool:
        """Whether the reservation is to be released."""
        return self._is_free and self._charged is None

    @property
    def cost(self) -> tuple[MicroUsd, Tokens]:
        """What is to be committed: the reported charge, otherwise all that was reserved."""
        return (self.micro_usd, self.tokens) if self._charged is None else self._charged


@asynccontextmanager
async def reserved(
    tracker: BudgetTracker,
    scope: str,
    amount_usd: Amount = 0,
    *,
    tokens: int = 0,
    also: Iterable[str] = (),
    lease_seconds: float = DEFAULT_LEASE_SECONDS,
    reservation_id: str | None = None,
    not_charged_on: tuple[type[BaseException], ...] = (),
    on_exhausted: OnExhausted = "wait",
    max_wait_seconds: float | None = None,
    hold: Callable[[], Hold] | None = None,
) -> AsyncIterator[ActiveReservation]:
    """Reserve an estimate while the body runs, and book the cost when the body ends.

    An error of a kind in `not_charged_on` says that the provider cannot have charged.

    Where a budget has no room now and may have it later, the call waits its turn, for
    `max_wait_seconds` at most; with `on_exhausted="reject"` it is refused at once. Inside of
    another reservation it waits only if it says for how long: it could be waiting for itself.

    `hold` says instead of the amounts what is to be held, where that is learned or unknown. It is
    asked anew for each try, because others of the kind may have ended meanwhile.

    One `reservation_id` is one call. While it is live it must not be held a second time: both
    bodies would run on the same money, and the ledger keeps only the cost that is booked first.
    """
    further = tuple(also)
    scopes = scopes_of(scope, further)
    own_id = new_reservation_id()

    async def ask() -> tuple[ReservationToken, Hold | None]:
        now = None if hold is None else hold()
        flexible = None if now is None else now.flexible
        # A tracker of somebody else's need not know what a flexible amount is.
        more: dict[str, Any] = {} if flexible is None else {"flexible": flexible}
        reserving = asyncio.ensure_future(
            tracker.reserve(
                scope,
                amount_usd if now is None else Decimal(now.micro_usd.amount).scaleb(-6),
                tokens=tokens if now is None else now.tokens.amount,
                **more,
                reservation_id=own_id if reservation_id is None else reservation_id,
                lease_seconds=lease_seconds,
                also=further,
                dispatched=True,
            )
        )
        try:
            return await asyncio.shield(reserving), now
        except (asyncio.CancelledError, LedgerUnavailableError):
            # It may be held all the same. Nobody else knows this id and the provider was not
            # called, so it can be given back; under an id of the caller's another call may be
            # under way.
            await _finish(_give_up(tracker, reserving, own_id if reservation_id is None else None))
            raise

    if may_wait(tracker, on_exhausted, max_wait_seconds):
        queue, kind = budget_queue(tracker), "" if hold is None else hold().waiting_kind
        token, held_by = await queue.reserve(
            scopes, ask, kind=kind, max_wait_seconds=max_wait_seconds
        )
    else:
        token, held_by = await ask()
    _check_live(token)
    held = ActiveReservation(token, tracker, held_by)
    note_held(held)
    renewing = asyncio.create_task(_renew(tracker, held, lease_seconds))
    try:
        yield held
    except BaseException as error:
        if isinstance(error, not_charged_on):
            held.not_charged()
        await _finish(_settle_after(tracker, held, renewing, error))
        raise
    else:
        await _finish(_settle(tracker, held, renewing))
    finally:
        held.is_over = True
        if not isinstance(tracker, LedgerTracker):
            # The trackers of this package tell by themselves, whoever settles.
            tell_freed(tracker, scopes)


def budget_queue(tracker: BudgetTracker) -> BudgetQueue:
    """Return the queue of those who wait for a tracker on this event loop."""
    clock = tracker.ledger.now if isinstance(tracker, LedgerTracker) else time.time
    return queue_of(tracker, clock)


def scopes_of(scope: str, also: Iterable[str]) -> tuple[Scope, ...]:
    """Return every scope that a reservation is charged to."""
    further = [parse_scope(name, field="also") for name in also]
    return charged_scopes(parse_scope(scope), further)


_held_here: ContextVar[tuple[ref[ActiveReservation], ...]] = ContextVar("held_here", default=())
"""What this task holds, or held a moment ago; what was forgotten with its loop does not count."""


def note_held(held: ActiveReservation) -> None:
    """Note that this task holds money until it says otherwise."""
    _held_here.set((*map(ref, _live_here()), ref(held)))


def may_wait(
    tracker: BudgetTracker, on_exhausted: OnExhausted, max_wait_seconds: float | None
) -> bool:
    """Tell whether a call waits for money; one that holds some only if it says for how long."""
    if on_exhausted not in get_args(OnExhausted):
        choices = ", ".join(get_args(OnExhausted))
        raise InvalidFieldError("on_exhausted", f"must be one of {choices}, not {on_exhausted!r}")
    if max_wait_seconds is not None and not max_wait_seconds >= 0:
        raise InvalidFieldError("max_wait_seconds", "must be a number of seconds, at least 0")
    if on_exhausted == "reject":
        return False
    return max_wait_seconds is not None or all(one.tracker is not tracker for one in _live_here())


def _live_here() -> list[ActiveReservation]:
    known = [one() for one in _held_here.get()]
    return [held for held in known if held is not None and not held.is_over]


def _check_live(token: ReservationToken) -> None:
    if not token.is_live:
        raise IllegalSettlementError(
            subject=f"reservation {token.id}",
            current=token.state.value,
            wanted="held again",
            allowed=(),
            advice="the call under this id is over, use a new id for a further one",
        )


async def _renew(tracker: BudgetTracker, held: ActiveReservation, lease_seconds: float) -> None:
    pause = lease_seconds / RENEWALS_PER_LEASE
    for _ in range(MAX_RENEWALS):
        await asyncio.sleep(pause)
        try:
            async with asyncio.timeout(pause):
                await tracker.extend(held.reservation_id, lease_seconds)
            held.renewal_error = None
        except TimeoutError:
            problem = f"the ledger did not renew a lease within {pause:g} seconds"
            held.renewal_error = LedgerUnavailableError(problem)
        except LedgerUnavailableError as error:
            held.renewal_error = error
        except HeadgateError as error:
            held.renewal_error = error
            return


async def _settle(
    tracker: BudgetTracker, held: ActiveReservation, renewing: asyncio.Task[None]
) -> None:
    renewing.cancel()
    try:
        async with asyncio.timeout(SETTLE_SECONDS):
            await asyncio.wait({renewing})
            if held.is_given_back:
                await tracker.release(held.reservation_id)
            else:
                cost, tokens = held.cost
                usd = Decimal(cost).scaleb(-6)
                await tracker.commit(held.reservation_id, usd, tokens=tokens)
    except TimeoutError:
        problem = f"reservation {held.reservation_id} was not settled in time: its lease decides"
        raise LedgerUnavailableError(problem) from None


async def _settle_after(
    tracker: BudgetTracker,
    held: ActiveReservation,
    renewing: asyncio.Task[None],
    error: BaseException,
) -> None:
    """Settle a body that failed; its own error is the one to raise."""
    try:
        await _settle(tracker, held, renewing)
    except HeadgateError as problem:
        error.add_note(f"and its reservation was not settled: {problem}")


async def _give_up(
    tracker: BudgetTracker, reserving: asyncio.Future[ReservationToken], own_id: str | None
) -> None:
    """Let a reserve that nobody waits for any more come to its end, then give its money back.

    The release must not overtake the reserve: it would find nothing, and leave the money held.
    """
    with suppress(HeadgateError, TimeoutError):
        async with asyncio.timeout(SETTLE_SECONDS):
            await asyncio.wait({reserving})
            if own_id is not None:
                await tracker.release(own_id)
    reserving.cancel()
    with suppress(HeadgateError, asyncio.CancelledError):
        await reserving


async def _finish(settlement: Coroutine[Any, Any, None]) -> None:
    """Await a settlement to its end, also through cancellations; these are raised afterwards."""
    task = asyncio.create_task(settlement)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        task.result()
        return
    if not task.cancelled():
        task.exception()
    raise cancelled


MAX_LEASE_SECONDS = 7 * 86_400.0
MAX_JOURNAL_ENTRIES = 10_000
NO_MONEY = MicroUsd(0)
NO_TOKENS = Tokens(0)


class LedgerTracker:
    """The budget tracker on any ledger; use it as an async context manager."""

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
        """Set or replace the limits of a scope and their window."""
        limit = _limit(limit_usd, limit_tokens, window)
        await self.ledger.set_limit(parse_scope(scope), limit)

    async def create_budget(
        self,
        scope: str,
        limit_usd: Amount | None = None,
        limit_tokens: int | None = None,
        window: str | None = None,
        *,
        source: str = "the request",
        is_by_tenant: bool = False,
        ledger: str = "",
    ) -> Limit:
        """Set the limits of a scope that has none; one that has others: BudgetMismatchError.

        `source` says in that error who wants these, `ledger` where the budget command finds them.
        Returns what is in force, so what was given.
        """
        limit = _limit(limit_usd, limit_tokens, window)
        wanted = msgspec.structs.replace(limit, is_by_tenant=is_by_tenant)
        if not wanted.has_amount:
            raise InvalidSettingError("limit_usd", "give an amount, in dollars or in tokens")
        name = parse_scope(scope)
        in_force = await self.ledger.create_limit(name, wanted)
        check_created(name, in_force=in_force, wanted=wanted, source=source, ledger=ledger)
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
        flexible: Flexible | None = None,
    ) -> ReservationToken:
        """Reserve an estimate in the scope, its ancestors and `also`, or raise BudgetExceededError.

        Amounts count as given, also zero, unless `flexible` says that they are learned or unknown.
        """
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
            flexible=flexible,
        )
        answer = await self.ledger.reserve(request)
        if isinstance(answer, Refused):
            raise exceeded(answer)
        return _token(answer, charged)

    def reserved(
        self,
        scope: str,
        amount_usd: Amount = 0,
        *,
        tokens: int = 0,
        also: Iterable[str] = (),
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        reservation_id: str | None = None,
        not_charged_on: tuple[type[BaseException], ...] = (),
        on_exhausted: OnExhausted = "wait",
        max_wait_seconds: float | None = None,
        hold: Callable[[], Hold] | None = None,
    ) -> AbstractAsyncContextManager[ActiveReservation]:
        """Reserve an estimate while the body runs, and book the cost when the body ends."""
        return reserved(
            self,
            scope,
            amount_usd,
            tokens=tokens,
            also=also,
            lease_seconds=lease_seconds,
            reservation_id=reservation_id,
            not_charged_on=not_charged_on,
            on_exhausted=on_exhausted,
            max_wait_seconds=max_wait_seconds,
            hold=hold,
        )

    async def dispatched(self, token: ReservationToken | str) -> ReservationToken:
        """Record that the caller is about to call the provider: a lease that ends now costs."""
        return await self._settle(token, Call.DISPATCHED)

    async def extend(
        self, token: ReservationToken | str, lease_seconds: float = DEFAULT_LEASE_SECONDS
    ) -> ReservationToken:
        """Renew the lease of a reservation."""
        return await self._settle(token, Call.EXTEND, lease_seconds=_lease(lease_seconds))

    async def commit(
        self,
        token: ReservationToken | str,
        actual_usd: Amount = 0,
        *,
        tokens: int = 0,
        tenant: Tenant | None = None,
    ) -> None:
        """Book the actual cost in place of the estimate; more than was held is an overrun.

        What a `tenant` claims counts beyond its own scopes as far as its own limits reach.
        """
        cost, used = to_micro_usd(actual_usd, field="actual_usd"), to_tokens(tokens)
        await self._settle(token, Call.COMMIT, micro_usd=cost, tokens=used, tenant=tenant)

    async def adjust(
        self,
        scope: str,
        usd: Amount | None = None,
        *,
        tokens: int | None = None,
        call: Adjustment = Adjustment.ADJUST,
        adjustment_id: str | None = None,
    ) -> ScopeStatus:
        """Change the booked amount of one scope, or accept or reject its claims.

        An amount that is added or taken away has a sign; without any amount all that is claimed
        is accepted or rejected. Returns the scope as it is then.
        """
        amounts = (
            None if usd is None else to_signed_micro_usd(usd, field="usd"),
            None if tokens is None else to_signed_tokens(tokens),
        )
        is_adjust = call is Adjustment.ADJUST
        if is_adjust and not any(amounts):
            raise InvalidFieldError("usd", "give what to add or take away, in usd or in tokens")
        if not is_adjust and min(amount or 0 for amount in amounts) < 0:
            raise InvalidFieldError("usd", f"is negative; name how much to {call.value}")
        is_all = not is_adjust and amounts == (None, None)
        request = AdjustRequest(
            reservation_id=new_reservation_id()
            if adjustment_id is None
            else check_id(adjustment_id),
            scope=parse_scope(scope),
            call=call,
            micro_usd=amounts[0] if is_all else amounts[0] or 0,
            tokens=amounts[1] if is_all else amounts[1] or 0,
        )
        reservation = await self.ledger.adjust(request)
        tell_freed(self, reservation.scopes)
        return await self.own_status(request.scope)

    async def release(self, token: ReservationToken | str) -> None:
        """Release the money, because the provider cannot have charged."""
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
        """Return the exact balances of a scope and of the scopes inside it."""
        return at_once(await self.status_steps(scope))

    async def status_steps(self, scope: str = "") -> Steps[ScopeStatus]:
        """Read a scope with everything within it, and return what nests it in slices."""
        # One more than is shown tells whether there are more.
        accounts = await self.ledger.accounts(parse_scope(scope), most=MAX_ACCOUNTS + 1)
        return status_steps(accounts, now=self.ledger.now(), most=MAX_ACCOUNTS)

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
        """Return the latest changes of a scope in a period, newest first."""
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
        tenant: Tenant | None = None,
    ) -> ReservationToken:
        request = SettleRequest(
            reservation_id=token.id if isinstance(token, ReservationToken) else check_id(token),
            call=call,
            micro_usd=micro_usd,
            tokens=tokens,
            lease_seconds=lease_seconds,
            tenant=tenant,
        )
        reservation = await self.ledger.settle(request)
        if reservation.state not in LIVE:
            tell_freed(self, reservation.scopes)
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
        raise InvalidSettingError("window", "must be a string, as in day or rolling:24h")
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


# Which scopes of a ledger have a limit, remembered for a while.
#
# Every task that names a scope of its own asks this, so that few of them ask the ledger. Rule: what
# is kept is bounded in number and age; a limit that is new or gone is seen within `FRESH_SECONDS`.

FRESH_SECONDS = 30.0
MAX_KEPT = 4_096
MAX_NAMES = 1_000


class DefinedBudgets:
    """What a ledger says of the limits of scopes."""

    def __init__(self, tracker: LedgerTracker) -> None:
        self._tracker = tracker
        self._kept: OrderedDict[Scope, tuple[bool, float]] = OrderedDict()
        self._names: tuple[Scope, ...] = ()
        self._names_until = 0.0

    async def is_limited(self, scope: Scope) -> bool:
        """Tell whether a scope itself has a limit."""
        now = self._tracker.ledger.now()
        is_limited, until = self._kept.get(scope, (False, 0.0))
        if now < until:
            return is_limited
        is_limited = has_limit(await self._tracker.own_status(scope))
        self._kept[scope] = (is_limited, now + FRESH_SECONDS)
        self._kept.move_to_end(scope)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return is_limited

    async def names(self) -> tuple[Scope, ...]:
        """Return scopes that have a limit, as many as are looked at for one that is meant."""
        now = self._tracker.ledger.now()
        if now >= self._names_until:
            accounts = await self._tracker.ledger.accounts(ROOT, most=MAX_NAMES)
            limited = [one for one in accounts if one.limit is not None and one.limit.has_amount]
            self._names = tuple(one.scope for one in limited)
            self._names_until = now + FRESH_SECONDS
        return self._names
