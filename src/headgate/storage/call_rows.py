"""Calls through the gateway that have ended: one row each, and everything that their end books.

A call is no task: nothing is written while it waits. One that runs for longer than a moment is
noted with others in a transaction of its own, so that a crash leaves a row of it: ended, with an
outcome that nobody knows. Its row and its usage have what was held for it, as assumed; the ledger
books that when the lease of the money ends. If the call ends after all, its real end replaces both.
Where several nodes run, the place that is kept for a client to come back is noted as well, for the
node that dispatches next.

The end of a call is one transaction: what was
held for it is settled, its row is inserted, and its usage is added to the rows that reports and
shares are reckoned from. A call of a running task adds to the sums of its attempt instead, since
the end of the task books what its calls have used. Where the ledger is outside the store nothing is
settled here.

Rule: a call ends once, by its id. The same end again changes nothing.

Ids grow with time, so the key of the table is the order of a list, and its age. One index finds the
calls of a project in that order: for whoever may see no others, and for making room at the cost of
whoever has most. Another one finds whose a stored response is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from headgate.core.budgets.escrow import Amounts, slice_size
from headgate.core.budgets.ledger import Refused, ReserveRequest, SettleRequest, UnheldCost
from headgate.core.budgets.reservations import Call, Reservation
from headgate.core.budgets.scopes import ROOT, Scope, charged_scopes
from headgate.core.call import CALL_PREFIX, CallRecord, CallState
from headgate.core.lifecycle import MAX_MODEL_LENGTH
from headgate.core.money import MicroUsd, Tokens
from headgate.core.rate_limits import RateCharge
from headgate.core.retention import CALL_RETENTION_SECONDS
from headgate.errors import (
    CallerError,
    LedgerUnavailableError,
    StoreError,
    StoreUnavailableError,
)
from headgate.storage import ledger, task_calls
from headgate.storage.finish import is_overrun
from headgate.storage.migrations import Migration, first_migration
from headgate.storage.schema import TASK_COLUMNS
from headgate.storage.task_ids import PREFIX, first_id_at
from headgate.storage.transaction import Access, Insert, Lookup, Row, Transaction, Value, about
from headgate.storage.unit_of_work import TICK, Counters, size_of, to_task_row

PART = "calls"

_TABLES = """
CREATE TABLE calls (
    id {text} PRIMARY KEY,
    project_id {text} NOT NULL,
    agent_id {text} NOT NULL,
    model {text} NOT NULL,
    upstream {text} NOT NULL,
    state {text} NOT NULL,
    slot {text},
    task_id {text},
    record {text} NOT NULL
) {by_key};
CREATE INDEX calls_of_projects ON calls (project_id, id)
"""

_RUNNING_TABLE = """
CREATE TABLE running_calls (
    id {text} PRIMARY KEY,
    seen_at DOUBLE PRECISION NOT NULL,
    record {text} NOT NULL
) {by_key}
"""

_NODE_OF_RUNNING = "ALTER TABLE running_calls ADD COLUMN node_id TEXT NOT NULL DEFAULT ''"

_KEPT_PLACES = (
    "ALTER TABLE running_calls ADD COLUMN identity TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE running_calls ADD COLUMN kept_until DOUBLE PRECISION NOT NULL DEFAULT 0",
)
"""A call with an identity does not run: its place is kept for its client."""

_OF_RESPONSES = (
    "ALTER TABLE calls ADD COLUMN response_id TEXT",
    "CREATE INDEX calls_of_responses ON calls (response_id) WHERE response_id IS NOT NULL",
)
"""The call that a provider's stored response came of; earlier calls are not found by it."""

MIGRATIONS = (
    first_migration(_TABLES),
    msgspec.structs.replace(first_migration(_RUNNING_TABLE), number=2),
    Migration(number=3, sqlite=(_NODE_OF_RUNNING,), postgres=(_NODE_OF_RUNNING,)),
    Migration(number=4, sqlite=_KEPT_PLACES, postgres=_KEPT_PLACES),
    Migration(number=5, sqlite=_OF_RESPONSES, postgres=_OF_RESPONSES),
)

_ROWS = Insert(
    table="calls",
    columns=(
        ("id", "TEXT"),
        ("project_id", "TEXT"),
        ("agent_id", "TEXT"),
        ("model", "TEXT"),
        ("upstream", "TEXT"),
        ("state", "TEXT"),
        ("slot", "TEXT"),
        ("task_id", "TEXT"),
        ("record", "TEXT"),
        ("response_id", "TEXT"),
    ),
)

_RUNNING = Insert(
    table="running_calls",
    columns=(
        ("id", "TEXT"),
        ("seen_at", "DOUBLE PRECISION"),
        ("record", "TEXT"),
        ("node_id", "TEXT"),
        ("identity", "TEXT"),
        ("kept_until", "DOUBLE PRECISION"),
    ),
    key=("id",),
    updated=("seen_at", "record", "node_id", "identity", "kept_until"),
)

