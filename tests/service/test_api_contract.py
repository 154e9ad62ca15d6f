"""Every route of a real service keeps to `/openapi.json`, whatever it is sent.

All of them on SQLite with a token, and those that hand what they are sent to the store on
PostgreSQL too, which takes less than SQLite does.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from schemathesis.generation import GenerationMode

from budgets.servers import PostgresServer
from headgate.api.api import Route
from headgate.api.app import ROUTES
from service.api_explorer import EXPLORED, MODES, WITHOUT_END, Explorer
from service.support import running_service

EXAMPLES = 5
PG_EXAMPLES = 4
SETTINGS = """
[auth]
required = true

[projects.default]

[agents.coder]
target = "pull"
"""
TASK = {"agentId": "a", "action": "work"}
LATER = {"notBefore": "2100-01-01T00:00:00Z"}
STORED = frozenset(
    {
        ("POST", "/tasks"),
        ("GET", "/tasks"),
        ("POST", "/tasks/cancel"),
        ("POST", "/tasks/retry"),
        ("POST", "/agents/{id}/claim"),
        ("GET", "/webhooks"),
        ("POST", "/budgets/reserve"),
        ("GET", "/budgets/status"),
        ("GET", "/usage"),
        ("POST", "/tokens"),
        ("DELETE", "/tokens/{id}"),
        ("GET", "/audit"),
    }
)
"""Routes whose fields come to the store as they are, or nearly so."""

NUL = (
    ("GET", "/tasks?agentId=%00", None),
    ("GET", "/tasks?projectId=a%00b", None),
    ("POST", "/tasks/cancel", {"agentId": "a\0"}),
    ("POST", "/tasks/cancel", {"projectId": "\0"}),
    ("POST", "/tasks/retry", {"target": "\0a"}),
    ("POST", "/tasks/retry", {"label": "a=\0"}),
)

Prepare = Callable[[Explorer], tuple[str | None, object]]
"""Make what a request is about; returns the name of it, and the body."""


def explored(folder: Path, *arguments: str) -> Iterator[Explorer]:
    (folder / "headgate.toml").write_text(SETTINGS)
    with running_service(folder, *arguments) as service:
        explorer = Explorer(service.address, token=(folder / "data" / "token").read_text().strip())
        yield explorer
        explorer.close()


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explorer]:
    yield from explored(tmp_path_factory.mktemp("explored"))


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explorer]:
    """Give a service that is only asked what a test says.

    One that is explored may have been told anything, as that its root budget is nothing.
    """
    yield from explored(tmp_path_factory.mktemp("left_alone"))


@pytest.fixture(scope="module")
def on_postgres(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[Explorer]:
    folder = tmp_path_factory.mktemp("on_postgres")
    yield from explored(folder, "--store", postgres.new_schema())


def named(name: str, body: object = None) -> Prepare:
    return lambda _: (name, body)


def with_body(body: object) -> Prepare:
    return lambda _: (None, body)


def waiting(explorer: Explorer) -> tuple[str, object]:
    return str(explorer.ask("POST", "/tasks", TASK | LATER)["taskId"]), None


def ended(explorer: Explorer) -> tuple[str, object]:
    task_id, _ = waiting(explorer)
    explorer.ask("POST", f"/tasks/{task_id}/cancel")
    return task_id, None


def joined(explorer: Explorer) -> tuple[str, object]:
    worker_id = explorer.ask("POST", "/agents/coder/claim", {"capacity": 1})["workerId"]
    return "coder", {"workerId": worker_id}


def taken(explorer: Explorer) -> tuple[str, dict[str, object]]:
    """Have a task handed to a worker of an agent of its own."""
    explorer.ask("POST", "/scheduler/resume")
    agent_id = f"agent-{uuid.uuid4().hex}"
    task = TASK | {"agentId": agent_id, "target": "pull"}
    explorer.ask("POST", "/tasks", task)
    place = f"/agents/{agent_id}/claim"
    worker = {"workerId": explorer.ask("POST", place, {"capacity": 1})["workerId"], "capacity": 1}
    for _ in range(10):
        tasks = explorer.ask("POST", place, worker | {"waitSeconds": 2})["tasks"]
        if tasks:
            own = {"workerId": worker["workerId"], "attempt": tasks[0]["attempt"]}
            return str(tasks[0]["taskId"]), own
    raise AssertionError("the task was not handed out")


def failing(explorer: Explorer) -> tuple[str, object]:
    task_id, own = taken(explorer)
    return task_id, own | {"error": "it broke"}


def reserved(explorer: Explorer) -> tuple[None, object]:
    name = {"id": uuid.uuid4().hex, "scope": "session:s"}
    explorer.ask("POST", "/budgets/reserve", name | {"usd": "0.01"})
    return None, name


def token_made(explorer: Explorer) -> tuple[str, object]:
    wish = {"name": uuid.uuid4().hex, "permissions": ["read"]}
    return str(explorer.ask("POST", "/tokens", wish)["id"]), None


REAL: tuple[tuple[str, str, Prepare], ...] = (
    ("POST", "/tasks", with_body(TASK)),
    ("POST", "/tasks/batch", with_body({"agentId": "a", "tasks": [TASK, {}]})),
    ("GET", "/tasks/{id}", waiting),
    ("GET", "/tasks/{id}/why", waiting),
    ("POST", "/tasks/{id}/cancel", waiting),
    ("POST", "/tasks/{id}/retry", ended),
    ("POST", "/tasks/cancel", with_body({"agentId": "a"})),
    ("POST", "/tasks/retry", with_body({"agentId": "a", "state": ["cancelled"]})),
    ("POST", "/agents/{id}/claim", named("coder", {"capacity": 2, "waitSeconds": 0})),
    ("POST", "/agents/{id}/heartbeat", joined),
    ("POST", "/tasks/{id}/complete", taken),
    ("POST", "/tasks/{id}/fail", failing),
    ("POST", "/budgets/reserve", lambda _: (None, {"id": uuid.uuid4().hex, "scope": "session:s"})),
    ("POST", "/budgets/dispatched", reserved),
    ("POST", "/budgets/extend", reserved),
    ("POST", "/budgets/commit", reserved),
    ("POST", "/budgets/release", reserved),
    ("POST", "/tokens", lambda _: (None, {"name": uuid.uuid4().hex, "permissions": ["read"]})),
    ("DELETE", "/tokens/{id}", token_made),
    ("GET", "/projects/{id}", named("default")),
    ("PATCH", "/projects/{id}", named("default", {"creditWeight": 2})),
    ("GET", "/agents/{id}", named("coder")),
    ("PATCH", "/agents/{id}", named("coder", {"capacity": 3})),
    ("GET", "/targets/{id}", named("pull")),
    ("PATCH", "/targets/{id}", named("pull", {"status": "active"})),
)


def route_of(method: str, path: str) -> Route:
    return next(one for one in EXPLORED if (one.method, one.path) == (method, path))


def title(value: object) -> str | None:
    return f"{value.method} {value.path}" if isinstance(value, Route) else None


@pytest.mark.parametrize("mode", MODES, ids=["right", "wrong"])
@pytest.mark.parametrize("route", EXPLORED, ids=title)
def test_a_route_answers_as_it_is_described(
    explorer: Explorer, route: Route, mode: GenerationMode
) -> None:
    explorer.explore(route, mode, examples=EXAMPLES)


@pytest.mark.parametrize("mode", MODES, ids=["right", "wrong"])
@pytest.mark.parametrize(
    "route", [one for one in EXPLORED if (one.method, one.path) in STORED], ids=title
)
def test_a_route_answers_so_on_postgresql_too(
    on_postgres: Explorer, route: Route, mode: GenerationMode
) -> None:
    on_postgres.explore(route, mode, examples=PG_EXAMPLES)


@pytest.mark.parametrize(("method", "path", "body"), NUL)
def test_what_postgresql_cannot_keep_is_the_fault_of_whoever_sends_it(
    on_postgres: Explorer, method: str, path: str, body: object
) -> None:
    answer = on_postgres.send(method, path, body)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_field")


@pytest.mark.parametrize(
    ("method", "path", "prepare"), REAL, ids=[f"{method} {path}" for method, path, _ in REAL]
)
def test_a_request_about_what_exists_is_answered_as_it_is_described(
    left_alone: Explorer, method: str, path: str, prepare: Prepare
) -> None:
    name, body = prepare(left_alone)
    statuses = left_alone.explore(
        route_of(method, path), GenerationMode.POSITIVE, examples=2, name=name, body=body
    )
    assert any(status < 300 for status in statuses), statuses


def test_only_what_has_no_end_is_left_out() -> None:
    assert {route.path for route in ROUTES} - {route.path for route in EXPLORED} == WITHOUT_END
