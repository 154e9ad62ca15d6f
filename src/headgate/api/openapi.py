"""`GET /openapi.json`: the API described to programs, made from the table of routes.

Rule: every status and media type that a route can answer with is in its description. What a route
says of itself stands in its row; what any request can meet on its way there is added here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import inspect

import headgate
from headgate.api.api import Route
from headgate.api.errors import CODES
from headgate.api.http.response import PROBLEM_JSON
from headgate.api.schema.tasks import ErrorBody, LimitsBody
from headgate.config.messages import field_docs
from headgate.config.settings import SchedulerSettings

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
QUERY_DOCS = {
    "agentId": "Only entries of this agent.",
    "by": "What each row stands for: `project` (the default), `agent`, `model`, `slot` or `day`.",
    "changed": "`true` shows only settings that differ from the default.",
    "createdAfter": "Only entries submitted since this time; RFC 3339 with a zone.",
    "createdBefore": "Only entries submitted before this time.",
    "cursor": "`nextCursor` of the page before. A page without `nextCursor` is the last one.",
    "find": "Only entries with this text in the name of the project or the agent.",
    "kind": "Only these kinds, such as `task.completed,task.failed`. A `reset` always comes.",
    "label": "Only entries with this label, as `key=value`, or as `key` for any value.",
    "limit": "How many entries, 1 to 1,000. The default is 100.",
    "model": "Only entries for this model, as clients name it.",
    "omit": "What to leave out, such as `params,input,result`, which may be large.",
    "order": "`newest` (the default) or `oldest` first.",
    "projectId": "Only entries of this project.",
    "provider": "Only entries for any slot of this provider.",
    "scope": "The budget. Empty is the root. For tasks: charged to it, or to one within it.",
    "section": "Only settings of this section.",
    "since": "From when: a day, or RFC 3339 with a zone.",
    "slot": "Only entries with this key slot.",
    "state": "Only entries in one of these states, such as `queued,running`.",
    "target": "Only entries for this target.",
    "task": "Only entries of this task.",
    "taskId": "Only entries of this task.",
    "text": "Only entries that contain this text, in either case, at most 200 characters.",
    "until": "Until when; as `since`.",
    "upstream": "Only entries to this upstream.",
}
"""What each query parameter does; one name means the same wherever it is taken."""

FIELD_DOCS = {
    "agent_id": "The agent.",
    "attempt": "The number of the attempt.",
    "call_id": "The id of the call.",
    "configured": "Whether it is in the settings file.",
    "count": "How many there are.",
    "created_at": "When it was created.",
    "ended_at": "When it ended.",
    "error": "What went wrong.",
    "id": "Its id or name.",
    "inflight": "Tasks that are assigned or run.",
    "lease_seconds": "How long the lease lasts from now on.",
    "limit_tokens": "The most tokens; left out without a limit.",
    "limit_usd": "The most dollars; left out without a limit.",
    "name": "The name.",
    "next_cursor": "The `cursor` of the next page. Left out on the last page.",
    "overridden": "The fields that are not as the file says.",
    "position": "How many tasks wait, this one included.",
    "priority": "Lower goes first.",
    "project_id": "The project.",
    "provider": "The provider of the key.",
    "queued": "Tasks that wait.",
    "reset": "Fields that are to be as the file says again.",
    "scope": "The scope of the budget. Empty is the root.",
    "slot": "The key slot.",
    "state": "The state.",
    "status": "`active`, `paused` or `draining`; for a project also `archived`.",
    "task_id": "The id of the task.",
    "token_id": "The token.",
    "tokens": "Tokens.",
    "usd": "Dollars.",
    "window": "The time that the limits count for, such as `day@Europe/Berlin`.",
}
"""What a field means wherever nothing is said below it."""

_KEYED = "Idempotency-Key"
_NAMES = re.compile(r"\{(\w+)\}")
_DESCRIPTION = (
    "Decides which task of which agent runs next. Every refusal is a problem (RFC 9457) whose"
    " `code` is for programs."
)
_KEY_DESCRIPTION = (
    "1 to 255 visible ASCII characters. The same key with the same body gets the same answer"
    " again for at least a day; with another body it is refused."
)


def openapi(routes: Sequence[Route], calls: Sequence[Route] = ()) -> dict[str, Any]:
    """Return the OpenAPI document of a table of routes.

    `calls` are those of the gateway: providers say what is asked and answered there.
    """
    schemas, components = _schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    for route in calls:
        paths.setdefault(route.path, {})[route.method.lower()] = _call_operation(route)
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
    for kind in structs_of(kinds):
        properties = components.get(kind.__name__, {}).get("properties", {})
        for field, text in docs_of(kind).items():
            if field in properties:
                properties[field]["description"] = text
    return dict(zip(kinds, found, strict=True)), components


def docs_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return what each field of a struct means, by its name in JSON, as far as anything is said."""
    # The limits that are shown are settings of the same names.
    own = field_docs(SchedulerSettings if kind is LimitsBody else kind)
    found = {
        field.encode_name: own.get(field.name) or FIELD_DOCS.get(field.name, "")
        for field in msgspec.structs.fields(kind)
    }
    return {name: text for name, text in found.items() if text}