MAX_LOST = 1_000
"""How many calls are ended at a time that a crash has left behind."""

MAX_ELSEWHERE = 20_000
"""How many calls are counted that run at other nodes than the one that dispatches."""

LOST = "the service ended while the call ran; nobody knows its outcome"
"""What is said of a call that a crash has left behind."""

MAX_TEXT = 1_000
"""How much of an error or another text that a client or an upstream chose is kept."""

MAX_AT_ONCE = 512
"""How many ends one transaction writes."""

MAX_WAITING = 16_384
"""How many ends may wait for their transaction."""

MAX_LOOKED_AT = 20_000
"""How many calls one question looks at, however few of them match."""

SettleAnswer = Reservation | CallerError | None
"""What became of a settlement; None where there was none, or the call had ended before."""


class EndedCall(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a call: its record, what settles its reservation, and what counts in the share.

    Without `settle` nothing was held, or the ledger is outside the store. `rate_charges` are what
    it counted in rate limits, and what others counted before that is not kept yet. `of_task` is set
    if the attempt of a running task books what it cost; one that `is_late` has outlived that, and
    counts by itself. `over` is what a call of a task cost beyond all that was held for it. One that
    `is_noted` was noted as running.
    """

    record: CallRecord
    settle: SettleRequest | None = None
    share: Amounts = Amounts()
    rate_charges: tuple[RateCharge, ...] = ()
    of_task: task_calls.TaskPart | None = None
    is_late: bool = False
    over: Amounts = Amounts()
    is_noted: bool = False


class CallQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which calls to list, newest first; what is None is any, and no states are all of them.

    Times are Unix seconds of the arrival. `before` is the `next_before` of the page before.
    """

    states: tuple[CallState, ...] = ()
    project_id: str | None = None
    agent_id: str | None = None
    model: str | None = None
    upstream: str | None = None
    slot: str | None = None
    task_id: str | None = None
    since: float | None = None
    until: float | None = None
    before: str | None = None
    limit: int = 100

    def matches(self, record: CallRecord) -> bool:
        """Tell whether a call belongs on the list, from `before` on."""
        if self.states and record.state not in self.states:
            return False
        if self.before is not None and record.id >= self.before:
            return False
        if self.since is not None and record.id < first_call_id_at(self.since):
            return False
        if self.until is not None and record.id >= first_call_id_at(self.until):
            return False
        return all(
            wanted is None or wanted == getattr(record, name)
            for name, wanted in self._names().items()
        )

    def _names(self) -> dict[str, str | None]:
        return {
            "project_id": self.project_id,
            "agent_id": self.agent_id,
            "model": self.model,
            "upstream": self.upstream,
            "slot": self.slot,
            "task_id": self.task_id,
        }

    def conditions(self) -> tuple[list[str], list[Value]]:
        """Return what holds for the calls beside their time and their project, with the values."""
        given = {name: one for name, one in self._names().items() if one is not None}
        given.pop("project_id", None)
        conditions = [f"{name} = ?" for name in given]
        values: list[Value] = [*given.values()]
        if self.states:
            conditions.append(f"state IN ({', '.join('?' * len(self.states))})")
            values += [state.value for state in self.states]
        return conditions, values

    def part(self) -> tuple[str, list[Value]]:
        """Return which calls are looked at: those of a project within a time, as SQL."""
        ends = (
            ("project_id = ?", self.project_id),
            ("id < ?", self.before),
            ("id < ?", None if self.until is None else first_call_id_at(self.until)),
            ("id >= ?", None if self.since is None else first_call_id_at(self.since)),
        )
        conditions = [condition for condition, end in ends if end is not None]
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return where, [end for _, end in ends if end is not None]


class CallPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a list: it ends at the limit, or where enough calls were looked at.

    `next_before` is the `before` of the page after it; None if this one is the last.
    """

    records: tuple[CallRecord, ...]
    next_before: str | None = None


def first_call_id_at(seconds: float) -> str:
    """Return what no id of a call of this time or later is below, and every earlier one is."""
    return CALL_PREFIX + first_id_at(seconds).removeprefix(PREFIX)


# The end of calls, as a function on a transaction: who holds money for many calls at once can put
# it into the transaction that does the rest.

_encoder = msgspec.json.Encoder()
_records = msgspec.json.Decoder(CallRecord)
_KNOWN = about("SELECT id, record FROM calls", "id")


def finish(transaction: Transaction, now: float, ended: Sequence[EndedCall]) -> list[SettleAnswer]:
    """Write the end of calls; each has an answer of its own, and one that is known has none.

    Their records are `cleaned`.
    """
    known = _known(transaction, now, [one.record.id for one in ended])
    new: dict[int, EndedCall] = {}
    for place, one in enumerate(ended):
        if one.record.id not in known:
            known.add(one.record.id)
            new[place] = one
    answers: list[SettleAnswer] = [None] * len(ended)
    over = [_unheld(one.record, "over", one.over) for one in new.values() if any(one.over)]
    if over:
        _book(transaction, now, over)
    new = _by_themselves(transaction, now, new)
    settled = {place: one.settle for place, one in new.items() if one.settle is not None}
    if settled:
        found = ledger.apply_batch(transaction, [*settled.values()], now)
        for place, answer in zip(settled, found, strict=True):
            answers[place] = _settled(answer)
    if new:
        counters = Counters(now)
        rows = [_add(counters, one) for one in new.values()]
        of_tasks = task_calls.rows(
            (one.record, one.of_task, _model(one.record))
            for one in new.values()
            if one.of_task is not None
        )
        transaction.insert_all([(_ROWS, rows), (task_calls.TASK_CALLS, of_tasks), *counters.rows()])
    noted = [one.record.id for one in ended if one.is_noted]
    if noted:
        transaction.run(_FORGET_RUNNING, noted)
    return answers


# What a response in the background cost is known after its call has ended.


def correct(
    transaction: Transaction, now: float, *, record: CallRecord, settle: SettleRequest | None
) -> bool:
    """Book what a call cost in place of what was assumed; False if that was done, or is too late.

    Without `settle` the ledger is outside the store and has it already.
    """
    before = get(transaction, call_id=record.id)
    if before is None or not before.reservation_id:
        return False
    if settle is not None:
        (answer,) = ledger.apply_batch(transaction, [settle], now)
        if isinstance(answer, CallerError):
            return False
    record = cleaned(record)
    counters = Counters(now)
    text = _encoder.encode(record).decode()
    size_bytes = size_of(text) - size_of(_encoder.encode(before).decode())
    counters.keep_calls(record.project_id, 0, size_bytes)
    tokens = (record.tokens or 0) - (before.tokens or 0)
    micro_usd = (record.micro_usd or 0) - (before.micro_usd or 0)
    counters.spend(record.project_id, tokens=tokens, micro_usd=micro_usd)
    counters.use(
        (record.project_id, record.agent_id, _model(record)),
        is_over=False,
        is_call=True,
        calls=0,
        slot=record.slot or "",
        tokens=tokens,
        micro_usd=micro_usd,
        assumed_tokens=record.assumed_tokens - before.assumed_tokens,
        assumed_micro_usd=record.assumed_micro_usd - before.assumed_micro_usd,
        unpriced_tokens=record.tokens or 0 if record.is_unpriced else 0,
        priced_micro_usd=0 if record.is_unpriced else record.micro_usd or 0,
    )
    transaction.run("UPDATE calls SET record = ? WHERE id = ?", (text, record.id))
    transaction.insert_all(counters.rows())
    return True


# Calls that run: a crash is to leave a row of them, and the next dispatcher to count them.


def note_running(transaction: Transaction, now: float, *, packed: bytes, node_id: str) -> None:
    """Note calls that run at a node, or that they still do."""
    records = [cleaned(one) for one in _unpack_records.decode(packed)]
    rows = [(one.id, now, _encoder.encode(one).decode(), node_id, "", 0.0) for one in records]
    transaction.insert_all([(_RUNNING, rows)])


class KeptPlace(NamedTuple):
    """The place of a call that waits for its client to come back, until a time.

    `identity` is what the call and its retry have in common.
    """

    identity: str
    until: float
    record: CallRecord


def note_places(transaction: Transaction, now: float, *, packed: bytes, node_id: str) -> None:
    """Note places that a node keeps."""
    rows = [
        (one.id, now, _encoder.encode(cleaned(one)).decode(), node_id, identity, until)
        for identity, until, one in _unpack_places.decode(packed)
    ]
    transaction.insert_all([(_RUNNING, rows)])


def places_elsewhere(transaction: Transaction, *, node_id: str) -> tuple[KeptPlace, ...]:
    """Return the places that were noted, but for those of one node; theirs may be gone."""
    rows = transaction.read(_PLACES_ELSEWHERE, (node_id, MAX_ELSEWHERE))
    return tuple(KeptPlace(row[0], row[1], _records.decode(row[2])) for row in rows)


_PLACES_ELSEWHERE = (
    "SELECT identity, kept_until, record FROM running_calls"
    " WHERE identity <> '' AND node_id <> ? ORDER BY id LIMIT ?"
)


def forget_running(transaction: Transaction, _now: float, *, ids: Sequence[str]) -> None:
    """Forget that calls run: they wait again, or have gone."""
    transaction.run(_FORGET_RUNNING, ids)


def running_elsewhere(
    transaction: Transaction, *, node_id: str, now: float, seen_after: float
) -> tuple[CallRecord, ...]:
    """Return the calls that run at nodes which are alive, but for those of one node."""
    values = (node_id, now, seen_after, MAX_ELSEWHERE)
    rows = transaction.read(_RUNNING_ELSEWHERE, values)
    return tuple(_records.decode(row[0]) for row in rows)


_RUNNING_ELSEWHERE = (
    "SELECT record FROM running_calls JOIN nodes ON nodes.id = running_calls.node_id"
    " WHERE identity = '' AND running_calls.node_id <> ? AND lease_until > ? AND seen_at > ?"
    " ORDER BY running_calls.id LIMIT ?"
)


class LostQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which noted calls are lost: those that nobody has seen since a time, but for those named.

    `with_dead_nodes` adds those whose node has let its lease end.
    """

    seen_before: float
    without: frozenset[str]
    with_dead_nodes: bool

    def texts(self, transaction: Transaction, now: float) -> dict[str, str]:
        """Return the records of lost calls by their id, as they were noted."""
        which, values = "seen_at < ?", [self.seen_before]
        if self.with_dead_nodes:
            which, values = f"({which} OR {_NODE_IS_DEAD})", [self.seen_before, now]
        rows = transaction.read(
            f"{_RUNS} AND {which} ORDER BY id LIMIT ?", (*values, MAX_LOST + len(self.without))
        )
        return {row[0]: row[1] for row in rows if row[0] not in self.without}


_RUNS = "SELECT id, record FROM running_calls WHERE identity = ''"
_NODE_IS_DEAD = (
    "NOT EXISTS (SELECT 1 FROM nodes WHERE nodes.id = running_calls.node_id AND lease_until > ?)"
)


def has_lost(transaction: Transaction, *, query: LostQuery, now: float) -> bool:
    """Tell whether there are calls to end."""
    return bool(query.texts(transaction, now))


def end_lost(transaction: Transaction, now: float, *, query: LostQuery) -> list[CallRecord]:
    """End calls that are lost, and return those that had not ended."""
    texts = query.texts(transaction, now)
    if not texts:
        return []
    known = {row[0] for row in transaction.read(_KNOWN, list(texts))}
    lost = [_as_lost(_records.decode(one), now) for name, one in texts.items() if name not in known]
    ended = [
        EndedCall(record=one, share=Amounts(one.micro_usd or 0, one.tokens or 0)) for one in lost
    ]
    finish(transaction, now, ended)
    transaction.run(_FORGET_RUNNING, list(texts))
    return lost


def _as_lost(record: CallRecord, now: float) -> CallRecord:
    """Return a call as it has ended by a crash: it may have cost what was held for it."""
    return msgspec.structs.replace(
        record,
        state=CallState.FAILED,
        error=LOST,
        ended_at=now,
        tokens=record.reserved_tokens,
        micro_usd=record.reserved_micro_usd,
        assumed_tokens=record.reserved_tokens,
        assumed_micro_usd=record.reserved_micro_usd,
    )


_FORGET_RUNNING = Lookup(
    lambda dialect: f"DELETE FROM running_calls WHERE id IN {dialect.texts}",  # noqa: S608
    one="DELETE FROM running_calls WHERE id = ?",
)
_unpack_records = msgspec.msgpack.Decoder(list[CallRecord])
_unpack_places = msgspec.msgpack.Decoder(list[KeptPlace])


def _known(transaction: Transaction, now: float, ids: Sequence[str]) -> set[str]:
    """Return the calls of these that have ended; one that was only taken for lost has not."""
    rows = transaction.read(_KNOWN, ids)
    if not rows:
        return set()
    lost = [(row[0], one) for row in rows if (one := _records.decode(row[1])).error == LOST]
    sizes = {row[0]: size_of(row[1]) for row in rows}
    for name, one in lost:
        # In the hour in which it was counted.
        counters = Counters(one.ended_at or now)
        _deleted(transaction, counters, [(name, one.project_id, sizes[name])])
        if one.task_id is None:
            _take_back(counters, one)
        transaction.insert_all(counters.rows())
    return {row[0] for row in rows}.difference(name for name, _ in lost)


def _by_themselves(
    transaction: Transaction, now: float, ended: dict[int, EndedCall]
) -> dict[int, EndedCall]:
    """Have calls booked by themselves whose task has ended meanwhile; return all, as they are then.

    Another node may end a task before this one has written its last call, and nobody would book
    what that had drawn.
    """
    of_tasks = {
        place: (one.record.task_id or "", one.of_task.attempt)
        for place, one in ended.items()
        if one.of_task is not None
    }
    if not of_tasks:
        return ended
    ids = list(dict.fromkeys(task_id for task_id, _ in of_tasks.values()))
    rows = [to_task_row(row) for row in transaction.read(_TASKS, ids)]
    running = {(row.id, row.progress.attempt) for row in rows if row.is_in_flight}
    late = [place for place, attempt in of_tasks.items() if attempt not in running]
    # What was booked at all that it held has paid for its calls.
    whole = {(row.id, row.progress.whole_attempt) for row in rows}
    unpaid = [place for place in late if of_tasks[place] not in whole]
    costs = [one for place in unpaid for one in _late_costs(ended[place])]
    if costs:
        _book(transaction, now, costs)
    changed = {
        place: msgspec.structs.replace(ended[place], of_task=None, is_late=place in unpaid)
        for place in late
    }
    return ended | changed


def _late_costs(ended: EndedCall) -> list[UnheldCost]:
    """Return what a call had drawn on its task."""
    record, part = ended.record, ended.of_task
    if part is None or not part.keeps_ledger:
        return []
    cost = Amounts(record.micro_usd or 0, record.tokens or 0).minus(part.beside)
    return [_unheld(record, "late", cost)]


def _unheld(record: CallRecord, why: str, cost: Amounts) -> UnheldCost:
    scopes = charged_scopes(ROOT, [Scope(one) for one in record.scopes])
    name = f"{record.id}:{why}"
    return UnheldCost.of(name, scopes, micro_usd=cost.micro_usd, tokens=cost.tokens)


def _book(transaction: Transaction, now: float, costs: Sequence[UnheldCost]) -> None:
    """Book what calls cost that nothing is held for: they were admitted before, and have run.

    A scope that is exhausted by now refuses none of it.
    """
    state = ledger.load(transaction, [request for one in costs for request in one], now)
    for one in costs:
        state.carry_over(one.reserve, now)
        ledger.apply(state, one.commit, now)
    ledger.write(transaction, state, now)


_TASKS = about(f"SELECT {', '.join(TASK_COLUMNS)} FROM tasks", "id")  # noqa: S608


def _settled(answer: ledger.Answer | CallerError) -> Reservation | CallerError:
    if isinstance(answer, Refused):
        raise StoreError("the ledger refused a settlement")
    return answer


def is_usage(record: CallRecord) -> bool:
    """Tell whether a call counts as one: it began, and was not refused."""
    return record.started_at is not None and record.state is not CallState.REFUSED


def _add(counters: Counters, ended: EndedCall) -> Row:
    """Count what a call has used, and return its row."""
    record = ended.record
    if record.task_id is None or ended.is_late:
        if any(ended.share):
            micro_usd, tokens = ended.share
            counters.spend(record.project_id, tokens=tokens, micro_usd=micro_usd)
        if is_usage(record):
            _count(counters, record)
    if ended.rate_charges:
        counters.charge(ended.rate_charges)
    text = _encoder.encode(record).decode()
    counters.keep_calls(record.project_id, 1, size_of(text))
    return (
        record.id,
        record.project_id,
        record.agent_id,
        record.model,
        record.upstream,
        record.state._value_,
        record.slot,
        record.task_id,
        text,
        record.response_id or None,
    )


def _count(counters: Counters, record: CallRecord) -> None:
    tokens, micro_usd = record.tokens or 0, record.micro_usd or 0
    assumed_tokens, assumed_micro_usd = record.assumed_tokens, record.assumed_micro_usd
    reported, reported_micro_usd = tokens - assumed_tokens, micro_usd - assumed_micro_usd
    counters.count(TICK)
    if record.task_id is None:
        counters.start(record.project_id)
        if record.state is CallState.DONE:
            counters.complete(record.project_id)
    counters.use(
        (record.project_id, record.agent_id, _model(record)),
        is_over=False,
        is_call=True,
        slot=record.slot or "",
        tokens=tokens,
        micro_usd=micro_usd,
        assumed_tokens=assumed_tokens,
        assumed_micro_usd=assumed_micro_usd,
        unpriced_tokens=reported if record.is_unpriced else 0,
        priced_micro_usd=0 if record.is_unpriced else reported_micro_usd,
        is_overrun=is_overrun(
            reserved_tokens=record.reserved_tokens,
            reserved_micro_usd=record.reserved_micro_usd,
            tokens=reported,
            micro_usd=reported_micro_usd,
        ),
    )


def _take_back(counters: Counters, lost: CallRecord) -> None:
    """Count out a call that was taken for lost."""
    tokens, micro_usd = lost.tokens or 0, lost.micro_usd or 0
    counters.count(TICK, -1)
    counters.start(lost.project_id, -1)
    counters.spend(lost.project_id, tokens=-tokens, micro_usd=-micro_usd)
    counters.use(
        (lost.project_id, lost.agent_id, _model(lost)),
        is_over=False,
        is_call=True,
        calls=-1,
        slot=lost.slot or "",
        tokens=-tokens,
        micro_usd=-micro_usd,
        assumed_tokens=-lost.assumed_tokens,
        assumed_micro_usd=-lost.assumed_micro_usd,
    )


def _model(record: CallRecord) -> str:
    """Return the model that usage counts for; one that could not be shown counts as unknown."""
    name = record.upstream_model or record.model
    return name if len(name) <= MAX_MODEL_LENGTH and name.isprintable() else ""


def cleaned(record: CallRecord) -> CallRecord:
    """Return a record without what no database takes, and no more of long texts than is of use."""
    model, error = _storable(record.model), record.error
    if error is not None:
        error = _storable(error)
    if model is record.model and error is record.error:
        return record
    return msgspec.structs.replace(record, model=model, error=error)


def _storable(text: str) -> str:
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT]
    if text.isprintable():
        return text
    return text.replace("\0", "").encode(errors="replace").decode()


