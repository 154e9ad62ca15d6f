"""What a scheduler says of itself: loads, stats, a trace, weights."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Agent, LoadScheduler, SharedResource, Task
from headgate.inprocess.calls import (
    LEAST_FACTOR,
    MAX_TYPES,
    MOST_FACTOR,
    WeightEstimates,
    prompt_chars_of,
)
from headgate.inprocess.lanes import jain_index
from headgate.testing import SimulatedLoop, simulate


async def reserved(scheduler: LoadScheduler, agent: str) -> None:
    async with scheduler.acquire(agent):
        await asyncio.sleep(1)


def told() -> tuple[list[str], list[str]]:
    """Return what a scheduler explains in the middle of its work, and its trace."""

    async def main(loop: SimulatedLoop) -> tuple[list[str], list[str]]:
        agents: list[Agent | str] = ["deep", "old", Agent(id="full"), "lazy"]
        scheduler = LoadScheduler(agents, SharedResource("llm", 2))
        loop.create_task(reserved(scheduler, "full"))
        loop.create_task(reserved(scheduler, "old"))
        await asyncio.sleep(0.1)
        for agent in ("old", "full"):
            loop.create_task(reserved(scheduler, agent))
        await asyncio.sleep(0.95)
        await scheduler.submit_task("lazy", Task(weight=7))
        for _ in range(3):
            loop.create_task(reserved(scheduler, "deep"))
        await asyncio.sleep(0.1)
        return str(scheduler.explain()).splitlines(), str(scheduler.trace).splitlines()

    return simulate(main, seed=None).result


def test_explain_says_who_goes_next_and_why_the_others_do_not() -> None:
    shown, _ = told()
    assert shown == [
        "llm: 2 of 2 permits in use, tick 2, alpha 0.25",
        "  0.250  deep: waits with depth 3, the oldest for 0 ticks",
        "         old: has 1 in flight, and nothing queued",
        "         full: has 1 in flight, and nothing queued",
        "         lazy: has 1 queued, and nobody has asked for a permit",
    ]


def test_the_trace_tells_of_every_step_in_a_line() -> None:
    _, trace = told()
    lines = [line.strip().split("  ", 1)[1] for line in trace]
    assert lines[:6] == [
        "tick 0      granted      full (0 queued, waited 0 ticks)",
        "tick 0      granted      old (0 queued, waited 0 ticks)",
        "tick 0      queued       old (1 queued)",
        "tick 0      queued       full (1 queued)",
        "tick 1      released     full (1 queued)",
        "tick 1      granted      full (0 queued, waited 1 ticks)",
    ]


def test_only_the_latest_events_are_kept_and_none_where_none_are_wanted() -> None:
    async def main(loop: SimulatedLoop) -> list[int]:
        kept = []
        for most in (0, 3):
            scheduler = LoadScheduler(None, SharedResource("llm"), trace_events=most)
            for _ in range(5):
                await reserved(scheduler, "a")
            kept.append(len(scheduler.trace.events()))
        return kept

    assert simulate(main).result == [0, 3]


def test_stats_are_kept_for_each_agent() -> None:
    async def main(loop: SimulatedLoop) -> None:
        scheduler = LoadScheduler(["a", "b"], SharedResource("llm"))
        await asyncio.gather(*(reserved(scheduler, agent) for agent in "aab"))
        a, b = scheduler.stats()
        assert (a.grants, b.grants, a.in_flight, a.queued) == (2, 1, 0, 0)
        assert (a.share, b.share) == pytest.approx((2 / 3, 1 / 3))
        assert a.longest_wait_ticks + b.longest_wait_ticks == 3
        assert max(a.longest_wait_seconds, b.longest_wait_seconds) == 2.0
        assert (a.mean_wait_seconds * 2 + b.mean_wait_seconds) == pytest.approx(3.0)

    simulate(main)


def test_the_jain_index_is_one_for_equal_shares_and_one_nth_for_one_who_has_all() -> None:
    assert jain_index([3, 3, 3]) == 1.0
    assert jain_index([1, 0, 0, 0]) == 0.25
    assert jain_index([]) == jain_index([0, 0]) == 1.0


costs = st.floats(0, 1e9)


@given(st.lists(st.tuples(st.sampled_from("ab"), costs), max_size=30))
def test_a_correction_stays_within_its_bounds(history: list[tuple[str, float]]) -> None:
    weights = WeightEstimates()
    for kind, cost in history:
        weights.observe(kind, weight=1.0, cost=cost)
    for kind in "abc":
        assert LEAST_FACTOR <= weights.factor(kind) <= MOST_FACTOR
    assert weights.factor("c") == 1.0


def test_a_type_that_costs_twice_as_much_weighs_more() -> None:
    weights = WeightEstimates()
    for _ in range(50):
        weights.observe("plain", weight=1.0, cost=10)
        weights.observe("dear", weight=1.0, cost=20)
    assert weights.factor("dear") == pytest.approx(1.3, abs=0.1)
    assert weights.factor("dear") / weights.factor("plain") == pytest.approx(2)


def test_no_more_types_are_remembered_than_that() -> None:
    weights = WeightEstimates()
    for number in range(MAX_TYPES + 10):
        weights.observe(f"type {number}", weight=1.0, cost=number + 1)
    assert weights.factor("type 0") == 1.0
    assert weights.factor(f"type {MAX_TYPES + 9}") != 1.0


def test_the_characters_of_a_prompt_are_counted_wherever_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "four"}]}]
    assert prompt_chars_of("abc", messages, None, 7) == 3 + len("user") + len("text") + 4
