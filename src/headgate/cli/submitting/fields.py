"""From the options of `headgate submit` to the fields of a task."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import click
import msgspec

from headgate.cli.submitting.input_lines import BYTE_ORDER_MARK
from headgate.client.task_fields import TaskFields
from headgate.errors import InvalidFieldError

FILE_MARK = "@"
JSON_MARK = ":"
MOST_FILE_BYTES = 2**20


def task_fields(action: str | None, given: dict[str, Any]) -> TaskFields:
    """Return what the options say of a task; what they do not say is left out."""
    fields = {name: value for name, value in given.items() if value not in (None, ())}
    params = _params(fields.pop("params_json", None), fields.pop("params_given", ()))
    labels = dict(_pair("--label", text) for text in fields.pop("labels", ()))
    if not math.isfinite(fields.get("weight", 1.0)):
        raise InvalidFieldError("--weight", "must be a finite number")
    document = fields.pop("input_json", None)
    if document is not None:
        fields["input"] = _json("--input", document)
    found = {"action": action, "params": params or None, "labels": labels or None}
    fields |= {name: value for name, value in found.items() if value is not None}
    return cast("TaskFields", fields)


def _params(document: str | None, pairs: tuple[str, ...]) -> dict[str, Any]:
    params = {} if document is None else _json("--params", document)
    if not isinstance(params, dict):
        raise InvalidFieldError("--params", "must be a JSON object")
    for text in pairs:
        key, value = _pair("--param", text)
        if key.endswith(JSON_MARK):
            params[key.removesuffix(JSON_MARK)] = _json(f"--param {key}=", value)
        else:
            params[key] = value
    return params


def _pair(option: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip(JSON_MARK):
        message = f"{option}: {text!r} is not KEY=TEXT"
        raise click.UsageError(message)
    return key, value


def _json(option: str, text: str) -> Any:  # noqa: ANN401 - any JSON
    document = _read(option, text[1:]) if text.startswith(FILE_MARK) else text.encode()
    try:
        return msgspec.json.decode(document)
    except RecursionError:
        raise InvalidFieldError(option, "is nested too deeply") from None
    except msgspec.DecodeError as error:
        advice = "" if text.startswith(FILE_MARK) else "; a text needs quotes, as '\"text\"'"
        raise InvalidFieldError(option, f"is not JSON: {error}{advice}") from None


def _read(option: str, name: str) -> bytes:
    try:
        with click.open_file(name, "rb") if name == "-" else Path(name).open("rb") as file:
            content: bytes = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidFieldError(option, f"cannot read {name}: {error.strerror}") from None
    if len(content) > MOST_FILE_BYTES:
        raise InvalidFieldError(option, f"{name} has more than {MOST_FILE_BYTES} bytes")
    return content.removeprefix(BYTE_ORDER_MARK)
