"""The seven panes: what each is called, its columns, its rows, and what it says without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from headgate.cli.top import rows
from headgate.cli.top.service_state import ServiceState, Topic
from headgate.cli.top.tables import (
    GAP,
    TIME_WIDTH,
    ArrangedRows,
    Cell,
    Column,
    ColumnKind,
    Row,
    drawable,
    fitted,
    shortened,
    widths_of,
)
from headgate.core.text import count

MakeRows = Callable[[ServiceState, float], Sequence[Row]]


class PaneKind(NamedTuple):
    """One pane; `empty` is said when there is nothing to show."""

    name: str
    topic: Topic
    columns: tuple[Column, ...]
    rows: MakeRows
    empty: str


def _text(
    title: str, least: int, holds: ColumnKind = ColumnKind.TEXT, *, from_width: int = 0
) -> Column:
    return Column(title=title, least=least, holds=holds, from_width=from_width)


def _number(title: str, least: int, *, from_width: int = 0) -> Column:
    return _text(title, least, ColumnKind.FIGURE, from_width=from_width)


def _time(title: str) -> Column:
    return _number(title, TIME_WIDTH)


PROJECTS = PaneKind(
    "Projects",
    Topic.PROJECTS,
    (
        _text("project", 14),
        _text("status", 8),
        _text("had │ target", 12, ColumnKind.BAR),
        _number("had", 5),
        _number("target", 6),
        _number("owed", 7, from_width=88),
        _number("queued", 6),
        _number("flight", 6),
        _number("cap", 4, from_width=94),
        _number("weight", 6),
        _number("tokens", 7, from_width=104),
    ),
    rows.project_rows,
    "A token for one agent sees no projects.",
)
LANES = PaneKind(
    "Lanes",
    Topic.LANES,
    (
        _text("agent", 14),
        _text("project", 12),
        _number("queued", 6),
        _number("ready", 5),
        _number("flight", 6),
        _time("oldest"),
        _number("load", 5),
        _text("", 5, ColumnKind.BAR),
    ),
    rows.lane_rows,
    "No lane has work. Submit a task: headgate submit hello --agent demo",
)
RUNNING = PaneKind(
    "Running",
    Topic.RUNNING,
    (
        _text("task", 11, ColumnKind.ID),
        _time("time"),
        _number("try", 4),
        _text("agent", 12),
        _text("project", 10),
        _text("target", 9),
        _text("action", 10),
        _text("progress", 12, from_width=94),
    ),
    rows.running_rows,
    "Nothing runs.",
)
WAITING = PaneKind(
    "Waiting",
    Topic.WAITING,
    (
        _text("task", 9, ColumnKind.ID),
        _time("waits"),
        _text("agent", 8, ColumnKind.NAME),
        _text("project", 7),
        _text("reason", 30, ColumnKind.REASON),
    ),
    rows.waiting_rows,
    "Nothing waits.",
)
BUDGETS = PaneKind(
    "Budgets",
    Topic.BUDGETS,
    (
        _text("scope", 18),
        _text("used", 6, ColumnKind.BAR),
        _number("spent", 8),
        _text("limit", 9, ColumnKind.REASON),
        _time("ends"),
        _time("room in"),
        _number("tokens", 7, from_width=94),
        _number("overrun", 8, from_width=104),
        _number("an hour", 8, from_width=114),
    ),
    rows.budget_rows,
    "Nothing was booked yet.",
)
SLOTS = PaneKind(
    "Slots",
    Topic.SLOTS,
    (
        _text("slot", 10),
        _text("state", 9),
        _text("quota", 6, ColumnKind.BAR),
        _number("used", 5),
        _time("resets"),
        _time("wake"),
        _text("woken", 15, from_width=102),
        _number("errors", 6, from_width=90),
        _text("reason", 13, ColumnKind.REASON),
    ),
    rows.slot_rows,
    "No slot is configured; headgate config explain slots says how.",
)

CALLS = PaneKind(
    "Calls",
    Topic.CALLS,
    (
        _text("upstream", 10),
        _number("waiting", 7),
        _number("running", 7),
        _time("longest"),
        _text("project", 8),
        _text("model", 8, from_width=90),
        _text("reason", 20, ColumnKind.REASON),
    ),
    rows.call_rows,
    "No call waits or runs; set ANTHROPIC_BASE_URL or OPENAI_BASE_URL of a client to this service.",
)

PANES = (PROJECTS, LANES, RUNNING, WAITING, BUDGETS, SLOTS, CALLS)


def amount(kind: PaneKind, service: ServiceState) -> str:
    """Return how much there is of what a pane shows, as far as that is known; else nothing."""
    if kind is RUNNING and service.stats is not None:
        return str(service.stats.queue.total_inflight)
    if kind is WAITING and service.stats is not None:
        return str(service.stats.queue.total_queued)
    if kind is CALLS and service.calls:
        return str(sum(one.waiting + one.running for one in service.calls))
    return ""


def note(kind: PaneKind, service: ServiceState, *, wanted: str, found: ArrangedRows) -> str:
    """Return what is said instead of rows, or under them; empty where rows say enough."""
    problem, number = service.problems.get(kind.topic), len(found.rows)
    if problem:
        return f"{'Not up to date' if number else 'Not shown'}: {drawable(problem)}."
    if answer_of(kind, service) is None:
        return "Asking…"
    page = {Topic.RUNNING: service.running, Topic.WAITING: service.waiting}.get(kind.topic)
    if page is not None and page.next_cursor is not None:
        return f"The oldest {len(page.tasks)} are shown; / finds others."
    if found.total > number:
        return f"The first {number} of {count(found.total)} are shown; / finds others."
    if number:
        return ""
    return f"Nothing here contains “{drawable(wanted)}”." if wanted else kind.empty


def answer_of(kind: PaneKind, service: ServiceState) -> object:
    """Return the last answer of a pane's topic."""
    answers: dict[Topic, object] = {
        Topic.PROJECTS: service.projects,
        Topic.LANES: service.lanes,
        Topic.RUNNING: service.running,
        Topic.WAITING: service.waiting,
        Topic.BUDGETS: service.budgets,
        Topic.SLOTS: service.slots,
        Topic.CALLS: service.calls,
    }
    return answers[kind.topic]


# One pane: a table with a cursor that stays on its row while numbers and order change.
#
# Rule: it draws what it is given and asks nobody; how many rows fit is its own affair.

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
