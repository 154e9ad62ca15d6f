"""The one transition table of a task."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from headgate import Task, TaskStatus
from headgate.core.task import TERMINAL, TRANSITIONS, move
from headgate.errors import CallerError, HeadgateError, IllegalTransitionError

Q, A, R = TaskStatus.QUEUED, TaskStatus.ASSIGNED, TaskStatus.RUNNING
D, F, C, X = TaskStatus.DONE, TaskStatus.FAILED, TaskStatus.CANCELLED, TaskStatus.REJECTED

LEGAL = {
    (Q, A), (Q, F), (Q, C), (Q, X),
    (A, R), (A, Q), (A, F), (A, C),
    (R, D), (R, F), (R, C), (R, Q),
}  # fmt: skip


@pytest.mark.parametrize(("current", "wanted"), list(itertools.product(TaskStatus, repeat=2)))
def test_only_the_moves_of_the_table_are_made(current: TaskStatus, wanted: TaskStatus) -> None:
    task = Task(id="t", status=current)
    if (current, wanted) in LEGAL:
        assert move(task, wanted).status is wanted
        assert task.status is current
        return
    with pytest.raises(IllegalTransitionError) as refusal:
        move(task, wanted)
    assert (refusal.value.current, refusal.value.wanted) == (current.value, wanted.value)
    assert isinstance(refusal.value, CallerError)
    assert isinstance(refusal.value, HeadgateError)


def test_terminal_states_are_final() -> None:
    assert {D, F, C, X} == TERMINAL
    assert all(not TRANSITIONS[status] for status in TERMINAL)


def test_every_state_can_be_reached_and_left_for_a_terminal_one() -> None:
    reached = {Q}
    for _ in TaskStatus:
        reached |= {wanted for current in reached for wanted in TRANSITIONS[current]}
    assert reached == set(TaskStatus)


def test_ready_and_queued_are_one_state() -> None:
    assert TaskStatus["READY"] is TaskStatus["QUEUED"]
    assert TaskStatus.READY.value == "queued"


@pytest.mark.parametrize("written", ["READY", "ready", "queued", "QUEUED"])
def test_a_status_is_read_by_name_or_value(written: str) -> None:
    assert msgspec.convert({"status": written}, Task).status is TaskStatus.READY


def test_a_refusal_says_what_is_possible() -> None:
    with pytest.raises(IllegalTransitionError, match="task t is done and cannot become running"):
        move(Task(id="t", status=D), R)
    with pytest.raises(IllegalTransitionError, match="it may become assigned, failed, cancelled"):
        move(Task(id="t"), D)


def test_a_task_is_written_without_its_defaults_and_read_from_either_form() -> None:
    task = Task(id="tsk_1", agent_id="a", estimate_tokens=100)
    written = msgspec.json.encode(task)
    assert written == b'{"id":"tsk_1","agent_id":"a","estimate_tokens":100}'
    # Rows of earlier versions have every field.
    whole = msgspec.json.encode(msgspec.structs.asdict(task))
    assert b'"deadline":null' in whole
    assert [msgspec.json.decode(one, type=Task) for one in (written, whole)] == [task, task]
