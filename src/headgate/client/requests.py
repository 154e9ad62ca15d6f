"""What a client sends: to which address, as whom, and the fields of each request as JSON.

`Client` and `SyncClient` share this; how a request travels is the business of their transports.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from headgate.api.schema.admin import ProjectStatusText, ReserveText, StandingText
from headgate.core.idempotency import KEY_RULE, is_key
from headgate.errors import InvalidFieldError, InvalidSettingError

DEFAULT_URL = "http://127.0.0.1:7420"
URL_VARIABLE = "HEADGATE_URL"
TOKEN_VARIABLE = "HEADGATE_TOKEN"  # noqa: S105 - the name of a variable
IDEMPOTENCY_KEY = "idempotency-key"
LAST_EVENT_ID = "last-event-id"

_PORTS = {"http": 80, "https": 443}
_TOKEN = re.compile(r"[\x21-\x7e]{1,512}")
_LOOPBACK = re.compile(r"localhost|127(\.[0-9]{1,3}){3}|::1")

Body = TypeVar("Body")
Query = Mapping[str, str | int | None]

Moment = datetime | timedelta | str
"""A time: with its zone, or from now, or as RFC 3339."""

Amount = str | int | float | Decimal
"""Dollars; a string or a `Decimal` is exact."""


# The address of a service, and who asks.


class Address(NamedTuple):
    """The parts of a service's URL; `prefix` is the path that its routes lie under."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @property
    def url(self) -> str:
        """The address as people write it."""
        return f"{self.scheme}://{self.netloc}{self.prefix}"

    @property
    def netloc(self) -> str:
        """Host and port, as a Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether it is on this machine, judged by its text; no name is looked up."""
        return _LOOPBACK.fullmatch(self.host) is not None


def address_of(url: str | None) -> Address:
    """Return the address of an argument, of HEADGATE_URL, or the default one."""
    given = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError:
        raise _bad_url("is not an address") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise _bad_url("must start with http:// or https:// and name a host")
    if parts.username is not None or parts.query or parts.fragment:
        raise _bad_url("must have no user name, query or fragment; give the token apart from it")
    return Address(
        parts.scheme, parts.hostname, port or _PORTS[parts.scheme], parts.path.rstrip("/")
    )


def token_of(token: str | None) -> str | None:
    """Return the token of an argument or of HEADGATE_TOKEN; None where there is none."""
    given = (token or os.environ.get(TOKEN_VARIABLE) or "").strip()
    if given and _TOKEN.fullmatch(given) is None:
        raise InvalidSettingError("token", "must be one word of printable ASCII characters")
    return given or None


def headers_of(token: str | None) -> dict[str, str]:
    """Return what every request says of its sender."""
    headers = {
        "user-agent": "headgate",
        "accept": "application/json",
        "accept-encoding": "identity",
    }
    if token:
        headers["authorization"] = f"Bearer {token}"
    return headers


def _bad_url(problem: str) -> InvalidSettingError:
    return InvalidSettingError("url", problem)


# One request.


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[Body]):
    """One request, ready to be sent; `is_repeatable` if sending it twice does what once does.

    `timeout_seconds` is for calls that wait on purpose, over the client's own.
    """

    method: str
    path: str
    response_type: type[Body]
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_repeatable: bool = False
    timeout_seconds: float | None = None


def new_call(
    method: str,
    path: str,
    *,
    response_type: type[Body],
    body: object = None,
    query: Query | None = None,
    headers: Mapping[str, str] | None = None,
    is_repeatable: bool | None = None,
    timeout_seconds: float | None = None,
) -> Call[Body]:
    """Describe any call; one that only reads, or that has an idempotency key, is repeatable."""
    given = {name: value for name, value in (query or {}).items() if value is not None}
    sent = dict(headers or {})
    if is_repeatable is None:
        is_repeatable = method in ("GET", "PUT", "DELETE") or IDEMPOTENCY_KEY in sent
    return Call(
        method=method,
        path=f"{path}?{urlencode(given)}" if given else path,
        response_type=response_type,
        body=None if body is None else msgspec.json.encode(body),
        headers=sent,
        is_repeatable=is_repeatable,
        timeout_seconds=timeout_seconds,
    )


