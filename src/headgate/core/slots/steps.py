"""Every change to what is kept of a slot, as a pure step from rows and now to rows and an answer.

A step decides again from the rows as they are, so that of several nodes that saw the same thing to
do one does it. A poll or a wake is claimed before its request leaves, and its answer counts only
while the claim stands: a new configuration, a switch or a later wake ends it. Claims carry an id
that the caller made, so a step whose reply got lost gives the same answer again.
"""

from __future__ import annotations

import msgspec

from headgate.core.slots.polling import (
    WakeCause,
    due_wake,
    is_live,
    key_is_away,
    may_open_window,
    poll_delay_minutes,
    poll_due_at,
    poll_failed,
    poll_succeeded,
    polled_in_turn,
    slot_throttled,
    wake_obstacle,
)
from headgate.core.slots.quota import (
    QuotaFailure,
    QuotaFailureKind,
    QuotaLimit,
    QuotaReport,
    WakeAnswer,
)
from headgate.core.slots.slot import (
    Claim,
    Reading,
    Rows,
    SlotConfig,
    SlotRow,
    StartPhase,
    is_exhausted,
    is_same,
    read_answer,
    slides,
    why_off,
)
from headgate.core.slots.wakes import (
    SAME_RESET_MS,
    SECONDS_PER_MINUTE,
    Confirmation,
    SlotSchedule,
    WakeConfig,
    WindowEnd,
    config_changed,
    due_trigger,
    end_pending,
    initial_wake_needed,
    interval_under_new_clock,
    key_refused,
    mark_fired,
    mark_missed,
    may_wake,
    missed_time,
    quota_read,
    reset_slides,
    slot_enabled,
    slot_started,
    wake_needed,
    wake_sent,
    wakes_on_start,
)
from headgate.core.slots.wakes import close_window as close_retry_window

Changed = tuple[SlotRow, ...]

MAX_PROBLEM_CHARS = 300


