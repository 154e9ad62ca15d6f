"""From the bytes of a workflow file to a workflow of which nothing is refused later.

Rule: everything that can be known before the run is checked here, and the first thing that is
wrong is one line with its file, line and key.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headgate.errors import WorkflowError
from headgate.workflow.config import read_config
from headgate.workflow.document import read_document
from headgate.workflow.links import linked
from headgate.workflow.steps import read_steps
from headgate.workflow.values import Value
from headgate.workflow.workflow import Workflow

ROOT_KEYS = ("name", "config", "steps")
MAX_NAME_LENGTH = 100

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MADE_OF = "write letters, digits and . _ -, beginning with a letter or a digit"


def read_workflow(path: Path, source: bytes, *, name: str | None = None) -> Workflow:
    """Read a workflow, or raise `WorkflowError`; relative paths in it begin beside `path`.

    Nothing is read but `source`. A name that is given goes before that of the file.
    """
    with _collecting_later():
        return _read(path, source, name)


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Leave the garbage alone meanwhile: the values of a large file are looked through too often.

    There is next to none, and a file is bounded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read(path: Path, source: bytes, name: str | None) -> Workflow:
    file = str(path)
    root = Value(file, read_document(file, source))
    fields = root.fields(ROOT_KEYS, "a workflow")
    if "steps" not in fields:
        root.refuse("has no steps; write them")
    folder = path.absolute().parent
    written = (
        fields["name"].name(_NAME, _MADE_OF, most=MAX_NAME_LENGTH) if "name" in fields else None
    )
    config = read_config(fields.get("config"))
    return Workflow(
        name=name or written or _name_of(path),
        folder=folder,
        steps=linked(read_steps(fields["steps"], config, folder)),
        micro_usd=config.micro_usd,
        scopes=config.scopes,
        endpoints=config.endpoints,
        prices=config.prices,
        concurrency=config.concurrency,
        fail_fast=config.fail_fast,
        on_exhausted=config.on_exhausted,
        file=file,
    )


def _name_of(path: Path) -> str:
    name = path.stem
    if len(name) > MAX_NAME_LENGTH or _NAME.fullmatch(name) is None:
        problem = f"{name[:60]!r} is no name of a workflow; write name: … into the file"
        raise WorkflowError(str(path), problem)
    return name
