"""JSON pointers (RFC 6901): where in a document something is found."""

from __future__ import annotations

import re

from headgate.errors import InvalidSettingError

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_BAD_ESCAPE = re.compile(r"~(?![01])")


def parsed_pointer(pointer: str, *, setting: str) -> tuple[str, ...]:
    """Return the parts of a pointer, or raise `InvalidSettingError` with its setting."""
    if not pointer:
        return ()
    if not pointer.startswith("/") or _BAD_ESCAPE.search(pointer):
        problem = "is not a JSON pointer (RFC 6901); write one as /data/endpoint"
        raise InvalidSettingError(setting, problem)
    parts = pointer[1:].split("/")
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)


def found_at(document: object, path: tuple[str, ...]) -> object:
    """Follow the parts of a JSON pointer, or raise `LookupError`."""
    for part in path:
        if isinstance(document, dict):
            document = document[part]
        elif isinstance(document, list) and _INDEX.fullmatch(part):
            document = document[int(part)]
        else:
            raise LookupError(part)
    return document
