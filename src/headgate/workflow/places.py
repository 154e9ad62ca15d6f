"""Places as a file writes them: found in texts and in JSON values, and told from other braces.

`{item.name}` is a place. `{itm}` looks like one and is refused, because a prompt with a misspelt
place would be paid for; `{{itm}}` is the text `{itm}`, as in Python's formats. All other braces,
such as those of JSON in a prompt, are text.

Rule: whatever is refused is refused here, in words; a `PlaceError` has no line and no key.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NoReturn

import msgspec

from headgate.workflow.texts import (
    EnvPlace,
    IndexPlace,
    ItemPlace,
    Path,
    Place,
    RunPlace,
    StepPlace,
    Template,
    Text,
)

ROOTS = ("item", "index", "steps", "run", "env")
"""How places begin."""
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
_BRACES = re.compile(r"(\{+)([^{}]*)(\}+)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class PlaceError(ValueError):
    """What looks like a place is none; the text says what to write."""


def parsed_text(source: str) -> Text:
    """Read a text with places, or raise `PlaceError`."""
    if "{" not in source:
        return Text(parts=(source,) if source else ())
    parts: list[str | Place] = []
    end = 0
    for match in _BRACES.finditer(source):
        parts += [source[end : match.start()], *_parts(match)]
        end = match.end()
    return Text(parts=_joined([*parts, source[end:]]))


def parsed_template(value: Any) -> Template:  # noqa: ANN401
    """Read a JSON value whose strings may have places, or raise `PlaceError`."""
    return Template(value=_parsed_value(value))


def parsed_place(source: str) -> Place:
    """Read what stands between the braces of a place, or raise `PlaceError`."""
    shape = _SHAPE.fullmatch(source)
    if shape is None:
        problem = "is not written as a place; write {item.name}, {item[0]} or {item['a b']}"
        _refuse(f"{shown(source)} {problem}, without spaces")
    try:
        return place_of(shape[1], _path(shape[2]))
    except PlaceError as error:
        _refuse(f"{shown(source)}: {error}, or {{{shown(source)}}} for the text")


def place_of(root: str, path: Path) -> Place:
    """Return the place that a root and a path name, or raise `PlaceError`."""
    if root not in ROOTS:
        close = get_close_matches(root[:_SHOWN_CHARACTERS].lower(), ROOTS, n=1)
        advice = f"write {close[0]}" if close else f"write one of {', '.join(ROOTS)}"
        _refuse(f"{root[:_SHOWN_CHARACTERS]!r} is not known; {advice}")
    return _PLACES[root](path)


def shown(source: str) -> str:
    """Return a place that is none as far as it fits into a message."""
    cut = source[:_SHOWN_CHARACTERS]
    return f"{{{cut}}}" if cut == source else f"{{{cut}…}}"


def _refuse(problem: str) -> NoReturn:
    raise PlaceError(problem) from None


def _parts(match: re.Match[str]) -> list[str | Place]:
    """Return braces around a name as their parts: pairs of them are braces, a last one is a place.

    Braces that have no counterpart stand for themselves.
    """
    name = match[2]
    if _SHAPE.fullmatch(name) is None and _MEANT.fullmatch(name) is None:
        return [match[0]]
    opening, closing = len(match[1]), len(match[3])
    paired = min(opening, closing)
    kept = paired // 2
    inner: str | Place = parsed_place(name) if paired % 2 else name
    return ["{" * (opening - paired + kept), inner, "}" * (closing - paired + kept)]


def _joined(parts: list[str | Place]) -> tuple[str | Place, ...]:
    joined: list[str | Place] = []
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
        problem = f"has a place in the key {key[:_SHOWN_CHARACTERS]!r}; places stand in values only"
        _refuse(problem)
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


def _item(path: Path) -> Place:
    return ItemPlace(path=path)


def _index(path: Path) -> Place:
    if path:
        _refuse("index is a number and has nothing in it; write index")
    return IndexPlace()


def _step(path: Path) -> Place:
    match path:
        case (str(step), str(field), *rest):
            if field not in STEP_FIELDS:
                close = get_close_matches(field[:_SHOWN_CHARACTERS].lower(), STEP_FIELDS, n=1)
                meant = f"steps.{step}.{close[0] if close else f'output.{field}'}"
                _refuse(f"a step has no {field[:_SHOWN_CHARACTERS]!r}; write {meant}")
            return StepPlace(step=step, field=field, path=tuple(rest))
    _refuse("steps is followed by a step and a field; write steps.first.output")


def _run(path: Path) -> Place:
    match path:
        case (str(field),) if field in RUN_FIELDS:
            return RunPlace(field=field)
    _refuse("run is followed by id or name; write run.id")


def _variable(path: Path) -> Place:
    match path:
        case (str(name),) if _VARIABLE.fullmatch(name):
            return EnvPlace(name=name)
    _refuse("env is followed by the name of a variable; write env.HOME")


_PLACES: dict[str, Callable[[Path], Place]] = {
    "item": _item,
    "index": _index,
    "steps": _step,
    "run": _run,
    "env": _variable,
}
