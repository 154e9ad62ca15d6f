"""The files of a run that a resume goes by: whether they are there, and are what they were.

Runs of steps are known by their numbers. If items or steps are changed in between, the numbers are
those of others, and the results with them; if the store is gone, so is what was done and spent.
Rule: what cannot be trusted is refused, and nothing is made up in its place.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable
from pathlib import Path

from headgate.runs.kept.record import RunRecord

WORKFLOW = "workflow.yaml"
STORE = "headgate.db"
JOURNAL = "journal.jsonl"


def digests_of(paths: Iterable[Path]) -> dict[str, str]:
    """Return what tells these files from any others, by their names."""
    return {path.name: _digest(path) for path in sorted(paths)}


def damage(path: Path, record: RunRecord) -> str:
    """Say in one line what of the folder of a run is not as the run left it; empty if all is."""
    anew = f"begin anew with headgate run {shlex.quote(record.source)}"
    if record.has_begun and not any((path / name).exists() for name in (STORE, JOURNAL)):
        name = STORE if record.server is None else JOURNAL
        return f"{path / name} is gone; what the run did and spent is not known; {anew}"
    for name, digest in record.digests.items():
        try:
            is_same = _digest(path / name) == digest
        except OSError as error:
            why = f"cannot be read: {error.strerror}; the run cannot be resumed"
            return f"{path / name} {why}; put it back, or {anew}"
        if not is_same:
            return f"{path / name} was changed since the run began; put it back, or {anew}"
    return ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
