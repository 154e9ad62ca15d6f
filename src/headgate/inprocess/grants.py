"""A grant: one place of a resource, for one task of one agent, until it is released.

Rule: a place is freed exactly once, however often its grant is released.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar

from headgate.budget_tracker import Amount
from headgate.core.lanes.load_ranking import MICRO
from headgate.core.money import to_micro_usd, to_tokens
from headgate.core.tasks.task import Task
from headgate.errors import IllegalSettlementError
from headgate.hold import HeldMoney
from headgate.inprocess.lanes import Entry, Lane

NOTHING = (0, 0)

_current: ContextVar[Grant | None] = ContextVar("headgate_grant", default=None)


class Grant:
    """A place that somebody has, with the task that it is for and the money that is held for it.

    `model` is the one that the call may use: where a budget was too small for the one that was
    asked for, the cheaper one that the caller named.
    """

    __slots__ = (
        "_counted",
        "_held",
        "_holding",
        "_task",
        "charged_micro_usd",
        "entry",
        "is_released",
        "lane",
        "model",
        "wait_seconds",
        "wait_ticks",
    )

    def __init__(self, lane: Lane, entry: Entry, wait_ticks: int, wait_seconds: float) -> None:
        self.lane = lane
        self.entry = entry
        self.is_released = False
        self.wait_ticks = wait_ticks
        self.wait_seconds = wait_seconds
        self.model: str | None = None
        self.charged_micro_usd: int | None = None
        self._counted = NOTHING
        self._task = entry.task
        self._held: HeldMoney | None = None
        self._holding: AbstractAsyncContextManager[HeldMoney] | None = None

    def __repr__(self) -> str:
        state = "released" if self.is_released else "held"
        return f"Grant(agent_id={self.agent_id!r}, weight={self.weight:g}, {state})"

    @property
    def agent_id(self) -> str:
        """Whose place it is."""
        return self.lane.agent_id

    @property
    def weight(self) -> float:
        """What its task counted in the queue."""
        return self.entry.weight_micro / MICRO

    @property
    def task(self) -> Task:
        """The task that it is for; one of weight 1 where none was submitted."""
        if self._task is None:
            self._task = Task(agent_id=self.lane.agent_id, enqueued_tick=self.entry.tick)
        return self._task

    @property
    def held(self) -> HeldMoney | None:
        """The money that is held for it, None without a budget."""
        return self._held

    def charge(self, actual_usd: Amount, *, tokens: int | None = None) -> None:
        """Report what the call cost in all; a later report replaces it.

        With a budget it is booked when the grant is released, and a call that reports nothing is
        taken to have used all that was held. Without one it only counts in the figures.
        """
        cost = to_micro_usd(actual_usd, field="actual_usd")
        if self.is_released:
            raise IllegalSettlementError(
                subject=f"the grant of {self.agent_id!r}",
                current="released",
                wanted="charged",
                allowed=(),
                advice="report the cost before the place is released",
            )
        if self._held is not None:
            self._held.charge(actual_usd, tokens=tokens)
        self._count(cost, 0 if tokens is None else to_tokens(tokens))
        self.charged_micro_usd = cost

    def not_charged(self) -> None:
        """Report that the provider cannot have charged."""
        if self._held is not None:
            self._held.not_charged()

    def fund(
        self, holding: AbstractAsyncContextManager[HeldMoney], held: HeldMoney, model: str | None
    ) -> None:
        """Give it the money that was held for it."""
        self._holding, self._held, self.model = holding, held, model

    async def settle(self, error: BaseException | None) -> None:
        """Book what the call cost; afterwards nothing is held any more."""
        holding, self._holding = self._holding, None
        if holding is None or self._held is None:
            return
        try:
            await holding.__aexit__(
                None if error is None else type(error),
                error,
                None if error is None else error.__traceback__,
            )
        finally:
            cost = (0, 0) if self._held.is_given_back else self._held.cost
            self._count(*cost)

    def _count(self, micro_usd: int, tokens: int) -> None:
        counted_micro_usd, counted_tokens = self._counted
        self.lane.tally.charged(micro_usd - counted_micro_usd, tokens - counted_tokens)
        self._counted = (micro_usd, tokens)


def current_grant() -> Grant | None:
    """Return the grant under which this code was called by `wrap`, None outside of one.

    Tasks that a call has started and left behind are outside of it when it has ended.
    """
    grant = _current.get()
    return None if grant is None or grant.is_released else grant


@contextmanager
def granted_to(grant: Grant) -> Iterator[None]:
    """Let what is called meanwhile find the grant that it runs under."""
    token = _current.set(grant)
    try:
        yield
    finally:
        _current.reset(token)
