"""What is wrong with a value, in words: the key as the file writes it, and what it must be.

Rule: a value that may be a secret is not repeated. Numbers and switches are shown, and the words
that a key chooses among; any other text is only called a text.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from enum import Enum
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import inspect

from headgate.core.text import did_you_mean, nearest
from headgate.errors import InvalidFieldError, InvalidSettingError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_INDEX = re.compile(r"\[(?:\.\.\.|[0-9]+)\]")
_STEP = re.compile(r"\.(\w+)|\[([^\]]*)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_SHOWN_CHARACTERS = 40
_LISTED_NAMES = 20
_LARGEST_SHOWN = 10**18


@lru_cache(maxsize=256)
def key_path(*parts: str) -> str:
    """Write a key as TOML does: `projects."a b".credit_weight`."""
    written = [_quoted(part) for part in parts]
    return ".".join(written).replace(".[", "[")


def unknown_key(parts: tuple[str, ...], known: Iterable[str]) -> InvalidSettingError:
    """Refuse a key that nothing reads, with the one that was probably meant."""
    key = parts[-1]
    names = sorted(known)
    listed = f"known are {', '.join(names)}"
    if len(names) > _LISTED_NAMES:
        listed = "headgate config example shows all of them"
    advice = did_you_mean(nearest(key, names), listed)
    return InvalidSettingError(key_path(*parts), f"is not a setting; {advice}")


def invalid_value(
    error: msgspec.ValidationError, kind: object, value: object, parts: tuple[str, ...]
) -> InvalidSettingError:
    """Say in the words of the file why `value`, at the key `parts`, is not of its kind."""
    problem, _, place = str(error).rpartition(" - at `")
    if not problem:
        problem, place = place, ""
    steps = [name or f"[{index}]" for name, index in _STEP.findall(place)]
    cause = error.__cause__
    if isinstance(cause, InvalidFieldError):
        return InvalidSettingError(key_path(*parts, *steps, cause.field), cause.problem)
    info = _type_at(_chosen(inspect.type_info(kind), value), steps)
    if match := _UNKNOWN.fullmatch(problem):
        return unknown_key((*parts, *steps, match[1]), _fields(info))
    if match := _MISSING.fullmatch(problem):
        return InvalidSettingError(key_path(*parts, *steps, match[1]), "is missing; write it")
    where = key_path(*parts, *steps)
    wanted = _described(info)
    if wanted is None:
        return InvalidSettingError(where, f"cannot be used: {problem}")
    return InvalidSettingError(where, f"must be {wanted}{_instead(info, value, steps)}")


def wrong_key(error: msgspec.ValidationError) -> str:
    """Return the key of a table that an error is about; empty if it is about the whole."""
    problem, _, place = str(error).rpartition(" - at `")
    step = _STEP.match(place.removeprefix("$"))
    if problem and step:
        return step[1] or ""
    unknown = _UNKNOWN.fullmatch(problem or place) or _MISSING.fullmatch(problem or place)
    return unknown[1] if unknown else ""


def table_expected(parts: tuple[str, ...], value: object) -> InvalidSettingError:
    """Refuse a plain value where a table is needed."""
    return InvalidSettingError(key_path(*parts), f"must be a table, not {_kind_of(value)}")


def _quoted(part: str) -> str:
    if _BARE_KEY.fullmatch(part) or _INDEX.fullmatch(part):
        return part
    shown = part[:_SHOWN_CHARACTERS].encode("utf-8", "replace").decode()
    return msgspec.json.encode(shown).decode()


def _chosen(info: inspect.Type, value: object) -> inspect.Type:
    """Return the member of a union of tables that the value's tag names."""
    if not isinstance(info, inspect.UnionType) or not isinstance(value, dict):
        return info
    for member in info.types:
        if isinstance(member, inspect.StructType) and value.get(member.tag_field) == member.tag:
            return member
    return info


def _type_at(info: inspect.Type | None, steps: list[str]) -> inspect.Type | None:
    for step in steps:
        info = _inner(_without_none(info), step)
    return _without_none(info)


def _inner(info: inspect.Type | None, step: str) -> inspect.Type | None:
    if isinstance(info, inspect.UnionType):
        tags = [member.tag for member in info.types if isinstance(member, inspect.StructType)]
        return inspect.LiteralType(values=tuple(tags))
    if isinstance(info, inspect.StructType):
        return next((field.type for field in info.fields if field.encode_name == step), None)
    if isinstance(info, inspect.DictType):
        return info.value_type
    if isinstance(info, inspect.ListType | inspect.VarTupleType):
        return info.item_type
    return None