# A slice of a budget that calls draw from: the old one is committed at what was spent of it, and
# the next one reserved, in the transaction that writes the calls.


class SliceTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a slice: `spent` of the old one is committed, and a new one is reserved.

    Either name may be empty: the first slice has none before it, the last none after it.
    """

    old: str = ""
    new: str = ""
    scopes: tuple[Scope, ...]
    spent: Amounts = Amounts()
    in_flight: Amounts = Amounts()
    wanted: Amounts = Amounts()
    least: Amounts = Amounts()
    lease_seconds: float
    ended: tuple[EndedCall, ...] = ()


class SliceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The slice that is held from now on; with `is_near` it has no headroom."""

    held: Amounts = Amounts()
    is_near: bool = False
    until: float | None = None


def turn_slice(transaction: Transaction, now: float, turn: SliceTurn) -> SliceAnswer:
    """Commit a slice at what was spent of it, and reserve the next.

    What is in flight was admitted before, so it is held whatever the limits say by now; only
    headroom is asked for. It recognises its own work: a slice that is there already is returned.
    """
    if turn.ended:
        finish(transaction, now, turn.ended)
    settle = SettleRequest(
        reservation_id=turn.old,
        call=Call.COMMIT,
        micro_usd=MicroUsd(turn.spent.micro_usd),
        tokens=Tokens(turn.spent.tokens),
    )
    in_flight = _slice_request(turn, turn.in_flight)
    requests = [settle] if turn.old else []
    state = ledger.load(transaction, [*requests, in_flight], now)
    known = state.reservations.get(turn.new)
    for request in requests:
        ledger.apply(state, request, now)
    accounts = [state.account(scope, now) for scope in turn.scopes]
    size = slice_size(
        accounts, in_flight=turn.in_flight, wanted=turn.wanted, least=turn.least, now=now
    )
    if known is not None:
        held = Amounts(known.micro_usd, known.tokens)
        return SliceAnswer(held=held, is_near=True, until=size.until)
    answer = SliceAnswer(held=size.held, is_near=size.is_near, until=size.until)
    if not turn.new or size.held == Amounts():
        answer = msgspec.structs.replace(answer, held=Amounts())
    elif size.held == turn.in_flight:
        state.carry_over(in_flight, now)
    elif not isinstance(ledger.apply(state, _slice_request(turn, size.held), now), Reservation):
        answer = SliceAnswer(held=turn.in_flight, is_near=True, until=size.until)
        if turn.in_flight != Amounts():
            state.carry_over(in_flight, now)
    ledger.write(transaction, state, now)
    return answer


