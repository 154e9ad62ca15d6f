"""The lock on a data directory: one process at a time, and whoever comes second is told why.

The locks are the kernel's, on an open directory and on an open file in it, so they end with the
process that holds them, however that ends: a file that a crash left behind locks nothing. What the
file says is only there to be read by people and by commands that look for the service.

Rule: the lock follows the database. The directory is locked as well as the file, so that nobody
gets in whose lock file is a new one because somebody deleted the first; a service puts the file
back. A service whose database is elsewhere keeps nobody out, and only says where it is.
Of a database that is a symbolic link both directories are held, and one that has a second
name on its disk is not used at all: SQLite keeps what it has not yet moved into the file beside the
name by which it was opened, and it would be missing under the other.
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
ADDRESS_NAME = "headgate.address"
PATIENCE_SECONDS = 2.0
LOOK_SECONDS = 0.02

_ONLY_THE_OWNER = 0o600
_ONLY_THE_OWNER_ENTERS = 0o700
_MOST_BYTES = 1_000


class Holder(NamedTuple):
    """Who holds a directory, as far as its lock file says."""

    pid: int | None = None
    address: str = ""


class DirectoryLock:
    """A directory that this process holds; it is made if it was missing.

    `descriptors` are the open files that hold it. Programs that the process starts do not inherit
    them, so none can keep the directory, unless they are given them. A process that was only forked
    has them. Either must end when its parent does.
    """

    def __init__(self, path: Path, *, address: str = "") -> None:
        self.path = path
        self._address = address
        _make(path)
        self._directory = _locked_directory(path)
        try:
            self._file = _locked_file(path)
        except BaseException:
            self._close_directory()
            raise
        _write(self._file, Holder(os.getpid(), address))

    @property
    def file(self) -> int:
        """The open lock file."""
        return self._file

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files that hold the directory."""
        return (self._file,) if self._directory is None else (self._file, self._directory)

    def tell(self, address: str) -> None:
        """Say where the service is, once it is known: a port may be chosen by the system."""
        self._address = address
        _write(self._file, Holder(os.getpid(), address))

    def restore(self) -> bool:
        """Hold the directory anew if it or its lock file was deleted or replaced; tell whether so.

        `DirectoryInUseError` says that another process has it by now. While there is no such
        directory there is nothing to hold.
        """
        if not self.path.is_dir():
            return False
        has_directory = self._directory is None or _is_at(self._directory, self.path)
        if has_directory and _is_at(self._file, self.path / LOCK_NAME):
            return False
        if not has_directory:
            before, self._directory = self._directory, _locked_directory(self.path)
            _close(before)
        before, self._file = self._file, _locked_file(self.path)
        _close(before)
        _write(self._file, Holder(os.getpid(), self._address))
        return True

    def close(self) -> None:
        """Let go of the directory."""
        os.close(self._file)
        self._close_directory()

    def _close_directory(self) -> None:
        _close(self._directory)


@contextmanager
def hold_directory(path: Path, *, address: str = "") -> Iterator[int]:
    """Hold a directory while the body runs, which is given the open lock file."""
    lock = DirectoryLock(path, address=address)
    try:
        yield lock.file
    finally:
        lock.close()


