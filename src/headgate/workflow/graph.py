"""The order of steps: which go first, and whether any wait for each other in a circle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from headgate.workflow.workflow import Step


def ordered(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return steps so that parents go first, and otherwise in the order of the file."""
    by_id = {step.id: step for step in steps}
    order = topological_order({step.id: step.depends_on for step in steps})
    return tuple(by_id[step_id] for step_id in order)


def topological_order(parents: Mapping[str, Iterable[str]]) -> list[str]:
    """Return names so that parents go first; those that wait in a circle are left out."""
    waiting_for = {name: len(set(before)) for name, before in parents.items()}
    children: dict[str, list[str]] = {name: [] for name in parents}
    for name, before in parents.items():
        for parent in set(before):
            children[parent].append(name)
    ready = deque(name for name, count in waiting_for.items() if count == 0)
    order: list[str] = []
    while ready:
        name = ready.popleft()
        order.append(name)
        for child in children[name]:
            waiting_for[child] -= 1
            if waiting_for[child] == 0:
                ready.append(child)
    return order


def circle_in(parents: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return a circle, each name before the one that it waits for; empty if there is none."""
    stuck = dict.fromkeys(name for name in parents)
    for name in topological_order(parents):
        del stuck[name]
    if not stuck:
        return ()
    # Whatever is stuck waits for something that is stuck, so this walk comes back to itself.
    name = next(iter(stuck))
    seen: dict[str, int] = {}
    walk: list[str] = []
    while name not in seen:
        seen[name] = len(walk)
        walk.append(name)
        name = next(parent for parent in parents[name] if parent in stuck)
    return tuple(walk[seen[name] :])
