"""Rows of each pane, made from the last answers: the same numbers that the dashboard shows.

Every function takes the picture and the time, and returns plain rows, so that what is on a screen
can be tested without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from headgate.api.schema.admin import LaneBody, ProjectBody
from headgate.api.schema.calls import CallWhyBody
from headgate.api.schema.tasks import BudgetStatusBody, WhyBody
from headgate.cli.slot import wake_reason
from headgate.cli.top.service_state import ServiceState, ShownTask, UpstreamCalls
from headgate.cli.top.tables import (
    BAD,
    CAREFUL,
    FAINT,
    GOOD,
    NEVER,
    NOW,
    UNKNOWN,
    Bar,
    Cell,
    Row,
    Rows,
    bar_cell,
    count_cell,
    is_full,
    limited_cell,
    money_cell,
    number_cell,
    share_cell,
    since_cell,
    text_cell,
    until_cell,
)
from headgate.core.budgets.alerts import share_used
from headgate.core.budgets.scopes import ROOT_WORDS
from headgate.core.call import CallState
from headgate.core.money import MicroUsd, read_usd
from headgate.core.slots.status import NextWakeBody, SlotBody, state_words
from headgate.core.slots.wakes import ENDED, mode_words
from headgate.core.task import TaskStatus
from headgate.core.text import count, dollars, seconds_of, usd

NOT_ASKED = "…"
ANY_AGENT = "(any)"

_STANDINGS = {"active": "", "paused": CAREFUL, "draining": CAREFUL, "archived": FAINT}
_SLOT_STATES = {
    "open": GOOD,
    "closed": CAREFUL,
    "exhausted": BAD,
    "paused": CAREFUL,
    "no_key": BAD,
    "disabled": BAD,
}


def project_rows(service: ServiceState, _: float) -> Sequence[Row]:
    """Return the projects: the share that each had beside the one it should have, and its work."""
    projects = [] if service.projects is None else service.projects.projects
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


def lane_rows(service: ServiceState, _: float) -> Sequence[Row]:
    """Return the lanes that have work, the longest wait first."""
    lanes = [] if service.lanes is None else service.lanes.lanes
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


def running_rows(service: ServiceState, now: float) -> Sequence[Row]:
    """Return the tasks in flight, those that run longest first."""
    tasks = () if service.running is None else service.running.tasks
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
        text_cell("" if task.progress is None else task.progress.words),
    )
    return Row(key=task.task_id, cells=cells)


def _attempt(task: ShownTask) -> str:
    # Only failures count against the most: one that was taken back from a dead node begins again.
    is_counted = task.attempt <= task.max_attempts
    return f"{task.attempt}/{task.max_attempts}" if is_counted else str(task.attempt)


def waiting_rows(service: ServiceState, now: float) -> Sequence[Row]:
    """Return the tasks that wait, the oldest of them first, with the reason where it was asked."""
    tasks = () if service.waiting is None else service.waiting.tasks
    oldest_first = sorted(tasks, key=lambda one: one.created_at)
    return [_waiting(one, service.reasons.get(one.task_id), now) for one in oldest_first]


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


def slot_rows(service: ServiceState, now: float) -> Sequence[Row]:
    """Return the slots: how much of each quota is used, its next times, what holds its tasks."""
    slots = [] if service.slots is None else service.slots.slots
    return Rows(slots, lambda one: _slot(one, now))


def _slot(slot: SlotBody, now: float) -> Row:
    used, wake = _used_share(slot), slot.next_wake
    errors = slot.poll_errors + slot.wake_errors
    cells = (
        text_cell(slot.name),
        text_cell(state_words(slot.state), _SLOT_STATES.get(slot.state, "")),
        limited_cell(None if used is None else Bar(used=used), used),
        share_cell(used),
        until_cell(slot.resets_at, now, past=ENDED),
        _wake_cell(wake, now),
        text_cell("-" if wake is None else mode_words(wake.mode)),
        count_cell(errors, CAREFUL if errors else ""),
        text_cell(_held_because(slot), CAREFUL),
    )
    return Row(key=slot.name, cells=cells)


def _wake_cell(wake: NextWakeBody | None, now: float) -> Cell:
    if wake is not None and wake.is_skipped:
        return text_cell("skipped")
    return until_cell(None if wake is None else wake.at, now)


def _used_share(slot: SlotBody) -> float | None:
    return None if slot.percent_used is None else slot.percent_used / 100


def _held_because(slot: SlotBody) -> str:
    # That it is disabled says its state.
    why = slot.wait_reason or slot.disabled_reason or slot.last_error
    if not why and slot.next_wake is not None and slot.next_wake.is_skipped:
        # The column before says that the wake is skipped, and when it would have come.
        return wake_reason(slot.next_wake)
    if not why and slot.no_wake_reason:
        return f"no wake: {slot.no_wake_reason}"
    state = state_words(slot.state)
    return why.removeprefix(f"{state}, ").removeprefix(f"{state}: ")


def call_rows(service: ServiceState, now: float) -> Sequence[Row]:
    """Return the upstreams that calls go to, with the call at each that waits longest."""
    return Rows(service.calls or (), lambda one: _calls(one, now))


def _calls(row: UpstreamCalls, now: float) -> Row:
    longest = row.longest
    cells = (
        text_cell(row.upstream),
        count_cell(row.waiting),
        count_cell(row.running),
        NEVER if longest is None else since_cell(now - seconds_of(longest.created_at)),
        text_cell("" if longest is None else longest.project_id),
        text_cell("" if longest is None else longest.model),
        text_cell("") if longest is None else _call_reason(row.why),
    )
    return Row(key=row.upstream, cells=cells)


def _call_reason(why: CallWhyBody | str | None) -> Cell:
    if why is None:
        return text_cell(NOT_ASKED, FAINT)
    if isinstance(why, str):
        return text_cell(why, FAINT)
    if not why.reasons:
        return text_cell("starts now" if why.state is CallState.WAITING else why.state.value)
    more = len(why.reasons) - 1
    return text_cell(why.reasons[0].message, tail=f" +{more}" if more else "")


# What budgets say in the terminal: the rows of their pane, and money in short.
#
# Rule: money is counted in micro-dollars, as everywhere; only shares of a limit are fractions.

MAX_DEPTH = 16


def budget_rows(service: ServiceState, now: float) -> Sequence[Row]:
    """Return the scopes with what each has used of its limit, children under their parents."""
    scopes = [] if service.budgets is None else list(_tree(service.budgets, 0))
    return Rows(scopes, lambda one: _budget(one[1], one[0], now))


def _tree(status: BudgetStatusBody, depth: int) -> Iterator[tuple[int, BudgetStatusBody]]:
    yield depth, status
    if depth < MAX_DEPTH:
        for child in status.children:
            yield from _tree(child, depth + 1)


def _budget(status: BudgetStatusBody, depth: int, now: float) -> Row:
    bar, share = _fullest(status), _share(status)
    overrun = read_usd(status.overrun_usd)
    cells = (
        Cell(text=f"{'  ' * depth}{text_cell(_last_part(status.scope)).text}", order=status.scope),
        limited_cell(bar, share),
        money_cell(_used_micro_usd(status)),
        text_cell("no limit" if bar is None else limit_text(status)),
        _ends(status, share, now),
        until_cell(status.resets_at, now),
        count_cell(status.spent_tokens + status.overrun_tokens),
        money_cell(overrun or None, CAREFUL),
        money_cell(_micro_usd(status.burn_usd_per_hour)),
    )
    return Row(key=status.scope or ROOT_WORDS, cells=cells)


def _last_part(scope: str) -> str:
    return scope.rpartition("/")[2] or ROOT_WORDS


def _fullest(status: BudgetStatusBody) -> Bar | None:
    """Return the bar of dollars or of tokens, whichever is nearer to its limit; None without."""
    used_tokens = status.spent_tokens + status.overrun_tokens
    units = (
        (_used_micro_usd(status), read_usd(status.reserved_usd), _micro_usd(status.limit_usd)),
        (used_tokens, status.reserved_tokens, status.limit_tokens),
    )
    bars = [_part(used, held, limit) for used, held, limit in units if limit is not None]
    return max(bars, key=lambda bar: bar.used + bar.held, default=None)


def _part(used: int, held: int, limit: int) -> Bar:
    return Bar(used=used / limit, held=held / limit) if limit > 0 else Bar(used=1.0)


def _share(status: BudgetStatusBody) -> float | None:
    """Return how much of the tighter limit is used or held, as it is told wherever it is shown."""
    return share_used(
        (_micro_usd(status.limit_usd), _micro_usd(status.remaining_usd)),
        (status.limit_tokens, status.remaining_tokens),
    )


def _ends(status: BudgetStatusBody, share: float | None, now: float) -> Cell:
    """Return when a budget is used up if it is spent as lately; nobody knows that of most."""
    if share is None:
        return NEVER
    return number_cell(NOW, 0.0, BAD) if is_full(share) else until_cell(status.exhausted_at, now)


def limit_text(status: BudgetStatusBody) -> str:
    """Return the limits of a scope, and for how long they are: `$180.00/1h`."""
    money = "" if status.limit_usd is None else dollars(status.limit_usd)
    tokens = "" if status.limit_tokens is None else f"{count(status.limit_tokens)} tokens"
    return ", ".join(one for one in (money, tokens) if one) + _window(status.window)


def _window(window: str) -> str:
    """Return for how long a limit is: `day@Europe/Berlin` is a day."""
    if window == "none":
        return ""
    kind, _, hours = window.partition(":")
    return f"/{hours or kind.partition('@')[0]}"


def spent_text(status: BudgetStatusBody) -> str:
    """Return what was spent, overrun included."""
    return usd(_used_micro_usd(status))


def left_text(status: BudgetStatusBody) -> str:
    """Return what is left of the limit in dollars, else of that in tokens; empty without either."""
    left = _micro_usd(status.remaining_usd)
    if left is not None:
        return usd(max(0, left))
    tokens = status.remaining_tokens
    return "" if tokens is None else f"{count(max(0, tokens))} tokens"


def _used_micro_usd(status: BudgetStatusBody) -> int:
    return read_usd(status.spent_usd) + read_usd(status.overrun_usd)


def _micro_usd(text: str | None) -> MicroUsd | None:
    return None if text is None else read_usd(text)
