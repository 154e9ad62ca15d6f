"""Rows of each pane, made from the last answers: the same figures that the dashboard shows.

Every function takes the picture and the time, and returns plain rows, so that what is on a screen
can be tested without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from headgate.bodies.admin import ProjectBody
from headgate.bodies.figures import LaneBody
from headgate.bodies.slots import SlotBody
from headgate.bodies.tasks import WhyBody
from headgate.core.key_slots.wake_words import ENDED, mode_words
from headgate.core.tasks.task import TaskStatus
from headgate.core.texts.figures import seconds_of
from headgate.top.arranging import Rows
from headgate.top.bars import Bar
from headgate.top.cells import (
    BAD,
    CAREFUL,
    FAINT,
    GOOD,
    UNKNOWN,
    count_cell,
    limited_cell,
    share_cell,
    since_cell,
    until_cell,
)
from headgate.top.picture import Picture, ShownTask
from headgate.top.tables import Cell, Row, bar_cell, number_cell, text_cell

NOT_ASKED = "…"
ANY_AGENT = "(any)"

_STANDINGS = {"active": "", "paused": CAREFUL, "draining": CAREFUL, "archived": FAINT}
_SLOT_STATES = {"open": GOOD, "exhausted": BAD, "paused": CAREFUL, "disabled": BAD}


def project_rows(picture: Picture, _: float) -> Sequence[Row]:
    """Return the projects: the share that each had beside the one it should have, and its work."""
    projects = [] if picture.projects is None else picture.projects.projects
    return Rows(projects, _project)


def _project(project: ProjectBody) -> Row:
    had, target = project.actual_share, project.target_share
    cells = (
        text_cell(project.id),
        text_cell(project.status, _STANDINGS[project.status]),
        UNKNOWN if had is None else bar_cell(Bar(used=had, mark=target), "cyan"),
        share_cell(had),
        share_cell(target),
        share_cell(project.deficit),
        count_cell(project.queued),
        count_cell(project.inflight),
        count_cell(project.max_concurrent_agents),
        number_cell(f"{project.credit_weight:g}", project.credit_weight),
        count_cell(project.tokens),
    )
    return Row(key=project.id, cells=cells)


def lane_rows(picture: Picture, _: float) -> Sequence[Row]:
    """Return the lanes that have work, the longest wait first."""
    lanes = [] if picture.lanes is None else picture.lanes.lanes
    most = max((one.load or 0.0 for one in lanes), default=0.0)
    return Rows(lanes, lambda one: _lane(one, most))


def _lane(lane: LaneBody, most: float) -> Row:
    load = lane.load
    cells = (
        text_cell(lane.agent_id or ANY_AGENT),
        text_cell(lane.project_id),
        count_cell(lane.queued),
        count_cell(lane.ready),
        count_cell(lane.inflight),
        since_cell(lane.oldest_wait_seconds),
        UNKNOWN if load is None else number_cell(f"{load:.2f}", load),
        UNKNOWN if load is None else bar_cell(Bar(used=load / most if most else 0.0), "cyan"),
    )
    return Row(key=f"{lane.project_id}/{lane.agent_id}", cells=cells)


def running_rows(picture: Picture, now: float) -> Sequence[Row]:
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
        since_cell(ran) if has_begun else text_cell("assigned", FAINT),
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


def waiting_rows(picture: Picture, now: float) -> Sequence[Row]:
    """Return the tasks that wait, the oldest of them first, with the reason where it was asked."""
    tasks = () if picture.waiting is None else picture.waiting.tasks
    oldest_first = sorted(tasks, key=lambda one: one.created_at)
    return [_waiting(one, picture.reasons.get(one.task_id), now) for one in oldest_first]


def _waiting(task: ShownTask, why: WhyBody | str | None, now: float) -> Row:
    cells = (
        text_cell(task.task_id),
        since_cell(now - seconds_of(task.created_at)),
        text_cell(task.agent_id or ANY_AGENT),
        text_cell(task.project_id),
        _reason(why),
    )
    return Row(key=task.task_id, cells=cells)


def _reason(why: WhyBody | str | None) -> Cell:
    if why is None:
        return text_cell(NOT_ASKED, FAINT)
    if isinstance(why, str):
        return text_cell(why, FAINT)
    if not why.reasons:
        return text_cell("starts now" if why.state is TaskStatus.QUEUED else why.state.value)
    more = len(why.reasons) - 1
    return text_cell(why.reasons[0].message, tail=f" +{more}" if more else "")


def slot_rows(picture: Picture, now: float) -> Sequence[Row]:
    """Return the slots: how much of each quota is used, its next times, what holds its tasks."""
    slots = [] if picture.slots is None else picture.slots.slots
    return Rows(slots, lambda one: _slot(one, now))


def _slot(slot: SlotBody, now: float) -> Row:
    used, wake = _used_share(slot), slot.next_wake
    errors = slot.poll_errors + slot.wake_errors
    cells = (
        text_cell(slot.name),
        text_cell(slot.state, _SLOT_STATES.get(slot.state, "")),
        limited_cell(None if used is None else Bar(used=used), used),
        share_cell(used),
        until_cell(slot.resets_at, now, past=ENDED),
        until_cell(None if wake is None else wake.at, now),
        text_cell("-" if wake is None else mode_words(wake.mode)),
        count_cell(errors, CAREFUL if errors else ""),
        text_cell(_held_because(slot), CAREFUL),
    )
    return Row(key=slot.name, cells=cells)


def _used_share(slot: SlotBody) -> float | None:
    return None if slot.percent_used is None else slot.percent_used / 100


def _held_because(slot: SlotBody) -> str:
    # That it is disabled says its state.
    why = slot.hold or slot.disabled_reason or slot.last_error
    return why.removeprefix(f"{slot.state}, ")
