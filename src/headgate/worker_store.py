"""What a task store keeps of workers: agents on other machines, which ask for their tasks.

A worker is a node like any other: one life, with a lease that covers all that it runs. It speaks
to whichever process of the service it reaches, so what it has is known to the store alone.

Rule: a task that a worker has and does not name is handed out again. So an answer that got lost
loses no task, and nobody has to remember what was said to whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from headgate.core.tasks.records import TaskRecord

MAX_HANDED_OUT = 50
"""How many tasks one answer has at most; the others are in the next."""

MAX_HANDED_OUT_BYTES = 4 * 2**20
"""What these may have together; a larger one has an answer of its own."""


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """A worker shows that it lives, and says what it runs, by task and attempt.

    `places` are all that it has, taken or not; None leaves them as they were. With none it is
    about to leave: what it does not name is taken back, and when nothing is left it is forgotten.
    """

    worker_id: str
    agent_id: str
    places: int | None
    running: dict[str, int]
    lease_seconds: float
    joins: bool = False
    takes: bool = True
    node_id: str = ""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to do; one that is not alive any more must drop everything.

    `tasks` are those to be run, `cancelled` those to be stopped, and `lost` those that are not
    its own any more. With news there is something for the dispatcher to look at.
    """

    is_alive: bool
    tasks: tuple[TaskRecord, ...] = ()
    cancelled: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    has_news: bool = False


class Overdue(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at a worker that has had its time."""

    task_id: str
    attempt: int


class WorkerStore(Protocol):
    """The steps of a task store that concern workers."""

    async def visit(self, visit: Visit) -> Orders:
        """Renew the lease of a worker, start what is assigned to it, and say what it is to do."""

    async def give_up(self, epoch: int, overdue: Sequence[Overdue]) -> list[TaskRecord]:
        """End attempts that a worker has neither ended nor stopped in time."""
