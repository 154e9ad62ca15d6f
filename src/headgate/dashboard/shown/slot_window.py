"""The window of a slot as it is drawn: from its beginning over now to its reset.

A provider tells when a window ends. When it began follows from the length that some of them tell,
and otherwise from the wake that opened it.
"""

from __future__ import annotations

import msgspec

from headgate.bodies.slots import SlotBody
from headgate.core.key_slots.quota import UNIT_HOURS

HOUR_SECONDS = 3_600.0


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """An open window; times are Unix seconds, and `elapsed` is the part of 1 that is over."""

    begins_at: float
    ends_at: float
    elapsed: float


def window_of(slot: SlotBody, now: float) -> Window | None:
    """Return the window that is open; None if none is, or it is not known when it began."""
    if slot.resets_at is None:
        return None
    ends_at = slot.resets_at.timestamp()
    begins_at = _begins_at(slot, ends_at)
    if begins_at is None or not begins_at <= now < ends_at:
        return None
    elapsed = (now - begins_at) / (ends_at - begins_at)
    return Window(begins_at=begins_at, ends_at=ends_at, elapsed=elapsed)


def _begins_at(slot: SlotBody, ends_at: float) -> float | None:
    """Return when the window began: with the wake that opened it, or its whole length ago."""
    whole = _length_seconds(slot)
    longest_ago = None if whole is None else ends_at - whole
    sent_at, confirmed_at = slot.last_wake_at, slot.last_confirmed_at
    if sent_at is None or confirmed_at is None or confirmed_at < sent_at:
        return longest_ago
    # A wake of an earlier window says nothing of this one.
    return max(sent_at.timestamp(), longest_ago or 0.0)


def _length_seconds(slot: SlotBody) -> float | None:
    for limit in slot.limits:
        if limit.unit == UNIT_HOURS and limit.number and limit.resets_at == slot.resets_at:
            return limit.number * HOUR_SECONDS
    return None
