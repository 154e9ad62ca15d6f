"""Texts and JSON values with places for what is known only when a step runs.

Places: `{item}`, `{item.path}`, `{index}`, `{steps.ID.FIELD.path}`, `{run.id}`, `{run.name}` and
`{env.NAME}`; `headgate.workflow.places` reads them. A string of a template that is nothing but one
place gives its JSON value; within a longer text a string stands as it is, all else as JSON.

Rule: a value of the environment never gets into what is stored. It stays a named part of a filled
text until an executor reads it, so what an item or an output says is never looked up. What is
filled in is never read again: a value with braces in it stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeGuard
from urllib.parse import quote

import msgspec

Path = tuple[str | int, ...]
"""Keys of objects and numbers in lists (from the end, if negative), outermost first."""


class ItemPlace(msgspec.Struct, frozen=True, kw_only=True, tag="item"):
    """The item, or what lies in it."""

    path: Path = ()


class IndexPlace(msgspec.Struct, frozen=True, kw_only=True, tag="index"):
    """The number of the item, from 0."""


class StepPlace(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """A field of another step, such as its output, or what lies in it."""

    step: str
    field: str
    path: Path = ()


class RunPlace(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """The id of the run, or the name of its workflow."""

    field: str


class EnvPlace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="env"):
    """A variable of the environment; only an endpoint that is always there has a default."""

    name: str
    default: str | None = None


Place = ItemPlace | IndexPlace | StepPlace | RunPlace | EnvPlace


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A text as its parts: what is written, and places.

    In a URL, what is filled in behind its beginning is percent-encoded, so that it stays one part
    of a path or a query.
    """

    parts: tuple[str | Place, ...]
    is_url: bool = False


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON value whose strings are texts; what has no place in it is kept as it is."""

    value: Any


FilledText = str | tuple[str | EnvPlace, ...]
"""A text whose places are filled, all but those of the environment."""


class View(Protocol):
    """What places are filled with, for one run of one step."""

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


class UnfilledError(Exception):
    """A place has nothing to be filled with; the text is the error of this run of the step."""


def as_string(text: Text) -> Text:
    """Return a text that fills a template with a string, even where it is but one place."""
    is_one_place = len(text.parts) == 1 and not isinstance(text.parts[0], str)
    return Text(parts=("", *text.parts)) if is_one_place else text


def fill(text: Text, view: View) -> FilledText:
    """Fill a text; raise `UnfilledError` for a place that lies in nothing that is there."""
    if all(map(_is_written, text.parts)):
        return "".join(filter(_is_written, text.parts))
    # A place with nothing before it is where an address begins.
    filled = [
        _filled(part, view, is_encoded=text.is_url and number > 0)
        for number, part in enumerate(text.parts)
    ]
    if any(isinstance(part, EnvPlace) for part in filled):
        return tuple(part for part in filled if part != "")
    return "".join(filter(_is_written, filled))


def fill_template(template: Template, view: View) -> Any:  # noqa: ANN401
    """Fill a JSON value; raise `UnfilledError` for a place that lies in nothing that is there."""
    return _filled_value(template.value, view)


def with_variables(text: FilledText, value_of: Callable[[EnvPlace], str]) -> str:
    """Put the values of variables into a filled text."""
    if isinstance(text, str):
        return text
    return "".join([part if isinstance(part, str) else value_of(part) for part in text])


def references(value: Text | Template | None) -> Iterator[Place]:
    """Give the places of a text or a template."""
    waiting: list[Any] = [value.value if isinstance(value, Template) else value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Text):
            yield from (part for part in found.parts if not isinstance(part, str))
        elif isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found


def value_at(place: Place, view: View) -> Any:  # noqa: ANN401
    """Return what a place stands for; `LookupError` if there is nothing.

    What would lie in null is null: a step that did not end well has no output.
    """
    match place:
        case ItemPlace(path=path):
            return found_in(view.item, path)
        case StepPlace(step=step, field=field, path=path):
            return found_in(view.field(step, field), path)
        case IndexPlace():
            return view.index
        case RunPlace(field=field):
            return view.run[field]
        case EnvPlace():
            return place


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
            raise LookupError(part)
    return value


def place_text(place: Place) -> str:
    """Write a place as a file does."""
    match place:
        case ItemPlace(path=path):
            return f"{{item{_path_text(path)}}}"
        case StepPlace(step=step, field=field, path=path):
            return f"{{steps.{step}.{field}{_path_text(path)}}}"
        case RunPlace(field=field):
            return f"{{run.{field}}}"
        case EnvPlace(name=name):
            return f"{{env.{name}}}"
        case IndexPlace():
            return "{index}"


def _path_text(path: Path) -> str:
    return "".join([_key_text(part) if isinstance(part, str) else f"[{part}]" for part in path])


def _key_text(key: str) -> str:
    is_plain = key.isascii() and key.replace("-", "_").isidentifier()
    return f".{key}" if is_plain else f"[{msgspec.json.encode(key).decode()}]"


def _is_written(part: str | Place) -> TypeGuard[str]:
    return isinstance(part, str)


def _filled(part: str | Place, view: View, *, is_encoded: bool) -> str | EnvPlace:
    if isinstance(part, str | EnvPlace):
        return part
    value = _looked_up(part, view)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return quote(text, safe="", errors="replace") if is_encoded else text


def _filled_value(value: Any, view: View) -> Any:  # noqa: ANN401
    if isinstance(value, Text):
        if len(value.parts) == 1 and not isinstance(value.parts[0], str):
            return _looked_up(value.parts[0], view)
        return fill(value, view)
    if isinstance(value, dict):
        return {key: _filled_value(inner, view) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled_value(inner, view) for inner in value]
    return value


def _looked_up(place: Place, view: View) -> Any:  # noqa: ANN401
    try:
        return value_at(place, view)
    except LookupError as error:
        missing = error.args[0] if error.args else ""
        problem = f"{place_text(place)} has nothing to be filled with: there is no {missing!r}"
        raise UnfilledError(problem) from None
