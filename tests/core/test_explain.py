"""Every task that waits has a reason, and the reason is the right one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headgate import Agent, AgentState, Project, ProjectStatus, Scheduler, SchedulerState, Task
from headgate.core.gates import GateClosure
from headgate.core.reasons import (
    AgentFull,
    AgentUnavailable,
    BudgetShort,
    Cap,
    ClientAway,
    EverythingPaused,
    FirstOfKind,
    GateClosed,
    GlobalBudgetExhausted,
    InflightCapReached,
    LaneBehind,
    NoAgentPulls,
    NodesFull,
    NoIdleAgent,
    NotYetDue,
    NoWorker,
    ParentsPending,
    ProjectBudgetExhausted,
    ProjectConcurrencyReached,
    ProjectNotActive,
    ProjectUnknown,
    RateLimited,
    Reason,
    UpstreamFull,
    WorkersFull,
)
from snapshots import idle, snapshot, tasks


def one_task(**fields: Any) -> SchedulerState:
    values: dict[str, Any] = {
        "projects": [Project(id="p")],
        "tasks": [Task(id="t", project_id="p")],
        "agents": idle("a"),
    }
    return snapshot(**(values | fields))


CASES: list[tuple[str, SchedulerState, Reason]] = [
    (
        "global budget",
        one_task(global_budget=5, global_tokens_used=7),
        GlobalBudgetExhausted(used=7, limit=5),
    ),
    ("no idle agent", one_task(agents=[Agent(id="a", state=AgentState.BUSY)]), NoIdleAgent()),
    ("no agent at all", one_task(agents=[]), NoIdleAgent()),
    (
        "agents that take no open tasks",
        one_task(agents=[Agent(id="a", accepts_open=False)]),
        NoIdleAgent(),
    ),
    (
        "project paused",
        one_task(projects=[Project(id="p", status=ProjectStatus.PAUSED)]),
        ProjectNotActive(project_id="p", status="paused"),
    ),
    ("project unknown", one_task(projects=[]), ProjectUnknown(project_id="p")),
    (
        "project budget",
        one_task(projects=[Project(id="p", budget_limit=9)], project_token_usage={"p": 9}),
        ProjectBudgetExhausted(project_id="p", used=9, limit=9),
    ),
    (
        "project concurrency",
        one_task(project_active_agent_counts={"p": 2}),
        ProjectConcurrencyReached(project_id="p", active=2, limit=2),
    ),
    (
        "agent full",
        one_task(
            tasks=[Task(id="t", project_id="p", agent_id="a")],
            agents=[Agent(id="a", capacity=3)],
            agent_inflight={"a": 3},
        ),
        AgentFull(agent_id="a", inflight=3, capacity=3),
    ),
    (
        "named agent does not exist",
        one_task(tasks=[Task(id="t", project_id="p", agent_id="ghost")]),
        AgentUnavailable(agent_id="ghost", state="unknown"),
    ),
    (
        "named agent is not working",
        one_task(
            tasks=[Task(id="t", project_id="p", agent_id="a")],
            agents=[Agent(id="a", state=AgentState.ERROR)],
        ),
        AgentUnavailable(agent_id="a", state="error"),
    ),
    (
        "global in-flight cap",
        one_task(agent_inflight={"other": 4}, max_inflight=4),
        InflightCapReached(inflight=4, limit=4),
    ),
    (
        "rate limit",
        one_task(agents=[Agent(id="a", agent_type="claude")], rate_limited={"claude": 60.0}),
        RateLimited(agent_type="claude", until=60.0),
    ),
    (
        "rate limit of the named agent",
        one_task(
            tasks=[Task(id="t", project_id="p", agent_id="a")],
            agents=[Agent(id="a", agent_type="claude"), Agent(id="b", agent_type="x")],
            rate_limited={"claude": 60.0},
        ),
        RateLimited(agent_type="claude", until=60.0),
    ),
    (
        "scope closed",
        one_task(
            tasks=[Task(id="t", project_id="p", scopes=("session:s/workflow:w",))],
            closed_gates=[GateClosure(kind="scope", name="session:s", until=9.0, why="exhausted")],
        ),
        GateClosed(kind="scope", name="session:s", until=9.0, why="exhausted"),
    ),
    (
        "target closed",
        one_task(
            tasks=[Task(id="t", project_id="p", target="browser")],
            closed_gates=[GateClosure(kind="target", name="browser")],
        ),
        GateClosed(kind="target", name="browser"),
    ),
    (
        "slot closed",
        one_task(
            tasks=[Task(id="t", project_id="p", slot="work")],
            closed_gates=[GateClosure(kind="slot", name="work", until=5.0)],
        ),
        GateClosed(kind="slot", name="work", until=5.0),
    ),
    (
        "not before",
        one_task(tasks=[Task(id="t", project_id="p", not_before=9.0)], now=1.0),
        NotYetDue(until=9.0),
    ),
    (
        "lane behind others",
        one_task(tasks=[*tasks("p", 1, priority=-1), Task(id="t", project_id="p")]),
        LaneBehind(project_id="p", agent="any agent", given_first=1),
    ),
]


@pytest.mark.parametrize(
    ("state", "expected"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_a_waiting_task_has_this_reason(state: SchedulerState, expected: Reason) -> None:
    assert Scheduler.explain(state)["t"] == expected


KEPT_BY_THE_STATE = {
    ParentsPending,
    BudgetShort,
    ClientAway,
    EverythingPaused,
    FirstOfKind,
    NoAgentPulls,
    NodesFull,
    NoWorker,
    UpstreamFull,
    WorkersFull,
}
"""Reasons that no snapshot has: who waits for them is not in the round."""


def test_every_kind_of_reason_is_in_the_table() -> None:
    kinds = {*Reason.__subclasses__(), *Cap.__subclasses__()} - KEPT_BY_THE_STATE - {Cap}
    assert {type(case[2]) for case in CASES} == kinds


def test_a_task_that_got_an_agent_has_no_reason() -> None:
    assert Scheduler.explain(one_task()) == {}


def test_all_rules_are_listed_from_the_widest_to_the_narrowest() -> None:
    state = one_task(
        projects=[Project(id="p", budget_limit=0, max_concurrent_agents=0)],
        tasks=[Task(id="t", project_id="p", slot="s", agent_id="gone")],
        global_budget=0,
        closed_gates=[GateClosure(kind="slot", name="s")],
    )
    reasons = [type(hold) for hold in Scheduler.explain_all(state)["t"]]
    assert reasons == [
        GlobalBudgetExhausted,
        ProjectBudgetExhausted,
        ProjectConcurrencyReached,
        GateClosed,
        AgentUnavailable,
    ]


def test_a_cap_that_the_round_itself_reached_is_a_reason() -> None:
    state = one_task(projects=[Project(id="p", max_concurrent_agents=1)], tasks=tasks("p", 2))
    assert Scheduler.explain(state)["p-00001"] == ProjectConcurrencyReached(
        project_id="p", active=1, limit=1
    )


def test_an_agent_that_the_round_filled_means_that_others_went_first() -> None:
    own = [Task(id=f"t{number}", project_id="p", agent_id="a") for number in range(2)]
    state = one_task(tasks=own, agent_inflight={})
    assert Scheduler.explain(state)["t1"] == LaneBehind(project_id="p", agent="a", given_first=1)


def test_reasons_are_written_with_their_tag() -> None:
    written = msgspec.to_builtins(ProjectNotActive(project_id="p", status="paused"))
    assert written == {"reason": "project_paused", "project_id": "p", "status": "paused"}
