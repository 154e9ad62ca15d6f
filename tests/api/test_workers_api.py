"""The routes of workers over the real engine: what they take, what they refuse, and whom."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from api.asgi_client import Response, answer_of
from api.fake_tokens import FakeTokens
from headgate.api.app import App
from headgate.api.auth import Authenticator
from headgate.api.callers import Caller
from headgate.api.http import slices
from headgate.app import build_app, build_service
from headgate.config import load_settings
from headgate.providers import usage
from headgate.storage.tokens import Bounds

Scenario = Callable[[App], Awaitable[None]]
SETTINGS = """
[agents.coder]
target = "pull"

[targets.elsewhere]
kind = "pull"
slot = "work"

[targets.python]
kind = "callable"
entry_point = "headgate.executors.callable:echo"
default = true
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Scenario], None]:
    """Run a scenario against a service in memory."""
    (tmp_path / "headgate.toml").write_text(SETTINGS)

    def serve_for(scenario: Scenario) -> None:
        async def main() -> None:
            flags = {"store.url": "memory:"}
            loaded = load_settings(tmp_path / "headgate.toml", {}, flags)
            built = build_service(loaded, data=tmp_path, environ={})
            await built.engine.start()
            try:
                await scenario(build_app(built))
            finally:
                await built.engine.stop(drain_seconds=0.0)

        asyncio.run(asyncio.wait_for(main(), 30.0))

    return serve_for


async def post(app: App, url: str, **body: object) -> Response:
    return await answer_of(app, "POST", url, json.dumps(body).encode())


async def submit(app: App, **fields: object) -> str:
    answer = await post(app, "/tasks", agentId="coder", action="work", **fields)
    assert answer.status == 202, answer.body
    return str(answer.json["taskId"])


async def claimed(app: App, agent_id: str = "coder", **fields: object) -> dict[str, Any]:
    """Claim until there is a task, and return the answer."""
    worker: dict[str, object] = {}
    while True:
        answer = await post(app, f"/agents/{agent_id}/claim", waitSeconds=5, **worker, **fields)
        assert answer.status == 200, answer.body
        body: dict[str, Any] = answer.json
        if body["tasks"]:
            return body
        worker = {"workerId": body["workerId"]}


def test_a_task_goes_to_the_worker_of_its_agent_and_back(run: Callable[[Scenario], None]) -> None:
    async def scenario(app: App) -> None:
        task_id = await submit(app, params={"n": [1, 2.5, "x"]}, input={"text": "hello"})
        answer = await claimed(app)
        (task,) = answer["tasks"]
        assert (task["taskId"], task["attempt"], task["target"]) == (task_id, 1, "pull")
        assert (task["params"], task["input"]) == ({"n": [1, 2.5, "x"]}, {"text": "hello"})
        assert (answer["leaseSeconds"], answer["lost"], answer["cancelled"]) == (30, [], [])
        own = {"workerId": answer["workerId"], "attempt": 1}
        running = [{"taskId": task_id, "attempt": 1}]
        beat = await post(
            app, "/agents/coder/heartbeat", workerId=answer["workerId"], running=running
        )
        assert beat.json == {"leaseSeconds": 30, "cancelled": [], "lost": []}
        for _ in range(2):
            done = await post(
                app,
                f"/tasks/{task_id}/complete",
                **own,
                result={"answer": 42},
                usage={"tokens": 5, "usd": "0.25", "model": "m"},
            )
            assert (done.status, done.json) == (200, {"taskId": task_id, "state": "done"})
        shown = (await answer_of(app, "GET", f"/tasks/{task_id}")).json
        assert shown["result"] == {"answer": 42}
        assert shown["usage"] == {"tokens": 5, "usd": 0.25}

    run(scenario)


def test_a_heartbeat_says_how_far_a_task_is(run: Callable[[Scenario], None]) -> None:
    async def scenario(app: App) -> None:
        task_id = await submit(app)
        worker = (await claimed(app))["workerId"]
        progress = {"fraction": 1.5, "text": "a\nb" + "x" * 1_000}
        running = [{"taskId": task_id, "attempt": 1, "progress": progress}]
        beat = await post(app, "/agents/coder/heartbeat", workerId=worker, running=running)
        assert beat.status == 200
        shown = (await answer_of(app, "GET", f"/tasks/{task_id}")).json["progress"]
        assert (shown["fraction"], shown["text"]) == (1.0, "a b" + "x" * 196 + "…")
        assert set(shown) == {"fraction", "text", "at"}
        (listed,) = (await answer_of(app, "GET", "/tasks")).json["tasks"]
        assert listed["progress"] == shown
        page = await answer_of(app, "GET", f"/ui/tasks/{task_id}")
        assert b"100 %, a bxxx" in page.body
        await post(app, f"/tasks/{task_id}/complete", workerId=worker, attempt=1)
        assert "progress" not in (await answer_of(app, "GET", f"/tasks/{task_id}")).json

    run(scenario)


