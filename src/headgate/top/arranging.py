"""Which rows of a pane are shown, and in which order.

Rule: all rows are looked through and sorted before they are cut to what a screen needs. Of
thousands, rows are made only where they are looked at, and looked through once for each answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar, overload

import msgspec

from headgate.top.drawable import drawable
from headgate.top.tables import Cell, Row

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
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self._make(one) for one in self._things[place]]
        return self._make(self._things[place])


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a person wants to see: rows with a text, sorted by a column or in their own order."""

    wanted: str = ""
    column: int | None = None
    is_reversed: bool = False


class Arranged(NamedTuple):
    """The first rows, and how many there are."""

    rows: Sequence[Row]
    total: int


class Arranger:
    """Arranges the rows of one pane, again and again."""

    def __init__(self) -> None:
        self._answer: object = None
        self._wish = Wish()
        self._kept = Arranged((), 0)

    def arranged(self, answer: object, rows: Sequence[Row], wish: Wish) -> Arranged:
        """Return the rows of an answer as wished; those of a long one stay until the next."""
        is_short = len(rows) <= MAX_ROWS
        if is_short or (not wish.wanted and wish.column is None):
            return arranged(rows, wish)
        if answer is not self._answer or wish != self._wish:
            self._answer, self._wish, self._kept = answer, wish, arranged(rows, wish)
        return self._kept


def arranged(rows: Sequence[Row], wish: Wish) -> Arranged:
    """Return the rows that contain a text, sorted by a column, or in their own order."""
    if wish.wanted or wish.column is not None:
        rows = _sorted(_found(rows, wish.wanted), wish.column)
    shown = rows[-MAX_ROWS:][::-1] if wish.is_reversed else rows[:MAX_ROWS]
    return Arranged(shown, len(rows))


def _found(rows: Sequence[Row], wanted: str) -> list[Row]:
    needle = drawable(wanted).casefold()
    return [row for row in rows if any(needle in cell.text.casefold() for cell in row.cells)]


def _sorted(rows: list[Row], column: int | None) -> list[Row]:
    return rows if column is None else sorted(rows, key=lambda row: _order(row.cells[column]))


def _order(cell: Cell) -> tuple[bool, float, str]:
    """Return what a cell is sorted by: figures before texts, so that the two can be mixed."""
    if isinstance(cell.order, str):
        return True, 0.0, cell.order
    return False, cell.order, ""
