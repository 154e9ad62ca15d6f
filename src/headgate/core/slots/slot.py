"""A key slot as plain data: what is configured, what is known, and what that means for tasks.

A slot is a provider's key with its quota window. `SlotRow` is all that is kept of one; it is the
same after a restart, and on every node. `SlotStanding` is what a decision needs of it. The
functions read a provider's answer, tell whether tasks may start, and choose a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Literal

import msgspec

from headgate.core.gates import ClosureCause, GateClosure
from headgate.core.slots.quota import (
    RATE_LIMIT,
    UNIFIED_LIMIT,
    QuotaFailure,
    QuotaFailureKind,
    QuotaLimit,
    QuotaReport,
    driving_limit,
    sound_report,
    sound_reset,
)
from headgate.core.slots.wakes import (
    SAME_RESET_MS,
    SECONDS_PER_MINUTE,
    SlotSchedule,
    WakeConfig,
    is_paused,
    why_paused,
)

EXHAUSTED_PERCENT = 100.0

StartPhase = Literal["", "poll", "wake"]
"""How far a slot's start has come: `poll` waits for the first reading, `wake` for its wake."""


class SlotConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One slot as the rules see it.

    `key_digest` is the same for slots that use the same key at the same place, and so share a
    window; `settings_digest` changes with anything that is configured, the key included. Neither
    tells the key. With `has_fixed_key` the key is in a variable, which no running service sees
    change. `limit_type` and `limit_unit` name the row that drives wakes, if not the usual.
    `projects` are those whose tasks may use it; None is all.
    """

    name: str
    provider: str
    wake: WakeConfig = WakeConfig()
    is_enabled: bool = True
    adaptive_polling: bool = False
    limit_type: str | None = None
    limit_unit: int | str | None = None
    key_digest: str = ""
    settings_digest: str = ""
    has_fixed_key: bool = False
    projects: tuple[str, ...] | None = None

    def is_for(self, project_id: str) -> bool:
        """Tell whether tasks of a project may use the slot."""
        return self.projects is None or project_id in self.projects


class SlotReading(msgspec.Struct, frozen=True, kw_only=True):
    """The last thing that the provider said about the quota; times are Unix seconds.

    `percent_used` and `resets_at` are those of the row that drives wakes, or of the one that is
    used up. A key without an open window has no `resets_at`. `is_used_up_again` means that the
    reading before was used up as well, and that its reset had passed by this one.
    `exhausted_since` is when the first of such readings was made.
    """

    read_at: float
    percent_used: float | None = None
    resets_at: float | None = None
    level: str | None = None
    limits: tuple[QuotaLimit, ...] = ()
    is_exhausted: bool = False
    is_used_up_again: bool = False
    exhausted_since: float | None = None


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who does something for a slot just now, and since when; after `until` another may."""

    id: str
    until: float
    began_at: float | None = None


class SlotRow(msgspec.Struct, frozen=True, kw_only=True):
    """All that is kept of a slot.

    `config` is what it was last kept under. `is_off` means that somebody disabled it by hand.
    `wake_claim` is the wake that was claimed last and whose answer is not known yet. `version`
    grows with every change of any slot.
    """

    name: str
    schedule: SlotSchedule = SlotSchedule()
    reading: SlotReading | None = None
    config: SlotConfig | None = None
    is_off: bool = False
    start: StartPhase = ""
    poll_claim: Claim | None = None
    wake_claim: Claim | None = None
    version: int = 0


Rows = dict[str, SlotRow]
"""What is kept of several slots, by their names."""


