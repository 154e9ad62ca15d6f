"""Making a desk from the store, while the event loop goes on with everything else."""

from __future__ import annotations

import asyncio

from headgate.core.dispatch.desk import Desk
from headgate.core.dispatch.desk_settings import DeskSettings
from headgate.errors import StaleEpochError
from headgate.store import Backlog

LOADED_AT_ONCE = 500
"""How many tasks are loaded between two turns of the loop, which has signs of life to show."""


def ended_while_loading(epoch: int) -> StaleEpochError:
    """Return why what was loaded is of no use."""
    return StaleEpochError(f"epoch {epoch} ended while the backlog was read")


async def desk_from(backlog: Backlog, settings: DeskSettings, now: float, *, node_id: str) -> Desk:
    """Return a desk that has everything in the backlog, for the node that dispatches."""
    desk = Desk(settings)
    desk.load(
        (),
        usage=backlog.usage,
        rate_counts=backlog.rate_counts,
        closures=backlog.closures,
        lane_served=_served(backlog),
        tick=backlog.tick,
        now=now,
    )
    # Among equals the first is taken, and a task starts here in one step less than elsewhere.
    for node in sorted(backlog.nodes, key=lambda node: node.id != node_id):
        desk.workers.set_node(node.id, node.places, agent_id=node.agent_id, now=now)
    for start in range(0, len(backlog.records), LOADED_AT_ONCE):
        desk.load_more(backlog.records[start : start + LOADED_AT_ONCE], now)
        await asyncio.sleep(0)
    return desk


def _served(backlog: Backlog) -> dict[str, dict[str, int]]:
    served: dict[str, dict[str, int]] = {}
    for lane in backlog.lanes:
        served.setdefault(lane.project_id, {})[lane.agent_id] = lane.served_tick
    return served
