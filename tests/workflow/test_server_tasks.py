"""What is sent to a service for a step, and what is concluded from what it says."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from headgate.api.schema.tasks import ReasonBody, WhyBody
from headgate.core.events import EventKind, TaskEvent
from headgate.core.task import Task, TaskRecord, TaskStatus
from headgate.core.task_view import TaskUsageBody, snapshot_of
from headgate.errors import WorkflowError
from headgate.workflow.backend import StepTask, TaskState
from headgate.workflow.placeholders import Text
from headgate.workflow.remote_journal import SentOrder
from headgate.workflow.remote_tasks import (
    BATCH_BYTES,
    Parcel,
    SharedFields,
    batch_size,
    check_for_service,
    gone_task,
    needed_steps,
    parcel_of,
    task_of,
    waits_for_window,
)
from headgate.workflow.workflow import (
    CallWork,
    CommandWork,
    HttpWork,
    Step,
    StepItems,
    Work,
)
from workflow.server_support import order, step, workflow

NOW = datetime(2026, 11, 15, 20, 0, tzinfo=UTC)
SENDER = SharedFields("r-1", "eval", "session:s/workflow:eval", "eval")
HERE = Text(parts=("x",))


@pytest.mark.parametrize(
    ("key", "work"),
    [
        ("command", CommandWork(command=(HERE,))),
        ("http", HttpWork(url=HERE)),
        ("call", CallWork(entry_point="a:b")),
    ],
)
def test_a_step_that_names_no_target_is_refused_with_its_name_and_line(
    key: str, work: Work
) -> None:
    flow = workflow(step("first"), Step(id="second", line=12, work=work))
    with pytest.raises(WorkflowError) as caught:
        check_for_service(flow, "eval.yaml")
    line = str(caught.value)
    assert line.startswith(f"eval.yaml:12: steps[1].{key}: step 'second': a service runs only")
    assert "http, command, callable or pull" in line


def test_steps_with_targets_run_on_a_service() -> None:
    check_for_service(workflow(step("a"), step("b", target="x")), "eval.yaml")


def test_a_task_says_all_that_its_step_says() -> None:
    chosen = step(
        "case", target="echo", priority=-3, weight=2.0, retries=2, labels={"run": "mine", "k": "v"}
    )
    body: dict[str, Any] = parcel_of(
        order(4, of=chosen, micro_usd=70_000, params={"n": 1}), SENDER, is_needed=True, now=NOW
    ).body
    assert body["labels"] == {"run": "r-1", "k": "v", "workflow": "eval", "step": "case"}
    assert (body["agentId"], body["target"], body["maxAttempts"]) == ("eval", "echo", 3)
    assert (body["priority"], body["weight"], body["timeoutSeconds"]) == (-3, 2.0, 3_600.0)
    assert body["estimate"] == {"usd": "0.07"}
    assert "costUsd" not in body
    assert body["scopes"] == ("session:s/workflow:eval",)
    assert body["deadline"] > NOW


@pytest.mark.parametrize(("micro_usd", "usd"), [(70_000, "0.07"), (0, "0.00")])
def test_a_cost_that_is_known_is_sent_as_such(micro_usd: int, usd: str) -> None:
    known = step(cost_micro_usd=micro_usd)
    body = parcel_of(order(1, of=known, micro_usd=micro_usd), SENDER, is_needed=True, now=NOW).body
    assert body["costUsd"] == usd
    assert "estimate" not in body


@pytest.mark.parametrize(
    ("micro_usd", "tokens", "sent"),
    [
        (None,   None, None),
        (0,      None, {"usd": "0.00"}),
        (70_000, None, {"usd": "0.07"}),
        (None,   0,    {"tokens": 0}),
        (None,   5,    {"tokens": 5}),
    ],
)  # fmt: skip
def test_what_a_step_says_it_costs_is_sent_and_zero_is_said(
    micro_usd: int | None, tokens: int | None, sent: dict[str, int | str] | None
) -> None:
    chosen = order(1, micro_usd=micro_usd, tokens=tokens)
    body = parcel_of(chosen, SENDER, is_needed=True, now=NOW).body
    assert body.get("estimate") == sent


@pytest.mark.parametrize(
    ("used", "tokens"),
    [
        (TaskUsageBody(tokens=50, assumed_tokens=50), 50),
        (TaskUsageBody(tokens=7), 7),
        (None, 0),
    ],
)
def test_the_tokens_of_a_step_are_those_that_the_service_has_booked(
    used: TaskUsageBody | None, tokens: int
) -> None:
    record = TaskRecord(task=Task(id="t", project_id="x"))
    snapshot = msgspec.structs.replace(snapshot_of(record), usage=used)
    before = StepTask(number=1, generation=0, task_id="t", state=TaskState.RUNNING)
    assert task_of(snapshot, before).tokens == tokens


def test_a_step_with_an_agent_runs_as_that_one() -> None:
    body = parcel_of(order(1, of=step(agent="coder")), SENDER, is_needed=True, now=NOW).body
    assert body["agentId"] == "coder"


def test_results_are_needed_of_steps_that_others_name() -> None:
    second = step("b", depends_on=("a",))
    third = step("c", foreach=StepItems(step="d"))
    assert needed_steps(workflow(step("a"), second, third, step("d"))) == {"a", "d"}


def parcels(*sizes: int) -> list[Parcel]:
    sent = SentOrder(number=0, generation=0)
    return [Parcel(sent, {}, size) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "most", "count"),
    [
        ([1] * 60, 50, 50),
        ([1] * 3, 50, 3),
        ([1] * 3, 1, 1),
        ([BATCH_BYTES, 1, 1], 50, 1),
        ([BATCH_BYTES * 9, 1], 50, 1),
        ([BATCH_BYTES - 1, 1, 1], 50, 2),
    ],
)
def test_a_batch_is_small_in_number_and_in_bytes(sizes: list[int], most: int, count: int) -> None:
    assert batch_size(parcels(*sizes), most) == count


TASK = StepTask(number=1, generation=0, task_id="tsk_1", state=TaskState.RUNNING)


def ending(state: TaskStatus, error: str | None = None) -> TaskEvent:
    return TaskEvent(id="1", kind=EventKind.COMPLETED, time=NOW, state=state, error=error)


@pytest.mark.parametrize(
    ("event", "is_needed", "state", "error"),
    [
        (None, True, TaskState.FAILED, "nobody knows whether it was done"),
        (None, False, TaskState.FAILED, "nobody knows whether it was done"),
        (ending(TaskStatus.DONE), False, TaskState.DONE, ""),
        (ending(TaskStatus.DONE), True, TaskState.FAILED, "forgotten its result"),
        (ending(TaskStatus.FAILED, "no"), True, TaskState.FAILED, "no"),
        (ending(TaskStatus.REJECTED, "spent"), True, TaskState.REJECTED, "spent"),
        (ending(TaskStatus.CANCELLED), True, TaskState.CANCELLED, ""),
    ],
)
def test_of_a_task_that_is_gone_only_what_was_heard_is_concluded(
    event: TaskEvent | None, *, is_needed: bool, state: TaskState, error: str
) -> None:
    gone = gone_task(TASK, event, is_needed=is_needed)
    assert gone.state is state
    assert error in (gone.error or "")


def why(*holds: dict[str, Any], until: float | None = 9.0, others: int = 0) -> WhyBody:
    reasons = tuple(
        ReasonBody(
            detail=hold,
            message="m",
            until=None if until is None else datetime.fromtimestamp(until, UTC),
            held_by_others=others,
        )
        for hold in holds
    )
    return WhyBody(task_id="t", state=TaskStatus.QUEUED, reasons=reasons)


SHORT = {"reason": "budget_short", "scope": "session:s"}


@pytest.mark.parametrize(
    ("said", "is_stuck"),
    [
        (why(SHORT), True),
        (why({"reason": "gate_closed", "kind": "scope", "name": "session:s"}), True),
        (why({"reason": "project_budget"}, until=None), True),
        (why({"reason": "agent_full"}, SHORT), True),
        (why(SHORT, until=None), False),
        (why(SHORT, others=1), False),
        (why({"reason": "gate_closed", "kind": "slot", "name": "k"}), False),
        (why({"reason": "agent_full"}), False),
        (why(), False),
    ],
)
def test_a_task_is_stuck_if_only_the_window_of_a_budget_can_help(
    said: WhyBody, *, is_stuck: bool
) -> None:
    assert waits_for_window(said) is is_stuck


def test_the_bytes_of_a_task_are_what_its_size_says() -> None:
    parcel = parcel_of(order(1), SENDER, is_needed=True, now=NOW)
    assert len(msgspec.json.encode(parcel.body)) == parcel.size_bytes
