"""The agents of the demonstration: they submit what the plan says, over HTTP as any client does.

Rule: the service is never pressed. What it refuses is left out, a service that does not answer is
asked again after a pause, and time that was slept through is not made up for.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator

from headgate.client.async_client import Client
from headgate.client.task_fields import TaskFields
from headgate.demo.plan import PlannedTask
from headgate.errors import ServiceError, ServiceUnavailableError

MAX_KNOWN = 100
MAX_LATE_SECONDS = 2.0
PAUSE_SECONDS = 1.0


class DemoFleet:
    """Submits planned tasks when their time has come; `submitted` and `refused` count them."""

    def __init__(self, client: Client, hooks: str) -> None:
        self.submitted = 0
        self.refused = 0
        self._client = client
        self._hooks = hooks
        self._ids: OrderedDict[int, str] = OrderedDict()

    async def run(self, plan: Iterator[PlannedTask]) -> None:
        """Submit one task after the other, until it is cancelled."""
        clock = asyncio.get_running_loop().time
        began = clock()
        for planned in plan:
            early = began + planned.at_seconds - clock()
            if early < -MAX_LATE_SECONDS:
                began -= early
            await asyncio.sleep(max(early, 0.0))
            await self._take(planned)

    async def _take(self, planned: PlannedTask) -> None:
        try:
            await self._submit(planned)
            self.submitted += 1
        except ServiceUnavailableError:
            await asyncio.sleep(PAUSE_SECONDS)
        except ServiceError:
            self.refused += 1

    async def _submit(self, planned: PlannedTask) -> None:
        fields = TaskFields(**planned.fields)
        parents = [self._ids[number] for number in planned.parents if number in self._ids]
        if parents:
            fields["depends_on"] = parents
        if planned.hook is not None:
            fields["callback_url"] = f"{self._hooks}/{planned.hook}"
        task_id = (await self._client.submit(**fields)).task_id
        self._ids[planned.number] = task_id
        if len(self._ids) > MAX_KNOWN:
            self._ids.popitem(last=False)
        if planned.is_cancelled:
            await self._client.cancel(task_id)