def resource_path(kind: str, name: str, verb: str = "", *, field_name: str = "id") -> str:
    """Return the path of one resource, or of what can be done with it."""
    if not name:
        raise InvalidFieldError(field_name, "must not be empty")
    path = f"/{kind}/{quote(name, safe='')}"
    return f"{path}/{verb}" if verb else path


def task_path(task_id: str, verb: str = "") -> str:
    """Return the path of a task, or of what can be done with it."""
    return resource_path("tasks", task_id, verb, field_name="task_id")


def key_headers(key: str | None, *, field: str = "idempotency_key") -> dict[str, str]:
    """Return the header with an idempotency key; without one given, a new key is drawn."""
    if key is not None and not is_key(key):
        raise InvalidFieldError(field, f"must be {KEY_RULE}")
    return {IDEMPOTENCY_KEY: os.urandom(16).hex() if key is None else key}


def task_query(
    which: ListFilter, *, limit: int | None = None, cursor: str | None = None
) -> dict[str, str | int | None]:
    """Return the query that asks for one page of tasks."""
    given: dict[str, object] = {**which, "limit": limit, "cursor": cursor}
    return {camel(name): _query_value(value) for name, value in given.items()}


def _query_value(value: object) -> str | int | None:
    if isinstance(value, datetime):
        return value.isoformat()
    return value if value is None or isinstance(value, int) else str(value)


def timestamp(value: datetime | str | None) -> str | None:
    """Return a time as a query has it."""
    return value.isoformat() if isinstance(value, datetime) else value


def events_call(
    task_id: str | None = None, *, last_event_id: str | None = None, **query: str | None
) -> Call[bytes]:
    """Describe a stream of events, of all tasks or of one, after the one that was seen last."""
    path = "/events" if task_id is None else task_path(task_id, "events")
    headers = {"accept": "text/event-stream"}
    if last_event_id:
        headers[LAST_EVENT_ID] = last_event_id
    return new_call("GET", path, response_type=bytes, headers=headers, query=camel_keys(query))


# What a program says of a task, and of which tasks it means.


class TaskFields(TypedDict, total=False):
    """The fields of a task, as the HTTP API has them; what is left out has the service's default.

    `estimate_tokens` and `estimate_usd` are what the task is expected to use; `cost_usd` is what
    each attempt costs, whatever it reports. `slot` names the key
    that it runs on, `provider` leaves the choice between those of a provider to the service. An
    attempt that takes longer than `timeout_seconds` is stopped.
    """

    agent_id: str | None
    action: str | None
    tab_id: str | None
    selector: str | None
    ref: str | None
    params: Mapping[str, Any] | None
    priority: int | None
    deadline: Moment | None
    callback_url: str | None
    project_id: str | None
    target: str | None
    slot: str | None
    provider: str | None
    input: Any
    weight: float | None
    estimate_tokens: int | None
    estimate_usd: float | Decimal | str | None
    cost_usd: float | Decimal | str | None
    scopes: Sequence[str] | None
    depends_on: Sequence[str] | None
    on_parent_failure: Literal["fail", "run"] | None
    not_before: Moment | None
    labels: Mapping[str, str] | None
    max_attempts: int | None
    timeout_seconds: float | None
    on_exhausted: Literal["wait", "reject"] | None


class TaskFilter(TypedDict, total=False):
    """Which tasks are meant, where several can be; `label` is one, as `key=value` or `key`.

    `text` is looked for in the id, the project, the agent, the action, the labels and the error.
    """

    agent_id: str | None
    project_id: str | None
    state: Sequence[str]
    target: str | None
    slot: str | None
    provider: str | None
    scope: str | None
    label: str | None
    created_before: datetime | None
    created_after: datetime | None
    text: str | None


