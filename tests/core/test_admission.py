"""Queue limits: who may wait, and what a refusal says."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.admission import (
    Admitted,
    QueueLimit,
    QueueLimits,
    Rejected,
    admit,
    admit_scheduled,
    refuse_by_size,
)
from headgate.core.retention import StoreSize
from headgate.errors import InvalidSettingError

LIMITS = st.none() | st.integers(0, 20)


def test_the_limits_are_a_thousand_in_all_and_a_hundred_an_agent() -> None:
    assert QueueLimits() == QueueLimits(
        max_queue=1000, max_per_agent=100, queue_share=8, max_scheduled=10_000
    )


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
        limit=QueueLimit.AGENT,
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


PROJECTS = [
    # max_queue  share  queued  of the project  answer
    (1000,       8,     0,      0,              1),
    (1000,       8,     888,    888,            889),  # alone: 888 < 8 * 112
    (1000,       8,     889,    889,            'project queue full for "p" (889/888)'),
    (1000,       8,     889,    0,              890),
    (1000,       8,     999,    0,              1000),  # the last place is for who has none
    (1000,       8,     999,    7,              1000),
    (1000,       8,     999,    8,              'project queue full for "p" (8/8)'),
    (1000,       8,     1000,   0,              "global queue full (1000/1000)"),
    (1000,       8,     1200,   0,              "global queue full (1200/1000)"),
    (1000,       1,     499,    499,            500),
    (1000,       1,     500,    500,            'project queue full for "p" (500/500)'),
    (10,         1.1,   0,      10,             1),  # 11 places, although 1.1 * 10 is above 11
    (10,         1.1,   0,      11,             'project queue full for "p" (11/11)'),
    (None,       1,     10**6,  10**6,          10**6 + 1),
]  # fmt: skip


@pytest.mark.parametrize(("max_queue", "share", "queued", "of_project", "answer"), PROJECTS)
def test_a_project_may_queue_while_it_has_fewer_waiting_than_so_many_times_the_free_places(
    max_queue: int | None, share: float, queued: int, of_project: int, answer: int | str
) -> None:
    limits = QueueLimits(max_queue=max_queue, max_per_agent=None, queue_share=share)
    decision = admit(limits, queued=queued, queued_for_project=of_project, project_id="p")
    if isinstance(decision, Admitted):
        assert decision.position == answer
    else:
        assert decision.message == f"rejected: {answer}"


ORDER = [
    # full: all, project, agent   asked first
    (True,        True,    True,  QueueLimit.GLOBAL),
    (True,        False,   True,  QueueLimit.GLOBAL),
    (False,       True,    True,  QueueLimit.PROJECT),
    (False,       False,   True,  QueueLimit.AGENT),
]  # fmt: skip


@pytest.mark.parametrize(("is_all", "is_project", "is_agent", "limit"), ORDER)
def test_the_global_limit_is_asked_first_then_the_project_then_the_agent(
    is_all: bool, is_project: bool, is_agent: bool, limit: QueueLimit
) -> None:
    decision = admit(
        QueueLimits(max_queue=10, max_per_agent=5),
        queued=10 if is_all else 9,
        queued_for_project=8 if is_project else 0,
        queued_for_agent=5 if is_agent else 0,
        project_id="p",
        agent_id="a",
    )
    assert isinstance(decision, Rejected)
    assert decision.limit is limit
    assert (decision.project_id, decision.agent_id, decision.queue_share) == ("p", "a", 8)
    assert decision.max_per_project == (0 if is_all else 8)
    assert "send it again" in decision.advice


@pytest.mark.parametrize("name", ["max_queue", "max_per_agent", "queue_share"])
def test_a_negative_limit_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidSettingError, match=name):
        QueueLimits(**{name: -1})


@pytest.mark.parametrize("share", [0, 0.99, 1_000_001, float("nan"), float("inf")])
def test_a_share_below_one_is_refused_with_the_range(share: float) -> None:
    with pytest.raises(InvalidSettingError, match="queue_share: must be a number from 1 to 1,000"):
        QueueLimits(queue_share=share)


class Queue:
    """What waits, by project; each asks until it is refused."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.waiting: Counter[str] = Counter()

    def submit(self, project_id: str) -> bool:
        decision = admit(
            self.limits,
            queued=self.waiting.total(),
            queued_for_project=self.waiting[project_id],
            project_id=project_id,
        )
        self.waiting[project_id] += isinstance(decision, Admitted)
        return isinstance(decision, Admitted)

    def flood(self, projects: str) -> None:
        """Let projects submit in turn until all are refused."""
        while sum(self.submit(project_id) for project_id in projects):
            pass


FLOODS = [
    # projects  share  each gets
    ("a",        8,    {889}),
    ("ab",       8,    {470, 471}),
    ("abcd",     8,    {242, 243}),
    ("a",        1,    {500}),
    ("ab",       1,    {333, 334}),
]  # fmt: skip


