"""A shared resource: so many places for concurrent calls.

Rule: a resource belongs to one scheduler. Two that counted its places side by side could only
agree by asking each other at every grant.
"""

from __future__ import annotations

from headgate.errors import InvalidSettingError

MAX_CAPACITY = 1_000_000


class SharedResource:
    """Something that bears `capacity` concurrent calls: a provider's key, a database, a GPU."""

    __slots__ = ("_capacity", "in_use", "is_claimed", "name")

    def __init__(self, name: str, capacity: int = 1) -> None:
        if not name:
            raise InvalidSettingError("name", "must not be empty")
        self._capacity = whole_number("capacity", capacity, most=MAX_CAPACITY)
        self.name = name
        self.in_use = 0
        self.is_claimed = False

    def __repr__(self) -> str:
        return f"SharedResource({self.name!r}, {self.in_use} of {self.capacity} in use)"

    @property
    def capacity(self) -> int:
        """How many calls it bears at once; fixed, because those who wait count on it."""
        return self._capacity

    @property
    def free(self) -> int:
        """How many places nobody has."""
        return self._capacity - self.in_use

    def claim(self) -> None:
        """Let a scheduler have it, once."""
        if self.is_claimed:
            problem = f"{self.name!r} has a scheduler already; use that one, or make another"
            raise InvalidSettingError("resource", problem)
        self.is_claimed = True


def whole_number(field: str, value: object, *, least: int = 1, most: int | None = None) -> int:
    """Return a setting that is a whole number in its range, or say what is wrong with it."""
    # True is an int to Python, and is not what anybody means by a number.
    if type(value) is int and least <= value and (most is None or value <= most):
        return value
    bounds = f"at least {least:,}" if most is None else f"between {least:,} and {most:,}"
    raise InvalidSettingError(field, f"must be a whole number, {bounds}, not {value!r}")
