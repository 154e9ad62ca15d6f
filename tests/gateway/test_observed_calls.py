"""What metrics and traces show of calls through a whole service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter

import apsw
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from gateway.gateway_service import CHAT, MESSAGES, GatewayService, asking, gateway_service
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


PAUSE_SECONDS = 0.2


async def added_to(gateway: GatewayService) -> float:
    """Return the seconds that the gateway has added to all calls."""
    found = await metrics_of(gateway)
    return sum(one for key, one in found.items() if key[0] == "headgate_call_added_seconds_sum")


async def pause(gateway: GatewayService) -> None:
    until = perf_counter() + PAUSE_SECONDS
    await gateway.until(lambda: perf_counter() >= until)


async def test_what_is_added_begins_when_a_request_comes(tmp_path: Path) -> None:
    async with gateway_service(tmp_path) as gateway:
        reading = gateway.gateway._recalling
        async with reading:
            call = gateway.start(CHAT)
            await gateway.until(lambda: bool(reading._waiters))
            await pause(gateway)
        assert (await call).status_code == 200
        assert await added_to(gateway) >= PAUSE_SECONDS


async def test_what_is_added_is_neither_the_upload_nor_the_wait(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, inflight=1) as gateway:
        await gateway.ask(CHAT)
        before = await added_to(gateway)

        async def slowly() -> AsyncIterator[bytes]:
            body = json.dumps(asking(CHAT, "[[until go]]")).encode()
            yield body[:20]
            await pause(gateway)
            yield body[20:]

        json_type = {"content-type": "application/json"}
        sending = gateway.client.post(CHAT, content=slowly(), headers=json_type)
        first = asyncio.create_task(sending)
        await gateway.until(lambda: len(gateway.calls) == 1)
        second = gateway.start(CHAT)
        await gateway.until_waiting()
        await pause(gateway)
        gateway.upstream.releases.add("go")
        assert {(await one).status_code for one in (first, second)} == {200}
        assert await added_to(gateway) - before < PAUSE_SECONDS


async def test_the_wait_for_the_ledger_is_a_wait(tmp_path: Path) -> None:
    path = tmp_path / "headgate.db"
    text = POOR.replace('"0"', '"5"')
    async with gateway_service(tmp_path, text, store=f"sqlite:///{path}") as gateway:
        await gateway.record(await gateway.ask(CHAT))
        before = await added_to(gateway)
        with closing(apsw.Connection(str(path))) as another:
            another.execute("BEGIN IMMEDIATE")
            call = gateway.start(CHAT, headers={"x-headgate-project": "poor"})
            await gateway.until(lambda: any(one.planned for one in gateway.calls._live.values()))
            await pause(gateway)
            another.execute("ROLLBACK")
        record = await gateway.record(await call)
        assert (record.state.value, record.tries) == ("done", 1)
        assert (record.started_at or 0.0) - record.created_at >= PAUSE_SECONDS
        assert await added_to(gateway) - before < PAUSE_SECONDS


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
