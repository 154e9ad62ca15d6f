"""Budgets as metrics: what is counted when, under which labels, and how many of them."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from headgate.budgets.local import LocalBudgetTracker, LocalLedger
from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.ledger import MAX_ACCOUNTS, Account
from headgate.core.budgets.scopes import Scope
from headgate.errors import BudgetExceededError, LedgerUnavailableError
from headgate.metrics import MAX_SCOPES, BudgetMetrics
from headgate.testing import SimulatedLoop, simulate

REMAINING = "headgate_budget_remaining_usd"
RESERVED = "headgate_budget_reserved_usd"
REJECTIONS = "headgate_budget_rejections_total"


def labels_of(registry: CollectorRegistry, metric: str) -> list[dict[str, str]]:
    return [
        sample.labels
        for family in registry.collect()
        for sample in family.samples
        if sample.name == metric
    ]


def test_gauges_show_the_books_as_they_were_read() -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        metrics = BudgetMetrics(registry)
        async with LocalBudgetTracker() as tracker:
            await tracker.set_budget("session:eval", "50")
            await tracker.set_budget("session:eval/workflow:w1", "5")
            token = await tracker.reserve("session:eval/workflow:w1", "1.20")
            await metrics.refresh(tracker)
            await tracker.release(token)

    asyncio.run(scenario())
    session = {"workflow": "", "scope": "session:eval"}
    workflow = {"workflow": "w1", "scope": "session:eval/workflow:w1"}
    assert labels_of(registry, REMAINING) == [session, workflow]
    assert registry.get_sample_value(REMAINING, session) == pytest.approx(48.8)
    assert registry.get_sample_value(REMAINING, workflow) == pytest.approx(3.8)
    assert registry.get_sample_value(RESERVED, {"scope": "session:eval"}) == pytest.approx(1.2)
    assert registry.get_sample_value(RESERVED, {"scope": "(root)"}) == pytest.approx(1.2)


def test_gauges_have_every_amount_of_both_units() -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        metrics = BudgetMetrics(registry)
        async with LocalBudgetTracker() as tracker:
            await tracker.set_budget("session:eval", "50", limit_tokens=1_000)
            token = await tracker.reserve("session:eval", "1", tokens=100)
            await tracker.commit(token, "1.5", tokens=130)
            await tracker.reserve("session:eval", "2", tokens=200)
            await metrics.refresh(tracker)

    asyncio.run(scenario())
    names = ("limit", "spent", "reserved", "overrun")
    for unit, expected in (("usd", [50, 1, 2, 0.5]), ("tokens", [1_000, 100, 200, 30])):
        found = [
            registry.get_sample_value(f"headgate_budget_{name}_{unit}", {"scope": "session:eval"})
            for name in names
        ]
        assert found == expected, unit
    left = {"workflow": "", "scope": "session:eval"}
    assert registry.get_sample_value("headgate_budget_remaining_tokens", left) == 670
    for unit in ("usd", "tokens"):
        assert labels_of(registry, f"headgate_budget_limit_{unit}") == [{"scope": "session:eval"}]


def test_a_scope_with_a_limit_of_tokens_has_a_label_before_one_without_a_limit() -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        metrics = BudgetMetrics(registry)
        async with LocalBudgetTracker() as tracker:
            for number in range(MAX_SCOPES):
                await tracker.reserve(f"session:s{number:03}", "1")
            await tracker.set_budget("session:z", limit_tokens=5)
            await metrics.refresh(tracker)

    asyncio.run(scenario())
    assert labels_of(registry, "headgate_budget_limit_tokens") == [{"scope": "session:z"}]


def test_a_scope_that_left_the_books_leaves_the_gauges() -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        metrics = BudgetMetrics(registry)
        async with LocalBudgetTracker() as tracker:
            await tracker.set_budget("session:eval", "50")
            await metrics.refresh(tracker)
            await tracker.set_budget("session:eval")
            await metrics.refresh(tracker)

    asyncio.run(scenario())
    assert labels_of(registry, REMAINING) == []


def test_a_refusal_is_counted_at_once_under_the_scope_that_refused() -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        async with BudgetMetrics(registry).observe(LocalBudgetTracker()) as tracker:
            await tracker.set_budget("session:eval", "1", limit_tokens=10)
            await refused(tracker, "session:eval/workflow:w1", "2")
            await refused(tracker, "session:eval/workflow:w1", "0.5", tokens=11)
            await refused(tracker, "session:eval", "3")
            await tracker.commit(await tracker.reserve("session:eval", "1"), "1")

    asyncio.run(scenario())
    by_dollars = {"scope": "session:eval", "reason": "micro_usd"}
    by_tokens = {"scope": "session:eval", "reason": "tokens"}
    assert labels_of(registry, REJECTIONS) == [by_dollars, by_tokens]
    assert registry.get_sample_value(REJECTIONS, by_dollars) == 2
    assert registry.get_sample_value(REJECTIONS, by_tokens) == 1


async def refused(tracker: LedgerTracker, scope: str, amount: str, *, tokens: int = 0) -> None:
    with pytest.raises(BudgetExceededError):
        await tracker.reserve(scope, amount, tokens=tokens)


def test_an_unreachable_ledger_is_a_refusal_too() -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        async with BudgetMetrics(registry).observe(LocalBudgetTracker()) as tracker:
            await tracker.ledger.close()
            with pytest.raises(LedgerUnavailableError):
                await tracker.reserve("session:eval", "1")

    asyncio.run(scenario())
    labels = {"scope": "session:eval", "reason": "unavailable"}
    assert registry.get_sample_value(REJECTIONS, labels) == 1


def test_beyond_two_hundred_scopes_the_rest_is_one_label() -> None:
    registry = CollectorRegistry()
    count = MAX_SCOPES + 50

    async def scenario() -> None:
        metrics = BudgetMetrics(registry)
        async with metrics.observe(LocalBudgetTracker()) as tracker:
            for number in range(count):
                scope = f"session:s{number:03}"
                await tracker.set_budget(scope, number)
                await refused(tracker, scope, "1000")
                if number:
                    await tracker.reserve(f"{scope}/workflow:w", "0.25")
            await metrics.refresh(tracker)

    asyncio.run(scenario())
    # The root has a label of its own, and no limit that something could remain of.
    assert len(labels_of(registry, REMAINING)) == MAX_SCOPES
    assert len(labels_of(registry, RESERVED)) == MAX_SCOPES + 1
    assert len(labels_of(registry, REJECTIONS)) == MAX_SCOPES + 1
    other = {"scope": "other", "reason": "micro_usd"}
    assert registry.get_sample_value(REJECTIONS, other) == 50
    # The scope with the least room stands for all that share the label.
    least = registry.get_sample_value(REMAINING, {"workflow": "", "scope": "other"})
    assert least == pytest.approx(MAX_SCOPES - 1 - 0.25)


def test_money_is_counted_once_among_the_scopes_that_share_a_label() -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        metrics = BudgetMetrics(registry)
        async with LocalBudgetTracker() as tracker:
            for number in range(MAX_SCOPES):
                await tracker.set_budget(f"session:s{number:03}", 1)
            await tracker.reserve("team:t/workflow:w1", "0.25")
            await metrics.refresh(tracker)

    asyncio.run(scenario())
    assert registry.get_sample_value(RESERVED, {"scope": "other"}) == pytest.approx(0.25)


def test_the_shared_label_leaves_out_what_labels_of_their_own_show() -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        metrics = BudgetMetrics(registry)
        async with LocalBudgetTracker() as tracker:
            for number in range(MAX_SCOPES + 1):
                await tracker.set_budget(f"team:t/session:s{number:03}", 1)
            await tracker.reserve("team:t/session:s000", "0.50")
            await tracker.reserve("team:t/session:s200", "0.25")
            await metrics.refresh(tracker)

    asyncio.run(scenario())
    assert registry.get_sample_value(RESERVED, {"scope": "(root)"}) == pytest.approx(0.75)
    assert registry.get_sample_value(RESERVED, {"scope": "other"}) == pytest.approx(0.25)


class SilentLedger(LocalLedger):
    """A ledger that does not answer."""

    async def accounts(self, scope: Scope, *, most: int = MAX_ACCOUNTS) -> list[Account]:
        await asyncio.sleep(3_600)
        return await super().accounts(scope, most=most)


def test_a_ledger_that_does_not_answer_is_unavailable() -> None:
    async def main(_: SimulatedLoop) -> None:
        with pytest.raises(LedgerUnavailableError, match="did not answer within 10 seconds"):
            await BudgetMetrics(CollectorRegistry()).refresh(LedgerTracker(SilentLedger()))

    simulate(main)
