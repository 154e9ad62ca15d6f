"""The room of a store: what is for later, refusals, sizes by project, and a disk that is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psycopg
import pytest

from headgate.core.admission import QueueLimit, QueueLimits
from headgate.core.budgets.ledger import ReserveRequest
from headgate.core.budgets.scopes import ROOT
from headgate.core.money import MicroUsd, Tokens
from headgate.core.retention import BY_SIZE, Evicted, Retention, StoreSize
from headgate.core.task import Submission, TaskStatus
from headgate.errors import StoreFullError
from headgate.storage import maintenance, unit_of_work
from headgate.storage.postgres import translated
from headgate.storage.sql_store import StoreLedger
from headgate.storage.sqlite import SqliteTaskStore
from headgate.storage.store import NewTask, Queued, TaskQuery, TurnedAway
from headgate.storage.task_ids import first_id_at
from headgate.storage.transaction import Transaction
from storage.scene import FAILED, NO_LIMITS, Place, Scene, ids

MIB = 2**20
LARGE = Submission(
    action="click", params=msgspec.Raw(b'"' + b"x" * 100_000 + b'"'), labels={"run": "7"}
)
FOR_EVER = 1e9


# What is for later


async def test_tasks_for_later_take_no_place_in_the_queue(place: Place) -> None:
    limits = QueueLimits(max_queue=2, max_per_agent=2, max_scheduled=3, queue_share=100)
    async with place.scene() as scene:
        later = scene.clock() + 60
        for number in range(3):
            await scene.submit(f"l{number}", not_before=later, limits=limits)
        refused = await scene.ask(scene.new("l3", not_before=later, limits=limits))
        assert isinstance(refused, TurnedAway)
        assert refused.rejected.limit is QueueLimit.SCHEDULED
        for number in range(2):
            await scene.submit(f"q{number}", limits=limits)
        refused = await scene.ask(scene.new("q2", limits=limits))
        assert isinstance(refused, TurnedAway)
        assert refused.rejected.limit is QueueLimit.GLOBAL


async def test_tasks_that_become_due_keep_nobody_from_submitting(place: Place) -> None:
    """They count apart until they start, and in the queue when they are tried again."""
    limits = QueueLimits(max_queue=3, max_per_agent=None, max_scheduled=50, queue_share=8)
    async with place.scene() as scene:
        due_at = scene.clock() + 60
        taken = 0
        for number in range(60):
            new = scene.new(f"h{number}", project_id="hostile", not_before=due_at, limits=limits)
            taken += isinstance(await scene.ask(new), Queued)
        assert taken == 45
        await scene.let_time_pass(61)
        # The place is for whoever comes, though all of these could start now.
        await scene.submit("mine", project_id="honest", limits=limits)
        await scene.assign("h0")
        await scene.settle("h0", FAILED)
        await scene.submit("later", project_id="honest", not_before=due_at + 99, limits=limits)


async def test_a_project_leaves_places_for_later_to_others(place: Place) -> None:
    limits = QueueLimits(max_scheduled=9, queue_share=2)
    async with place.scene() as scene:
        later = scene.clock() + 60
        answers = [
            await scene.ask(
                scene.new(f"h{number}", project_id="hostile", not_before=later, limits=limits)
            )
            for number in range(9)
        ]
        assert sum(isinstance(answer, Queued) for answer in answers) == 6
        last = answers[-1]
        assert isinstance(last, TurnedAway)
        assert last.rejected.limit is QueueLimit.PROJECT_SCHEDULED
        for number in range(2):
            await scene.submit(f"m{number}", project_id="honest", not_before=later, limits=limits)


# Refusals


async def test_a_refusal_is_kept_without_what_was_to_be_done(place: Place) -> None:
    async with place.scene() as scene:
        limits = QueueLimits(max_queue=1)
        await scene.submit("t0", limits=limits)
        refused = await scene.ask(scene.new("t1", limits=limits, submission=LARGE))
        assert isinstance(refused, TurnedAway)
        assert refused.kept_id == "t1"
        kept = await scene.store.get("t1")
        assert kept is not None
        assert kept.task.status is TaskStatus.REJECTED
        assert kept.was_refused
        assert kept.submission == Submission(action="click", labels={"run": "7"})
        assert await scene.store.ask(_ended_bytes) < 2_000


def _ended_bytes(transaction: Transaction) -> int:
    rows = transaction.read("SELECT ended_bytes FROM project_counts")
    return sum(size_bytes for (size_bytes,) in rows)


async def test_a_flood_of_refusals_is_only_counted(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        limits = QueueLimits(max_queue=0)
        answers = [
            await scene.ask(scene.new(f"t{number}", limits=limits, submission=LARGE))
            for number in range(130)
        ]
        assert all(isinstance(answer, TurnedAway) for answer in answers)
        kept = [answer.kept_id for answer in answers if isinstance(answer, TurnedAway)]
        assert kept == [f"t{number}" for number in range(100)] + [None] * 30
        assert (await scene.store.totals()).rejected == 130
        assert (await scene.store.totals()).rejected_by_global == 130
        assert await scene.store.get("t120") is None
        # Others are not counted with it, and in the next second there is room again.
        other = await scene.ask(scene.new("o", project_id="other", limits=limits))
        assert isinstance(other, TurnedAway)
        assert other.kept_id == "o"
        scene.clock.advance(1)
        again = await scene.ask(scene.new("t200", limits=limits))
        assert isinstance(again, TurnedAway)
        assert again.kept_id == "t200"


async def test_refusals_of_a_project_are_bounded_and_the_oldest_go(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "MAX_REFUSALS", 3)
    async with place.scene(evicts=True) as scene:
        limits = QueueLimits(max_queue=0)
        for number in range(5):
            await scene.ask(scene.new(f"t{number}", limits=limits))
            scene.clock.advance(1)
        await scene.ask(scene.new("mine", project_id="other", limits=limits))
        await scene.store.evict(Retention(seconds=FOR_EVER), limit=100)
        assert sorted(ids(await scene.found(TaskQuery()))) == ["mine", "t2", "t3", "t4"]


# Who has most of the store gives most of it back


async def test_too_many_tasks_go_from_the_project_that_has_most(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        for number in range(2):
            await _end(scene, f"honest-{number}", "honest")
        for number in range(6):
            await _end(scene, f"hostile-{number}", "hostile")
        await scene.store.evict(Retention(seconds=FOR_EVER, max_tasks=5), limit=100)
        left = sorted(ids(await scene.found(TaskQuery())))
        assert left == ["honest-0", "honest-1", "hostile-3", "hostile-4", "hostile-5"]
        await scene.store.evict(Retention(seconds=FOR_EVER, max_tasks=2), limit=100)
        assert len(ids(await scene.found(TaskQuery()))) == 2


async def test_a_step_asks_nothing_of_a_project_that_has_nothing_to_delete(place: Place) -> None:
    """It holds up everything that is written, so it costs no more for hundreds of projects."""
    async with place.scene(evicts=True) as scene:
        for number in range(12):
            await _end(scene, f"t{number}", f"p{number}")
        asked: list[object] = []

        def evict(transaction: Transaction, now: float) -> Evicted:
            read = transaction.read

            def counted(sql: Any, parameters: Any = ()) -> Any:
                asked.append(sql)
                return read(sql, parameters)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(transaction, "read", counted)
                return maintenance.evict(
                    transaction, now, retention=Retention(seconds=FOR_EVER), limit=100
                )

        assert (await scene.store.run(evict)).tasks == 0
        assert len(asked) <= 6


async def test_a_large_store_takes_from_the_project_that_takes_most(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        first = first_id_at(scene.clock())
        for number in range(3):
            await _end(scene, f"honest-{number}", "honest")
        for number in range(4):
            await _end(scene, first if not number else f"hostile-{number}", "hostile", LARGE)
        size = StoreSize(used_bytes=1_150_000, max_bytes=1_000_000)

        def evict(transaction: Transaction, now: float) -> Evicted:
            return maintenance.evict(
                transaction,
                now,
                retention=Retention(seconds=FOR_EVER, max_store_bytes=1_000_000),
                limit=100,
                size=size,
            )

        assert (await scene.store.run(evict)).tasks == 3
        left = sorted(ids(await scene.found(TaskQuery())))
        assert left == ["honest-0", "honest-1", "honest-2", "hostile-3"]
        cut = await scene.store.deleted_by(first)
        assert cut is not None
        assert (cut.setting, cut.value) == (BY_SIZE, 1_000_000)


async def test_a_store_at_its_limit_refuses_new_tasks_and_ends_the_others(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        await scene.run("t0")
        limits = QueueLimits(max_store_bytes=1)
        refused = await scene.ask(scene.new("t1", limits=limits))
        assert isinstance(refused, TurnedAway)
        assert (refused.rejected.limit, refused.kept_id) == (QueueLimit.STORE, None)
        assert "scheduler.max_store_bytes" in refused.rejected.message
        assert await scene.store.get("t1") is None
        await scene.settle("t0")
        evicted = await scene.store.evict(Retention(seconds=FOR_EVER, max_store_bytes=1), limit=9)
        assert evicted.tasks == 1
        assert evicted.size is not None
        assert evicted.size.problem


async def test_a_task_that_fails_with_its_parent_needs_room_as_well(place: Place) -> None:
    """Otherwise whoever has one failed task fills the disk with others that depend on it."""
    async with place.scene() as scene:
        await scene.run("parent")
        await scene.settle("parent", FAILED)
        limits = QueueLimits(max_store_bytes=1)
        new = scene.new("t1", depends_on=("parent",), limits=limits, submission=LARGE)
        refused = await scene.ask(new)
        assert isinstance(refused, TurnedAway)
        assert (refused.rejected.limit, refused.kept_id) == (QueueLimit.STORE, None)
        assert await scene.store.get("t1") is None


async def test_a_batch_fits_into_what_is_left_as_a_whole() -> None:
    """What shares a transaction is counted together, though nothing of it is written yet."""
    disk = unit_of_work.Disk()
    room = StoreSize(used_bytes=0, max_bytes=1_000_000)
    disk._size, disk._measured_at = room, 0.0
    for _ in range(9):
        assert (disk.size.room_bytes or 0) >= 100_000
        disk.take(110_000)
    assert disk.size.room_bytes == 10_000


async def _end(
    scene: Scene, task_id: str, project_id: str, submission: Submission | None = None
) -> None:
    await scene.submit(task_id, project_id=project_id, submission=submission, limits=NO_LIMITS)
    await scene.assign(task_id)
    await scene.settle(task_id)
    scene.clock.advance(0.1)


def test_a_server_whose_disk_is_full_has_no_room() -> None:
    connection = cast("psycopg.Connection[object]", SimpleNamespace(closed=False))
    error = psycopg.errors.DiskFull("could not extend file")
    assert isinstance(translated(error, connection), StoreFullError)


# A real disk that is full: a small file system in memory, where the tests may mount one.

DISK_BYTES = 48 * MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only who may mount can test with a disk that is really full")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(folder: Path) -> Path:
    """Have somebody else take all that is left of a disk."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (MIB, 4_096, 1):
            try:
                while True:
                    file.write(b"\1" * size)
            except OSError:
                continue
    return ballast


