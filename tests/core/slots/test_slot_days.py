"""Days of schedule through the steps, minute by minute, across changes of the clock and jumps."""

from __future__ import annotations

from collections import Counter
from datetime import date, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import msgspec
import pytest

from core.slots.slot_world import World
from headgate.core.slots.slot import SlotConfig
from headgate.core.slots.wakes import WakeConfig, WakeMode

TIMES = ("00:00", "01:30", "02:15", "02:30", "09:00")
SLOT = SlotConfig(name="work", provider="zai", key_digest="k", settings_digest="s")

CHANGES = [
    ("Europe/Berlin", date(2026, 3, 29)),
    ("Europe/Berlin", date(2026, 10, 25)),
    ("America/New_York", date(2026, 3, 8)),
    ("America/New_York", date(2026, 11, 1)),
    ("Australia/Lord_Howe", date(2026, 4, 5)),
    ("Australia/Lord_Howe", date(2026, 10, 4)),
    ("Africa/Casablanca", date(2026, 2, 15)),
    ("Africa/Casablanca", date(2026, 3, 22)),
    ("Asia/Kathmandu", date(2026, 3, 29)),
    ("UTC", date(2026, 3, 29)),
]


def timed(zone: str, *times: str, catch_up: int = 15) -> SlotConfig:
    wake = WakeConfig(
        wake_modes=frozenset({WakeMode.TIMES}),
        wake_times=times,
        zone=ZoneInfo(zone),
        wake_catch_up_minutes=catch_up,
    )
    return msgspec.structs.replace(SLOT, wake=wake)


def local(day: date, zone: str, hour: int = 12) -> float:
    return datetime(day.year, day.month, day.day, hour, tzinfo=ZoneInfo(zone)).timestamp()


@pytest.mark.parametrize(("zone", "day"), CHANGES)
def test_each_time_is_served_once_a_local_day_across_a_change_of_clocks(
    zone: str, day: date
) -> None:
    first, last = day - timedelta(days=2), day + timedelta(days=1)
    world = World(local(first, zone), (timed(zone, *TIMES),))
    world.begin("work", starts=True)
    served_at: dict[str, float] = {}
    while world.now < local(last, zone):
        world.minute("work")
        for marker in world.markers["work"][len(served_at) :]:
            served_at[marker] = world.now
        world.now += 60.0
    days = [(first + timedelta(days=n)).isoformat() for n in (1, 2, 3)]
    missing = {f"{each} {time}" for each in days for time in TIMES} - served_at.keys()
    # Two times that fall into one gap, or on its end, happen at one moment, and share a wake.
    shared = {marker for marker in missing if marker.startswith(day.isoformat())}
    assert missing == shared
    assert len(missing) <= 2
    assert all(count == 1 for count in world.served.values())
    for marker, at in served_at.items():
        shown = datetime.fromtimestamp(at, ZoneInfo(zone))
        in_gap = marker.startswith(day.isoformat()) and f"{shown:%H:%M}" != marker[-5:]
        assert in_gap or f"{shown:%Y-%m-%d %H:%M}" == marker


def test_a_week_of_all_modes_serves_nothing_twice_and_leaves_nothing_due() -> None:
    wake = WakeConfig(
        wake_modes=frozenset(WakeMode),
        wake_times=("09:00", "14:30"),
        wake_interval_minutes=90,
        zone=ZoneInfo("Europe/Berlin"),
    )
    world = World(
        local(date(2026, 3, 26), "Europe/Berlin"), (msgspec.structs.replace(SLOT, wake=wake),)
    )
    world.begin("work", starts=True)
    world.run(7 * 1440)
    assert set(world.served.values()) == {1}
    modes = Counter(mode for _, mode, _ in world.served)
    assert modes[WakeMode.TIMES] == 14
    assert 33 <= modes[WakeMode.AFTER_RESET] <= 34
    wakes = world.provider("work").wakes
    gaps = [later - earlier for earlier, later in pairwise(wakes)]
    # The window is five hours, and is opened again one minute after its end at the latest.
    assert all(5 * 3600 <= gap <= 5 * 3600 + 120 for gap in gaps)
    assert set(world.sent.values()) == {1}


@pytest.mark.parametrize("jump_hours", [-20, -5, -1, 1, 5, 20])
def test_a_clock_that_jumps_repeats_no_time_and_goes_on(jump_hours: int) -> None:
    config = timed("UTC", "09:00", "10:00", "11:00")
    start = local(date(2026, 5, 4), "UTC", hour=8)
    world = World(start, (config,))
    world.begin("work", starts=True)
    world.run(125)
    assert world.markers["work"] == ["2026-05-04 09:00", "2026-05-04 10:00"]
    world.now += jump_hours * 3600
    world.run(72 * 60)
    assert set(world.served.values()) == {1}
    assert world.markers["work"][-3:] == sorted(world.markers["work"])[-3:]
    assert len(world.markers["work"]) >= 2 + 6
    row = world.row("work")
    assert not row.schedule.wake_pending
    assert row.schedule.last_poll_at is not None
    assert 0 <= world.now - row.schedule.last_poll_at <= 1860


def test_two_nodes_an_hour_asleep_catch_up_each_time_once() -> None:
    config = timed("Europe/Berlin", "09:00", catch_up=60)
    world = World(local(date(2026, 5, 4), "Europe/Berlin", hour=8), (config,))
    world.begin("work", starts=True)
    world.now += 100 * 60
    for _ in range(2):
        world.begin("work", starts=True)
        world.minute("work")
    assert world.markers["work"] == ["2026-05-04 09:00"]
