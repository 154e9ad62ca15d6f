"""The end of attempts and tasks: settling, cancelling, and what the dispatcher gives up.

A lease is one life of one node for one attempt. A settlement that shows another lease changes
nothing; the one that ended an attempt may come again, and gets its answer again. Every count
changes together with its row: a task leaves its lane once, frees its permit once, ends once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headgate.core.budgets.escrow import Amounts
from headgate.core.budgets.ledger import Unit
from headgate.core.budgets.scopes import Tenant
from headgate.core.lifecycle import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    EXPIRED_WHILE_QUEUED,
    NOTHING_USED,
    UNKNOWN_USAGE,
    Finish,
    Lost,
    TryAgain,
    Usage,
    next_step,
    share_in_usd,
    share_of,
    timed_out,
)
from headgate.core.task import (
    OnParentFailure,
    PastAttempt,
    Progress,
    TaskStatus,
    beginning_of,
    check_move,
    is_worker,
    kind_of,
    sample_of,
    with_latest,
)
from headgate.core.task_money import OpenCalls
from headgate.storage import audit, nodes, task_calls
from headgate.storage.nodes import Kind
from headgate.storage.store import (
    CancelAnswer,
    Cancellation,
    Expiration,
    Heir,
    Overdue,
    Settled,
    Settlement,
    StaleLease,
)
from headgate.storage.task_calls import CallsUsed
from headgate.storage.unit_of_work import EXPIRED, TICK, TaskRow, UnitOfWork

# Ending a task. Its end is handed on to the tasks that depend on it: they no longer wait for one
# that succeeded, and they fail with one that did not, unless they asked to run all the same. This
# goes on, level by level, within the same transaction.


def parent_error(parent: TaskRow) -> str:
    """Say why a task failed that depended on another."""
    return f"parent {parent.id} is {parent.status.value}"


def leave_queue(work: UnitOfWork, row: TaskRow) -> None:
    """Count a task out of its lane."""
    work.counters.queue(row.spec.task.agent_id, row.project_id, -1, is_scheduled=row.is_scheduled)


def enter_queue(work: UnitOfWork, row: TaskRow) -> None:
    """Count a task into its lane."""
    work.counters.queue(row.spec.task.agent_id, row.project_id, 1, is_scheduled=row.is_scheduled)


class Booked(NamedTuple):
    """What an attempt was booked at, and the part of it for which nobody gave a number."""

    tokens: int
    micro_usd: int
    assumed_tokens: int
    assumed_micro_usd: int


class CallCost(NamedTuple):
    """What an attempt costs that has made calls: as measured, as booked, and what of that is its.

    `charged` is the part that its own reservation is committed at; the rest is booked by those
    calls that held something beside it.
    """

    cost: Usage
    booked: Booked
    charged: Amounts
    used: CallsUsed


def free_permit(
    work: UnitOfWork,
    row: TaskRow,
    step: Finish | TryAgain,
    cost: Usage,
    *,
    tenant: Tenant | None = None,
    calls: CallCost | None = None,
) -> Booked:
    """Free the permit of an attempt, book what it cost, and return that.

    What nobody knows of the cost is booked as it was held, and the task shows it as assumed. Only
    a success of which nothing was known before, and of which nothing is known now, costs nothing.
    What its `calls` through the gateway have cost goes before what anybody reports.
    """
    old = row.progress
    is_done = isinstance(step, Finish) and step.status is TaskStatus.DONE
    booked = _booked(old, cost, is_done=is_done)
    charged = Amounts(booked.micro_usd, booked.tokens)
    if calls is not None:
        cost, booked, charged, tenant = calls.cost, calls.booked, calls.charged, None
    tokens, micro_usd = booked.tokens, booked.micro_usd
    is_claimed = tenant is not None
    share_tokens = old.share_tokens if cost.tokens is None else cost.tokens
    if _has_worked(row, step):
        seconds = work.now - (old.started_at or work.now)
        share_tokens = share_of(old, cost, seconds=seconds, is_done=is_done, is_claim=is_claimed)
    if calls is not None:
        # What the calls of a lost attempt have used is known, and counts at least.
        share_tokens = max(share_tokens, calls.used.total.minus(calls.used.assumed).tokens)
    work.counters.fly(row.agent_id, row.project_id, -1)
    work.counters.count(TICK)
    share_micro_usd = share_in_usd(share_tokens, micro_usd)
    if share_tokens or share_micro_usd:
        work.counters.spend(row.project_id, tokens=share_tokens, micro_usd=share_micro_usd)
    work.settle_money(
        old.reservation_id, tokens=charged.tokens, micro_usd=charged.micro_usd, tenant=tenant
    )
    node_id = row.progress.node_id
    if node_id is not None and is_worker(node_id):
        work.take_from_worker(node_id, row.id)
    row.tokens, row.micro_usd = tokens, micro_usd
    # A model without a price is named, and so is work that held money and said nothing of it.
    is_named = cost.model is not None and cost.tokens != 0
    is_silent = old.hold is not None and Unit.MICRO_USD in old.hold.probed
    is_unpriced = is_done and cost.micro_usd is None and (is_named or is_silent)
    row.progress = msgspec.structs.replace(
        old,
        used_tokens=old.used_tokens + tokens,
        used_micro_usd=old.used_micro_usd + micro_usd,
        assumed_tokens=old.assumed_tokens + booked.assumed_tokens,
        assumed_micro_usd=old.assumed_micro_usd + booked.assumed_micro_usd,
        share_tokens=share_tokens,
        reported_tokens=cost.tokens,
        reported_micro_usd=cost.micro_usd,
        is_priced=cost.is_priced,
        is_claimed=is_claimed,
        is_unpriced=is_unpriced,
    )
    sample = sample_of(
        row.progress, row.spec.terms, is_done=is_done, booked_micro_usd=booked.micro_usd
    )
    if sample.says_something:
        work.learn(kind_of(row.spec.task, row.spec.terms), sample)
    return booked


def _has_worked(row: TaskRow, step: Finish | TryAgain) -> bool:
    """Tell whether an attempt had its permit for work, and not only for a provider's refusal.

    That a provider refused is known of what runs here; a worker may say so of anything.
    """
    if row.status is not TaskStatus.RUNNING:
        return False
    if isinstance(step, Finish) or is_worker(row.progress.node_id):
        return True
    return step.rate_limit_hits == row.progress.rate_limit_hits


def is_overrun(
    *, reserved_tokens: int, reserved_micro_usd: int, tokens: int | None, micro_usd: int | None
) -> bool:
    """Tell whether more was reported, in either unit, than was held."""
    return 0 < reserved_tokens < (tokens or 0) or 0 < reserved_micro_usd < (micro_usd or 0)


def _booked(progress: Progress, cost: Usage, *, is_done: bool) -> Booked:
    hold = progress.hold
    probed = hold.probed if is_done and hold is not None else ()
    # A model that was named has used something, though nobody knows its price.
    has_model = cost.model is not None
    assumed_tokens, assumed_usd = progress.reserved_tokens, progress.reserved_micro_usd
    if hold is not None and Unit.TOKENS in probed:
        assumed_tokens = min(assumed_tokens, hold.tokens.claimed or 0)
    if hold is not None and Unit.MICRO_USD in probed and not has_model:
        assumed_usd = min(assumed_usd, hold.micro_usd.claimed or 0)
    tokens = assumed_tokens if cost.tokens is None else cost.tokens
    micro_usd = assumed_usd if cost.micro_usd is None else cost.micro_usd
    return Booked(
        tokens=tokens,
        micro_usd=micro_usd,
        assumed_tokens=tokens if cost.tokens is None else 0,
        assumed_micro_usd=micro_usd if cost.micro_usd is None else 0,
    )


def _call_cost(row: TaskRow, used: CallsUsed, open_calls: OpenCalls | None) -> CallCost:
    """Return what an attempt costs by its calls; of a lost one nobody knows which were under way.

    What was held for a lost attempt is booked whole, as after any other loss; so is what was held
    for one whose calls were decided by a process that has ended.
    """
    total, beside, assumed = used.total, used.beside, used.assumed
    if open_calls is None or open_calls.is_partly_unknown:
        held = Amounts(row.progress.reserved_micro_usd, row.progress.reserved_tokens)
        known = total.minus(beside)
        charged = Amounts(max(held.micro_usd, known.micro_usd), max(held.tokens, known.tokens))
        whole = charged.plus(beside)
        assumed = whole.minus(total.minus(assumed))
        cost = UNKNOWN_USAGE
    else:
        whole, assumed = total.plus(open_calls.drawn), assumed.plus(open_calls.drawn)
        charged = whole.minus(beside)
        is_priced = not assumed.micro_usd and not any(one.unpriced_tokens for one in used.sums)
        cost = Usage(
            tokens=whole.tokens, micro_usd=whole.micro_usd, model=used.model, is_priced=is_priced
        )
    booked = Booked(
        tokens=whole.tokens,
        micro_usd=whole.micro_usd,
        assumed_tokens=assumed.tokens,
        assumed_micro_usd=assumed.micro_usd,
    )
    return CallCost(cost, booked, charged, used)


def _count_calls(work: UnitOfWork, row: TaskRow, calls: CallCost) -> Booked:
    """Count what the calls of an attempt used, by model and key, and return what is left of it."""
    for one in calls.used.sums:
        work.counters.count(TICK, one.calls)
        work.counters.use(
            (row.project_id, row.agent_id or "", one.model),
            is_over=False,
            is_call=True,
            calls=one.calls,
            slot=one.slot,
            tokens=one.tokens,
            micro_usd=one.micro_usd,
            assumed_tokens=one.assumed_tokens,
            assumed_micro_usd=one.assumed_micro_usd,
            unpriced_tokens=one.unpriced_tokens,
            priced_micro_usd=0
            if one.unpriced_tokens
            else max(0, one.micro_usd - one.assumed_micro_usd),
        )
    booked, total, assumed = calls.booked, calls.used.total, calls.used.assumed
    return Booked(
        tokens=booked.tokens - total.tokens,
        micro_usd=booked.micro_usd - total.micro_usd,
        assumed_tokens=booked.assumed_tokens - assumed.tokens,
        assumed_micro_usd=booked.assumed_micro_usd - assumed.micro_usd,
    )


def requeue(work: UnitOfWork, row: TaskRow, step: TryAgain, booked: Booked) -> None:
    """Let a task that freed its permit wait for another attempt, and note the one that ended."""
    error = _storable(step.error)
    note = _note(row, booked, error=error, now=work.now)
    _move(work, row, TaskStatus.QUEUED)
    row.progress = msgspec.structs.replace(
        row.progress,
        failures=step.failures,
        losses=step.losses,
        rate_limit_hits=step.rate_limit_hits,
        not_before=step.not_before,
        node_id=None,
        report=None,
        attempts=with_latest(row.progress.attempts, note),
    )
    row.agent_id = row.spec.task.agent_id
    row.error = error
    enter_queue(work, row)


def finish(work: UnitOfWork, row: TaskRow, end: Finish) -> list[TaskRow]:
    """End a task that has left its lane and its permit, and return the others that this changed."""
    _end(work, row, end)
    touched: dict[str, TaskRow] = {}
    ended = [row]
    while ended := [parent for parent in ended if parent.progress.dependants]:
        pairs = work.children(ended)
        touched.update((child.id, child) for _, child in pairs)
        ended = [child for parent, child in pairs if _hand_on(work, parent, child)]
    return list(touched.values())


def descendants(work: UnitOfWork, row: TaskRow) -> list[TaskRow]:
    """Return what the end of a task may have changed, for an answer that is given again."""
    found: dict[str, TaskRow] = {}
    ended = [row] if row.is_terminal else []
    while ended:
        children = [child for _, child in work.children(ended) if child.id not in found]
        found.update((child.id, child) for child in children)
        ended = [child for child in children if child.is_terminal]
    return list(found.values())


def release_parents(work: UnitOfWork, row: TaskRow) -> None:
    """Let go of the results that an ended task depended on."""
    for parent in work.rows(row.spec.terms.depends_on):
        old = parent.progress
        parent.progress = msgspec.structs.replace(old, dependants=max(0, old.dependants - 1))
        work.change(parent)


def _hand_on(work: UnitOfWork, parent: TaskRow, child: TaskRow) -> bool:
    """Tell a task that one of its parents has ended; return whether that ends it."""
    if child.status is not TaskStatus.QUEUED or not child.progress.waiting_for:
        return False
    is_fatal = child.spec.terms.on_parent_failure is OnParentFailure.FAIL
    if parent.status is not TaskStatus.DONE and is_fatal:
        leave_queue(work, child)
        _end(work, child, Finish(status=TaskStatus.FAILED, error=parent_error(parent)))
        return True
    left = child.progress.waiting_for - 1
    child.progress = msgspec.structs.replace(child.progress, waiting_for=left)
    work.change(child)
    return False


def _end(work: UnitOfWork, row: TaskRow, end: Finish) -> None:
    _move(work, row, end.status)
    row.progress = msgspec.structs.replace(
        row.progress, not_before=None, node_id=None, report=None, completed_at=work.now
    )
    row.error = _storable(end.error)
    work.end(row)
    if end.error == EXPIRED_WHILE_QUEUED:
        work.counters.happen(EXPIRED, row.agent_id, row.project_id)
    if row.spec.terms.depends_on:
        release_parents(work, row)
    if row.spec.terms.callback_url is not None:
        work.file_delivery(row, row.spec.terms.callback_url)


def _note(row: TaskRow, booked: Booked, *, error: str | None, now: float) -> PastAttempt:
    """Return what is kept of an attempt whose permit is free again and that is not requeued yet."""
    progress = row.progress
    # A task that is assigned still shows when the attempt before began.
    has_begun = row.status is TaskStatus.RUNNING
    return PastAttempt(
        attempt=progress.attempt,
        started_at=progress.started_at if has_begun else None,
        ended_at=now,
        error=beginning_of(error),
        agent_id=row.agent_id,
        slot=progress.slot or row.spec.task.slot,
        node_id=progress.node_id,
        tokens=booked.tokens,
        micro_usd=booked.micro_usd,
        assumed_tokens=booked.assumed_tokens,
        assumed_micro_usd=booked.assumed_micro_usd,
    )


def _storable(error: str | None) -> str | None:
    """Leave out what no database takes; an error may quote whatever a process has printed."""
    if error is None or error.isprintable():
        return error
    return error.replace("\0", "").encode(errors="replace").decode()


def _move(work: UnitOfWork, row: TaskRow, status: TaskStatus) -> None:
    check_move(row.id, row.status, status)
    row.status = status
    work.change(row)


CANCELLED_ON_REQUEST = Finish(status=TaskStatus.CANCELLED, error=CANCELLED)


def settle(work: UnitOfWork, settlement: Settlement) -> Settled | StaleLease:
    """Write the end of an attempt: the outcome, the money, the freed permit."""
    row = work.row(settlement.task_id)
    if row is None or row.progress.attempt != settlement.lease.attempt:
        return StaleLease(task_id=settlement.task_id)
    node_id = settlement.lease.node_id
    if row.is_in_flight and row.progress.node_id == node_id:
        return _settled(_apply(work, row, settlement))
    if not row.is_in_flight and row.settled_by == node_id:
        return _settled([row, *descendants(work, row)])
    return StaleLease(task_id=settlement.task_id)


def conclude(
    work: UnitOfWork,
    row: TaskRow,
    step: Finish | TryAgain,
    cost: Usage,
    *,
    tenant: Tenant | None = None,
    calls: CallCost | None = None,
) -> list[TaskRow]:
    """End an attempt, and with it the task unless it is tried again; return the other tasks.

    A task that somebody wants cancelled is not tried again. A cost may be what a tenant claims.
    """
    booked = free_permit(work, row, step, cost, tenant=tenant, calls=calls)
    own, charged = booked, (row.progress.reported_tokens, row.progress.reported_micro_usd)
    if calls is not None:
        # Calls count by their model and key. What they held beside the task is no overrun of it.
        own, cost = _count_calls(work, row, calls), UNKNOWN_USAGE
        charged = (calls.charged.tokens, calls.charged.micro_usd)
    work.counters.use(
        (row.project_id, row.agent_id or "", cost.model or ""),
        is_over=row.progress.cancel_requested or isinstance(step, Finish),
        tokens=own.tokens,
        micro_usd=own.micro_usd,
        assumed_tokens=own.assumed_tokens,
        assumed_micro_usd=own.assumed_micro_usd,
        unpriced_tokens=(cost.tokens or 0) if cost.is_unpriced else 0,
        priced_micro_usd=(cost.micro_usd or 0) if cost.is_priced else 0,
        is_overrun=is_overrun(
            reserved_tokens=row.progress.reserved_tokens,
            reserved_micro_usd=row.progress.reserved_micro_usd,
            tokens=charged[0],
            micro_usd=charged[1],
        ),
        slot=row.progress.slot or row.spec.task.slot or "",
    )
    if isinstance(step, TryAgain):
        if not row.progress.cancel_requested:
            requeue(work, row, step, booked)
            return []
        step = CANCELLED_ON_REQUEST
    if step.status is TaskStatus.DONE:
        work.counters.complete(row.project_id)
    return finish(work, row, step)


def _apply(work: UnitOfWork, row: TaskRow, settlement: Settlement) -> list[TaskRow]:
    calls = None
    if settlement.open_calls is not None:
        calls = _calls_of(work, row, settlement.open_calls)
    others = conclude(
        work, row, settlement.step, settlement.cost, tenant=settlement.tenant, calls=calls
    )
    if settlement.open_calls is not None and (calls or settlement).cost == UNKNOWN_USAGE:
        _note_whole(row)
    row.settled_by = settlement.lease.node_id
    if settlement.result is not None and row.is_terminal:
        row.result = settlement.result
    if settlement.closure is not None:
        work.close_gate(settlement.closure)
    changed = [row, *others]
    work.notify_dispatcher(changed, by=settlement.node_id or settlement.lease.node_id)
    return changed


def _calls_of(work: UnitOfWork, row: TaskRow, open_calls: OpenCalls | None) -> CallCost | None:
    """Return what an attempt costs by its calls; None if it has made none."""
    used = task_calls.take(work.transaction, row.id, row.progress.attempt)
    if not used.sums and (open_calls is None or not open_calls.has_called):
        return None
    return _call_cost(row, used, open_calls)


def _note_whole(row: TaskRow) -> None:
    """Note that an attempt was booked at all that it held, if so: its calls had drawn on that."""
    progress = row.progress
    held = Amounts(progress.reserved_micro_usd, progress.reserved_tokens)
    if any(held) and Amounts(row.micro_usd or 0, row.tokens or 0).covers(held):
        row.progress = msgspec.structs.replace(progress, whole_attempt=progress.attempt)


def _settled(rows: list[TaskRow]) -> Settled:
    return Settled(records=tuple([row.record() for row in rows]))


# Cancelling: a waiting task ends at once, and the node of a running one is asked to stop it


def cancel(work: UnitOfWork, request: Cancellation) -> CancelAnswer | None:
    """Cancel a task; the first record is the task, the others ended with it."""
    row = work.row(request.task_id)
    if row is None:
        return None
    if request.entry is not None and not row.is_terminal:
        audit.write(work.transaction, request.entry, work.now)
    if row.status is TaskStatus.RUNNING:
        _ask_to_stop(work, row, request.node_id)
        return CancelAnswer(records=(row.record(),))
    had_ended = row.is_terminal
    if not had_ended:
        others = _cancel(work, row, request)
    else:
        is_repeat = row.status is TaskStatus.CANCELLED
        others = descendants(work, row) if is_repeat else []
    records = (row.record(), *[other.record() for other in others])
    return CancelAnswer(records=records, had_ended=had_ended)


def _ask_to_stop(work: UnitOfWork, row: TaskRow, asked_at: str) -> None:
    if row.progress.cancel_requested:
        return
    row.progress = msgspec.structs.replace(row.progress, cancel_requested=True)
    work.change(row)
    if row.progress.node_id not in (None, asked_at):
        work.notify(row.progress.node_id, Kind.CANCELLED, row.id)
    if is_worker(row.progress.node_id):
        # Whoever dispatches sees to it that a worker which does not stop is not waited for.
        work.notify_dispatcher((row,), by=asked_at)


def _cancel(work: UnitOfWork, row: TaskRow, request: Cancellation) -> list[TaskRow]:
    if row.status is TaskStatus.ASSIGNED:
        # Its node has not begun, so nothing was charged.
        others = conclude(work, row, CANCELLED_ON_REQUEST, NOTHING_USED)
    else:
        leave_queue(work, row)
        others = finish(work, row, CANCELLED_ON_REQUEST)
    work.notify_dispatcher([row, *others], by=request.node_id)
    return others


# What the dispatcher ends or takes back: tasks that cannot run, and lost attempts


def drop(work: UnitOfWork, drops: Sequence[Expiration]) -> list[TaskRow]:
    """End queued tasks; what is not queued any more is returned as it is."""
    work.load(wanted.task_id for wanted in drops)
    changed: dict[str, TaskRow] = {}
    for wanted in drops:
        row = work.row(wanted.task_id)
        if row is not None:
            others = _drop(work, row, wanted)
            changed.update((each.id, each) for each in (row, *others))
    return list(changed.values())


def recover(work: UnitOfWork, task_ids: Sequence[str], heir: Heir | None = None) -> list[TaskRow]:
    """Take attempts from nodes that are not alive; what is not in flight is returned as it is.

    What an heir can go on with becomes its own, and stays the same attempt with the same money.
    """
    rows = work.rows(task_ids)
    work.load_ledger((), rows)
    owners = {row.progress.node_id for row in rows if row.progress.node_id is not None}
    dead = nodes.end_lives(work.transaction, owners, work.now) if owners else set()
    changed: dict[str, TaskRow] = {}
    for row in rows:
        if row.progress.node_id is None or row.progress.node_id in dead:
            if heir is not None and _is_inherited(row, heir):
                row.progress = msgspec.structs.replace(row.progress, node_id=heir.node_id)
                work.change(row)
                others = []
            else:
                others = _recover(work, row) if row.is_in_flight else descendants(work, row)
            changed.update((each.id, each) for each in (row, *others))
    return list(changed.values())


def _is_inherited(row: TaskRow, heir: Heir) -> bool:
    is_running = row.status is TaskStatus.RUNNING and not is_worker(row.progress.node_id)
    return is_running and row.spec.task.target in heir.targets


def give_up(work: UnitOfWork, overdue: Sequence[Overdue]) -> list[TaskRow]:
    """End attempts at workers that have had their time; all that was held for them is booked."""
    rows = work.rows(wanted.task_id for wanted in overdue)
    work.load_ledger((), rows)
    attempts = {wanted.task_id: wanted.attempt for wanted in overdue}
    changed: dict[str, TaskRow] = {}
    for row in rows:
        is_meant = row.is_in_flight and row.progress.attempt == attempts[row.id]
        end = _end_of_overdue(row, work.now) if is_meant else None
        others = descendants(work, row) if end is None else _conclude(work, row, end)
        changed.update((each.id, each) for each in (row, *others))
    return list(changed.values())


def take_from_worker(work: UnitOfWork, row: TaskRow) -> list[TaskRow]:
    """End an attempt that its worker does not know of: it was lost, or is not wanted any more."""
    return _recover(work, row)


def _end_of_overdue(row: TaskRow, now: float) -> Finish | TryAgain | None:
    deadline = row.spec.task.deadline
    if deadline is not None and deadline <= now:
        has_started = row.status is TaskStatus.RUNNING
        error = DEADLINE_EXCEEDED if has_started else EXPIRED_WHILE_QUEUED
        return Finish(status=TaskStatus.FAILED, error=error)
    if row.progress.cancel_requested:
        return CANCELLED_ON_REQUEST
    seconds, began_at = row.spec.terms.attempt_seconds, row.progress.started_at
    if seconds is None or began_at is None or row.status is not TaskStatus.RUNNING:
        return None
    if now < began_at + seconds:
        return None
    return next_step(timed_out(seconds), row.progress, row.spec.terms, now=now, draw=0.0)


def _drop(work: UnitOfWork, row: TaskRow, wanted: Expiration) -> list[TaskRow]:
    if row.status is not TaskStatus.QUEUED:
        return descendants(work, row)
    leave_queue(work, row)
    return finish(work, row, Finish(status=wanted.status, error=wanted.error))


def _recover(work: UnitOfWork, row: TaskRow) -> list[TaskRow]:
    """End a lost attempt; one that had begun is booked at all that was held for it."""
    has_started = row.status is TaskStatus.RUNNING
    step = next_step(
        Lost(has_started=has_started), row.progress, row.spec.terms, now=work.now, draw=0.0
    )
    return _conclude(work, row, step)


def _conclude(work: UnitOfWork, row: TaskRow, step: Finish | TryAgain) -> list[TaskRow]:
    if row.status is not TaskStatus.RUNNING:
        return conclude(work, row, step, NOTHING_USED)
    others = conclude(work, row, step, UNKNOWN_USAGE, calls=_calls_of(work, row, None))
    _note_whole(row)
    return others
