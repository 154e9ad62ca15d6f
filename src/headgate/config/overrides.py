"""Overrides: what an administrator changed beside the file, and how long that holds.

An override remembers what the file said of its key when it was made. Rule: it holds for as long as
the file says the same; a file that says something else of that key has the last word. Effective
settings are the tables of the file with the overrides in force laid over them, and they are decoded
and checked as if the file had said so.

A budget is overridden as a whole: all of its keys hold, or none. It stands by itself, so a file
that does not mention the budget leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import msgspec

from headgate.config.budget_limits import budgets, limit_of, limit_words, scope_of
from headgate.config.loading import ECHO_NAME, Origins, hidden
from headgate.config.messages import key_path
from headgate.config.settings import DEFAULT_PROJECT, NAMED_TABLES, Settings
from headgate.config.sources import Table
from headgate.core.budgets.ledger import Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.task import TERMINAL, TaskStatus
from headgate.executors.targets import BUILT_IN_TARGETS, ECHO, Target
from headgate.storage import audit, ledger
from headgate.storage.audit import AuditEntry
from headgate.storage.queries import lanes
from headgate.storage.schema import OVERRIDES
from headgate.storage.transaction import Dialect, Row, Transaction
from headgate.storage.unit_of_work import states_of

OverrideKind = Literal["projects", "agents", "targets", "slots", "budgets", "scheduler"]
Tables = Mapping[str, Table]

PAUSED = "paused"
RESERVE = "reserve"
MAX_OVERRIDES = 10_000

PATCHABLE: dict[OverrideKind, dict[str, str]] = {
    "projects": {
        "creditWeight": "credit_weight",
        "maxConcurrentAgents": "max_concurrent_agents",
        "budgetLimit": "budget_limit",
        "status": "status",
    },
    "agents": {
        "capacity": "capacity",
        "acceptsOpen": "accepts_open",
        "type": "type",
        "status": "status",
    },
    "targets": {
        "slot": "slot",
        "provider": "provider",
        "estimateUsd": "estimate_usd",
        "estimateTokens": "estimate_tokens",
        "status": "status",
    },
    "slots": {"maxInflight": "max_inflight"},
    "budgets": {
        "limitUsd": "limit_usd",
        "limitTokens": "limit_tokens",
        "window": "window",
        "reserve": RESERVE,
    },
}
"""The keys that can be changed beside the file, by the names that the API has for them."""

BUDGET_KEYS = tuple(PATCHABLE["budgets"].values())


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """One key that was changed: its new value, and what the file said then; None is absent."""

    kind: OverrideKind
    name: str
    key: str
    value: object
    file_value: object = None
    at: float = 0.0
    by: str = ""

    @property
    def path(self) -> tuple[str, str, str]:
        """The key that this is about."""
        return self.kind, self.name, self.key


def written_table(tables: Tables, kind: str, name: str) -> Table | None:
    """Return what the file says of a name, or what it stands for if it need not be written.

    None is a name that no override can be about.
    """
    found = tables.get(kind, {}).get(name)
    if isinstance(found, dict):
        return found
    if kind == "projects":
        return {} if name == DEFAULT_PROJECT else None
    if kind == "slots":
        return None
    if kind == "targets" and name in BUILT_IN_TARGETS:
        return _written(BUILT_IN_TARGETS[name])
    if kind == "targets":
        is_echo = name == ECHO_NAME and not tables.get(kind)
        return _written(ECHO) if is_echo else None
    # An agent that nobody declared takes only its own tasks; a budget may be set in any scope.
    return {"accepts_open": False} if kind == "agents" else {}


def file_value_of(tables: Tables, kind: str, name: str, key: str) -> object:
    """Return what the file says of a key; None if it does not say anything."""
    found = tables.get(kind, {}).get(name)
    return found.get(key) if isinstance(found, dict) else None


def in_force(tables: Tables, overrides: Iterable[Override]) -> tuple[Override, ...]:
    """Return the overrides that still hold beside this file."""
    given = tuple(overrides)
    held = {
        name for name, keys in by_budget(given).items() if _is_budget_in_force(tables, name, keys)
    }
    return tuple(
        one
        for one in given
        if (one.name in held if one.kind == "budgets" else _is_key_in_force(tables, one))
    )


def by_budget(overrides: Iterable[Override]) -> dict[str, list[Override]]:
    """Return the overrides of each budget, by its name."""
    found: dict[str, list[Override]] = {}
    for one in overrides:
        if one.kind == "budgets":
            found.setdefault(one.name, []).append(one)
    return found


def whole_budget(
    tables: Tables,
    overrides: Iterable[Override],
    name: str,
    values: Mapping[str, object],
    resets: Collection[str],
) -> dict[str, object]:
    """Return all keys of a budget after some were changed by hand; empty if the file says them."""
    budget = by_budget(in_force(tables, overrides)).get(name, [])
    held = {one.key: one.value for one in budget}
    of_file = {key: file_value_of(tables, "budgets", name, key) for key in BUDGET_KEYS}
    whole = {**of_file, **{key: held[key] for key in held.keys() - set(resets)}, **values}
    if of_file[RESERVE] is None and RESERVE not in held.keys() | values.keys():
        # Most budgets never say it, and only so many keys can be overridden.
        del whole[RESERVE], of_file[RESERVE]
    if None in values.values() and whole["limit_usd"] is None and whole["limit_tokens"] is None:
        # The last limit was taken away, and a window alone is no budget.
        return dict.fromkeys(BUDGET_KEYS)
    return whole if values or whole != of_file else {}


def _is_budget_in_force(tables: Tables, name: str, keys: list[Override]) -> bool:
    table = tables.get("budgets", {}).get(name)
    if not isinstance(table, dict):
        # There is nothing left to delete; whatever else was set stands by itself.
        return any(one.value is not None for one in keys)
    if all(table.get(one.key) == one.file_value for one in keys):
        return True
    held = {one.key: one.value for one in keys}
    limit = limit_of(name, held)
    is_same = limit is not None and limit == limit_of(name, table)
    return is_same and held.get(RESERVE) == table.get(RESERVE)


def _is_key_in_force(tables: Tables, override: Override) -> bool:
    if override.kind == "scheduler":
        return True
    if written_table(tables, override.kind, override.name) is None:
        return False
    return file_value_of(tables, *override.path) == override.file_value


def with_overrides(tables: Tables, overrides: Iterable[Override]) -> dict[str, Table]:
    """Lay the overrides in force over the tables of a file; these are left as they are."""
    laid = {section: dict(table) for section, table in tables.items()}
    held = [one for one in in_force(tables, overrides) if one.kind != "scheduler"]
    if not laid.get("targets") and any(one.kind == "targets" for one in held):
        # Whatever is laid there would take the place of the one that stands for none.
        laid["targets"] = {ECHO_NAME: written_table(tables, "targets", ECHO_NAME)}
    for override in held:
        named = laid.setdefault(override.kind, {})
        current = named.get(override.name)
        if not isinstance(current, dict):
            current = written_table(tables, override.kind, override.name) or {}
        table = {key: value for key, value in current.items() if key != override.key}
        if override.value is not None:
            table[override.key] = override.value
        named[override.name] = table
    _drop_empty_budgets(laid, held)
    return laid


def is_paused(overrides: Iterable[Override]) -> bool:
    """Tell whether the switch that pauses everything is on."""
    return any(one.kind == "scheduler" and one.key == PAUSED and one.value for one in overrides)


def _drop_empty_budgets(laid: dict[str, Table], overrides: Iterable[Override]) -> None:
    """Leave out budgets whose limits were taken away by hand; one without any is none."""
    named = laid.get("budgets", {})
    taken = {
        name
        for name, keys in by_budget(overrides).items()
        if all(one.value is None for one in keys)
    }
    for name in taken & named.keys():
        table = named[name]
        if isinstance(table, dict) and not set(table) - {"window", RESERVE}:
            del named[name]


def _written(target: Target) -> Table:
    # Its status is not said, as a file does not say it: an override of it holds beside both.
    table: Table = msgspec.to_builtins(target)
    del table["status"]
    return table


# The difference of two settings: what changed, from what to what, and what has to wait.
#
# Rule: what may be a secret is never shown; that it changed is. Settings that say where the service
# is and what keeps its tasks cannot change while it runs: those stay as they are, and are named.

HOT = (
    "scheduler",
    "rate_limits",
    "targets",
    "projects",
    "agents",
    "budgets",
    "prices",
    "quota",
    "slots",
    "gateway",
    "upstreams",
    "models",
)
"""The sections that can change while the service runs; all others need a restart."""

COLD_KEYS = ("enabled",)
"""The keys of `[scheduler]` that need a restart all the same."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One key with a new value; a name that came or went is one change, with its whole table."""

    key: str
    before: object = msgspec.field(name="from", default=None)
    after: object = msgspec.field(name="to", default=None)


