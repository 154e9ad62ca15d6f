"""Functions that workflows of the tests call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headgate.core.lifecycle import Failed, Limited, Succeeded, Usage


def double(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return twice what was given."""
    return {"twice": 2 * task["input"]["value"]}


def shown(*arguments: object, **keywords: object) -> list[object]:
    """Return what it was called with."""
    return [arguments, keywords]


async def shown_later(*arguments: object, **keywords: object) -> list[object]:
    """Return what it was called with, on the loop."""
    return shown(*arguments, **keywords)


async def refuse(*_given: object) -> None:
    """Fail."""
    raise RuntimeError("not today")


def free(*_given: object) -> Succeeded:
    """Say that nothing was used."""
    return Succeeded(usage=Usage(tokens=0, micro_usd=0))


async def pause(*_given: object) -> Limited | str:
    """Ask for a pause the first time."""
    if _seen:
        return "done"
    _seen.append(1)
    return Limited(retry_after_seconds=1.0)


def not_begun(*_given: object) -> Failed:
    """Fail before anything was done."""
    return Failed(error="no", usage=Usage(tokens=0, micro_usd=0))


_seen: list[int] = []