def structs_of(kinds: Iterable[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    """Return these structs and all that lie within them."""
    found: dict[type[msgspec.Struct], None] = {}
    waiting = [inspect.type_info(kind) for kind in kinds]
    while waiting:
        match waiting.pop():
            case inspect.StructType(cls=kind, fields=fields) if kind not in found:
                found[kind] = None
                waiting += [field.type for field in fields]
            case inspect.UnionType(types=types):
                waiting += types
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                waiting.append(item)
            case inspect.DictType(value_type=value):
                waiting.append(value)
    return list(found)


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


_CALL_HEADERS = {
    "X-Headgate-Project": "the project of the call; `/p/<project>` before the path says the same",
    "X-Headgate-Agent": "the agent of the call; `/p/<project>/<agent>` before the path as well",
    "X-Headgate-Scope": "further budgets that are charged, with commas between them",
    "X-Headgate-Priority": "a whole number; lower goes first",
    "X-Headgate-Reserve": "`strict` holds what the call can cost at most",
}
_CALL_FIELDS = {
    "model": {"type": "string"},
    "stream": {"type": "boolean"},
    "max_tokens": {"type": "integer"},
}


def _call_operation(route: Route) -> dict[str, Any]:
    """Describe what is passed on to a provider, whose documentation has the rest."""
    names = _NAMES.findall(route.path)
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    parameters += [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
        for name, text in _CALL_HEADERS.items()
        if name in route.headers
    ]
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "security": [{"bearer": []}, {}],
        "responses": {
            **{
                str(status): {"description": route.summary, "content": {str(kind): {}}}
                for status, kind in route.responses.items()
            },
            "default": {
                "description": "an error in the shape of the protocol",
                "content": {_JSON: {}},
            },
        },
    }
    if parameters:
        operation["parameters"] = parameters
    if route.method == "POST":
        schema = {"type": "object", "properties": _CALL_FIELDS}
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return operation


def _operation_id(route: Route) -> str:
    path = _NAMES.sub(lambda name: name[0] if name[0] == PLACEHOLDER else name[1], route.path)
    parts = [part for part in path.replace(".", "/").split("/") if part]
    words = ["one" if part == PLACEHOLDER else part for part in parts]
    return "_".join([route.method.lower(), *words])


def _parameters(route: Route) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = []
    if PLACEHOLDER in route.path:
        text = {"type": "string", "minLength": 1}
        parameters.append({"name": "id", "in": "path", "required": True, "schema": text})
    parameters += [
        {
            "name": name,
            "in": "query",
            "description": QUERY_DOCS[name],
            "schema": _QUERY_SCHEMAS.get(name, {"type": "string"}),
        }
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
