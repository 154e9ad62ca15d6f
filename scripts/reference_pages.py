"""The parts of the reference that are made from the code: commands, routes, settings, metrics.

A page of `docs/reference` has a line `<!-- reference: commands -->` where such a part belongs. The
site has the part in its place; the page in the repository says how to see the same without it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

import headgate
import headgate.errors
import headgate.testing
from headgate.api.api import Route
from headgate.api.app import ROUTES
from headgate.api.errors import CODES
from headgate.api.openapi import ANY_ROUTE, QUERY_DOCS, docs_of, errors_of, structs_of
from headgate.api.schema.tasks import ErrorBody
from headgate.cli.logs import LOG_EVENTS
from headgate.cli.main import GROUPS, cli
from headgate.config.messages import described_default, described_type, field_docs
from headgate.config.settings import SECTIONS
from headgate.core.gates import GateClosure
from headgate.core.snapshot import Agent, Project, SchedulerState
from headgate.core.task import Task
from headgate.executors.targets import AnyTarget
from headgate.gateway.gateway import ROUTES as CALL_ROUTES
from headgate.metrics import METRICS
from headgate.workflow.backend import Money, StepTask
from headgate.workflow.dry_run import DryHold, DryPart, DryRun, DryStop
from headgate.workflow.report import RunReport, RunState, StepRow, StepSummary
from headgate.workflow.run_list import RunSummary, StepOutput
from headgate.workflow.run_metrics import run_metrics

SOURCES = Path(headgate.__file__).parent
_MARKER = re.compile(r"^<!-- reference: (?P<name>[\w-]+) -->$", re.MULTILINE)


def expanded(text: str) -> str:
    """Return a page with each part that is made from the code in its place."""
    return _MARKER.sub(lambda match: part(match["name"]).strip("\n"), text)


@cache
def part(name: str) -> str:
    """Return a part by its name; the code does not change meanwhile."""
    return PARTS[name]()


def parts_of(text: str) -> list[str]:
    """Return the names of the parts that a page asks for."""
    return [match["name"] for match in _MARKER.finditer(text)]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a column that is empty in all rows is left out."""
    body = [[cell.replace("\n", " ").replace("|", r"\|") for cell in row] for row in rows]
    shown = [at for at in range(len(headings)) if any(row[at] for row in body)]
    lines = [
        [headings[at] for at in shown],
        ["---"] * len(shown),
        *([row[at] for at in shown] for row in body),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def sentence(text: str) -> str:
    """Return a text that begins with a capital and ends with a full stop; an empty one as it is."""
    text = " ".join(text.split())
    if not text:
        return ""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ":")) else ".")


