"""What a policy is told when an agent that was free has one task less in flight."""

from __future__ import annotations

import pytest

from headgate import Agent, Task
from headgate.core.lane_index import AgentPermits, Lane, LaneIndex, lane_chooser
from headgate.core.snapshot import LanePolicy


def test_the_lane_of_an_agent_that_lands_a_task_goes_first_though_it_was_free_before() -> None:
    index = LaneIndex(
        policy=LanePolicy.FEWEST_IN_FLIGHT, max_wait_ticks=1_000, counts_inflight=True
    )
    for agent_id, inflight in (("a", 1), ("b", 2)):
        index.set_agent(Agent(id=agent_id, capacity=10), inflight=inflight)
        index.add(Task(id=f"of-{agent_id}", project_id="x", agent_id=agent_id))
    assert _first(index) == "a"
    index.give_back_permit("b")
    index.give_back_permit("b")
    assert _first(index) == "b"


@pytest.mark.parametrize(
    ("policy", "asked"), [(LanePolicy.FEWEST_IN_FLIGHT, 1), (LanePolicy.HIGHEST_LOAD, 0)]
)
def test_less_in_flight_is_news_only_to_the_policy_that_counts_it(
    policy: LanePolicy, asked: int
) -> None:
    seen: list[Lane] = []

    def agent_for(lane: Lane) -> AgentPermits | None:
        seen.append(lane)
        return None

    lane = _lane_with_work()
    lane_chooser(policy, agent_for, max_wait_ticks=1_000).ease(lane)
    assert len(seen) == asked


def _lane_with_work() -> Lane:
    index = LaneIndex(policy=LanePolicy.FEWEST_IN_FLIGHT, counts_inflight=True)
    index.set_agent(Agent(id="a", capacity=10))
    index.add(Task(id="t", project_id="x", agent_id="a"))
    lane = index.choose_lane("x", tick=0, alpha=0.5)
    assert lane is not None
    return lane


def _first(index: LaneIndex) -> str | None:
    lane = index.choose_lane("x", tick=0, alpha=0.5)
    return None if lane is None else lane.owner
