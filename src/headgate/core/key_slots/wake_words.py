"""What wakes a slot and when its window ends, in the words that pages and terminals share.

Rule: a mode that has no words here is said as it is called, so that nothing is hidden.
"""

from __future__ import annotations

import re

ENDED = "ended"
"""What stands in the place of the time until a reset that has passed."""

_WORDS = {
    "interval": "at an interval",
    "times": "at times of day",
    "after_reset": "after a reset",
    "retry": "once more",
}
"""The modes of a slot, and what a service calls a wake that is sent again."""

_REASON = re.compile(r"(\w+) mode \((.+)\)")


def mode_words(mode: str) -> str:
    """Return when a slot is woken by a mode."""
    return _WORDS.get(mode, mode)


def reason_words(reason: str) -> str:
    """Return why a wake comes, which has not come yet: `5 min after the last one`."""
    found = _REASON.fullmatch(reason)
    if found is None:
        return reason
    mode, told = found.groups()
    if mode == "interval":
        return f"{told.removesuffix(' elapsed')} after the last one"
    if mode == "after_reset":
        return f"{told.removesuffix(' after reset')} after the reset"
    return f"set for {told}" if mode == "times" else reason


def ended_words(when: str) -> str:
    """Return what is said of a window whose reset has passed, which only a reading can show."""
    return f"the window {ENDED} {when}; a reading has to confirm it"
