"""The table of attacks: every route and every field of the API, and what somebody may try there.

A line without indentation is a route; below it stands each of its fields with its kind. The kind
says which hostile values are sent, and which of the five harms they aim at. A route or a field that
is described in `/openapi.json` and is not in the table fails the suite, and so does a line for
something that is gone. A route that needs `admin` has no fields here: a tenant is always refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from tenants.world import (
    MALLORY,
    MINE,
    OWN_CALL,
    THEIR_AGENT,
    THEIR_CALL,
    THEIRS,
    Tenant,
    World,
    own_call_body,
    own_task_body,
)

HARMS = ("spend", "block", "read", "slow", "fill")

TABLE = """
POST /tasks
  Idempotency-Key  header
  agentId          agent
  action           text
  tabId            text
  selector         text
  ref              text
  params           document
  priority         number
  deadline         moment
  callbackUrl      address
  projectId        project
  target           target
  slot             slot
  provider         text
  input            document
  weight           number
  estimate         document
  estimate.tokens  number
  estimate.usd     money
  costUsd          money
  scopes           scopes
  dependsOn        tasks
  onParentFailure  choice
  notBefore        moment
  labels           document
  maxAttempts      number
  timeoutSeconds   number
  onExhausted      choice
GET /tasks
  agentId          agent
  projectId        project
  state            choice
  target           target
  slot             slot
  provider         text
  scope            scope
  label            text
  createdAfter     moment
  createdBefore    moment
  text             text
  order            choice
  omit             text
  limit            number
  cursor           text
POST /tasks/batch
  Idempotency-Key  header
  agentId          agent
  callbackUrl      address
  projectId        project
  tasks            batch
GET /tasks/{id}
  id               task
POST /tasks/{id}/cancel
  id               task
GET /tasks/{id}/why
  id               task
POST /tasks/cancel
  agentId          agent
  projectId        project
  state            choices
  target           target
  slot             slot
  provider         text
  scope            scope
  label            text
  createdBefore    moment
  createdAfter     moment
  text             text
  confirm          flag
  limit            number
POST /tasks/retry
  agentId          agent
  projectId        project
  state            choices
  target           target
  slot             slot
  provider         text
  scope            scope
  label            text
  createdBefore    moment
  createdAfter     moment
  text             text
  confirm          flag
  limit            number
POST /tasks/{id}/retry
  id               task
GET /calls
  projectId        project
  agentId          agent
  model            text
  upstream         text
  slot             slot
  taskId           task
  state            choice
  since            moment
  until            moment
  limit            number
  cursor           text
GET /calls/{id}
  id               call
GET /calls/{id}/why
  id               call
POST /agents/{id}/claim
  id               agent
  workerId         worker
  capacity         number
  waitSeconds      short
  running          document
  running.[].taskId   task
  running.[].attempt  number
  running.[].progress  document
  running.[].progress.fraction  number
  running.[].progress.text  text
POST /agents/{id}/heartbeat
  id               agent
  workerId         worker
  running          document
  running.[].taskId   task
  running.[].attempt  number
  running.[].progress  document
  running.[].progress.fraction  number
  running.[].progress.text  text
POST /tasks/{id}/complete
  id               task
  workerId         worker
  attempt          number
  result           document
  usage            document
  usage.tokens     number
  usage.usd        money
  usage.model      text
  usage.inputTokens   number
  usage.outputTokens  number
POST /tasks/{id}/fail
  id               task
  workerId         worker
  attempt          number
  error            text
  retryable        flag
  cutOff           flag
  retryAfterSeconds  number
  usage            document
  usage.tokens     number
  usage.usd        money
  usage.model      text
  usage.inputTokens   number
  usage.outputTokens  number
GET /tasks/{id}/events
  id               task
GET /events
  agentId          agent
  projectId        project
  kind             choice
  state            choice
GET /webhooks
POST /webhooks/ping
GET /webhooks/secret
POST /webhooks/secret/rotate
GET /webhooks/{id}
POST /webhooks/{id}/redeliver
POST /budgets/create
  scope            scope
  limitUsd         money
  limitTokens      number
  window           text
POST /budgets/reserve
  id               text
  scope            scope
  usd              money
  tokens           number
  also             scopes
  leaseSeconds     number
  dispatched       flag
POST /budgets/dispatched
  id               reservation
  scope            scope
POST /budgets/extend
  id               reservation
  scope            scope
  leaseSeconds     number
POST /budgets/commit
  id               reservation
  scope            scope
  usd              money
  tokens           number
