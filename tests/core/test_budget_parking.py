"""What a budget refused waits as long as waiting can help, and comes back when it may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given as example_given
from hypothesis import settings
from hypothesis import strategies as st

from core.dispatch_model import START, ended, queued, state_of, taken
from headgate.core.budgets.escrow import Amounts
from headgate.core.budgets.ledger import (
    LedgerState,
    Limit,
    Refused,
    ReserveRequest,
    SettleRequest,
    Unit,
    amounts_to_hold,
)
from headgate.core.budgets.reservations import Call, Reservation
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.budgets.windows import NO_WINDOW, parse_window
from headgate.core.dispatch_state import (
    ASK_AGAIN_SECONDS,
    MAX_SET_ASIDE,
    BudgetParking,
    HoldOf,
    Planned,
    Settled,
    Waiting,
    ask_again_at,
    charged_by,
    closure_of,
    refusing_part,
)
from headgate.core.estimates import PROBE, Basis, Estimate, Hold, given
from headgate.core.gates import (
    GatePart,
    RoomPart,
    gate_key,
    gate_parts,
    kind_part,
    known_by_name,
)
from headgate.core.money import MicroUsd, Tokens
from headgate.core.snapshot import Agent, Project
from headgate.core.task import OnExhausted, Task, TaskRecord, TaskStatus, Terms

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
    settled = Settled(scopes, has_freed=has_freed)
    assert parking.wake(settled) == ([SESSION] if is_woken else [])


@pytest.mark.parametrize("scopes", [(), ("session:s",), ("project:p", "session:s/workflow:w")])
def test_every_attempt_was_charged_to_the_root(scopes: tuple[str, ...]) -> None:
    parking = BudgetParking()
    parking.judge(Task(id="t1"), refused("", reserved=100), WAIT)
    assert parking.wake(Settled(scopes)) == [GatePart("scope", "")]


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
    assert parking.wake(Settled(every)) == []


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
    assert parking.wake(Settled(("session:s",))) == [SESSION]


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
    assert parking.wake(Settled((), ("alpha/other/",))) == []
    assert parking.wake(Settled((), ("alpha/agent/review",), has_freed=False)) == [kind]
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
    assert not parking.joins(newcomer, hold, _is_later)
    parking.judge(first, refusal, WAIT)
    assert parking.joins(newcomer, hold, _is_later) == (part if is_behind else None)
    assert parking.set_aside(part) == 1 + is_behind
    assert parking.leave(part) == (["t1", "t2"] if is_behind else ["t1"])
    assert not parking.joins(newcomer, hold, _is_later)


LEFT_400 = msgspec.structs.replace(refused(spent=600, requested=500, resets_at=9), limit=1_000)
MARGIN = Estimate(basis=Basis.LEARNED, amount=500, most=300, samples=20)


@pytest.mark.parametrize(
    ("refusal", "asked", "tokens", "is_behind"),
    [
        # without its margin a learned amount fits, though the other one is as large
        (LEFT_400, given(500), MARGIN, False),
        (LEFT_400, given(500), msgspec.structs.replace(MARGIN, most=500), True),
        # who was refused for the same stands before it, though the margin is more than what is left
        (msgspec.structs.replace(LEFT_400, spent=800), MARGIN, MARGIN, True),
        (msgspec.structs.replace(LEFT_400, spent=800), MARGIN, given(300), True),
        (msgspec.structs.replace(LEFT_400, spent=800), MARGIN, given(299), False),
        # beside others in flight a learned amount needs a guard as well, and a given one does not
        (
            msgspec.structs.replace(LEFT_400, spent=390, reserved=200),
            msgspec.structs.replace(MARGIN, amount=400, most=900),
            given(410),
            False,
        ),
        # what is larger than the limit is refused at once
        (LEFT_400, given(500), given(1_000), True),
        (LEFT_400, given(500), given(1_001), False),
        (LEFT_400, given(500), msgspec.structs.replace(MARGIN, amount=5_000, most=1_000), True),
        (
            LEFT_400,
            given(500),
            msgspec.structs.replace(MARGIN, amount=5_000, most=2_000, likely=1_500),
            False,
        ),
    ],
)
def test_a_newcomer_stands_behind_others_by_what_it_needs_at_least(
    refusal: Refused, asked: Estimate, tokens: Estimate, is_behind: bool
) -> None:
    parking = BudgetParking()
    first, late = Task(id="t1", scopes=("session:s",)), Task(id="t2", scopes=("session:s",))
    parking.judge(first, refusal, WAIT, hold=Hold(micro_usd=given(0), tokens=asked))
    hold = Hold(micro_usd=given(0), tokens=tokens)
    assert (parking.joins(Waiting(late, WAIT, 0, 0), hold, _is_later) == SESSION) is is_behind


def test_a_newcomer_stands_behind_those_that_still_wait() -> None:
    parking = BudgetParking()
    for name, tokens in (("t1", 90), ("t2", 50), ("t3", 60)):
        refusal = refused(reserved=60, requested=tokens)
        parking.judge(Task(id=name, scopes=("session:s",)), refusal, WAIT)
    parking.drop("t2", ("session:s",))
    assert parking.joins(waiting("less", WAIT, "session:s"), holds(59), _is_later) is None
    assert parking.joins(waiting("more", WAIT, "session:s"), holds(70), _is_later) == SESSION
    refusal_of = parking.refusal_of("more")
    assert refusal_of is not None
    assert refusal_of.requested == 70
    parking.drop("t3", ("session:s",))
    assert parking.joins(waiting("late", WAIT, "session:s"), holds(69), _is_later) is None


def test_a_newcomer_stands_behind_those_that_lack_the_same_unit() -> None:
    parking = BudgetParking()
    for name, unit in (("t1", Unit.MICRO_USD), ("t2", Unit.TOKENS)):
        parking.judge(Task(id=name, scopes=("session:s",)), refused(reserved=60, unit=unit), WAIT)
    dollars = Hold(micro_usd=given(50), tokens=given(0))
    assert parking.joins(waiting("late", WAIT, "session:s"), dollars, _is_later) == SESSION


@pytest.mark.parametrize("field", ["is_free", "has_money"])
def test_who_needs_no_budget_stands_behind_nobody(field: str) -> None:
    parking = BudgetParking()
    parking.judge(Task(id="t1"), refused(reserved=60, requested=0), WAIT)
    task = msgspec.structs.replace(Task(id="t2", is_call=True), **{field: True})
    late = Waiting(task, WAIT, 0, 0)
    assert parking.joins(late, holds(0), _is_later) is None


def test_more_of_a_kind_than_run_may_start() -> None:
    parking = BudgetParking()
    first = Task(id="t1", **IN_SESSION)
    parking.judge(first, OF_KIND, WAIT)
    learned = Hold(
        micro_usd=given(0),
        tokens=msgspec.structs.replace(MARGIN, at_once=2),
        kind=OF_KIND.kind,
    )
    late = Waiting(Task(id="t2", **IN_SESSION), WAIT, 0, 0)
    assert parking.joins(late, learned, _is_later) is None


def test_who_will_not_wait_is_refused_by_what_it_needs_at_least() -> None:
    parking = BudgetParking()
    for number in range(MAX_SET_ASIDE + 1):
        parking.judge(Task(id=f"t{number}"), msgspec.structs.replace(LEFT_400, scope=ROOT), WAIT)
    late = waiting("late", REJECT)
    for tokens, is_refused in ((MARGIN, False), (given(500), True)):
        hold = Hold(micro_usd=given(0), tokens=tokens)
        assert bool(parking.refuses(late, partial(_held, hold))) is is_refused


def _is_later(_task: Task, _other: Task) -> bool:
    """Say that a task goes before no other in their lane."""
    return False


def _held(hold: Hold, _waiting: Waiting) -> Hold:
    return hold


def test_what_one_project_cannot_have_closes_a_scope_for_no_other() -> None:
    parking = BudgetParking()
    little = refused("", spent=60, reserved=10)
    verdicts = [
        parking.judge(Task(id=f"a{number}", project_id="a"), little, WAIT)
        for number in range(MAX_SET_ASIDE + 2)
    ]
    assert [one.closure is None for one in verdicts] == [True] * MAX_SET_ASIDE + [False] * 2
    assert verdicts[-1].closure is not None
    closed = verdicts[-1].closure.part
    (shown,) = known_by_name((verdicts[-1].closure, verdicts[-1].closure))
    assert shown.part == GatePart("scope", "")
    for project_id, is_behind in (("a", True), ("b", False)):
        task = Task(id="late", project_id=project_id, scopes=("session:s",))
        assert (closed in gate_parts(gate_key(task))) is is_behind
        assert parking.refusal_behind("", project_id) == (little if is_behind else None)
        # Who will not wait is refused where it would stand behind the closed gate.
        late = Waiting(task, REJECT, 0, 0)
        assert bool(parking.refuses(late, lambda _waiting: holds(50))) is is_behind
    assert list(parking.closed(GatePart("scope", ""))) == [closed]
    assert parking.judge(Task(id="b", project_id="b"), little, WAIT).closure is None
    assert len(parking.leave(GatePart("scope", ""))) == MAX_SET_ASIDE + 1
    assert list(parking.closed(GatePart("scope", ""))) == []
    assert parking.refusal_behind("", "a") is None


def test_projects_share_the_number_of_tasks_that_are_tried_one_by_one() -> None:
    parking, aside = BudgetParking(), Counter[str]()
    for project_id in (str(number) for number in range(2 * MAX_SET_ASIDE)):
        for number in range(MAX_SET_ASIDE):
            task = Task(id=f"{project_id}/{number}", project_id=project_id)
            verdict = parking.judge(task, refused(spent=60, reserved=1), WAIT)
            aside[project_id] += verdict.closure is None
    assert list(aside.values())[:4] == [MAX_SET_ASIDE // share for share in (1, 2, 3, 4)]
    assert min(aside.values()) == 1
    assert parking.set_aside(SESSION) == aside.total() < 6 * MAX_SET_ASIDE


def test_a_scope_without_room_closes_for_all_projects() -> None:
    parking = BudgetParking()
    for number in range(MAX_SET_ASIDE + 1):
        parking.judge(Task(id=f"a{number}", project_id="a"), refused(spent=60, reserved=1), WAIT)
    full = refused(spent=60, reserved=40)
    closure = parking.judge(Task(id="b", project_id="b"), full, WAIT).closure
    assert closure is not None
    assert closure.part == SESSION
    room = closure_of(RoomPart("a", "session:s").part, full)
    assert known_by_name((room, closure)) == [closure]
    assert [parking.refusal_behind("session:s", name) for name in "abc"] == [full] * 3


def test_no_more_newcomers_are_set_aside_than_others() -> None:
    parking = BudgetParking()
    for number in range(MAX_SET_ASIDE):
        parking.judge(Task(id=f"t{number}"), refused(spent=60), WAIT)
    assert not parking.joins(waiting("late", WAIT, "session:s"), holds(50), _is_later)


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
    assert (scope or "root") in error


# Work that comes, runs and ends beside a real ledger, whose changes are heard of at once or not.

LEARNED = Estimate(basis=Basis.LEARNED, amount=500, most=300, samples=30)
ESTIMATES = (
    given(0),
    given(100),
    given(400),
    given(5_000),
    LEARNED,
    msgspec.structs.replace(LEARNED, amount=200, most=900),
    msgspec.structs.replace(LEARNED, amount=60, most=4_000, likely=50),
    msgspec.structs.replace(LEARNED, amount=80, most=40, at_once=2),
    PROBE,
)
SCOPES = ((), ("session:s",), ("session:t",), ("session:s/workflow:w",), ("session:s", "session:t"))
TOKENS = st.sampled_from((None, 900, 1_000, 1_000))
WINDOWS = st.sampled_from((NO_WINDOW, parse_window("day")))
PROJECTS = ("x", "y", "z")
limits = st.builds(
    Limit,
    limit_micro_usd=st.sampled_from((None, None, None, 1_000)),
    limit_tokens=TOKENS,
    window=WINDOWS,
)
numbers = st.integers(0, 99)
comings = st.tuples(
    st.sampled_from(("task", "task", "call", "call", "child")),
    st.sampled_from((*(given(0),) * 30, *ESTIMATES)),
    st.sampled_from((*ESTIMATES, *(given(400), given(300), given(500), LEARNED) * 3)),
    st.sampled_from((*(("session:s",),) * 15, *SCOPES)),
    st.sampled_from((0, 0, 0, 5, -5)),
    st.sampled_from((*(OnExhausted.WAIT,) * 9, OnExhausted.REJECT)),
)
happenings = st.tuples(
    st.sampled_from(
        (*("end", "end unheard") * 2, *("move", "cancel", "raise", "raise unheard"), "later")
    ),
    numbers,
    st.sampled_from((0.0, 0.5, 0.9)),
)


class _BesideLedger:
    """A dispatch state that plans, and a ledger that grants; all permits are plenty."""

    def __init__(self, root: Limit, session: Limit) -> None:
        self.now = START
        self.ledger = LedgerState(lambda _name: UTC)
        self.ledger.limits = {ROOT: root, Scope("session:s"): session}
        self.state = state_of(
            places=1_000,
            max_inflight=1_000,
            agents=(Agent(id="a", capacity=1_000),),
            projects=tuple(Project(id=name, max_concurrent_agents=None) for name in PROJECTS),
        )
        self.records: dict[str, TaskRecord] = {}
        self.running: dict[str, tuple[Planned, str]] = {}
        self.news: list[Callable[[], None]] = []
        self.asked: set[str] = set()
        self.unheard_at = 0.0
        self.count = 0

    def come(
        self,
        kind: str,
        micro_usd: Estimate,
        tokens: Estimate,
        scopes: tuple[str, ...],
        priority: int,
        on_exhausted: OnExhausted,
        project_id: str = "x",
    ) -> None:
        self.count += 1
        name = f"{self.count:03}"
        tasks = [
            one
            for one, (line, _) in self.running.items()
            if not line.task.is_call and line.task.project_id == project_id
        ]
        fields: dict[str, Any] = {
            "project_id": project_id,
            "scopes": scopes,
            "priority": priority,
            "agent_id": "a",
            "target": "agent",
            "created_at": self.now,
        }
        if kind == "task":
            is_given = [one.basis is Basis.GIVEN for one in (micro_usd, tokens)]
            record = queued(
                name,
                **fields,
                estimate_tokens=tokens.amount if is_given[1] else None,
                estimate_micro_usd=micro_usd.amount if is_given[0] else None,
                has_usd_estimate=is_given[0],
                on_exhausted=on_exhausted,
            )
            self.records[name] = record
            self.state.observe(record, self.now)
        else:
            hold = Hold(micro_usd=micro_usd, tokens=tokens, kind=f"{project_id}/agent/")
            parent = tasks[0] if kind == "child" and tasks else None
            task = Task(id=name, is_call=True, parent_id=parent, **fields)
            self.enter(TaskRecord(task=task), lambda: hold)
        self.check_newcomer(name)

    def enter(self, record: TaskRecord, hold: HoldOf) -> None:
        self.records[record.task.id] = record
        line = self.state.start_call(record.task, hold, self.now)
        if line is None:
            self.state.observe_call(record, hold, self.now)
        self.go_on([] if line is None else [line])

    def happen(self, kind: str, number: int, share: float) -> None:
        state, is_heard = self.state, not kind.endswith("unheard")
        running = sorted(self.running)
        waiting = sorted(state.waiting)
        if kind == "later":
            self.now += (1.0, ASK_AGAIN_SECONDS, 86_400.0)[number % 3]
        elif kind.startswith("raise"):
            scope = (ROOT, Scope("session:s"))[number % 2]
            limit, more = self.ledger.limits[scope], MicroUsd(500 * number)
            self.ledger.limits[scope] = msgspec.structs.replace(
                limit,
                limit_micro_usd=None if limit.limit_micro_usd is None else more,
                limit_tokens=None if limit.limit_tokens is None else Tokens(more),
            )
            self.tell(state.ask_budgets_again, is_heard=is_heard)
        elif kind == "cancel" and waiting:
            state.forget(waiting[number % len(waiting)], self.now)
        elif kind == "move" and running:
            line, reservation = self.running[running[number % len(running)]]
            if line.hold_of is not None:
                state.withdraw_call(line.task.id, self.now)
                task = msgspec.structs.replace(line.task, has_money=True)
                self.enter(TaskRecord(task=task), line.hold_of)
                assert self.running[task.id] == (line, reservation)
                assert task.id in state.in_flight, "it has its money"
        elif running:
            self.end(running[number % len(running)], share, is_heard=is_heard)
        self.go_on([])

    def end(self, name: str, share: float, *, is_heard: bool) -> None:
        line, reservation_id = self.running.pop(name)
        held = self.ledger.reservations[reservation_id]
        spent = [int(share * amount) for amount in (held.micro_usd, held.tokens)]
        commit = SettleRequest(
            reservation_id=reservation_id,
            call=Call.COMMIT,
            micro_usd=MicroUsd(spent[0]),
            tokens=Tokens(spent[1]),
        )
        self.ledger.settle(commit, self.now)

        def tell() -> None:
            if line.hold_of is not None:
                share = Amounts(spent[0], spent[1])
                self.state.end_call(name, self.now, tokens=spent[1], share=share)
                self.state.settled(Settled(line.task.scopes, (held.kind,)))
                return
            record = taken(self.records[name], line)
            progress = msgspec.structs.replace(
                record.progress, reserved_tokens=held.tokens, reserved_micro_usd=held.micro_usd
            )
            record = msgspec.structs.replace(record, progress=progress)
            over = ended(record, TaskStatus.DONE, tokens=spent[1])
            self.state.observe(msgspec.structs.replace(over, micro_usd=spent[0]), self.now)

        self.tell(tell, is_heard=is_heard)

    def tell(self, news: Callable[[], None], *, is_heard: bool) -> None:
        if is_heard:
            news()
        else:
            self.news.append(news)
            self.unheard_at = self.now

    def go_on(self, lines: list[Planned]) -> None:
        """Plan until nothing can start any more."""
        state = self.state
        due = state.fall_due(self.now)
        while lines := [*lines, *state.plan(self.now, most=1_000)]:
            for line in lines:
                self.ask(line)
            due.rejected.update(state.fall_due(self.now).rejected)
            lines = []
        for name in due.rejected:
            state.forget(name, self.now)

    def ask(self, line: Planned) -> None:
        name = line.task.id
        if line.task.has_money:
            return
        self.asked.add(name)
        overtaken = self.overtaken(line)
        reservation_id = f"{name}:{len(self.ledger.reservations)}"
        answer = self.ledger.reserve(
            line.reserve_request(reservation_id, dispatched=True), self.now
        )
        if isinstance(answer, Reservation):
            assert not overtaken
            self.running[name] = line, reservation_id
        elif self.state.refuse(line, self.records[name], answer, self.now) is not None:
            self.state.forget(name, self.now)

    def hold(self, waiting: Waiting) -> Hold:
        if waiting.hold is not None:
            return waiting.hold()
        return self.state.settings.hold(waiting, self.state.estimates)

    def would_grant(self, waiting: Waiting) -> bool:
        """Tell what the ledger would say now."""
        hold, scopes = self.hold(waiting), charged_by(waiting.task.scopes)
        request = ReserveRequest(
            reservation_id="dry",
            scopes=scopes,
            micro_usd=MicroUsd(hold.micro_usd.amount),
            tokens=Tokens(hold.tokens.amount),
            lease_seconds=None,
            flexible=hold.flexible,
        )
        accounts = [self.ledger.account(scope, self.now) for scope in scopes]
        live = self.ledger.live_kinds.get(hold.kind, 0)
        return not isinstance(amounts_to_hold(accounts, request, now=self.now, live=live), Refused)

    def check_newcomer(self, name: str) -> None:
        """Who was set aside unasked would be refused, by what is known or was a moment ago.

        Who is the first in its lane is refused by the ledger itself.
        """
        self.asked.discard(name)
        self.go_on([])
        waiting = self.state.waiting.get(name)
        if waiting is None or name in self.asked or self.state.parking.refusal_of(name) is None:
            return
        others = [one for one in self.state.parking.all_aside() if one != name]
        goes_before = self.state.index.goes_before
        is_first = all(goes_before(waiting.task, self.state.waiting[one].task) for one in others)
        if is_first or self.now - self.unheard_at >= ASK_AGAIN_SECONDS:
            assert not self.would_grant(waiting)

    def overtaken(self, line: Planned) -> list[str]:
        """Return who waits for what the ledger would give, before another that needs no less.

        Who will not wait, or needs more than the limit was, is to be told at once, and so may
        overtake.
        """
        task = line.task
        if line.terms.on_exhausted is OnExhausted.REJECT or task.parent_id is not None:
            return []
        found = []
        for name in self.state.parking.all_aside():
            other, refused = self.state.waiting[name], self.state.parking.refusal_of(name)
            assert refused is not None
            hold = self.hold(other)
            is_exact = hold.flexible is None and line.hold.flexible is None
            needs_less = any(
                line.hold.estimate(unit).amount < hold.estimate(unit).amount for unit in Unit
            )
            if (
                is_exact
                and not needs_less
                and line.hold.estimate(refused.unit).amount <= refused.limit
                and other.task.scopes == task.scopes
                and self.state.index.goes_before(other.task, task)
                and self.would_grant(other)
            ):
                found.append(name)
        return found

    def check_projects_stop_only_themselves(self) -> None:
        """Whoever is alone in a project runs if the ledger would let it, whatever others wait for.

        Only a scope without any room is closed to it.
        """
        waiting = [one for one in self.state.waiting.values() if one.task.is_bound_by_budgets]
        counts = Counter(one.task.project_id for one in waiting)
        for one in waiting:
            project_id = one.task.project_id
            if counts[project_id] == 1 and self.would_grant(one):
                parking = self.state.parking
                scopes = charged_by(one.task.scopes)
                found = [parking.refusal_behind(scope, project_id) for scope in scopes]
                assert any(found)
                for refused in filter(None, found):
                    assert refused.spent + refused.reserved + refused.overrun >= refused.limit

    def check_nobody_is_forgotten(self) -> None:
        """Once all is heard of, everybody runs whom the ledger would let run."""
        for news in self.news:
            news()
        self.go_on([])
        self.now += ASK_AGAIN_SECONDS
        self.go_on([])
        for waiting in self.state.waiting.values():
            assert waiting.task.parent_id is not None or not self.would_grant(waiting)


@pytest.mark.hypothesis
@settings(max_examples=300, deadline=None)
@example_given(
    limits, limits, st.lists(st.one_of(comings, comings, happenings), min_size=12, max_size=40)
)
def test_nobody_waits_behind_others_for_money_that_the_ledger_would_give(
    root: Limit, session: Limit, steps: list[tuple[Any, ...]]
) -> None:
    beside = _BesideLedger(root, session)
    for step in steps:
        if step[0] in ("task", "call", "child"):
            beside.come(*step)
        else:
            beside.happen(*step)
    beside.check_nobody_is_forgotten()


of_projects = st.builds(
    lambda coming, project_id: (*coming, project_id), comings, st.sampled_from(PROJECTS)
)
heard = st.tuples(st.sampled_from(("end", "end", "raise", "later")), numbers, st.just(0.5))


@pytest.mark.hypothesis
@settings(max_examples=300, deadline=None)
@example_given(
    limits,
    limits,
    st.lists(
        st.one_of(*(of_projects,) * 3, heard),
        min_size=12,
        max_size=40,
    ),
    st.sampled_from((1, 2, 6)),
)
def test_a_project_waits_for_nothing_that_only_another_one_cannot_have(
    root: Limit, session: Limit, steps: list[tuple[Any, ...]], most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headgate.core.dispatch_state.MAX_SET_ASIDE", most)
        beside = _BesideLedger(root, session)
        for step in steps:
            if step[0] in ("task", "call", "child"):
                beside.come(*step)
            else:
                beside.happen(*step)
            beside.check_projects_stop_only_themselves()
