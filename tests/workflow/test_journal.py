"""The journal of a run on a service: what is written counts, and what a crash has cut off goes."""

from __future__ import annotations

import asyncio
import resource
import signal
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import StoreError
from headgate.workflow import remote_journal as journal_module
from headgate.workflow.backend import StepTask, TaskState
from headgate.workflow.remote_journal import Ended, Entry, Journal, Opened, Sent, SentOrder, Taken

OPENED = Opened(server="http://127.0.0.1:7420", keys="r-1")


def sent(number: int, *, generation: int = 0, key: str = "") -> Sent:
    order = SentOrder(number=number, generation=generation)
    body = msgspec.Raw(b'{"tasks": [{"action":  "spaced"}]}')
    return Sent(key=key or f"k{number}-{generation}", at=1.0, orders=(order,), body=body)


def taken(number: int, *, generation: int = 0, task_id: str = "") -> Taken:
    return Taken(key=f"k{number}-{generation}", task_ids=(task_id or f"tsk_{number}_{generation}",))


def ended(
    number: int, result: object = None, *, generation: int = 0, state: TaskState = TaskState.DONE
) -> Ended:
    task_id = f"tsk_{number}_{generation}"
    task = StepTask(number=number, generation=generation, task_id=task_id, state=state)
    return Ended(task=task, result=msgspec.Raw(msgspec.json.encode(result)))


def write(path: Path, *entries: Entry) -> None:
    async def written() -> None:
        journal = Journal(path)
        journal.open()
        for entry in entries:
            await journal.write(entry)
        await journal.close()

    asyncio.run(written())


def opened(path: Path) -> Journal:
    journal = Journal(path)
    journal.open()
    return journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def test_what_was_written_is_there_when_it_is_opened_again(path: Path) -> None:
    write(path, OPENED, sent(1), taken(1), sent(2), taken(2), ended(1, {"score": 3}), sent(3))
    journal = opened(path)
    assert journal.opened == OPENED
    assert list(journal.pending) == ["k3-0"]
    assert [one.task.task_id for one in journal.unfinished.values()] == ["tsk_2_0"]
    assert [task.task_id for task in journal.ended()] == ["tsk_1_0"]
    assert journal.result(1, 0) == {"score": 3}
    assert journal.sent == 3


def test_the_bytes_of_a_batch_come_back_as_they_were(path: Path) -> None:
    write(path, sent(1))
    assert bytes(opened(path).pending["k1-0"].body) == b'{"tasks": [{"action":  "spaced"}]}'


def test_no_file_is_made_before_something_is_written(path: Path) -> None:
    opened(path)
    assert not path.exists()


def test_only_the_owner_can_read_it(path: Path) -> None:
    write(path, OPENED)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_generation_of_a_step_is_kept(path: Path) -> None:
    first: list[Entry] = [sent(1), taken(1), ended(1, "old", state=TaskState.FAILED)]
    write(path, *first, sent(1, generation=1), taken(1, generation=1))
    journal = opened(path)
    assert [task.generation for task in journal.ended()] == [0]
    assert (journal.result(1, 0), journal.result(1, 1)) == ("old", None)
    assert journal.unfinished[1].task.generation == 1


def test_what_was_not_taken_is_not_known(path: Path) -> None:
    write(path, sent(1), Taken(key="k1-0", task_ids=("",)))
    journal = opened(path)
    assert (journal.pending, journal.unfinished) == ({}, {})


WHOLE: list[Entry] = [OPENED, sent(1), taken(1), ended(1, "é" * 10), sent(2)]


@given(cut=st.integers(min_value=0, max_value=600))
def test_a_line_that_was_cut_off_goes_and_the_rest_stays(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "journal.jsonl"
    write(path, *WHOLE)
    kept = path.read_bytes()[: min(cut, path.stat().st_size)]
    path.write_bytes(kept)
    journal = opened(path)
    assert path.read_bytes() == kept[: kept.rfind(b"\n") + 1]
    whole = [line for line in kept.splitlines(keepends=True) if line.endswith(b"\n")]
    assert journal.sent == sum(line.startswith(b'{"kind":"sent"') for line in whole)
    asyncio.run(journal.close())


def test_after_a_cut_the_journal_goes_on(path: Path) -> None:
    write(path, OPENED, sent(1))
    with path.open("ab") as file:
        file.write(b'{"kind":"tak')
    write(path, taken(1), ended(1, "kept"))
    assert opened(path).result(1, 0) == "kept"


def test_a_last_line_of_zeros_is_cut_off_too(path: Path) -> None:
    write(path, OPENED)
    with path.open("ab") as file:
        file.write(b"\0\0\0\n")
    assert opened(path).opened == OPENED


def test_damage_in_the_middle_is_an_error_and_not_forgotten_work(path: Path) -> None:
    write(path, OPENED, sent(1), taken(1))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"garbage\n", *lines[1:]]))
    with pytest.raises(StoreError, match="line 2 is none of a journal"):
        opened(path)


def test_an_answer_to_what_was_not_sent_is_damage(path: Path) -> None:
    write(path, OPENED, sent(1))
    path.write_bytes(path.read_bytes() + msgspec.json.encode(taken(5)) + b"\n")
    with pytest.raises(StoreError, match="was not sent"):
        opened(path)


def test_lines_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_LINE_BYTES", 1_000)
    with pytest.raises(StoreError, match="more than 1000 bytes"):
        write(path, ended(1, "x" * 1_000))
    path.write_bytes(b'"' + b"x" * 2_000 + b'"\n')
    with pytest.raises(StoreError, match="more than 1000 bytes"):
        opened(path)


def test_a_disk_that_takes_nothing_more_ends_the_journal(path: Path) -> None:
    async def written() -> None:
        journal = Journal(path)
        journal.open()
        await journal.write(OPENED)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        most = len(msgspec.json.encode(OPENED)) + 10
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            with pytest.raises(StoreError, match="File too large"):
                await journal.write(sent(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        with pytest.raises(StoreError, match="takes no more lines"):
            await journal.write(sent(1))
        assert journal.pending == {}
        await journal.close()

    asyncio.run(written())
    assert opened(path).opened == OPENED


def test_writes_that_come_together_share_a_sync_and_keep_their_order(path: Path) -> None:
    async def written() -> None:
        journal = Journal(path)
        journal.open()
        await asyncio.gather(*(journal.write(sent(number)) for number in range(100)))
        await journal.close()

    asyncio.run(written())
    assert list(opened(path).pending) == [f"k{number}-0" for number in range(100)]
