"""Assigning: a line of a plan takes the task, a permit and the money, or nothing at all.

The plan was made from a picture that may be old, so the row decides: the task must still be queued,
with the attempt that the plan saw, and with nothing left to wait for. A node then collects what it
was assigned.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headgate.core.budgets.ledger import Refused
from headgate.core.budgets.reservations import LIVE
from headgate.core.estimates import kept_hold
from headgate.core.lifecycle import NOTHING_USED, TryAgain
from headgate.core.task import Progress, TaskStatus, is_worker
from headgate.errors import CallerError
from headgate.storage.finish import conclude, leave_queue
from headgate.storage.nodes import Kind, Message
from headgate.storage.store import Assigned, Assignment, Collected, NotAssigned
from headgate.storage.transaction import Transaction
from headgate.storage.unit_of_work import STARTED, WAIT_MS, Counters, TaskRow, UnitOfWork


def assign(work: UnitOfWork, line: Assignment, *, dead: set[str]) -> Assigned | NotAssigned:
    """Apply one line of a plan; nobody is assigned to a node that is not alive."""
    row = work.row(line.task_id)
    if row is None:
        return NotAssigned(task_id=line.task_id, record=None)
    if _is_assigned(row, line):
        return _assigned(work, row, line)
    if line.node_id in dead or not _is_as_planned(row, line):
        return NotAssigned(task_id=line.task_id, record=row.record())
    held = _reserve(work, line)
    if held is None or isinstance(held, Refused):
        return NotAssigned(task_id=line.task_id, record=row.record(), refused=held)
    _take(work, row, line, *held)
    if not line.starts:
        work.notify(line.node_id, Kind.ASSIGNED, row.id)
        if is_worker(line.node_id):
            work.give_to_worker(line.node_id, row.id)
    return _assigned(work, row, line)


def count_start(work: UnitOfWork, row: TaskRow) -> None:
    """Count an attempt that begins to run now."""
    lane = (row.agent_id, row.project_id)
    work.counters.happen(STARTED, *lane)
    work.counters.happen(WAIT_MS, *lane, _waited_ms(row, work.now))
    work.counters.start(row.project_id)


def _is_assigned(row: TaskRow, line: Assignment) -> bool:
    progress = row.progress
    return (
        row.is_in_flight
        and progress.attempt == line.attempt
        and progress.node_id == line.node_id
        and progress.reservation_id == (line.reservation_id or None)
    )


def _is_as_planned(row: TaskRow, line: Assignment) -> bool:
    progress = row.progress
    return (
        row.status is TaskStatus.QUEUED
        and progress.attempt == line.attempt - 1
        and not progress.waiting_for
    )


def _reserve(work: UnitOfWork, line: Assignment) -> tuple[int, int] | Refused | None:
    """Reserve the money of a line; return the tokens and micro-dollars, or a budget's refusal."""
    request = line.reserve
    if request is None or not work.keeps_ledger:
        return line.tokens, line.micro_usd
    if request.dispatched is not line.starts:
        request = msgspec.structs.replace(request, dispatched=line.starts)
    try:
        answer = work.ledger.reserve(request, work.now)
    except CallerError:
        # An id that is taken, or a window whose zone this machine does not know: the line is not
        # applied, and the others in the same plan are not to suffer from it.
        return None
    if isinstance(answer, Refused):
        return answer
    # A known id gets its answer again, also when what it held was given back long ago.
    return (answer.tokens, answer.micro_usd) if answer.state in LIVE else None


def _take(work: UnitOfWork, row: TaskRow, line: Assignment, tokens: int, micro_usd: int) -> None:
    leave_queue(work, row)
    # A start is counted with the agent that takes the task, here as when another node collects it.
    row.agent_id = line.agent_id
    if line.starts:
        count_start(work, row)
    old, counters = row.progress, work.counters
    row.status = TaskStatus.RUNNING if line.starts else TaskStatus.ASSIGNED
    row.settled_by = None
    row.progress = msgspec.structs.replace(
        old,
        attempt=line.attempt,
        node_id=line.node_id,
        reservation_id=line.reservation_id or None,
        reserved_tokens=tokens,
        reserved_micro_usd=micro_usd,
        share_tokens=line.share_tokens,
        hold=kept_hold(line.hold, tokens=tokens, micro_usd=micro_usd),
        reported_tokens=None,
        reported_micro_usd=None,
        is_priced=False,
        is_claimed=False,
        is_unpriced=False,
        started_at=work.now if line.starts else old.started_at,
        slot=line.slot,
        choice=line.choice,
    )
    counters.fly(line.agent_id, row.project_id, 1)
    counters.serve(row.spec.task.agent_id, row.project_id, line.tick)
    counters.charge(line.rate_charges)
    work.change(row)


