"""Admission: whether one more task may wait, by the limits on the queue.

The global limit is asked first, then the project's share of what is free, then the agent's limit.
A refusal is a value with the reason, because a full queue is an expected answer: it is recorded,
and the caller may try again later. Rule: what was admitted is never judged again.

The bound of a project is a dynamic threshold (Choudhury and Hahne, 1998): it may queue while it has
fewer tasks waiting than `queue_share` times the places that are free. A project that floods the
queue leaves places free by its own bound, so one that has nothing waiting finds room. The limit of
an agent is that of its lane in one project, so nobody can fill the queue of another's agent.

A task that was submitted for later takes no place in the queue, now or when it is due: it counts
apart until it starts, against `max_scheduled`, by the same threshold. So a thousand of them that
become due at once take turns by their project's share, and keep nobody from submitting. A task that
waits for a parent or for money takes a place, since it may start at any moment.

What tasks that have not ended take on disk is bounded in the same way, by what is free of it.
"""

from __future__ import annotations

from math import ceil

import msgspec

from headgate.core.enums import FastEnum
from headgate.core.retention import StoreSize, in_mebibytes
from headgate.errors import InvalidSettingError

LEAST_QUEUE_SHARE = 1
MOST_QUEUE_SHARE = 1_000_000


class QueueLimit(FastEnum):
    """Which limit keeps a task out."""

    GLOBAL = "global"
    PROJECT = "project"
    AGENT = "agent"
    SCHEDULED = "scheduled"
    PROJECT_SCHEDULED = "project_scheduled"
    PROJECT_STORE = "project_store"
    STORE = "store"


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks may wait, in all, for one project and for one agent.

    None is no limit, and without a limit on all there is none on a project; 0 lets none wait.
    `max_scheduled` is for tasks that were submitted for later, and `max_store_bytes` for the size
    of the whole store.
    """

    max_queue: int | None = 1000
    max_per_agent: int | None = 100
    queue_share: float = 8
    max_scheduled: int | None = 10_000
    max_store_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_per_agent", "max_scheduled", "max_store_bytes"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise InvalidSettingError(name, f"must be 0 or more, not {limit}")
        share = self.queue_share
        if not LEAST_QUEUE_SHARE <= share <= MOST_QUEUE_SHARE:
            allowed = f"a number from {LEAST_QUEUE_SHARE} to {MOST_QUEUE_SHARE:,}"
            raise InvalidSettingError("queue_share", f"must be {allowed}, not {share}")

    def max_per_project(self, queued: int) -> int | None:
        """Return how many tasks a project may have waiting, while so many wait in all."""
        return None if self.max_queue is None else self._share_of(self.max_queue - queued)

    def max_scheduled_per_project(self, scheduled: int) -> int | None:
        """Return how many tasks a project may have for later, while there are so many in all."""
        most = self.max_scheduled
        return None if most is None else self._share_of(most - scheduled)

    def max_bytes_per_project(self, free_bytes: int) -> int:
        """Return what the unfinished tasks of a project may take, while so much is free."""
        return self._share_of(free_bytes)

    def _share_of(self, free: int) -> int:
        # Rounded first, because 1.1 times 10 is more than 11 in binary.
        return ceil(round(self.queue_share * max(free, 0), 6))


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """The task may wait. `position` counts every waiting task, and the first is 1."""

    position: int


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """The task may not wait now, and why.

    `queued` is the number that met its limit: of all tasks, of the project's, or of the agent's in
    the project; for later, where the task was.
    `max_per_project` is the bound of the project at that moment.
    """

    message: str
    queued: int
    max_queue: int | None
    max_per_agent: int | None
    limit: QueueLimit = QueueLimit.GLOBAL
    max_per_project: int | None = None
    max_scheduled: int | None = 10_000
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
            case QueueLimit.SCHEDULED:
                return (
                    "send it again when tasks with a notBefore have started, send it without one,"
                    " or raise scheduler.max_scheduled"
                )
            case QueueLimit.PROJECT_SCHEDULED:
                return (
                    f"a project may have {self.queue_share:g} times as many tasks for later as"
                    " places are free; send it again when some of them have started, send it"
                    " without notBefore, or raise scheduler.max_scheduled"
                )
            case QueueLimit.PROJECT_STORE:
                return (
                    f"the unfinished tasks of a project may take {self.queue_share:g} times the"
                    " room that is left; send it again when some of them have ended, or send less"
                    " with each"
                )
            case QueueLimit.STORE:
                return (
                    "ended tasks are being deleted to make room, unfinished ones keep theirs; send"
                    " it again later, or have an operator cancel tasks, free some of the disk or"
                    " raise scheduler.max_store_bytes"
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
    return _rejected(limits, limit, where, waiting, bound, project_id, agent_id)


def _rejected(
    limits: QueueLimits,
    limit: QueueLimit,
    where: str,
    waiting: int,
    bound: int | None,
    project_id: str | None,
    agent_id: str | None,
) -> Rejected:
    return Rejected(
        limit=limit,
        message=f"rejected: {where}",
        queued=waiting,
        max_queue=limits.max_queue,
        max_per_agent=limits.max_per_agent,
        max_per_project=bound,
        max_scheduled=limits.max_scheduled,
        queue_share=limits.queue_share,
        project_id=project_id,
        agent_id=agent_id,
        code="store_full" if limit is QueueLimit.STORE else "queue_full",
    )


def admit_scheduled(
    limits: QueueLimits,
    *,
    queued: int,
    scheduled: int,
    scheduled_for_project: int,
    project_id: str,
    agent_id: str | None = None,
) -> Admitted | Rejected:
    """Decide whether one more task may wait for its time; `queued` are all that wait."""
    bound = limits.max_scheduled_per_project(scheduled)
    if _is_full(scheduled, limits.max_scheduled):
        limit, waiting = QueueLimit.SCHEDULED, scheduled
        where = f"as many tasks wait for their time as may ({scheduled}/{limits.max_scheduled})"
    elif _is_full(scheduled_for_project, bound):
        limit, waiting = QueueLimit.PROJECT_SCHEDULED, scheduled_for_project
        where = f'too many tasks of "{project_id}" wait for their time ({waiting}/{bound})'
    else:
        return Admitted(position=queued + 1)
    return _rejected(limits, limit, where, waiting, bound, project_id, agent_id)


def refuse_by_size(
    limits: QueueLimits,
    size: StoreSize,
    *,
    adds_bytes: int,
    ended_bytes: int,
    live_bytes_of_project: int,
    project_id: str,
    agent_id: str | None = None,
) -> Rejected | None:
    """Return why the store has no room for so many bytes more; None if it has.

    What has ended is deleted when the room is needed, so for a project it counts as free.
    """
    room = size.room_bytes
    if room is None:
        return None
    if adds_bytes > room:
        problem = size.problem or (
            f"the store has room for {in_mebibytes(room)}, and the task takes"
            f" {in_mebibytes(adds_bytes)}"
        )
        return _rejected(limits, QueueLimit.STORE, problem, 0, None, project_id, agent_id)
    bound = limits.max_bytes_per_project(room + ended_bytes)
    if live_bytes_of_project + adds_bytes <= bound:
        return None
    taken, most = in_mebibytes(live_bytes_of_project), in_mebibytes(bound)
    where = f'the unfinished tasks of "{project_id}" take {taken} of {most}'
    return _rejected(limits, QueueLimit.PROJECT_STORE, where, 0, None, project_id, agent_id)


def _is_full(waiting: int, limit: int | None) -> bool:
    return limit is not None and waiting >= limit
