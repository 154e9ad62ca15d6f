"""Admission: whether one more task may wait, by the limits on the queue.

The global limit is asked first, then the agent's. A refusal is a value with the reason, because a
full queue is an expected answer: it is recorded, and the caller may try again later.
"""

from __future__ import annotations

import msgspec

from headgate.errors import InvalidSettingError


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks may wait, in all and for one agent. None is no limit; 0 lets none wait."""

    max_queue: int | None = 1000
    max_per_agent: int | None = 100

    def __post_init__(self) -> None:
        for name, limit in (("max_queue", self.max_queue), ("max_per_agent", self.max_per_agent)):
            if limit is not None and limit < 0:
                raise InvalidSettingError(name, f"must be 0 or more, not {limit}")


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """The task may wait. `position` counts every waiting task, and the first is 1."""

    position: int


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """The task may not wait now, and why.

    `queued` is the number that met its limit: of all tasks, or of the agent's.
    """

    message: str
    queued: int
    max_queue: int | None
    max_per_agent: int | None
    agent_id: str | None = None
    code: str = "queue_full"
    retryable: bool = True


def admit(
    limits: QueueLimits, *, queued: int, queued_for_agent: int = 0, agent_id: str | None = None
) -> Admitted | Rejected:
    """Decide whether one more task may wait; an open task (no agent) has only the global limit."""
    if _is_full(queued, limits.max_queue):
        where = f"global queue full ({queued}/{limits.max_queue})"
        return _rejected(limits, where, queued, agent_id)
    if agent_id is not None and _is_full(queued_for_agent, limits.max_per_agent):
        where = f'agent queue full for "{agent_id}" ({queued_for_agent}/{limits.max_per_agent})'
        return _rejected(limits, where, queued_for_agent, agent_id)
    return Admitted(position=queued + 1)


def _is_full(waiting: int, limit: int | None) -> bool:
    return limit is not None and waiting >= limit


def _rejected(limits: QueueLimits, where: str, queued: int, agent_id: str | None) -> Rejected:
    return Rejected(
        message=f"rejected: {where}",
        queued=queued,
        max_queue=limits.max_queue,
        max_per_agent=limits.max_per_agent,
        agent_id=agent_id,
    )
