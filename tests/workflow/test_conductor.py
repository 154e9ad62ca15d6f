"""The conductor's rules, one at a time, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headgate.core.task import OnParentFailure
from headgate.errors import StoreUnavailableError
from headgate.testing import SimulatedLoop, simulate
from headgate.workflow.backend import StepOrder, StepTask, TaskState
from headgate.workflow.conditions import parsed_condition
from headgate.workflow.conductor import SMALLEST_WINDOW, Conductor
from headgate.workflow.placeholders import parsed_template
from headgate.workflow.report import RunReport, RunState, StepRow, StepState
from headgate.workflow.step_requests import CallRequest
from headgate.workflow.workflow import CallWork, Estimate, ListItems, Step, StepItems, Workflow
from workflow.fake_backend import (
    FakeBackend,
    Fate,
    Fates,
    KeptTasks,
    a_run,
    a_step,
    a_workflow,
)

FAILS = Fate(state=TaskState.FAILED)


def done(order: StepOrder) -> Fate:
    return Fate(result=order.index)


def fails(*names: str) -> Fates:
    return lambda order: FAILS if order.step.id in names else done(order)


def calls(given: Any) -> CallWork:
    return CallWork(entry_point="work:do", given=parsed_template(given))


def items(count: int) -> ListItems:
    return ListItems(values=tuple(range(count)))


class Stage:
    """One run, carried out by one process after another."""

    def __init__(self, folder: Path, workflow: Workflow, fates: Fates = done) -> None:
        self.kept = KeptTasks()
        self.fates = fates
        self.run = a_run(folder, workflow)
        self.backend = FakeBackend(self.kept, fates)
        self.ended: list[StepRow] = []

    def play(
        self,
        disturb: Callable[[Conductor, FakeBackend], Coroutine[Any, Any, None]] | None = None,
    ) -> RunReport:
        """Carry the run out, or go on with it, and disturb it meanwhile."""

        async def main(loop: SimulatedLoop) -> RunReport:
            self.backend = FakeBackend(self.kept, self.fates)
            conductor = Conductor(self.run, self.backend, clock=loop.clock, ended=self.ended.append)
            if disturb is None:
                return await conductor.run()
            carrying = asyncio.create_task(conductor.run())
            await disturb(conductor, self.backend)
            return await carrying

        return simulate(main).result

    def request(self, number: int, generation: int = 0) -> CallRequest:
        request = self.kept.orders[number, generation].request
        assert isinstance(request, CallRequest)
        return request


def counts(report: RunReport) -> dict[str, dict[str, int]]:
    return {step.step: step.counts for step in report.steps}


def play(folder: Path, *steps: Step, fates: Fates = done, **fields: Any) -> tuple[Stage, RunReport]:
    stage = Stage(folder, a_workflow(*steps, **fields), fates)
    return stage, stage.play()


def test_a_run_that_is_all_done_says_so_and_keeps_it(tmp_path: Path) -> None:
    stage, report = play(tmp_path, a_step("a", foreach=items(3)), a_step("b", depends_on=("a",)))
    assert (report.state, report.ended, report.total) == (RunState.DONE, 4, 4)
    assert stage.run.record.state is RunState.DONE
    assert sorted(row.name for row in stage.ended) == ["a[0]", "a[1]", "a[2]", "b"]


def test_outputs_of_steps_fill_the_texts_of_later_ones(tmp_path: Path) -> None:
    stage, _ = play(
        tmp_path,
        a_step("a"),
        a_step("case", foreach=items(3)),
        a_step("judge", foreach=StepItems(step="case"), depends_on=("case", "a"),
               work=calls({"one": "{steps.case.output}", "a": "{steps.a.output}"})),
        a_step("all", depends_on=("case",),
               work=calls(["{steps.case.outputs}", "{steps.case.done}", "{run.name}"])),
    )  # fmt: skip
    assert stage.request(5).given == {"one": 1, "a": 0}
    assert stage.request(7).given == [[0, 1, 2], 3, "test"]


def test_the_results_for_many_runs_are_fetched_together(tmp_path: Path) -> None:
    stage, report = play(
        tmp_path,
        a_step("a"),
        a_step("b", foreach=items(50), depends_on=("a",), work=calls("{steps.a.output}")),
    )
    assert report.state is RunState.DONE
    assert stage.backend.results_calls == 1


def test_a_text_that_cannot_be_filled_fails_that_run_only(tmp_path: Path) -> None:
    values: tuple[dict[str, str], ...] = ({"name": "x"}, {})
    _, report = play(
        tmp_path, a_step("a", foreach=ListItems(values=values), work=calls("{item.name}"))
    )
    assert report.state is RunState.FAILED
    assert counts(report) == {"a": {"done": 1, "failed": 1}}
    problem = "{item.name} has nothing to be filled with: there is no 'name'"
    assert report.steps[0].error == problem
    assert [(row.name, row.why, row.task) for row in report.rows] == [("a[1]", problem, None)]


def test_what_waits_for_a_failed_step_is_skipped_unless_it_is_to_run(tmp_path: Path) -> None:
    stage, report = play(
        tmp_path,
        a_step("a"),
        a_step("b", depends_on=("a",)),
        a_step("c", depends_on=("b",)),
        a_step("d", depends_on=("a",), on_parent_failure=OnParentFailure.RUN),
        fates=fails("a"),
    )
    assert report.state is RunState.FAILED
    assert counts(report) == {
        "a": {"failed": 1}, "b": {"skipped": 1}, "c": {"skipped": 1}, "d": {"done": 1},
    }  # fmt: skip
    assert [(row.name, row.why) for row in stage.ended] == [
        ("a", ""), ("b", "'a' failed"), ("c", "'b' was skipped"), ("d", ""),
    ]  # fmt: skip


def test_a_run_without_its_condition_is_skipped(tmp_path: Path) -> None:
    stage, report = play(
        tmp_path,
        a_step("a", foreach=items(4), when=parsed_condition("item in [1, 3]")),
        a_step("b", depends_on=("a",)),
        a_step("c", foreach=StepItems(step="a"), depends_on=("a",)),
    )
    assert report.state is RunState.DONE
    assert counts(report) == {
        "a": {"done": 2, "skipped": 2}, "b": {"done": 1}, "c": {"done": 2, "skipped": 2},
    }  # fmt: skip
    whys = {row.name: row.why for row in stage.ended if row.state is StepState.SKIPPED}
    assert whys["a[0]"] == "when: item in [1, 3]"
    assert whys["c[2]"] == "'a[2]' was skipped"


def test_each_run_waits_for_its_counterpart_only(tmp_path: Path) -> None:
    def fates(order: StepOrder) -> Fate:
        return Fate(seconds=100.0 if (order.step.id, order.index) == ("a", 0) else 1.0)

    stage, _ = play(
        tmp_path,
        a_step("a", foreach=items(3)),
        a_step("b", foreach=StepItems(step="a"), depends_on=("a",)),
        fates=fates,
    )
    names = [row.name for row in stage.ended]
    assert names.index("b[1]") < names.index("a[0]") < names.index("b[0]")


def test_a_run_that_reads_all_results_waits_for_all_of_them(tmp_path: Path) -> None:
    def fates(order: StepOrder) -> Fate:
        return Fate(seconds=100.0 if order.number == 0 else 1.0, result=order.index)

    stage, _ = play(
        tmp_path,
        a_step("a", foreach=items(2)),
        a_step("b", foreach=StepItems(step="a"), depends_on=("a",),
               work=calls("{steps.a.outputs}")),
        fates=fates,
    )  # fmt: skip
    assert stage.request(3).given == [0, 1]


def test_lower_priority_values_go_out_first(tmp_path: Path) -> None:
    stage, _ = play(
        tmp_path,
        a_step("late", foreach=items(20), priority=5),
        a_step("soon", foreach=items(20), priority=-1),
    )
    assert [number for number, _ in stage.kept.submitted] == [*range(20, 40), *range(20)]


def test_no_more_than_a_window_is_at_the_backend(tmp_path: Path) -> None:
    stage, report = play(tmp_path, a_step("a", foreach=items(1_000)))
    assert report.state is RunState.DONE
    assert stage.kept.most_unfinished <= SMALLEST_WINDOW


def test_nothing_as_dear_as_what_was_refused_goes_out_and_cheaper_steps_do(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path,
        a_workflow(
            a_step("dear", foreach=items(2_000), cost_micro_usd=70),
            a_step("free", depends_on=("dear",), on_parent_failure=OnParentFailure.RUN),
            a_step("after", depends_on=("dear",)),
            a_step("cheap", cost_micro_usd=20, priority=1),
        ),
    )
    stage.kept.limit = 1_000
    report = stage.play()
    assert report.state is RunState.EXHAUSTED
    assert report.exhausted_by == "workflow:test is used up"
    assert counts(report) == {
        "dear": {"done": 14, "not run": 1_986},
        "free": {"done": 1}, "after": {"not run": 1}, "cheap": {"done": 1},
    }  # fmt: skip
    assert len(stage.kept.submitted) <= 2 * SMALLEST_WINDOW
    assert stage.kept.spent == 14 * 70 + 20
    whys = {row.name: row.why for row in stage.ended}
    assert whys["dear[1999]"] == "workflow:test is used up"
    assert whys["after"] == "'dear' was not run"


def test_a_refusal_for_tokens_is_none_for_dollars(tmp_path: Path) -> None:
    estimate = Estimate(micro_usd=1, tokens=1_000)
    stage = Stage(
        tmp_path,
        a_workflow(
            a_step("many", estimate=estimate),
            a_step("dear", priority=1, depends_on=("many",), cost_micro_usd=5,
                   on_parent_failure=OnParentFailure.RUN),
        ),
        lambda order: Fate(state=TaskState.REJECTED) if order.number == 0 else done(order),
    )  # fmt: skip
    assert counts(stage.play())["dear"] == {"done": 1}


def test_fail_fast_starts_nothing_after_the_first_failure(tmp_path: Path) -> None:
    stage, report = play(
        tmp_path,
        a_step("a", foreach=items(1_000)),
        a_step("b", depends_on=("a",), on_parent_failure=OnParentFailure.RUN),
        fates=lambda order: FAILS if order.number == 0 else done(order),
        fail_fast=True,
    )
    assert report.state is RunState.FAILED
    assert counts(report)["b"] == {"not run": 1}
    assert counts(report)["a"]["not run"] >= 1_000 - 8
    assert len(stage.kept.started) <= 8
    whys = {row.why for row in stage.ended if row.state is StepState.NOT_RUN}
    assert whys == {"the run ended before it"}


def test_what_waits_for_a_window_of_a_budget_is_given_up(tmp_path: Path) -> None:
    stage = Stage(tmp_path, a_workflow(a_step("a", cost_micro_usd=5)))

    async def disturb(_: Conductor, backend: FakeBackend) -> None:
        backend._free = 0
        backend.stuck_when = lambda: True

    report = stage.play(disturb)
    assert report.state is RunState.EXHAUSTED
    assert report.exhausted_by == "0 waits for a permit"
    assert counts(report) == {"a": {"not run": 1}}


def test_a_workflow_that_says_so_waits_for_the_window(tmp_path: Path) -> None:
    stage = Stage(tmp_path, a_workflow(a_step("a", cost_micro_usd=5), on_exhausted="wait"))

    async def disturb(conductor: Conductor, backend: FakeBackend) -> None:
        backend._free = 0
        backend.stuck_when = lambda: True
        await asyncio.sleep(3_600)
        assert [row.why for row in conductor.report().rows] == ["0 waits for a permit"]
        backend._free = 1
        backend._start()

    assert stage.play(disturb).state is RunState.DONE


def test_nobody_asks_whether_it_is_stuck_while_something_runs(tmp_path: Path) -> None:
    stage, _ = play(tmp_path, a_step("a"), fates=lambda _: Fate(seconds=1_000.0))
    assert stage.backend.asked_stuck == 0


def test_the_first_interruption_lets_what_runs_finish(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path, a_workflow(a_step("a", foreach=items(10))), lambda _: Fate(seconds=100.0)
    )

    async def disturb(conductor: Conductor, _: FakeBackend) -> None:
        await asyncio.sleep(10)
        conductor.interrupt()

    report = stage.play(disturb)
    assert report.state is RunState.INTERRUPTED
    assert counts(report) == {"a": {"done": 4, "not run": 6}}
    assert (report.ended, stage.run.record.ended) == (4, 4)
    # Nobody is told of each that is left: there may be a million of them.
    assert [row.state for row in stage.ended] == [StepState.DONE] * 4
    assert stage.run.record.state is RunState.INTERRUPTED
    report = stage.play()
    assert report.state is RunState.DONE
    assert stage.kept.executed == dict.fromkeys(range(10), 1)


def test_the_second_interruption_stops_what_runs_and_a_resume_begins_it_anew(
    tmp_path: Path,
) -> None:
    stage = Stage(
        tmp_path, a_workflow(a_step("a", foreach=items(6))), lambda _: Fate(seconds=100.0)
    )

    async def disturb(conductor: Conductor, _: FakeBackend) -> None:
        await asyncio.sleep(10)
        conductor.interrupt()
        await asyncio.sleep(1)
        conductor.interrupt()

    report = stage.play(disturb)
    assert report.state is RunState.INTERRUPTED
    assert counts(report) == {"a": {"stopped": 4, "not run": 2}}
    assert (report.ended, stage.run.record.ended) == (0, 0)
    assert stage.play().state is RunState.DONE
    assert sorted(stage.kept.submitted)[-2:] == [(5, 0), (5, 1)]


def test_one_interruption_of_a_resume_that_is_beginning_cancels_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, a_workflow(a_step("a")), lambda _: Fate(seconds=100.0))
    stage.play()
    ended = stage.kept.tasks[0, 0]
    stage.kept.tasks[0, 0] = msgspec.structs.replace(ended, state=TaskState.QUEUED)

    async def disturb(conductor: Conductor, backend: FakeBackend) -> None:
        cancel = backend.cancel

        async def waits(_: Sequence[StepTask]) -> None:
            backend.cancel = cancel  # type: ignore[method-assign]
            await asyncio.Event().wait()

        backend.cancel = waits  # type: ignore[method-assign,assignment]
        await asyncio.sleep(1)
        conductor.interrupt()

    assert stage.play(disturb).state is RunState.INTERRUPTED
    assert stage.backend.cancelled == []


def test_a_resume_begins_failed_runs_anew_and_keeps_the_others(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path,
        a_workflow(
            a_step("a", foreach=items(3), cost_micro_usd=10),
            a_step("b", depends_on=("a",), work=calls("{steps.a.outputs}")),
        ),
        lambda order: FAILS if (order.number, order.generation) == (1, 0) else done(order),
    )
    assert counts(stage.play()) == {"a": {"done": 2, "failed": 1}, "b": {"skipped": 1}}
    report = stage.play()
    assert report.state is RunState.DONE
    assert stage.kept.submitted == [(0, 0), (1, 0), (2, 0), (1, 1), (3, 0)]
    assert stage.request(3).given == [0, 1, 2]
    assert report.steps[0].micro_usd == 40


def test_a_resume_of_a_run_that_is_done_does_nothing(tmp_path: Path) -> None:
    stage, _ = play(tmp_path, a_step("a", foreach=items(3)))
    before = list(stage.kept.submitted)
    assert stage.play().state is RunState.DONE
    assert stage.kept.submitted == before


def test_a_cancelled_task_is_a_failure(tmp_path: Path) -> None:
    _, report = play(tmp_path, a_step("a"), fates=lambda _: Fate(state=TaskState.CANCELLED))
    assert report.state is RunState.FAILED
    assert report.steps[0].error == "it was cancelled"


def test_a_backend_that_fails_ends_the_run_as_interrupted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, a_workflow(a_step("a")))

    async def disturb(_: Conductor, backend: FakeBackend) -> None:
        async def fail(_orders: object) -> None:
            raise StoreUnavailableError("the disk is full")

        backend.submit = fail  # type: ignore[method-assign,assignment]

    with pytest.raises(StoreUnavailableError):
        stage.play(disturb)
    assert stage.run.record.state is RunState.INTERRUPTED


def test_a_report_says_what_runs_and_what_is_spent(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path,
        a_workflow(a_step("a", foreach=items(6), cost_micro_usd=10)),
        lambda _: Fate(seconds=10.0),
    )
    reports: list[RunReport] = []

    async def disturb(conductor: Conductor, _: FakeBackend) -> None:
        await asyncio.sleep(5)
        reports.append(conductor.report())

    stage.play(disturb)
    (report,) = reports
    assert report.state is RunState.RUNNING
    assert counts(report) == {"a": {"queued": 2, "running": 4}}
    assert report.steps[0].seconds == pytest.approx(5, abs=0.01)
    names = [(row.name, row.state) for row in report.rows if row.state is StepState.RUNNING]
    assert names == [(f"a[{index}]", StepState.RUNNING) for index in range(4)]
    assert [money.reserved_micro_usd for money in report.money] == [40]


def test_steps_without_items_count_as_done(tmp_path: Path) -> None:
    _, report = play(tmp_path, a_step("a", foreach=items(0)), a_step("b", depends_on=("a",)))
    assert (report.state, report.total) == (RunState.DONE, 1)


def test_an_interruption_ends_even_a_backend_that_never_opens(tmp_path: Path) -> None:
    stage = Stage(tmp_path, a_workflow(a_step("a")))

    async def disturb(conductor: Conductor, backend: FakeBackend) -> None:
        backend.open = asyncio.Event().wait  # type: ignore[method-assign,assignment]
        await asyncio.sleep(1)
        conductor.interrupt()

    assert stage.play(disturb).state is RunState.INTERRUPTED
    assert stage.kept.submitted == []


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_process_that_could_not_begin_leaves_the_record_as_it_was(
    tmp_path: Path, *, is_interrupted: bool
) -> None:
    stage = Stage(tmp_path, a_workflow(a_step("a", cost_micro_usd=5)))
    stage.play()
    before = stage.run.record

    async def disturb(conductor: Conductor, backend: FakeBackend) -> None:
        async def fail() -> None:
            raise StoreUnavailableError("the ledger is away")

        waits = asyncio.Event().wait
        backend.open = waits if is_interrupted else fail  # type: ignore[method-assign,assignment]
        await asyncio.sleep(1)
        if is_interrupted:
            conductor.interrupt()

    if is_interrupted:
        assert stage.play(disturb).state is RunState.INTERRUPTED
    else:
        with pytest.raises(StoreUnavailableError):
            stage.play(disturb)
    assert stage.run.record == before
    assert before.state is RunState.DONE


def test_a_fault_of_the_backend_is_not_hidden_by_the_end_of_the_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path, a_workflow(a_step("a")), lambda _: Fate(seconds=100.0))

    async def disturb(_: Conductor, backend: FakeBackend) -> None:
        async def fail() -> None:
            raise ZeroDivisionError

        backend.money = fail  # type: ignore[method-assign,assignment]

    with pytest.raises(ZeroDivisionError):
        stage.play(disturb)


def test_what_went_without_a_parent_is_begun_anew_after_it(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path,
        a_workflow(
            a_step("case", foreach=items(3)),
            a_step("report", depends_on=("case",), on_parent_failure=OnParentFailure.RUN),
            a_step("mail", depends_on=("report",)),
        ),
        lambda order: FAILS if (order.number, order.generation) == (1, 0) else done(order),
    )
    assert counts(stage.play())["mail"] == {"done": 1}
    assert [stage.kept.orders[number, 0].is_provisional for number in (3, 4)] == [True, True]
    assert stage.play().state is RunState.DONE
    assert stage.kept.submitted[5:] == [(1, 1), (3, 1), (4, 1)]
    assert not stage.kept.orders[3, 1].is_provisional
