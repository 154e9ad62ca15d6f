"""Who is let in: tokens, permissions, bounds, hosts and origins."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
import structlog

from api.asgi_client import answer_of
from api.fake_tokens import Door, FakeTokens
from headgate.api import auth
from headgate.api.app import ROUTES
from headgate.api.auth import Authenticator, is_loopback
from headgate.api.callers import LOCAL, Caller, Permission
from headgate.api.errors import ApiError
from headgate.api.http.request import Request
from headgate.core.task import TaskStatus
from headgate.errors import StoreUnavailableError
from headgate.storage.tokens import Bounds
from headgate.testing import VirtualClock

TASK = {"agentId": "a", "action": "click"}
OWN = {"action": "click"}


def closed() -> Door:
    """Give a service that asks for tokens, as on any address but loopback."""
    return Door(is_loopback=False, needs_token=True)


def test_without_a_token_nothing_is_open_but_what_needs_none() -> None:
    door = closed()
    for route in ROUTES:
        path = route.path.replace("{id}", "x")
        answer = door.client.request(route.method, path, b"not JSON at all")
        if route.needs is None:
            assert answer.status != 401, route
        else:
            assert (answer.status, answer.problem["code"]) == (401, "unauthorized"), route
            assert answer.headers["www-authenticate"].startswith("Bearer")


def test_every_route_needs_the_permission_that_it_names() -> None:
    door = closed()
    for route in ROUTES:
        if route.needs is None:
            continue
        others = [one for one in ("submit", "read", "cancel", "admin") if one != route.needs]
        token = door.token(*others)  # type: ignore[arg-type]
        path = route.path.replace("{id}", "x")
        answer = door.client.request(
            route.method, path, headers={"authorization": f"Bearer {token}"}
        )
        assert (answer.status, answer.problem["code"]) == (403, "forbidden"), route
        assert answer.problem["details"] == {"needs": route.needs}


def test_a_token_lets_in() -> None:
    door = closed()
    assert door.post("/tasks", TASK, door.token("submit")).status == 202
    assert door.get("/tasks", door.token("read")).json["count"] == 1


@pytest.mark.parametrize(
    "header",
    [
        "Bearer x",
        "Bearer ",
        "bearer hg_0123456789ab_" + "0" * 48,
        "Basic YTpi",
        "hg_x",
        "Bearer\x80",
    ],
)
def test_what_is_no_good_token_is_refused(header: str) -> None:
    answer = closed().get("/tasks", authorization=header)
    assert (answer.status, answer.problem["code"]) == (401, "unauthorized")
    assert "hg_0" not in answer.problem["error"]


def test_a_token_with_another_secret_is_refused() -> None:
    door = closed()
    token = door.token()
    other = token[:-1] + ("0" if token[-1] != "0" else "1")
    assert door.get("/tasks", token).status == 200
    assert door.get("/tasks", other).status == 401


def test_a_token_that_expires_while_it_is_known_is_refused() -> None:
    door = closed()
    token = door.token(expires_at=door.tokens.time + 10.0)
    assert door.get("/tasks", token).status == 200
    door.tokens.time += 10.0
    answer = door.get("/tasks", token)
    assert (answer.status, answer.problem["error"]) == (401, "the token has expired")


def test_a_token_that_is_revoked_here_ends_at_once() -> None:
    door = closed()
    token, admin = door.token("read"), door.token()
    assert door.get("/tasks", token).status == 200
    revoked = door.delete(f"/tokens/{token.split('_')[1]}", admin)
    assert (revoked.status, revoked.json["state"]) == (200, "revoked")
    answer = door.get("/tasks", token)
    assert (answer.status, answer.problem["error"]) == (401, "the token was revoked")


def test_a_token_that_is_revoked_elsewhere_ends_within_five_seconds() -> None:
    clock = VirtualClock()
    door = closed()
    api = door.client.app.api
    api.auth = Authenticator(door.tokens, api.auth.rules, ticks=clock)
    token = door.token("read")
    assert door.get("/tasks", token).status == 200
    asyncio.run(door.tokens.revoke(token.split("_")[1]))
    clock.advance(5.0)
    assert door.get("/tasks", token).status == 401


async def test_a_token_that_is_revoked_while_it_is_looked_up_is_not_remembered() -> None:
    door = closed()
    token = door.token("read")

    class Slow(FakeTokens):
        async def get(self, token_id: str) -> Any:
            kept = door.tokens.kept.get(token_id)
            gate.forget()
            return kept

    gate = Authenticator(Slow(), door.client.app.api.auth.rules)
    door.client.app.api.auth = gate
    headers = {"authorization": f"Bearer {token}"}
    assert (await answer_of(door.client.app, "GET", "/tasks", headers=headers)).status == 200
    assert gate._known == {}


def test_a_token_that_is_known_is_not_looked_up_again() -> None:
    door = closed()
    token = door.token("read")
    for _ in range(5):
        assert door.get("/tasks", token).status == 200
    assert door.tokens.looked_up == 1


async def test_many_requests_with_one_token_ask_the_store_once_and_delay_no_other() -> None:
    door = closed()
    greedy, honest = door.token("read"), door.token("read")
    answers = asyncio.Event()

    class Slow(FakeTokens):
        async def get(self, token_id: str) -> Any:
            self.looked_up += 1
            await answers.wait()
            return door.tokens.kept.get(token_id)

    tokens = Slow()
    app = door.client.app
    app.api.auth = Authenticator(tokens, app.api.auth.rules)
    asked = [
        asyncio.create_task(
            answer_of(app, "GET", "/tasks", headers={"authorization": f"Bearer {token}"})
        )
        for token in [*[greedy] * 200, honest]
    ]
    await asyncio.sleep(0.01)
    assert tokens.looked_up == 2
    asked[0].cancel()
    answers.set()
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert {end.status for end in ends[1:] if not isinstance(end, BaseException)} == {200}
    assert app.api.auth._asking == {}


def test_a_token_that_is_no_good_is_not_looked_up_again_for_a_while() -> None:
    clock = VirtualClock()
    door = closed()
    api = door.client.app.api
    api.auth = Authenticator(door.tokens, api.auth.rules, ticks=clock)
    unknown = "hg_0123456789ab_" + "0" * 48
    answers = {door.get("/tasks", unknown).status for _ in range(5)}
    assert (answers, door.tokens.looked_up) == ({401}, 1)
    clock.advance(5.0)
    assert door.get("/tasks", unknown).status == 401
    assert door.tokens.looked_up == 2


def test_no_more_refusals_are_remembered_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_REFUSED", 2)
    door = closed()
    for number in (1, 2, 3, 3, 2, 1):
        assert door.get("/tasks", f"hg_0123456789ab_{number:048x}").status == 401
    assert door.tokens.looked_up == 4


def test_no_more_tokens_are_remembered_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_KNOWN", 3)
    door = closed()
    for _ in range(6):
        assert door.get("/tasks", door.token("read")).status == 200
    assert len(door.client.app.api.auth._known) == 3


def test_while_the_store_is_away_nobody_is_let_in() -> None:
    door = closed()
    door.tokens.failure = StoreUnavailableError("gone")
    answer = door.get("/tasks", door.token())
    assert (answer.status, answer.problem["code"]) == (503, "unavailable")


def test_a_refused_token_is_logged_at_a_bounded_rate_and_without_itself() -> None:
    door = closed()
    token = door.token()
    wrong = token[:-4] + "ffff" if not token.endswith("ffff") else token[:-4] + "0000"
    with structlog.testing.capture_logs() as lines:
        for _ in range(50):
            assert door.get("/tasks", wrong).status == 401
    assert len(lines) == 1
    assert lines[0]["token_id"] == token.split("_")[1]
    assert token.split("_")[2][:8] not in str(lines)


def test_on_loopback_a_token_is_not_needed_and_one_that_is_sent_counts() -> None:
    door = Door()
    assert door.get("/tasks").status == 200
    assert door.get("/tasks", authorization="Basic YTpi").status == 200
    assert door.get("/tasks", "hg_wrong").status == 401
    assert door.get("/tasks", door.token("submit")).status == 403


def test_on_loopback_a_token_may_be_required() -> None:
    door = Door(needs_token=True)
    assert door.get("/tasks").status == 401
    assert door.get("/tasks", door.token()).status == 200


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost", True),
        ("LocalHost:1", True),
        ("127.0.0.1", True),
        ("127.1.2.3:7420", True),
        ("[::1]", True),
        ("[::1]:7420", True),
        ("evil.test", False),
        ("localhost.evil.test", False),
        ("127.0.0.1.evil.test", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("[::ffff:1.2.3.4]", False),
        (":7420", False),
        ("[", False),
        ("127.0.0.1:abc", False),
        ("127.0.0.1:7420@evil.test", False),
        ("headgate.example", True),
        ("headgate.example:8443", True),
        ("other.example", False),
        ("other.example:8443", True),
    ],
)
def test_on_loopback_the_host_is_this_machine_or_allowed(host: str, is_own: bool) -> None:
    door = Door(hosts=frozenset({"headgate.example", "other.example:8443"}))
    answer = door.get("/tasks", host=host)
    assert answer.status == (200 if is_own else 421), host
    if not is_own:
        assert (answer.problem["code"], answer.headers["connection"]) == ("wrong_host", "close")
    assert door.get("/livez", host=host).status == 200


def test_elsewhere_any_host_is_taken_unless_some_are_named() -> None:
    door = closed()
    token = door.token()
    assert door.get("/tasks", token, host="whatever.test").status == 200
    door.client.app.api.auth.rules = auth.AuthRules(
        is_loopback=False, needs_token=True, hosts=frozenset({"a.test"})
    )
    assert door.get("/tasks", token, host="whatever.test").status == 421
    assert door.get("/tasks", token, host="A.test:443").status == 200


@pytest.mark.parametrize(
    ("origin", "is_taken"),
    [
        ("http://127.0.0.1:7420", True),
        ("https://127.0.0.1:7420", True),
        ("http://127.0.0.1:3000", False),
        ("https://evil.test", False),
        ("null", False),
        ("https://page.example", True),
        ("https://PAGE.example", True),
        ("http://page.example", False),
    ],
)
def test_a_page_of_another_site_is_refused_whatever_it_asks_for(
    origin: str, is_taken: bool
) -> None:
    door = Door(origins=frozenset({"https://page.example"}))
    for answer in (
        door.get("/tasks", origin=origin),
        door.get("/livez", origin=origin),
        door.post("/tasks", TASK, origin=origin),
    ):
        assert (answer.status in (200, 202)) is is_taken
        assert is_taken or answer.problem["code"] == "forbidden_origin"


@pytest.mark.parametrize(
    ("host", "is_so"),
    [("localhost", True), ("127.0.0.9", True), ("::1", True), ("0.0.0.0", False), ("h", False)],
)
def test_what_is_not_surely_loopback_is_not_taken_for_it(host: str, is_so: bool) -> None:
    assert is_loopback(host) is is_so


def test_what_a_bound_caller_leaves_out_is_filled_in() -> None:
    door = Door()
    token = door.token("submit", "read", bounds=Bounds(agent_id="a", project_id="search"))
    task_id = door.post("/tasks", OWN, token).json["taskId"]
    shown = door.get(f"/tasks/{task_id}", token).json
    assert (shown["agentId"], shown["projectId"]) == ("a", "search")


@pytest.mark.parametrize("fields", [{"agentId": "b"}, {"projectId": "default"}])
def test_a_bound_caller_does_not_pose_as_another(fields: dict[str, str]) -> None:
    door = Door()
    token = door.token("submit", bounds=Bounds(agent_id="a", project_id="search"))
    answer = door.post("/tasks", OWN | fields, token)
    assert (answer.status, answer.problem["code"]) == (403, "forbidden")
    assert answer.problem["details"] == {"field": next(iter(fields))}
    assert door.client.engine.records == {}


def test_a_batch_of_a_bound_caller_is_bound_task_by_task() -> None:
    door = Door()
    token = door.token("submit", bounds=Bounds(agent_id="a"))
    body: dict[str, object] = {"tasks": [OWN, OWN | {"agentId": "b"}, OWN | {"agentId": "a"}]}
    answer = door.post("/tasks/batch", body, token).json
    assert answer["submitted"] == 2
    assert answer["tasks"][1]["code"] == "forbidden"
    assert door.post("/tasks/batch", body | {"agentId": "b"}, token).status == 403


def test_a_priority_is_as_urgent_as_the_token_allows() -> None:
    door = Door()
    token = door.token("submit", "read", bounds=Bounds(least_priority=5))
    refused = door.post("/tasks", TASK | {"priority": 4}, token)
    assert (refused.status, refused.problem["details"]) == (403, {"field": "priority"})
    for fields, priority in (({}, 5), ({"priority": 5}, 5), ({"priority": 9}, 9)):
        task_id = door.post("/tasks", TASK | fields, token).json["taskId"]
        assert door.get(f"/tasks/{task_id}", token).json["priority"] == priority
    urgent = door.token("submit", "read", bounds=Bounds(least_priority=-5))
    task_id = door.post("/tasks", TASK, urgent).json["taskId"]
    assert door.get(f"/tasks/{task_id}", urgent).json["priority"] == 0


OTHERS = {"scopes": ["team:others"]}


@pytest.mark.parametrize(
    ("fields", "bounds", "is_taken"),
    [
        ({}, Bounds(project_id="default"), True),
        (OTHERS, Bounds(), True),
        (OTHERS, Bounds(least_priority=5), True),
        (OTHERS, Bounds(project_id="default"), False),
        (OTHERS, Bounds(agent_id="a"), False),
        ({"scopes": ["team:others/agent:a"]}, Bounds(agent_id="a"), True),
    ],
)
def test_a_retry_charges_what_its_caller_may_charge(
    fields: dict[str, object], bounds: Bounds, is_taken: bool
) -> None:
    door = Door()
    task_id = door.post("/tasks", TASK | fields | {"projectId": "default"}).json["taskId"]
    door.client.engine.set_state(task_id, TaskStatus.FAILED)
    answer = door.post(f"/tasks/{task_id}/retry", {}, door.token("submit", bounds=bounds))
    assert answer.status == (202 if is_taken else 403)
    if not is_taken:
        assert answer.problem["details"] == {"field": "scopes"}


OF_AGENT = ("project:search", "project:search/agent:a")


def test_what_an_agents_token_sends_is_charged_to_its_own_budget() -> None:
    door = Door()
    bounds = Bounds(agent_id="a", project_id="search")
    token = door.token("submit", bounds=bounds)
    task_id = door.post("/tasks", OWN, token).json["taskId"]
    assert scopes_of(door, task_id) == OF_AGENT
    session = "project:search/agent:a/session:s"
    batch = {"tasks": [OWN, OWN | {"scopes": [session]}, OWN | {"scopes": [OF_AGENT[1]]}]}
    sent = door.post("/tasks/batch", batch, token).json["tasks"]
    charged = [scopes_of(door, one["taskId"]) for one in sent]
    assert charged == [OF_AGENT, (*OF_AGENT, session), OF_AGENT]
    assert not any(one.get("warning") for one in sent)


ANYBODY, AGENT_A = Bounds(), Bounds(agent_id="a")
IN_SEARCH, A_IN_SEARCH = Bounds(project_id="search"), Bounds(agent_id="a", project_id="search")


@pytest.mark.parametrize(
    ("first", "then", "scopes"),
    [
        (ANYBODY, A_IN_SEARCH, OF_AGENT),
        (A_IN_SEARCH, ANYBODY, OF_AGENT),
        (A_IN_SEARCH, AGENT_A, ("project:search", "agent:a", OF_AGENT[1])),
        (AGENT_A, A_IN_SEARCH, OF_AGENT),
        (AGENT_A, IN_SEARCH, ("project:search",)),
        (AGENT_A, ANYBODY, ("project:search", "agent:a")),
    ],
)
def test_a_retry_charges_the_agent_of_whoever_sends_it(
    first: Bounds, then: Bounds, scopes: tuple[str, ...]
) -> None:
    door = Door()
    body = TASK | {"projectId": "search"}
    sent = door.post("/tasks", body, door.token("submit", bounds=first))
    task_id = sent.json["taskId"]
    door.client.engine.set_state(task_id, TaskStatus.FAILED)
    token = door.token("submit", bounds=then)
    again = door.post(f"/tasks/{task_id}/retry", {}, token)
    assert again.status == 202, again.problem
    assert scopes_of(door, again.json["taskId"]) == scopes


def scopes_of(door: Door, task_id: str) -> tuple[str, ...]:
    return door.client.engine.records[task_id].task.scopes


def test_an_agent_tries_again_for_itself_what_it_took_and_as_urgent_as_it_may() -> None:
    door = Door()
    open_task = {"projectId": "default", "action": "x", "priority": -9}
    task_id = door.post("/tasks", open_task).json["taskId"]
    door.client.engine.set_state(task_id, TaskStatus.DONE, agent_id="a")
    token = door.token("submit", "read", bounds=Bounds(agent_id="a", least_priority=-2))
    again = door.post(f"/tasks/{task_id}/retry", {}, token)
    assert again.status == 202
    shown = door.get(f"/tasks/{again.json['taskId']}", token).json
    assert (shown["agentId"], shown["priority"]) == ("a", -2)


def test_what_belongs_to_others_is_not_there_for_a_bound_caller() -> None:
    door = Door()
    theirs = door.post("/tasks", {"agentId": "b", "action": "x"}).json["taskId"]
    mine = door.post("/tasks", {"agentId": "a", "action": "x"}).json["taskId"]
    token = door.token("submit", "read", "cancel", bounds=Bounds(agent_id="a"))
    for method, path in (("GET", ""), ("GET", "/why"), ("POST", "/cancel")):
        headers = {"authorization": f"Bearer {token}"}
        answer = door.client.request(method, f"/tasks/{theirs}{path}", headers=headers)
        gone = door.client.request(method, f"/tasks/tsk_none{path}", headers=headers)
        assert answer.status == gone.status == 404
        assert answer.problem == gone.problem
        own = door.client.request(method, f"/tasks/{mine}{path}", headers=headers)
        assert own.status == 200
    assert [task["taskId"] for task in door.get("/tasks", token).json["tasks"]] == [mine]
    assert door.get("/tasks?agentId=a", token).json["count"] == 1
    assert door.get("/tasks?agentId=b", token).status == 403
    assert door.client.engine.records[theirs].task.status.value == "queued"


def test_a_bound_caller_does_not_depend_on_tasks_of_others() -> None:
    door = Door()
    theirs = door.post("/tasks", {"agentId": "b", "action": "x"}).json["taskId"]
    token = door.token("submit", bounds=Bounds(agent_id="a"))
    answer = door.post("/tasks", OWN | {"dependsOn": [theirs]}, token)
    assert (answer.status, answer.problem["code"]) == (400, "unknown_parent")
    batch = door.post("/tasks/batch", {"tasks": [OWN | {"dependsOn": [theirs]}]}, token)
    assert batch.json["tasks"][0]["code"] == "unknown_parent"
    mine = door.post("/tasks", OWN, token).json["taskId"]
    assert door.post("/tasks", OWN | {"dependsOn": [mine]}, token).status == 202
    door.client.engine.questions = 0
    tasks = [OWN | {"dependsOn": [mine]}] * 3
    assert door.post("/tasks/batch", {"tasks": tasks}, token).json["submitted"] == 3
    assert door.client.engine.questions == 1


def test_a_bound_caller_charges_budgets_of_its_own() -> None:
    door = Door()
    token = door.token("submit", bounds=Bounds(agent_id="a", project_id="search"))
    own = {"scopes": ["project:search/agent:a/session:s"]}
    assert door.post("/tasks", OWN | own, token).status == 202
    answer = door.post("/tasks", OWN | {"scopes": ["session:s"]}, token)
    assert (answer.status, answer.problem["details"]) == (403, {"field": "scopes"})


def test_a_bound_caller_learns_what_holds_its_task_within_its_bounds() -> None:
    door = closed()
    bounds = Bounds(agent_id="a")
    task_id = door.post("/tasks", OWN, door.token("submit", bounds=bounds)).json["taskId"]
    assert door.get(f"/tasks/{task_id}/why", door.token("read", bounds=bounds)).status == 200
    assert door.client.engine.asked_for == bounds


def test_the_counts_of_a_bound_caller_are_its_own() -> None:
    door = Door()
    for agent in ("a", "a", "b"):
        door.post("/tasks", {"agentId": agent, "action": "x"})
    stats = door.get("/scheduler/stats", door.token("read", bounds=Bounds(agent_id="a"))).json
    assert stats["queue"] == {
        "totalQueued": 2,
        "totalInflight": 0,
        "agents": {"a": {"queued": 2, "inflight": 0}},
    }
    assert stats["metrics"]["tasksSubmitted"] == 2
    assert set(stats["metrics"]["agents"]) == {"a"}


def test_a_token_is_made_shown_once_listed_and_revoked() -> None:
    door = closed()
    admin = door.token()
    wanted = {
        "name": "ci",
        "permissions": ["read", "submit", "read"],
        "projectId": "search",
        "agentId": "a",
        "leastPriority": 3,
        "expiresAt": "2027-02-01T00:00:00Z",
    }
    made = door.post("/tokens", wanted, admin)
    assert (made.status, made.headers["cache-control"]) == (201, "no-store")
    body = made.json
    text, token_id = body.pop("token"), body["id"]
    assert body == {
        "id": token_id,
        "name": "ci",
        "permissions": ["submit", "read"],
        "state": "good",
        "createdAt": "2027-01-15T08:00:00Z",
        "expiresAt": "2027-02-01T00:00:00Z",
        "agentId": "a",
        "projectId": "search",
        "leastPriority": 3,
    }
    assert door.post("/tasks", OWN, text).status == 202
    listed = door.get("/tokens", admin)
    assert body in listed.json["tokens"]
    assert text.split("_")[2] not in listed.body.decode()
    assert door.delete(f"/tokens/{token_id}", admin).status == 200
    assert door.post("/tasks", OWN, text).status == 401
    noted = [(one.action, one.subject, one.actor.token_id) for one in door.tokens.entries]
    by = admin.split("_")[1]
    assert noted == [("token.create", token_id, by), ("token.revoke", token_id, by)]
    assert text.split("_")[2] not in str(door.tokens.entries)
    for unknown in ("0" * 12, "..", "x" * 100):
        assert door.delete(f"/tokens/{unknown}", admin).status == 404


@pytest.mark.parametrize(
    ("wanted", "status", "field"),
    [
        ({"permissions": ["read"]}, 400, "name"),
        ({"name": "x"}, 400, "permissions"),
        ({"name": "x", "permissions": []}, 400, "permissions"),
        ({"name": "x", "permissions": ["all"]}, 400, "permissions[0]"),
        ({"name": "", "permissions": ["read"]}, 400, "name"),
        ({"name": "x", "permissions": ["admin"], "agentId": "a"}, 400, "permissions"),
        ({"name": "x", "permissions": ["read"], "agentId": " a"}, 400, "agentId"),
        ({"name": "x", "permissions": ["read"], "leastPriority": 10**18}, 400, "leastPriority"),
        ({"name": "x", "permissions": ["read"], "expiresAt": "soon"}, 400, "expiresAt"),
        (
            {"name": "x", "permissions": ["read"], "expiresAt": "2020-01-01T00:00:00Z"},
            400,
            "expiresAt",
        ),
        (
            {"name": "x", "permissions": ["read"], "expiresAt": "2030-01-01T00:00:00"},
            400,
            "expiresAt",
        ),
        ({"name": "x", "permission": ["read"]}, 400, "permission"),
    ],
)
def test_a_wrong_wish_for_a_token_is_refused(wanted: object, status: int, field: str) -> None:
    door = Door()
    answer = door.post("/tokens", wanted)
    assert (answer.status, answer.problem["details"].get("field")) == (status, field), answer.body
    assert door.tokens.kept == {}


def test_a_token_for_a_project_that_does_not_exist_is_refused() -> None:
    wanted = {"name": "x", "permissions": ["read"], "projectId": "nowhere"}
    answer = Door().post("/tokens", wanted)
    assert (answer.status, answer.problem["code"]) == (400, "unknown_project")


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"permissions": ["admin", "submit"]}, "permissions"),
        ({"leastPriority": 4}, "leastPriority"),
        ({"leastPriority": None}, "leastPriority"),
        ({"expiresAt": None}, "expiresAt"),
        ({"expiresAt": "2027-01-16T00:00:00Z"}, "expiresAt"),
    ],
)
def test_nobody_makes_a_token_with_more_than_it_has(more: dict[str, Any], field: str) -> None:
    door = closed()
    ends_at = door.tokens.time + 3_600.0
    admin = door.token("admin", "read", bounds=Bounds(least_priority=5), expires_at=ends_at)
    least = {
        "name": "x",
        "permissions": ["read"],
        "leastPriority": 5,
        "expiresAt": "2027-01-15T08:30:00Z",
    }
    assert door.post("/tokens", least, admin).status == 201
    answer = door.post("/tokens", least | more, admin)
    assert (answer.status, answer.problem["details"]) == (403, {"field": field})


def test_no_text_of_a_token_is_in_anything_that_a_service_says() -> None:
    door = closed()
    token = door.token("read")
    secret = token.split("_")[2]
    with structlog.testing.capture_logs() as lines:
        answers = [
            door.get(path, token)
            for path in ("/tasks", "/tasks/none", "/nowhere", "/tokens", f"/tasks?state={token}")
        ]
    said = msgspec.json.encode(lines).decode() + "".join(
        f"{answer.headers}{answer.body.decode()}" for answer in answers
    )
    # A part of it, since what is told of a text is cut.
    assert secret[:16] not in said


@pytest.mark.parametrize(
    ("permissions", "is_trusted"),
    [(("submit", "read", "cancel"), False), (("submit", "admin"), True), (("admin",), True)],
)
def test_what_is_stated_counts_as_given_of_an_operator_alone(
    permissions: tuple[Permission, ...], is_trusted: bool
) -> None:
    assert Caller(name="x", permissions=frozenset(permissions)).is_trusted is is_trusted
    assert LOCAL.is_trusted


SITES: list[tuple[dict[str, str], bool, bool]] = [
    # What a browser says of a request; is it taken by the API; is it taken by a page?
    ({}, True, True),
    ({"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, True, True),
    ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, True, True),
    ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, False, False),
    ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, False, False),
    ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, False, False),
    ({"sec-fetch-site": "cross-site"}, False, False),
    (
        {
            "sec-fetch-site": "cross-site",
            "sec-fetch-mode": "navigate",
            "sec-fetch-dest": "document",
        },
        False,
        True,
    ),
    (
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
        False,
        False,
    ),
    (
        {
            "sec-fetch-site": "cross-site",
            "sec-fetch-mode": "cors",
            "origin": "https://friend.example",
        },
        True,
        True,
    ),
    ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, False, False),
    ({"origin": "null"}, False, False),
]


@pytest.mark.parametrize(("headers", "is_taken", "is_taken_by_page"), SITES)
def test_without_tokens_no_page_of_another_site_reads_or_starts_anything(
    headers: dict[str, str], is_taken: bool, is_taken_by_page: bool
) -> None:
    door = Door(origins=frozenset({"https://friend.example"}))
    # What is taken is tried on two: others would stream, or change this service.
    taken = [route for route in ROUTES if route.path == "/tasks"]
    for route in taken if is_taken else ROUTES:
        path = route.path.replace("{id}", "x")
        answer = door.client.request(route.method, path, b"not JSON at all", headers=headers)
        is_refused = answer.status == 403 and answer.problem["code"] == "forbidden_origin"
        assert is_refused is not is_taken, (route, answer.status)
    scope = {
        "method": "GET",
        "path": "/ui",
        "headers": [
            (b"host", b"localhost"),
            *[(name.encode(), value.encode()) for name, value in headers.items()],
        ],
    }
    request = Request(scope, None)
    with nullcontext() if is_taken_by_page else pytest.raises(ApiError, match="other sites"):
        door.client.app.api.auth.authenticate(request, "read", is_page=True)


def test_where_tokens_are_asked_for_a_token_decides_whatever_the_browser_says() -> None:
    door = closed()
    headers = {"sec-fetch-site": "cross-site"}
    assert door.get("/tasks", door.token("read"), **headers).status == 200
    assert door.get("/tasks", **headers).status == 401
