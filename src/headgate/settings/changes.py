"""The difference of two settings: what changed, from what to what, and what has to wait.

Rule: what may be a secret is never shown; that it changed is. Settings that say where the service
is and what keeps its tasks cannot change while it runs: those stay as they are, and are named.
"""

from __future__ import annotations

import msgspec

from headgate.settings.messages import key_path
from headgate.settings.sections import NAMED_TABLES, Settings
from headgate.settings.shown import Origins, hidden

HOT = ("scheduler", "rate_limits", "targets", "projects", "agents", "budgets", "quota", "slots")
"""The sections that can change while the service runs; all others need a restart."""

COLD_KEYS = ("enabled",)
"""The keys of `[scheduler]` that need a restart all the same."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One key with a new value; a name that came or went is one change, with its whole table."""

    key: str
    before: object = msgspec.field(name="from", default=None)
    after: object = msgspec.field(name="to", default=None)


class Difference(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What changed, and what is written otherwise and needs a restart to come into force."""

    changed: tuple[Change, ...] = ()
    needs_restart: tuple[Change, ...] = ()

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


def settled(before: Settings, after: Settings) -> Settings:
    """Return what can come into force of settings that were read, with all else as it is."""
    kept = {
        section: getattr(before, section)
        for section in Settings.__struct_fields__
        if section not in HOT
    }
    cold = {key: getattr(before.scheduler, key) for key in COLD_KEYS}
    scheduler = msgspec.structs.replace(after.scheduler, **cold)
    return msgspec.structs.replace(after, scheduler=scheduler, **kept)


def settled_origins(before: Origins, after: Origins) -> Origins:
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
