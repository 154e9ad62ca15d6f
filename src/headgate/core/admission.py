"""Admission: whether one more task may wait, by the limits on the queue.

The global limit is asked first, then the project's share of what is free, then the agent's limit.
A refusal is a value with the reason, because a full queue is an expected answer: it is recorded,
and the caller may try again later. Rule: what was admitted is never judged again.

The bound of a project is a dynamic threshold (Choudhury and Hahne, 1998): it may queue while it has
fewer tasks waiting than `queue_share` times the places that are free. A project that floods the
queue leaves places free by its own bound, so one that has nothing waiting finds room.
"""

from __future__ import annotations

from enum import Enum
from math import ceil

import msgspec

from headgate.errors import InvalidSettingError

LEAST_QUEUE_SHARE = 1
MOST_QUEUE_SHARE = 1_000_000


class QueueLimit(Enum):
    """Which limit keeps a task out."""

    GLOBAL = "global"
    PROJECT = "project"
    AGENT = "agent"


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks may wait, in all, for one project and for one agent.

    None is no limit, and without a limit on all there is none on a project; 0 lets none wait.
    """

    max_queue: int | None = 1000
    max_per_agent: int | None = 100
    queue_share: float = 8

    def __post_init__(self) -> None:
        for name, limit in (("max_queue", self.max_queue), ("max_per_agent", self.max_per_agent)):
            if limit is not None and limit < 0:
                raise InvalidSettingError(name, f"must be 0 or more, not {limit}")
        share = self.queue_share
        if not LEAST_QUEUE_SHARE <= share <= MOST_QUEUE_SHARE:
            allowed = f"a number from {LEAST_QUEUE_SHARE} to {MOST_QUEUE_SHARE:,}"
            raise InvalidSettingError("queue_share", f"must be {allowed}, not {share}")

    def max_per_project(self, queued: int) -> int | None:
        """Return how many tasks a project may have waiting, while so many wait in all."""
        if self.max_queue is None:
            return None
        free = max(self.max_queue - queued, 0)
        # Rounded first, because 1.1 times 10 is more than 11 in binary.
        return ceil(round(self.queue_share * free, 6))


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """The task may wait. `position` counts every waiting task, and the first is 1."""

    position: int


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """The task may not wait now, and why.

    `queued` is the number that met its limit: of all tasks, of the project's, or of the agent's.
    `max_per_project` is the bound of the project at that moment.
    """

    message: str
    queued: int
    max_queue: int | None
    max_per_agent: int | None
    limit: QueueLimit = QueueLimit.GLOBAL
    max_per_project: int | None = None
    queue_share: float = 8
    project_id: str | None = None
    agent_id: str | None = None
    code: str = "queue_full"
    retryable: bool = True

    @property
    def advice(self) -> str:
        """What whoever was refused can do."""
        match self.limit:
            case QueueLimit.GLOBAL:
                return "send it again when tasks have started, or raise scheduler.max_queue_size"
            case QueueLimit.PROJECT:
                return (
                    f"a project may have {self.queue_share:g} times as many tasks waiting as places"
                    " are free; send it again when some of its tasks have started, or raise"
                    " scheduler.max_queue_size or scheduler.queue_share"
                )
            case QueueLimit.AGENT:
                return (
                    "send it again when tasks of this agent have started, name another agent or"
                    " none, or raise scheduler.max_per_agent"
                )


def admit(
    limits: QueueLimits,
    *,
    queued: int,
    queued_for_project: int = 0,
    queued_for_agent: int = 0,
    project_id: str | None = None,
    agent_id: str | None = None,
) -> Admitted | Rejected:
    """Decide whether one more task may wait.

    An open task (no agent) has no limit of an agent, and one of no project none of a project.
    """
    bound = None if project_id is None else limits.max_per_project(queued)
    if _is_full(queued, limits.max_queue):
        limit, waiting = QueueLimit.GLOBAL, queued
        where = f"global queue full ({queued}/{limits.max_queue})"
    elif _is_full(queued_for_project, bound):
        limit, waiting = QueueLimit.PROJECT, queued_for_project
        where = f'project queue full for "{project_id}" ({queued_for_project}/{bound})'
    elif agent_id is not None and _is_full(queued_for_agent, limits.max_per_agent):
        limit, waiting = QueueLimit.AGENT, queued_for_agent
        where = f'agent queue full for "{agent_id}" ({queued_for_agent}/{limits.max_per_agent})'
    else:
        return Admitted(position=queued + 1)
    return Rejected(
        limit=limit,
        message=f"rejected: {where}",
        queued=waiting,
        max_queue=limits.max_queue,
        max_per_agent=limits.max_per_agent,
        max_per_project=bound,
        queue_share=limits.queue_share,
        project_id=project_id,
        agent_id=agent_id,
    )


def _is_full(waiting: int, limit: int | None) -> bool:
    return limit is not None and waiting >= limit
