"""Zones by their names, as this machine knows them."""

from __future__ import annotations

from datetime import UTC, tzinfo

from headgate.core.budgets.windows import UTC_NAME
from headgate.errors import InvalidSettingError


def zone_of(name: str, *, field: str) -> tzinfo:
    """Return the zone of this name, or raise `InvalidSettingError` for the field that has it."""
    if name == UTC_NAME:
        return UTC
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # noqa: PLC0415  few settings name a zone

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        problem = f"{name!r} is not a zone that this machine knows; write one as Europe/Berlin"
        raise InvalidSettingError(field, problem) from None