class StoreLock:
    """The directories of a database that this process holds."""

    def __init__(self, file: Path, *, address: str = "") -> None:
        self._locks: list[DirectoryLock] = []
        try:
            for folder in store_folders(file):
                self._locks.append(DirectoryLock(folder, address=address))
            _refuse_second_name(file)
        except BaseException:
            self.close()
            raise

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files that hold the directories."""
        return tuple(one for lock in self._locks for one in lock.descriptors)

    def tell(self, address: str) -> None:
        """Say in each directory where the service is."""
        for lock in self._locks:
            lock.tell(address)

    def restore(self) -> bool:
        """Hold anew what was deleted or replaced, and tell whether anything was."""
        restored = [lock.restore() for lock in self._locks]
        return any(restored)

    def close(self) -> None:
        """Let go of the directories."""
        for lock in self._locks:
            lock.close()


@contextmanager
def hold_store(file: Path, *, address: str = "") -> Iterator[StoreLock]:
    """Hold the directories of an SQLite store while the body runs."""
    lock = StoreLock(file, address=address)
    try:
        yield lock
    finally:
        lock.close()


@contextmanager
def announce(path: Path, *, address: str) -> Iterator[None]:
    """Say in a directory where a service is whose store is elsewhere, while the body runs.

    Several may use the directory: the first is told of. One that cannot be written is used as well.
    """
    file: int | None = None
    with suppress(OSError, ValueError, StoreUnavailableError):
        _make(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        file = os.open(path / ADDRESS_NAME, flags, _ONLY_THE_OWNER)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write(file, Holder(os.getpid(), address))
    try:
        yield
    finally:
        _close(file)


def tell_address(path: Path, address: str) -> None:
    """Say where the service is that has announced itself in a directory, if this process has."""
    file = path / ADDRESS_NAME
    if _read_file(file).pid != os.getpid():
        return
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            _write(descriptor, Holder(os.getpid(), address))
        finally:
            os.close(descriptor)


def store_folders(file: Path) -> tuple[Path, ...]:
    """Return where the file of a store lies: as it is named, and where a symbolic link leads."""
    named, real = file.parent, Path(os.path.realpath(file)).parent
    is_one = os.path.realpath(named) == str(real)
    return (named,) if is_one else (named, real)


def _refuse_second_name(file: Path) -> None:
    try:
        names = file.stat().st_nlink
    except OSError:
        return
    if names > 1:
        problem = f"{file} is one of {names} hard links to a database, and another process may have"
        problem += f" it open under another name; remove the others{_named(file)}, or use a copy"
        raise StoreUnavailableError(problem)


def _named(file: Path) -> str:
    """Name the other links to a file that lie beside it, as a restore that was cut off leaves."""
    real = Path(os.path.realpath(file))
    beside = sorted(one.name for one in real.parent.glob(f"{real.name}*") if one.samefile(real))
    names = ", ".join(name for name in beside if name != real.name)
    return f" ({names})" if names else ""


def holder_of(path: Path) -> Holder:
    """Return who holds a directory, or held it last; nothing is known where it was never held."""
    return _read_file(path / LOCK_NAME)


def service_address(path: Path, *, is_running: bool = False) -> str:
    """Return the address of the service that uses a directory, or used it last; empty if none did.

    With `is_running` only one that uses it now counts.
    """
    files = [path / LOCK_NAME, path / ADDRESS_NAME]
    running = [one for one in files if _is_locked(one)]
    told = (_read_file(one).address for one in running or ([] if is_running else files))
    return next(filter(None, told), "")


def is_held(path: Path) -> bool:
    """Tell whether a process holds a directory now; nothing is changed by looking."""
    return _is_locked(path / LOCK_NAME) or _is_locked(path)


def _is_locked(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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


def _make(path: Path) -> None:
    try:
        path.mkdir(mode=_ONLY_THE_OWNER_ENTERS, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise _cannot_be_used(path, error) from None


def _locked_directory(path: Path) -> int | None:
    """Return the directory, open and locked; None where a file system has no locks on them."""
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _cannot_be_used(path, error) from None
    try:
        _lock(directory, path)
    except DirectoryInUseError:
        os.close(directory)
        raise
    except OSError:
        # The file in it is locked all the same.
        os.close(directory)
        return None
    return directory


def _locked_file(path: Path) -> int:
    while True:
        try:
            # Python opens files so that they close when another program is executed.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            lock = os.open(path / LOCK_NAME, flags, _ONLY_THE_OWNER)
        except (OSError, ValueError) as error:
            raise _cannot_be_used(path, error) from None
        try:
            _take(lock, path)
            if _is_at(lock, path / LOCK_NAME):
                return lock
        except BaseException:
            os.close(lock)
            raise
        # It was deleted before it was locked: a lock on it keeps nobody out.
        os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _cannot_be_used(path: Path, error: OSError | ValueError) -> StoreUnavailableError:
    why = error.strerror if isinstance(error, OSError) else error
    problem = f"the data directory {path} cannot be used: {why}; name another one with --data"
    return StoreUnavailableError(problem)


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
            holder = holder_of(path)
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


def _read_file(file: Path) -> Holder:
    try:
        lock = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return Holder()
    try:
        return _read(lock)
    finally:
        os.close(lock)


def _read(lock: int) -> Holder:
    pid, _, address = os.pread(lock, _MOST_BYTES, 0).decode(errors="replace").partition("\n")
    return Holder(int(pid) if pid.isascii() and pid.isdigit() else None, address.strip())
