"""Tasks as spans: what they say, whose trace they belong to, and what a target is told."""

from __future__ import annotations

import asyncio
import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from api.asgi_client import answer_of
from engine.one_service import Service, play
from executors.endpoint import reply_json, running_endpoint
from headgate.app import build_app, build_service
from headgate.client.worker import order_of
from headgate.config import load_settings
from headgate.core.call import CallRecord, CallState
from headgate.core.lifecycle import Failed, Limited, Outcome, Succeeded, Usage
from headgate.core.task import Submission, read_traceparent
from headgate.core.task_view import TaskSnapshot
from headgate.errors import InvalidSettingError
from headgate.executors.executor import RemoteExecutor, Room, WorkOrder
from headgate.telemetry import Telemetry, build_telemetry

TRACE = "0af7651916cd43dd8448eb211c80319c"
SENT = f"00-{TRACE}-b7ad6b7169203331-01"
CANARY = "canary-secret"


class Work:
    """An executor that ends as it is told, and remembers its order."""

    def __init__(self, outcome: Outcome | BaseException) -> None:
        self.outcome = outcome
        self.orders: list[WorkOrder] = []

    async def open(self) -> None:
        """Make nothing ready."""

    async def close(self) -> None:
        """Let nothing go."""

    async def execute(self, order: WorkOrder) -> Outcome:
        self.orders.append(order)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(exporter: InMemorySpanExporter) -> Telemetry:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry(provider)


def order(**fields: Any) -> WorkOrder:
    submission = fields.pop("submission", Submission(action="review"))
    values: dict[str, Any] = {
        "task_id": "tsk_1",
        "attempt": 1,
        "project_id": "search",
        "agent_id": "coder",
        "submission": submission,
        "waits_since": 100.0,
        "started_at": 107.5,
        "traceparent": SENT,
    }
    return WorkOrder(**(values | fields))


def executed(telemetry: Telemetry, outcome: Outcome, **fields: Any) -> WorkOrder:
    work = Work(outcome)
    assert asyncio.run(telemetry.traced("llm", work).execute(order(**fields))) == outcome
    return work.orders[0]


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


class RemoteWork(Work):
    """An executor whose work goes on elsewhere, and that has no room."""

    def __init__(self) -> None:
        super().__init__(Succeeded())
        self.was_asked = asyncio.Event()
        self.left: list[str] = []

    def leave(self, task_id: str) -> None:
        self.left.append(task_id)

    async def room(self) -> Room:
        self.was_asked.set()
        return Room(free=0)


def test_a_traced_target_elsewhere_is_asked_for_its_room(telemetry: Telemetry) -> None:
    async def scenario(service: Service) -> None:
        work = RemoteWork()
        service.engine.executors = {"ray": telemetry.traced("ray", work)}
        async with asyncio.timeout(60):
            await work.was_asked.wait()

    play(scenario)


def test_a_traced_executor_is_remote_if_what_it_traces_is(telemetry: Telemetry) -> None:
    work = RemoteWork()
    remote = telemetry.traced("ray", work)
    assert isinstance(remote, RemoteExecutor)
    remote.leave("tsk_1")
    assert work.left == ["tsk_1"]
    assert not isinstance(telemetry.traced("llm", Work(Succeeded())), RemoteExecutor)


