"""Rows of each pane, made from the last answers: the same figures that the dashboard shows.

Every function takes the picture and the time, and returns plain rows, so that what is on a screen
can be tested without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from headgate.admin_bodies import ProjectBody
from headgate.core.figure_texts import count, dollars, duration, percent, seconds_of
from headgate.core.tasks import TaskStatus
from headgate.figure_bodies import LaneBody
from headgate.http_bodies import BudgetStatusBody, WhyBody
from headgate.slot_bodies import SlotBody
from headgate.top.bars import Bar
from headgate.top.picture import Picture, ShownTask
from headgate.top.tables import Cell, Row, bar_cell, number_cell, text_cell

MAX_ROWS = 200
MAX_DEPTH = 16
NOT_ASKED = "…"
ANY_AGENT = "(any)"

_GOOD, _CAREFUL, _BAD, _FAINT = "green", "yellow", "red", "dim"
_STANDINGS = {"active": "", "paused": _CAREFUL, "draining": _CAREFUL, "archived": _FAINT}
_SLOT_STATES = {"open": _GOOD, "exhausted": _BAD, "paused": _CAREFUL, "disabled": _BAD}
_NEARLY, _FULL = 0.8, 1.0
_UNKNOWN = Cell(text="-", order=-1.0)


def project_rows(picture: Picture, _: float) -> list[Row]:
    """Return the projects: the share that each had beside the one it should have, and its work."""
    projects = [] if picture.projects is None else picture.projects.projects
    return [_project(one) for one in projects[:MAX_ROWS]]


def _project(project: ProjectBody) -> Row:
    had, target = project.actual_share, project.target_share
    cells = (
        text_cell(project.id),
        text_cell(project.status, _STANDINGS[project.status]),
        _UNKNOWN if had is None else bar_cell(Bar(used=had, mark=target), "cyan"),
        _share(had),
        _share(target),
        _number(project.queued),
        _number(project.inflight),
        number_cell(f"{project.credit_weight:g}", project.credit_weight),
    )
    return Row(key=project.id, cells=cells)


def _share(share: float | None) -> Cell:
    return _UNKNOWN if share is None else number_cell(percent(share), share)


def lane_rows(picture: Picture, _: float) -> list[Row]:
    """Return the lanes that have work, the longest wait first."""
    lanes = [] if picture.lanes is None else picture.lanes.lanes
    most = max((one.load or 0.0 for one in lanes), default=0.0)
    return [_lane(one, most) for one in lanes[:MAX_ROWS]]


def _lane(lane: LaneBody, most: float) -> Row:
    wait, load = lane.oldest_wait_seconds, lane.load
    cells = (
        text_cell(lane.agent_id or ANY_AGENT),
        text_cell(lane.project_id),
        _number(lane.queued),
        _UNKNOWN if lane.ready is None else _number(lane.ready),
        _number(lane.inflight),
        _UNKNOWN if wait is None else _since(wait),
        _UNKNOWN if load is None else number_cell(f"{load:.2f}", load),
        _UNKNOWN if load is None else bar_cell(Bar(used=load / most if most else 0.0), "cyan"),
    )
    return Row(key=f"{lane.project_id}/{lane.agent_id}", cells=cells)


def running_rows(picture: Picture, now: float) -> list[Row]:
    """Return the tasks in flight, those that run longest first."""
    tasks = () if picture.running is None else picture.running.tasks
    return [_running(one, now) for one in sorted(tasks, key=_began)]


def _began(task: ShownTask) -> datetime:
    return task.started_at or task.created_at


def _running(task: ShownTask, now: float) -> Row:
    # One that is assigned was given to a node, and has not begun.
    has_begun = task.state is TaskStatus.RUNNING and task.started_at is not None
    ran = now - seconds_of(_began(task)) if has_begun else 0.0
    cells = (
        text_cell(task.task_id),
        _since(ran) if has_begun else text_cell("assigned", _FAINT),
        number_cell(_attempt(task), task.attempt),
        text_cell(task.agent_id or ANY_AGENT),
        text_cell(task.project_id),
        text_cell(task.target or "(default)"),
        text_cell(task.action),
    )
    return Row(key=task.task_id, cells=cells)


def _attempt(task: ShownTask) -> str:
    # Only failures count against the most: one that was taken back from a dead node begins again.
    is_counted = task.attempt <= task.max_attempts
    return f"{task.attempt}/{task.max_attempts}" if is_counted else str(task.attempt)


def waiting_rows(picture: Picture, now: float) -> list[Row]:
    """Return the tasks that wait, the oldest of them first, with the reason where it was asked."""
    tasks = () if picture.waiting is None else picture.waiting.tasks
    oldest_first = sorted(tasks, key=lambda one: one.created_at)
    return [_waiting(one, picture.reasons.get(one.task_id), now) for one in oldest_first]


def _waiting(task: ShownTask, why: WhyBody | str | None, now: float) -> Row:
    cells = (
        text_cell(task.task_id),
        _since(now - seconds_of(task.created_at)),
        text_cell(task.agent_id or ANY_AGENT),
        text_cell(task.project_id),
        _reason(why),
    )
    return Row(key=task.task_id, cells=cells)


def _reason(why: WhyBody | str | None) -> Cell:
    if why is None:
        return text_cell(NOT_ASKED, _FAINT)
    if isinstance(why, str):
        return text_cell(why, _FAINT)
    if not why.reasons:
        return text_cell("starts now" if why.state is TaskStatus.QUEUED else why.state.value)
    more = f" +{len(why.reasons) - 1}" if len(why.reasons) > 1 else ""
    return text_cell(f"{why.reasons[0].message}{more}")


def budget_rows(picture: Picture, now: float) -> list[Row]:
    """Return the scopes with what each has used of its limit, children under their parents."""
    if picture.budgets is None:
        return []
    rows = []
    for depth, status in _tree(picture.budgets, 0):
        rows.append(_budget(status, depth, now))
        if len(rows) == MAX_ROWS:
            break
    return rows


def _tree(status: BudgetStatusBody, depth: int) -> Iterator[tuple[int, BudgetStatusBody]]:
    yield depth, status
    if depth < MAX_DEPTH:
        for child in status.children:
            yield from _tree(child, depth + 1)


def _budget(status: BudgetStatusBody, depth: int, now: float) -> Row:
    spent = float(status.spent_usd) + float(status.overrun_usd)
    bar = _fullest(status)
    limit = "no limit" if bar is None else _limit(status)
    tokens = status.spent_tokens + status.overrun_tokens
    cells = (
        Cell(text=f"{'  ' * depth}{text_cell(_last_part(status.scope)).text}", order=status.scope),
        _UNKNOWN if bar is None else bar_cell(bar, _bar_style(bar)),
        number_cell(dollars(str(spent)), spent),
        number_cell(count(tokens), tokens),
        text_cell(limit),
        _until(status.resets_at, now),
    )
    return Row(key=status.scope, cells=cells)


def _last_part(scope: str) -> str:
    return scope.rpartition("/")[2] or "(all)"


def _fullest(status: BudgetStatusBody) -> Bar | None:
    """Return the bar of dollars or of tokens, whichever is nearer to its limit; None without."""
    bars = []
    if status.limit_usd is not None:
        used = float(status.spent_usd) + float(status.overrun_usd)
        bars.append(_part(used, float(status.reserved_usd), float(status.limit_usd)))
    if status.limit_tokens is not None:
        used = status.spent_tokens + status.overrun_tokens
        bars.append(_part(used, status.reserved_tokens, status.limit_tokens))
    return max(bars, key=lambda bar: bar.used + bar.held, default=None)


def _part(used: float, held: float, limit: float) -> Bar:
    return Bar(used=used / limit, held=held / limit) if limit > 0 else Bar(used=1.0)


def _limit(status: BudgetStatusBody) -> str:
    money = "" if status.limit_usd is None else dollars(status.limit_usd)
    tokens = "" if status.limit_tokens is None else f"{count(status.limit_tokens)} tokens"
    return ", ".join(one for one in (money, tokens) if one) + _window(status.window)


def _window(window: str) -> str:
    """Return for how long a limit is: `day@Europe/Berlin` is a day."""
    if window == "none":
        return ""
    kind, _, hours = window.partition(":")
    return f"/{hours or kind.partition('@')[0]}"


def _bar_style(bar: Bar) -> str:
    whole = bar.used + bar.held
    if whole >= _FULL:
        return _BAD
    return _CAREFUL if whole >= _NEARLY else _GOOD


def slot_rows(picture: Picture, now: float) -> list[Row]:
    """Return the slots: how much of each quota is used, its reset, and what holds its tasks."""
    slots = [] if picture.slots is None else picture.slots.slots
    return [_slot(one, now) for one in slots[:MAX_ROWS]]


def _slot(slot: SlotBody, now: float) -> Row:
    used = slot.percent_used
    bar = None if used is None else Bar(used=used / 100)
    wake = slot.next_wake
    cells = (
        text_cell(slot.name),
        text_cell(slot.state, _SLOT_STATES.get(slot.state, "")),
        _UNKNOWN if bar is None else bar_cell(bar, _bar_style(bar)),
        _UNKNOWN if used is None else number_cell(percent(used / 100), used),
        _until(slot.resets_at, now),
        _until(None if wake is None else wake.at, now),
        text_cell(slot.hold or slot.disabled_reason or slot.last_error, _CAREFUL),
    )
    return Row(key=slot.name, cells=cells)


def _number(number: int, style: str = "") -> Cell:
    return number_cell(count(number), number, style)


def _since(seconds: float) -> Cell:
    seconds = max(0.0, seconds)
    return number_cell(duration(seconds), seconds)


def _until(moment: datetime | None, now: float) -> Cell:
    if moment is None:
        return Cell(text="-", order=float("inf"))
    away = seconds_of(moment) - now
    return number_cell(duration(away) if away > 0 else "now", away)
