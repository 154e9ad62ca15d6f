"""What an execution came to, and what the task does next.

An executor reports an outcome; it does not know of attempts. `next_step` is where it is decided
whether the task is finished or tried again, and `cost_of` what is booked for the attempt.

Rule: what the provider may have charged is booked. An outcome without numbers costs what was
reserved, unless the executor knows that the provider cannot have charged.
"""

from __future__ import annotations

import math
import re
from datetime import datetime

import msgspec

from headgate.core.budgets.escrow import Amounts
from headgate.core.gates import GateClosure
from headgate.core.money import MAX_RESERVATION_MICRO_USD, MAX_RESERVATION_TOKENS
from headgate.core.retries import Backoff, RateLimitPolicy, doubled_seconds, rate_limit_wait_seconds
from headgate.core.task import (
    MAX_LOSSES,
    Progress,
    Task,
    TaskRecord,
    TaskStatus,
    Terms,
    is_worker,
)
from headgate.errors import InvalidSettingError

DEADLINE_EXCEEDED = "deadline exceeded while running"
CANCELLED = "cancelled"
SHORTEST_PAUSE_SECONDS = 1.0
MAX_MODEL_LENGTH = 128
MAX_PAUSE_SECONDS = 86_400.0
"""The longest pause that anybody can ask for: a wrong header must not stop work for a year."""

MAX_SHARED_PAUSE_SECONDS = 3_600.0
"""How long one answer closes what several use, at most: a target, or a slot of which nobody knows
when its window resets. After that one task asks again, which costs nothing while it is refused."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What an execution used, as far as anybody knows; None is unknown, 0 is nothing.

    `model` is what the provider calls the one that answered. `is_priced` says that the dollars
    come from our price list and a provider's counts; otherwise the target said them.
    """

    tokens: int | None = None
    micro_usd: int | None = None
    model: str | None = None
    is_priced: bool = False

    @property
    def is_unpriced(self) -> bool:
        """Whether a model was used of which nobody knows the price."""
        return self.model is not None and bool(self.tokens) and self.micro_usd is None


UNKNOWN_USAGE = Usage()
NOTHING_USED = Usage(tokens=0, micro_usd=0)


class Succeeded(msgspec.Struct, frozen=True, kw_only=True):
    """The work was done; `result` is JSON."""

    result: msgspec.Raw | None = None
    usage: Usage = UNKNOWN_USAGE


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The work was not done. A transient failure may be tried again.

    `is_cut` says that nobody heard how it ended: a timeout, or a connection that broke after the
    request was sent. The work may go on, and be charged for.
    """

    error: str
    is_transient: bool = False
    usage: Usage = UNKNOWN_USAGE
    is_cut: bool = False


class Limited(msgspec.Struct, frozen=True, kw_only=True):
    """The provider asked for a pause; it has done nothing, and charged nothing.

    One that is overloaded may guess when it is not; a limit has an end. `slot` is the one whose
    provider answered so; None where nobody but the target or the worker said it. `why` is what
    others are told who wait for the same thing: it has nothing of this task in it.
    """

    retry_after_seconds: float | None = None
    error: str = "rate limited"
    is_overload: bool = False
    slot: str | None = None
    why: str = ""


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """The executor was stopped because somebody cancelled the task."""

    usage: Usage = UNKNOWN_USAGE


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """The node went away, or could not begin; `has_started` tells whether work may have begun.

    One that cannot begin here may elsewhere, after `retry_seconds`.
    """

    has_started: bool
    retry_seconds: float | None = None
    error: str | None = None


Outcome = Succeeded | Failed | Limited | Cancelled | Lost


def timed_out(attempt_seconds: float) -> Failed:
    """Return the outcome of an attempt that took longer than its terms allow."""
    return Failed(error=f"timed out after {attempt_seconds:g} s", is_transient=True, is_cut=True)


class Finish(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="finish"):
    """The task is over."""

    status: TaskStatus
    error: str | None = None


class TryAgain(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="again"):
    """The task is queued again, and may start at `not_before`; None is at once."""

    not_before: float | None
    failures: int = 0
    losses: int = 0
    rate_limit_hits: int = 0
    error: str | None = None


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long tasks wait before another try."""

    backoff: Backoff = Backoff()
    rate_limit: RateLimitPolicy = RateLimitPolicy()


DEFAULT_POLICY = RetryPolicy()


