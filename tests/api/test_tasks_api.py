"""The task routes: shapes, statuses and codes that clients rely on."""

from __future__ import annotations

import json
import logging
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.asgi_client import Client
from api.fake_engine import FakeEngine, health
from headgate.api.errors import CODES, STORE_FAILS
from headgate.api.http.request import MAX_BODY_BYTES
from headgate.core.admission import QueueLimits, refuse_by_size
from headgate.core.retention import BY_AGE, BY_NUMBER, RetentionCut, StoreSize
from headgate.core.task import Progress, TaskStatus
from headgate.errors import (
    HeadgateError,
    NotTakingWorkError,
    StoreFullError,
    StoreUnavailableError,
    UnfitValueError,
)
from headgate.storage.task_ids import first_id_at

TASK = {"agentId": "a", "action": "click"}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


@pytest.fixture
def client() -> Client:
    return Client()


def submitted(client: Client, **fields: object) -> str:
    answer = client.post("/tasks", TASK | fields)
    assert answer.status == 202, answer.body
    return str(answer.json["taskId"])


def test_a_task_that_is_taken_gets_its_id_state_position_and_time(client: Client) -> None:
    answer = client.post("/tasks", TASK)
    assert answer.status == 202
    assert answer.headers["content-type"] == "application/json"
    body = answer.json
    assert list(body) == ["taskId", "state", "position", "createdAt"]
    assert (body["state"], body["position"]) == ("queued", 1)
    assert body["createdAt"] == "2027-01-15T08:00:00Z"
    assert body["taskId"] in client.engine.records


def test_a_wrong_task_is_refused_with_code_field_and_message(client: Client) -> None:
    answer = client.post("/tasks", {"action": "x"})
    assert answer.status == 400
    assert answer.problem == {
        "code": "missing_field",
        "error": "missing required field 'agentId'",
        "retryable": False,
        "details": {"field": "agentId"},
    }


def test_a_full_queue_answers_429_with_the_id_of_the_rejected_task() -> None:
    client = Client(FakeEngine(limits=QueueLimits(max_queue=1, max_per_agent=5)))
    submitted(client)
    answer = client.post("/tasks", TASK)
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    body = answer.problem
    task_id = body.pop("taskId")
    assert body == {
        "code": "queue_full",
        "error": "rejected: global queue full (1/1)",
        "retryable": True,
        "details": {
            "limit": "global",
            "projectId": "default",
            "agentId": "a",
            "queued": 1,
            "maxQueue": 1,
            "maxPerProject": 0,
            "maxPerAgent": 5,
            "maxScheduled": 10_000,
            "queueShare": 8,
        },
    }
    assert client.get(f"/tasks/{task_id}").json["state"] == "rejected"


@pytest.mark.parametrize(
    "failure",
    [StoreFullError("/var/secret/place.db: the disk is full"), None],
)
def test_a_store_without_room_answers_507_and_says_what_to_do(
    failure: StoreFullError | None,
) -> None:
    client = Client()
    if failure is None:
        size = StoreSize(used_bytes=2**24, max_bytes=2**24)
        client.engine.refusal = refuse_by_size(
            QueueLimits(),
            size,
            adds_bytes=1,
            ended_bytes=0,
            live_bytes_of_project=0,
            project_id="default",
        )
    client.engine.failure = failure
    answer = client.post("/tasks", TASK)
    assert (answer.status, answer.headers["retry-after"]) == (507, "1")
    assert (answer.problem["code"], answer.problem["retryable"]) == ("store_full", True)
    assert "taskId" not in answer.problem
    assert b"secret" not in answer.body
    told = "scheduler.max_store_bytes" if failure is None else "free some space"
    assert told in answer.problem["error"]


def test_a_node_without_room_is_degraded_and_still_ready() -> None:
    client = Client()
    parts = {"store": "the disk is full", "ledger": "ok", "dispatcher": "ok"}
    client.engine.state = health(shortage="the disk is full", parts=parts)
    answer = client.get("/readyz")
    assert answer.status == 200
    assert (answer.json["status"], answer.json["store"]) == ("degraded", "the disk is full")


