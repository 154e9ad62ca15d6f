"""Tasks that are expected: on their way to the store, and shown to a desk that has nothing to do.

Where nothing waits that could start, a task starts as soon as it is stored. Its plan need not wait
for the answer to its submit: it is sent behind it, and both are in one transaction if they arrive
together. The store decides as ever: a task that it did not take is not there to be assigned.
"""

from __future__ import annotations

import msgspec

from headgate.core.dispatch.desk import Desk
from headgate.core.tasks.records import TaskRecord
from headgate.core.tasks.task import TaskStatus
from headgate.store import NewTask


def expect(desk: Desk | None, new: NewTask, now: float) -> bool:
    """Show a desk the record that a task will most likely have; False if others could start."""
    if desk is None or desk.index.offers.has_ready or new.task.id in desk.waiting:
        return False
    if new.terms.depends_on or new.task.not_before is not None:
        return False
    task = msgspec.structs.replace(new.task, status=TaskStatus.QUEUED, enqueued_tick=desk.tick)
    desk.see(TaskRecord(task=task, terms=new.terms, agent_id=task.agent_id), now)
    return True


def unexpect(desk: Desk | None, task_id: str, now: float) -> None:
    """Have a desk forget a task that it was shown too soon; what is planned the store judges."""
    if desk is not None and task_id in desk.waiting:
        desk.forget(task_id, now)
