"""The lag clamp: what a project is owed after a pause is bounded.

A project that used nothing for a day is owed half of everything the others used, and would take
thousands of grants in a row when it comes back. Beyond `max_lag_tokens` the debt is forgiven, by
counting the excess as if the project had used it. The decision is made from one snapshot, so what
was forgiven must be carried to the next one, or the same debt would be found again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def forgiven_lag(
    usage: Sequence[int], targets: Sequence[float], *, max_lag_tokens: int
) -> list[int]:
    """Return the tokens to add to each project so that none is owed more than the bound.

    `usage` includes what was forgiven before; `targets` are the shares, in the same order.
    """
    level = _level(usage, targets, max_lag_tokens)
    pairs = zip(usage, targets, strict=True)
    return [max(0, math.ceil(share * level) - used - max_lag_tokens) for used, share in pairs]


def _level(usage: Sequence[int], targets: Sequence[float], bound: int) -> float:
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