def _slice_request(turn: SliceTurn, held: Amounts) -> ReserveRequest:
    return ReserveRequest(
        reservation_id=turn.new,
        scopes=turn.scopes,
        micro_usd=MicroUsd(held.micro_usd),
        tokens=Tokens(held.tokens),
        lease_seconds=turn.lease_seconds,
        dispatched=True,
    )


# Reading calls. A list goes over the ids from the newest back, and looks at a bounded number.


def get(transaction: Transaction, *, call_id: str) -> CallRecord | None:
    """Return a call that has ended."""
    rows = transaction.read("SELECT record FROM calls WHERE id = ?", (call_id,))
    return _records.decode(rows[0][0]) if rows else None


def of_response(transaction: Transaction, *, response_id: str) -> CallRecord | None:
    """Return the call that a stored response came of."""
    sql = "SELECT record FROM calls WHERE response_id = ? ORDER BY id LIMIT 1"
    rows = transaction.read(sql, (response_id,))
    return _records.decode(rows[0][0]) if rows else None


def ended_of(transaction: Transaction, *, ids: Sequence[str]) -> tuple[CallRecord, ...]:
    """Return those of some calls that have ended."""
    return tuple(_records.decode(row[1]) for row in transaction.read(_KNOWN, ids)) if ids else ()


