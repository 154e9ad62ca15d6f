"""What the settings of a service are made of at a moment, and how the next moment's follow.

All of it is pure: the tables of the file as they were last read, the overrides beside them, and
what has left the file and drains. The settings in force follow from these three and nothing else.

Rules of a file that is read again: in `[scheduler]` a key that is absent keeps what was. A project,
agent or target that is no longer there is drained: what it has still runs, nothing new is taken,
and then it is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import msgspec

from headgate.config.loading import ECHO_NAME, Origins, decode
from headgate.config.overrides import (
    PATCHABLE,
    Override,
    OverrideKind,
    Tables,
    applied_live,
    file_value_of,
    in_force,
    is_paused,
    live_origins,
    with_overrides,
    written_table,
)
from headgate.config.settings import (
    DEFAULT_PROJECT,
    SchedulerSettings,
    Settings,
    UpstreamSettings,
)
from headgate.config.sources import Merged, Table
from headgate.errors import InvalidSettingError
from headgate.executors.targets import BUILT_IN_TARGETS

DRAINING_SECTIONS = ("projects", "agents", "targets")
DRAINING = "draining"
_EITHER = ("alpha", "optimize_for")
_ALWAYS_THERE = (
    ("projects", DEFAULT_PROJECT),
    *(("targets", name) for name in BUILT_IN_TARGETS),
)

Names = frozenset[tuple[str, str]]
"""Section and name of each."""


class ConfigState(msgspec.Struct, frozen=True, kw_only=True):
    """The tables in force, the overrides, what drains, and the settings that these make.

    `written` is what was read; `settings` has of it what can come into force without a restart.
    `origins` says which file, variable or option each value was read from.
    """

    tables: dict[str, Table]
    settings: Settings
    written: Settings
    overrides: tuple[Override, ...] = ()
    draining: Names = frozenset()
    origins: Origins = {}

    @classmethod
    def initial(
        cls, settings: Settings, tables: dict[str, Table], origins: Origins | None = None
    ) -> Self:
        """Return what a service starts from."""
        return cls(tables=tables, settings=settings, written=settings, origins=origins or {})

    @property
    def is_paused(self) -> bool:
        """Whether nothing new is to be started at all."""
        return is_paused(self.overrides)

    @property
    def set_caps(self) -> frozenset[str]:
        """The keys of caps on tasks in flight that somebody set, here or anywhere.

        A cap that is not the default was set, whoever forgot to say where.
        """
        scheduler, default = self.settings.scheduler, SchedulerSettings()
        return frozenset(
            [
                f"scheduler.{key}"
                for key in ("max_inflight", "max_per_agent_inflight", "worker_count")
                if ("scheduler", key) in self.origins
                or getattr(scheduler, key) != getattr(default, key)
            ]
            + [
                f"projects.{name}.max_concurrent_agents"
                for name, project in self.settings.projects.items()
                if project.max_concurrent_agents is not None
            ]
            + [
                f"agents.{name}.capacity"
                for name, agent in self.settings.agents.items()
                if agent.capacity is not None
            ]
            + [
                f"upstreams.{name}.max_inflight"
                for name, upstream in self.settings.upstreams.items()
                if ("upstreams", name, "max_inflight") in self.origins
                or upstream.max_inflight != UpstreamSettings(kind=upstream.kind).max_inflight
            ]
        )

    def overridden(self, kind: str, name: str) -> tuple[str, ...]:
        """Return the keys of a name that are not as the file says."""
        return tuple(one.key for one in self.in_force() if (one.kind, one.name) == (kind, name))

    def overridden_fields(self, kind: OverrideKind, name: str) -> list[str]:
        """Return the same by the names that the API has for them."""
        fields = {key: field for field, key in PATCHABLE[kind].items()}
        return [fields[key] for key in self.overridden(kind, name)]

    def in_force(self) -> tuple[Override, ...]:
        """Return the overrides that hold, without keys of a budget that are as the file says."""
        return tuple(
            one
            for one in in_force(self.tables, self.overrides)
            if one.kind != "budgets" or one.value != file_value_of(self.tables, *one.path)
        )

    def ended(self) -> tuple[Override, ...]:
        """Return the overrides that the file no longer lets hold."""
        held = {one.path for one in in_force(self.tables, self.overrides)}
        return tuple(one for one in self.overrides if one.path not in held)

    def with_overrides(self, overrides: Iterable[Override]) -> ConfigState:
        """Return the state with other overrides, or raise `InvalidSettingError`."""
        return self._resolve(tables=self.tables, overrides=tuple(overrides), draining=self.draining)

    def with_file(self, tables: dict[str, Table], origins: Origins | None = None) -> ConfigState:
        """Return the state after the file was read again, or raise `InvalidSettingError`.

        What drains is beside the file for a while only, so the file must be right without it.
        """
        decode(Merged(with_omitted_keys(self.tables, tables), {}))
        following = reloaded_tables(self.tables, tables)
        gone = frozenset(removed_names(self.tables, tables))
        after = self._resolve(tables=following, overrides=self.overrides, draining=gone)
        return msgspec.structs.replace(after, origins=live_origins(self.origins, origins or {}))

    def with_unconfigured_projects(self, projects: Iterable[str]) -> ConfigState:
        """Return the state with projects that have tasks and are not configured: they drain."""
        named = dict(self.tables["projects"]) | {name: {"status": DRAINING} for name in projects}
        tables = self.tables | {"projects": named}
        gone = self.draining | {("projects", name) for name in projects}
        return self._resolve(tables=tables, overrides=self.overrides, draining=gone)

    def after_draining(self, gone: Iterable[tuple[str, str]]) -> ConfigState:
        """Return the state without what has drained."""
        done = frozenset(gone)
        tables = without_names(self.tables, done)
        return self._resolve(tables=tables, overrides=self.overrides, draining=self.draining - done)

    def with_fitting_overrides(self, overrides: Iterable[Override]) -> ConfigState:
        """Return the state with as many overrides as go with the file.

        A start must not fail because a file contradicts what somebody changed by hand before.
        """
        wholes: dict[tuple[str, ...], list[Override]] = {}
        for one in overrides:
            place = (one.kind, one.name) if one.kind == "budgets" else one.path
            wholes.setdefault(place, []).append(one)
        chosen: list[Override] = []
        state = self
        for whole in wholes.values():
            try:
                state = self.with_overrides([*chosen, *whole])
            except InvalidSettingError:
                continue
            chosen += whole
        return state

    def without_ended(self) -> ConfigState:
        """Return the state without the overrides that the file no longer lets hold."""
        ended = {one.path for one in self.ended()}
        overrides = tuple(one for one in self.overrides if one.path not in ended)
        return msgspec.structs.replace(self, overrides=overrides)

    def _resolve(
        self, *, tables: dict[str, Table], overrides: tuple[Override, ...], draining: Names
    ) -> ConfigState:
        decoded = decode(Merged(with_overrides(tables, overrides), {}))
        return ConfigState(
            tables=tables,
            settings=applied_live(self.settings, decoded),
            written=decoded,
            overrides=overrides,
            draining=draining,
            origins=self.origins,
        )


def with_omitted_keys(before: Tables, after: Tables) -> dict[str, Table]:
    """Return the tables of a file with what it leaves out and means to keep."""
    tables = {section: dict(table) for section, table in after.items()}
    tables["scheduler"] = before.get("scheduler", {}) | tables.get("scheduler", {})
    given = after.get("scheduler", {})
    for key, other in (_EITHER, _EITHER[::-1]):
        if key in given and other not in given:
            tables["scheduler"].pop(other, None)
    return tables


def reloaded_tables(before: Tables, after: Tables) -> dict[str, Table]:
    """Return the tables that come into force when a file is read again, after those before."""
    tables = with_omitted_keys(before, after)
    gone = removed_names(before, after)
    if any(section == "targets" for section, _ in gone):
        tables["targets"] = _with_default(tables["targets"])
    for section, name in gone:
        table = written_table(before, section, name) or {}
        drained = {key: value for key, value in table.items() if key != "default"}
        tables[section][name] = drained | {"status": DRAINING}
    return tables


def removed_names(before: Tables, after: Tables) -> list[tuple[str, str]]:
    """List what was there and is there no more, in the order in which it was."""
    return [
        (section, name)
        for section in DRAINING_SECTIONS
        for name in _names(before, section)
        if name not in _names(after, section) and (section, name) not in _ALWAYS_THERE
    ]


def without_names(tables: Tables, gone: Iterable[tuple[str, str]]) -> dict[str, Table]:
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
    if set(targets) - BUILT_IN_TARGETS.keys():
        return targets
    name = next(iter(targets), ECHO_NAME)
    written = written_table({"targets": targets}, "targets", name) or {}
    return {name: written | {"default": True}}


def _names(tables: Tables, section: str) -> list[str]:
    names = list(tables.get(section, {}))
    return [ECHO_NAME] if section == "targets" and not names else names
