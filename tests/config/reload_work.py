"""The work of a service that is reloaded while it runs: it takes a while, and counts itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from service.work import until_there

LONGEST_SECONDS = 0.03

Name = tuple[str, str]


class Witness:
    """What runs, by project and agent; which limits were reached, and which were passed."""

    def __init__(self) -> None:
        self.running: Counter[Name] = Counter()
        self.ran: Counter[str] = Counter()
        self.limits: dict[Name, int] = {}
        self.reached: set[tuple[Name, int]] = set()
        self.violations: list[tuple[Name, int, int]] = []

    def begin(self, *names: Name) -> None:
        """Count a start, and hold it against the limits of now."""
        for name in names:
            self.running[name] += 1
            limit = self.limits.get(name)
            if limit is not None and self.running[name] == limit:
                self.reached.add((name, limit))
            elif limit is not None and self.running[name] > limit:
                self.violations.append((name, self.running[name], limit))

    def end(self, *names: Name) -> None:
        """Count an end."""
        self.running.subtract(names)


witness = Witness()


def start_anew() -> None:
    """Forget what was counted before."""
    witness.__dict__.update(Witness().__dict__)


async def work(order: dict[str, Any]) -> dict[str, Any]:
    """Work for a moment, and say that nothing was spent."""
    names = [("all", ""), ("project", order["projectId"]), ("agent", order["agentId"])]
    if order["params"]:
        names.append(("budget", "session:load"))
    witness.begin(*names)
    try:
        await asyncio.sleep(LONGEST_SECONDS * (1 + hash(order["taskId"]) % 4) / 4)
    finally:
        witness.end(*names)
    witness.ran[order["taskId"]] += 1
    return {"usage": {"input_tokens": 0, "output_tokens": 0}}


async def other_work(order: dict[str, Any]) -> dict[str, Any]:
    """Do the same, as another function: a target that is configured otherwise."""
    return await work(order)


async def nap(order: dict[str, Any]) -> None:
    """Sleep for as long as the task says, or until the file is there that it names."""
    params = order["params"]
    await asyncio.sleep(params.get("seconds", 0.0))
    if "until" in params:
        await until_there(Path(params["until"]))


async def model(order: dict[str, Any]) -> dict[str, Any]:
    """Answer as a model does that is priced by the settings."""
    usage = {"input_tokens": 1_000_000, "output_tokens": 0}
    return {"model": "house-7b", "usage": usage, "taskId": order["taskId"]}
