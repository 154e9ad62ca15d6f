"""Task ids: they sort by creation, also within a millisecond, and nobody can guess them.

An id is `tsk_` and 26 characters: the milliseconds since 1970 in the first ten, then randomness.
Within one millisecond an id is the one before plus a small random step, so that "earlier wins" is
true of ids too.
"""

from __future__ import annotations

import os

PREFIX = "tsk_"
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_CHARACTERS = frozenset(_ALPHABET)
_PAIRS = [high + low for high in _ALPHABET for low in _ALPHABET]
_RANDOM_BITS = 80
_STEP_BYTES = 4
_STOCK_BYTES = 4_096
_LENGTH_BITS = 130
_TIME_CHARACTERS = 10
_HALF_BITS = 40
_HALF_CHARACTERS = 8
_HALF_MASK = (1 << _HALF_BITS) - 1


class TaskIds:
    """Makes ids for one process; give it the clock that the process goes by."""

    def __init__(self) -> None:
        self._last = 0
        self._start = (-1, "")
        self._random = b""
        self._used = 0

    def new(self, now: float) -> str:
        """Return an id that is larger than every one before it, whatever the clock does."""
        earliest = int(now * 1000) << _RANDOM_BITS
        if earliest > self._last:
            self._last = earliest | self._draw(_RANDOM_BITS // 8)
        else:
            self._last += 1 + self._draw(_STEP_BYTES)
        start = self._last >> _HALF_BITS
        if start != self._start[0]:
            # Many ids are made in one millisecond, and differ by small steps.
            self._start = (start, PREFIX + _text(self._last)[:-_HALF_CHARACTERS])
        return self._start[1] + _half_text(self._last & _HALF_MASK)

    def _draw(self, size: int) -> int:
        # Drawn in stock: each question to the system lets another thread run first.
        if self._used + size > len(self._random):
            self._random, self._used = os.urandom(_STOCK_BYTES), 0
        self._used += size
        return int.from_bytes(self._random[self._used - size : self._used])


def first_id_at(seconds: float) -> str:
    """Return what no id of this time or later is below, and every earlier one is."""
    return PREFIX + _text(max(0, int(seconds * 1000)) << _RANDOM_BITS)


def seconds_of(task_id: str) -> float | None:
    """Return the time that an id was made at; None of one that was made elsewhere."""
    text = task_id.removeprefix(PREFIX)
    if text == task_id or len(text) != _LENGTH_BITS // 5 or not _CHARACTERS.issuperset(text):
        return None
    milliseconds = 0
    for character in text[:_TIME_CHARACTERS]:
        milliseconds = milliseconds * 32 + _ALPHABET.index(character)
    return milliseconds / 1000


def _half_text(low: int) -> str:
    """Return the last characters, which are the lower half of the randomness."""
    pairs = _PAIRS
    return (
        f"{pairs[low >> 30]}{pairs[(low >> 20) & 1023]}"
        f"{pairs[(low >> 10) & 1023]}{pairs[low & 1023]}"
    )


def _text(number: int) -> str:
    return "".join(
        [_PAIRS[(number >> shift) & 1023] for shift in range(_LENGTH_BITS - 10, -10, -10)]
    )
