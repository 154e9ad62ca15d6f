"""A file that is read again while the service runs: what it may leave out, and what that means.

Rules: in `[scheduler]` a key that is absent keeps what was. A project, agent or target that is no
longer there is drained: what it has still runs, nothing new is taken, and then it is gone.
"""

from __future__ import annotations

from collections.abc import Iterable

from headgate.executors.targets import PULL_NAME
from headgate.settings.decoding import ECHO_NAME
from headgate.settings.overrides import Tables, written_table
from headgate.settings.sections import DEFAULT_PROJECT
from headgate.settings.sources import Table

DRAINED = ("projects", "agents", "targets")
DRAINING = "draining"
_EITHER = ("alpha", "optimize_for")
_ALWAYS_THERE = (("projects", DEFAULT_PROJECT), ("targets", PULL_NAME))

Left = frozenset[tuple[str, str]]
"""Section and name of what the file has no more, and what drains because of that."""


def completed(before: Tables, after: Tables) -> dict[str, Table]:
    """Return the tables of a file with what it leaves out and means to keep."""
    tables = {section: dict(table) for section, table in after.items()}
    tables["scheduler"] = before.get("scheduler", {}) | tables.get("scheduler", {})
    given = after.get("scheduler", {})
    for key, other in (_EITHER, _EITHER[::-1]):
        if key in given and other not in given:
            tables["scheduler"].pop(other, None)
    return tables


def reloaded(before: Tables, after: Tables) -> dict[str, Table]:
    """Return the tables that come into force when a file is read again, after those before."""
    tables = completed(before, after)
    gone = left(before, after)
    if any(section == "targets" for section, _ in gone):
        tables["targets"] = _with_default(tables["targets"])
    for section, name in gone:
        table = written_table(before, section, name) or {}
        drained = {key: value for key, value in table.items() if key != "default"}
        tables[section][name] = drained | {"status": DRAINING}
    return tables


def left(before: Tables, after: Tables) -> list[tuple[str, str]]:
    """List what was there and is there no more, in the order in which it was."""
    return [
        (section, name)
        for section in DRAINED
        for name in _names(before, section)
        if name not in _names(after, section) and (section, name) not in _ALWAYS_THERE
    ]


def without(tables: Tables, gone: Iterable[tuple[str, str]]) -> dict[str, Table]:
    """Return tables without what has drained."""
    dropped = set(gone)
    return {
        section: {name: value for name, value in table.items() if (section, name) not in dropped}
        for section, table in tables.items()
    }


def _with_default(targets: Table) -> Table:
    """Return targets with the one that is the default where no others are, written as such.

    Without that, one that drains beside it would be the only one, and take nothing new.
    """
    if set(targets) - {PULL_NAME}:
        return targets
    name = next(iter(targets), ECHO_NAME)
    written = written_table({"targets": targets}, "targets", name) or {}
    return {name: written | {"default": True}}


def _names(tables: Tables, section: str) -> list[str]:
    names = list(tables.get(section, {}))
    return [ECHO_NAME] if section == "targets" and not names else names
