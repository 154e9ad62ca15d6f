"""Whatever a tenant sends, the other one keeps its money, its place, its secrets and its room."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal

import msgspec
import pytest

from budgets.servers import PostgresServer
from headgate.api.app import ROUTES
from headgate.api.openapi import openapi
from headgate.gateway.gateway import ROUTES as CALL_ROUTES
from tenants.harms import (
    HARMS,
    KINDS,
    UNKNOWN_CALL,
    UNKNOWN_RESPONSE,
    UNKNOWN_TASK,
    Attack,
    attacks,
    described,
    first,
    routes,
)
from tenants.world import (
    BOUNDS,
    MOST_SECONDS,
    SECRET,
    THEIR_CALL,
    THEIRS,
    Answer,
    Tenant,
    World,
    own_call_body,
    own_task_body,
    running_world,
)

WORK = (
    "POST /agents/{id}/claim",
    "POST /agents/{id}/heartbeat",
    "POST /tasks/{id}/complete",
    "POST /tasks/{id}/fail",
)
OF_PROJECTS = ("GET /estimates", "GET /projects/{id}")
NEEDS = {f"{route.method} {route.path}": route.needs for route in ROUTES}
CALLS = [f"{route.method} {route.path}" for route in CALL_ROUTES]
NOT_FOR = {
    *((route, bound) for route in WORK for bound in ("project", "both")),
    *((route, bound) for route in OF_PROJECTS for bound in ("agent", "both")),
    *(("GET /metrics", bound) for bound in BOUNDS),
    *(
        (f"{method} /upstreams/{{id}}/{{path}}", one)
        for method in ("GET", "DELETE")
        for one in BOUNDS
    ),
}
"""What some tokens cannot do at all: a worker takes tasks of all projects, some answers are of
whole projects, metrics name every agent, and the key of the service opens what is everybody's."""

