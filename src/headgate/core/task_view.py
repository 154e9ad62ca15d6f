"""A task as clients see it: everything that is known of it, and nothing that is not set."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from headgate.core.budgets.ledger import Unit
from headgate.core.estimates import Basis, Estimate, Hold, given
from headgate.core.gates import ClosureCause, GateClosure, GateKind
from headgate.core.money import to_usd_float
from headgate.core.task import (
    Choice,
    OnExhausted,
    OnParentFailure,
    PastAttempt,
    TaskRecord,
    TaskStatus,
    slot_of,
)
from headgate.core.text import percent

CONTENTS = ("params", "input", "result")
"""What a client sent and got, which may be large; a list can do without."""


class AmountBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Tokens and dollars, as far as they are known."""

    tokens: int | None = None
    """Tokens."""
    usd: float | None = None
    """Dollars."""


class ClosureBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """Something that keeps tasks from starting: a slot, a target, an agent, a budget."""

    kind: GateKind
    """`slot`, `target`, `agent`, or `scope` for a budget."""
    name: str
    """The name of the slot, target or agent, or the scope."""
    why: str = ""
    """Why it is closed, in a sentence."""
    cause: ClosureCause = ""
    """Who closed it: a `worker`, the answer of a `target` or a `provider`, the end of the `credit`
    there, an `operator`, the `settings`, a `budget` without room, or a `rate` limit."""
    by: str = ""
    """The worker, target or scope that closed it."""
    task_id: str = ""
    """The task that met with it."""
    since: datetime | None = None
    """Since when."""
    until: datetime | None = None
    """Until when. Without it, until what closed it is over."""


def closure_body(closure: GateClosure, *, is_whole: bool = True) -> ClosureBody:
    """Return a closure as clients see it; whose task met with it is left out unless it is whole."""
    return ClosureBody(
        kind=closure.kind,
        name=closure.name,
        why=closure.why,
        cause=closure.cause,
        by=closure.by if is_whole else "",
        task_id=closure.task_id if is_whole else "",
        since=_possible(closure.since),
        until=_possible(closure.until),
    )


def _possible(seconds: float | None) -> datetime | None:
    """Return a time; None where none is known, or no calendar reaches it."""
    try:
        return moment(seconds)
    except (OverflowError, OSError, ValueError):
        return None


class TaskUsageBody(AmountBody, kw_only=True, omit_defaults=True, rename="camel"):
    """What all attempts were booked at, and the part for which nobody gave a figure, if any."""

    assumed_tokens: int | None = None
    """The part of the tokens that nobody reported, so that what was reserved was booked."""
    assumed_usd: float | None = None
    """The part of the dollars that nobody reported."""


class ReportedBody(AmountBody, kw_only=True, omit_defaults=True, rename="camel"):
    """What is known of the cost of the latest attempt; what is left out nobody said."""

    priced: bool = False
    """Whether the dollars were computed from a provider's response by the price list."""


class HeldBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What an attempt holds in one unit, how that came about, and the same in a sentence."""

    unit: Literal["usd", "tokens"]
    """`usd` or `tokens`."""
    amount: float | None = None
    """How much. Left out for a probe until the ledger has worked it out."""
    basis: Basis
    """How the amount was found: `given`, `learned`, `configured`, `probe` or `silent`."""
    samples: int | None = None
    """How many known costs it was learned from."""
    quantile: float | None = None
    """The share of those costs that were lower."""
    text: str
    """The same in a sentence."""


class AttemptBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One attempt after which a task was tried again; one that never began has no `started_at`."""

    attempt: int
    """Its number."""
    started_at: datetime | None = None
    """When it started. Left out if it never began."""
    ended_at: datetime
    """When it ended."""
    error: str | None = None
    """The beginning of its error."""
    agent_id: str | None = None
    """The agent that ran it."""
    slot: str | None = None
    """The key slot that it used."""
    node_id: str | None = None
    """The node that ran it."""
    usage: TaskUsageBody
    """What it was booked at."""


class ProgressBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the attempt that runs says that it is."""

    fraction: float | None = None
    """From 0 to 1. Left out if it did not say."""
    text: str = ""
    """A line of its own, of at most 200 characters."""
    at: datetime
    """When it last said something new."""

    @property
    def words(self) -> str:
        """The same in words."""
        share = "" if self.fraction is None else percent(self.fraction)
        return ", ".join(one for one in (share, self.text) if one)


class TaskSnapshot(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """The JSON of a task. Times are RFC 3339 in UTC; `latency_ms` is from start to end.

    A service gives `params`, `input` and `result` as the bytes that it stored, a client reads them
    as values; the encoder takes both. `held`, `reported` and `attempts` are in the answer to a
    question for one task, and neither in lists nor in what is sent to workers and receivers.
    `unpriced` is a success whose dollars nobody knows.
    """

    task_id: str
    """The id of the task. Ids sort by creation."""
    agent_id: str | None = None
    """The agent that it names, or that took it."""
    action: str = ""
    """As submitted."""
    tab_id: str | None = None
    """As submitted."""
    selector: str | None = None
    """As submitted."""
    ref: str | None = None
    """As submitted."""
    params: Any = None
    """As submitted."""
    priority: int
    """As submitted."""
    state: TaskStatus
    """`queued`, `assigned`, `running`, `done`, `failed`, `cancelled` or `rejected`."""
    deadline: datetime | None = None
    """When it must have ended."""
    created_at: datetime
    """When it was submitted."""
    started_at: datetime | None = None
    """When its latest attempt started."""
    completed_at: datetime | None = None
    """When it ended."""
    latency_ms: int | None = None
    """Milliseconds from the latest start to the end."""
    result: Any = None
    """What the target answered, as JSON."""
    error: str | None = None
    """Why it failed, was cancelled or rejected, or why it is tried again."""
    callback_url: str | None = None
    """As submitted."""
    position: int | None = None
    """How many tasks waited when it was submitted, itself included."""
    project_id: str
    """The project whose share it counts against."""
    target: str | None = None
    """Where it runs."""
    slot: str | None = None
    """The key slot that it names, or that its latest attempt got."""
    provider: str | None = None
    """The provider whose slots it may get."""
    input: Any = None
    """As submitted."""
    weight: float
    """As submitted."""
    estimate: AmountBody | None = None
    """What it was estimated to use."""
    cost_usd: float | None = None
    """As submitted."""
    scopes: tuple[str, ...] = ()
    """Every budget scope that it is charged to."""
    depends_on: tuple[str, ...] = ()
    """As submitted."""
    on_parent_failure: OnParentFailure
    """As submitted."""
    not_before: datetime | None = None
    """As submitted, or the time of its next try."""
    labels: dict[str, str] = {}
    """As submitted."""
    retry_of: str | None = None
    """The task that this one repeats."""
    traceparent: str | None = None
    """The trace that it belongs to."""
    max_attempts: int
    """As submitted."""
    timeout_seconds: float | None = None
    """How long one attempt may take."""
    on_exhausted: OnExhausted
    """As submitted."""
    attempt: int
    """How often it was started."""
    progress: ProgressBody | None = None
    """How far the attempt that runs says that it is. It is gone when the attempt ends."""
    held: tuple[HeldBody, ...] = ()
    """What the latest attempt reserves or reserved. Neither lists nor webhooks have this."""
    reported: ReportedBody | None = None
    """What the latest attempt is known to have used. Neither lists nor webhooks have this."""
    unpriced: bool = False
    """True for a success whose dollars nobody knows: its target reported none, or a model without a
    price."""
    usage: TaskUsageBody | None = None
    """What all attempts were booked at."""
    choice: Choice | None = None
    """Why the latest attempt started when it did."""
    attempts: tuple[AttemptBody, ...] = ()
    """The latest 10 attempts after which it was tried again, oldest first. Neither lists nor
    webhooks have this."""


def whole_snapshot_of(record: TaskRecord) -> TaskSnapshot:
    """Return what clients see of a task that they ask for by its id."""
    snapshot = snapshot_of(record)
    snapshot.held = held_of(record)
    snapshot.reported = _reported(record)
    snapshot.attempts = tuple([_attempt(past) for past in record.progress.attempts])
    return snapshot


def snapshot_of(record: TaskRecord) -> TaskSnapshot:
    """Return what clients see of a task among others."""
    task, terms, given, progress = record.task, record.terms, record.submission, record.progress
    return TaskSnapshot(
        task_id=task.id,
        agent_id=record.agent_id or task.agent_id,
        action=given.action,
        tab_id=given.tab_id,
        selector=given.selector,
        ref=given.ref,
        params=given.params or None,
        priority=task.priority,
        state=task.status,
        deadline=moment(task.deadline),
        created_at=exact_moment(task.created_at),
        started_at=moment(progress.started_at),
        completed_at=moment(progress.completed_at),
        latency_ms=_latency_ms(progress.started_at, progress.completed_at),
        result=msgspec.Raw(record.result) if record.result else None,
        error=record.error or None,
        callback_url=terms.callback_url,
        position=_position(record),
        project_id=task.project_id,
        target=task.target,
        slot=_slot(record),
        provider=task.provider,
        input=given.input or None,
        weight=task.weight,
        estimate=_amount(task.estimate_tokens, terms.estimate_micro_usd),
        cost_usd=None if terms.cost_micro_usd is None else to_usd_float(terms.cost_micro_usd),
        scopes=task.scopes,
        depends_on=terms.depends_on,
        on_parent_failure=terms.on_parent_failure,
        not_before=moment(task.not_before),
        labels=given.labels,
        retry_of=given.retry_of,
        traceparent=given.traceparent,
        max_attempts=terms.max_attempts,
        timeout_seconds=terms.attempt_seconds,
        on_exhausted=terms.on_exhausted,
        attempt=progress.attempt,
        progress=progress_of(record),
        unpriced=progress.is_unpriced,
        usage=_used(record),
        choice=progress.choice,
    )


def moment(seconds: float | None) -> datetime | None:
    """Return Unix seconds as a time in UTC."""
    return None if seconds is None else exact_moment(seconds)


def exact_moment(seconds: float) -> datetime:
    """Return Unix seconds as a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def progress_of(record: TaskRecord) -> ProgressBody | None:
    """Return how far the attempt that runs says that it is; None if it says nothing."""
    report = record.progress.report
    if report is None or (report.fraction is None and not report.text):
        return None
    return ProgressBody(fraction=report.fraction, text=report.text, at=exact_moment(report.at))


