"""What each agent got: grants, waits, cost, and its share of the whole.

Waits are counted in ticks, which is what the order goes by, and in seconds, which is what people
feel. A share is that of the weight that was granted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headgate.core.lanes.load_ranking import MICRO


class Tally:
    """The running sums of one lane."""

    __slots__ = (
        "charged_micro_usd",
        "charged_tokens",
        "granted_micro",
        "grants",
        "longest_wait_seconds",
        "longest_wait_ticks",
        "waited_seconds",
        "waited_ticks",
    )

    def __init__(self) -> None:
        self.grants = 0
        self.granted_micro = 0
        self.waited_ticks = 0
        self.longest_wait_ticks = 0
        self.waited_seconds = 0.0
        self.longest_wait_seconds = 0.0
        self.charged_micro_usd = 0
        self.charged_tokens = 0

    def granted(self, weight_micro: int, ticks: int, seconds: float) -> None:
        """Count a grant, and what it had waited for."""
        self.grants += 1
        self.granted_micro += weight_micro
        if seconds > 0.0 or ticks:
            self.waited_ticks += ticks
            self.waited_seconds += seconds
            self.longest_wait_ticks = max(self.longest_wait_ticks, ticks)
            self.longest_wait_seconds = max(self.longest_wait_seconds, seconds)

    def taken_back(self, weight_micro: int, ticks: int, seconds: float) -> None:
        """Uncount a grant that was never used; its wait stays the longest if it was."""
        self.grants -= 1
        self.granted_micro -= weight_micro
        self.waited_ticks -= ticks
        self.waited_seconds -= seconds

    def charged(self, micro_usd: int, tokens: int) -> None:
        """Count what was booked for a grant."""
        self.charged_micro_usd += micro_usd
        self.charged_tokens += tokens


class AgentFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent stands now, and what it got since it was registered.

    `parked` counts its calls that wait for room in a budget.
    """

    agent_id: str
    queued: int
    parked: int
    in_flight: int
    grants: int
    weight: float
    share: float
    mean_wait_ticks: float
    longest_wait_ticks: int
    mean_wait_seconds: float
    longest_wait_seconds: float
    charged_micro_usd: int
    charged_tokens: int


def figures_of(
    agent_id: str, tally: Tally, *, queued: int, parked: int, in_flight: int, total_micro: int
) -> AgentFigures:
    """Return what a tally comes to, beside what was granted in all."""
    grants = tally.grants or 1
    return AgentFigures(
        agent_id=agent_id,
        queued=queued,
        parked=parked,
        in_flight=in_flight,
        grants=tally.grants,
        weight=tally.granted_micro / MICRO,
        share=tally.granted_micro / total_micro if total_micro else 0.0,
        mean_wait_ticks=tally.waited_ticks / grants,
        longest_wait_ticks=tally.longest_wait_ticks,
        mean_wait_seconds=tally.waited_seconds / grants,
        longest_wait_seconds=tally.longest_wait_seconds,
        charged_micro_usd=tally.charged_micro_usd,
        charged_tokens=tally.charged_tokens,
    )


def jain_index(amounts: Sequence[float]) -> float:
    """Return how even amounts are: 1 if all are equal, 1/n if one of n has everything."""
    squares = sum(amount * amount for amount in amounts)
    if not squares:
        return 1.0
    total = sum(amounts)
    return total * total / (len(amounts) * squares)
