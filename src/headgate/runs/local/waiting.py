"""Why steps wait in this process, in one line each, and whether anything but time can help."""

from __future__ import annotations

from headgate.core.budgets.accounts import Refused, Unit
from headgate.core.dispatch.desk import Desk
from headgate.core.holds import BudgetShort, GateClosed, Hold, LaneBehind, NotYetDue
from headgate.core.money import format_usd
from headgate.core.why import Reason, reasons
from headgate.runtime.looking.why import Why


def why_line(why: Why, desk: Desk | None, now: float) -> str:
    """Return every rule that holds a task, in one line."""
    return "; ".join([_line(reason, desk, now) for reason in why.reasons])


def waits_for_windows(desk: Desk, now: float) -> bool:
    """Tell whether all that waits can start only when the window of a budget moves on."""
    if not desk.waiting or len(desk.flights):
        return False
    return all(_waits_for_window(desk, reasons(desk, one, now)) for one in list(desk.waiting))


def _waits_for_window(desk: Desk, found: tuple[Reason, ...]) -> bool:
    refusals = (_refusal(reason.hold, desk) for reason in found)
    # What others hold may be given back, and is asked for again before long.
    return any(one is not None and one.resets_at is not None and not one.reserved
               for one in refusals)  # fmt: skip


def _refusal(hold: Hold, desk: Desk) -> Refused | None:
    match hold:
        case BudgetShort(scope=scope) | GateClosed(kind="scope", name=scope):
            return desk.parking.refusals.get(scope)
    return None


def _line(reason: Reason, desk: Desk | None, now: float) -> str:
    hold = reason.hold
    refused = None if desk is None else _refusal(hold, desk)
    if refused is not None:
        return _budget_line(refused, now)
    match hold:
        case NotYetDue(until=until):
            return f"tries again in {max(0.0, until - now):.0f} s"
        case LaneBehind():
            return "others go first"
        case GateClosed(kind="target", why=why, until=until) if until is not None:
            return f"paused for {max(0.0, until - now):.0f} s: {why}"
    return hold.message


def _budget_line(refused: Refused, now: float) -> str:
    used = refused.spent + refused.overrun
    line = f"{refused.scope or 'the root'}: {_amount(used, refused)} of"
    line += f" {_amount(refused.limit, refused)} spent, {_amount(refused.reserved, refused)} held"
    line += f", it needs {_amount(refused.requested, refused)}"
    if refused.resets_at is None:
        return line
    return f"{line}; more in {max(0.0, refused.resets_at - now):.0f} s"


def _amount(amount: int, refused: Refused) -> str:
    if refused.unit is Unit.TOKENS:
        return f"{amount} tokens"
    return format_usd(amount)