def next_step(
    outcome: Outcome,
    progress: Progress,
    terms: Terms,
    *,
    now: float,
    draw: float,
    policy: RetryPolicy = DEFAULT_POLICY,
) -> Finish | TryAgain:
    """Decide what a task does after an outcome; the counts of `TryAgain` are the new ones."""
    match outcome:
        case Succeeded():
            return Finish(status=TaskStatus.DONE)
        case Cancelled():
            return Finish(status=TaskStatus.CANCELLED, error=CANCELLED)
        case Failed():
            return _after_failure(outcome, progress, terms, now=now, draw=draw, policy=policy)
        case Limited():
            hits = progress.rate_limit_hits + 1
            return _again(
                progress,
                rate_limit_hits=hits,
                not_before=now + pause_seconds(outcome, hits, policy),
                error=outcome.error,
            )
        case Lost():
            return _after_loss(outcome, progress, now)


def pause_seconds(outcome: Limited, hits: int, policy: RetryPolicy = DEFAULT_POLICY) -> float:
    """Return how long a provider is left alone: as long as it said, else longer each time.

    One that names no time worth the name, and goes on refusing, is asked ever more seldom.
    """
    asked = outcome.retry_after_seconds
    is_named = asked is not None and not math.isnan(asked)
    if not is_named and not outcome.is_overload:
        return rate_limit_wait_seconds(hits, policy.rate_limit)
    if asked is None or not asked >= SHORTEST_PAUSE_SECONDS:
        longest = policy.rate_limit.max_seconds
        return doubled_seconds(hits, base=SHORTEST_PAUSE_SECONDS, maximum=longest)
    return min(asked, MAX_PAUSE_SECONDS)


def closure_after(
    outcome: Outcome,
    record: TaskRecord,
    *,
    now: float,
    policy: RetryPolicy = DEFAULT_POLICY,
    slot_resets_at: float | None = None,
) -> GateClosure | None:
    """Return what a pause closes, for whom, and until when.

    Rule: nobody's word closes what others use. A worker pauses its own agent, and a target itself.
    A slot is closed by the answer of its provider alone, and no longer than until its window
    resets; `slot_resets_at` is that time, where it is known.
    """
    if not isinstance(outcome, Limited):
        return None
    seconds = pause_seconds(outcome, record.progress.rate_limit_hits + 1, policy)
    worker, task_id = record.progress.node_id, record.task.id
    if is_worker(worker):
        # Agents share the target that they pull from, and not the account that they work on.
        return GateClosure(
            kind="agent",
            name=record.agent_id or "",
            until=now + seconds,
            why=outcome.error,
            cause="worker",
            by=worker or "",
            task_id=task_id,
            since=now,
        )
    target, slot = record.task.target or "", outcome.slot
    latest = now + MAX_SHARED_PAUSE_SECONDS
    if slot is not None and slot_resets_at is not None and slot_resets_at > now:
        latest = slot_resets_at
    return GateClosure(
        kind="target" if slot is None else "slot",
        name=target if slot is None else slot,
        until=min(now + seconds, latest),
        why=outcome.why or outcome.error,
        cause="target" if slot is None else "provider",
        by=target,
        task_id=task_id,
        since=now,
    )


def behind(closure: GateClosure, step: Finish | TryAgain, task: Task) -> Finish | TryAgain:
    """Let a task wait for the gate that its own attempt closed, and not for a time of its own.

    So it goes on when somebody opens the gate, and at once where another slot is chosen for it. Of
    those who pull, only the agent that a task names stands before its gate.
    """
    if isinstance(step, Finish):
        return step
    is_held = closure.kind != "agent" or task.agent_id == closure.name
    return msgspec.structs.replace(step, not_before=None if is_held else closure.until)


def known_usage(outcome: Outcome) -> Usage:
    """Return what the attempt has used, as far as anybody gave numbers that can be booked."""
    match outcome:
        case Limited():
            return NOTHING_USED
        case Lost():
            return UNKNOWN_USAGE if outcome.has_started else NOTHING_USED
        case _:
            usage = outcome.usage
    return Usage(
        tokens=_known(usage.tokens, most=MAX_RESERVATION_TOKENS),
        micro_usd=_known(usage.micro_usd, most=MAX_RESERVATION_MICRO_USD),
        model=_model(usage.model),
        is_priced=usage.is_priced,
    )


