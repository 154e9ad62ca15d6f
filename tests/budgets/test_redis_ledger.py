"""What is special about a ledger on Redis: the script, its bounds, what this process remembers."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Sequence
from typing import cast

import pytest
from redis import Redis

from budgets.servers import ValkeyServer
from budgets.support import A_DAY_SECONDS, assert_ledger_is_right, usd
from headgate.budgets.redis import RedisBudgetTracker, RedisLedger
from headgate.budgets.redis_script import Bounds
from headgate.budgets.redis_server import RedisServer
from headgate.budgets.tracker import LedgerTracker, ReservationToken
from headgate.core.budgets.ledger import LedgerState, ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import RULES, Call, Reservation, ReservationState
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.budgets.windows import KEPT_BUCKETS
from headgate.core.money import MicroUsd, Tokens
from headgate.errors import (
    BudgetExceededError,
    IllegalSettlementError,
    InvalidFieldError,
    InvalidSettingError,
    LedgerUnavailableError,
)
from headgate.storage.zones import zone
from headgate.testing import VirtualClock

SESSION = "session:eval"
FLOW = "session:eval/workflow:w1"
SCOPES = (Scope(""), Scope(SESSION), Scope(FLOW))

RESERVE = ReserveRequest(
    reservation_id="r",
    scopes=SCOPES,
    micro_usd=MicroUsd(100),
    tokens=Tokens(10),
    lease_seconds=60.0,
)
DISPATCHED = SettleRequest(reservation_id="r", call=Call.DISPATCHED)
EXPIRE = SettleRequest(reservation_id="r", call=Call.EXPIRE)
COMMIT = SettleRequest(
    reservation_id="r", call=Call.COMMIT, micro_usd=MicroUsd(130), tokens=Tokens(4)
)
RELEASE = SettleRequest(reservation_id="r", call=Call.RELEASE)
EXTEND = SettleRequest(reservation_id="r", call=Call.EXTEND, lease_seconds=90.0)

Step = ReserveRequest | SettleRequest
WAYS: dict[ReservationState, list[Step]] = {
    ReservationState.HELD: [RESERVE],
    ReservationState.DISPATCHED: [RESERVE, DISPATCHED],
    ReservationState.COMMITTED: [RESERVE, COMMIT],
    ReservationState.RELEASED: [RESERVE, RELEASE],
    ReservationState.EXPIRED: [RESERVE, EXPIRE],
    ReservationState.ASSUMED: [RESERVE, DISPATCHED, EXPIRE],
}
CALLS: dict[Call, list[Step]] = {
    Call.RESERVE: [
        RESERVE,
        ReserveRequest(
            reservation_id="r",
            scopes=SCOPES[:2],
            micro_usd=MicroUsd(100),
            tokens=Tokens(10),
            lease_seconds=60.0,
        ),
    ],
    Call.DISPATCHED: [DISPATCHED],
    Call.EXTEND: [EXTEND],
    Call.COMMIT: [
        COMMIT,
        SettleRequest(reservation_id="r", call=Call.COMMIT, micro_usd=MicroUsd(1)),
    ],
    Call.RELEASE: [RELEASE],
    Call.EXPIRE: [EXPIRE],
}
PAIRS = [(state, request) for state in RULES for call in Call for request in CALLS[call]]


def admin(server: ValkeyServer) -> Redis:
    return cast("Redis", server.client())


def by_core(rules: LedgerState, step: Step, now: float) -> object:
    try:
        if isinstance(step, ReserveRequest):
            return rules.reserve(step, now)
        return rules.settle(step, now)
    except IllegalSettlementError as error:
        return str(error)


async def by_redis(ledger: RedisLedger, step: Step) -> object:
    try:
        if isinstance(step, ReserveRequest):
            return await ledger.reserve(step)
        return await ledger.settle(step)
    except IllegalSettlementError as error:
        return str(error)


@pytest.mark.parametrize(
    ("state", "request_made"),
    PAIRS,
    ids=lambda value: value.value if isinstance(value, ReservationState) else None,
)
async def test_every_state_answers_every_call_as_the_core_does(
    valkey_url: str, state: ReservationState, request_made: Step
) -> None:
    clock = VirtualClock()
    rules = LedgerState(zone)
    ledger = RedisLedger(valkey_url, clock=clock)
    await ledger.open()
    for step in (*WAYS[state], request_made):
        if step is EXPIRE:
            clock.advance(60)
            await ledger.sweep()
            by_core(rules, step, clock())
            continue
        assert await by_redis(ledger, step) == by_core(rules, step, clock())
    assert (await ledger.audit()).kept == {
        (scope, start): balance
        for scope, buckets in rules.balances.items()
        for start, balance in buckets.items()
    }
    assert (await ledger.journal(SCOPES[0], since=0, limit=100))[::-1] == rules.entries
    assert await by_redis(ledger, RESERVE) == rules.reservations["r"]
    await ledger.close()


async def test_a_tracker_learns_from_the_script_that_a_window_changed(valkey_url: str) -> None:
    clock = VirtualClock()
    first = RedisBudgetTracker(valkey_url, clock=clock)
    second = RedisBudgetTracker(valkey_url, clock=clock)
    async with first, second:
        await first.set_budget(SESSION, "1.00", window="rolling:24h")
        for window in ("day@Europe/Berlin", "none", "rolling:1h", "month@Asia/Tokyo"):
            await second.reserve(FLOW, "0.10")
            await first.set_budget(SESSION, "1.00", window=window)
            token = await second.reserve(FLOW, "0.10")
            await first.release(token)
            assert (await second.status(SESSION)).window == window
        await first.set_budget(SESSION, "0.01", window="day")
        with pytest.raises(BudgetExceededError):
            await second.reserve(FLOW, "0.10")
        await assert_ledger_is_right(first)


async def test_a_change_of_window_tells_what_the_journal_no_longer_dates(valkey_url: str) -> None:
    clock = VirtualClock()
    ledger = RedisLedger(valkey_url, clock=clock, bounds=Bounds(journal_entries=2))
    clock.advance(3_600)
    async with LedgerTracker(ledger) as tracker:
        held = await tracker.reserve(FLOW, "0.05", lease_seconds=600)
        for _ in range(50):
            await tracker.commit(await tracker.reserve(FLOW, "0.01"), "0.01")
        clock.advance(60)
        await tracker.commit(await tracker.reserve(FLOW, "0.01"), "0.01")
        await tracker.set_budget(SESSION, "1.00", window="day")
        status = await tracker.status(SESSION)
        since = (await ledger.journal(ROOT, since=0, limit=1_000))[-1].at
        assert status.counted_since == since
        # What is held and has no time counts as of now.
        assert 10_000 <= status.spent_micro_usd < 500_000
        assert status.reserved_micro_usd == 50_000
        await tracker.commit(held, "0.05")
        await tracker.set_budget(SESSION, "2.00", window="day")
        assert (await tracker.status(SESSION)).counted_since == since
        assert (await tracker.status("")).spent_micro_usd == 560_000
        await assert_ledger_is_right(tracker)


@pytest.mark.parametrize("step", ["set_budget", "create_budget"])
async def test_a_change_of_window_whose_reply_is_lost_tells_what_is_not_dated(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    clock = VirtualClock()
    ledger = RedisLedger(valkey_url, clock=clock, bounds=Bounds(journal_entries=2))
    run_alone = RedisServer._run_alone
    lost = 0

    async def run_and_lose_once(
        server: RedisServer, arguments: Sequence[str | bytes | int]
    ) -> bytes:
        nonlocal lost
        reply = await run_alone(server, arguments)
        if not lost and {"set_limit", "create_limit"} & set(arguments):
            lost += 1
            raise ConnectionError("the reply is lost")
        return reply

    clock.advance(3_600)
    async with LedgerTracker(ledger) as tracker:
        for _ in range(50):
            await tracker.commit(await tracker.reserve(FLOW, "0.01"), "0.01")
        clock.advance(60)
        await tracker.commit(await tracker.reserve(FLOW, "0.01"), "0.01")
        monkeypatch.setattr(RedisServer, "_run_alone", run_and_lose_once)
        await getattr(tracker, step)(SESSION, "1.00", window="day")
        since = (await ledger.journal(ROOT, since=0, limit=1_000))[-1].at
        assert ((await tracker.status(SESSION)).counted_since, lost) == (since, 1)
        await tracker.set_budget(SESSION, "2.00", window="day")
        assert (await tracker.status(SESSION)).counted_since == since


async def test_a_change_of_window_tells_nothing_where_all_that_is_not_dated_is_older(
    valkey_url: str,
) -> None:
    clock = VirtualClock()
    ledger = RedisLedger(valkey_url, clock=clock, bounds=Bounds(journal_entries=2))
    async with LedgerTracker(ledger) as tracker:
        await tracker.set_budget(SESSION, "9.00", window="day")
        for _ in range(50):
            await tracker.commit(await tracker.reserve(FLOW, "0.01"), "0.01")
        clock.advance(3 * A_DAY_SECONDS)
        await tracker.set_budget("session:other", "1.00", window="day")
        for _ in range(50):
            await tracker.commit(await tracker.reserve("session:other", "0.01"), "0.01")
        await tracker.set_budget(SESSION, "9.00", window="rolling:24h")
        status = await tracker.status(SESSION)
        assert (status.counted_since, status.spent_micro_usd) == (None, 0)


async def test_limits_that_change_while_others_reserve_are_never_passed(valkey_url: str) -> None:
    clock = VirtualClock()
    first = RedisBudgetTracker(valkey_url, clock=clock)
    second = RedisBudgetTracker(valkey_url, clock=clock)
    async with first, second:
        await first.set_budget(SESSION, "0.10", window="day")

        async def change() -> None:
            for number in range(40):
                # Each of the two counts the buckets of the other.
                window = ("rolling:24h", "day")[number % 2]
                await first.set_budget(SESSION, "0.10", window=window)

        async def spend() -> None:
            for _ in range(20):
                try:
                    await second.reserve(FLOW, "0.01")
                except BudgetExceededError:
                    continue

        await asyncio.gather(change(), *(spend() for _ in range(8)))
        assert (await usd(second, SESSION)).reserved == 100_000
        await assert_ledger_is_right(first)


async def test_a_zone_that_only_another_machine_knows_fails_its_own_calls_alone(
    valkey: ValkeyServer, valkey_url: str
) -> None:
    ledger = RedisLedger(valkey_url)
    async with LedgerTracker(ledger) as tracker:
        await tracker.set_budget("session:far", "1.00", window="day@Europe/Berlin")
        await tracker.set_budget("session:windowed", "1.00", window="day@Europe/Berlin")
        with admin(valkey) as client:
            key = "{headgate:budget:default}:limits"
            kept = cast("bytes", client.hget(key, "session:far"))
            client.hset(key, "session:far", kept.replace(b"Europe/Berlin", b"Europe/Nowhe1"))
        calls: list[Awaitable[object]] = [
            tracker.reserve("session:far", "0.10"),
            tracker.reserve("session:near", "0.10"),
            tracker.reserve("session:windowed", "0.10"),
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[0], InvalidSettingError)
        assert [type(answer) for answer in answers[1:]] == [ReservationToken] * 2
        async with RedisBudgetTracker(valkey_url) as elsewhere:
            await elsewhere.set_budget("session:far", "1.00", window="day@Asia/Tokyo")
        await tracker.reserve("session:far", "0.10")


async def test_two_ledgers_on_one_server_stay_apart(valkey_url: str) -> None:
    named = RedisBudgetTracker(f"{valkey_url}&ledger=team-a")
    argued = RedisBudgetTracker(valkey_url, ledger="team-a")
    async with named, argued, RedisBudgetTracker(valkey_url) as other:
        await named.reserve(FLOW, "0.10", reservation_id="same")
        assert await usd(argued) == (0, 100_000, 0)
        assert await usd(other) == (0, 0, 0)
        await other.reserve(FLOW, "0.20", reservation_id="same")


@pytest.mark.parametrize("name", ["{a}", "a b", "a*", "é", "x" * 65, "a}b"])
def test_a_name_that_would_break_the_keys_is_refused(name: str) -> None:
    with pytest.raises(InvalidFieldError, match="ledger"):
        RedisBudgetTracker("redis://127.0.0.1/0", ledger=name)


async def test_all_keys_of_a_ledger_have_one_hash_tag(
    valkey: ValkeyServer, valkey_url: str
) -> None:
    async with RedisBudgetTracker(valkey_url) as tracker:
        await tracker.set_budget(SESSION, "1.00")
        await tracker.commit(await tracker.reserve(FLOW, "0.10"), "0.10")
        await tracker.reserve(FLOW, "0.10")
    with admin(valkey) as client:
        keys = cast("list[bytes]", client.keys("*"))
        assert len(keys) >= 8
        assert {key.partition(b"}")[0] for key in keys} == {b"{headgate:budget:default"}


async def test_the_journal_is_folded_and_the_audit_holds_at_every_step(
    valkey: ValkeyServer, valkey_url: str
) -> None:
    clock = VirtualClock()
    bounds = Bounds(journal_entries=20, finished=10)
    async with LedgerTracker(RedisLedger(valkey_url, clock=clock, bounds=bounds)) as tracker:
        await tracker.set_budget(SESSION, "100.00", window="rolling:1h")
        for number in range(150):
            token = await tracker.reserve(FLOW, "0.10", lease_seconds=30)
            if number % 3:
                await tracker.commit(token, "0.12")
            clock.advance(40)
            await assert_ledger_is_right(tracker)
        with admin(valkey) as client:
            assert cast("int", client.llen("{headgate:budget:default}:journal")) < 20 + 64
            assert cast("int", client.hlen("{headgate:budget:default}:checkpoint")) == 3


async def test_finished_reservations_are_forgotten_beyond_a_number_and_live_ones_never(
    valkey: ValkeyServer, valkey_url: str
) -> None:
    bounds = Bounds(finished=5)
    async with LedgerTracker(RedisLedger(valkey_url, bounds=bounds)) as tracker:
        live = await tracker.reserve(FLOW, "0.10")
        for number in range(20):
            await tracker.reserve(FLOW, "0.10", reservation_id=f"r{number}")
            await tracker.commit(f"r{number}", "0.10")
        for number in range(15, 20):
            await tracker.commit(f"r{number}", "0.10")
        with pytest.raises(IllegalSettlementError, match="unknown"):
            await tracker.commit("r14", "0.10")
        with admin(valkey) as client:
            assert cast("int", client.hlen("{headgate:budget:default}:reservations")) == 6
        await tracker.commit(live, "0.10")
        await assert_ledger_is_right(tracker)


async def test_one_that_finished_twice_is_remembered_from_the_second_time(valkey_url: str) -> None:
    clock = VirtualClock()
    async with RedisBudgetTracker(valkey_url, clock=clock) as tracker:
        await tracker.reserve(FLOW, "0.10", reservation_id="late", lease_seconds=10)
        clock.advance(A_DAY_SECONDS / 2)
        await tracker.commit("late", "0.10")
        clock.advance(A_DAY_SECONDS * 3 / 4)
        await tracker.ledger.sweep()
        await tracker.commit("late", "0.10")
        clock.advance(A_DAY_SECONDS / 2)
        await tracker.ledger.sweep()
        with pytest.raises(IllegalSettlementError, match="unknown"):
            await tracker.commit("late", "0.10")


async def test_old_buckets_leave_both_sides_of_the_audit(valkey_url: str) -> None:
    clock = VirtualClock()
    async with RedisBudgetTracker(valkey_url, clock=clock) as tracker:
        await tracker.set_budget(SESSION, "100.00", window="rolling:1h")
        for _ in range(120):
            await tracker.commit(await tracker.reserve(FLOW, "0.10"), "0.10")
            clock.advance(3_600)
        audit = await tracker.ledger.audit()
        buckets = [start for scope, start in audit.kept if scope == SESSION]
        assert len(buckets) <= KEPT_BUCKETS + 2
        assert (await usd(tracker)).spent == 12_000_000
        await assert_ledger_is_right(tracker)


async def test_no_refusal_is_given_while_ended_leases_hold_the_room(valkey_url: str) -> None:
    clock = VirtualClock()
    bounds = Bounds(expired_at_once=10)
    async with LedgerTracker(RedisLedger(valkey_url, clock=clock, bounds=bounds)) as tracker:
        await tracker.set_budget(SESSION, "1.00")
        calls = [tracker.reserve(FLOW, "0.01", lease_seconds=10) for _ in range(100)]
        await asyncio.gather(*calls)
        clock.advance(10)
        await tracker.reserve(FLOW, "1.00", lease_seconds=10)
        assert await usd(tracker, SESSION) == (0, 1_000_000, 0)
        clock.advance(10)
        assert await tracker.ledger.sweep() == 1


async def test_the_time_is_the_server_s(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = RedisLedger(valkey_url)
    await ledger.open()
    ahead = ledger.now()
    monkeypatch.setattr("time.time", lambda: 1_000.0)
    wrong = RedisLedger(valkey_url, clock=time.time)
    await wrong.open()
    assert abs(wrong.now() - ahead) < 30
    await wrong.close()
    await ledger.close()


@pytest.mark.parametrize("step_seconds", [3_600.0, -3_600.0])
async def test_a_step_of_this_machine_s_clock_ends_nobody_s_lease(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch, step_seconds: float
) -> None:
    wall = time.time
    steps = [0.0]
    monkeypatch.setattr("time.time", lambda: wall() + steps[0])
    stepping = RedisBudgetTracker(valkey_url, clock=time.time)
    async with RedisBudgetTracker(valkey_url) as other, stepping:
        token = await other.reserve(FLOW, "0.10", lease_seconds=600)
        steps[0] = step_seconds
        assert await stepping.ledger.sweep() == 0
        await stepping.reserve(FLOW, "0.20", lease_seconds=600)
        assert await other.ledger.sweep() == 0
        assert await usd(other) == (0, 300_000, 0)
        await other.commit(token, "0.10")


async def test_the_balance_of_an_old_bucket_is_kept_while_what_it_assumed_can_be_corrected(
    valkey_url: str,
) -> None:
    clock = VirtualClock()
    # The journal is folded at once, so it cannot tell what is still remembered.
    bounds = Bounds(journal_entries=0)
    async with LedgerTracker(RedisLedger(valkey_url, clock=clock, bounds=bounds)) as tracker:
        await tracker.set_budget(SESSION, "1.00", window="rolling:1h")
        lease_seconds = 3 * A_DAY_SECONDS
        late = await tracker.reserve(FLOW, "1.00", dispatched=True, lease_seconds=lease_seconds)
        clock.advance(lease_seconds)
        for _ in range(80):
            await tracker.release(await tracker.reserve(FLOW, "0.01"))
        await tracker.commit(late, "0.10")
        assert await spent_in_buckets(tracker) == [100_000]
        clock.advance(A_DAY_SECONDS + 1)
        await tracker.release(await tracker.reserve(FLOW, "0.01"))
        assert 100_000 in await spent_in_buckets(tracker)
        # Forgotten now; so it goes when enough later ones have been used.
        for _ in range(KEPT_BUCKETS):
            clock.advance(150)
            await tracker.commit(await tracker.reserve(FLOW, "0.01"), "0.001")
        assert 100_000 not in await spent_in_buckets(tracker)
        await assert_ledger_is_right(tracker)


async def spent_in_buckets(tracker: LedgerTracker) -> list[int]:
    audit = await tracker.ledger.audit()
    kept = [balance for (scope, _), balance in audit.kept.items() if scope == SESSION]
    return sorted(balance.spent_micro_usd for balance in kept)


def test_reservations_of_the_core_have_no_field_that_the_script_does_not_keep() -> None:
    kept = {"charges", "micro_usd", "tokens", "lease_until", "state", "dispatched_at_once"}
    kept |= {"id", "actual_micro_usd", "actual_tokens", "kind"}
    assert set(Reservation.__struct_fields__) == kept


IN_ANOTHER_LOOP = "opened in another event loop; open a tracker in each loop"


async def test_a_second_loop_is_told_so_and_the_first_goes_on(valkey_url: str) -> None:
    tracker = RedisBudgetTracker(valkey_url)

    async def everything() -> None:
        calls = (
            tracker.reserve(FLOW, "0.10"),
            tracker.set_budget(FLOW, "1.00"),
            tracker.status(),
            tracker.journal(),
            tracker.ledger.open(),
            tracker.ledger.close(),
        )
        for call in calls:
            with pytest.raises(LedgerUnavailableError, match=IN_ANOTHER_LOOP):
                await call

    async with tracker:
        await tracker.reserve(FLOW, "0.10")
        await asyncio.to_thread(lambda: asyncio.run(everything()))
        await tracker.reserve(FLOW, "0.10")
        assert (await tracker.status()).reserved_micro_usd == 200_000


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_tracker_that_its_loop_left_open_is_opened_again_in_the_next(valkey_url: str) -> None:
    tracker = RedisBudgetTracker(valkey_url)

    async def leave_open() -> None:
        await tracker.ledger.open()
        await tracker.reserve(FLOW, "0.10")

    async def use_without_opening() -> None:
        with pytest.raises(LedgerUnavailableError, match=IN_ANOTHER_LOOP):
            await tracker.reserve(FLOW, "0.10")

    async def open_again() -> None:
        async with tracker:
            await tracker.reserve(FLOW, "0.10")
            assert (await tracker.status()).reserved_micro_usd == 200_000

    for scenario in (leave_open(), use_without_opening(), open_again()):
        asyncio.run(scenario)
    # The connections that were left open warn here, and not in the tests that follow.
    gc.collect()
