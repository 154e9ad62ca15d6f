"""Tasks that a budget refused: which wait, behind what, and which never can start.

A scope without any room is closed whole. One with some room left may still hold smaller tasks, so
only the refused task is set aside, up to a number; otherwise one dear task would stand before
many cheap ones. Both come back when the scope may have room: when its window frees some, when an
attempt that was charged to it ends, and every few seconds while somebody else may give money back.
A task that asked to be refused does not wait behind a closed scope: it is refused by what the scope
said last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from headgate.core.budgets.accounts import Refused, Unit, exceeded
from headgate.core.budgets.scopes import ROOT, Scope, ancestors
from headgate.core.dispatch_plan import Waiting
from headgate.core.gates import GateClosure, GateKind, GatePart
from headgate.core.in_flight import InFlightAttempts, Timers
from headgate.core.lane_index import LaneIndex
from headgate.core.money import amount_of
from headgate.core.slots.slot import SlotStanding, most_headroom, provider_closure
from headgate.core.task import OnExhausted, Terms

Needs = Mapping[Unit, int]
"""What is to be held for an attempt."""

MAX_SET_ASIDE = 64
"""How many tasks are tried one by one against a scope with a little room, before it is closed."""

ASK_AGAIN_SECONDS = 5.0
"""When money that others hold is asked for again: nobody tells the desk that they gave it back."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a refused task: end it with an error, close the gate, or set it aside.

    Without any of them the task is set aside.
    """

    error: str | None = None
    closure: GateClosure | None = None


class BudgetParking:
    """What waits for budgets."""

    def __init__(self) -> None:
        self._aside: dict[str, dict[str, None]] = {}
        self._scope_of: dict[str, str] = {}
        self._closed: set[str] = set()
        self._unwilling: dict[str, dict[str, None]] = {}
        self.refusals: dict[str, Refused] = {}

    def judge(self, task_id: str, refused: Refused, terms: Terms) -> Verdict:
        """Decide what becomes of a task that a scope refused."""
        if not refused.may_clear or terms.on_exhausted is OnExhausted.REJECT:
            return Verdict(error=str(exceeded(refused)))
        scope = refused.scope
        self.refusals[scope] = refused
        has_room = refused.spent + refused.reserved + refused.overrun < refused.limit
        if has_room and len(self._aside.get(scope, ())) < MAX_SET_ASIDE:
            self._aside.setdefault(scope, {})[task_id] = None
            self._scope_of[task_id] = scope
            return Verdict()
        self._closed.add(scope)
        return Verdict(closure=closure_of(refused))

    def refuses(self, waiting: Waiting, needs: Callable[[Waiting], Needs]) -> str | None:
        """Return why a task that will not wait cannot start; None if it may be asked for."""
        if waiting.terms.on_exhausted is not OnExhausted.REJECT:
            return None
        reached = _reached(waiting.task.scopes)
        for scope in reached:
            self._unwilling.setdefault(scope, {})[waiting.task.id] = None
        for scope in sorted(reached & self._closed):
            refused = self.refusals[scope]
            used = refused.spent + refused.reserved + refused.overrun
            requested = needs(waiting)[refused.unit]
            if used + requested > refused.limit:
                return str(exceeded(msgspec.structs.replace(refused, requested=requested)))
        return None

    def unwilling(self, scope: str) -> list[str]:
        """Return the tasks behind a scope that will not wait for it."""
        return list(self._unwilling.get(scope, ()))

    def leave(self, scope: str) -> list[str]:
        """Take out the tasks that were set aside for a scope."""
        self.refusals.pop(scope, None)
        self._closed.discard(scope)
        tasks = list(self._aside.pop(scope, ()))
        for task_id in tasks:
            self._scope_of.pop(task_id, None)
        return tasks

    def drop(self, task_id: str, scopes: Iterable[str]) -> None:
        """Forget a task that has ended, or waits no more."""
        self._forget_unwilling(task_id, scopes)
        scope = self._scope_of.pop(task_id, None)
        if scope is None:
            return
        aside = self._aside[scope]
        del aside[task_id]
        if not aside:
            del self._aside[scope]
            if scope not in self._closed:
                del self.refusals[scope]

    def set_aside(self, scope: str) -> int:
        """Return how many tasks were set aside for a scope."""
        return len(self._aside.get(scope, ()))

    def all_aside(self) -> Iterable[str]:
        """Return the tasks that were set aside one by one, for any scope."""
        return self._scope_of.keys()

    def scope_of(self, task_id: str) -> str | None:
        """Return the scope that a task was set aside for."""
        return self._scope_of.get(task_id)

    def wake(self, scopes: Iterable[str], *, has_freed: bool) -> list[str]:
        """Return the refusing scopes in which an attempt that ended may have left room.

        One without a window is asked again in any case: its tasks wait only for what is in
        flight, and are refused for good when nothing is.
        """
        if not self.refusals:
            return []
        refusing = sorted(_reached(scopes) & self.refusals.keys())
        return [scope for scope in refusing if has_freed or self.refusals[scope].resets_at is None]

    def _forget_unwilling(self, task_id: str, scopes: Iterable[str]) -> None:
        if not self._unwilling:
            return
        for scope in _reached(scopes) & self._unwilling.keys():
            tasks = self._unwilling[scope]
            tasks.pop(task_id, None)
            if not tasks:
                del self._unwilling[scope]


def _reached(scopes: Iterable[str]) -> set[str]:
    return {charged for scope in (ROOT, *scopes) for charged in ancestors(Scope(scope))}


def ask_again_at(refused: Refused, now: float) -> float | None:
    """Return when a scope that refused is asked again by itself; None is never."""
    times = [] if refused.resets_at is None else [float(refused.resets_at)]
    if refused.reserved:
        times.append(now + ASK_AGAIN_SECONDS)
    return min(times, default=None)


def closure_of(refused: Refused) -> GateClosure:
    """Return the closed gate of a scope without room."""
    used = refused.spent + refused.reserved + refused.overrun
    unit = refused.unit.value
    most, asked = amount_of(refused.limit, unit), amount_of(refused.requested, unit)
    return GateClosure(
        kind="scope",
        name=refused.scope,
        until=refused.resets_at,
        why=f"{amount_of(used, unit)} of {most} are used or held, and {asked} asked for",
    )


# What is closed at a desk: for a time, or as long as things stand as they do.
#
# A closure for a time ends by itself, or when whoever closed opens again: a budget, a rate limit,
# a pause that a provider asked for. A standing one says how things are: an administrator's pause,
# a slot without room. Its time is only shown, and nothing ends it but another standing. Rule: a
# part is open when neither closes it, and the end of one leaves the other as it is.


class Closures:
    """Both kinds of closures, and the index that is kept in line with them."""

    def __init__(self, index: LaneIndex) -> None:
        self.index = index
        self.timed: dict[GatePart, GateClosure] = {}
        self.standing: dict[GatePart, GateClosure] = {}
        self._openings: Timers[GatePart] = Timers()

    def close(self, closure: GateClosure, now: float) -> None:
        """Close a part until its time; one that is closed for longer stays so."""
        part = closure.part
        if closure.until is not None and closure.until <= now:
            return
        known = self.timed.get(part)
        if known is not None and (known.until or 0.0) > (closure.until or 0.0):
            return
        self.timed[part] = closure
        if part not in self.standing:
            self.index.close(closure)
        if closure.until is not None:
            self._openings.set(part, closure.until)

    def open(self, part: GatePart) -> bool:
        """End what closes a part for a time; return whether anything did."""
        if self.timed.pop(part, None) is None:
            return False
        self._openings.drop(part)
        if part not in self.standing:
            self.index.open(part)
        return True

    def hold(self, kind: GateKind, closures: Mapping[GatePart, GateClosure]) -> None:
        """Have these and no others of their kind stand, until this is called again."""
        ended = [part for part in self.standing if part.kind == kind and part not in closures]
        for part in ended:
            self.stand(part, None)
        for part, closure in closures.items():
            self.stand(part, closure)

    def stand(self, part: GatePart, closure: GateClosure | None) -> None:
        """Have one closure stand, or none."""
        if closure == self.standing.get(part):
            return
        if closure is not None:
            self.standing[part] = closure
            self.index.close(closure)
            return
        del self.standing[part]
        timed = self.timed.get(part)
        if timed is None:
            self.index.open(part)
        else:
            self.index.close(timed)

    def of(self, part: GatePart) -> list[GateClosure]:
        """Return everything that closes a part, what stands first."""
        found = (self.standing.get(part), self.timed.get(part))
        return [closure for closure in found if closure is not None]

    def is_closed(self, part: GatePart) -> bool:
        """Say whether anything closes a part."""
        return part in self.standing or part in self.timed

    def shown(self) -> list[GateClosure]:
        """Return one closure for each part that is closed, as the index has it."""
        return list((self.timed | self.standing).values())

    def look_at(self, part: GatePart, at: float) -> None:
        """Have a part fall due at a time, though it may open before or stay closed."""
        self._openings.set(part, at)

    def next_at(self) -> float | None:
        """Return when a part falls due."""
        return self._openings.next_at()

    def pop_due(self, now: float, *, most: int) -> list[GatePart]:
        """Return the parts whose time has come."""
        return self._openings.pop_due(now, most=most)


# The slots as a desk knows them: which are held, and which providers have none that is open.
#
# Rule: the gate of a provider follows from those of its slots, whatever closes them: a hold, a
# pause that the provider asked for, a rate limit. So what may be planned for it can be given a
# slot.


class SlotGates:
    """The standings of all slots, and the gates of the providers that tasks name."""

    def __init__(self, closures: Closures, flights: InFlightAttempts) -> None:
        self.standings: dict[str, SlotStanding] = {}
        self._closures = closures
        self._flights = flights
        self._by_provider: dict[str, list[SlotStanding]] = {}
        self._named: set[str] = set()

    def set(self, standings: Sequence[SlotStanding]) -> None:
        """Go by these standings, and no others; their order is that of the file."""
        self.standings = {standing.name: standing for standing in standings}
        self._by_provider = {}
        for standing in self.standings.values():
            self._by_provider.setdefault(standing.provider, []).append(standing)
        holds = {_part(one.name): one.hold for one in self.standings.values() if one.hold}
        self._closures.hold("slot", holds)
        for provider in sorted(self._named):
            self._look_at(provider)

    def know(self, provider: str) -> None:
        """Keep the gate of a provider from now on, because a task names it."""
        if provider not in self._named:
            self._named.add(provider)
            self._look_at(provider)

    def changed(self, slot: str) -> None:
        """Look again at the provider of a slot that was closed or opened."""
        standing = self.standings.get(slot)
        if standing is not None and standing.provider in self._named:
            self._look_at(standing.provider)

    def choose(self, provider: str, *, without: Collection[str]) -> str | None:
        """Return the open slot of a provider with the most headroom."""
        return most_headroom(
            self._by_provider.get(provider, ()),
            is_closed=lambda slot: self._closures.is_closed(_part(slot)),
            in_flight=self._flights.by_slot,
            without=without,
        )

    def _look_at(self, provider: str) -> None:
        standings = self._by_provider.get(provider, ())
        closure = provider_closure(provider, standings, self._closures_of)
        self._closures.stand(GatePart("provider", provider), closure)

    def _closures_of(self, slot: str) -> list[GateClosure]:
        return self._closures.of(_part(slot))


def _part(slot: str) -> GatePart:
    return GatePart("slot", slot)