def latest(transaction: Transaction, *, most: int) -> tuple[CallRecord, ...]:
    """Return the calls that came last, the oldest of them first."""
    rows = transaction.read("SELECT record FROM calls ORDER BY id DESC LIMIT ?", (most,))
    return tuple(_records.decode(row[0]) for row in reversed(rows))


_COLUMNS = "id, agent_id, model, upstream, state, slot, task_id"


def find(transaction: Transaction, query: CallQuery) -> CallPage:
    """List calls, as many as fit on one page."""
    where, bounds = query.part()
    part = f"FROM calls{where} ORDER BY id DESC"
    conditions, values = query.conditions()
    if conditions:
        looked_at = f"(SELECT {_COLUMNS} {part} LIMIT {MAX_LOOKED_AT}) AS looked_at"
        matching = f"WHERE {' AND '.join(conditions)} ORDER BY id DESC"
        sql = f"SELECT id FROM {looked_at} {matching} LIMIT ?"  # noqa: S608
    else:
        sql = f"SELECT id {part} LIMIT ?"
    found = [row[0] for row in transaction.read(sql, (*bounds, *values, query.limit + 1))]
    ids = found[: query.limit]
    texts: dict[str, str] = dict(transaction.read(_KNOWN, ids))
    next_before = ids[-1] if len(found) > query.limit else None
    if next_before is None and conditions:
        further = f"SELECT id {part} LIMIT 2 OFFSET {MAX_LOOKED_AT - 1}"
        rows = transaction.read(further, bounds)
        next_before = rows[0][0] if len(rows) > 1 else None
    # One that was evicted between the questions is no longer there to be listed.
    records = tuple(_records.decode(texts[call_id]) for call_id in ids if call_id in texts)
    return CallPage(records=records, next_before=next_before)


