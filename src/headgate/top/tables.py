"""Tables that fit any width: columns with the room that they need, as far as there is some.

Rule: a text that somebody else wrote is one line of printable characters, cut where its column
ends; wide characters count as two.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec
from rich.cells import cell_len, set_cell_size

from headgate.top.bars import Bar, drawn
from headgate.top.drawable import drawable

GAP = "  "
BAR_WIDTH = 24
MAX_CELL_LENGTH = 300
ELLIPSIS = "…"

Order = float | str


class Holds(IntEnum):
    """What a column holds, in the order in which columns get the room that they want.

    `REASON` is what a table is read for; names beside it are cut before it is. A `NAME` or an `ID`
    that is cut keeps its end, which is where those of one kind differ.
    """

    FIGURE = 0
    REASON = 1
    TEXT = 2
    NAME = 3
    ID = 4
    BAR = 5


_KEEPS_END = (Holds.NAME, Holds.ID)


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """A column: its title, and the least room that it gets in a table of at least `from_width`."""

    title: str
    least: int
    holds: Holds = Holds.TEXT
    from_width: int = 0


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in a row under a column, and by what it is sorted.

    `tail` is the end of the text that is still seen where the rest of it is cut. `room` is what a
    text takes that is longer at other times: without it columns would move as a clock runs.
    """

    text: str = ""
    tail: str = ""
    room: int = 0
    bar: Bar | None = None
    order: Order = ""
    style: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row; its key is the name of what it shows, and stays when figures change."""

    key: str
    cells: tuple[Cell, ...]


def text_cell(text: str, style: str = "", *, tail: str = "") -> Cell:
    """Return a cell with a text that somebody wrote, and a tail of ours that is never cut."""
    shown = drawable(text[:MAX_CELL_LENGTH]) + tail
    return Cell(text=shown, tail=tail, order=shown.casefold(), style=style)


def number_cell(text: str, order: float, style: str = "", *, room: int = 0) -> Cell:
    """Return a cell with a figure."""
    return Cell(text=text, room=room, order=order, style=style)


def bar_cell(bar: Bar, style: str = "") -> Cell:
    """Return a cell with a bar, sorted by what is used and held."""
    return Cell(bar=bar, order=bar.used + bar.held, style=style)


def widths_of(columns: Sequence[Column], rows: Sequence[Row], width: int) -> list[int]:
    """Return the width of each column; what is left after all have what they need is the last's.

    A column that the table is not wide enough for has 0. Where there is not even room for the least
    of the others, those at the right have less, or 0.
    """
    shown = [index for index, column in enumerate(columns) if column.from_width <= width]
    wanted = {index: _wanted(columns[index], rows, index) for index in shown}
    widths = [min(column.least, wanted.get(index, 0)) for index, column in enumerate(columns)]
    spare = width - sum(widths) - len(GAP) * (len(shown) - 1)
    for index in sorted(shown, key=lambda one: columns[one].holds):
        more = max(0, min(spare, wanted[index] - widths[index]))
        widths[index] += more
        spare -= more
    if shown and spare > 0 and columns[shown[-1]].holds is not Holds.FIGURE:
        widths[shown[-1]] += spare
    for index in reversed(shown):
        less = min(widths[index], max(0, -spare))
        widths[index] -= less
        # A column that is gone needs no gap before it.
        spare += less + (0 if widths[index] else len(GAP))
    return widths


def _wanted(column: Column, rows: Sequence[Row], index: int) -> int:
    cells = [row.cells[index] for row in rows]
    longest = max((_room_of(one) for one in cells), default=0)
    # One more for the sign that tells what a table is sorted by.
    return max(longest, cell_len(column.title) + 1)


def _room_of(cell: Cell) -> int:
    return BAR_WIDTH if cell.bar else max(cell.room, cell_len(cell.text))


def fitted(cell: Cell, column: Column, width: int) -> str:
    """Return a cell in exactly this many columns of the terminal."""
    if cell.bar is not None:
        return drawn(cell.bar, min(width, BAR_WIDTH)).ljust(width)
    if column.holds is Holds.FIGURE:
        return shortened(cell.text.rjust(width), width)
    if column.holds in _KEEPS_END and cell_len(cell.text) > width:
        # Mirrored, the end is the beginning.
        return shortened(cell.text[::-1], width)[::-1]
    if cell_len(cell.tail) < width < cell_len(cell.text):
        head = cell.text.removesuffix(cell.tail)
        return shortened(head, width - cell_len(cell.tail)) + cell.tail
    return shortened(cell.text, width)


def shortened(text: str, width: int) -> str:
    """Return a text in exactly this many columns, with a sign where it was cut."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, width - 1) + ELLIPSIS if width > 0 else ""
