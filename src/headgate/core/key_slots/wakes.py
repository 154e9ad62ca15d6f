"""The steps of a wake: claimed before it is sent, settled by its answer, sent once more.

Rule: the markers of all that a wake serves, and the wake itself as pending, are stored before the
request leaves. If the process dies in between, the retry window finds no confirmation and sends
it. Slots that use the same key share a window, and so a wake: one that is due as well is served by
the same request, and one that comes due a moment later joins the wake that is on its way.
"""

from __future__ import annotations

import msgspec

from headgate.core.key_slots.headroom import why_off
from headgate.core.key_slots.poll_backoff import poll_succeeded
from headgate.core.key_slots.quota import WakeAnswer
from headgate.core.key_slots.readings import Reading, read_answer
from headgate.core.key_slots.slot import Claim, Rows, SlotConfig, SlotRow
from headgate.core.key_slots.steps import Changed, problem_of, with_failure, with_reading
from headgate.core.key_slots.times import WakeCause, due_wake, wake_obstacle
from headgate.core.key_slots.wake import (
    SECONDS_PER_MINUTE,
    due_trigger,
    mark_fired,
    mark_missed,
    missed_time,
)
from headgate.core.key_slots.wake_confirmation import (
    Confirmation,
    WindowEnd,
    end_pending,
    wake_sent,
)
from headgate.core.key_slots.wake_confirmation import close_window as close_retry_window

SHARED_WAKE_SECONDS = 60.0
"""For so long after a wake, a slot of the same key does not send another."""

Configs = tuple[SlotConfig, ...]
"""All slots that use one key; those that use it alone are by themselves."""


class WakeClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A wake that is to be sent now, unless it `is_shared`: then one is on its way already.

    `also` are the other slots that it serves. What has not left by `send_before`, or within
    `send_within_seconds`, is not sent any more: its retry may be on the way by then.
    """

    id: str
    name: str
    cause: WakeCause
    reason: str
    send_before: float = 0.0
    send_within_seconds: float = 0.0
    also: tuple[str, ...] = ()
    is_shared: bool = False


class WakeDone(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a wake: the row after it, and what there is to tell.

    `outcome` is `ok` or the kind of the failure; a stale answer changed nothing.
    """

    row: SlotRow
    outcome: str
    is_stale: bool = False
    problem: str = ""
    confirmation: Confirmation = Confirmation.NOT_PENDING
    is_disabled: bool = False


class WindowDone(msgspec.Struct, frozen=True, kw_only=True):
    """What the end of a retry window called for; `claim` where a wake is sent once more."""

    row: SlotRow
    outcome: WindowEnd
    claim: WakeClaim | None = None


def claim_wake(
    rows: Rows, now: float, *, configs: Configs, name: str, cause: WakeCause, claim_id: str
) -> tuple[Changed, WakeClaim | None]:
    """Claim a wake; None if there is no need any more, or the slot is not free for one.

    The pre-check lies before this step. A person may have a slot woken that no mode wakes.
    """
    row, config = _of(rows, configs, name)
    if row.wake_claim is not None and row.wake_claim.id == claim_id:
        return (), _claim(rows, configs, name, cause, claim_id, reason=cause)
    reason = _reason(config, row, cause, now)
    if not reason:
        return (), None
    donor = _donor(rows, configs, config, now)
    if donor is not None:
        joined = _joined(_woken(config, row, now, None), donor)
        claim = _claim({}, configs, name, cause, claim_id, reason=reason)
        return (joined,), msgspec.structs.replace(claim, is_shared=True)
    due_too = [other for other in _others(configs, name) if _is_due(rows, other, now)]
    held = Claim(id=claim_id, until=now + _window_seconds(config))
    after = tuple(_woken(each, rows[each.name], now, held) for each in (config, *due_too))
    known = {each.name: each for each in after}
    return after, _claim(known, configs, name, cause, claim_id, reason=reason)


def skip_wake(
    rows: Rows, now: float, *, config: SlotConfig, marker: str
) -> tuple[Changed, SlotRow]:
    """Answer a trigger by its pre-check: a window is open, and no wake is needed."""
    row = rows.get(config.name) or SlotRow(name=config.name)
    trigger = due_trigger(config.wake, row.schedule, now)
    if trigger is None or trigger.marker != marker:
        return (), row
    after = msgspec.structs.replace(row, schedule=mark_fired(row.schedule, trigger, now))
    return (after,), after


def miss_wake(rows: Rows, now: float, *, config: SlotConfig, marker: str) -> tuple[Changed, bool]:
    """Give up a time of day that was held for too long; False if somebody else has done so."""
    row = rows.get(config.name) or SlotRow(name=config.name)
    trigger = missed_time(config.wake, row.schedule, now)
    if trigger is None or trigger.marker != marker:
        return (), False
    after = msgspec.structs.replace(row, schedule=mark_missed(row.schedule, trigger))
    return (after,), True


