"""The contract of what keeps slots: rows that change by steps, each of them atomic.

A step is a pure function of the rows and the time, see `headgate.core.slots.steps`. It runs in
a transaction, so that of several nodes that take the same step one finds it still to be done. Steps
are bound with `functools.partial`, and can be sent to the process that writes. Every method may
raise `StoreUnavailableError`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import UTC, tzinfo
from functools import cache, partial
from typing import Any, TypeVar, get_args

import msgspec

from headgate.core.budgets.ledger import Clock
from headgate.core.slots.slot import Claim, Rows, SlotConfig, SlotReading, SlotRow, StartPhase
from headgate.core.slots.wakes import SlotSchedule
from headgate.errors import InvalidSettingError, StoreError
from headgate.storage import audit
from headgate.storage.audit import AuditEntry
from headgate.storage.migrations import first_migration
from headgate.storage.transaction import Access, Dialect, Insert, Transaction, about, json_rows
from headgate.storage.zones import zone

Answer = TypeVar("Answer")

Step = Callable[[Rows, float], "tuple[tuple[SlotRow, ...], Answer]"]
"""From the rows that were asked for, by name, and now, to the rows that change and an answer.

A slot that nothing is kept of yet has a row with nothing but its name.
"""


# What is kept of slots: one row each, changed by steps that run in the writer's transaction.
#
# Whoever writes has the database for itself, so a step sees the rows as they are, and versions
# reach readers in their order. A row holds JSON. What a newer program has added to it is passed
# over, and a reading or a configuration that this one cannot read is as none. Of markers that
# cannot be read nothing is guessed: a step on them fails, until a start drops the row and begins
# with a poll.

PART = "slots"

KEPT_SECONDS = 30 * 86_400.0
"""How long the row of a slot is kept that no configuration names, since it last changed."""

MAX_KEPT = 10_000
"""How many rows are kept; beyond that those go that no configuration names, oldest first."""

_TABLES = """
CREATE TABLE slots (
    name {text} PRIMARY KEY,
    version BIGINT NOT NULL,
    changed_at DOUBLE PRECISION NOT NULL,
    kept TEXT NOT NULL
) {by_key};
CREATE INDEX slots_by_version ON slots (version);
CREATE TABLE slot_versions (last_version BIGINT NOT NULL);
INSERT INTO slot_versions (last_version) VALUES (0)
"""
MIGRATIONS = (first_migration(_TABLES),)

_WRITE = Insert(
    table="slots",
    columns=(
        ("name", "TEXT"),
        ("version", "BIGINT"),
        ("changed_at", "DOUBLE PRECISION"),
        ("kept", "TEXT"),
    ),
    key=("name",),
    updated=("version", "changed_at", "kept"),
)
_READ = about("SELECT name, version, kept FROM slots", "name")
_READ_AFTER = "SELECT name, version, kept FROM slots WHERE version > ? ORDER BY version"
_COUNT = "UPDATE slot_versions SET last_version = last_version + ? RETURNING last_version"


class _Kept(msgspec.Struct, kw_only=True):
    """A row as JSON; the parts that may be from another program's time are read by themselves."""

    schedule: msgspec.Raw
    reading: msgspec.Raw = msgspec.Raw(b"null")
    config: msgspec.Raw = msgspec.Raw(b"null")
    is_off: bool = False
    start: str = ""
    poll_claim: Claim | None = None
    wake_claim: Claim | None = None


