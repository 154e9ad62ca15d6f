"""What the state knows of workers: who has room, since when nobody has, whose time is over."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from core.dispatch_model import START, ended, queued, state_of, taken
from headgate.core.dispatch_state import CANCEL_GRACE_SECONDS, DEADLINE_GRACE_SECONDS, DispatchState
from headgate.core.gates import GateClosure
from headgate.core.snapshot import Agent, LanePolicy
from headgate.core.task import Progress, TaskStatus, Terms
from headgate.core.why import reasons
from headgate.errors import utc_time

PULL = frozenset({"pull"})
FLEET = (Agent(id="a", capacity=9), Agent(id="b", capacity=9))


def pull_state(*task_ids: str, places: int = 1, agents: tuple[Agent, ...] = FLEET) -> DispatchState:
    """Return a dispatch state on which these tasks of agent a wait for a worker."""
    records = [queued(task_id, agent_id="a", target="pull") for task_id in task_ids]
    return state_of(
        *records, pull_targets=PULL, max_inflight=99, agents=agents, max_lag_tokens=500,
        places=places,
    )  # fmt: skip


def offer(
    dispatch_state: DispatchState, places: int, *, agent_id: str = "a", worker: str = "worker-1"
) -> None:
    dispatch_state.workers.set_node(worker, places, agent_id=agent_id, now=START)


def planned(dispatch_state: DispatchState, now: float = START) -> list[tuple[str, str]]:
    return [(line.task.id, line.node_id) for line in dispatch_state.plan(now, most=99)]


def test_tasks_without_a_worker_are_parked_and_not_looked_at() -> None:
    dispatch_state = pull_state(*(f"t{n:05}" for n in range(5_000)))
    assert (dispatch_state.index.ready("x"), dispatch_state.index.offers.pulled) == (0, 0)
    assert planned(dispatch_state) == []
    offer(dispatch_state, 2)
    assert planned(dispatch_state) == [("t00000", "worker-1"), ("t00001", "worker-1")]
    assert dispatch_state.index.offers.pulled == 0


def test_a_worker_of_one_agent_takes_nothing_of_another() -> None:
    dispatch_state = pull_state("t1")
    offer(dispatch_state, 5, agent_id="b")
    assert planned(dispatch_state) == []
    assert [reason.message for reason in reasons(dispatch_state, "t1", START)] == [
        "no worker of agent a is connected"
    ]


def test_why_says_since_when_there_is_no_free_worker() -> None:
    dispatch_state = pull_state("t1", "t2")
    offer(dispatch_state, 1)
    planned(dispatch_state, START + 3)
    (reason,) = reasons(dispatch_state, "t2", START + 9)
    assert (
        reason.message
        == f"all 1 permits of agent a's workers are taken, since {utc_time(START + 3)}"
    )
    assert reason.held_by == ("t1",)
    dispatch_state.workers.drop_node("worker-1", START + 20)
    (reason,) = reasons(dispatch_state, "t2", START + 30)
    assert reason.message == f"no worker of agent a is connected, since {utc_time(START + 3)}"


def test_a_full_service_does_not_hold_up_what_workers_could_take() -> None:
    dispatch_state = pull_state("p1", places=1)
    for task_id in ("t1", "t2"):
        dispatch_state.observe(queued(task_id, agent_id="b", priority=-1), START)
    assert planned(dispatch_state) == [("t1", "n1")]
    offer(dispatch_state, 1)
    assert planned(dispatch_state) == [("p1", "worker-1")]
    assert dispatch_state.present == ["x"]


@pytest.mark.parametrize("policy", LanePolicy)
def test_an_open_task_that_nobody_can_pull_does_not_stand_before_others(policy: LanePolicy) -> None:
    dispatch_state = state_of(
        queued("t1", target="pull", priority=-5),
        queued("t2"),
        pull_targets=PULL,
        agents=FLEET,
        lane_policy=policy,
    )
    assert planned(dispatch_state) == [("t2", "n1")]
    offer(dispatch_state, 1, agent_id="b")
    assert planned(dispatch_state) == [("t1", "worker-1")]


def test_an_agent_without_room_pulls_nothing_though_its_worker_has_some() -> None:
    dispatch_state = pull_state("t1", "t2", agents=(Agent(id="a", capacity=1),))
    offer(dispatch_state, 5)
    assert planned(dispatch_state) == [("t1", "worker-1")]
    (reason,) = reasons(dispatch_state, "t2", START)
    assert reason.message == "agent a has 1 of 1 permits in use"


def test_a_pause_of_an_agent_holds_what_its_workers_pull_and_nothing_else() -> None:
    dispatch_state = pull_state("t1", places=5)
    offer(dispatch_state, 5)
    dispatch_state.close(GateClosure(kind="agent", name="a", until=START + 60), START)
    dispatch_state.observe(queued("t2", agent_id="a"), START)
    assert planned(dispatch_state) == [("t2", "n1")]
    dispatch_state.fall_due(START + 60)
    assert planned(dispatch_state, START + 60) == [("t1", "worker-1")]


def test_the_place_of_an_attempt_is_free_again_when_it_is_over() -> None:
    dispatch_state = pull_state("t1", "t2")
    offer(dispatch_state, 1)
    (line,) = dispatch_state.plan(START, most=9)
    record = taken(queued("t1", agent_id="a", target="pull"), line, starts=False)
    dispatch_state.observe(ended(record, TaskStatus.DONE), START + 1)
    assert planned(dispatch_state, START + 1) == [("t2", "worker-1")]


def deadline_state(deadline: float | None) -> DispatchState:
    record = queued("t1", agent_id="a", target="pull", deadline=deadline)
    dispatch_state = state_of(record, pull_targets=PULL, agents=FLEET)
    offer(dispatch_state, 1)
    dispatch_state.plan(START, most=9)
    return dispatch_state


def overdue(dispatch_state: DispatchState, now: float) -> list[str]:
    return [attempt.task.id for attempt in dispatch_state.workers.take_overdue(now)]


def test_an_attempt_is_overdue_a_grace_after_its_deadline_until_it_is_over() -> None:
    dispatch_state = deadline_state(START + 10)
    ends_at = START + 10 + DEADLINE_GRACE_SECONDS
    assert dispatch_state.next_at() == ends_at
    assert overdue(dispatch_state, ends_at - 0.1) == []
    assert overdue(dispatch_state, ends_at) == ["t1"]
    assert overdue(dispatch_state, ends_at) == []
    assert overdue(dispatch_state, ends_at + 1) == ["t1"]


@pytest.mark.parametrize(
    ("deadline", "ends_after"),
    [
        (None, CANCEL_GRACE_SECONDS),
        (START + 3, 3 + DEADLINE_GRACE_SECONDS),
        (START + 900, CANCEL_GRACE_SECONDS),
    ],
)
def test_a_cancelled_attempt_is_overdue_after_a_grace(
    deadline: float | None, ends_after: float
) -> None:
    dispatch_state = deadline_state(deadline)
    attempt = dispatch_state.in_flight.get("t1")
    assert attempt is not None
    running = ended(queued("t1", agent_id="a", target="pull"), TaskStatus.RUNNING)
    progress = Progress(attempt=1, cancel_requested=True, node_id="worker-1")
    for later in (0.0, 1.0):
        dispatch_state.observe(
            type(running)(task=running.task, progress=progress, agent_id="a"), START + later
        )
    assert dispatch_state.workers.next_at() == START + ends_after


def timed_state(seconds: float, deadline: float | None = None) -> DispatchState:
    record = queued("t1", agent_id="a", target="pull", deadline=deadline)
    timed = msgspec.structs.replace(record, terms=Terms(attempt_seconds=seconds))
    dispatch_state = state_of(timed, pull_targets=PULL, agents=FLEET)
    offer(dispatch_state, 1)
    dispatch_state.plan(START, most=9)
    return dispatch_state


def seen(dispatch_state: DispatchState, status: TaskStatus, now: float, **progress: Any) -> None:
    record = ended(queued("t1", agent_id="a", target="pull"), status)
    timed = Progress(attempt=1, node_id="worker-1", **progress)
    dispatch_state.observe(type(record)(task=record.task, progress=timed, agent_id="a"), now)


def test_an_attempt_is_overdue_a_grace_after_its_own_time() -> None:
    for deadline, ends_after in ((None, 10.0), (START + 900, 10.0), (START + 4, 4.0)):
        dispatch_state = timed_state(10.0, deadline)
        assert dispatch_state.next_at() == START + ends_after + DEADLINE_GRACE_SECONDS


def test_the_time_of_an_attempt_counts_from_its_start_at_the_worker() -> None:
    dispatch_state = timed_state(10.0)
    assert overdue(dispatch_state, START + 15) == ["t1"]
    seen(dispatch_state, TaskStatus.ASSIGNED, START + 15)
    assert dispatch_state.workers.next_at() == START + 25 + DEADLINE_GRACE_SECONDS
    seen(dispatch_state, TaskStatus.RUNNING, START + 20, started_at=START + 18)
    assert dispatch_state.workers.next_at() == START + 28 + DEADLINE_GRACE_SECONDS


def test_an_older_start_does_not_count_for_an_attempt_that_has_not_begun() -> None:
    dispatch_state = timed_state(10.0)
    seen(dispatch_state, TaskStatus.ASSIGNED, START + 1, started_at=START - 100)
    assert dispatch_state.workers.next_at() == START + 11 + DEADLINE_GRACE_SECONDS


def test_a_cancel_is_not_put_off_by_the_time_of_an_attempt() -> None:
    dispatch_state = timed_state(900.0)
    for later in (0.0, 1.0, 5.0):
        seen(
            dispatch_state,
            TaskStatus.RUNNING,
            START + later,
            started_at=START,
            cancel_requested=True,
        )
    assert dispatch_state.workers.next_at() == START + CANCEL_GRACE_SECONDS


def test_attempts_on_nodes_are_not_timed_here() -> None:
    dispatch_state = state_of(queued("t1", deadline=START + 5), pull_targets=PULL)
    dispatch_state.plan(START, most=9)
    assert dispatch_state.workers.next_at() is None


def test_news_of_workers_that_have_not_changed_cost_no_count_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatch_state = state_of()
    counted: list[str] = []
    refresh = dispatch_state.workers.refresh

    def counting(agent_id: str, now: float) -> None:
        counted.append(agent_id)
        refresh(agent_id, now)

    monkeypatch.setattr(dispatch_state.workers, "refresh", counting)
    for _ in range(3):
        for number in range(5):
            dispatch_state.workers.set_node(f"worker-{number}", 2, agent_id="a", now=START)
    assert len(counted) == 5
    dispatch_state.workers.set_node("worker-0", 3, agent_id="a", now=START)
    assert dispatch_state.in_flight.free_at_workers("a") == 11
    assert len(counted) == 6
