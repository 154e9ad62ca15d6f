"""What a page says of a slot: how much is used, when its window ends, what wakes it next.

Rule: the overview and the pages of slots draw from here, so that a slot reads the same on all.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from headgate.bodies.slots import SlotBody
from headgate.core.budgets.alerts import NEARLY_PERCENT
from headgate.core.key_slots.wake_words import ended_words, mode_words, reason_words
from headgate.core.texts.figures import ago, coming, seconds_of


class SlotBar(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a quota is used, of 100; without a reading the bar is empty."""

    used: float
    tone: str
    words: str


def bar_of(slot: SlotBody) -> SlotBar:
    """Return the bar of a slot; used up has the tone that a budget has then."""
    used = slot.percent_used
    if used is None:
        return SlotBar(used=0.0, tone="spent", words="not known yet")
    tone = "warn" if used >= NEARLY_PERCENT else "spent"
    if slot.state == "exhausted":
        tone = "full"
    return SlotBar(used=used, tone=tone, words=f"{used:.1f}".removesuffix(".0") + " % used")


def reset_words(resets_at: datetime | float, now: float) -> str:
    """Return when a window resets, or that it ended."""
    if seconds_of(resets_at) > now:
        return f"resets {coming(resets_at, now)}"
    return ended_words(ago(resets_at, now))


def next_wake_words(slot: SlotBody) -> str:
    """Return why the next wake comes, or why there is none."""
    if slot.next_wake is not None:
        return reason_words(slot.next_wake.reason)
    if not slot.wake_modes:
        return "never: nothing is set that wakes it"
    if not slot.wakes_enabled:
        return f"none: {slot.disabled_reason or 'it is disabled'}"
    return "not known yet"


def wake_mode_words(slot: SlotBody) -> str:
    """Return when a slot is woken."""
    return ", ".join(mode_words(mode) for mode in slot.wake_modes) or "never"
