"""A run on paper: the order of a real one, lower bounds where outputs decide, no budget touched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.budgets.connect import connect_budget
from headgate.core.budgets.ledger import Account, Balance, Limit, Unit
from headgate.core.budgets.scopes import Scope
from headgate.core.estimates import Basis, Kind, Learned
from headgate.core.money import MicroUsd, Tokens
from headgate.errors import BudgetMismatchError
from headgate.storage.usage import KnownKind
from headgate.workflow.budgets import RunLedger
from headgate.workflow.dry_run import MOST_PARTS, DryRun, budgets_before, rehearse
from headgate.workflow.expansion import load_items
from headgate.workflow.local_backend import StepHolds
from headgate.workflow.parser import read_workflow
from headgate.workflow.run_record import RunOptions, RunScope

OWN = Scope("workflow:w")


def budget(limit: int | None, *, spent: int = 0, scope: Scope = OWN) -> Account:
    return Account(
        scope=scope,
        limit=None if limit is None else Limit(limit_micro_usd=MicroUsd(limit)),
        balance=Balance(spent_micro_usd=MicroUsd(spent)),
    )


def rehearsed(
    text: str, *accounts: Account, concurrency: int = 2, kinds: Sequence[KnownKind] = ()
) -> DryRun:
    workflow = read_workflow(Path("w.yaml"), text.encode(), name="w")
    items = load_items(workflow, copies=None)
    hold = StepHolds(workflow, None, kinds)
    return rehearse(workflow, items, accounts, concurrency=concurrency, now=0.0, hold=hold)


def order_of(found: DryRun) -> list[tuple[str, int | None, int | None, str]]:
    return [(part.step, part.first, part.last, part.fate) for part in found.parts]


def test_parents_go_before_children_and_lower_priority_values_before_others() -> None:
    found = rehearsed(
        """
        steps:
          - {id: late, command: [echo, "{steps.first.output}"]}
          - {id: first, command: [echo]}
          - {id: urgent, priority: -1, foreach: [1, 2, 3], command: [echo]}
        """
    )
    assert order_of(found) == [
        ("urgent", 0, 2, "runs"),
        ("first", None, None, "runs"),
        ("late", None, None, "runs"),
    ]


def test_a_step_over_the_items_of_another_begins_with_its_first_counterpart() -> None:
    text = """
        steps:
          - {id: case, foreach: [1, 2, 3, 4], command: [echo], cost_usd: 1}
          - {id: judge, priority: -1, foreach: {step: case}, command: [echo], cost_usd: 0.5}
        """
    found = rehearsed(text, concurrency=1)
    assert [part.step for part in found.parts] == ["case", "judge"] * 4
    assert [part.cumulated_micro_usd for part in found.parts[:3]] == [
        1_000_000,
        1_500_000,
        2_500_000,
    ]


def test_a_condition_on_items_is_decided_and_one_on_outputs_is_left_open() -> None:
    found = rehearsed(
        """
        steps:
          - {id: case, foreach: [1, 2, 3], when: item > 1, command: [echo]}
          - {id: after, when: steps.case.done > 2, command: [echo]}
        """
    )
    assert order_of(found) == [
        ("case", 0, 0, "skipped"),
        ("case", 1, 2, "runs"),
        ("after", None, None, "runs"),
    ]
    assert [part.may_skip for part in found.parts] == [False, False, True]
    assert found.parts[0].why == "when: item > 1"


MODEL = """
config:
  prices: {stand-in: {input: 10, output: 30}}
steps:
  - {id: draft, model: stand-in, max_tokens: 100, prompt: "a question"}
  - {id: judge, model: stand-in, max_tokens: 100, prompt: "judge {steps.draft.output}"}
  - {id: known, model: stand-in, max_tokens: 9, prompt: "{steps.draft.output}", estimate: {usd: 1}}
