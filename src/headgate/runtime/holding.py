"""Holding the money of a plan: the requests, and the books that are not in the store.

A reservation is named after its task, its attempt and the epoch that planned it. So a plan that is
tried again holds the same money again, and none twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import lru_cache

import msgspec
import structlog

from headgate.core.budgets.accounts import Refused
from headgate.core.budgets.books import ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import LIVE, Call, Reservation
from headgate.core.budgets.scopes import ROOT, Scope, charged_scopes
from headgate.core.dispatch.desk_settings import Planned
from headgate.core.money import MicroUsd, Tokens
from headgate.errors import CallerError, IllegalSettlementError, StoreUnavailableError
from headgate.ledger import Ledger

log = structlog.get_logger("headgate.holding")

GRACE_SECONDS = 60.0
"""How long a reservation outlives the time of its attempt, so that settling comes first."""

NO_DEADLINE_SECONDS = 86_400.0
MAX_GIVEN_BACK = 10_000
MAX_NAMES = 5


def reservation_id(line: Planned, epoch: int) -> str:
    """Return the name of the reservation of a line."""
    return f"{line.task.id}:{line.attempt}:{epoch}"


def reserve_request(line: Planned, name: str, now: float, *, dispatched: bool) -> ReserveRequest:
    """Return what a line asks the books for.

    The lease lasts as long as the attempt can: its settlement ends it, and after a crash the task
    is recovered and its reservation with it. So nothing has to be renewed while a task runs.
    """
    return ReserveRequest(
        reservation_id=name,
        scopes=_charged(line.task.scopes),
        micro_usd=MicroUsd(line.micro_usd),
        tokens=Tokens(line.tokens),
        lease_seconds=_longest_seconds(line, now) + GRACE_SECONDS,
        dispatched=dispatched,
    )


def _longest_seconds(line: Planned, now: float) -> float:
    """Return how long the attempt of a line can take."""
    deadline, attempt_seconds = line.task.deadline, line.terms.attempt_seconds
    if deadline is None:
        return NO_DEADLINE_SECONDS if attempt_seconds is None else attempt_seconds
    left_seconds = max(0.0, deadline - now)
    return left_seconds if attempt_seconds is None else min(left_seconds, attempt_seconds)


class HeldPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a plan: lines with money, lines that a scope refused, lines that are wrong."""

    held: list[Planned]
    refused: list[tuple[Planned, Refused]]
    wrong: list[tuple[Planned, str]]


class OutsideBooks:
    """Holds the money of plans in a ledger outside the store.

    It is only held: a crash before the work starts gives it back when its lease ends. The node
    that starts the work says so to the books first. What was given back is over for these books,
    so the next try at the same attempt has another name.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._given_back: dict[str, int] = {}

    def name(self, line: Planned, epoch: int) -> str:
        """Return the name under which the money of a line is held."""
        first = reservation_id(line, epoch)
        tries = self._given_back.get(first, 0)
        return f"{first}:{tries}" if tries else first

    async def hold(self, planned: list[Planned], epoch: int, now: float) -> HeldPlan:
        """Hold the money of a plan, each line by itself."""
        answers = await asyncio.gather(*(self._hold(line, epoch, now) for line in planned))
        plan = HeldPlan(held=[], refused=[], wrong=[])
        for line, answer in zip(planned, answers, strict=True):
            if isinstance(answer, Refused):
                plan.refused.append((line, answer))
            elif isinstance(answer, CallerError):
                plan.wrong.append((line, str(answer)))
            else:
                plan.held.append(line)
        return plan

    async def give_back(self, lines: Iterable[Planned], epoch: int) -> None:
        """Give the money of lines back that were not applied."""
        for line in lines:
            name = self.name(line, epoch)
            self._use_up(line, epoch)
            await self._ledger.settle(SettleRequest(reservation_id=name, call=Call.RELEASE))

    async def _hold(
        self, line: Planned, epoch: int, now: float
    ) -> Reservation | Refused | CallerError:
        for _ in range(MAX_NAMES):
            request = reserve_request(line, self.name(line, epoch), now, dispatched=False)
            try:
                answer = await self._ledger.reserve(request)
            except CallerError as error:
                return error
            if isinstance(answer, Refused) or answer.state in LIVE:
                return answer
            # It was given back by a step whose answer got lost.
            self._use_up(line, epoch)
        return CallerError(f"reservation {self.name(line, epoch)} is over; submit the task anew")

    def _use_up(self, line: Planned, epoch: int) -> None:
        first = reservation_id(line, epoch)
        self._given_back[first] = self._given_back.get(first, 0) + 1
        if len(self._given_back) > MAX_GIVEN_BACK:
            del self._given_back[next(iter(self._given_back))]


async def mark_dispatched(ledger: Ledger, name: str) -> bool:
    """Tell books outside the store that the work is about to start; False if it must not.

    Either they cannot be asked, or the money is not held any more.
    """
    request = SettleRequest(reservation_id=name, call=Call.DISPATCHED)
    try:
        await ledger.settle(request)
    except (StoreUnavailableError, IllegalSettlementError) as error:
        log.warning("an attempt was not started", reservation=name, problem=str(error))
        return False
    return True


@lru_cache(maxsize=4_096)
def _charged(scopes: tuple[str, ...]) -> tuple[Scope, ...]:
    return charged_scopes(ROOT, [Scope(scope) for scope in scopes])
