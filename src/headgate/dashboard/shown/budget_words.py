"""A budget as it is drawn: its bars with the words beside them, its rate, and when it is used up.

Rule: the overview and the page of budgets draw from here, so that a budget looks and reads the same
on both. The parts of a bar are spent, reserved, overrun, in this order; red is overrun alone, and a
budget that is used up without one has a tone of its own beside its word.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headgate.core.budgets.alerts import NEARLY_USED_UP
from headgate.core.budgets.burn_rate import BurnRate
from headgate.core.budgets.windows import WindowKind, parse_window
from headgate.core.texts.figures import count, duration, exact_usd, usd
from headgate.scope_status import ScopeStatus

Part = tuple[str, int, str]
"""The name of a part of a bar, its amount, and its tone."""


class BudgetBar(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of a budget; without a limit there is nothing that a bar could be a part of."""

    parts: tuple[Part, ...]
    limit: int | None
    words: str


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """When a budget is used up: in words, and at which time if that is known; faint is no news."""

    words: str
    at: float | None = None
    is_faint: bool = False


def state_of(status: ScopeStatus) -> str:
    """Return the sign under which a budget is shown; empty where it has no limit."""
    used = status.used_share
    if used is None:
        return ""
    if used >= 1:
        return "exhausted"
    return "warning" if used >= NEARLY_USED_UP else "ok"


def bars_of(status: ScopeStatus, *, is_exact: bool = False) -> list[BudgetBar]:
    """Return a bar for dollars and one for tokens, as far as they are limited or used."""
    bars = []
    money = (status.spent_micro_usd, status.reserved_micro_usd, status.overrun_micro_usd)
    if status.limit_micro_usd is not None or status.limit_tokens is None or any(money):
        bars.append(_bar(money, status.limit_micro_usd, exact_usd if is_exact else usd))
    if status.limit_tokens is not None:
        tokens = (status.spent_tokens, status.reserved_tokens, status.overrun_tokens)
        bars.append(_bar(tokens, status.limit_tokens, count, unit=" tokens"))
    return bars


def _bar(
    amounts: tuple[int, int, int], limit: int | None, text: Callable[[int], str], unit: str = ""
) -> BudgetBar:
    spent, reserved, overrun = amounts
    is_full = limit is not None and sum(amounts) >= limit
    words = f"{text(spent)} spent, {text(reserved)} reserved"
    words += f", {text(overrun)} overrun" if overrun else ""
    words += ", no limit" if limit is None else f" of {text(limit)}{unit}"
    parts = (
        ("spent", spent, "full" if is_full else "spent"),
        ("reserved", reserved, "reserved"),
        ("overrun", overrun, "overrun"),
    )
    return BudgetBar(parts=parts, limit=limit, words=words)


def ending(status: ScopeStatus, rate: BurnRate, ends_at: float | None) -> Ending:
    """Return when one of the limits of a scope is reached at its rate."""
    used = status.used_share
    if used is None:
        return Ending(words="no limit", is_faint=True)
    if used >= 1:
        return Ending(words="now")
    if ends_at is not None:
        return Ending(words="", at=ends_at)
    if rate.measured_seconds and not rate.is_steady:
        return Ending(words="not known, it is not spent steadily", is_faint=True)
    if not rate.measured_seconds or status.resets_at is None:
        return Ending(words="not at this rate", is_faint=True)
    is_rolling = parse_window(status.window).kind is WindowKind.ROLLING
    return Ending(words="not before more room is freed" if is_rolling else "not before it resets")


def rate_words(rate: BurnRate) -> str:
    """Return how fast a scope spends; empty where it spent nothing lately."""
    if not rate.measured_seconds:
        return ""
    tokens = f", {count(rate.tokens_per_hour)} tokens" if rate.tokens_per_hour else ""
    over = duration(rate.measured_seconds)
    return f"{usd(rate.micro_usd_per_hour)}{tokens} an hour, over {over}"
