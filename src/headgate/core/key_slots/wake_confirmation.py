"""Whether a wake is needed, and whether it worked.

A wake counts only when a later quota reading shows a reset time that has advanced, and lies ahead.
Until then it is pending: polls come every minute for one retry window, then the wake is sent once
more, and after a second window the slot returns to its schedule, confirmed or not. So no wake can
block the ones after it. A window does not end before the poll that was last asked for: after a
restart or a pause that poll may tell that the wake has worked long since.

    wake sent ──> pending ──────────────> pending, retried ──────────────> normal schedule
                     │   window ends,          │   window ends             (or disabled, at the
                     │   send once more        │                            limit of wake errors)
                     └────────────> confirmed <┘
"""

from __future__ import annotations

from enum import Enum

import msgspec

from headgate.core.key_slots.quota import QuotaFailure, QuotaFailureKind, QuotaLimit
from headgate.core.key_slots.wake import (
    SAME_RESET_MS,
    SECONDS_PER_MINUTE,
    SlotSchedule,
    WakeConfig,
    due_trigger,
    is_paused,
    mark_fired,
)


class Confirmation(Enum):
    """What a quota reading says about the wake that is pending."""

    NOT_PENDING = "not_pending"
    CONFIRMED = "confirmed"
    NOT_CONFIRMED = "not_confirmed"


class WindowEnd(Enum):
    """What the end of a retry window calls for. RETRY_NOW: send the wake once more."""

    NOT_YET = "not_yet"
    RETRY_NOW = "retry_now"
    BACK_TO_SCHEDULE = "back_to_schedule"
    WAKES_DISABLED = "wakes_disabled"


class ConfirmationStep(msgspec.Struct, frozen=True, kw_only=True):
    """The schedule after a reading, and what the reading meant."""

    schedule: SlotSchedule
    outcome: Confirmation


class WindowStep(msgspec.Struct, frozen=True, kw_only=True):
    """The schedule after a look at the retry window, and what is to be done."""

    schedule: SlotSchedule
    outcome: WindowEnd


def wake_needed(quota: QuotaLimit | QuotaFailure, now: float) -> bool:
    """Tell from a fresh reading whether a wake could open a window.

    A missing or past reset time means that no window is open. A failed reading means yes: better
    one wake too many than a window that opens late. Two failures are clear answers, though: a
    refused key opens nothing, and an exhausted one has its window open until the reset it names.
    """
    if isinstance(quota, QuotaLimit):
        return quota.next_reset_epoch_ms is None or quota.next_reset_epoch_ms / 1000 <= now
    if quota.kind is QuotaFailureKind.EXHAUSTED:
        return quota.resets_at is None or quota.resets_at <= now
    return quota.kind is not QuotaFailureKind.REFUSED


def wake_sent(config: WakeConfig, schedule: SlotSchedule, now: float) -> SlotSchedule:
    """Return the schedule with a wake under way, and the markers of all that it serves set.

    Store it before the request leaves: if the process dies in between, the retry window finds no
    confirmation and sends the wake.
    """
    schedule = _serve_due(config, schedule, now)
    return msgspec.structs.replace(
        schedule,
        wake_pending=True,
        wake_reset_snapshot_ms=schedule.next_reset_epoch_ms,
        wake_timeout_retry_fired=False,
        **_window_from(config, now),
    )


def quota_read(schedule: SlotSchedule, reset_ms: int | None, now: float) -> ConfirmationStep:
    """Take note of the reset time in a good reading, and settle the pending wake by it.

    A reading without a reset time keeps the last one seen: the wake that is due after a reset must
    not be lost because a poll came between the two. The reset time that an exhausted key names in
    its failure is such a reading too.
    """
    outcome = _outcome_of(schedule, reset_ms, now)
    if reset_ms is not None:
        schedule = msgspec.structs.replace(schedule, next_reset_epoch_ms=reset_ms)
    if outcome is Confirmation.CONFIRMED:
        schedule = msgspec.structs.replace(
            end_pending(schedule), wake_errors=0, last_confirmed_at=now
        )
    elif outcome is Confirmation.NOT_CONFIRMED:
        schedule = msgspec.structs.replace(schedule, wake_errors=schedule.wake_errors + 1)
    return ConfirmationStep(schedule=schedule, outcome=outcome)


