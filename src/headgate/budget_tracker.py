"""The contract of a budget tracker: reserve before the work, commit or release after it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Protocol

import msgspec

from headgate.core.budgets.accounts import JournalEntry
from headgate.core.budgets.reservations import LIVE, ReservationState
from headgate.core.budgets.scopes import Scope
from headgate.core.money import MicroUsd, Tokens
from headgate.errors import InvalidFieldError
from headgate.scope_status import ScopeStatus

Amount = Decimal | int | str | float

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
        """Whether the money is still held."""
        return self.state in LIVE


class BudgetTracker(Protocol):
    """Tracks cumulative cost against budgets, across everybody who shares the same books."""

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

    async def dispatched(self, token: ReservationToken | str) -> ReservationToken:
        """Note that the provider is about to be called."""

    async def extend(
        self, token: ReservationToken | str, lease_seconds: float = DEFAULT_LEASE_SECONDS
    ) -> ReservationToken:
        """Renew the lease of a call that takes longer."""

    async def commit(
        self, token: ReservationToken | str, actual_usd: Amount = 0, *, tokens: int = 0
    ) -> None:
        """Book the actual cost in place of the estimate."""

    async def release(self, token: ReservationToken | str) -> None:
        """Give the money back: the provider cannot have charged."""

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
        """Set or replace the limits of a scope and the window they hold for."""

    async def status(self, scope: str = "") -> ScopeStatus:
        """Return a scope with everything within it, exactly."""

    async def journal(
        self,
        scope: str = "",
        *,
        since: float = 0.0,
        until: float | None = None,
        limit: int = 100,
    ) -> Sequence[JournalEntry]:
        """Return the latest changes of a scope in a time, newest first."""


def check_id(reservation_id: object) -> str:
    """Return a reservation id that every backend can keep, or say what is wrong with it."""
    if not isinstance(reservation_id, str) or not reservation_id:
        raise InvalidFieldError("reservation_id", "must be a text that is not empty")
    if len(reservation_id) > MAX_ID_LENGTH or not reservation_id.isprintable():
        problem = f"must be printable and at most {MAX_ID_LENGTH} characters long"
        raise InvalidFieldError("reservation_id", problem)
    return reservation_id


def new_reservation_id() -> str:
    """Return an id that nobody else makes; later ones sort later, which databases keep cheaply."""
    return f"{time.time_ns() // 1_000:014x}{secrets.token_hex(9)}"