# Making room. What is deleted is counted out by whoever has the counters of the step.

_OLDEST = "SELECT id, project_id, octet_length(record) FROM calls WHERE id < ? ORDER BY id LIMIT ?"
_OLDEST_OF = (
    "SELECT id, project_id, octet_length(record) FROM calls WHERE project_id = ?"
    " ORDER BY id LIMIT ?"
)
_DELETE = Lookup(
    lambda dialect: f"DELETE FROM calls WHERE id IN {dialect.texts}",  # noqa: S608
    one="DELETE FROM calls WHERE id = ?",
)


def delete_old(
    transaction: Transaction, counters: Counters, now: float, *, most: int
) -> list[tuple[str, int]]:
    """Delete calls that were kept long enough, and return the project and the size of each."""
    ends_at = first_call_id_at(now - CALL_RETENTION_SECONDS)
    return _deleted(transaction, counters, transaction.read(_OLDEST, (ends_at, most)))


def delete_oldest_of(
    transaction: Transaction,
    counters: Counters,
    project_id: str,
    *,
    most: int,
    most_bytes: float,
) -> list[tuple[str, int]]:
    """Delete the oldest calls of a project, until they take so much together."""
    chosen: list[Row] = []
    size_bytes = 0
    for row in transaction.read(_OLDEST_OF, (project_id, most)):
        if size_bytes >= most_bytes:
            break
        chosen.append(row)
        size_bytes += row[2]
    return _deleted(transaction, counters, chosen)


