"""What a program says of a task that it submits, and the JSON of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal, TypedDict

from headgate.errors import InvalidFieldError

Moment = datetime | timedelta | str
"""A time: with its zone, or from now, or as RFC 3339."""


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


def camel(name: str) -> str:
    """Return a name as the JSON of the service has it."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _time(name: str, value: object, now: datetime) -> object:
    if isinstance(value, timedelta):
        return now + value
    if isinstance(value, datetime) and value.tzinfo is None:
        raise InvalidFieldError(name, "must have a time zone, as in datetime.now(UTC)")
    return value