POST /reservations/{id}/release
POST /reservations/{id}/extend
POST /budgets/adjust
POST /budgets/release
  id               reservation
  scope            scope
GET /budgets/status
  scope            scope
GET /budgets/journal
  scope            scope
  limit            number
  cursor           text
GET /usage
  by               choice
  since            moment
  until            moment
GET /estimates
  projectId        project
POST /tokens
GET /tokens
DELETE /tokens/{id}
POST /scheduler/pause
POST /scheduler/resume
POST /scheduler/reload
GET /projects
GET /projects/{id}
  id               project
PATCH /projects/{id}
GET /agents
GET /agents/{id}
PATCH /agents/{id}
GET /targets
GET /targets/{id}
PATCH /targets/{id}
GET /budgets
PATCH /budgets
DELETE /budgets
GET /closures
POST /closures/open
GET /audit
GET /settings
GET /slots
PATCH /slots/{id}
GET /slots/{id}
  id               slot
GET /slots/{id}/log
POST /slots/{id}/warm
POST /slots/{id}/observe
POST /slots/{id}/enable
POST /slots/{id}/disable
GET /models
GET /models/{id}
GET /scheduler/stats
GET /scheduler/lanes
  projectId        project
  find             text
GET /metrics
GET /livez
GET /readyz
GET /openapi.json
"""

CALLS = """
POST /v1/chat/completions
  X-Headgate-Project   project
  X-Headgate-Agent     agent
  X-Headgate-Scope     scope
  X-Headgate-Priority  number
  X-Headgate-Reserve   choice
  model            model
  stream           flag
  max_tokens       number
POST /v1/completions
  X-Headgate-Project   project
  X-Headgate-Agent     agent
  X-Headgate-Scope     scope
  X-Headgate-Priority  number
  X-Headgate-Reserve   choice
  model            model
  stream           flag
  max_tokens       number
POST /v1/responses
  X-Headgate-Project   project
  X-Headgate-Agent     agent
  X-Headgate-Scope     scope
  X-Headgate-Priority  number
  X-Headgate-Reserve   choice
  model            model
  stream           flag
  max_tokens       number
POST /v1/embeddings
  X-Headgate-Project   project
  X-Headgate-Agent     agent
  X-Headgate-Scope     scope
  X-Headgate-Priority  number
  X-Headgate-Reserve   choice
  model            model
  stream           flag
  max_tokens       number
POST /v1/messages
  X-Headgate-Project   project
  X-Headgate-Agent     agent
  X-Headgate-Scope     scope
  X-Headgate-Priority  number
  X-Headgate-Reserve   choice
  model            model
  stream           flag
  max_tokens       number
POST /v1/messages/count_tokens
  X-Headgate-Project   project
  X-Headgate-Agent     agent
  X-Headgate-Scope     scope
  X-Headgate-Priority  number
  X-Headgate-Reserve   choice
  model            model
  stream           flag
  max_tokens       number
GET /v1/models
GET /v1/models/{id}
  id               model
GET /v1/responses/{id}
  id               response
DELETE /v1/responses/{id}
  id               response
GET /upstreams/{id}/{path}
  id               upstream
  path             place
POST /upstreams/{id}/{path}
  id               upstream
  path             place
  X-Headgate-Project   project
  X-Headgate-Agent     agent
  X-Headgate-Scope     scope
  X-Headgate-Priority  number
  X-Headgate-Reserve   choice
  model            model
  stream           flag
  max_tokens       number
DELETE /upstreams/{id}/{path}
  id               upstream
  path             place
