"""Runs for those who look: what is shown is what the run itself said, whoever drives it."""

from __future__ import annotations

import asyncio
import shutil
from itertools import permutations
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from headgate.testing import DEFAULT_START
from headgate.workflow.backend import StepTask, TaskListener, TaskState
from headgate.workflow.conductor import Conductor
from headgate.workflow.expansion import Expansion
from headgate.workflow.local_backend import local_backend
from headgate.workflow.parser import read_workflow
from headgate.workflow.progress import WorkflowProgress
from headgate.workflow.remote_journal import Ended, Entry, Opened, Sent, SentOrder, Taken
from headgate.workflow.report import RunReport, RunState, RunTotals, StepState
from headgate.workflow.run_folder import JOURNAL, RecordWriter, Run, create_run
from headgate.workflow.run_list import counted, list_runs, show_run, step_outputs
from headgate.workflow.run_record import RunOptions
from headgate.workflow.run_tasks import left_at
from headgate.workflow.workflow import ListItems
from workflow.fake_backend import a_run, a_step, a_workflow

ENVIRON = {"PATH": "/usr/bin:/bin"}

MIXED = b"""\
config: {budget_usd: 0.50}
steps:
  - id: case
    foreach: [1, 2, 3, 4]
    command: [sh, -c, "echo {item}; test {item} -ne 3"]
    cost_usd: 0.07
  - id: odd
    foreach: {step: case}
    when: steps.case.output == 1
    command: [echo, "{steps.case.output}"]
  - id: report
    depends_on: case
    command: [echo, never]
  - id: always
    depends_on: case
    on_parent_failure: run
    command: [echo, "{steps.case.outputs}"]
  - id: unfilled
    call: json:dumps
    with: "{steps.always.output[9]}"
"""


def begun(folder: Path, text: bytes) -> Run:
    source = folder / "mixed.yaml"
    source.write_bytes(text)
    return create_run(
        RunOptions(data=folder),
        source=source,
        text=text,
        workflow=read_workflow(source, text),
        now=DEFAULT_START,
    )


def carried_out(run: Run) -> RunReport:
    async def main() -> RunReport:
        backend = local_backend(run, run.workflow, RunOptions(data=run.path.parent.parent), ENVIRON)
        return await Conductor(run, backend).run()

    with run.held():
        return asyncio.run(main())


def test_what_is_shown_of_a_run_is_what_it_said_when_it_ended(tmp_path: Path) -> None:
    run = begun(tmp_path, MIXED)
    report = carried_out(run)
    assert report.state is RunState.FAILED
    shown = show_run(tmp_path, "last", every_row=True)
    assert shown.report.steps == report.steps
    assert shown.report.money == report.money
    assert (shown.report.state, shown.report.ended) == (report.state, report.total)
    assert {row.name: (row.state, row.why) for row in shown.rows} == {
        "case[0]": (StepState.DONE, ""),
        "case[1]": (StepState.DONE, ""),
        "case[2]": (StepState.FAILED, "command exited with 1"),
        "case[3]": (StepState.DONE, ""),
        "odd[0]": (StepState.DONE, ""),
        "odd[1]": (StepState.SKIPPED, "when: steps.case.output == 1"),
        "odd[2]": (StepState.SKIPPED, "'case[2]' failed"),
        "odd[3]": (StepState.SKIPPED, "when: steps.case.output == 1"),
        "report": (StepState.SKIPPED, "'case' failed"),
        "always": (StepState.DONE, ""),
        "unfilled": (
            StepState.FAILED,
            "{steps.always.output[9]} has nothing to be filled with: there is no 9",
        ),
    }


def test_without_every_row_those_that_are_done_are_left_out(tmp_path: Path) -> None:
    carried_out(begun(tmp_path, MIXED))
    rows = show_run(tmp_path, "last").rows
    assert {row.state for row in rows} == {StepState.FAILED, StepState.SKIPPED}


def test_what_no_budget_held_is_shown_as_not_run(tmp_path: Path) -> None:
    text = MIXED.replace(b"0.50", b"0.15").replace(b"; test {item} -ne 3", b"")
    report = carried_out(begun(tmp_path, text))
    assert report.state is RunState.EXHAUSTED
    shown = show_run(tmp_path, "last")
    assert shown.report.steps == report.steps
    assert shown.report.exhausted_by == report.exhausted_by
    assert [row.name for row in shown.rows if row.state is StepState.NOT_RUN][:2] == [
        "case[2]",
        "case[3]",
    ]


