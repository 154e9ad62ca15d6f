"""Executors whose work is simulated: it takes virtual time, and ends as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from headgate.core.lifecycle import Failed, Limited, Outcome, Succeeded, Usage
from headgate.executors.executor import WorkOrder

Work = Callable[[WorkOrder], tuple[float, Outcome]]
"""Says how many seconds an order takes, and what comes of it."""

FOREVER_SECONDS = 1e7
DONE = Succeeded(usage=Usage(tokens=1, micro_usd=0))


class SimulatedExecutor:
    """Does what it is told, and remembers what it was asked."""

    def __init__(self, work: Work, *, stop_seconds: float = 0.0) -> None:
        self.work = work
        self.stop_seconds = stop_seconds
        self.orders: list[WorkOrder] = []
        self.stopped: list[str] = []
        self.running = 0
        self.most_running = 0

    async def open(self) -> None:
        """Make nothing ready."""

    async def close(self) -> None:
        """Let nothing go."""

    async def execute(self, order: WorkOrder) -> Outcome:
        """Let time pass."""
        self.orders.append(order)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        seconds, outcome = self.work(order)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.stopped.append(order.task_id)
            await asyncio.sleep(self.stop_seconds)
            raise
        finally:
            self.running -= 1
        return outcome


def always(seconds: float, outcome: Outcome = DONE) -> Work:
    """Return work that takes so long, and ends so."""
    return lambda _order: (seconds, outcome)


def in_turn(*results: tuple[float, Outcome]) -> Work:
    """Return work that ends differently each time, and then as the last time."""
    left = list(results)
    return lambda _order: left.pop(0) if len(left) > 1 else left[0]


def by_chance(random: Random, *, overruns: bool) -> Work:
    """Return work of which anything may come."""

    def work(_order: WorkOrder) -> tuple[float, Outcome]:
        draw = random.random()
        seconds = random.choice([0.0, 0.01, 0.5, 3.0, 8.0])
        tokens = random.choice([None, 0, 5, 100] + ([5_000] if overruns else []))
        usage = Usage(tokens=tokens, micro_usd=0)
        if draw < 0.6:
            return seconds, Succeeded(usage=usage)
        if draw < 0.75:
            return seconds, Failed(error="it broke", is_transient=True, usage=usage)
        if draw < 0.8:
            return seconds, Failed(error="it is wrong", usage=usage)
        if draw < 0.9:
            return seconds, Limited(retry_after_seconds=random.choice([0.0, 1.0, 5.0]))
        return FOREVER_SECONDS, DONE

    return work