def _assigned(work: UnitOfWork, row: TaskRow, line: Assignment) -> Assigned:
    if not line.starts:
        return Assigned(record=row.record())
    return Assigned(record=row.record(work.submission(row.id)))


def _waited_ms(row: TaskRow, now: float) -> int:
    """Return how long a task has been kept waiting though it could have started."""
    task, progress = row.spec.task, row.progress
    since = progress.not_before if progress.not_before is not None else task.not_before
    if progress.started_at is None:
        since = task.created_at if since is None else max(since, task.created_at)
    return 0 if since is None else max(0, round((now - since) * 1_000))


# Collecting. A message only says where to look. A task that is assigned to the node is written as
# running; one that runs there already was started by a call whose answer got lost, and is returned
# once more.


def collect(work: UnitOfWork, node_id: str, received: Sequence[Message]) -> Collected:
    """Start what is assigned to a node, and say what it has to stop."""
    task_ids = [message.task_id for message in received]
    assigned = {message.task_id for message in received if message.kind is Kind.ASSIGNED}
    work.read(work.need_rows(task_ids), work.need_submissions(sorted(assigned)))
    rows = [row for row in work.rows(task_ids) if row.progress.node_id == node_id]
    work.load_ledger((), [row for row in rows if row.status is TaskStatus.ASSIGNED])
    started = [row for row in rows if row.id in assigned and is_running(work, row)]
    return Collected(
        started=tuple([row.record(work.submission(row.id)) for row in started]),
        cancelled=tuple([row.id for row in rows if row.progress.cancel_requested]),
    )


def is_running(work: UnitOfWork, row: TaskRow) -> bool:
    """Start a task that is assigned, and tell whether it runs now."""
    if row.status is TaskStatus.ASSIGNED:
        _start(work, row)
    return row.status is TaskStatus.RUNNING


def _start(work: UnitOfWork, row: TaskRow) -> None:
    old = row.progress
    if not work.mark_dispatched(old.reservation_id):
        # The money went back before the node came: the task has to be decided again.
        give_back(work, row, old)
        return
    count_start(work, row)
    row.status = TaskStatus.RUNNING
    row.progress = msgspec.structs.replace(old, started_at=work.now)
    work.change(row)


def give_back(work: UnitOfWork, row: TaskRow, progress: Progress) -> None:
    """Have a task decided again that its node has not begun."""
    again = TryAgain(
        not_before=None,
        failures=progress.failures,
        losses=progress.losses,
        rate_limit_hits=progress.rate_limit_hits,
    )
    conclude(work, row, again, NOTHING_USED)
    work.notify_dispatcher((row,), by="")


# Forgiving lag, which is counted as if the project had used it. An amount that is added twice would
# be forgiven twice, so each call of a dispatcher has a number, higher than the last one, and what
# comes again is left out.

LAST_FORGIVENESS = "last_pardon"
_CALLS_PER_EPOCH = 2**32


class Forgiveness(msgspec.Struct, frozen=True):
    """One call of a dispatcher: its epoch, its number, and the tokens of each project."""

    epoch: int
    number: int
    tokens: dict[str, int]


def forgive(transaction: Transaction, forgiveness: Forgiveness, now: float) -> None:
    """Add forgiven tokens to the usage of projects, unless this very call has done so before."""
    mark = forgiveness.epoch * _CALLS_PER_EPOCH + forgiveness.number
    sql = "SELECT amount FROM counters WHERE name = ?"
    rows = transaction.read(sql, (LAST_FORGIVENESS,))
    last = rows[0][0] if rows else 0
    if mark <= last:
        return
    counters = Counters(now)
    counters.count(LAST_FORGIVENESS, mark - last)
    for project_id, tokens in forgiveness.tokens.items():
        counters.forgive(project_id, tokens)
    transaction.insert_all(counters.rows())