def test_a_project_beyond_its_share_of_the_queue_is_told_its_bound_and_what_to_do() -> None:
    client = Client(FakeEngine(limits=QueueLimits(max_queue=4, max_per_agent=9, queue_share=1)))
    batch = client.post("/tasks/batch", {"agentId": "a", "tasks": [{"action": "x"}] * 3}).json
    assert [entry.get("code") for entry in batch["tasks"]] == [None, None, "queue_full"]
    answer = client.post("/tasks", TASK)
    assert answer.status == 429
    assert answer.problem["error"] == 'rejected: project queue full for "default" (2/2)'
    assert answer.problem["details"] == {
        "limit": "project",
        "projectId": "default",
        "agentId": "a",
        "queued": 2,
        "maxQueue": 4,
        "maxPerProject": 2,
        "maxPerAgent": 9,
        "maxScheduled": 10_000,
        "queueShare": 1,
    }
    assert "send it again when some of its tasks have started" in answer.json["detail"]
    assert client.post("/tasks", TASK | {"projectId": "search"}).status == 202


def test_a_parent_that_is_not_there_is_refused(client: Client) -> None:
    answer = client.post("/tasks", TASK | {"dependsOn": ["tsk_gone"]})
    assert (answer.status, answer.json["code"]) == (400, "unknown_parent")
    assert answer.json["error"] == "unknown task 'tsk_gone' in 'dependsOn'"


def test_the_snapshot_of_a_new_task_has_what_is_set_and_nothing_else(client: Client) -> None:
    task_id = submitted(client)
    assert client.get(f"/tasks/{task_id}").json == {
        "taskId": task_id,
        "agentId": "a",
        "action": "click",
        "priority": 0,
        "state": "queued",
        "createdAt": "2027-01-15T08:00:00Z",
        "projectId": "default",
        "target": "browser",
        "weight": 1.0,
        "scopes": ["project:default"],
        "onParentFailure": "fail",
        "maxAttempts": 1,
        "timeoutSeconds": 3600.0,
        "onExhausted": "wait",
        "attempt": 0,
    }


def test_the_snapshot_of_a_finished_task_has_everything(client: Client) -> None:
    parent = submitted(client)
    task_id = submitted(
        client,
        tabId="t",
        selector="#x",
        ref="e5",
        params={"a": [1]},
        priority=2,
        callbackUrl="https://example.com/h",
        projectId="search",
        input={"b": None},
        weight=2.5,
        estimate={"tokens": 10, "usd": 0.25},
        scopes=["session:s"],
        dependsOn=[parent],
        onParentFailure="run",
        notBefore="2027-01-15T08:00:05Z",
        deadline="2027-01-15T09:00:00Z",
        labels={"k": "v"},
        maxAttempts=3,
        timeoutSeconds=30,
        onExhausted="reject",
    )
    client.engine.set_state(
        task_id,
        TaskStatus.DONE,
        progress=Progress(
            attempt=2,
            used_tokens=12,
            used_micro_usd=300_000,
            started_at=1_800_000_010.0,
            completed_at=1_800_000_010.25,
        ),
        result='{"ok":true}',
        tokens=7,
        micro_usd=100_000,
    )
    body = client.get(f"/tasks/{task_id}").json
    for name in ("deadline", "createdAt", "startedAt", "completedAt"):
        assert TIME.fullmatch(body.pop(name)), name
    assert body == {
        "taskId": task_id,
        "agentId": "a",
        "action": "click",
        "tabId": "t",
        "selector": "#x",
        "ref": "e5",
        "params": {"a": [1]},
        "priority": 2,
        "state": "done",
        "latencyMs": 250,
        "result": {"ok": True},
        "callbackUrl": "https://example.com/h",
        "projectId": "search",
        "target": "browser",
        "input": {"b": None},
        "weight": 2.5,
        "estimate": {"tokens": 10, "usd": 0.25},
        "scopes": ["project:search", "session:s"],
        "dependsOn": [parent],
        "onParentFailure": "run",
        "notBefore": "2027-01-15T08:00:05Z",
        "labels": {"k": "v"},
        "maxAttempts": 3,
        "timeoutSeconds": 30.0,
        "onExhausted": "reject",
        "attempt": 2,
        "usage": {"tokens": 12, "usd": 0.3},
    }


