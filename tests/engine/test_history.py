"""The figures over time: what is summed, for how long it is kept, and where there is nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.task import Progress, Task, TaskRecord, TaskStatus
from headgate.engine.events import EventFeed
from headgate.engine.history import (
    LONG_STEPS,
    STEP_SECONDS,
    STEPS,
    WAIT_BOUNDS,
    History,
    Present,
    Step,
    summed,
)

BEGINNING = 1_000_000.0


class Watched:
    """A history on a clock of the test, behind a feed."""

    def __init__(self) -> None:
        self.now = BEGINNING
        self.present: Present | None = Present(queued=3, inflight=2)
        self.history = History(lambda: self.now, lambda: self.present)
        self.feed = EventFeed(lambda: self.now)
        self.feed.open(1)
        self.feed.load(())
        self.feed.subscribe(events=self.history)
        self._tasks = 0

    def step(self) -> None:
        self.now += STEP_SECONDS
        self.history.run_once()

    def run(self, *, waited: float = 0.0, end: TaskStatus | None = None, cost: int = 0) -> None:
        """Have a task start after a wait, and end."""
        self._tasks += 1
        task = Task(
            id=f"t{self._tasks}",
            project_id="p",
            status=TaskStatus.RUNNING,
            created_at=self.now - waited,
        )
        progress = Progress(attempt=1, started_at=self.now)
        self.feed.observe((TaskRecord(task=task, progress=progress),))
        if end is not None:
            ended = Task(id=task.id, project_id="p", status=end, created_at=task.created_at)
            progress = Progress(attempt=1, completed_at=self.now, used_micro_usd=cost)
            self.feed.observe((TaskRecord(task=ended, progress=progress),))


def test_a_step_has_what_happened_in_it_and_what_there_was_at_its_end() -> None:
    watched = Watched()
    watched.run(waited=1.0, end=TaskStatus.DONE, cost=70)
    watched.run(waited=3.0, end=TaskStatus.FAILED, cost=5)
    watched.run(waited=2.0)
    watched.step()
    (step,) = watched.history.hour
    assert (step.at, step.seconds) == (BEGINNING + STEP_SECONDS, STEP_SECONDS)
    assert (step.queued, step.inflight) == (3, 2)
    assert (step.started, step.completed, step.failed) == (3, 1, 1)
    assert step.spent_micro_usd == 75
    assert step.wait_average_seconds == pytest.approx(2.0)
    assert step.wait_p95_seconds == pytest.approx(3.0, rel=0.2)


def test_a_step_without_a_start_has_no_wait() -> None:
    watched = Watched()
    watched.step()
    assert watched.history.hour[0].wait_average_seconds is None
    assert watched.history.hour[0].wait_p95_seconds is None


def test_a_node_that_does_not_dispatch_leaves_its_steps_out() -> None:
    watched = Watched()
    watched.step()
    watched.present = None
    watched.run(end=TaskStatus.DONE)
    watched.step()
    watched.present = Present(queued=0, inflight=0)
    watched.step()
    assert [step.completed for step in watched.history.hour] == [0, 0]
    assert watched.history.hour[1].at - watched.history.hour[0].at == 2 * STEP_SECONDS


def test_an_hour_is_kept_in_small_steps_and_a_day_in_minutes() -> None:
    watched = Watched()
    for _ in range(STEPS + 24):
        watched.run(end=TaskStatus.DONE)
        watched.step()
    assert len(watched.history.hour) == STEPS
    assert len(watched.history.day) == (STEPS + 24) // 12
    assert {step.completed for step in watched.history.day} == {12}
    assert watched.history.day.maxlen == LONG_STEPS


def test_the_last_minutes_are_one_sum() -> None:
    watched = Watched()
    for _ in range(100):
        watched.run(end=TaskStatus.DONE)
        watched.step()
    lately = watched.history.recent(60.0)
    assert lately is not None
    assert (lately.completed, lately.seconds) == (12, 60.0)
    assert Watched().history.recent(60.0) is None


@pytest.mark.parametrize("by_seconds", [-3_600.0, -86_400.0, -1.0, 3_600.0])
def test_a_clock_that_is_set_changes_neither_the_sums_nor_the_order(by_seconds: float) -> None:
    watched = Watched()
    for _ in range(24):
        watched.run(end=TaskStatus.DONE)
        watched.step()
    watched.now += by_seconds
    for _ in range(12):
        watched.run(end=TaskStatus.DONE)
        watched.step()
    steps = list(watched.history.hour)
    assert [step.at for step in steps] == sorted(step.at for step in steps)
    assert all(step.seconds <= STEP_SECONDS for step in steps)
    lately = watched.history.recent(60.0)
    assert lately is not None
    assert lately.seconds == pytest.approx(60.0, abs=STEP_SECONDS)
    assert lately.completed == pytest.approx(12, abs=1)


@given(st.lists(st.floats(0, 600_000), min_size=1, max_size=60))
def test_the_long_tail_is_right_to_a_fifth(waits: list[float]) -> None:
    watched = Watched()
    for waited in waits:
        watched.run(waited=waited)
    watched.step()
    found = watched.history.hour[0].wait_p95_seconds
    exact = sorted(waits)[max(0, -(-95 * len(waits) // 100) - 1)]
    assert found is not None
    assert exact <= found * 1.000001
    assert found <= max(WAIT_BOUNDS[0], exact * 1.2001)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_a_sum_of_steps_has_everything_of_them(counts: list[tuple[int, int]]) -> None:
    steps = [Step(at=float(n), completed=a, failed=b) for n, (a, b) in enumerate(counts)]
    whole = summed(steps)
    if not steps:
        assert whole is None
        return
    assert whole is not None
    assert (whole.completed, whole.failed) == tuple(map(sum, zip(*counts, strict=True)))
    assert whole.seconds == STEP_SECONDS * len(steps)
