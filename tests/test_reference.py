"""The generated reference is complete: everything public is in it, with a sentence.

What a command, a route, a setting, a metric or a log event says of itself stands in the code. These
tests fail when one says nothing, and when a page asks for a part that nobody makes.
"""

from __future__ import annotations

import importlib
import inspect
import re
from enum import Enum

import click
import msgspec
import pytest

from doc_pages import PAGES, ROOT, anchors_of, prose_of, rows_under
from headgate import Client, SyncClient
from headgate.api.app import ROUTES
from headgate.api.errors import CODES
from headgate.api.openapi import QUERY_DOCS, docs_of, openapi
from headgate.cli.logs import LOG_EVENTS
from headgate.config.messages import described_default, described_type, field_docs
from headgate.config.settings import NAMED_TABLES, SECTIONS, TABLES
from headgate.core.admission import QueueLimit
from headgate.executors.targets import AnyTarget
from headgate.gateway.gateway import ROUTES as CALL_ROUTES
from headgate.gateway.relay import PLACE
from headgate.metrics import METRICS
from headgate.storage.tokens import PERMISSIONS
from headgate.workflow.report import RunState
from reference_pages import (
    PARTS,
    RUN_JSON,
    SNAPSHOT,
    commands,
    expanded,
    log_lines,
    members_of,
    objects,
    part,
    parts_of,
    public_names,
    signature,
    slot_lines,
    snapshot_fields,
)

COMMANDS = list(commands())


def is_sentence(text: str) -> bool:
    """Whether a text begins with a capital, a name or a figure, and has an end."""
    return bool(re.match(r"[A-Z0-9`(\u201c\"/]", text)) and text.rstrip()[-1:] in {
        ".",
        ")",
        "]",
        ":",
    }


def test_every_part_is_on_one_page() -> None:
    asked = [name for page in PAGES for name in parts_of(page.read_text())]
    assert sorted(asked) == sorted(PARTS)


def test_a_page_without_the_site_says_how_to_see_the_part() -> None:
    """On a code host the part is missing, so the text before it names the command."""
    for page in PAGES:
        text = page.read_text()
        for name in parts_of(text):
            before = prose_of(text).partition(f"<!-- reference: {name} -->")[0]
            assert re.search(r"`headgate \w|help\(headgate|/openapi.json|make docs", before), name


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_every_command_and_option_says_what_it_does(name: str, command: click.Command) -> None:
    assert is_sentence(command.help or "")
    options = [one for one in command.params if isinstance(one, click.Option)]
    assert [one.opts for one in options if not one.help] == []
    if len(name.split()) > 1:
        assert name.replace(" ", "-") in anchors_of(part("commands"))


def test_every_option_of_a_command_is_in_its_section() -> None:
    sections = dict(
        re.findall(r"^##+ `([^`]+)`\n(.*?)(?=^##|\Z)", part("commands"), re.MULTILINE | re.DOTALL)
    )
    for name, command in COMMANDS[1:]:
        for option in command.params:
            if isinstance(option, click.Option):
                assert [one for one in option.opts if f"`{one}`" not in sections[name]] == []


@pytest.mark.parametrize("kind", [kind for _, kind in RUN_JSON.values()])
def test_every_key_of_a_run_says_what_it_is(kind: type[msgspec.Struct]) -> None:
    docs = field_docs(kind)
    assert [name for name in kind.__struct_fields__ if not is_sentence(docs.get(name, ""))] == []
    for state in RunState:
        assert f"`{state.value}`" in part("run-json")


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_setting_says_what_it_does(heading: str) -> None:
    kind = SECTIONS[heading]
    docs = field_docs(kind)
    assert is_sentence(kind.__doc__ or "")
    assert [name for name in kind.__struct_fields__ if not is_sentence(docs.get(name, ""))] == []
    rows = {row[0]: row for row in rows_under(part("settings"), heading)}
    inherited = set(AnyTarget.__struct_fields__) if kind is not AnyTarget else set()
    for field in msgspec.structs.fields(kind):
        if field.name not in inherited or not issubclass(kind, AnyTarget):
            written = [field.encode_name, described_type(field.type), described_default(field)]
            assert rows[field.encode_name][:3] == written


def test_every_section_of_the_file_is_in_the_reference() -> None:
    headings = " ".join(SECTIONS)
    assert [name for name in TABLES if f"[{name}]" not in headings] == []
    named = [name for name in NAMED_TABLES if f"[{name}." not in headings]
    assert [name for name in named if f"[[{name}]]" not in headings] == []