@pytest.mark.parametrize("task_id", ["tsk_x", "x" * 65, "a%2Fb", "%00", "%FF", "..", "a b", "é"])
@pytest.mark.parametrize("rest", ["", "/why"])
def test_a_task_that_is_not_there_is_404_whatever_its_id(
    client: Client, task_id: str, rest: str
) -> None:
    answer = client.get(f"/tasks/{task_id}{rest}")
    assert answer.status == 404
    assert answer.problem == {
        "code": "not_found",
        "error": "task not found",
        "retryable": False,
        "details": {},
    }


OLD = first_id_at(1_790_000_000)
CUTS = {
    BY_AGE: (604_800.0, "ended tasks are kept for 7 days", "604800"),
    BY_NUMBER: (1_000_000.0, "1,000,000 ended tasks are kept at most", "1000000"),
}


@pytest.mark.parametrize("setting", CUTS)
@pytest.mark.parametrize(
    ("method", "rest"),
    [("GET", ""), ("GET", "/why"), ("GET", "/events"), ("POST", "/cancel"), ("POST", "/retry")],
)
def test_a_task_that_was_deleted_is_410_and_names_the_setting_and_the_cut(
    client: Client, setting: str, method: str, rest: str
) -> None:
    value, rule, shown = CUTS[setting]
    cut = RetentionCut(setting=setting, value=value, task_id=first_id_at(1_790_000_000.5))
    client.engine.cuts = [cut]
    answer = (
        client.get(f"/tasks/{OLD}{rest}") if method == "GET" else client.post(f"/tasks/{OLD}{rest}")
    )
    assert (answer.status, answer.problem["code"]) == (410, "task_deleted")
    assert answer.problem["taskId"] == OLD
    assert answer.problem["details"] == {
        "setting": f"scheduler.{setting}",
        "value": shown,
        "cut": "2026-09-21T14:13:20.500Z",
    }
    assert rule in answer.problem["error"]
    assert f"scheduler.{setting} = {shown}" in answer.problem["error"]
    newer = first_id_at(1_790_000_001)
    assert client.get(f"/tasks/{newer}").status == 404


@pytest.mark.parametrize("rest", ["complete", "fail"])
def test_a_worker_that_ends_a_deleted_task_is_told_so(client: Client, rest: str) -> None:
    client.engine.cuts = [RetentionCut(setting=BY_AGE, value=1.0, task_id=OLD)]
    body = {"workerId": f"worker-{'0' * 32}", "attempt": 1, "error": "x"}
    if rest == "complete":
        del body["error"]
    answer = client.post(f"/tasks/{OLD}/{rest}", body)
    assert (answer.status, answer.problem["code"]) == (410, "task_deleted")


def test_tasks_are_listed_newest_first_and_page_by_page(client: Client) -> None:
    ids = [submitted(client) for _ in range(5)]
    first = client.get("/tasks?limit=2").json
    assert [task["taskId"] for task in first["tasks"]] == [ids[4], ids[3]]
    assert (first["count"], first["nextCursor"]) == (2, ids[3])
    rest = client.get(f"/tasks?limit=3&cursor={first['nextCursor']}").json
    assert [task["taskId"] for task in rest["tasks"]] == [ids[2], ids[1], ids[0]]
    assert "nextCursor" not in rest


def test_an_empty_list_is_a_list(client: Client) -> None:
    assert client.get("/tasks").json == {"tasks": [], "count": 0}


def test_lists_are_filtered_by_agent_project_and_states(client: Client) -> None:
    mine = submitted(client)
    other = submitted(client, agentId="b", projectId="search")
    client.engine.set_state(other, TaskStatus.RUNNING)

    def found(query: str) -> list[str]:
        return [task["taskId"] for task in client.get(f"/tasks?{query}").json["tasks"]]

    assert found("agentId=b") == [other]
    assert found("projectId=default") == [mine]
    assert found("state=running,done") == [other]
    assert found("state=queued%2C%20running") == [other, mine]
    assert found("state=&agentId=") == [other, mine]
    assert found("verbose=1") == [other, mine]