class PollDone(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a poll: the row after it, and what there is to tell.

    `outcome` is `ok` or the kind of the failure. A stale answer changed nothing. `needs_wake` is
    what the pre-check of a wake goes by. `backoff_minutes` is until the next poll after an error.
    `key_was_away` tells of the poll before.
    """

    row: SlotRow
    outcome: str
    is_stale: bool = False
    problem: str = ""
    confirmation: Confirmation = Confirmation.NOT_PENDING
    needs_wake: bool = False
    errors_before: int = 0
    errors_after: int = 0
    is_disabled: bool = False
    backoff_minutes: int | None = None
    key_was_away: bool = False


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a response to real traffic: the row after it, and what it confirmed."""

    row: SlotRow
    confirmation: Confirmation = Confirmation.NOT_PENDING
    is_kept: bool = False


def begin(
    rows: Rows, now: float, *, config: SlotConfig, starts: bool = False
) -> tuple[Changed, SlotRow]:
    """Put a configuration in force, at a start or in between.

    A start asks for a poll, after which the slot may be woken. What disabled a slot ends with any
    change of its settings, and a new key is a new start: nothing that is known of the old one
    holds for it.
    """
    row = _row(rows, config.name)
    after = msgspec.structs.replace(_configured(row, config, now), config=config)
    if starts and not why_off(config, after):
        after = _started(after, now)
    return _changed(row, after), after


def switch(rows: Rows, now: float, *, config: SlotConfig, is_on: bool) -> tuple[Changed, SlotRow]:
    """Enable a slot, whatever had disabled it, or disable it by hand."""
    row = _row(rows, config.name)
    after = msgspec.structs.replace(_at_rest(row), is_off=not is_on)
    if is_on:
        enabled = msgspec.structs.replace(after, schedule=slot_enabled(after.schedule))
        after = enabled if why_off(config, enabled) else _started(enabled, now)
    return _changed(row, after), after


def reopen(rows: Rows, now: float, *, config: SlotConfig) -> tuple[Changed, SlotRow]:  # noqa: ARG001
    """Let tasks start again that a pause or a quota kept, and ask for a poll.

    The poll may know better. A reading that says used up is forgotten: until the next one nobody
    knows how much is used. A slot that is off stays so: that is a switch of its own.
    """
    row = _row(rows, config.name)
    schedule = msgspec.structs.replace(
        row.schedule, paused_until=None, paused_why="", poll_requested=True
    )
    reading = row.reading
    if reading is not None and reading.is_exhausted:
        reading = None
    after = msgspec.structs.replace(row, schedule=schedule, reading=reading)
    return _changed(row, after), after


def claim_poll(
    rows: Rows,
    now: float,
    *,
    config: SlotConfig,
    claim_id: str,
    seconds: float,
    force: bool = False,
) -> tuple[Changed, Claim | None]:
    """Claim the poll of a slot; None if none is due or somebody else is at it.

    `force` is for a pre-check: a poll that is not due yet. Not even that goes before a pause ends.
    """
    row = _row(rows, config.name)
    claim = row.poll_claim
    if claim is not None and claim.id == claim_id:
        return (), claim
    if is_live(claim, now, seconds=seconds):
        return (), None
    free = msgspec.structs.replace(row, poll_claim=None)
    if force:
        asked = msgspec.structs.replace(row.schedule, poll_requested=True)
        free = msgspec.structs.replace(free, schedule=asked)
    due_at = poll_due_at(config, free, now)
    if due_at is None or due_at > now:
        return (), None
    claim = Claim(id=claim_id, until=now + seconds, began_at=now)
    return (msgspec.structs.replace(row, poll_claim=claim),), claim


def poll_done(
    rows: Rows,
    now: float,
    *,
    config: SlotConfig,
    claim_id: str,
    answer: QuotaReport | QuotaFailure,
) -> tuple[Changed, PollDone]:
    """Settle a claimed poll by its answer."""
    row = _row(rows, config.name)
    read = read_answer(config, answer, now, row.reading)
    outcome = _outcome(read)
    if row.poll_claim is None or row.poll_claim.id != claim_id:
        return (), PollDone(row=row, outcome=outcome, is_stale=True)
    began_at = min(row.poll_claim.began_at or now, now)
    schedule = interval_under_new_clock(row.schedule, now)
    released = msgspec.structs.replace(row, schedule=schedule, poll_claim=None)
    if isinstance(read, Reading):
        done = _read_well(config, released, read, now, began_at=began_at)
    else:
        done = _read_nothing(config, released, read, now, began_at=began_at)
    key_was_away = bool(row.schedule.paused_why)
    return (done.row,), msgspec.structs.replace(done, key_was_away=key_was_away)


def look(
    rows: Rows, now: float, *, config: SlotConfig, key_problem: str = ""
) -> tuple[Changed, SlotRow]:
    """Look after a slot that is not polled: whether it has its key, and whether a start wakes it.

    The start goes by what is known, since nobody can be asked for nothing.
    """
    row = _row(rows, config.name)
    if why_off(config, row):
        return (), row
    if key_problem:
        away = key_is_away(row.schedule, now, key_problem)
        after = msgspec.structs.replace(row, schedule=away)
        return _changed(row, after), after
    schedule = interval_under_new_clock(row.schedule, now)
    if schedule.paused_why:
        schedule = msgspec.structs.replace(schedule, paused_until=None, paused_why="")
    is_woken = wakes_on_start(config.wake) and may_wake(schedule, now) and may_open_window(row, now)
    start: StartPhase = "wake" if row.start and is_woken else ""
    after = msgspec.structs.replace(row, schedule=schedule, start=start)
    return _changed(row, after), after


def needs_look(row: SlotRow, now: float) -> bool:
    """Tell whether `look` would change a slot that has its key, without asking the store."""
    schedule = row.schedule
    is_new_clock = interval_under_new_clock(schedule, now) is not schedule
    return row.start == "poll" or bool(schedule.paused_why) or is_new_clock


def observe(
    rows: Rows, now: float, *, config: SlotConfig, answer: QuotaReport | QuotaFailure, at: float
) -> tuple[Changed, Observed]:
    """Take what a response to real traffic said at a moment as a reading, as good as a poll's.

    It counts no errors: whoever sent the request deals with a refusal. It comes in the place of the
    next poll. One that is older than what is known changes nothing.
    """
    row = _row(rows, config.name)
    read = read_answer(config, answer, at, row.reading)
    is_late = row.reading is not None and row.reading.read_at > at
    if isinstance(read, QuotaFailure) or is_late or why_off(config, row):
        return (), Observed(row=row)
    schedule = poll_succeeded(row.schedule, at, is_unchanged=is_same(read.kept, row.reading))
    # A pause for want of a key is over: somebody has used it.
    has_ended = bool(row.schedule.paused_why)
    schedule = msgspec.structs.replace(
        schedule,
        poll_requested=row.schedule.poll_requested and row.schedule.wake_pending,
        paused_until=None if has_ended else schedule.paused_until,
    )
    is_sliding = not schedule.wake_pending and slides(config, read, row)
    before = msgspec.structs.replace(row, schedule=schedule)
    after, confirmation = with_reading(before, read, now, counts_errors=False)
    if is_sliding:
        after = msgspec.structs.replace(after, schedule=reset_slides(after.schedule))
    needs_wake = wake_needed(read.driving, now) and not _is_used_up(read, now)
    start = _start_after(config, after, read.driving, now) if needs_wake else ""
    after = msgspec.structs.replace(after, start=start)
    return (after,), Observed(row=after, confirmation=confirmation, is_kept=True)


def refuse_key(
    rows: Rows, now: float, *, config: SlotConfig, status: int, key_place: str
) -> tuple[Changed, SlotRow | None]:
    """Disable a slot whose key was refused to real traffic; None if it is off already."""
    del now
    row = _row(rows, config.name)
    if why_off(config, row):
        return (), None
    schedule = key_refused(row.schedule, status, key_place=key_place)
    after = msgspec.structs.replace(row, schedule=schedule, start="")
    return (after,), after


def is_news(
    config: SlotConfig, row: SlotRow, answer: QuotaReport | QuotaFailure, now: float
) -> bool:
    """Tell whether what a response said changes more than a percentage, and must not wait."""
    read = read_answer(config, answer, now, row.reading)
    if isinstance(read, QuotaFailure):
        return False
    known, schedule = row.reading, row.schedule
    if known is None or schedule.wake_pending or schedule.paused_why or row.start:
        return True
    if read.kept.is_exhausted != is_exhausted(config, known, now):
        return True
    if slides(config, read, row) or read.reset_ms is None:
        return False
    known_ms = schedule.next_reset_epoch_ms
    return known_ms is None or abs(read.reset_ms - known_ms) > SAME_RESET_MS


def is_used_up(
    config: SlotConfig, row: SlotRow, answer: QuotaReport | QuotaFailure, now: float
) -> bool:
    """Tell whether a response is the first to say that the quota is used up."""
    read = read_answer(config, answer, now, row.reading)
    if isinstance(read, QuotaFailure) or not read.kept.is_exhausted:
        return False
    return row.reading is None or not is_exhausted(config, row.reading, now)


def with_reading(
    row: SlotRow, read: Reading, now: float, *, counts_errors: bool = True
) -> tuple[SlotRow, Confirmation]:
    """Return the row with a reading in it, and what that says about the wake under way."""
    step = quota_read(row.schedule, read.reset_ms, now)
    schedule = step.schedule
    if step.outcome is Confirmation.NOT_CONFIRMED and not counts_errors:
        schedule = msgspec.structs.replace(schedule, wake_errors=row.schedule.wake_errors)
    after = msgspec.structs.replace(row, schedule=schedule, reading=read.kept)
    return after, step.outcome


def with_failure(
    config: SlotConfig, row: SlotRow, failure: QuotaFailure, now: float
) -> SlotRow | None:
    """Return the row after a clear word: go away, wait, there is no key; None if it is none."""
    if failure.kind is QuotaFailureKind.REFUSED:
        refused = key_refused(row.schedule, failure.code, problem_of(failure))
        return msgspec.structs.replace(row, schedule=refused, start="")
    if failure.kind is QuotaFailureKind.THROTTLED:
        throttled = slot_throttled(config.wake, row.schedule, now, failure.retry_after_seconds)
        return msgspec.structs.replace(row, schedule=throttled)
    if failure.kind is QuotaFailureKind.NO_KEY:
        away = key_is_away(row.schedule, now, _line_of(failure))
        return msgspec.structs.replace(row, schedule=away)
    return None


def problem_of(failure: QuotaFailure) -> str:
    """Return one line about a failure."""
    words, line = failure.kind.value.replace("_", " "), _line_of(failure)
    return f"{words}: {line}" if line else words


def _line_of(failure: QuotaFailure) -> str:
    return " ".join(failure.message.split())[:MAX_PROBLEM_CHARS]


def _outcome(read: Reading | QuotaFailure) -> str:
    failure = read.driving if isinstance(read, Reading) else read
    return failure.kind.value if isinstance(failure, QuotaFailure) else "ok"


def _read_well(
    config: SlotConfig, row: SlotRow, read: Reading, now: float, *, began_at: float
) -> PollDone:
    is_unchanged = is_same(read.kept, row.reading)
    polled = poll_succeeded(row.schedule, began_at, is_unchanged=is_unchanged)
    is_sliding = not polled.wake_pending and slides(config, read, row)
    after, confirmation = with_reading(msgspec.structs.replace(row, schedule=polled), read, now)
    if is_sliding:
        schedule = reset_slides(after.schedule)
        after = msgspec.structs.replace(after, schedule=schedule)
    needs_wake = wake_needed(read.driving, now) and not _is_used_up(read, now)
    start = _start_after(config, after, read.driving, now) if needs_wake else ""
    return PollDone(
        row=msgspec.structs.replace(after, start=start),
        outcome=_outcome(read),
        confirmation=confirmation,
        needs_wake=needs_wake,
        errors_before=row.schedule.consecutive_poll_errors,
    )


def _is_used_up(read: Reading, now: float) -> bool:
    resets_at = read.kept.resets_at
    return read.kept.is_exhausted and resets_at is not None and resets_at > now


def _read_nothing(
    config: SlotConfig, row: SlotRow, failure: QuotaFailure, now: float, *, began_at: float
) -> PollDone:
    before, problem = row.schedule, problem_of(failure)
    after = with_failure(config, row, failure, now)
    if after is None:
        failed = poll_failed(config.wake, before, began_at, problem)
        start = _start_after(config, msgspec.structs.replace(row, schedule=failed), failure, now)
        after = msgspec.structs.replace(row, schedule=failed, start=start)
    elif failure.kind is not QuotaFailureKind.NO_KEY:
        after = _answered_at(after, began_at)
    schedule = after.schedule
    errors = schedule.consecutive_poll_errors
    backs_off = errors > before.consecutive_poll_errors and not schedule.slot_auto_disabled
    return PollDone(
        row=after,
        outcome=failure.kind.value,
        problem=problem,
        needs_wake=wake_needed(failure, now),
        errors_before=before.consecutive_poll_errors,
        errors_after=errors,
        is_disabled=schedule.slot_auto_disabled and not before.slot_auto_disabled,
        backoff_minutes=poll_delay_minutes(config.wake, errors) if backs_off else None,
    )


def _answered_at(row: SlotRow, began_at: float) -> SlotRow:
    """Return the row after an answer that is no reading, but no error either."""
    kept = row.schedule
    schedule = msgspec.structs.replace(
        polled_in_turn(kept, began_at),
        poll_requested=kept.poll_requested,
        consecutive_throttles=kept.consecutive_throttles,
    )
    return msgspec.structs.replace(row, schedule=schedule)


def _start_after(
    config: SlotConfig, row: SlotRow, quota: QuotaLimit | QuotaFailure, now: float
) -> StartPhase:
    if not row.start:
        return ""
    return "wake" if initial_wake_needed(config.wake, row.schedule, quota, now) else ""


def _configured(row: SlotRow, config: SlotConfig, now: float) -> SlotRow:
    previous = row.config
    if previous is None:
        return row
    schedule = config_changed(
        _same_zone(previous.wake, config.wake), config.wake, row.schedule, now
    )
    row = msgspec.structs.replace(row, schedule=schedule)
    if previous.key_digest != config.key_digest:
        row = _with_new_key(row)
    if previous.settings_digest != config.settings_digest:
        row = _with_new_settings(row)
    if not config.is_enabled:
        return _at_rest(row)
    is_begun = previous.is_enabled and previous.key_digest == config.key_digest
    return row if is_begun or why_off(config, row) else _started(row, now)


def _same_zone(previous: WakeConfig, current: WakeConfig) -> WakeConfig:
    """Return what was kept, with the zone of today where only the objects differ."""
    is_same_zone = str(previous.zone) == str(current.zone)
    return msgspec.structs.replace(previous, zone=current.zone) if is_same_zone else previous


def _with_new_key(row: SlotRow) -> SlotRow:
    schedule = msgspec.structs.replace(
        end_pending(row.schedule),
        next_reset_epoch_ms=None,
        last_reset_marker=None,
        paused_until=None,
        paused_why="",
        unchanged_readings=0,
        consecutive_throttles=0,
    )
    return msgspec.structs.replace(row, schedule=schedule, reading=None)


def _with_new_settings(row: SlotRow) -> SlotRow:
    schedule = msgspec.structs.replace(row.schedule, poll_requested=True)
    if schedule.slot_auto_disabled or schedule.wake_auto_disabled:
        schedule = slot_enabled(schedule)
    return msgspec.structs.replace(row, schedule=schedule, poll_claim=None, wake_claim=None)


def _started(row: SlotRow, now: float) -> SlotRow:
    return msgspec.structs.replace(row, schedule=slot_started(row.schedule, now), start="poll")


def _at_rest(row: SlotRow) -> SlotRow:
    """Return the row of a slot for which nothing is under way."""
    schedule: SlotSchedule = end_pending(row.schedule)
    return msgspec.structs.replace(
        row, schedule=schedule, start="", poll_claim=None, wake_claim=None
    )


def _row(rows: Rows, name: str) -> SlotRow:
    return rows.get(name) or SlotRow(name=name)


def _changed(before: SlotRow, after: SlotRow) -> Changed:
    return () if after == before else (after,)


# The steps of a wake. The markers of all that it serves, and the wake itself as pending, are stored
# before the request leaves: if the process dies in between, the retry window finds no confirmation
# and sends it. Slots that use the same key share a window, and so a wake: one that is due as well
# is served by the same request, and one that comes due a moment later joins the wake that is on its
# way.

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
        done[name] = WakeDone(row=own, outcome=_wake_outcome(answer), is_stale=True)
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
    if not config.wake.is_polled:
        after = _settled_unpolled(after, answer)
    elif after.schedule.wake_pending:
        # A poll from while it was on its way may have told nothing of it; the retry waits for one.
        schedule = msgspec.structs.replace(after.schedule, poll_requested=True)
        after = msgspec.structs.replace(after, schedule=schedule)
    return WakeDone(
        row=after,
        outcome=_wake_outcome(answer),
        problem="" if answer.failure is None else problem_of(answer.failure),
        confirmation=confirmation,
        is_disabled=after.schedule.slot_auto_disabled and not row.schedule.slot_auto_disabled,
    )


def _settled_unpolled(row: SlotRow, answer: WakeAnswer) -> SlotRow:
    """Return the row after a wake that no poll can confirm: what the provider took has worked.

    One that failed stays pending, and is sent once more when its retry window ends.
    """
    schedule = row.schedule
    if answer.failure is None:
        schedule = msgspec.structs.replace(end_pending(schedule), last_problem="")
    elif not schedule.slot_auto_disabled:
        schedule = msgspec.structs.replace(schedule, last_problem=problem_of(answer.failure))
    return msgspec.structs.replace(row, schedule=schedule)


def _wake_outcome(answer: WakeAnswer) -> str:
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
