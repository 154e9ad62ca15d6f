"""The page of a task: its way, what holds it, what it cost; and hostile text shown as text."""

from __future__ import annotations

import json
import shlex
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from api.asgi_client import answer_of
from config.running import WORK
from dashboard.browser import Browser, serving, submit, text_of, until
from headgate.api.app import App
from headgate.core.task import (
    MAX_LOSSES,
    PastAttempt,
    Progress,
    Submission,
    Task,
    TaskRecord,
    TaskStatus,
    Terms,
)
from headgate.dashboard.task import (
    MAX_BLOCK,
    MAX_BODY_BYTES,
    attempts_text,
    block_of,
    curl_of,
    timeline,
)
from headgate.errors import LedgerUnavailableError
from headgate.storage.deliveries import Delivery, DeliveryState

HELD = '[projects.default]\nstatus = "paused"\n'
SCRIPT = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
RIGHT_TO_LEFT = "\u202egpj.exe\u2066"


class Tags(HTMLParser):
    """Collects the elements of a page, and every attribute that would run something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]


def tags_of(body: bytes) -> Tags:
    found = Tags()
    found.feed(body.decode())
    return found


async def ended(app: App, task_id: str) -> None:
    async def is_over() -> bool:
        answer = await answer_of(app, "GET", f"/tasks/{task_id}")
        return bool(answer.json["state"] in ("done", "failed", "cancelled"))

    await until(is_over)


async def test_what_a_driver_says_is_not_on_the_page(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        task_id = await submit(app)

        async def away(*_: object, **__: object) -> object:
            raise LedgerUnavailableError("redis at 10.1.2.3 refused")

        app.api.engine.why = away  # type: ignore[method-assign, assignment]
        page = text_of((await Browser(app).get(f"/ui/tasks/{task_id}")).body)
    assert "Unknown now: the store is unavailable now" in page
    assert "10.1.2.3" not in page


async def test_a_task_that_has_ended_shows_its_way_and_asks_no_more(tmp_path: Path) -> None:
    async with serving(tmp_path, WORK) as (_, app):
        task_id = await submit(app, estimate={"tokens": 10}, input={"say": "hello"})
        await ended(app, task_id)
        browser = Browser(app)
        page = (await browser.get(f"/ui/tasks/{task_id}")).body
        region = (await browser.region(f"/ui/tasks/{task_id}", "task-now")).body
    text = text_of(page)
    for words in (
        "Submitted",
        "Attempt 1 started",
        "Agent a",
        "Nothing else could start then.",
        "Done",
        "Estimate",
        "Booked",
        "hello",
    ):
        assert words in text, words
    for part in (page, region):
        assert b"hx-get" not in part
        assert b"/retry" in part
        assert b"/cancel" not in part
    assert b"<html" not in region
    assert region.strip().startswith(b'<div id="task-now"')


async def test_the_raw_json_is_what_the_api_answers(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        task_id = await submit(app, labels={"a": SCRIPT})
        raw = await Browser(app).get(f"/ui/tasks/{task_id}/raw")
        told = await answer_of(app, "GET", f"/tasks/{task_id}")
    assert raw.json == told.json
    assert raw.headers["content-type"] == "application/json"
    assert raw.headers["x-content-type-options"] == "nosniff"


async def test_a_task_is_cancelled_and_tried_again_from_its_page(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        task_id = await submit(app)
        browser = Browser(app)
        await browser.get(f"/ui/tasks/{task_id}")
        page, said = await browser.act(f"/ui/tasks/{task_id}/cancel")
        assert said.startswith("Done:"), said
        assert "cancelled" in text_of(page.body)
        _, said = await browser.act(f"/ui/tasks/{task_id}/cancel")
        assert said.startswith("Not done:"), said
        page, said = await browser.act(f"/ui/tasks/{task_id}/retry")
        assert said.startswith("Done:"), said
        assert f'href="/ui/tasks/{task_id}"'.encode() in page.body
        for path in ("nothing/cancel", "nothing/retry", "a%2Fb/cancel"):
            assert (await browser.post(f"/ui/tasks/{path}")).status == 404
        assert (await browser.get("/ui/tasks/nothing")).status == 404


async def test_a_hostile_task_is_shown_as_text_and_the_page_stays_small(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        plain = await submit(app)
        task_id = await submit(
            app,
            agentId=SCRIPT,
            action=SCRIPT,
            tabId=SCRIPT,
            ref=SCRIPT,
            selector=SCRIPT + RIGHT_TO_LEFT + "\n\x1b[31m",
            labels={SCRIPT: SCRIPT},
            params={SCRIPT: RIGHT_TO_LEFT + "\u0000"},
            input="<b>" + "x" * 900_000,
        )
        browser = Browser(app)
        expected = tags_of((await browser.get(f"/ui/tasks/{plain}")).body)
        for path in (f"/ui/tasks/{task_id}", "/ui/tasks", "/ui/tasks?text=%3Cscript%3E"):
            page = await browser.get(path)
            assert page.status == 200
            assert len(page.body) < 100_000
            found = tags_of(page.body)
            assert found.handlers == expected.handlers == []
            assert found.names.count("script") == expected.names.count("script")
            assert "b" not in found.names
            assert found.names.count("img") == expected.names.count("img")
            for hidden in ("\u202e", "\u2066", "\x1b", "\0"):
                assert hidden not in page.body.decode(), (path, hidden)
            assert "<script>alert(1)</script>" in text_or_source(page.body)
        raw = await browser.get(f"/ui/tasks/{task_id}/raw")
        assert len(raw.body) > 900_000


def text_or_source(body: bytes) -> str:
    return body.decode().replace("&lt;", "<").replace("&gt;", ">")


@pytest.mark.parametrize("field", ["agentId", "action", "selector"])
async def test_a_null_character_is_refused_before_it_is_stored(field: str, tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        body = {"agentId": "a", "action": "x", field: "a\0b"}
        answer = await answer_of(app, "POST", "/tasks", json.dumps(body).encode())
        assert answer.status == 400
        page = await Browser(app).get("/ui/tasks?text=a%00b")
    assert page.status == 400


def record_of(**fields: object) -> TaskRecord:
    task = Task(id="t1", agent_id="a", created_at=100.0, status=TaskStatus.RUNNING)
    known: dict[str, object] = {"task": task, "agent_id": "a", **fields}
    return TaskRecord(**known)  # type: ignore[arg-type]


def told_of(record: TaskRecord) -> list[tuple[float | None, str, str]]:
    return [(step.at, step.title, step.text) for step in timeline(record, None)]


BROKEN = PastAttempt(
    attempt=3,
    started_at=300.0,
    ended_at=350.0,
    error="it broke",
    agent_id="b",
    slot="work",
    node_id="n2",
    tokens=12_000,
    micro_usd=70_000,
    assumed_micro_usd=70_000,
)


def test_attempts_are_told_as_far_as_they_are_known() -> None:
    progress = Progress(
        attempt=4, failures=2, losses=1, started_at=400.0, node_id="n1", attempts=(BROKEN,)
    )
    assert told_of(record_of(progress=progress)) == [
        (100.0, "Submitted", ""),
        (
            None,
            "2 earlier attempts",
            "Their times are not stored. Of all attempts 2 failed, 1 lost their node.",
        ),
        (300.0, "Attempt 3 started", "Agent b, on node n2, with slot work."),
        (
            350.0,
            "Attempt 3 ended, will be retried",
            "it broke. Booked: 12.0k tokens, $0.07, partly assumed.",
        ),
        (400.0, "Attempt 4 started", "Agent a, on node n1."),
    ]


def test_an_attempt_that_is_to_be_tried_again_is_told_once() -> None:
    past = msgspec.structs.replace(BROKEN, attempt=1)
    progress = Progress(attempt=1, failures=1, started_at=300.0, attempts=(past,))
    for status in (TaskStatus.QUEUED, TaskStatus.CANCELLED):
        task = Task(id="t1", agent_id="a", created_at=100.0, status=status)
        titles = [title for _, title, _ in told_of(record_of(task=task, progress=progress))]
        assert titles[1:3] == ["Attempt 1 started", "Attempt 1 ended, will be retried"]
        assert "Attempt" not in " ".join(titles[3:])


@pytest.mark.parametrize("status", [TaskStatus.ASSIGNED, TaskStatus.CANCELLED])
def test_an_attempt_that_was_not_begun_is_not_told_with_the_time_of_another(
    status: TaskStatus,
) -> None:
    past = msgspec.structs.replace(BROKEN, attempt=1, started_at=None, error=None, tokens=0)
    never = msgspec.structs.replace(past, micro_usd=0, assumed_micro_usd=0)
    progress = Progress(attempt=2, started_at=300.0, attempts=(never,))
    task = Task(id="t1", agent_id="a", created_at=100.0, status=status)
    assert told_of(record_of(task=task, progress=progress))[1:4] == [
        (None, "Attempt 1 assigned, not started", "Agent b, on node n2, with slot work."),
        (350.0, "Attempt 1 ended, will be retried", ""),
        (None, "Attempt 2 assigned, not started", "Agent a."),
    ]


async def test_attempts_are_told_after_a_restart_and_by_no_list(tmp_path: Path) -> None:
    quick = f"{WORK}[scheduler]\nretry_base_seconds = 0.01\nretry_max_seconds = 0.02\n"
    store: dict[str, object] = {"store.url": f"sqlite:///{tmp_path}/tasks.db"}
    async with serving(tmp_path, quick, store) as (_, app):
        task_id = await submit(app, maxAttempts=3, timeoutSeconds=0.001)
        await ended(app, task_id)
    async with serving(tmp_path, quick, store) as (_, app):
        page = (await Browser(app).get(f"/ui/tasks/{task_id}")).body
        told = (await answer_of(app, "GET", f"/tasks/{task_id}")).json
        listed = (await answer_of(app, "GET", "/tasks")).json
    titles = ("Attempt 1 ended", "Attempt 2 started", "Attempt 2 ended", "Attempt 3 started")
    assert [title for title in titles if title not in text_of(page)] == []
    assert [one["attempt"] for one in told["attempts"]] == [1, 2]
    first = told["attempts"][0]
    assert (first["error"], first["agentId"]) == ("timed out after 0.001 s", "a")
    assert first["startedAt"] < first["endedAt"] < told["startedAt"]
    assert "attempts" not in listed["tasks"][0]


@pytest.mark.parametrize(
    ("status", "most", "progress", "said"),
    [
        ("running", 3, Progress(attempt=1), "started; it is given up when 3 have failed"),
        ("queued", 1, Progress(), "started; it is given up when 1 has failed"),
        ("done", 3, Progress(attempt=2, failures=1), "started"),
        ("cancelled", 3, Progress(attempt=1), "started"),
        ("failed", 3, Progress(), "started"),
        (
            "failed",
            3,
            Progress(attempt=3, failures=2),
            "started; no retry: no more than 3 may fail",
        ),
        (
            "failed",
            1,
            Progress(attempt=1),
            "started; no retry: no more than one may fail",
        ),
        (
            "failed",
            3,
            Progress(attempt=1, completed_at=250.0),
            "started; no retry: its deadline has passed",
        ),
        (
            "failed",
            9,
            Progress(attempt=MAX_LOSSES, losses=MAX_LOSSES - 1),
            "started; no retry: its error says why",
        ),
        (
            "failed",
            3,
            Progress(attempt=1, completed_at=150.0),
            "started; no retry: this kind of error does not go away by itself",
        ),
    ],
)
def test_a_task_that_has_ended_says_why_it_is_not_tried_again(
    status: str, most: int, progress: Progress, said: str
) -> None:
    task = Task(id="t1", created_at=100.0, deadline=200.0, status=TaskStatus(status))
    record = record_of(task=task, progress=progress, terms=Terms(max_attempts=most))
    assert attempts_text(record) == said


def test_a_task_that_has_ended_waits_for_no_parent() -> None:
    terms, waiting = Terms(depends_on=("t0",)), Progress(waiting_for=1)
    task = Task(id="t1", status=TaskStatus.FAILED)
    waits = timeline(record_of(terms=terms, progress=waiting), None)[1]
    ended = timeline(record_of(task=task, terms=terms, progress=waiting), None)[1]
    assert (waits.state, waits.text) == ("queued", "Not ended yet: 1.")
    assert (ended.state, ended.text) == ("cancelled", "It no longer waits for them.")


async def test_a_reason_says_its_time_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        task_id = await submit(app, notBefore="2090-01-02T03:04:05Z")
        text = text_of((await Browser(app).get(f"/ui/tasks/{task_id}")).body)
    assert "It may not start before 2090-01-02 03:04:05 UTC ( in " in text
    assert "Asked again" not in text


@pytest.mark.parametrize(
    ("state", "at", "title"),
    [
        (DeliveryState.PENDING, 510.0, "Webhook, next try"),
        (DeliveryState.DELIVERED, 520.0, "Webhook delivered"),
        (DeliveryState.DEAD, 520.0, "Webhook given up"),
    ],
)
def test_the_timeline_ends_with_the_webhook(state: DeliveryState, at: float, title: str) -> None:
    task = Task(id="t1", created_at=100.0, status=TaskStatus.DONE)
    record = record_of(task=task, progress=Progress(completed_at=500.0))
    delivery = Delivery(
        id="msg_1",
        event="task.completed",
        url="https://example.org",
        state=state,
        tries=2,
        created_at=500.0,
        due_at=510.0,
        ended_at=520.0,
        status=503,
    )
    *_, done, last = timeline(record, delivery)
    assert (done.title, done.at) == ("Done", 500.0)
    assert (last.title, last.at, last.text) == (title, at, "2 tries, last answered 503.")


def test_the_command_submits_the_same_and_is_one_safe_line() -> None:
    params = msgspec.Raw(b'{"q": "it\'s $HOME `id` \xe2\x80\xae"}')
    given = Submission(action="x'y", params=params, labels={"k": "v"})
    record = record_of(submission=given, terms=Terms(estimate_micro_usd=1_500_000, max_attempts=2))
    command = curl_of(record, "http://127.0.0.1:7420", needs_token=True)
    assert command is not None
    assert command.isascii()
    assert "\n" not in command
    words = shlex.split(command)
    assert words[:5] == [
        "curl",
        "-s",
        "-H",
        "Authorization: Bearer $HEADGATE_TOKEN",
        "http://127.0.0.1:7420/tasks",
    ]
    assert json.loads(words[-1]) == {
        "agentId": "a",
        "projectId": "default",
        "action": "x'y",
        "params": {"q": "it's $HOME `id` \u202e"},
        "priority": 0,
        "estimate": {"usd": "1.50"},
        "labels": {"k": "v"},
        "maxAttempts": 2,
        "onExhausted": "wait",
    }


async def test_the_command_is_taken_by_the_service(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (service, app):
        task_id = await submit(
            app, params={"n": 1}, estimate={"tokens": 5}, notBefore="2090-01-01T00:00:00Z"
        )
        record = await service.engine.get(task_id)
        assert record is not None
        command = curl_of(record, "http://127.0.0.1:7420", needs_token=False)
        assert command is not None
        body = shlex.split(command)[-1].encode()
        again = await answer_of(app, "POST", "/tasks", body)
        told = await answer_of(app, "GET", f"/tasks/{again.json['taskId']}")
        first = await answer_of(app, "GET", f"/tasks/{task_id}")
    changing = ("taskId", "createdAt", "deadline", "position")
    same, before = (
        {name: value for name, value in one.json.items() if name not in changing}
        for one in (told, first)
    )
    assert same == before


def test_a_task_that_is_too_large_has_no_command() -> None:
    large = msgspec.Raw(msgspec.json.encode("x" * MAX_BODY_BYTES))
    record = record_of(submission=Submission(action="x", input=large))
    assert curl_of(record, "http://127.0.0.1:7420", needs_token=False) is None


def test_a_large_value_is_cut_and_says_so() -> None:
    small = block_of("Result", b'{"a":1}')
    assert (small.text, small.is_cut) == ('{\n  "a": 1\n}', False)
    large = block_of("Result", msgspec.json.encode("é" * 1_000_000))
    assert (len(large.text), large.is_cut, large.size_bytes) == (MAX_BLOCK, True, 2_000_002)
