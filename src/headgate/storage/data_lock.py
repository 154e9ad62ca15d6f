"""The lock on a data directory: one process at a time, and whoever comes second is told why.

The lock is the kernel's, on an open file, so it ends with the process that holds it, however that
ends: a file that a crash left behind locks nothing. What the file says is only there to be read by
people.

Rule: the file is never deleted. Two processes could otherwise hold locks on two files of one name.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from headgate.errors import DirectoryInUseError, StoreUnavailableError

LOCK_NAME = "headgate.lock"
PATIENCE_SECONDS = 2.0
LOOK_SECONDS = 0.02

_ONLY_THE_OWNER = 0o600
_ONLY_THE_OWNER_ENTERS = 0o700
_MOST_BYTES = 1_000


class Holder(NamedTuple):
    """Who holds a directory, as far as its lock file says."""

    pid: int | None = None
    address: str = ""


@contextmanager
def hold_directory(path: Path, *, address: str = "") -> Iterator[int]:
    """Hold a directory while the body runs; it is made if it was missing.

    Programs that the process starts do not inherit the lock, so none can keep it, unless they are
    given the open file that this returns. A process that was only forked has it. Either must end
    when its parent does.
    """
    lock = _opened(path)
    try:
        _take(lock, path)
        _write(lock, Holder(os.getpid(), address))
        yield lock
    finally:
        os.close(lock)


def holder_of(path: Path) -> Holder:
    """Return who holds a directory, or held it last; nothing is known where it was never held."""
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return Holder()
    try:
        return _read(lock)
    finally:
        os.close(lock)


def is_held(path: Path) -> bool:
    """Tell whether a process holds a directory now; nothing is changed by looking."""
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def _opened(path: Path) -> int:
    try:
        path.mkdir(mode=_ONLY_THE_OWNER_ENTERS, parents=True, exist_ok=True)
        # Python opens files so that they close when another program is executed.
        return os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _ONLY_THE_OWNER)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        problem = f"the data directory {path} cannot be used: {why}; name another one with --data"
        raise StoreUnavailableError(problem) from None


def _take(lock: int, path: Path) -> None:
    try:
        _lock(lock, path)
    except OSError as error:
        problem = f"the data directory {path} cannot be locked ({error.strerror})"
        problem += "; name one on a local disk with --data"
        raise StoreUnavailableError(problem) from None


def _lock(lock: int, path: Path) -> None:
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(lock)
            # Of a holder that was killed, the process that wrote for it may be a moment longer.
            if _is_alive(holder.pid) or time.monotonic() >= ends_at:
                pid, address = holder
                raise DirectoryInUseError(str(path), pid=pid, address=address) from None
            time.sleep(LOOK_SECONDS)
        else:
            return


def _is_alive(pid: int | None) -> bool:
    if pid is None:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # It belongs to somebody else.
        return True
    return True


def _write(lock: int, holder: Holder) -> None:
    # The lock holds without the note; a full disk is for the store to report.
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{holder.pid}\n{holder.address}\n".encode(), 0)


def _read(lock: int) -> Holder:
    pid, _, address = os.pread(lock, _MOST_BYTES, 0).decode(errors="replace").partition("\n")
    return Holder(int(pid) if pid.isascii() and pid.isdigit() else None, address.strip())
