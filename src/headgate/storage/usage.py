"""What tasks and calls used, by hour, project, agent, model and key: rows behind usage reports.

They stand beside `project_usage`, which shares are reckoned from: that one is small, exact for each
project and read whole by every dispatcher, while here anybody can add a row by naming an agent. An
hour with more than `MAX_PER_HOUR` rows has its cheapest ones added up under a name that
no agent can have, so that whoever is bound to one reads nothing of others.

Beside them are sums over all time, for counters: of usage by project and model, and of the lanes
that were forgotten by project. Rule: a sum never goes down. A project and model that came among the
first `OWN_TOTALS` keep their sum for good; those after them are added up for their project.

What is learned of the cost of each kind of work is read here too, for people: what is known of it,
and which work reports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Literal

import msgspec

from headgate.core.dispatch_state import NO_ESTIMATE, TargetEstimate
from headgate.core.estimates import SILENT_AFTER, Estimates, Kind, Learned, SilentKind
from headgate.core.fair_share import SECONDS_PER_HOUR, hour_of
from headgate.core.money import format_usd
from headgate.core.retention import usage_kept_since
from headgate.storage.migrations import Migration, statements
from headgate.storage.schema import ESTIMATE_ROWS
from headgate.storage.tokens import Bounds
from headgate.storage.transaction import Access, Row, Transaction, Value

# The contract of usage reports: what was used, by project, agent, model, slot (a key) or day.
#
# Figures are kept by the hour for four hundred days. A day is one of UTC.

Grouping = Literal["project", "agent", "model", "slot", "day"]

GROUPINGS: tuple[Grouping, ...] = ("project", "agent", "model", "slot", "day")
MAX_ROWS = 1_000
"""How many rows a report has; what is left is one more."""

OTHER = " other"
"""The key of what has no row of its own; with its space it is nobody's name."""


class UsageSum(msgspec.Struct, frozen=True, kw_only=True):
    """What was used under one key: tasks and attempts that ended, calls, tokens, micro-dollars.

    A call of a task is in the attempt of that task, and not among the calls. The assumed amounts
    are the part of the others that nobody reported: an attempt was lost or ended without a word,
    and what was held for it was booked. Unpriced are the tokens of a model of which nobody knows
    the price.
    """

    key: str
    tasks: int = 0
    attempts: int = 0
    calls: int = 0
    tokens: int = 0
    micro_usd: int = 0
    assumed_tokens: int = 0
    assumed_micro_usd: int = 0
    unpriced_tokens: int = 0


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of a time, days in their order and all else by cost; Unix seconds, in whole hours."""

    by: Grouping
    since: float
    until: float
    rows: tuple[UsageSum, ...]
    total: UsageSum


class UsageTotal(msgspec.Struct, frozen=True, kw_only=True):
    """What a project and a model have used since the store was made; `OTHER` is all other models.

    The assumed amounts are the part of the others that nobody reported, and the priced one is the
    part of the dollars that the price list knows. `overruns` are attempts that cost more than was
    reserved for them.
    """

    project_id: str
    model: str
    tokens: int = 0
    micro_usd: int = 0
    assumed_tokens: int = 0
    assumed_micro_usd: int = 0
    unpriced_tokens: int = 0
    priced_micro_usd: int = 0
    overruns: int = 0


class KnownKind(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one kind of work, and the Unix time of the latest attempt it was fed by."""

    kind: Kind
    fed_at: float
    learned: Learned


class UnpricedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was used though nobody knows its price, how many tokens, and what was booked."""

    model: str
    tokens: int
    assumed_micro_usd: int = 0

    @property
    def problem(self) -> str:
        """What it does to budgets."""
        if not self.assumed_micro_usd:
            return f"has no price: {self.tokens:,} tokens were booked at no cost"
        booked = format_usd(self.assumed_micro_usd)
        return f"has no price: for {self.tokens:,} tokens {booked} was booked, as was reserved"


PART = "usage"
OWN_TOTALS = 500
MAX_TOTALS = 1_000
MAX_PER_HOUR = 1_000
MAX_UNPRICED = 20
UNPRICED_SECONDS = 86_400
"""For how long a model counts as unpriced after it was used without a price."""
SECONDS_PER_DAY = 86_400
MAX_KINDS_READ = 500
MAX_SILENT = 20
MAX_SILENT_READ = 200
SILENT_SECONDS = 86_400
"""For how long a kind of work that reports nothing is told of after it ran."""

_TABLE = """
CREATE TABLE usage_rows (
    hour BIGINT,
    project_id {text},
    agent_id {text},
    model {text},
    tasks BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    micro_usd BIGINT NOT NULL,
    PRIMARY KEY (hour, project_id, agent_id, model)
) {by_key}
"""
_RENAME_OTHER = (
    "UPDATE usage_rows SET agent_id = ' other', model = ' other'"
    " WHERE agent_id = 'other' AND model = 'other'"
)
_ADD_ASSUMED = (
    "ALTER TABLE usage_rows ADD COLUMN assumed_tokens BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE usage_rows ADD COLUMN assumed_micro_usd BIGINT NOT NULL DEFAULT 0",
)
_ADD_UNPRICED = (
    "ALTER TABLE usage_rows ADD COLUMN unpriced_tokens BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE usage_totals ADD COLUMN unpriced_tokens BIGINT NOT NULL DEFAULT 0",
)
# The key takes part in what a row is of, so SQLite needs another table.
_ADD_SLOTS_SQLITE = """
CREATE TABLE usage_rows_by_slot (
    hour BIGINT,
    project_id TEXT,
    agent_id TEXT,
    model TEXT,
    slot TEXT,
    tasks BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    calls BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    micro_usd BIGINT NOT NULL,
    assumed_tokens BIGINT NOT NULL,
    assumed_micro_usd BIGINT NOT NULL,
    unpriced_tokens BIGINT NOT NULL,
    PRIMARY KEY (hour, project_id, agent_id, model, slot)
) WITHOUT ROWID;
INSERT INTO usage_rows_by_slot SELECT hour, project_id, agent_id, model, '', tasks, attempts, 0,
    tokens, micro_usd, assumed_tokens, assumed_micro_usd, unpriced_tokens FROM usage_rows;
DROP TABLE usage_rows;
ALTER TABLE usage_rows_by_slot RENAME TO usage_rows
"""
_ADD_SLOTS_POSTGRES = """
ALTER TABLE usage_rows ADD COLUMN slot TEXT COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE usage_rows ADD COLUMN calls BIGINT NOT NULL DEFAULT 0;
ALTER TABLE usage_rows DROP CONSTRAINT usage_rows_pkey;
ALTER TABLE usage_rows ADD PRIMARY KEY (hour, project_id, agent_id, model, slot)
"""
_TOTAL_TABLES = """
CREATE TABLE usage_totals (
    seq {sequence},
    project_id {text} NOT NULL,
    model {text} NOT NULL,
    tokens BIGINT NOT NULL,
    micro_usd BIGINT NOT NULL,
    assumed_tokens BIGINT NOT NULL,
    assumed_micro_usd BIGINT NOT NULL,
    priced_micro_usd BIGINT NOT NULL,
    overruns BIGINT NOT NULL,
    UNIQUE (project_id, model)
);
INSERT INTO usage_totals
    (project_id, model, tokens, micro_usd, assumed_tokens, assumed_micro_usd, priced_micro_usd,
    overruns) SELECT project_id, model, SUM(tokens), SUM(micro_usd), SUM(assumed_tokens),
    SUM(assumed_micro_usd), 0, 0 FROM usage_rows GROUP BY project_id, model
    ORDER BY project_id, model;