"""
"""The routes of the gateway, where a tenant spends the money of its own budgets on models."""

OF_PROVIDERS = {
    "previous_response_id": "response",
    "conversation": "text",
    "background": "flag",
    "n": "number",
    "tools": "document",
    "service_tier": "choice",
}
"""Fields of calls that the gateway reads and only providers describe."""

PREFIXES = {"/p/{}": "project", f"/p/{MINE}/{{}}": "agent", f"/p/{THEIRS}/{{}}": "agent"}
"""What may stand before the path of a call, with the kind of the name in it."""

LONG = "x" * 300_000
DEEP = "[" * 3_000 + "]" * 3_000
UNKNOWN_CALL = "call-01m7fs2skb2415wvpawg4jr96h"
UNKNOWN_RESPONSE = "resp_0"
UNKNOWN_TASK = "01a00000000000000000000000000000"


class Kind(NamedTuple):
    """What is sent in a field of this kind, and the harms that it aims at."""

    aims: tuple[str, ...]
    values: Callable[[World], list[Any]]


KINDS: Mapping[str, Kind] = {
    "text": Kind(
        ("slow", "fill"),
        lambda _: [LONG, "{" * 20_000, "\0", "%" * 5_000, "a" * 5_000 + "!", "${" * 5_000, 7],
    ),
    "header": Kind(("block", "fill"), lambda _: ["x" * 5_000, "their-key", "x"]),
    "document": Kind(
        ("slow", "fill"),
        lambda _: [
            {"x": LONG},
            {"x": _nested(200)},
            {str(n): n for n in range(5_000)},
            [LONG],
            LONG,
            None,
        ],
    ),
    "number": Kind(
        ("spend", "block", "slow"),
        lambda _: [0, -1, 1e-300, 1e300, 2**31, 2**53, 2**63 - 1, 2**63, 86_400, "0", "x"],
    ),
    "short": Kind(("block",), lambda _: [-1, 0, 0.05, 1e300, "x"]),
    "money": Kind(
        ("spend", "slow"),
        lambda _: [
            *("0", 0, "-1", -0.5, "1000000", "9223372036854.775807", "1e400", "NaN", "0.0000001"),
            "9" * 100_000,
            "0." + "0" * 100_000 + "1",
        ],
    ),
    "moment": Kind(
        ("block", "fill"),
        lambda _: [
            *("1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2030-01-01T00:00:00Z", "0", ""),
            LONG,
        ],
    ),
    "address": Kind(
        ("read", "slow"),
        lambda _: ["http://169.254.169.254/", "http://127.0.0.1:1/", "file:///etc/passwd", LONG],
    ),
    "agent": Kind(("block", "read"), lambda _: [THEIR_AGENT, MALLORY, "", "a/b", LONG]),
    "project": Kind(
        ("spend", "block", "read"), lambda _: [THEIRS, "default", MINE, "", "no-such", LONG]
    ),
    "target": Kind(("block", "read"), lambda _: ["pull", "echo", "no-such", LONG]),
    "slot": Kind(("block", "read"), lambda _: ["common", "no-such", "", LONG]),
    "scope": Kind(
        ("spend", "block", "read"),
        lambda _: [
            *("", f"project:{THEIRS}", f"project:{THEIRS}/agent:{MALLORY}", f"project:{MINE}"),
            *(f"session:s/agent:{MALLORY}", f"agent:{MALLORY}", f"project:{MINE}/agent:{MALLORY}"),
            *("/".join(f"k{n}:v" for n in range(500)), LONG),
        ],
    ),
    "model": Kind(
        ("spend", "read", "slow"),
        lambda _: ["gpt-unpriced", "a\r\nx: y", "openai/gpt-5", "", LONG, 7],
    ),
    "upstream": Kind(("block", "read"), lambda _: ["no-such", "..", "%2e%2e", "", LONG]),
    "place": Kind(
        ("spend", "read"),
        lambda _: ["..", "../../tasks", "%2e%2e/tasks", "chat/completions", "admin", "x" * 5_000],
    ),
    "scopes": Kind(
        ("spend", "block"),
        lambda _: [
            *([f"project:{THEIRS}"], [""], [f"project:{THEIRS}/agent:{MALLORY}"]),
            *([f"project:{MINE}/session:{n}" for n in range(300)], [LONG], "x"),
        ],
    ),
    "task": Kind(
        ("block", "read"),
        lambda world: [world.their_done_task, world.their_waiting_task, UNKNOWN_TASK, "x", LONG],
    ),
    "response": Kind(
        ("block", "read"),
        lambda world: [world.their_response, UNKNOWN_RESPONSE, "x", "../models", "", LONG],
    ),
    "call": Kind(
        ("block", "read"),
        lambda world: [THEIR_CALL, UNKNOWN_CALL, world.their_waiting_task, "call-", "x", LONG],
    ),
    "tasks": Kind(
        ("block", "read", "slow"),
        lambda world: [[world.their_waiting_task], [world.their_done_task], ["x"] * 5_000],
    ),
    "worker": Kind(("block", "read"), lambda world: [world.their_worker, "no-such", "", LONG]),
    "reservation": Kind(("spend", "block", "read"), lambda _: ["their-call", "no-such", "", LONG]),
    "choice": Kind(("slow",), lambda _: ["no-such", "", LONG]),
    "choices": Kind(("slow",), lambda _: [["no-such"], ["done"] * 5_000, "done"]),
    "flag": Kind(("block",), lambda _: [True, False, "yes"]),
    "batch": Kind(
        ("spend", "block", "fill", "slow"),
        lambda world: [
            [{"projectId": THEIRS, "agentId": THEIR_AGENT}],
            [{"costUsd": "0"}] * 40,
            [{"weight": 0, "estimate": {"tokens": 0}}] * 40,
            [{"dependsOn": [world.their_waiting_task]}],
            [{"notBefore": "2030-01-01T00:00:00Z"}] * 40,
            [{}] * 20_000,
        ],
    ),
}

RAW_BODIES = (
    b"[" * (1 << 20),
    b'{"a":' * 100_000,
    DEEP.encode(),
    b'{"action": "' + b"\\u0000" * 1_000 + b'"}',
    b"\xff\xfe{}",
    b'{"action": "a", ' * 10_000,
    b"{" + b'"a":1,' * 50_000 + b'"a":1}',
    b"1" * 500_000,
)
"""Bodies for every route that reads one: none may cost more than a moment."""


class Attack(NamedTuple):
    """One request of the hostile tenant."""

    method: str
    path: str
    body: object = None
    headers: Mapping[str, str] = {}
    is_stream: bool = False
    field: str = ""
    value: object = None

    def __str__(self) -> str:
        """Name the attack in a message."""
        value = repr(self.value)
        return f"{self.method} {self.path[:80]} {self.field}={value[:60]}"


def routes() -> dict[str, dict[str, str]]:
    """Return the fields of each route in the table, with their kinds."""
    found: dict[str, dict[str, str]] = {}
    route = ""
    for line in (TABLE.strip() + CALLS).strip().splitlines():
        if not line.startswith(" "):
            route = line.strip()
            found[route] = {}
        else:
            name, kind = line.split()
            found[route][name] = kind
    return found


def is_call(route: str) -> bool:
    """Tell whether a route is the gateway's."""
    return route.partition(" ")[2].startswith(("/v1/", "/upstreams/"))