class ListFilter(TypedDict, total=False):
    """Which tasks are listed, as for several at once; `state` may be several, as `queued,running`.

    Times have a zone. The `order` is newest first unless given. To `omit` is what tasks are to be
    shown without, as `params,input,result`.
    """

    agent_id: str | None
    project_id: str | None
    state: str | None
    target: str | None
    slot: str | None
    provider: str | None
    scope: str | None
    label: str | None
    created_before: datetime | str | None
    created_after: datetime | str | None
    text: str | None
    order: Literal["newest", "oldest"] | None
    omit: str | None


_TIMES = ("deadline", "not_before")
_ESTIMATE = ("estimate_tokens", "estimate_usd")


def task_body(fields: TaskFields, *, now: datetime | None = None) -> dict[str, object]:
    """Return a task as the service reads it, without what is not given."""
    given = {name: value for name, value in fields.items() if value is not None}
    unknown = sorted(given.keys() - TaskFields.__annotations__.keys())
    if unknown:
        raise InvalidFieldError(unknown[0], "is not a field of a task")
    estimate = {
        name.removeprefix("estimate_"): given.pop(name) for name in _ESTIMATE if name in given
    }
    body = {camel(name): value for name, value in given.items() if name not in _TIMES}
    for name in _TIMES:
        if name in given:
            body[camel(name)] = _time(name, given[name], now or datetime.now(UTC))
    return {**body, "estimate": estimate} if estimate else body


def batch_body(
    tasks: Iterable[TaskFields],
    *,
    agent_id: str | None,
    project_id: str | None,
    callback_url: str | None,
) -> dict[str, object]:
    """Return several tasks as the service reads them, with what they share."""
    shared = {"agentId": agent_id, "projectId": project_id, "callbackUrl": callback_url}
    body: dict[str, object] = {name: value for name, value in shared.items() if value is not None}
    bodies = [task_body(fields) for fields in tasks]
    body["tasks"] = bodies
    if not ("agentId" in body or "projectId" in body):
        body |= shared_by(bodies)
    return body


def shared_by(bodies: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return an agent or a project for a batch whose tasks all name their own.

    The service asks for one even then. It goes for no task: what a task says itself comes first.
    """
    for name in ("agentId", "projectId"):
        if bodies and all(name in body for body in bodies):
            return {name: bodies[0][name]}
    return {}


def camel(name: str) -> str:
    """Return a name as the JSON of the service has it."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def camel_keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields under the names that the JSON of the service has."""
    return {camel(name): value for name, value in fields.items()}


def given_keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same, without what is None."""
    return {camel(name): value for name, value in fields.items() if value is not None}


def _time(name: str, value: object, now: datetime) -> object:
    if isinstance(value, timedelta):
        return now + value
    if isinstance(value, datetime) and value.tzinfo is None:
        raise InvalidFieldError(name, "must have a time zone, as in datetime.now(UTC)")
    return value


# What a program says of a change to something that is configured. What is left out stays as it is;
# None takes the value away, which leaves the default.


class ProjectChange(TypedDict, total=False):
    """A change of a project."""

    credit_weight: float | None
    max_concurrent_agents: int | None
    budget_limit: int | None
    status: ProjectStatusText | None


class AgentChange(TypedDict, total=False):
    """A change of an agent."""

    type: str | None
    capacity: int | None
    accepts_open: bool | None
    status: StandingText | None


class TargetChange(TypedDict, total=False):
    """A change of a target."""

    slot: str | None
    provider: str | None
    estimate_usd: Amount | None
    estimate_tokens: int | None
    status: StandingText | None


class SlotChange(TypedDict, total=False):
    """A change of a key slot."""

    max_inflight: int | None


class BudgetChange(TypedDict, total=False):
    """A change of what a scope may use."""

    limit_usd: Amount | None
    limit_tokens: int | None
    window: str | None
    reserve: ReserveText | None


def change_body(reset: Iterable[str], change: Mapping[str, object]) -> dict[str, object]:
    """Return a change as the service reads it; fields in `reset` are as the file says again."""
    body: dict[str, object] = camel_keys(change)
    named = [camel(name) for name in reset]
    return {**body, "reset": named} if named else body
