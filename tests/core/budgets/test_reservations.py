"""Every call on a reservation in every state has one answer, and a second one changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.budgets.reservations import (
    LIVE,
    NO_CHANGE,
    RULES,
    UNKNOWN_RULES,
    Answer,
    Call,
    Charge,
    Delta,
    Reservation,
    ReservationState,
    Settlement,
    commit,
    expire,
    extend,
    mark_dispatched,
    release,
    reserve,
    reserve_again,
    rules_table_markdown,
    unknown_reservation,
)
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.money import MicroUsd, Tokens
from headgate.errors import IllegalSettlementError

HELD, DISPATCHED = ReservationState.HELD, ReservationState.DISPATCHED
COMMITTED, RELEASED = ReservationState.COMMITTED, ReservationState.RELEASED
EXPIRED, ASSUMED = ReservationState.EXPIRED, ReservationState.ASSUMED

CHARGES = (
    Charge(scope=ROOT, bucket_start=0),
    Charge(scope=Scope("session:a"), bucket_start=86_400),
)
LEASE_UNTIL = 60.0
AFTER_LEASE = 60.0


def new(*, micro_usd: int = 100, tokens: int = 10, dispatched: bool = False) -> Settlement:
    return reserve(
        reservation_id="r-1",
        charges=CHARGES,
        micro_usd=MicroUsd(micro_usd),
        tokens=Tokens(tokens),
        lease_until=LEASE_UNTIL,
        dispatched=dispatched,
    )


def in_state(state: ReservationState) -> Reservation:
    held = new().reservation
    ways: dict[ReservationState, Callable[[], Reservation]] = {
        HELD: lambda: held,
        DISPATCHED: lambda: mark_dispatched(held).reservation,
        COMMITTED: lambda: spend(held, 70, 7).reservation,
        RELEASED: lambda: release(held).reservation,
        EXPIRED: lambda: expire(held, now=AFTER_LEASE).reservation,
        ASSUMED: lambda: expire(mark_dispatched(held).reservation, now=AFTER_LEASE).reservation,
    }
    return ways[state]()


def spend(reservation: Reservation, micro_usd: int, tokens: int) -> Settlement:
    return commit(reservation, micro_usd=MicroUsd(micro_usd), tokens=Tokens(tokens))


def ask(reservation: Reservation, call: Call) -> Settlement:
    return {
        Call.RESERVE: lambda: reserve_same(reservation),
        Call.DISPATCHED: lambda: mark_dispatched(reservation),
        Call.EXTEND: lambda: extend(reservation, lease_until=90.0),
        Call.COMMIT: lambda: spend(reservation, 70, 7),
        Call.RELEASE: lambda: release(reservation),
        Call.EXPIRE: lambda: expire(reservation, now=AFTER_LEASE),
    }[call]()


def reserve_same(reservation: Reservation) -> Settlement:
    return reserve_again(
        reservation,
        scopes=(ROOT, Scope("session:a")),
        micro_usd=MicroUsd(100),
        tokens=Tokens(10),
    )


def usd(spent: int, reserved: int, overrun: int) -> tuple[int, int, int]:
    return spent, reserved, overrun


def dollars_of(delta: Delta) -> tuple[int, int, int]:
    return usd(delta.spent_micro_usd, delta.reserved_micro_usd, delta.overrun_micro_usd)


def tokens_of(delta: Delta) -> tuple[int, int, int]:
    return usd(delta.spent_tokens, delta.reserved_tokens, delta.overrun_tokens)


def test_every_state_has_a_rule_for_every_call() -> None:
    assert set(RULES) == set(ReservationState)
    for rules in (*RULES.values(), UNKNOWN_RULES):
        assert set(rules) == set(Call)


def test_every_rule_says_what_it_must() -> None:
    for rules in (*RULES.values(), UNKNOWN_RULES):
        for rule in rules.values():
            moves = rule.answer in {Answer.MOVE, Answer.STAY}
            assert moves == (rule.to is not None) == (rule.booking is not None)
            assert bool(rule.why) == (rule.answer in {Answer.REFUSE, Answer.REPEAT_IF_SAME})


@pytest.mark.parametrize("call", Call)
@pytest.mark.parametrize("state", ReservationState)
def test_each_call_answers_as_the_table_says(state: ReservationState, call: Call) -> None:
    rule, reservation = RULES[state][call], in_state(state)
    if rule.answer is Answer.REFUSE:
        with pytest.raises(IllegalSettlementError) as refusal:
            ask(reservation, call)
        assert refusal.value.current == state.value
        assert rule.why in str(refusal.value)
        return
    settlement = ask(reservation, call)
    assert settlement.reservation.state is (rule.to or state)
    assert settlement.is_repeat == (rule.to is None)


#    before      call          after       dollars             tokens
MOVES = [
    (HELD, Call.DISPATCHED, DISPATCHED, usd(0, 0, 0), usd(0, 0, 0)),
    (HELD, Call.EXTEND, HELD, usd(0, 0, 0), usd(0, 0, 0)),
    (HELD, Call.COMMIT, COMMITTED, usd(70, -100, 0), usd(7, -10, 0)),
    (HELD, Call.RELEASE, RELEASED, usd(0, -100, 0), usd(0, -10, 0)),
    (HELD, Call.EXPIRE, EXPIRED, usd(0, -100, 0), usd(0, -10, 0)),
    (DISPATCHED, Call.EXTEND, DISPATCHED, usd(0, 0, 0), usd(0, 0, 0)),
    (DISPATCHED, Call.COMMIT, COMMITTED, usd(70, -100, 0), usd(7, -10, 0)),
    (DISPATCHED, Call.RELEASE, RELEASED, usd(0, -100, 0), usd(0, -10, 0)),
    (DISPATCHED, Call.EXPIRE, ASSUMED, usd(100, -100, 0), usd(10, -10, 0)),
    (EXPIRED, Call.COMMIT, COMMITTED, usd(0, 0, 70), usd(0, 0, 7)),
    (ASSUMED, Call.COMMIT, COMMITTED, usd(-30, 0, 0), usd(-3, 0, 0)),
    (ASSUMED, Call.RELEASE, RELEASED, usd(-100, 0, 0), usd(-10, 0, 0)),
]


@pytest.mark.parametrize(("before", "call", "after", "dollars", "tokens"), MOVES)
def test_each_move_books_its_delta(
    before: ReservationState,
    call: Call,
    after: ReservationState,
    dollars: tuple[int, int, int],
    tokens: tuple[int, int, int],
) -> None:
    settlement = ask(in_state(before), call)

    assert settlement.reservation.state is after
    assert dollars_of(settlement.delta) == dollars
    assert tokens_of(settlement.delta) == tokens


def test_the_table_of_moves_is_complete() -> None:
    tested = {(before, call) for before, call, *_ in MOVES}
    assert tested == {
        (state, call)
        for state, rules in RULES.items()
        for call, rule in rules.items()
        if rule.to is not None
    }


@pytest.mark.parametrize(
    ("before", "actual", "dollars"),
    [
        (HELD, 0, usd(0, -100, 0)),
        (HELD, 100, usd(100, -100, 0)),
        (HELD, 101, usd(100, -100, 1)),
        (DISPATCHED, 250, usd(100, -100, 150)),
        (ASSUMED, 0, usd(-100, 0, 0)),
        (ASSUMED, 100, usd(0, 0, 0)),
        (ASSUMED, 250, usd(0, 0, 150)),
        (EXPIRED, 0, usd(0, 0, 0)),
        (EXPIRED, 250, usd(0, 0, 250)),
    ],
)
def test_an_actual_above_what_was_held_is_overrun(
    before: ReservationState, actual: int, dollars: tuple[int, int, int]
) -> None:
    assert dollars_of(spend(in_state(before), actual, 10).delta) == dollars


def test_dollars_and_tokens_overrun_apart() -> None:
    delta = spend(in_state(HELD), 50, 15).delta

    assert dollars_of(delta) == usd(50, -100, 0)
    assert tokens_of(delta) == usd(10, -10, 5)


def test_a_new_reservation_holds_its_amounts() -> None:
    settlement = new()

    assert settlement.reservation.state is HELD
    assert dollars_of(settlement.delta) == usd(0, 100, 0)
    assert tokens_of(settlement.delta) == usd(0, 10, 0)


def test_a_reservation_may_be_dispatched_at_once() -> None:
    settlement = new(dispatched=True)

    assert settlement.reservation.state is DISPATCHED
    assert dollars_of(settlement.delta) == usd(0, 100, 0)
    assert expire(settlement.reservation, now=AFTER_LEASE).reservation.state is ASSUMED


ANSWERED = [
    (state, call)
    for state, rules in RULES.items()
    for call, rule in rules.items()
    if rule.answer is not Answer.REFUSE
]


@pytest.mark.parametrize(("state", "call"), ANSWERED)
def test_a_call_that_is_doubled_is_answered_alike_and_booked_once(
    state: ReservationState, call: Call
) -> None:
    first = ask(in_state(state), call)
    second = ask(first.reservation, call)

    assert second.reservation == first.reservation
    assert second.delta == NO_CHANGE


@pytest.mark.parametrize("state", ReservationState)
def test_reserving_the_same_again_is_a_repeat_in_every_state(state: ReservationState) -> None:
    reservation = in_state(state)

    assert reserve_same(reservation) == Settlement(reservation=reservation, is_repeat=True)


@pytest.mark.parametrize("state", ReservationState)
@pytest.mark.parametrize(
    ("scopes", "micro_usd", "tokens", "dispatched"),
    [
        ((ROOT,), 100, 10, False),
        ((ROOT, Scope("session:a")), 101, 10, False),
        ((ROOT, Scope("session:a")), 100, 11, False),
        ((ROOT, Scope("session:a")), 100, 10, True),
    ],
)
def test_reserving_something_else_under_the_same_id_is_refused_in_every_state(
    state: ReservationState,
    scopes: tuple[Scope, ...],
    micro_usd: int,
    tokens: int,
    dispatched: bool,
) -> None:
    with pytest.raises(IllegalSettlementError, match="use a new id"):
        reserve_again(
            in_state(state),
            scopes=scopes,
            micro_usd=MicroUsd(micro_usd),
            tokens=Tokens(tokens),
            dispatched=dispatched,
        )


@pytest.mark.parametrize(("micro_usd", "tokens"), [(71, 7), (70, 8), (0, 0)])
def test_committing_another_actual_is_refused(micro_usd: int, tokens: int) -> None:
    with pytest.raises(IllegalSettlementError, match="committed with another amount"):
        spend(in_state(COMMITTED), micro_usd, tokens)


def test_a_repeated_commit_is_known_by_its_actual_also_when_that_was_zero() -> None:
    committed = spend(in_state(HELD), 0, 0).reservation

    assert spend(committed, 0, 0).is_repeat


@pytest.mark.parametrize("state", [EXPIRED, ASSUMED])
def test_a_caller_whose_lease_ended_is_told_not_to_call_the_provider(
    state: ReservationState,
) -> None:
    with pytest.raises(IllegalSettlementError, match="do not call the provider"):
        mark_dispatched(in_state(state))


@pytest.mark.parametrize("state", ReservationState)
def test_nothing_expires_before_its_lease_ends(state: ReservationState) -> None:
    reservation = in_state(state)

    settlement = expire(reservation, now=LEASE_UNTIL - 0.001)

    assert settlement == Settlement(reservation=reservation, is_repeat=True)


@pytest.mark.parametrize("state", [HELD, DISPATCHED])
def test_an_extension_lengthens_the_lease_and_never_shortens_it(state: ReservationState) -> None:
    reservation = in_state(state)

    assert extend(reservation, lease_until=90.0).reservation.lease_until == 90.0
    assert extend(reservation, lease_until=30.0).reservation.lease_until == LEASE_UNTIL


def test_live_states_are_those_that_time_can_end() -> None:
    ends = {state for state, rules in RULES.items() if rules[Call.EXPIRE].answer is Answer.MOVE}
    assert ends == LIVE


@pytest.mark.parametrize("state", [COMMITTED, RELEASED])
def test_committed_and_released_are_final(state: ReservationState) -> None:
    assert all(rule.to is None for rule in RULES[state].values())


@pytest.mark.parametrize("call", [call for call in Call if call is not Call.RESERVE])
def test_an_unknown_id_is_refused_with_the_way_out(call: Call) -> None:
    refusal = unknown_reservation("r-9", call)

    assert refusal.current == "unknown"
    assert refusal.allowed == ("held",)
    assert "reserve first" in str(refusal)


def test_a_reservation_survives_being_stored() -> None:
    for state in ReservationState:
        stored = msgspec.json.encode(in_state(state))
        assert msgspec.json.decode(stored, type=Reservation) == in_state(state)


def test_the_drawn_table_has_a_row_for_every_rule() -> None:
    rows = rules_table_markdown().splitlines()[2:]

    assert len(rows) == (len(ReservationState) + 1) * len(Call)
    assert all(row.count("|") == 5 for row in rows)
    late = "| `expired` | `commit` | moves to `committed` | overrun: the whole actual cost |"
    assert late in rows


AMOUNTS = st.integers(0, 1_000)


@given(
    held=st.tuples(AMOUNTS, AMOUNTS),
    actual=st.tuples(AMOUNTS, AMOUNTS),
    calls=st.lists(st.sampled_from(Call), max_size=8),
)
@settings(deadline=None)
def test_whatever_the_order_of_calls_a_reservation_weighs_what_its_state_says(
    held: tuple[int, int], actual: tuple[int, int], calls: list[Call]
) -> None:
    settlement = new(micro_usd=held[0], tokens=held[1])
    reservation = settlement.reservation
    dollars, tokens = dollars_of(settlement.delta), tokens_of(settlement.delta)
    was_expired = False
    for call in calls:
        try:
            settlement = (
                spend(reservation, *actual) if call is Call.COMMIT else ask(reservation, call)
            )
        except IllegalSettlementError:
            continue
        was_expired = was_expired or settlement.reservation.state is EXPIRED
        reservation = settlement.reservation
        dollars = add(dollars, dollars_of(settlement.delta))
        tokens = add(tokens, tokens_of(settlement.delta))

    for column, kept, spent in ((dollars, held[0], actual[0]), (tokens, held[1], actual[1])):
        covered = 0 if was_expired else min(kept, spent)
        assert (
            column
            == {
                HELD: usd(0, kept, 0),
                DISPATCHED: usd(0, kept, 0),
                COMMITTED: usd(covered, 0, spent - covered),
                RELEASED: usd(0, 0, 0),
                EXPIRED: usd(0, 0, 0),
                ASSUMED: usd(kept, 0, 0),
            }[reservation.state]
        )


def add(left: tuple[int, int, int], right: tuple[int, int, int]) -> tuple[int, int, int]:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]