CREATE TABLE forgotten_lanes (
    project_id {text} PRIMARY KEY,
    submitted BIGINT NOT NULL,
    completed BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    cancelled BIGINT NOT NULL,
    rejected BIGINT NOT NULL,
    expired BIGINT NOT NULL,
    started BIGINT NOT NULL,
    wait_ms BIGINT NOT NULL
) {by_key}
"""


MIGRATIONS = (
    Migration(
        number=1,
        sqlite=(_TABLE.format(text="TEXT", by_key="WITHOUT ROWID"),),
        postgres=(_TABLE.format(text='TEXT COLLATE "C"', by_key=""),),
    ),
    Migration(number=2, sqlite=(_RENAME_OTHER,), postgres=(_RENAME_OTHER,)),
    Migration(number=3, sqlite=_ADD_ASSUMED, postgres=_ADD_ASSUMED),
    Migration(
        number=4,
        sqlite=statements(
            _TOTAL_TABLES,
            text="TEXT",
            sequence="INTEGER PRIMARY KEY AUTOINCREMENT",
            by_key="WITHOUT ROWID",
        ),
        postgres=statements(
            _TOTAL_TABLES,
            text='TEXT COLLATE "C"',
            sequence="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
            by_key="",
        ),
    ),
    Migration(number=5, sqlite=_ADD_UNPRICED, postgres=_ADD_UNPRICED),
    Migration(
        number=6, sqlite=statements(_ADD_SLOTS_SQLITE), postgres=statements(_ADD_SLOTS_POSTGRES)
    ),
)

_AMOUNTS = (
    *("tasks", "attempts", "calls", "tokens", "micro_usd"),
    *("assumed_tokens", "assumed_micro_usd", "unpriced_tokens"),
)
_SUMS = ", ".join(f"CAST(SUM({name}) AS BIGINT)" for name in _AMOUNTS)
_KEYS: dict[Grouping, str] = {
    "project": "project_id",
    "agent": "agent_id",
    "model": "model",
    "slot": "slot",
    "day": f"hour / {SECONDS_PER_DAY} * {SECONDS_PER_DAY}",
}
_FULL_HOURS = (
    "SELECT hour FROM usage_rows WHERE hour >= ? GROUP BY hour HAVING COUNT(*) > ? ORDER BY hour"
)
_IS_OWN = f"NOT (agent_id = '{OTHER}' AND model = '{OTHER}')"
# What is folded must not take part in the choice, or the second statement would choose otherwise.
_CHEAPEST = (
    f"hour = ? AND {_IS_OWN} AND (project_id, agent_id, model, slot) NOT IN"  # noqa: S608
    f" (SELECT project_id, agent_id, model, slot FROM usage_rows WHERE hour = ? AND {_IS_OWN}"
    " ORDER BY micro_usd DESC, tokens DESC, attempts + calls DESC,"
    " project_id, agent_id, model, slot LIMIT ?)"
)
_FOLD = (
    f"INSERT INTO usage_rows (hour, project_id, agent_id, model, slot, {', '.join(_AMOUNTS)})"  # noqa: S608
    f" SELECT hour, project_id, '{OTHER}', '{OTHER}', '{OTHER}', {_SUMS}"
    f" FROM usage_rows WHERE {_CHEAPEST} GROUP BY hour, project_id"
    " ON CONFLICT (hour, project_id, agent_id, model, slot) DO UPDATE SET "
    + ", ".join(f"{name} = usage_rows.{name} + excluded.{name}" for name in _AMOUNTS)
)
_FORGET = f"DELETE FROM usage_rows WHERE {_CHEAPEST}"  # noqa: S608

_TOTALS = UsageTotal.__struct_fields__[2:]
_TOTAL_SUMS = ", ".join(f"CAST(SUM({name}) AS BIGINT)" for name in _TOTALS)
# Those that came first, so that no other takes the place of one; sums of others are never first.
_FIRST = f"FROM usage_totals WHERE model <> '{OTHER}' ORDER BY seq LIMIT {OWN_TOTALS}"
_OWN = f"SELECT project_id, model, {', '.join(_TOTALS)} {_FIRST}"
_LATER = f"seq NOT IN (SELECT seq {_FIRST})"
_REST = (
    f"SELECT project_id, '{OTHER}', {_TOTAL_SUMS} FROM usage_totals"  # noqa: S608
    f" WHERE {_LATER} GROUP BY project_id ORDER BY MIN(seq)"
)
_COUNT_TOTALS = "SELECT COUNT(*) FROM usage_totals"
_LATER_OWN = f"model <> '{OTHER}' AND {_LATER}"
_FOLD_TOTALS = (
    f"INSERT INTO usage_totals (project_id, model, {', '.join(_TOTALS)})"  # noqa: S608
    f" SELECT project_id, '{OTHER}', {_TOTAL_SUMS} FROM usage_totals"
    f" WHERE {_LATER_OWN} GROUP BY project_id"
    " ON CONFLICT (project_id, model) DO UPDATE SET "
    + ", ".join(f"{name} = usage_totals.{name} + excluded.{name}" for name in _TOTALS)
)
_UNPRICED = (
    "SELECT model, CAST(SUM(unpriced_tokens) AS BIGINT),"  # noqa: S608
    " CAST(SUM(assumed_micro_usd) AS BIGINT) FROM usage_rows"
    " WHERE hour >= ? AND unpriced_tokens > 0 AND model <> ? GROUP BY model"
    f" ORDER BY 2 DESC, 1 LIMIT {MAX_UNPRICED}"
)
_KINDS = "SELECT project_id, name, action, fed_at, learned FROM estimates"
_LATEST = "ORDER BY fed_at DESC, project_id, name, action LIMIT ?"
# Whether successes without a number came last is told by a word of the JSON, so few rows are read.
_SILENT = f"{_KINDS} WHERE project_id <> '' AND fed_at >= ? AND learned LIKE ?"
_HAS_SILENT = '%"silent":%'
_learned = msgspec.json.Decoder(Learned)
_FORGET_TOTALS = f"DELETE FROM usage_totals WHERE {_LATER_OWN}"  # noqa: S608


def purge(transaction: Transaction, now: float) -> None:
    """Forget what is older than four hundred days, and fold hours that have too many rows."""
    transaction.run("DELETE FROM usage_rows WHERE hour < ?", (int(usage_kept_since(now)),))
    latest = hour_of(now) - SECONDS_PER_HOUR
    for (hour,) in transaction.read(_FULL_HOURS, (latest, MAX_PER_HOUR)):
        _fold(transaction, hour)
    if transaction.read(_COUNT_TOTALS)[0][0] > MAX_TOTALS:
        transaction.run(_FOLD_TOTALS)
        transaction.run(_FORGET_TOTALS)


def totals(transaction: Transaction) -> tuple[UsageTotal, ...]:
    """Return what was used by project and model since the store was made, the first ones first."""
    own, rest = transaction.read_all([(_OWN, ()), (_REST, ())])
    names = UsageTotal.__struct_fields__
    return tuple(UsageTotal(**dict(zip(names, row, strict=True))) for row in (*own, *rest))


def unpriced(transaction: Transaction, *, since: int) -> tuple[UnpricedModel, ...]:
    """Return the models that were used from an hour on without a price, the most used first."""
    rows = transaction.read(_UNPRICED, (since, OTHER))
    return tuple(
        UnpricedModel(model=model, tokens=tokens, assumed_micro_usd=assumed)
        for model, tokens, assumed in rows
    )


def known_kinds(
    transaction: Transaction, *, project_id: str | None, most: int
) -> tuple[KnownKind, ...]:
    """Return what is known of kinds of work, of one project or of all, the last fed first."""
    where = "" if project_id is None else " WHERE project_id = ?"
    given: list[Value] = [] if project_id is None else [project_id]
    rows = transaction.read(f"{_KINDS}{where} {_LATEST}", [*given, most])
    return tuple([_known(row) for row in rows])


def keep_kinds(kinds: Sequence[KnownKind], transaction: Transaction, _now: float) -> None:
    """Write what is known of kinds of work from elsewhere, in place of what was."""
    rows = [(*one.kind, one.fed_at, msgspec.json.encode(one.learned).decode()) for one in kinds]
    transaction.insert_all([(ESTIMATE_ROWS, rows)])


def silent_kinds(
    transaction: Transaction,
    *,
    since: float,
    estimates: Mapping[str, TargetEstimate],
    least: int = SILENT_AFTER,
) -> tuple[SilentKind, ...]:
    """Return the work that ran since a time and reports nothing, the latest first.

    `least` is after how many tasks. Where the target has an estimate by now, nobody needs to do
    anything any more.
    """
    rows = transaction.read(f"{_SILENT} {_LATEST}", (since, _HAS_SILENT, MAX_SILENT_READ))
    known = [_known(row) for row in rows]
    found = [
        one
        for one in Estimates((kind.kind, kind.learned) for kind in known).silent_kinds(least)
        if estimates.get(one.kind.name, NO_ESTIMATE).amount(one.unit) is None
    ]
    return tuple(found[:MAX_SILENT])


def _known(row: Row) -> KnownKind:
    return KnownKind(kind=Kind(*row[:3]), fed_at=row[3], learned=_learned.decode(row[4]))


def report(
    transaction: Transaction, *, by: Grouping, since: int, until: int, bounds: Bounds
) -> UsageReport:
    """Sum up what was used from one hour until before another."""
    conditions, values = _conditions(since, until, bounds)
    key = _KEYS[by]
    order = "1" if by == "day" else "6 DESC, 5 DESC, 1"
    sql = f"SELECT {key}, {_SUMS} FROM usage_rows WHERE {conditions}"  # noqa: S608
    rows = transaction.read(f"{sql} GROUP BY 1 ORDER BY {order} LIMIT {MAX_ROWS + 1}", values)
    totals = transaction.read(f"SELECT '', {_SUMS} FROM usage_rows WHERE {conditions}", values)  # noqa: S608
    sums = tuple(_sum(row, by) for row in rows[:MAX_ROWS])
    total = _sum(totals[0], "project")
    if len(rows) > MAX_ROWS:
        sums = (*sums, _rest(total, sums))
    return UsageReport(by=by, since=since, until=until, rows=sums, total=total)


class UsageReports:
    """Reads what was used; may raise `StoreUnavailableError`."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def now(self) -> float:
        """Return the time by which hours are told apart."""
        return self._access.now()

    async def report(
        self, by: Grouping, *, since: float, until: float, bounds: Bounds
    ) -> UsageReport:
        """Sum up what was used from one hour until before another, within the bounds."""
        first, end = hour_of(since), -hour_of(-until)
        question = partial(report, by=by, since=first, until=end, bounds=bounds)
        return await self._access.ask(question, is_long=True)

    async def unpriced(self) -> tuple[UnpricedModel, ...]:
        """Return the models that were used without a price in the last day."""
        since = hour_of(self._access.now() - UNPRICED_SECONDS)
        return await self._access.ask(partial(unpriced, since=since), is_long=True)

    async def silent(self, estimates: Mapping[str, TargetEstimate]) -> tuple[SilentKind, ...]:
        """Return the work of the last day that reports nothing, unless its target says a cost."""
        since = self._access.now() - SILENT_SECONDS
        return await self._access.ask(partial(silent_kinds, since=since, estimates=estimates))

    async def kinds(
        self, project_id: str | None = None, *, most: int = MAX_KINDS_READ
    ) -> tuple[KnownKind, ...]:
        """Return what is known of kinds of work, of one project or of all, the last fed first."""
        return await self._access.ask(partial(known_kinds, project_id=project_id, most=most))

    async def totals(self) -> tuple[UsageTotal, ...]:
        """Return what was used by project and model since the store was made."""
        return await self._access.ask(totals)


