"""A ledger outside the store: reservations before a plan is applied, settlements afterwards.

A settlement was written together with the outcome, so none is lost: the outbox carries it until the
ledger has answered. The ledger recognises a repeat, so none is booked twice. One that it refuses
for good is logged and let go. That the ledger cannot be told is logged once, and so is that it can
be again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from math import inf
from typing import TypeVar

import msgspec
import structlog

from headgate.core.budgets.escrow import Amounts
from headgate.core.budgets.ledger import (
    MAX_ACCOUNTS,
    Account,
    AdjustRequest,
    Audit,
    JournalEntry,
    Ledger,
    Limit,
    Refused,
    ReserveRequest,
    SettleRequest,
)
from headgate.core.budgets.reservations import LIVE, Call, Reservation
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.dispatch_state import Planned, Settled
from headgate.errors import (
    CallerError,
    IllegalSettlementError,
    LedgerUnavailableError,
    StoreError,
    StoreUnavailableError,
)
from headgate.storage.store import TaskStore

log = structlog.get_logger("headgate.ledger")

MAX_SENT = 256
PAUSE_SECONDS = 0.05
RETRY_SECONDS = 1.0
LAST_SECONDS = 10.0
MOST_SUMMED = 1_000_000


class SettlementOutbox:
    """Carries settlements from the store to the ledger."""

    def __init__(
        self, store: TaskStore, ledger: Ledger, *, settled: Callable[[Settled], None]
    ) -> None:
        """Call `settled` with what the ledger has settled: it may have room now, or never."""
        self._store = store
        self._ledger = ledger
        self._settled = settled
        self._problem = ""
        self._is_waiting = False
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Carry until cancelled."""
        while True:
            try:
                sent = await self.run_once()
            except StoreUnavailableError as error:
                self._note_wait(error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if sent and self._is_waiting:
                self._is_waiting = False
                log.warning("the ledger is told of settlements again")
            await asyncio.sleep(0 if sent else PAUSE_SECONDS)

    async def finish(self, *, patience_seconds: float = 0.0) -> None:
        """Carry all that is left, before the end: nobody may come after this process.

        A ledger that is away is tried again for so long, until somebody is in a hurry. What cannot
        be carried now stays in the store, for whoever starts over it next.
        """
        problem = "the ledger is too slow"
        try:
            async with asyncio.timeout(patience_seconds or LAST_SECONDS):
                while True:
                    try:
                        if not await self.run_once():
                            return
                    except StoreUnavailableError as error:
                        problem = str(error)
                        if not patience_seconds or self._hurry.is_set():
                            break
                        await self._pause()
        except TimeoutError:
            pass
        log.warning("settlements are left in the outbox", problem=problem)

    def hurry(self) -> None:
        """Have `finish` try once more at most."""
        self._hurry.set()

    async def left_micro_usd(self) -> int:
        """Return how much money the ledger has yet to be told of."""
        requests = await self._store.outbox(limit=MOST_SUMMED)
        return sum(request.micro_usd for request in requests)

    def _note_wait(self, error: StoreUnavailableError) -> None:
        if not self._is_waiting:
            log.warning("settlements wait for the ledger", problem=str(error))
        self._is_waiting = True

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(RETRY_SECONDS):
                await self._hurry.wait()

    async def run_once(self) -> int:
        """Carry what waits, and return how many settlements the ledger has answered."""
        requests = await self._store.outbox(limit=MAX_SENT)
        if not requests:
            return 0
        answered = await asyncio.gather(*(self._settle(request) for request in requests))
        pairs = zip(requests, answered, strict=True)
        told = [request.reservation_id for request, answer in pairs if answer is not None]
        if told:
            await self._store.sent(told)
            for one in answered:
                if one is not None:
                    self._settled(one)
        if len(told) < len(requests):
            raise LedgerUnavailableError(self._problem)
        return len(told)

    async def _settle(self, request: SettleRequest) -> Settled | None:
        """Return what has been settled; None if the ledger could not be told."""
        try:
            found = await self._ledger.settle(request)
        except CallerError as error:
            # The lease ended first and the ledger has decided; saying it again changes nothing.
            log.warning("the ledger refused a settlement", problem=str(error))
            return Settled(())
        except StoreError as error:
            # The others are told all the same: one that cannot be must not stand before them.
            self._problem = str(error)
            return None
        has_freed = not Amounts(found.actual_micro_usd or 0, found.actual_tokens or 0).covers(
            Amounts(found.micro_usd, found.tokens)
        )
        return Settled(found.scopes, (found.kind,), has_freed)


# Whether the ledger answers, as those who use it see it.
#
# Every call shows it, and the last answer counts. Where nobody asks for a
# while, a loop does, so that a ledger which is back is known to be back before there is work for
# it.


LOOK_SECONDS = 5.0
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
            log.warning("the ledger is unavailable", problem=self.problem)

    async def open(self) -> None:
        """Connect, and bring the schema up to date."""
        await self._noted(self._ledger.open())

    async def close(self) -> None:
        """Let go of everything."""
        await self._ledger.close()

    async def set_limit(self, scope: Scope, limit: Limit) -> None:
        """Replace the limit of a scope; one without any amount removes it."""
        await self._noted(self._ledger.set_limit(scope, limit))

    async def create_limit(self, scope: Scope, limit: Limit) -> Limit:
        """Set the limit of a scope that has none, and return the one that is in force then."""
        return await self._noted(self._ledger.create_limit(scope, limit))

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        """Reserve the money in all scopes or in none; a known id gets its answer again."""
        return await self._noted(self._ledger.reserve(request))

    async def settle(self, request: SettleRequest) -> Reservation:
        """Apply a further call, or raise `IllegalSettlementError`."""
        return await self._noted(self._ledger.settle(request))

    async def adjust(self, request: AdjustRequest) -> Reservation:
        """Change a balance by the word of an operator, or raise a `CallerError`."""
        return await self._noted(self._ledger.adjust(request))

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
            self.problem = str(error) or "the ledger is unavailable"
            raise
        self.problem = ""
        return result


# The money of plans, reserved in a ledger outside the store.

MAX_GIVEN_BACK = 10_000
MAX_NAMES = 5


class ReservedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a plan: reserved, refused by a scope, or asked for wrongly."""

    reserved: list[tuple[Planned, Reservation]]
    refused: list[tuple[Planned, Refused]]
    wrong: list[tuple[Planned, str]]


class ExternalReservations:
    """Reserves the money of plans in a ledger outside the store.

    It is only held: a crash before the work starts gives it back when its lease ends. The node
    that starts the work says so to the ledger first. What was given back is over for the ledger, so
    the next try at the same attempt has another name.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._given_back: dict[str, int] = {}

    def name(self, planned: Planned, epoch: int) -> str:
        """Return the name under which the money of an attempt is reserved."""
        first = planned.reservation_id(epoch)
        tries = self._given_back.get(first, 0)
        return f"{first}:{tries}" if tries else first

    async def reserve(self, planned: list[Planned], epoch: int) -> ReservedPlan:
        """Reserve the money of a plan, each attempt by itself."""
        answers = await asyncio.gather(*(self._reserve(one, epoch) for one in planned))
        plan = ReservedPlan(reserved=[], refused=[], wrong=[])
        for one, answer in zip(planned, answers, strict=True):
            if isinstance(answer, Refused):
                plan.refused.append((one, answer))
            elif isinstance(answer, CallerError):
                plan.wrong.append((one, str(answer)))
            else:
                plan.reserved.append((one, answer))
        return plan

    async def give_back(self, planned: Iterable[Planned], epoch: int) -> None:
        """Release the money of attempts that were not applied."""
        for one in planned:
            name = self.name(one, epoch)
            self._use_up(one, epoch)
            await self._ledger.settle(SettleRequest(reservation_id=name, call=Call.RELEASE))

    async def _reserve(self, planned: Planned, epoch: int) -> Reservation | Refused | CallerError:
        for _ in range(MAX_NAMES):
            name = self.name(planned, epoch)
            request = planned.reserve_request(name, dispatched=False, lease_seconds=LEASE_SECONDS)
            try:
                answer = await self._ledger.reserve(request)
            except CallerError as error:
                return error
            if isinstance(answer, Refused) or answer.state in LIVE:
                return answer
            # It was given back by a step whose answer got lost.
            self._use_up(planned, epoch)
        return CallerError(f"reservation {self.name(planned, epoch)} is over; submit the task anew")

    def _use_up(self, planned: Planned, epoch: int) -> None:
        first = planned.reservation_id(epoch)
        self._given_back[first] = self._given_back.get(first, 0) + 1
        if len(self._given_back) > MAX_GIVEN_BACK:
            del self._given_back[next(iter(self._given_back))]


# The leases of that money. The ledger knows nothing of nodes and their leases, so its own are
# short, and whoever is in charge of an attempt renews them: the node that runs it, and the
# dispatcher for all that is in flight, at workers too. They outlive an election, and a restart that
# takes no longer. When everybody is gone, or the ledger was away for longer, what had begun is
# assumed to be spent, and its settlement corrects that.

LEASE_SECONDS = 60.0
RENEWALS_PER_LEASE = 4
MAX_RENEWED = 1_000
"""How many leases are renewed at once; a ledger may send them as one batch."""


class LeaseRenewer:
    """Renews the leases of money in a ledger outside the store."""

    def __init__(self, ledger: Ledger, held: Callable[[], Awaitable[set[str]]]) -> None:
        """Renew what `held` returns: the reservations of attempts that are under way."""
        self._ledger = ledger
        self._held = held
        self._over: set[str] = set()

    async def run(self) -> None:
        """Renew until cancelled; a ledger that is away is asked again soon."""
        while True:
            is_told = await self.run_once()
            await asyncio.sleep(LEASE_SECONDS / RENEWALS_PER_LEASE if is_told else RETRY_SECONDS)

    async def run_once(self) -> bool:
        """Renew all leases; return whether the ledger could be told of all of them."""
        held = await self._held()
        self._over &= held
        names = sorted(held - self._over)
        over: list[str] = []
        for start in range(0, len(names), MAX_RENEWED):
            batch = names[start : start + MAX_RENEWED]
            answers = await asyncio.gather(*(self._renew(name) for name in batch))
            if None in answers:
                return False
            over += [name for name, is_held in zip(batch, answers, strict=True) if not is_held]
        if over:
            # Most have been settled since. Of the others the lease ended while nobody renewed it:
            # what had begun is booked in full by now, and its settlement will correct that.
            ended = (await self._held()).intersection(over)
            self._over |= ended
            if ended:
                log.warning("the lease of money in use has ended", reservations=len(ended))
        return True

    async def _renew(self, name: str) -> bool | None:
        """Renew a lease; return whether the money is held, None if the ledger cannot be asked."""
        request = SettleRequest(reservation_id=name, call=Call.EXTEND, lease_seconds=LEASE_SECONDS)
        try:
            await self._ledger.settle(request)
        except IllegalSettlementError:
            return False
        except StoreError:
            return None
        return True


async def mark_dispatched(ledger: Ledger, name: str) -> bool:
    """Tell a ledger outside the store that the work is about to start; False if it must not.

    Either it cannot be asked, or the money is not reserved any more.
    """
    request = SettleRequest(reservation_id=name, call=Call.DISPATCHED)
    try:
        await ledger.settle(request)
    except (StoreUnavailableError, IllegalSettlementError) as error:
        log.warning("an attempt was not started", reservation=name, problem=str(error))
        return False
    return True
