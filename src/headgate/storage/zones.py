"""Time zones by name: the one place where zone data is read."""

from __future__ import annotations

from datetime import UTC, tzinfo
from functools import lru_cache

from headgate.core.budgets.windows import UTC_NAME
from headgate.errors import InvalidSettingError


@lru_cache(maxsize=1_024)
def zone(name: str, *, field: str = "window") -> tzinfo:
    """Return the zone of an IANA name, or raise `InvalidSettingError` for the field that has it."""
    if name == UTC_NAME:
        return UTC
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # noqa: PLC0415  few settings name a zone

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        problem = f"{name!r} is not a zone that this machine knows; write one as Europe/Berlin"
        raise InvalidSettingError(field, problem) from None
