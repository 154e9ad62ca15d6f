"""The money of a task and of its calls through the gateway: who draws on what, and who waits.

An attempt at a task holds a reservation. Its calls draw on that, in memory. What a call needs
beyond it is reserved beside it under the call's own name, in the scopes of the task: so the task
grows while its scopes have room. When a call has ended, the part of its cost that it had drawn is
booked with the task, and the rest with its own reservation.

Rule: each micro-dollar is booked once. No two tasks wait for each other to give money back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from headgate.core.budgets.escrow import Amounts

TASK_TOKEN_PREFIX = "hg_task_"  # noqa: S105
"""How the token of an attempt at a task begins."""

NOTHING = Amounts()


class Parts(NamedTuple):
    """What a call cost: the part that its task has held, and the part beside it."""

    of_task: Amounts
    beside: Amounts


class TaskMoney:
    """What one attempt holds, what its calls have drawn of it, and what those have used."""

    __slots__ = ("drawn", "held", "used")

    def __init__(self, held: Amounts, used: Amounts = NOTHING) -> None:
        self.held = held
        self.drawn = NOTHING
        self.used = used

    @property
    def left(self) -> Amounts:
        """What may still be drawn."""
        left = self.held.minus(self.drawn).minus(self.used)
        return Amounts(max(0, left.micro_usd), max(0, left.tokens))

    def draw(self, wanted: Amounts) -> Amounts:
        """Take as much of an amount as there is, and return that."""
        left = self.left
        taken = Amounts(min(wanted.micro_usd, left.micro_usd), min(wanted.tokens, left.tokens))
        self.drawn = self.drawn.plus(taken)
        return taken

    def give_back(self, drawn: Amounts) -> None:
        """Put back what a call had drawn that cost nothing."""
        self.drawn = self.drawn.minus(drawn)

    def settle(self, drawn: Amounts, beside: Amounts, cost: Amounts) -> Parts:
        """Book what a call cost that had drawn so much and held so much beside it.

        What it had drawn goes first, so that nothing is held longer than it must. A call that cost
        more than it held uses what is left of the task. What is beyond that is beside it: so calls
        together use no more of a task than it holds, and an overrun shows before the task ends.
        """
        self.drawn = self.drawn.minus(drawn)
        left = self.left
        usd = _parts(cost.micro_usd, drawn.micro_usd, beside.micro_usd, left.micro_usd)
        tokens = _parts(cost.tokens, drawn.tokens, beside.tokens, left.tokens)
        parts = Parts(Amounts(usd[0], tokens[0]), Amounts(usd[1], tokens[1]))
        self.used = self.used.plus(parts.of_task)
        return parts


def _parts(cost: int, drawn: int, beside: int, left: int) -> tuple[int, int]:
    """Split a cost; `left` is what the task has left with what was drawn put back."""
    of_task = min(cost, drawn)
    of_call = min(cost - of_task, beside)
    over = cost - of_task - of_call
    more = min(over, max(0, left - of_task))
    return of_task + more, of_call + over - more


class OpenCalls(msgspec.Struct, frozen=True, array_like=True):
    """What is known of the calls of an attempt that ends, beside what the store has of them.

    `drawn` is what those hold of it that nobody waits for any more. `has_called` tells that there
    were calls, though the store may not have heard of any yet. One that `is_partly_unknown` began
    while another process decided its calls: nobody knows which of them were under way when that
    ended.
    """

    drawn: Amounts = NOTHING
    has_called: bool = False
    is_partly_unknown: bool = False


class GrowingCall(NamedTuple):
    """A call that needs more than its task holds, and that a scope has no room for."""

    call_id: str
    task_id: str
    created_at: float


def call_to_refuse(
    growing: Iterable[GrowingCall], *, reserved: int, held_by_stuck: Mapping[str, int]
) -> str | None:
    """Return which call gives up, of those that wait for room in one scope; None if none has to.

    `reserved` is all that is held in the scope, and `held_by_stuck` what tasks hold of it that do
    nothing but wait to grow, by task. While somebody else holds something, room may come, and all
    wait. Otherwise each waits for the others, and the youngest is refused: its task goes on.
    """
    if reserved > sum(held_by_stuck.values()):
        return None
    youngest = max(growing, key=lambda one: (one.created_at, one.call_id), default=None)
    return None if youngest is None else youngest.call_id
