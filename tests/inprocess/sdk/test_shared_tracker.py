"""A ledger is open while a call uses it, and closed once the client and its last call are over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headgate.budgets.local import LocalBudgetTracker
from headgate.errors import InvalidSettingError
from headgate.inprocess.sdk.governor import SharedTracker


async def test_the_first_call_opens_and_the_client_closes() -> None:
    shared = SharedTracker("memory:")
    assert not shared.is_open
    await shared.use()
    await shared.leave()
    assert shared.is_open
    await shared.close()
    assert not shared.is_open


async def test_the_last_call_closes_what_the_client_left_open() -> None:
    shared = SharedTracker("memory:")
    await asyncio.gather(shared.use(), shared.use())
    await shared.close()
    await shared.leave()
    assert shared.is_open
    await shared.leave()
    assert not shared.is_open


async def test_a_call_that_comes_while_they_close_has_them_open() -> None:
    shared = SharedTracker("memory:")
    await shared.use()
    await shared.leave()
    for _ in range(3):
        await asyncio.gather(shared.close(), shared.use(), shared.close())
        assert shared.is_open
        await shared.leave()
        await shared.close()
        assert not shared.is_open


async def test_a_tracker_that_was_given_is_left_alone() -> None:
    tracker = LocalBudgetTracker()
    shared = SharedTracker(tracker)
    assert await shared.use() is tracker
    await shared.leave()
    await shared.close()
    assert shared.is_open


async def test_a_call_that_could_not_open_them_does_not_use_them(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    shared = SharedTracker(f"sqlite:///{folder}/budget.db")
    with pytest.raises(InvalidSettingError, match="create it first"):
        await shared.use()
    folder.mkdir()
    await shared.use()
    await shared.leave()
    await shared.close()
    assert not shared.is_open


def test_calls_of_a_loop_that_is_over_keep_nothing_open() -> None:
    shared = SharedTracker("memory:")
    asyncio.run(_used(shared))
    asyncio.run(shared.close())
    assert not shared.is_open


async def _used(shared: SharedTracker) -> None:
    await shared.use()
