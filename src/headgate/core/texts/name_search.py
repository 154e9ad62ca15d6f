"""Finding things by a part of their names, whatever its case; no text finds everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Thing = TypeVar("Thing")


def named_like(
    things: Iterable[Thing], text: str, names: Callable[[Thing], Sequence[str]]
) -> list[Thing]:
    """Return the things that have a name with this text in it."""
    wanted = text.casefold()
    if not wanted:
        return list(things)
    return [one for one in things if any(wanted in name.casefold() for name in names(one))]
