"""Errors that pass through an SDK as they are.

The SDK of Anthropic takes whatever a transport raises for a lost connection, hides it and tries
again, unless it is an error of its own kind. So what is raised through it is given that kind beside
its own: `except BudgetExceededError` works, and nothing is tried again. The SDK of OpenAI lets
errors pass that are none of the HTTP client's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from headgate.errors import HeadgateError

_ANTHROPIC_HEADER = "anthropic-version"

_passing: dict[type[HeadgateError], type[HeadgateError]] = {}
"""The kinds that were made; as many as there are errors."""


def let_pass(error: HeadgateError, headers: Mapping[str, str]) -> None:
    """Give an error the kind that the SDK which sent these headers lets pass."""
    module = sys.modules.get("anthropic")
    kind = getattr(module, "AnthropicError", None)
    if _ANTHROPIC_HEADER in headers and isinstance(kind, type) and not isinstance(error, kind):
        plain = type(error)
        if plain not in _passing:
            _passing[plain] = _both(plain, kind)
        error.__class__ = _passing[plain]


def _both(plain: type[HeadgateError], kind: type[Any]) -> type[HeadgateError]:
    def reduced(error: HeadgateError) -> tuple[Any, ...]:
        # A class that is made here cannot be found by its name in another process.
        restore, (_, arguments, fields) = HeadgateError.__reduce__(error)
        return restore, (plain, arguments, fields)

    members = {
        "__doc__": plain.__doc__,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__reduce__": reduced,
    }
    return type(plain.__name__, (plain, kind), members)
