"""Who sends a request, and what that allows.

Rule: whatever a route does, it names the one permission that it needs; nothing is allowed by being
forgotten. `admin` goes with no bounds, so a route that needs it has nobody bound before it. Any
other route keeps the bounds of its caller with one of these, and with nothing of its own:

- what is taken in: hand `caller.bounds` to the submission parser, which fills in what is missing;
- what exists: `caller.check_task(record)` before showing or changing it, `caller.narrowed(query)`
  before listing, `caller.owns(...)` for anything else that has an agent and a project;
- budgets: `caller.check_scope(scope)`.

What belongs to others is not there: it is answered like what does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headgate.api.errors import ApiError, not_found
from headgate.core.budgets.scopes import ROOT_NAME, Scope, Tenant
from headgate.core.task import TaskRecord
from headgate.errors import without_figures
from headgate.storage.store import TaskQuery
from headgate.storage.tokens import PERMISSIONS, UNBOUND, Bounds, Permission, Token

__all__ = ["LOCAL", "PERMISSIONS", "Caller", "Permission", "caller_with"]


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who was let in: under which name, what for, and for whom alone."""

    name: str
    permissions: frozenset[str] = frozenset(PERMISSIONS)
    token_id: str = ""
    bounds: Bounds = UNBOUND
    expires_at: float | None = None

    @property
    def agent_id(self) -> str | None:
        """The one agent that the caller acts for; None is any."""
        return self.bounds.agent_id

    @property
    def project_id(self) -> str | None:
        """The one project that the caller acts for; None is any."""
        return self.bounds.project_id

    @property
    def least_priority(self) -> int | None:
        """The most urgent priority that its tasks may have; None is any."""
        return self.bounds.least_priority

    @property
    def is_bound(self) -> bool:
        """Whether not everything belongs to the caller."""
        return self.bounds.is_bound

    @property
    def is_trusted(self) -> bool:
        """Whether what it states is taken as given: an operator, or anybody without tokens.

        What anybody else states of costs, tokens and weights is a claim.
        """
        return "admin" in self.permissions

    @property
    def tenant(self) -> Tenant | None:
        """Whose claim it is what the caller states of money; None is taken as given."""
        return None if self.is_trusted else self.bounds.tenant

    def may(self, permission: Permission | None) -> bool:
        """Tell whether the caller may do what needs this permission; None is free to all."""
        return permission is None or permission in self.permissions

    def check(self, permission: Permission | None) -> None:
        """Refuse what needs a permission that the caller does not have."""
        if permission is not None and permission not in self.permissions:
            line = f"this needs the permission {permission}, which the token does not have"
            raise ApiError("forbidden", line, details={"needs": permission})

    def owns(self, *, agent_id: str | None, project_id: str) -> bool:
        """Tell whether something of this agent and project belongs to the caller."""
        return self.bounds.has(agent_id=agent_id, project_id=project_id)

    def has_task(self, record: TaskRecord) -> bool:
        """Tell whether a task belongs to the caller: to its agent, or to the one that took it."""
        task = record.task
        return not self.bounds.is_bound or self.bounds.has(
            agent_id=record.agent_id or task.agent_id, project_id=task.project_id
        )

    def check_task(self, record: TaskRecord | None) -> TaskRecord:
        """Return a task that is there and belongs to the caller; any other is not found."""
        if record is None or not self.has_task(record):
            raise not_found()
        return self.shown(record)

    def shown(self, record: TaskRecord) -> TaskRecord:
        """Return a task without the figures of budgets that the caller may not read."""
        if record.error is None or not self.bounds.is_bound:
            return record
        return msgspec.structs.replace(record, error=self.told(record.error))

    def told(self, error: str) -> str:
        """Return an error without the figures of budgets that the caller may not read."""
        if not self.bounds.is_bound:
            return error
        return without_figures(error, lambda scope: self.bounds.may_charge(Scope(scope)))

    def narrowed(self, query: TaskQuery) -> TaskQuery:
        """Return a query for what belongs to the caller; asking for another's is forbidden."""
        if not self.bounds.is_bound:
            return query
        return msgspec.structs.replace(
            query,
            agent_id=own("agentId", query.agent_id, self.agent_id),
            project_id=own("projectId", query.project_id, self.project_id),
        )

    def check_agent(self, agent_id: str) -> None:
        """Refuse to act as another agent than the caller's own."""
        own("agentId", agent_id, self.agent_id)

    def further(self, scopes: Sequence[str]) -> list[Scope]:
        """Return the scopes of a task that somebody named.

        The first one is that of its project, and that of the caller's agent is always charged.
        """
        own = self.bounds.agent_scope
        return [Scope(one) for one in scopes[1:] if one != own]

    def check_scope(self, scope: Scope) -> None:
        """Refuse a budget that is not the caller's own."""
        if self.bounds.is_bound and not self.bounds.may_charge(scope):
            line = f"the token is not for the budget '{scope or ROOT_NAME}'"
            raise ApiError("forbidden", line, details={"field": "scope"})


LOCAL = Caller(name="local")
"""Whoever asks on a loopback address where no token is asked for."""


def caller_with(token: Token) -> Caller:
    """Return who has a token."""
    return Caller(
        name=token.name,
        permissions=frozenset(token.permissions),
        token_id=token.id,
        bounds=token.bounds,
        expires_at=token.expires_at,
    )


def own(field: str, given: str | None, bound: str | None) -> str | None:
    """Return what a caller means that may name only its own; another one is forbidden."""
    if bound is None or given is None or given == bound:
        return bound or given
    line = f"field '{field}': the token is for '{bound}' only"
    raise ApiError("forbidden", line, details={"field": field})
