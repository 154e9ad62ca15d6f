"""Names of programs are said in words, and one that has none is shown as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from headgate.core.budgets.reservations import Call
from headgate.core.slots.status import LimitBody, LogPhase
from headgate.dashboard.formats import (
    BOOKINGS,
    DELIVERIES,
    LOG_ACTIONS,
    LOG_PHASES,
    limit_words,
    said,
)
from headgate.engine.slots.loops import ACTIONS
from headgate.storage.deliveries import DeliveryState

ENGINE = Path(__file__).parents[2] / "src/headgate/engine"


def test_every_name_of_a_closed_list_has_its_words() -> None:
    assert set(BOOKINGS) == {call.value for call in Call}
    assert set(DELIVERIES) == {state.value for state in DeliveryState}
    assert set(LOG_PHASES) == set(get_args(LogPhase))


def test_everything_that_is_logged_of_a_slot_has_its_words() -> None:
    sources = "".join(path.read_text() for path in ENGINE.rglob("*.py"))
    events = re.findall(r'trail\.event\(\s*"([a-z.-]+)"', sources)
    polls = re.findall(r'"([a-z]+-(?:quota-poll|precheck))"', sources)
    assert len(events) > 10
    assert set(events) | set(polls) | set(ACTIONS.values()) <= set(LOG_ACTIONS)


def test_a_name_without_words_is_shown_as_it_is() -> None:
    assert said(BOOKINGS, "commit") == "booked"
    assert said(BOOKINGS, "something-new") == "something-new"


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
    assert limit_words(LimitBody(type="TOKENS_LIMIT", unit=unit, number=number)) == words