def _without_none(info: inspect.Type | None) -> inspect.Type | None:
    if not isinstance(info, inspect.UnionType):
        return info
    members = [member for member in info.types if not isinstance(member, inspect.NoneType)]
    return members[0] if len(members) == 1 else inspect.UnionType(types=tuple(members))


def _fields(info: inspect.Type | None) -> list[str]:
    if not isinstance(info, inspect.StructType):
        return []
    return [field.encode_name for field in info.fields]


def field_docs(kind: type) -> dict[str, str]:
    """Return what the code says below each field of a class, those of its bases included.

    Python keeps no such text, so the source is read; without a source there is none.
    """
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        found |= _docs_of_module(one.__module__).get(one.__qualname__, {})
    return found


@cache
def _docs_of_module(name: str) -> dict[str, dict[str, str]]:
    path = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    source = path.read_text() if path.suffix == ".py" and path.is_file() else ""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {node.name: _docs_below(node) for node in classes}


def _docs_below(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, text in pairwise(node.body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                found[name] = " ".join(doc.split())
    return found


def described_default(field: msgspec.structs.FieldInfo) -> str:
    """Say what a setting is unless it is written, as the file would write it."""
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is msgspec.NODEFAULT:
        return "required"
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    if isinstance(value, float | Enum):
        return f"{value:g}" if isinstance(value, float) else str(value.value)
    return str(value) if value not in ((), {}, "") else "empty"


def described_type(kind: object) -> str:
    """Say what a value of this type must be: `a whole number from 1 to 100`."""
    return _described(_without_none(inspect.type_info(kind))) or "a value"


def _described(info: inspect.Type | None) -> str | None:
    if isinstance(info, inspect.UnionType):
        members = dict.fromkeys(filter(None, map(_described, info.types)))
        if "a number" in members:
            members.pop("a whole number", None)
        return " or ".join(members) or None
    word = None if info is None else _WORDS.get(type(info))
    return None if word is None else f"{word}{_bounds(info)}"


_WORDS: dict[type, str] = {
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.BoolType: "true or false",
    inspect.StrType: "a string",
    inspect.LiteralType: "one of ",
    inspect.EnumType: "one of ",
    inspect.DictType: "a table",
    inspect.StructType: "a table",
    inspect.ListType: "a list",
    inspect.VarTupleType: "a list",
}


def _bounds(info: inspect.Type | None) -> str:
    match info:
        case inspect.IntType() | inspect.FloatType():
            return _range(info)
        case inspect.StrType() if info.min_length and info.max_length is not None:
            return f" of 1 to {info.max_length:,} characters"
        case inspect.StrType() | inspect.VarTupleType() if info.min_length:
            return " that is not empty"
        case inspect.LiteralType():
            return ", ".join(str(value) for value in info.values)
        case inspect.EnumType():
            return ", ".join(str(member.value) for member in info.cls)
    return ""


def _range(info: inspect.IntType | inspect.FloatType) -> str:
    if info.le is None:
        return ""
    if info.ge is None:
        return f" above {info.gt} and at most {_number(info.le)}"
    return f" from {_number(info.ge)} to {_number(info.le)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _instead(info: inspect.Type | None, value: object, steps: list[str]) -> str:
    for step in steps:
        if not isinstance(value, dict) or step not in value:
            return ""
        value = value[step]
    if isinstance(value, str):
        return f", not {value[:_SHOWN_CHARACTERS]!r}" if isinstance(info, _SHOWN_TYPES) else ""
    is_empty = value == [] and isinstance(info, inspect.VarTupleType)
    return "" if is_empty else f", not {_kind_of(value)}"


def _kind_of(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if abs(value) < _LARGEST_SHOWN else "a number of that size"
    if isinstance(value, float):
        return repr(value)
    return _NAMES.get(type(value), f"a {type(value).__name__}")


_SHOWN_TYPES = (
    inspect.BoolType,
    inspect.EnumType,
    inspect.FloatType,
    inspect.IntType,
    inspect.LiteralType,
)
_NAMES: dict[type, str] = {str: "a string", dict: "a table", list: "a list"}
