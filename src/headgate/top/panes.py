"""The six panes: what each is called, its columns, its rows, and what it says when it has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headgate.core.texts.figures import count
from headgate.top import budget_figures, figures
from headgate.top.arranging import Arranged
from headgate.top.cells import TIME_WIDTH
from headgate.top.drawable import drawable
from headgate.top.picture import Picture
from headgate.top.rota import Topic
from headgate.top.tables import Column, Holds, Row

MakeRows = Callable[[Picture, float], Sequence[Row]]


class PaneKind(NamedTuple):
    """One pane; `empty` is said when there is nothing to show."""

    name: str
    topic: Topic
    columns: tuple[Column, ...]
    rows: MakeRows
    empty: str


def _text(title: str, least: int, holds: Holds = Holds.TEXT, *, from_width: int = 0) -> Column:
    return Column(title=title, least=least, holds=holds, from_width=from_width)


def _figure(title: str, least: int, *, from_width: int = 0) -> Column:
    return _text(title, least, Holds.FIGURE, from_width=from_width)


def _time(title: str) -> Column:
    return _figure(title, TIME_WIDTH)


PROJECTS = PaneKind(
    "Projects",
    Topic.PROJECTS,
    (
        _text("project", 14),
        _text("status", 8),
        _text("had │ target", 12, Holds.BAR),
        _figure("had", 5),
        _figure("target", 6),
        _figure("owed", 7, from_width=88),
        _figure("queued", 6),
        _figure("flight", 6),
        _figure("cap", 4, from_width=94),
        _figure("weight", 6),
        _figure("tokens", 7, from_width=104),
    ),
    figures.project_rows,
    "A token for one agent sees no projects.",
)
LANES = PaneKind(
    "Lanes",
    Topic.LANES,
    (
        _text("agent", 14),
        _text("project", 12),
        _figure("queued", 6),
        _figure("ready", 5),
        _figure("flight", 6),
        _time("oldest"),
        _figure("load", 5),
        _text("", 5, Holds.BAR),
    ),
    figures.lane_rows,
    "No lane has work. Submit a task: headgate submit hello --agent demo",
)
RUNNING = PaneKind(
    "Running",
    Topic.RUNNING,
    (
        _text("task", 11, Holds.ID),
        _time("time"),
        _figure("try", 4),
        _text("agent", 12),
        _text("project", 10),
        _text("target", 9),
        _text("action", 10),
    ),
    figures.running_rows,
    "Nothing runs.",
)
WAITING = PaneKind(
    "Waiting",
    Topic.WAITING,
    (
        _text("task", 9, Holds.ID),
        _time("waits"),
        _text("agent", 8, Holds.NAME),
        _text("project", 7),
        _text("reason", 30, Holds.REASON),
    ),
    figures.waiting_rows,
    "Nothing waits.",
)
BUDGETS = PaneKind(
    "Budgets",
    Topic.BUDGETS,
    (
        _text("scope", 18),
        _text("used", 6, Holds.BAR),
        _figure("spent", 8),
        _text("limit", 9, Holds.REASON),
        _time("ends"),
        _time("room in"),
        _figure("tokens", 7, from_width=94),
        _figure("overrun", 8, from_width=104),
        _figure("an hour", 8, from_width=114),
    ),
    budget_figures.budget_rows,
    "Nothing was booked yet.",
)
SLOTS = PaneKind(
    "Slots",
    Topic.SLOTS,
    (
        _text("slot", 10),
        _text("state", 9),
        _text("quota", 6, Holds.BAR),
        _figure("used", 5),
        _time("resets"),
        _time("wake"),
        _text("woken", 15, from_width=102),
        _figure("errors", 6, from_width=90),
        _text("held because", 13, Holds.REASON),
    ),
    figures.slot_rows,
    "No slot is configured; docs/how-to/key-slots.md says how.",
)

PANES = (PROJECTS, LANES, RUNNING, WAITING, BUDGETS, SLOTS)


def amount(kind: PaneKind, picture: Picture) -> str:
    """Return how much there is of what a pane shows, as far as that is known; else nothing."""
    if kind is RUNNING and picture.stats is not None:
        return str(picture.stats.queue.total_inflight)
    if kind is WAITING and picture.stats is not None:
        return str(picture.stats.queue.total_queued)
    return ""


def note(kind: PaneKind, picture: Picture, *, wanted: str, found: Arranged) -> str:
    """Return what is said instead of rows, or under them; empty where rows say enough."""
    problem, number = picture.problems.get(kind.topic), len(found.rows)
    if problem:
        return f"{'Not up to date' if number else 'Not shown'}: {drawable(problem)}."
    if answer_of(kind, picture) is None:
        return "Asking…"
    page = {Topic.RUNNING: picture.running, Topic.WAITING: picture.waiting}.get(kind.topic)
    if page is not None and page.next_cursor is not None:
        return f"The oldest {len(page.tasks)} are shown; / finds others."
    if found.total > number:
        return f"The first {number} of {count(found.total)} are shown; / finds others."
    if number:
        return ""
    return f"Nothing here contains “{drawable(wanted)}”." if wanted else kind.empty


def answer_of(kind: PaneKind, picture: Picture) -> object:
    """Return the last answer of a pane's topic."""
    answers: dict[Topic, object] = {
        Topic.PROJECTS: picture.projects,
        Topic.LANES: picture.lanes,
        Topic.RUNNING: picture.running,
        Topic.WAITING: picture.waiting,
        Topic.BUDGETS: picture.budgets,
        Topic.SLOTS: picture.slots,
    }
    return answers[kind.topic]
