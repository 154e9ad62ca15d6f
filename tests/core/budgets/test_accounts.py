"""An admission never passes a limit, and the balances are the sum of the journal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.budgets.ledger import (
    EMPTY,
    Account,
    Balance,
    JournalEntry,
    LedgerState,
    Limit,
    Refused,
    ReserveRequest,
    SettleRequest,
    Unit,
    balances_from,
    charges_at,
    first_refusal,
    read_account,
)
from headgate.core.budgets.reservations import (
    Call,
    Reservation,
    ReservationState,
)
from headgate.core.budgets.scopes import ROOT, Scope, charged_scopes, parse_scope
from headgate.core.budgets.windows import parse_window
from headgate.core.money import MicroUsd, Tokens
from headgate.errors import IllegalSettlementError

SESSION = parse_scope("session:a")
WORKFLOW = parse_scope("session:a/workflow:w")
HOUR = 3_600
NOW = 1_000_000 * HOUR + 60.0


def limit(usd: int | None = None, *, tokens: int | None = None, window: str = "none") -> Limit:
    return Limit(
        limit_micro_usd=None if usd is None else MicroUsd(usd),
        limit_tokens=None if tokens is None else Tokens(tokens),
        window=parse_window(window),
    )


def balance(*usd: int, tokens: tuple[int, int, int] = (0, 0, 0)) -> Balance:
    spent, reserved, overrun = usd or (0, 0, 0)
    return Balance(
        spent_micro_usd=MicroUsd(spent),
        reserved_micro_usd=MicroUsd(reserved),
        overrun_micro_usd=MicroUsd(overrun),
        spent_tokens=Tokens(tokens[0]),
        reserved_tokens=Tokens(tokens[1]),
        overrun_tokens=Tokens(tokens[2]),
    )


def ask(*accounts: Account, usd: int = 0, tokens: int = 0) -> Refused | None:
    return first_refusal(accounts, micro_usd=MicroUsd(usd), tokens=Tokens(tokens), now=NOW)


def refusal_of(*accounts: Account, usd: int = 0, tokens: int = 0) -> Refused:
    answer = ask(*accounts, usd=usd, tokens=tokens)
    assert isinstance(answer, Refused)
    return answer


@pytest.mark.parametrize(
    ("most", "booked", "requested", "fits"),
    [
        (100, (0, 0, 0), 100, True),
        (100, (0, 0, 0), 101, False),
        (100, (40, 30, 20), 10, True),
        (100, (40, 30, 20), 11, False),
        (100, (100, 0, 0), 1, False),
        (100, (0, 100, 0), 1, False),
        (100, (0, 0, 100), 1, False),
        (100, (100, 0, 0), 0, True),
        (100, (100, 0, 1), 0, False),
        (0, (0, 0, 0), 0, True),
        (0, (0, 0, 0), 1, False),
        (None, (10**15, 0, 0), 10**12, True),
    ],
)
def test_what_is_used_and_requested_must_fit_the_limit(
    most: int | None, booked: tuple[int, int, int], requested: int, fits: bool
) -> None:
    dollars = Account(scope=ROOT, limit=limit(most), balance=balance(*booked))
    tokens = Account(scope=ROOT, limit=limit(tokens=most), balance=balance(tokens=booked))

    assert (ask(dollars, usd=requested) is None) is fits
    assert (ask(tokens, tokens=requested) is None) is fits


def test_a_scope_without_a_limit_holds_anything() -> None:
    assert ask(Account(scope=ROOT, balance=balance(10**15, 0, 0)), usd=10**12) is None


def test_the_first_scope_that_is_full_is_named_root_first() -> None:
    roomy = Account(scope=ROOT, limit=limit(1_000))
    full = Account(scope=SESSION, limit=limit(50), balance=balance(30, 10, 5))
    fuller = Account(scope=WORKFLOW, limit=limit(5))

    assert refusal_of(roomy, full, fuller, usd=6) == Refused(
        scope=SESSION,
        unit=Unit.MICRO_USD,
        limit=50,
        spent=30,
        reserved=10,
        overrun=5,
        requested=6,
        resets_at=None,
        may_clear=True,
    )


def test_tokens_are_enforced_beside_dollars() -> None:
    account = Account(
        scope=ROOT, limit=limit(100, tokens=10), balance=balance(0, 0, 0, tokens=(5, 3, 1))
    )

    assert ask(account, usd=100, tokens=1) is None
    refused = refusal_of(account, usd=100, tokens=2)
    assert (refused.unit, refused.limit, refused.requested) == (Unit.TOKENS, 10, 2)
    assert (refused.spent, refused.reserved, refused.overrun) == (5, 3, 1)


@pytest.mark.parametrize(
    ("window", "booked", "requested", "may_clear"),
    [
        ("none", (60, 0, 0), 50, False),
        ("none", (50, 10, 0), 50, True),
        ("none", (0, 0, 60), 50, False),
        ("none", (51, 40, 0), 50, False),
        ("none", (0, 100, 0), 101, False),
        ("day", (60, 0, 0), 50, True),
        ("day", (60, 0, 0), 101, False),
        ("rolling:24h", (60, 0, 0), 50, True),
        ("rolling:24h", (0, 0, 0), 101, False),
    ],
)
def test_waiting_helps_only_where_room_can_come_back(
    window: str, booked: tuple[int, int, int], requested: int, may_clear: bool
) -> None:
    account = read_account(
        ROOT, limit(100, window=window), {int(NOW): balance(*booked)}, now=NOW, tz=UTC
    )

    assert refusal_of(account, usd=requested).may_clear is may_clear


def test_a_refusal_tells_when_the_calendar_window_resets() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    account = Account(
        scope=ROOT, limit=limit(1, window="day@Europe/Berlin"), balance=balance(1, 0, 0), tz=berlin
    )
    # 2026-03-29 is a day of 23 hours there.
    noon = 1_774_778_400.0

    refused = first_refusal([account], micro_usd=MicroUsd(1), tokens=Tokens(0), now=noon)

    assert isinstance(refused, Refused)
    assert refused.resets_at == noon + 12 * HOUR


def test_only_buckets_of_the_window_count_and_the_oldest_of_them_resets_it() -> None:
    current = 1_000_000 * HOUR
    buckets = {
        current - 25 * HOUR: balance(1, 0, 0),
        current - 24 * HOUR: EMPTY,
        current - 23 * HOUR: balance(10, 0, 0),
        current: balance(0, 100, 0),
        current + HOUR: balance(0, 0, 1_000),
    }

    account = read_account(ROOT, limit(1_111, window="rolling:24h"), buckets, now=NOW, tz=UTC)

    assert account.balance == balance(10, 100, 1_000)
    assert account.oldest_bucket == current - 23 * HOUR
    assert refusal_of(account, usd=2).resets_at == current + 2 * HOUR


def test_an_amount_is_kept_in_the_bucket_of_each_scope_s_own_window() -> None:
    accounts = [
        Account(scope=ROOT),
        Account(scope=SESSION, limit=limit(1, window="day")),
        Account(scope=WORKFLOW, limit=limit(1, window="rolling:24h")),
    ]

    charges = charges_at(accounts, now=86_400.0 * 10 + 2.5 * HOUR)

    assert [(charge.scope, charge.bucket_start) for charge in charges] == [
        (ROOT, 0),
        (SESSION, 864_000),
        (WORKFLOW, 864_000 + 2 * HOUR),
    ]


def test_a_change_is_one_journal_row_for_all_charged_scopes() -> None:
    books = PlayedLedger({})

    books.reserve(SESSION, ROOT, 5, 0, NOW, dispatched=False)

    (entry,) = books.journal
    assert [charge.scope for charge in entry.charges] == [ROOT, SESSION]
    assert balances_from([entry]) == {(ROOT, 0): balance(0, 5, 0), (SESSION, 0): balance(0, 5, 0)}


def test_repeats_and_extensions_leave_no_journal_row() -> None:
    books = PlayedLedger({})
    books.reserve(ROOT, ROOT, 5, 0, NOW, dispatched=False)

    for call in (Call.EXTEND, Call.DISPATCHED, Call.RELEASE, Call.RELEASE):
        books.settle("r-0", call, 0, NOW)

    assert [entry.call for entry in books.journal] == [Call.RESERVE, Call.DISPATCHED, Call.RELEASE]


class PlayedLedger:
    """The books under test, played with short calls; the record of changes is the journal."""

    def __init__(self, limits: Mapping[Scope, Limit]) -> None:
        self.books = LedgerState(lambda _: UTC)
        self.books.limits.update(limits)
        self.account = self.books.account
        self.reservations = self.books.reservations

    @property
    def journal(self) -> list[JournalEntry]:
        return self.books.entries

    @property
    def balances(self) -> dict[tuple[Scope, int], Balance]:
        kept = self.books.balances.items()
        return {(scope, start): row for scope, rows in kept for start, row in rows.items()}

    def reserve(
        self, scope: Scope, also: Scope, usd: int, tokens: int, now: float, *, dispatched: bool
    ) -> bool:
        request = ReserveRequest(
            reservation_id=f"r-{len(self.reservations)}",
            scopes=charged_scopes(scope, [also]),
            micro_usd=MicroUsd(usd),
            tokens=Tokens(tokens),
            lease_seconds=600,
            dispatched=dispatched,
        )
        answer = self.books.reserve(request, now)
        assert self.books.reserve(request, now) == answer
        return isinstance(answer, Reservation)

    def settle(self, reservation_id: str, call: Call, usd: int, now: float) -> None:
        request = SettleRequest(
            reservation_id=reservation_id,
            call=call,
            micro_usd=MicroUsd(usd),
            tokens=Tokens(usd // 2),
            lease_seconds=600,
        )
        with suppress(IllegalSettlementError):
            self.books.settle(request, now)

    def check(self) -> None:
        journalled = balances_from(self.journal)
        assert self.balances == {key: one for key, one in journalled.items() if one != EMPTY}
        assert set(self.balances) <= self.books.changed_balances <= set(journalled)
        assert self.reservations == self.books.changed_reservations
        for row in self.balances.values():
            assert min(msgspec.structs.astuple(row)) >= 0


TREE = [ROOT, SESSION, WORKFLOW, parse_scope("session:a/workflow:v"), parse_scope("session:b")]
LIMITS = st.builds(
    limit,
    st.none() | st.integers(0, 300),
    tokens=st.none() | st.integers(0, 300),
    window=st.sampled_from(["none", "day", "month", "rolling:1h", "rolling:24h"]),
)
SCOPES, AMOUNTS, PAUSES = st.sampled_from(TREE), st.integers(0, 60), [0, 1, 599, 7_000, 90_000]
LATER_CALLS = st.sampled_from([call for call in Call if call is not Call.RESERVE])
RESERVE_STEPS = st.tuples(SCOPES, SCOPES, AMOUNTS, AMOUNTS, st.booleans())
SETTLE_STEPS = st.tuples(st.integers(0, 30), LATER_CALLS, st.integers(0, 90))
Step = tuple[int, tuple[Scope, Scope, int, int, bool], tuple[int, Call, int]]
STEPS = st.lists(
    st.tuples(st.sampled_from(PAUSES), RESERVE_STEPS, SETTLE_STEPS), min_size=1, max_size=25
)


def play(books: PlayedLedger, steps: list[Step]) -> float:
    """Take the steps, check the books after each, and tell what time it is."""
    now = NOW
    for pause, (scope, also, usd, tokens, dispatched), (number, call, actual) in steps:
        now += pause
        if books.reserve(scope, also, usd, tokens, now, dispatched=dispatched):
            check_limits(books, charged_scopes(scope, [also]), now)
        if books.reservations:
            books.settle(f"r-{number % len(books.reservations)}", call, actual, now)
        books.check()
    return now


@given(limits=st.dictionaries(st.sampled_from(TREE), LIMITS), steps=STEPS)
@settings(deadline=None, max_examples=150)
def test_no_order_of_calls_passes_a_limit_by_admission_or_loses_money(
    limits: dict[Scope, Limit], steps: list[Step]
) -> None:
    books = PlayedLedger(limits)
    now = play(books, steps)

    for reservation_id in list(books.reservations):
        books.settle(reservation_id, Call.EXPIRE, 0, now + 1_000)
    books.check()
    for row in books.balances.values():
        assert (row.reserved_micro_usd, row.reserved_tokens) == (0, 0)
    check_root_weighs_what_was_spent(books)


def check_limits(books: PlayedLedger, scopes: tuple[Scope, ...], now: float) -> None:
    for scope in scopes:
        account = books.account(scope, now)
        bound = account.limit or Limit()
        if bound.limit_micro_usd is not None:
            assert account.balance.used_micro_usd <= bound.limit_micro_usd
        if bound.limit_tokens is not None:
            assert account.balance.used_tokens <= bound.limit_tokens


def check_root_weighs_what_was_spent(books: PlayedLedger) -> None:
    """Every reservation reaches the root, so its total is what all of them came to."""
    booked = sum(row.used_micro_usd for (scope, _), row in books.balances.items() if not scope)
    made = books.reservations.values()
    assumed = sum(one.micro_usd for one in made if one.state is ReservationState.ASSUMED)
    assert booked == assumed + sum(one.actual_micro_usd or 0 for one in made)


def test_a_limit_lowered_below_what_is_used_stops_admissions_and_nothing_else() -> None:
    books = PlayedLedger({SESSION: limit(100)})
    assert books.reserve(WORKFLOW, ROOT, 60, 0, NOW, dispatched=False)

    books.books.limits[SESSION] = limit(10)

    assert not books.reserve(WORKFLOW, ROOT, 0, 0, NOW, dispatched=False)
    books.settle("r-0", Call.DISPATCHED, 0, NOW)
    books.settle("r-0", Call.COMMIT, 55, NOW)
    assert books.balances[SESSION, 0] == balance(55, 0, 0, tokens=(0, 0, 27))


def test_a_late_settlement_is_booked_in_the_bucket_of_its_reservation() -> None:
    books = PlayedLedger({ROOT: limit(100, window="day")})
    assert books.reserve(ROOT, ROOT, 100, 0, NOW, dispatched=True)
    tomorrow = NOW + 86_400

    assert books.reserve(ROOT, ROOT, 100, 0, tomorrow, dispatched=True)
    books.settle("r-0", Call.COMMIT, 80, tomorrow)

    assert [row.used_micro_usd for row in books.balances.values()] == [80, 100]


@given(steps=STEPS, cut=st.integers(0, 200))
@settings(deadline=None, max_examples=30)
def test_a_checkpoint_and_the_rest_of_the_journal_give_the_same_balances(
    steps: list[Step],
    cut: int,
) -> None:
    books = PlayedLedger({})
    play(books, steps)

    checkpoint = balances_from(books.journal[:cut])
    summed = balances_from(books.journal[cut:], checkpoint=checkpoint)
    assert {key: one for key, one in summed.items() if one != EMPTY} == books.balances
