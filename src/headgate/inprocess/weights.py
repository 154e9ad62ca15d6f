"""What a call weighs: by its model and the length of its prompt, corrected by what it really cost.

The correction is the cost per weight of a type of task, as a moving average, beside that of all
types. A type that costs twice as much as its weight says counts twice as much from then on.

Rule: a correction is bounded, and so is what is remembered: a weight must not be driven to nothing
or beyond all others by one odd call, nor memory by names that never come again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

STEP = 0.2
LEAST_FACTOR, MOST_FACTOR = 0.1, 10.0
MAX_TYPES = 1_024
MAX_PARTS = 10_000


class WeightEstimates:
    """By how much the weights of each type of call are off, from the measured cost."""

    def __init__(self) -> None:
        self._averages: OrderedDict[str, float] = OrderedDict()
        self._overall: float | None = None

    def factor(self, task_type: str) -> float:
        """Return by how much calls of a type cost more than their weight says; 1 if unknown."""
        average = self._averages.get(task_type)
        if average is None or not self._overall:
            return 1.0
        return min(max(average / self._overall, LEAST_FACTOR), MOST_FACTOR)

    def observe(self, task_type: str, *, weight: float, cost: float) -> None:
        """Note what a call of a type cost, in any unit that is always the same.

        `weight` is the one before correction, or the correction would be corrected in turn.
        """
        if weight <= 0 or cost < 0:
            return
        rate = cost / weight
        self._averages[task_type] = _moved(self._averages.get(task_type), rate)
        self._averages.move_to_end(task_type)
        self._overall = _moved(self._overall, rate)
        if len(self._averages) > MAX_TYPES:
            self._averages.popitem(last=False)


def prompt_chars_of(*prompts: object) -> int:
    """Count the characters of prompts: texts, and texts anywhere in lists and mappings of them."""
    chars, waiting = 0, list(prompts)
    for _ in range(MAX_PARTS):
        if not waiting:
            break
        part = waiting.pop()
        if isinstance(part, str):
            chars += len(part)
        elif isinstance(part, Mapping):
            waiting.extend(part.values())
        elif isinstance(part, list | tuple):
            waiting.extend(part)
    return chars


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + STEP * (value - average)