def test_a_list_leaves_out_what_is_not_wanted_and_nothing_else(client: Client) -> None:
    task_id = submitted(client, params={"a": 1}, input=[2], labels={"k": "v"})
    client.engine.set_state(task_id, TaskStatus.DONE, result="3")

    def listed(query: str) -> dict[str, object]:
        return dict(client.get(f"/tasks?{query}").json["tasks"][0])

    whole = listed("omit=")
    contents = {"params": {"a": 1}, "input": [2], "result": 3}
    assert whole.items() >= contents.items()
    for name, value in contents.items():
        assert listed(f"omit={name}") | {name: value} == whole
        assert name not in listed(f"omit={name}")
    assert listed("omit=params,%20result,input,params") | contents == whole
    assert contents.keys().isdisjoint(listed("omit=params,%20result,input,params"))
    assert client.get(f"/tasks/{task_id}").json["params"] == {"a": 1}


def test_a_name_that_cannot_be_left_out_is_refused_with_those_that_can(client: Client) -> None:
    answer = client.get("/tasks?omit=params,labels")
    assert answer.json["error"] == (
        "field 'omit': 'params,labels' is not a list of params, input, result"
    )


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("state=sleeping", "invalid_field"),
        ("omit=taskId", "invalid_field"),
        ("omit=PARAMS", "invalid_field"),
        ("agentId=%00", "invalid_field"),
        ("projectId=a%00b", "invalid_field"),
        ("agentId=" + "a" * 129, "invalid_field"),
        ("limit=0", "invalid_field"),
        ("limit=1001", "invalid_field"),
        ("limit=-1", "invalid_field"),
        ("limit=many", "invalid_field"),
        ("limit=" + "9" * 5000, "invalid_field"),
        ("cursor=%00", "invalid_field"),
        ("agentid=a", "unknown_field"),
        ("&".join("a=1" for _ in range(100)), "invalid_field"),
    ],
)
def test_a_query_that_cannot_be_meant_is_refused(client: Client, query: str, code: str) -> None:
    answer = client.get(f"/tasks?{query}")
    assert (answer.status, answer.json["code"]) == (400, code)


def test_a_cancelled_task_says_so_and_cannot_be_cancelled_again(client: Client) -> None:
    task_id = submitted(client)
    answer = client.post(f"/tasks/{task_id}/cancel")
    assert (answer.status, answer.json) == (200, {"status": "cancelled", "taskId": task_id})
    again = client.post(f"/tasks/{task_id}/cancel")
    assert again.status == 409
    assert again.json["code"] == "conflict"
    assert again.json["error"] == "task is already cancelled"


def test_a_task_that_is_still_stopping_is_202_and_cancelling(client: Client) -> None:
    task_id = submitted(client)
    client.engine.set_state(task_id, TaskStatus.RUNNING)
    client.engine.cancel_takes_effect = False
    answer = client.post(f"/tasks/{task_id}/cancel")
    assert (answer.status, answer.json) == (202, {"status": "cancelling", "taskId": task_id})


def test_cancelling_what_is_done_or_unknown_is_409_and_404(client: Client) -> None:
    task_id = submitted(client)
    client.engine.set_state(task_id, TaskStatus.DONE)
    answer = client.post(f"/tasks/{task_id}/cancel")
    assert (answer.status, answer.json["error"]) == (409, "task is already done")
    assert client.post("/tasks/tsk_none/cancel").status == 404


def test_why_answers_with_the_reasons(client: Client) -> None:
    task_id = submitted(client)
    body = client.get(f"/tasks/{task_id}/why").json
    assert body["taskId"] == task_id
    assert body["reasons"][0]["detail"]["reason"] == "global_budget"


def test_a_batch_is_handed_over_whole_before_anything_is_waited_for(client: Client) -> None:
    answer = client.post("/tasks/batch", {"agentId": "a", "tasks": [{"action": "x"}] * 50})
    assert answer.status == 202
    assert answer.json["submitted"] == 50
    assert [task["position"] for task in answer.json["tasks"]] == list(range(1, 51))
    assert client.engine.most_under_way == 50