def test_every_route_parameter_and_code_is_in_the_reference() -> None:
    headings = re.findall(r"^### (\S+ \S+)$", part("routes"), re.MULTILINE)
    routes = (*ROUTES, *CALL_ROUTES)
    assert headings == [f"{route.method} {route.path}" for route in routes]
    assert [route.path for route in routes if not route.summary] == []
    assert [name for route in routes for name in route.query if name not in QUERY_DOCS] == []
    codes = rows_under("# Codes\n" + part("error-codes"), "Codes")
    assert [row[0] for row in codes] == list(CODES)
    assert all(row[2] for row in codes)


@pytest.mark.parametrize("kind", objects(), ids=lambda kind: kind.__name__)
def test_every_field_of_the_api_says_what_it_is(kind: type[msgspec.Struct]) -> None:
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    assert [name for name in names if not is_sentence(docs_of(kind).get(name, ""))] == []
    assert kind.__name__.lower() in anchors_of(part("objects"))


def test_the_openapi_document_says_it_too() -> None:
    document = openapi(ROUTES)
    task = document["components"]["schemas"]["TaskBody"]["properties"]
    assert task["priority"]["description"] == "Lower goes first. The default is 0."
    (limit,) = [
        one for one in document["paths"]["/tasks"]["get"]["parameters"] if one["name"] == "limit"
    ]
    assert limit["description"] == QUERY_DOCS["limit"]


def test_the_page_of_the_api_names_the_headers_of_the_gateway_and_the_permissions() -> None:
    page = (ROOT / "docs/reference/http-api.md").read_text()
    text = "".join(path.read_text() for path in (ROOT / "src/headgate/gateway").glob("*.py"))
    # Only nodes send the position of a call to each other.
    headers = set(re.findall(r"\"(x-headgate-[a-z-]+)\"", text)) - {PLACE.decode()}
    assert "x-headgate-call-id" in headers
    assert {name for name in headers if name not in page.lower()} == set()
    assert [row[0] for row in rows_under(page, "Who may ask")] == list(PERMISSIONS)
    limits = {
        name for row in rows_under(page, "Submitting a task") for name in row[0].split("`, `")
    }
    assert limits == {limit.value for limit in QueueLimit} - {QueueLimit.STORE.value}


def test_every_metric_says_what_it_says() -> None:
    rows = rows_under("# Metrics\n" + part("metrics"), "Metrics")
    assert [row[0] for row in rows] == list(METRICS)
    of_a_run = rows_under("# Metrics\n" + part("run-metrics"), "Metrics")
    assert len(of_a_run) > 10
    assert [row for row in (*rows, *of_a_run) if not is_sentence(row[-1])] == []


def test_every_line_of_the_log_says_what_it_means() -> None:
    lines = log_lines()
    assert {line.event for line in lines} == set(LOG_EVENTS)
    assert [text for text in LOG_EVENTS.values() if not is_sentence(text)] == []
    assert len(slot_lines()) > 20
    rows = {row[0]: row for row in rows_under("# Lines\n" + part("log-events"), "Lines")}
    for line in lines:
        assert rows[line.event][1:3] == [line.level, ", ".join(line.fields)]


NAMES = [(module, name) for module, names in public_names().items() for name in names]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[name for _, name in NAMES])
def test_every_public_name_and_its_methods_say_what_they_do(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    page = part("client") if name == "SyncClient" else part("python")
    assert f"# `{name}`" in part("python")
    if not callable(value):
        return
    assert is_sentence(inspect.getdoc(value) or "")
    if inspect.isclass(value) and not issubclass(value, (Enum, Client)):
        for member, definition in members_of(name, value):
            assert f"`{member}{signature(definition)}`".replace("|", r"\|") in page
            assert inspect.getdoc(definition), member


def test_a_client_for_asyncio_has_the_same_methods() -> None:
    one, other = (members_of("", kind) for kind in (Client, SyncClient))
    assert {name for name, _ in one} == {name for name, _ in other}


@pytest.mark.parametrize("kind", SNAPSHOT, ids=lambda kind: kind.__name__)
def test_every_field_of_a_snapshot_says_what_it_is(kind: type) -> None:
    rows = snapshot_fields(kind)
    assert [row[0] for row in rows if not is_sentence(row[3])] == []
    assert [row[0] for row in rows_under(part("snapshot"), kind.__name__)] == [
        row[0].strip("`") for row in rows
    ]


def test_a_page_is_expanded_where_it_asks_for_it() -> None:
    text = (ROOT / "docs/reference/cli.md").read_text()
    whole = expanded(text)
    assert parts_of(whole) == []
    assert "## `headgate run`" in whole
    assert expanded("nothing to expand\n") == "nothing to expand\n"
