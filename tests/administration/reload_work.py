"""The work of a service that is reloaded while it runs: it takes a while, and counts itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

LONGEST_SECONDS = 0.004


class Witness:
    """What runs, by project and agent; and what was above its limit when it started."""

    def __init__(self) -> None:
        self.running: Counter[tuple[str, str]] = Counter()
        self.ran: Counter[str] = Counter()
        self.limits: dict[tuple[str, str], int] = {}
        self.violations: list[tuple[tuple[str, str], int, int]] = []

    def begin(self, *names: tuple[str, str]) -> None:
        """Count a start, and hold it against the limits of now."""
        for name in names:
            self.running[name] += 1
            limit = self.limits.get(name)
            if limit is not None and self.running[name] > limit:
                self.violations.append((name, self.running[name], limit))

    def end(self, *names: tuple[str, str]) -> None:
        """Count an end."""
        self.running.subtract(names)


witness = Witness()


def start_anew() -> None:
    """Forget what was counted before."""
    witness.__dict__.update(Witness().__dict__)


async def work(order: dict[str, Any]) -> str:
    """Work for a moment, as `params` say."""
    names = (("all", ""), ("project", order["projectId"]), ("agent", order["agentId"]))
    witness.begin(*names)
    try:
        await asyncio.sleep(LONGEST_SECONDS * (hash(order["taskId"]) % 5) / 5)
    finally:
        witness.end(*names)
    witness.ran[order["taskId"]] += 1
    return "done"


async def other_work(order: dict[str, Any]) -> str:
    """Do the same, as another function: a target that is configured otherwise."""
    return await work(order)
