"""What every ledger makes of a tenant's word: where it counts, where it waits, who decides."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from budgets.support import TrackerFactory, assert_ledger_is_right
from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.ledger import Adjustment
from headgate.core.budgets.scopes import Tenant
from headgate.errors import (
    AdjustmentError,
    BudgetExceededError,
    IllegalSettlementError,
    InvalidFieldError,
)

LEASE_SECONDS = 60.0
ALPHA, EVIL = Tenant(project_id="alpha"), Tenant(agent_id="evil")
BOTH = Tenant(project_id="alpha", agent_id="evil")
ANYBODY = Tenant()
PROJECT, AGENT = "project:alpha", "project:alpha/agent:evil"
SESSION = "project:alpha/agent:evil/session:s"


class Column(NamedTuple):
    """Micro-dollars of a scope."""

    spent: int
    overrun: int
    unaccepted: int


async def column(tracker: LedgerTracker, scope: str) -> Column:
    status = await tracker.own_status(scope)
    assert status.reserved_micro_usd == 0
    assert status.spent_tokens == status.spent_micro_usd
    assert status.overrun_tokens == status.overrun_micro_usd
    assert status.unaccepted_tokens == status.unaccepted_micro_usd
    return Column(status.spent_micro_usd, status.overrun_micro_usd, status.unaccepted_micro_usd)


def dollars(micro_usd: int) -> str:
    return f"{micro_usd / 1_000_000:.6f}"


class Row(NamedTuple):
    """Limits of operators, who claims how much on what was held, and what the scopes have then.

    `lease` is what became of it before: held, expired, or assumed to be spent.
    """

    name: str
    limits: dict[str, int]
    tenant: Tenant | None
    lease: str
    held: int
    claim: int
    scopes: tuple[Column, ...]


# Spent, overrun and unaccepted of the root, the project and the agent after the commit.
TABLE = """
name            | limits      | who     | lease   | held | claim | root      | project   | agent
measured        | -           | us      | held    | 10   | 1000  | 10/990/0  | 10/990/0  | 10/990/0
less            | -           | alpha   | held    | 10   | 7     | 7/0/0     | 7/0/0     | 7/0/0
exactly         | -           | alpha   | held    | 10   | 10    | 10/0/0    | 10/0/0    | 10/0/0
project         | -           | alpha   | held    | 10   | 1000  | 10/0/990  | 10/990/0  | 10/990/0
agent           | -           | evil    | held    | 10   | 1000  | 10/0/990  | 10/0/990  | 10/990/0
both            | -           | both    | held    | 10   | 1000  | 10/0/990  | 10/0/990  | 10/990/0
not bound       | -           | anybody | held    | 10   | 1000  | 10/990/0  | 10/990/0  | 10/990/0
of others       | -           | other   | held    | 10   | 1000  | 10/0/990  | 10/0/990  | 10/0/990
held nothing    | -           | alpha   | held    | 0    | 1000  | 0/0/1000  | 0/1000/0  | 0/1000/0
own limit       | p 100       | alpha   | held    | 10   | 1000  | 10/90/900 | 10/990/0  | 10/990/0
is enough       | p 100       | alpha   | held    | 10   | 100   | 10/90/0   | 10/90/0   | 10/90/0
the tighter one | p 100, a 50 | alpha   | held    | 10   | 1000  | 10/40/950 | 10/990/0  | 10/990/0
not its limit   | p 100       | evil    | held    | 10   | 1000  | 10/0/990  | 10/0/990  | 10/990/0
of the agent    | a 100       | evil    | held    | 10   | 1000  | 10/90/900 | 10/90/900 | 10/990/0
expired         | -           | alpha   | expired | 10   | 7     | 0/0/7     | 0/7/0     | 0/7/0
expired, limit  | p 100       | alpha   | expired | 10   | 1000  | 0/100/900 | 0/1000/0  | 0/1000/0
assumed, less   | -           | alpha   | assumed | 10   | 7     | 7/0/0     | 7/0/0     | 7/0/0
assumed, more   | p 100       | alpha   | assumed | 10   | 1000  | 10/90/900 | 10/990/0  | 10/990/0
others' limit   | r 100       | alpha   | held    | 10   | 1000  | 10/0/990  | 10/990/0  | 10/990/0
measured, limit | r 100       | us      | held    | 10   | 1000  | 10/990/0  | 10/990/0  | 10/990/0
anybody, limit  | r 100       | anybody | held    | 10   | 1000  | 10/90/900 | 10/990/0  | 10/990/0
is enough, too  | r 100       | anybody | held    | 10   | 100   | 10/90/0   | 10/90/0   | 10/90/0
on nothing      | r 100       | anybody | held    | 0    | 1000  | 0/100/900 | 0/1000/0  | 0/1000/0
the least left  | r 100, p 50 | anybody | held    | 10   | 1000  | 10/40/950 | 10/40/950 | 10/990/0
of the root     | r 50, a 100 | anybody | held    | 10   | 1000  | 10/40/950 | 10/990/0  | 10/40/950
in the middle   | p 100       | anybody | held    | 10   | 1000  | 10/990/0  | 10/90/900 | 10/990/0
late            | r 100       | anybody | expired | 10   | 1000  | 0/100/900 | 0/1000/0  | 0/1000/0
after assumed   | r 100       | anybody | assumed | 10   | 1000  | 10/90/900 | 10/990/0  | 10/990/0
"""
TENANTS = {
    "us": None,
    "alpha": ALPHA,
    "evil": EVIL,
    "both": BOTH,
    "anybody": ANYBODY,
    "other": Tenant(agent_id="x"),
}
SCOPES = {"r": "", "p": PROJECT, "a": AGENT}


def read(line: str) -> Row:
    name, limits, who, lease, held, claim, *scopes = [cell.strip() for cell in line.split("|")]
    pairs = [] if limits == "-" else [text.split() for text in limits.split(",")]
    return Row(
        name=name,
        limits={SCOPES[scope]: int(limit) for scope, limit in pairs},
        tenant=TENANTS[who],
        lease=lease,
        held=int(held),
        claim=int(claim),
        scopes=tuple(Column(*map(int, cell.split("/"))) for cell in scopes),
    )


ROWS = [read(line) for line in TABLE.strip().splitlines()[1:]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_a_claim_counts_as_far_as_limits_reach(
    tracker_factory: TrackerFactory, row: Row
) -> None:
    async with tracker_factory() as tracker:
        for scope, limit in row.limits.items():
            await tracker.set_budget(scope, dollars(limit), limit)
        token = await tracker.reserve(
            AGENT,
            dollars(row.held),
            tokens=row.held,
            lease_seconds=LEASE_SECONDS,
            dispatched=row.lease == "assumed",
        )
        tracker_factory.clock.advance(0 if row.lease == "held" else LEASE_SECONDS)
        for _ in range(2):
            await tracker.commit(token, dollars(row.claim), tokens=row.claim, tenant=row.tenant)
        with pytest.raises(IllegalSettlementError):
            await tracker.commit(token, dollars(row.claim + 1), tokens=1, tenant=row.tenant)
        found = [await column(tracker, scope) for scope in ("", PROJECT, AGENT)]
        assert tuple(found) == row.scopes
        await assert_ledger_is_right(tracker)


async def test_what_is_claimed_and_not_accepted_keeps_nobody_out(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget("", "1000")
        token = await tracker.reserve(PROJECT, "0")
        await tracker.commit(token, "1000000", tenant=ALPHA)
        status = await tracker.own_status("")
        assert (status.remaining_micro_usd, status.unaccepted_micro_usd) == (10**9, 10**12)
        await tracker.reserve("project:beta", "1000")


async def test_whoever_is_bound_to_nothing_carries_no_limit_of_an_operator_to_minus(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget("", "999")
        for claim in ("1.50", "1000000", "1000000"):
            await tracker.commit(await tracker.reserve(PROJECT, "0"), claim, tenant=ANYBODY)
        root, own = await tracker.own_status(""), await tracker.own_status(PROJECT)
        assert (root.remaining_micro_usd, root.unaccepted_micro_usd) == (0, 1_999_002_500_000)
        assert (own.overrun_micro_usd, own.unaccepted_micro_usd) == (2_000_001_500_000, 0)
        # One call of the operator undoes it, and nothing is in the way of the others then.
        await tracker.adjust("", "-999")
        await tracker.reserve("project:beta", "999")
        await assert_ledger_is_right(tracker)


async def test_a_claim_waits_in_each_unit_where_an_operator_limited_that_unit(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget("", None, 100)
        await tracker.set_budget(PROJECT, dollars(50))
        await tracker.set_budget(AGENT, dollars(200), 200)
        token = await tracker.reserve(SESSION, dollars(10), tokens=10)
        await tracker.commit(token, dollars(1_000), tokens=1_000, tenant=ANYBODY)
        found = {}
        for scope in ("", PROJECT, AGENT, SESSION):
            status = await tracker.own_status(scope)
            assert (status.spent_micro_usd, status.spent_tokens) == (10, 10)
            found[scope] = (
                (status.overrun_micro_usd, status.unaccepted_micro_usd),
                (status.overrun_tokens, status.unaccepted_tokens),
            )
        assert found == {
            "": ((990, 0), (90, 900)),
            PROJECT: ((40, 950), (990, 0)),
            AGENT: ((40, 950), (90, 900)),
            SESSION: ((990, 0), (990, 0)),
        }
        await assert_ledger_is_right(tracker)


async def test_claims_at_once_share_what_is_left_of_their_own_limit(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(PROJECT, dollars(100))
        tokens = [await tracker.reserve(SESSION, dollars(10)) for _ in range(4)]
        for token in tokens:
            await tracker.commit(token, dollars(1_000), tenant=ALPHA)
        root = await tracker.own_status("")
        # All that was held, and the 60 that were left, once.
        assert (root.spent_micro_usd, root.overrun_micro_usd) == (40, 60)
        assert root.unaccepted_micro_usd == 4 * 990 - 60
        await assert_ledger_is_right(tracker)


async def test_a_limit_that_a_tenant_set_lets_it_claim_nothing(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        limit = await tracker.create_budget(AGENT, "1000000", is_by_tenant=True)
        assert await tracker.create_budget(AGENT, "1000000") == limit
        token = await tracker.reserve(AGENT, "1")
        await tracker.commit(token, "5", tenant=EVIL)
        assert (await tracker.own_status("")).unaccepted_micro_usd == 4_000_000
        # The operator's own word makes it one.
        await tracker.set_budget(AGENT, "1000000")
        token = await tracker.reserve(AGENT, "1")
        await tracker.commit(token, "5", tenant=EVIL)
        assert (await tracker.own_status("")).unaccepted_micro_usd == 4_000_000


async def test_a_limit_that_a_tenant_set_holds_back_no_claim(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.create_budget(AGENT, "2", is_by_tenant=True)
        token = await tracker.reserve(AGENT, "1")
        await tracker.commit(token, "5", tenant=ANYBODY)
        for scope in ("", PROJECT, AGENT):
            status = await tracker.own_status(scope)
            assert (status.overrun_micro_usd, status.unaccepted_micro_usd) == (4_000_000, 0)


@pytest.mark.parametrize("window", ["day", "rolling:24h"])
async def test_a_reservation_from_a_window_that_passed_claims_nothing_of_the_next(
    tracker_factory: TrackerFactory, window: str
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(PROJECT, dollars(100), window=window)
        tokens = [await tracker.reserve(AGENT, dollars(10), lease_seconds=3 * 86_400)] * 2
        tracker_factory.clock.advance(2 * 86_400)
        for token in tokens:
            await tracker.commit(token, dollars(1_000), tenant=ALPHA)
        root = await tracker.own_status("")
        assert (root.spent_micro_usd, root.overrun_micro_usd) == (10, 0)
        assert root.unaccepted_micro_usd == 990
        await assert_ledger_is_right(tracker)


async def test_an_operator_accepts_and_rejects_what_is_claimed(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        token = await tracker.reserve(PROJECT, "1", tokens=10)
        await tracker.commit(token, "11", tokens=110, tenant=ALPHA)
        for _ in range(2):
            status = await tracker.adjust(
                "", "4", tokens=30, call=Adjustment.ACCEPT, adjustment_id="a"
            )
            assert (status.overrun_micro_usd, status.unaccepted_micro_usd) == (4_000_000, 6_000_000)
            assert (status.overrun_tokens, status.unaccepted_tokens) == (30, 70)
        with pytest.raises(AdjustmentError) as caught:
            await tracker.adjust("", "7", call=Adjustment.REJECT)
        assert (caught.value.there, caught.value.wanted) == (6_000_000, 7_000_000)
        status = await tracker.adjust("", call=Adjustment.REJECT, adjustment_id="b")
        assert (status.overrun_micro_usd, status.unaccepted_micro_usd) == (4_000_000, 0)
        assert status.unaccepted_tokens == 0
        # All again is nothing more; the scopes below are as they were.
        await tracker.adjust("", call=Adjustment.REJECT, adjustment_id="b")
        await tracker.adjust("", call=Adjustment.REJECT)
        assert (await tracker.own_status(PROJECT)).overrun_micro_usd == 10_000_000
        calls = [entry.call for entry in await tracker.journal("")]
        assert calls.count(Adjustment.ACCEPT) == 1
        await assert_ledger_is_right(tracker)


async def test_an_operator_undoes_a_booking_and_never_more_than_there_is(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget("", "1000")
        token = await tracker.reserve(PROJECT, "1")
        await tracker.commit(token, "1000000", tokens=5)
        with pytest.raises(BudgetExceededError):
            await tracker.reserve("project:beta", "1")
        with pytest.raises(AdjustmentError):
            await tracker.adjust("", "-1000000.000001")
        await tracker.adjust("", "-999999", adjustment_id="undo")
        status = await tracker.adjust("", "-999999", adjustment_id="undo")
        assert (status.spent_micro_usd, status.overrun_micro_usd) == (1_000_000, 0)
        assert status.remaining_micro_usd == 999_000_000
        await tracker.reserve("project:beta", "999")
        with pytest.raises(IllegalSettlementError):
            await tracker.adjust("", "-1", adjustment_id="undo")
        with pytest.raises(IllegalSettlementError):
            await tracker.adjust(PROJECT, "-999999", adjustment_id="undo")
        status = await tracker.adjust("", tokens=-5)
        assert status.overrun_tokens == 0
        status = await tracker.adjust("", "2.5", tokens=7)
        assert (status.spent_micro_usd, status.spent_tokens) == (3_500_000, 7)
        await assert_ledger_is_right(tracker)


async def test_what_is_taken_away_leaves_the_newest_bucket_first(
    tracker_factory: TrackerFactory,
) -> None:
    clock = tracker_factory.clock
    async with tracker_factory() as tracker:
        await tracker.set_budget("", "100", window="rolling:24h")
        for amount in ("1", "2", "4"):
            await tracker.commit(await tracker.reserve(PROJECT, "1"), amount)
            clock.advance(7_200)
        await tracker.adjust("", "-5")
        assert (await tracker.own_status("")).spent_micro_usd == 2_000_000
        clock.advance(86_400 - 2 * 7_200 - 3_600)
        assert (await tracker.own_status("")).spent_micro_usd == 1_000_000
        with pytest.raises(AdjustmentError):
            await tracker.adjust("", "-1.5")
        await assert_ledger_is_right(tracker)


async def test_an_adjustment_says_what_is_wrong_with_it(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        for call, usd, tokens in (
            (Adjustment.ADJUST, None, None),
            (Adjustment.ADJUST, "0", 0),
            (Adjustment.ADJUST, "-0.01", None),
            (Adjustment.ADJUST, "1e12", None),
            (Adjustment.ACCEPT, "-1", None),
            (Adjustment.REJECT, None, 1),
        ):
            with pytest.raises(InvalidFieldError):
                await tracker.adjust("", usd, tokens=tokens, call=call)