def test_only_tasks_that_were_taken_count_as_submitted() -> None:
    client = Client(FakeEngine(limits=QueueLimits(max_queue=1)))
    tasks = [{"action": "x"}, {"action": "x"}, {}, {"action": "x", "dependsOn": ["gone"]}]
    answer = client.post("/tasks/batch", {"agentId": "a", "tasks": tasks})
    assert (answer.status, answer.json["submitted"]) == (202, 1)
    taken, full, wrong, orphan = answer.json["tasks"]
    assert list(taken) == ["taskId", "state", "position"]
    assert (full["state"], full["code"]) == ("rejected", "queue_full")
    assert full["taskId"] in client.engine.records
    assert wrong == {
        "code": "missing_field",
        "error": "missing required field 'action'",
        "retryable": False,
    }
    assert orphan["code"] == "unknown_parent"


@pytest.mark.parametrize(
    ("tasks", "code"), [([], "batch_empty"), ([{"action": "x"}] * 51, "batch_too_large")]
)
def test_a_batch_has_one_to_fifty_tasks(client: Client, tasks: list[object], code: str) -> None:
    answer = client.post("/tasks/batch", {"agentId": "a", "tasks": tasks})
    assert (answer.status, answer.json["code"]) == (400, code)


def test_a_batch_of_which_nothing_is_stored_in_an_outage_is_503_whatever_else_is_wrong(
    client: Client,
) -> None:
    client.engine.failing_actions = {"x": StoreUnavailableError("disk full")}
    whole = client.post("/tasks/batch", {"agentId": "a", "tasks": [{"action": "x"}, {}]})
    assert (whole.status, whole.json["code"]) == (503, "unavailable")
    wrong = client.post("/tasks/batch", {"agentId": "a", "tasks": [{}, {}]})
    assert (wrong.status, wrong.json["submitted"]) == (202, 0)


def test_a_batch_during_an_outage_is_503_and_a_part_of_one_says_which(client: Client) -> None:
    client.engine.failing_actions = {"bad": StoreUnavailableError("disk full")}
    both = {"agentId": "a", "tasks": [{"action": "bad"}, {"action": "x"}]}
    part = client.post("/tasks/batch", both).json
    assert part["submitted"] == 1
    assert part["tasks"][0] == {"code": "unavailable", "error": STORE_FAILS, "retryable": True}
    whole = client.post("/tasks/batch", {"agentId": "a", "tasks": [{"action": "bad"}]})
    assert (whole.status, whole.json["code"]) == (503, "unavailable")


def test_stats_count_lanes_by_agent_and_show_the_limits(client: Client) -> None:
    for agent in ("a", "a", "b"):
        submitted(client, agentId=agent)
    submitted(client, agentId=None, projectId="search")
    client.engine.set_state(submitted(client, projectId="search"), TaskStatus.RUNNING)
    body = client.get("/scheduler/stats").json
    assert body["queue"] == {
        "totalQueued": 4,
        "totalInflight": 1,
        "agents": {
            "a": {"queued": 2, "inflight": 1},
            "b": {"queued": 1, "inflight": 0},
            "": {"queued": 1, "inflight": 0},
        },
    }
    agents = body["metrics"].pop("agents")
    assert {name: each["tasksSubmitted"] for name, each in agents.items()} == {
        "a": 3,
        "b": 1,
        "": 1,
    }
    assert body["metrics"] == {
        "tasksSubmitted": 5,
        "tasksCompleted": 0,
        "tasksFailed": 0,
        "tasksCancelled": 0,
        "tasksRejected": 0,
        "tasksExpired": 0,
        "dispatchCount": 3,
        "avgDispatchLatencyMs": 3.333,
    }
    assert agents["b"].keys() == body["metrics"].keys()
    assert body["config"] == {
        "strategy": "fair-fifo",
        "maxQueueSize": 1000,
        "queueShare": 8,
        "maxPerAgent": 100,
        "maxScheduled": 10_000,
        "maxInflight": 20,
        "maxPerAgentInflight": 10,
        "taskRetentionSeconds": 604800,
        "maxEndedTasks": 1_000_000,
        "maxStoreBytes": None,
        "workerCount": 20,
    }