@pytest.mark.parametrize(("projects", "share", "each"), FLOODS)
def test_projects_that_flood_the_queue_share_it_and_leave_places(
    projects: str, share: float, each: set[int]
) -> None:
    queue = Queue(QueueLimits(max_queue=1000, max_per_agent=None, queue_share=share))
    queue.flood(projects)
    assert set(queue.waiting.values()) <= each
    assert queue.submit("late")


@given(
    st.integers(1, 60),
    st.sampled_from([1, 1.5, 8, 100]),
    st.lists(st.tuples(st.sampled_from("++-"), st.sampled_from("aaabc")), max_size=200),
)
@settings(deadline=None)
def test_whoever_has_nothing_waiting_gets_a_free_place_and_nobody_passes_its_bound(
    max_queue: int, share: float, steps: list[tuple[str, str]]
) -> None:
    queue = Queue(QueueLimits(max_queue=max_queue, max_per_agent=None, queue_share=share))
    for sign, project_id in steps:
        waiting, free = queue.waiting[project_id], max_queue - queue.waiting.total()
        if sign == "-":
            queue.waiting[project_id] -= min(1, waiting)
        elif queue.submit(project_id):
            assert free > 0
            assert waiting < share * free
        else:
            assert free == 0 or waiting >= share * free > 0
            assert waiting or not free
        assert queue.waiting.total() <= max_queue


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


SCHEDULED = [
    # most  share  scheduled  of the project  answer
    (10,    8,     0,         0,              "admitted"),
    (10,    8,     8,         8,              "admitted"),  # alone: 8 < 8 * 2
    (10,    8,     9,         9,              QueueLimit.PROJECT_SCHEDULED),
    (10,    8,     9,         0,              "admitted"),  # the last place is for who has none
    (10,    8,     10,        0,              QueueLimit.SCHEDULED),
    (None,  8,     10**6,     10**6,          "admitted"),
]  # fmt: skip


@pytest.mark.parametrize(("most", "share", "scheduled", "of_project", "answer"), SCHEDULED)
def test_a_task_for_later_waits_unless_too_many_do(
    most: int | None, share: float, scheduled: int, of_project: int, answer: str | QueueLimit
) -> None:
    # However full the queue is: a task for later takes no place of it.
    limits = QueueLimits(max_queue=0, max_per_agent=0, max_scheduled=most, queue_share=share)
    decision = admit_scheduled(
        limits,
        queued=scheduled,
        scheduled=scheduled,
        scheduled_for_project=of_project,
        project_id="p",
        agent_id="a",
    )
    found = decision.limit if isinstance(decision, Rejected) else "admitted"
    assert found == answer


MIB = 2**20
SIZES = [
    # free  reserve  used  max   adds  ended  live of p  answer
    (100,   10,      50,   None, 1,    0,     0,         None),
    (11,    10,      50,   None, 1,    0,     0,         None),
    (11,    10,      50,   None, 2,    0,     0,         QueueLimit.STORE),
    (10,    10,      50,   None, 1,    0,     0,         QueueLimit.STORE),
    (100,   10,      50,   51,   1,    0,     0,         None),
    (100,   10,      50,   51,   2,    0,     0,         QueueLimit.STORE),
    (20,    10,      50,   None, 1,    0,     79,        None),  # 8 times the ten that are left
    (20,    10,      50,   None, 1,    0,     80,        QueueLimit.PROJECT_STORE),
    (20,    10,      50,   None, 1,    5,     80,        None),  # what has ended can go
    (None,  0,       50,   None, 1,    0,     10**6,     None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("free", "reserve", "used", "most", "adds", "ended", "live", "answer"), SIZES
)
def test_a_task_is_stored_if_it_leaves_the_reserve_and_room_for_others(
    free: int | None,
    reserve: int,
    used: int,
    most: int | None,
    adds: int,
    ended: int,
    live: int,
    answer: QueueLimit | None,
) -> None:
    size = StoreSize(
        used_bytes=used * MIB,
        free_bytes=None if free is None else free * MIB,
        reserve_bytes=reserve * MIB,
        max_bytes=None if most is None else most * MIB,
    )
    refused = refuse_by_size(
        QueueLimits(),
        size,
        adds_bytes=adds * MIB,
        ended_bytes=ended * MIB,
        live_bytes_of_project=live * MIB,
        project_id="p",
    )
    assert (None if refused is None else refused.limit) == answer
    if refused is not None:
        assert refused.code == ("store_full" if answer is QueueLimit.STORE else "queue_full")
        assert refused.advice


@given(st.lists(st.integers(0, 4), max_size=200))
def test_whoever_floods_what_is_for_later_leaves_a_place_to_the_others(order: list[int]) -> None:
    limits = QueueLimits(max_scheduled=20)
    counts: Counter[int] = Counter()
    for project in [*[0] * 100, *order]:
        decision = admit_scheduled(
            limits,
            queued=0,
            scheduled=counts.total(),
            scheduled_for_project=counts[project],
            project_id=str(project),
        )
        is_first = not counts[project] and counts.total() < 20
        assert isinstance(decision, Admitted) or not is_first
        counts[project] += isinstance(decision, Admitted)
    assert counts.total() <= 20
    assert counts[0] == 18