def _deleted(
    transaction: Transaction, counters: Counters, rows: Sequence[Row]
) -> list[tuple[str, int]]:
    if rows:
        transaction.run(_DELETE, [row[0] for row in rows])
    for _, project_id, size_bytes in rows:
        counters.keep_calls(project_id, -1, -size_bytes)
    return [(row[1], row[2]) for row in rows]


# The writer may be in a process of its own: then ends are sent as bytes, at a fraction of what
# pickling them costs.

_pack = msgspec.msgpack.Encoder()
_unpack = msgspec.msgpack.Decoder(list[EndedCall])


def pack(ended: Sequence[EndedCall]) -> bytes:
    """Write ends of calls as bytes, without what no database takes."""
    return _pack.encode([_cleaned(one) for one in ended])


def _cleaned(ended: EndedCall) -> EndedCall:
    record = cleaned(ended.record)
    return ended if record is ended.record else msgspec.structs.replace(ended, record=record)


def _finish_packed(transaction: Transaction, now: float, *, packed: bytes) -> list[SettleAnswer]:
    return finish(transaction, now, _unpack.decode(packed))


_turn_pack = msgspec.msgpack.Encoder()
_turn_unpack = msgspec.msgpack.Decoder(SliceTurn)


def _turn_packed(transaction: Transaction, now: float, *, packed: bytes) -> SliceAnswer:
    return turn_slice(transaction, now, _turn_unpack.decode(packed))


class _Waiting:
    """One caller whose calls have ended, and who waits for the answer."""

    __slots__ = ("answers", "ended")

    def __init__(self, ended: Sequence[EndedCall]) -> None:
        self.ended = ended
        future: asyncio.Future[list[SettleAnswer]] = asyncio.get_running_loop().create_future()
        self.answers = future