def test_alive_asks_nobody_and_ready_asks_the_engine(client: Client) -> None:
    client.engine.failure = StoreUnavailableError("gone")
    assert client.get("/livez").json == {"status": "ok"}
    well = {"store": "ok", "ledger": "ok", "dispatcher": "ok", "descriptors": "ok"}
    ready = {"status": "ready", "role": "dispatcher", "paused": False, **well}
    assert client.get("/readyz").json == ready
    parts = {**well, "store": "the store is gone"}
    client.engine.state = health(
        is_ready=False, role="follower", problem="the store is gone", parts=parts
    )
    answer = client.get("/readyz")
    assert answer.status == 503
    assert answer.problem == {
        "code": "not_ready",
        "error": "the store is gone",
        "retryable": True,
        "details": {"role": "follower", **parts},
    }


ASKING = [
    ("POST", "/tasks", json.dumps(TASK).encode()),
    ("GET", "/tasks", b""),
    ("GET", "/tasks/tsk_x", b""),
    ("POST", "/tasks/tsk_x/cancel", b""),
    ("GET", "/tasks/tsk_x/why", b""),
    ("GET", "/scheduler/stats", b""),
]


@pytest.mark.parametrize(("method", "url", "body"), ASKING)
def test_a_store_that_cannot_be_asked_is_503_and_only_the_log_has_the_reason(
    client: Client, caplog: pytest.LogCaptureFixture, method: str, url: str, body: bytes
) -> None:
    client.engine.failure = StoreUnavailableError("/var/x.db is locked")
    for _ in range(3):
        answer = client.request(method, url, body)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.problem == {
            "code": "unavailable",
            "error": STORE_FAILS,
            "retryable": True,
            "details": {},
        }
    assert caplog.text.count("/var/x.db is locked") == 1


def test_a_value_that_the_store_cannot_take_is_the_fault_of_the_request(client: Client) -> None:
    client.engine.failure = UnfitValueError("PostgreSQL: text of a column")
    answer = client.get("/tasks")
    assert (answer.status, answer.problem["code"]) == (400, "invalid_field")
    assert "PostgreSQL" not in answer.body.decode()


def test_a_node_that_was_told_to_take_no_work_says_so(client: Client) -> None:
    client.engine.failure = NotTakingWorkError("switched off")
    answer = client.post("/tasks", TASK)
    assert (answer.status, answer.problem["error"]) == (503, "switched off")


@pytest.mark.parametrize("fault", [ZeroDivisionError("secret"), HeadgateError("secret")])
@pytest.mark.parametrize(("method", "url", "body"), ASKING)
def test_a_fault_is_500_and_only_the_log_tells_what_it_was(
    client: Client,
    caplog: pytest.LogCaptureFixture,
    method: str,
    url: str,
    body: bytes,
    fault: Exception,
) -> None:
    client.engine.failure = fault
    with caplog.at_level(logging.ERROR):
        answer = client.request(method, url, body, headers={"x-request-id": "req-7"})
    assert answer.status == 500
    assert answer.problem == {
        "code": "internal",
        "error": "internal error",
        "retryable": False,
        "details": {},
    }
    assert "req-7" in caplog.text
    assert "secret" in caplog.text


def test_a_request_id_is_echoed_if_it_is_sane_and_made_otherwise(client: Client) -> None:
    def answered(sent: str) -> str:
        headers = {"x-request-id": sent} if sent else {}
        return client.request("GET", "/livez", headers=headers).headers["x-request-id"]

    assert answered("abc-1.2") == "abc-1.2"
    made = {answered(""), answered(""), answered("a b"), answered("x" * 129), answered("a\r\nb")}
    assert len(made) == 5
    assert "a b" not in made


