"""Steps and answers between two processes: what arrives is what was sent."""

from __future__ import annotations

import pickle
from collections import deque
from functools import partial
from typing import Any

import msgspec
import pytest

from headgate.core.admission import QueueLimits
from headgate.core.gates import GateClosure
from headgate.core.outcomes import Finish, TryAgain, Usage
from headgate.core.records import Lease, Progress, Submission, TaskRecord, Terms
from headgate.core.tasks import Task, TaskStatus
from headgate.databases.jobs import Job
from headgate.databases.transaction import Transaction
from headgate.errors import StaleEpochError, StoreError
from headgate.store import (
    Assigned,
    Assignment,
    CancelAnswer,
    NewTask,
    NotAssigned,
    Queued,
    Settled,
    Settlement,
    StaleLease,
    TurnedAway,
    UnknownParent,
)
from headgate.stores.assigning import Plan
from headgate.stores.cancelling import Cancellation
from headgate.stores.sent_records import MAX_KNOWN, KnownTasks
from headgate.stores.step_wire import StepWire
from headgate.stores.task_tables import TaskTables, be_here
from headgate.stores.worksheet import SHORT_SUBMISSION

TASK = Task(
    id="tsk_1",
    project_id="search",
    agent_id="coder",
    priority=3,
    created_at=1_000.25,
    deadline=2_000.5,
    scopes=("session:s",),
    target="browser",
    slot="key-1",
    status=TaskStatus.QUEUED,
)
TERMS = Terms(max_attempts=3, depends_on=("tsk_0",))
SUBMISSION = Submission(
    action="click", params=msgspec.Raw(b'{"n": 1}'), input=msgspec.Raw(b"null"), labels={"a": "b"}
)
LIMITS = QueueLimits(max_queue=10, max_per_agent=5)
NEW = NewTask(task=TASK, terms=TERMS, submission=SUBMISSION, limits=LIMITS, node_id="n1")
STEPS = (
    NEW,
    Settlement(
        task_id="tsk_1",
        lease=Lease(node_id="n1", attempt=1),
        step=Finish(status=TaskStatus.DONE),
        cost=Usage(tokens=5, micro_usd=7),
        result=msgspec.Raw(b'{"a": [1, 2]}'),
    ),
    Settlement(
        task_id="tsk_1",
        lease=Lease(node_id="n1", attempt=2),
        step=TryAgain(not_before=3_000.5, failures=1, error="é \ud800 broke"),
        cost=Usage(),
        closure=GateClosure(kind="slot", name="key-1", until=5_000.0, why="asked to"),
    ),
    Cancellation("tsk_1", "n2"),
    Plan(
        3,
        [
            Assignment(
                task_id="tsk_1",
                attempt=1,
                agent_id="coder",
                node_id="n1",
                starts=True,
                reservation_id="r",
                tokens=1,
                micro_usd=2,
            )
        ],
    ),
)
# Whoever adds a field has it sent, too, and then adds it here.
FIELDS: dict[type[msgspec.Struct], tuple[str, ...]] = {
    NewTask: ("task", "terms", "submission", "limits", "node_id"),
    Settlement: ("task_id", "lease", "step", "cost", "result", "closure"),
    Cancellation: ("task_id", "node_id"),
    Plan: ("epoch", "assignments"),
    Queued: ("record", "position"),
    TurnedAway: ("record", "rejected"),
    UnknownParent: ("parent_id",),
    Settled: ("records",),
    StaleLease: ("task_id",),
    CancelAnswer: ("records", "had_ended"),
    Assigned: ("record",),
    NotAssigned: ("task_id", "record", "refused"),
    TaskRecord: (
        *("task", "terms", "submission", "progress", "agent_id", "position", "result"),
        *("error", "tokens", "micro_usd"),
    ),
}


class Ends:
    """The two ends of a wire, and what is between them."""

    def __init__(self) -> None:
        tables = TaskTables()
        be_here(tables)
        self.near, self.far = StepWire(tables), StepWire(tables)
        self.apply: Any = tables.apply

    def send(self, *works: object) -> tuple[list[Job], list[Job]]:
        """Send steps, and return them as they are here and there."""
        jobs = [Job(work, self.apply) for work in works]
        packed = self.near.join([self.near.pack(job) for job in jobs])
        return jobs, self.far.unpack(packed)

    def answer(self, jobs: list[Job], received: list[Job], *answers: object) -> list[object]:
        """Answer steps there, and return what arrives here."""
        for job, answer in zip(received, answers, strict=True):
            job.answer = answer
        packed = self.far.pack_answers(received)
        return [job.answer for job in self.near.unpack_answers(packed, deque(jobs))]


