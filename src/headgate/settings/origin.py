"""Where the settings of a running service came from, so that they can be read again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from headgate.settings.decoding import decode
from headgate.settings.sections import Settings
from headgate.settings.shown import Origins
from headgate.settings.sources import Merged, Table, merge, settings_file


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A file, variables and options; without a file, one that appears in the folder is taken."""

    path: Path | None
    environ: Mapping[str, str] = {}
    options: Mapping[str, object] = {}

    def read(self) -> Merged:
        """Read all sources again, or raise `InvalidSettingError`."""
        return merge(self.path or settings_file(None), self.environ, self.options)


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with the tables that they were decoded from, and where those came from.

    `origins` says so of each value.
    """

    settings: Settings
    tables: dict[str, Table]
    origin: Origin | None = None
    origins: Origins = {}


def load(origin: Origin) -> Loaded:
    """Read and check all settings, and remember how."""
    path = origin.path
    if path is not None:
        # Whoever starts the service may be in a folder that it leaves.
        origin = msgspec.structs.replace(origin, path=path.absolute())
    merged = origin.read()
    return Loaded(
        settings=decode(merged), tables=merged.tables, origin=origin, origins=merged.origins
    )


def loaded_from(settings: Settings) -> Loaded:
    """Return settings that were made by a program, as if a file had written every key."""
    tables: dict[str, Table] = msgspec.to_builtins(settings)
    return Loaded(settings=settings, tables=tables)
