"""The budgets of a run that a service keeps: whose they are, their limits, and how they stand.

A token that is bound to a project or an agent may charge only budgets of its own; a run with such a
token has its scopes within that. Rule: limits are founded, as everywhere; only the workflow's own
one is set anew, and only by somebody who says so. What a resume does not say is taken as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headgate.bodies.tasks import BudgetStatusBody
from headgate.client.async_client import Client
from headgate.core.budgets.scopes import parse_scope
from headgate.core.money import plain_usd, to_limit_micro_usd
from headgate.errors import BudgetMismatchError, NotAllowedError, RequestRefusedError
from headgate.redaction import hidden_address
from headgate.runs.backend import Money
from headgate.runs.kept.record import RunScope
from headgate.runs.raising import change_at_service

MISMATCH = "budget_mismatch"


async def own_scope(client: Client, scopes: Sequence[RunScope]) -> str:
    """Return the budget that a bound token is for; empty if the run's scopes may be charged."""
    try:
        await client.budget_status(scopes[-1].scope)
    except NotAllowedError as error:
        if error.details.get("field") != "scope":
            raise
        return (await client.budget_status()).scope
    return ""


def within(outer: str, scopes: Sequence[RunScope]) -> tuple[RunScope, ...]:
    """Return scopes as they are within another one."""
    if not outer:
        return tuple(scopes)
    return tuple(
        [msgspec.structs.replace(one, scope=parse_scope(f"{outer}/{one.scope}")) for one in scopes]
    )


async def found_limits(
    client: Client,
    scopes: Sequence[RunScope],
    sources: Sequence[str | None],
    *,
    sets_own: bool,
) -> None:
    """Set the limits that are not there; one that differs raises `BudgetMismatchError`.

    The sources are what says each of them; where nothing does, another one may be in force.
    """
    for scope, source in zip(scopes, sources, strict=True):
        if scope.micro_usd is not None:
            limit_usd = plain_usd(scope.micro_usd)
            try:
                if sets_own and scope is scopes[-1]:
                    await client.change_budget(scope.scope, limit_usd=limit_usd)
                else:
                    await client.found_budget(scope.scope, limit_usd=limit_usd)
            except RequestRefusedError as error:
                if source is None and error.code == MISMATCH:
                    continue
                change = change_at_service(hidden_address(client.url))(scope.scope, limit_usd)
                raise _refused(scope.scope, limit_usd, error, source or "", change) from None


async def money_of(client: Client, scopes: Sequence[RunScope]) -> list[Money]:
    """Return how the scopes of a run stand, outermost first."""
    return [_money(await client.budget_status(one.scope)) for one in scopes]


def _money(status: BudgetStatusBody) -> Money:
    spent = to_limit_micro_usd(status.spent_usd) + to_limit_micro_usd(status.overrun_usd)
    limit = status.limit_usd
    return Money(
        scope=status.scope,
        spent_micro_usd=spent,
        reserved_micro_usd=to_limit_micro_usd(status.reserved_usd),
        limit_micro_usd=None if limit is None else to_limit_micro_usd(limit),
    )


def _refused(
    scope: str, limit_usd: str, error: RequestRefusedError, source: str, change: str
) -> Exception:
    if error.code == MISMATCH:
        existing = str(error.details.get("existing", "another one"))
        return BudgetMismatchError(
            scope=scope, existing=existing, wanted=f"${limit_usd}", source=source, change=change
        )
    if not isinstance(error, NotAllowedError):
        return error
    line = f"{scope}: this token may not set its limit to ${limit_usd}: {error}"
    return NotAllowedError(
        f"{line}; use one that may, or leave the amount out",
        code=error.code,
        status=error.status,
        details=error.details,
    )