def without_failure_cost(outcome: Outcome) -> Outcome:
    """Return the outcome of a target whose failures cost nothing.

    It holds for a failure that the target itself reported, without any figures. One that was cut
    off costs what was reserved: nobody knows what became of the work.
    """
    if not isinstance(outcome, Failed) or outcome.is_cut:
        return outcome
    if (outcome.usage.tokens, outcome.usage.micro_usd) != (None, None):
        return outcome
    return msgspec.structs.replace(outcome, usage=NOTHING_USED)


def at_fixed_cost(outcome: Outcome, terms: Terms) -> Outcome:
    """Return what an executor reports with the cost that the terms of its task fix, if they do.

    Work that surely was not begun has cost nothing, whatever the terms say.
    """
    if terms.cost_micro_usd is None or isinstance(outcome, Limited | Lost):
        return outcome
    usage = outcome.usage
    has_begun = isinstance(outcome, Succeeded) or (usage.tokens, usage.micro_usd) != (0, 0)
    if not has_begun:
        return outcome
    fixed = msgspec.structs.replace(usage, micro_usd=terms.cost_micro_usd, is_priced=False)
    return msgspec.structs.replace(outcome, usage=fixed)


def cost_of(outcome: Outcome, *, reserved_tokens: int, reserved_micro_usd: int) -> Usage:
    """Return what the attempt is booked at; every figure is known in it."""
    usage = known_usage(outcome)
    return Usage(
        tokens=reserved_tokens if usage.tokens is None else usage.tokens,
        micro_usd=reserved_micro_usd if usage.micro_usd is None else usage.micro_usd,
        model=usage.model,
        is_priced=usage.is_priced,
    )


FULL_CHARGE_SECONDS = 1.0
"""From so long on a failure that used nothing counts as a whole task in the share of its project.

It had a permit meanwhile. What a target refuses at once counts less, or one that is down for an
hour would cost its project the share of a day.
"""


MOST_CLAIMED_SHARE = 10
"""So many times what is known of its kind may a claim count in a project's share, at the start of
an attempt, and so many times what it was charged then at its end."""


def share_of(
    progress: Progress, cost: Usage, *, seconds: float, is_done: bool, is_claim: bool = False
) -> int:
    """Return what an attempt that ran counts in the share of its project, once it has ended.

    What was measured replaces what it was charged at its start. A success that used no tokens, and
    what a tenant merely claims, lower nothing: they had a permit all the same. Nor does a claim
    raise it by more than `MOST_CLAIMED_SHARE` times: the project need not be the tenant's own.
    """
    charged = progress.share_tokens
    if cost.tokens is None:
        return charged
    if is_claim:
        return max(charged, min(cost.tokens, MOST_CLAIMED_SHARE * charged))
    if cost.tokens or not charged:
        return cost.tokens
    if is_done:
        return charged
    return share_of_unused(charged, seconds)


def share_of_unused(charged: int, seconds: float) -> int:
    """Return what work that used nothing counts in the share: by how long it had its permit.

    Nothing is free, or a project whose work fails at once would take every grant.
    """
    return math.ceil(charged * min(1.0, max(0.0, seconds) / FULL_CHARGE_SECONDS))


MOST_UNPRICED_MICRO_USD = 1_000
"""So much at most counts in shares by dollars what has no price, or costs nothing."""


def share_in_usd(tokens: int, micro_usd: int) -> int:
    """Return what work counts in shares by dollars; where it has no cost, its tokens stand in."""
    return micro_usd or min(tokens, MOST_UNPRICED_MICRO_USD)


def share_of_try(used: Amounts, charged: Amounts, seconds: float) -> Amounts:
    """Return what a try of a call counts in the share, in both units of it, once it is over.

    One that used nothing counts by the `seconds` that it had its permit.
    """
    return Amounts(
        used.micro_usd or share_of_unused(charged.micro_usd, seconds),
        used.tokens or share_of_unused(charged.tokens, seconds),
    )


def _known(used: int | None, *, most: int) -> int | None:
    """Return a figure; one that a ledger would refuse counts as unknown."""
    return None if used is None or not 0 <= used <= most else used


