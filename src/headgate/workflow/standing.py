"""How one run of a step stands, and how many runs of a step stand how."""

from __future__ import annotations

from enum import IntEnum


class Standing(IntEnum):
    """How one run of a step stands; those that did not run say why not."""

    WAITING = 0
    SUBMITTED = 1
    DONE = 2
    FAILED = 3
    SKIPPED = 4
    """A parent failed, or was skipped altogether."""
    UNMET = 5
    """Its condition does not hold."""
    UNFUNDED = 6
    """No budget would hold it."""
    STOPPED = 7
    """The run of the workflow ended before it."""
    UNFED = 8
    """A parent was not run."""
    CUT_OFF = 9
    """It had begun, and was stopped before it had ended."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to it, unless the workflow is resumed."""
        return self >= Standing.DONE

    @property
    def is_skipped(self) -> bool:
        """Whether the workflow itself said that it is not to run."""
        return self in (Standing.SKIPPED, Standing.UNMET)

    @property
    def is_not_run(self) -> bool:
        """Whether it would have run to its end under other circumstances."""
        return self >= Standing.UNFUNDED


ALL = tuple(Standing)
_WAITING = Standing.WAITING.value
_ENDED = Standing.DONE.value


class StepCounts:
    """How the runs of one step stand; `left` are those that have not ended."""

    __slots__ = ("by_standing", "left", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.left = total
        self.by_standing = [0] * len(ALL)
        self.by_standing[_WAITING] = total

    def __getitem__(self, standing: Standing) -> int:
        return self.by_standing[standing]

    @property
    def skipped(self) -> int:
        """How many the workflow itself left out."""
        return self.by_standing[Standing.SKIPPED] + self.by_standing[Standing.UNMET]

    @property
    def not_run(self) -> int:
        """How many would have run to their end under other circumstances."""
        return sum(self.by_standing[Standing.UNFUNDED :])

    def move(self, before: int, after: int) -> None:
        """Count one run elsewhere."""
        self.by_standing[before] -= 1
        self.by_standing[after] += 1
        if after >= _ENDED:
            self.left -= 1
