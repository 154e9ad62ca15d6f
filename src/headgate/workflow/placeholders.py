"""Texts and JSON values with placeholders for what is known only when a step runs.

They are `{item}`, `{item.path}`, `{index}`, `{steps.ID.FIELD.path}`, `{run.id}`, `{run.name}` and
`{env.NAME}`. A string of a template that is nothing but one placeholder gives its JSON value;
within a longer text a string stands as it is, all else as JSON.

Rule: a value of the environment never gets into what is stored. It stays a named part of a filled
text until an executor reads it, so what an item or an output says is never looked up. What is
filled in is never read again: a value with braces in it stays what it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NoReturn, Protocol, TypeGuard
from urllib.parse import quote

import msgspec

from headgate.core.text import did_you_mean, nearest

Path = tuple[str | int, ...]
"""Keys of objects and numbers in lists (from the end, if negative), outermost first."""


class ItemPlaceholder(msgspec.Struct, frozen=True, kw_only=True, tag="item"):
    """The item, or what lies in it."""

    path: Path = ()


class IndexPlaceholder(msgspec.Struct, frozen=True, kw_only=True, tag="index"):
    """The number of the item, from 0."""


class StepPlaceholder(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """A field of another step, such as its output, or what lies in it."""

    step: str
    field: str
    path: Path = ()


class RunPlaceholder(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """The id of the run, or the name of its workflow."""

    field: str


class EnvPlaceholder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="env"):
    """A variable of the environment; only an endpoint that is always there has a default."""

    name: str
    default: str | None = None


Placeholder = ItemPlaceholder | IndexPlaceholder | StepPlaceholder | RunPlaceholder | EnvPlaceholder


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A text as its parts: what is written, and placeholders.

    In a URL, what is filled in behind its beginning is percent-encoded, so that it stays one part
    of a path or a query.
    """

    parts: tuple[str | Placeholder, ...]
    is_url: bool = False


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON value whose strings are texts; what has no placeholder in it is kept as it is."""

    value: Any


FilledText = str | tuple[str | EnvPlaceholder, ...]
"""A text whose placeholders are filled, all but those of the environment."""


class View(Protocol):
    """What placeholders are filled with, for one run of one step."""

    @property
    def item(self) -> Any:  # noqa: ANN401
        """The item; None where there is none."""

    @property
    def index(self) -> int:
        """The number of the item."""

    @property
    def run(self) -> dict[str, str]:
        """The id and the name of the run."""

    def field(self, step: str, name: str) -> Any:  # noqa: ANN401
        """Return a field of another step that has ended, such as its output or its status."""


MAX_COMPARED = 100
"""How many keys of a value are compared with a wrong one, and how many characters of it."""


class UnfilledError(Exception):
    """A placeholder has no value; the text is the error of this run of the step."""


def as_string(text: Text) -> Text:
    """Return a text that fills a template with a string, even where it is but one placeholder."""
    is_one_placeholder = len(text.parts) == 1 and not isinstance(text.parts[0], str)
    return Text(parts=("", *text.parts)) if is_one_placeholder else text


MAX_FILLED_BYTES = 8 << 20
"""How much one run of a step may be filled to, all of its texts and values together.

