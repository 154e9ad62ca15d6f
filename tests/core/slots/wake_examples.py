"""Configurations and steps that the wake tests share."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

from headgate.core.slots.wakes import (
    SlotSchedule,
    WakeConfig,
    WakeMode,
    mark_fired,
    should_fire_wake,
)

MINUTE = 60.0
HOUR = 3600.0
BERLIN = ZoneInfo("Europe/Berlin")


def interval_config(minutes: int = 60) -> WakeConfig:
    return WakeConfig(wake_modes=frozenset({WakeMode.INTERVAL}), wake_interval_minutes=minutes)


def times_config(*times: str, zone: ZoneInfo = BERLIN, catch_up: int = 15) -> WakeConfig:
    return WakeConfig(
        wake_modes=frozenset({WakeMode.TIMES}),
        wake_times=times,
        zone=zone,
        wake_catch_up_minutes=catch_up,
    )


def after_reset_config(minutes: int = 1) -> WakeConfig:
    return WakeConfig(
        wake_modes=frozenset({WakeMode.AFTER_RESET}), wake_after_reset_minutes=minutes
    )


def berlin(text: str, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN, fold=fold).timestamp()


def fire(config: WakeConfig, schedule: SlotSchedule, now: float) -> SlotSchedule:
    trigger = should_fire_wake(config, schedule, now)
    assert trigger is not None
    return mark_fired(schedule, trigger, now)


def markers_fired(
    config: WakeConfig, moments: list[float], schedule: SlotSchedule | None = None
) -> list[str]:
    """Step through the moments as a wake loop would, and list the markers that fired."""
    schedule = schedule or SlotSchedule()
    fired = []
    for now in moments:
        trigger = should_fire_wake(config, schedule, now)
        if trigger is not None:
            fired.append(trigger.marker)
            schedule = mark_fired(schedule, trigger, now)
    return fired
