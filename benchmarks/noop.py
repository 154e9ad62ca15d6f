"""Work that takes no time, so that what is measured is everything around it."""

from __future__ import annotations

import time
from collections.abc import Mapping


async def noop(*_given: object, **_named: object) -> None:
    return None


async def clock(_order: Mapping[str, object]) -> float:
    """Tell when it was called, which is when the task really started."""
    return time.time()


async def fail(_order: Mapping[str, object]) -> None:
    """Fail, as work does now and then."""
    raise ValueError("there was nothing to find")