class SlotStanding(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision needs of a slot: whether its tasks may start, and how much room it has.

    `last_reset_at` is when the longest of its windows ends. A slot that `is_unusable` has no key
    that works, and does not come back by itself.
    """

    name: str
    provider: str
    closure: GateClosure | None = None
    percent_used: float | None = None
    resets_at: float | None = None
    last_reset_at: float | None = None
    is_unusable: bool = False
    projects: tuple[str, ...] | None = None

    def is_for(self, project_id: str) -> bool:
        """Tell whether tasks of a project may use the slot."""
        return self.projects is None or project_id in self.projects


# Reading a provider's answer. The row that drives wakes gives percent and reset. A slot is
# exhausted when that row, or another of its type such as the weekly one, is used up, even if its
# reset has just passed: a provider may reset later than it said. A provider that still tells of the
# same window long after has not looked since, and does so when the key is used. The monthly row of
# tools never exhausts a slot, because models do not draw on it. The reset of a rate slides: each
# answer puts it as far ahead as the one before. It never comes, and calls for nothing.

TIME_LIMIT = "TIME_LIMIT"
MAX_KEPT_LIMITS = 32

LATE_RESET_SECONDS = 900.0
"""How long after its reset a window that is used up is believed to be so."""

LEAST_SLIDE_SECONDS = 30.0
"""A reset that moves by less is one that two servers tell a little differently."""

SLIDE_ERROR_SECONDS = 60.0
"""How much nearer or further than before a sliding reset may be: a rate recovers with its use."""

_MS_PER_SECOND = 1000


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A good answer: the reading to be kept, and the row or failure that the wake rules go by."""

    kept: SlotReading
    driving: QuotaLimit | QuotaFailure
    reset_ms: int | None


def read_answer(
    config: SlotConfig,
    answer: QuotaReport | QuotaFailure,
    now: float,
    previous: SlotReading | None = None,
) -> Reading | QuotaFailure:
    """Read an answer for a slot; a failure is handed back unless it says that all is used up."""
    if isinstance(answer, QuotaReport):
        report = sound_report(answer, now)
        row = driving_limit(report, row_type=config.limit_type, row_unit=config.limit_unit)
        if isinstance(row, QuotaFailure):
            return row
        return _after(previous, _read_rows(config, report, row, now))
    if answer.kind is QuotaFailureKind.EXHAUSTED:
        return _after(previous, _read_exhaustion(answer, now, previous))
    return answer


def is_same(reading: SlotReading, previous: SlotReading | None) -> bool:
    """Tell whether a reading says nothing that the one before it did not."""
    if previous is None or reading.is_exhausted != previous.is_exhausted:
        return False
    same_reset = reading.resets_at == previous.resets_at
    if reading.resets_at is not None and previous.resets_at is not None:
        apart_ms = abs(reading.resets_at - previous.resets_at) * _MS_PER_SECOND
        same_reset = apart_ms <= SAME_RESET_MS
    return same_reset and reading.percent_used == previous.percent_used


def _after(previous: SlotReading | None, read: Reading) -> Reading:
    """Return the reading with what the one before it adds to it."""
    kept = read.kept
    if not kept.is_exhausted:
        return read
    since, has_passed = kept.read_at, False
    if previous is not None and previous.is_exhausted:
        since = previous.exhausted_since or previous.read_at
        has_passed = previous.resets_at is not None and previous.resets_at <= kept.read_at
    kept = msgspec.structs.replace(kept, is_used_up_again=has_passed, exhausted_since=since)
    return msgspec.structs.replace(read, kept=kept)


def slides(config: SlotConfig, read: Reading, row: SlotRow) -> bool:
    """Tell whether the reset of a reading is the one before it, moved by the time that has passed.

    A row that is a rate by its type does so, and a window of a plan never does. Another window
    would move so too if it ended and the next began between the two readings. Where it is longer
    than the time between polls that is told apart; and never after a wake.
    """
    if isinstance(read.driving, QuotaLimit) and read.driving.type in {RATE_LIMIT, UNIFIED_LIMIT}:
        return read.driving.type == RATE_LIMIT
    last_ms, previous = row.schedule.next_reset_epoch_ms, row.reading
    if previous is None or previous.resets_at is None or last_ms is None or read.reset_ms is None:
        return False
    now = read.kept.read_at
    moved, passed = (read.reset_ms - last_ms) / _MS_PER_SECOND, now - previous.read_at
    left = read.reset_ms / _MS_PER_SECOND - now
    is_short = left < config.wake.poll_interval_minutes * SECONDS_PER_MINUTE
    is_moving = moved >= LEAST_SLIDE_SECONDS and abs(moved - passed) <= SLIDE_ERROR_SECONDS
    return is_moving and (is_short or last_ms / _MS_PER_SECOND > now)


def _read_rows(config: SlotConfig, report: QuotaReport, row: QuotaLimit, now: float) -> Reading:
    used_up = [each for each in report.limits if _is_used_up(config, each, row, now)]
    # All of them have to reset before there is room; the last one decides.
    shown = max(used_up, key=lambda each: each.next_reset_epoch_ms or 0, default=row)
    kept = SlotReading(
        read_at=now,
        percent_used=shown.percent_used,
        resets_at=_seconds(shown.next_reset_epoch_ms),
        level=report.level,
        limits=report.limits[:MAX_KEPT_LIMITS],
        is_exhausted=bool(used_up),
    )
    return Reading(kept=kept, driving=row, reset_ms=row.next_reset_epoch_ms)


def _is_used_up(config: SlotConfig, limit: QuotaLimit, driving: QuotaLimit, now: float) -> bool:
    if limit.type != driving.type or (limit.type == TIME_LIMIT and config.limit_type != TIME_LIMIT):
        return False
    resets_at = _seconds(limit.next_reset_epoch_ms)
    if resets_at is not None and now - resets_at > LATE_RESET_SECONDS:
        return False
    return limit.percent_used is not None and limit.percent_used >= EXHAUSTED_PERCENT


def _read_exhaustion(failure: QuotaFailure, now: float, previous: SlotReading | None) -> Reading:
    resets_at = sound_reset(failure.resets_at, now)
    kept = SlotReading(
        read_at=now,
        percent_used=EXHAUSTED_PERCENT,
        resets_at=resets_at,
        level=None if previous is None else previous.level,
        is_exhausted=True,
    )
    reset_ms = None if resets_at is None else int(resets_at * _MS_PER_SECOND)
    return Reading(kept=kept, driving=failure, reset_ms=reset_ms)


def _seconds(epoch_ms: int | None) -> float | None:
    return None if epoch_ms is None else epoch_ms / _MS_PER_SECOND


# Whether a slot's tasks may start. An exhausted slot stays closed until a poll says otherwise. Its
# reset only says when that poll comes: a provider may reset later than it said. One that is not
# polled opens at its reset, and the first answer after it tells whether that was right.


def standing_of(config: SlotConfig, row: SlotRow, now: float) -> SlotStanding:
    """Return what a decision needs of a slot.

    Once a window that was not used up has reset, nothing of it is used any more.
    """
    reading = row.reading
    percent = None if reading is None else reading.percent_used
    resets_at = None if reading is None else reading.resets_at
    if reading is not None and _is_over(config, reading, now):
        percent, resets_at = 0.0, None
    return SlotStanding(
        name=config.name,
        provider=config.provider,
        closure=_standing_closure(config, row, now),
        percent_used=percent,
        resets_at=resets_at,
        last_reset_at=_last_reset_at(reading, now),
        is_unusable=_is_unusable(config, row),
        projects=config.projects,
    )


def _last_reset_at(reading: SlotReading | None, now: float) -> float | None:
    rows = () if reading is None else reading.limits
    times = [one.next_reset_epoch_ms for one in rows if one.type != TIME_LIMIT]
    known = [seconds for one in times if (seconds := _seconds(one)) is not None and seconds > now]
    return max(known, default=None)


def _is_over(config: SlotConfig, reading: SlotReading, now: float) -> bool:
    has_reset = reading.resets_at is not None and reading.resets_at <= now
    return has_reset and not is_exhausted(config, reading, now)


def _standing_closure(config: SlotConfig, row: SlotRow, now: float) -> GateClosure | None:
    off = why_off(config, row)
    if off:
        return _closure(config, off, cause=_off_by(config, row))
    # A pause of the provider ends by its time; one for want of a key when a poll has had the key.
    if is_paused(row.schedule, now) or row.schedule.paused_why:
        return _paused(config, row)
    if row.reading is not None and is_exhausted(config, row.reading, now):
        return _exhausted(config, row.reading, now)
    return None


def _paused(config: SlotConfig, row: SlotRow) -> GateClosure:
    why, until = why_paused(row.schedule), row.schedule.paused_until
    if not row.schedule.paused_why:
        return _closure(config, why + _used(row.reading), until, cause="provider")
    # A variable stays as it is while the service runs, so the next look is no time to wait for.
    return _closure(config, why, None if config.has_fixed_key else until, cause="settings")


def _is_unusable(config: SlotConfig, row: SlotRow) -> bool:
    """Tell whether the key stays out of use until somebody changes something.

    A slot that was paused by hand is not: whoever paused it wants its work to wait.
    """
    if why_off(config, row):
        return not (config.is_enabled and row.is_off)
    return bool(row.schedule.paused_why) and config.has_fixed_key


def is_exhausted(config: SlotConfig, reading: SlotReading, now: float) -> bool:
    """Tell whether a slot is used up: until a poll says otherwise, or by its time if none comes.

    Where only traffic tells the quota, nobody would let its tasks go again.
    """
    if not reading.is_exhausted or config.wake.is_polled:
        return reading.is_exhausted
    return now < exhausted_until(config, reading)


def exhausted_until(config: SlotConfig, reading: SlotReading) -> float:
    """Return when a slot that is not polled is tried again: at its reset, or after an interval."""
    if reading.resets_at is not None:
        return reading.resets_at
    return reading.read_at + config.wake.poll_interval_minutes * SECONDS_PER_MINUTE


def why_off(config: SlotConfig, row: SlotRow) -> str:
    """Return why nothing is sent for a slot, for as long as nobody changes that; "" if it is on."""
    if not config.is_enabled:
        return "disabled in the configuration"
    if row.is_off:
        return f"paused by hand, `headgate slot resume {config.name}` brings it back"
    if row.schedule.slot_auto_disabled:
        advice = f"correct that, then run `headgate slot resume {config.name}`"
        return f"disabled, {row.schedule.disabled_reason}; {advice}"
    return ""


def _exhausted(config: SlotConfig, reading: SlotReading, now: float) -> GateClosure:
    why, until = f"exhausted{_used(reading)}", reading.resets_at
    if not config.wake.is_polled:
        until = exhausted_until(config, reading)
    elif until is not None and until <= now:
        why, until = f"{why}, a poll has to show the reset", None
    since = reading.exhausted_since or reading.read_at
    return _closure(config, why, until, cause="provider", since=since)


def _used(reading: SlotReading | None) -> str:
    if reading is None or reading.percent_used is None:
        return ""
    return f", {reading.percent_used:.0f}% used"


def _off_by(config: SlotConfig, row: SlotRow) -> ClosureCause:
    if not config.is_enabled:
        return "settings"
    return "operator" if row.is_off else "provider"


def _closure(
    config: SlotConfig,
    why: str,
    until: float | None = None,
    *,
    cause: ClosureCause,
    since: float | None = None,
) -> GateClosure:
    by = config.provider if cause == "provider" else ""
    return GateClosure(
        kind="slot", name=config.name, until=until, why=why, cause=cause, by=by, since=since
    )


# Choosing a slot for a task that names only the provider. The slot with the most headroom goes
# first: the lowest percentage used, then those that nobody has read yet; among equals the one with
# the fewest tasks in flight, then the first of the file. A closed slot is never chosen, and while
# all slots of a provider are closed, its tasks wait.

MAX_NAMED = 8
"""How many slots a reason names; the others are counted."""

IsClosed = Callable[[str], bool]
ClosuresOf = Callable[[str], Sequence[GateClosure]]


def most_headroom(
    standings: Sequence[SlotStanding],
    *,
    is_closed: IsClosed,
    in_flight: Mapping[str, int],
    without: Collection[str] = (),
) -> str | None:
    """Return the open slot with the most headroom; None if there is none."""
    found = [one for one in standings if one.name not in without and not is_closed(one.name)]
    if not found:
        return None
    # The first of the smallest is returned, so the order of the file settles what is left.
    return min(found, key=lambda one: _rank(one, in_flight)).name


def provider_closure(
    provider: str, standings: Sequence[SlotStanding], closures_of: ClosuresOf
) -> GateClosure | None:
    """Return what closes a provider: its slots, each for its own reason; None if one is open.

    It opens when the first of them does, where that is known.
    """
    closed: list[Sequence[GateClosure]] = []
    for standing in standings:
        closures = closures_of(standing.name)
        if not closures:
            return None
        closed.append(closures)
    times = [until for closures in closed if (until := _opens_at(closures)) is not None]
    why = _why(closed) if closed else _no_slot(provider)
    return GateClosure(kind="provider", name=provider, until=min(times, default=None), why=why)


def _rank(standing: SlotStanding, in_flight: Mapping[str, int]) -> tuple[bool, float, int]:
    percent = standing.percent_used
    return (percent is None, percent or 0.0, in_flight.get(standing.name, 0))


def _opens_at(closures: Sequence[GateClosure]) -> float | None:
    """Return when the last of what closes a slot may end; None if one of them does not say."""
    times = [closure.until for closure in closures if closure.until is not None]
    return max(times) if len(times) == len(closures) else None


def _why(closed: Sequence[Sequence[GateClosure]]) -> str:
    last = [max(closures, key=attrgetter("opens_at")) for closures in closed[:MAX_NAMED]]
    named = [f"{one.name} ({_reason(one)})" for one in last]
    rest = len(closed) - len(named)
    further = f" and {rest} more" if rest else ""
    return f"none of its slots is open: {', '.join(named)}{further}"


def _reason(closure: GateClosure) -> str:
    return closure.why or "closed"


def _no_slot(provider: str) -> str:
    line = f"no slot of {provider} is configured"
    return f"{line}; add one to the file under [[slots]], or cancel the task"
