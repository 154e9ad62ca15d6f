"""How deep JSON is nested: beyond some depth readers give up, each at a depth of its own.

Rule: a value is judged without recursion, so that judging it cannot fail where reading it would.
"""

from __future__ import annotations

from itertools import chain

_OPENING = (b"[", b"{")
_NESTED = (dict, list)


def is_deeper(text: bytes, value: object, *, levels: int) -> bool:
    """Tell whether a value, which was read from this text, is nested deeper than so many levels."""
    # Most texts have fewer brackets than that, which is soon counted.
    return sum(map(text.count, _OPENING)) > levels and _goes_below(value, levels)


def _goes_below(value: object, levels: int) -> bool:
    # Level by level, and in C as far as it goes: a body may have hundreds of thousands of values.
    level: list[object] = [value]
    for _ in range(levels):
        arrays = chain.from_iterable([one for one in level if isinstance(one, list)])
        objects = chain.from_iterable([one.values() for one in level if isinstance(one, dict)])
        level = [one for one in chain(arrays, objects) if isinstance(one, _NESTED)]
        if not level:
            return False
    return True
