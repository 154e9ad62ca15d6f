"""Tasks in doubt are looked at behind what is on its way to the disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from headgate.engine.dispatcher import UnknownWrites
from headgate.storage.transaction import Transaction
from headgate.storage.writer import Step, StepAnswer
from storage.scene import fresh_place

WRITING_SECONDS = 0.2


async def test_a_submit_whose_client_left_while_it_was_written_is_found(
    request: pytest.FixtureRequest,
) -> None:
    async with fresh_place("sqlite", request).scene() as scene:
        store, loop = scene.store, asyncio.get_running_loop()
        apply, is_written, may_go_on = store.tables.apply, asyncio.Event(), threading.Event()

        def slowly(transaction: Transaction, steps: Sequence[Step]) -> Sequence[StepAnswer]:
            loop.call_soon_threadsafe(is_written.set)
            may_go_on.wait(10)
            return apply(transaction, steps)

        store._steps = slowly
        asking = store.submit(scene.new("t1"))
        await is_written.wait()
        asking.cancel()
        unknown = UnknownWrites(store)
        unknown.add("t1")
        unknown.add("t2")
        loop.call_later(WRITING_SECONDS, may_go_on.set)
        found = {task_id: record is not None async for task_id, record in unknown.read()}
        assert found == {"t1": True, "t2": False}
        assert len(unknown) == 0
