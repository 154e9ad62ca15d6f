"""Tasks that a budget refused: which wait, behind what, and which never can start.

A scope without any room is closed whole. One with some room left may still hold smaller tasks, so
only the refused task is set aside, up to a number; otherwise one dear task would stand before
many cheap ones. Both come back when the scope may have room: when its window frees some, when an
attempt that was charged to it ends, and every few seconds while somebody else may give money back.
A task that asked to be refused does not wait behind a closed scope: it is refused by what the scope
said last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from headgate.core.budgets.accounts import Refused, Unit, exceeded
from headgate.core.budgets.scopes import ROOT, Scope, ancestors
from headgate.core.dispatch.desk_settings import Waiting
from headgate.core.gates import GateClosure
from headgate.core.money import amount_of
from headgate.core.tasks.records import OnExhausted, Terms

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