FOR_TENANTS = [route for route, needs in NEEDS.items() if needs not in ("admin", None)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running_world(tmp_path_factory.mktemp("tenants")) as world:
        yield world


@pytest.fixture(scope="module")
def world_on_postgres(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tenants_pg")
    with running_world(folder, "--store", postgres.new_schema()) as world:
        yield world


def test_every_route_and_field_has_a_row() -> None:
    document = msgspec.json.decode(msgspec.json.encode(openapi(ROUTES, CALL_ROUTES)))
    for_admin = {route for route, needs in NEEDS.items() if needs == "admin"}
    wanted = {
        route: set() if route in for_admin else fields
        for route, fields in described(document).items()
    }
    assert {route: set(fields) for route, fields in routes().items()} == wanted


def test_every_harm_is_aimed_at() -> None:
    kinds = {kind for fields in routes().values() for kind in fields.values()}
    assert kinds == set(KINDS)
    assert {aim for kind in KINDS.values() for aim in kind.aims} == set(HARMS)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("route", FOR_TENANTS)
def test_no_field_of_a_route_harms_another(world: World, route: str, bound: str) -> None:
    harmless(world, route, world.hostile[bound])


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("route", CALLS)
def test_no_call_of_a_model_harms_another(world: World, route: str, bound: str) -> None:
    harmless(world, route, world.hostile[bound])


@pytest.mark.parametrize("bound", BOUNDS)
def test_calls_are_for_tokens_that_may_submit(world: World, bound: str) -> None:
    reader = world.token_with("read", BOUNDS[bound])
    for route in CALLS:
        answer = _sent(reader, first(route, world.hostile[bound], world))
        assert answer.status == 403, (route, answer)


@pytest.mark.parametrize(
    "route", [route for route in FOR_TENANTS if "budgets/" in route or "/tasks" in route]
)
def test_no_field_harms_another_on_postgresql(world_on_postgres: World, route: str) -> None:
    harmless(world_on_postgres, route, world_on_postgres.hostile["project"])


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("route", [route for route, needs in NEEDS.items() if needs == "admin"])
def test_a_tenant_is_refused_what_an_operator_may(world: World, route: str, bound: str) -> None:
    method, _, path = route.partition(" ")
    for name in ("common", "theirs", world.their_done_task, "no-such"):
        answer = world.hostile[bound].ask(method, path.replace("{id}", name), {})
        assert answer.status == 403, (route, name, answer)
        assert SECRET not in answer.text


@pytest.mark.parametrize("permission", ["submit", "read", "cancel"])
def test_a_token_does_only_what_it_is_for(world: World, permission: str) -> None:
    tenant = world.token_with(permission, BOUNDS["both"])
    for route, needs in NEEDS.items():
        method, _, path = route.partition(" ")
        if needs is None or path.endswith("/events"):
            continue
        answer = tenant.ask(method, path.replace("{id}", "no-such"), {})
        is_refused = answer.status == 403 and answer.json["details"].get("needs") == needs
        assert is_refused == (needs != permission), (route, answer)


@pytest.mark.parametrize("bound", BOUNDS)
def test_what_belongs_to_others_is_answered_like_what_does_not_exist(
    world: World, bound: str
) -> None:
    tenant = world.hostile[bound]
    for route in (route for route in FOR_TENANTS if "/tasks/{id}" in route):
        method, _, path = route.partition(" ")
        body = {"workerId": "w", "attempt": 1, "error": "e"} if "POST" in route else None
        if route.endswith("complete"):
            body = {"workerId": "w", "attempt": 1}
        answers = [
            _told(tenant.ask(method, path.replace("{id}", task_id), body), task_id)
            for task_id in (UNKNOWN_TASK, world.their_done_task, world.their_waiting_task)
        ]
        assert answers[0] == answers[1] == answers[2], route
    for end in ("", "/why"):
        answers = [
            _told(tenant.ask("GET", f"/calls/{call_id}{end}"), call_id)
            for call_id in (UNKNOWN_CALL, THEIR_CALL)
        ]
        assert answers[0] == answers[1], end
    headers = {"X-Headgate-Project": THEIRS} if bound == "agent" else {}
    for method, path in (("GET", "/{id}"), ("DELETE", "/{id}"), ("POST", "")):
        answers = []
        for response_id in (UNKNOWN_RESPONSE, world.their_response):
            place = "/v1/responses" + path.replace("{id}", response_id)
            body = own_call_body("responses") | {"previous_response_id": response_id}
            sent = body if method == "POST" else None
            answers.append(_told(tenant.ask(method, place, sent, headers=headers), response_id))
        assert answers[0] == answers[1], method
        assert answers[0][0] == 404
    parents = [
        _told(tenant.ask("POST", "/tasks", _depending(tenant, task_id)), task_id)
        for task_id in (UNKNOWN_TASK, world.their_done_task, world.their_waiting_task)
    ]
    assert parents[0] == parents[1] == parents[2]


def test_a_token_that_is_bound_to_nothing_carries_no_budget_to_minus(world: World) -> None:
    tenant, limited = world.unbound, ["", f"project:{THEIRS}"]
    held = {"id": "unbound", "scope": f"project:{THEIRS}"}
    assert tenant.ask("POST", "/budgets/reserve", held | {"usd": "0"}).status == 200
    claim = {"usd": "1000000", "tokens": 10**12}
    assert tenant.ask("POST", "/budgets/commit", held | claim).status == 200
    for scope in limited:
        books = world.operator.ask("GET", f"/budgets/status?scope={scope}").json
        assert Decimal(books["remainingUsd"]) >= 0, books
        assert books["remainingTokens"] >= 0, books
        assert Decimal(books["unacceptedUsd"]) > 0, books
    # One call for each budget undoes it, and the other feels nothing of it then.
    world.give_back(limited)
    assert world.harms() == []


@pytest.mark.parametrize("route", WORK)
def test_a_token_that_is_bound_to_nothing_cannot_work(world: World, route: str) -> None:
    attack = first(route, world.hostile["agent"], world)
    assert _sent(world.unbound, attack).status == 403


def harmless(world: World, route: str, tenant: Tenant) -> None:
    """Attack a route with all that the table has, and look at what it did to the other.

    The request that all attacks begin from is taken, or none of them would reach anything.
    """
    taken = _sent(tenant, first(route, tenant, world))
    assert taken.status < 300 or (route, tenant.kind) in NOT_FOR, taken
    for attack in attacks(route, tenant, world):
        answer = _sent(tenant, attack)
        assert SECRET not in answer.text, f"read: {attack}: {answer.text[:300]}"
        assert answer.status < 500 or answer.status in (503, 507), f"{attack}: {answer.text[:300]}"
        assert answer.cpu_seconds < MOST_SECONDS, f"slow: {attack}: {answer.cpu_seconds} s"
    assert world.harms() == []


def _sent(tenant: Tenant, attack: Attack) -> Answer:
    return tenant.ask(
        attack.method,
        attack.path,
        attack.body,
        headers=dict(attack.headers),
        is_stream=attack.is_stream,
    )


def _depending(tenant: Tenant, task_id: str) -> dict[str, object]:
    return own_task_body(tenant) | {"dependsOn": [task_id]}


def _told(answer: Answer, task_id: str) -> tuple[int, str]:
    """Return an answer without what is new with every request."""
    body = json.loads(answer.text)
    for name in ("requestId", "instance", "detail"):
        body.pop(name, None)
    return answer.status, json.dumps(body).replace(task_id, "(id)")
