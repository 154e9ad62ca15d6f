"""What the settings of a service are made of at a moment, and how the next moment's follow.

All of it is pure: the tables of the file as they were last read, the overrides beside them, and
what has left the file and drains. The settings in force follow from these three and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headgate.errors import InvalidSettingError
from headgate.settings import Settings
from headgate.settings.changes import settled, settled_origins
from headgate.settings.decoding import decode
from headgate.settings.overrides import Override, is_in_force, is_paused, with_overrides
from headgate.settings.reloading import DRAINING, Left, completed, left, reloaded, without
from headgate.settings.shown import Origins
from headgate.settings.sources import Merged, Table


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """The tables in force, the overrides, what drains, and the settings that these make.

    `written` is what was read; `settings` has of it what can come into force without a restart.
    `origins` says which file, variable or option each value was read from.
    """

    tables: dict[str, Table]
    settings: Settings
    written: Settings
    overrides: tuple[Override, ...] = ()
    left: Left = frozenset()
    origins: Origins = {}

    @property
    def is_paused(self) -> bool:
        """Whether nothing new is to be started at all."""
        return is_paused(self.overrides)

    def overridden(self, kind: str, name: str) -> tuple[str, ...]:
        """Return the keys of a name that are not as the file says."""
        found = (one for one in self.overrides if (one.kind, one.name) == (kind, name))
        return tuple(one.key for one in found if is_in_force(self.tables, one))

    def ended(self) -> tuple[Override, ...]:
        """Return the overrides that the file no longer lets hold."""
        return tuple(one for one in self.overrides if not is_in_force(self.tables, one))

    def with_overrides(self, overrides: Iterable[Override]) -> Situation:
        """Return the situation with other overrides, or raise `InvalidSettingError`."""
        return _resolved(self, tables=self.tables, overrides=tuple(overrides), left=self.left)

    def with_file(self, tables: dict[str, Table], origins: Origins | None = None) -> Situation:
        """Return the situation after the file was read again, or raise `InvalidSettingError`.

        What drains is beside the file for a while only, so the file must be right without it.
        """
        decode(Merged(completed(self.tables, tables), {}))
        following = reloaded(self.tables, tables)
        gone = frozenset(left(self.tables, tables))
        after = _resolved(self, tables=following, overrides=self.overrides, left=gone)
        return msgspec.structs.replace(after, origins=settled_origins(self.origins, origins or {}))

    def with_strays(self, projects: Iterable[str]) -> Situation:
        """Return the situation with projects that have tasks and are not configured: they drain."""
        named = dict(self.tables["projects"]) | {name: {"status": DRAINING} for name in projects}
        tables = self.tables | {"projects": named}
        gone = self.left | {("projects", name) for name in projects}
        return _resolved(self, tables=tables, overrides=self.overrides, left=gone)

    def after_draining(self, gone: Iterable[tuple[str, str]]) -> Situation:
        """Return the situation without what has drained."""
        done = frozenset(gone)
        tables = without(self.tables, done)
        return _resolved(self, tables=tables, overrides=self.overrides, left=self.left - done)

    def with_those_that_fit(self, overrides: Iterable[Override]) -> Situation:
        """Return the situation with as many overrides as go with the file.

        A start must not fail because a file contradicts what somebody changed by hand before.
        """
        chosen: list[Override] = []
        situation = self
        for one in overrides:
            try:
                situation = self.with_overrides([*chosen, one])
            except InvalidSettingError:
                continue
            chosen.append(one)
        return situation


def first_situation(
    settings: Settings, tables: dict[str, Table], origins: Origins | None = None
) -> Situation:
    """Return what a service starts from."""
    return Situation(tables=tables, settings=settings, written=settings, origins=origins or {})


def _resolved(
    before: Situation, *, tables: dict[str, Table], overrides: tuple[Override, ...], left: Left
) -> Situation:
    decoded = decode(Merged(with_overrides(tables, overrides), {}))
    return Situation(
        tables=tables,
        settings=settled(before.settings, decoded),
        written=decoded,
        overrides=overrides,
        left=left,
        origins=before.origins,
    )