def record(**fields: Any) -> TaskRecord:
    """Make a record of the task as the store would."""
    given = {"task": TASK, "terms": TERMS, "agent_id": "coder", "position": 4, **fields}
    return TaskRecord(**given)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: type(step).__name__)
def test_a_step_arrives_as_it_was_sent(step: object) -> None:
    _, received = Ends().send(step)
    work = received[0].work
    if isinstance(work, partial):
        # One that no JSON can hold goes the long way.
        work = pickle.loads(work.args[1])
    assert work == step


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_of_what_is_sent_is_known_here(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_fields__ == FIELDS[kind]


def test_what_is_known_of_a_task_need_not_be_sent_again() -> None:
    ends = Ends()
    jobs, received = ends.send(NEW)
    queued = Queued(record=record(submission=SUBMISSION), position=4)
    assert ends.answer(jobs, received, queued) == [queued]

    running = record(
        task=msgspec.structs.replace(TASK, status=TaskStatus.RUNNING),
        submission=SUBMISSION,
        progress=Progress(attempt=1, node_id="n1", reserved_tokens=9),
    )
    jobs, received = ends.send(STEPS[-1])
    assert ends.answer(jobs, received, [Assigned(record=running)]) == [[Assigned(record=running)]]

    done = record(
        task=msgspec.structs.replace(TASK, status=TaskStatus.DONE),
        progress=Progress(attempt=1, completed_at=7.5),
        result=msgspec.Raw(b'{"a": [1, 2]}'),
        tokens=5,
    )
    jobs, received = ends.send(STEPS[1])
    packed_bytes = len(ends.near.pack(jobs[0]))
    assert ends.answer(jobs, received, Settled(records=(done,))) == [Settled(records=(done,))]
    assert packed_bytes < 120


def test_a_task_that_is_not_known_is_sent_whole() -> None:
    ends = Ends()
    long = Submission(action="x" * SHORT_SUBMISSION)
    jobs, received = ends.send(msgspec.structs.replace(NEW, submission=long))
    queued = Queued(record=record(submission=long), position=4)
    assert ends.answer(jobs, received, queued) == [queued]

    running = record(
        task=msgspec.structs.replace(TASK, status=TaskStatus.RUNNING),
        submission=long,
        progress=Progress(attempt=1, node_id="n1"),
    )
    jobs, received = ends.send(STEPS[-1])
    assert jobs[0].note == [None]
    assert ends.answer(jobs, received, [Assigned(record=running)]) == [[Assigned(record=running)]]


def test_a_step_that_cannot_be_read_fails_alone() -> None:
    wrong = msgspec.structs.replace(NEW, node_id=5)
    _, received = Ends().send(NEW, wrong, STEPS[1])
    assert (received[0].work, received[2].work) == (NEW, STEPS[1])
    with pytest.raises(StoreError, match="cannot be read"):
        received[1].work(None)


def test_errors_arrive_with_their_kind_and_an_answer_that_cannot_be_sent_is_one() -> None:
    ends = Ends()
    jobs = [Job(_nothing) for _ in range(3)]
    received = ends.far.unpack(ends.near.join([ends.near.pack(job) for job in jobs]))
    received[0].fail(StaleEpochError("epoch 1 is over"))
    received[1].answer = lambda: None
    received[2].answer = {"a": 1}
    ends.near.unpack_answers(ends.far.pack_answers(received), deque(jobs))
    assert isinstance(jobs[0].error, StaleEpochError)
    assert isinstance(jobs[1].error, RuntimeError)
    assert (jobs[2].answer, jobs[2].error) == ({"a": 1}, None)


def test_only_so_many_tasks_are_known() -> None:
    known = KnownTasks(most=2)
    for number in range(3):
        known.put(record(task=msgspec.structs.replace(TASK, id=f"tsk_{number}")))
    assert known.get("tsk_0") is None
    assert known.get("tsk_2") is not None
    assert MAX_KNOWN == 20_000


def _nothing(_transaction: Transaction) -> None:
    return None