class Difference(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What changed, and what is written otherwise and needs a restart to come into force.

    `kept` are keys that a zero leaves as they were; the next start refuses it.
    """

    changed: tuple[Change, ...] = ()
    needs_restart: tuple[Change, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was different at all."""
        return not (self.changed or self.needs_restart)


def difference(before: Settings, after: Settings) -> Difference:
    """Compare settings in force with those that were read."""
    old, new = msgspec.to_builtins(before), msgspec.to_builtins(after)
    hot: list[Change] = []
    cold: list[Change] = []
    for section in new:
        for path, change in _changes(section, old[section], new[section]):
            (cold if _is_cold(path) else hot).append(change)
    return Difference(changed=tuple(hot), needs_restart=tuple(cold))


def applied_live(before: Settings, after: Settings) -> Settings:
    """Return what can come into force of settings that were read, with all else as it is."""
    kept = {
        section: getattr(before, section)
        for section in Settings.__struct_fields__
        if section not in HOT
    }
    cold = {key: getattr(before.scheduler, key) for key in COLD_KEYS}
    scheduler = msgspec.structs.replace(after.scheduler, **cold)
    return msgspec.structs.replace(after, scheduler=scheduler, **kept)


def live_origins(before: Origins, after: Origins) -> Origins:
    """Return where each value was read that is in force when others were read."""
    kept = {path: origin for path, origin in before.items() if _is_cold(path)}
    return kept | {path: origin for path, origin in after.items() if not _is_cold(path)}


def _is_cold(path: tuple[str, ...]) -> bool:
    return path[0] not in HOT or (path[0] == "scheduler" and path[-1] in COLD_KEYS)


def _changes(
    section: str, old: dict[str, object], new: dict[str, object]
) -> list[tuple[tuple[str, ...], Change]]:
    found = []
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        is_named = section in NAMED_TABLES
        if is_named and isinstance(before, dict) and isinstance(after, dict):
            found += _inner_changes((section, name), before, after)
        else:
            found.append(_change((section, name), before, after))
    return found


def _inner_changes(
    path: tuple[str, ...], old: dict[str, object], new: dict[str, object]
) -> list[tuple[tuple[str, ...], Change]]:
    return [
        _change((*path, key), old.get(key), new.get(key))
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key)
    ]