def test_an_attempt_and_its_wait_are_spans_of_the_clients_trace(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    answer = {"model": "gpt-4o-2026", "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
    result = msgspec.Raw(json.dumps(answer).encode())
    usage = Usage(tokens=12, micro_usd=1_500_000)
    asked = Submission(input=msgspec.Raw(b'{"model": "gpt-4o", "messages": []}'))
    given = executed(telemetry, Succeeded(result=result, usage=usage), submission=asked)
    spans = by_name(exporter)
    wait, attempt = spans["wait"], spans["invoke_agent coder"]
    assert (wait.start_time, wait.end_time) == (100_000_000_000, 107_500_000_000)
    for span in (wait, attempt):
        assert span.context is not None
        assert span.parent is not None
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert dict(attempt.attributes or {}) == {
        "headgate.task.id": "tsk_1",
        "headgate.task.attempt": 1,
        "headgate.project.id": "search",
        "headgate.target": "llm",
        "headgate.action": "",
        "headgate.outcome": "done",
        "headgate.usage.tokens": 12,
        "headgate.usage.usd": 1.5,
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "coder",
        "gen_ai.request.model": "gpt-4o",
        "gen_ai.response.model": "gpt-4o-2026",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
    }
    assert attempt.context is not None
    assert given.traceparent == f"00-{TRACE}-{attempt.context.span_id:016x}-01"


ENDS: list[tuple[Outcome, str, StatusCode]] = [
    (Succeeded(), "done", StatusCode.UNSET),
    (Failed(error="it broke"), "failed", StatusCode.ERROR),
    (Limited(), "rate limited", StatusCode.ERROR),
]


@pytest.mark.parametrize(("outcome", "word", "code"), ENDS)
def test_how_an_attempt_ended_is_its_status(
    telemetry: Telemetry,
    exporter: InMemorySpanExporter,
    outcome: Outcome,
    word: str,
    code: StatusCode,
) -> None:
    executed(telemetry, outcome)
    span = by_name(exporter)["invoke_agent coder"]
    assert (span.status.status_code, (span.attributes or {})["headgate.outcome"]) == (code, word)


def test_an_attempt_that_is_stopped_is_a_span_all_the_same(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    work = telemetry.traced("llm", Work(asyncio.CancelledError()))

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await work.execute(order(waits_since=None))

    asyncio.run(main())
    assert list(by_name(exporter)) == ["invoke_agent coder"]


@pytest.mark.parametrize("params", [b"null", b"[1]", b'{"model": 3}', b'{"model": ', b"\xff"])
def test_whatever_a_task_was_given_makes_no_trouble(
    telemetry: Telemetry, exporter: InMemorySpanExporter, params: bytes
) -> None:
    executed(telemetry, Succeeded(), submission=Submission(action="x", params=msgspec.Raw(params)))
    span = by_name(exporter)["invoke_agent coder"]
    assert "gen_ai.request.model" not in (span.attributes or {})


def test_neither_what_was_given_nor_what_was_answered_is_in_a_span(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    secret = msgspec.Raw(json.dumps({"prompt": CANARY}).encode())
    given = Submission(action="x", params=secret, input=secret, labels={"k": CANARY})
    executed(telemetry, Succeeded(result=secret), submission=given)
    assert CANARY not in "".join(span.to_json() for span in exporter.get_finished_spans())


HEADERS = [
    (SENT, SENT),
    ("", None),
    ("00-" + "0" * 32 + "-b7ad6b7169203331-01", None),
    (f"00-{TRACE}-{'0' * 16}-01", None),
    (f"ff-{TRACE}-b7ad6b7169203331-01", None),
    (SENT + "-x", None),
    (SENT.upper(), None),
]


@pytest.mark.parametrize(("sent", "taken"), HEADERS)
def test_only_a_whole_header_is_passed_on(sent: str, taken: str | None) -> None:
    assert read_traceparent(sent) == taken


@pytest.mark.parametrize("batch", [False, True])
def test_a_target_is_told_the_trace_that_the_client_sent(tmp_path: Path, batch: bool) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), running_endpoint(reply_json({})) as endpoint:
            settings = tmp_path / "settings.toml"
            settings.write_text(f'[targets.t]\nkind = "http"\nurl = "{endpoint.url}/x"\n')
            loaded = load_settings(settings, {}, {"store.url": "memory:"})
            service = build_service(loaded, data=tmp_path, environ={})
            await service.engine.start()
            try:
                task = {"agentId": "a", "action": "x"}
                path = "/tasks/batch" if batch else "/tasks"
                body = json.dumps({**task, "tasks": [{"action": "x"}]} if batch else task).encode()
                headers = {"traceparent": SENT}
                answer = await answer_of(build_app(service), "POST", path, body, headers=headers)
                assert answer.status == 202
                while not endpoint.seen:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            finally:
                await service.engine.stop(drain_seconds=1.0)
            assert endpoint.seen[0].headers["traceparent"] == SENT

    asyncio.run(main())


@pytest.mark.parametrize(("outcome", "word", "code"), ENDS)
def test_an_attempt_of_a_worker_is_a_span_when_it_has_settled(
    telemetry: Telemetry,
    exporter: InMemorySpanExporter,
    outcome: Outcome,
    word: str,
    code: StatusCode,
) -> None:
    telemetry.pulled("pull", order(), outcome, 110.0)
    wait, attempt = exporter.get_finished_spans()
    assert (wait.name, wait.start_time, wait.end_time) == ("wait", 100 * 10**9, 1075 * 10**8)
    assert attempt.name == "invoke_agent coder"
    assert (attempt.start_time, attempt.end_time) == (1075 * 10**8, 110 * 10**9)
    assert attempt.status.status_code is code
    assert attempt.attributes is not None
    assert (attempt.attributes["headgate.target"], attempt.attributes["headgate.outcome"]) == (
        "pull",
        word,
    )
    assert attempt.context is not None
    assert f"{attempt.context.trace_id:032x}" == TRACE


def test_a_worker_is_told_the_trace_and_its_attempt_is_seen_once(
    tmp_path: Path, telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    async def main() -> None:
        loaded = load_settings(None, {}, {"store.url": "memory:"})
        service = build_service(loaded, data=tmp_path, environ={})
        service.engine.workers.watch(telemetry.pulled)
        app = build_app(service)

        async def ask(path: str, body: object) -> Any:
            sent = json.dumps(body).encode()
            answer = await answer_of(app, "POST", path, sent, headers={"traceparent": SENT})
            assert answer.status in (200, 202), answer.body
            return answer.json

        await service.engine.start()
        try:
            worker = {"workerId": (await ask("/agents/a/claim", {}))["workerId"]}
            await ask("/tasks", {"agentId": "a", "action": "x", "target": "pull"})
            claimed = await ask("/agents/a/claim", {**worker, "waitSeconds": 10})
            (task,) = claimed["tasks"]
            done = {**worker, "attempt": 1, "usage": {"tokens": 7}}
            for _ in range(2):
                await ask(f"/tasks/{task['taskId']}/complete", done)
        finally:
            await service.engine.stop(drain_seconds=1.0)
        assert task["traceparent"] == SENT
        snapshot = msgspec.convert(task, TaskSnapshot)
        assert order_of(snapshot, "a").traceparent == SENT

    asyncio.run(asyncio.wait_for(main(), 20.0))
    wait, attempt = exporter.get_finished_spans()
    assert (wait.name, attempt.name) == ("wait", "invoke_agent a")
    assert attempt.attributes is not None
    assert attempt.attributes["headgate.usage.tokens"] == 7


def test_a_submit_is_a_span_above_everything_that_becomes_of_it(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    for sent in (None, SENT):
        traceparent = telemetry.submitted(sent)
        assert traceparent is not None
        executed(telemetry, Succeeded(), traceparent=traceparent)
        submit, wait, attempt = exporter.get_finished_spans()
        for span in (wait, attempt):
            assert span.parent is not None
            assert submit.context is not None
            assert span.parent.span_id == submit.context.span_id
        exporter.clear()


def call(**fields: Any) -> CallRecord:
    values: dict[str, Any] = {
        "id": "call-1",
        "project_id": "search",
        "agent_id": "coder",
        "model": "fast",
        "upstream": "openai",
        "protocol": "chat",
        "state": CallState.DONE,
        "created_at": 100.0,
        "started_at": 100.0,
        "ended_at": 109.0,
    }
    return CallRecord(**(values | fields))


def called(
    telemetry: Telemetry, record: CallRecord, traceparent: str | None = SENT, model: str = ""
) -> None:
    url = "https://api.openai.com/v1"
    telemetry.called(
        record, traceparent=traceparent, provider="openai", url=url, response_model=model
    )


def test_a_call_is_a_span_of_its_clients_trace(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    record = call(
        upstream_model="gpt-5-mini",
        is_stream=True,
        session="s1",
        started_at=107.5,
        first_byte_at=108.0,
        slot="work",
        input_tokens=100,
        cached_tokens=80,
        output_tokens=7,
        tokens=107,
        micro_usd=1_500_000,
    )
    called(telemetry, record, model="gpt-5-mini-2026")
    wait, span = exporter.get_finished_spans()
    assert span.name == "chat fast"
    assert (span.start_time, span.end_time) == (100 * 10**9, 109 * 10**9)
    assert (wait.name, wait.start_time, wait.end_time) == ("wait", 100 * 10**9, 1075 * 10**8)
    assert span.context is not None
    assert span.parent is not None
    assert wait.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert wait.parent.span_id == span.context.span_id
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-5-mini",
        "gen_ai.request.stream": True,
        "gen_ai.response.model": "gpt-5-mini-2026",
        "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.agent.name": "coder",
        "gen_ai.conversation.id": "s1",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 80,
        "server.address": "api.openai.com",
        "server.port": 443,
        "headgate.call.id": "call-1",
        "headgate.project.id": "search",
        "headgate.upstream": "openai",
        "headgate.slot": "work",
        "headgate.outcome": "done",
        "headgate.waited_seconds": 7.5,
        "headgate.usage.tokens": 107,
        "headgate.usage.usd": 1.5,
    }


PROTOCOLS = [
    ("chat", "chat"),
    ("responses", "chat"),
    ("messages", "chat"),
    ("completions", "text_completion"),
    ("embeddings", "embeddings"),
    ("count_tokens", "count_tokens"),
]


@pytest.mark.parametrize(("protocol", "operation"), PROTOCOLS)
def test_the_operation_of_a_call_is_that_of_its_protocol(
    telemetry: Telemetry, exporter: InMemorySpanExporter, protocol: str, operation: str
) -> None:
    called(telemetry, call(protocol=protocol))
    (span,) = exporter.get_finished_spans()
    assert span.name == f"{operation} fast"
    assert (span.attributes or {})["gen_ai.operation.name"] == operation


CALL_ENDS = [
    (CallState.DONE, 200, StatusCode.UNSET, None),
    (CallState.CANCELLED, None, StatusCode.UNSET, None),
    (CallState.FAILED, 500, StatusCode.ERROR, "500"),
    (CallState.REFUSED, None, StatusCode.ERROR, "refused"),
]


@pytest.mark.parametrize(("state", "status", "code", "error"), CALL_ENDS)
def test_how_a_call_ended_is_its_status(
    telemetry: Telemetry,
    exporter: InMemorySpanExporter,
    state: CallState,
    status: int | None,
    code: StatusCode,
    error: str | None,
) -> None:
    called(telemetry, call(state=state, status=status, error="x" if error else None))
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code, (span.attributes or {}).get("error.type")) == (code, error)


@pytest.mark.parametrize("own", [None, SENT])
def test_a_call_of_a_task_is_below_its_attempt_unless_it_names_a_span(
    telemetry: Telemetry, exporter: InMemorySpanExporter, own: str | None
) -> None:
    class Calling(Work):
        async def execute(self, order: WorkOrder) -> Outcome:
            called(telemetry, call(task_id=order.task_id), own)
            return await super().execute(order)

    work = telemetry.traced("llm", Calling(Succeeded()))
    asyncio.run(work.execute(order(waits_since=None)))
    called(telemetry, call(task_id="tsk_1", protocol="embeddings"), None)
    spans = by_name(exporter)
    attempt, span = spans["invoke_agent coder"], spans["chat fast"]
    assert attempt.context is not None
    assert span.parent is not None
    by_attempt = f"{attempt.context.span_id:016x}"
    expected = by_attempt if own is None else "b7ad6b7169203331"
    assert f"{span.parent.span_id:016x}" == expected
    assert spans["embeddings fast"].parent is None, "the attempt has ended"


def test_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("opentelemetry.sdk"):
            raise ModuleNotFoundError(name=name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidSettingError, match=r"^telemetry.otel: .*headgate\[otel\]"):
        build_telemetry({})


def test_an_exporter_that_does_not_exist_is_named() -> None:
    with pytest.raises(InvalidSettingError, match=r"^OTEL_TRACES_EXPORTER: must be one of"):
        build_telemetry({"OTEL_TRACES_EXPORTER": "zipkin"})
    build_telemetry({"OTEL_TRACES_EXPORTER": "none", "OTEL_SERVICE_NAME": "fleet"}).close()