def test_a_body_beyond_one_mebibyte_is_refused_before_it_is_read(client: Client) -> None:
    headers = {"content-length": str(MAX_BODY_BYTES + 1)}
    answer = client.request("POST", "/tasks", b"", headers=headers)
    assert (answer.status, answer.json["code"]) == (413, "body_too_large")
    assert answer.headers["connection"] == "close"


def test_a_body_without_a_length_is_refused_as_soon_as_it_is_too_large(client: Client) -> None:
    part = b" " * (MAX_BODY_BYTES // 2)
    unread = [b" "] * 50
    answer = client.request("POST", "/tasks", part, part, b" ", *unread)
    assert answer.status == 413
    assert client.request("POST", "/tasks/batch", part + part + b" ").status == 413


def test_a_body_in_parts_up_to_the_limit_is_taken(client: Client) -> None:
    least = len(json.dumps(TASK | {"input": ""}).encode())
    body = json.dumps(TASK | {"input": "x" * (MAX_BODY_BYTES - least)}).encode()
    assert len(body) == MAX_BODY_BYTES
    assert client.request("POST", "/tasks", body[:10], body[10:]).status == 202


def test_a_client_that_goes_away_gets_no_answer_and_submits_nothing(client: Client) -> None:
    whole = json.dumps(TASK).encode()
    assert client.request("POST", "/tasks", whole, disconnects=True).status == 0
    assert client.engine.records == {}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=utf-8"}, 202),
        ({"content-type": "application/vnd.x+json"}, 202),
        ({"content-type": "application/x-www-form-urlencoded"}, 202),
        ({"content-type": ""}, 202),
        ({"content-encoding": "identity"}, 202),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "text/html"}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"origin": "http://127.0.0.1:7420"}, 202),
        ({"origin": "https://evil.test"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_bodies_of_other_types_and_from_other_sites_are_refused(
    client: Client, headers: dict[str, str], status: int
) -> None:
    assert client.request("POST", "/tasks", json.dumps(TASK).encode(), headers=headers).status == (
        status
    )


def test_another_site_cannot_cancel(client: Client) -> None:
    task_id = submitted(client)
    url = f"/tasks/{task_id}/cancel"
    assert client.request("POST", url, headers={"origin": "https://evil.test"}).status == 403
    assert client.engine.records[task_id].task.status is TaskStatus.QUEUED


@pytest.mark.parametrize(
    ("method", "url", "allow"),
    [
        ("DELETE", "/tasks", "GET, HEAD, OPTIONS, POST"),
        ("PUT", "/tasks/tsk_x", "GET, HEAD, OPTIONS"),
        ("GET", "/tasks/tsk_x/cancel", "OPTIONS, POST"),
        ("GET", "/tasks/batch", "OPTIONS, POST"),
        ("POST", "/livez", "GET, HEAD, OPTIONS"),
    ],
)
def test_another_method_is_405_with_those_that_are_taken(
    client: Client, method: str, url: str, allow: str
) -> None:
    answer = client.request(method, url)
    assert (answer.status, answer.json["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == allow


def test_options_names_the_methods_and_head_is_as_get(client: Client) -> None:
    answer = client.request("OPTIONS", "/tasks")
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["allow"] == "GET, HEAD, OPTIONS, POST"
    assert client.request("HEAD", "/tasks").status == 200
    assert client.request("HEAD", "/tasks/tsk_x").status == 404


@pytest.mark.parametrize("url", ["/", "/task", "/tasks/", "/tasks/a/b", "/tasks/a/why/", "//tasks"])
def test_an_address_without_a_route_is_404(client: Client, url: str) -> None:
    answer = client.get(url)
    assert (answer.status, answer.json["code"]) == (404, "not_found")


@settings(deadline=None, max_examples=150)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "HEAD"]),
    url=st.sampled_from(["/tasks", "/tasks/batch"]) | st.text("/tasks%?=&.:\0", max_size=30),
    body=st.binary(max_size=200),
)
def test_no_request_is_answered_with_an_undocumented_code_or_a_fault(
    method: str, url: str, body: bytes
) -> None:
    answer = Client().request(method, "/" + url.lstrip("/"), body)
    assert answer.status < 500
    if answer.status >= 400:
        assert CODES[answer.json["code"]].status == answer.status
