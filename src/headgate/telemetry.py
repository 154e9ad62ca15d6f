"""Tasks and calls as spans of OpenTelemetry, where the settings ask for it.

A submit is a span, and everything that becomes of its tasks is below it: each wait, and each
attempt at a target, which is told the trace by `traceparent`. A call through the gateway is a span
below the one that its client names, or below the attempt of the task that makes it. Where spans go
is said by the variables of OpenTelemetry. Rule: a span has names and numbers; never what a task or
a model was given or what it answered.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from headgate.core.call import CallRecord, CallState
from headgate.core.events import shortened_error
from headgate.core.lifecycle import Cancelled, Failed, Limited, Lost, Outcome, Succeeded
from headgate.core.money import to_usd_float
from headgate.errors import InvalidSettingError
from headgate.executors.executor import Executor, RemoteExecutor, Room, WorkOrder
from headgate.extras import naming_extras
from headgate.providers.usage import counted_tokens

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span


SERVICE_NAME = "headgate"
EXPORTERS = ("otlp", "console", "none")
CLOSE_SECONDS = 5.0
WAIT_SPAN_SECONDS = 0.1
"""A call that waits for less has no span for it, only an attribute."""

_NS = 1_000_000_000

_OUTCOMES = {
    Succeeded: "done",
    Failed: "failed",
    Limited: "rate limited",
    Cancelled: "cancelled",
    Lost: "lost",
}


_OPERATIONS = {
    "chat": "chat",
    "responses": "chat",
    "messages": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
"""The operations of the conventions, by the protocol of a call; others go by their own name."""


class _Asked(msgspec.Struct):
    """What a request to a model says about it."""

    model: object = None


_requests = msgspec.json.Decoder(_Asked)


class Telemetry:
    """Makes the spans of one process."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        self._provider = provider
        self._tracer = provider.get_tracer("headgate")
        self._propagator = TraceContextTextMapPropagator()
        self._attempts: dict[str, str | None] = {}

    def submitted(self, traceparent: str | None) -> str | None:
        """Note a submit; return the header under which its tasks go on."""
        from opentelemetry.trace import SpanKind  # noqa: PLC0415

        span = self._tracer.start_span(
            "submit", context=self._context(traceparent), kind=SpanKind.PRODUCER
        )
        span.end()
        return self._traceparent(span)

    def traced(self, target: str, executor: Executor) -> Executor:
        """Return an executor that does the same, and is seen."""
        if isinstance(executor, RemoteExecutor):
            return TracedRemoteExecutor(self, target, executor)
        return TracedExecutor(self, target, executor)

    async def execute(self, target: str, executor: Executor, order: WorkOrder) -> Outcome:
        """Have an attempt executed within a span, after one for its wait."""
        from opentelemetry.trace import use_span  # noqa: PLC0415

        span = self._begun(target, order)
        traceparent = self._attempts[order.task_id] = self._traceparent(span)
        try:
            with use_span(span, record_exception=False, set_status_on_exception=False):
                passed_on = msgspec.structs.replace(order, traceparent=traceparent)
                outcome = await executor.execute(passed_on)
            _note(span, outcome)
        finally:
            self._attempts.pop(order.task_id, None)
            span.end()
        return outcome

    def pulled(self, target: str, order: WorkOrder, outcome: Outcome, ended_at: float) -> None:
        """Note an attempt of a worker, which may have begun at another node, with its wait."""
        span = self._begun(target, order, order.started_at)
        _note(span, outcome)
        span.end(int(ended_at * _NS))

    def called(
        self,
        record: CallRecord,
        *,
        traceparent: str | None,
        provider: str,
        url: str,
        response_model: str = "",
    ) -> None:
        """Note a call that has ended, below the span of its client or of the task that makes it.

        `provider` is what its upstream speaks, and `url` where that is; `response_model` is the one
        that the answer names.
        """
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context  # noqa: PLC0415

        if traceparent is None and record.task_id is not None:
            traceparent = self._attempts.get(record.task_id)
        operation = _OPERATIONS.get(record.protocol, record.protocol)
        attributes = _call_attributes(record, operation, provider, url)
        if response_model:
            attributes["gen_ai.response.model"] = response_model
        span = self._tracer.start_span(
            f"{operation} {record.model}".strip(),
            context=self._context(traceparent),
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=int(record.created_at * _NS),
        )
        ended_at = record.ended_at or record.created_at
        started_at = record.started_at or ended_at
        if started_at - record.created_at >= WAIT_SPAN_SECONDS:
            wait = self._tracer.start_span(
                "wait",
                context=set_span_in_context(span),
                attributes={"headgate.call.id": record.id},
                start_time=int(record.created_at * _NS),
            )
            wait.end(int(started_at * _NS))
        if record.state in (CallState.FAILED, CallState.REFUSED):
            span.set_attribute("error.type", str(record.status or record.state.value))
            span.set_status(StatusCode.ERROR, shortened_error(record.error or record.state.value))
        span.end(int(ended_at * _NS))

    def _begun(self, target: str, order: WorkOrder, at: float | None = None) -> Span:
        """Return the span of an attempt, from now on unless said, after one for its wait."""
        from opentelemetry.trace import SpanKind  # noqa: PLC0415

        context = self._context(order.traceparent)
        names = _names_of(target, order)
        if order.waits_since is not None and order.started_at is not None:
            wait = self._tracer.start_span(
                "wait",
                context=context,
                attributes=names,
                start_time=int(order.waits_since * _NS),
            )
            wait.end(int(order.started_at * _NS))
        return self._tracer.start_span(
            f"invoke_agent {order.agent_id}".strip(),
            context=context,
            kind=SpanKind.CLIENT,
            attributes=names | _model_names_of(order),
            start_time=None if at is None else int(at * _NS),
        )

    def close(self) -> None:
        """Send what is left; a collector that does not answer is waited for only so long."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)

    def _context(self, traceparent: str | None) -> Context:
        from opentelemetry.context import Context  # noqa: PLC0415

        if traceparent is None:
            return Context()
        return self._propagator.extract({"traceparent": traceparent}, context=Context())

    def _traceparent(self, span: Span) -> str | None:
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=set_span_in_context(span))
        return carrier.get("traceparent")


class TracedExecutor:
    """An executor whose attempts are spans."""

    def __init__(self, telemetry: Telemetry, target: str, executor: Executor) -> None:
        self._telemetry = telemetry
        self._target = target
        self._executor = executor
        self.open = executor.open
        self.close = executor.close

    async def execute(self, order: WorkOrder) -> Outcome:
        """Do the work, and say what came of it."""
        return await self._telemetry.execute(self._target, self._executor, order)


class TracedRemoteExecutor(TracedExecutor):
    """A traced executor whose work goes on elsewhere; its type says so, as any other's does."""

    def __init__(self, telemetry: Telemetry, target: str, executor: RemoteExecutor) -> None:
        super().__init__(telemetry, target, executor)
        self._remote = executor

    def leave(self, task_id: str) -> None:
        """Let the work of a task go on when its coroutine is cancelled: another finds it."""
        self._remote.leave(task_id)

    async def room(self) -> Room:
        """Say how many more tasks could begin now; none while that is not known."""
        return await self._remote.room()


