"""What pages say of a slot."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from dashboard.test_attention import slot
from headgate.core.slots.status import NextWakeBody
from headgate.dashboard.formats import (
    SlotBar,
    bar_of,
    next_wake_words,
    reset_words,
    wake_mode_words,
)

LATER = datetime(2026, 11, 15, 21, 0, tzinfo=UTC)
WAKE = NextWakeBody(at=LATER, mode="interval", reason="interval mode (5 min elapsed)")


@pytest.mark.parametrize(
    ("fields", "bar"),
    [
        ({}, SlotBar(used=0.0, tone="spent", words="not known yet")),
        ({"percent_used": 12.0}, SlotBar(used=12.0, tone="spent", words="12 % used")),
        ({"percent_used": 79.94}, SlotBar(used=79.94, tone="spent", words="79.9 % used")),
        ({"percent_used": 80.0}, SlotBar(used=80.0, tone="warn", words="80 % used")),
        (
            {"percent_used": 100.0, "state": "exhausted"},
            SlotBar(used=100.0, tone="full", words="100 % used"),
        ),
    ],
)
def test_a_quota_that_is_used_up_is_not_drawn_as_overrun(
    fields: dict[str, Any], bar: SlotBar
) -> None:
    assert bar_of(slot(**fields)) == bar


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"next_wake": WAKE, "wake_modes": ["interval"]}, "5 min after the last one"),
        ({}, "never: nothing is set that wakes it"),
        ({"wake_modes": ["times"]}, "none: it is disabled"),
        ({"wake_modes": ["times"], "disabled_reason": "a 401"}, "none: a 401"),
        ({"wake_modes": ["times"], "wakes_enabled": True}, "not known yet"),
    ],
)
def test_the_next_wake_says_why_it_comes_or_why_there_is_none(
    fields: dict[str, Any], words: str
) -> None:
    assert next_wake_words(slot(**fields)) == words


def test_the_modes_of_wakes_are_said_in_words() -> None:
    assert wake_mode_words(slot(wake_modes=["interval", "times"])) == (
        "at an interval, at times of day"
    )
    assert wake_mode_words(slot()) == "never"


@pytest.mark.parametrize(
    ("resets_at", "words"),
    [
        (7_201.0, "resets in 2 h"),
        (1.0, "the window ended now; a reading has to confirm it"),
        (-119.0, "the window ended 2 min ago; a reading has to confirm it"),
    ],
)
def test_a_reset_that_has_passed_is_the_end_of_a_window(resets_at: float, words: str) -> None:
    assert reset_words(resets_at, 1.0) == words
