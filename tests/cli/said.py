"""What a command said: its exit code, and what it wrote where."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest


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


@contextmanager
def in_zone(zone: str) -> Iterator[None]:
    """Have this process be in a zone for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        yield
    time.tzset()
