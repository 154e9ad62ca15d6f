"""The description of the API: every route is in it, with all that it can answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from api.asgi_client import Client
from headgate.api import openapi as describing
from headgate.api.api import Route
from headgate.api.app import ROUTES
from headgate.api.errors import CODES
from headgate.api.openapi import errors_of, openapi

DOCUMENT = msgspec.json.decode(msgspec.json.encode(openapi(ROUTES)))
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
    assert answer.json == DOCUMENT
    assert client.get("/openapi.json").body is answer.body


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


def test_every_reference_leads_somewhere() -> None:
    for reference in references(DOCUMENT):
        part: Any = DOCUMENT
        for name in reference.removeprefix("#/").split("/"):
            part = part[name]


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [one for inner in value.values() for one in references(inner)]
    return [one for inner in value for one in references(inner)] if isinstance(value, list) else []
