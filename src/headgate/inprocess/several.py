"""Places of several resources at once: a provider and a database and a GPU.

Rule: everybody takes them in the same order, whatever the order in which they are named. Then those
who wait for each other cannot form a circle, and whoever has the last one in the order is waiting
for nobody. A place is not taken outside of this while another is held, or the rule is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from headgate.core.tasks import Task
from headgate.errors import InvalidFieldError
from headgate.inprocess.budget import Estimate
from headgate.inprocess.grants import Grant
from headgate.inprocess.scheduler import LoadScheduler


@asynccontextmanager
async def acquire_all(
    schedulers: Iterable[LoadScheduler],
    agent_id: str,
    *,
    task: Task | None = None,
    timeout: float | None = None,  # noqa: ASYNC109  what is held already must be given back
    estimate: Estimate | None = None,
) -> AsyncIterator[dict[str, Grant]]:
    """Hold one place of each resource while the body runs; the grants come by resource name.

    `timeout` is for all of them together. Who does not get all keeps none.
    """
    ordered = _in_order(schedulers)
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    async with AsyncExitStack() as stack:
        grants: dict[str, Grant] = {}
        for scheduler in ordered:
            left = None if deadline is None else max(deadline - loop.time(), 0.0)
            acquisition = scheduler.acquire(agent_id, task=task, timeout=left, estimate=estimate)
            grants[scheduler.resource.name] = await stack.enter_async_context(acquisition)
        yield grants


def _in_order(schedulers: Iterable[LoadScheduler]) -> list[LoadScheduler]:
    """Sort by the names of the resources, which must differ: they are the order."""
    ordered = sorted(schedulers, key=lambda scheduler: scheduler.resource.name)
    names = [scheduler.resource.name for scheduler in ordered]
    if len(set(names)) < len(names):
        raise InvalidFieldError("schedulers", f"two resources have one name: {', '.join(names)}")
    return ordered
