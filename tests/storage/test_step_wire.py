"""Steps and answers between two processes: what arrives is what was sent."""

from __future__ import annotations

import gc
import pickle
from collections import deque
from functools import partial
from typing import Any

import msgspec
import pytest

from headgate.core.admission import QueueLimit, QueueLimits, Rejected
from headgate.core.budgets.escrow import Amounts
from headgate.core.budgets.ledger import SettleRequest
from headgate.core.budgets.reservations import Call
from headgate.core.budgets.scopes import Tenant
from headgate.core.estimates import PROBE, Hold, given
from headgate.core.gates import GateClosure
from headgate.core.idempotency import InvalidEntry, KeyRefusal, RejectedEntry, SubmitKey, TakenEntry
from headgate.core.lifecycle import Finish, TryAgain, Usage
from headgate.core.task import (
    Choice,
    LaneRule,
    Lease,
    PastAttempt,
    Progress,
    Submission,
    Task,
    TaskRecord,
    TaskStatus,
    Terms,
)
from headgate.core.task_money import OpenCalls
from headgate.errors import IllegalSettlementError, StaleEpochError, StoreError
from headgate.storage.audit import Actor, AuditEntry
from headgate.storage.memory import MemoryDatabase
from headgate.storage.sql_store import StoreLedger, TaskTables, be_here
from headgate.storage.store import (
    Assigned,
    Assignment,
    CancelAnswer,
    Cancellation,
    KeyedAnswer,
    KeyedSubmit,
    NewTask,
    NotAssigned,
    Plan,
    Queued,
    Settled,
    Settlement,
    StaleLease,
    TurnedAway,
    UnknownParent,
)
from headgate.storage.transaction import Transaction
from headgate.storage.writer import Job, StepWire
from storage.wired import wired_store

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
    provider="zai",
    status=TaskStatus.QUEUED,
)
TERMS = Terms(
    max_attempts=3, depends_on=("tsk_0",), callback_url="https://example.org/done", names_slot=True
)
SUBMISSION = Submission(
    action="click",
    params=msgspec.Raw(b'{"n": 1}'),
    input=msgspec.Raw(b"null"),
    labels={"a": "b"},
    retry_of="tsk_9",
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)
PAST = PastAttempt(attempt=1, started_at=1.5, ended_at=2.5, error="é broke", micro_usd=7)
LIMITS = QueueLimits(max_queue=10, max_per_agent=5)
NEW = NewTask(
    task=TASK,
    terms=TERMS,
    submission=SUBMISSION,
    limits=LIMITS,
    node_id="n1",
    warning="it expires at ten, before the window opens at eleven",
)
OTHER = msgspec.structs.replace(NEW, task=msgspec.structs.replace(TASK, id="tsk_2"))
FULL = Rejected(
    limit=QueueLimit.PROJECT,
    message="full",
    queued=10,
    max_queue=10,
    max_per_agent=None,
    max_per_project=8,
    queue_share=1.5,
    project_id="p",
)
WRONG = InvalidEntry(code="invalid_field", field="priority", message="is wrong")
KEYED = KeyedSubmit(key=SubmitKey(owner="tok_1", name="k", digest="d"), tasks=(NEW, WRONG, OTHER))
STEPS = (
    NEW,
    Settlement(
        task_id="tsk_1",
        lease=Lease(node_id="n1", attempt=1),
        step=Finish(status=TaskStatus.DONE),
        cost=Usage(tokens=5, micro_usd=7, model="small"),
        result='{"a": [1, 2]}',
        node_id="n2",
    ),
    Settlement(
        task_id="tsk_1",
        lease=Lease(node_id="n1", attempt=2),
        step=TryAgain(not_before=3_000.5, failures=1, error="é \ud800 broke"),
        cost=Usage(model="large"),
        node_id="n2",
        closure=GateClosure(kind="slot", name="key-1", until=5_000.0, why="asked to"),
    ),
    Settlement(
        task_id="tsk_1",
        lease=Lease(node_id="worker-1", attempt=2),
        step=Finish(status=TaskStatus.FAILED, error="broke"),
        cost=Usage(tokens=0),
        node_id="n3",
        tenant=Tenant(agent_id="coder"),
        open_calls=OpenCalls(Amounts(micro_usd=3, tokens=4), has_called=True),
    ),
    KEYED,
    Cancellation("tsk_1", "n2"),
    Cancellation(
        "tsk_1", "n2", AuditEntry(actor=Actor(name="ops", token_id="t1"), action="task.cancel")
    ),
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
                share_tokens=3,
                tokens=1,
                micro_usd=2,
                hold=Hold(micro_usd=PROBE, tokens=given(1)),
                slot="key-2",
                choice=Choice(projects=2, rule=LaneRule.HIGHEST_LOAD),
            )
        ],
    ),
)
TRACELESS = msgspec.structs.replace(NEW, keeps_refusal=False)
# Whoever adds a field has it sent, too, and then adds it here.
FIELDS: dict[type[msgspec.Struct], tuple[str, ...]] = {
    NewTask: ("task", "terms", "submission", "limits", "node_id", "keeps_refusal", "warning"),
    KeyedSubmit: ("key", "tasks"),
    Settlement: (
        "task_id",
        "lease",
        "step",
        "cost",
        "result",
        "closure",
        "node_id",
        "tenant",
        "open_calls",
    ),
    Tenant: ("project_id", "agent_id"),
    Lease: ("node_id", "attempt"),
    Usage: ("tokens", "micro_usd", "model", "is_priced"),
    Cancellation: ("task_id", "node_id", "entry"),
    AuditEntry: ("actor", "action", "subject", "detail", "is_read", "id"),
    Plan: ("epoch", "assignments"),
    Queued: ("record", "position", "warning"),
    TurnedAway: ("record", "rejected"),
    UnknownParent: ("parent_id",),
    KeyedAnswer: ("entries", "fresh", "is_replay"),
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
        self.near, self.far = StepWire(tables.apply), StepWire(tables.apply)
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


@pytest.mark.parametrize("step", [*STEPS, TRACELESS], ids=lambda step: type(step).__name__)
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


def test_the_answers_to_the_steps_of_a_task_arrive_as_they_were_sent() -> None:
    ends = Ends()
    jobs, received = ends.send(NEW)
    queued = Queued(record=record(submission=SUBMISSION), position=4, warning=NEW.warning)
    assert ends.answer(jobs, received, queued) == [queued]

    running = record(
        task=msgspec.structs.replace(TASK, status=TaskStatus.RUNNING),
        submission=SUBMISSION,
        progress=Progress(
            attempt=2, node_id="n1", reserved_tokens=9, slot="key-2", attempts=(PAST,)
        ),
    )
    jobs, received = ends.send(STEPS[-1])
    assert ends.answer(jobs, received, [Assigned(record=running)]) == [[Assigned(record=running)]]

    done = record(
        task=msgspec.structs.replace(TASK, status=TaskStatus.DONE),
        progress=Progress(attempt=1, completed_at=7.5, slot="key-2"),
        result='{"a": [1, 2]}',
        tokens=5,
    )
    jobs, received = ends.send(STEPS[1])
    assert ends.answer(jobs, received, Settled(records=(done,))) == [Settled(records=(done,))]


def keyed_answer(*fresh: Queued | TurnedAway, is_replay: bool = False) -> KeyedAnswer:
    taken = TakenEntry(task_id="tsk_1", state=TaskStatus.QUEUED, position=4, created_at=1_000.25)
    refused = RejectedEntry(task_id="tsk_2", rejected=FULL)
    return KeyedAnswer(entries=(taken, WRONG, refused), fresh=fresh, is_replay=is_replay)


def test_tasks_under_a_key_are_answered_as_others_are() -> None:
    queued = Queued(record=record(submission=SUBMISSION), position=4, warning=NEW.warning)
    turned_away = TurnedAway(
        record=record(
            task=msgspec.structs.replace(OTHER.task, status=TaskStatus.REJECTED),
            submission=SUBMISSION,
            progress=Progress(completed_at=9.0),
        ),
        rejected=FULL,
    )
    both = keyed_answer(queued, turned_away)
    for answer in (both, keyed_answer(queued), keyed_answer(is_replay=True), *KeyRefusal):
        ends = Ends()
        jobs, received = ends.send(KEYED)
        assert ends.answer(jobs, received, answer) == [answer]


def test_of_two_that_settle_one_attempt_both_are_told_the_result_that_counts() -> None:
    ends = Ends()
    jobs, received = ends.send(NEW)
    ends.answer(jobs, received, Queued(record=record(submission=SUBMISSION), position=4))
    late = msgspec.structs.replace(STEPS[1], result="2")
    done = Settled(
        records=(
            record(
                task=msgspec.structs.replace(TASK, status=TaskStatus.DONE),
                progress=Progress(attempt=1, completed_at=7.5),
                result='{"a": [1, 2]}',
            ),
        )
    )
    jobs, received = ends.send(STEPS[1], late)
    assert ends.answer(jobs, received, done, done) == [done, done]


def test_what_a_task_was_given_to_do_is_not_sent_back_to_who_submits_it() -> None:
    ends = Ends()
    long = Submission(action="x" * 2_000)
    jobs, received = ends.send(msgspec.structs.replace(NEW, submission=long))
    queued = Queued(record=record(submission=long), position=4)
    assert ends.answer(jobs, received, queued) == [queued]
    assert len(ends.far.pack_answers(received)) < len(long.action)


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


async def test_an_error_that_was_answered_is_freed_without_a_search_for_garbage() -> None:
    store = wired_store(MemoryDatabase(), clock=lambda: 0.0, keeps_ledger=True)
    await store.open()
    request = SettleRequest(reservation_id="unknown", call=Call.COMMIT)
    gc.disable()
    try:
        with pytest.raises(IllegalSettlementError) as caught:
            await StoreLedger(store).settle(request)
        kept = [one for one in gc.get_objects() if isinstance(one, IllegalSettlementError)]
        assert kept == [caught.value], "only what has arrived"
    finally:
        gc.enable()
        await store.close()


def test_a_fault_arrives_with_the_place_that_it_comes_from() -> None:
    ends = Ends()
    jobs = [Job(_divide)]
    received = ends.far.unpack(ends.near.join([ends.near.pack(job) for job in jobs]))
    with pytest.raises(ZeroDivisionError) as caught:
        received[0].work(None)
    received[0].fail(caught.value)
    ends.near.unpack_answers(ends.far.pack_answers(received), deque(jobs))
    assert isinstance(jobs[0].error, ZeroDivisionError)
    assert "_divide" in jobs[0].error.__notes__[0]


def _divide(_transaction: Transaction) -> float:
    return 1 / 0


def _nothing(_transaction: Transaction) -> None:
    return None