def test_what_a_failure_stopped_is_shown_as_not_run(tmp_path: Path) -> None:
    text = MIXED.replace(b"budget_usd", b"fail_fast: true, concurrency: 1, budget_usd")
    text = text.replace(b"    when: steps.case.output == 1\n", b"")
    report = carried_out(begun(tmp_path, text))
    assert report.state is RunState.FAILED
    assert show_run(tmp_path, "last").report.steps == report.steps


def test_a_run_that_has_not_begun_is_shown_as_interrupted(tmp_path: Path) -> None:
    run = begun(tmp_path, MIXED)
    shown = show_run(tmp_path, run.id, every_row=True)
    assert shown.report.state is RunState.INTERRUPTED
    assert {row.state for row in shown.rows} == {StepState.NOT_RUN}


SLOW = b"""\
config: {budget_usd: 1.00}
steps:
  - id: quick
    command: ["true"]
    cost_usd: 0.05
  - id: slow
    depends_on: quick
    command: [sleep, "60"]
    cost_usd: 0.07
"""


def test_what_ran_when_its_process_was_lost_is_shown_as_such(tmp_path: Path) -> None:
    run = begun(tmp_path, SLOW)
    running = RunOptions(data=tmp_path)
    reports: list[RunReport] = []

    async def main() -> None:
        backend = local_backend(run, run.workflow, running, ENVIRON)
        has_begun = asyncio.Event()
        listen = backend.listen

        def listened(listener: TaskListener) -> None:
            def hear(task: StepTask) -> None:
                listener(task)
                if (task.number, task.state) == (1, TaskState.RUNNING):
                    has_begun.set()

            listen(hear)

        backend.listen = listened  # type: ignore[method-assign]
        conductor = Conductor(run, backend)
        carrying = asyncio.create_task(conductor.run())
        await has_begun.wait()
        shown = show_run(tmp_path, run.id)
        assert [(row.name, row.state) for row in shown.rows] == [("slow", StepState.RUNNING)]
        shutil.copytree(run.path, tmp_path / "runs" / "20270101-000000-killed")
        conductor.interrupt()
        conductor.interrupt()
        reports.append(await carrying)

    with run.held():
        asyncio.run(main())
    stopped = show_run(tmp_path, run.id, every_row=True)
    assert stopped.report.steps == reports[0].steps
    assert stopped.report.ended == reports[0].ended == 1
    assert [row.state for row in stopped.rows] == [StepState.DONE, StepState.STOPPED]
    killed = show_run(tmp_path, "last", every_row=True)
    assert killed.report.state is RunState.INTERRUPTED
    assert [(row.name, row.state, row.why) for row in killed.rows] == [
        ("quick", StepState.DONE, ""),
        ("slow", StepState.STOPPED, "its process ended while it ran; a resume tries again"),
    ]
    assert [money.spent_micro_usd for money in killed.report.money] == [50_000]


WAITING = b"""\
config: {budget_usd: 0.10, concurrency: 2}
steps:
  - id: case
    foreach: [1, 2]
    command: ["sleep", "60"]
    cost_usd: 0.07
"""


def test_a_queued_step_says_what_it_waits_for_and_money_in_flight_is_shown(
    tmp_path: Path,
) -> None:
    run = begun(tmp_path, WAITING)

    async def main() -> None:
        backend = local_backend(run, run.workflow, RunOptions(data=tmp_path), ENVIRON)
        has_begun = asyncio.Event()
        listen = backend.listen

        def listened(listener: TaskListener) -> None:
            def hear(task: StepTask) -> None:
                listener(task)
                if task.state is TaskState.RUNNING:
                    has_begun.set()

            listen(hear)

        backend.listen = listened  # type: ignore[method-assign]
        conductor = Conductor(run, backend)
        carrying = asyncio.create_task(conductor.run())
        await has_begun.wait()
        shown = show_run(tmp_path, run.id)
        assert [(row.state, row.why) for row in shown.rows] == [
            (StepState.RUNNING, ""),
            (
                StepState.QUEUED,
                "workflow:mixed has $0.03 left; steps that run have reserved $0.07",
            ),
        ]
        assert [money.reserved_micro_usd for money in shown.report.money] == [70_000]
        conductor.interrupt()
        conductor.interrupt()
        await carrying

    with run.held():
        asyncio.run(main())


