"""The description of the API: every route is in it, with all that it can answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from api.asgi_client import Client
from headgate.api import openapi as describing
from headgate.api.api import Route
from headgate.api.app import ROUTES
from headgate.api.errors import CODES
from headgate.api.openapi import errors_of, openapi
from headgate.gateway.gateway import ROUTES as CALL_ROUTES

DOCUMENT = msgspec.json.decode(msgspec.json.encode(openapi(ROUTES)))
WHOLE_DOCUMENT = msgspec.json.decode(msgspec.json.encode(openapi(ROUTES, CALL_ROUTES)))
NAMES = [f"{route.method} {route.path}" for route in ROUTES]


@pytest.mark.parametrize("route", ROUTES, ids=NAMES)
def test_a_route_says_what_it_answers_and_names_only_codes_that_exist(route: Route) -> None:
    assert route.responses, "fill in `answers`: a struct or a media type for each status"
    assert all(200 <= status < 300 for status in route.responses)
    assert set(route.errors) <= set(CODES)
    if route.method in {"POST", "PUT", "PATCH"} and "bad_json" in route.errors:
        assert route.body is not None, "fill in `takes`: the struct of the body"


def test_every_code_is_one_of_a_route_or_of_all() -> None:
    described = {code for route in ROUTES for code in errors_of(route)}
    assert set(CODES) - described == set()


def test_what_any_request_can_meet_are_codes_that_exist() -> None:
    for name in ("ANY_ROUTE", "WITH_PERMISSION", "WITH_NAME", "WITH_BODY"):
        assert set(getattr(describing, name)) <= set(CODES)


def test_the_document_is_served_as_it_is_built_and_built_once() -> None:
    client = Client()
    answer = client.get("/openapi.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json == WHOLE_DOCUMENT
    assert client.get("/openapi.json").body is answer.body


def test_calls_of_models_are_described_beside_the_rest() -> None:
    described = {
        (method.upper(), path)
        for path, methods in WHOLE_DOCUMENT["paths"].items()
        for method in methods
    }
    routes = {(route.method, route.path) for route in (*ROUTES, *CALL_ROUTES)}
    assert described == routes
    names = {
        operation["operationId"]
        for methods in WHOLE_DOCUMENT["paths"].values()
        for operation in methods.values()
    }
    assert len(names) == len(routes)
    assert generator_problems(WHOLE_DOCUMENT) == []


def test_every_route_is_one_operation_with_a_name_of_its_own() -> None:
    operations = [
        (method.upper(), path, operation["operationId"])
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
    ]
    assert sorted(operation[:2] for operation in operations) == sorted(
        (route.method, route.path) for route in ROUTES
    )
    assert len({operation[2] for operation in operations}) == len(ROUTES)


TIME_NAME = re.compile(r"(?:[a-z]At|Until|Since|\bat|\buntil|\bsince|deadline|[Ee]xpires)$")


def test_no_time_is_a_number() -> None:
    numbers = [
        f"{name}.{field}"
        for name, schema in DOCUMENT["components"]["schemas"].items()
        for field, kind in schema.get("properties", {}).items()
        if TIME_NAME.search(field) and re.search(r"'(number|integer)'", str(kind))
    ]
    assert numbers == []


def test_a_generator_of_clients_takes_the_document_whole() -> None:
    assert generator_problems(DOCUMENT) == []


def planted(name: str, module: str, *, inner: type = str) -> type[msgspec.Struct]:
    return msgspec.defstruct(name, [("limits", inner)], module=module)


def with_answers(*kinds: type[msgspec.Struct]) -> Any:
    """Return the document with routes that answer with these."""
    routes = [
        ROUTES[0]._replace(path=f"/planted{number}", responses={200: kind})
        for number, kind in enumerate(kinds)
    ]
    return msgspec.json.decode(msgspec.json.encode(openapi([*ROUTES, *routes])))


COLLISIONS = [
    ("two modules", [planted("LimitBody", "a.b"), planted("LimitBody", "a.c")]),
    ("another spelling", [planted("Task_body", "a.b")]),
    ("another case", [planted("Taskbody", "a.b")]),
    ("a part that is named after its whole", [
        planted("Planted", "a.b", inner=dict[str, int]), planted("PlantedLimits", "a.b"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    "kinds", [row[1] for row in COLLISIONS], ids=[row[0] for row in COLLISIONS]
)
def test_a_name_that_a_generator_would_make_twice_is_found(
    kinds: list[type[msgspec.Struct]],
) -> None:
    assert generator_problems(with_answers(*kinds)) != []


def test_a_reference_that_leads_nowhere_is_found() -> None:
    document = msgspec.json.decode(msgspec.json.encode(DOCUMENT))
    del document["components"]["schemas"]["TaskBody"]
    assert "#/components/schemas/TaskBody leads nowhere" in generator_problems(document)


def generator_problems(document: Any) -> list[str]:
    """Return what a generator would drop or write over: each class and function needs one name.

    It makes a class of each schema, named by its title or its key, and one of each object and
    enumeration that stands within a schema, named after its whole and its field.
    """
    schemas = document["components"]["schemas"]
    problems = [
        f"schema {key!r} has no plain name"
        for key in schemas
        if re.fullmatch(r"[A-Z][A-Za-z0-9]*", key) is None
    ]
    made: dict[str, str] = {}
    for key, schema in schemas.items():
        for name in class_names(schema.get("title", key), schema):
            known = made.setdefault(normalised(name), f"{name} of {key}")
            if known != f"{name} of {key}":
                problems.append(f"{name} of {key} is also {known}")
    functions = [
        normalised(operation["operationId"])
        for methods in document["paths"].values()
        for operation in methods.values()
    ]
    doubled = {name for name in functions if functions.count(name) > 1}
    problems += [f"operation {name} is there twice" for name in sorted(doubled)]
    for reference in dict.fromkeys(references(document)):
        part: Any = document
        for name in reference.removeprefix("#/").split("/"):
            part = part.get(name) if isinstance(part, dict) else None
        if part is None:
            problems.append(f"{reference} leads nowhere")
    return problems


def class_names(name: str, schema: Any) -> Iterator[str]:
    """Give the name of the class of a schema, and those of the classes within it."""
    if schema.get("type") == "object" or "enum" in schema:
        yield name
    for field, inner in schema.get("properties", {}).items():
        yield from class_names(f"{name} {field}", inner)
    for number, inner in enumerate(schema.get("anyOf", ())):
        yield from class_names(f"{name} Type {number}", inner)
    if isinstance(schema.get("items"), dict):
        yield from class_names(f"{name} Item", schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        yield from class_names(f"{name} AdditionalProperty", schema["additionalProperties"])


def normalised(name: str) -> str:
    """Return a name as classes, and files that know no case, tell it from others."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [one for inner in value.values() for one in references(inner)]
    return [one for inner in value for one in references(inner)] if isinstance(value, list) else []
