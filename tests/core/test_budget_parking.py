"""What a budget refused waits as long as waiting can help, and comes back when it may."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headgate.core.budgets.ledger import Refused, Unit
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch_state import (
    ASK_AGAIN_SECONDS,
    MAX_SET_ASIDE,
    BudgetParking,
    Waiting,
    ask_again_at,
    closure_of,
    refusing_part,
)
from headgate.core.estimates import PROBE, Hold, given
from headgate.core.gates import GatePart, gate_key, gate_parts, kind_part
from headgate.core.task import OnExhausted, Task, Terms

WAIT = Terms()
REJECT = Terms(on_exhausted=OnExhausted.REJECT)
SESSION = GatePart("scope", "session:s")


def holds(tokens: int) -> Hold:
    return Hold(micro_usd=given(0), tokens=given(tokens))


def refused(
    scope: str = "session:s",
    *,
    spent: int = 0,
    reserved: int = 0,
    overrun: int = 0,
    requested: int = 50,
    resets_at: int | None = None,
    may_clear: bool = True,
    unit: Unit = Unit.TOKENS,
) -> Refused:
    return Refused(
        scope=Scope(scope),
        unit=unit,
        limit=100,
        spent=spent,
        reserved=reserved,
        overrun=overrun,
        requested=requested,
        resets_at=resets_at,
        may_clear=may_clear,
    )


@pytest.mark.parametrize(
    ("refusal", "terms", "expected"),
    [
        # a task that waiting cannot help, or that asked to be refused, ends
        (refused(spent=100, may_clear=False), WAIT, "error"),
        (refused(spent=100, resets_at=9), REJECT, "error"),
        # a scope without any room is closed whole
        (refused(spent=100, resets_at=9), WAIT, "closure"),
        (refused(spent=60, reserved=40), WAIT, "closure"),
        (refused(spent=60, overrun=80, resets_at=9), WAIT, "closure"),
        # one with a little room is left open to smaller tasks
        (refused(spent=60, resets_at=9), WAIT, "aside"),
        (refused(spent=30, reserved=30), WAIT, "aside"),
    ],
)
def test_a_refused_task_ends_or_closes_the_gate_or_is_set_aside(
    refusal: Refused, terms: Terms, expected: str
) -> None:
    parking = BudgetParking()
    verdict = parking.judge(Task(id="t1"), refusal, terms)
    found = "error" if verdict.error else "closure" if verdict.closure else "aside"
    assert found == expected
    assert (parking.refusal_of("t1") is refusal) == (expected == "aside")


def test_beyond_a_number_of_tasks_set_aside_the_gate_is_closed() -> None:
    parking = BudgetParking()
    for number in range(MAX_SET_ASIDE):
        assert (
            parking.judge(Task(id=f"t{number}"), refused(spent=60, reserved=1), WAIT).closure
            is None
        )
    assert parking.judge(Task(id="last"), refused(spent=60, reserved=1), WAIT).closure is not None
    assert len(parking.leave(SESSION)) == MAX_SET_ASIDE
    assert parking.leave(SESSION) == []


@pytest.mark.parametrize(
    ("scopes", "has_freed", "resets_at", "is_woken"),
    [
        (("session:s",), True, 9, True),
        (("session:s",), False, 9, False),
        (("session:s",), False, None, True),
        (("session:s/workflow:w",), True, None, True),
        (("session:other",), True, None, False),
        ((), True, None, False),
    ],
)
def test_an_attempt_wakes_the_scopes_that_it_was_charged_to(
    scopes: tuple[str, ...], has_freed: bool, resets_at: int | None, is_woken: bool
) -> None:
    parking = BudgetParking()
    parking.judge(Task(id="t1"), refused(spent=60, reserved=30, resets_at=resets_at), WAIT)
    assert parking.wake(Task(scopes=scopes), has_freed=has_freed) == ([SESSION] if is_woken else [])


@pytest.mark.parametrize("scopes", [(), ("session:s",), ("project:p", "session:s/workflow:w")])
def test_every_attempt_was_charged_to_the_root(scopes: tuple[str, ...]) -> None:
    parking = BudgetParking()
    parking.judge(Task(id="t1"), refused("", reserved=100), WAIT)
    assert parking.wake(Task(scopes=scopes), has_freed=True) == [GatePart("scope", "")]


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (refused(spent=100, resets_at=1_600), 1_600.0),
        (refused(spent=60, reserved=40, resets_at=1_600), 1_000.0 + ASK_AGAIN_SECONDS),
        (refused(spent=60, reserved=40, resets_at=1_001), 1_001.0),
        (refused(reserved=100), 1_000.0 + ASK_AGAIN_SECONDS),
        (refused(spent=100, may_clear=False), None),
        # the others of a kind may have ended before anybody heard of the refusal
        (msgspec.structs.replace(refused(), kind="a/b/", live=1), 1_000.0 + ASK_AGAIN_SECONDS),
    ],
)
def test_a_scope_is_asked_again_when_it_resets_or_soon_while_somebody_holds_its_money(
    refusal: Refused, expected: float | None
) -> None:
    assert ask_again_at(refusal, 1_000.0) == expected


def test_tasks_that_ended_leave_nothing_behind() -> None:
    parking = BudgetParking()
    for number in range(1_000):
        parking.judge(
            Task(id=f"t{number}"), refused(f"session:{number}", spent=60, reserved=1), WAIT
        )
        parking.drop(f"t{number}", (f"session:{number}",))
    assert parking.refusals == {}
    every = tuple(f"session:{number}" for number in range(1_000))
    assert parking.wake(Task(scopes=every), has_freed=True) == []


def waiting(task_id: str, terms: Terms, *scopes: str) -> Waiting:
    return Waiting(Task(id=task_id, scopes=scopes), terms, 0, 0)


@pytest.mark.parametrize(
    ("terms", "scopes", "tokens", "is_refused"),
    [
        (REJECT, ("session:s",), 50, True),
        (REJECT, ("session:s/workflow:w",), 50, True),
        (REJECT, ("session:s",), 1, True),
        (REJECT, ("session:s",), 0, False),
        (REJECT, ("session:other",), 50, False),
        (WAIT, ("session:s",), 50, False),
    ],
)
def test_who_will_not_wait_is_refused_by_what_a_closed_scope_said_last(
    terms: Terms, scopes: tuple[str, ...], tokens: int, is_refused: bool
) -> None:
    parking = BudgetParking()
    parking.judge(Task(id="t1"), refused(spent=60, reserved=40), WAIT)
    error = parking.refuses(waiting("t2", terms, *scopes), lambda _waiting: holds(tokens))
    assert (error is not None) == is_refused
    assert parking.unwilling("session:s") == (
        ["t2"] if "session:s" in str(scopes) and terms is REJECT else []
    )
    parking.leave(SESSION)
    assert parking.refuses(waiting("t3", terms, *scopes), lambda _waiting: holds(tokens)) is None


def test_who_will_not_wait_is_forgotten_when_it_has_ended() -> None:
    parking = BudgetParking()
    for number in range(100):
        scopes = (f"session:{number}",)
        parking.refuses(waiting(f"t{number}", REJECT, *scopes), lambda _waiting: holds(1))
        parking.drop(f"t{number}", scopes)
    assert parking.unwilling("") == []
    assert parking._unwilling == {}


def test_a_closed_scope_is_woken_though_nobody_is_set_aside_for_it() -> None:
    parking = BudgetParking()
    parking.judge(Task(id="t1"), refused(spent=60, reserved=1), WAIT)
    parking.judge(Task(id="t2"), refused(spent=60, reserved=40), WAIT)
    parking.drop("t1", ("session:s",))
    parking.drop("t2", ("session:s",))
    assert parking.wake(Task(scopes=("session:s",)), has_freed=True) == [SESSION]


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        (Unit.TOKENS, "100 tokens of 100 tokens are used or reserved, and 50 tokens asked for"),
        (Unit.MICRO_USD, "$0.0001 of $0.0001 are used or reserved, and $0.00005 asked for"),
    ],
)
def test_a_closed_gate_says_how_much_is_used_and_needed(unit: Unit, words: str) -> None:
    closure = closure_of(
        SESSION, refused(spent=60, reserved=30, overrun=10, resets_at=9, unit=unit)
    )
    assert closure.why == words
    assert (closure.kind, closure.name, closure.until) == ("scope", "session:s", 9)


def test_work_of_which_nothing_is_known_waits_for_one_of_its_kind() -> None:
    parking = BudgetParking()
    refusal = msgspec.structs.replace(refused(reserved=10), kind="alpha/agent/", live=1)
    first = Task(id="t0", project_id="alpha", target="agent", scopes=("session:s",))
    kind = kind_part(first, refusal)
    # It was not refused for want of money, so one that will not wait for money waits, too.
    assert parking.judge(first, refusal, REJECT).error is None
    for number in range(1, MAX_SET_ASIDE):
        other = msgspec.structs.replace(first, id=f"t{number}")
        assert parking.judge(other, refusal, WAIT).closure is None
    last = parking.judge(msgspec.structs.replace(first, id="last"), refusal, WAIT).closure
    assert last is not None
    assert last.part == kind
    assert last.why == (
        "the cost of this kind of work is unknown until the first one ends;"
        " set `estimate_tokens` on the target to run more at once"
    )
    # Neither work of which the tokens are known passes here, nor work that nothing limits.
    known = msgspec.structs.replace(first, estimate_tokens=5)
    unlimited = msgspec.structs.replace(first, scopes=("session:other",))
    assert [kind in gate_parts(gate_key(one)) for one in (first, known, unlimited)] == [
        True,
        False,
        False,
    ]
    elsewhere = msgspec.structs.replace(first, target="other")
    assert parking.wake(elsewhere, has_freed=True) == []
    assert parking.wake(first, has_freed=False) == [kind]
    assert len(parking.leave(kind)) == MAX_SET_ASIDE
    assert parking.refusals == {}


IN_SESSION: dict[str, Any] = {"scopes": ("session:s",), "project_id": "alpha", "target": "agent"}
OF_KIND = msgspec.structs.replace(refused(reserved=10), kind="alpha/agent/", live=1)
UNKNOWN = Hold(micro_usd=given(0), tokens=PROBE, kind="alpha/agent/")


@pytest.mark.parametrize(
    ("refusal", "fields", "terms", "hold", "is_behind"),
    [
        # who needs as much or more would take what the others wait for
        (refused(spent=60), {}, WAIT, holds(50), True),
        (refused(spent=60), {}, WAIT, holds(51), True),
        (refused(""), {}, WAIT, holds(50), True),
        (refused(spent=60, requested=1), {}, WAIT, UNKNOWN, True),
        # who needs less may have what is too little for them
        (refused(spent=60), {}, WAIT, holds(49), False),
        (refused(spent=60), {}, WAIT, UNKNOWN, False),
        (refused(spent=60, unit=Unit.MICRO_USD), {}, WAIT, holds(50), False),
        (refused(spent=60), {"scopes": ("session:other",)}, WAIT, holds(50), False),
        # who will not wait is told at once, and a call stands behind its own task alone
        (refused(spent=60), {}, REJECT, holds(50), False),
        (refused(spent=60), {"parent_id": "t0"}, WAIT, holds(50), False),
        # the first of a kind are waited for by all others of that kind
        (OF_KIND, {}, WAIT, UNKNOWN, True),
        (OF_KIND, {}, REJECT, UNKNOWN, True),
        (OF_KIND, {}, WAIT, holds(50), False),
        (OF_KIND, {}, WAIT, msgspec.structs.replace(UNKNOWN, kind="alpha/agent/x"), False),
        (OF_KIND, {"target": "other"}, WAIT, UNKNOWN, False),
        (OF_KIND, {"project_id": "beta"}, WAIT, UNKNOWN, False),
    ],
)
def test_a_newcomer_stands_behind_those_that_need_no_more(
    refusal: Refused, fields: dict[str, Any], terms: Terms, hold: Hold, is_behind: bool
) -> None:
    parking = BudgetParking()
    first, late = Task(id="t1", **IN_SESSION), Task(id="t2", **{**IN_SESSION, **fields})
    part = refusing_part(first, refusal)
    newcomer = Waiting(late, terms, 0, 0)
    assert not parking.joins(newcomer, hold)
    parking.judge(first, refusal, WAIT)
    assert parking.joins(newcomer, hold) is is_behind
    assert parking.set_aside(part) == 1 + is_behind
    assert parking.leave(part) == (["t1", "t2"] if is_behind else ["t1"])
    assert not parking.joins(newcomer, hold)


def test_no_more_newcomers_are_set_aside_than_others() -> None:
    parking = BudgetParking()
    for number in range(MAX_SET_ASIDE):
        parking.judge(Task(id=f"t{number}"), refused(spent=60), WAIT)
    assert not parking.joins(waiting("late", WAIT, "session:s"), holds(50))


@pytest.mark.parametrize(
    ("scope", "agent_id", "has_claims", "has_figures"),
    [
        ("", None, False, True),
        ("", None, True, False),
        ("project:p", None, True, True),
        ("project:p", "a", True, False),
        ("project:p", "a", False, True),
        ("project:p/agent:a", "a", True, True),
        ("session:s", None, True, False),
    ],
)
def test_a_task_of_a_tenant_is_refused_with_the_figures_of_its_own_budgets_alone(
    scope: str, agent_id: str | None, has_claims: bool, has_figures: bool
) -> None:
    refusal = msgspec.structs.replace(refused(), scope=Scope(scope), may_clear=False)
    task = Task(id="t1", project_id="p", agent_id=agent_id, has_claims=has_claims)
    error = BudgetParking().judge(task, refusal, Terms()).error
    assert error is not None
    assert ("spent" in error) == has_figures
    assert (scope or "(root)") in error
