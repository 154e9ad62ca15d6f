"""What metrics and traces show of calls through a whole service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from gateway.gateway_service import CHAT, MESSAGES, GatewayService, gateway_service
from headgate.telemetry import Telemetry

TRACE = "0af7651916cd43dd8448eb211c80319c"
SENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
POOR = """
[projects.poor]

[budgets."project:poor"]
limit_usd = "0"
"""


async def metrics_of(gateway: GatewayService) -> dict[tuple[str, ...], float]:
    """Return the samples of calls by name and labels, in the order of the labels' names."""
    text = (await gateway.client.get("/metrics")).text
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name.startswith("headgate_call")
    }


def test_calls_are_counted_by_upstream_model_and_outcome(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, POOR) as gateway:
            await gateway.record(await gateway.ask(CHAT))
            record = await gateway.record(await gateway.ask(MESSAGES))
            refused = await gateway.ask(CHAT, headers={"x-headgate-project": "poor"})
            assert refused.status_code == 402, refused.text
            found = await metrics_of(gateway)
            assert found["headgate_calls_total", "gpt-5", "done", "openai"] == 1
            assert found["headgate_calls_total", "gpt-5", "refused", "openai"] == 1
            claude = ("claude-sonnet-5", "anthropic")
            assert found["headgate_calls_total", "claude-sonnet-5", "done", "anthropic"] == 1
            assert found["headgate_call_wait_seconds_count", *claude] == 1
            assert found["headgate_call_first_byte_seconds_count", *claude] == 1
            cost = found["headgate_call_cost_usd_total", *claude]
            assert round(1_000_000 * cost) == record.micro_usd
            added = found["headgate_call_added_seconds_sum", *claude]
            assert 0 < added < 5
            assert found["headgate_call_added_seconds_count", "gpt-5", "openai"] == 1, (
                "what was never sent has added nothing"
            )

    asyncio.run(scenario())


def test_what_waits_and_runs_is_a_gauge(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, inflight=1) as gateway:
            first = gateway.start(CHAT, "[[until go]]")
            await gateway.until(lambda: len(gateway.calls) == 1)
            second = gateway.start(CHAT, "[[until go]]")
            await gateway.until_waiting()
            found = await metrics_of(gateway)
            assert found["headgate_calls_waiting", "openai"] == 1
            assert found["headgate_calls_running", "openai"] == 1
            gateway.upstream.releases.add("go")
            await asyncio.gather(first, second)

    asyncio.run(scenario())


@contextmanager
def traced(gateway: GatewayService) -> Iterator[InMemorySpanExporter]:
    """Have a service make spans, and give them."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    gateway.service.api.telemetry = Telemetry(provider)
    yield exporter


def test_a_call_is_a_span_in_the_trace_of_its_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            with traced(gateway) as exporter:
                record = await gateway.record(await gateway.ask(CHAT, headers=SENT))
            (span,) = exporter.get_finished_spans()
            assert span.name == "chat gpt-5"
            assert span.context is not None
            assert f"{span.context.trace_id:032x}" == TRACE
            attributes = dict(span.attributes or {})
            assert attributes["gen_ai.provider.name"] == "openai"
            assert attributes["gen_ai.response.model"] == "gpt-5"
            assert attributes["gen_ai.usage.input_tokens"] == record.input_tokens
            assert attributes["server.address"] == "127.0.0.1"
            assert attributes["headgate.call.id"] == record.id

    asyncio.run(scenario())
