"""The W3C trace context: the one header by which a trace goes from process to process."""

from __future__ import annotations

import re

_TRACEPARENT = re.compile(r"00-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}")


def read_traceparent(text: str) -> str | None:
    """Return a header that can be passed on; None for anything else, as the standard has it."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None or not int(found["trace"], 16) or not int(found["span"], 16):
        return None
    return text
