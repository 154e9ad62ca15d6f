"""Which slot a task gets that names only the provider, and when there is none to get.

The slot with the most headroom goes first: the lowest percentage used, and what nobody has read yet
after what is known; among equals the one with the fewest tasks in flight, then the first of the
file. Rule: a slot that is closed is never chosen, and while all of a provider are, its tasks wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from headgate.core.gates import GateClosure
from headgate.core.key_slots.slot import SlotStanding

MAX_NAMED = 8
"""How many slots a reason names; the others are counted."""

IsClosed = Callable[[str], bool]
ClosuresOf = Callable[[str], Sequence[GateClosure]]


def most_headroom(
    standings: Sequence[SlotStanding],
    *,
    is_closed: IsClosed,
    in_flight: Mapping[str, int],
    without: Collection[str] = (),
) -> str | None:
    """Return the open slot with the most headroom; None if there is none."""
    found = [one for one in standings if one.name not in without and not is_closed(one.name)]
    if not found:
        return None
    # The first of the smallest is returned, so the order of the file settles what is left.
    return min(found, key=lambda one: _rank(one, in_flight)).name


def provider_closure(
    provider: str, standings: Sequence[SlotStanding], closures_of: ClosuresOf
) -> GateClosure | None:
    """Return what closes a provider: its slots, each for its own reason; None if one is open.

    It opens when the first of them does, where that is known.
    """
    closed: list[Sequence[GateClosure]] = []
    for standing in standings:
        closures = closures_of(standing.name)
        if not closures:
            return None
        closed.append(closures)
    times = [until for closures in closed if (until := _opens_at(closures)) is not None]
    why = _why(closed) if closed else _no_slot(provider)
    return GateClosure(kind="provider", name=provider, until=min(times, default=None), why=why)


def _rank(standing: SlotStanding, in_flight: Mapping[str, int]) -> tuple[bool, float, int]:
    percent = standing.percent_used
    return (percent is None, percent or 0.0, in_flight.get(standing.name, 0))


def _opens_at(closures: Sequence[GateClosure]) -> float | None:
    """Return when the last of what closes a slot may end; None if one of them does not say."""
    times = [closure.until for closure in closures if closure.until is not None]
    return max(times) if len(times) == len(closures) else None


def _why(closed: Sequence[Sequence[GateClosure]]) -> str:
    named = [f"{closures[0].name} ({_reason(closures[0])})" for closures in closed[:MAX_NAMED]]
    rest = len(closed) - len(named)
    further = f" and {rest} more" if rest else ""
    return f"none of its slots is open: {', '.join(named)}{further}"


def _reason(closure: GateClosure) -> str:
    return closure.why or "closed"


def _no_slot(provider: str) -> str:
    line = f"no slot of {provider} is configured"
    return f"{line}; add one to the file under [[slots]], or cancel the task"
