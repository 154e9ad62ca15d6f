"""Where settings come from: a file, environment variables over it, options over those.

A variable is named by section and key, as in `HEADGATE_SCHEDULER__MAX_INFLIGHT`; those without a
double underscore are not settings, and `variable_warnings` names those that were meant to be. What
is wrong with a variable's value is said of the variable.

Rule: each value is remembered with its origin, and what is wrong with one names it: a file and a
line, or an option. A service that reads its file again takes a 0 in `[scheduler]`, where the range
begins above it, for "keep what was"; at a start it is as wrong as any other number outside.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from headgate.config.messages import invalid_value, key_path, table_expected, unknown_key
from headgate.config.settings import NAMED_TABLES, SLOTS, TABLES, ZERO_KEEPS, slots_by_name
from headgate.core.snapshot import BYTE_ORDER_MARK
from headgate.core.text import did_you_mean
from headgate.errors import InvalidSettingError, Problems

FILE_NAME = "headgate.toml"
VARIABLE_PREFIX = "HEADGATE_"
MAX_FILE_BYTES = 4 * 2**20
OPTION_ORIGIN = "option"
OTHER_VARIABLES = ("HEADGATE_URL", "HEADGATE_TOKEN", "HEADGATE_LOG_LEVEL")
"""Variables that are no settings, although a setting has such a name."""

_SEPARATOR = "__"
_PLACE = re.compile(r"(?P<problem>.*) \(at line (?P<line>\d+), column (?P<column>\d+)\)")
_AT_END = " (at end of document)"

_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")
_KEY = rf"(?:{_PART.pattern})(?:\s*\.\s*(?:{_PART.pattern}))*"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_KEY})\s*\]")
_ASSIGNED = re.compile(rf"\s*({_KEY})\s*=")
_NAME = re.compile(r"""\s*name\s*=\s*["']([^"']*)["']""")

Table = dict[str, object]
Value = TypeVar("Value")


class Merged(NamedTuple):
    """All sources laid over each other, and the origin of each key by its path.

    `kept` are keys that a reload leaves as they were, `text` is the file whose name is `file`.
    `problems` are what could not be laid anywhere, for whoever checks the rest as well.
    """

    tables: dict[str, Table]
    origins: dict[tuple[str, ...], str]
    kept: tuple[str, ...] = ()
    file: str = ""
    text: str = ""
    problems: tuple[InvalidSettingError, ...] = ()

    def located(self, error: InvalidSettingError) -> InvalidSettingError:
        """Add to an error, and to those beside it, where the value was given, if that is known."""
        all_of_it = (error, *(one for one in error.others if isinstance(one, InvalidSettingError)))
        found = sorted(map(self._located, all_of_it), key=lambda one: one.line or 0)
        found[0].others = tuple(found[1:])
        return found[0]

    def _located(self, error: InvalidSettingError) -> InvalidSettingError:
        if error.source:
            return error
        origins = {key_path(*path): origin for path, origin in self.origins.items()}
        origin = _longest(origins, error.field)
        if origin == OPTION_ORIGIN:
            source = "given as an option"
        elif origin is not None and origin != self.file:
            source = origin
        else:
            lines = key_lines(self.text)
            line = _longest(lines, error.field)
            if line is None:
                # A table may be written only by the tables within it.
                inner = (f"{error.field}.", f"{error.field}[")
                line = min((n for key, n in lines.items() if key.startswith(inner)), default=None)
            source = "" if line is None else f"{self.file}, line {line}"
            return InvalidSettingError(error.field, error.problem, source=source, line=line)
        return InvalidSettingError(error.field, error.problem, source=source)


def _longest(known: Mapping[str, Value], field: str) -> Value | None:
    """Return what is known of a key, or of the nearest one that it lies within."""
    within = [key for key in known if field == key or field.startswith((f"{key}.", f"{key}["))]
    return known[max(within, key=len)] if within else None


def key_lines(text: str) -> dict[str, int]:
    """Return the line at which each key of a TOML file is written, as far as lines tell it.

    It is a help for people: what lies inside of values that span lines is not told apart.
    """
    lines: dict[str, int] = {}
    table: tuple[str, ...] = ()
    slots = -1
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _parts(header[2])
            if header[1] == "[[":
                slots += 1
                table = (*table, f"[{slots}]")
            lines.setdefault(key_path(*table), number)
        elif assigned := _ASSIGNED.match(line):
            parts = (*table, *_parts(assigned[1]))
            lines.setdefault(key_path(*parts), number)
            name = _NAME.match(line)
            if slots >= 0 and table[0] == SLOTS and name:
                # From its name on, a slot goes by it.
                _rename(lines, key_path(*table), key_path(SLOTS, name[1]))
                table = (SLOTS, name[1])
    return lines


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _rename(lines: dict[str, int], old: str, new: str) -> None:
    for key in [key for key in lines if key == old or key.startswith(f"{old}.")]:
        lines.setdefault(new + key.removeprefix(old), lines[key])


def settings_file(given: Path | None) -> Path | None:
    """Return the file that was named, else the one in the working directory if there is one."""
    if given is not None:
        return given
    here = Path(FILE_NAME)
    return here if here.exists() else None


def merge(
    path: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, object],
    *,
    is_again: bool = False,
    collects: bool = False,
) -> Merged:
    """Read the sources and lay them over each other; an override of None was not given.

    `is_again` is for a running service, where a 0 may mean what was before. With `collects` what
    is wrong is among the `problems` of the result, and not raised.
    """
    if path is None:
        return merge_tables({}, environ, overrides, origin="", collects=collects)
    return merge_text(
        read_text(path), str(path), environ, overrides, is_again=is_again, collects=collects
    )


def merge_text(
    text: str,
    name: str,
    environ: Mapping[str, str],
    overrides: Mapping[str, object],
    *,
    is_again: bool = False,
    collects: bool = False,
) -> Merged:
    """Lay variables and options over the text of a file; `name` is how errors call it."""
    raw = parsed(text, name)
    try:
        merged = merge_tables(
            raw, environ, overrides, origin=name, is_again=is_again, collects=collects
        )
    except InvalidSettingError as error:
        raise Merged({}, {}, file=name, text=text).located(error) from None
    return merged._replace(text=text)


def merge_tables(
    raw: Table,
    environ: Mapping[str, str],
    overrides: Mapping[str, object],
    *,
    origin: str,
    is_again: bool = False,
    collects: bool = False,
) -> Merged:
    """Lay variables and options over the tables of a file that was read."""
    found = Problems(InvalidSettingError)
    kept: tuple[str, ...] = ()
    scheduler = raw.get("scheduler")
    if is_again and isinstance(scheduler, dict):
        zeros = [key for key, value in scheduler.items() if _keeps(key, value)]
        kept = tuple(f"scheduler.{key}" for key in zeros)
        raw = raw | {"scheduler": {key: scheduler[key] for key in scheduler if key not in zeros}}
    merged = Merged({name: {} for name in (*TABLES, *NAMED_TABLES)}, {}, kept, origin)
    for section, written in raw.items():
        with found.collected():
            _add_section(merged, section, written, origin)
    for variable in sorted(environ):
        with found.collected():
            _add_variable(merged, variable, environ[variable])
    for name, value in overrides.items():
        section, _, key = name.partition(".")
        if value is not None:
            with found.collected():
                _check_key(section, key)
                _add(merged, section, key, value, OPTION_ORIGIN)
    if not collects:
        found.check()
    return merged._replace(problems=found.found)


def read_text(path: Path) -> str:
    """Read a settings file; whatever is wrong with it is one line that names the place."""
    try:
        content = regular_content(path, MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        problem = f"cannot be read: {why}; name a file with --config"
        raise InvalidSettingError(str(path), problem) from None
    return decoded_text(content, str(path))


def decoded_text(content: bytes, name: str) -> str:
    """Return the text of a settings file from its bytes; `name` is how errors call it."""
    if len(content) > MAX_FILE_BYTES:
        problem = f"has more than {MAX_FILE_BYTES:,} bytes; it is not a settings file"
        raise InvalidSettingError(name, problem)
    content = content.removeprefix(BYTE_ORDER_MARK)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line, column = _line_and_column(content[: error.start].decode())
        place = f"{name}, line {line}, column {column}"
        raise InvalidSettingError(place, "is not UTF-8") from None


def regular_content(path: Path, most_bytes: int) -> bytes:
    """Read the beginning of a regular file; of anything else, `OSError` says what is wrong."""
    with open(path, "rb", opener=_opened) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return file.read(most_bytes)


def _opened(path: str, flags: int) -> int:
    # Otherwise a pipe is not even opened before somebody writes to it.
    return os.open(path, flags | os.O_NONBLOCK)


def parsed(text: str, name: str) -> Table:
    """Parse the text of a settings file; `name` is how errors call it."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _PLACE.fullmatch(str(error))
        problem = (match["problem"] if match else str(error)).removesuffix(_AT_END)
        line, column = _line_and_column(text)
        if match:
            line, column = int(match["line"]), int(match["column"])
    except RecursionError:
        raise InvalidSettingError(name, "is nested too deeply") from None
    except ValueError:
        raise InvalidSettingError(name, "has a number with too many digits") from None
    place = f"{name}, line {line}, column {column}"
    raise InvalidSettingError(place, problem)


