"""Bars made of characters, which are read without colour: what is used, what is held, what is left.

Rule: what is not nothing is seen, and what is not full does not look full.
"""

from __future__ import annotations

import msgspec

USED, HELD, LEFT, MARK = "█", "▒", "·", "│"


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of 1: what is used, what is held behind it, and where a mark stands."""

    used: float
    held: float = 0.0
    mark: float | None = None


def drawn(bar: Bar, width: int) -> str:
    """Return a bar in this many characters."""
    used = _cells(bar.used, width)
    both = max(used, _cells(bar.used + bar.held, width))
    cells = USED * used + HELD * (both - used) + LEFT * (width - both)
    if bar.mark is None or not cells:
        return cells
    place = min(width - 1, max(0, round(bar.mark * width) - 1))
    return cells[:place] + MARK + cells[place + 1 :]


def _cells(part: float, width: int) -> int:
    if part <= 0:
        return 0
    if part >= 1:
        return width
    return min(width - 1, max(1, round(part * width))) if width > 1 else 0
