"""A task as people read it."""

from __future__ import annotations

import pytest

from headgate.api.schema.tasks import ReasonBody, WhyBody
from headgate.cli.output import clock_time
from headgate.cli.task_view import lines_of
from headgate.cli.why import lines_of as lines_of_why
from headgate.core.estimates import PROBE, SILENT, Basis, Estimate, Hold, given
from headgate.core.task import (
    PastAttempt,
    Progress,
    ProgressReport,
    Task,
    TaskRecord,
    TaskStatus,
    Terms,
)
from headgate.core.task_view import exact_moment, snapshot_of, whole_snapshot_of


def usage_line(*, used: tuple[int, int], assumed: tuple[int, int]) -> str:
    record = TaskRecord(
        task=Task(id="t", project_id="x", created_at=1.0, status=TaskStatus.FAILED),
        terms=Terms(attempt_seconds=30.0),
        progress=Progress(
            used_tokens=used[0],
            used_micro_usd=used[1],
            assumed_tokens=assumed[0],
            assumed_micro_usd=assumed[1],
        ),
        tokens=used[0],
        micro_usd=used[1],
    )
    lines = lines_of(snapshot_of(record))
    assert any(line.split() == ["timeout", "seconds", "30.0"] for line in lines)
    (line,) = [line for line in lines if line.startswith("usage")]
    return line.removeprefix("usage").strip()


@pytest.mark.parametrize(
    ("used", "assumed", "shown"),
    [
        ((0, 0), (0, 0), "nothing"),
        ((0, 70_000), (0, 70_000), "$0.07 (assumed $0.07)"),
        ((1_512, 193_400), (0, 0), "1512 tokens, $0.1934"),
        ((207, 1), (200, 0), "207 tokens, $0.000001 (assumed 200 tokens)"),
        ((9, 140_000), (4, 70_000), "9 tokens, $0.14 (assumed 4 tokens, $0.07)"),
    ],
)
def test_usage_is_one_line_that_says_what_is_assumed(
    used: tuple[int, int], assumed: tuple[int, int], shown: str
) -> None:
    assert usage_line(used=used, assumed=assumed) == shown


@pytest.mark.parametrize(("others", "text"), [(1, "1 task or call"), (3, "3 tasks or calls")])
def test_what_holds_a_task_may_be_a_call_of_others(others: int, text: str) -> None:
    reason = ReasonBody(detail={}, message="the project is full", held_by_others=others)
    why = WhyBody(task_id="t", state=TaskStatus.QUEUED, reasons=(reason,))
    assert lines_of_why(why)[-1] == f"    held by {text} of others"


def test_an_attempt_before_the_latest_is_one_line_that_nothing_can_break() -> None:
    attempts = (
        PastAttempt(
            attempt=1,
            started_at=10.0,
            ended_at=12.0,
            error="it broke\nat\x1b[2J once",
            agent_id="coder",
            slot="work",
            node_id="n1",
            tokens=9,
            assumed_tokens=9,
        ),
        PastAttempt(attempt=2, ended_at=20.0),
    )
    record = TaskRecord(
        task=Task(id="t", project_id="x", created_at=1.0), progress=Progress(attempts=attempts)
    )
    (block,) = [one for one in lines_of(whole_snapshot_of(record)) if one.startswith("attempts")]
    shown = [line.strip() for line in block.removeprefix("attempts").split("\n")]
    first, second = (clock_time(exact_moment(at)) for at in (12.0, 20.0))
    where, booked = "agent coder, slot work, node n1", "booked 9 tokens (assumed 9 tokens)"
    assert shown == [
        f"1: ended {first}, took 2.0 s, {where}, {booked}: it broke\\nat\\x1b[2J once",
        f"2: ended {second}, not begun, booked nothing",
    ]


LEARNED = Estimate(basis=Basis.LEARNED, amount=31_000, most=90_000, samples=412, quantile=0.95)
FEW = Estimate(basis=Basis.LEARNED, amount=400, most=100, samples=1)
HELD: list[tuple[TaskStatus, Hold | None, tuple[int, int], list[str]]] = [
    (
        TaskStatus.RUNNING,
        Hold(micro_usd=LEARNED, tokens=FEW),
        (31_000, 400),
        [
            "$0.031, 95% of 412 of its kind cost less",
            "400 tokens, 4 times the highest cost of 1 of its kind",
        ],
    ),
    (
        TaskStatus.DONE,
        Hold(micro_usd=PROBE, tokens=given(0)),
        (50_000, 0),
        ["$0.05, a probe: the cost of this kind of work is unknown"],
    ),
    (TaskStatus.RUNNING, None, (7_000, 0), ["$0.007, the estimate that it came with"]),
    (
        TaskStatus.DONE,
        Hold(micro_usd=SILENT, tokens=given(0)),
        (0, 0),
        ["reserves nothing: this kind of work never reports what it used"],
    ),
    (TaskStatus.RUNNING, None, (0, 0), []),
    (TaskStatus.QUEUED, None, (7_000, 0), []),
]