def _line_and_column(before: str) -> tuple[int, int]:
    return before.count("\n") + 1, len(before) - before.rfind("\n")


def _add_section(merged: Merged, section: str, table: object, origin: str) -> None:
    if section not in merged.tables:
        raise unknown_key((section,), merged.tables)
    named = slots_by_name(table) if section == SLOTS else table
    if not isinstance(named, dict):
        raise table_expected((section,), table)
    for key, value in named.items():
        _add(merged, section, key, value, origin)


def _add(merged: Merged, section: str, key: str, value: object, origin: str) -> None:
    merged.tables[section][key] = value
    for path in _leaves((section, key), value, named=section in NAMED_TABLES):
        merged.origins[path] = origin


def _keeps(key: str, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value == 0 and key in ZERO_KEEPS


def _leaves(path: tuple[str, ...], value: object, *, named: bool) -> Iterator[tuple[str, ...]]:
    if named and isinstance(value, dict):
        yield from ((*path, str(key)) for key in value)
    else:
        yield path


def _add_variable(merged: Merged, variable: str, text: str) -> None:
    """Lay a variable over the file, if its name is that of a setting."""
    name = variable.removeprefix(VARIABLE_PREFIX)
    if name != variable and _SEPARATOR in name:
        section, _, key = name.lower().partition(_SEPARATOR)
        _add(merged, section, key, _value_of(variable, section, key, text), variable)


def variable_warnings(environ: Mapping[str, str]) -> list[str]:
    """Name the variables that were meant for a setting and lack its section or an underscore."""
    meant = {
        f"{VARIABLE_PREFIX}{wrong}".upper(): f"{VARIABLE_PREFIX}{section}{_SEPARATOR}{field.name}"
        for section, table in TABLES.items()
        for field in msgspec.structs.fields(table)
        for wrong in (field.name, f"{section}_{field.name}")
    }
    return [
        f"{variable} has no effect; {did_you_mean(meant[variable].upper())}"
        for variable in sorted(environ)
        if variable in meant and variable not in OTHER_VARIABLES
    ]


def _value_of(variable: str, section: str, key: str, text: str) -> object:
    try:
        _check_key(section, key)
    except InvalidSettingError as error:
        raise InvalidSettingError(variable, error.problem) from None
    fields = msgspec.structs.fields(TABLES[section])
    field_type = next(field.type for field in fields if field.name == key)
    is_list = isinstance(inspect.type_info(field_type), inspect.VarTupleType)
    value = [part.strip() for part in text.split(",") if part.strip()] if is_list else text
    try:
        return msgspec.to_builtins(msgspec.convert(value, field_type, strict=False))
    except msgspec.ValidationError as error:
        problem = invalid_value(error, field_type, text, (variable,)).problem
        raise InvalidSettingError(variable, problem) from None


def _check_key(section: str, key: str) -> None:
    if section in NAMED_TABLES:
        shown = f"[[{section}]]" if section == SLOTS else f"[{section}]"
        problem = f"{shown} is set in the file only; write it into {FILE_NAME}"
        raise InvalidSettingError(section, problem)
    if section not in TABLES:
        raise unknown_key((section,), TABLES)
    known = TABLES[section].__struct_fields__
    if key not in known:
        raise unknown_key((section, key), known)