def build_telemetry(environ: Mapping[str, str] = os.environ) -> Telemetry:
    """Return what makes spans, and sends them where the variables of OpenTelemetry say."""
    with naming_extras("telemetry.otel"):
        from opentelemetry.sdk.resources import SERVICE_NAME as NAME  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415

        named = environ.get("OTEL_SERVICE_NAME") or SERVICE_NAME
        resource = Resource.create({NAME: named})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        _add_exporter(provider, environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower())
        return Telemetry(provider)


def _add_exporter(provider: TracerProvider, kind: str) -> None:
    from opentelemetry.sdk.trace.export import (  # noqa: PLC0415
        BatchSpanProcessor,
        ConsoleSpanExporter,
    )

    if kind not in EXPORTERS:
        problem = f"must be one of {', '.join(EXPORTERS)}, not {kind!r}"
        raise InvalidSettingError("OTEL_TRACES_EXPORTER", problem)
    if kind == "console":
        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter()))
    elif kind == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))


def _call_attributes(
    record: CallRecord, operation: str, provider: str, url: str
) -> dict[str, str | int | float | bool]:
    """Return what is known of a call; what nobody said is left out."""
    server = urlsplit(url)
    waited = (record.started_at or record.ended_at or record.created_at) - record.created_at
    is_answered = record.first_byte_at is not None and record.started_at is not None
    found: dict[str, str | int | float | bool | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": record.upstream_model or record.model,
        "gen_ai.request.stream": record.is_stream or None,
        "gen_ai.agent.name": record.agent_id,
        "gen_ai.conversation.id": record.session or None,
        "gen_ai.usage.input_tokens": record.input_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.cache_creation.input_tokens": record.cache_write_tokens,
        "gen_ai.usage.reasoning.output_tokens": record.reasoning_tokens,
        "gen_ai.response.time_to_first_chunk": (
            (record.first_byte_at or 0.0) - (record.started_at or 0.0)
            if record.is_stream and is_answered
            else None
        ),
        "server.address": server.hostname,
        "server.port": server.port or (443 if server.scheme == "https" else 80),
        "headgate.call.id": record.id,
        "headgate.project.id": record.project_id,
        "headgate.upstream": record.upstream,
        "headgate.slot": record.slot,
        "headgate.task.id": record.task_id,
        "headgate.outcome": record.state.value,
        "headgate.waited_seconds": max(0.0, waited),
        "headgate.usage.tokens": record.tokens,
        "headgate.usage.usd": None if record.micro_usd is None else to_usd_float(record.micro_usd),
    }
    return {name: value for name, value in found.items() if value is not None}


