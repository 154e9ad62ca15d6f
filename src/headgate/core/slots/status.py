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

SlotState = Literal[
    "unknown", "cold", "open", "closed", "exhausted", "paused", "no_key", "disabled"
]
LogPhase = Literal["request", "response", "error", "event"]


class QuotaLimitBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One row of what the provider tells."""

    type: str
    """The type of the row."""
    unit: int | str | None = None
    """Its unit."""
    number: float | None = None
    """How many units."""
    percent_used: float | None = None
    """How much is used."""
    resets_at: datetime | None = None
    """When it resets."""


class NextWakeBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """The wake that comes first, and why: a mode, or the retry of one that is being confirmed."""

    at: datetime
    """When."""
    mode: str
    """The mode, or `retry`."""
    reason: str
    """Why."""
    text: str
    """One line for people."""
    is_skipped: bool = False
    """Nothing will be sent: a window is open."""
    open_until: datetime | None = None
    """Until when that window is open."""
    then: datetime | None = None
    """The first wake after it."""


class SlotResponseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came back to a request that was sent with the key of a slot: its headers of limits."""

    status: Annotated[int, msgspec.Meta(ge=100, le=599)]
    """The status of the response."""
    headers: Annotated[dict[str, str], msgspec.Meta(max_length=64)]
    """Its headers, at most 64. Headers of limits are a reading."""


class LoopBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """How one loop of a slot is doing on this node."""

    last_step_at: datetime | None = None
    """When it last did something."""
    restarts: int = 0
    """How often it was started again."""
    problem: str = ""
    """What went wrong."""


class SlotBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """Everything about a slot."""

    name: str
    """Its name in the settings."""
    provider: str
    """Whose key it is."""
    zone: str
    """The time zone of its wakes."""
    quota_from: QuotaSource
    """Where readings come from: an `address`, `requests` that cost, or real `traffic`."""
    quota_text: str
    """The same in words, with what it costs."""
    state: SlotState
    """`unknown` before the first reading, `cold` while no window is open, `open`, `closed` by a
    rate limit or while the provider asks to wait, `exhausted`, `paused` by hand, `no_key` while the
    key cannot be read, or `disabled`: in the settings, by a refused key, or by too many errors."""
    enabled: bool
    """Whether it is polled at all."""
    percent_used: float | None = None
    """How much of the quota is used."""
    resets_at: datetime | None = None
    """When the window ends."""
    read_at: datetime | None = None
    """When the provider said so."""
    level: str | None = None
    """The plan of the key."""
    limits: list[QuotaLimitBody]
    """Every row of what the provider told."""
    wait_reason: str = ""
    """Why its calls and tasks wait: what opens last."""
    wait_until: datetime | None = None
    """Until when."""
    closures: list[ClosureBody] = []
    """Everything that keeps them waiting, what opens last first."""
    projects: list[str] | None = None
    """The projects that may use it. Left out if all may."""
    max_inflight: int | None = None
    """How many tasks and calls may use it at a time. Left out without such a limit."""
    overridden: list[str] = []
    """What is not as the file says."""
    wake_modes: list[str]
    """The modes that wake it."""
    wakes_enabled: bool
    """Whether it is woken."""
    next_wake: NextWakeBody | None = None
    """The wake that comes first."""
    no_wake_reason: str = ""
    """Why no wake is ahead; left out if one is ahead, or if no mode is set."""
    wake_pending: bool
    """Whether a wake is not confirmed yet."""
    last_wake_at: datetime | None = None
    """When a wake was last sent."""
    last_confirmed_at: datetime | None = None
    """When a reading last showed the new window."""
    wake_errors: int
    """How many readings in a row did not."""
    poll_errors: int
    """How many polls in a row failed."""
    last_error: str = ""
    """What went wrong at the last poll, or when the key was refused."""
    last_poll_at: datetime | None = None
    """When the quota was last asked for."""
    next_poll_at: datetime | None = None
    """When it is asked for next; left out where only traffic tells it."""
    disabled_reason: str = ""
    """Why it is not polled or not woken; left out if no mode is configured."""
    wake_loop: LoopBody | None = None
    """How the loop that wakes it does on this node."""
    quota_loop: LoopBody | None = None
    """How the loop that polls it does."""


class LogLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the log of slots, as it is written to the file and told."""

    ts: str
    """When."""
    slot: str
    """The slot."""
    action: str
    """What it is about."""
    phase: LogPhase
    """`request`, `response`, `error` or `event`."""
    method: str | None = None
    """The HTTP method."""
    url: str | None = None
    """The address, without values of its query."""
    flow_id: str | None = None
    """The same for all lines of one request."""
    status: int | None = None
    """The HTTP status."""
    request_body: str | None = None
    """At most 4,096 characters."""
    response_body: str | None = None
    """At most 4,096 characters."""
    error: str | None = None
    """Why there is no answer."""
    details: dict[str, Any] | None = None
    """What an event says."""
    duration_ms: float | None = None
    """How long it took."""


class SlotLogBody(msgspec.Struct, kw_only=True):
    """The latest lines of a slot, oldest first."""

    lines: list[LogLine]
    """The lines, oldest first."""
    count: int


class SlotListBody(msgspec.Struct, kw_only=True):
    """All slots, in the order of the file."""

    slots: list[SlotBody]
    """All slots, in the order of the file."""
    count: int


def state_words(state: str) -> str:
    """Return the state of a slot as people read it."""
    return state.replace("_", " ")


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


def why_no_wake(config: SlotConfig, row: SlotRow) -> str:
    """Return why a slot with a wake mode has no wake ahead; "" if it has one, or has no mode."""
    schedule, modes = row.schedule, config.wake.wake_modes
    if not modes:
        return ""
    off = why_off(config, row)
    if off or schedule.wake_auto_disabled:
        return off or schedule.disabled_reason
    if WakeMode.TIMES in modes or schedule.wake_pending:
        return ""
    if WakeMode.INTERVAL in modes:
        return "" if schedule.last_interval_fire is not None else "the slot has not started yet"
    reset_ms = schedule.next_reset_epoch_ms
    if reset_ms is None:
        return "no reset is known yet; the next reading tells it"
    if is_rate(row):
        return _NO_WINDOW
    is_answered = reset_ms == schedule.last_reset_marker
    return _RESET_ANSWERED if is_answered else ""


_NO_WINDOW = "the limit of this key is a rate, which has no window to open"
_RESET_ANSWERED = "the last reset had its wake; the next reading tells the next reset"


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
        text = f"{when}: skipped, {_NO_WINDOW}"
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
