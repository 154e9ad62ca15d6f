"""Who sends a request, and what that allows.

Rule: whatever a route does, it names the one permission that it needs; nothing is allowed by being
forgotten.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Permission = Literal["submit", "read", "cancel", "admin"]

PERMISSIONS: tuple[Permission, ...] = ("submit", "read", "cancel", "admin")


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who was let in: under which name, what for, and for whom alone.

    `least_priority` is the most urgent priority that its tasks may have; lower goes first.
    """

    name: str
    permissions: frozenset[str] = frozenset(PERMISSIONS)
    token_id: str = ""
    agent_id: str | None = None
    project_id: str | None = None
    least_priority: int | None = None

    def may(self, permission: Permission | None) -> bool:
        """Tell whether the caller may do what needs this permission; None is free to all."""
        return permission is None or permission in self.permissions


LOCAL = Caller(name="local")
"""Whoever asks on a loopback address where no token is asked for."""
