"""Queue limits: who may wait, and what a refusal says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.admission import Admitted, QueueLimits, Rejected, admit
from headgate.errors import InvalidSettingError

LIMITS = st.none() | st.integers(0, 20)


def test_the_limits_are_a_thousand_in_all_and_a_hundred_an_agent() -> None:
    assert QueueLimits() == QueueLimits(max_queue=1000, max_per_agent=100)


@pytest.mark.parametrize(
    ("max_queue", "max_per_agent", "queued", "for_agent", "answer"),
    [
        (10, 5, 0, 0, 1),
        (10, 5, 9, 4, 10),
        (10, 5, 10, 0, "rejected: global queue full (10/10)"),
        (10, 5, 12, 0, "rejected: global queue full (12/10)"),  # the limit was lowered meanwhile
        (10, 5, 9, 5, 'rejected: agent queue full for "a" (5/5)'),
        (10, 5, 10, 5, "rejected: global queue full (10/10)"),  # the global limit is asked first
        (None, 5, 10**6, 4, 10**6 + 1),
        (None, 5, 10**6, 5, 'rejected: agent queue full for "a" (5/5)'),
        (10, None, 9, 9, 10),
        (None, None, 10**6, 10**6, 10**6 + 1),
        (0, 5, 0, 0, "rejected: global queue full (0/0)"),
        (10, 0, 0, 0, 'rejected: agent queue full for "a" (0/0)'),
    ],
)
def test_a_task_waits_unless_a_limit_is_reached(
    max_queue: int | None,
    max_per_agent: int | None,
    queued: int,
    for_agent: int,
    answer: int | str,
) -> None:
    limits = QueueLimits(max_queue=max_queue, max_per_agent=max_per_agent)
    decision = admit(limits, queued=queued, queued_for_agent=for_agent, agent_id="a")
    if isinstance(decision, Admitted):
        assert decision.position == answer
    else:
        assert decision.message == answer


def test_a_refusal_carries_what_the_client_needs() -> None:
    limits = QueueLimits(max_queue=10, max_per_agent=5)
    assert admit(limits, queued=7, queued_for_agent=5, agent_id="a") == Rejected(
        code="queue_full",
        message='rejected: agent queue full for "a" (5/5)',
        retryable=True,
        agent_id="a",
        queued=5,
        max_queue=10,
        max_per_agent=5,
    )


def test_an_open_task_has_only_the_global_limit() -> None:
    limits = QueueLimits(max_queue=10, max_per_agent=0)
    assert admit(limits, queued=3, queued_for_agent=3) == Admitted(position=4)
    assert isinstance(admit(limits, queued=10), Rejected)


@pytest.mark.parametrize("name", ["max_queue", "max_per_agent"])
def test_a_negative_limit_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidSettingError, match=name):
        QueueLimits(**{name: -1})


@given(LIMITS, LIMITS, st.lists(st.sampled_from("abc"), max_size=60))
@settings(deadline=None)
def test_no_sequence_of_submissions_passes_a_limit(
    max_queue: int | None, max_per_agent: int | None, submissions: list[str]
) -> None:
    limits = QueueLimits(max_queue=max_queue, max_per_agent=max_per_agent)
    waiting: list[str] = []
    for agent_id in submissions:
        decision = admit(
            limits,
            queued=len(waiting),
            queued_for_agent=waiting.count(agent_id),
            agent_id=agent_id,
        )
        if isinstance(decision, Admitted):
            waiting.append(agent_id)
            assert decision.position == len(waiting)
    assert max_queue is None or len(waiting) <= max_queue
    assert max_per_agent is None or all(waiting.count(agent) <= max_per_agent for agent in "abc")
