"""YAML as values that know their lines, from a file that nobody has to trust.

Only the parser of PyYAML is used, event by event: it makes no objects of what a file names. Plain
words are read as YAML 1.2 and JSON have them, so `no`, `on`, `010`, `0x1f`, `1:30` and a date are
texts. A number keeps its digits, for amounts that must be exact.

Rule: everything is bounded while it is read: bytes, values, depth, and the size that aliases would
give the whole. Duplicate keys, tags, keys that are no text and further documents are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import yaml

from headgate.core.money import to_micro_usd, to_written_limit_micro_usd
from headgate.core.text import did_you_mean, nearest
from headgate.errors import InvalidAmountError, Problems, WorkflowError
from headgate.providers.http_headers import FRAMING_HEADERS, HEADER_NAME
from headgate.workflow.conditions import (
    Condition,
    ConditionError,
    condition_references,
    parsed_condition,
)
from headgate.workflow.placeholders import (
    EnvPlaceholder,
    Placeholder,
    PlaceholderError,
    Template,
    Text,
    parsed_template,
    parsed_text,
    references,
)

MAX_FILE_BYTES = 16 << 20
MAX_VALUES = 500_000
MAX_CHARACTERS = 32 << 20
"""How long all texts may be together, once aliases are followed."""
MAX_DEPTH = 40

MERGE = "<<"

_TOO_DEEP = f"is nested more than {MAX_DEPTH} deep; write it more simply"

_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_LONGEST_NUMBER = 300
_SHOWN_CHARACTERS = 60
_STARTS = (yaml.SequenceStartEvent, yaml.MappingStartEvent)
_ENDS = (yaml.SequenceEndEvent, yaml.MappingEndEvent)


class Node:
    """One value: where it begins, and how large and deep it is once aliases are followed."""

    __slots__ = ("characters", "depth", "is_open", "line", "values")

    def __init__(self, line: int) -> None:
        self.line = line
        self.is_open = False
        self.depth = 0
        self.values = 1
        self.characters = 0

    def add_size(self, other: Node) -> None:
        """Count what lies in this one."""
        self.values += other.values
        self.characters += other.characters
        self.depth = max(self.depth, other.depth + 1)


class ScalarNode(Node):
    """A text, a number, true, false or null; `text` is how it was written."""

    __slots__ = ("is_plain", "text")

    def __init__(self, line: int, text: str, *, is_plain: bool) -> None:
        super().__init__(line)
        self.characters = len(text)
        self.text = text
        self.is_plain = is_plain

    @property
    def is_null(self) -> bool:
        """Whether it is null, or nothing at all."""
        return self.is_plain and _WORDS.get(self.text, False) is None

    @property
    def value(self) -> str | int | float | bool | None:
        """What it is in JSON; a plain word that JSON does not have is a text."""
        if not self.is_plain:
            return self.text
        if self.text in _WORDS:
            return _WORDS[self.text]
        return _number(self.text)


class ListNode(Node):
    """A list."""

    __slots__ = ("items",)

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.is_open = True
        self.items: list[Node] = []


class ObjectNode(Node):
    """An object; its keys are texts, each there once, and `lines` says where."""

    __slots__ = ("entries", "key", "lines", "merged")

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.is_open = True
        self.entries: dict[str, Node] = {}
        self.lines: dict[str, int] = {}
        self.key: str | None = None
        self.merged: Node | None = None


def read_document(file: str, source: bytes) -> Node:
    """Read a file, or raise `WorkflowError` with the line."""
    return _Builder(file).document(_checked(file, source))


def json_value(node: Node) -> Any:  # noqa: ANN401
    """Return a node as a JSON value."""
    match node:
        case ScalarNode():
            return node.value
        case ListNode():
            return [json_value(item) for item in node.items]
        case ObjectNode():
            return {key: json_value(value) for key, value in node.entries.items()}
    raise TypeError(node)


def _checked(file: str, source: bytes) -> bytes:
    if len(source) > MAX_FILE_BYTES:
        problem = f"has more than {MAX_FILE_BYTES:,} bytes; put items into a JSONL file"
        raise WorkflowError(file, problem)
    try:
        source.decode()
    except UnicodeDecodeError as error:
        raise WorkflowError(
            file, "is not UTF-8; save it as UTF-8", line=_line_at(source, error.start)
        ) from None
    return source.removeprefix(b"\xef\xbb\xbf")


def _line_at(source: bytes, offset: int) -> int:
    return source.count(b"\n", 0, offset) + 1


def _number(text: str) -> str | int | float:
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    number = float(text) if _FLOAT.fullmatch(text) else math.inf
    # JSON has no number that is larger than all others.
    return number if math.isfinite(number) else text


class _Builder:
    """Builds nodes from events."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._anchors: dict[str, Node] = {}
        self._open: list[ListNode | ObjectNode] = []
        self._root: Node | None = None
        self._values = 0

    def document(self, source: bytes) -> Node:
        """Read the one document."""
        documents = 0
        for event in self._events(source):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._refuse(event, "has a second document; leave out what follows ---")
            else:
                self._take(event)
        if self._root is None or _is_empty(self._root):
            raise WorkflowError(self._file, "is empty; write steps")
        return self._root

    def _events(self, source: bytes) -> Iterator[yaml.Event]:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            yield from yaml.parse(source, Loader=loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = None if mark is None else mark.line + 1
            problem = f"is not YAML: {error.problem or error.context}; correct the line"
            if mark is not None and _is_indented_by_tab(source, mark.line):
                problem = "is indented with a tab; indent with spaces, not tabs"
            raise WorkflowError(self._file, problem, line=line) from None
        except yaml.reader.ReaderError as error:
            code = ord(error.character) if isinstance(error.character, str) else error.character
            problem = f"has the character U+{code:04X}, which YAML does not allow"
            raise WorkflowError(
                self._file, f"{problem}; leave it out", line=_line_at(source, error.position)
            ) from None
        except RecursionError:
            raise WorkflowError(self._file, "is nested too deeply; write it more simply") from None

    def _take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self._check_tag(event)
            node = ScalarNode(_line(event), event.value, is_plain=event.implicit[0])
            self._put(event, node, event.anchor)
        elif isinstance(event, _STARTS):
            self._check_tag(event)
            is_list = isinstance(event, yaml.SequenceStartEvent)
            self._begin(event, ListNode(_line(event)) if is_list else ObjectNode(_line(event)))
        elif isinstance(event, _ENDS):
            self._end()
        elif isinstance(event, yaml.AliasEvent):
            self._put(event, self._aliased(event), None)

    def _begin(self, event: Any, node: ListNode | ObjectNode) -> None:  # noqa: ANN401
        if len(self._open) == MAX_DEPTH:
            self._refuse(event, _TOO_DEEP)
        if self._is_key():
            self._refuse(event, "has a key that is not a string; write keys as strings")
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._open.append(node)

    def _end(self) -> None:
        node = self._open.pop()
        node.is_open = False
        if isinstance(node, ObjectNode) and node.merged is not None:
            self._merge(node, node.merged)
        self._attach(node, node.line)

    def _put(self, event: yaml.Event, node: Node, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = node
        if self._is_key():
            self._name(event, node)
        else:
            self._attach(node, _line(event))

    def _is_key(self) -> bool:
        inner = self._open[-1] if self._open else None
        return isinstance(inner, ObjectNode) and inner.key is None

    def _name(self, event: yaml.Event, node: Node) -> None:
        mapping = self._open[-1]
        if not isinstance(mapping, ObjectNode):
            raise TypeError(mapping)
        if not isinstance(node, ScalarNode) or node.is_null:
            self._refuse(event, "has a key that is not a string; write keys as strings")
        if node.text in mapping.entries or (mapping.merged and node.text == MERGE):
            shown = node.text[:_SHOWN_CHARACTERS]
            self._refuse(event, f"has the key {shown!r} twice; keep one of them")
        mapping.key = node.text
        mapping.lines[node.text] = _line(event)
        mapping.characters += len(node.text)

    def _attach(self, node: Node, line: int) -> None:
        if not self._open:
            self._root = node
            return
        outer = self._open[-1]
        outer.add_size(node)
        self._values += 1
        if max(outer.values, self._values) > MAX_VALUES or outer.characters > MAX_CHARACTERS:
            problem = f"has more than {MAX_VALUES:,} values or {MAX_CHARACTERS:,} characters"
            advice = "use fewer aliases, or put items into a JSONL file"
            raise WorkflowError(self._file, f"{problem}; {advice}", line=line)
        if outer.depth > MAX_DEPTH:
            raise WorkflowError(self._file, _TOO_DEEP, line=line)
        if isinstance(outer, ListNode):
            outer.items.append(node)
        elif outer.key == MERGE:
            outer.merged, outer.key = node, None
        elif outer.key is not None:
            outer.entries[outer.key] = node
            outer.key = None

    def _merge(self, mapping: ObjectNode, merged: Node) -> None:
        sources = merged.items if isinstance(merged, ListNode) else [merged]
        for source in sources:
            if not isinstance(source, ObjectNode):
                problem = "<< takes a mapping or a list of them; write <<: *name"
                raise WorkflowError(self._file, problem, line=merged.line)
            for key, value in source.entries.items():
                mapping.entries.setdefault(key, value)
                mapping.lines.setdefault(key, source.lines[key])

    def _aliased(self, event: yaml.AliasEvent) -> Node:
        anchor = event.anchor or ""
        node = self._anchors.get(anchor)
        name = anchor[:_SHOWN_CHARACTERS]
        if node is None:
            self._refuse(event, f"*{name} is an alias of nothing; write &{name} before it")
        if node.is_open:
            self._refuse(event, f"*{name} lies in itself; leave it out")
        return node

    def _check_tag(self, event: Any) -> None:  # noqa: ANN401
        if event.tag is not None:
            shown = event.tag[:_SHOWN_CHARACTERS]
            self._refuse(event, f"has the tag {shown!r}; leave it out, and quote strings")

    def _refuse(self, event: yaml.Event, problem: str) -> NoReturn:
        raise WorkflowError(self._file, problem, line=_line(event))


def _is_indented_by_tab(source: bytes, index: int) -> bool:
    lines = source.splitlines()
    if index >= len(lines):
        return False
    line = lines[index]
    return b"\t" in line[: len(line) - len(line.lstrip())]


def _line(event: Any) -> int:  # noqa: ANN401
    line: int = event.start_mark.line + 1
    return line


def _is_empty(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.is_null


# A value of a workflow file together with where it stands, and what it is read as.
#
# Rule: a value that cannot be read is a `WorkflowError` of one line with its file, line and key,
# and with what to write instead. A text that may be a secret is not repeated.

_VALUE_CHARACTERS = 40
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
        errors = Problems(WorkflowError)
        for key, value in entries.items():
            if key not in known:
                listed = f"write one of {', '.join(known)}"
                advice = did_you_mean(nearest(key, known), listed)
                with errors.collected():
                    value.refuse(f"is not a key of {of}; {advice}")
        errors.check()
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
            self._wrong("a string")
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
        """Return a text with placeholders."""
        return self._parsed(parsed_text, self.word())

    def template(self) -> Template:
        """Return a JSON value whose strings may have placeholders."""
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
        except (PlaceholderError, ConditionError) as error:
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
        return _shown(node.text) if shows_text else "a string"
    return node.text[:_VALUE_CHARACTERS]


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


def _shown(text: str) -> str:
    cut = text[:_VALUE_CHARACTERS]
    return repr(cut if cut == text else f"{cut}…")


# Texts of a step as they are read, with every placeholder that they use and where it was written.
#
# Names of steps are looked up when all steps are read, so the placeholders wait here until then.
# Rule: a variable of the environment stands only in what an executor fills; all else is kept in a
# store.

_ADDRESS = re.compile(r"https?://[^/?#@\s]", re.IGNORECASE)
_CREDENTIALS = re.compile(r"https?://[^/?#]*@", re.IGNORECASE)
_BEGINNING = re.compile(r"https?://", re.IGNORECASE)


class TextReader:
    """Reads the texts of one step."""

    def __init__(self) -> None:
        self.placeholders: list[tuple[Value, Placeholder]] = []

    def text(self, value: Value) -> Text:
        """Read a text that an executor fills, so it may have variables."""
        text = value.text()
        self._note(value, references(text))
        return text

    def stored_text(self, value: Value) -> Text:
        """Read a text that is kept in the store of the run once it is filled."""
        text = value.text()
        _refuse_variables(value, references(text))
        self._note(value, references(text))
        return text

    def template(self, value: Value) -> Template:
        """Read a JSON value, which is kept in the store of the run once it is filled."""
        template = value.template()
        _refuse_variables(value, references(template))
        self._note(value, references(template))
        return template

    def condition(self, value: Value) -> Condition:
        """Read a condition."""
        condition = value.condition()
        self._note(value, condition_references(condition))
        return condition

    def _note(self, value: Value, placeholders: Iterable[Placeholder]) -> None:
        self.placeholders += [
            (value, placeholder)
            for placeholder in placeholders
            if not isinstance(placeholder, EnvPlaceholder)
        ]


def only_variables(value: Value) -> Text:
    """Read a text that is the same for every run of every step."""
    text = value.text()
    if not all(isinstance(placeholder, EnvPlaceholder) for placeholder in references(text)):
        value.refuse("is the same for all steps; only {env.NAME} may stand in it")
    return text


def read_url(value: Value, read_text: Callable[[Value], Text]) -> Text:
    """Read the address of a request."""
    parts = read_text(value).parts
    beginning = parts[0] if parts else ""
    if isinstance(beginning, str):
        is_address = _ADDRESS.match(beginning)
        # The host may be a placeholder, and then only the scheme is there to be looked at.
        is_scheme = len(parts) > 1 and _BEGINNING.fullmatch(beginning)
        if not is_address and not is_scheme:
            value.refuse("is not an address; write one as https://host/path")
        if _CREDENTIALS.match(beginning):
            value.refuse("has a user name or a password; put them into headers")
    return Text(parts=parts, is_url=True)


def read_headers(value: Value, read_text: Callable[[Value], Text]) -> dict[str, Text]:
    """Read headers, each once whatever its case."""
    headers: dict[str, Text] = {}
    for name, entry in value.entries("headers").items():
        if HEADER_NAME.fullmatch(name) is None:
            entry.refuse("is not the name of a header; write it with letters and dashes")
        if name.lower() in FRAMING_HEADERS:
            entry.refuse("is set for every request; leave it out")
        if name.lower() in map(str.lower, headers):
            entry.refuse("is there twice, in another case; keep one of them")
        headers[name] = read_text(entry)
    return headers


def _refuse_variables(value: Value, placeholders: Iterable[Placeholder]) -> None:
    for placeholder in placeholders:
        if isinstance(placeholder, EnvPlaceholder):
            problem = f"{{env.{placeholder.name}}} cannot stand here: this is kept in the store"
            value.refuse(f"{problem} of the run; put it into env, headers or the command")