def _free(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


async def test_a_flood_is_refused_before_the_disk_is_full_and_deletes_its_own(
    small_disk: Path,
) -> None:
    path = small_disk / "tasks.db"
    place = Place(
        "sqlite", lambda clock, ledger: SqliteTaskStore(path, clock=clock, keeps_ledger=ledger)
    )
    keep = Retention(seconds=FOR_EVER)
    async with place.scene(evicts=True) as scene:
        await _end(scene, "mine", "honest")
        refused = 0
        for number in range(600):
            new = scene.new(f"h{number}", project_id="hostile", submission=LARGE)
            answer = await scene.ask(new)
            if isinstance(answer, TurnedAway):
                assert answer.rejected.limit in (QueueLimit.STORE, QueueLimit.PROJECT_STORE)
                refused += 1
                break
        assert refused
        assert _free(small_disk) > 2 * MIB
        # What runs is ended, and another project still has room for its small tasks.
        await scene.submit("other", project_id="honest")
        for number in range(50):
            await scene.assign(f"h{number}")
            await scene.settle(f"h{number}")
        for _ in range(20):
            scene.clock.advance(1)
            await scene.store.evict(keep, limit=100)
        size = (await scene.store.evict(keep, limit=100)).size
        assert size is not None
        assert not size.problem
        again = await scene.ask(scene.new("again", project_id="hostile", submission=LARGE))
        assert isinstance(again, Queued)
        assert await scene.store.get("mine") is not None


async def test_a_full_disk_heals_by_itself(small_disk: Path) -> None:
    path = small_disk / "tasks.db"
    place = Place(
        "sqlite", lambda clock, ledger: SqliteTaskStore(path, clock=clock, keeps_ledger=ledger)
    )
    keep = Retention(seconds=FOR_EVER)
    async with place.scene(evicts=True) as scene:
        for number in range(60):
            await _end(scene, f"t{number}", "search", LARGE)
        await scene.run("running")
        await scene.store.evict(keep, limit=100)
        reserve = path.with_name("tasks.db-reserve")
        assert reserve.stat().st_blocks * 512 == DISK_BYTES // 16
        ballast = _fill(small_disk)
        assert _free(small_disk) < 4_096
        scene.clock.advance(1)
        # Nothing new is taken; what runs is ended.
        answer = await _asked(scene, scene.new("new", submission=LARGE))
        assert isinstance(answer, TurnedAway | StoreFullError)
        money = ReserveRequest(
            reservation_id="r",
            scopes=(ROOT,),
            micro_usd=MicroUsd(0),
            tokens=Tokens(1),
            lease_seconds=9.0,
        )
        with pytest.raises(StoreFullError):
            await StoreLedger(scene.store).reserve(money)
        await scene.settle("running")
        assert await scene.states("running") == ["done"]
        assert ids(await scene.found(TaskQuery(limit=1)))
        for _ in range(30):
            scene.clock.advance(1)
            await scene.store.evict(keep, limit=10)
        size = (await scene.store.evict(keep, limit=10)).size
        assert size is not None
        ballast.unlink()
        scene.clock.advance(1)
        await scene.store.evict(keep, limit=10)
        assert reserve.exists()
        await scene.submit("new", submission=LARGE)


async def test_new_work_never_takes_what_is_kept_back_for_a_full_disk(small_disk: Path) -> None:
    """Otherwise nothing is left of it for a restart, when somebody else fills the disk at once."""
    path = small_disk / "tasks.db"
    place = Place(
        "sqlite", lambda clock, ledger: SqliteTaskStore(path, clock=clock, keeps_ledger=ledger)
    )
    async with place.scene() as scene:
        await scene.run("running")
        reserve = path.with_name("tasks.db-reserve")
        assert reserve.exists()
        # The store has just measured its room when somebody else takes all of it.
        _fill(small_disk)
        answer: object = None
        for number in range(9):
            answer = await _asked(scene, scene.new(f"t{number}", submission=LARGE))
            if not isinstance(answer, Queued):
                break
        assert isinstance(answer, TurnedAway)
        assert reserve.exists()
        await scene.settle("running")
        assert await scene.states("running") == ["done"]


async def _asked(scene: Scene, new: NewTask) -> object:
    try:
        return await scene.ask(new)
    except StoreFullError as error:
        return error


PROGRAM = """
import asyncio, sys
from pathlib import Path
from headgate.core.admission import QueueLimits
from headgate.core.task import Submission, Task, TaskStatus, Terms
from headgate.storage.sqlite import SqliteTaskStore
from headgate.storage.store import NewTask, Node, Queued
import msgspec

async def main():
    store = SqliteTaskStore(Path(sys.argv[1]))
    await store.open()
    await store.join(Node(id="n", capacity=1), lease_seconds=10.0)
    work = Submission(params=msgspec.Raw(b'"' + b"x" * 50_000 + b'"'))
    number = 0
    while True:
        task = Task(id=f"t{number:05}", created_at=1.0, status=TaskStatus.QUEUED)
        new = NewTask(task=task, terms=Terms(), submission=work, limits=QueueLimits(
            max_queue=None, max_per_agent=None))
        try:
            answer = await store.submit(new)
        except Exception as error:
            print("failed", type(error).__name__, flush=True)
            continue
        print("taken" if isinstance(answer, Queued) else "refused", task.id, flush=True)
        number += 1

asyncio.run(main())
"""


async def test_a_restart_on_a_full_disk_reads_and_deletes_and_has_lost_nothing(
    small_disk: Path,
) -> None:
    path = small_disk / "tasks.db"
    program = textwrap.dedent(PROGRAM)
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        taken = []
        ballast = None
        for line in process.stdout:
            what, *rest = line.split()
            if what == "taken":
                taken.append(rest[0])
            if len(taken) == 100 and ballast is None:
                ballast = _fill(small_disk)
            if what != "taken":
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(taken) >= 100
    assert ballast is not None
    _fill_rest(small_disk)
    store = SqliteTaskStore(path)
    place = Place("sqlite", lambda _clock, _ledger: store)
    await store.open()
    try:
        scene = Scene(place, store)
        await scene.start()
        for task_id in taken:
            record = await store.get(task_id)
            assert record is not None
            assert len(record.submission.params) == 50_002
        for task_id in taken[:40]:
            await store.cancel(task_id, node_id="n1")
        for _ in range(60):
            await store.evict(Retention(seconds=0), limit=10)
        left = [task_id for task_id in taken if await store.get(task_id) is not None]
        assert left == taken[40:]
        ballast.unlink()
    finally:
        await store.close()


def _fill_rest(folder: Path) -> None:
    """Have somebody else take what has become free, as far as it goes."""
    with (folder / "rest").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\1" * 4_096)
        except OSError:
            return