def test_a_run_that_is_driven_now_is_shown_as_running(tmp_path: Path) -> None:
    run = begun(tmp_path, MIXED)
    with run.held():
        shown = show_run(tmp_path, run.id, every_row=True)
        assert [found.state for found in list_runs(tmp_path)] == [RunState.RUNNING]
    assert shown.report.state is RunState.RUNNING
    assert {row.name: row.why for row in shown.rows}["report"] == "waits for 'case'"


def test_runs_are_listed_with_how_they_stand_the_newest_first(tmp_path: Path) -> None:
    first = begun(tmp_path, MIXED)
    first.change(created_at=DEFAULT_START - 1)
    carried_out(first)
    first.path.rename(first.path.with_name("20250101-000000-0000"))
    second = begun(tmp_path, MIXED)
    found = list_runs(tmp_path)
    assert [(run.id, run.state, run.total) for run in found] == [
        (second.id, RunState.INTERRUPTED, 11),
        (first.id, RunState.FAILED, 11),
    ]
    assert found[1].spent_micro_usd == 4 * 70_000


def test_a_run_that_was_killed_is_listed_with_what_its_tasks_tell(tmp_path: Path) -> None:
    run = begun(tmp_path, MIXED)
    carried_out(run)
    ended, spent = run.record.ended, run.record.spent_micro_usd
    run.change(state=RunState.RUNNING, ended=0, spent_micro_usd=None, ended_at=None)
    (left,) = list_runs(tmp_path)
    assert (left.state, left.ended, left.spent_micro_usd) == (RunState.INTERRUPTED, None, None)
    (found,) = counted(tmp_path, [left])
    assert (found.spent_micro_usd, found.total) == (spent, 11)
    assert 0 < (found.ended or 0) <= ended


def test_a_run_took_as_long_as_processes_carried_it(tmp_path: Path) -> None:
    run = begun(tmp_path, SERVED)
    stands = replace(show_run(tmp_path, run.id).report, state=RunState.INTERRUPTED)
    first, second, third = (RecordWriter(run) for _ in range(3))
    first.begin(now=1_000.0, left_at=lambda: 0.0)
    first.end(stands, now=1_010.0)
    assert list_runs(tmp_path)[0].seconds == 10.0
    second.begin(now=2_000.0, left_at=lambda: 0.0)
    with run.held():
        assert show_run(tmp_path, run.id, clock=lambda: 2_005.0).report.seconds == 15.0
    ended = replace(a_task(0, TaskState.DONE), started_at=2_001.0, completed_at=2_003.0)
    written(run, Opened(server="http://127.0.0.1:7420", keys="k"), Ended(task=ended))
    # Its process was killed, so it counts until the last that was written.
    assert [one.seconds for one in counted(tmp_path, list_runs(tmp_path))] == [13.0]
    third.begin(now=9_000.0, left_at=lambda: left_at(run))
    third.end(stands, now=9_001.0)
    assert show_run(tmp_path, run.id).report.seconds == 14.0


Span = tuple[float | None, float]
RAN: list[tuple[list[Span], float | None, float | None]] = [
    ([], None, None),
    ([(0, 4)], None, 4),
    # A resume whose budget refuses every run adds nothing, and one later only what it runs.
    ([(0, 4), (None, 10), (None, 90)], None, 4),
    ([(None, 10)], None, None),
    ([(0, 4), (100, 103)], None, 7),
    ([(100, 103), (0, 4), (2, 6)], None, 9),
    ([(0, 4), (6, 8), (3, 7)], None, 8),
    ([(0, 4), (4, 6)], None, 6),
    ([(5, 5)], None, 0),
    ([(0, 4), (0.5, 3.5), (4.5, 6)], None, 6),
    ([(4.5, 6), (0, 4), (8, 9)], None, 7),
    ([], 95, 5),
    ([(0, 4)], 95, 9),
    ([(0, 4), (6, 8), (10, 11)], 7, 98),
]


