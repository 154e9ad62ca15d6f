"""Zones by name: the one place where zone data is read."""

from __future__ import annotations

from datetime import UTC, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from headgate.errors import InvalidSettingError


@lru_cache(maxsize=1_024)
def zone(name: str) -> tzinfo:
    """Return the zone of an IANA name."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        problem = f"{name!r} is not a zone that this machine knows; write one as Europe/Berlin"
        raise InvalidSettingError("window", problem) from None
