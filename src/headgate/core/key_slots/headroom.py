"""Whether a slot's tasks may start: what holds them, until when, and how much room there is.

Rule: an exhausted slot is held until a poll says otherwise. Its reset is when that poll comes, not
when the tasks start: a provider may reset later than it said.
"""

from __future__ import annotations

from headgate.core.gates import GateClosure
from headgate.core.key_slots.slot import SlotConfig, SlotReading, SlotRow, SlotStanding
from headgate.core.key_slots.wake import is_paused, why_paused


def standing_of(config: SlotConfig, row: SlotRow, now: float) -> SlotStanding:
    """Return what a decision needs of a slot.

    Once a window that was not used up has reset, nothing of it is used any more.
    """
    reading = row.reading
    percent = None if reading is None else reading.percent_used
    resets_at = None if reading is None else reading.resets_at
    if reading is not None and _is_over(reading, now):
        percent, resets_at = 0.0, None
    return SlotStanding(
        name=config.name,
        provider=config.provider,
        hold=_hold(config, row, now),
        percent_used=percent,
        resets_at=resets_at,
    )


def _is_over(reading: SlotReading, now: float) -> bool:
    has_reset = reading.resets_at is not None and reading.resets_at <= now
    return has_reset and not reading.is_exhausted


def _hold(config: SlotConfig, row: SlotRow, now: float) -> GateClosure | None:
    off = why_off(config, row)
    if off:
        return _closure(config, off)
    # A pause of the provider ends by its time; one for want of a key when a poll has had the key.
    if is_paused(row.schedule, now) or row.schedule.paused_why:
        why = f"paused, {why_paused(row.schedule)}"
        return _closure(config, why + _used(row.reading), row.schedule.paused_until)
    if row.reading is not None and row.reading.is_exhausted:
        return _exhausted(config, row.reading, now)
    return None


def why_off(config: SlotConfig, row: SlotRow) -> str:
    """Return why nothing is sent for a slot, for as long as nobody changes that; "" if it is on."""
    if not config.is_enabled:
        return "disabled in the configuration"
    if row.is_off:
        return f"disabled by hand, `headgate slots enable {config.name}` brings it back"
    if row.schedule.slot_auto_disabled:
        return f"disabled, {row.schedule.disabled_reason}"
    return ""


def _exhausted(config: SlotConfig, reading: SlotReading, now: float) -> GateClosure:
    percent = _used(reading)
    resets_at = reading.resets_at
    if resets_at is None or resets_at > now:
        return _closure(config, f"exhausted{percent}", resets_at)
    return _closure(config, f"exhausted{percent}, a poll has to show the reset")


def _used(reading: SlotReading | None) -> str:
    if reading is None or reading.percent_used is None:
        return ""
    return f", {reading.percent_used:.0f}% used"


def _closure(config: SlotConfig, why: str, until: float | None = None) -> GateClosure:
    return GateClosure(kind="slot", name=config.name, until=until, why=why)
