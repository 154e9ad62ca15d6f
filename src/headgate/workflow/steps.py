"""The steps of a workflow file, one by one.

What they say of each other is checked when all are read, by `headgate.workflow.links`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headgate.workflow.config import TERMS, Config, Defaults, read_name, read_terms
from headgate.workflow.document import Uses, Value, read_headers, read_url
from headgate.workflow.models import MODEL_KEYS, read_model
from headgate.workflow.placeholders import Text
from headgate.workflow.workflow import (
    CallWork,
    CommandWork,
    Endpoint,
    FileItems,
    HttpWork,
    Items,
    ListItems,
    Step,
    StepItems,
    TargetWork,
    Work,
)

# The work of a step: a command, an HTTP request, a call, a model or a target.
#
# Rule: a step does exactly one of them, and has no key of another.

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


STEP_KEYS = ("id", "foreach", "depends_on", "when", *TERMS, "cost_usd", "labels")
FOREACH_KEYS = ("file", "step")
MAX_STEPS = 10_000
MAX_ID_LENGTH = 64
OWN_LABELS = ("run", "step")
"""Labels that every task of a run has, and that tell which run and step it is of."""
MAX_LABELS = 30
MAX_LABEL_KEY_LENGTH = 64
MAX_LABEL_VALUE_LENGTH = 256

_ALL_KEYS = (*STEP_KEYS, *(key for keys in WORK_KEYS.values() for key in keys))
_ID = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_ID_MADE_OF = "write letters, digits, _ and -, beginning with a letter"


class ReadStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step, and where in the file it said what has to do with other steps."""

    step: Step
    value: Value
    fields: dict[str, Value]
    uses: Uses


def read_steps(value: Value, config: Config, folder: Path) -> list[ReadStep]:
    """Read all steps."""
    entries = value.items("steps")
    if not entries:
        value.refuse("has no steps; write at least one")
    if len(entries) > MAX_STEPS:
        value.refuse(f"has {len(entries):,} steps, at most {MAX_STEPS:,} are run; use foreach")
    return [_step(entry, config, folder) for entry in entries]


def read_id(value: Value) -> str:
    """Read the id of a step."""
    return value.name(_ID, _ID_MADE_OF, most=MAX_ID_LENGTH)


def _step(value: Value, config: Config, folder: Path) -> ReadStep:
    fields = value.fields(_ALL_KEYS, "a step")
    if "id" not in fields:
        value.refuse("has no id; write one")
    uses = Uses()
    step = Step(
        id=read_id(fields["id"]),
        line=value.line,
        work=read_work(value, fields, uses, defaults=config.defaults, endpoints=config.endpoints),
        depends_on=_parents(fields),
        foreach=_foreach(fields["foreach"], folder) if "foreach" in fields else None,
        when=uses.condition(fields["when"]) if "when" in fields else None,
        labels=_labels(fields["labels"]) if "labels" in fields else {},
        **_terms(fields, config),
    )
    return ReadStep(step=step, value=value, fields=fields, uses=uses)


def _terms(fields: dict[str, Value], config: Config) -> dict[str, Any]:
    own = read_terms(fields)
    terms = config.defaults.terms | own
    if "cost_usd" not in fields:
        return terms
    terms["cost_micro_usd"] = fields["cost_usd"].amount()
    if "estimate" not in own:
        terms.pop("estimate", None)
    elif own["estimate"].micro_usd is not None:
        problem = "says usd beside cost_usd, which is what the step costs; keep one of them"
        fields["estimate"].refuse(problem)
    return terms


def _parents(fields: dict[str, Value]) -> tuple[str, ...]:
    value = fields.get("depends_on")
    if value is None:
        return ()
    return tuple(dict.fromkeys(value.words("steps")))


def _foreach(value: Value, folder: Path) -> Items:
    if value.is_list:
        return ListItems(values=tuple(value.plain()))
    if not value.is_object:
        return _file(value, folder)
    fields = value.fields(FOREACH_KEYS, "foreach")
    if len(fields) != 1:
        value.refuse("must have either file or step; write one of them")
    return (
        _file(fields["file"], folder) if "file" in fields else StepItems(step=fields["step"].word())
    )


def _file(value: Value, folder: Path) -> FileItems:
    name = value.word() if value.is_text else ""
    if "{" in name or not name.strip():
        problem = "must be a list, the name of a JSONL file, or {step: other}"
        value.refuse(f"{problem}; items are known before the run, so no places stand here")
    return FileItems(path=folder / name)


def _labels(value: Value) -> dict[str, str]:
    entries = value.entries("labels")
    if len(entries) > MAX_LABELS:
        value.refuse(f"has {len(entries)} labels, at most {MAX_LABELS} are kept; leave some out")
    labels = {key: entry.word() for key, entry in entries.items()}
    for key in OWN_LABELS:
        if key in entries:
            entries[key].refuse("is set for every step; take another name")
    for key, label in labels.items():
        if not key or len(key) > MAX_LABEL_KEY_LENGTH or not key.isprintable():
            problem = f"is no label; a name has 1 to {MAX_LABEL_KEY_LENGTH} printable characters"
            entries[key].refuse(problem)
        if len(label) > MAX_LABEL_VALUE_LENGTH or not label.isprintable():
            problem = f"must be up to {MAX_LABEL_VALUE_LENGTH} printable characters; shorten it"
            entries[key].refuse(problem)
    return labels