def _names_of(target: str, order: WorkOrder) -> dict[str, str | int]:
    return {
        "headgate.task.id": order.task_id,
        "headgate.task.attempt": order.attempt,
        "headgate.project.id": order.project_id,
        "headgate.target": target,
        "headgate.action": order.submission.action,
    }


def _model_names_of(order: WorkOrder) -> dict[str, str | int]:
    names: dict[str, str | int] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": order.agent_id,
    }
    model = _model_of(order.submission.input or order.submission.params)
    if model:
        names["gen_ai.request.model"] = model
    return names


def _model_of(json: msgspec.Raw | None) -> str:
    if json is None:
        return ""
    try:
        model = _requests.decode(json).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return model if isinstance(model, str) else ""


def _note(span: Span, outcome: Outcome) -> None:
    """Write down how an attempt ended, and what it used as far as anybody knows."""
    from opentelemetry.trace import StatusCode  # noqa: PLC0415

    span.set_attribute("headgate.outcome", _OUTCOMES[type(outcome)])
    if isinstance(outcome, Failed | Limited):
        span.set_status(StatusCode.ERROR, shortened_error(outcome.error))
    if isinstance(outcome, Succeeded | Failed | Cancelled):
        if outcome.usage.tokens is not None:
            span.set_attribute("headgate.usage.tokens", outcome.usage.tokens)
        if outcome.usage.micro_usd is not None:
            span.set_attribute("headgate.usage.usd", to_usd_float(outcome.usage.micro_usd))
    counted = None if not isinstance(outcome, Succeeded) else counted_tokens(outcome.result)
    if counted is not None:
        span.set_attribute("gen_ai.usage.input_tokens", counted.input_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", counted.output_tokens)
        if counted.model:
            span.set_attribute("gen_ai.response.model", counted.model)
