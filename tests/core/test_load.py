from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.load import (
    ADAPTIVE_WINDOW,
    OPTIMIZE_FOR,
    AdaptiveAlpha,
    load_score,
    resolve_alpha,
)
from headgate.errors import InvalidSettingError

SCORES = [
    # alpha   Q, max Q     D, max D   load
    (0.25,    (10, 10),    (4, 4),    1.0),
    (0.25,    (5, 10),     (4, 4),    0.875),
    (0.25,    (10, 10),    (1, 4),    0.4375),
    (0.0,     (10, 10),    (1, 4),    0.25),
    (0.5,     (10, 10),    (1, 4),    0.625),
    (0.5,     (2.5, 10),   (0, 0),    0.125),
    (0.25,    (0, 0),      (3, 4),    0.5625),
    (0.25,    (0, 0),      (0, 0),    0.0),
]  # fmt: skip


@pytest.mark.parametrize(("alpha", "depths", "waits", "load"), SCORES)
def test_load_is_the_weighted_sum_of_relative_depth_and_relative_wait(
    alpha: float, depths: tuple[float, float], waits: tuple[int, int], load: float
) -> None:
    score = load_score(
        alpha=alpha,
        queue_depth=depths[0],
        max_queue_depth=depths[1],
        oldest_wait=waits[0],
        max_oldest_wait=waits[1],
    )
    assert score == load


@settings(deadline=None)
@given(
    alpha=st.floats(0, 0.5),
    depths=st.tuples(st.integers(0, 1000), st.integers(1, 1000)).map(sorted),
    waits=st.tuples(st.integers(0, 1000), st.integers(1, 1000)).map(sorted),
    factor=st.sampled_from([2, 8, 1024]),
)
def test_load_is_relative_and_between_zero_and_one(
    alpha: float, depths: list[int], waits: list[int], factor: int
) -> None:
    scores = [
        load_score(
            alpha=alpha,
            queue_depth=depths[0] * scale,
            max_queue_depth=depths[1] * scale,
            oldest_wait=waits[0] * scale,
            max_oldest_wait=waits[1] * scale,
        )
        for scale in (1, factor)
    ]
    assert scores[0] == scores[1]
    assert 0 <= scores[0] <= 1


def test_presets_are_latency_balanced_and_throughput() -> None:
    assert OPTIMIZE_FOR == {"latency": 0.0, "balanced": 0.25, "throughput": 0.5}


@pytest.mark.parametrize(("name", "alpha"), OPTIMIZE_FOR.items())
def test_a_preset_resolves_to_its_alpha(name: str, alpha: float) -> None:
    assert resolve_alpha(optimize_for=name) == alpha


def test_without_a_choice_alpha_is_balanced() -> None:
    assert resolve_alpha() == 0.25


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5])
def test_an_alpha_in_its_range_is_taken(alpha: float) -> None:
    assert resolve_alpha(alpha=alpha) == alpha


@pytest.mark.parametrize("alpha", [-0.001, 0.501, 1.0, float("nan"), float("inf")])
def test_an_alpha_outside_its_range_is_refused(alpha: float) -> None:
    with pytest.raises(InvalidSettingError, match=r"alpha: must be a number from 0 to 0\.5, not "):
        resolve_alpha(alpha=alpha)


def test_an_unknown_preset_is_refused_with_the_choices() -> None:
    with pytest.raises(InvalidSettingError, match="one of latency, balanced, throughput") as caught:
        resolve_alpha(optimize_for="speed")
    assert caught.value.field == "optimize_for"


def test_alpha_and_a_preset_together_are_refused() -> None:
    with pytest.raises(InvalidSettingError, match="either alpha or optimize_for"):
        resolve_alpha(alpha=0.25, optimize_for="balanced")


def observed(
    start: AdaptiveAlpha, *grants: tuple[float, float], agents: str = "ab"
) -> AdaptiveAlpha:
    """Observe grants to these agents in turn."""
    for agent_id, (wait_ticks, queue_depth) in zip(cycle(agents), grants, strict=False):
        start = start.observe(agent_id=agent_id, wait_ticks=wait_ticks, queue_depth=queue_depth)
    return start


