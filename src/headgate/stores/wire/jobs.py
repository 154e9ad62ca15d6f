"""Jobs and their answers as bytes, for a writer in a process of its own.

Steps of tasks are many, so they are written as JSON arrays, at a tenth of what pickling them costs.
Everything else is rare, and is pickled. What a task was given to do and what it resulted in are
JSON already; they travel as texts, so that one which is not well-formed spoils nothing beside it.
"""

from __future__ import annotations

import copyreg
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from typing import Any

import msgspec

from headgate.core.tasks.records import TaskRecord
from headgate.databases.jobs import Batch, Job
from headgate.databases.transaction import Transaction
from headgate.databases.workplace import Asked
from headgate.errors import HeadgateError, StoreError
from headgate.stores.task_tables import TaskTables
from headgate.stores.wire.records import KnownTasks, Sent, Whole, from_whole, whole
from headgate.stores.wire.steps import (
    SentAnswer,
    SentStep,
    read_answer,
    read_step,
    write_answer,
    write_step,
)


class Pickled(Sent, frozen=True, tag="p"):
    """An operation that is not a step, or the answer to one."""

    content: bytes


class RareStep(Sent, frozen=True, tag="r"):
    """A step of which there are few."""

    content: bytes


class Error(Sent, frozen=True, tag="e"):
    """An error that a job came to."""

    content: bytes


_encoder = msgspec.json.Encoder()
_jobs = msgspec.json.Decoder(list[SentStep | RareStep | Pickled])
_job = msgspec.json.Decoder(SentStep | RareStep | Pickled)
_wholes = msgspec.json.Decoder(Whole)
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_answers = msgspec.json.Decoder(list[SentAnswer | Pickled | Error])


class StepWire:
    """The language of jobs on the tables of tasks."""

    def __init__(self, tables: TaskTables) -> None:
        self._apply = tables.apply
        self._known = KnownTasks()

    def pack(self, job: Job) -> bytes:
        """Write one job; raise if it cannot be sent."""
        if job.batch is None:
            return _encoder.encode(Pickled(pickle.dumps(job.work)))
        step = write_step(job, self._known)
        if step is not None:
            # What a process has printed may hold what no JSON can.
            with suppress(UnicodeEncodeError):
                return _encoder.encode(step)
        return _encoder.encode(RareStep(pickle.dumps(job.work)))

    def join(self, packed: Sequence[bytes]) -> bytes:
        """Put jobs together that were packed each by itself."""
        return b"[" + b",".join(packed) + b"]"

    def unpack(self, packed: bytes) -> list[Job]:
        """Read jobs; one that cannot be read fails alone."""
        try:
            return [self._job(sent) for sent in _jobs.decode(packed)]
        except msgspec.MsgspecError:
            return [self._job_alone(raw) for raw in _raws.decode(packed)]

    def pack_answers(self, jobs: Sequence[Job]) -> bytes:
        """Write what came of jobs, in their order."""
        return self.join([_packed_answer(job) for job in jobs])

    def unpack_answers(self, packed: bytes, jobs: deque[Asked]) -> list[Asked]:
        """Read what came of the first of these jobs, take them out, and return them."""
        return [self._answered(jobs.popleft(), sent) for sent in _answers.decode(packed)]

    def _job(self, sent: SentStep | RareStep | Pickled) -> Job:
        if isinstance(sent, Pickled):
            return Job(partial(_run_pickled, sent.content))
        if isinstance(sent, RareStep):
            return Job(partial(_run_rare, self._apply, sent.content))
        work, note = read_step(sent)
        job = Job(work, self._apply)
        job.note = note
        return job

    def _job_alone(self, raw: msgspec.Raw) -> Job:
        try:
            return self._job(_job.decode(raw))
        except msgspec.MsgspecError as error:
            return Job(partial(_fail, str(error)))

    def _answered(self, job: Asked, sent: SentAnswer | Pickled | Error) -> Asked:
        try:
            if isinstance(sent, Error):
                job.fail(pickle.loads(sent.content))  # noqa: S301
            elif isinstance(sent, Pickled):
                job.answer = pickle.loads(sent.content)  # noqa: S301
            else:
                job.answer = read_answer(job, sent, self._known)
        # An answer that cannot be read is for its caller, and not for those beside it.
        except Exception as error:  # noqa: BLE001
            job.fail(error)
        return job


def _fail(problem: str, _transaction: Transaction) -> None:
    line = f"a step cannot be read by the process that writes: {problem}"
    raise StoreError(line)


def _run_rare(apply: Batch[Any, Any], content: bytes, transaction: Transaction) -> object:
    answer = apply(transaction, [pickle.loads(content)])[0]  # noqa: S301
    if isinstance(answer, Exception):
        raise answer
    return answer


def _run_pickled(content: bytes, transaction: Transaction) -> object:
    operation: Callable[[Transaction], object] = pickle.loads(content)  # noqa: S301
    return operation(transaction)


def _packed_answer(job: Job) -> bytes:
    try:
        answer = None if job.batch is None or job.error is not None else write_answer(job)
        if answer is not None:
            with suppress(UnicodeEncodeError):
                return _encoder.encode(answer)
        return _encoder.encode(_pickled_answer(job))
    # The work is done, and only its answer cannot be told.
    except Exception as error:  # noqa: BLE001
        problem = RuntimeError(f"{job.error or error!r}")
        return _encoder.encode(Error(pickle.dumps(problem)))


def _pickled_answer(job: Job) -> Pickled | Error:
    if job.error is not None:
        return Error(pickle.dumps(_with_trace(job.error)))
    return Pickled(_with_records(job.answer))


def _with_trace(error: BaseException) -> BaseException:
    """Note where a fault that nobody foresaw has come from: its traceback cannot be sent."""
    if not isinstance(error, HeadgateError):
        lines = "".join(traceback.format_exception(error))
        error.add_note(f"In the process that writes: {lines}")
    return error


class _Pickler(pickle.Pickler):
    """Pickles records as they are sent otherwise; a node that collects its tasks gets many."""

    dispatch_table = copyreg.dispatch_table.copy()


def _reduced(record: TaskRecord) -> str | tuple[Any, ...]:
    try:
        return _record, (_encoder.encode(whole(record)),)
    except UnicodeEncodeError:
        return record.__reduce__()


def _record(packed: bytes) -> TaskRecord:
    return from_whole(_wholes.decode(packed))


_Pickler.dispatch_table[TaskRecord] = _reduced


def _with_records(answer: object) -> bytes:
    file = BytesIO()
    _Pickler(file).dump(answer)
    return file.getvalue()