def held_of(record: TaskRecord) -> tuple[HeldBody, ...]:
    """Return what the latest attempt holds or held, a line for each unit; a waiting one nothing."""
    progress = record.progress
    if not progress.attempt or record.task.status is TaskStatus.QUEUED:
        return ()
    found = []
    for unit in Unit:
        is_usd = unit is Unit.MICRO_USD
        held = progress.reserved_micro_usd if is_usd else progress.reserved_tokens
        # How an amount came about is kept only where nobody gave it.
        said = given(held) if progress.hold is None else progress.hold.estimate(unit)
        if held or said.basis is Basis.SILENT:
            found.append(_held(said, unit, held, said.sentence(held, unit)))
    return tuple(found)


def would_hold(hold: Hold) -> tuple[HeldBody, ...]:
    """Return what a waiting task would hold, a line for each unit."""
    units = [(unit, hold.estimate(unit)) for unit in Unit]
    return tuple(
        [
            _held(one, unit, None if one.basis is Basis.PROBE else one.amount, one.prospect(unit))
            for unit, one in units
            if one.basis is not Basis.FREE
        ]
    )


def _held(one: Estimate, unit: Unit, amount: int | None, text: str) -> HeldBody:
    is_usd = unit is Unit.MICRO_USD
    return HeldBody(
        unit="usd" if is_usd else "tokens",
        amount=to_usd_float(amount) if is_usd and amount is not None else amount,
        basis=one.basis,
        samples=one.samples or None,
        quantile=one.quantile or None,
        text=text,
    )


def _reported(record: TaskRecord) -> ReportedBody | None:
    progress = record.progress
    said = _amount(progress.reported_tokens, progress.reported_micro_usd)
    if said is None:
        return None
    return ReportedBody(tokens=said.tokens, usd=said.usd, priced=progress.is_priced)


def _used(record: TaskRecord) -> TaskUsageBody | None:
    """Return what all attempts were booked at; None before the first has ended."""
    if record.tokens is None and record.micro_usd is None:
        return None
    progress = record.progress
    assumed = (progress.assumed_tokens, progress.assumed_micro_usd)
    return _booked(progress.used_tokens, progress.used_micro_usd, assumed=assumed)


def _booked(tokens: int, micro_usd: int, *, assumed: tuple[int, int]) -> TaskUsageBody:
    assumed_tokens, assumed_micro_usd = assumed
    return TaskUsageBody(
        tokens=tokens,
        usd=to_usd_float(micro_usd),
        assumed_tokens=assumed_tokens or None,
        assumed_usd=to_usd_float(assumed_micro_usd) or None,
    )


def _attempt(past: PastAttempt) -> AttemptBody:
    assumed = (past.assumed_tokens, past.assumed_micro_usd)
    return AttemptBody(
        attempt=past.attempt,
        started_at=moment(past.started_at),
        ended_at=exact_moment(past.ended_at),
        error=past.error,
        agent_id=past.agent_id,
        slot=past.slot,
        node_id=past.node_id,
        usage=_booked(past.tokens, past.micro_usd, assumed=assumed),
    )


def _slot(record: TaskRecord) -> str | None:
    """Return the slot of a task; one that leaves it open has none while it waits."""
    return record.task.slot if record.task.status is TaskStatus.QUEUED else slot_of(record)


def _position(record: TaskRecord) -> int | None:
    return record.position or None if record.task.status is TaskStatus.QUEUED else None


def _latency_ms(started_at: float | None, completed_at: float | None) -> int | None:
    if started_at is None or completed_at is None:
        return None
    return max(0, round((completed_at - started_at) * 1000))


def _amount(tokens: int | None, micro_usd: int | None) -> AmountBody | None:
    if tokens is None and micro_usd is None:
        return None
    return AmountBody(tokens=tokens, usd=None if micro_usd is None else to_usd_float(micro_usd))
