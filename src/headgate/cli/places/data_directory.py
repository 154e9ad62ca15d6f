"""Where Headgate keeps what it keeps for one user: the data directory of the XDG convention."""

from __future__ import annotations

import os
from pathlib import Path

from headgate.errors import LedgerUnavailableError

_ONLY_THE_OWNER = 0o700


def data_directory() -> Path:
    """Return the directory, made if it was missing; nobody else may look into it.

    The convention has a path that is not absolute ignored.
    """
    try:
        directory = _directory()
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=_ONLY_THE_OWNER, exist_ok=True)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problem = f"the data directory cannot be made: {reason}; set XDG_DATA_HOME or give --url"
        raise LedgerUnavailableError(problem) from None
    return directory


def default_directory() -> Path | None:
    """Return where the directory is or would be; None where a user has no home."""
    try:
        return _directory()
    except RuntimeError:
        return None


def _directory() -> Path:
    given = Path(os.environ.get("XDG_DATA_HOME", ""))
    base = given if given.is_absolute() else Path.home() / ".local" / "share"
    return base / "headgate"
