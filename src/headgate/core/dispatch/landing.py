"""How attempts leave a desk: their places come back, and what they used is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.core.dispatch.flights import InFlight
from headgate.core.tasks.records import TaskRecord
from headgate.core.tasks.task import TaskStatus

if TYPE_CHECKING:
    from headgate.core.dispatch.desk import Desk

IN_FLIGHT = (TaskStatus.ASSIGNED, TaskStatus.RUNNING)


def lands(desk: Desk, flight: InFlight, record: TaskRecord, now: float) -> bool:
    """Say whether a record ends an attempt, and if so let it land."""
    is_before = record.progress.attempt < flight.attempt
    if is_before and record.is_terminal:
        take_back(desk, flight, now)
        return True
    is_under_way = record.task.status in IN_FLIGHT and record.progress.attempt == flight.attempt
    if is_under_way:
        desk.workers.see(flight, record, now)
    if is_before or is_under_way:
        return False
    _land(desk, flight, record, now)
    return True


def take_back(desk: Desk, flight: InFlight, now: float) -> None:
    """Give back the place of an attempt that never began."""
    give_back_place(desk, flight, now)
    desk.figures.add(flight.task.project_id, now, started=-1)


def give_back_place(desk: Desk, flight: InFlight, now: float) -> None:
    """Have the place of an attempt free again, for whatever reason."""
    desk.flights.remove(flight)
    desk.index.free_place(flight.agent_id)
    desk.workers.land(flight, now)


def _land(desk: Desk, flight: InFlight, record: TaskRecord, now: float) -> None:
    give_back_place(desk, flight, now)
    desk.tick += 1
    tokens = record.tokens or 0
    is_done = record.task.status is TaskStatus.DONE
    desk.figures.add(flight.task.project_id, now, tokens=tokens, completed=int(is_done))
    _count_overrun(desk, flight, tokens, now)
    has_freed = tokens < flight.tokens or (record.micro_usd or 0) < (
        record.progress.reserved_micro_usd
    )
    desk.ask_again(flight.task.scopes, has_freed=has_freed)


def _count_overrun(desk: Desk, flight: InFlight, tokens: int, now: float) -> None:
    if tokens > flight.tokens:
        limits = desk.rate_limits_on(flight.task, flight.slot, flight.agent_id)
        desk.rates.count_more(limits, tokens=tokens - flight.tokens, now=now)
