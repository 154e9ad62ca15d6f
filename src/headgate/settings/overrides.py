"""Overrides: what an administrator changed beside the file, and how long that holds.

An override remembers what the file said of its key when it was made. Rule: it holds for as long as
the file says the same; a file that says something else of that key has the last word. Effective
settings are the tables of the file with the overrides in force laid over them, and they are decoded
and checked as if the file had said so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from headgate.executors.targets import ECHO, PULL, PULL_NAME, Target
from headgate.settings.decoding import ECHO_NAME
from headgate.settings.sections import DEFAULT_PROJECT
from headgate.settings.sources import Table

OverrideKind = Literal["projects", "agents", "targets", "budgets", "scheduler"]
Tables = Mapping[str, Table]

PAUSED = "paused"
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
    "targets": {"status": "status"},
    "budgets": {"limitUsd": "limit_usd", "limitTokens": "limit_tokens", "window": "window"},
}
"""The keys that can be changed beside the file, by the names that the API has for them."""


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
    def place(self) -> tuple[str, str, str]:
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
    if kind == "targets" and name == PULL_NAME:
        return _written(PULL)
    if kind == "targets":
        is_echo = name == ECHO_NAME and not tables.get(kind)
        return _written(ECHO) if is_echo else None
    # An agent that nobody declared takes only its own tasks; a budget may be set in any scope.
    return {"accepts_open": False} if kind == "agents" else {}


def said_of(tables: Tables, kind: str, name: str, key: str) -> object:
    """Return what the file says of a key; None if it does not say anything."""
    found = tables.get(kind, {}).get(name)
    return found.get(key) if isinstance(found, dict) else None


def is_in_force(tables: Tables, override: Override) -> bool:
    """Tell whether an override still holds beside this file."""
    if override.kind == "scheduler":
        return True
    if written_table(tables, override.kind, override.name) is None:
        return False
    return said_of(tables, *override.place) == override.file_value


def with_overrides(tables: Tables, overrides: Iterable[Override]) -> dict[str, Table]:
    """Lay the overrides in force over the tables of a file; these are left as they are."""
    laid = {section: dict(table) for section, table in tables.items()}
    in_force = [one for one in overrides if one.kind != "scheduler" and is_in_force(tables, one)]
    if not laid.get("targets") and any(one.kind == "targets" for one in in_force):
        # Whatever is laid there would take the place of the one that stands for none.
        laid["targets"] = {ECHO_NAME: written_table(tables, "targets", ECHO_NAME)}
    for override in in_force:
        named = laid.setdefault(override.kind, {})
        current = named.get(override.name)
        if not isinstance(current, dict):
            current = written_table(tables, override.kind, override.name) or {}
        table = {key: value for key, value in current.items() if key != override.key}
        if override.value is not None:
            table[override.key] = override.value
        named[override.name] = table
    _drop_empty_budgets(laid, in_force)
    return laid


def is_paused(overrides: Iterable[Override]) -> bool:
    """Tell whether the switch that pauses everything is on."""
    return any(one.kind == "scheduler" and one.key == PAUSED and one.value for one in overrides)


def _drop_empty_budgets(laid: dict[str, Table], overrides: Iterable[Override]) -> None:
    """Leave out budgets whose limits were taken away by hand; one without any is none."""
    named = laid.get("budgets", {})
    taken = {one.name for one in overrides if one.kind == "budgets" and one.value is None}
    for name in taken & named.keys():
        table = named[name]
        if isinstance(table, dict) and not set(table) - {"window"}:
            del named[name]


def _written(target: Target) -> Table:
    # Its status is not said, as a file does not say it: an override of it holds beside both.
    table: Table = msgspec.to_builtins(target)
    del table["status"]
    return table
