"""Start, new configuration and return of a slot: what of the past still counts."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import msgspec
import pytest

from headgate.core.slots.polling import next_poll_at
from headgate.core.slots.quota import QuotaFailure, QuotaFailureKind, QuotaLimit
from headgate.core.slots.wakes import (
    SlotSchedule,
    WakeConfig,
    WakeMode,
    config_changed,
    initial_wake_needed,
    key_refused,
    mark_fired,
    should_fire_wake,
    slot_enabled,
    slot_started,
    wake_sent,
)

BERLIN = ZoneInfo("Europe/Berlin")
INTERVAL = WakeConfig(wake_modes=frozenset({WakeMode.INTERVAL}))
NINE = WakeConfig(wake_modes=frozenset({WakeMode.TIMES}), wake_times=("09:00",), zone=BERLIN)
COLD = QuotaLimit(type="TOKENS_LIMIT")


def berlin(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


FIVE_PAST = berlin("2026-05-01T09:05")


def with_times(*times: str) -> WakeConfig:
    return msgspec.structs.replace(NINE, wake_times=times)


def test_the_first_start_begins_the_interval_and_polls() -> None:
    schedule = slot_started(SlotSchedule(), FIVE_PAST)
    assert next_poll_at(INTERVAL, schedule, FIVE_PAST) == FIVE_PAST
    assert should_fire_wake(INTERVAL, schedule, FIVE_PAST + 3599) is None
    assert should_fire_wake(INTERVAL, schedule, FIVE_PAST + 3600) is not None


def test_the_first_start_leaves_the_times_before_it_alone() -> None:
    assert should_fire_wake(NINE, slot_started(SlotSchedule(), FIVE_PAST), FIVE_PAST) is None


def test_the_minute_of_the_first_start_still_counts() -> None:
    now = berlin("2026-05-01T09:00:40")
    assert should_fire_wake(NINE, slot_started(SlotSchedule(), now), now) is not None


def test_a_restart_catches_up_what_was_slept_through() -> None:
    stored = slot_started(SlotSchedule(), berlin("2026-04-30T12:00"))
    assert should_fire_wake(NINE, slot_started(stored, FIVE_PAST), FIVE_PAST) is not None


def test_a_restart_repeats_nothing() -> None:
    stored = slot_started(SlotSchedule(), berlin("2026-04-30T12:00"))
    trigger = should_fire_wake(NINE, stored, FIVE_PAST)
    assert trigger is not None
    fired = mark_fired(stored, trigger, FIVE_PAST)
    assert should_fire_wake(NINE, slot_started(fired, FIVE_PAST + 5), FIVE_PAST + 5) is None


def test_a_restart_does_not_begin_the_interval_again() -> None:
    stored = SlotSchedule(last_interval_fire=FIVE_PAST - 3000)
    assert slot_started(stored, FIVE_PAST).last_interval_fire == FIVE_PAST - 3000


def started_with(config: WakeConfig, *, wakes: bool) -> WakeConfig:
    return msgspec.structs.replace(config, wake_on_start=wakes)


@pytest.mark.parametrize(
    ("config", "schedule", "quota", "needed"),
    [
        (INTERVAL, SlotSchedule(), COLD, True),
        (NINE, SlotSchedule(), COLD, False),
        (started_with(NINE, wakes=True), SlotSchedule(), COLD, True),
        (started_with(NINE, wakes=False), SlotSchedule(), COLD, False),
        (started_with(INTERVAL, wakes=False), SlotSchedule(), COLD, False),
        (started_with(WakeConfig(), wakes=True), SlotSchedule(), COLD, False),
        (INTERVAL, SlotSchedule(), QuotaFailure(kind=QuotaFailureKind.TIMEOUT), True),
        (INTERVAL, SlotSchedule(), QuotaFailure(kind=QuotaFailureKind.REFUSED), False),
        (INTERVAL, SlotSchedule(), QuotaLimit(type="T", next_reset_epoch_ms=9 * 10**12), False),
        (WakeConfig(), SlotSchedule(), COLD, False),
        (INTERVAL, SlotSchedule(wake_pending=True), COLD, False),
        (INTERVAL, SlotSchedule(wake_auto_disabled=True), COLD, False),
        (INTERVAL, SlotSchedule(paused_until=FIVE_PAST + 1), COLD, False),
    ],
)
def test_a_start_wakes_only_where_a_mode_or_the_setting_and_the_reading_call_for_it(
    config: WakeConfig, schedule: SlotSchedule, quota: QuotaLimit | QuotaFailure, needed: bool
) -> None:
    assert initial_wake_needed(config, schedule, quota, FIVE_PAST) is needed


def test_the_same_configuration_changes_nothing() -> None:
    schedule = SlotSchedule(slot_auto_disabled=True)
    assert config_changed(NINE, with_times("09:00"), schedule, FIVE_PAST) is schedule


@pytest.mark.parametrize(
    ("added", "fires"), [("08:55", False), ("09:03", False), ("09:05", True), ("09:06", False)]
)
def test_a_time_added_for_a_minute_already_past_waits_for_tomorrow(added: str, fires: bool) -> None:
    before = WakeConfig(wake_modes=NINE.wake_modes, wake_times=("18:00",), zone=BERLIN)
    after = msgspec.structs.replace(before, wake_times=("18:00", added))
    schedule = config_changed(before, after, SlotSchedule(times_served_until=0.0), FIVE_PAST + 10)
    assert (should_fire_wake(after, schedule, FIVE_PAST + 10) is not None) is fires


def test_a_time_that_was_due_before_the_change_stays_due() -> None:
    after = with_times("09:00", "18:00")
    schedule = config_changed(NINE, after, SlotSchedule(times_served_until=0.0), FIVE_PAST)
    assert should_fire_wake(after, schedule, FIVE_PAST) is not None


def test_a_change_never_makes_a_served_time_due_again() -> None:
    served = SlotSchedule(times_served_until=FIVE_PAST + 30)
    schedule = config_changed(NINE, with_times("09:05"), served, FIVE_PAST)
    assert schedule.times_served_until == FIVE_PAST + 30


def test_times_switched_on_do_not_look_back() -> None:
    off = msgspec.structs.replace(NINE, wake_modes=frozenset())
    schedule = config_changed(off, NINE, SlotSchedule(times_served_until=0.0), FIVE_PAST)
    assert should_fire_wake(NINE, schedule, FIVE_PAST) is None


def test_an_interval_switched_on_begins_now() -> None:
    schedule = SlotSchedule(last_interval_fire=0.0)
    changed = config_changed(WakeConfig(), INTERVAL, schedule, FIVE_PAST)
    assert should_fire_wake(INTERVAL, changed, FIVE_PAST) is None
    assert should_fire_wake(INTERVAL, changed, FIVE_PAST + 3600) is not None


def test_a_changed_interval_counts_from_the_last_wake() -> None:
    shorter = msgspec.structs.replace(INTERVAL, wake_interval_minutes=10)
    schedule = SlotSchedule(last_interval_fire=FIVE_PAST - 600)
    changed = config_changed(INTERVAL, shorter, schedule, FIVE_PAST)
    assert should_fire_wake(shorter, changed, FIVE_PAST) is not None


def test_switching_all_modes_off_ends_the_wake_under_way() -> None:
    schedule = wake_sent(INTERVAL, SlotSchedule(), FIVE_PAST)
    assert not config_changed(INTERVAL, WakeConfig(), schedule, FIVE_PAST).wake_pending


def test_another_change_leaves_the_wake_under_way_alone() -> None:
    schedule = wake_sent(INTERVAL, SlotSchedule(), FIVE_PAST)
    changed = msgspec.structs.replace(INTERVAL, poll_interval_minutes=5)
    assert config_changed(INTERVAL, changed, schedule, FIVE_PAST) == schedule


@pytest.mark.parametrize(
    "disabled",
    [
        SlotSchedule(wake_auto_disabled=True, wake_errors=31, disabled_reason="unconfirmed"),
        SlotSchedule(slot_auto_disabled=True, consecutive_poll_errors=10, disabled_reason="polls"),
        key_refused(SlotSchedule(wake_pending=True), 401),
    ],
)
def test_a_disabled_slot_returns_by_hand_or_by_a_new_configuration(disabled: SlotSchedule) -> None:
    changed = msgspec.structs.replace(INTERVAL, poll_interval_minutes=5)
    for revived in (
        slot_enabled(disabled),
        config_changed(INTERVAL, changed, disabled, FIVE_PAST),
    ):
        assert revived == SlotSchedule(poll_requested=True)
