"""The status of a scope and of everything within it, as people and programs read it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo

import msgspec

from headgate.core.budgets.alerts import share_used
from headgate.core.budgets.ledger import Account, Limit
from headgate.core.budgets.scopes import Scope, is_within, parent
from headgate.core.budgets.windows import format_window, live_from, resets_at
from headgate.core.text import Steps, at_once

NO_LIMIT = Limit()


class ScopeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a scope has used in its window, and what it may use; None means unlimited.

    `remaining` can be negative where a limit was lowered or an overrun booked. The children are
    the nearest scopes within it that have a limit or a balance; `is_truncated` tells that there are
    more scopes than one status reads, so that some within this one may be missing. `unaccepted` is
    what tenants claim beyond their own limits, and does not count. Where the window changed,
    `counted_since` tells that what was spent in it before that time does not count.
    """

    scope: Scope
    spent_micro_usd: int
    reserved_micro_usd: int
    overrun_micro_usd: int
    limit_micro_usd: int | None
    remaining_micro_usd: int | None
    spent_tokens: int
    reserved_tokens: int
    overrun_tokens: int
    limit_tokens: int | None
    remaining_tokens: int | None
    window: str
    resets_at: int | None
    unaccepted_micro_usd: int = 0
    unaccepted_tokens: int = 0
    counted_since: float | None = None
    is_truncated: bool = False
    children: tuple[ScopeStatus, ...] = ()

    @property
    def used_share(self) -> float | None:
        """How much of the tighter limit is used or held, of 1; None without a limit."""
        return share_used(
            (self.limit_micro_usd, self.remaining_micro_usd),
            (self.limit_tokens, self.remaining_tokens),
        )


def has_limit(status: ScopeStatus) -> bool:
    """Tell whether anything limits the scope itself."""
    return status.limit_micro_usd is not None or status.limit_tokens is not None


def empty_status(scope: Scope) -> ScopeStatus:
    """Return the status of a scope to which nothing was ever charged."""
    return status_tree([Account(scope=scope)], now=0.0, most=1)


def status_tree(accounts: Sequence[Account], *, now: float, most: int) -> ScopeStatus:
    """Nest accounts, the outermost first and at most so many, under the first of them."""
    return at_once(status_steps(accounts, now=now, most=most))


def status_steps(accounts: Sequence[Account], *, now: float, most: int) -> Steps[ScopeStatus]:
    """Nest accounts, in slices."""
    is_truncated, accounts = len(accounts) > most, accounts[:most]
    children: dict[Scope, list[Account]] = {account.scope: [] for account in accounts}
    for account in accounts[1:]:
        children[_nearest(account.scope, children, accounts[0].scope)].append(account)
        yield
    return (yield from _status(accounts[0], children, now, is_truncated=is_truncated))


def _nearest(scope: Scope, known: dict[Scope, list[Account]], top: Scope) -> Scope:
    above = parent(scope)
    while above is not None and is_within(above, top):
        if above in known:
            return above
        above = parent(above)
    return top


def _status(
    account: Account, children: dict[Scope, list[Account]], now: float, *, is_truncated: bool
) -> Steps[ScopeStatus]:
    yield
    balance = account.balance
    limit = NO_LIMIT if account.limit is None else account.limit
    usd, tokens = limit.limit_micro_usd, limit.limit_tokens
    inner: list[ScopeStatus] = []
    for child in sorted(children[account.scope], key=lambda child: child.scope):
        nested = yield from _status(child, children, now, is_truncated=is_truncated)
        inner.append(nested)
    return ScopeStatus(
        scope=account.scope,
        spent_micro_usd=balance.spent_micro_usd,
        reserved_micro_usd=balance.reserved_micro_usd,
        overrun_micro_usd=balance.overrun_micro_usd,
        limit_micro_usd=usd,
        remaining_micro_usd=None if usd is None else usd - balance.used_micro_usd,
        spent_tokens=balance.spent_tokens,
        reserved_tokens=balance.reserved_tokens,
        overrun_tokens=balance.overrun_tokens,
        limit_tokens=tokens,
        remaining_tokens=None if tokens is None else tokens - balance.used_tokens,
        window=format_window(limit.window),
        resets_at=resets_at(limit.window, now, account.tz, oldest_bucket=account.oldest_bucket),
        unaccepted_micro_usd=balance.unaccepted_micro_usd,
        unaccepted_tokens=balance.unaccepted_tokens,
        counted_since=_counted_since(limit, now, account.tz),
        is_truncated=is_truncated,
        children=tuple(inner),
    )


def _counted_since(limit: Limit, now: float, tz: tzinfo) -> float | None:
    """Return from when on everything counts, unless that is the whole window by now."""
    since = limit.counted_since
    return since if since is not None and since > live_from(limit.window, now, tz) else None
