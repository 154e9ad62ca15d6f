"""A store that one process has alone: what an earlier one left behind keeps nobody waiting."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from headgate.storage.sqlite import SqliteTaskStore
from headgate.storage.store import Life, Node, Visit
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


@pytest.mark.parametrize("is_kept", [True, False])
async def test_workers_are_kept_while_the_only_process_is_too_busy_to_hear_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_kept: bool
) -> None:
    monkeypatch.setattr("headgate.storage.sql_store.SOLE_LEASE_SECONDS", 1.0)
    store = SqliteTaskStore(tmp_path / "tasks.db")
    await store.open()
    try:
        await store.join(Node(id="n1", capacity=1), lease_seconds=LEASE_SECONDS)
        visit = Visit(worker_id="worker-1", agent_id="a", capacity=1, running={}, lease_seconds=1.0)
        await store.visit(msgspec.structs.replace(visit, joins=True))
        store.keep_alive(Life(node_id="n1", lease_seconds=LEASE_SECONDS) if is_kept else None)
        # The event loop does nothing for longer than the lease of the worker.
        time.sleep(1.5)  # noqa: ASYNC251
        epoch = (await store.elect("n1", lease_seconds=LEASE_SECONDS)).epoch
        alive = [node.id for node in (await store.backlog(epoch)).nodes]
        assert alive == (["n1", "worker-1"] if is_kept else ["n1"])
    finally:
        await store.close()
