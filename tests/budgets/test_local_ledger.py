"""The ledger in memory over a long time: what it lets go, and that it stays right."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from headgate.budgets.local import LocalBudgetTracker, LocalLedger
from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.ledger import FINISHED_KEPT_SECONDS
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.errors import BudgetExceededError

SCOPE = Scope("session:s")
BUCKET_SECONDS = 150
START = 1_775_995_200.0
BUCKETS_KEPT = 2 * (FINISHED_KEPT_SECONDS + 3_600) / BUCKET_SECONDS


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


async def spend(tracker: LedgerTracker) -> None:
    await tracker.commit(await tracker.reserve(SCOPE, "0.01"), "0.01")


async def kept_starts(ledger: LocalLedger) -> list[int]:
    audit = await ledger.audit()
    assert audit.kept == audit.journalled
    return sorted(start for scope, start in audit.kept if scope == SCOPE)


def test_buckets_that_left_their_window_long_ago_are_dropped() -> None:
    async def scenario() -> None:
        hands = Hands()
        ledger = LocalLedger(clock=hands)
        tracker = LedgerTracker(ledger)
        await tracker.set_budget(SCOPE, "1", window="rolling:1h")
        for step in range(3_000):
            await spend(tracker)
            if step % 500 == 0:
                await kept_starts(ledger)
            hands.now += BUCKET_SECONDS
        starts = await kept_starts(ledger)
        assert len(starts) < BUCKETS_KEPT / 2 + 50
        assert starts[-1] == hands.now - BUCKET_SECONDS
        assert await tracker.get_spent(SCOPE) == 0.24
        # All that was ever spent stays with the root, which has no window.
        assert await tracker.get_spent(ROOT) == 30.0

    asyncio.run(scenario())


def test_a_bucket_that_holds_money_stays() -> None:
    async def scenario() -> None:
        hands = Hands()
        ledger = LocalLedger(clock=hands)
        tracker = LedgerTracker(ledger)
        await tracker.set_budget(SCOPE, "1", window="rolling:1h")
        held = await tracker.reserve(SCOPE, "0.50", lease_seconds=7 * 86_400)
        for _ in range(1_000):
            hands.now += BUCKET_SECONDS * 3
            await spend(tracker)
        assert (await kept_starts(ledger))[0] == START
        await tracker.commit(held, "0.40")
        assert (await kept_starts(ledger))[0] == START
        hands.now += FINISHED_KEPT_SECONDS + 1
        for _ in range(200):
            await tracker.status(SCOPE)
        assert START not in await kept_starts(ledger)
        assert await tracker.get_spent(ROOT) == 10.4

    asyncio.run(scenario())


def test_a_window_that_was_taken_away_counts_all_that_is_left() -> None:
    async def scenario() -> None:
        hands = Hands()
        tracker = LedgerTracker(LocalLedger(clock=hands))
        await tracker.set_budget(SCOPE, "1", window="day")
        await spend(tracker)
        await tracker.set_budget(SCOPE, "1")
        hands.now += 10 * FINISHED_KEPT_SECONDS
        for _ in range(100):
            await tracker.status(SCOPE)
        assert await tracker.get_spent(SCOPE) == 0.01

    asyncio.run(scenario())


@pytest.fixture
def switches_often() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("switches_often")
def test_threads_with_a_loop_each_share_the_ledger() -> None:
    threads, calls = 8, 150
    tracker = LocalBudgetTracker()

    async def spend_and_look() -> int:
        spent = 0
        for number in range(calls):
            try:
                token = await tracker.reserve(f"session:s/run:{number}", "0.01")
                await tracker.commit(token, "0.01")
                spent += 1
            except BudgetExceededError:
                await tracker.status()
        return spent

    asyncio.run(tracker.set_budget(SCOPE, "6.00"))
    with ThreadPoolExecutor(threads) as pool:
        spent = [pool.submit(asyncio.run, spend_and_look()) for _ in range(threads)]
    assert sum(thread.result() for thread in spent) == 600
    assert asyncio.run(tracker.get_spent(SCOPE)) == 6.0
    audit = asyncio.run(tracker.ledger.audit())
    assert audit.kept == audit.journalled
