"""What every ledger holds where nobody gave an estimate: probes and learned amounts."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgets.servers import ValkeyServer
from budgets.support import (
    TrackerFactory,
    assert_ledger_is_right,
    local_factory,
    placed_factory,
    run,
    usd,
)
from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.ledger import (
    Flexible,
    HoldRule,
    Refused,
    ReserveRequest,
    SettleRequest,
    Unit,
    exceeded,
)
from headgate.core.budgets.reservations import Call, Reservation, ReservationState
from headgate.core.budgets.scopes import charged_scopes, parse_scope
from headgate.core.money import MicroUsd, Tokens
from headgate.errors import IllegalSettlementError

SESSION = "session:eval"
FLOW = "session:eval/workflow:w1"
PROBE = Flexible(
    micro_usd=HoldRule.PROBE,
    tokens=HoldRule.PROBE,
    kind="p/t/",
    micro_usd_at_once=1,
    tokens_at_once=1,
)
LEARNED = Flexible(micro_usd=HoldRule.LEARNED, most_micro_usd=30_000, kind="p/t/")


def request(
    name: str,
    flexible: Flexible | None = PROBE,
    *,
    micro_usd: int = 0,
    tokens: int = 0,
    scope: str = FLOW,
    dispatched: bool = False,
) -> ReserveRequest:
    return ReserveRequest(
        reservation_id=name,
        scopes=charged_scopes(parse_scope(scope), ()),
        micro_usd=MicroUsd(micro_usd),
        tokens=Tokens(tokens),
        lease_seconds=60,
        dispatched=dispatched,
        flexible=flexible,
    )


async def held(tracker: LedgerTracker, asked: ReserveRequest) -> Reservation:
    answer = await tracker.ledger.reserve(asked)
    assert isinstance(answer, Reservation), answer
    return answer


async def refused(tracker: LedgerTracker, asked: ReserveRequest) -> Refused:
    answer = await tracker.ledger.reserve(asked)
    assert isinstance(answer, Refused), answer
    return answer


async def commit(tracker: LedgerTracker, name: str, micro_usd: int = 0, tokens: int = 0) -> None:
    await tracker.ledger.settle(
        SettleRequest(
            reservation_id=name,
            call=Call.COMMIT,
            micro_usd=MicroUsd(micro_usd),
            tokens=Tokens(tokens),
        )
    )


async def test_a_probe_holds_a_tenth_of_the_smallest_limit(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "5.00")
        await tracker.set_budget("", "100.00", limit_tokens=2_000)
        first = await held(tracker, request("a"))
        assert (first.micro_usd, first.tokens, first.kind) == (500_000, 200, "p/t/")
        # The same id, the same amount, also when another limit is in force by then.
        await tracker.set_budget(SESSION, "50.00")
        assert await held(tracker, request("a")) == first
        assert await usd(tracker, "") == (0, 500_000, 0)
        await assert_ledger_is_right(tracker)


@pytest.mark.parametrize(
    ("limit", "spent", "expected"),
    [
        ("5.00", "4.70", 300_000),
        ("5.00", "4.95", 50_000),
        ("5.00", "4.950001", None),
        ("5.00", "5.00", None),
        ("0", "0", None),
        ("0.000001", "0", 1),
    ],
)
async def test_a_probe_takes_what_is_left_and_waits_below_a_hundredth(
    tracker_factory: TrackerFactory, limit: str, spent: str, expected: int | None
) -> None:
    async with tracker_factory() as tracker:
        await tracker.reserve(FLOW, spent, reservation_id="before")
        await tracker.commit("before", spent)
        await tracker.set_budget(SESSION, limit)
        answer = await tracker.ledger.reserve(request("a"))
        if expected is None:
            assert isinstance(answer, Refused)
            assert answer.unit is Unit.MICRO_USD
            assert not answer.may_clear
            assert not answer.kind
        else:
            assert isinstance(answer, Reservation)
            assert answer.micro_usd == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(1, 500_000), (500_001, 500_001), (5_000_000, 5_000_000), (5_000_001, None)],
)
async def test_a_probe_holds_no_less_than_what_is_asked_for(
    tracker_factory: TrackerFactory, asked: int, expected: int | None
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "5.00")
        answer = await tracker.ledger.reserve(request("a", micro_usd=asked))
        if expected is None:
            assert isinstance(answer, Refused)
            assert (answer.requested, answer.may_clear) == (asked, False)
        else:
            assert isinstance(answer, Reservation)
            assert answer.micro_usd == expected
            assert (await refused(tracker, request("b", micro_usd=asked))).scope == SESSION
        unlimited = request("c", micro_usd=asked, scope="session:other")
        assert (await held(tracker, unlimited)).micro_usd == asked


async def test_an_exact_amount_may_be_bounded_in_number(tracker_factory: TrackerFactory) -> None:
    bounded = Flexible(kind="p/t/", micro_usd_at_once=2)
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "5.00")
        for name in ("a", "b"):
            assert (await held(tracker, request(name, bounded, micro_usd=7))).micro_usd == 7
        answer = await refused(tracker, request("c", bounded, micro_usd=7))
        assert (answer.kind, answer.live) == ("p/t/", 2)
        await assert_ledger_is_right(tracker)


async def test_without_a_limit_a_probe_holds_nothing_and_many_run(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget("session:other", "1.00", limit_tokens=10)
        for number in range(5):
            one = await held(tracker, request(str(number)))
            assert (one.micro_usd, one.tokens, one.kind) == (0, 0, "")


async def test_one_probe_of_a_kind_is_live_at_once(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "5.00")
        await held(tracker, request("a", dispatched=True))
        answer = await refused(tracker, request("b"))
        assert (answer.kind, answer.live, answer.may_clear) == ("p/t/", 1, True)
        assert "of this kind of work" in str(exceeded(answer))
        assert "estimate_usd" in str(exceeded(answer))
        await held(tracker, request("c", msgspec.structs.replace(PROBE, kind="p/other/")))
        await commit(tracker, "a", micro_usd=20_000)
        await held(tracker, request("b"))
        # A lost one counts no more, and what it held is spent.
        await tracker.ledger.settle(SettleRequest(reservation_id="b", call=Call.DISPATCHED))
        tracker_factory.clock.advance(61)
        await held(tracker, request("d"))
        assert await usd(tracker, SESSION) == (520_000, 500_000, 0)
        await assert_ledger_is_right(tracker)


async def test_a_bound_counts_only_where_its_unit_is_limited(
    tracker_factory: TrackerFactory,
) -> None:
    only_tokens = msgspec.structs.replace(PROBE, micro_usd=HoldRule.EXACT, micro_usd_at_once=0)
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "5.00")
        for number in range(5):
            one = await held(tracker, request(str(number), only_tokens, micro_usd=10_000))
            assert (one.micro_usd, one.tokens, one.kind) == (10_000, 0, "")


@pytest.mark.parametrize(
    ("spent", "reserved", "most", "expected"),
    [
        ("0.80", "0", 500_000, True),
        ("0.90", "0", 500_000, True),
        ("0.91", "0", 500_000, False),
        # Beside others in flight a guard stays free: an eightieth of the limit, twice.
        ("0.70", "0.175", 500_000, True),
        ("0.70", "0.18", 500_000, False),
    ],
)
async def test_a_learned_amount_leaves_a_guard_beside_others(
    tracker_factory: TrackerFactory, spent: str, reserved: str, most: int, expected: bool
) -> None:
    flexible = msgspec.structs.replace(LEARNED, most_micro_usd=most)
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "1.00")
        await tracker.reserve(FLOW, spent, reservation_id="before")
        await tracker.commit("before", spent)
        await tracker.reserve(FLOW, reserved, reservation_id="others")
        answer = await tracker.ledger.reserve(request("a", flexible, micro_usd=100_000))
        if expected:
            assert isinstance(answer, Reservation)
            assert answer.micro_usd == 100_000
        else:
            assert isinstance(answer, Refused)
            assert answer.requested == 100_000
            assert answer.may_clear == (reserved != "0")


@pytest.mark.parametrize(
    ("spent", "reserved", "most", "expected"),
    [
        # The dearest of its kind fits, though the margin does not.
        ("0.20", "0", 700_000, 800_000),
        ("0.10", "0.10", 700_000, 800_000),
        ("0.31", "0", 700_000, None),
        # Nothing like it has ever fitted: alone it has all that is left.
        ("0.20", "0", 2_000_000, 800_000),
        ("0.10", "0.10", 2_000_000, None),
    ],
)
async def test_a_margin_keeps_nothing_out_that_the_dearest_of_its_kind_would_not(
    tracker_factory: TrackerFactory, spent: str, reserved: str, most: int, expected: int | None
) -> None:
    flexible = msgspec.structs.replace(LEARNED, most_micro_usd=most)
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "1.00")
        await tracker.reserve(FLOW, spent, reservation_id="before")
        await tracker.commit("before", spent)
        await tracker.reserve(FLOW, reserved, reservation_id="others")
        asked = request("a", flexible, micro_usd=4 * most)
        answer = await tracker.ledger.reserve(asked)
        assert (answer.micro_usd if isinstance(answer, Reservation) else None) == expected


async def test_a_learned_amount_above_the_limit_holds_all_of_it(
    tracker_factory: TrackerFactory,
) -> None:
    dear = msgspec.structs.replace(LEARNED, most_micro_usd=3_000_000)
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "1.00")
        assert (await held(tracker, request("a", dear, micro_usd=9_000_000))).micro_usd == 1_000_000
        assert (await refused(tracker, request("b", dear, micro_usd=9_000_000))).may_clear


@pytest.mark.parametrize(
    ("spent", "likely", "expected"),
    [("0.20", 800_000, 800_000), ("0.20", 800_001, None), ("0", 2_000_000, None)],
)
async def test_work_that_is_known_to_cost_more_than_is_left_is_refused(
    tracker_factory: TrackerFactory, spent: str, likely: int, expected: int | None
) -> None:
    dear = msgspec.structs.replace(
        LEARNED, most_micro_usd=3_000_000, likely_micro_usd=likely, likely_tokens=5
    )
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "1.00")
        await tracker.commit(await tracker.reserve(FLOW, spent), spent)
        answer = await tracker.ledger.reserve(request("a", dear, micro_usd=4_000_000))
        assert (answer.micro_usd if isinstance(answer, Reservation) else None) == expected
        if isinstance(answer, Refused):
            assert not answer.may_clear


async def test_an_id_that_is_taken_by_another_amount_is_refused(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "5.00")
        await held(tracker, request("a", LEARNED, micro_usd=100_000))
        # What was learned since does not matter, what was given would.
        await held(tracker, request("a", LEARNED, micro_usd=200_000))
        with pytest.raises(IllegalSettlementError):
            await tracker.ledger.reserve(request("a", None, micro_usd=200_000))


# The same calls give the same answers, whatever keeps the ledger.

FLEXIBLES = st.one_of(
    st.none(),
    st.builds(
        Flexible,
        micro_usd=st.sampled_from(HoldRule),
        tokens=st.sampled_from(HoldRule),
        most_micro_usd=st.integers(0, 60),
        most_tokens=st.integers(0, 60),
        kind=st.sampled_from(["k1", "k2"]),
        micro_usd_at_once=st.integers(0, 2),
        tokens_at_once=st.integers(0, 2),
    ),
)
RESERVES = st.builds(
    request,
    st.sampled_from([f"r{number}" for number in range(8)]),
    FLEXIBLES,
    micro_usd=st.integers(0, 60),
    tokens=st.integers(0, 60),
    scope=st.sampled_from(["", SESSION, FLOW]),
    dispatched=st.booleans(),
)
SETTLES = st.builds(
    SettleRequest,
    reservation_id=st.sampled_from([f"r{number}" for number in range(8)]),
    call=st.sampled_from([Call.COMMIT, Call.RELEASE, Call.DISPATCHED]),
    micro_usd=st.integers(0, 80).map(MicroUsd),
    tokens=st.integers(0, 80).map(Tokens),
)
LIMITS = st.tuples(
    st.sampled_from(["", SESSION, FLOW]),
    st.one_of(st.none(), st.integers(0, 200)),
    st.one_of(st.none(), st.integers(0, 200)),
)
STEPS = st.lists(st.one_of(RESERVES, SETTLES, LIMITS, st.just(61.0)), max_size=30)


async def answers(factory: TrackerFactory, steps: list[Any]) -> list[object]:
    given: list[object] = []
    async with factory() as tracker:
        for step in steps:
            try:
                match step:
                    case ReserveRequest():
                        given.append(await tracker.ledger.reserve(step))
                    case SettleRequest():
                        given.append(await tracker.ledger.settle(step))
                    case float():
                        factory.clock.advance(step)
                    case (scope, micro_usd, tokens):
                        dollars = None if micro_usd is None else f"0.{micro_usd:06d}"
                        await tracker.set_budget(scope, dollars, limit_tokens=tokens)
            except IllegalSettlementError as error:
                given.append(str(error))
        await assert_ledger_is_right(tracker)
        await assert_limits_hold(given)
    return given


async def assert_limits_hold(given: list[object]) -> None:
    for one in given:
        if isinstance(one, Refused):
            assert one.requested > 0 or one.spent + one.reserved + one.overrun > one.limit
        elif isinstance(one, Reservation) and one.state is ReservationState.HELD:
            assert one.micro_usd >= 0
            assert one.tokens >= 0


def check_same_answers(fresh: Any, *, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None)
    @given(STEPS)
    def same(steps: list[Any]) -> None:
        assert run(answers(fresh(), steps)) == run(answers(local_factory(), steps))

    same()


@pytest.mark.hypothesis
def test_sqlite_answers_as_memory_does(tmp_path: Path) -> None:
    numbers = count()

    def fresh() -> TrackerFactory:
        path = str(tmp_path / f"{next(numbers)}.db")
        return placed_factory("sqlite", "SqliteBudgetTracker", path, path)

    check_same_answers(fresh, examples=60)


@pytest.mark.hypothesis
def test_redis_answers_as_memory_does(valkey: ValkeyServer) -> None:
    def fresh() -> TrackerFactory:
        valkey.flush()
        return placed_factory("redis", "RedisBudgetTracker", valkey.url, valkey.url)

    check_same_answers(fresh, examples=150)
