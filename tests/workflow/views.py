"""What placeholders are filled with in these tests, and files that are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headgate.workflow.parser import read_workflow
from headgate.workflow.workflow import Workflow

FILE = Path("eval.yaml")


class SimpleView:
    """A view with fixed values; `fields` are those of steps, by step and name."""

    def __init__(
        self,
        item: Any = None,
        *,
        index: int = 0,
        fields: Mapping[tuple[str, str], Any] | None = None,
    ) -> None:
        self.item = item
        self.index = index
        self.run = {"id": "20261115-200917-3fa2", "name": "eval"}
        self._fields = fields or {}

    def field(self, step: str, name: str) -> Any:
        return self._fields.get((step, name))


def read(text: str) -> Workflow:
    return read_workflow(FILE, text.encode())
