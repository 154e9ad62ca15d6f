"""The writer in a process of its own: what it answers, and what its end means to callers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import LedgerUnavailableError
from headgate.storage.sqlite import SqliteDatabase
from headgate.storage.transaction import Transaction
from headgate.storage.writer import (
    MAX_BATCH,
    MAX_SHORT_LIVES,
    ChildStarter,
    Frames,
    ProcessWriter,
    StandingOrder,
    framed,
)
from service.support import ROOT, wait_until
from storage import number_work

SECONDS = 10.0
PARENT = """
import asyncio, os, signal, sys
from functools import partial
from pathlib import Path
from storage import number_work
from headgate.storage.writer import ChildStarter
from headgate.storage.writer import ProcessWriter

async def main():
    recipe = partial(number_work.writer_setup, Path(sys.argv[1]))
    writer = ProcessWriter(recipe, number_work.PickleWire(), ChildStarter())
    writer.start()
    print(await writer.submit(number_work.pid), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@asynccontextmanager
async def opened(
    path: Path, *, needed: Path | None = None, max_queued: int = 100_000
) -> AsyncIterator[ProcessWriter]:
    recipe = partial(number_work.writer_setup, path, needed)
    writer = ProcessWriter(recipe, number_work.PickleWire(), ChildStarter(), max_queued=max_queued)
    writer.start()
    try:
        if needed is None:
            await writer.submit(number_work.create)
        yield writer
    finally:
        await writer.close()


def kept(path: Path) -> list[int]:
    database = SqliteDatabase(path)
    try:
        return number_work.numbers(database.begin())
    finally:
        database.close()


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


async def until_it_works(writer: ProcessWriter, operation: Callable[[Transaction], object]) -> None:
    """Ask for something that does no harm twice, until it is answered."""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                await writer.submit(operation)
            except LedgerUnavailableError:
                await asyncio.sleep(0.02)
            else:
                return


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 60))
def test_frames_are_the_same_however_the_stream_was_cut(payloads: list[bytes], step: int) -> None:
    stream = b"".join(framed(payload) for payload in payloads)
    frames = Frames()
    found = [
        frame
        for start in range(0, len(stream), step)
        for frame in frames.feed(stream[start : start + step])
    ]
    assert found == payloads


async def test_what_was_answered_is_on_disk_and_was_written_elsewhere(tmp_path: Path) -> None:
    async with opened(tmp_path / "n.db") as writer:
        answers = await asyncio.gather(
            *(writer.submit(partial(number_work.add, number)) for number in range(2_000))
        )
        assert answers == list(range(2_000))
        assert await writer.submit(number_work.pid) == writer.pid != os.getpid()
        assert kept(tmp_path / "n.db") == answers


def order(every_seconds: float = 0.05, longest_seconds: float = 60.0) -> StandingOrder:
    """Return the order to add a number, again and again."""
    return StandingOrder(number_work.add_next, every_seconds, longest_seconds)


def sleep_until(condition: Callable[[], bool]) -> None:
    """Wait without letting the event loop go on."""
    wait_until(condition, seconds=SECONDS)


async def test_a_standing_order_is_repeated_while_the_loop_is_busy(tmp_path: Path) -> None:
    path = tmp_path / "n.db"
    async with opened(path) as writer:
        writer.keep([order()])
        sleep_until(lambda: len(kept(path)) >= 3)
        writer.keep(())
        await writer.submit(number_work.pid)
        done = kept(path)
        time.sleep(0.3)  # noqa: ASYNC251
        assert kept(path) == done


async def test_nothing_is_repeated_while_the_loop_shows_itself_in_time(tmp_path: Path) -> None:
    path = tmp_path / "n.db"
    async with opened(path) as writer:
        for _ in range(10):
            writer.keep([order(every_seconds=SECONDS)])
            await asyncio.sleep(0.02)
        assert kept(path) == []


async def test_a_loop_that_is_silent_for_too_long_is_not_spoken_for(tmp_path: Path) -> None:
    path = tmp_path / "n.db"
    async with opened(path) as writer:
        writer.keep([order(longest_seconds=0.3)])
        sleep_until(lambda: bool(kept(path)))
        time.sleep(0.5)  # noqa: ASYNC251
        done = kept(path)
        time.sleep(0.3)  # noqa: ASYNC251
        assert kept(path) == done


