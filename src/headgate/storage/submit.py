"""Submitting: a task is stored if there is room for it and its parents are known.

A task that is turned away is stored too, as rejected and without what it was to do, where its
refusal is to be kept. Beyond a number in a second refusals of a project are only counted, and where
the disk has no room nothing is written at all. A task whose parent has failed already is stored as
failed. A known id, or a known key of a whole request, gets the answer that it got the first time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from headgate.core.admission import (
    Admitted,
    QueueLimit,
    Rejected,
    admit,
    admit_scheduled,
    refuse_by_size,
)
from headgate.core.idempotency import (
    KEPT_SECONDS,
    MAX_KEPT_BYTES,
    MAX_KEYS,
    OWNER_SHARE,
    InvalidEntry,
    KeyRefusal,
    OrphanEntry,
    RejectedEntry,
    SubmitEntry,
    SubmitKey,
    TakenEntry,
    is_kept,
    to_try_again,
)
from headgate.core.task import OnParentFailure, Progress, Submission, TaskStatus
from headgate.storage.finish import enter_queue, parent_error
from headgate.storage.migrations import Migration
from headgate.storage.store import (
    KeyedAnswer,
    KeyedSubmit,
    NewTask,
    Queued,
    TurnedAway,
    UnknownParent,
)
from headgate.storage.transaction import Insert, Lookup, Row, Transaction, about
from headgate.storage.unit_of_work import (
    CALL_BYTES,
    ENDED,
    ENDED_BYTES,
    QUEUED,
    REJECTED_BY,
    SCHEDULED,
    SUBMITTED,
    Need,
    Spec,
    TaskRow,
    UnitOfWork,
    size_of,
    submission_text,
)

SubmitAnswer = Queued | TurnedAway | UnknownParent

ROW_BYTES = 2_048
"""What a task takes beside its submission until it ends, about: its rows and the indexes."""

MAX_REFUSAL_BYTES = 2_000
"""What is kept of a submission that was refused."""


def needs(work: UnitOfWork, requests: Sequence[NewTask]) -> list[Need]:
    """Return what reads all that these submissions need, beside their rows."""
    agents = {new.task.agent_id for new in requests}
    return work.need_counts(
        project_ids={new.task.project_id for new in requests},
        agent_ids=[agent for agent in agents if agent is not None],
    )


def task_ids(new: NewTask) -> tuple[str, ...]:
    """Return the tasks that a submission looks at."""
    return (new.task.id, *new.terms.depends_on)


def submit_task(work: UnitOfWork, new: NewTask) -> SubmitAnswer:
    """Store a task if it may wait."""
    known = work.row(new.task.id)
    if known is not None:
        return _again(known, new)
    parents = []
    for parent_id in dict.fromkeys(new.terms.depends_on):
        parent = work.row(parent_id)
        if parent is None:
            return UnknownParent(parent_id=parent_id)
        parents.append(parent)
    return _store(work, new, parents)


def _store(work: UnitOfWork, new: NewTask, parents: list[TaskRow]) -> SubmitAnswer:
    text = submission_text(new.submission)
    no_room = _refused_by_size(work, new, text)
    fatal = _failed_parent(new, parents)
    if no_room is None and fatal is not None:
        return _store_failed(work, new, text, fatal)
    answer = no_room or _admit(work, new)
    if isinstance(answer, Rejected):
        return _store_rejected(work, new, answer)
    row = _row(work, new, text, position=answer.position)
    if parents:
        _depend(work, row, parents)
    work.counters.happen(SUBMITTED, row.agent_id, row.project_id)
    enter_queue(work, row)
    work.notify_dispatcher((row,), by=new.node_id)
    return Queued(record=row.record(new.submission), position=answer.position, warning=new.warning)


def _admit(work: UnitOfWork, new: NewTask) -> Admitted | Rejected:
    project_id, agent_id = new.task.project_id, new.task.agent_id
    queued, scheduled = work.count(QUEUED), work.count(SCHEDULED)
    queued_of_project, scheduled_of_project = work.waiting_of(project_id)
    if new.task.not_before is not None:
        return admit_scheduled(
            new.limits,
            queued=queued,
            scheduled=scheduled,
            scheduled_for_project=scheduled_of_project,
            project_id=project_id,
            agent_id=agent_id,
        )
    return admit(
        new.limits,
        queued=queued - scheduled,
        queued_for_project=queued_of_project - scheduled_of_project,
        queued_for_agent=0 if agent_id is None else work.queued_in(agent_id, project_id),
        project_id=project_id,
        agent_id=agent_id,
    )


def _refused_by_size(work: UnitOfWork, new: NewTask, text: str) -> Rejected | None:
    size = work.disk.size
    if size.room_bytes is None:
        return None
    project_id = new.task.project_id
    added = size_of(text) + ROW_BYTES
    refused = refuse_by_size(
        new.limits,
        size,
        adds_bytes=added,
        ended_bytes=work.count(ENDED_BYTES) + work.count(CALL_BYTES),
        live_bytes_of_project=work.live_bytes_of(project_id),
        project_id=project_id,
        agent_id=new.task.agent_id,
    )
    if refused is None:
        work.disk.take(added)
    return refused


def _again(row: TaskRow, new: NewTask) -> SubmitAnswer:
    record, rejected = row.record(new.submission), row.spec.rejected
    if rejected is not None:
        return TurnedAway(record=record, rejected=rejected)
    return Queued(record=record, position=row.spec.position, warning=new.warning)


def _failed_parent(new: NewTask, parents: list[TaskRow]) -> TaskRow | None:
    if new.terms.on_parent_failure is OnParentFailure.RUN:
        return None
    failed = (row for row in parents if row.is_terminal and row.status is not TaskStatus.DONE)
    return next(failed, None)


def _depend(work: UnitOfWork, row: TaskRow, parents: list[TaskRow]) -> None:
    waiting_for = sum(not parent.is_terminal for parent in parents)
    row.progress = Progress(waiting_for=waiting_for)
    work.depend(row, [parent.id for parent in parents])
    for parent in parents:
        more = parent.progress.dependants + 1
        parent.progress = msgspec.structs.replace(parent.progress, dependants=more)
        work.change(parent)


def _store_failed(work: UnitOfWork, new: NewTask, text: str, parent: TaskRow) -> Queued:
    row = _row(work, new, text, position=0)
    _end_at_once(work, row, TaskStatus.FAILED, parent_error(parent))
    work.counters.happen(SUBMITTED, row.agent_id, row.project_id)
    work.notify_dispatcher((row,), by=new.node_id)
    return Queued(record=row.record(new.submission), position=0)


def _store_rejected(work: UnitOfWork, new: NewTask, rejected: Rejected) -> TurnedAway:
    if not new.keeps_refusal or rejected.limit is QueueLimit.STORE:
        return _untold(new, rejected)
    work.counters.count(REJECTED_BY[rejected.limit])
    if not work.disk.may_keep_refusal(new.task.project_id, work.now):
        work.counters.happen(
            ENDED[TaskStatus.REJECTED], new.task.agent_id, new.task.project_id, is_kept=False
        )
        return _untold(new, rejected)
    small = msgspec.structs.replace(
        new,
        submission=_label_of(new.submission),
        terms=msgspec.structs.replace(new.terms, depends_on=()),
    )
    row = _row(work, small, submission_text(small.submission), position=0, rejected=rejected)
    _end_at_once(work, row, TaskStatus.REJECTED, rejected.message)
    # It has nothing to decide there, but tells those who listen.
    work.notify_dispatcher((row,), by=new.node_id)
    return TurnedAway(record=row.record(new.submission), rejected=rejected)


def _untold(new: NewTask, rejected: Rejected) -> TurnedAway:
    """Answer a refusal that is not kept: its record has not ended, and nobody finds it."""
    row = TaskRow(Spec(new.task, new.terms, 0, rejected))
    return TurnedAway(record=row.record(new.submission), rejected=rejected)


def _label_of(submission: Submission) -> Submission:
    """Return what is kept of a submission that was refused: what it is called, if that is short."""
    named = Submission(
        action=submission.action, labels=submission.labels, retry_of=submission.retry_of
    )
    return named if len(submission_text(named)) <= MAX_REFUSAL_BYTES else Submission()


def _end_at_once(work: UnitOfWork, row: TaskRow, status: TaskStatus, error: str) -> None:
    row.status, row.error = status, error
    row.progress = Progress(completed_at=work.now)
    work.end(row)
    if row.spec.terms.callback_url is not None:
        work.file_delivery(row, row.spec.terms.callback_url)


def _row(
    work: UnitOfWork, new: NewTask, text: str, *, position: int, rejected: Rejected | None = None
) -> TaskRow:
    task, tick = new.task, work.tick()
    # Only the store knows how many attempts have ended; and a new task has always to wait.
    if task.enqueued_tick != tick or task.status is not TaskStatus.QUEUED:
        task = msgspec.structs.replace(task, enqueued_tick=tick, status=TaskStatus.QUEUED)
    row = TaskRow(Spec(task, new.terms, position, rejected, size_of(text)))
    work.add(row, new.submission, text)
    return row


# Submitting under a key. The answer is stored in the transaction that stores the tasks, so a
# request that is sent again after a crash gets the answer that it missed. Requests with the same
# key queue in the writer, and over all nodes behind its lock. A key is forgotten by age and never
# because there are many: one that was forgotten early would run its tasks twice without a word.
# What the keys of one owner take is bounded by a share of the whole.

PART = "submit_keys"
PURGED_AT_ONCE = 1_000
KEY_BYTES = 100
"""What a key takes beside its texts, about."""

_TABLE = """
CREATE TABLE submit_keys (
    owner {text},
    name {text},
    digest {text} NOT NULL,
    entries {text} NOT NULL,
    bytes INTEGER NOT NULL,
    kept_at DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (owner, name)
) {by_key}
"""
_OWNERS = """
CREATE TABLE submit_key_owners (
    owner {text} PRIMARY KEY,
    key_count BIGINT NOT NULL,
    bytes BIGINT NOT NULL
) {by_key}
"""
_COUNT_OWNERS = (
    "INSERT INTO submit_key_owners"
    " SELECT owner, COUNT(*), CAST(SUM(bytes) AS BIGINT) FROM submit_keys GROUP BY owner"
)
_BY_AGE = "CREATE INDEX old_submit_keys ON submit_keys (kept_at)"

MIGRATIONS = (
    Migration(
        number=1,
        sqlite=(_TABLE.format(text="TEXT", by_key="WITHOUT ROWID"), _BY_AGE),
        postgres=(_TABLE.format(text='TEXT COLLATE "C"', by_key=""), _BY_AGE),
    ),
    Migration(
        number=2,
        sqlite=(_OWNERS.format(text="TEXT", by_key="WITHOUT ROWID"), _COUNT_OWNERS),
        postgres=(_OWNERS.format(text='TEXT COLLATE "C"', by_key=""), _COUNT_OWNERS),
    ),
)

_KEEP = Insert(
    table="submit_keys",
    columns=(
        ("owner", "TEXT"),
        ("name", "TEXT"),
        ("digest", "TEXT"),
        ("entries", "TEXT"),
        ("bytes", "INTEGER"),
        ("kept_at", "DOUBLE PRECISION"),
    ),
    key=("owner", "name"),
    updated=("entries", "bytes", "kept_at"),
)
_ADD = Insert(
    table="submit_key_owners",
    columns=(("owner", "TEXT"), ("key_count", "BIGINT"), ("bytes", "BIGINT")),
    key=("owner",),
    added=("key_count", "bytes"),
)
_FIND_OWNERS = about("SELECT owner, key_count, bytes FROM submit_key_owners", "owner")
_FIND = Lookup(
    lambda dialect: (
        "SELECT owner, name, digest, entries, bytes FROM submit_keys WHERE (owner, name) IN"  # noqa: S608
        " (SELECT given.owner, given.name FROM"
        f" {dialect.given({'owner': 'TEXT', 'name': 'TEXT'})})"
    )
)
_FORGET_OWNERS = "DELETE FROM submit_key_owners WHERE key_count <= 0"
_COUNT, _BYTES = "submit_keys", "submit_key_bytes"
_SUMS = f"SELECT name, amount FROM counters WHERE name IN ('{_COUNT}', '{_BYTES}')"  # noqa: S608
_LESS = "UPDATE counters SET amount = amount - ? WHERE name = ?"
_PURGE = (
    "DELETE FROM submit_keys WHERE (owner, name) IN (SELECT owner, name FROM submit_keys"
    " WHERE kept_at < ? ORDER BY kept_at LIMIT ?) RETURNING owner, bytes"
)

_DECODER = msgspec.json.Decoder(tuple[SubmitEntry, ...])
_ENCODER = msgspec.json.Encoder()

Entries = tuple[SubmitEntry, ...]


class _Held(NamedTuple):
    """How many keys there are, and what they take."""

    keys: int
    size_bytes: int

    def plus(self, size_bytes: int, *, keys: int = 1) -> _Held:
        return _Held(self.keys + keys, self.size_bytes + size_bytes)

    def fills(self, share: float) -> bool:
        return self.keys >= MAX_KEYS * share or self.size_bytes >= MAX_KEPT_BYTES * share


_NOTHING = _Held(0, 0)


class _Kept(NamedTuple):
    """What is kept under a key."""

    digest: str
    entries: Entries
    size_bytes: int


class Keys:
    """What is kept under the keys of one transaction, and what it adds."""

    def __init__(self, work: UnitOfWork, steps: Sequence[KeyedSubmit]) -> None:
        self._work = work
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._new: dict[tuple[str, str], Row] = {}
        self._added: dict[str, _Held] = {}
        transaction = work.transaction
        find = (_FIND, [(step.key.owner, step.key.name) for step in steps])
        owners = (_FIND_OWNERS, list({step.key.owner for step in steps}))
        rows, sums, held = transaction.read_all([find, (_SUMS, ()), owners])
        for owner, name, digest, entries, size_bytes in rows:
            self._kept[owner, name] = _Kept(digest, _DECODER.decode(entries), size_bytes)
        amounts: dict[str, int] = dict(sums)
        self._all = _Held(amounts.get(_COUNT, 0), amounts.get(_BYTES, 0))
        self._held = {owner: _Held(count, size) for owner, count, size in held}

    def is_full(self, owner: str) -> bool:
        """Tell whether no further key of this owner can be kept."""
        if self._all.fills(1.0):
            return True
        # Where no token is asked for there is nobody else who could go short.
        return bool(owner) and self._held.get(owner, _NOTHING).fills(OWNER_SHARE)

    def get(self, key: SubmitKey) -> _Kept | None:
        """Return the digest and the answer that are kept under a key."""
        return self._kept.get((key.owner, key.name))

    def keep(self, key: SubmitKey, entries: Entries) -> None:
        """Keep an answer in place of the one before, beginning with the steps after this one."""
        text = _ENCODER.encode(entries).decode()
        texts = (key.owner, key.name, key.digest, text)
        size = KEY_BYTES + sum(len(one) for one in texts)
        place = (key.owner, key.name)
        before = self._kept.get(place)
        self._kept[place] = _Kept(key.digest, entries, size)
        self._new[place] = (*texts, size, self._work.now)
        keys, more = (1, size) if before is None else (0, size - before.size_bytes)
        self._all = self._all.plus(more, keys=keys)
        for sums in (self._held, self._added):
            sums[key.owner] = sums.get(key.owner, _NOTHING).plus(more, keys=keys)
        self._work.counters.count(_COUNT, keys)
        self._work.counters.count(_BYTES, more)

    def write(self) -> None:
        """Write the answers that were kept."""
        transaction = self._work.transaction
        transaction.insert(_KEEP, list(self._new.values()))
        transaction.insert(_ADD, [(owner, *held) for owner, held in self._added.items()])


def submit_keyed(work: UnitOfWork, keys: Keys, step: KeyedSubmit) -> KeyedAnswer | KeyRefusal:
    """Store the tasks of a request and what to answer, or find what was answered.

    Of a request that is known, the tasks that had no room are tried again.
    """
    kept = keys.get(step.key)
    if kept is None:
        if keys.is_full(step.key.owner):
            return KeyRefusal.FULL
        entries, fresh = _try(work, step.tasks)
        if is_kept(entries):
            keys.keep(step.key, entries)
        return KeyedAnswer(entries=entries, fresh=fresh, is_replay=False)
    if kept.digest != step.key.digest:
        return KeyRefusal.MISMATCH
    own = _own(work, step, kept.entries)
    places = to_try_again(kept.entries, step.tasks)
    if not places:
        return KeyedAnswer(entries=kept.entries, fresh=own, is_replay=not own)
    tried, fresh = _try(work, [step.tasks[place] for place in places])
    outcomes = dict(zip(places, tried, strict=True))
    entries = tuple([outcomes.get(place, entry) for place, entry in enumerate(kept.entries)])
    if not all(isinstance(entry, RejectedEntry) for entry in tried):
        keys.keep(step.key, entries)
    return KeyedAnswer(entries=entries, fresh=(*own, *fresh), is_replay=False)


def _try(
    work: UnitOfWork, tasks: Iterable[NewTask | InvalidEntry]
) -> tuple[Entries, tuple[SubmitAnswer, ...]]:
    """Store tasks, and return what is kept of each and what became of those that are tasks."""
    outcomes = [one if isinstance(one, InvalidEntry) else submit_task(work, one) for one in tasks]
    fresh = [outcome for outcome in outcomes if not isinstance(outcome, InvalidEntry)]
    return tuple([entry_of(outcome) for outcome in outcomes]), tuple(fresh)


def new_tasks(steps: Sequence[KeyedSubmit]) -> list[NewTask]:
    """Return the tasks that requests would store."""
    return [task for step in steps for task in step.tasks if isinstance(task, NewTask)]


def purge_keys(transaction: Transaction, now: float) -> bool:
    """Forget some keys that are old enough, and tell whether there may be more."""
    rows = transaction.read(_PURGE, (now - KEPT_SECONDS, PURGED_AT_ONCE))
    if rows:
        transaction.run(_LESS, (len(rows), _COUNT))
        transaction.run(_LESS, (sum(size for _, size in rows), _BYTES))
        transaction.insert(_ADD, _less_by_owner(rows))
        transaction.run(_FORGET_OWNERS, ())
    return len(rows) == PURGED_AT_ONCE


def _less_by_owner(rows: Sequence[Row]) -> list[Row]:
    gone: dict[str, _Held] = {}
    for owner, size in rows:
        gone[owner] = gone.get(owner, _NOTHING).plus(size)
    return [(owner, -held.keys, -held.size_bytes) for owner, held in gone.items()]


def _own(work: UnitOfWork, step: KeyedSubmit, entries: Entries) -> tuple[SubmitAnswer, ...]:
    """Return what this step stored itself, if its transaction is run once more after its commit."""
    stored = {one.task_id for one in entries if isinstance(one, TakenEntry)}
    return tuple([submit_task(work, new) for new in new_tasks([step]) if new.task.id in stored])


def entry_of(outcome: SubmitAnswer | InvalidEntry) -> SubmitEntry:
    """Return what is kept of what became of a task."""
    if isinstance(outcome, InvalidEntry):
        return outcome
    if isinstance(outcome, Queued):
        task = outcome.record.task
        return TakenEntry(
            task_id=task.id,
            state=task.status,
            position=outcome.position,
            created_at=task.created_at,
            warning=outcome.warning,
        )
    if isinstance(outcome, TurnedAway):
        return RejectedEntry(task_id=outcome.kept_id, rejected=outcome.rejected)
    return OrphanEntry(parent_id=outcome.parent_id)
