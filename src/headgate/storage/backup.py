"""Copies of an SQLite store: made while it is written to, and checked before anybody relies on one.

A copy is one moment of the store: whatever was acknowledged before it began is in it. It is
complete under its name or it is not there, and only its owner can read it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import apsw

from headgate.errors import InvalidSettingError, StoreError
from headgate.storage.migrations import Migration
from headgate.storage.sqlite import BUSY_TIMEOUT_SECONDS, translated

Part = tuple[str, Sequence[Migration]]

SIDE_FILES = ("", "-wal", "-shm")
"""What a store in use consists of: the file, its log, and an index of the log."""

_ONLY_THE_OWNER = 0o600


def back_up(source: Path, target: Path, *, replaces: bool = False) -> int:
    """Copy a store, also one that is in use; return the size of the copy in bytes."""
    if not source.is_file():
        raise InvalidSettingError("data", f"{source} is not there; name the directory with --data")
    if target.exists() and not replaces:
        raise InvalidSettingError("FILE", f"{target} exists; name another, or give --force")
    with _written_beside(target) as unfinished:
        with _opened(source) as connection:
            connection.execute("VACUUM INTO ?", (str(unfinished),))
        check(unfinished)
    return target.stat().st_size


def put_back(copy: Path, store: Path, *, aside_suffix: str) -> Path | None:
    """Put a copy in place of a store that nobody uses, and return where that one is now.

    Until the copy takes its place the store is whole under its name, whatever happens.
    """
    aside = store.with_name(f"{store.name}{aside_suffix}")
    if aside.exists():
        raise InvalidSettingError("data", f"{aside} exists; try again in a moment")
    try:
        with _written_beside(store) as unfinished:
            shutil.copyfile(copy, unfinished)
            _set_aside(store, aside)
    except BaseException:
        _take_back(store, aside)
        raise
    return aside if aside.exists() else None


def _set_aside(store: Path, aside: Path) -> None:
    """Give a store a second name, and leave none of its log for what comes in its place."""
    if store.exists():
        # A log that is in the file cannot be parted from it. Where that does not work the file is
        # damaged, and goes with the log as they are.
        with suppress(StoreError), _opened(store) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    for side in ("", "-wal"):
        with suppress(FileNotFoundError):
            _name_also(Path(f"{store}{side}"), Path(f"{aside}{side}"))
    for side in ("-shm", "-wal"):
        Path(f"{store}{side}").unlink(missing_ok=True)


def _take_back(store: Path, aside: Path) -> None:
    for side in ("-wal", ""):
        path, other = Path(f"{store}{side}"), Path(f"{aside}{side}")
        if path.exists():
            other.unlink(missing_ok=True)
        elif other.exists():
            other.replace(path)


def _name_also(path: Path, other: Path) -> None:
    try:
        os.link(path, other)
    except FileNotFoundError:
        raise
    except OSError:
        # Some file systems know one name a file.
        shutil.copy2(path, other)


def check(path: Path, parts: Sequence[Part] = ()) -> dict[str, int]:
    """Return the version of each part of a store, or raise what is wrong with the file.

    `parts` are those that this program knows; a store with a newer one is refused.
    """
    # Nobody writes to a copy; so nothing is written beside it either, wherever it lies.
    with _opened(path, is_copy=True) as connection:
        found = connection.pragma("integrity_check")
        if found != "ok":
            problem = f"{path} is damaged: {found}; use another copy"
            raise StoreError(problem)
        versions = _versions(connection)
    if not versions:
        raise InvalidSettingError("FILE", f"{path} is not a store of Headgate")
    known = {part: migrations[-1].number for part, migrations in parts}
    for part, version in versions.items():
        if part in known and version > known[part]:
            line = f"the {part} tables of {path} are at version {version}, this program knows them"
            line += f" up to {known[part]}; install a newer headgate"
            raise StoreError(line)
    return versions


def _versions(connection: apsw.Connection) -> dict[str, int]:
    sql = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'headgate_schema'"
    if not connection.execute(sql).fetchall():
        return {}
    rows = connection.execute("SELECT part, version FROM headgate_schema ORDER BY part")
    return {str(part): int(version) for part, version in rows}


@contextmanager
def _opened(path: Path, *, is_copy: bool = False) -> Iterator[apsw.Connection]:
    name, flags = str(path), apsw.SQLITE_OPEN_READWRITE
    if is_copy:
        name = f"file:{quote(str(path))}?immutable=1"
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    try:
        connection = apsw.Connection(name, flags=flags)
        try:
            connection.set_busy_timeout(int(BUSY_TIMEOUT_SECONDS * 1_000))
            yield connection
        finally:
            connection.close()
    except apsw.Error as error:
        raise translated(error, path) from error


@contextmanager
def _written_beside(target: Path) -> Iterator[Path]:
    """Give the name of an empty file; what is written to it is put in place when it is on disk."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_RDWR, _ONLY_THE_OWNER))
        yield unfinished
        _flush(unfinished)
        unfinished.replace(target)
        _flush(target.parent)
    except OSError as error:
        problem = f"{target} cannot be written: {error.strerror}"
        raise StoreError(problem) from error
    finally:
        for side in SIDE_FILES:
            Path(f"{unfinished}{side}").unlink(missing_ok=True)


def _flush(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