A short text may name a large output many times, so what a file says does not bound it.
"""


class FilledBytes:
    """Counts what is filled for one run of a step, before it is put together."""

    def __init__(self, most: int = MAX_FILLED_BYTES) -> None:
        self.most = most
        self.count = 0

    def add(self, count: int, placeholder: Placeholder) -> None:
        """Count a value that was looked up; raise `UnfilledError` where it is too much."""
        self.count += count
        if self.count > self.most:
            written = placeholder_text(placeholder)
            problem = f"the step is filled to more than {self.most:,} bytes at {written}; use less"
            raise UnfilledError(problem)


def fill(text: Text, view: View, filled_bytes: FilledBytes | None = None) -> FilledText:
    """Fill a text; `UnfilledError` for a placeholder without a value, or with too large a one."""
    filled_bytes = filled_bytes or FilledBytes()
    if all(map(_is_written, text.parts)):
        return "".join(filter(_is_written, text.parts))
    # A placeholder with nothing before it is where an address begins.
    filled = [
        _filled(part, view, filled_bytes, is_encoded=text.is_url and number > 0)
        for number, part in enumerate(text.parts)
    ]
    if any(isinstance(part, EnvPlaceholder) for part in filled):
        return tuple(part for part in filled if part != "")
    return "".join(filter(_is_written, filled))


def fill_template(template: Template, view: View, filled_bytes: FilledBytes | None = None) -> Any:  # noqa: ANN401
    """Fill a JSON value; `UnfilledError` as for a text."""
    filled_bytes = filled_bytes or FilledBytes()
    return _filled_value(template.value, view, filled_bytes)


def with_variables(text: FilledText, value_of: Callable[[EnvPlaceholder], str]) -> str:
    """Put the values of variables into a filled text."""
    if isinstance(text, str):
        return text
    return "".join([part if isinstance(part, str) else value_of(part) for part in text])


def references(value: Text | Template | None) -> Iterator[Placeholder]:
    """Give the placeholders of a text or a template."""
    waiting: list[Any] = [value.value if isinstance(value, Template) else value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Text):
            yield from (part for part in found.parts if not isinstance(part, str))
        elif isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found


def value_at(placeholder: Placeholder, view: View) -> Any:  # noqa: ANN401
    """Return what a placeholder stands for; `LookupError` if there is nothing.

    What would lie in null is null: a step that did not end well has no output.
    """
    match placeholder:
        case ItemPlaceholder(path=path):
            return found_in(view.item, path)
        case StepPlaceholder(step=step, field=field, path=path):
            return found_in(view.field(step, field), path)
        case IndexPlaceholder():
            return view.index
        case RunPlaceholder(field=field):
            return view.run[field]
        case EnvPlaceholder():
            return placeholder


def found_in(value: Any, path: Path) -> Any:  # noqa: ANN401
    """Follow a path into a JSON value, or raise `LookupError`."""
    for part in path:
        if value is None:
            return None
        is_there = isinstance(value, dict if isinstance(part, str) else list)
        try:
            value = value[part] if is_there else None
        except LookupError:
            is_there = False
        if not is_there:
            raise LookupError(part, _meant(part, value))
    return value


def _meant(part: str | int, value: Any) -> str:  # noqa: ANN401
    """Return the key that somebody may have meant, for an error; empty if none is close."""
    if not isinstance(part, str) or not isinstance(value, dict):
        return ""
    return nearest(part, islice(value, MAX_COMPARED))


def placeholder_text(placeholder: Placeholder) -> str:
    """Write a placeholder as a file does."""
    match placeholder:
        case ItemPlaceholder(path=path):
            return f"{{item{_path_text(path)}}}"
        case StepPlaceholder(step=step, field=field, path=path):
            return f"{{steps.{step}.{field}{_path_text(path)}}}"
        case RunPlaceholder(field=field):
            return f"{{run.{field}}}"
        case EnvPlaceholder(name=name):
            return f"{{env.{name}}}"
        case IndexPlaceholder():
            return "{index}"


def _path_text(path: Path) -> str:
    return "".join([_key_text(part) if isinstance(part, str) else f"[{part}]" for part in path])


def _key_text(key: str) -> str:
    is_plain = key.isascii() and key.replace("-", "_").isidentifier()
    return f".{key}" if is_plain else f"[{msgspec.json.encode(key).decode()}]"


def _is_written(part: str | Placeholder) -> TypeGuard[str]:
    return isinstance(part, str)


def _filled(
    part: str | Placeholder, view: View, filled_bytes: FilledBytes, *, is_encoded: bool
) -> str | EnvPlaceholder:
    if isinstance(part, str | EnvPlaceholder):
        return part
    value = look_up(part, view)
    if isinstance(value, str):
        filled_bytes.add(len(value), part)
        text = value
    else:
        text = msgspec.json.encode(value).decode()
        filled_bytes.add(len(text), part)
    return quote(text, safe="", errors="replace") if is_encoded else text


def _filled_value(value: Any, view: View, filled_bytes: FilledBytes) -> Any:  # noqa: ANN401
    if isinstance(value, Text):
        if len(value.parts) == 1 and not isinstance(value.parts[0], str):
            found = look_up(value.parts[0], view)
            if isinstance(found, str | list | dict):
                size = len(found) if isinstance(found, str) else len(msgspec.json.encode(found))
                filled_bytes.add(size, value.parts[0])
            return found
        return fill(value, view, filled_bytes)
    if isinstance(value, dict):
        return {key: _filled_value(inner, view, filled_bytes) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled_value(inner, view, filled_bytes) for inner in value]
    return value


def look_up(placeholder: Placeholder, view: View) -> Any:  # noqa: ANN401
    """Return what a placeholder stands for, or raise `UnfilledError` with what is missing."""
    try:
        return value_at(placeholder, view)
    except LookupError as error:
        missing, meant = error.args if len(error.args) > 1 else (*error.args, "")
        written = placeholder_text(placeholder)
        problem = f"{written} has nothing to be filled with: there is no {missing!r}"
        raise UnfilledError(problem + (f"; {did_you_mean(meant)}" if meant else "")) from None


# Placeholders as a file writes them: found in texts and in JSON values, and told from other braces.
#
# `{item.name}` is a placeholder. `{itm}` looks like one and is refused, because a prompt with a
# misspelt placeholder would be paid for; `{{itm}}` is the text `{itm}`, as in Python's formats. All
# other braces, such as those of JSON in a prompt, are text.
#
# Rule: whatever is refused is refused here, in words; a `PlaceholderError` has no line and no key.

ROOTS = ("item", "index", "steps", "run", "env")
"""How placeholders begin."""
RUN_FIELDS = ("id", "name")
ONE_RUN_FIELDS = ("output", "result", "status", "error", "cost_usd")
"""What is known of one run of a step."""
ALL_RUNS_FIELDS = ("outputs", "results", "done", "failed", "skipped", "status", "cost_usd")
"""What is known of all runs of a step with `foreach`, from outside of it."""
STEP_FIELDS = tuple(dict.fromkeys((*ONE_RUN_FIELDS, *ALL_RUNS_FIELDS)))

_SHOWN_CHARACTERS = 60
_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
_KEY = r"\.([A-Za-z0-9_-]+)"
_NUMBER = r"\[(-?[0-9]{1,9})\]"
_QUOTED = r"""\[("(?:[^"\\{}]|\\.)*"|'[^'\\{}]*')\]"""
_PART = re.compile(f"{_KEY}|{_NUMBER}|{_QUOTED}")
_SHAPE = re.compile(rf"({_NAME})((?:{_KEY}|{_NUMBER}|{_QUOTED})*)")
_MEANT = re.compile(rf"\s*(?:{'|'.join(ROOTS)})\s*(?:[.\[].*)?")
# A run of braces is looked at from its beginning alone, and no part of it is given back: a text of
# nothing but braces is read once, and not once for each of them.
_BRACES = re.compile(r"(?<!\{)(\{++)([^{}]*+)(\}++)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class PlaceholderError(ValueError):
    """What looks like a placeholder is none; the text says what to write."""


def parsed_text(source: str) -> Text:
    """Read a text with placeholders, or raise `PlaceholderError`."""
    if "{" not in source:
        return Text(parts=(source,) if source else ())
    parts: list[str | Placeholder] = []
    end = 0
    for match in _BRACES.finditer(source):
        parts += [source[end : match.start()], *_parts(match)]
        end = match.end()
    return Text(parts=_joined([*parts, source[end:]]))


def parsed_template(value: Any) -> Template:  # noqa: ANN401
    """Read a JSON value whose strings may have placeholders, or raise `PlaceholderError`."""
    return Template(value=_parsed_value(value))


def parsed_placeholder(source: str) -> Placeholder:
    """Read what stands between the braces of a placeholder, or raise `PlaceholderError`."""
    shape = _SHAPE.fullmatch(source)
    if shape is None:
        problem = "is not written as a placeholder; write {item.name}, {item[0]} or {item['a b']}"
        _refuse(f"{shown(source)} {problem}, without spaces")
    try:
        return placeholder_of(shape[1], _path(shape[2]))
    except PlaceholderError as error:
        _refuse(f"{shown(source)}: {error}, or {{{shown(source)}}} for the text")


def placeholder_of(root: str, path: Path) -> Placeholder:
    """Return the placeholder that a root and a path name, or raise `PlaceholderError`."""
    if root not in ROOTS:
        meant = nearest(root, ROOTS) or f"one of {', '.join(ROOTS)}"
        _refuse(f"{root[:_SHOWN_CHARACTERS]!r} is not known; write {meant}")
    return _ROOT_PARSERS[root](path)


def shown(source: str) -> str:
    """Return a placeholder that is none as far as it fits into a message."""
    cut = source[:_SHOWN_CHARACTERS]
    return f"{{{cut}}}" if cut == source else f"{{{cut}…}}"


def _refuse(problem: str) -> NoReturn:
    raise PlaceholderError(problem) from None


def _parts(match: re.Match[str]) -> list[str | Placeholder]:
    """Return braces around a name as their parts: pairs are braces, a last one is a placeholder.

    Braces that have no counterpart stand for themselves.
    """
    name = match[2]
    if _SHAPE.fullmatch(name) is None and _MEANT.fullmatch(name) is None:
        return [match[0]]
    opening, closing = len(match[1]), len(match[3])
    paired = min(opening, closing)
    kept = paired // 2
    inner: str | Placeholder = parsed_placeholder(name) if paired % 2 else name
    return ["{" * (opening - paired + kept), inner, "}" * (closing - paired + kept)]


def _joined(parts: list[str | Placeholder]) -> tuple[str | Placeholder, ...]:
    joined: list[str | Placeholder] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        elif part != "":
            joined.append(part)
    return tuple(joined)


def _parsed_value(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, str):
        text = parsed_text(value)
        is_written = all(isinstance(part, str) for part in text.parts)
        return "".join(map(str, text.parts)) if is_written else text
    if isinstance(value, dict):
        return {_parsed_key(key): _parsed_value(inner) for key, inner in value.items()}
    return [_parsed_value(inner) for inner in value] if isinstance(value, list) else value


def _parsed_key(key: str) -> str:
    if "{" in key and any(not isinstance(part, str) for part in parsed_text(key).parts):
        problem = f"has a placeholder in the key {key[:_SHOWN_CHARACTERS]!r}"
        _refuse(f"{problem}; placeholders stand in values only")
    return key


def _path(source: str) -> Path:
    return tuple(_path_part(*found) for found in _PART.findall(source))


def _path_part(key: str, number: str, quoted: str) -> str | int:
    if key:
        return key
    if number:
        return int(number)
    if quoted.startswith("'"):
        return quoted[1:-1]
    try:
        return msgspec.json.decode(quoted, type=str)
    except msgspec.MsgspecError:
        _refuse(f"{quoted[:_SHOWN_CHARACTERS]} is not a key in quotes")


def _item(path: Path) -> Placeholder:
    return ItemPlaceholder(path=path)


def _index(path: Path) -> Placeholder:
    if path:
        _refuse("index is a number and has nothing in it; write index")
    return IndexPlaceholder()


def _step(path: Path) -> Placeholder:
    match path:
        case (str(step), str(field), *rest):
            if field not in STEP_FIELDS:
                near = nearest(field, STEP_FIELDS) or f"output.{field}"
                meant = f"steps.{step}.{near}"
                _refuse(f"a step has no {field[:_SHOWN_CHARACTERS]!r}; write {meant}")
            return StepPlaceholder(step=step, field=field, path=tuple(rest))
    _refuse("steps is followed by a step and a field; write steps.first.output")


def _run(path: Path) -> Placeholder:
    match path:
        case (str(field),) if field in RUN_FIELDS:
            return RunPlaceholder(field=field)
    _refuse("run is followed by id or name; write run.id")


def _variable(path: Path) -> Placeholder:
    match path:
        case (str(name),) if _VARIABLE.fullmatch(name):
            return EnvPlaceholder(name=name)
    _refuse("env is followed by the name of a variable; write env.HOME")


_ROOT_PARSERS: dict[str, Callable[[Path], Placeholder]] = {
    "item": _item,
    "index": _index,
    "steps": _step,
    "run": _run,
    "env": _variable,
}
