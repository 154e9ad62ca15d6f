"""From the bytes of a workflow file to a workflow of which nothing is refused later.

Rule: everything that can be known before the run is checked here, and the first thing that is
wrong is one line with its file, line and key.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from headgate.core.text import did_you_mean, nearest
from headgate.errors import Problems, WorkflowError
from headgate.providers.prices import MAX_MODEL_LENGTH
from headgate.workflow.config import (
    BUILT_IN,
    TERMS,
    Config,
    Defaults,
    read_config,
    read_endpoint_name,
    read_max_tokens,
    read_name,
    read_terms,
)
from headgate.workflow.expansion import circle_in
from headgate.workflow.placeholders import (
    ALL_RUNS_FIELDS,
    ONE_RUN_FIELDS,
    IndexPlaceholder,
    ItemPlaceholder,
    Placeholder,
    StepPlaceholder,
    Template,
    Text,
    as_string,
    placeholder_text,
)
from headgate.workflow.workflow import (
    CallWork,
    CommandWork,
    Endpoint,
    FileItems,
    HttpWork,
    Items,
    ListItems,
    ModelWork,
    Step,
    StepItems,
    TargetWork,
    Work,
    Workflow,
)
from headgate.workflow.yaml_document import (
    TextReader,
    Value,
    read_document,
    read_headers,
    read_url,
)

ROOT_KEYS = ("name", "config", "steps")
MAX_NAME_LENGTH = 100

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MADE_OF = "write letters, digits and . _ -, beginning with a letter or a digit"


def read_workflow(path: Path, source: bytes, *, name: str | None = None) -> Workflow:
    """Read a workflow, or raise `WorkflowError`; relative paths in it begin beside `path`.

    Nothing is read but `source`. A name that is given goes before that of the file.
    """
    with _collecting_later():
        return _read(path, source, name)


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Leave the garbage alone meanwhile: the values of a large file are looked through too often.

    There is next to none, and a file is bounded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read(path: Path, source: bytes, name: str | None) -> Workflow:
    file = str(path)
    root = Value(file, read_document(file, source))
    fields = root.fields(ROOT_KEYS, "a workflow")
    if "steps" not in fields:
        root.refuse("has no steps; write them")
    folder = path.absolute().parent
    written = (
        fields["name"].name(_NAME, _MADE_OF, most=MAX_NAME_LENGTH) if "name" in fields else None
    )
    errors, config = Problems(WorkflowError), Config(endpoints=BUILT_IN)
    with errors.collected():
        config = read_config(fields.get("config"))
    read: list[ReadStep] = []
    with errors.collected():
        read = read_steps(fields["steps"], config, folder)
    errors.check()
    return Workflow(
        name=name or written or _name_of(path),
        folder=folder,
        steps=linked(read),
        micro_usd=config.micro_usd,
        scopes=config.scopes,
        endpoints=config.endpoints,
        prices=config.prices,
        concurrency=config.concurrency,
        fail_fast=config.fail_fast,
        on_exhausted=config.on_exhausted,
        file=file,
    )


def _name_of(path: Path) -> str:
    name = path.stem
    if len(name) > MAX_NAME_LENGTH or _NAME.fullmatch(name) is None:
        problem = f"{name[:60]!r} is no name of a workflow; write name: … into the file"
        raise WorkflowError(str(path), problem)
    return name


# A step: what it does, and on which terms.

MODEL_KEYS = (
    "model",
    "prompt",
    "messages",
    "system",
    "max_tokens",
    "temperature",
    "endpoint",
    "options",
)
MAX_TEMPERATURE = 2
LIMITS = ("max_tokens", "max_completion_tokens")
"""The names under which requests say how long an answer may be."""

_OWN_KEYS = ("model", "messages", "system", "temperature")
_ANTHROPIC_MODELS = ("claude",)

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
    texts: TextReader


def read_steps(value: Value, config: Config, folder: Path) -> list[ReadStep]:
    """Read all steps."""
    entries = value.items("steps")
    if not entries:
        value.refuse("has no steps; write at least one")
    if len(entries) > MAX_STEPS:
        value.refuse(f"has {len(entries):,} steps, at most {MAX_STEPS:,} are run; use foreach")
    errors, read = Problems(WorkflowError), []
    for entry in entries:
        with errors.collected():
            read.append(_step(entry, config, folder))
    errors.check()
    return read


def read_id(value: Value) -> str:
    """Read the id of a step."""
    return value.name(_ID, _ID_MADE_OF, most=MAX_ID_LENGTH)


def _step(value: Value, config: Config, folder: Path) -> ReadStep:
    errors, texts = Problems(WorkflowError), TextReader()
    with errors.collected():
        value.fields(_ALL_KEYS, "a step")
    if not value.is_object:
        errors.check()
    fields = value.entries("a step")
    # A key that is misspelt is what the step would miss: nobody is told of that twice.
    is_misspelt = bool(errors.found)
    parts: dict[str, Callable[[], Any]] = {
        "depends_on": lambda: _parents(fields),
        "foreach": lambda: _foreach(fields["foreach"], folder) if "foreach" in fields else None,
        "when": lambda: texts.condition(fields["when"]) if "when" in fields else None,
        "labels": lambda: _labels(fields["labels"]) if "labels" in fields else {},
    }
    if not is_misspelt:
        parts["id"] = lambda: _own_id(value, fields)
        parts["work"] = lambda: read_work(
            value, fields, texts, defaults=config.defaults, endpoints=config.endpoints
        )
    read: dict[str, Any] = {}
    for name, reader in parts.items():
        with errors.collected():
            read[name] = reader()
    with errors.collected():
        read |= _terms(fields, config)
    errors.check()
    return ReadStep(step=Step(line=value.line, **read), value=value, fields=fields, texts=texts)


def _own_id(value: Value, fields: Mapping[str, Value]) -> str:
    if "id" not in fields:
        value.refuse("has no id; write one")
    return read_id(fields["id"])


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
        value.refuse(f"{problem}; items are known before the run, so no placeholders stand here")
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


# The work of a step: a command, an HTTP request, a call, a model or a target.
#
# Rule: a step does exactly one of them, and has no key of another.


def read_work(
    step: Value,
    fields: Mapping[str, Value],
    texts: TextReader,
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
            return _command(fields, texts)
        case "http":
            return _http(fields["http"], texts)
        case "call":
            return _call(fields, texts)
        case "model":
            return read_model(step, fields, texts, defaults=defaults, endpoints=endpoints)
    return _target(fields, texts, defaults)


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


def _command(fields: Mapping[str, Value], texts: TextReader) -> CommandWork:
    value = fields["command"]
    if not value.is_list:
        value.refuse('must be a list, as ["./evaluate", "{item}"]; there is no shell')
    arguments = tuple(texts.text(argument) for argument in value.items("arguments"))
    if not arguments or not arguments[0].parts:
        value.refuse("has no program; write it and its arguments as a list")
    if len(arguments) > MAX_ARGUMENTS:
        value.refuse(f"has more than {MAX_ARGUMENTS:,} arguments; put them into stdin")
    stdin, cwd = fields.get("stdin"), fields.get("cwd")
    return CommandWork(
        command=arguments,
        env=_env(fields["env"], texts) if "env" in fields else {},
        pass_env=_pass_env(fields["pass_env"]) if "pass_env" in fields else (),
        stdin=None if stdin is None else texts.stored_text(stdin),
        cwd=None if cwd is None else texts.text(cwd),
    )


def _env(value: Value, texts: TextReader) -> dict[str, Text]:
    variables: dict[str, Text] = {}
    for name, entry in value.entries("variables").items():
        _check_variable(entry, name)
        variables[name] = texts.text(entry)
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


def _http(value: Value, texts: TextReader) -> HttpWork:
    fields = value.fields(HTTP_KEYS, "http")
    if "url" not in fields:
        value.refuse("has no url; write it")
    method = fields["method"].choice(METHODS) if "method" in fields else METHODS[0]
    body = fields.get("body")
    if body is not None and method in _WITHOUT_BODY:
        body.refuse(f"cannot go with {method}; leave it out, or write method: POST")
    return HttpWork(
        url=read_url(fields["url"], texts.text),
        method=method,
        headers=read_headers(fields["headers"], texts.text) if "headers" in fields else {},
        body=None if body is None else texts.template(body),
    )


def _call(fields: Mapping[str, Value], texts: TextReader) -> CallWork:
    entry_point = fields["call"].word()
    module, _, function = entry_point.partition(":")
    if not all(name.isidentifier() for name in [*module.split("."), *function.split(".")]):
        fields["call"].refuse("must be written as package.module:function")
    given = fields.get("with")
    return CallWork(entry_point=entry_point, given=None if given is None else texts.template(given))


def _target(fields: Mapping[str, Value], texts: TextReader, defaults: Defaults) -> TargetWork:
    if "slot" in fields and "provider" in fields:
        fields["provider"].refuse("stands beside slot; keep one of them")
    readers: dict[str, Callable[[Value], Any]] = {
        **dict.fromkeys(("target", "slot", "provider"), read_name),
        **dict.fromkeys(("action", "tab_id", "selector", "ref"), texts.stored_text),
        **dict.fromkeys(("params", "input"), texts.template),
    }
    read = {key: reader(fields[key]) for key, reader in readers.items() if key in fields}
    return TargetWork(**{"target": defaults.target, **read})


# Calls to models: from the keys of a step to the whole request that its endpoint wants.
#
# Rule: every request says how long its answer may be, because that is what its money is held for.


def read_model(
    step: Value,
    fields: Mapping[str, Value],
    texts: TextReader,
    *,
    defaults: Defaults,
    endpoints: Mapping[str, Endpoint],
) -> ModelWork:
    """Read a call to a model."""
    model_value = fields.get("model") or defaults.model
    if model_value is None:
        step.refuse("has no model; write model, or config.defaults.model")
    model = _model(model_value, texts)
    endpoint = _endpoint(step, fields, model, defaults, endpoints)
    options = _options(fields.get("options"), texts)
    max_tokens = _max_tokens(fields, options, defaults)
    return ModelWork(
        endpoint=endpoint.name,
        model=model_value.word(),
        body=Template(
            value={
                "model": model,
                **_conversation(step, fields, texts, endpoint),
                **({} if _has_limit(options) else {_limit_name(endpoint): max_tokens}),
                **_temperature(fields),
                **options,
            }
        ),
        max_tokens=max_tokens,
    )


def _model(value: Value, texts: TextReader) -> str | Text:
    model = _string(texts.stored_text(value))
    if not value.word() or len(value.word()) > MAX_MODEL_LENGTH:
        value.refuse(f"must be a name of 1 to {MAX_MODEL_LENGTH} characters")
    return model


def _endpoint(
    step: Value,
    fields: Mapping[str, Value],
    model: str | Text,
    defaults: Defaults,
    endpoints: Mapping[str, Endpoint],
) -> Endpoint:
    if "endpoint" in fields:
        return endpoints[read_endpoint_name(fields["endpoint"], endpoints)]
    if defaults.endpoint is not None:
        return endpoints[defaults.endpoint]
    if len(endpoints) > len(BUILT_IN):
        # Whoever lists an endpoint may mean it, and is not billed by another one for a guess.
        problem = f"has no endpoint; write endpoint as one of {', '.join(endpoints)}"
        step.refuse(f"{problem}, or config.defaults.endpoint")
    is_claude = isinstance(model, str) and model.lower().startswith(_ANTHROPIC_MODELS)
    return endpoints["anthropic" if is_claude else "openai"]


def _options(value: Value | None, texts: TextReader) -> dict[str, Any]:
    if value is None:
        return {}
    for key, entry in value.entries("options").items():
        if key in _OWN_KEYS:
            entry.refuse(f"is a key of the step; write {key} beside options")
        if key == "stream":
            entry.refuse("is not for steps, which take answers whole; leave it out")
        if key in LIMITS:
            read_max_tokens(entry)
    options: dict[str, Any] = texts.template(value).value
    return options


def _max_tokens(fields: Mapping[str, Value], options: Mapping[str, Any], defaults: Defaults) -> int:
    if not _has_limit(options):
        return (
            read_max_tokens(fields["max_tokens"]) if "max_tokens" in fields else defaults.max_tokens
        )
    if "max_tokens" in fields:
        fields["max_tokens"].refuse("is in options, too; keep one of them")
    limits: list[int] = [options[name] for name in LIMITS if name in options]
    return max(limits)


def _has_limit(options: Mapping[str, Any]) -> bool:
    return any(name in options for name in LIMITS)


def _limit_name(endpoint: Endpoint) -> str:
    """Return how an endpoint calls the limit of an answer.

    OpenAI's later models know only the later name; servers that speak its language know the
    earlier one, and some of them pass over the later.
    """
    return "max_completion_tokens" if endpoint is BUILT_IN["openai"] else "max_tokens"


def _temperature(fields: Mapping[str, Value]) -> dict[str, float]:
    value = fields.get("temperature")
    return {} if value is None else {"temperature": value.number(0, MAX_TEMPERATURE)}


def _conversation(
    step: Value, fields: Mapping[str, Value], texts: TextReader, endpoint: Endpoint
) -> dict[str, Any]:
    """Return the messages, and what goes before them as the kind of the endpoint wants it."""
    messages = _messages(step, fields, texts)
    if "system" not in fields:
        return {"messages": messages}
    system = _string(texts.stored_text(fields["system"]))
    if endpoint.kind == "anthropic":
        return {"system": system, "messages": messages}
    if not isinstance(messages, list):
        problem = "cannot go before messages that are a placeholder; put it into them"
        fields["system"].refuse(problem)
    return {"messages": [{"role": "system", "content": system}, *messages]}


def _messages(step: Value, fields: Mapping[str, Value], texts: TextReader) -> list[Any] | Text:
    if "prompt" in fields and "messages" in fields:
        fields["messages"].refuse("stands beside prompt; keep one of them")
    if "prompt" in fields:
        return [{"role": "user", "content": _string(texts.stored_text(fields["prompt"]))}]
    if "messages" not in fields:
        step.refuse("has nothing to ask; write prompt or messages")
    return _written_messages(fields["messages"], texts)


def _written_messages(value: Value, texts: TextReader) -> list[Any] | Text:
    messages = texts.template(value).value
    if isinstance(messages, Text) and len(messages.parts) == 1:
        return messages
    entries = value.items("messages, or one placeholder such as {item.messages}")
    if not entries:
        value.refuse("has no messages; write at least one")
    for number, entry in enumerate(entries):
        message = messages[number]
        if isinstance(message, Text) and len(message.parts) == 1:
            continue
        if "role" not in entry.entries("role and content"):
            entry.refuse("has no role; write one, as user")
    found: list[Any] = messages
    return found


def _string(text: Text) -> str | Text:
    placeholders: list[Placeholder] = [part for part in text.parts if not isinstance(part, str)]
    return as_string(text) if placeholders else "".join(map(str, text.parts))


# What steps say of each other: names that must exist, fields that a step has, and no circles.
#
# A text or a condition that names a step makes it a parent. Rule: after this nothing that a step
# refers to can be missing, and whatever it refers to has ended when it runs.

_LISTS = ("outputs", "results")
_SHOWN_IN_CIRCLE = 12
_SHOWN_CHARACTERS = 64


def linked(read: list[ReadStep]) -> tuple[Step, ...]:
    """Return the steps with all their parents, or raise `WorkflowError`."""
    by_id = _by_id(read)
    errors, steps = Problems(WorkflowError), {}
    for one in read:
        with errors.collected():
            steps[one.step.id] = _with_parents(one, by_id)
    errors.check()
    circle = circle_in({name: step.depends_on for name, step in steps.items()})
    if circle:
        shown = (*circle[:_SHOWN_IN_CIRCLE], "…" if len(circle) > _SHOWN_IN_CIRCLE else circle[0])
        problem = f"waits for itself: {' → '.join(shown)}; take one of these dependencies out"
        next(one for one in read if one.step.id == circle[0]).value.refuse(problem)
    return tuple(steps.values())


def _by_id(read: list[ReadStep]) -> dict[str, Step]:
    # Some file systems take names for the same that differ in case, and items are kept in files.
    earlier: dict[str, str] = {}
    for one in read:
        step_id = one.step.id
        other = earlier.get(step_id.lower())
        if other is not None:
            same = "is the id of" if other == step_id else "is but for its case the id of"
            one.fields["id"].refuse(f"{step_id!r} {same} another step; rename one of them")
        earlier[step_id.lower()] = step_id
    return {one.step.id: one.step for one in read}


def _with_parents(one: ReadStep, by_id: Mapping[str, Step]) -> Step:
    step = one.step
    for parent in step.depends_on:
        _check_known(parent, step, one.fields["depends_on"], by_id)
    parents = dict.fromkeys(step.depends_on)
    if isinstance(step.foreach, StepItems):
        _check_items(step.foreach.step, step, one.fields["foreach"], by_id)
        parents[step.foreach.step] = None
    for value, placeholder in one.texts.placeholders:
        if isinstance(placeholder, ItemPlaceholder | IndexPlaceholder) and step.foreach is None:
            _refuse_item(placeholder, value, is_text=value is not one.fields.get("when"))
        if isinstance(placeholder, StepPlaceholder):
            _check_known(placeholder.step, step, value, by_id)
            _check_field(placeholder, step, value, by_id[placeholder.step])
            parents[placeholder.step] = None
    if len(parents) == len(step.depends_on):
        return step
    return msgspec.structs.replace(step, depends_on=tuple(parents))


def _check_known(name: str, step: Step, value: Value, by_id: Mapping[str, Step]) -> None:
    if name == step.id:
        value.refuse(f"{name!r} is this step itself; take it out")
    if name in by_id:
        return
    advice = did_you_mean(nearest(name, by_id), "write the id of a step")
    value.refuse(f"there is no step {name[:_SHOWN_CHARACTERS]!r}; {advice}")


def _check_items(name: str, step: Step, value: Value, by_id: Mapping[str, Step]) -> None:
    _check_known(name, step, value, by_id)
    if by_id[name].foreach is None:
        value.refuse(f"{name!r} has no items; name a step with foreach")


def _refuse_item(placeholder: Placeholder, value: Value, *, is_text: bool) -> NoReturn:
    shown = placeholder_text(placeholder)
    advice = f"; write foreach, or {{{shown}}} for the text" if is_text else "; write foreach"
    value.refuse(f"{shown} is for steps with foreach{advice}")


def _check_field(placeholder: StepPlaceholder, step: Step, value: Value, other: Step) -> None:
    runs_along = isinstance(step.foreach, StepItems) and step.foreach.step == other.id
    has_one_run = other.foreach is None or runs_along
    if placeholder.field in (ONE_RUN_FIELDS if has_one_run else ALL_RUNS_FIELDS):
        return
    if runs_along and placeholder.field in _LISTS:
        return
    if runs_along:
        problem = "this step runs along with it, item by item; write output, outputs or status"
    elif other.foreach is None:
        problem = "it runs once; write output, result or status"
    else:
        problem = f"it runs for each item; write outputs, or foreach: {{step: {other.id}}}"
    value.refuse(f"{other.id!r} has no {placeholder.field} here: {problem}")