async def test_a_loop_too_busy_to_read_its_answers_is_spoken_for(tmp_path: Path) -> None:
    """They fill the socket, and whoever sends them waits."""
    path = tmp_path / "n.db"
    async with opened(path) as writer:
        writer.keep([order()])
        answer = writer.submit(partial(number_work.text, 8_000_000))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sleep_until(lambda: len(kept(path)) >= 3)
        assert len(await answer) == 8_000_000


STOPPED = """
import asyncio, sys, time
from functools import partial
from pathlib import Path
from storage import number_work
from headgate.storage.writer import ChildStarter, ProcessWriter, StandingOrder

async def main():
    recipe = partial(number_work.writer_setup, Path(sys.argv[1]))
    writer = ProcessWriter(recipe, number_work.PickleWire(), ChildStarter())
    writer.start()
    await writer.submit(number_work.create)
    writer.keep([StandingOrder(number_work.add_next, 0.05, 60.0)])
    print("busy", flush=True)
    time.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says that a process was stopped")
def test_a_process_that_was_stopped_is_not_spoken_for_until_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "n.db"
    command = [sys.executable, "-c", STOPPED, str(path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            wait_until(lambda: kept(path), seconds=SECONDS)
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: is_stopped(process.pid), seconds=SECONDS)
            time.sleep(0.3)
            done = kept(path)
            time.sleep(0.3)
            assert kept(path) == done
            process.send_signal(signal.SIGCONT)
            wait_until(lambda: len(kept(path)) > len(done), seconds=SECONDS)
        finally:
            process.kill()


def is_stopped(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat").read_text()
    return status.rpartition(")")[2].split()[0] == "T"


async def test_requests_that_wait_together_are_one_batch(tmp_path: Path) -> None:
    async with opened(tmp_path / "n.db") as writer:
        batch = [writer.submit_request(number_work.add_all, number) for number in range(50)]
        assert set(await asyncio.gather(*batch)) == {50}


async def test_a_job_that_fails_or_cannot_be_sent_fails_alone(tmp_path: Path) -> None:
    async with opened(tmp_path / "n.db") as writer:
        jobs = (
            writer.submit(partial(number_work.add, 1)),
            writer.submit(partial(number_work.add, 1)),
            writer.submit(lambda _transaction: 2),
            writer.submit(partial(number_work.add, 3)),
        )
        first, again, made_here, last = await asyncio.gather(*jobs, return_exceptions=True)
    assert (first, last) == (1, 3)
    assert isinstance(again, Exception)
    assert isinstance(made_here, Exception)
    assert kept(tmp_path / "n.db") == [1, 3]


async def test_jobs_larger_than_any_buffer_arrive(tmp_path: Path) -> None:
    async with opened(tmp_path / "n.db") as writer:
        texts = ["x" * 3_000_000] * 8
        jobs = [writer.submit(partial(number_work.length, text)) for text in texts]
        assert await asyncio.gather(*jobs) == [3_000_000] * 8


async def test_what_goes_first_overtakes_all_that_was_not_sent_yet(tmp_path: Path) -> None:
    async with opened(tmp_path / "n.db") as writer:
        many = [writer.submit(partial(number_work.add, number)) for number in range(20 * MAX_BATCH)]
        await asyncio.sleep(0)
        await writer.submit(number_work.pid, goes_first=True)
        left = sum(not job.done() for job in many)
        assert left >= 10 * MAX_BATCH
        await asyncio.gather(*many)


async def test_what_goes_first_keeps_its_order(tmp_path: Path) -> None:
    async with opened(tmp_path / "n.db") as writer:
        added = writer.submit(partial(number_work.add, 1), goes_first=True)
        found = writer.submit(number_work.numbers, goes_first=True)
        assert (await added, await found) == (1, [1])


async def test_what_waits_is_counted_and_what_is_under_way_is_not(tmp_path: Path) -> None:
    async with opened(tmp_path / "n.db") as writer:
        many = [writer.submit(partial(number_work.add, number)) for number in range(3 * MAX_BATCH)]
        first = writer.submit(number_work.pid, goes_first=True)
        assert writer.queue_length == 3 * MAX_BATCH + 1
        await first
        assert writer.queue_length <= 2 * MAX_BATCH + 1
        await asyncio.gather(*many)
        assert writer.queue_length == 0


async def test_more_than_may_wait_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "n.db", max_queued=2) as writer:
        jobs = [writer.submit(partial(number_work.add, number)) for number in (1, 2)]
        with pytest.raises(LedgerUnavailableError, match="2 calls wait already"):
            writer.submit(number_work.pid)
        await asyncio.gather(*jobs)


async def test_when_the_process_dies_its_callers_are_told_and_another_goes_on(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path / "n.db") as writer:
        await writer.submit(partial(number_work.add, 1))
        before = writer.pid
        with pytest.raises(LedgerUnavailableError, match="may be done or not"):
            await writer.submit(partial(number_work.die, 2))
        # What was not sent to the process that died is not lost with it.
        assert await writer.submit(partial(number_work.add, 3)) == 3
        assert writer.pid != before
        assert kept(tmp_path / "n.db") == [1, 3]


async def test_nothing_that_was_answered_is_lost_when_the_process_is_killed(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path / "n.db") as writer:
        answered: list[int] = []
        for number in range(400):
            if number % 100 == 50 and writer.pid is not None:
                os.kill(writer.pid, signal.SIGKILL)
            try:
                answered.append(await writer.submit(partial(number_work.add, number)))
            except LedgerUnavailableError:
                await until_it_works(writer, number_work.numbers)
        assert len(answered) >= 390
        assert set(answered) <= set(kept(tmp_path / "n.db"))


async def test_processes_that_die_at_once_are_started_with_a_wait_between_them(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path / "n.db") as writer:
        for number in range(MAX_SHORT_LIVES + 1):
            await writer.submit(number_work.pid)
            with pytest.raises(LedgerUnavailableError, match="may be done or not"):
                await writer.submit(partial(number_work.die, number))
        with pytest.raises(LedgerUnavailableError, match="cannot be started"):
            writer.submit(number_work.pid)
        await until_it_works(writer, number_work.numbers)


async def test_a_process_that_cannot_begin_says_why_and_is_tried_again(tmp_path: Path) -> None:
    needed = tmp_path / "needed"
    async with opened(tmp_path / "n.db", needed=needed) as writer:
        with (
            structlog.testing.capture_logs() as lines,
            pytest.raises(LedgerUnavailableError),
        ):
            await writer.submit(number_work.create)
        assert lines[0]["problem"] == "FileNotFoundError: needed must be there"
        with pytest.raises(LedgerUnavailableError, match="cannot be started"):
            await writer.submit(number_work.create)
        needed.touch()
        await until_it_works(writer, number_work.create)
        assert await writer.submit(partial(number_work.add, 7)) == 7


async def test_closing_finishes_what_was_asked_and_ends_the_process(tmp_path: Path) -> None:
    async with opened(tmp_path / "n.db") as writer:
        jobs = [writer.submit(partial(number_work.add, number)) for number in range(100)]
        child = writer.pid
    assert [job.result() for job in jobs] == list(range(100))
    assert child is not None
    assert not is_running(child)
    with pytest.raises(LedgerUnavailableError, match="closed"):
        writer.submit(number_work.pid)
    writer.start()
    assert len(await writer.submit(number_work.numbers)) == 100
    await writer.close()


async def test_signals_for_the_whole_group_do_not_end_it(tmp_path: Path) -> None:
    async with opened(tmp_path / "n.db") as writer:
        assert writer.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(writer.pid, number)
        assert await writer.submit(number_work.pid) == writer.pid


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, str(tmp_path / "n.db")],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    wait_until(lambda: not is_running(int(parent.stdout)), seconds=SECONDS)


async def test_a_process_started_ahead_is_the_one_that_is_used(tmp_path: Path) -> None:
    starter = ChildStarter(modules=("headgate.storage.sqlite",))
    starter.start_ahead()
    recipe = partial(number_work.writer_setup, tmp_path / "n.db")
    writer = ProcessWriter(recipe, number_work.PickleWire(), starter)
    writer.start()
    try:
        assert await writer.submit(number_work.pid) == writer.pid
    finally:
        await writer.close()
