"""Enumerations: hashed by identity, and those for what people write, read in any case."""

from __future__ import annotations

from enum import Enum
from typing import Self


class FastEnum(Enum):
    """An enumeration whose members are cheap keys.

    Members are single objects; the inherited hash is a function in Python, and asked very often.
    """

    __hash__ = object.__hash__


class LenientEnum(FastEnum):
    """An enumeration that reads its members by value or by name, in any case."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        wanted = str(value).lower()
        for name, member in cls.__members__.items():
            if wanted in (name.lower(), str(member.value).lower()):
                return member
        return None
