"""Texts and names as pages show them: cut, written out, and in plain words."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import pytest

from dashboard.test_attention import slot
from headgate.core.budgets.ledger import Adjustment
from headgate.core.budgets.reservations import Call
from headgate.core.slots.status import LogPhase, NextWakeBody, QuotaLimitBody
from headgate.dashboard import formats
from headgate.dashboard.formats import (
    BOOKINGS,
    DELIVERIES,
    LOG_ACTIONS,
    LOG_PHASES,
    SlotBar,
    bar_of,
    limit_words,
    next_wake_words,
    reset_words,
    wake_mode_words,
)
from headgate.engine.slots.slot import ACTIONS
from headgate.storage.deliveries import DeliveryState


def test_long_texts_are_cut_and_strange_ones_written_out() -> None:
    assert formats.line("a" * 300) == "a" * 200 + "…"
    assert formats.line("a\nb\u202e") == "a\\nb\\u202e"
    assert formats.block("a\nb\u202e" + "x" * 9_000) == "a\nb\\u202e" + "x" * 3_996 + "…"
    assert len(formats.line("\x00" * 1_000_000)) < 1_000


ENGINE = Path(__file__).parents[2] / "src/headgate/engine"


def test_every_name_of_a_closed_list_has_its_words() -> None:
    assert set(BOOKINGS) == {call.value for call in (*Call, *Adjustment)}
    assert set(DELIVERIES) == {state.value for state in DeliveryState}
    assert set(LOG_PHASES) == set(get_args(LogPhase))


def test_everything_that_is_logged_of_a_slot_has_its_words() -> None:
    sources = "".join(path.read_text() for path in ENGINE.rglob("*.py"))
    events = re.findall(r'trail\.event\(\s*"([a-z.-]+)"', sources)
    polls = re.findall(r'"([a-z]+-(?:quota-poll|precheck))"', sources)
    assert len(events) > 10
    assert set(events) | set(polls) | set(ACTIONS.values()) <= set(LOG_ACTIONS)


@pytest.mark.parametrize(
    ("unit", "number", "words"),
    [
        (3, 1, "an hour"),
        (3, 5, "5 hours"),
        (5, 1, "1 of the provider's unit 5"),
        ("week", None, "of the provider's unit week"),
        (None, 1, ""),
    ],
)
def test_the_window_of_a_limit_is_said_as_far_as_it_is_known(
    unit: int | str | None, number: float | None, words: str
) -> None:
    assert limit_words(QuotaLimitBody(type="TOKENS_LIMIT", unit=unit, number=number)) == words


LATER = datetime(2026, 11, 15, 21, 0, tzinfo=UTC)
WAKE = NextWakeBody(at=LATER, mode="interval", reason="", text="21:00 UTC: why")


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
        ({"next_wake": WAKE, "wake_modes": ["interval"]}, "21:00 UTC: why"),
        ({}, "never: no wake mode is set"),
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
