"""A value of a workflow file together with where it stands, and what it is read as.

Rule: a value that cannot be read is a `WorkflowError` of one line with its file, line and key, and
with what to write instead. A text that may be a secret is not repeated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from headgate.core.money import to_micro_usd, to_written_limit_micro_usd
from headgate.errors import InvalidAmountError, WorkflowError
from headgate.workflow.conditions import Condition, ConditionError, parsed_condition
from headgate.workflow.document import ListNode, Node, ObjectNode, ScalarNode, json_value
from headgate.workflow.places import PlaceError, parsed_template, parsed_text
from headgate.workflow.texts import Template, Text

_SHOWN_CHARACTERS = 40
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhd]?)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}

Parsed = TypeVar("Parsed")


class Value:
    """One value of a file; a key path is made of keys and of numbers of list items."""

    __slots__ = ("_file", "_node", "_path", "line")

    def __init__(
        self, file: str, node: Node, path: tuple[str | int, ...] = (), line: int | None = None
    ) -> None:
        self._file = file
        self._node = node
        self._path = path
        self.line = node.line if line is None else line
        """Where its key stands, or where it begins itself, from 1."""

    @property
    def key(self) -> str:
        """Its key path, as `steps[3].when`."""
        return key_path(self._path)

    @property
    def is_list(self) -> bool:
        """Whether it is a list."""
        return isinstance(self._node, ListNode)

    @property
    def is_object(self) -> bool:
        """Whether it has keys."""
        return isinstance(self._node, ObjectNode)

    @property
    def is_text(self) -> bool:
        """Whether it is a text, or a number that can be read as one; null is neither."""
        return isinstance(self._node, ScalarNode) and not self._node.is_null

    def refuse(self, problem: str) -> NoReturn:
        """Raise the error that says what is wrong with it."""
        raise WorkflowError(self._file, problem, line=self.line, key=self.key) from None

    def fields(self, known: Collection[str], of: str) -> dict[str, Value]:
        """Return what lies in it by its keys, all of which must be known."""
        if not self.is_object:
            self._wrong(f"a mapping with the keys of {of}")
        entries = self.entries(of)
        for key, value in entries.items():
            if key not in known:
                close = get_close_matches(key[:_SHOWN_CHARACTERS].lower(), known, n=1)
                listed = f"write one of {', '.join(known)}"
                advice = f"did you mean {close[0]}?" if close else listed
                value.refuse(f"is not a key of {of}; {advice}")
        return entries

    def entries(self, of: str) -> dict[str, Value]:
        """Return what lies in it by keys that the file chose."""
        node = self._node
        if not isinstance(node, ObjectNode):
            self._wrong(f"a mapping of {of}")
        return {
            key: Value(self._file, inner, (*self._path, key), node.lines[key])
            for key, inner in node.entries.items()
        }

    def items(self, of: str) -> list[Value]:
        """Return the items of a list."""
        if not isinstance(self._node, ListNode):
            self._wrong(f"a list of {of}")
        nodes = enumerate(self._node.items)
        return [Value(self._file, node, (*self._path, number)) for number, node in nodes]

    def word(self) -> str:
        """Return a text as it was written: `no`, `010` and `2024-01-01` too."""
        if not isinstance(self._node, ScalarNode) or self._node.is_null:
            self._wrong("a text")
        if "\0" in self._node.text:
            self.refuse("has a null character; leave it out")
        return self._node.text

    def words(self, of: str) -> tuple[str, ...]:
        """Return a list of texts; one text alone is a list of one."""
        if not self.is_list:
            return (self.word(),)
        return tuple(item.word() for item in self.items(of))

    def name(self, pattern: re.Pattern[str], made_of: str, *, most: int) -> str:
        """Return a text that is a name."""
        name = self.word()
        if len(name) > most:
            self.refuse(f"has {len(name)} characters, at most {most} are kept; shorten it")
        if pattern.fullmatch(name) is None:
            self.refuse(f"{_shown(name)} is no name here; {made_of}")
        return name

    def choice(self, words: tuple[str, ...]) -> str:
        """Return one of these words."""
        word = self._node.text if isinstance(self._node, ScalarNode) else None
        if word not in words:
            self._wrong(f"one of {', '.join(words)}", shows_text=True)
        return word

    def flag(self) -> bool:
        """Return true or false."""
        value = self._scalar()
        if not isinstance(value, bool):
            self._wrong("true or false", shows_text=True)
        return value

    def whole(self, least: int, most: int) -> int:
        """Return a whole number."""
        value = self._scalar()
        if type(value) is not int or not least <= value <= most:
            self._wrong(f"a whole number from {least:,} to {most:,}", shows_text=True)
        return value

    def number(self, least: float, most: float) -> float:
        """Return a number."""
        value = self._scalar()
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        number = float(value or 0) if is_number else math.nan
        if not least <= number <= most:
            self._wrong(f"a number from {_figure(least)} to {_figure(most)}", shows_text=True)
        return number

    def seconds(self, least: float, most: float) -> float:
        """Return a length of time: seconds, or a number with its unit."""
        node = self._node
        found = _DURATION.fullmatch(node.text) if isinstance(node, ScalarNode) else None
        if found is None:
            self._wrong("seconds, or a time such as 30s, 5m or 2h", shows_text=True)
        seconds = float(found[1]) * _UNITS[found[2]]
        if not least <= seconds <= most:
            self.refuse(f"must be from {_figure(least)} to {_figure(most)} seconds")
        return seconds

    def amount(self) -> int:
        """Return dollars that one reservation can hold, exactly, in micro-dollars."""
        return self._money(to_micro_usd)

    def limit(self) -> int:
        """Return dollars that a budget can be limited to, exactly, in micro-dollars."""
        return self._money(to_written_limit_micro_usd)

    def dollars(self) -> str:
        """Return dollars as they were written, checked as an amount."""
        self.amount()
        return self.word()

    def text(self) -> Text:
        """Return a text with places."""
        return self._parsed(parsed_text, self.word())

    def template(self) -> Template:
        """Return a JSON value whose strings may have places."""
        return self._parsed(parsed_template, self.plain())

    def condition(self) -> Condition:
        """Return a condition."""
        return self._parsed(parsed_condition, self.word())

    def plain(self) -> Any:  # noqa: ANN401
        """Return it as a JSON value."""
        return json_value(self._node)

    def _parsed(self, parse: Callable[[Any], Parsed], value: Any) -> Parsed:  # noqa: ANN401
        try:
            return parse(value)
        except (PlaceError, ConditionError) as error:
            self.refuse(str(error))

    def _money(self, to_micro: Callable[..., int]) -> int:
        text = self._node.text if isinstance(self._node, ScalarNode) else ""
        if not text or isinstance(self._scalar(), bool):
            self._wrong("an amount in dollars, as 12.50")
        if text.startswith("-"):
            self.refuse("must not be negative; write dollars as 12.50")
        try:
            return to_micro(text)
        except InvalidAmountError as error:
            self.refuse(error.problem)

    def _scalar(self) -> str | int | float | bool | None:
        return self._node.value if isinstance(self._node, ScalarNode) else None

    def _wrong(self, wanted: str, *, shows_text: bool = False) -> NoReturn:
        self.refuse(f"must be {wanted}, not {_described(self._node, shows_text)}")


def key_path(path: tuple[str | int, ...]) -> str:
    """Write a key path: `steps[3].env.PATH`."""
    written = ""
    for part in path:
        if isinstance(part, int):
            written += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            written += f".{part}" if written else part
        else:
            written += f"[{_shown(part)}]"
    return written


def _is_null(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.is_null


def _described(node: Node, shows_text: bool) -> str:  # noqa: FBT001
    if isinstance(node, ListNode):
        return "a list"
    if isinstance(node, ObjectNode):
        return "a mapping"
    if not isinstance(node, ScalarNode) or _is_null(node):
        return "null"
    if isinstance(node.value, str):
        return _shown(node.text) if shows_text else "a text"
    return node.text[:_SHOWN_CHARACTERS]


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


def _shown(text: str) -> str:
    cut = text[:_SHOWN_CHARACTERS]
    return repr(cut if cut == text else f"{cut}…")