# The command line.


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command with its whole name, each before those within it."""
    yield from _within("headgate", cli)


def _within(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for inner_name in command.list_commands(context):
            inner = command.get_command(context, inner_name)
            if inner is not None and not inner.hidden:
                yield from _within(f"{name} {inner_name}", inner)


def command_part() -> str:
    """Describe every command: what it does, its arguments and options, and examples."""
    groups = [
        (title, ", ".join(f"[`{name}`](#headgate-{name})" for name in names))
        for title, names in GROUPS.items()
    ]
    found = [_command(name, command) for name, command in commands() if command is not cli]
    return "\n".join([table(("for", "commands"), groups), *found])


def _command(name: str, command: click.Command) -> str:
    level = "#" * (1 + min(len(name.split()) - 1, 2))
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    parts = [f"{level} `{name}`", _paragraphs(command.help or ""), f"```text\n{usage}\n```"]
    if isinstance(command, click.Group):
        inner = [(one, command.get_command(context, one)) for one in command.list_commands(context)]
        rows = [
            (f"[`{one}`](#{f'{name} {one}'.replace(' ', '-')})", sentence(_first_line(found)))
            for one, found in inner
            if found is not None
        ]
        parts.append(table(("command", "what it does"), rows))
    rows_of_options = [_option(one, context) for one in options]
    if rows_of_options:
        parts.append(table(("option", "what it does"), rows_of_options))
    if command.epilog:
        parts.append(_examples(command.epilog))
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _first_line(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "").split("\n\n")[0]


def _option(option: click.Option, context: click.Context) -> tuple[str, str]:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    record = option.get_help_record(context)
    text = option.help or ""
    if record is not None:
        text = record[1]
    value = "" if option.is_flag else f" {option.make_metavar(context)}"
    return f"{names}{value}", text


def _paragraphs(text: str) -> str:
    """Return help as Markdown: what click is told not to wrap becomes a block."""
    found = []
    for part in inspect.cleandoc(text).split("\n\n"):
        lines = part.strip("\n").split("\n")
        if lines[0].strip() == "\b":
            found.append("```text\n" + "\n".join(lines[1:]) + "\n```")
        else:
            found.append(" ".join(line.strip() for line in lines))
    return "\n\n".join(found)


def _examples(epilog: str) -> str:
    """Return the examples as a block of shell, and whatever else is said there as it is."""
    found = []
    for part in inspect.cleandoc(epilog).split("\n\n"):
        lines = [line for line in part.split("\n") if line.strip() != "\b"]
        if lines and lines[0].strip() == "Examples:":
            found.append("```sh\n" + inspect.cleandoc("\n".join(lines[1:])) + "\n```")
        else:
            found.append(" ".join(line.strip() for line in lines))
    return "\n\n".join(found)


# What commands write as JSON.

RUN_JSON: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "The end of a run": ("headgate run --json", RunReport),
    "A step": ("an entry of `steps`", StepSummary),
    "A run of a step": ("an entry of `rows`", StepRow),
    "A task": ("`task` of a row", StepTask),
    "A budget": ("an entry of `money`", Money),
    "A run in the list": ("headgate runs --json", RunSummary),
    "An output": ("headgate runs output --json", StepOutput),
    "A dry run": ("headgate run --dry-run --json", DryRun),
    "A part of a dry run": ("an entry of `parts`", DryPart),
    "A reservation of a dry run": ("an entry of `holds`", DryHold),
    "The stop of a dry run": ("`stop`", DryStop),
}


def run_json_part() -> str:
    """Describe each key of what `headgate run` and `headgate runs` write as JSON."""
    return "\n".join(
        f"### {heading}\n\n{_where(where)}\n\n{fields(kind)}"
        for heading, (where, kind) in RUN_JSON.items()
    )


def _where(where: str) -> str:
    return f"`{where}`" if where.startswith("headgate") else sentence(where)


def fields(kind: type[msgspec.Struct]) -> str:
    """Return a table of the fields of a struct, and what each means."""
    docs = field_docs(kind)
    rows = [
        (f"`{one.encode_name}`", sentence(docs.get(one.name, "")))
        for one in msgspec.structs.fields(kind)
    ]
    return table(("key", "what it is"), rows)


# Settings.


def setting_part() -> str:
    """Describe every key of the settings file: what it may be, its default, and what it does."""
    return "\n".join(_section(heading, kind) for heading, kind in SECTIONS.items())


def _section(heading: str, kind: type[msgspec.Struct]) -> str:
    level = "##" if heading.startswith("[") else "###"
    own = {one.name for one in msgspec.structs.fields(kind)}
    if issubclass(kind, AnyTarget) and kind is not AnyTarget:
        own -= set(AnyTarget.__struct_fields__)
    docs = field_docs(kind)
    rows = [
        (
            f"`{one.encode_name}`",
            described_type(one.type),
            described_default(one),
            docs.get(one.name, ""),
        )
        for one in msgspec.structs.fields(kind)
        if one.name in own
    ]
    parts = [f"{level} {heading}", _paragraphs(kind.__doc__ or "")]
    if rows:
        parts.append(table(("key", "value", "default", "what it does"), rows))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


# The HTTP API.


def route_part() -> str:
    """Describe every route: what it does, what it takes, and what it answers."""
    document = "The same for programs: [openapi.json](openapi.json).\n"
    return "\n".join([document, *(_route(route) for route in (*ROUTES, *CALL_ROUTES))])


def _route(route: Route) -> str:
    needs = f"Needs the permission `{route.needs}`." if route.needs else "Needs no token."
    parts = [f"### {route.method} {route.path}", f"{sentence(route.summary)} {needs}"]
    if route.query:
        rows = [(f"`{name}`", QUERY_DOCS[name]) for name in route.query]
        parts.append(table(("query", "what it does"), rows))
    if route.body is not None:
        parts.append(f"Body: {_object(route.body)}.")
    answers = [
        f"{status} {_object(kind) if not isinstance(kind, str) else f'`{kind}`'}"
        for status, kind in route.responses.items()
    ]
    parts.append(f"Answers: {', '.join(answers)}.")
    errors = [code for code in errors_of(route) if code not in ANY_ROUTE]
    if errors and route not in CALL_ROUTES:
        parts.append("Errors: " + ", ".join(f"`{code}`" for code in errors) + ".")
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _object(kind: type[msgspec.Struct]) -> str:
    return f"[`{kind.__name__}`](#{kind.__name__.lower()})"


def error_part() -> str:
    """List every code of a refusal."""
    rows = [(f"`{code}`", str(kind.status), sentence(kind.meaning)) for code, kind in CODES.items()]
    return table(("code", "status", "what it means"), rows)


def objects() -> list[type[msgspec.Struct]]:
    """Return every struct that a route takes or answers with, by name."""
    kinds: dict[type[msgspec.Struct], None] = {ErrorBody: None}
    for route in ROUTES:
        found = [route.body, *route.responses.values()]
        kinds.update((one, None) for one in found if one is not None and not isinstance(one, str))
    return sorted(structs_of(kinds), key=lambda kind: kind.__name__)


def object_part() -> str:
    """Describe every field of what routes take and answer."""
    parts = []
    for kind in objects():
        docs = docs_of(kind)
        names = [field.encode_name for field in msgspec.structs.fields(kind)]
        rows = [(f"`{name}`", docs.get(name, "")) for name in names]
        what = _paragraphs((kind.__doc__ or "").split("\n\n")[0])
        parts.append(f"### {kind.__name__}\n\n{what}\n\n{table(('field', 'what it is'), rows)}")
    return "\n".join(parts)


# Metrics.


def metric_part() -> str:
    """Describe every metric of a service: its type, its labels, and what it says."""
    rows = [
        (
            f"`{one.name}`",
            one.kind,
            ", ".join(f"`{label}`" for label in one.labels),
            one.across,
            one.text,
        )
        for one in METRICS.values()
    ]
    return table(("metric", "type", "labels", "over nodes", "what it says"), rows)


def run_metric_part() -> str:
    """List every metric of a run of a workflow."""
    summary = StepSummary(step="s", total=1, counts={"done": 1})
    money = Money(scope="s", spent_micro_usd=0, reserved_micro_usd=0, limit_micro_usd=1)
    report = RunReport(
        run_id="r", workflow="w", state=RunState.DONE, began_at=0, steps=(summary,), money=(money,)
    )
    rows = []
    for family in run_metrics(report, 0.0):
        ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
        kind = "gauge" if family.type == "info" else family.type
        labels = dict.fromkeys(name for one in family.samples for name in one.labels)
        rows.append((f"{family.name}{ending}", kind, tuple(labels), family.documentation))
    return _metrics(rows)


def _metrics(found: Iterable[tuple[str, str, tuple[str, ...], str]]) -> str:
    rows = [
        (f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), sentence(text))
        for name, kind, labels, text in found
    ]
    return table(("metric", "type", "labels", "what it says"), rows)


# Lines of the log.

LEVELS = ("debug", "info", "warning", "error", "exception")


class LogLine(NamedTuple):
    """A line that the code writes: its text, its level, and the fields that it has."""

    event: str
    level: str
    fields: tuple[str, ...]


def log_lines() -> list[LogLine]:
    """Return every line that the service writes, by its text; `…` stands for what differs."""
    found: dict[str, LogLine] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            line = _log_line(node)
            if line is not None:
                before = found.get(line.event, line)
                fields = tuple(sorted({*before.fields, *line.fields}))
                found[line.event] = LogLine(line.event, line.level, fields)
    return [found[event] for event in sorted(found)]


def _log_line(node: ast.AST) -> LogLine | None:
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="log"), attr=level),
            args=[ast.Constant(value=str(event))],
            keywords=words,
        ) if level in LEVELS:
            fields = tuple(word.arg for word in words if word.arg)
            return LogLine(event, "error" if level == "exception" else level, fields)
    return None


def slot_lines() -> list[LogLine]:
    """Return every line about a slot; each begins with its name, and has it as a field."""
    found = []
    for node in ast.walk(ast.parse((SOURCES / "engine/slots/slot_log.py").read_text())):
        match node:
            case ast.Call(
                func=ast.Attribute(attr=level), args=[ast.JoinedStr(values=parts), *_]
            ) if level in LEVELS:
                texts = [str(one.value) if isinstance(one, ast.Constant) else "…" for one in parts]
                found.append(LogLine("".join(texts), level, ()))
    return found


def log_part() -> str:
    """List every line of the log, with what it means."""
    rows = [
        (f"`{line.event}`", line.level, ", ".join(line.fields), LOG_EVENTS.get(line.event, ""))
        for line in log_lines()
    ]
    return table(("event", "level", "fields", "what it means"), rows)


def slot_line_part() -> str:
    """List every line about a slot."""
    return table(("line", "level"), [(f"`{line.event}`", line.level) for line in slot_lines()])


# Python.

INTERNAL = {
    "SimulatedLoop": {
        *("abandon", "call_at", "call_soon", "call_soon_threadsafe", "check", "close"),
        *("create_task", "default_exception_handler", "run_in_executor", "watch"),
    },
    "RateLimitWindow": {"clock"},
    "SharedResource": {"claim"},
    "Grant": {"attach", "settle"},
    "Budget": {"reserve_for", "estimate_of", "scopes_of", "notify"},
}
"""What asyncio itself documents, and what only other parts of Headgate call."""

ELSEWHERE = {"Client": "client.md", "SyncClient": "client.md"}


def public_names() -> dict[str, list[str]]:
    """Return the names that programs may use, by module."""
    errors = [name for name in vars(headgate.errors) if name.endswith("Error")]
    return {
        "headgate": list(headgate.__all__),
        "headgate.budgets.tracker": ["LedgerTracker", "ActiveReservation"],
        "headgate.providers.prices": ["PriceList", "Price", "Cost", "UnknownPriceError"],
        "headgate.testing": list(headgate.testing.__all__),
        "headgate.testing.fleet": ["SimulatedFleet", "Workload"],
        "headgate.errors": errors,
    }


def python_part() -> str:
    """Describe every public name: its signature, what it is, and its methods."""
    parts = []
    for module, names in public_names().items():
        parts.append(f"## `{module}`\n")
        for name in names:
            value = getattr(importlib.import_module(module), name)
            parts.append(_name(module, name, value))
    return "\n".join(parts)


def _name(module: str, name: str, value: object) -> str:
    level = "#####" if module == "headgate.errors" else "###"
    parts = [f"{level} `{name}`"]
    if not callable(value):
        parts.append(f"`{value!r}`")
    elif not (inspect.isclass(value) and issubclass(value, (Enum, BaseException))):
        parts.append(f"```python\n{name}{signature(value)}\n```")
    doc = (inspect.getdoc(value) or "") if callable(value) else ""
    parts.append(_paragraphs(doc))
    if inspect.isclass(value) and issubclass(value, Enum):
        parts.append(", ".join(f"`{member}`" for member in value.__members__))
    elif name in ELSEWHERE:
        parts.append(f"Its methods are on [a page of their own]({ELSEWHERE[name]}).")
    elif inspect.isclass(value):
        rows = [
            (f"`{member}{signature(found)}`", _first_paragraph(found))
            for member, found in members_of(name, value)
        ]
        if rows:
            parts.append(table(("member", "what it does"), rows))
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def members_of(name: str, value: type) -> list[tuple[str, object]]:
    """Return the public methods and properties that a class defines itself."""
    found = []
    for member, definition in vars(value).items():
        is_own = isinstance(definition, (property, staticmethod, classmethod))
        if (
            member.startswith("_")
            or member in INTERNAL.get(name, ())
            or inspect.isclass(definition)
        ):
            continue
        if is_own or callable(definition):
            found.append((member, definition))
    return found


def _first_paragraph(value: object) -> str:
    return sentence((inspect.getdoc(_function(value)) or "").split("\n\n")[0])


def _function(value: object) -> object:
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def signature(value: object) -> str:
    """Return a signature without `self`; a property has none."""
    if isinstance(value, property):
        return ""
    function = _function(value)
    if not callable(function):
        return ""
    text = str(inspect.signature(function)).replace("'", "")
    text = re.sub(r"\((?:self|cls)(, )?", "(", text)
    text = re.sub(r"<function \w*clock[^>]*>", "time.time", text)
    return text.removesuffix(" -> None") if isinstance(value, type) else text


def client_part() -> str:
    """Describe every method of a client."""
    rows = [
        (f"`{name}{signature(found)}`", _first_paragraph(found))
        for name, found in members_of("SyncClient", headgate.SyncClient)
    ]
    return table(("method", "what it does"), rows)


# Snapshots.

SNAPSHOT: tuple[type, ...] = (SchedulerState, Project, Task, Agent, GateClosure)


def snapshot_part() -> str:
    """Describe every field of a snapshot."""
    return "\n".join(
        f"## {kind.__name__}\n\n"
        + table(("field", "type", "default", "what it is"), snapshot_fields(kind))
        for kind in SNAPSHOT
    )


def snapshot_fields(kind: type) -> list[tuple[str, str, str, str]]:
    """Return name, type, default and meaning of each field."""
    docs = field_docs(kind)
    if dataclasses.is_dataclass(kind):
        found = [(f.name, f.type, f.default, f.default_factory) for f in dataclasses.fields(kind)]
    else:
        annotations = inspect.get_annotations(kind)
        structs = msgspec.structs.fields(kind)
        found = [(f.name, annotations[f.name], f.default, f.default_factory) for f in structs]
    return [
        (f"`{name}`", f"`{annotation}`", _written(value, factory), docs.get(name, ""))
        for name, annotation, value, factory in found
    ]


def _written(value: object, factory: object) -> str:
    if callable(factory):
        return f"`{factory()!r}`"
    if value in (dataclasses.MISSING, msgspec.NODEFAULT):
        return "required"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{value}`" if isinstance(value, Enum) else f"`{value!r}`"


PARTS: dict[str, Callable[[], str]] = {
    "commands": command_part,
    "metrics": metric_part,
    "run-json": run_json_part,
    "settings": setting_part,
    "routes": route_part,
    "error-codes": error_part,
    "objects": object_part,
    "run-metrics": run_metric_part,
    "log-events": log_part,
    "slot-lines": slot_line_part,
    "python": python_part,
    "client": client_part,
    "snapshot": snapshot_part,
}