def described(document: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the fields of each route that `/openapi.json` describes: path, query, header, body."""
    schemas = document["components"]["schemas"]
    found: dict[str, set[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            names = {parameter["name"] for parameter in operation.get("parameters", ())}
            for content in operation.get("requestBody", {}).get("content", {}).values():
                names.update(_fields(content["schema"], schemas, "", ()))
            found[f"{method.upper()} {path}"] = names
    return found


def first(route: str, tenant: Tenant, world: World) -> Attack:
    """Return the request that the attacks on a route begin from, which harms nobody."""
    method, _, path = route.partition(" ")
    name, body = _base(route, tenant, world)
    return _attack(method, path, name, body, "(nothing)", None)


def attacks(route: str, tenant: Tenant, world: World) -> Iterator[Attack]:
    """Send every hostile value in every field of a route, all else being right."""
    method, _, path = route.partition(" ")
    fields = routes()[route]
    if is_call(route) and method == "POST":
        fields |= OF_PROVIDERS
    for field, kind in fields.items():
        for value in KINDS[kind].values(world):
            name, body = _base(route, tenant, world)
            if field == "id" and "{id}" in path:
                yield _attack(method, path, value, body, field, value)
            elif field == "path" and "{path}" in path:
                yield _attack(method, path.replace("{path}", str(value)), name, body, field, value)
            elif field.startswith("X-Headgate-"):
                yield _attack(method, path, name, body, field, value)._replace(
                    headers={field: str(value)}
                )
            elif method == "GET":
                yield _attack(method, path, name, None, field, value, query={field: value})
            elif kind == "header":
                yield _attack(method, path, name, body, field, value)._replace(
                    headers={field: str(value)}
                )
            else:
                yield _attack(method, path, name, _with(body, field, value), field, value)
    for prefix, kind in PREFIXES.items() if is_call(route) else ():
        for value in KINDS[kind].values(world):
            name, body = _base(route, tenant, world)
            before = prefix.format(quote(str(value)[:2_000], safe=""))
            yield _attack(method, before + path, name, body, prefix, value)
    if method != "GET" and routes()[route]:
        name, _ = _base(route, tenant, world)
        for raw in RAW_BODIES:
            yield _attack(method, path, name, raw, "(body)", raw[:20])


def _attack(
    method: str,
    path: str,
    name: object,
    body: object,
    field: str,
    value: object,
    *,
    query: Mapping[str, object] | None = None,
) -> Attack:
    place = path.replace("{id}", quote(str(name)[:2_000], safe=""))
    place = place.replace("{path}", "chat/completions" if method == "POST" else "models")
    if query:
        place += "?" + urlencode({key: str(each)[:6_000] for key, each in query.items()})
    is_stream = path.endswith("/events")
    return Attack(method, place, body, {}, is_stream, field, value)


def _base(route: str, tenant: Tenant, world: World) -> tuple[str, dict[str, Any] | None]:
    """Return a name and a body that the route takes from this tenant."""
    own_scope = {
        "project": f"project:{MINE}/session:s",
        "agent": f"project:{THEIRS}/agent:{MALLORY}",
        "both": f"project:{MINE}/agent:{MALLORY}",
    }[tenant.kind]
    match route:
        case "POST /tasks":
            return "", dict(own_task_body(tenant))
        case "POST /tasks/batch":
            return "", dict(own_task_body(tenant)) | {"tasks": [{"action": "a"}]}
        case "POST /tasks/{id}/complete" | "POST /tasks/{id}/fail":
            task_id, worker_id, attempt = world.taken_task(tenant)
            body: dict[str, Any] = {"workerId": worker_id, "attempt": attempt}
            if route.endswith("fail"):
                body["error"] = "it broke"
            return task_id, body
        case "POST /agents/{id}/claim":
            return MALLORY, {"capacity": 1, "waitSeconds": 0}
        case "POST /agents/{id}/heartbeat":
            claimed = tenant.ask("POST", f"/agents/{MALLORY}/claim", {"capacity": 1})
            return MALLORY, {"workerId": claimed.json.get("workerId", "x"), "running": []}
        case "POST /budgets/create":
            return "", {"scope": f"{own_scope}/step:{_new_id()}", "limitUsd": "0.5"}
        case "POST /budgets/reserve":
            return "", {"id": _new_id(), "scope": own_scope, "usd": "0", "tokens": 0}
        case (
            "POST /budgets/dispatched"
            | "POST /budgets/extend"
            | "POST /budgets/commit"
            | "POST /budgets/release"
        ):
            held = {"id": _new_id(), "scope": own_scope}
            tenant.ask("POST", "/budgets/reserve", held | {"usd": "0.000001", "tokens": 1})
            return "", held
        case "POST /tasks/{id}/retry":
            task_id = world.own_task(tenant)
            tenant.ask("POST", f"/tasks/{task_id}/cancel")
            return task_id, {}
        case "GET /projects/{id}":
            return MINE, None
        case "GET /slots/{id}":
            return "common", None
        case "GET /calls/{id}" | "GET /calls/{id}/why":
            return OWN_CALL, None
        case "GET /v1/models/{id}":
            return "gpt-5", None
        case "GET /v1/responses/{id}" | "DELETE /v1/responses/{id}":
            made = tenant.ask("POST", "/v1/responses", own_call_body("responses"))
            return str(made.json["id"]), None
    if "/upstreams/" in route:
        return "openai", own_call_body("chat") if "POST" in route else None
    if "/v1/" in route:
        return "", own_call_body(route.rpartition("/")[2]) if "POST" in route else None
    if "/tasks/{id}" in route:
        return world.own_task(tenant), {}
    return "x", {} if route.startswith("POST") else None


def _new_id() -> str:
    return uuid.uuid4().hex


def _with(body: dict[str, Any] | None, field: str, value: object) -> dict[str, Any]:
    """Return a body with one field changed, at any depth; `[]` is the only entry of a list."""
    changed = dict(body or {})
    head, _, rest = field.partition(".")
    if not rest:
        changed[head] = value
    elif rest.startswith("[]."):
        other = {"taskId": UNKNOWN_TASK, "attempt": 1}
        changed[head] = [other | {rest[3:]: value}]
    else:
        inner = changed.get(head)
        changed[head] = _with(inner if isinstance(inner, dict) else {}, rest, value)
    return changed


def _nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def _fields(
    schema: Mapping[str, Any], schemas: Mapping[str, Any], prefix: str, seen: tuple[str, ...]
) -> Iterator[str]:
    reference = schema.get("$ref")
    if reference is not None:
        name = str(reference).rpartition("/")[2]
        if name not in seen:
            yield from _fields(schemas[name], schemas, prefix, (*seen, name))
        return
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _fields(choice, schemas, prefix, seen)
    for name, inner in schema.get("properties", {}).items():
        yield prefix + name
        yield from _fields(inner, schemas, f"{prefix}{name}.", seen)
    if isinstance(schema.get("items"), dict):
        yield from _fields(schema["items"], schemas, f"{prefix}[].", seen)
