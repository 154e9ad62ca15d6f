"""Reports of runs as the display and the tables get them, made up for tests."""

from __future__ import annotations

from headgate.workflow.backend import Money, StepTask, TaskState
from headgate.workflow.report import RunReport, RunState, StepRow, StepState, StepSummary

BEGAN_AT = 1_800_000_000.0
SO_FAR_SECONDS = 12.0


def task_of(number: int, state: TaskState = TaskState.RUNNING, **fields: object) -> StepTask:
    given = {"attempt": 1, "started_at": BEGAN_AT, **fields}
    return StepTask(number=number, generation=0, task_id=f"r-{number:07d}", state=state, **given)  # type: ignore[arg-type]


def running(index: int, *, step: str = "case", attempt: int = 1) -> StepRow:
    return StepRow(
        name=f"{step}[{index}]",
        step=step,
        index=index,
        state=StepState.RUNNING,
        task=task_of(index, attempt=attempt),
    )


def failed(index: int, error: str = "exit code 3: no such page", *, step: str = "case") -> StepRow:
    task = task_of(
        index, TaskState.FAILED, completed_at=BEGAN_AT + 2, error=error, micro_usd=70_000
    )
    return StepRow(
        name=f"{step}[{index}]", step=step, index=index, state=StepState.FAILED, task=task
    )


def done(index: int, *, step: str = "case") -> StepRow:
    task = task_of(index, TaskState.DONE, completed_at=BEGAN_AT + 0.3, micro_usd=70_000)
    return StepRow(name=f"{step}[{index}]", step=step, index=index, state=StepState.DONE, task=task)


def waiting(name: str, why: str) -> StepRow:
    return StepRow(name=name, step=name, index=None, state=StepState.QUEUED, why=why)


def report(
    *rows: StepRow,
    state: RunState = RunState.RUNNING,
    counts: dict[str, int] | None = None,
    money: tuple[Money, ...] = (),
    ended_at: float | None = None,
    exhausted_by: str | None = None,
) -> RunReport:
    counted = counts or {
        "done": 12,
        "running": sum(row.state is StepState.RUNNING for row in rows),
    }
    total = sum(counted.values())
    ended = sum(counted.get(name, 0) for name in ("done", "failed", "skipped", "not run"))
    step = StepSummary(
        step="case",
        total=total,
        counts=counted,
        seconds=61.0,
        attempts=total,
        tokens=1_200,
        micro_usd=70_000 * counted.get("done", 0),
    )
    return RunReport(
        run_id="20270115-080000-3fa2",
        workflow="eval",
        state=state,
        began_at=BEGAN_AT,
        ended_at=ended_at,
        seconds=SO_FAR_SECONDS if ended_at is None else ended_at - BEGAN_AT,
        steps=(step,),
        rows=rows,
        money=money,
        exhausted_by=exhausted_by,
        total=total,
        ended=ended,
    )


SESSION_MONEY = (
    Money(
        scope="session:eval-1",
        spent_micro_usd=32_400_000,
        reserved_micro_usd=1_200_000,
        limit_micro_usd=50_000_000,
    ),
    Money(scope="session:eval-1/team:a", spent_micro_usd=5, reserved_micro_usd=0),
    Money(
        scope="session:eval-1/team:a/workflow:eval",
        spent_micro_usd=840_000,
        reserved_micro_usd=70_000,
        limit_micro_usd=5_000_000,
    ),
)
