"""What every ledger keeps about windows: what counts, when it frees, whether waiting helps."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budgets.conftest import ledger_on
from budgets.support import (
    A_DAY_SECONDS,
    TrackerFactory,
    assert_ledger_is_right,
    local_factory,
    placed_factory,
    run,
    usd,
)
from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.windows import bucket_start, live_from, parse_window
from headgate.errors import BudgetExceededError
from headgate.testing import VirtualClock

SESSION = "session:eval"
FLOW = "session:eval/workflow:w1"


def set_clock(clock: VirtualClock, text: str) -> None:
    clock.advance(seconds_at(text) - clock())


def seconds_at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


async def spend(tracker: LedgerTracker, amount_usd: str) -> None:
    await tracker.commit(await tracker.reserve(FLOW, amount_usd), amount_usd)


# Window, when it is used up, when the refusal says that it frees; times are UTC.
RESETS = [
    ("day", "2026-02-28T23:59:59", "2026-03-01T00:00:00"),
    ("day@Asia/Kolkata", "2026-02-28T18:29:59", "2026-02-28T18:30:00"),
    ("day@Asia/Kolkata", "2026-02-28T18:30:00", "2026-03-01T18:30:00"),
    ("week", "2026-01-07T12:00:00", "2026-01-12T00:00:00"),
    # The week in which Berlin changes to summer time is an hour short.
    ("week@Europe/Berlin", "2026-03-23T00:00:00", "2026-03-29T22:00:00"),
    ("week@Europe/Berlin", "2026-10-25T22:00:00", "2026-10-25T23:00:00"),
    ("month", "2026-02-01T00:00:00", "2026-03-01T00:00:00"),
    ("month@America/New_York", "2026-12-01T04:59:59", "2026-12-01T05:00:00"),
    # A rolling day has buckets of an hour; one leaves when the whole of it is a day old.
    ("rolling:24h", "2026-05-01T10:59:59", "2026-05-02T11:00:00"),
    ("rolling:1h", "2026-05-01T10:00:00", "2026-05-01T11:02:30"),
]


@pytest.mark.parametrize(("window", "used_at", "frees_at"), RESETS)
async def test_a_window_that_is_used_up_says_when_it_frees_and_then_does(
    tracker_factory: TrackerFactory, window: str, used_at: str, frees_at: str
) -> None:
    clock = tracker_factory.clock
    set_clock(clock, used_at)
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "0.10", window=window)
        await spend(tracker, "0.10")
        with pytest.raises(BudgetExceededError) as caught:
            await tracker.reserve(FLOW, "0.10")
        assert caught.value.resets_at == seconds_at(frees_at)
        assert caught.value.may_clear
        status = await tracker.status(SESSION)
        assert (status.window, status.resets_at) == (window, seconds_at(frees_at))
        clock.advance(seconds_at(frees_at) - clock() - 1)
        with pytest.raises(BudgetExceededError):
            await tracker.reserve(FLOW, "0.10")
        clock.advance(1)
        assert await tracker.get_spent(SESSION) == 0.0
        await spend(tracker, "0.10")
        assert await tracker.get_spent(SESSION) == 0.1
        # The scope below has no window, so all of it counts there.
        assert await tracker.get_spent(FLOW) == 0.2
        await assert_ledger_is_right(tracker)


async def test_a_rolling_window_frees_bucket_by_bucket(tracker_factory: TrackerFactory) -> None:
    clock = tracker_factory.clock
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "0.24", window="rolling:24h")
        for _ in range(24):
            await spend(tracker, "0.01")
            clock.advance(3_600)
        # A day and an hour after the first, its bucket has left, and each hour one more.
        with pytest.raises(BudgetExceededError):
            await tracker.reserve(FLOW, "0.01")
        for _ in range(24):
            clock.advance(3_600)
            assert await usd(tracker, SESSION) == (230_000, 0, 0)
            await spend(tracker, "0.01")
        clock.advance(2 * A_DAY_SECONDS)
        assert (await tracker.status(SESSION)).resets_at is None
        assert await usd(tracker, SESSION) == (0, 0, 0)
        await assert_ledger_is_right(tracker)


async def test_an_amount_stays_in_the_window_in_which_it_was_reserved(
    tracker_factory: TrackerFactory,
) -> None:
    clock = tracker_factory.clock
    set_clock(clock, "2026-03-01T23:59:59")
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "0.10", window="day")
        token = await tracker.reserve(FLOW, "0.10", reservation_id="r", dispatched=True)
        clock.advance(2)
        await tracker.reserve(FLOW, "0.10", reservation_id="r", dispatched=True)
        assert await usd(tracker, SESSION) == (0, 0, 0)
        await tracker.commit(token, "0.30")
        assert await usd(tracker, SESSION) == (0, 0, 0)
        assert await usd(tracker, FLOW) == (100_000, 0, 200_000)
        await tracker.reserve(FLOW, "0.10")
        await assert_ledger_is_right(tracker)


async def test_each_scope_has_its_own_window(tracker_factory: TrackerFactory) -> None:
    clock = tracker_factory.clock
    set_clock(clock, "2026-03-30T12:00:00")
    async with tracker_factory() as tracker:
        await tracker.set_budget("", "0.20", window="month")
        await tracker.set_budget(SESSION, "0.10", window="day")
        await spend(tracker, "0.10")
        clock.advance(A_DAY_SECONDS)
        await spend(tracker, "0.10")
        clock.advance(A_DAY_SECONDS / 2 - 1)
        with pytest.raises(BudgetExceededError) as caught:
            await tracker.reserve(FLOW, "0.01")
        assert caught.value.scope == ""
        clock.advance(1)
        await spend(tracker, "0.10")
        assert await tracker.get_spent("") == 0.1


async def test_a_new_window_counts_what_lies_in_it(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "1", window="day")
        await spend(tracker, "0.10")
        tracker_factory.clock.advance(A_DAY_SECONDS)
        await spend(tracker, "0.20")
        assert await tracker.get_spent(SESSION) == 0.2
        await tracker.set_budget(SESSION, "1", window="month")
        assert await tracker.get_spent(SESSION) == 0.3
        await tracker.set_budget(SESSION, "1")
        assert await tracker.get_spent(SESSION) == 0.3
        await tracker.set_budget(SESSION)
        assert await tracker.get_spent(SESSION) == 0.3


async def test_what_was_spent_without_a_window_counts_again_when_the_window_goes(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "0.10")
        await spend(tracker, "0.10")
        await tracker.set_budget(SESSION, "0.10", window="day")
        for _ in range(3):
            tracker_factory.clock.advance(2 * A_DAY_SECONDS)
            await tracker.release(await tracker.reserve(FLOW, "0.01"))
        await tracker.set_budget(SESSION, "0.10")
        assert await usd(tracker, SESSION) == (100_000, 0, 0)
        with pytest.raises(BudgetExceededError):
            await tracker.reserve(FLOW, "0.01")
        await assert_ledger_is_right(tracker)


# What is spent before a change of window at 15:30 on the last day, with its time.
SPENDING = (
    ("2026-03-17T20:00:00", "0.10"),
    ("2026-03-18T09:00:00", "0.20"),
    ("2026-03-18T15:00:00", "0.40"),
)

# The window before, the one after, and what counts in it; None is a scope without a budget.
CHANGES = [
    (None, "day", 600_000),
    (None, "rolling:1h", 400_000),
    ("none", "day", 600_000),
    ("none", "rolling:24h", 700_000),
    ("none", "month", 700_000),
    ("month", "day", 600_000),
    ("week", "rolling:1h", 400_000),
    ("day", "rolling:24h", 700_000),
    ("day", "rolling:1h", 400_000),
    ("rolling:24h", "day", 600_000),
    # The day of Kolkata begins at 18:30 UTC.
    ("day", "day@Asia/Kolkata", 700_000),
    ("day@Asia/Kolkata", "day", 600_000),
    ("day", "none", 700_000),
]


@pytest.mark.parametrize(("before", "after", "counted"), CHANGES)
async def test_a_change_of_window_counts_what_was_spent_inside_the_new_one(
    tracker_factory: TrackerFactory, before: str | None, after: str, counted: int
) -> None:
    async with tracker_factory() as tracker:
        if before is not None:
            set_clock(tracker_factory.clock, "2026-03-17T12:00:00")
            await tracker.set_budget(SESSION, "1.00", window=before)
        for at, amount_usd in SPENDING:
            set_clock(tracker_factory.clock, at)
            await spend(tracker, amount_usd)
        set_clock(tracker_factory.clock, "2026-03-18T15:30:00")
        await tracker.set_budget(SESSION, "1.00", window=after)
        assert await usd(tracker, SESSION) == (counted, 0, 0)
        status = await tracker.status(SESSION)
        assert status.counted_since is None
        await assert_ledger_is_right(tracker)
        # However often it changes, an amount keeps its time.
        for window, further in (("rolling:1h", 400_000), ("day", 600_000), ("none", 700_000)):
            await tracker.set_budget(SESSION, "1.00", window=window)
            assert await usd(tracker, SESSION) == (further, 0, 0)
            await assert_ledger_is_right(tracker)
        # The scopes around it are as they were.
        assert await usd(tracker, "") == await usd(tracker, FLOW) == (700_000, 0, 0)


async def test_a_budget_that_is_created_counts_what_was_spent_in_its_window(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        set_clock(tracker_factory.clock, "2026-03-18T15:00:00")
        await spend(tracker, "0.40")
        await tracker.create_budget(SESSION, "1.00", window="day")
        await tracker.create_budget(SESSION, "1.00", window="day")
        assert await usd(tracker, SESSION) == (400_000, 0, 0)
        with pytest.raises(BudgetExceededError):
            await tracker.reserve(FLOW, "0.61")


async def test_a_change_of_window_takes_along_what_is_in_flight(
    tracker_factory: TrackerFactory,
) -> None:
    clock = tracker_factory.clock
    async with tracker_factory() as tracker:
        set_clock(clock, "2026-03-17T23:00:00")
        yesterday = await tracker.reserve(FLOW, "0.01", dispatched=True, lease_seconds=90_000)
        set_clock(clock, "2026-03-18T15:00:00")
        held = await tracker.reserve(FLOW, "0.10", lease_seconds=600)
        given_back = await tracker.reserve(FLOW, "0.20", lease_seconds=600)
        lost = await tracker.reserve(FLOW, "0.30", dispatched=True, lease_seconds=60)
        free = await tracker.reserve(FLOW, "0", lease_seconds=600)
        late = await tracker.reserve(FLOW, "0.40", lease_seconds=60)
        clock.advance(61)
        await tracker.set_budget(SESSION, "2.00", window="day")
        assert await usd(tracker, SESSION) == (300_000, 300_000, 0)
        await tracker.commit(held, "0.15")
        await tracker.release(given_back)
        await tracker.commit(lost, "0.05")
        await tracker.commit(free, "0.02")
        await tracker.commit(late, "0.40")
        # What was reserved yesterday counts yesterday.
        await tracker.commit(yesterday, "0.01")
        assert await usd(tracker, SESSION) == (150_000, 0, 470_000)
        assert await usd(tracker, "") == (160_000, 0, 470_000)
        await assert_ledger_is_right(tracker)


async def test_a_correction_never_frees_room_that_was_not_spent_in_the_new_window(
    tracker_factory: TrackerFactory,
) -> None:
    clock = tracker_factory.clock
    async with tracker_factory() as tracker:
        set_clock(clock, "2026-03-17T12:00:00")
        await spend(tracker, "0.50")
        set_clock(clock, "2026-03-18T12:00:00")
        await spend(tracker, "0.20")
        await tracker.adjust(SESSION, "-0.05")
        await tracker.adjust(SESSION, "-0.40")
        await tracker.adjust(SESSION, "0.01")
        await tracker.set_budget(SESSION, "1.00", window="day")
        # The second one took what was spent on the day before.
        assert await usd(tracker, SESSION) == (160_000, 0, 0)
        await tracker.set_budget(SESSION, "1.00")
        assert await usd(tracker, SESSION) == (260_000, 0, 0)
        await assert_ledger_is_right(tracker)


# The window after no window; what counts of what two days ago was spent and held; since when.
FORGOTTEN = [
    ("day", (200_000, 50_000, 0), False),
    ("rolling:24h", (200_000, 50_000, 0), False),
    ("week", (200_000, 50_000, 0), True),
    ("none", (700_000, 50_000, 0), False),
]


@pytest.mark.parametrize("factory", ["local", "sqlite", "postgres"])
@pytest.mark.parametrize(("window", "counted", "is_told"), FORGOTTEN)
async def test_what_the_journal_no_longer_dates_is_not_counted_and_that_is_told(
    request: pytest.FixtureRequest,
    factory: str,
    window: str,
    counted: tuple[int, int, int],
    is_told: bool,
) -> None:
    tracker_factory = ledger_on(factory, request)
    clock = tracker_factory.clock
    async with tracker_factory() as tracker:
        set_clock(clock, "2026-03-18T12:00:00")
        await spend(tracker, "0.50")
        held = await tracker.reserve(FLOW, "0.05", lease_seconds=4 * A_DAY_SECONDS)
        set_clock(clock, "2026-03-20T12:00:00")
        await spend(tracker, "0.20")
        for _ in range(3):
            await tracker.ledger.sweep()
        since = clock() - A_DAY_SECONDS
        await tracker.set_budget(SESSION, "1.00", window=window)
        # What is held and has no time counts as of now.
        assert await usd(tracker, SESSION) == counted
        assert (await tracker.status(SESSION)).counted_since == (since if is_told else None)
        await tracker.set_budget(SESSION, "2.00", window=window)
        assert (await tracker.status(SESSION)).counted_since == (since if is_told else None)
        await tracker.commit(held, "0.04")
        assert await usd(tracker, SESSION) == (counted[0] + 40_000, 0, 0)
        await assert_ledger_is_right(tracker)
        clock.advance(8 * A_DAY_SECONDS)
        assert (await tracker.status(SESSION)).counted_since is None


# The window of the reservation, then the one that leaves it behind, then one that counts it again.
LATE_COMMITS = [("none", "day", "none"), ("rolling:1h", "rolling:1h", "month")]


@pytest.mark.parametrize(("window", "narrow", "wide"), LATE_COMMITS)
async def test_a_late_commit_finds_the_bucket_in_which_its_amount_was_assumed(
    tracker_factory: TrackerFactory, window: str, narrow: str, wide: str
) -> None:
    clock = tracker_factory.clock
    set_clock(clock, "2026-03-02T12:00:00")
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "1.00", window=window)
        lease_seconds = 3 * A_DAY_SECONDS
        token = await tracker.reserve(FLOW, "1.00", dispatched=True, lease_seconds=lease_seconds)
        clock.advance(lease_seconds + 1)
        await tracker.set_budget(SESSION, "1.00", window=narrow)
        for _ in range(2):
            await tracker.release(await tracker.reserve(FLOW, "0.01"))
            clock.advance(A_DAY_SECONDS / 3)
        await tracker.commit(token, "0.10")
        await tracker.set_budget(SESSION, "1.00", window=wide)
        assert await usd(tracker, SESSION) == (100_000, 0, 0)
        await assert_ledger_is_right(tracker)


# Spent, reserved, asked for; whether waiting can help, of a limit of $1.00 without a window.
CLEARINGS = [
    ("1.00", "0.00", "0.01", False),
    ("0.50", "0.50", "0.01", True),
    ("0.50", "0.50", "0.50", True),
    ("0.50", "0.50", "0.51", False),
    ("0.00", "0.00", "1.01", False),
]


@pytest.mark.parametrize(("spent", "reserved", "asked", "helps"), CLEARINGS)
async def test_without_a_window_waiting_helps_only_while_what_is_held_could_make_room(
    tracker_factory: TrackerFactory, spent: str, reserved: str, asked: str, helps: bool
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "1.00")
        await spend(tracker, spent)
        await tracker.reserve(FLOW, reserved)
        with pytest.raises(BudgetExceededError) as caught:
            await tracker.reserve(FLOW, asked)
        assert (caught.value.resets_at, caught.value.may_clear) == (None, helps)


async def test_waiting_never_helps_a_request_larger_than_the_limit(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        for window in ("day", "rolling:24h", None):
            await tracker.set_budget(SESSION, "1.00", window=window)
            with pytest.raises(BudgetExceededError) as caught:
                await tracker.reserve(FLOW, "1.01")
            assert not caught.value.may_clear


YEAR_SECONDS = 366 * A_DAY_SECONDS


def jump(clock: VirtualClock, seconds: float) -> None:
    clock.set_back(-seconds)


@pytest.mark.parametrize("window", ["rolling:1h", "rolling:24h", "day", "month"])
async def test_a_clock_that_jumps_ahead_and_back_forgets_no_spending(
    tracker_factory: TrackerFactory, window: str
) -> None:
    clock = tracker_factory.clock
    set_clock(clock, "2026-03-15T12:30:00")
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "1.00", window=window)
        await spend(tracker, "0.60")
        for _ in range(3):
            jump(clock, 10 * YEAR_SECONDS)
            # Enough calls to have all upkeep done that a day of other times would bring.
            for _ in range(80):
                await tracker.release(await tracker.reserve(FLOW, "0.01"))
            await tracker.ledger.sweep()
            assert await usd(tracker, SESSION) == (0, 0, 0)
            jump(clock, -10 * YEAR_SECONDS)
            assert await usd(tracker, SESSION) == (600_000, 0, 0)
            with pytest.raises(BudgetExceededError):
                await tracker.reserve(FLOW, "0.41")
            await assert_ledger_is_right(tracker)


@pytest.mark.parametrize("backend", ["local", "sqlite"])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([0, 100, -100, 3_600, 90_000, -90_000, 10**7, -(10**7), 10**9]),
            st.integers(1, 9),
        ),
        max_size=24,
    )
)
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
def test_what_counts_is_what_was_spent_since_whatever_the_clock_did(
    backend: str, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    async def scenario() -> None:
        path = str(tmp_path_factory.mktemp("ledger") / "ledger.db")
        factory = (
            local_factory()
            if backend == "local"
            else placed_factory("sqlite", "SqliteBudgetTracker", path, path)
        )
        clock, window = factory.clock, parse_window("rolling:1h")
        clock.set_back(clock() - 2_000_000_000)
        spent: list[tuple[int, int]] = []
        async with factory() as tracker:
            await tracker.set_budget(SESSION, "1000", window="rolling:1h")
            for seconds, amount in steps:
                clock.set_back(-max(10**9 - clock(), seconds))
                await spend(tracker, f"0.{amount}")
                spent.append((bucket_start(window, clock(), UTC), amount * 100_000))
                earliest = live_from(window, clock(), UTC)
                counted = sum(paid for start, paid in spent if start >= earliest)
                assert await usd(tracker, SESSION) == (counted, 0, 0)
            await assert_ledger_is_right(tracker)

    run(scenario())
