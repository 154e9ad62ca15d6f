"""The parts of a condition, and what each gives for one run of a step.

Rule: every part has a value, whatever an item or an output holds. What is not there is null;
comparing the order of what has none, a text with a number or anything with null, is false. True
and false are no numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from headgate.workflow.texts import Place, View, value_at

Sign = Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"]


class Expression(msgspec.Struct, frozen=True):
    """A part of a condition."""

    def value(self, view: View) -> Any:  # noqa: ANN401
        """Return what it is for one run of a step."""
        raise TypeError(view)

    @property
    def parts(self) -> tuple[Expression, ...]:
        """What it is made of."""
        return ()


class Constant(Expression, frozen=True):
    """A literal."""

    literal: Any

    def value(self, view: View) -> Any:  # noqa: ANN401, ARG002
        """Return it."""
        return self.literal


class Found(Expression, frozen=True):
    """What a place stands for."""

    place: Place

    def value(self, view: View) -> Any:  # noqa: ANN401
        """Return it, or null."""
        try:
            return value_at(self.place, view)
        except LookupError:
            return None


class Listed(Expression, frozen=True):
    """A list of values."""

    parts: tuple[Expression, ...]

    def value(self, view: View) -> list[Any]:
        """Return the list."""
        return [part.value(view) for part in self.parts]


class Length(Expression, frozen=True):
    """How long a text or a list is, or how many keys an object has; else null."""

    of: Expression

    def value(self, view: View) -> int | None:
        """Return it."""
        value = self.of.value(view)
        return len(value) if isinstance(value, str | list | dict) else None

    @property
    def parts(self) -> tuple[Expression, ...]:
        """What is measured."""
        return (self.of,)


class Not(Expression, frozen=True):
    """The opposite."""

    of: Expression

    def value(self, view: View) -> bool:
        """Return it."""
        return not self.of.value(view)

    @property
    def parts(self) -> tuple[Expression, ...]:
        """What does not hold."""
        return (self.of,)


class Joined(Expression, frozen=True):
    """Several conditions, of which all must hold, or any."""

    parts: tuple[Expression, ...]
    needs_all: bool

    def value(self, view: View) -> bool:
        """Tell whether they hold; what decides nothing any more is not looked at."""
        return (all if self.needs_all else any)(part.value(view) for part in self.parts)


class Compared(Expression, frozen=True):
    """A chain of comparisons, as `0 < x < 1`."""

    first: Expression
    rest: tuple[tuple[Sign, Expression], ...]

    def value(self, view: View) -> bool:
        """Tell whether all of them hold."""
        left = self.first.value(view)
        for sign, part in self.rest:
            right = part.value(view)
            if not _COMPARISONS[sign](left, right):
                return False
            left = right
        return True

    @property
    def parts(self) -> tuple[Expression, ...]:
        """What is compared."""
        return (self.first, *(part for _, part in self.rest))


def places_of(expression: Expression) -> Iterator[Place]:
    """Give the places of an expression."""
    if isinstance(expression, Found):
        yield expression.place
    for part in expression.parts:
        yield from places_of(part)


def _is_equal(left: object, right: object) -> bool:
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _is_in(left: object, right: object) -> bool:
    if isinstance(right, str | dict):
        return isinstance(left, str) and left in right
    return isinstance(right, list) and any(_is_equal(left, value) for value in right)


def _ordered(test: Callable[[Any, Any], bool]) -> Callable[[object, object], bool]:
    def compare(left: object, right: object) -> bool:
        are_texts = isinstance(left, str) and isinstance(right, str)
        return (are_texts or (_is_number(left) and _is_number(right))) and test(left, right)

    return compare


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_COMPARISONS: dict[Sign, Callable[[object, object], bool]] = {
    "==": _is_equal,
    "!=": lambda left, right: not _is_equal(left, right),
    "<": _ordered(operator.lt),
    "<=": _ordered(operator.le),
    ">": _ordered(operator.gt),
    ">=": _ordered(operator.ge),
    "in": _is_in,
    "not in": lambda left, right: not _is_in(left, right),
}
