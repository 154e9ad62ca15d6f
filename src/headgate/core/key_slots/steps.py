"""Every change to what is kept of a slot, as a pure step from rows and now to rows and an answer.

A step decides again from the rows as they are, so that of several nodes that saw the same thing to
do one does it. A poll or a wake is claimed before its request leaves, and its answer counts only
while the claim stands: a new configuration, a switch or a later wake ends it. Claims carry an id
that the caller made, so a step whose reply got lost gives the same answer again.
"""

from __future__ import annotations

import msgspec

from headgate.core.key_slots.headroom import why_off
from headgate.core.key_slots.poll_backoff import (
    key_is_away,
    poll_delay_minutes,
    poll_failed,
    poll_succeeded,
    polled_in_turn,
    slot_throttled,
)
from headgate.core.key_slots.quota import QuotaFailure, QuotaFailureKind, QuotaLimit, QuotaReport
from headgate.core.key_slots.readings import Reading, is_same, read_answer, slides
from headgate.core.key_slots.slot import Claim, Rows, SlotConfig, SlotRow, StartPhase
from headgate.core.key_slots.times import is_live, poll_due_at
from headgate.core.key_slots.wake import (
    SlotSchedule,
    WakeConfig,
    interval_under_new_clock,
    reset_slides,
)
from headgate.core.key_slots.wake_confirmation import (
    Confirmation,
    end_pending,
    key_refused,
    quota_read,
    wake_needed,
)
from headgate.core.key_slots.wake_lifecycle import (
    config_changed,
    initial_wake_needed,
    slot_enabled,
    slot_started,
)

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