"""


def test_an_estimate_made_from_outputs_is_a_lower_bound() -> None:
    found = rehearsed(MODEL)
    assert {part.step: part.is_least for part in found.parts} == {
        "draft": False,
        "judge": True,
        "known": False,
    }
    assert found.is_least
    assert all(part.micro_usd >= 3_000 for part in found.parts)


def test_a_place_that_no_item_fills_is_found_before_money_is_spent() -> None:
    found = rehearsed(
        """
        steps:
          - id: case
            foreach: [{name: a}, {nme: b}]
            command: [echo, "{item.name}"]
          - {id: after, depends_on: case, command: [echo]}
        """
    )
    assert found.counts == {"runs": 1, "fails": 1, "skipped": 1, "not run": 0}
    fails = next(part for part in found.parts if part.fate == "fails")
    assert (fails.first, "{item.name}" in fails.why) == (1, True)


def test_the_first_budget_that_cannot_hold_a_step_stops_it_and_free_steps_go_on() -> None:
    text = """
        steps:
          - {id: case, foreach: [1, 2, 3, 4], command: [echo], cost_usd: 0.40}
          - {id: free, command: [echo]}
          - {id: cheap, priority: 1, command: [echo], cost_usd: 0.10}
        """
    session = budget(900_000, spent=50_000, scope=Scope("session:s"))
    found = rehearsed(text, session, budget(5_000_000, scope=Scope("session:s/workflow:w")))
    assert order_of(found) == [
        ("case", 0, 1, "runs"),
        ("case", 2, 3, "not run"),
        ("free", None, None, "runs"),
        ("cheap", None, None, "not run"),
    ]
    assert found.stop is not None
    assert (found.stop.at, found.stop.after) == ("case[2]", "case[1]")
    assert found.stop.refused.scope == "session:s"
    assert (found.micro_usd, found.needed_micro_usd) == (800_000, 1_700_000)
    assert found.accounts[0] == session


@given(st.integers(0, 2_000_000), st.integers(1, 12), st.integers(0, 300_000), st.integers(1, 5))
def test_no_budget_is_passed_and_nothing_that_fits_is_left_out(
    limit: int, runs: int, cost: int, at_once: int
) -> None:
    text = f"""
        steps:
          - id: case
            foreach: {list(range(runs))}
            command: [echo]
            cost_usd: {cost / 1_000_000:.6f}
        """
    found = rehearsed(text, budget(limit), concurrency=at_once)
    fit = runs if not cost else min(runs, limit // cost)
    assert found.counts["runs"] == fit
    assert found.micro_usd == fit * cost <= max(limit, 0)
    assert (found.stop is None) == (fit == runs)


def test_an_order_of_many_parts_is_bounded_and_the_rest_counted() -> None:
    count = MOST_PARTS // 2 + 3
    text = f"""
        steps:
          - {{id: case, foreach: {list(range(count))}, command: [echo]}}
          - {{id: judge, priority: -1, foreach: {{step: case}}, command: [echo]}}
        """
    found = rehearsed(text, concurrency=1)
    assert len(found.parts) == MOST_PARTS
    assert found.parts_left_out == 6
    assert found.counts["runs"] == 2 * count


SCOPES = (
    RunScope(scope="session:s", micro_usd=1_000_000),
    RunScope(scope="session:s/workflow:w", micro_usd=500_000),
)


async def test_budgets_are_read_as_they_stand_and_limits_that_are_not_there_are_assumed(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/budget.db"
    async with connect_budget(url) as tracker:
        await tracker.set_budget("session:s", "1.00")
        token = await tracker.reserve("session:s/workflow:other", "0.30")
        await tracker.commit(token, "0.20")
    found = await budgets_before(
        RunLedger(tracker="sqlite", url=url), SCOPES, RunOptions(data=Path())
    )
    assert [(one.scope, one.balance.spent_micro_usd) for one in found] == [
        ("", 200_000),
        ("session:s", 200_000),
        ("session:s/workflow:w", 0),
    ]
    assert found[2].limit == Limit(limit_micro_usd=MicroUsd(500_000))
    async with connect_budget(url) as tracker:
        assert await tracker.get_budget("session:s/workflow:w") is None


def test_a_ledger_that_is_not_there_is_empty_and_is_not_created(tmp_path: Path) -> None:
    ledger = RunLedger(tracker="sqlite", url=f"sqlite:///{tmp_path}/budget.db")
    found = asyncio.run(budgets_before(ledger, SCOPES, RunOptions(data=Path())))
    assert [one.balance for one in found] == [Balance()] * 3
    assert not list(tmp_path.iterdir())


async def test_a_limit_that_differs_is_the_error_that_a_run_would_have(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/budget.db"
    async with connect_budget(url) as tracker:
        await tracker.set_budget("session:s", "2.00")
    with pytest.raises(BudgetMismatchError, match=r"the limit is \$2\.00, and .* says"):
        await budgets_before(RunLedger(tracker="sqlite", url=url), SCOPES, RunOptions(data=Path()))


ANY_STEP = "steps: [{id: case, foreach: [1, 2, 3], command: [agent]}]"


def learned(*costs: int, silent: int = 0) -> KnownKind:
    """What earlier runs of the only step have cost."""
    known = Learned()
    for cost in costs:
        known.micro_usd.add(cost)
    known.micro_usd.silent = silent
    return KnownKind(kind=Kind("w", "step:command:case", "case"), fed_at=1.0, learned=known)


def tokens(limit: int) -> Account:
    return Account(scope=OWN, limit=Limit(limit_tokens=Tokens(limit)))


HELD = {
    "no limit": (
        (budget(None),), (), 0, Basis.PROBE, "unknown: no limit, so nothing is reserved",
    ),
    "unknown": (
        (budget(5_000_000),), (), 500_000, Basis.PROBE,
        "unknown: the first runs alone and reserves $0.50, a tenth of the smallest limit",
    ),
    "the smallest limit": (
        (budget(9_000_000), budget(1_000_000, scope=Scope("workflow:w/run:r"))), (),
        100_000, Basis.PROBE,
        "unknown: the first runs alone and reserves $0.10, a tenth of the smallest limit",
    ),
    "little left": (
        (budget(5_000_000, spent=4_900_000),), (), 100_000, Basis.PROBE,
        "unknown: the first runs alone and reserves $0.10, all that is left",
    ),
    "a few": (
        (budget(5_000_000),), (learned(10_000, 20_000, 30_000),), 60_000, Basis.LEARNED,
        "reserved $0.06, twice the highest cost of 3 of its kind",
    ),
    "many": (
        (budget(5_000_000),), (learned(*[10_000] * 100),), 10_300, Basis.LEARNED,
        "reserved $0.0103, 95% of 100 of its kind cost less",
    ),
    "silent": (
        (budget(5_000_000),), (learned(silent=3),), 0, Basis.SILENT,
        "reserves nothing: this kind of work never reports what it used",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HELD.values(), ids=HELD.keys())
def test_each_step_says_what_it_holds_and_why(
    case: tuple[tuple[Account, ...], tuple[KnownKind, ...], int, Basis, str],
) -> None:
    accounts, kinds, amount, basis, text = case
    (part,) = rehearsed(ANY_STEP, *accounts, kinds=kinds).parts
    (hold,) = part.holds
    assert (hold.amount, hold.basis, hold.text) == (amount, basis, text)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ("command: [echo]", "costs nothing by definition"),
        ("command: [x], cost_usd: 0.02", "reserved $0.02, the cost_usd of the step"),
        ("command: [x], estimate: {usd: 0.03}", "reserved $0.03, the estimate of the step"),
        ("model: m, max_tokens: 10, prompt: abcd",
         "reserved $0.00011, the most that its request can cost"),
    ],
)  # fmt: skip
def test_what_somebody_said_is_held_as_such(step: str, text: str) -> None:
    prices = "config: {prices: {m: {input: 2, output: 8}}}\n"
    (part,) = rehearsed(f"{prices}steps: [{{id: a, {step}}}]", budget(1_000_000)).parts
    assert [hold.text for hold in part.holds] == [text]


def test_a_probe_is_not_counted_as_spent_and_a_learned_amount_is() -> None:
    probed = rehearsed(ANY_STEP, budget(1_000_000))
    assert (probed.micro_usd, probed.unknown, probed.counts["runs"]) == (0, 3, 3)
    known = rehearsed(ANY_STEP, budget(1_000_000), kinds=(learned(*[10_000] * 100),))
    assert (known.micro_usd, known.unknown, known.stop) == (3 * 10_300, 0, None)


def test_what_is_unknown_is_refused_where_too_little_is_left_for_a_probe() -> None:
    found = rehearsed(ANY_STEP, budget(1_000_000, spent=990_001))
    assert found.stop is not None
    assert (found.stop.at, found.counts["not run"]) == ("case[0]", 3)


def test_what_is_held_in_tokens_is_shown_where_tokens_are_limited() -> None:
    (part,) = rehearsed(ANY_STEP, tokens(5_000)).parts
    assert [(hold.unit, hold.amount) for hold in part.holds] == [
        (Unit.MICRO_USD, 0),
        (Unit.TOKENS, 500),
    ]


def test_where_a_service_decides_what_it_has_learned_is_not_known_here() -> None:
    workflow = read_workflow(Path("w.yaml"), ANY_STEP.encode())
    items = load_items(workflow, copies=None)
    (part,) = rehearse(workflow, items, [budget(5_000_000)], concurrency=1, now=0.0).parts
    assert part.holds[0].text.endswith(", unless the service has learned what it costs")
