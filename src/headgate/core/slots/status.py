"""What is told of slots: the JSON that a service, its clients and its commands exchange, and words.

Times of the JSON are RFC 3339. What is not known is left out. Times in words are those of the
slot's own zone, which they name.
"""

from __future__ import annotations

from datetime import datetime, tzinfo
from typing import Annotated, Any, Literal

import msgspec

from headgate.core.slots.polling import is_rate, open_until
from headgate.core.slots.slot import SlotConfig, SlotRow, why_off
from headgate.core.slots.wakes import (
    MINUTES_PER_DAY,
    QuotaSource,
    SlotSchedule,
    WakeConfig,
    WakeMode,
    WakeTrigger,
    first_wake_from,
    is_paused,
    next_wake_at,
    reason_words,
)
from headgate.core.task_view import ClosureBody, exact_moment

SlotState = Literal["unknown", "cold", "open", "closed", "exhausted", "paused", "disabled"]
LogPhase = Literal["request", "response", "error", "event"]


class QuotaLimitBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One row of what the provider tells."""

    type: str
    unit: int | str | None = None
    number: float | None = None
    percent_used: float | None = None
    resets_at: datetime | None = None


class NextWakeBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """The wake that comes first, and why: a mode, or the retry of one that is being confirmed.

    Where `is_skipped`, nothing will be sent then, as far as the last reading tells: a window is
    open until `open_until`, and `then` is the first wake behind it. `text` says all of it on one
    line, in the zone of the slot.
    """

    at: datetime
    mode: str
    reason: str
    text: str
    is_skipped: bool = False
    open_until: datetime | None = None
    then: datetime | None = None


class SlotResponseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came back to a request that was sent with the key of a slot: its headers of limits."""

    status: Annotated[int, msgspec.Meta(ge=100, le=599)]
    headers: Annotated[dict[str, str], msgspec.Meta(max_length=64)]


class LoopBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """How one loop of a slot is doing on this node."""

    last_step_at: datetime | None = None
    restarts: int = 0
    problem: str = ""


class SlotBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """Everything about a slot: `wait_reason` says why its tasks wait, if they do.

    `closures` are all the things that keep them, each with who closed the slot, since when and
    until when. `projects` are those whose tasks may use it; without them all may.

    `zone` is the one in which its times of day are set, and told. `quota_from` is where readings
    come from: an `address` that tells the quota, `requests` that are sent for it and cost, or the
    responses to real `traffic`; then nothing is asked, and there is no `next_poll_at`.
    `quota_text` says so in words, and what it costs.

    `state` is `cold` while no window is open, and `unknown` before the first reading; `closed` is
    a slot with room to which a task got a 429, or whose rate limit is reached. A slot that
    is not `enabled` is neither polled nor woken, one without `wakes_enabled` is only polled;
    `disabled_reason` says why, unless no mode was configured. `last_error` is what went wrong at
    the last poll, or when the key was refused, which counts as one of `poll_errors`.
    """

    name: str
    provider: str
    zone: str
    quota_from: QuotaSource
    quota_text: str
    state: SlotState
    enabled: bool
    percent_used: float | None = None
    resets_at: datetime | None = None
    read_at: datetime | None = None
    level: str | None = None
    limits: list[QuotaLimitBody]
    wait_reason: str = ""
    wait_until: datetime | None = None
    closures: list[ClosureBody] = []
    projects: list[str] | None = None
    wake_modes: list[str]
    wakes_enabled: bool
    next_wake: NextWakeBody | None = None
    wake_pending: bool
    last_wake_at: datetime | None = None
    last_confirmed_at: datetime | None = None
    wake_errors: int
    poll_errors: int
    last_error: str = ""
    last_poll_at: datetime | None = None
    next_poll_at: datetime | None = None
    disabled_reason: str = ""
    wake_loop: LoopBody | None = None
    quota_loop: LoopBody | None = None


class LogLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the log of slots, as it is written to the file and told.

    Lines of one request have a `flow_id` in common.
    """

    ts: str
    slot: str
    action: str
    phase: LogPhase
    method: str | None = None
    url: str | None = None
    flow_id: str | None = None
    status: int | None = None
    request_body: str | None = None
    response_body: str | None = None
    error: str | None = None
    details: dict[str, Any] | None = None
    duration_ms: float | None = None


class SlotLogBody(msgspec.Struct, kw_only=True):
    """The latest lines of a slot, oldest first."""

    lines: list[LogLine]
    count: int


class SlotListBody(msgspec.Struct, kw_only=True):
    """All slots, in the order of the file."""

    slots: list[SlotBody]
    count: int


RETRY = "retry"
_RETRY_REASON = "the last wake is not confirmed yet; if it is not by then, it is sent again"


def quota_source_words(config: WakeConfig) -> str:
    """Return where readings come from, and what that costs."""
    if config.quota_from == "requests":
        a_day = max(1, round(MINUTES_PER_DAY / config.poll_interval_minutes))
        cost = "one request of one word and one token, which opens a window"
        return f"each poll costs {cost}; about {a_day} a day while there is no traffic"
    if config.quota_from == "traffic":
        return "the headers of real traffic tell it, and wakes; nothing else is sent"
    return "an address tells it; no request to a model is sent"


def local_time(moment: float, zone: tzinfo, *, now: float) -> str:
    """Return a time as a clock in the zone shows it: `13:05`, on another day with its date."""
    local = datetime.fromtimestamp(moment, zone)
    is_today = local.date() == datetime.fromtimestamp(now, zone).date()
    return f"{local:%H:%M}" if is_today else f"{local:%Y-%m-%d %H:%M}"


def next_wake(config: SlotConfig, row: SlotRow, now: float) -> NextWakeBody | None:
    """Return the wake that comes first, and whether it will be sent; None if none is ahead.

    Pages, commands and the API all tell what this returns.
    """
    schedule = row.schedule
    if why_off(config, row):
        return None
    retry_at = _retry_at(schedule)
    trigger = next_wake_at(config.wake, schedule, now)
    try:
        if retry_at is not None:
            text = f"{_zoned(config, retry_at, now)}: {_RETRY_REASON}"
            moment = exact_moment(retry_at)
            return NextWakeBody(at=moment, mode=RETRY, reason=_RETRY_REASON, text=text)
        return None if trigger is None else _of_trigger(config, row, trigger, now)
    except (OverflowError, OSError, ValueError):
        # A time that no calendar reaches.
        return None


def _of_trigger(config: SlotConfig, row: SlotRow, trigger: WakeTrigger, now: float) -> NextWakeBody:
    schedule = row.schedule
    # A pause holds what is due; it is sent when the pause ends.
    paused_until = schedule.paused_until if is_paused(schedule, now) else None
    at = max(trigger.due_at, paused_until or trigger.due_at)
    ends_at = open_until(row, max(at, now))
    then = None if ends_at is None else first_wake_from(config.wake, schedule, ends_at)
    has_no_window = ends_at is None and is_rate(row)
    when = "now" if at <= now else _zoned(config, at, now)
    if ends_at is not None:
        text = f"{when}: skipped, the window is open until {_local(config, ends_at, now)}"
        text += "" if then is None else f"; the next one at {_local(config, then, now)}"
    elif has_no_window:
        text = f"{when}: skipped, the limit of this key is a rate, which has no window to open"
    elif trigger.mode is WakeMode.TIMES and at > now:
        text = f"{when}: set in wake_times"
    else:
        text = f"{when}: {reason_words(trigger.reason)}"
    return NextWakeBody(
        at=exact_moment(at),
        mode=trigger.mode.value,
        reason=trigger.reason,
        text=text,
        is_skipped=ends_at is not None or has_no_window,
        open_until=None if ends_at is None else exact_moment(ends_at),
        then=None if then is None else exact_moment(then),
    )


def _retry_at(schedule: SlotSchedule) -> float | None:
    is_ahead = schedule.wake_pending and not schedule.wake_timeout_retry_fired
    return schedule.wake_retry_window_deadline if is_ahead else None


def _zoned(config: SlotConfig, moment: float, now: float) -> str:
    return f"{_local(config, moment, now)} {config.wake.zone}"


def _local(config: SlotConfig, moment: float, now: float) -> str:
    return local_time(moment, config.wake.zone, now=now)
