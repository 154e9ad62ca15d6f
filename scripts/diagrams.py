"""Mermaid diagrams of the documentation as SVG, drawn without a browser and without a network.

Only what the pages use is read: flowcharts and state diagrams, with labels and groups. Rule: a line
that is not understood is an error, so that no diagram loses an arrow in silence.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

CHARACTER, LINE, PADDING = 7.2, 18, 12
RANK_GAP, LABEL_GAP, NODE_GAP, MARGIN = 60, 104, 36, 20
MOST_SWEEPS = 8

_NAME = r"\w+|\[\*\]"
_SHAPE = r"\[\(\"(?P<store>[^\"]*)\"\)\]|\[\"(?P<box>[^\"]*)\"\]"
_NODE = re.compile(rf"\s*(?P<name>{_NAME})(?:{_SHAPE})?\s*")
_EDGE = re.compile(
    r"(?:--\s*\"(?P<text>[^\"]*)\"\s*-->|-\.\s*\"(?P<dotted>[^\"]*)\"\s*\.->|-->|(?P<bare>-\.->))"
)
_GROUP = re.compile(r"subgraph \w+\[\"(?P<title>[^\"]*)\"\]")
_STATE = re.compile(rf"(?P<start>{_NAME}) --> (?P<end>{_NAME})(?:: (?P<text>.+))?")


class Edge(NamedTuple):
    """An arrow."""

    start: str
    end: str
    text: str = ""
    is_dotted: bool = False


class Diagram(NamedTuple):
    """What a diagram says: its nodes in the order in which they came, and its arrows."""

    is_horizontal: bool
    nodes: dict[str, str]
    edges: list[Edge]
    groups: dict[str, list[str]]


def parse(text: str) -> Diagram:
    """Read a diagram, or raise `ValueError` with the line that is not understood."""
    first, *lines = [line.strip() for line in text.strip().split("\n")]
    nodes: dict[str, str] = {}
    edges: list[Edge] = []
    groups: dict[str, list[str]] = {}
    group = ""
    for line in filter(None, lines):
        if found := _GROUP.fullmatch(line):
            group = found["title"]
            groups[group] = []
        elif line == "end":
            group = ""
        else:
            before = set(nodes)
            read = _state_line if first.startswith("stateDiagram") else _flow_line
            edges += read(line, nodes)
            if group:
                groups[group] += [name for name in nodes if name not in before]
    return Diagram(first.endswith("LR"), nodes, edges, groups)


def _state_line(line: str, nodes: dict[str, str]) -> list[Edge]:
    found = _STATE.fullmatch(line)
    if found is None:
        message = f"this line of a diagram is not understood: {line}"
        raise ValueError(message)
    # What every end leads to says nothing more than that it is an end.
    if found["end"] == "[*]":
        return []
    start = "start" if found["start"] == "[*]" else found["start"]
    for name in (start, found["end"]):
        nodes.setdefault(name, name)
    return [Edge(start, found["end"], found["text"] or "")]


def _flow_line(line: str, nodes: dict[str, str]) -> list[Edge]:
    edges: list[Edge] = []
    place = 0
    previous, arrow = "", Edge("", "")
    while place < len(line):
        node = _NODE.match(line, place)
        if node is None:
            message = f"this line of a diagram is not understood: {line}"
            raise ValueError(message)
        name = node["name"]
        label = node["box"] or node["store"]
        if label is not None or name not in nodes:
            nodes[name] = label or name
        if previous:
            edges.append(arrow._replace(start=previous, end=name))
        place = node.end()
        found = _EDGE.match(line, place)
        if found is None:
            if line[place:].strip():
                message = f"this line of a diagram is not understood: {line}"
                raise ValueError(message)
            return edges
        text = found["text"] or found["dotted"] or ""
        is_dotted = found["dotted"] is not None or found["bare"] is not None
        previous, arrow = name, Edge("", "", text, is_dotted)
        place = found.end()
    return edges


# The layout: nodes in ranks along the arrows, each rank ordered so that few arrows cross.


def _forward(diagram: Diagram) -> list[tuple[str, str]]:
    """Return the arrows without those that lead back to where their path came from."""
    next_of: defaultdict[str, list[str]] = defaultdict(list)
    for edge in diagram.edges:
        next_of[edge.start].append(edge.end)
    found: list[tuple[str, str]] = []
    done: set[str] = set()

    def visit(name: str, path: frozenset[str]) -> None:
        for end in next_of[name]:
            if end not in path and end != name:
                found.append((name, end))
                if end not in done:
                    visit(end, path | {end})
        done.add(name)

    for name in diagram.nodes:
        if name not in done:
            visit(name, frozenset({name}))
    return list(dict.fromkeys(found))


def _ranks(diagram: Diagram) -> list[list[str]]:
    forward = _forward(diagram)
    rank = dict.fromkeys(diagram.nodes, 0)
    for _ in diagram.nodes:
        for start, end in forward:
            rank[end] = max(rank[end], rank[start] + 1)
    rows: list[list[str]] = [[] for _ in range(max(rank.values()) + 1)]
    for name, at in rank.items():
        rows[at].append(name)
    near: defaultdict[str, list[str]] = defaultdict(list)
    for start, end in forward:
        near[start].append(end)
        near[end].append(start)
    for _ in range(MOST_SWEEPS):
        for row in rows:
            middle = {name: _middle(near[name], rows) for name in row}
            row.sort(key=lambda name: middle[name])
    return rows


def _middle(names: Iterable[str], rows: list[list[str]]) -> float:
    places = [(row.index(name) + 0.5) / len(row) for name in names for row in rows if name in row]
    return sum(places) / len(places) if places else 0.5


def _lines(text: str) -> list[str]:
    return text.replace("<br/>", "\n").split("\n")


def _size(text: str) -> tuple[float, float]:
    lines = _lines(text)
    width = max(len(line) for line in lines) * CHARACTER + 2 * PADDING
    return max(width, 48), len(lines) * LINE + PADDING


class Place(NamedTuple):
    """Where a node is drawn: its centre and its size."""

    x: float
    y: float
    width: float
    height: float

    def towards(self, other: Place) -> tuple[float, float]:
        """Return the point of the border on the way to the centre of another."""
        dx, dy = other.x - self.x, other.y - self.y
        if not dx and not dy:
            return self.x, self.y
        across = self.width / 2 / abs(dx) if dx else float("inf")
        down = self.height / 2 / abs(dy) if dy else float("inf")
        part = min(across, down)
        return self.x + dx * part, self.y + dy * part


def _places(diagram: Diagram) -> dict[str, Place]:
    sizes = {name: _size(label) for name, label in diagram.nodes.items()}
    rows = _ranks(diagram)
    # Along is the way of the arrows, across the order within a rank.
    along_of = 0 if diagram.is_horizontal else 1
    texts: defaultdict[int, float] = defaultdict(float)
    rank_of = {name: at for at, row in enumerate(rows) for name in row}
    for edge in diagram.edges:
        if diagram.is_horizontal and edge.text:
            at = min(rank_of[edge.start], rank_of[edge.end])
            texts[at] = max(texts[at], max(map(len, _wrapped(edge.text))) * CHARACTER)
    gaps: defaultdict[int, float] = defaultdict(lambda: RANK_GAP)
    room = {name: size[1 - along_of] for name, size in sizes.items()}
    for edge in diagram.edges:
        if not diagram.is_horizontal and edge.text and rank_of[edge.end] - rank_of[edge.start] == 1:
            label = max(map(len, _wrapped(edge.text))) * CHARACTER
            room[edge.end] = max(room[edge.end], label)
            gaps[rank_of[edge.start]] = LABEL_GAP
    widths = [sum(room[name] for name in row) + NODE_GAP * (len(row) - 1) for row in rows]
    found: dict[str, Place] = {}
    along = float(MARGIN)
    for at, row in enumerate(rows):
        thick = max(sizes[name][along_of] for name in row)
        across = MARGIN + (max(widths) - widths[at]) / 2
        for name in row:
            width, height = sizes[name]
            own = room[name]
            centre = (along + thick / 2, across + own / 2)
            x, y = centre if diagram.is_horizontal else centre[::-1]
            found[name] = Place(x, y, width, height)
            across += own + NODE_GAP
        along += thick + max(gaps[at], texts[at] + 2 * PADDING)
    return found


def _wrapped(text: str, most: int = 24) -> list[str]:
    lines = [""]
    for word in text.replace("<br/>", " ").split():
        if lines[-1] and len(lines[-1]) + len(word) >= most:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _text(x: float, y: float, lines: list[str], kind: str) -> str:
    top = y - (len(lines) - 1) * LINE / 2 + 4
    spans = "".join(
        f'<tspan x="{x:.0f}" y="{top + at * LINE:.0f}">{escape(line)}</tspan>'
        for at, line in enumerate(lines)
    )
    return f'<text class="{kind}">{spans}</text>'


def _label(x: float, y: float, lines: list[str]) -> str:
    width = max(map(len, lines)) * CHARACTER * 0.86
    height = len(lines) * LINE
    behind = (
        f'<rect class="behind" x="{x - width / 2:.0f}" y="{y - height / 2:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}"/>'
    )
    return behind + _text(x, y, lines, "label")


def _path(points: Sequence[tuple[float, float]], *, is_dotted: bool) -> str:
    kind = "arrow dotted" if is_dotted else "arrow"
    steps = " L".join(f"{x:.0f},{y:.0f}" for x, y in points)
    return f'<path class="{kind}" marker-end="url(#head)" d="M{steps}"/>'


def _straight(edge: Edge, places: dict[str, Place], part: float) -> tuple[str, str]:
    """Return an arrow to the next rank, and its label at this part of the way."""
    start, end = places[edge.start], places[edge.end]
    (x1, y1), (x2, y2) = start.towards(end), end.towards(start)
    drawn = _path([(x1, y1), (x2, y2)], is_dotted=edge.is_dotted)
    if not edge.text:
        return drawn, ""
    at = (x1 + (x2 - x1) * part, y1 + (y2 - y1) * part)
    return drawn, _label(*at, _wrapped(edge.text))


class Lanes:
    """The room beside all nodes, where arrows go that pass ranks or lead back."""

    def __init__(self, diagram: Diagram, places: dict[str, Place]) -> None:
        self._is_horizontal = diagram.is_horizontal
        self._places = places
        self._ports: defaultdict[str, int] = defaultdict(int)
        self.edge = max(
            one.y + one.height / 2 if diagram.is_horizontal else one.x + one.width / 2
            for one in places.values()
        )

    def _port(self, name: str) -> float:
        """Return how far from the middle of its side the next arrow of a node begins."""
        self._ports[name] += 1
        count = self._ports[name]
        return (count // 2) * (6 if count % 2 else -6)

    def route(self, edge: Edge) -> tuple[str, str]:
        """Return an arrow in a lane of its own, and its label on the lane."""
        start, end = self._places[edge.start], self._places[edge.end]
        lines = _wrapped(edge.text, 18) if edge.text else []
        width = max(map(len, lines), default=0) * CHARACTER * 0.86
        room = (len(lines) * LINE if self._is_horizontal else width) / 2 + PADDING
        lane = self.edge + room
        self.edge = lane + room - PADDING / 2
        one, two = self._port(edge.start), self._port(edge.end)
        if self._is_horizontal:
            x1, x2 = start.x + one, end.x + two
            points = [(x1, start.y), (x1, lane), (x2, lane), (x2, end.y + end.height / 2)]
            middle = ((x1 + x2) / 2, lane)
        else:
            y1, y2 = start.y + one, end.y + two
            points = [(start.x, y1), (lane, y1), (lane, y2), (end.x + end.width / 2, y2)]
            middle = (lane, (y1 + y2) / 2)
        drawn = _path(points, is_dotted=edge.is_dotted)
        return drawn, _label(*middle, lines) if lines else ""


_STYLE = """
text{font-family:system-ui,sans-serif;text-anchor:middle;fill:#1f2933}
.node{font-size:13px}.label{font-size:11px;fill:#52606d}
.box{fill:#eef4fb;stroke:#3b6ea5}.inner{stroke-dasharray:5 3}
.arrow{fill:none;stroke:#52606d;stroke-width:1.3}.dotted{stroke-dasharray:4 4}
.behind{fill:#fff}.paper{fill:#fff}
""".replace("\n", "")


def svg(text: str) -> str:
    """Return a diagram as an SVG."""
    diagram = parse(text)
    places = _places(diagram)
    rows = _ranks(diagram)
    rank_of = {name: at for at, row in enumerate(rows) for name in row}
    lanes = Lanes(diagram, places)
    arrows: list[str] = []
    labels: list[str] = []
    for edge in diagram.edges:
        if rank_of[edge.end] - rank_of[edge.start] == 1:
            # Arrows to neighbours have their labels at different parts of the way.
            neighbour = rows[rank_of[edge.end]].index(edge.end)
            drawn, label = _straight(edge, places, 0.45 + 0.3 * (neighbour % 2))
        else:
            drawn, label = lanes.route(edge)
        arrows.append(drawn)
        labels.append(label)
    grouped = {name for names in diagram.groups.values() for name in names}
    boxes: list[str] = []
    for name, place in places.items():
        kind = "box inner" if name in grouped else "box"
        boxes.append(
            f'<rect class="{kind}" rx="6" x="{place.x - place.width / 2:.0f}" '
            f'y="{place.y - place.height / 2:.0f}" width="{place.width:.0f}" '
            f'height="{place.height:.0f}"/>'
        )
        boxes.append(_text(place.x, place.y, _lines(diagram.nodes[name]), "node"))
    width = max(one.x + one.width / 2 for one in places.values()) + MARGIN
    height = max(one.y + one.height / 2 for one in places.values()) + MARGIN
    if diagram.is_horizontal:
        height = max(height, lanes.edge + MARGIN)
    else:
        width = max(width, lanes.edge + MARGIN)
    for title in diagram.groups:
        words = [f"dashed: {title}"]
        labels.append(_text(MARGIN + len(words[0]) * CHARACTER / 2, height, words, "label"))
        height += LINE
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#52606d"/></marker>'
    )
    said = "; ".join(f"{edge.start} to {edge.end}" for edge in diagram.edges)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} '
        f'{height:.0f}" width="{width:.0f}"><title>{escape(said)}</title>'
        f"<style>{_STYLE}</style><defs>{head}</defs>"
        f'<rect class="paper" width="100%" height="100%"/>'
        f"{''.join(arrows)}{''.join(boxes)}{''.join(labels)}</svg>"
    )
