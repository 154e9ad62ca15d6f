"""Why something was started: the figures of the round, and what they say."""

from __future__ import annotations

import pytest

from headgate.core.lane_index import LaneIndex
from headgate.core.scheduler import Round
from headgate.core.snapshot import Agent, LanePolicy, Project, SchedulerState
from headgate.core.task import Choice, LaneRule, Task

FIRST = Choice(projects=2, target_share=0.75, actual_share=0.0, is_guaranteed=True, ready=2)


def round_of(**fields: object) -> Round:
    usual: dict[str, object] = {
        "project_token_usage": {},
        "project_active_agent_counts": {},
        "tasks_completed_in_window": {},
        "lane_policy": LanePolicy.FEWEST_IN_FLIGHT,
    }
    projects = [Project(id="x", credit_weight=3.0), Project(id="y", credit_weight=1.0)]
    state = SchedulerState(projects=projects, **{**usual, **fields})  # type: ignore[arg-type]
    decided = Round(LaneIndex.of(state), state)
    decided.run()
    return decided


def agents(*names: str) -> list[Agent]:
    return [Agent(id=name) for name in names]


def tasks(project_id: str, *names: str, agent_id: str | None = None) -> list[Task]:
    return [Task(id=name, project_id=project_id, agent_id=agent_id) for name in names]


def test_every_action_has_its_choice() -> None:
    decided = round_of(
        agents=agents("a", "b", "c"), tasks=[*tasks("x", "t1", "t2"), *tasks("y", "t3")]
    )
    assert len(decided.choices) == len(decided.actions) == 3


def test_a_project_that_has_had_nothing_is_guaranteed_its_first_start() -> None:
    decided = round_of(agents=agents("a"), tasks=[*tasks("x", "t1", "t2"), *tasks("y", "t3")])
    assert decided.choices == [FIRST]


def test_shares_are_those_that_the_round_compared() -> None:
    decided = round_of(
        agents=agents("a"),
        tasks=[*tasks("x", "t1"), *tasks("y", "t2")],
        project_token_usage={"x": 600, "y": 400},
        tasks_completed_in_window={"x": 1, "y": 1},
    )
    assert decided.choices == [Choice(projects=2, target_share=0.75, actual_share=0.6)]


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, LaneRule.FEWEST_IN_FLIGHT),
        ({"lane_policy": LanePolicy.HIGHEST_LOAD}, LaneRule.HIGHEST_LOAD),
        ({"max_wait_ticks": 5, "tick": 5}, LaneRule.LONGEST_WAIT),
        ({"max_wait_ticks": 5, "tick": 4}, LaneRule.FEWEST_IN_FLIGHT),
        ({"lane_policy": None}, LaneRule.AGENT_IN_TURN),
    ],
)
def test_the_rule_is_the_one_that_chose_the_lane(fields: dict[str, object], rule: LaneRule) -> None:
    waiting = [*tasks("x", "t1", agent_id="a"), *tasks("x", "t2", agent_id="b")]
    decided = round_of(agents=agents("a"), tasks=waiting, **fields)
    assert [(one.rule, one.lanes) for one in decided.choices] == [(rule, 2)]


def test_what_was_alone_went_because_nothing_else_could() -> None:
    assert Choice().sentences("x") == ["Nothing else could start then."]


def test_the_widest_ground_is_said_first() -> None:
    shares = Choice(
        projects=3,
        target_share=0.4,
        actual_share=0.125,
        lanes=2,
        rule=LaneRule.LONGEST_WAIT,
        ready=7,
    )
    evals = (
        "Of 3 projects with work, evals stood lowest against its share of those that could start "
        "something: it had 12.5 % of their tokens, and its target among them is 40.0 %."
    )
    assert shares.sentences("evals") == [
        evals,
        "Of the 2 lanes of the project, it had waited as long as a lane may.",
        "In its lane it was the first of 7 tasks that could start.",
    ]
    assert FIRST.sentences("x")[0] == (
        "Project x had started nothing in the window yet, so of 2 projects with work it went first."
    )