EVEN = [(3.0, 10.0)] * ADAPTIVE_WINDOW
UNEVEN = [(0.0, 10.0), (9.0, 10.0)] * (ADAPTIVE_WINDOW // 2)
GROWING = [(3.0, 10.0 * 2**n) for n in range(ADAPTIVE_WINDOW)]
UNEVEN_AND_GROWING = [(wait, depth) for (wait, _), (_, depth) in zip(UNEVEN, GROWING, strict=True)]

ADJUSTMENTS = [
    # what was observed                        grants               alpha
    ("nothing yet",                            [],                  0.25),
    ("less than a window",                     UNEVEN[:-1],         0.25),
    ("even waits, steady depth",               EVEN,                0.25),
    ("uneven waits",                           UNEVEN,              0.24),
    ("a growing depth",                        GROWING,             0.26),
    ("uneven waits go before a growing depth", UNEVEN_AND_GROWING,  0.24),
    ("no waits at all",                        [(0.0, 10.0)] * 10,  0.25),
    ("a depth that grew from nothing",         [(3.0, 0.0)] * 5 + [(3.0, 1.0)] * 5, 0.26),
    ("empty queues",                           [(3.0, 0.0)] * 10,   0.25),
    ("a depth that shrinks",                   GROWING[::-1],       0.25),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "grants", "alpha"), ADJUSTMENTS, ids=[row[0] for row in ADJUSTMENTS]
)
def test_alpha_follows_what_was_observed(
    what: str, grants: list[tuple[float, float]], alpha: float
) -> None:
    assert observed(AdaptiveAlpha(), *grants).alpha == alpha


UNEVEN_AGENTS = [
    # whose grants                                      agents         alpha
    ("one agent that queues many tasks at once",        "a",           0.25),
    ("one agent that waits, another that never does",   "ab",          0.24),
    ("each agent waits for half of its tasks",          "aabb",        0.25),
    ("ten agents",                                      "abcdefghij",  0.24),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "agents", "alpha"), UNEVEN_AGENTS, ids=[row[0] for row in UNEVEN_AGENTS]
)
def test_waits_are_uneven_where_agents_differ_not_the_tasks_of_one(
    rule: str, agents: str, alpha: float
) -> None:
    assert observed(AdaptiveAlpha(), *UNEVEN, agents=agents).alpha == alpha


def test_uneven_waits_bring_alpha_down_to_zero_and_no_further() -> None:
    assert observed(AdaptiveAlpha(), *UNEVEN * 10).alpha == 0.0


def test_a_growing_depth_brings_alpha_up_to_one_half_and_no_further() -> None:
    grants = [(3.0, 1.5**n) for n in range(100)]
    assert observed(AdaptiveAlpha(), *grants).alpha == 0.5


def test_observing_leaves_the_earlier_state_as_it_was() -> None:
    start = AdaptiveAlpha()
    observed(start, *UNEVEN)
    assert start == AdaptiveAlpha()


def test_an_adaptive_alpha_cannot_start_outside_its_range() -> None:
    with pytest.raises(InvalidSettingError, match="alpha"):
        AdaptiveAlpha(alpha=0.6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=100))
def test_alpha_stays_in_its_range_moves_by_one_step_and_remembers_one_window(
    grants: list[tuple[int, int]],
) -> None:
    state = AdaptiveAlpha()
    for wait_ticks, queue_depth in grants:
        agent_id = str(queue_depth % 3)
        after = state.observe(agent_id=agent_id, wait_ticks=wait_ticks, queue_depth=queue_depth)
        assert 0.0 <= after.alpha <= 0.5
        assert round(abs(after.alpha - state.alpha), 6) in {0.0, 0.01}
        assert len(after.waits) == len(after.queue_depths) <= ADAPTIVE_WINDOW
        state = after