def _change(path: tuple[str, ...], before: object, after: object) -> tuple[tuple[str, ...], Change]:
    key = path[-1]
    shown = Change(key=key_path(*path), before=hidden(key, before), after=hidden(key, after))
    return path, shown


# Overrides as rows, and the one transaction in which a change of settings is made.
#
# Rule: what was changed, the budgets that follow from it, and who did it are written together. A
# process that dies right after has made the change; one that dies right before has not.

OverridePath = tuple[str, str, str]

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


REPLACE_BUDGET = "budget.replace"
MAX_REPLACED = 20
REPLACED_SECONDS = 7 * 86_400.0
"""For how long a replaced budget is told of, unless somebody changes it by hand before."""

_REPLACED = (
    "SELECT subject, detail FROM audit_log WHERE at >= ? AND action = ? AND NOT EXISTS"
    " (SELECT 1 FROM audit_log AS later WHERE later.subject = audit_log.subject"
    " AND later.action IN ('budget.replace', 'budget.patch', 'budget.delete')"
    " AND later.seq > audit_log.seq) ORDER BY seq DESC LIMIT ?"
)


class ReplacedBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A budget that was changed by hand, and that the file has replaced; in words."""

    name: str
    before: str
    after: str

    @property
    def line(self) -> str:
        """What a person is told of it."""
        return f"budget {self.name}: the {self.before} was replaced by the file: {self.after}"

    @property
    def entry(self) -> AuditEntry:
        """What the audit log says of it."""
        detail = {key_path("budgets", self.name): {"from": self.before, "to": self.after}}
        return AuditEntry(
            actor=audit.FILE, action=REPLACE_BUDGET, subject=self.name, detail=dict(detail)
        )


def replaced_budgets(ended: Iterable[Override], settings: Settings) -> tuple[ReplacedBudget, ...]:
    """Return which budgets the settings in force say otherwise than overrides that ended."""
    limits = budgets(settings)
    found = []
    for name, keys in by_budget(ended).items():
        before = limit_of(name, {one.key: one.value for one in keys})
        after = limits.get(scope_of(name))
        if after is not None and after != before:
            words = "deletion by hand" if before is None else f"{limit_words(before)} set by hand"
            found.append(ReplacedBudget(name=name, before=words, after=limit_words(after)))
    return tuple(found)


def read_replaced_budgets(transaction: Transaction, *, since: float) -> tuple[ReplacedBudget, ...]:
    """Return the budgets that were replaced from a time on and not changed by hand since."""
    rows = transaction.read(_REPLACED, (since, REPLACE_BUDGET, MAX_REPLACED))
    found = []
    for name, text in rows:
        detail = msgspec.json.decode(text, type=dict[str, dict[str, str]])
        found += [
            ReplacedBudget(name=name, before=one["from"], after=one["to"])
            for one in detail.values()
        ]
    return tuple(found)


class StoredChange(msgspec.Struct, frozen=True, kw_only=True):
    """What is written with a change: overrides that begin and end, budgets, and who did it.

    `budgets` None leaves these as they are.
    """

    begun: tuple[Override, ...] = ()
    ended: tuple[OverridePath, ...] = ()
    budgets: dict[Scope, Limit] | None = None
    entries: tuple[AuditEntry, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.begun or self.ended or self.entries) and self.budgets is None


def store_change(
    transaction: Transaction, now: float, *, stored_change: StoredChange, keeps_ledger: bool
) -> None:
    """Write a change of settings."""
    for path in stored_change.ended:
        transaction.run(_END, path)
    transaction.insert(OVERRIDES, [_row(one) for one in stored_change.begun])
    if stored_change.budgets is not None:
        ledger.set_limits(transaction, stored_change.budgets, now, keeps_ledger=keeps_ledger)
    for entry in stored_change.entries:
        audit.write(transaction, entry, now)


def read_overrides(transaction: Transaction) -> tuple[Override, ...]:
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
    return (*override.path, value, file_value, override.at, override.by)
