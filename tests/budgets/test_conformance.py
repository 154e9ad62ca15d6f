"""What every ledger keeps, whatever holds its rows: amounts, the tree of scopes, limits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from decimal import Decimal

import pytest

import headgate.budgets.tracker
from budgets.support import Sums, TrackerFactory, assert_ledger_is_right, flat, tokens, usd
from headgate.budgets.tracker import LedgerTracker, ReservationToken
from headgate.core.budgets.ledger import JournalEntry
from headgate.core.budgets.reservations import Call, ReservationState
from headgate.core.budgets.scopes import parse_scope
from headgate.errors import (
    BudgetExceededError,
    IllegalSettlementError,
    InvalidAmountError,
    InvalidFieldError,
    InvalidScopeError,
    InvalidSettingError,
    LedgerUnavailableError,
)

SESSION = "session:eval"
FLOW = "session:eval/workflow:w1"
OTHER_FLOW = "session:eval/workflow:w2"
TENANT = "tenant:acme/team:red"
NOTHING = Sums(0, 0, 0)
LEASE_SECONDS = 60.0


async def test_an_estimate_is_held_in_its_scope_and_in_every_ancestor(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        token = await tracker.reserve(FLOW, "0.07", tokens=900)
        assert (token.scope, token.micro_usd, token.tokens) == (FLOW, 70_000, 900)
        assert token.state is ReservationState.HELD
        assert token.lease_until == tracker_factory.clock() + LEASE_SECONDS
        for scope in ("", SESSION, FLOW):
            assert await usd(tracker, scope) == (0, 70_000, 0)
            assert await tokens(tracker, scope) == (0, 900, 0)
        assert await usd(tracker, OTHER_FLOW) == NOTHING
        await assert_ledger_is_right(tracker)


async def commit_less(tracker: LedgerTracker, token: ReservationToken) -> None:
    await tracker.commit(token, "0.04", tokens=30)


async def commit_exactly(tracker: LedgerTracker, token: ReservationToken) -> None:
    await tracker.commit(token, "0.10", tokens=100)


async def commit_more(tracker: LedgerTracker, token: ReservationToken) -> None:
    await tracker.commit(token, "0.15", tokens=130)


async def commit_more_tokens_only(tracker: LedgerTracker, token: ReservationToken) -> None:
    await tracker.commit(token, "0.01", tokens=130)


async def commit_nothing(tracker: LedgerTracker, token: ReservationToken) -> None:
    await tracker.commit(token)


async def give_back(tracker: LedgerTracker, token: ReservationToken) -> None:
    await tracker.release(token)


async def leave(tracker: LedgerTracker, token: ReservationToken) -> None:
    await tracker.ledger.sweep()


Ending = Callable[[LedgerTracker, ReservationToken], Awaitable[None]]
# Held: $0.10 and 100 tokens. Spent, reserved and overrun after the end, in both columns.
ENDINGS: list[tuple[str, bool, bool, Ending, Sums, Sums]] = [
    ("held, actual below", False, False, commit_less, Sums(40_000, 0, 0), Sums(30, 0, 0)),
    ("held, actual equal", False, False, commit_exactly, Sums(100_000, 0, 0), Sums(100, 0, 0)),
    ("held, actual above", False, False, commit_more, Sums(100_000, 0, 50_000), Sums(100, 0, 30)),
    (
        "one column above",
        True,
        False,
        commit_more_tokens_only,
        Sums(10_000, 0, 0),
        Sums(100, 0, 30),
    ),
    ("held, actual nothing", False, False, commit_nothing, NOTHING, NOTHING),
    ("held, given back", False, False, give_back, NOTHING, NOTHING),
    ("dispatched, actual below", True, False, commit_less, Sums(40_000, 0, 0), Sums(30, 0, 0)),
    ("dispatched, given back", True, False, give_back, NOTHING, NOTHING),
    ("held, lease ended", False, True, leave, NOTHING, NOTHING),
    ("expired, committed late", False, True, commit_less, Sums(0, 0, 40_000), Sums(0, 0, 30)),
    ("expired, given back late", False, True, give_back, NOTHING, NOTHING),
    ("dispatched, lease ended", True, True, leave, Sums(100_000, 0, 0), Sums(100, 0, 0)),
    ("assumed, actual below", True, True, commit_less, Sums(40_000, 0, 0), Sums(30, 0, 0)),
    ("assumed, actual above", True, True, commit_more, Sums(100_000, 0, 50_000), Sums(100, 0, 30)),
    ("assumed, given back", True, True, give_back, NOTHING, NOTHING),
]


async def test_each_end_of_a_reservation_books_the_same_in_every_scope(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        for number, (name, dispatched, is_late, end, want_usd, want_tokens) in enumerate(ENDINGS):
            scope = f"session:s{number}/workflow:w"
            token = await tracker.reserve(
                scope, "0.10", tokens=100, lease_seconds=LEASE_SECONDS, dispatched=dispatched
            )
            tracker_factory.clock.advance(LEASE_SECONDS if is_late else 0)
            await end(tracker, token)
            for reached in (f"session:s{number}", scope):
                assert await usd(tracker, reached) == want_usd, name
                assert await tokens(tracker, reached) == want_tokens, name
        total = [sum(column) for column in zip(*(row[4] for row in ENDINGS), strict=True)]
        assert await usd(tracker) == tuple(total)
        await assert_ledger_is_right(tracker)


async def test_dispatched_marks_the_reservation_and_books_nothing(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        token = await tracker.dispatched(await tracker.reserve(FLOW, "0.10"))
        assert token.state is ReservationState.DISPATCHED
        assert await usd(tracker, FLOW) == (0, 100_000, 0)
        at_once = await tracker.reserve(FLOW, "0.10", dispatched=True)
        assert at_once.state is ReservationState.DISPATCHED


async def test_further_scopes_are_held_with_their_ancestors_and_each_scope_once(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        token = await tracker.reserve(FLOW, "0.10", also=(TENANT, SESSION, TENANT))
        for scope in ("", SESSION, FLOW, "tenant:acme", TENANT):
            assert await usd(tracker, scope) == (0, 100_000, 0)
        await tracker.commit(token, "0.12")
        for scope in ("", SESSION, FLOW, "tenant:acme", TENANT):
            assert await usd(tracker, scope) == (100_000, 0, 20_000)
        await assert_ledger_is_right(tracker)


@pytest.mark.parametrize("full", [FLOW, SESSION, TENANT, "tenant:acme"])
async def test_a_refusal_anywhere_leaves_nothing_anywhere(
    tracker_factory: TrackerFactory, full: str
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(full, "0.05")
        with pytest.raises(BudgetExceededError) as caught:
            await tracker.reserve(FLOW, "0.10", also=(TENANT,), reservation_id="r")
        assert caught.value.scope == full
        for scope in ("", SESSION, FLOW, "tenant:acme", TENANT):
            assert await usd(tracker, scope) == NOTHING
        assert await tracker.journal() == []
        with pytest.raises(IllegalSettlementError, match="unknown"):
            await tracker.commit("r", "0.01")
        await assert_ledger_is_right(tracker)


async def test_a_refused_id_may_be_used_again(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "0.05")
        with pytest.raises(BudgetExceededError):
            await tracker.reserve(FLOW, "0.10", reservation_id="r")
        await tracker.set_budget(SESSION, "0.10")
        assert (await tracker.reserve(FLOW, "0.10", reservation_id="r")).is_live


async def test_the_first_refusal_is_the_outermost_and_dollars_come_before_tokens(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        for scope in ("", SESSION, FLOW):
            await tracker.set_budget(scope, "0.05", 5)
        for scope in ("", SESSION, FLOW):
            with pytest.raises(BudgetExceededError) as caught:
                await tracker.reserve(FLOW, "0.10", tokens=10)
            assert (caught.value.scope, caught.value.unit) == (scope, "micro_usd")
            await tracker.set_budget(scope, None, 5)
            with pytest.raises(BudgetExceededError) as caught:
                await tracker.reserve(FLOW, "0.10", tokens=10)
            assert (caught.value.scope, caught.value.unit) == (scope, "tokens")
            await tracker.set_budget(scope)


async def test_a_refusal_carries_the_balances_of_the_scope(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "1.00", 1_000)
        first = await tracker.reserve(FLOW, "0.30", tokens=300)
        await tracker.reserve(OTHER_FLOW, "0.20", tokens=200)
        await tracker.commit(first, "0.35", tokens=310)
        with pytest.raises(BudgetExceededError) as by_usd:
            await tracker.reserve(FLOW, "0.450001")
        with pytest.raises(BudgetExceededError) as by_tokens:
            await tracker.reserve(FLOW, tokens=491)
    assert facts(by_usd.value) == ("micro_usd", 1_000_000, 300_000, 200_000, 50_000, 450_001)
    assert facts(by_tokens.value) == ("tokens", 1_000, 300, 200, 10, 491)
    assert str(by_usd.value).startswith(
        "Budget exceeded: spent $0.3500 of $1.0000 limit; $0.450001 needed, $0.45 left "
    )


def facts(error: BudgetExceededError) -> tuple[str, int, int, int, int, int]:
    amounts = (error.limit, error.spent, error.reserved, error.overrun, error.requested)
    return (error.unit, *amounts)


async def test_without_a_limit_everything_is_admitted(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        assert await tracker.get_budget(SESSION) is None
        for _ in range(3):
            await tracker.reserve(FLOW, 1_000_000, tokens=10**12)
        status = await tracker.status(SESSION)
        assert (status.limit_micro_usd, status.remaining_micro_usd) == (None, None)
        assert (status.limit_tokens, status.remaining_tokens) == (None, None)
        assert status.reserved_micro_usd == 3 * 10**12
        assert status.reserved_tokens == 3 * 10**12


async def test_a_limit_admits_up_to_the_brim_and_not_a_micro_dollar_more(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "0.10", 100)
        await tracker.reserve(FLOW, "0.099999", tokens=99)
        await tracker.reserve(FLOW, "0.000001", tokens=1)
        for amount_usd, count in (("0.000001", 0), ("0", 1)):
            with pytest.raises(BudgetExceededError):
                await tracker.reserve(FLOW, amount_usd, tokens=count)
        # Nothing fits where nothing is left, as long as the scope is not over its limit.
        await tracker.reserve(FLOW, 0, tokens=0)
        await tracker.set_budget(SESSION, "0.099999", 100)
        with pytest.raises(BudgetExceededError):
            await tracker.reserve(FLOW, 0, tokens=0)


async def test_spent_reserved_and_overrun_all_count_against_the_limit(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "0.40")
        await tracker.commit(await tracker.reserve(FLOW, "0.10"), "0.20")
        await tracker.reserve(FLOW, "0.10")
        assert (await tracker.status(SESSION)).remaining_micro_usd == 100_000
        with pytest.raises(BudgetExceededError):
            await tracker.reserve(FLOW, "0.100001")
        await tracker.reserve(FLOW, "0.10")


async def test_a_limit_lowered_below_what_is_used_stops_admissions_and_nothing_else(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "1.00")
        token = await tracker.reserve(FLOW, "0.60")
        await tracker.set_budget(SESSION, "0.50")
        assert (await tracker.status(SESSION)).remaining_micro_usd == -100_000
        with pytest.raises(BudgetExceededError):
            await tracker.reserve(FLOW, "0.01")
        await tracker.dispatched(token)
        await tracker.extend(token)
        await tracker.commit(token, "0.70")
        assert await usd(tracker, SESSION) == (600_000, 0, 100_000)
        await tracker.set_budget(SESSION, "0.80")
        await tracker.reserve(FLOW, "0.10")
        await assert_ledger_is_right(tracker)


async def test_a_limit_is_replaced_whole_and_can_be_removed(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, Decimal("2.50"), 7, "month")
        assert await tracker.get_budget(SESSION) == 2.5
        await tracker.set_budget(SESSION, limit_tokens=9)
        status = await tracker.status(SESSION)
        assert (status.limit_micro_usd, status.limit_tokens, status.window) == (None, 9, "none")
        await tracker.set_budget(SESSION)
        assert await tracker.get_budget(SESSION) is None
        assert SESSION not in flat(await tracker.status())


async def test_a_budget_of_nothing_admits_nothing(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget("", 0)
        with pytest.raises(BudgetExceededError) as caught:
            await tracker.reserve(FLOW, "0.000001")
        assert (caught.value.scope, caught.value.limit) == ("", 0)


@pytest.mark.parametrize("scope", ["", SESSION, FLOW, "session:unknown"])
async def test_one_account_is_read_alone(tracker_factory: TrackerFactory, scope: str) -> None:
    async with tracker_factory() as tracker:
        for name in (FLOW, OTHER_FLOW):
            await tracker.commit(await tracker.reserve(name, "0.10"), "0.10")
        accounts = await tracker.ledger.accounts(parse_scope(scope), most=1)
        assert accounts == (await tracker.ledger.accounts(parse_scope(scope)))[:1]
        assert [account.scope for account in accounts] == [scope]


async def test_get_spent_includes_the_overrun_and_status_tells_it_apart(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        assert await tracker.get_spent(SESSION) == 0.0
        await tracker.commit(await tracker.reserve(FLOW, "0.10"), "0.25")
        assert await tracker.get_spent(SESSION) == 0.25
        status = await tracker.status(SESSION)
        assert (status.spent_micro_usd, status.overrun_micro_usd) == (100_000, 150_000)


async def test_sums_stay_exact_at_the_largest_amounts(tracker_factory: TrackerFactory) -> None:
    # The sums have fifteen digits, one more than some formats of a double show.
    count = 200

    async def one(tracker: LedgerTracker) -> None:
        token = await tracker.reserve("", "999999.999999", tokens=10**12 - 1, dispatched=True)
        await tracker.commit(token, "1000000", tokens=10**12)

    async with tracker_factory() as tracker:
        await tracker.set_budget("", 1_000_000_000, 10**15)
        await asyncio.gather(*(one(tracker) for _ in range(count)))
        assert await usd(tracker) == (count * (10**12 - 1), 0, count)
        assert await tokens(tracker) == (count * (10**12 - 1), 0, count)
        await tracker.reserve("", 1_000_000)
        assert (await tracker.status()).remaining_micro_usd == (999 - count) * 10**12
        await assert_ledger_is_right(tracker)


async def test_the_status_of_a_scope_nests_what_lies_within_it(
    tracker_factory: TrackerFactory,
) -> None:
    # Names that are prefixes of each other, or sort around the slash, are strangers.
    strangers = ("session:eval-2", "session:eval.2", "session:eval0", "session:evam", "a:a", "z:z")
    async with tracker_factory() as tracker:
        for scope in (*strangers, FLOW, f"{FLOW}/step:a/call:b", OTHER_FLOW):
            await tracker.reserve(scope, "0.01")
        await tracker.set_budget(f"{SESSION}/deep:1/deeper:2", "5")
        top = await tracker.status(SESSION)
        assert sorted(flat(top)) == [
            SESSION,
            f"{SESSION}/deep:1/deeper:2",
            FLOW,
            f"{FLOW}/step:a",
            f"{FLOW}/step:a/call:b",
            OTHER_FLOW,
        ]
        assert [child.scope for child in top.children] == [
            f"{SESSION}/deep:1/deeper:2",
            FLOW,
            OTHER_FLOW,
        ]
        assert top.reserved_micro_usd == 30_000
        assert flat(top)[FLOW].reserved_micro_usd == 20_000
        assert set(flat(await tracker.status())) == {"", *strangers, *flat(top)}
        unknown = await tracker.status("session:never")
        assert (unknown.reserved_micro_usd, unknown.children) == (0, ())


async def test_a_status_that_leaves_scopes_out_says_so(
    tracker_factory: TrackerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headgate.budgets.tracker, "MAX_ACCOUNTS", 4)
    async with tracker_factory() as tracker:
        for number in range(3):
            await tracker.reserve(f"{SESSION}/run:{number}", "0.01")
        whole = flat(await tracker.status(SESSION))
        assert [status.is_truncated for status in whole.values()] == [False] * 4
        await tracker.set_budget(f"{SESSION}/run:3", "1.00")
        cut = flat(await tracker.status(SESSION))
        assert list(cut) == list(whole)
        assert [status.is_truncated for status in cut.values()] == [True] * 4
        assert cut[SESSION].reserved_micro_usd == 30_000


async def test_the_journal_has_one_row_a_change_newest_first(
    tracker_factory: TrackerFactory,
) -> None:
    clock = tracker_factory.clock
    started = clock()
    async with tracker_factory() as tracker:
        token = await tracker.reserve(FLOW, "0.10", tokens=5, reservation_id="one")
        await tracker.reserve(FLOW, "0.10", tokens=5, reservation_id="one")
        clock.advance(1)
        await tracker.dispatched(token)
        await tracker.extend(token)
        clock.advance(1)
        await tracker.commit(token, "0.12", tokens=5)
        await tracker.commit(token, "0.12", tokens=5)
        await tracker.reserve("tenant:acme", "0.01", reservation_id="two", lease_seconds=10)
        clock.advance(10)
        rows = await tracker.journal()
        assert [(row.reservation_id, row.call, row.at - started) for row in rows] == [
            ("two", Call.EXPIRE, 12),
            ("two", Call.RESERVE, 2),
            ("one", Call.COMMIT, 2),
            ("one", Call.DISPATCHED, 1),
            ("one", Call.RESERVE, 0),
        ]
        assert [charge.scope for charge in rows[2].charges] == ["", SESSION, FLOW]
        assert usd_of(rows[2]) == (100_000, -100_000, 20_000)
        assert (rows[2].delta.spent_tokens, rows[2].delta.reserved_tokens) == (5, -5)
        assert calls(await tracker.journal(limit=2)) == [Call.EXPIRE, Call.RESERVE]
        assert len(await tracker.journal(since=started + 2)) == 3
        assert calls(await tracker.journal(until=started + 1)) == [Call.DISPATCHED, Call.RESERVE]
        assert len(await tracker.journal(since=started + 1, until=started + 2)) == 3
        assert await tracker.journal(until=started - 1) == []
        assert len(await tracker.journal(FLOW)) == 3
        assert await tracker.journal(limit=0) == []
        assert await tracker.journal(OTHER_FLOW) == []


def usd_of(entry: JournalEntry) -> tuple[int, int, int]:
    delta = entry.delta
    return delta.spent_micro_usd, delta.reserved_micro_usd, delta.overrun_micro_usd


def calls(entries: object) -> list[Call]:
    assert isinstance(entries, list)
    return [entry.call for entry in entries]


@pytest.mark.parametrize("amount", [-1, "-0.000001", math.nan, "nan", math.inf, "1000000.000001"])
async def test_an_amount_that_cannot_be_booked_is_refused_before_anything_is_written(
    tracker_factory: TrackerFactory, amount: float | str
) -> None:
    async with tracker_factory() as tracker:
        token = await tracker.reserve(FLOW, "0.10")
        with pytest.raises(InvalidAmountError):
            await tracker.reserve(FLOW, amount)
        with pytest.raises(InvalidAmountError):
            await tracker.commit(token, amount)
        with pytest.raises(InvalidAmountError):
            await tracker.set_budget(FLOW, "-1")
        assert await usd(tracker, FLOW) == (0, 100_000, 0)


async def test_amounts_are_rounded_up_to_whole_micro_dollars(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        token = await tracker.reserve(FLOW, "0.0000001")
        assert token.micro_usd == 1
        await tracker.commit(token, Decimal("0.0000011"))
        assert await usd(tracker, FLOW) == (1, 0, 1)


async def test_scopes_windows_leases_and_ids_that_cannot_be_used_are_refused(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        for scope in ("eval", "session:", "session:a/", "session:a b", "session:{a}", "a:b" * 200):
            with pytest.raises(InvalidScopeError):
                await tracker.reserve(scope, "0.10")
        with pytest.raises(InvalidScopeError):
            await tracker.reserve(FLOW, "0.10", also=("nonsense",))
        for window in ("fortnight", "day@Nowhere/At-All", "rolling:0h"):
            with pytest.raises(InvalidSettingError):
                await tracker.set_budget(SESSION, "1", window=window)
        for lease_seconds in (0, -1, math.nan, math.inf):
            with pytest.raises(InvalidFieldError):
                await tracker.reserve(FLOW, "0.10", lease_seconds=lease_seconds)
        for name in ("", "x" * 201, "a\nb", "a\0b"):
            with pytest.raises(InvalidFieldError):
                await tracker.reserve(FLOW, "0.10", reservation_id=name)
        assert await tracker.journal() == []
        assert await tracker.get_budget(SESSION) is None


@pytest.mark.parametrize(
    "name",
    ["x" * 200, "task-1:2:3", "{tag}", "it's; DROP TABLE", '"quoted"', "50%_*?", "ключ-é-鍵", "🔑"],
)
async def test_a_printable_id_is_kept_as_it_is(tracker_factory: TrackerFactory, name: str) -> None:
    async with tracker_factory.two() as (tracker, other):
        assert (await tracker.reserve(FLOW, "0.10", reservation_id=name)).id == name
        await other.commit(name, "0.04")
        assert (await tracker.journal())[0].reservation_id == name
        assert await usd(tracker, FLOW) == (40_000, 0, 0)


async def test_the_deepest_scope_and_the_widest_reservation_are_held(
    tracker_factory: TrackerFactory,
) -> None:
    deepest = "/".join(f"level{number}:n" for number in range(8))
    also = [f"team:t{number:02}" for number in range(55)]
    async with tracker_factory() as tracker:
        token = await tracker.reserve(deepest, "0.10", also=also)
        assert len(flat(await tracker.status())) == 64
        await tracker.commit(token, "0.10")
        for scope in ("", deepest, also[0], also[-1]):
            assert await usd(tracker, scope) == (100_000, 0, 0)


async def test_the_two_spellings_of_a_scope_are_one_budget(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget("Session:eval", "0.10")
        with pytest.raises(BudgetExceededError):
            await tracker.reserve("SESSION:eval/workflow:w1", "0.11")
        # Names keep their case.
        await tracker.reserve("session:EVAL", "0.11")


async def test_a_closed_ledger_answers_nothing_until_it_is_opened_again(
    tracker_factory: TrackerFactory,
) -> None:
    tracker = tracker_factory()
    async with tracker:
        token = await tracker.reserve(FLOW, "0.10")
    every_call: list[Callable[[], Awaitable[object]]] = [
        lambda: tracker.reserve(FLOW, "0.10"),
        lambda: tracker.dispatched(token),
        lambda: tracker.extend(token),
        lambda: tracker.commit(token, "0.10"),
        lambda: tracker.release(token),
        lambda: tracker.get_spent(FLOW),
        lambda: tracker.get_budget(FLOW),
        lambda: tracker.set_budget(FLOW, 1),
        tracker.status,
        tracker.journal,
        tracker.ledger.sweep,
        tracker.ledger.audit,
    ]
    for call in every_call:
        with pytest.raises(LedgerUnavailableError):
            await call()
    await tracker.ledger.close()
    async with tracker:
        assert await usd(tracker, FLOW) == (0, 100_000, 0)


@pytest.mark.parametrize("amount", ["0", "0.10"])
async def test_what_is_given_back_leaves_no_scope_behind(
    tracker_factory: TrackerFactory, amount: str
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "1.00")
        await tracker.commit(await tracker.reserve(TENANT, "0.10"), "0.10")
        for n in range(20):
            also = [f"tenant:acme/run:{n}-{k}" for k in range(5)]
            token = await tracker.reserve(FLOW, amount, also=also, dispatched=n % 2 == 0)
            if n % 2 == 0:
                await tracker.commit(token)
            else:
                await tracker.release(token)
        known = await tracker.ledger.accounts(parse_scope(""))
        assert [one.scope for one in known] == ["", SESSION, "tenant:acme", TENANT]
        await assert_ledger_is_right(tracker)