class CallStore:
    """The calls that have ended; may raise `StoreUnavailableError`.

    Callers that end calls while others do share an operation, as they would share a transaction:
    the tables are read and written once for all of them.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._waiting: deque[_Waiting] = deque()
        self._waiting_calls = 0
        self._writing: asyncio.Task[None] | None = None

    async def finish(self, ended: Sequence[EndedCall]) -> list[SettleAnswer]:
        """Write the end of calls; the answers mean that it is on disk.

        A settlement that the ledger does not take is answered with the error, and its call is
        written all the same: the money was settled before, or its lease has ended.
        """
        if not ended:
            return []
        if self._waiting_calls + len(ended) > MAX_WAITING:
            raise LedgerUnavailableError("too many ended calls wait to be written")
        waiting = _Waiting(ended)
        self._waiting.append(waiting)
        self._waiting_calls += len(ended)
        if self._writing is None or self._writing.done():
            # It begins after all others that end calls in this round of the loop.
            self._writing = asyncio.create_task(self._write_waiting())
        return await waiting.answers

    async def turn(self, turn: SliceTurn) -> SliceAnswer:
        """Commit what was spent of a slice, reserve the next one, and write calls that ended."""
        turn = msgspec.structs.replace(turn, ended=tuple(_cleaned(one) for one in turn.ended))
        return await self._access.run(partial(_turn_packed, packed=_turn_pack.encode(turn)))

    async def find(self, query: CallQuery) -> CallPage:
        """List calls that have ended, newest first."""
        return await self._access.ask(partial(find, query=query), is_long=True)

    async def correct(self, record: CallRecord, settle: SettleRequest | None) -> bool:
        """Book what a call cost in place of what was assumed; False if nothing was changed."""
        return await self._access.run(partial(correct, record=record, settle=settle))

    async def note_running(self, records: Sequence[CallRecord], *, node_id: str = "") -> None:
        """Note calls that run at a node, or that they still do."""
        packed = _pack.encode(records)
        await self._access.run(partial(note_running, packed=packed, node_id=node_id))

    async def forget_running(self, ids: Sequence[str]) -> None:
        """Forget that calls run: they wait again, or have gone."""
        await self._access.run(partial(forget_running, ids=ids))

    async def note_places(self, places: Sequence[KeptPlace], *, node_id: str) -> None:
        """Note places that a node keeps; `forget_running` and the end of a call take them out."""
        packed = _pack.encode(places)
        await self._access.run(partial(note_places, packed=packed, node_id=node_id))

    async def places_elsewhere(self, node_id: str) -> tuple[KeptPlace, ...]:
        """Return the places that were noted, but for those of one node."""
        return await self._access.ask(partial(places_elsewhere, node_id=node_id))

    async def running_elsewhere(self, node_id: str, *, seen_after: float) -> tuple[CallRecord, ...]:
        """Return the calls that run at other nodes which are alive, as far as they were noted."""
        now = self._access.now()
        question = partial(running_elsewhere, node_id=node_id, now=now, seen_after=seen_after)
        return await self._access.ask(question)

    async def ended(self, ids: Sequence[str]) -> tuple[CallRecord, ...]:
        """Return those of some calls that have ended."""
        return await self._access.ask(partial(ended_of, ids=ids))

    async def end_lost(
        self, seen_before: float, without: Sequence[str], *, with_dead_nodes: bool = False
    ) -> list[CallRecord]:
        """End calls that were noted and not seen since a time, but for those named; return them.

        With `with_dead_nodes` also those whose node has let its lease end.
        """
        query = LostQuery(
            seen_before=seen_before, without=frozenset(without), with_dead_nodes=with_dead_nodes
        )
        if not await self._access.ask(partial(has_lost, query=query, now=self._access.now())):
            return []
        return await self._access.run(partial(end_lost, query=query))

    async def latest(self, most: int) -> tuple[CallRecord, ...]:
        """Return the calls that came last and have ended, the oldest of them first."""
        return await self._access.ask(partial(latest, most=most), is_long=True)

    async def get(self, call_id: str) -> CallRecord | None:
        """Return a call that has ended; None of one that is not there."""
        return await self._access.ask(partial(get, call_id=call_id))

    async def of_response(self, response_id: str) -> CallRecord | None:
        """Return the call that has ended whose response a provider keeps under an id."""
        return await self._access.ask(partial(of_response, response_id=response_id))

    async def _write_waiting(self) -> None:
        while self._waiting:
            taken: list[_Waiting] = []
            calls = 0
            while self._waiting and calls < MAX_AT_ONCE:
                taken.append(self._waiting.popleft())
                calls += len(taken[-1].ended)
            self._waiting_calls -= calls
            await self._write(taken)

    async def _write(self, taken: Sequence[_Waiting]) -> None:
        ended = [one for waiting in taken for one in waiting.ended]
        try:
            answers = await self._access.run(partial(_finish_packed, packed=pack(ended)))
        except Exception as error:  # noqa: BLE001 - whoever waits gets it
            if len(taken) > 1 and not isinstance(error, StoreUnavailableError):
                # One of them may have spoilt the others.
                for waiting in taken:
                    await self._write([waiting])
                return
            for waiting in taken:
                if not waiting.answers.done():
                    waiting.answers.set_exception(error)
            return
        start = 0
        for waiting in taken:
            its_answers = answers[start : start + len(waiting.ended)]
            start += len(its_answers)
            if not waiting.answers.done():
                waiting.answers.set_result(its_answers)
