"""The file of a workflow as bytes: read once, so that what was checked is what is kept and run."""

from __future__ import annotations

from pathlib import Path

from headgate.errors import InvalidSettingError
from headgate.workflow.document import MAX_FILE_BYTES


def read_source(path: Path) -> bytes:
    """Return what a file holds, or of one that is too long enough to say so."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problem = f"cannot read {path}: {reason}; name a readable file"
        raise InvalidSettingError("FILE", problem) from None
