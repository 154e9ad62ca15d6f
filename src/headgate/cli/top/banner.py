"""The lines above and below the panes, as parts with their styles: what runs, and how it is known.

Rule: nothing is said by colour alone, and a line that has not room enough shows that it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from headgate.api.schema.tasks import LimitsBody, StatsBody
from headgate.cli.top.panes import PANES, amount
from headgate.cli.top.rows import left_text, limit_text, spent_text
from headgate.cli.top.service_state import ConnectionState, ServiceState, Topic
from headgate.cli.top.tables import ELLIPSIS, GAP, drawable, shortened
from headgate.core.text import count, duration

KEYS = ("/ filter", "c cancel", "p pause", "w why", "Enter more", "s sort")
LAST_KEYS = ("? help", "q quit")
MAX_WANTED_SHOWN = 24

_CONTACTS = {
    ConnectionState.LIVE: ("live", "green"),
    ConnectionState.POLLING: ("polling", "cyan"),
    ConnectionState.LOST: ("CONNECTION LOST", "bold red"),
    ConnectionState.REFUSED: ("REFUSED", "bold red"),
}
_GAP = (GAP, "")
_NO_LIMITS = LimitsBody(max_queue_size=None, max_inflight=None)

Part = tuple[str, str]


class Line(Widget):
    """One line of parts, each with a style."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - the name that textual has for it
        super().__init__(id=id)
        self._parts: list[Part] = []

    def show(self, parts: list[Part]) -> None:
        """Draw other parts."""
        if parts != self._parts:
            self._parts = parts
            self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return the line."""
        width = self.size.width
        if y:
            return Strip.blank(width)
        parts = cut(self._parts, width)
        strip = Strip(Segment(text, Style.parse(style)) for text, style in parts)
        return strip.adjust_cell_length(width)


def cut(parts: list[Part], width: int) -> list[Part]:
    """Return as much of a line as there is room for, with a sign where it was cut."""
    if cell_len("".join(text for text, _ in parts).rstrip()) <= width:
        return parts
    room, kept = width - 1, list[Part]()
    for text, style in parts:
        kept.append((set_cell_size(text, min(room, cell_len(text))), style))
        room -= cell_len(kept[-1][0])
    return [*((text, style) for text, style in kept if text), (ELLIPSIS, "")] if width > 0 else []


def address_parts(url: str, service: ServiceState, *, width: int) -> list[Part]:
    """Return the first line: which service, and how the connection to it is."""
    word, style = _CONTACTS[service.contact]
    name = shortened(f"headgate {drawable(url)}", width - len(word) - 2)
    return [(name, "bold"), _GAP, (word, style)]


def total_parts(service: ServiceState, *, width: int) -> list[Part]:
    """Return the second line: the totals, or what is wrong."""
    problem = service.problems.get(Topic.STATS, "")
    if problem:
        return [(drawable(problem), "red")]
    stats = service.stats
    if stats is None:
        return [("Asking…", "")]
    style = "dim" if service.is_past else ""
    parts: list[Part] = [("PAUSED", "bold yellow reverse"), _GAP] if stats.paused else []
    room = width - sum(len(text) for text, _ in parts)
    whole = _totals(stats, service, has_limits=True)
    bare = _totals(stats, service, has_limits=False)
    lines = (_joined(texts, room) for texts in (whole, whole[:-1], bare))
    return [*parts, (next(filter(None, lines), "") or _fitting(bare, room), style)]


def _totals(stats: StatsBody, service: ServiceState, *, has_limits: bool) -> list[str]:
    """Return the totals, in the order in which they are worth their room."""
    queue = stats.queue
    limits = stats.config if has_limits else _NO_LIMITS
    rates = service.throughput.per_minute()
    done, failed = ("-", "-") if rates is None else (count(rates[0]), count(rates[1]))
    return [
        f"queued {_of(queue.total_queued, limits.max_queue_size)}",
        f"in flight {_of(queue.total_inflight, limits.max_inflight)}",
        f"done {done}/min",
        f"failed {failed}/min",
        *_money(service, has_limits=has_limits),
        f"wait {_wait(stats)}",
    ]


def _wait(stats: StatsBody) -> str:
    waited_seconds = None if stats.recent is None else stats.recent.average_wait_seconds
    return "-" if waited_seconds is None else duration(waited_seconds)


def _money(service: ServiceState, *, has_limits: bool) -> list[str]:
    status = service.budgets
    if status is None:
        return []
    spent, left = f"spent {spent_text(status)}", left_text(status)
    if not left:
        return [spent]
    return [spent, f"left {left} of {limit_text(status)}" if has_limits else f"left {left}"]


def _of(number: int, limit: int | None) -> str:
    return count(number) if limit is None else f"{count(number)} of {count(limit)}"


def _joined(texts: Sequence[str], width: int) -> str:
    """Return texts beside each other; nothing if there is no room for all of them."""
    line = GAP.join(texts)
    return line if cell_len(line) <= width else ""


def _fitting(texts: Sequence[str], width: int, last: Sequence[str] = ()) -> str:
    """Return as many of the texts as there is room for, before those that are told anyway."""
    for number in range(len(texts), 0, -1):
        line = _joined((*texts[:number], *last), width)
        if line:
            return line
    return GAP.join(last)


def key_parts(width: int) -> list[Part]:
    """Return the last line: the keys, of which two are told in any width."""
    return [(_fitting(KEYS, width, LAST_KEYS), "")]


def tab_parts(service: ServiceState, current: int, *, width: int) -> list[Part]:
    """Return the names of the panes, the one that keys go to between brackets.

    Where there is no room for all of them, the others have their numbers alone.
    """
    tabs = [_tab(service, place, is_current=place == current) for place in range(len(PANES))]
    parts = [part for tab in tabs for part in tab]
    if cell_len("".join(text for text, _ in parts).rstrip()) <= width:
        return parts
    numbers = [(f" {place} ", "") for place in range(1, len(PANES) + 1)]
    return [*numbers[:current], *tabs[current], *numbers[current + 1 :]]


def _tab(service: ServiceState, place: int, *, is_current: bool) -> list[Part]:
    kind = PANES[place]
    begin, end, style = ("[", "]", "bold") if is_current else (" ", " ", "")
    number = amount(kind, service)
    if not number:
        return [(f"{begin}{place + 1} {kind.name}{end}", style)]
    faint = f"{style} dim".strip() if service.is_past else style
    return [(f"{begin}{place + 1} {kind.name} ", style), (number, faint), (end, style)]


def message_parts(said: str, service: ServiceState, *, is_problem: bool, wanted: str) -> list[Part]:
    """Return what is looked for, and beside it what was said last, or what is wrong."""
    parts: list[Part] = []
    if said:
        parts = [(drawable(said), "bold red" if is_problem else "bold")]
    elif service.contact is ConnectionState.LOST:
        parts = [(f"Trying again: {drawable(service.contact_problem)}.", "red")]
    if not wanted:
        return parts
    text = wanted if len(wanted) <= MAX_WANTED_SHOWN else f"{wanted[:MAX_WANTED_SHOWN]}{ELLIPSIS}"
    only = f"Only what contains “{drawable(text)}”"
    return [(f"{only}.", ""), _GAP, *parts] if parts else [(f"{only}; / changes that.", "")]