@pytest.mark.parametrize(("ended", "began_at", "seconds"), RAN)
def test_a_step_took_as_long_as_something_of_it_ran(
    tmp_path: Path, ended: list[Span], began_at: float | None, seconds: float | None
) -> None:
    workflow = a_workflow(a_step("many", foreach=ListItems(values=(1, 2, 3, 4))))
    run = a_run(tmp_path, workflow)
    progress = WorkflowProgress(workflow, {"many": Expansion(workflow, run.items).runs_of("many")})
    totals = RunTotals(workflow, progress, ())
    for start, end in ended:
        state = TaskState.DONE if start is not None else TaskState.REJECTED
        totals.add(replace(a_task(0, state), started_at=start, completed_at=end))
    live = [] if began_at is None else [replace(a_task(3, TaskState.RUNNING), started_at=began_at)]
    (step,) = totals.summaries(live, 100.0)
    assert step.seconds == seconds


def test_a_damaged_run_is_listed_with_its_problem(tmp_path: Path) -> None:
    run = begun(tmp_path, MIXED)
    (run.path / "run.json").write_text("{")
    (found,) = list_runs(tmp_path)
    assert found.id == run.id
    assert "run.json is damaged" in found.problem


def test_without_a_data_directory_there_are_no_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []


SERVED = b"""\
steps:
  - id: a
    foreach: [1, 2, 3]
    target: echo
    action: say
  - id: b
    when: steps.a.done == 3
    target: echo
    action: say
"""


def written(run: Run, *entries: Entry, torn: bytes = b"") -> None:
    lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
    (run.path / JOURNAL).write_bytes(lines + torn)


def a_task(number: int, state: TaskState, generation: int = 0) -> StepTask:
    return StepTask(number=number, generation=generation, task_id=f"t{number}", state=state,
                    micro_usd=10)  # fmt: skip


@pytest.mark.parametrize("torn", [b"", b'{"kind":"ended","ta'])
def test_a_run_on_a_service_is_shown_from_its_journal(tmp_path: Path, torn: bytes) -> None:
    run = begun(tmp_path, SERVED)
    orders = tuple(SentOrder(number=number, generation=0) for number in range(3))
    written(
        run,
        Opened(server="http://127.0.0.1:7420", keys="k"),
        Sent(key="k-1", at=0.0, orders=orders, body=msgspec.Raw(b"{}")),
        Taken(key="k-1", task_ids=("t0", "t1", "t2")),
        Ended(task=a_task(0, TaskState.DONE), result=msgspec.Raw(b'{"x":1}')),
        Ended(task=a_task(1, TaskState.FAILED)),
        Ended(task=a_task(1, TaskState.DONE, generation=1)),
        torn=torn,
    )
    with run.held():
        shown = show_run(tmp_path, run.id, every_row=True)
    assert [row.state for row in shown.rows] == [
        StepState.DONE, StepState.DONE, StepState.QUEUED, StepState.WAITING,
    ]  # fmt: skip
    assert shown.report.steps[0].micro_usd == 30


GENERATIONS = [
    Ended(task=a_task(0, TaskState.DONE), result=msgspec.Raw(b'"first"')),
    Ended(task=a_task(0, TaskState.DONE, generation=1), result=msgspec.Raw(b'"second"')),
    Ended(task=a_task(1, TaskState.DONE), result=msgspec.Raw(b'"outdated"')),
    Ended(task=a_task(1, TaskState.FAILED, generation=1)),
]


@pytest.mark.parametrize("ends", list(permutations(GENERATIONS)))
def test_the_newest_generation_counts_in_whatever_order_tasks_are_known(
    tmp_path: Path, ends: tuple[Ended, ...]
) -> None:
    run = begun(tmp_path, SERVED)
    written(run, Opened(server="http://127.0.0.1:7420", keys="k"), *ends)
    assert [(one.index, one.output) for one in step_outputs(tmp_path, run.id, "a")] == [
        (0, "second")
    ]
    rows = show_run(tmp_path, run.id, every_row=True).rows
    assert [row.task and row.task.generation for row in rows[:2]] == [1, 1]
    assert [row.state for row in rows[:2]] == [StepState.DONE, StepState.FAILED]
