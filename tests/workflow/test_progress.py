"""The state of a run by itself: what is ready, in which order, and how little it takes."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from headgate.core.task import OnParentFailure
from headgate.workflow.progress import StepRunState, WorkflowProgress
from headgate.workflow.workflow import ListItems, Step, StepItems
from workflow.fake_backend import a_step, a_workflow

RUN = OnParentFailure.RUN


def progress_of(*steps: Step, counts: dict[str, int] | None = None) -> WorkflowProgress:
    runs: dict[str, range] = {}
    start = 0
    for step in steps:
        count = (counts or {}).get(step.id, 1)
        runs[step.id] = range(start, start + count)
        start += count
    return WorkflowProgress(a_workflow(*steps), runs)


def taken(progress: WorkflowProgress) -> list[int]:
    numbers = []
    while (number := progress.take()) is not None:
        numbers.append(number)
    return numbers


def test_nothing_is_ready_before_the_start() -> None:
    progress = progress_of(a_step("a"))
    assert progress.take() is None
    progress.start()
    assert progress.take() == 0
    assert progress.take() is None


def test_an_end_counts_once() -> None:
    progress = progress_of(a_step("a"))
    progress.start()
    assert progress.end(0, StepRunState.DONE)
    assert not progress.end(0, StepRunState.FAILED)
    assert (progress.run_state(0), progress.ended) == (StepRunState.DONE, 1)


PARENT = a_step("a")
FAULTS = [
    (StepRunState.DONE, OnParentFailure.FAIL, StepRunState.WAITING, ""),
    (StepRunState.FAILED, OnParentFailure.FAIL, StepRunState.SKIPPED, "'a' failed"),
    (StepRunState.SKIPPED, OnParentFailure.FAIL, StepRunState.SKIPPED, "'a' was skipped"),
    (StepRunState.CONDITION_FALSE, OnParentFailure.FAIL, StepRunState.SKIPPED, "'a' was skipped"),
    (
        StepRunState.OVER_BUDGET,
        OnParentFailure.FAIL,
        StepRunState.PARENT_NOT_RUN,
        "'a' was not run",
    ),
    (
        StepRunState.PARENT_NOT_RUN,
        OnParentFailure.FAIL,
        StepRunState.PARENT_NOT_RUN,
        "'a' was not run",
    ),
    (StepRunState.FAILED, RUN, StepRunState.WAITING, ""),
    (StepRunState.CONDITION_FALSE, RUN, StepRunState.WAITING, ""),
    (StepRunState.OVER_BUDGET, RUN, StepRunState.WAITING, ""),
]


@pytest.mark.parametrize(("end", "policy", "run_state", "why"), FAULTS)
def test_what_becomes_of_a_step_by_the_end_of_its_parent(
    end: StepRunState, policy: OnParentFailure, run_state: StepRunState, why: str
) -> None:
    progress = progress_of(PARENT, a_step("b", depends_on=("a",), on_parent_failure=policy))
    progress.start()
    assert progress.why(1) == "waits for 'a'"
    progress.end(0, end)
    assert (progress.run_state(1), progress.why(1)) == (run_state, why)
    assert progress.take() == (1 if run_state is StepRunState.WAITING else None)


def test_a_parent_of_which_only_some_runs_were_skipped_counts_as_done() -> None:
    items = ListItems(values=())
    progress = progress_of(a_step("a", foreach=items), a_step("b", depends_on=("a",)),
                           counts={"a": 2})  # fmt: skip
    progress.start()
    progress.end(0, StepRunState.CONDITION_FALSE)
    progress.end(1, StepRunState.DONE)
    assert (progress.status("a"), progress.take()) == ("done", 2)


def test_what_was_restored_is_not_given_out() -> None:
    progress = progress_of(a_step("a", foreach=ListItems(values=())), counts={"a": 6})
    progress.restore(1, StepRunState.DONE)
    progress.restore(4, StepRunState.SUBMITTED)
    progress.start()
    assert taken(progress) == [0, 2, 3, 5]
    assert progress.counts("a").left == 5


def test_the_lowest_priority_value_goes_first_then_the_lowest_number() -> None:
    items = ListItems(values=())
    progress = progress_of(
        a_step("late", foreach=items, priority=3),
        a_step("soon", foreach=items, priority=-3),
        a_step("too", priority=-3),
        counts={"late": 2, "soon": 2},
    )
    progress.start()
    assert taken(progress) == [2, 3, 4, 0, 1]


def test_a_stop_ends_what_waits_and_nothing_else() -> None:
    progress = progress_of(a_step("a"), a_step("b"), a_step("c", depends_on=("b",)))
    progress.start()
    progress.submit(0)
    progress.stop()
    assert [progress.run_state(number) for number in range(3)] == [
        StepRunState.SUBMITTED, StepRunState.STOPPED, StepRunState.STOPPED,
    ]  # fmt: skip


def test_a_chain_of_skips_may_be_as_long_as_a_workflow() -> None:
    steps = [a_step(f"s{n}", depends_on=(f"s{n - 1}",) if n else ()) for n in range(10_000)]
    progress = progress_of(*steps)
    progress.start()
    progress.end(0, StepRunState.FAILED)
    assert progress.ended == progress.total
    assert progress.run_state(9_999) is StepRunState.SKIPPED


def test_runs_take_a_byte_each_and_microseconds() -> None:
    count = 100_000
    tracemalloc.start()
    try:
        progress = progress_of(
            a_step("a", foreach=ListItems(values=())),
            a_step("b", foreach=StepItems(step="a"), depends_on=("a",)),
            counts={"a": count, "b": count},
        )
        progress.start()
        assert tracemalloc.get_traced_memory()[0] < 1.1 * 2 * count
    finally:
        tracemalloc.stop()
    began = time.process_time()
    for _ in range(10_000):
        number = progress.take()
        assert number is not None
        progress.submit(number)
        progress.end(number, StepRunState.DONE)
    assert time.process_time() - began < 0.5
