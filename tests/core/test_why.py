"""Why a task waits: each rule that holds it, who has what it waits for, and until when."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from core.dispatch_model import START, queued, state_of, taken
from headgate.core.budgets.ledger import Refused, Unit
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch_state import DispatchState
from headgate.core.gates import GateClosure
from headgate.core.rate_limits import RateLimit
from headgate.core.reasons import (
    AgentFull,
    BudgetShort,
    GateClosed,
    GlobalBudgetExhausted,
    InflightCapReached,
    LaneBehind,
    NoAgentPulls,
    NodesFull,
    NoIdleAgent,
    NotYetDue,
    ParentsPending,
    ProjectBudgetExhausted,
    ProjectConcurrencyReached,
    ProjectNotActive,
    ProjectUnknown,
    RateLimited,
    Reason,
    expiry_warning,
)
from headgate.core.snapshot import (
    BUILT_IN_AGENT,
    Agent,
    AgentState,
    Project,
    ProjectStatus,
    with_built_in_agent,
)
from headgate.core.why import (
    MAX_HOLDERS,
    TaskReason,
    reasons,
    warning_at_submit,
    without_figures,
)
from headgate.errors import utc_time

ONE_AGENT = (Agent(id="a", capacity=9),)


def why(
    dispatch_state: DispatchState, task_id: str = "t1", now: float = START
) -> tuple[TaskReason, ...]:
    return reasons(dispatch_state, task_id, now)


def only(dispatch_state: DispatchState, task_id: str = "t1") -> TaskReason:
    (reason,) = why(dispatch_state, task_id)
    return reason


def test_a_task_that_the_state_does_not_have_has_no_reason() -> None:
    assert why(state_of()) == ()


CASES: list[tuple[DispatchState, Reason]] = [
    (
        state_of(queued("t1", waiting_for=1, depends_on=("p1", "p2"))),
        ParentsPending(count=1, parents=("p1", "p2")),
    ),
    (state_of(queued("t1", not_before=START + 5)), NotYetDue(until=START + 5)),
    (state_of(queued("t1", project_id="ghost")), ProjectUnknown(project_id="ghost")),
    (
        state_of(queued("t1"), projects=(Project(id="x", status=ProjectStatus.PAUSED),)),
        ProjectNotActive(project_id="x", status="paused"),
    ),
    (state_of(queued("t1"), places=0), NodesFull(nodes=1, capacity=0)),
    (state_of(queued("t1"), max_inflight=0), InflightCapReached(inflight=0, limit=0)),
    (state_of(queued("t1"), agents=()), NoIdleAgent()),
    (
        state_of(queued("t1"), queued("t2")),
        LaneBehind(project_id="x", agent="any agent", given_first=1),
    ),
]


@pytest.mark.parametrize(("dispatch_state", "hold"), CASES)
def test_one_rule_gives_one_reason(dispatch_state: DispatchState, hold: Reason) -> None:
    reason = only(dispatch_state)
    assert reason.detail == hold
    assert reason.message == hold.message


def test_every_rule_that_holds_is_told() -> None:
    record = queued("t1", waiting_for=1, not_before=START + 5, target="t", project_id="ghost")
    dispatch_state = state_of(record)
    dispatch_state.close(
        GateClosure(kind="target", name="t", until=START + 9, why="slow down"), START
    )
    kinds = {type(reason.detail) for reason in why(dispatch_state)}
    assert kinds >= {ParentsPending, NotYetDue, ProjectUnknown}


def test_what_lasts_longest_is_told_first() -> None:
    paused = (Project(id="x", status=ProjectStatus.PAUSED),)
    dispatch_state = state_of(
        queued("t1", not_before=START + 5, waiting_for=1), projects=paused, places=0
    )
    assert [type(reason.detail) for reason in why(dispatch_state)] == [
        ProjectNotActive,
        NotYetDue,
        ParentsPending,
        NodesFull,
    ]


def test_a_closed_gate_says_why_and_until_when() -> None:
    dispatch_state = state_of(queued("t1", target="t"))
    dispatch_state.close(
        GateClosure(kind="target", name="t", until=START + 9, why="slow down"), START
    )
    reason = only(dispatch_state)
    assert reason.detail == GateClosed(kind="target", name="t", until=START + 9, why="slow down")
    assert reason.until == START + 9


def test_the_tasks_that_have_the_places_of_an_agent_are_named() -> None:
    records = [queued(f"t{number}", agent_id="a") for number in range(3)]
    dispatch_state = state_of(*records, agents=(Agent(id="a", capacity=2),))
    dispatch_state.plan(START, most=9)
    reason = only(dispatch_state, "t2")
    assert reason.detail == AgentFull(agent_id="a", inflight=2, capacity=2)
    assert reason.held_by == ("t0", "t1")


def test_the_tasks_that_have_the_places_of_a_project_are_named() -> None:
    other = queued("u1")
    records = [queued(f"t{number}", project_id="y") for number in range(3)]
    dispatch_state = state_of(other, *records, agents=ONE_AGENT)
    dispatch_state.plan(START, most=9)
    reason = only(dispatch_state, "t2")
    assert reason.detail == ProjectConcurrencyReached(project_id="y", active=2, limit=2)
    assert reason.held_by == ("t0", "t1")


def test_at_most_a_few_holders_are_named() -> None:
    records = [queued(f"t{number:02}") for number in range(20)]
    dispatch_state = state_of(
        *records, places=15, agents=(Agent(id="a", capacity=50),), max_inflight=50
    )
    dispatch_state.plan(START, most=50)
    reason = only(dispatch_state, "t19")
    assert reason.detail == NodesFull(nodes=1, capacity=15)
    assert len(reason.held_by) == MAX_HOLDERS


def test_tasks_of_others_are_counted_and_not_named() -> None:
    records = [queued(f"t{number:02}", project_id="xy"[number % 2]) for number in range(30)]
    projects = tuple(Project(id=name, max_concurrent_agents=None) for name in "xy")
    agents = (Agent(id="a", capacity=50),)
    dispatch_state = state_of(
        *records, places=26, agents=agents, projects=projects, max_inflight=50
    )
    dispatch_state.plan(START, most=50)
    own = {
        attempt.task.id for attempt in dispatch_state.in_flight if attempt.task.project_id == "x"
    }
    waiting = next(
        one for one in dispatch_state.waiting if dispatch_state.waiting[one].task.project_id == "x"
    )
    (reason,) = reasons(
        dispatch_state, waiting, START, lambda attempt: attempt.task.project_id == "x"
    )
    assert set(reason.held_by) < own
    assert (len(reason.held_by), reason.held_by_others) == (MAX_HOLDERS, 26 - len(own))


def short(scope: str, *, spent: int, reserved: int, resets_at: int | None = None) -> Refused:
    return Refused(
        scope=Scope(scope),
        unit=Unit.TOKENS,
        limit=1_000,
        spent=spent,
        reserved=reserved,
        overrun=0,
        requested=700,
        resets_at=resets_at,
        may_clear=True,
    )


@pytest.mark.parametrize("scope", ["session:s", ""])
def test_a_task_set_aside_for_budget_says_what_is_left_and_who_holds_the_rest(scope: str) -> None:
    first, second = queued("t1", scopes=("session:s/workflow:w",)), queued("t2")
    dispatch_state = state_of(first, second, agents=ONE_AGENT)
    lines = {line.task.id: line for line in dispatch_state.plan(START, most=2)}
    refused = short(scope, spent=300, reserved=100, resets_at=int(START) + 50)
    dispatch_state.refuse(lines["t2"], second, refused, START)
    assert taken(first, lines["t1"]).progress.attempt == 1
    reason = only(dispatch_state, "t2")
    until = int(START) + 50
    expected = BudgetShort(scope=scope, unit="tokens", room=600, requested=700, until=until)
    assert reason.detail == expected
    assert reason.until == until
    assert reason.held_by == ("t1",)


def test_a_scope_without_room_is_a_closed_gate_with_the_tasks_that_hold_its_money() -> None:
    first, second = queued("t1", scopes=("session:s",)), queued("t2", scopes=("session:s",))
    dispatch_state = state_of(first, second, agents=ONE_AGENT)
    lines = {line.task.id: line for line in dispatch_state.plan(START, most=2)}
    dispatch_state.refuse(lines["t2"], second, short("session:s", spent=0, reserved=1_000), START)
    reason = only(dispatch_state, "t2")
    assert isinstance(reason.detail, GateClosed)
    assert (reason.detail.name, reason.until, reason.held_by) == ("session:s", None, ("t1",))


def test_a_scope_that_is_closed_for_a_project_is_told_by_its_name() -> None:
    records = [queued(f"t{number:02}", scopes=("session:s",)) for number in range(70)]
    agents = (Agent(id="a", capacity=99),)
    dispatch_state = state_of(*records, agents=agents, places=99, max_inflight=99)
    until = int(START) + 50
    refused = short("session:s", spent=300, reserved=100, resets_at=until)
    for line, record in zip(dispatch_state.plan(START, most=99), records, strict=True):
        dispatch_state.refuse(line, record, refused, START)
    (behind,) = why(dispatch_state, "t69")
    assert isinstance(behind.detail, GateClosed)
    assert (behind.detail.kind, behind.detail.name, behind.until) == ("scope", "session:s", until)
    assert behind.message == (
        "scope session:s is closed: 400 tokens of 1,000 tokens are used or reserved, and 700 tokens"
        f" asked for; it is open to other projects, until {utc_time(until)}"
    )
    (hidden,) = reasons(dispatch_state, "t69", START, may_read=lambda _scope: False)
    assert "tokens" not in hidden.message
    late = msgspec.structs.replace(records[0].task, id="late", deadline=START + 10)
    assert "before the window of budget session:s opens" in warning_at_submit(dispatch_state, late)


def test_a_rate_limit_on_a_type_of_agents_says_until_when() -> None:
    limit = RateLimit(kind="agent_type", name="claude", unit="requests", most=1, window_seconds=60)
    dispatch_state = state_of(
        queued("t1"),
        queued("t2"),
        agents=(Agent(id="a", agent_type="claude", capacity=9),),
        rate_limits=(limit,),
    )
    dispatch_state.plan(START, most=9)
    reason = only(dispatch_state, "t2")
    assert reason.detail == RateLimited(agent_type="claude", until=START + 61)


def test_a_task_that_no_rate_limit_can_ever_hold_says_so() -> None:
    limit = RateLimit(kind="target", name="t", unit="tokens", most=500, window_seconds=60)
    dispatch_state = state_of(queued("t1", target="t", estimate_tokens=501), rate_limits=(limit,))
    assert dispatch_state.plan(START, most=9) == []
    messages = [reason.message for reason in why(dispatch_state)]
    assert messages == ["target t is closed: 500 tokens in 60 seconds can never take it"]


NODES_FULL = (
    "all 2 permits of the service's nodes are taken; scheduler.worker_count = 2 is the default"
)
AGENT_FULL = (
    "agent b has 2 of 2 permits in use; scheduler.max_per_agent_inflight = 2 is the default"
)
CAPS = frozenset(
    {"scheduler.max_inflight", "agents.a.capacity", "projects.y.max_concurrent_agents"}
)


@pytest.mark.parametrize(
    ("options", "agent_id", "set_keys", "messages"),
    [
        (
            {"max_inflight": 2},
            None,
            CAPS,
            ["2 of 2 tasks are in flight; scheduler.max_inflight = 2 was set"],
        ),
        (
            {"max_inflight": 2},
            None,
            frozenset(),
            ["2 of 2 tasks are in flight; scheduler.max_inflight = 2 is the default"],
        ),
        ({"max_inflight": 2}, None, None, ["2 of 2 tasks are in flight"]),
        (
            {"places": 2},
            None,
            frozenset(),
            [NODES_FULL],
        ),
        (
            {"agents": (Agent(id="a", capacity=2),)},
            "a",
            CAPS,
            ["agent a has 2 of 2 permits in use; agents.a.capacity = 2 was set"],
        ),
        (
            {"agents": (Agent(id="a", capacity=2),)},
            None,
            CAPS,
            ["agent a has 2 of 2 permits in use; agents.a.capacity = 2 was set"],
        ),
        (
            {"agents": (), "max_per_agent_inflight": 2},
            "b",
            frozenset(),
            [AGENT_FULL],
        ),
        (
            {"agents": with_built_in_agent((), capacity=2), "max_inflight": 2, "places": 2},
            None,
            frozenset(),
            [
                "2 of 2 tasks are in flight; scheduler.max_inflight = 2 is the default",
                NODES_FULL,
            ],
        ),
        (
            {"agents": (Agent(id="a", state=AgentState.PAUSED),)},
            None,
            frozenset(),
            ["agent a is paused"],
        ),
    ],
)
def test_a_cap_names_its_setting_its_value_and_whether_somebody_set_it(
    options: dict[str, Any],
    agent_id: str | None,
    set_keys: frozenset[str] | None,
    messages: list[str],
) -> None:
    options = {"agents": ONE_AGENT} | options
    records = [queued(f"t{number}", agent_id=agent_id) for number in range(3)]
    dispatch_state = state_of(*records, set_keys=set_keys, **options)
    dispatch_state.plan(START, most=9)
    assert [reason.message for reason in why(dispatch_state, "t2")] == messages


def test_a_capped_project_names_its_setting() -> None:
    records = [queued(f"t{number}", project_id="y") for number in range(3)]
    dispatch_state = state_of(*records, agents=ONE_AGENT, set_keys=CAPS)
    dispatch_state.plan(START, most=9)
    assert only(dispatch_state, "t2").message == (
        "project y has 2 of 2 tasks in flight; projects.y.max_concurrent_agents = 2 was set"
    )


def test_the_built_in_agent_takes_open_tasks_and_not_those_that_workers_pull() -> None:
    pulled = queued("t2", target="pull")
    agents = with_built_in_agent((Agent(id="a", accepts_open=False),), capacity=9)
    dispatch_state = state_of(
        queued("t1", target="t"), pulled, agents=agents, pull_targets=frozenset({"pull"})
    )
    dispatch_state.workers.set_node("worker-1", 3, agent_id="a", now=START)
    planned = dispatch_state.plan(START, most=9)
    assert [(line.task.id, line.agent_id) for line in planned] == [("t1", BUILT_IN_AGENT)]
    assert only(dispatch_state, "t2").detail == NoAgentPulls()


UNTIL = START + 100
TELLING: list[tuple[Reason, str]] = [
    (NotYetDue(until=UNTIL), "it may start"),
    (GateClosed(kind="scope", name="project:x", until=UNTIL), "the window of budget project:x"),
    (GateClosed(kind="scope", name="", until=UNTIL), "the window of budget root opens"),
    (GateClosed(kind="slot", name="work", until=UNTIL), "slot work opens"),
    (BudgetShort(scope="s", unit="tokens", room=1, requested=2, until=UNTIL), "budget s opens"),
    (RateLimited(agent_type="claude", until=UNTIL), "it may start"),
]


@pytest.mark.parametrize(("reason", "awaited"), TELLING)
def test_a_task_is_warned_only_if_it_expires_before_what_it_waits_for(
    reason: Reason, awaited: str
) -> None:
    assert expiry_warning(reason, None) == ""
    assert expiry_warning(reason, UNTIL + 0.1) == ""
    for deadline in (START, UNTIL):
        warning = expiry_warning(reason, deadline)
        assert utc_time(deadline) in warning
        assert awaited in warning
        assert utc_time(UNTIL) in warning


def test_what_names_no_time_warns_of_nothing() -> None:
    assert expiry_warning(GateClosed(kind="target", name="t"), START) == ""
    assert expiry_warning(ParentsPending(count=1), START) == ""


@pytest.mark.parametrize(
    ("deadline", "is_warned"), [(None, False), (UNTIL - 1, True), (UNTIL + 1, False)]
)
def test_why_warns_of_the_reason_that_outlasts_the_task_and_of_no_other(
    deadline: float | None, is_warned: bool
) -> None:
    dispatch_state = state_of(queued("t1", target="t", slot="s", deadline=deadline))
    dispatch_state.close(GateClosure(kind="target", name="t", until=UNTIL), START)
    dispatch_state.close(GateClosure(kind="slot", name="s", until=START + 5), START)
    told = {one.until: bool(one.warning) for one in why(dispatch_state)}
    assert told == {UNTIL: is_warned, START + 5: False}


@pytest.mark.parametrize(
    ("fields", "warned_of"),
    [
        ({"target": "t"}, "target t opens at"),
        ({"target": "u", "scopes": ("project:x/session:s",)}, "budget project:x opens at"),
        ({"target": "t", "scopes": ("project:x",)}, "budget project:x opens at"),
        ({"target": "v"}, ""),
        ({"target": "v", "slot": "one"}, ""),
    ],
)
def test_a_submit_is_warned_of_the_gate_that_opens_last(
    fields: dict[str, Any], warned_of: str
) -> None:
    dispatch_state = state_of()
    for closure in (
        GateClosure(kind="target", name="t", until=UNTIL),
        GateClosure(kind="scope", name="project:x", until=UNTIL + 50),
        GateClosure(kind="target", name="v"),
        GateClosure(kind="slot", name="one", until=START + 9),
    ):
        dispatch_state.close(closure, START)
    task = queued("t1", deadline=START + 10, **fields).task
    warning = warning_at_submit(dispatch_state, task)
    assert warned_of in warning
    assert bool(warning) is bool(warned_of)
    assert warning_at_submit(dispatch_state, queued("t1", **fields).task) == ""


BUDGET_REASONS = [
    GateClosed(kind="scope", name="", until=9.0, why="$4.00 of $5.00 are used or reserved"),
    GateClosed(kind="scope", name="project:x", until=9.0, why="$4.00 of $5.00 are used"),
    BudgetShort(scope="", unit="micro_usd", room=4_000_000, requested=5_000_000, until=9.0),
    GlobalBudgetExhausted(used=4_000, limit=5_000),
    ProjectBudgetExhausted(project_id="x", used=4_000, limit=5_000),
]


@pytest.mark.parametrize("reason", BUDGET_REASONS, ids=lambda reason: type(reason).__name__)
def test_a_reason_has_no_figures_of_a_budget_that_may_not_be_read(reason: Reason) -> None:
    told = without_figures(reason, lambda _: False)
    assert isinstance(told, GateClosed)
    assert told.until == getattr(reason, "until", None)
    assert not re.search(r"[45]", told.message)
    assert without_figures(reason, lambda _: True) is reason


def test_other_reasons_stay_as_they_are() -> None:
    for reason in (NotYetDue(until=4.0), GateClosed(kind="slot", name="a", why="4 of 5")):
        assert without_figures(reason, lambda _: False) is reason
