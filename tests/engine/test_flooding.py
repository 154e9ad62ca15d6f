"""A project that floods the queue keeps nobody out, and gets no more than its share."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import cycle

import pytest

from engine.one_service import Service, play
from engine.simulated_work import always
from headgate.core.admission import QueueLimit, QueueLimits
from headgate.core.task import Submission, Task, Terms
from headgate.storage.store import TurnedAway

MODEST_WAITS = 30
SECONDS = 60


class Project:
    """Submits for its agents in turn, and counts what it was refused by."""

    def __init__(self, service: Service, project_id: str, *, agents: int) -> None:
        self.service = service
        self.id = project_id
        self.refused: Counter[QueueLimit] = Counter()
        self._agents = cycle([f"{project_id}-{number}" for number in range(agents)])

    async def submit(self, *, not_before: float | None = None) -> bool:
        task = Task(
            not_before=not_before,
            created_at=self.service.now(),
            project_id=self.id,
            agent_id=next(self._agents),
            target="",
        )
        answer = await self.service.engine.submit(task, Terms(), Submission(action="work"))
        if isinstance(answer, TurnedAway):
            self.refused[answer.rejected.limit] += 1
            return False
        return True

    async def flood(self) -> None:
        """Submit whenever there is room, and try again all the time."""
        while True:
            while await self.submit():
                pass
            await asyncio.sleep(0.1)

    async def keep_waiting(self, most: int) -> None:
        """Submit one task for each that has started."""
        while True:
            for _ in range(most - await self.waiting()):
                await self.submit()
            await asyncio.sleep(0.2)

    async def waiting(self) -> int:
        totals = await self.service.engine.store.totals()
        return sum(lane.queued for lane in totals.lanes if lane.project_id == self.id)

    async def done(self) -> int:
        totals = await self.service.engine.store.totals()
        return sum(lane.completed for lane in totals.lanes if lane.project_id == self.id)


@pytest.mark.parametrize("agents", [1, 8, 50, 400])
def test_a_flood_over_many_agents_takes_no_more_than_its_share(agents: int) -> None:
    async def scenario(service: Service) -> None:
        flooding = Project(service, "x", agents=agents)
        modest = Project(service, "y", agents=2)
        flood = asyncio.create_task(flooding.flood())
        # The flood is there first, and has filled all that it may.
        await asyncio.sleep(5)
        assert flooding.refused.total() > 10
        steady = asyncio.create_task(modest.keep_waiting(MODEST_WAITS))
        await asyncio.sleep(5)
        before = (await flooding.done(), await modest.done(), flooding.refused.total())
        for _ in range(SECONDS):
            refused = flooding.refused.total()
            await asyncio.sleep(1)
            assert flooding.refused.total() > refused
        x, y = await flooding.done() - before[0], await modest.done() - before[1]
        assert x + y > 15 * SECONDS
        assert abs(y / (x + y) - 0.5) <= 0.02
        assert not modest.refused
        expected = QueueLimit.PROJECT if agents > 8 else QueueLimit.AGENT
        assert set(flooding.refused) == {expected}
        totals = await service.engine.store.totals()
        assert totals.rejected == flooding.refused.total()
        assert totals.rejected_by_global == 0
        for task in (flood, steady):
            task.cancel()

    play(
        scenario,
        always(1.0),
        limits=QueueLimits(),
        capacity=20,
        max_inflight=20,
        max_per_agent_inflight=20,
        agents=(),
    )


def test_a_flood_for_later_that_becomes_due_at_once_takes_no_more_than_its_share() -> None:
    async def scenario(service: Service) -> None:
        flooding = Project(service, "x", agents=50)
        modest = Project(service, "y", agents=2)
        due_at = service.now() + 60
        while await flooding.submit(not_before=due_at):
            pass
        assert set(flooding.refused) == {QueueLimit.PROJECT_SCHEDULED}
        assert await flooding.waiting() == 1_778
        # All of them could start now, and there are more than the queue has places.
        await asyncio.sleep(65)
        steady = asyncio.create_task(modest.keep_waiting(MODEST_WAITS))
        await asyncio.sleep(5)
        before = (await flooding.done(), await modest.done())
        await asyncio.sleep(SECONDS)
        x, y = await flooding.done() - before[0], await modest.done() - before[1]
        assert x + y > 15 * SECONDS
        assert abs(y / (x + y) - 0.5) <= 0.02
        assert not modest.refused
        steady.cancel()

    play(
        scenario,
        always(1.0),
        limits=QueueLimits(max_scheduled=2_000),
        capacity=20,
        max_inflight=20,
        max_per_agent_inflight=20,
        agents=(),
    )
