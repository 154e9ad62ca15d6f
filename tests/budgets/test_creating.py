"""Founding a budget: of all who want to give a scope its limit, one does, and everybody sees it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from budgets.support import TrackerFactory, assert_ledger_is_right, flat
from headgate.core.budgets.ledger import Limit
from headgate.core.budgets.scopes import parse_scope
from headgate.core.budgets.windows import parse_window
from headgate.core.money import MicroUsd, Tokens
from headgate.engine.external_ledger import WatchedLedger
from headgate.errors import (
    BudgetExceededError,
    BudgetMismatchError,
    InvalidScopeError,
    InvalidSettingError,
)

SESSION = parse_scope("session:eval")
FOUNDERS = 20
WINDOWS = ("none", "day", "week@Europe/Berlin", "rolling:24h")


def dollars(amount: int, *, window: str = "none", tokens: int | None = None) -> Limit:
    return Limit(
        limit_micro_usd=MicroUsd(amount * 1_000_000),
        limit_tokens=None if tokens is None else Tokens(tokens),
        window=parse_window(window),
    )


async def test_a_limit_is_founded_once_and_the_first_stays(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        first, second = dollars(50), dollars(40, window="day", tokens=9)
        assert await tracker.ledger.create_limit(SESSION, first) == first
        assert await tracker.ledger.create_limit(SESSION, second) == first
        assert await tracker.get_budget(SESSION) == 50.0
        assert [account.scope for account in await tracker.ledger.accounts(parse_scope(""))] == [
            "",
            SESSION,
        ]


@pytest.mark.parametrize("window", WINDOWS)
async def test_a_limit_comes_back_as_it_was_founded(
    tracker_factory: TrackerFactory, window: str
) -> None:
    limit = dollars(3, window=window, tokens=7)
    only_tokens = Limit(limit_tokens=Tokens(0), window=parse_window(window))
    async with tracker_factory.two() as (one, other):
        assert await one.ledger.create_limit(SESSION, limit) == limit
        assert await other.ledger.create_limit(SESSION, dollars(1)) == limit
        beside = parse_scope("session:other")
        assert await one.ledger.create_limit(beside, only_tokens) == only_tokens
        assert await other.ledger.create_limit(beside, limit) == only_tokens


async def test_founding_without_an_amount_leaves_everything_as_it_is(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        assert await tracker.ledger.create_limit(SESSION, Limit()) == Limit()
        assert await tracker.get_budget(SESSION) is None
        await tracker.set_budget(SESSION, 5)
        assert await tracker.ledger.create_limit(SESSION, Limit()) == dollars(5)


async def test_a_limit_that_was_removed_can_be_founded_anew(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.create_budget(SESSION, 5)
        await tracker.set_budget(SESSION)
        assert await tracker.create_budget(SESSION, 6) == dollars(6)


async def test_one_of_many_founders_wins_and_all_see_its_limit(
    tracker_factory: TrackerFactory,
) -> None:
    async with AsyncExitStack() as stack:
        trackers = [
            await stack.enter_async_context(tracker_factory()) for _ in range(FOUNDERS // 4)
        ]
        seen = await asyncio.gather(
            *(
                trackers[number % len(trackers)].ledger.create_limit(SESSION, dollars(number + 1))
                for number in range(FOUNDERS)
            )
        )
        assert len(set(map(repr, seen))) == 1
        assert seen[0] in [dollars(number + 1) for number in range(FOUNDERS)]
        for tracker in trackers:
            assert (await tracker.ledger.accounts(SESSION, most=1))[0].limit == seen[0]


async def test_of_many_founders_all_but_one_are_told_of_the_mismatch(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory.two() as trackers:
        answers = await asyncio.gather(
            *(
                trackers[number % 2].create_budget(SESSION, number + 1)
                for number in range(FOUNDERS)
            ),
            return_exceptions=True,
        )
    founded = [answer for answer in answers if isinstance(answer, Limit)]
    refused = [answer for answer in answers if isinstance(answer, BudgetMismatchError)]
    assert (len(founded), len(refused)) == (1, FOUNDERS - 1)
    assert len({error.existing for error in refused}) == 1


async def test_a_founded_limit_holds_for_what_was_reserved_before_it(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory.two() as (one, other):
        await one.reserve(SESSION, "0.70")
        await other.create_budget(SESSION, "1.00")
        with pytest.raises(BudgetExceededError):
            await one.reserve(SESSION, "0.31")
        await one.reserve(SESSION, "0.30")
        assert flat(await one.status())[SESSION].limit_micro_usd == 1_000_000
        await assert_ledger_is_right(one)


async def test_a_founder_with_another_limit_is_told_both_and_what_to_do(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.create_budget(SESSION, "50.00")
        with pytest.raises(BudgetMismatchError) as caught:
            await tracker.create_budget(SESSION, 40, 2_000, "day", source="the file")
    assert str(caught.value) == (
        "session:eval: the limit is $50.00, and the file says $40.00 and 2,000 tokens (day);"
        " use the same limit, or change it with `headgate budget set session:eval --limit-usd 40.00"
        " --limit-tokens 2000 --window day`"
    )
    error = caught.value
    assert (error.scope, error.existing, error.wanted) == (
        SESSION,
        "$50.00",
        "$40.00 and 2,000 tokens (day)",
    )


async def test_founding_needs_an_amount_a_scope_and_a_window_that_exists(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        with pytest.raises(InvalidSettingError, match="limit_usd: give an amount"):
            await tracker.create_budget(SESSION)
        with pytest.raises(InvalidScopeError):
            await tracker.create_budget("no scope", 1)
        for window in ("hourly", "day@Europe/Nowhere"):
            with pytest.raises(InvalidSettingError):
                await tracker.create_budget(SESSION, 1, window=window)
        assert await tracker.get_budget(SESSION) is None


async def test_a_watched_ledger_founds_like_the_one_behind_it(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        watched = WatchedLedger(tracker.ledger)
        assert await watched.create_limit(SESSION, dollars(2)) == dollars(2)
        assert await tracker.ledger.create_limit(SESSION, dollars(1)) == dollars(2)
