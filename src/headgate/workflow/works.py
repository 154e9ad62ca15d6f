"""The work of a step: a command, an HTTP request, a call, a model or a target.

Rule: a step does exactly one of them, and has no key of another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from headgate.workflow.models import MODEL_KEYS, read_model
from headgate.workflow.terms import Defaults, read_name
from headgate.workflow.texts import Text
from headgate.workflow.uses import Uses, read_headers, read_url
from headgate.workflow.values import Value
from headgate.workflow.workflow import (
    CallWork,
    CommandWork,
    Endpoint,
    HttpWork,
    TargetWork,
    Work,
)

WORK_KEYS: dict[str, tuple[str, ...]] = {
    "command": ("command", "env", "pass_env", "stdin", "cwd"),
    "http": ("http",),
    "call": ("call", "with"),
    "model": MODEL_KEYS,
    "target": (
        "target",
        "action",
        "params",
        "input",
        "tab_id",
        "selector",
        "ref",
        "slot",
        "provider",
    ),
}
"""By the kind of work, the keys that a step of it may have; the first names the kind."""
HTTP_KEYS = ("url", "method", "headers", "body")
METHODS = ("POST", "GET", "PUT", "PATCH", "DELETE", "HEAD")
MAX_ARGUMENTS = 1_000

_WITHOUT_BODY = ("GET", "HEAD")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN_PREFIX = "HEADGATE_"
_KIND_OF = {key: kind for kind, keys in WORK_KEYS.items() for key in keys}
_QUESTIONS = ("prompt", "messages")


def read_work(
    step: Value,
    fields: Mapping[str, Value],
    uses: Uses,
    *,
    defaults: Defaults,
    endpoints: Mapping[str, Endpoint],
) -> Work:
    """Read what a step does."""
    kind = _kind(step, fields)
    for key, value in fields.items():
        if _KIND_OF.get(key, kind) != kind:
            value.refuse(f"is for steps with {_KIND_OF[key]}, and this has {kind}; leave it out")
    match kind:
        case "command":
            return _command(fields, uses)
        case "http":
            return _http(fields["http"], uses)
        case "call":
            return _call(fields, uses)
        case "model":
            return read_model(step, fields, uses, defaults=defaults, endpoints=endpoints)
    return _target(fields, uses, defaults)


def _kind(step: Value, fields: Mapping[str, Value]) -> str:
    named = [kind for kind in WORK_KEYS if kind in fields]
    if len(named) > 1:
        problem = f"stands beside {named[0]}, and a step does one thing; make two steps of it"
        fields[named[1]].refuse(problem)
    if not named and any(key in fields for key in _QUESTIONS):
        named = ["model"]
    if not named and any(_KIND_OF.get(key) == "target" for key in fields):
        named = ["target"]
    if not named:
        step.refuse(f"does nothing; write one of {', '.join(WORK_KEYS)}")
    return named[0]


def _command(fields: Mapping[str, Value], uses: Uses) -> CommandWork:
    value = fields["command"]
    if not value.is_list:
        value.refuse('must be a list, as ["./evaluate", "{item}"]; there is no shell')
    arguments = tuple(uses.text(argument) for argument in value.items("arguments"))
    if not arguments or not arguments[0].parts:
        value.refuse("has no program; write it and its arguments as a list")
    if len(arguments) > MAX_ARGUMENTS:
        value.refuse(f"has more than {MAX_ARGUMENTS:,} arguments; put them into stdin")
    stdin, cwd = fields.get("stdin"), fields.get("cwd")
    return CommandWork(
        command=arguments,
        env=_env(fields["env"], uses) if "env" in fields else {},
        pass_env=_pass_env(fields["pass_env"]) if "pass_env" in fields else (),
        stdin=None if stdin is None else uses.stored_text(stdin),
        cwd=None if cwd is None else uses.text(cwd),
    )


def _env(value: Value, uses: Uses) -> dict[str, Text]:
    variables: dict[str, Text] = {}
    for name, entry in value.entries("variables").items():
        _check_variable(entry, name)
        variables[name] = uses.text(entry)
    return variables


def _pass_env(value: Value) -> tuple[str, ...]:
    entries = value.items("variables") if value.is_list else [value]
    for entry in entries:
        _check_variable(entry, entry.word())
    return tuple(dict.fromkeys([entry.word() for entry in entries]))


def _check_variable(value: Value, name: str) -> None:
    if _VARIABLE.fullmatch(name) is None:
        value.refuse(f"{name[:60]!r} is no name of a variable; write letters, digits and _")
    if name.startswith(_OWN_PREFIX):
        value.refuse(f"names with {_OWN_PREFIX} are set for every task; take another")


def _http(value: Value, uses: Uses) -> HttpWork:
    fields = value.fields(HTTP_KEYS, "http")
    if "url" not in fields:
        value.refuse("has no url; write it")
    method = fields["method"].choice(METHODS) if "method" in fields else METHODS[0]
    body = fields.get("body")
    if body is not None and method in _WITHOUT_BODY:
        body.refuse(f"cannot go with {method}; leave it out, or write method: POST")
    return HttpWork(
        url=read_url(fields["url"], uses.text),
        method=method,
        headers=read_headers(fields["headers"], uses.text) if "headers" in fields else {},
        body=None if body is None else uses.template(body),
    )


def _call(fields: Mapping[str, Value], uses: Uses) -> CallWork:
    entry_point = fields["call"].word()
    module, _, function = entry_point.partition(":")
    if not all(name.isidentifier() for name in [*module.split("."), *function.split(".")]):
        fields["call"].refuse("must be written as package.module:function")
    given = fields.get("with")
    return CallWork(entry_point=entry_point, given=None if given is None else uses.template(given))


def _target(fields: Mapping[str, Value], uses: Uses, defaults: Defaults) -> TargetWork:
    if "slot" in fields and "provider" in fields:
        fields["provider"].refuse("stands beside slot; keep one of them")
    readers: dict[str, Callable[[Value], Any]] = {
        **dict.fromkeys(("target", "slot", "provider"), read_name),
        **dict.fromkeys(("action", "tab_id", "selector", "ref"), uses.stored_text),
        **dict.fromkeys(("params", "input"), uses.template),
    }
    read = {key: reader(fields[key]) for key, reader in readers.items() if key in fields}
    return TargetWork(**{"target": defaults.target, **read})
