"""A store that one process has alone: what an earlier one left behind keeps nobody waiting."""

from __future__ import annotations

from pathlib import Path

from headgate.storage.sqlite import SqliteTaskStore
from headgate.storage.store import Node
from headgate.testing import VirtualClock

LEASE_SECONDS = 3.0


async def life(path: Path, clock: VirtualClock, node_id: str) -> tuple[str, int]:
    """Join, stand for election, and go without a word; return who was elected."""
    store = SqliteTaskStore(path, clock=clock)
    await store.open()
    try:
        await store.join(Node(id=node_id, capacity=1), lease_seconds=LEASE_SECONDS)
        elected = await store.elect(node_id, lease_seconds=LEASE_SECONDS)
        return elected.node_id, elected.epoch
    finally:
        await store.close()


async def test_the_next_process_dispatches_at_once_under_a_new_epoch(tmp_path: Path) -> None:
    clock = VirtualClock()
    assert await life(tmp_path / "tasks.db", clock, "n1") == ("n1", 1)
    assert await life(tmp_path / "tasks.db", clock, "n2") == ("n2", 2)
