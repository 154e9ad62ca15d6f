"""`Idempotency-Key` on both submits: what clients see of it."""

from __future__ import annotations

import asyncio
import json

import pytest

from api.asgi_client import Client, Response, scope_of
from api.fake_engine import FakeEngine
from headgate.api.callers import Caller
from headgate.api.http import response as http
from headgate.api.http.request import Request
from headgate.api.tasks import submit_task
from headgate.core.admission import QueueLimits
from headgate.core.task import TaskStatus
from headgate.errors import StoreUnavailableError

TASK = {"agentId": "a", "action": "click"}
BATCH = {"agentId": "a", "tasks": [{"action": "x"}, {}, {"action": "y", "dependsOn": ["gone"]}]}
ONE_WAITS = QueueLimits(max_queue=1, max_per_agent=1)


@pytest.fixture
def client() -> Client:
    return Client()


def send(client: Client, body: object, *, path: str = "/tasks", key: str = "k-1") -> Response:
    return client.post(path, body, idempotency_key=key)


def is_replay(answer: Response) -> bool:
    return answer.headers.get("idempotency-replayed") == "true"


@pytest.mark.parametrize(("path", "body"), [("/tasks", TASK), ("/tasks/batch", BATCH)])
def test_the_same_request_gets_the_same_answer_and_says_so(
    client: Client, path: str, body: object
) -> None:
    first, again = send(client, body, path=path), send(client, body, path=path)
    assert (first.status, is_replay(first)) == (202, False)
    assert (again.status, is_replay(again)) == (202, True)
    assert first.body == again.body
    assert len(client.engine.records) == 1


@pytest.mark.parametrize(("path", "body"), [("/tasks", TASK), ("/tasks/batch", BATCH)])
def test_the_answer_is_that_of_a_request_without_a_key(
    client: Client, path: str, body: object
) -> None:
    keyed, plain = send(client, body, path=path), client.post(path, body)
    assert shape(keyed.json) == shape(plain.json)


def shape(value: object) -> object:
    """Return an answer without what is another for every task."""
    if isinstance(value, dict):
        own = {"taskId": "", "position": 0}
        return {name: own.get(name, shape(inner)) for name, inner in value.items()}
    return [shape(inner) for inner in value] if isinstance(value, list) else value


def test_the_answer_stays_when_the_task_and_the_times_have_changed(client: Client) -> None:
    body = TASK | {"deadline": "2027-01-15T08:01:00Z"}
    first = send(client, body)
    client.engine.set_state(first.json["taskId"], TaskStatus.DONE)
    client.engine.time += 3_600
    again = send(client, body)
    assert (again.body, is_replay(again)) == (first.body, True)
    assert send(client, body, key="k-2").status == 400


@pytest.mark.parametrize("other", [TASK | {"priority": 1}, b'{"agentId":"a","action":"click"}'])
def test_another_body_under_the_key_is_422(client: Client, other: object) -> None:
    send(client, TASK)
    answer = send(client, other)
    assert (answer.status, answer.problem["code"]) == (422, "idempotency_mismatch")
    assert answer.problem["details"] == {"field": "Idempotency-Key"}
    assert len(client.engine.records) == 1


def test_the_same_body_on_the_other_path_is_another_request(client: Client) -> None:
    send(client, BATCH | TASK)
    assert send(client, BATCH | TASK, path="/tasks/batch").status == 422


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/tasks", {"agentId": "a"}, "missing_field"),
        ("/tasks", b"{", "bad_json"),
        ("/tasks", TASK | {"dependsOn": ["gone"]}, "unknown_parent"),
        ("/tasks/batch", {"agentId": "a", "tasks": []}, "batch_empty"),
        ("/tasks/batch", {"tasks": [TASK]}, "missing_field"),
    ],
)
def test_a_request_that_is_wrong_stays_so(
    client: Client, path: str, body: object, code: str
) -> None:
    first, again = send(client, body, path=path), send(client, body, path=path)
    assert (first.status, first.problem["code"]) == (400, code)
    assert first.problem == again.problem == client.post(path, body).problem
    assert (is_replay(first), is_replay(again)) == (False, True)


def test_a_full_queue_and_an_outage_are_not_kept() -> None:
    client = Client(FakeEngine(limits=ONE_WAITS))
    waiting = send(client, TASK, key="other").json["taskId"]
    assert send(client, TASK).problem["code"] == "queue_full"
    client.engine.failure = StoreUnavailableError("gone")
    assert send(client, TASK).status == 503
    client.engine.failure = None
    client.engine.set_state(waiting, TaskStatus.DONE)
    taken = send(client, TASK)
    assert (taken.status, is_replay(taken)) == (202, False)


def test_a_batch_of_which_nothing_was_taken_may_be_sent_again() -> None:
    client = Client(FakeEngine(limits=ONE_WAITS))
    waiting = send(client, TASK, key="other").json["taskId"]
    assert send(client, BATCH, path="/tasks/batch").json["submitted"] == 0
    client.engine.set_state(waiting, TaskStatus.DONE)
    assert send(client, BATCH, path="/tasks/batch").json["submitted"] == 1
    assert is_replay(send(client, BATCH, path="/tasks/batch"))


def test_tasks_of_a_batch_that_had_no_room_are_tried_again_under_the_same_key() -> None:
    client = Client(FakeEngine(limits=ONE_WAITS))
    batch = {"agentId": "a", "tasks": [{"action": "x"}, {"action": "y"}]}
    first = send(client, batch, path="/tasks/batch").json
    taken = first["tasks"][0]["taskId"]
    assert (first["submitted"], first["tasks"][1]["code"]) == (1, "queue_full")
    client.engine.set_state(taken, TaskStatus.DONE)
    second = send(client, batch, path="/tasks/batch")
    assert (second.json["submitted"], is_replay(second)) == (2, False)
    assert second.json["tasks"][0]["taskId"] == taken
    third = send(client, batch, path="/tasks/batch")
    assert (third.body, is_replay(third)) == (second.body, True)


def test_two_callers_may_use_the_same_key(client: Client) -> None:
    async def submit(token_id: str) -> http.Response:
        body = json.dumps(TASK).encode()

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": body}

        headers = {"idempotency-key": "k-1"}
        request = Request(scope_of("POST", "/tasks", headers), receive)
        request.caller = Caller(name=token_id, token_id=token_id)
        return await submit_task(client.app.api, request, "")

    answers = [asyncio.run(submit(token_id)) for token_id in ("a", "b", "a")]
    assert answers[0].body == answers[2].body != answers[1].body
    assert len(client.engine.records) == 2


@pytest.mark.parametrize("key", ["", " ", "a b", "é", "x" * 256, "a\tb"])
def test_a_key_that_is_none_is_refused(client: Client, key: str) -> None:
    answer = send(client, TASK, key=key)
    assert (answer.status, answer.problem["code"]) == (400, "invalid_field")
    assert answer.problem["details"] == {"field": "Idempotency-Key"}
    assert client.engine.records == {}


def test_when_no_key_can_be_kept_the_request_is_429_and_nothing_is_done(client: Client) -> None:
    client.engine.keys_are_full = True
    answer = send(client, TASK)
    assert (answer.status, answer.problem["code"]) == (429, "idempotency_full")
    assert answer.headers["retry-after"]
    assert client.engine.records == {}
    assert client.post("/tasks", json.loads(json.dumps(TASK))).status == 202
