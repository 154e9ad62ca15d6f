"""A moment as people read it: Unix seconds by the calendar of UTC.

Rule: whatever is said of a time in a message is said in these words, so that it reads the same in
a terminal, on a page and in an error.
"""

from __future__ import annotations

from datetime import UTC, datetime

FAR = "some far day"


def utc_time(seconds: float) -> str:
    """Return a time to the second; one that no calendar reaches is far away."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return FAR