def _conditions(since: int, until: int, bounds: Bounds) -> tuple[str, list[Value]]:
    conditions = ["hour >= ?", "hour < ?"]
    values: list[Value] = [since, until]
    for column, value in (("project_id", bounds.project_id), ("agent_id", bounds.agent_id)):
        if value is not None:
            conditions.append(f"{column} = ?")
            values.append(value)
    return " AND ".join(conditions), values


def _sum(row: Row, by: Grouping) -> UsageSum:
    key = f"{datetime.fromtimestamp(row[0], UTC):%Y-%m-%d}" if by == "day" else str(row[0])
    amounts = [amount or 0 for amount in row[1:]]
    return UsageSum(key=key, **dict(zip(_AMOUNTS, amounts, strict=True)))


def _rest(total: UsageSum, sums: tuple[UsageSum, ...]) -> UsageSum:
    left = {
        name: getattr(total, name) - sum(getattr(one, name) for one in sums) for name in _AMOUNTS
    }
    return UsageSum(key=OTHER, **left)


def _fold(transaction: Transaction, hour: int) -> None:
    """Add the cheapest rows of an hour up, one row a project."""
    # Half of them go, so that the next call has nothing to do.
    chosen = (hour, hour, MAX_PER_HOUR // 2)
    transaction.run(_FOLD, chosen)
    transaction.run(_FORGET, chosen)
