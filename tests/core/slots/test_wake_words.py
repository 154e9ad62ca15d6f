"""What wakes a slot is said in words, on pages and in terminals alike."""

from __future__ import annotations

import pytest

from headgate.core.slots.wakes import WakeMode, mode_words, reason_words


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
