"""Every route of a real service keeps to `/openapi.json`, whatever it is sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from schemathesis.generation import GenerationMode

from headgate.web.api import Route
from headgate.web.routes import ROUTES
from service.api_explorer import EXPLORED, MODES, WITHOUT_END, Explorer
from service.support import ServiceProcess, running_service

EXAMPLES = 5
WAITING = "a task that waits"
TASK = {"agentId": "a", "action": "work"}
REAL = (
    ("POST", "/tasks", "", TASK),
    ("POST", "/tasks/batch", "", {"agentId": "a", "tasks": [TASK, {}]}),
    ("GET", "/tasks/{id}", WAITING, None),
    ("GET", "/tasks/{id}/why", WAITING, None),
    ("POST", "/tasks/{id}/cancel", WAITING, None),
    ("GET", "/projects/{id}", "default", None),
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("explored")) as running:
        yield running


@pytest.fixture(scope="module")
def explorer(service: ServiceProcess) -> Iterator[Explorer]:
    explorer = Explorer(service.address)
    yield explorer
    explorer.close()


@pytest.mark.parametrize("mode", MODES, ids=["right", "wrong"])
@pytest.mark.parametrize("route", EXPLORED, ids=[f"{one.method} {one.path}" for one in EXPLORED])
def test_a_route_answers_as_it_is_described(
    explorer: Explorer, route: Route, mode: GenerationMode
) -> None:
    explorer.explore(route, mode, examples=EXAMPLES)


@pytest.mark.parametrize(
    ("method", "path", "name", "body"), REAL, ids=lambda value: str(value)[:30]
)
def test_a_request_about_what_exists_is_answered_as_it_is_described(
    service: ServiceProcess, explorer: Explorer, method: str, path: str, name: str, body: object
) -> None:
    route = next(one for one in EXPLORED if (one.method, one.path) == (method, path))
    if name == WAITING:
        name = service.submit(notBefore="2100-01-01T00:00:00Z")
    statuses = explorer.explore(
        route, GenerationMode.POSITIVE, examples=EXAMPLES, name=name or None, body=body
    )
    assert any(status < 300 for status in statuses), statuses


def test_only_what_has_no_end_is_left_out() -> None:
    assert {route.path for route in ROUTES} - {route.path for route in EXPLORED} == WITHOUT_END
