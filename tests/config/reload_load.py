"""A service whose file changes without pause while clients submit, and what came of it.

There is always more to do than may run, so that every limit of both files is reached. One that
is never reached proves nothing, and is told of as a problem too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config.reload_work import Name, Witness, start_anew, witness
from config.running import Running, running

CHARGED = {"params": {"isCharged": True}, "scopes": ["session:load"], "estimate": {"tokens": 50}}
PLACES: tuple[dict[str, Any], ...] = (
    {"projectId": "capped"},
    {"projectId": "free"},
    {"projectId": "free", "agentId": "one"},
    {"projectId": "free", "agentId": "mine"},
    {"projectId": "extra"},
    {"projectId": "wide", "agentId": "guest", **CHARGED},
    {"projectId": "wide", "agentId": "other"},
)
WAITING_PER_PLACE = 9
PHASE_SECONDS = 0.04
MOST = 5
STARTED_TURNS = 10
"""What was started before an answer begins within so many turns of the loop after it."""

QUEUE: Name = ("queue", "")
LOW: dict[Name, int] = {
    QUEUE: 30,
    ("all", ""): 9,
    ("project", "capped"): 2,
    ("project", "free"): 3,
    ("agent", "one"): 1,
    ("agent", "any"): 2,
    ("budget", "session:load"): 2,
}
HIGH: dict[Name, int] = {
    QUEUE: 36,
    ("all", ""): 15,
    ("project", "capped"): 2,
    ("project", "free"): 6,
    ("agent", "one"): 1,
    ("agent", "any"): 4,
    ("budget", "session:load"): 4,
}


@dataclass
class Findings:
    """What a run did, and what it found."""

    reloads: int = 0
    taken: list[str] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    left: tuple[int, int] = (0, 0)
    witness: Witness = field(default_factory=Witness)

    def idle(self) -> list[tuple[Name, int]]:
        """Return the limits that were never reached."""
        return sorted({*LOW.items(), *HIGH.items()} - self.witness.reached)

    def problems(self) -> list[str]:
        """Return every promise that was broken, in words."""
        found = {
            "too few tasks": len(self.taken) < self.reloads,
            f"tasks ended as {self.states}": self.states != {"done"},
            f"limits passed: {self.witness.violations[:3]}": bool(self.witness.violations),
            f"limits never reached: {self.idle()}": bool(self.idle()),
            "tasks lost or foreign": set(self.witness.ran) != set(self.taken),
            f"left behind: {self.left}": self.left != (0, 0),
        }
        return [problem for problem, is_so in found.items() if is_so]


@dataclass
class Pace:
    """How many tasks of one place are submitted at once."""

    at_once: int = 1


def many(*, low: bool) -> str:
    """Return one of two files between which the limits, agents, targets and projects change."""
    limits = LOW if low else HIGH
    entry = "work" if low else "other_work"
    extra = "[projects.extra]\nmax_concurrent_agents = 6\n[agents.spare]\ncapacity = 2\n"
    strategy = 'strategy = "load"' if low else ""
    return f"""
[scheduler]
tick_seconds = 0.05
task_retention_seconds = 600
max_queue_size = {limits[QUEUE]}
max_per_agent = 100000
max_inflight = {limits["all", ""]}
worker_count = {12 if low else 24}
{strategy}
[projects.capped]
max_concurrent_agents = {limits["project", "capped"]}
credit_weight = {4.0 if low else 6.0}
[projects.free]
max_concurrent_agents = {limits["project", "free"]}
credit_weight = 12.0
[projects.wide]
max_concurrent_agents = 50
[agents.one]
capacity = {limits["agent", "one"]}
[agents.any]
capacity = {limits["agent", "any"]}
{"" if low else extra}
[budgets."session:load"]
limit_tokens = {50 * limits["budget", "session:load"]}
[targets.work]
kind = "callable"
entry_point = "config.reload_work:{entry}"
default = true
"""


async def reload_under_load(folder: Path, *, reloads: int, store: str = "memory:") -> Findings:
    """Reload a service again and again, by turns with a low and a high file.

    On a slow machine tasks may end as soon as they come. Then there are more reloads than these,
    and more is submitted at once, until every limit was reached.
    """
    start_anew()
    found = Findings(witness=witness)
    is_over = asyncio.Event()
    async with running(folder, many(low=False), store=store) as service:
        witness.limits = HIGH
        pace = Pace()
        submitting = asyncio.create_task(_submit(service, found.taken, pace, is_over))
        while found.reloads < reloads or (found.idle() and found.reloads < MOST * reloads):
            if found.reloads >= reloads:
                pace.at_once = WAITING_PER_PLACE
            await _reload(service, low=found.reloads % 2 == 0)
            found.reloads += 1
        is_over.set()
        await submitting
        found.states = {(await service.ended(task_id))["state"] for task_id in found.taken}
        queue = (await service.get("/scheduler/stats"))["queue"]
        found.left = (queue["totalQueued"], queue["totalInflight"])
    return found


async def _reload(service: Running, *, low: bool) -> None:
    # A higher limit holds as soon as it may be in force, a lower one when it was answered.
    if not low:
        witness.limits = HIGH
    service.path.write_text(many(low=low))
    response = await service.ask("POST", "/scheduler/reload")
    assert response.status == 200, response.body
    for _ in range(STARTED_TURNS):
        await asyncio.sleep(0)
    witness.limits = LOW if low else HIGH
    await asyncio.sleep(PHASE_SECONDS)


async def _submit(service: Running, taken: list[str], pace: Pace, is_over: asyncio.Event) -> None:
    place_of: dict[str, int] = {}
    while not is_over.is_set():
        waiting = Counter(place for one, place in place_of.items() if one not in witness.ran)
        # One for each place before the second for any, or the last places would get nothing.
        short = [
            number
            for more in range(1, pace.at_once + 1)
            for number in range(len(PLACES))
            if waiting[number] + more <= WAITING_PER_PLACE
        ]
        answers = await asyncio.gather(*(_submit_one(service, PLACES[one]) for one in short))
        place_of |= {task_id: one for task_id, one in zip(answers, short, strict=True) if task_id}
        await asyncio.sleep(0.001)
    taken += place_of


async def _submit_one(service: Running, place: dict[str, Any]) -> str | None:
    before = witness.limits[QUEUE]
    response = await service.ask("POST", "/tasks", {"agentId": "", "action": "run", **place})
    most = max(before, witness.limits[QUEUE])
    if response.status == 202:
        if response.json["position"] > most:
            witness.violations.append((QUEUE, response.json["position"], most))
        return str(response.json["taskId"])
    if response.status == 429:
        witness.reached.add((QUEUE, response.problem["details"]["maxQueue"]))
        # Each refusal is stored, and there is nothing to learn from thousands.
        await asyncio.sleep(0.01)
        return None
    assert response.json["code"] in ("draining", "unknown_project"), response.body
    return None
