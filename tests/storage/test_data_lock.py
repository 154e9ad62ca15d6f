"""The lock on a data directory: one process at a time, and no crash leaves it locked."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headgate.errors import DirectoryInUseError, StoreUnavailableError
from headgate.storage import data_lock
from headgate.storage.data_lock import (
    LOCK_NAME,
    hold_directory,
    hold_store,
    holder_of,
    is_held,
)

HOLDS_UNTIL_KILLED = """
import sys
from pathlib import Path
from headgate.storage.data_lock import hold_directory

with hold_directory(Path(sys.argv[1]), address="http://127.0.0.1:7420"):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(directory: Path) -> subprocess.Popen[str]:
    """Start a process that holds the directory until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_UNTIL_KILLED, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.communicate()


def test_a_second_process_is_refused_with_who_has_the_directory(tmp_path: Path) -> None:
    first = holder(tmp_path)
    try:
        with pytest.raises(DirectoryInUseError) as caught, hold_directory(tmp_path):
            pass
    finally:
        end(first)
    assert str(caught.value) == (
        f"{tmp_path} is in use by process {first.pid}, which serves http://127.0.0.1:7420; "
        "stop it, or name another directory with --data"
    )
    assert (caught.value.directory, caught.value.pid) == (str(tmp_path), first.pid)


def test_a_directory_is_free_again_when_its_holder_has_ended(tmp_path: Path) -> None:
    for _ in range(2):
        with hold_directory(tmp_path):
            pass


def test_a_body_that_fails_frees_the_directory(tmp_path: Path) -> None:
    with pytest.raises(KeyError), hold_directory(tmp_path):
        raise KeyError("body")
    with hold_directory(tmp_path):
        pass


def test_a_process_that_is_killed_leaves_a_file_that_locks_nothing(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.send_signal(signal.SIGKILL)
    end(process)
    assert (tmp_path / LOCK_NAME).read_text().startswith(f"{process.pid}\n")
    with hold_directory(tmp_path):
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n\n"


def test_a_program_that_was_started_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    with hold_directory(tmp_path):
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            close_fds=False,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
    try:
        with hold_directory(tmp_path):
            pass
    finally:
        end(child)


def test_what_a_lock_file_says_is_not_trusted(tmp_path: Path) -> None:
    with hold_directory(tmp_path):
        (tmp_path / LOCK_NAME).write_bytes(b"\xffnot a pid")
        with pytest.raises(DirectoryInUseError, match="in use by another process; stop it"):
            hold_directory(tmp_path).__enter__()


def test_only_the_owner_may_read_the_file_or_enter_a_directory_that_was_made(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "new" / "data"
    with hold_directory(directory):
        assert stat.S_IMODE((directory / LOCK_NAME).stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_place_that_cannot_be_a_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "data"):
        with pytest.raises(StoreUnavailableError, match="cannot be used: ") as caught:
            hold_directory(path).__enter__()
        assert str(path) in str(caught.value)


INHERITED = """
import os, signal, subprocess, sys
from pathlib import Path
from headgate.storage.data_lock import hold_directory

with hold_directory(Path(sys.argv[1])) as lock:
    subprocess.Popen(["sleep", "0.4"], pass_fds=[lock])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_that_wrote_for_a_holder_that_was_killed_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may be slow to end what ends in time.
    monkeypatch.setattr(data_lock, "PATIENCE_SECONDS", 30.0)
    subprocess.run([sys.executable, "-c", INHERITED, str(tmp_path)], check=False)
    with hold_directory(tmp_path):
        pass


def linked(folder: Path, link: Callable[[Path, Path], None]) -> tuple[Path, Path]:
    """Return a database, and another name for it in another directory."""
    real, other = folder / "a" / "headgate.db", folder / "b" / "other.db"
    for path in (real, other):
        path.parent.mkdir()
    real.touch()
    link(real, other)
    return real, other


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_symbolic_link_to_a_database_that_is_held_is_refused(tmp_path: Path, first: str) -> None:
    names = linked(tmp_path, lambda real, other: other.symlink_to(real))
    held, asked = names if first == "a" else reversed(names)
    with hold_store(held), pytest.raises(DirectoryInUseError, match=str(os.getpid())):
        hold_store(asked).__enter__()
    with hold_store(asked):
        assert is_held(names[0].parent)


def test_a_directory_under_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with hold_store(tmp_path / "data" / "headgate.db"), pytest.raises(DirectoryInUseError):
        hold_store(tmp_path / "link" / "headgate.db").__enter__()


def test_a_database_with_a_second_name_is_refused_and_the_name_is_told(tmp_path: Path) -> None:
    real, other = linked(tmp_path, lambda real, other: other.hardlink_to(real))
    (real.parent / "headgate.db.before").hardlink_to(real)
    for path in (real, other):
        with pytest.raises(StoreUnavailableError, match="one of 3 hard links") as caught:
            hold_store(path).__enter__()
        assert "(headgate.db.before)" in str(caught.value) or path is other
        assert not is_held(path.parent)


def test_a_deleted_lock_file_lets_nobody_in_and_is_put_back(tmp_path: Path) -> None:
    with hold_store(tmp_path / "headgate.db", address="http://here") as lock:
        assert not lock.restore()
        (tmp_path / LOCK_NAME).unlink()
        assert is_held(tmp_path)
        with pytest.raises(DirectoryInUseError):
            hold_directory(tmp_path).__enter__()
        assert lock.restore()
        assert holder_of(tmp_path).address == "http://here"
        assert not lock.restore()
        with pytest.raises(DirectoryInUseError):
            hold_directory(tmp_path).__enter__()
    with hold_directory(tmp_path):
        pass


def test_a_directory_that_was_replaced_is_held_again_or_is_anothers(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with hold_store(data / "headgate.db") as lock:
        data.rename(tmp_path / "moved")
        assert not lock.restore()
        with hold_directory(data), pytest.raises(DirectoryInUseError):
            lock.restore()
        assert lock.restore()
        assert is_held(data)
    assert not is_held(data)
