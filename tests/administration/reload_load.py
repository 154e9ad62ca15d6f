"""A service whose file changes without pause while clients submit, and what came of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from administration.reload_work import Witness, start_anew, witness
from administration.running import Running, running

PLACES = (
    {"projectId": "capped"},
    {"projectId": "free"},
    {"projectId": "free", "agentId": "one"},
    {"projectId": "extra"},
    {"projectId": "free", "agentId": "guest"},
)


@dataclass
class Findings:
    """What a run did, and what it found."""

    reloads: int = 0
    taken: list[str] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    left: tuple[int, int] = (0, 0)
    witness: Witness = field(default_factory=Witness)

    def problems(self) -> list[str]:
        """Return every promise that was broken, in words."""
        found = {
            "too few tasks": len(self.taken) < self.reloads / 10,
            f"tasks ended as {self.states}": self.states != {"done"},
            f"limits passed: {self.witness.violations[:3]}": bool(self.witness.violations),
            "tasks lost or foreign": set(self.witness.ran) != set(self.taken),
            f"left behind: {self.left}": self.left != (0, 0),
        }
        return [problem for problem, is_so in found.items() if is_so]


def many(*, low: bool) -> str:
    """Return one of two files between which the limits, agents, targets and projects change."""
    entry = "work" if low else "other_work"
    extra = "" if low else "[projects.extra]\n[agents.spare]\ncapacity = 2\n"
    strategy = 'strategy = "load"' if low else ""
    return f"""
[scheduler]
tick_seconds = 0.05
result_ttl_seconds = 600
max_queue_size = 100000
max_per_agent = 100000
max_inflight = {3 if low else 9}
worker_count = {4 if low else 20}
{strategy}
[projects.capped]
max_concurrent_agents = 2
credit_weight = {1.0 if low else 3.0}
[projects.free]
max_concurrent_agents = {2 if low else 8}
[agents.one]
capacity = 1
[agents.any]
capacity = {2 if low else 6}
{extra}
[targets.work]
kind = "callable"
entry_point = "administration.reload_work:{entry}"
default = true
"""


async def reload_under_load(folder: Path, *, reloads: int, store: str = "memory:") -> Findings:
    """Reload a service again and again, by turns with a low and a high file."""
    start_anew()
    found = Findings(reloads=reloads, witness=witness)
    is_over = asyncio.Event()
    async with running(folder, many(low=False), store=store) as service:
        submitting = asyncio.create_task(_submit(service, found.taken, is_over))
        for number in range(reloads):
            await _reload(service, low=number % 2 == 0)
        is_over.set()
        await submitting
        found.states = {(await service.ended(task_id))["state"] for task_id in found.taken}
        queue = (await service.get("/scheduler/stats"))["queue"]
        found.left = (queue["totalQueued"], queue["totalInflight"])
    return found


async def _reload(service: Running, *, low: bool) -> None:
    # A higher limit holds as soon as it may be in force, a lower one when it was answered.
    if not low:
        _obey(low=False)
    service.path.write_text(many(low=low))
    response = await service.ask("POST", "/scheduler/reload")
    assert response.status == 200, response.body
    _obey(low=low)
    await asyncio.sleep(0)


def _obey(*, low: bool) -> None:
    witness.limits = {
        ("all", ""): 3 if low else 9,
        ("project", "capped"): 2,
        ("project", "free"): 2 if low else 8,
        ("agent", "one"): 1,
        ("agent", "any"): 2 if low else 6,
    }


async def _submit(service: Running, taken: list[str], is_over: asyncio.Event) -> None:
    number = 0
    while not is_over.is_set():
        body = {"agentId": "", "action": "run", **PLACES[number % len(PLACES)]}
        number += 1
        response = await service.ask("POST", "/tasks", body)
        if response.status == 202:
            taken.append(response.json["taskId"])
        else:
            assert response.json["code"] in ("draining", "unknown_project"), response.body
        await asyncio.sleep(0.001)
