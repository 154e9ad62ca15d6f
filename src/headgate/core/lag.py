"""The lag clamp: what a project is owed after a pause is bounded.

A project that used nothing for a day is owed half of everything the others used, and would take
thousands of grants in a row when it comes back. When it joins a round, what it is owed beyond
`max_lag_tokens` is forgiven, by counting the excess as if it had used it. A project that stays is
never clamped, however dear its tasks or those of others are: it is owed what it has earned.

The decision is made from one snapshot, so what was forgiven must be carried to the next one, or
the same debt would be found again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def forgiven_lag(
    usage: Sequence[int],
    targets: Sequence[float],
    *,
    joins: Sequence[bool],
    max_lag_tokens: int,
) -> list[int]:
    """Return the tokens to add to each project that joins so that it is owed at most the bound.

    `usage` includes what was forgiven before; `targets` are the shares, in the same order.
    """
    level = _level_of_the_present(usage, targets, joins)
    if level is None:
        level = _common_level(usage, targets, max_lag_tokens)
    debts = (math.ceil(share * level) - used for used, share in zip(usage, targets, strict=True))
    return [
        max(0, debt - max_lag_tokens) if joined else 0
        for debt, joined in zip(debts, joins, strict=True)
    ]


def _level_of_the_present(
    usage: Sequence[int], targets: Sequence[float], joins: Sequence[bool]
) -> float | None:
    """Return the total at which those who stay have had their shares; None if nobody stays."""
    present = [
        (used, share)
        for used, share, joined in zip(usage, targets, joins, strict=True)
        if not joined
    ]
    share = sum(share for _, share in present)
    return sum(used for used, _ in present) / share if share else None


def _common_level(usage: Sequence[int], targets: Sequence[float], bound: int) -> float:
    """Return the total usage at which everyone beyond the bound stands exactly at it.

    Forgiving one project raises the total, and with it what the others are owed, so those beyond
    the bound are solved for together; each pass can only find more of them.
    """
    level, forgiven = float(sum(usage)), 0
    while True:
        pairs = zip(usage, targets, strict=True)
        kept = [(used, share) for used, share in pairs if share * level - used <= bound]
        if len(usage) - len(kept) <= forgiven:
            return level
        forgiven = len(usage) - len(kept)
        share = sum(share for _, share in kept)
        if not share:
            return level
        level = (sum(used for used, _ in kept) - bound * forgiven) / share
