"""Holding money around one call to a provider: reserve, renew, and settle however the call ends.

Rule: what the provider may have charged is booked. A body that reports its cost has it committed;
one that says nothing is taken to have used all that was reserved. Money goes back only when the
provider cannot have charged, which the body knows, or the kind of its error says.

The settlement outlives a cancellation, within bounds. If the ledger cannot be asked then, the end
of the lease decides, and that books the reservation in full.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from decimal import Decimal
from typing import Any

from headgate.budget_tracker import (
    DEFAULT_LEASE_SECONDS,
    Amount,
    BudgetTracker,
    ReservationToken,
    new_reservation_id,
)
from headgate.core.money import MicroUsd, Tokens, to_micro_usd, to_tokens
from headgate.errors import (
    HeadgateError,
    IllegalSettlementError,
    LedgerUnavailableError,
)

SETTLE_SECONDS = 10.0
"""How long a settlement may take before the lease is left to decide."""

RENEWALS_PER_LEASE = 3
MAX_RENEWALS = 10_000


class HeldMoney:
    """Money held while a body runs; the body reports here what became of it.

    `renewal_error` is set when the lease could not be renewed: the money may be booked in full
    before the body ends, and its commit then corrects that.
    """

    def __init__(self, token: ReservationToken) -> None:
        self.reservation_id = token.id
        self.micro_usd = token.micro_usd
        self.tokens = token.tokens
        self.renewal_error: HeadgateError | None = None
        self._charged: tuple[MicroUsd, Tokens] | None = None
        self._is_free = False

    def charge(self, actual_usd: Amount, *, tokens: int | None = None) -> None:
        """Report what the call cost in all; a later report replaces it.

        Tokens that are not reported are taken to be those that were reserved.
        """
        cost = to_micro_usd(actual_usd, field="actual_usd")
        self._charged = (cost, self.tokens if tokens is None else to_tokens(tokens))

    def not_charged(self) -> None:
        """Report that the provider cannot have charged; a reported charge outweighs this."""
        self._is_free = True

    @property
    def is_given_back(self) -> bool:
        """Whether the reservation is to be released."""
        return self._is_free and self._charged is None

    @property
    def cost(self) -> tuple[MicroUsd, Tokens]:
        """What is to be committed: the reported charge, otherwise all that was reserved."""
        return (self.micro_usd, self.tokens) if self._charged is None else self._charged


@asynccontextmanager
async def hold(
    tracker: BudgetTracker,
    scope: str,
    amount_usd: Amount = 0,
    *,
    tokens: int = 0,
    also: Iterable[str] = (),
    lease_seconds: float = DEFAULT_LEASE_SECONDS,
    reservation_id: str | None = None,
    not_charged_on: tuple[type[BaseException], ...] = (),
) -> AsyncIterator[HeldMoney]:
    """Hold an estimate while the body runs, and settle it when the body ends.

    An error of a kind in `not_charged_on` says that the provider cannot have charged.

    One `reservation_id` is one call. While it is live it must not be held a second time: both
    bodies would run on the same money, and the ledger keeps only the cost that is booked first.
    """
    own_id = new_reservation_id()
    reserving = asyncio.ensure_future(
        tracker.reserve(
            scope,
            amount_usd,
            tokens=tokens,
            reservation_id=own_id if reservation_id is None else reservation_id,
            lease_seconds=lease_seconds,
            also=also,
            dispatched=True,
        )
    )
    try:
        token = await asyncio.shield(reserving)
    except (asyncio.CancelledError, LedgerUnavailableError):
        # It may be held all the same. Nobody else knows this id and the provider was not called,
        # so it can be given back; under an id of the caller's another call may be under way.
        await _finish(_give_up(tracker, reserving, own_id if reservation_id is None else None))
        raise
    _check_live(token)
    held = HeldMoney(token)
    renewing = asyncio.create_task(_renew(tracker, held, lease_seconds))
    try:
        yield held
    except BaseException as error:
        if isinstance(error, not_charged_on):
            held.not_charged()
        await _finish(_settle_after(tracker, held, renewing, error))
        raise
    await _finish(_settle(tracker, held, renewing))


def _check_live(token: ReservationToken) -> None:
    if not token.is_live:
        raise IllegalSettlementError(
            subject=f"reservation {token.id}",
            current=token.state.value,
            wanted="held again",
            allowed=(),
            advice="the call under this id is over, use a new id for a further one",
        )


async def _renew(tracker: BudgetTracker, held: HeldMoney, lease_seconds: float) -> None:
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


async def _settle(tracker: BudgetTracker, held: HeldMoney, renewing: asyncio.Task[None]) -> None:
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
    tracker: BudgetTracker, held: HeldMoney, renewing: asyncio.Task[None], error: BaseException
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
