"""Tables that fit any width: columns with the room that they need, as far as there is some.

Rule: a text that somebody else wrote is one line of printable characters, cut where its column
ends; wide characters count as two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar, overload

import msgspec
from rich.cells import cell_len, set_cell_size

from headgate.core.budgets.alerts import NEARLY_USED_UP
from headgate.core.text import count, duration, percent, printable, printable_lines, seconds_of, usd

# Bars made of characters, which are read without colour: what is used, what is held, what is left.
#
# Rule: what is not nothing is seen, and what is not full does not look full.

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
    index = min(width - 1, max(0, round(bar.mark * width) - 1))
    return cells[:index] + MARK + cells[index + 1 :]


def _cells(part: float, width: int) -> int:
    if part <= 0:
        return 0
    if part >= 1:
        return width
    return min(width - 1, max(1, round(part * width))) if width > 1 else 0


# Texts of others as a terminal draws them: on as many cells as were counted for them.
#
# Rule: what no reader sees is written out, and so is a mark that only changes how the character
# before it looks. Terminals do not agree how wide the two are, and a line would be shifted by it.

_VARIATIONS = range(0xFE00, 0xFE10)
_SKIN_TONES = range(0x1F3FB, 0x1F400)
_WRITTEN_OUT = {mark: ascii(chr(mark))[1:-1] for mark in (*_VARIATIONS, *_SKIN_TONES)}


def drawable(text: str) -> str:
    """Return a text as one line."""
    return printable(text).translate(_WRITTEN_OUT)


def drawable_lines(text: str) -> str:
    """Return a text with its lines and tabs."""
    return printable_lines(text).translate(_WRITTEN_OUT)


GAP = "  "
BAR_WIDTH = 24
MAX_CELL_LENGTH = 300
ELLIPSIS = "…"

Order = float | str


class ColumnKind(IntEnum):
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


_KEEPS_END = (ColumnKind.NAME, ColumnKind.ID)


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """A column: its title, and the least room that it gets in a table of at least `from_width`."""

    title: str
    least: int
    holds: ColumnKind = ColumnKind.TEXT
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
    """One row; its key is the name of what it shows, and stays when numbers change."""

    key: str
    cells: tuple[Cell, ...]


def text_cell(text: str, style: str = "", *, tail: str = "") -> Cell:
    """Return a cell with a text that somebody wrote, and a tail of ours that is never cut."""
    shown = drawable(text[:MAX_CELL_LENGTH]) + tail
    return Cell(text=shown, tail=tail, order=shown.casefold(), style=style)


def number_cell(text: str, order: float, style: str = "", *, room: int = 0) -> Cell:
    """Return a cell with a number."""
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
    if shown and spare > 0 and columns[shown[-1]].holds is not ColumnKind.FIGURE:
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
    if column.holds is ColumnKind.FIGURE:
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


# Cells that several panes have: counts, money, shares, times from now, and bars with their colour.
#
# Rule: what is not known is a dash, and never a number that looks like one.

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


# Which rows of a pane are shown, and in which order.
#
# Rule: all rows are looked through and sorted before they are cut to what a screen needs. Of
# thousands, rows are made only where they are looked at, and looked through once for each answer.

MAX_ROWS = 200

Thing = TypeVar("Thing")


class Rows(Sequence[Row], Generic[Thing]):
    """Rows of things, each of which is made when it is looked at."""

    def __init__(self, things: Sequence[Thing], make: Callable[[Thing], Row]) -> None:
        self._things = things
        self._make = make

    def __len__(self) -> int:
        return len(self._things)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._make(one) for one in self._things[index]]
        return self._make(self._things[index])


class RowFilter(msgspec.Struct, frozen=True, kw_only=True):
    """What a person wants to see: rows with a text, sorted by a column or in their own order."""

    wanted: str = ""
    column: int | None = None
    is_reversed: bool = False


class ArrangedRows(NamedTuple):
    """The first rows, and how many there are."""

    rows: Sequence[Row]
    total: int


class RowArranger:
    """Arranges the rows of one pane, again and again."""

    def __init__(self) -> None:
        self._answer: object = None
        self._row_filter = RowFilter()
        self._kept = ArrangedRows((), 0)

    def arranged(self, answer: object, rows: Sequence[Row], row_filter: RowFilter) -> ArrangedRows:
        """Return the filtered rows of an answer; those of a long one stay until the next."""
        is_short = len(rows) <= MAX_ROWS
        if is_short or (not row_filter.wanted and row_filter.column is None):
            return arranged(rows, row_filter)
        if answer is not self._answer or row_filter != self._row_filter:
            self._answer, self._row_filter, self._kept = (
                answer,
                row_filter,
                arranged(rows, row_filter),
            )
        return self._kept


def arranged(rows: Sequence[Row], row_filter: RowFilter) -> ArrangedRows:
    """Return the rows that contain a text, sorted by a column, or in their own order."""
    if row_filter.wanted or row_filter.column is not None:
        rows = _sorted(_found(rows, row_filter.wanted), row_filter.column)
    shown = rows[-MAX_ROWS:][::-1] if row_filter.is_reversed else rows[:MAX_ROWS]
    return ArrangedRows(shown, len(rows))


def _found(rows: Sequence[Row], wanted: str) -> list[Row]:
    needle = drawable(wanted).casefold()
    return [row for row in rows if any(needle in cell.text.casefold() for cell in row.cells)]


def _sorted(rows: list[Row], column: int | None) -> list[Row]:
    return rows if column is None else sorted(rows, key=lambda row: _order(row.cells[column]))


def _order(cell: Cell) -> tuple[bool, float, str]:
    """Return what a cell is sorted by: numbers before texts, so that the two can be mixed."""
    if isinstance(cell.order, str):
        return True, 0.0, cell.order
    return False, cell.order, ""