def test_a_target_of_a_task_goes_before_that_of_its_agent(run: Callable[[Scenario], None]) -> None:
    async def scenario(app: App) -> None:
        targets = {}
        for given in (None, "python", "elsewhere", "pull"):
            fields = {} if given is None else {"target": given}
            task_id = await submit(app, **fields)
            targets[given] = (await answer_of(app, "GET", f"/tasks/{task_id}")).json["target"]
        assert targets == {
            None: "pull",
            "python": "python",
            "elsewhere": "elsewhere",
            "pull": "pull",
        }

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "state", "error"),
    [
        ({"error": "no"}, "failed", "no"),
        ({"error": "no", "retryable": True}, "queued", "no"),
        ({"error": "busy", "retryAfterSeconds": 30}, "queued", "busy"),
        ({"error": ""}, "failed", "the worker failed and did not say why"),
        ({"error": "x" * 5_000}, "failed", "x" * 499 + "…"),
    ],
)
def test_a_failure_ends_a_task_or_has_it_tried_again(
    run: Callable[[Scenario], None], fields: dict[str, object], state: str, error: str
) -> None:
    async def scenario(app: App) -> None:
        task_id = await submit(app, maxAttempts=2)
        answer = await claimed(app)
        own = {"workerId": answer["workerId"], "attempt": 1}
        failed = await post(app, f"/tasks/{task_id}/fail", **own, **fields)
        assert (failed.status, failed.json["state"]) == (200, state)
        assert (await answer_of(app, "GET", f"/tasks/{task_id}")).json["error"] == error

    run(scenario)


@pytest.mark.parametrize(
    ("usage", "booked"),
    [
        (None, {"tokens": 70, "usd": 0.0, "assumedTokens": 70}),
        ({"tokens": 3}, {"tokens": 3, "usd": 0.0}),
        ({"inputTokens": 30, "outputTokens": 4}, {"tokens": 34, "usd": 0.0}),
        (
            {"model": "claude-sonnet-4-5", "inputTokens": 1_000, "outputTokens": 1_000},
            {"tokens": 2_000, "usd": 0.018},
        ),
        ({"usd": 1.5, "tokens": 1}, {"tokens": 1, "usd": 1.5}),
    ],
)
def test_what_is_booked_is_what_the_worker_says_or_else_what_was_held(
    run: Callable[[Scenario], None], usage: object, booked: object
) -> None:
    async def scenario(app: App) -> None:
        task_id = await submit(app, estimate={"tokens": 70})
        own = {"workerId": (await claimed(app))["workerId"], "attempt": 1}
        await post(app, f"/tasks/{task_id}/complete", **own, usage=usage)
        shown = (await answer_of(app, "GET", f"/tasks/{task_id}")).json
        assert (shown["state"], shown["usage"]) == ("done", booked)

    run(scenario)


def test_usage_within_a_result_is_found_there(run: Callable[[Scenario], None]) -> None:
    async def scenario(app: App) -> None:
        task_id = await submit(app)
        own = {"workerId": (await claimed(app))["workerId"], "attempt": 1}
        result = {"model": "m", "usage": {"prompt_tokens": 5, "completion_tokens": 6}}
        await post(app, f"/tasks/{task_id}/complete", **own, result=result)
        shown = (await answer_of(app, "GET", f"/tasks/{task_id}")).json
        assert shown["usage"]["tokens"] == 11

    run(scenario)


