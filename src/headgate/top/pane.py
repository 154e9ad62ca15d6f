"""One pane: a table with a cursor that stays on its row while figures and order change.

Rule: it draws what it is given and asks nobody; how many rows fit is its own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from headgate.top.panes import PaneKind
from headgate.top.tables import GAP, Cell, Row, fitted, shortened, widths_of

UP, DOWN = "▲", "▼"

_PLAIN = Style()
_FAINT = Style(dim=True)
_HEAD = Style(bold=True)
_CURSOR = Style(reverse=True)
_NOTE = Style(italic=True)


class Pane(Widget, can_focus=True):
    """Shows the rows of one kind, as many as there is room for."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "move_page(-1)", show=False),
        Binding("pagedown,space", "move_page(1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
    ]

    class Moved(Message):
        """Other rows may be seen now."""

    def __init__(self, kind: PaneKind) -> None:
        super().__init__(id=kind.name.lower())
        self.kind = kind
        self.sort: int | None = None
        self.is_reversed = False
        self.is_faint = False
        self.title = ""
        self._rows: Sequence[Row] = ()
        self._note = ""
        self._index = 0
        self._first = 0
        self._strips: list[Strip] = []

    @property
    def selected(self) -> Row | None:
        """The row that the cursor is on."""
        return self._rows[self._index] if self._rows else None

    @property
    def seen(self) -> tuple[str, ...]:
        """The keys of the rows that are on the screen."""
        return tuple(row.key for row in self._rows[self._first : self._first + self._room()])

    def show(self, rows: Sequence[Row], *, note: str, title: str, is_faint: bool) -> None:
        """Draw other rows; the cursor stays on its row, or where that one was."""
        before = self.selected
        self._rows, self._note, self.title, self.is_faint = rows, note, title, is_faint
        keys = [row.key for row in rows]
        if before is not None and before.key in keys:
            self._index = keys.index(before.key)
        self._place()

    def sort_by_next(self) -> str:
        """Sort by the next column that is seen, after the last one by none; return its title."""
        columns = self.kind.columns
        shown = [one for one, column in enumerate(columns) if column.from_width <= self.size.width]
        self.sort = next((one for one in shown if self.sort is None or one > self.sort), None)
        return "" if self.sort is None else columns[self.sort].title

    def action_move(self, rows: int) -> None:
        """Move the cursor."""
        self._index += rows
        self._place()
        self.post_message(self.Moved())

    def action_move_page(self, pages: int) -> None:
        """Move the cursor by as many rows as are seen."""
        self.action_move(pages * max(1, self._room()))

    def on_resize(self) -> None:
        """Draw again, with more or less room."""
        self._place()

    def on_focus(self) -> None:
        """Show the cursor."""
        self._draw()

    def on_blur(self) -> None:
        """Hide the cursor."""
        self._draw()

    def render_line(self, y: int) -> Strip:
        """Return a line of what was drawn."""
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width)

    def _room(self) -> int:
        return max(0, self.size.height - 1 - bool(self.title) - bool(self._note))

    def _place(self) -> None:
        self._index = max(0, min(self._index, len(self._rows) - 1))
        room = max(1, self._room())
        self._first = max(min(self._first, self._index), self._index - room + 1)
        self._first = max(0, min(self._first, len(self._rows) - room))
        self._draw()

    def _draw(self) -> None:
        width = self.size.width
        widths = widths_of(self.kind.columns, self._rows, width)
        strips = [self._line(self.title, _HEAD)] if self.title else []
        if self._rows:
            strips.append(self._line(self._head(widths), _HEAD))
            shown = self._rows[self._first : self._first + self._room()]
            strips += [self._row(row, widths) for row in shown]
        if self._note:
            strips.append(self._line(self._note, _NOTE))
        self._strips = strips[: self.size.height]
        self.refresh()

    def _head(self, widths: Sequence[int]) -> str:
        sign = DOWN if self.is_reversed else UP
        titles = [
            f"{column.title}{sign if index == self.sort else ''}"
            for index, column in enumerate(self.kind.columns)
        ]
        return GAP.join(
            fitted(Cell(text=title), column, width)
            for title, column, width in zip(titles, self.kind.columns, widths, strict=True)
            if width
        )

    def _row(self, row: Row, widths: Sequence[int]) -> Strip:
        has_cursor = self.has_focus and row is self.selected
        over = _CURSOR if has_cursor else _FAINT if self.is_faint else _PLAIN
        segments = []
        for cell, column, width in zip(row.cells, self.kind.columns, widths, strict=True):
            if not width:
                continue
            # Under the cursor a colour would become a background that nobody chose.
            own = _PLAIN if has_cursor else Style.parse(cell.style)
            segments.append(Segment(fitted(cell, column, width) + GAP, own + over))
        return Strip(segments).crop(0, self.size.width).extend_cell_length(self.size.width, over)

    def _line(self, text: str, style: Style) -> Strip:
        over = _FAINT if self.is_faint else _PLAIN
        return Strip([Segment(shortened(text, self.size.width), style + over)])
