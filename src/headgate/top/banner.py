"""The lines above and below the panes, as parts with their styles: what runs, and how it is known.

Rule: nothing is said by colour alone.
"""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from headgate.core.printable import printable
from headgate.dashboard.formats import count, duration
from headgate.http_bodies import StatsBody
from headgate.top.panes import PANES, amount
from headgate.top.picture import Link, Picture
from headgate.top.rota import Topic
from headgate.top.tables import shortened

KEYS = "/ filter  c cancel  p pause  w why  Enter more  s sort  ? help  q quit"

_LINKS = {
    Link.LIVE: ("live", "green"),
    Link.POLLING: ("polling", "cyan"),
    Link.LOST: ("CONNECTION LOST", "bold red"),
}
_GAP = ("  ", "")

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
        strip = Strip(Segment(text, Style.parse(style)) for text, style in self._parts)
        return strip.crop(0, width).extend_cell_length(width)


def place_parts(url: str, picture: Picture, *, width: int) -> list[Part]:
    """Return the first line: which service, and how the connection to it is."""
    word, style = _LINKS[picture.link]
    name = shortened(f"headgate {printable(url)}", width - len(word) - 2)
    return [(name, "bold"), _GAP, (word, style)]


def total_parts(picture: Picture, *, width: int) -> list[Part]:
    """Return the second line: the totals, or what is wrong."""
    problem = picture.problems.get(Topic.STATS, "")
    if problem:
        return [(shortened(printable(problem), width), "red")]
    if picture.stats is None:
        return [("Asking…", "")]
    style = "dim" if picture.link is Link.LOST else ""
    parts: list[Part] = [("PAUSED", "bold yellow reverse"), _GAP] if picture.stats.paused else []
    for text in _totals(picture.stats, picture):
        parts += [(text, style), _GAP]
    return parts


def _totals(stats: StatsBody, picture: Picture) -> list[str]:
    queue, limits = stats.queue, stats.config
    rates = picture.throughput.per_minute()
    done, failed = ("-", "-") if rates is None else (count(rates[0]), count(rates[1]))
    return [
        f"queued {_of(queue.total_queued, limits.max_queue_size)}",
        f"in flight {_of(queue.total_inflight, limits.max_inflight)}",
        f"done {done}/min",
        f"failed {failed}/min",
        f"mean wait {duration(stats.metrics.avg_dispatch_latency_ms / 1000)}",
    ]


def _of(number: int, limit: int | None) -> str:
    return count(number) if limit is None else f"{count(number)} of {count(limit)}"


def tab_parts(picture: Picture, current: int, *, width: int) -> list[Part]:
    """Return the names of the panes, the one that keys go to between brackets."""
    parts: list[Part] = []
    for index, kind in enumerate(PANES):
        number = amount(kind, picture)
        name = f"{index + 1} {kind.name}{f' {number}' if number else ''}"
        parts.append((f"[{name}]", "bold") if index == current else (f" {name} ", ""))
    spare = width - sum(cell_len(text) for text, _ in parts)
    return parts if spare >= 0 else [(text.replace("  ", " "), style) for text, style in parts]


def said_parts(said: str, picture: Picture, *, is_problem: bool, wanted: str) -> list[Part]:
    """Return what was said last, or what is wrong, or what is looked for."""
    if said:
        return [(printable(said), "bold red" if is_problem else "bold")]
    if picture.link is Link.LOST:
        return [(f"Trying again: {printable(picture.link_problem)}", "red")]
    return [(f"Only what contains “{wanted}”; / and Enter shows all again.", "")] if wanted else []