def wake_done(
    rows: Rows, now: float, *, configs: Configs, name: str, claim_id: str, answer: WakeAnswer
) -> tuple[Changed, WakeDone]:
    """Settle a claimed wake by its answer, for every slot that it serves.

    A refused key stops at once, and a provider that asks for a pause gets it. After any other
    failure the wake stays pending, and its retry window goes on.
    """
    own, _ = _of(rows, configs, name)
    served = [
        config
        for config in configs
        if (row := rows.get(config.name)) and row.wake_claim and row.wake_claim.id == claim_id
    ]
    done = {each.name: _answered(each, rows[each.name], now, answer) for each in served}
    if name not in done:
        done[name] = WakeDone(row=own, outcome=_outcome(answer), is_stale=True)
    return tuple(done[each.name].row for each in served), done[name]


def close_window(
    rows: Rows, now: float, *, configs: Configs, name: str, claim_id: str
) -> tuple[Changed, WindowDone]:
    """End a retry window that is over: send the wake once more, or return to the schedule."""
    row, config = _of(rows, configs, name)
    if row.wake_claim is not None and row.wake_claim.id == claim_id:
        claim = _claim(rows, configs, name, "retry", claim_id, reason=_RETRY)
        return (), WindowDone(row=row, outcome=WindowEnd.RETRY_NOW, claim=claim)
    if row.schedule.wake_pending and why_off(config, row):
        ended = _without_claim(row, end_pending(row.schedule))
        return (ended,), WindowDone(row=ended, outcome=WindowEnd.BACK_TO_SCHEDULE)
    step = close_retry_window(config.wake, row.schedule, now)
    if step.outcome is WindowEnd.RETRY_NOW:
        return _retry(rows, now, configs=configs, config=config, claim_id=claim_id)
    after = row
    if step.outcome is not WindowEnd.NOT_YET:
        after = _without_claim(row, step.schedule)
    return (() if after == row else (after,)), WindowDone(row=after, outcome=step.outcome)


_RETRY = "not confirmed within its retry window"


def _retry(
    rows: Rows, now: float, *, configs: Configs, config: SlotConfig, claim_id: str
) -> tuple[Changed, WindowDone]:
    name = config.name
    donor = _retry_of_another(rows, configs, config, now)
    held = None if donor is not None else Claim(id=claim_id, until=now + _window_seconds(config))
    after = {name: _retried(config, rows[name], now, held)}
    if donor is not None:
        after[name] = _joined(after[name], donor)
    else:
        for other in _others(configs, name):
            if _retry_is_due(rows, other, now):
                after[other.name] = _retried(other, rows[other.name], now, held)
    claim = _claim(after, configs, name, "retry", claim_id, reason=_RETRY)
    claim = msgspec.structs.replace(claim, is_shared=donor is not None)
    done = WindowDone(row=after[name], outcome=WindowEnd.RETRY_NOW, claim=claim)
    return tuple(after.values()), done


def _retried(config: SlotConfig, row: SlotRow, now: float, claim: Claim | None) -> SlotRow:
    schedule = close_retry_window(config.wake, row.schedule, now).schedule
    return msgspec.structs.replace(row, schedule=schedule, poll_claim=None, wake_claim=claim)


def _retry_is_due(rows: Rows, config: SlotConfig, now: float) -> bool:
    row = rows.get(config.name)
    if row is None or why_off(config, row):
        return False
    step = close_retry_window(config.wake, row.schedule, now)
    return step.outcome is WindowEnd.RETRY_NOW


def _answered(config: SlotConfig, row: SlotRow, now: float, answer: WakeAnswer) -> WakeDone:
    row = msgspec.structs.replace(row, wake_claim=None)
    told = answer.failure or answer.report
    read = None if told is None else read_answer(config, told, now, row.reading)
    confirmation, after = Confirmation.NOT_PENDING, row
    if isinstance(read, Reading):
        # The poll that follows counts errors; this answer may be older than the window it opens.
        after, confirmation = with_reading(row, read, now, counts_errors=False)
        if confirmation is Confirmation.CONFIRMED:
            schedule = poll_succeeded(after.schedule, now)
            after = msgspec.structs.replace(after, schedule=schedule)
    elif answer.failure is not None:
        after = with_failure(config, row, answer.failure, now) or row
    if after.schedule.wake_pending:
        # A poll from while it was on its way may have told nothing of it; the retry waits for one.
        schedule = msgspec.structs.replace(after.schedule, poll_requested=True)
        after = msgspec.structs.replace(after, schedule=schedule)
    return WakeDone(
        row=after,
        outcome=_outcome(answer),
        problem="" if answer.failure is None else problem_of(answer.failure),
        confirmation=confirmation,
        is_disabled=after.schedule.slot_auto_disabled and not row.schedule.slot_auto_disabled,
    )


