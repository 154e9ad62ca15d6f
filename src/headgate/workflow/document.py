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
from collections.abc import Iterator
from typing import Any, NoReturn

import yaml

from headgate.errors import WorkflowError

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
            self._refuse(event, "has a key that is no text; write keys as texts")
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
            self._refuse(event, "has a key that is no text; write keys as texts")
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
            self._refuse(event, f"has the tag {shown!r}; leave it out, and quote what is a text")

    def _refuse(self, event: yaml.Event, problem: str) -> NoReturn:
        raise WorkflowError(self._file, problem, line=_line(event))


def _line(event: Any) -> int:  # noqa: ANN401
    line: int = event.start_mark.line + 1
    return line


def _is_empty(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.is_null