def _outcome_of(schedule: SlotSchedule, reset_ms: int | None, now: float) -> Confirmation:
    if not schedule.wake_pending:
        return Confirmation.NOT_PENDING
    if reset_ms is None or reset_ms / 1000 <= now:
        # A reset that has passed says that no window is open, however it compares.
        return Confirmation.NOT_CONFIRMED
    snapshot_ms = schedule.wake_reset_snapshot_ms
    advanced = snapshot_ms is None or reset_ms > snapshot_ms + SAME_RESET_MS
    # A wake sent because the pre-check failed may meet a window that was open all along. Its reset
    # cannot advance, and counting that as an error would disable a healthy slot.
    open_all_along = snapshot_ms is not None and snapshot_ms / 1000 > now
    return Confirmation.CONFIRMED if advanced or open_all_along else Confirmation.NOT_CONFIRMED


def close_window(config: WakeConfig, schedule: SlotSchedule, now: float) -> WindowStep:
    """Return what the end of a retry window calls for, and the schedule after it.

    The limit of wake errors is applied when the window of the forced retry closes. Errors come
    once a minute, so that an earlier look would disable the slot before its retry.
    """
    if not schedule.wake_pending or not _window_is_over(config, schedule, now):
        return WindowStep(schedule=schedule, outcome=WindowEnd.NOT_YET)
    if not schedule.wake_timeout_retry_fired:
        return WindowStep(
            schedule=_forced_retry(config, schedule, now), outcome=WindowEnd.RETRY_NOW
        )
    schedule = end_pending(schedule)
    if schedule.wake_errors < config.max_consecutive_errors:
        return WindowStep(schedule=schedule, outcome=WindowEnd.BACK_TO_SCHEDULE)
    reason = f"no wake was confirmed in {schedule.wake_errors} readings"
    disabled = msgspec.structs.replace(schedule, wake_auto_disabled=True, disabled_reason=reason)
    return WindowStep(schedule=disabled, outcome=WindowEnd.WAKES_DISABLED)


def _window_is_over(config: WakeConfig, schedule: SlotSchedule, now: float) -> bool:
    if schedule.poll_requested or is_paused(schedule, now):
        return False
    deadline = schedule.wake_retry_window_deadline
    if deadline is None:
        return True
    # A deadline this far ahead was set before the clock went back or the window was shortened.
    longest_seconds = 2 * config.wake_quota_retry_window_minutes * SECONDS_PER_MINUTE
    return now >= deadline or deadline - now > longest_seconds


def _forced_retry(config: WakeConfig, schedule: SlotSchedule, now: float) -> SlotSchedule:
    return msgspec.structs.replace(
        _serve_due(config, schedule, now),
        wake_timeout_retry_fired=True,
        **_window_from(config, now),
    )


def key_refused(schedule: SlotSchedule, status: int | None, problem: str = "") -> SlotSchedule:
    """Return the schedule of a slot whose key the provider refused: nothing more is sent.

    Without a status nobody was asked, because there is no key; then the problem says so. A refusal
    is an error that is not waited for to come again, and is counted and shown as one.
    """
    refusal = problem if status is None else f"the provider refused the key ({status})"
    return msgspec.structs.replace(
        end_pending(schedule),
        slot_auto_disabled=True,
        poll_requested=False,
        disabled_reason=refusal,
        consecutive_poll_errors=schedule.consecutive_poll_errors + 1,
        last_problem=problem or refusal,
    )


def end_pending(schedule: SlotSchedule) -> SlotSchedule:
    """Return the schedule with no wake under way; the count of wake errors stays."""
    return msgspec.structs.replace(
        schedule,
        wake_pending=False,
        wake_reset_snapshot_ms=None,
        wake_retry_window_deadline=None,
        wake_timeout_retry_fired=False,
    )


def _serve_due(config: WakeConfig, schedule: SlotSchedule, now: float) -> SlotSchedule:
    trigger = due_trigger(config, schedule, now)
    return schedule if trigger is None else mark_fired(schedule, trigger, now)


def _window_from(config: WakeConfig, now: float) -> dict[str, float | bool]:
    """Return the fields that every sent wake sets: a new window, and a poll at once."""
    window_seconds = config.wake_quota_retry_window_minutes * SECONDS_PER_MINUTE
    return {
        "last_wake_at": now,
        "wake_retry_window_deadline": now + window_seconds,
        "poll_requested": True,
    }
