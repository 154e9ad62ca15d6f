"""What a command said: its exit code, and what it wrote where."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Said(NamedTuple):
    """The end of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Read standard output as one JSON text."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """Read standard output as lines of JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


Command = Callable[..., Said]
