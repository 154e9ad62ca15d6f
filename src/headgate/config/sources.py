"""Where settings come from: a file, environment variables over it, options over those.

A variable is named by section and key, as in `HEADGATE_SCHEDULER__MAX_INFLIGHT`; those without a
double underscore are not settings. What is wrong with a variable's value is said of the variable.

Rule: each value is remembered with its origin. In `[scheduler]` a 0 that cannot be meant leaves the
key to the source below.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import inspect

from headgate.config.messages import invalid_value, table_expected, unknown_key
from headgate.config.settings import NAMED_TABLES, SLOTS, TABLES, ZERO_LEAVES_OUT, slots_by_name
from headgate.core.snapshot import BYTE_ORDER_MARK
from headgate.errors import InvalidSettingError

FILE_NAME = "headgate.toml"
VARIABLE_PREFIX = "HEADGATE_"
MAX_FILE_BYTES = 4 * 2**20
OPTION_ORIGIN = "option"

_SEPARATOR = "__"
_PLACE = re.compile(r"(?P<problem>.*) \(at line (?P<line>\d+), column (?P<column>\d+)\)")
_AT_END = " (at end of document)"

Table = dict[str, object]


class Merged(NamedTuple):
    """All sources laid over each other, and the origin of each key by its path."""

    tables: dict[str, Table]
    origins: dict[tuple[str, ...], str]


def settings_file(given: Path | None) -> Path | None:
    """Return the file that was named, else the one in the working directory if there is one."""
    if given is not None:
        return given
    here = Path(FILE_NAME)
    return here if here.exists() else None


def merge(path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object]) -> Merged:
    """Read the sources and lay them over each other; an override of None was not given."""
    raw = {} if path is None else read_file(path)
    return merge_tables(raw, environ, overrides, origin=str(path))


def merge_tables(
    raw: Table, environ: Mapping[str, str], overrides: Mapping[str, object], *, origin: str
) -> Merged:
    """Lay variables and options over the tables of a file that was read."""
    merged = Merged({name: {} for name in (*TABLES, *NAMED_TABLES)}, {})
    _add_file(merged, raw, origin)
    for section, key, value, variable in _variables(environ):
        _add(merged, section, key, value, variable)
    for name, value in overrides.items():
        section, _, key = name.partition(".")
        if value is not None:
            _check_key(section, key)
            _add(merged, section, key, value, OPTION_ORIGIN)
    return merged


def read_file(path: Path) -> Table:
    """Read a TOML file; whatever is wrong with it is one line that names the place."""
    try:
        content = regular_content(path, MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        problem = f"cannot be read: {why}; name a file with --config"
        raise InvalidSettingError(str(path), problem) from None
    if len(content) > MAX_FILE_BYTES:
        problem = f"has more than {MAX_FILE_BYTES:,} bytes; it is not a settings file"
        raise InvalidSettingError(str(path), problem)
    return _parsed(content.removeprefix(BYTE_ORDER_MARK), str(path))


def regular_content(path: Path, most_bytes: int) -> bytes:
    """Read the beginning of a regular file; of anything else, `OSError` says what is wrong."""
    with open(path, "rb", opener=_opened) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return file.read(most_bytes)


def _opened(path: str, flags: int) -> int:
    # Otherwise a pipe is not even opened before somebody writes to it.
    return os.open(path, flags | os.O_NONBLOCK)


def _parsed(content: bytes, name: str) -> Table:
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        line, column = _line_and_column(content[: error.start].decode())
        problem = "is not UTF-8"
    except tomllib.TOMLDecodeError as error:
        match = _PLACE.fullmatch(str(error))
        problem = (match["problem"] if match else str(error)).removesuffix(_AT_END)
        line, column = _line_and_column(content.decode())
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


def _add_file(merged: Merged, raw: Table, origin: str) -> None:
    for section, table in raw.items():
        if section not in merged.tables:
            raise unknown_key((section,), merged.tables)
        named = slots_by_name(table) if section == SLOTS else table
        if not isinstance(named, dict):
            raise table_expected((section,), table)
        for key, value in named.items():
            _add(merged, section, key, value, origin)


def _add(merged: Merged, section: str, key: str, value: object, origin: str) -> None:
    if section == "scheduler" and _is_left_out(key, value):
        return
    merged.tables[section][key] = value
    for path in _leaves((section, key), value, named=section in NAMED_TABLES):
        merged.origins[path] = origin


def _is_left_out(key: str, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value == 0 and key in ZERO_LEAVES_OUT


def _leaves(path: tuple[str, ...], value: object, *, named: bool) -> Iterator[tuple[str, ...]]:
    if named and isinstance(value, dict):
        yield from ((*path, str(key)) for key in value)
    else:
        yield path


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str, object, str]]:
    """Yield section, key, value and name of each variable that is a setting, in a fixed order."""
    for variable in sorted(environ):
        name = variable.removeprefix(VARIABLE_PREFIX)
        if name == variable or _SEPARATOR not in name:
            continue
        section, _, key = name.lower().partition(_SEPARATOR)
        yield section, key, _value_of(variable, section, key, environ[variable]), variable


def _value_of(variable: str, section: str, key: str, text: str) -> object:
    try:
        _check_key(section, key)
    except InvalidSettingError as error:
        raise InvalidSettingError(variable, error.problem) from None
    if key in ZERO_LEAVES_OUT and text.strip() == "0":
        return 0
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
