"""The table of reservation rules, as the documentation shows it, is what every ledger answers.

Each row is driven on each backend: a reservation is brought into the state, the call is made, and
the answer, the weight on the ledger and the wording of a refusal are held against the page.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest

from budgets.support import (
    A_DAY_SECONDS,
    Sums,
    TrackerFactory,
    assert_ledger_is_right,
    local_factory,
    tokens,
    usd,
)
from doc_pages import ROOT, rows_under
from headgate.budgets.tracker import LedgerTracker, ReservationToken
from headgate.core.budgets.ledger import SettleRequest
from headgate.core.budgets.reservations import RULES, Call, ReservationState, rules_table_markdown
from headgate.errors import IllegalSettlementError

PAGE = (ROOT / "docs/reservation-rules.md").read_text()
UNKNOWN = "unknown id"
SHORT_SECONDS, LONG_SECONDS = 60.0, 0.5 * A_DAY_SECONDS


class Row(NamedTuple):
    """One row of the page: the answer to a call in a state."""

    state: str
    call: Call
    answer: str
    note: str


def read_rows() -> list[Row]:
    cells = rows_under(PAGE, "Reservation rules")
    return [Row(state, Call(call), answer, note) for state, call, answer, note in cells]


ROWS = read_rows()
STATES = list(dict.fromkeys(row.state for row in ROWS))

# What a reservation of $0.10 and 100 tokens weighs by the words of the page, when its actual is
# $0.15 and 130 tokens.
WEIGHTS = {
    "nothing": (Sums(0, 0, 0), Sums(0, 0, 0)),
    "reserved: the amount": (Sums(0, 100_000, 0), Sums(0, 100, 0)),
    "spent: the reserved amount": (Sums(100_000, 0, 0), Sums(100, 0, 0)),
    "spent: the actual cost, up to the reserved amount; overrun: the rest": (
        Sums(100_000, 0, 50_000),
        Sums(100, 0, 30),
    ),
    "overrun: the whole actual cost": (Sums(0, 0, 150_000), Sums(0, 0, 130)),
}


class Case:
    """One row on one ledger, under an id and in a scope of its own."""

    def __init__(self, tracker: LedgerTracker, row: Row) -> None:
        self.tracker = tracker
        self.row = row
        self.id = f"{row.state}-{row.call.value}"
        self.scope = f"session:{row.state.replace(' ', '-')}/call:{row.call.value}"
        ends = row.state in ("expired", "assumed") or row.call is Call.EXPIRE
        self.lease_seconds = SHORT_SECONDS if ends else LONG_SECONDS

    async def reserve(self, amount_usd: str = "0.10") -> ReservationToken:
        return await self.tracker.reserve(
            self.scope,
            amount_usd,
            tokens=100,
            reservation_id=self.id,
            lease_seconds=self.lease_seconds,
        )

    async def commit(self, actual_usd: str = "0.15") -> None:
        await self.tracker.commit(self.id, actual_usd, tokens=130)

    async def expire(self) -> None:
        await self.tracker.ledger.settle(SettleRequest(reservation_id=self.id, call=Call.EXPIRE))

    async def enter(self) -> None:
        """Bring the reservation into the state of the row, but for the end of its lease."""
        if self.row.state == UNKNOWN:
            return
        await self.reserve()
        if self.row.state in ("dispatched", "assumed"):
            await self.tracker.dispatched(self.id)
        elif self.row.state == "committed":
            await self.commit()
        elif self.row.state == "released":
            await self.tracker.release(self.id)

    async def ask(self) -> object:
        """Make the call of the row, and return what a second backend must answer as well."""
        asks: dict[Call, Callable[[], Awaitable[object]]] = {
            Call.RESERVE: self.reserve,
            Call.DISPATCHED: lambda: self.tracker.dispatched(self.id),
            Call.EXTEND: lambda: self.tracker.extend(self.id, 2 * LONG_SECONDS),
            Call.COMMIT: self.commit,
            Call.RELEASE: lambda: self.tracker.release(self.id),
            Call.EXPIRE: self.expire,
        }
        return await answer_of(asks[self.row.call])

    async def ask_otherwise(self) -> object:
        """Make the call of the row with other parameters."""
        if self.row.call is Call.RESERVE:
            return await answer_of(lambda: self.reserve("0.11"))
        return await answer_of(lambda: self.commit("0.16"))

    async def state(self) -> str:
        """Read the state: a reserve under a known id repeats how it stands."""
        return (await self.reserve()).state.value

    async def weight(self) -> tuple[Sums, Sums]:
        return await usd(self.tracker, self.scope), await tokens(self.tracker, self.scope)

    async def rows_of_journal(self) -> int:
        return len(await self.tracker.journal(self.scope))


async def answer_of(ask: Callable[[], Awaitable[object]]) -> object:
    """Return the answer, or the facts of a refusal."""
    try:
        return await ask()
    except IllegalSettlementError as refusal:
        return ("refused", str(refusal), refusal.current, refusal.allowed, refusal.advice)


async def check(case: Case, answer: object) -> None:
    """Hold what the ledger shows after the call against the words of the page."""
    row = case.row
    if row.answer == "refused":
        assert isinstance(answer, tuple)
        assert (answer[0], answer[-1]) == ("refused", row.note)
        if row.state == UNKNOWN:
            assert await case.weight() == WEIGHTS["nothing"]
            return
    assert not (row.answer != "refused" and isinstance(answer, tuple)), answer
    moved_to = row.answer.removeprefix("moves to `").rstrip("`")
    assert await case.state() == (moved_to if row.answer.startswith("moves") else row.state)
    if row.answer.startswith("moves") or row.answer == "the lease is renewed":
        assert await case.weight() == WEIGHTS[row.note]


@pytest.mark.parametrize("state", STATES)
async def test_every_row_of_the_documented_table_is_what_the_ledger_answers(
    tracker_factory: TrackerFactory, state: str
) -> None:
    plain = local_factory()
    plain.clock = tracker_factory.clock
    async with tracker_factory() as tracker, plain() as reference:
        rows = [row for row in ROWS if row.state == state]
        pairs = [(Case(tracker, row), Case(reference, row)) for row in rows]
        for case in (case for pair in pairs for case in pair):
            await case.enter()
        tracker_factory.clock.advance(SHORT_SECONDS)
        for case, expected in pairs:
            await check_row(case, expected)
        await assert_ledger_is_right(tracker)


async def check_row(case: Case, expected: Case) -> None:
    weight, rows = await case.weight(), await case.rows_of_journal()
    answer = await case.ask()
    assert answer == await expected.ask(), case.row
    await check(case, answer)
    if case.row.answer.startswith(("answered as before", "refused")):
        assert (await case.weight(), await case.rows_of_journal()) == (weight, rows), case.row
    if case.row.answer == "the lease is renewed":
        assert isinstance(answer, ReservationToken)
        assert answer.lease_until > lease_at_first(case)
    if "refused if the parameters differ" in case.row.answer:
        refusal = await case.ask_otherwise()
        assert refusal == await expected.ask_otherwise(), case.row
        assert isinstance(refusal, tuple)
        assert refusal[-1] == case.row.note
        assert (await case.weight(), await case.rows_of_journal()) == (weight, rows), case.row


def lease_at_first(case: Case) -> float:
    return case.tracker.ledger.now() - SHORT_SECONDS + case.lease_seconds


def test_the_page_has_a_row_for_every_state_and_call() -> None:
    states = [UNKNOWN, *(state.value for state in ReservationState)]
    assert states == STATES == [UNKNOWN, *(state.value for state in RULES)]
    assert [(row.state, row.call) for row in ROWS] == [(s, call) for s in states for call in Call]
    assert rules_table_markdown() in PAGE
