"""Overrides as rows, and the one transaction in which a change of settings is made.

Rule: what was changed, the budgets that follow from it, and who did it are written together. A
process that dies right after has made the change; one that dies right before has not.
"""

from __future__ import annotations

import msgspec

from headgate.audit import AuditEntry
from headgate.core.budgets.accounts import Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.tasks.task import TERMINAL, TaskStatus
from headgate.databases.transaction import Dialect, Row, Transaction
from headgate.settings.overrides import MAX_OVERRIDES, Override
from headgate.stores.administering import audit_trail, configured
from headgate.stores.looking.reading import lanes
from headgate.stores.schemas.administration import OVERRIDES
from headgate.stores.task_rows import states_of

Place = tuple[str, str, str]

_READ = (
    "SELECT kind, name, key, value, file_value, at, made_by FROM overrides"
    " ORDER BY kind, name, key LIMIT ?"
)
_END = "DELETE FROM overrides WHERE kind = ? AND name = ? AND key = ?"
_LIVE = states_of(tuple(status for status in TaskStatus if status not in TERMINAL))
_FIND = {Dialect.SQLITE: "instr", Dialect.POSTGRES: "strpos"}
_TARGET = {
    Dialect.SQLITE: "json_extract(spec, '$[0].target')",
    Dialect.POSTGRES: "CAST(spec AS json) -> 0 ->> 'target'",
}


class Adoption(msgspec.Struct, frozen=True, kw_only=True):
    """What is written with a change: overrides that begin and end, budgets, and who did it.

    `budgets` None leaves these as they are.
    """

    begun: tuple[Override, ...] = ()
    ended: tuple[Place, ...] = ()
    budgets: dict[Scope, Limit] | None = None
    entry: AuditEntry | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.begun or self.ended or self.entry) and self.budgets is None


def adopt(transaction: Transaction, now: float, *, adoption: Adoption, keeps_books: bool) -> None:
    """Write a change of settings."""
    for place in adoption.ended:
        transaction.run(_END, place)
    transaction.insert(OVERRIDES, [_row(one) for one in adoption.begun])
    if adoption.budgets is not None:
        configured.set_limits(transaction, adoption.budgets, keeps_books=keeps_books)
    if adoption.entry is not None:
        audit_trail.write(transaction, adoption.entry, now)


def read(transaction: Transaction) -> tuple[Override, ...]:
    """Return all overrides, whether a file lets them hold or not."""
    return tuple(
        Override(
            kind=row[0],
            name=row[1],
            key=row[2],
            value=msgspec.json.decode(row[3]),
            file_value=msgspec.json.decode(row[4]),
            at=row[5],
            by=row[6],
        )
        for row in transaction.read(_READ, (MAX_OVERRIDES,))
    )


def busy_names(
    transaction: Transaction, *, asked: tuple[tuple[str, str], ...]
) -> set[tuple[str, str]]:
    """Return which of these projects, agents and targets still have tasks that wait or run."""
    found = [lane for lane in lanes(transaction) if lane.queued or lane.inflight]
    projects, agents = {lane.project_id for lane in found}, {lane.agent_id for lane in found}
    known = {"projects": projects, "agents": agents}
    return {
        (section, name)
        for section, name in asked
        if (name in known[section] if section in known else _is_at_work(transaction, name))
    }


def busy_projects(transaction: Transaction) -> set[str]:
    """Return the projects that have tasks that wait or run."""
    return {lane.project_id for lane in lanes(transaction) if lane.queued or lane.inflight}


def unknown_targets(transaction: Transaction, *, known: tuple[str, ...]) -> list[str]:
    """Return the targets of tasks that wait or run, as far as they are not known."""
    marks = ", ".join("?" * len(_LIVE))
    sql = f"SELECT DISTINCT {_TARGET[transaction.dialect]} FROM tasks WHERE state IN ({marks})"  # noqa: S608
    found = {name for (name,) in transaction.read(sql, _LIVE) if name is not None}
    return sorted(found - set(known))


def _is_at_work(transaction: Transaction, target: str) -> bool:
    # The text of a task is compact JSON, in which a quoted name cannot be part of another.
    written = f'"target":{msgspec.json.encode(target).decode()}'
    marks = ", ".join("?" * len(_LIVE))
    find = _FIND[transaction.dialect]
    sql = f"SELECT 1 FROM tasks WHERE state IN ({marks}) AND {find}(spec, ?) > 0 LIMIT 1"  # noqa: S608
    return bool(transaction.read(sql, (*_LIVE, written)))


def _row(override: Override) -> Row:
    value = msgspec.json.encode(override.value).decode()
    file_value = msgspec.json.encode(override.file_value).decode()
    # The time is the one that whoever made it has: it is compared with what is read.
    return (*override.place, value, file_value, override.at, override.by)
