"""Cells that several panes have: counts, money, shares, times from now, and bars with their colour.

Rule: what is not known is a dash, and never a figure that looks like one.
"""

from __future__ import annotations

import math
from datetime import datetime

from headgate.core.budgets.alerts import NEARLY_USED_UP
from headgate.core.texts.figures import count, duration, percent, seconds_of, usd
from headgate.top.bars import Bar
from headgate.top.tables import Cell, bar_cell, number_cell

GOOD, CAREFUL, BAD, FAINT = "green", "yellow", "red", "dim"
UNKNOWN = Cell(text="-", order=-1.0)
NEVER = Cell(text="-", order=math.inf)
NOW = "now"
TIME_WIDTH = len("59 min 59 s")
"""The longest that a time usually is."""

_FULL = 1.0


def count_cell(number: int | None, style: str = "") -> Cell:
    """Return how many there are."""
    return UNKNOWN if number is None else number_cell(count(number), number, style)


def money_cell(micro_usd: int | None, style: str = "") -> Cell:
    """Return an amount in dollars."""
    return UNKNOWN if micro_usd is None else number_cell(usd(micro_usd), micro_usd, style)


def share_cell(share: float | None) -> Cell:
    """Return a part of 1."""
    return UNKNOWN if share is None else number_cell(percent(share), share)


def since_cell(seconds: float | None) -> Cell:
    """Return for how long something has been; a clock that is behind makes no time negative."""
    if seconds is None:
        return UNKNOWN
    seconds = max(0.0, seconds)
    return number_cell(duration(seconds), seconds, room=TIME_WIDTH)


def until_cell(moment: datetime | None, now: float, *, past: str = NOW) -> Cell:
    """Return how long it is until a time, or what is said of it once it has come."""
    if moment is None:
        return NEVER
    away = seconds_of(moment) - now
    return number_cell(duration(away) if away > 0 else past, away, room=TIME_WIDTH)


def limited_cell(bar: Bar | None, share: float | None) -> Cell:
    """Return a bar of something that has a limit, in the colour of the share that is used of it."""
    return UNKNOWN if bar is None or share is None else bar_cell(bar, _share_style(share))


def is_full(share: float) -> bool:
    """Tell whether nothing is left."""
    return share >= _FULL


def _share_style(share: float) -> str:
    if is_full(share):
        return BAD
    return CAREFUL if share >= NEARLY_USED_UP else GOOD