def _model(name: object) -> str | None:
    """Return the name of a model; one that could not be kept or shown counts as unknown."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_MODEL_LENGTH:
        return None
    return name if name.isprintable() else None


def _after_failure(
    outcome: Failed,
    progress: Progress,
    terms: Terms,
    *,
    now: float,
    draw: float,
    policy: RetryPolicy,
) -> Finish | TryAgain:
    failures = progress.failures + 1
    if not outcome.is_transient or failures >= terms.max_attempts:
        return Finish(status=TaskStatus.FAILED, error=outcome.error)
    wait_seconds = policy.backoff.seconds(failures, draw=draw)
    return _again(progress, failures=failures, not_before=now + wait_seconds, error=outcome.error)


def _after_loss(outcome: Lost, progress: Progress, now: float) -> Finish | TryAgain:
    if not outcome.has_started:
        wait_seconds = outcome.retry_seconds
        not_before = None if wait_seconds is None else now + wait_seconds
        return _again(progress, not_before=not_before, error=outcome.error)
    losses = progress.losses + 1
    if losses >= MAX_LOSSES:
        error = f"its node was lost {losses} times while it ran; it is not started again"
        return Finish(status=TaskStatus.FAILED, error=error)
    return _again(progress, losses=losses, not_before=None, error="its node was lost")


def _again(
    progress: Progress,
    *,
    not_before: float | None,
    failures: int | None = None,
    losses: int | None = None,
    rate_limit_hits: int | None = None,
    error: str | None = None,
) -> TryAgain:
    hits = progress.rate_limit_hits if rate_limit_hits is None else rate_limit_hits
    return TryAgain(
        not_before=not_before,
        failures=progress.failures if failures is None else failures,
        losses=progress.losses if losses is None else losses,
        rate_limit_hits=hits,
        error=error,
    )


# Deadlines: which are accepted, and when a waiting task has missed its own.
#
# One boundary everywhere: at its deadline a task has no time left. So a deadline is accepted
# exactly if a task with it would not be expired at once.

INVALID_FORMAT = "invalid deadline format"
IN_THE_PAST = "deadline is in the past"
EXPIRED_WHILE_QUEUED = "deadline exceeded while queued"

# ISO 8601 has many more forms (week dates, no offset, no colons) that RFC 3339 leaves out.
_RFC_3339 = re.compile(
    r"(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2})[Tt ](?P<minute>[0-9]{2}:[0-9]{2}):(?P<second>[0-9]{2})"
    r"(?P<fraction>\.[0-9]+)?(?P<offset>[Zz]|[+-][0-9]{2}:[0-9]{2})"
)
_LEAP_SECOND = "60"
_SECONDS_PER_DAY = 86400


class DeadlineRefused(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted deadline that cannot be kept, and why."""

    message: str


def parse_rfc3339(text: str) -> float | None:
    """Return the Unix seconds of an RFC 3339 timestamp, or None if it is not one."""
    match = _RFC_3339.fullmatch(text)
    if match is None:
        return None
    is_leap = match["second"] == _LEAP_SECOND
    clock = f"{match['minute']}:{'59' if is_leap else match['second']}{match['fraction'] or ''}"
    try:
        moment = datetime.fromisoformat(f"{match['date']}T{clock}{match['offset'].upper()}")
    except ValueError:
        return None
    return _leap_second_after(moment) if is_leap else moment.timestamp()


def _leap_second_after(moment: datetime) -> float | None:
    # A leap second has no Unix time of its own, and comes only at the end of a day in UTC.
    following = moment.timestamp() + 1
    return following if following % _SECONDS_PER_DAY < 1 else None


def accept_deadline(
    text: str | None, *, now: float, default_deadline_seconds: float | None = None
) -> float | DeadlineRefused | None:
    """Return the deadline of a task submitted now, None for no deadline, or the refusal.

    Without a submitted one it is so many seconds from now, if there is a default.
    """
    if text is None:
        return _default_deadline(now, default_deadline_seconds)
    deadline = parse_rfc3339(text)
    if deadline is None:
        return DeadlineRefused(message=INVALID_FORMAT)
    return deadline if deadline > now else DeadlineRefused(message=IN_THE_PAST)


def expired(task: Task, now: float) -> bool:
    """Tell whether a queued task has missed its deadline, so that it fails without having run.

    Other states are not judged here: the executor keeps the deadline of a task that it has.
    """
    return task.status is TaskStatus.QUEUED and task.deadline is not None and now >= task.deadline


def remaining_seconds(task: Task, now: float) -> float | None:
    """Return the time that a task has left, never less than zero; None is without end."""
    return None if task.deadline is None else max(0.0, task.deadline - now)


def _default_deadline(now: float, seconds: float | None) -> float | None:
    if seconds is None:
        return None
    if not seconds > 0:
        raise InvalidSettingError("default_deadline_seconds", f"must be above 0: {seconds}")
    return now + seconds
