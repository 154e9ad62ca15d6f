"""What the tests of ledgers share: a fresh ledger on any backend, and shorthands for reading it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from headgate.budgets.local import LocalLedger
from headgate.budgets.status import ScopeStatus
from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.ledger import Audit, Balance, Clock
from headgate.testing import VirtualClock

Result = TypeVar("Result")

BACKENDS = ("local", "sqlite", "redis", "postgres")
SHARED_BACKENDS = ("sqlite", "redis", "postgres")
A_DAY_SECONDS = 86_400.0


def run(scenario: Coroutine[Any, Any, Result]) -> Result:
    """Run an async scenario on a loop of its own."""
    return asyncio.run(scenario)


class TrackerFactory:
    """Trackers over one fresh ledger, all with the same virtual clock.

    Each call makes a further tracker, with its own connection where the backend has connections.
    """

    def __init__(self, backend: str, make: Callable[[Clock], LedgerTracker], url: str = "") -> None:
        self.backend = backend
        self.clock = VirtualClock()
        self.url = url
        self._make = make

    def __call__(self) -> LedgerTracker:
        """Make a tracker over this ledger; it is not open yet."""
        return self._make(self.clock)

    @asynccontextmanager
    async def two(self) -> AsyncIterator[tuple[LedgerTracker, LedgerTracker]]:
        """Open two trackers over the same ledger, as two processes would."""
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(self())
            yield first, await stack.enter_async_context(self())


class _TrackerType(Protocol):
    def __call__(self, place: str, *, clock: Clock) -> LedgerTracker: ...


def local_factory() -> TrackerFactory:
    """Make a factory whose trackers share one ledger in memory."""
    ledgers: list[LocalLedger] = []

    def make(clock: Clock) -> LedgerTracker:
        if not ledgers:
            ledgers.append(LocalLedger(clock=clock))
        return LedgerTracker(ledgers[0])

    return TrackerFactory("local", make, "memory:")


def placed_factory(backend: str, class_name: str, place: str, url: str) -> TrackerFactory:
    """Make a factory whose trackers go to the same file or server."""

    def make(clock: Clock) -> LedgerTracker:
        module = import_module(f"headgate.budgets.{backend}")
        return cast("_TrackerType", getattr(module, class_name))(place, clock=clock)

    return TrackerFactory(backend, make, url)


class Sums(NamedTuple):
    """One column of a status, in its unit."""

    spent: int
    reserved: int
    overrun: int


async def usd(tracker: LedgerTracker, scope: str = "") -> Sums:
    """Read the micro-dollars of a scope."""
    status = await tracker.status(scope)
    return Sums(status.spent_micro_usd, status.reserved_micro_usd, status.overrun_micro_usd)


async def tokens(tracker: LedgerTracker, scope: str = "") -> Sums:
    """Read the tokens of a scope."""
    status = await tracker.status(scope)
    return Sums(status.spent_tokens, status.reserved_tokens, status.overrun_tokens)


async def assert_ledger_is_right(tracker: LedgerTracker) -> None:
    """Hold the balances against the journal; a balance of nothing may be missing on a side."""
    audit = await tracker.ledger.audit()
    assert drift_of(audit) == {}


def drift_of(audit: Audit) -> dict[object, tuple[Balance, Balance]]:
    """Return the balances that differ from the sum of the journal, with both readings."""
    keys = set(audit.kept) | set(audit.journalled)
    pairs = {
        key: (audit.kept.get(key, Balance()), audit.journalled.get(key, Balance())) for key in keys
    }
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def flat(status: ScopeStatus) -> dict[str, ScopeStatus]:
    """Return a status and everything within it by scope."""
    found: dict[str, ScopeStatus] = {status.scope: status}
    for child in status.children:
        found |= flat(child)
    return found
