"""Books are open while a call uses them, and closed once the client and its last call are over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headgate.budgets.local import LocalBudgetTracker
from headgate.errors import InvalidSettingError
from headgate.inprocess.sdk.governor import Books


async def test_the_first_call_opens_and_the_client_closes() -> None:
    books = Books("memory:")
    assert not books.is_open
    await books.use()
    await books.leave()
    assert books.is_open
    await books.close()
    assert not books.is_open


async def test_the_last_call_closes_what_the_client_left_open() -> None:
    books = Books("memory:")
    await asyncio.gather(books.use(), books.use())
    await books.close()
    await books.leave()
    assert books.is_open
    await books.leave()
    assert not books.is_open


async def test_a_call_that_comes_while_they_close_has_them_open() -> None:
    books = Books("memory:")
    await books.use()
    await books.leave()
    for _ in range(3):
        await asyncio.gather(books.close(), books.use(), books.close())
        assert books.is_open
        await books.leave()
        await books.close()
        assert not books.is_open


async def test_books_that_were_given_are_left_alone() -> None:
    tracker = LocalBudgetTracker()
    books = Books(tracker)
    assert await books.use() is tracker
    await books.leave()
    await books.close()
    assert books.is_open


async def test_a_call_that_could_not_open_them_does_not_use_them(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    books = Books(f"sqlite:///{folder}/budget.db")
    with pytest.raises(InvalidSettingError, match="create it first"):
        await books.use()
    folder.mkdir()
    await books.use()
    await books.leave()
    await books.close()
    assert not books.is_open


def test_calls_of_a_loop_that_is_over_keep_nothing_open() -> None:
    books = Books("memory:")
    asyncio.run(_used(books))
    asyncio.run(books.close())
    assert not books.is_open


async def _used(books: Books) -> None:
    await books.use()
