"""Results and errors in the form in which a task keeps them: JSON, and lines of bounded length.

Rule: what is kept as JSON can be read again by whoever asks for it; what cannot is a text.
"""

from __future__ import annotations

import msgspec

from headgate.core.texts.nesting import is_deeper

MAX_DEPTH = 200
"""How deep a result may be nested: far from where a reader, deep in its own calls, gives up."""

MAX_ERROR_CHARACTERS = 500
_CUT = "…"


def as_json(body: bytes) -> msgspec.Raw | None:
    """Return a body as JSON if it is exactly one JSON value, unchanged; otherwise None."""
    try:
        # Numbers, too: `1e400` is well formed, and no reader has a value for it.
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None
    return None if is_deeper(body, value, levels=MAX_DEPTH) else msgspec.Raw(body.strip())


def as_json_or_text(body: bytes) -> msgspec.Raw | None:
    """Return a body as the result of a task; what is no JSON is wrapped as `{"text": …}`."""
    if not body:
        return None
    found = as_json(body)
    if found is not None:
        return found
    return msgspec.Raw(msgspec.json.encode({"text": body.decode(errors="replace")}))


def shortened(text: str) -> str:
    """Return a text on one line that is short enough for an error."""
    # Only the beginning can be shown, and a body may be large.
    line = " ".join(text[: 4 * MAX_ERROR_CHARACTERS].split())
    if len(line) <= MAX_ERROR_CHARACTERS:
        return line
    return line[: MAX_ERROR_CHARACTERS - 1] + _CUT


def too_large(max_bytes: int) -> str:
    """Say that a result passes its cap."""
    return f"result is larger than {max_bytes} bytes"
