"""An enumeration for what people write: by value or by name, in any case."""

from __future__ import annotations

from enum import Enum
from typing import Self


class LenientEnum(Enum):
    """An enumeration that reads its members by value or by name, in any case."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        wanted = str(value).lower()
        for name, member in cls.__members__.items():
            if wanted in (name.lower(), str(member.value).lower()):
                return member
        return None