def _outcome(answer: WakeAnswer) -> str:
    return "ok" if answer.failure is None else answer.failure.kind.value


def _reason(config: SlotConfig, row: SlotRow, cause: WakeCause, now: float) -> str:
    """Return what calls for this wake now; "" if nothing does."""
    if cause == "manual":
        return "" if wake_obstacle(config, row, now) else "by hand"
    due = due_wake(config, row, now)
    return due.reason if due is not None and due.cause == cause else ""


def _is_due(rows: Rows, config: SlotConfig, now: float) -> bool:
    row = rows.get(config.name)
    return row is not None and due_wake(config, row, now) is not None


def _woken(config: SlotConfig, row: SlotRow, now: float, claim: Claim | None) -> SlotRow:
    # A poll that is under way was sent before the wake and cannot tell of it: its claim ends, and
    # the poll that the wake asks for takes its place.
    schedule = wake_sent(config.wake, row.schedule, now)
    return msgspec.structs.replace(
        row, schedule=schedule, start="", poll_claim=None, wake_claim=claim
    )


def _joined(row: SlotRow, donor: SlotRow) -> SlotRow:
    """Return the row with the time of the wake that was really sent.

    Otherwise each slot that joins would lengthen the time in which others may.
    """
    schedule = msgspec.structs.replace(row.schedule, last_wake_at=donor.schedule.last_wake_at)
    return msgspec.structs.replace(row, schedule=schedule)


def _donor(rows: Rows, configs: Configs, config: SlotConfig, now: float) -> SlotRow | None:
    """Return the row of a slot whose wake is on its way, or was sent a moment ago."""
    longest = 2 * _window_seconds(config)
    pending = [
        row
        for row in _rows_of_key(rows, configs, config)
        if row.schedule.wake_pending and _is_within(row, now, longest)
    ]
    return _sent_lately(rows, configs, config, now) or next(iter(pending), None)


def _sent_lately(rows: Rows, configs: Configs, config: SlotConfig, now: float) -> SlotRow | None:
    for row in _rows_of_key(rows, configs, config):
        if _is_within(row, now, SHARED_WAKE_SECONDS):
            return row
    return None


def _retry_of_another(
    rows: Rows, configs: Configs, config: SlotConfig, now: float
) -> SlotRow | None:
    """Return the row of a slot whose retry is on its way: a slot that joined a wake ends later."""
    for row in _rows_of_key(rows, configs, config):
        is_retried = row.schedule.wake_pending and row.schedule.wake_timeout_retry_fired
        if is_retried and _is_within(row, now, _window_seconds(config)):
            return row
    return _sent_lately(rows, configs, config, now)


def _is_within(row: SlotRow, now: float, seconds: float) -> bool:
    sent_at = row.schedule.last_wake_at
    return sent_at is not None and 0 <= now - sent_at < seconds


def _rows_of_key(rows: Rows, configs: Configs, config: SlotConfig) -> list[SlotRow]:
    """Return what is kept of other slots under this very key."""
    found = (rows.get(other.name) for other in _others(configs, config.name))
    return [
        row
        for row in found
        if row is not None and row.config is not None and row.config.key_digest == config.key_digest
    ]


def _others(configs: Configs, name: str) -> list[SlotConfig]:
    return [config for config in configs if config.name != name]


def _of(rows: Rows, configs: Configs, name: str) -> tuple[SlotRow, SlotConfig]:
    config = next(config for config in configs if config.name == name)
    return rows.get(name) or SlotRow(name=name), config


def _claim(
    rows: Rows, configs: Configs, name: str, cause: WakeCause, claim_id: str, *, reason: str
) -> WakeClaim:
    also = tuple(
        other.name
        for other in _others(configs, name)
        if (row := rows.get(other.name)) and row.wake_claim and row.wake_claim.id == claim_id
    )
    row, config = _of(rows, configs, name)
    return WakeClaim(
        id=claim_id,
        name=name,
        cause=cause,
        reason=reason,
        also=also,
        send_before=0.0 if row.wake_claim is None else row.wake_claim.until - _half(config),
        send_within_seconds=_half(config),
    )


def _half(config: SlotConfig) -> float:
    """Return the seconds of half a retry window, which leave the other half for the answer."""
    return _window_seconds(config) / 2


def _without_claim(row: SlotRow, schedule: object) -> SlotRow:
    return msgspec.structs.replace(row, schedule=schedule, wake_claim=None)


def _window_seconds(config: SlotConfig) -> float:
    return config.wake.wake_quota_retry_window_minutes * SECONDS_PER_MINUTE
