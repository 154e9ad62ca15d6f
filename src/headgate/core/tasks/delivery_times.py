"""When a webhook is tried again: at once, then after waits that grow to hours, then not any more.

Rule: a wait is never shorter than the table says. Randomness only makes it longer, so that what
failed together does not come back together; a receiver that asks for more time gets it, within a
bound.
"""

from __future__ import annotations

WAITS_SECONDS = (5.0, 300.0, 1_800.0, 7_200.0, 18_000.0, 36_000.0, 50_400.0)
"""The wait after each failed try, from the first on."""

MOST_TRIES = len(WAITS_SECONDS) + 1
SPREAD = 0.1
LONGEST_WAIT_SECONDS = WAITS_SECONDS[-1]


def next_try_at(
    tries: int, *, now: float, draw: float, asked_seconds: float | None = None
) -> float | None:
    """Return when a delivery that failed `tries` times is due again; None if it was the last try.

    `asked_seconds` is what the receiver asked for; `draw` is in [0, 1).
    """
    if tries >= MOST_TRIES:
        return None
    wait = WAITS_SECONDS[max(tries, 1) - 1] * (1 + SPREAD * draw)
    if asked_seconds is not None:
        wait = max(wait, min(asked_seconds, LONGEST_WAIT_SECONDS))
    return now + wait
