"""A fleet without asyncio tasks: who asks and who releases, step by step, on the real permits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from headgate.core.task import Task
from headgate.inprocess.lanes import LaneOrder, Waiter
from headgate.inprocess.permits import Grant, Permits, SharedResource, Trace
from headgate.testing import SimulatedLoop, simulate

T = TypeVar("T")


class Fleet:
    """Permits that are asked for and released; `grants` has all that were made, in order."""

    def __init__(
        self,
        *,
        alpha: float,
        capacity: int = 1,
        max_waiters: int = 10_000,
        max_wait_ticks: int | None = None,
    ) -> None:
        order = LaneOrder(alpha=alpha, auto_tune=False, max_wait_ticks=max_wait_ticks)
        self.permits = Permits(
            SharedResource("llm", capacity),
            order,
            Trace(0),
            max_waiters=max_waiters,
            is_open_to_all=True,
            on_idle=lambda: None,
        )
        self.held: list[Grant] = []
        self.grants: list[Grant] = []
        self._waiting: dict[str, list[Waiter]] = {}

    def ask(self, agent_id: str, weight: float = 1.0) -> None:
        waiter = Waiter()
        grant = self.permits.ask(waiter, agent_id, Task(weight=weight), None)
        if grant is None:
            self._waiting.setdefault(agent_id, []).append(waiter)
        else:
            self._granted(grant)

    def release(self) -> Grant | None:
        """Release the permit that is held longest; return what was granted instead."""
        self.permits.free(self.held.pop(0))
        for waiters in self._waiting.values():
            if waiters and waiters[0].future.done():
                grant = waiters.pop(0).future.result()
                assert isinstance(grant, Grant)
                self._granted(grant)
                return grant
        return None

    def waiting(self, agent_id: str) -> int:
        return len(self._waiting.get(agent_id, []))

    def _granted(self, grant: Grant) -> None:
        self.held.append(grant)
        self.grants.append(grant)


def in_a_loop(scenario: Callable[[], T]) -> T:
    """Run a scenario that does not await where there is an event loop."""

    async def main(loop: SimulatedLoop) -> T:
        return scenario()

    return simulate(main).result
