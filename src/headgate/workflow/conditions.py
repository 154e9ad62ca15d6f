"""Conditions: whether a step runs at all, said in the words of a small expression.

    steps.check.output.score > 0.5 and item.kind in ['hard', 'new']

There are `and`, `or`, `not`, comparisons (chained, too), `in`, literals, lists of them, `len()`,
and the placeholders `item`, `index`, `steps` and `run`. It is written as in Python and never run as
such.

Rule: what is not in that list is refused when the file is read; a condition that was read always
has an answer.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

import msgspec

from headgate.workflow.placeholders import (
    EnvPlaceholder,
    Path,
    Placeholder,
    PlaceholderError,
    View,
    placeholder_of,
    value_at,
)

# The parts of a condition, and what each gives for one run of a step.
#
# Rule: every part has a value, whatever an item or an output holds. What is not there is null;
# comparing the order of what has none, a text with a number or anything with null, is false. True
# and false are no numbers.

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


class Lookup(Expression, frozen=True):
    """The value that a placeholder stands for."""

    placeholder: Placeholder

    def value(self, view: View) -> Any:  # noqa: ANN401
        """Return it, or null."""
        try:
            return value_at(self.placeholder, view)
        except LookupError:
            return None


class ListExpression(Expression, frozen=True):
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


class AllOrAny(Expression, frozen=True):
    """Several conditions, of which all must hold, or any."""

    parts: tuple[Expression, ...]
    needs_all: bool

    def value(self, view: View) -> bool:
        """Tell whether they hold; what decides nothing any more is not looked at."""
        return (all if self.needs_all else any)(part.value(view) for part in self.parts)


class Comparison(Expression, frozen=True):
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


def placeholders_of(expression: Expression) -> Iterator[Placeholder]:
    """Give the placeholders of an expression."""
    if isinstance(expression, Lookup):
        yield expression.placeholder
    for part in expression.parts:
        yield from placeholders_of(part)


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


MAX_LENGTH = 2_000
MAX_DEPTH = 20


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that was found to be readable; `source` is how it was written."""

    source: str
    expression: Expression


class ConditionError(ValueError):
    """A condition cannot be read; the text says what to write."""


def parsed_condition(source: str) -> Condition:
    """Read a condition, or raise `ConditionError`."""
    if len(source) > MAX_LENGTH:
        _refuse(f"has more than {MAX_LENGTH:,} characters; shorten it")
    tree = _tree(source)
    if isinstance(tree, ast.List | ast.Tuple):
        _refuse("is a list, which says nothing; leave out the comma, or write how it compares")
    return Condition(source=source, expression=_expression(tree, MAX_DEPTH))


def holds(condition: Condition, view: View) -> bool:
    """Tell whether a condition holds."""
    try:
        return bool(condition.expression.value(view))
    except RecursionError:
        # Values that are nested very deeply cannot be compared.
        return False


def condition_references(condition: Condition | None) -> Iterator[Placeholder]:
    """Give the placeholders of a condition."""
    return iter(()) if condition is None else placeholders_of(condition.expression)


_MEANT = {"&&": "and", "||": "or", "===": "==", "!": "not"}
_LITERALS = {"true": True, "false": False, "null": None}
_SIGNS: dict[type[ast.cmpop], Sign] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
}


def _tree(source: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            # Python warns of what is refused here anyway, as of comparing a literal with `is`.
            warnings.simplefilter("ignore")
            # In parentheses it may go over several lines.
            return ast.parse(f"(\n{source}\n)", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        for wrong, right in _MEANT.items():
            if wrong in source.replace("!=", "").replace("==", "", wrong != "==="):
                _refuse(f"has {wrong}; write {right} instead")
        example = "steps.check.output > 0.5 and item.kind == 'hard'"
        _refuse(f"is not a condition; write one as {example}")


def _expression(node: ast.expr, depth: int) -> Expression:
    if depth == 0:
        _refuse(f"is nested more than {MAX_DEPTH} deep; write it more simply")
    read = _READERS.get(type(node))
    if read is None:
        _refuse(_refusal(node))
    return read(node, depth - 1)


def _constant(node: ast.Constant, _depth: int) -> Expression:
    if not isinstance(node.value, str | int | float | None):
        _refuse("has a literal that JSON does not have; write a string, a number, true or null")
    return Constant(node.value)


def _unary(node: ast.UnaryOp, depth: int) -> Expression:
    if isinstance(node.op, ast.Not):
        return Not(_expression(node.operand, depth))
    number = _negative(node)
    return Constant(number) if number is not None else _refuse(_refusal(node))


def _negative(node: ast.expr) -> int | float | None:
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    return None


def _listed(node: ast.List | ast.Tuple, depth: int) -> Expression:
    return ListExpression(tuple([_expression(value, depth) for value in node.elts]))


def _joined(node: ast.BoolOp, depth: int) -> Expression:
    values = tuple([_expression(value, depth) for value in node.values])
    return AllOrAny(values, isinstance(node.op, ast.And))


def _compared(node: ast.Compare, depth: int) -> Expression:
    rest: list[tuple[Sign, Expression]] = []
    for sign, value in zip(node.ops, node.comparators, strict=True):
        if type(sign) not in _SIGNS:
            _refuse("has `is`; write == or != instead")
        rest.append((_SIGNS[type(sign)], _expression(value, depth)))
    return Comparison(_expression(node.left, depth), tuple(rest))


def _length(node: ast.Call, depth: int) -> Expression:
    is_len = isinstance(node.func, ast.Name) and node.func.id == "len"
    if not is_len or len(node.args) != 1 or node.keywords:
        _refuse("calls something; there is only len() of one value")
    return Length(_expression(node.args[0], depth))


def _lookup(node: ast.expr, _depth: int) -> Expression:
    if isinstance(node, ast.Name) and node.id in _LITERALS:
        return Constant(_LITERALS[node.id])
    path: list[str | int] = []
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute(value=inner, attr=name):
                path.append(name)
            case ast.Subscript(value=inner, slice=key):
                path.append(_key(key))
            case _:
                _refuse(_refusal(node))
        node = inner
    return Lookup(_known(node.id, tuple(reversed(path))))


def _key(node: ast.expr) -> str | int:
    key = node.value if isinstance(node, ast.Constant) else _negative(node)
    if not isinstance(key, str | int) or isinstance(key, bool):
        _refuse("has brackets with neither a number nor a string; write item[0] or item['a b']")
    return key


def _known(root: str, path: Path) -> Placeholder:
    try:
        placeholder = placeholder_of(root, path)
    except PlaceholderError as error:
        _refuse(str(error))
    if isinstance(placeholder, EnvPlaceholder):
        _refuse("has env, which is not for conditions; let a step print what it depends on")
    return placeholder


_READERS: dict[type[ast.expr], Callable[[Any, int], Expression]] = {
    ast.Constant: _constant,
    ast.UnaryOp: _unary,
    ast.List: _listed,
    ast.Tuple: _listed,
    ast.BoolOp: _joined,
    ast.Compare: _compared,
    ast.Call: _length,
    ast.Name: _lookup,
    ast.Attribute: _lookup,
    ast.Subscript: _lookup,
}


def _refusal(node: ast.expr) -> str:
    match node:
        case ast.BinOp(op=ast.Sub()):
            return "has a minus; write a name with a dash in brackets, as steps['my-step'].output"
        case ast.BinOp() | ast.UnaryOp():
            return "calculates; compare values, and calculate in a step"
    return f"has a {type(node).__name__} in it; there are and, or, not, in, len() and comparisons"


def _refuse(problem: str) -> NoReturn:
    raise ConditionError(problem) from None
