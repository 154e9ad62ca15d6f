"""What wakes a slot is said in words, on pages and in terminals alike."""

from __future__ import annotations

import msgspec
import pytest

from core.slots.wake_examples import BERLIN, berlin
from headgate.core.slots.slot import SlotConfig, SlotReading, SlotRow
from headgate.core.slots.status import next_wake, why_no_wake
from headgate.core.slots.wakes import (
    SlotSchedule,
    WakeConfig,
    WakeMode,
    mode_words,
    reason_words,
    reset_slides,
)


@pytest.mark.parametrize("mode", [*(mode.value for mode in WakeMode), "retry"])
def test_every_mode_has_words_and_none_has_the_signs_of_a_name(mode: str) -> None:
    assert mode_words(mode) != mode
    assert "_" not in mode_words(mode)


def test_a_mode_of_a_newer_service_is_said_as_it_is_called() -> None:
    assert mode_words("at_full_moon") == "at_full_moon"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("interval mode (5 min elapsed)", "5 min after the last one"),
        ("after_reset mode (1 min after reset)", "1 min after the reset"),
        ("times mode (08:00)", "set for 08:00"),
        ("times mode (08:00, 3 min late)", "set for 08:00, 3 min late"),
        ("the last wake is not confirmed yet", "the last wake is not confirmed yet"),
        ("another mode (of its own)", "another mode (of its own)"),
    ],
)
def test_a_wake_to_come_says_why_without_names_of_modes(reason: str, words: str) -> None:
    assert reason_words(reason) == words


NOON = berlin("2026-11-16T12:00")


def known(
    *modes: WakeMode, open_until: str | None = None, is_used_up: bool = False, **schedule: object
) -> tuple[SlotConfig, SlotRow]:
    """Return a slot of Berlin, and what the last reading told of it."""
    wake = WakeConfig(wake_modes=frozenset(modes), wake_times=("08:55", "13:05"), zone=BERLIN)
    reset = None if open_until is None else berlin(f"2026-11-16T{open_until}")
    schedule = {"last_interval_fire": NOON - 1_800.0, "times_served_until": NOON - 1.0, **schedule}
    if reset is not None:
        schedule = {"next_reset_epoch_ms": int(reset * 1000), **schedule}
    row = SlotRow(
        name="work",
        schedule=SlotSchedule(**schedule),  # type: ignore[arg-type]
        reading=SlotReading(read_at=NOON - 60, resets_at=reset, is_exhausted=is_used_up),
    )
    return SlotConfig(name="work", provider="zai", wake=wake), row


TIMES, INTERVAL, AFTER_RESET = WakeMode.TIMES, WakeMode.INTERVAL, WakeMode.AFTER_RESET


@pytest.mark.parametrize(
    ("slot", "text", "is_skipped"),
    [
        (known(TIMES), "13:05 Europe/Berlin: set in wake_times", False),
        (known(TIMES, open_until="13:05"), "13:05 Europe/Berlin: set in wake_times", False),
        (
            known(TIMES, open_until="14:41"),
            (
                "13:05 Europe/Berlin: skipped, the window is open until 14:41"
                "; the next one at 2026-11-17 08:55"
            ),
            True,
        ),
        (known(INTERVAL), "12:30 Europe/Berlin: 60 min after the last one", False),
        (
            known(INTERVAL, open_until="14:41"),
            "12:30 Europe/Berlin: skipped, the window is open until 14:41; the next one at 15:30",
            True,
        ),
        (
            known(INTERVAL, AFTER_RESET, TIMES, open_until="14:41"),
            "12:30 Europe/Berlin: skipped, the window is open until 14:41; the next one at 14:42",
            True,
        ),
        (
            known(AFTER_RESET, open_until="14:41"),
            "14:42 Europe/Berlin: 1 min after the reset",
            False,
        ),
        (
            known(TIMES, open_until="14:41", is_used_up=True, next_reset_epoch_ms=None),
            (
                "13:05 Europe/Berlin: skipped, the window is open until 14:41"
                "; the next one at 2026-11-17 08:55"
            ),
            True,
        ),
        (
            known(TIMES, paused_until=berlin("2026-11-16T13:30")),
            "13:30 Europe/Berlin: set in wake_times",
            False,
        ),
        (
            known(INTERVAL, last_interval_fire=NOON - 7_200.0),
            "now: 60 min after the last one",
            False,
        ),
        (
            known(INTERVAL, wake_pending=True, wake_retry_window_deadline=NOON + 300.0),
            (
                "12:05 Europe/Berlin: the last wake is not confirmed yet"
                "; if it is not by then, it is sent again"
            ),
            False,
        ),
    ],
)
def test_the_next_wake_is_told_in_the_zone_of_the_slot_and_promises_nothing_that_is_skipped(
    slot: tuple[SlotConfig, SlotRow], text: str, is_skipped: bool
) -> None:
    told = next_wake(*slot, NOON)
    assert told is not None
    assert (told.text, told.is_skipped) == (text, is_skipped)
    assert (told.open_until is None) is not is_skipped


def test_a_wake_for_a_rate_is_told_as_skipped() -> None:
    config, row = known(TIMES, open_until="11:59:40")
    row = msgspec.structs.replace(row, schedule=reset_slides(row.schedule))
    told = next_wake(config, row, NOON)
    assert told is not None
    assert told.is_skipped
    assert "the limit of this key is a rate" in told.text


def test_a_slot_with_a_mode_and_no_next_wake_says_why() -> None:
    config, row = known(AFTER_RESET, open_until="14:41")
    reset_ms = row.schedule.next_reset_epoch_ms
    assert why_no_wake(config, row) == ""
    expected: list[tuple[dict[str, object], str]] = [
        ({"next_reset_epoch_ms": None}, "no reset is known yet; the next reading tells it"),
        (
            {"last_reset_marker": reset_ms},
            "the limit of this key is a rate, which has no window to open",
        ),
        ({"wake_auto_disabled": True, "disabled_reason": "no answer"}, "no answer"),
        ({"slot_auto_disabled": True, "disabled_reason": "refused"}, "disabled, refused"),
    ]
    for schedule, why in expected:
        changed = msgspec.structs.replace(row.schedule, **schedule)
        without = msgspec.structs.replace(row, schedule=changed)
        assert next_wake(config, without, NOON) is None
        assert why_no_wake(config, without).startswith(why)
    answered = msgspec.structs.replace(
        row,
        schedule=msgspec.structs.replace(row.schedule, last_reset_marker=reset_ms),
        reading=None,
    )
    assert why_no_wake(config, answered).startswith("the last reset had its wake")
