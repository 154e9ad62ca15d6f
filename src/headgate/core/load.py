"""The load function: how urgent a lane is beside the other lanes.

    L(i) = alpha * (Q_i / max Q_j) + (1 - alpha) * (D_i / max D_j)

Q is the weighted depth of a lane's queue, D the age of its oldest task in ticks; a tick is one
unit of work completed, so that ages grow only while there is contention. Alpha 0 serves whoever
has waited longest, alpha 0.5 leans towards the deepest backlog. The rule kept here: load is
relative, and a term whose maximum is zero counts nothing.
"""

from __future__ import annotations

from math import inf, sqrt

import msgspec

from headgate.errors import InvalidSettingError

MOST_ALPHA = 0.5
MOST_UNSAFE_ALPHA = 0.99
OPTIMIZE_FOR = {"latency": 0.0, "balanced": 0.25, "throughput": 0.5}

ADAPTIVE_STEP = 0.01
ADAPTIVE_WINDOW = 10
HIGH_VARIATION = 0.5
HIGH_GROWTH = 0.2


def load_score(
    *,
    alpha: float,
    queue_depth: float,
    max_queue_depth: float,
    oldest_wait: float,
    max_oldest_wait: float,
) -> float:
    """Return the load of a lane, between 0 and 1; the lane with the highest goes next."""
    depth_term = queue_depth / max_queue_depth if max_queue_depth else 0.0
    wait_term = oldest_wait / max_oldest_wait if max_oldest_wait else 0.0
    return alpha * depth_term + (1 - alpha) * wait_term


def check_alpha(alpha: float, *, most: float = MOST_ALPHA) -> float:
    """Return alpha if it is in its range, and refuse it otherwise.

    Above 0.5 depth outweighs age: beside a lane that stays deep, a shallow one may wait for ever.
    """
    if 0.0 <= alpha <= most:
        return alpha
    raise InvalidSettingError("alpha", f"must be between 0 and {most}, not {alpha}")


def resolve_alpha(
    *, alpha: float | None = None, optimize_for: str | None = None, most: float = MOST_ALPHA
) -> float:
    """Return the alpha that was given by number or by name; without either, the balanced one."""
    if alpha is not None and optimize_for is not None:
        raise InvalidSettingError("alpha", "give either alpha or optimize_for, not both")
    if alpha is not None:
        return check_alpha(alpha, most=most)
    name = "balanced" if optimize_for is None else optimize_for
    if name not in OPTIMIZE_FOR:
        choices = ", ".join(OPTIMIZE_FOR)
        raise InvalidSettingError("optimize_for", f"must be one of {choices}, not {name!r}")
    return OPTIMIZE_FOR[name]


def longest_wait_ticks(
    *, alpha: float, max_waiters: int, least_weight: float = 1.0, most_weight: float = 1.0
) -> float:
    """Return for how many ticks a task can wait at most, while so many wait and weigh so much.

    Say that no task has waited longer than B. One of age s loses only to a lane whose head is
    older than s - r * B, with r = alpha / (1 - alpha) * (1 - least share of the deepest lane). So
    whatever is granted after its tick r * B was waiting then, which is less than `max_waiters`,
    and B is at most r * B + max_waiters.
    """
    others = max(max_waiters - 1, 1)
    least_share = min(least_weight / (most_weight * others), 1.0)
    kept = 1 - alpha / (1 - alpha) * (1 - least_share)
    return max_waiters / kept if kept > 0 else inf


class AdaptiveAlpha(msgspec.Struct, frozen=True, kw_only=True):
    """An alpha that follows what was observed: uneven waits lower it, a growing backlog raises it.

    Each observation is one grant: how long the task had waited, and the weighted depth of all
    queues then. Alpha moves a step at a time, once the window is full, and only the window is
    remembered.
    """

    alpha: float = OPTIMIZE_FOR["balanced"]
    waits_ticks: tuple[float, ...] = ()
    queue_depths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_alpha(self.alpha)

    def observe(self, *, wait_ticks: float, queue_depth: float) -> AdaptiveAlpha:
        """Return the state after one more grant."""
        waits_ticks = (*self.waits_ticks, wait_ticks)[-ADAPTIVE_WINDOW:]
        queue_depths = (*self.queue_depths, queue_depth)[-ADAPTIVE_WINDOW:]
        moved = self.alpha + _adjustment(waits_ticks, queue_depths)
        return AdaptiveAlpha(
            # Rounded, because thirty steps of 0.01 do not add up to 0.3 in binary.
            alpha=round(min(max(moved, 0.0), MOST_ALPHA), 6),
            waits_ticks=waits_ticks,
            queue_depths=queue_depths,
        )


def _adjustment(waits_ticks: tuple[float, ...], queue_depths: tuple[float, ...]) -> float:
    if len(waits_ticks) < ADAPTIVE_WINDOW:
        return 0.0
    if _variation(waits_ticks) > HIGH_VARIATION:
        return -ADAPTIVE_STEP
    if _growth(queue_depths) > HIGH_GROWTH:
        return ADAPTIVE_STEP
    return 0.0


def _variation(values: tuple[float, ...]) -> float:
    """Return the coefficient of variation: the standard deviation as a share of the mean."""
    mean = sum(values) / len(values)
    if mean == 0:
        return 0.0
    return sqrt(sum((value - mean) ** 2 for value in values) / len(values)) / mean


def _growth(values: tuple[float, ...]) -> float:
    """Return by what share the newer half of the values exceeds the older half on average."""
    half = len(values) // 2
    older, newer = sum(values[:half]), sum(values[-half:])
    if older == 0:
        return 1.0 if newer > 0 else 0.0
    return newer / older - 1