class SlotStore:
    """The slots of a store; `now` is the clock that all nodes go by."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.now: Clock = access.now

    async def rows(self, after: int = -1) -> tuple[SlotRow, ...]:
        """Return the rows that changed after a version, in the order of their versions.

        A row that cannot be read is left out; a step on it says so.
        """
        return await self._access.ask(partial(read_after, after=after))

    async def step(
        self, names: tuple[str, ...], step: Step[Answer], entry: AuditEntry | None = None
    ) -> Answer:
        """Take a step on the rows of these slots; its answer means that the change is on disk."""
        return await self._access.run(partial(take, names=names, step=step, entry=entry))

    async def drop_unreadable(self, name: str) -> bool:
        """Drop the row of a slot if it cannot be read; tell whether there was such a row."""
        return await self._access.run(partial(drop_unreadable, name=name))

    async def forget(self, configured: Collection[str]) -> int:
        """Forget slots that are not configured and have not changed for long; return how many."""
        return await self._access.run(partial(forget, configured=tuple(configured)))


def read_after(transaction: Transaction, *, after: int) -> tuple[SlotRow, ...]:
    """Return the readable rows behind a version, in the order of their versions."""
    found: list[SlotRow] = []
    for name, version, kept in transaction.read(_READ_AFTER, (after,)):
        try:
            found.append(_row(name, version, kept))
        except StoreError:
            continue
    return tuple(found)


def take(
    transaction: Transaction,
    now: float,
    *,
    names: tuple[str, ...],
    step: Step[Answer],
    entry: AuditEntry | None = None,
) -> Answer:
    """Take a step in an open transaction, and write what it changes."""
    rows: Rows = {name: SlotRow(name=name) for name in names}
    for found in transaction.read(_READ, names):
        rows[found[0]] = _row(*found)
    changed, answer = step(rows, now)
    if changed:
        _write(transaction, now, changed)
    if entry is not None:
        audit.write(transaction, entry, now)
    return answer


def drop_unreadable(transaction: Transaction, _now: float, *, name: str) -> bool:
    """Drop a row that cannot be read; another node may have written a good one meanwhile."""
    for found in transaction.read(_READ, (name,)):
        try:
            _row(*found)
        except StoreError:
            transaction.write("DELETE FROM slots WHERE name = ?", (name,))
            return True
    return False


def forget(transaction: Transaction, now: float, *, configured: tuple[str, ...]) -> int:
    """Forget what no configuration names: after its time, or where there are too many."""
    names = json_rows([(name,) for name in configured])
    by_age, by_number = _forget_sql(transaction.dialect)
    gone = transaction.write(by_age, (now - KEPT_SECONDS, names))
    ((count,),) = transaction.read("SELECT COUNT(*) FROM slots")
    if count > MAX_KEPT:
        gone += transaction.write(by_number, (names, count - MAX_KEPT))
    return gone


@cache
def _forget_sql(dialect: Dialect) -> tuple[str, str]:
    configured = f"SELECT given.name FROM {dialect.given({'name': 'TEXT'})}"  # noqa: S608
    is_gone = f"name NOT IN ({configured})"
    oldest = f"SELECT name FROM slots WHERE {is_gone} ORDER BY changed_at LIMIT ?"  # noqa: S608
    return (
        f"DELETE FROM slots WHERE changed_at < ? AND {is_gone}",  # noqa: S608
        f"DELETE FROM slots WHERE name IN ({oldest})",  # noqa: S608
    )


def _write(transaction: Transaction, now: float, rows: tuple[SlotRow, ...]) -> None:
    ((last,),) = transaction.read(_COUNT, (len(rows),))
    first = last - len(rows) + 1
    transaction.insert(
        _WRITE, [(row.name, first + place, now, _text(row)) for place, row in enumerate(rows)]
    )


def _text(row: SlotRow) -> str:
    kept = _Kept(
        schedule=_raw(row.schedule),
        reading=_raw(row.reading),
        config=_raw(row.config),
        is_off=row.is_off,
        start=row.start,
        poll_claim=row.poll_claim,
        wake_claim=row.wake_claim,
    )
    return msgspec.json.encode(kept).decode()


def _raw(value: SlotSchedule | SlotReading | SlotConfig | None) -> msgspec.Raw:
    # Zones are kept by their names; all else is JSON already.
    return msgspec.Raw(msgspec.json.encode(value, enc_hook=str))


def _row(name: str, version: int, text: str) -> SlotRow:
    try:
        kept = msgspec.json.decode(text, type=_Kept)
        schedule = msgspec.json.decode(kept.schedule, type=SlotSchedule)
    except msgspec.DecodeError as error:
        advice = "install the headgate that wrote it, or delete its row from the table slots"
        line = f"slot {name!r}: what is kept of it cannot be read ({error}); {advice}"
        raise StoreError(line) from None
    return SlotRow(
        name=name,
        schedule=schedule,
        reading=_part(kept.reading, SlotReading),
        config=_part(kept.config, SlotConfig),
        is_off=kept.is_off,
        start=kept.start if kept.start in get_args(StartPhase) else "",  # type: ignore[arg-type]
        poll_claim=kept.poll_claim,
        wake_claim=kept.wake_claim,
        version=version,
    )


Part = TypeVar("Part", SlotReading, SlotConfig)


def _part(raw: msgspec.Raw, kind: type[Part]) -> Part | None:
    try:
        return _decoder(kind).decode(raw)  # type: ignore[no-any-return]
    except msgspec.DecodeError:
        return None


@cache
def _decoder(kind: type[Part]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind | None, dec_hook=_decode_zone)


def _decode_zone(_kind: type, name: object) -> tzinfo:
    """Return the zone that was in force; the one of a configuration is compared by its name.

    A machine that does not know it any more compares with another, and takes that for a change.
    """
    try:
        return zone(str(name), field="zone")
    except InvalidSettingError:
        return UTC
