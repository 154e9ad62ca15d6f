"""`GET /openapi.json`: the API described to programs, made from the table of routes.

Rule: every status and media type that a route can answer with is in its description. What a route
says of itself stands in its row; what any request can meet on its way there is added here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

import headgate
from headgate.api.api import Route
from headgate.api.errors import CODES
from headgate.api.http.response import PROBLEM_JSON
from headgate.api.schema.tasks import ErrorBody

OPENAPI_VERSION = "3.1.0"
OK = 200
PLACEHOLDER = "{id}"

ANY_ROUTE = (
    "bad_request",
    "request_timeout",
    "forbidden_origin",
    "body_too_large",
    "uri_too_long",
    "expectation_failed",
    "wrong_host",
    "head_too_large",
    "internal",
    "unavailable",
    "version_not_supported",
)
"""What any request can be refused with before it is looked at, or because the service fails."""

WITH_PERMISSION = ("unauthorized", "forbidden")
WITH_NAME = ("not_found", "method_not_allowed")
WITH_TASK = ("task_deleted",)
WITH_QUERY = ("invalid_field", "unknown_field")
WITH_BODY = ("bad_json", "missing_field", *WITH_QUERY, "unsupported_media_type")

_JSON = "application/json"
_NO_CONTENT = 204
_SCHEMAS = "#/components/schemas/{name}"
_HEADERS = {
    "X-Request-Id": "the id of the request, in the log of the service and in the body of a refusal",
    "Retry-After": "after how many seconds to try again",
    "Allow": "the methods that the address takes",
    "WWW-Authenticate": "`Bearer`: a token is asked for",
    "Idempotency-Replayed": "`true` if this is the answer to an earlier request with the same key",
}
_REFUSAL_HEADERS = {
    401: "WWW-Authenticate",
    405: "Allow",
    429: "Retry-After",
    503: "Retry-After",
    507: "Retry-After",
}
_QUERY_SCHEMAS: dict[str, dict[str, object]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
    "order": {"type": "string", "enum": ["newest", "oldest"]},
}
_KEYED = "Idempotency-Key"
_DESCRIPTION = (
    "Decides which task of which agent runs next. Every refusal is a problem (RFC 9457) whose"
    " `code` is for programs."
)
_KEY_DESCRIPTION = (
    "1 to 255 visible ASCII characters. The same key with the same body gets the same answer"
    " again for at least a day; with another body it is refused."
)


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of a table of routes."""
    schemas, components = _schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "Headgate",
            "version": headgate.__version__,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": {name: _header(text) for name, text in _HEADERS.items()},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def errors_of(route: Route) -> list[str]:
    """Return the codes of all refusals that a route can answer with, in the order of the table."""
    codes = {*ANY_ROUTE, *route.errors}
    if route.needs is not None:
        codes.update(WITH_PERMISSION)
    if PLACEHOLDER in route.path:
        codes.update(WITH_NAME)
    if route.path.startswith(f"/tasks/{PLACEHOLDER}"):
        codes.update(WITH_TASK)
    if route.query:
        codes.update(WITH_QUERY)
    if route.body is not None:
        codes.update(WITH_BODY)
    return [code for code in CODES if code in codes]


Schemas = dict[type[msgspec.Struct], dict[str, Any]]


def _schemas(routes: Iterable[Route]) -> tuple[Schemas, dict[str, Any]]:
    kinds: dict[type[msgspec.Struct], None] = {ErrorBody: None}
    for route in routes:
        if route.body is not None:
            kinds[route.body] = None
        structs = [kind for kind in route.responses.values() if not isinstance(kind, str)]
        kinds.update(dict.fromkeys(structs))
    found, components = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS)
    return dict(zip(kinds, found, strict=True)), components


def _operation(route: Route, schemas: Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "responses": _responses(route, schemas),
        # Where no token is asked for, none is needed.
        "security": [{"bearer": []}, {}] if route.needs is not None else [],
    }
    if route.needs is not None:
        operation["description"] = f"Needs the permission `{route.needs}`."
    parameters = _parameters(route)
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        content = {_JSON: {"schema": schemas[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _operation_id(route: Route) -> str:
    parts = [part for part in route.path.replace(".", "/").split("/") if part]
    words = ["one" if part == PLACEHOLDER else part for part in parts]
    return "_".join([route.method.lower(), *words])


def _parameters(route: Route) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = []
    if PLACEHOLDER in route.path:
        text = {"type": "string", "minLength": 1}
        parameters.append({"name": "id", "in": "path", "required": True, "schema": text})
    parameters += [
        {"name": name, "in": "query", "schema": _QUERY_SCHEMAS.get(name, {"type": "string"})}
        for name in route.query
    ]
    if _KEYED in route.headers:
        key = {"type": "string", "pattern": "^[!-~]{1,255}$"}
        about = {"name": _KEYED, "in": "header", "description": _KEY_DESCRIPTION}
        parameters.append({**about, "schema": key})
    return parameters


def _responses(route: Route, schemas: Schemas) -> dict[str, Any]:
    responses = {
        str(status): _response(status, kind, route, schemas)
        for status, kind in route.responses.items()
    }
    by_status: dict[int, list[str]] = {}
    for code in errors_of(route):
        by_status.setdefault(CODES[code].status, []).append(code)
    for status, codes in by_status.items():
        responses[str(status)] = _refusal(status, codes, schemas)
    return dict(sorted(responses.items()))


def _response(
    status: int, kind: type[msgspec.Struct] | str, route: Route, schemas: Schemas
) -> dict[str, Any]:
    headers = ["X-Request-Id"]
    if _KEYED in route.headers:
        headers.append("Idempotency-Replayed")
    described = {"description": route.summary, "headers": _refer(headers)}
    if status == _NO_CONTENT:
        return described
    if isinstance(kind, str):
        return {**described, "content": {kind: {}}}
    return {**described, "content": {_JSON: {"schema": schemas[kind]}}}


def _refusal(status: int, codes: list[str], schemas: Schemas) -> dict[str, Any]:
    meanings = "; ".join(f"`{code}`: {CODES[code].meaning}" for code in codes)
    headers = ["X-Request-Id"]
    if status in _REFUSAL_HEADERS:
        headers.append(_REFUSAL_HEADERS[status])
    content = {PROBLEM_JSON.decode(): {"schema": schemas[ErrorBody]}}
    return {"description": meanings, "headers": _refer(headers), "content": content}


def _refer(headers: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in headers}


def _header(text: str) -> dict[str, Any]:
    return {"description": text, "schema": {"type": "string"}}
