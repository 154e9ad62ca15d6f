"""The file of an SQLite ledger: when it is deleted, replaced or moved, nothing is spent twice."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from budgets.support import assert_ledger_is_right, usd
from headgate.budgets.connect import connect_budget
from headgate.budgets.sqlite import SqliteBudgetTracker
from headgate.errors import BudgetExceededError, LedgerUnavailableError, StoreError

FLOW = "session:eval/workflow:w1"
IS_GONE = r"ledger\.db is gone, nothing was granted; put it back"
HAS_NO_LEDGER = "has no ledger any more, nothing was granted; put it back"


def remove(path: Path) -> None:
    for name in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        name.unlink(missing_ok=True)


async def test_a_file_that_is_gone_grants_nothing_and_is_not_founded_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with SqliteBudgetTracker(path) as tracker:
        await tracker.reserve(FLOW, "0.10")
        path.rename(tmp_path / "away.db")
        for _ in range(2):
            with pytest.raises(LedgerUnavailableError, match=IS_GONE):
                await tracker.reserve(FLOW, "0.10")
        assert not path.exists()
        (tmp_path / "away.db").rename(path)
        await tracker.reserve(FLOW, "0.10")
        assert (await usd(tracker)).reserved == 200_000
        await assert_ledger_is_right(tracker)
    remove(path)
    with pytest.raises(LedgerUnavailableError, match=IS_GONE):
        await tracker.ledger.open()
    assert not path.exists()


@pytest.mark.parametrize("delete", [remove, Path.unlink], ids=["all three", "the ledger alone"])
async def test_a_file_that_was_replaced_is_the_one_that_is_written(
    delete: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "ledger.db"
    async with SqliteBudgetTracker(path) as first:
        await first.reserve(FLOW, "0.10")
        delete(path)
        async with SqliteBudgetTracker(path) as second:
            await second.set_budget("session:eval", "1.00")
            await second.reserve(FLOW, "0.60")
            with pytest.raises(BudgetExceededError):
                await first.reserve(FLOW, "0.60")
            await first.reserve(FLOW, "0.40")
            assert (await usd(second)).reserved == 1_000_000
            # What the first one let go of must not be the files that the second one writes.
            assert path.with_name("ledger.db-wal").exists()
    async with SqliteBudgetTracker(path) as third:
        assert (await usd(third)).reserved == 1_000_000
        await assert_ledger_is_right(third)


async def test_a_file_without_a_ledger_in_place_of_the_ledger_grants_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.db"
    async with SqliteBudgetTracker(path) as tracker:
        await tracker.reserve(FLOW, "0.10")
        remove(path)
        path.touch()
        for call in (tracker.reserve(FLOW, "0.10"), tracker.status(), tracker.journal()):
            with pytest.raises(LedgerUnavailableError, match=HAS_NO_LEDGER):
                await call
        remove(path)
        path.write_text("this is not the ledger that you are looking for, " * 40)
        with pytest.raises(LedgerUnavailableError, match="not a database"):
            await tracker.reserve(FLOW, "0.10")


async def test_a_newer_ledger_in_place_of_the_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    newer = tmp_path / "newer.db"
    async with SqliteBudgetTracker(newer):
        pass
    connection = apsw.Connection(str(newer))
    connection.execute("UPDATE headgate_schema SET version = 99")
    connection.close()
    async with SqliteBudgetTracker(path) as tracker:
        await tracker.reserve(FLOW, "0.10")
        remove(path)
        newer.rename(path)
        with pytest.raises(StoreError, match="ledger tables are at version 99"):
            await tracker.reserve(FLOW, "0.10")


async def test_a_relative_path_is_that_of_the_folder_in_which_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    tracker = connect_budget("sqlite:///ledger.db")
    monkeypatch.chdir(tmp_path / "elsewhere")
    async with tracker:
        await tracker.reserve(FLOW, "0.10")
    assert (tmp_path / "ledger.db").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


# Takes the bytes on which SQLite has a lock for as long as a connection is open.
TAKE_LOCK = """import fcntl, sys
with open(sys.argv[1], "r+b") as ledger:
    fcntl.lockf(ledger, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000002)"""


def take_lock(path: Path) -> str:
    command = [sys.executable, "-c", TAKE_LOCK, str(path)]
    return subprocess.run(command, check=False, capture_output=True, text=True).stderr


async def test_a_further_tracker_of_a_process_takes_no_lock_from_the_first(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with SqliteBudgetTracker(path):
        async with SqliteBudgetTracker(path):
            pass
        assert "BlockingIOError" in await asyncio.to_thread(take_lock, path)