@pytest.mark.parametrize(("status", "hold", "held", "shown"), HELD)
def test_what_is_held_and_why_is_a_line_for_each_unit(
    status: TaskStatus, hold: Hold | None, held: tuple[int, int], shown: list[str]
) -> None:
    record = TaskRecord(
        task=Task(id="t", project_id="x", created_at=1.0, status=status),
        progress=Progress(
            attempt=1,
            hold=hold,
            reserved_micro_usd=held[0],
            reserved_tokens=held[1],
            completed_at=2.0 if status is TaskStatus.DONE else None,
        ),
    )
    whole = whole_snapshot_of(record)
    assert [one.text.removeprefix("reserved ") for one in whole.held] == shown
    assert snapshot_of(record).held == ()
    lines = lines_of(whole)
    label = "was held" if status is TaskStatus.DONE else "held "
    blocks = [line.removeprefix(label) for line in lines if line.startswith(label)]
    assert [line.strip() for block in blocks for line in block.splitlines()] == shown


@pytest.mark.parametrize(
    ("fraction", "text", "shown"),
    [
        (0.4, "12 of 30 files", "40 %, 12 of 30 files"),
        (0.0, "", "0 %"),
        (None, "loading", "loading"),
        (None, "", None),
    ],
)
def test_show_and_why_say_how_far_a_task_is(
    monkeypatch: pytest.MonkeyPatch, fraction: float | None, text: str, shown: str | None
) -> None:
    report = ProgressReport(fraction=fraction, text=text, at=1.0)
    record = TaskRecord(
        task=Task(id="t", project_id="x", created_at=1.0, status=TaskStatus.RUNNING),
        progress=Progress(attempt=1, report=report),
    )
    expected = [] if shown is None else [f"{shown} (long ago)"]
    monkeypatch.setattr("headgate.cli.task_view.from_now", lambda _: "long ago")
    snapshot = snapshot_of(record)
    found = [line for line in lines_of(snapshot) if line.startswith("progress")]
    assert [line.removeprefix("progress").strip() for line in found] == expected
    why = WhyBody(task_id="t", state=snapshot.state, reasons=(), progress=snapshot.progress)
    assert [line.strip() for line in lines_of_why(why)[1:]] == expected


@pytest.mark.parametrize(
    ("reported", "is_priced", "shown"),
    [
        ((None, None), False, None),
        ((812, 12_300), True, "812 tokens, $0.0123, by the price list"),
        ((None, 12_300), False, "$0.0123"),
        ((0, 0), False, "nothing used"),
    ],
)
def test_what_was_reported_is_told_from_what_nobody_said(
    reported: tuple[int | None, int | None], is_priced: bool, shown: str | None
) -> None:
    record = TaskRecord(
        task=Task(id="t", project_id="x", created_at=1.0, status=TaskStatus.DONE),
        progress=Progress(
            attempt=1,
            reported_tokens=reported[0],
            reported_micro_usd=reported[1],
            is_priced=is_priced,
            is_unpriced=reported[1] is None,
        ),
    )
    lines = dict(line.split(maxsplit=1) for line in lines_of(whole_snapshot_of(record)))
    assert lines.get("reported") == shown
    assert ("unpriced" in lines) == (reported[1] is None)
    assert lines["priority"] == "0"


@pytest.mark.parametrize(
    ("tokens", "target", "shown"),
    [
        (812, "job", "nobody knows what it cost in dollars; `headgate doctor` has the line to add"),
        (None, "job", "it reported no cost; set estimate_usd in [targets.job], or report usage"),
        (None, None, "it reported no cost; set estimate_usd in its target, or report usage"),
    ],
)
def test_an_unpriced_task_says_what_to_do(
    tokens: int | None, target: str | None, shown: str
) -> None:
    record = TaskRecord(
        task=Task(id="t", project_id="x", created_at=1.0, status=TaskStatus.DONE, target=target),
        progress=Progress(attempt=1, reported_tokens=tokens, is_unpriced=True),
    )
    lines = dict(line.split(maxsplit=1) for line in lines_of(whole_snapshot_of(record)))
    assert lines["unpriced"] == shown