def test_usage_is_looked_for_in_slices(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result of a megabyte may have a million lines, and each may tell of usage."""
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    rounds, read_in = [0], Counter[int]()
    feed = usage.EventStreamReader.feed

    def counted(lines: usage.EventStreamReader, piece: bytes) -> None:
        read_in[rounds[0]] += 1
        feed(lines, piece)

    monkeypatch.setattr(usage.EventStreamReader, "feed", counted)

    async def count() -> None:
        while True:
            rounds[0] += 1
            await asyncio.sleep(0)

    async def scenario(app: App) -> None:
        task_id = await submit(app)
        own = {"workerId": (await claimed(app))["workerId"], "attempt": 1}
        body = json.dumps({**own, "result": ["usage"]}).replace("[", "[" + "\n" * 100_000)
        counting = asyncio.create_task(count())
        answer = await answer_of(app, "POST", f"/tasks/{task_id}/complete", body.encode())
        counting.cancel()
        assert answer.status == 200
        assert len(read_in) > 20
        assert max(read_in.values()) <= 2

    run(scenario)


NOBODY = f"worker-{'0' * 32}"


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("/agents/coder/claim", {"capacity": -1}, 400, "invalid_field"),
    ("/agents/coder/claim", {"capacity": 1_001}, 400, "invalid_field"),
    ("/agents/coder/claim", {"capacity": "many"}, 400, "invalid_field"),
    ("/agents/coder/claim", {"waitSeconds": 26}, 400, "invalid_field"),
    ("/agents/coder/claim", {"capacty": 1}, 400, "unknown_field"),
    ("/agents/coder/claim", {"workerId": NOBODY}, 410, "stale_worker"),
    ("/agents/coder/claim", {"workerId": "me"}, 410, "stale_worker"),
    ("/agents/coder/claim", {"running": [{"taskId": "?", "attempt": 1}]}, 404, "not_found"),
    (f"/agents/{'x' * 500}/claim", {}, 400, "invalid_field"),
    ("/agents/coder/heartbeat", {}, 400, "missing_field"),
    ("/agents/coder/heartbeat", {"workerId": NOBODY}, 410, "stale_worker"),
    ("/tasks/nobody/complete", {"workerId": NOBODY, "attempt": 1}, 404, "not_found"),
    ("/tasks/{id}/complete", {"workerId": NOBODY, "attempt": 1}, 409, "stale_lease"),
    ("/tasks/{id}/complete", {"workerId": "{me}", "attempt": 2}, 409, "stale_lease"),
    ("/tasks/{id}/complete", {"workerId": "{me}", "attempt": "1"}, 400, "invalid_field"),
    ("/tasks/{id}/fail", {"workerId": "{me}", "attempt": 1}, 400, "missing_field"),
    (
        "/tasks/{id}/fail",
        {"workerId": "{me}", "attempt": 1, "error": "", "retryAfterSeconds": -1},
        400,
        "invalid_field",
    ),
    (
        "/tasks/{id}/complete",
        {"workerId": "{me}", "attempt": 1, "usage": {"tokens": -1}},
        400,
        "invalid_field",
    ),
    (
        "/tasks/{id}/complete",
        {"workerId": "{me}", "attempt": 1, "usage": {"usd": "lots"}},
        400,
        "invalid_field",
    ),
    (
        "/tasks/{id}/complete",
        {"workerId": "{me}", "attempt": 1, "usage": {"usd": "0" * 101}},
        400,
        "invalid_field",
    ),
    (
        "/tasks/{id}/complete",
        {"workerId": "{me}", "attempt": 1, "usage": {"model": "m" * 129}},
        400,
        "invalid_field",
    ),
]


def test_what_is_wrong_is_refused_and_changes_nothing(run: Callable[[Scenario], None]) -> None:
    async def scenario(app: App) -> None:
        task_id = await submit(app)
        worker_id = (await claimed(app))["workerId"]
        for url, body, status, code in REFUSED:
            given = {name: worker_id if value == "{me}" else value for name, value in body.items()}
            answer = await post(app, url.replace("{id}", task_id), **given)
            assert (answer.status, answer.problem["code"]) == (status, code), (url, body)
        assert (await answer_of(app, "GET", f"/tasks/{task_id}")).json["state"] == "running"

    run(scenario)


class OneCaller(Authenticator):
    """Lets everybody in as the same caller."""

    def __init__(self, caller: Caller) -> None:
        super().__init__(FakeTokens())
        self._caller = caller

    def authenticate(self, *_: object, **__: object) -> Caller:
        return self._caller


@pytest.mark.parametrize(
    ("permissions", "bounds", "status"),
    [
        ({"submit"}, Bounds(agent_id="coder"), 200),
        ({"submit"}, Bounds(agent_id="other"), 403),
        ({"submit"}, Bounds(agent_id="coder", project_id="search"), 403),
        ({"submit"}, Bounds(), 403),
        ({"submit", "admin"}, Bounds(), 200),
    ],
)
def test_a_worker_needs_a_token_of_its_agent_or_an_administrators(
    run: Callable[[Scenario], None], permissions: set[str], bounds: Bounds, status: int
) -> None:
    async def scenario(app: App) -> None:
        task_id = await submit(app)
        worker_id = (await claimed(app))["workerId"]
        caller = Caller(name="it", permissions=frozenset(permissions), bounds=bounds)
        app.api.auth = OneCaller(caller)
        claim = await post(app, "/agents/coder/claim", workerId=worker_id)
        beat = await post(app, "/agents/coder/heartbeat", workerId=worker_id)
        body = {"workerId": worker_id, "attempt": 1}
        complete = await post(app, f"/tasks/{task_id}/complete", **body)
        assert [claim.status, beat.status] == [status, status]
        # A task of others is not there.
        assert complete.status == status or (status, complete.status) == (403, 404)

    run(scenario)


def test_nothing_has_an_empty_name(run: Callable[[Scenario], None]) -> None:
    async def scenario(app: App) -> None:
        answer = await post(app, "/agents//claim", capacity=1)
        assert (answer.status, answer.problem["code"]) == (404, "not_found")

    run(scenario)
