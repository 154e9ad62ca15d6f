"""Whether the store and the books can be reached, at which version they are, and their clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

from headgate.cli.checks.findings import Finding, fail, ok, warn
from headgate.databases.migrations import schema_version
from headgate.databases.transaction import Database, Transaction
from headgate.errors import HeadgateError
from headgate.ledgers.connect import connect_budget
from headgate.settings import Settings
from headgate.stores.schema import PARTS
from headgate.wiring import is_shared, sqlite_file

FEW_SECONDS = 1.0
MANY_SECONDS = 10.0

_DAMAGED = ("CorruptError", "NotADBError")
_SERVER_TIME = "SELECT EXTRACT(EPOCH FROM clock_timestamp())::double precision"


def store_findings(settings: Settings, directory: Path) -> Iterator[Finding]:
    """Look at the store, without changing or founding it."""
    try:
        if settings.store.url == "memory:":
            yield warn("store", "in memory", "tasks are lost at the end; this is for trying out")
        elif is_shared(settings):
            yield from _postgres(settings.store.url or "")
        else:
            yield from _sqlite(sqlite_file(settings, directory))
    except (HeadgateError, ModuleNotFoundError) as error:
        yield fail("store", str(error), _advice(error))


def _advice(error: Exception) -> str:
    # The driver is an extra, and told by its name where it is not there.
    if type(error.__cause__).__name__ in _DAMAGED:
        return "it is damaged; stop the service, and put a backup in its place: headgate restore"
    return "nothing is taken before it can be reached"


def books_findings(settings: Settings) -> Iterator[Finding]:
    """Look at books that are outside the store."""
    url = settings.ledger.url
    if url is None or url == settings.store.url:
        yield ok("books", "in the store")
        return
    try:
        asyncio.run(_reach(url))
        yield ok("books", f"{url.partition(':')[0]} answers")
    except (HeadgateError, ModuleNotFoundError) as error:
        yield fail("books", str(error), "nothing starts before they can be reached")


async def _reach(url: str) -> None:
    async with connect_budget(url):
        pass


def _sqlite(path: Path) -> Iterator[Finding]:
    from headgate.databases.sqlite import SqliteReader  # noqa: PLC0415

    if not path.exists():
        yield ok("store", f"{path} is founded at the first start")
        return
    yield from _versions(SqliteReader(path), str(path))
    yield ok("clock", "the store is on this machine")


def _postgres(url: str) -> Iterator[Finding]:
    from headgate.databases.postgres import PostgresReader  # noqa: PLC0415

    database = PostgresReader(url)
    yield from _versions(database, "postgresql")
    try:
        before = time.time()
        at = float(database.begin().read(_SERVER_TIME)[0][0])
        apart_seconds = at - (before + time.time()) / 2
    finally:
        database.rollback()
        database.close()
    found = f"the server is {apart_seconds:+.2f} s from this machine"
    advice = "set both clocks by NTP; deadlines and leases are judged by the server's"
    if abs(apart_seconds) > MANY_SECONDS:
        yield fail("clock", found, advice)
    elif abs(apart_seconds) > FEW_SECONDS:
        yield warn("clock", found, advice)
    else:
        yield ok("clock", found)


def _versions(database: Database, name: str) -> Iterator[Finding]:
    try:
        transaction = database.begin()
        yield _judged(transaction, name)
    finally:
        database.rollback()
        database.close()


def _judged(transaction: Transaction, name: str) -> Finding:
    older: list[str] = []
    for part, migrations in PARTS:
        version, known = schema_version(transaction, part), migrations[-1].number
        if version > known:
            found = f"{name}: the {part} tables are at version {version}, known are {known}"
            return fail("store", found, "install a newer headgate")
        if version < known:
            older.append(part)
    if older:
        advice = "the next start brings it up to date; back it up before"
        return warn("store", f"{name}: {', '.join(older)} tables are of an older version", advice)
    return ok("store", f"{name}: all tables are up to date")
