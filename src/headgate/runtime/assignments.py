"""Lines of a plan as the store is asked for them, and those that came to nothing before that."""

from __future__ import annotations

from headgate.core.budgets.accounts import Refused
from headgate.core.dispatch.desk_settings import Planned
from headgate.core.tasks.records import Progress, TaskRecord
from headgate.runtime.holding import reserve_request
from headgate.store import Assignment, NotAssigned


def assignment_of(
    line: Planned, *, name: str, now: float, tick: int, starts: bool, is_held: bool
) -> Assignment:
    """Return what the store is asked for; money that is held elsewhere is not held again."""
    reserve = None if is_held else reserve_request(line, name, now, dispatched=starts)
    return Assignment(
        task_id=line.task.id,
        attempt=line.attempt,
        agent_id=line.agent_id,
        node_id=line.node_id,
        starts=starts,
        reservation_id=name,
        tokens=line.tokens,
        micro_usd=line.micro_usd,
        reserve=reserve,
        rate_charges=line.rate_charges,
        tick=tick,
        slot=line.slot,
        choice=line.choice,
    )


def not_held(line: Planned, refused: Refused | None) -> NotAssigned:
    """Return the answer for a line whose money was refused before the store was asked."""
    record = TaskRecord(
        task=line.task, terms=line.terms, progress=Progress(attempt=line.attempt - 1)
    )
    return NotAssigned(task_id=line.task.id, record=record, refused=refused)
