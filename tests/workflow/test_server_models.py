"""Model steps on a service: through its gateway, with its keys, booked once, as the run's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.billing_upstream import TEXT, Plan
from gateway.gateway_service import CHAT, ENVIRON, GatewayService, asking, gateway_service, usd
from headgate.core.gates import GatePart
from headgate.core.task import TaskRecord, TaskStatus
from headgate.errors import WorkflowError
from headgate.workflow.parser import read_workflow
from headgate.workflow.remote_tasks import check_for_service
from run_commands import EXIT_DONE, EXIT_FAILED, Commands, Ended

NO_KEYS = {"OPENAI_API_KEY": "", "ANTHROPIC_API_KEY": ""}
ASKING = """
name: asking
config:
  budget_usd: 1.00
steps:
  - id: ask
    endpoint: openai
    model: gpt-5
    prompt: "what is the answer?"
    max_tokens: 50
  - id: again
    endpoint: anthropic
    model: claude-sonnet-5
    prompt: "is it {steps.ask.output}"
    max_tokens: 50
"""
ALIAS = '[models.fast]\nroute = ["openai/gpt-5-mini"]\n'


@asynccontextmanager
async def service(folder: Path, text: str = "", **options: Any) -> AsyncIterator[GatewayService]:
    """Start a service that knows its own address, as one of `headgate up` does."""
    async with gateway_service(folder, text, **options) as gateway:
        gateway.service.engine.node.address = address(gateway)
        yield gateway


def address(gateway: GatewayService) -> str:
    """Return where a service is."""
    return f"http://127.0.0.1:{gateway.port}"


async def run(folder: Path, text: str, *options: str, **environ: str) -> Ended:
    """Run a workflow in a process of its own, on a machine that has no key."""

    def started() -> Ended:
        folder.mkdir(exist_ok=True)
        (folder / "flow.yaml").write_text(text)
        return Commands(folder, **(NO_KEYS | environ)).run("flow.yaml", *options)

    return await asyncio.to_thread(started)


async def ended_task(gateway: GatewayService, **fields: Any) -> TaskRecord:
    """Submit a task for the gateway, and return it when it has ended."""
    body = {"agentId": "a", "target": "gateway", "action": "chat/completions", **fields}
    answer = await gateway.client.post("/tasks", json=body)
    assert answer.status_code in (201, 202), answer.text
    async with asyncio.timeout(20.0):
        while True:
            record = await gateway.service.engine.get(answer.json()["taskId"])
            assert record is not None
            if record.is_terminal:
                await gateway.calls.settled(seconds=20.0)
                return record
            await asyncio.sleep(0.01)


async def test_model_steps_go_through_the_gateway_and_are_booked_once(tmp_path: Path) -> None:
    async with service(tmp_path) as gateway:
        end = await run(tmp_path / "run", ASKING, "--server", address(gateway))
        assert end.code == EXIT_DONE, end
        await gateway.until_idle()
        requests = list(gateway.upstream.requests)
        assert [one.key for one in requests] == [ENVIRON["O_KEY"], ENVIRON["A_KEY"]]
        assert requests[1].fields["messages"][0]["content"] == f"is it {TEXT}"
        status = await gateway.status("workflow:asking")
        billed = sum(charge.tokens for charge in gateway.upstream.bill)
        assert status["spentTokens"] + status["overrunTokens"] == billed > 0
        assert float(status["reservedUsd"]) == 0.0
        calls = list(gateway.calls.latest())
        assert len(calls) == 2
        assert all(one.task_id and "workflow:asking" in one.scopes for one in calls)
        cost = sum(one.micro_usd or 0 for one in calls)
        assert usd(float(status["spentUsd"]) + float(status["overrunUsd"])) == cost
        assert cost > 0


async def test_a_run_on_a_service_asks_what_a_run_here_asks(tmp_path: Path) -> None:
    async with service(tmp_path) as gateway:
        alone = await run(
            tmp_path / "here",
            ASKING,
            OPENAI_BASE_URL=gateway.upstream.openai_url,
            OPENAI_API_KEY=ENVIRON["O_KEY"],
            ANTHROPIC_BASE_URL=gateway.upstream.url,
            ANTHROPIC_API_KEY=ENVIRON["A_KEY"],
        )
        served = await run(tmp_path / "there", ASKING, "--server", address(gateway))
        assert (alone.code, served.code) == (EXIT_DONE, EXIT_DONE), (alone, served)
        first, second, third, fourth = gateway.upstream.requests
        # The second of each was filled with the answer to the first.
        assert (first.fields, second.fields) == (third.fields, fourth.fields)


@pytest.mark.parametrize("is_on_service", [False, True])
async def test_truncated_answers_are_told_at_the_end_and_later(
    tmp_path: Path, *, is_on_service: bool
) -> None:
    async with service(tmp_path) as gateway:
        keys = {
            "OPENAI_BASE_URL": gateway.upstream.openai_url,
            "OPENAI_API_KEY": ENVIRON["O_KEY"],
            "ANTHROPIC_BASE_URL": gateway.upstream.url,
            "ANTHROPIC_API_KEY": ENVIRON["A_KEY"],
        }
        text = ASKING.replace("max_tokens: 50", "max_tokens: 2")
        options = ("--server", address(gateway)) if is_on_service else ()
        folder = tmp_path / "run"
        end = await run(folder, text, *options, **({} if is_on_service else keys))
        assert end.code == EXIT_DONE, end
        warning = "warning: 2 answers were truncated at max_tokens; raise max_tokens of ask, again"
        assert warning in end.stderr
        commands = Commands(folder, **NO_KEYS)
        show = ("runs", "show", "last", "--data", str(commands.data))
        shown = await asyncio.to_thread(commands.call, *show)
        assert warning in shown.stdout
        shown = await asyncio.to_thread(commands.call, *show, "--json")
        assert [step["truncated"] for step in json.loads(shown.stdout)["steps"]] == [1, 1]


async def test_a_model_that_only_the_service_knows_needs_no_price_here(tmp_path: Path) -> None:
    async with service(tmp_path, ALIAS) as gateway:
        text = ASKING.replace("gpt-5", "fast")
        end = await run(tmp_path / "run", text, "--server", address(gateway))
        assert end.code == EXIT_DONE, end
        assert gateway.upstream.requests[0].model == "gpt-5-mini"


async def test_a_model_that_the_service_does_not_have_fails_its_step(tmp_path: Path) -> None:
    async with service(tmp_path, prices="") as gateway:
        text = ASKING.replace("gpt-5", "house-model")
        end = await run(tmp_path / "run", text, "--server", address(gateway))
        assert end.code == EXIT_FAILED, end
        assert "house-model" in end.stdout
        assert gateway.upstream.bill == []


async def test_a_call_that_is_told_to_come_back_does_within_its_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.executors.gateway.LONGEST_WAIT_SECONDS", 0.02)
    async with service(tmp_path, "[gateway]\nhold_seconds = 0.1\n") as gateway:
        prompt = "[[mark one]] [[fail 429]] hello"
        task = asyncio.create_task(ended_task(gateway, input=asking(CHAT, prompt)))
        await gateway.until(lambda: len(gateway.upstream.requests) == 1)
        shown = (await gateway.client.get("/targets")).json()["targets"]
        assert all(not one["closures"] for one in shown)
        gateway.calls.open(GatePart("slot", "openai/gpt-5"))
        record = await task
        assert record.task.status is TaskStatus.DONE, record.error
        assert (record.progress.attempt, record.progress.rate_limit_hits) == (1, 0)
        assert record.tokens == sum(charge.tokens for charge in gateway.upstream.bill)


async def test_what_the_provider_refuses_costs_nothing(tmp_path: Path) -> None:
    async with service(tmp_path) as gateway:
        gateway.upstream.script.append(Plan(status=400, message="no such field"))
        record = await ended_task(gateway, input=asking(CHAT))
        assert record.task.status is TaskStatus.FAILED
        assert "no such field" in (record.error or "")
        assert (record.tokens, record.micro_usd) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"action": "paint", "input": {}}, "use one of chat/completions"),
        ({}, "input is missing"),
    ],
)
async def test_a_task_that_is_no_call_fails_with_a_line(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    async with service(tmp_path) as gateway:
        record = await ended_task(gateway, **fields)
        assert record.task.status is TaskStatus.FAILED
        assert said in (record.error or "")
        assert gateway.upstream.bill == []


async def test_a_service_without_any_key_says_what_it_lacks(tmp_path: Path) -> None:
    async with service(tmp_path, environ={}, upstreams="") as gateway:
        record = await ended_task(gateway, input=asking(CHAT))
        assert record.task.status is TaskStatus.FAILED
        assert "OPENAI_API_KEY" in (record.error or "")


async def test_the_gateway_is_a_target_that_is_always_there(tmp_path: Path) -> None:
    async with service(tmp_path) as gateway:
        shown = (await gateway.client.get("/targets")).json()["targets"]
        assert {one["id"]: one["kind"] for one in shown} == {
            "echo": "callable",
            "gateway": "gateway",
            "pull": "pull",
        }
        paused: httpx2.Response = await gateway.client.patch(
            "/targets/gateway", json={"status": "paused"}
        )
        assert paused.json()["status"] == "paused"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("house: {kind: openai, url: 'http://house/v1'}", "endpoint 'house' has a url of its own"),
        ("house: {kind: openai, url: '{env.OPENAI_BASE_URL}'}", "a url of its own"),
        ("openai: {headers: {x-team: red}}", "endpoint 'openai' has headers of its own"),
    ],
)
def test_an_endpoint_of_the_files_own_is_not_the_services(
    tmp_path: Path, config: str, said: str
) -> None:
    name = config.partition(":")[0]
    text = ASKING.replace("config:", f"config:\n  endpoints:\n    {config}")
    flow = read_workflow(
        tmp_path / "f.yaml", text.replace("endpoint: openai", f"endpoint: {name}").encode()
    )
    with pytest.raises(WorkflowError, match=said) as refused:
        check_for_service(flow, flow.file)
    assert refused.value.key == "steps[0].endpoint"


def test_a_key_of_the_files_own_is_not_needed_by_a_service(tmp_path: Path) -> None:
    text = ASKING.replace("config:", "config:\n  endpoints:\n    openai: {key: '{env.MY_KEY}'}")
    flow = read_workflow(tmp_path / "f.yaml", text.encode())
    check_for_service(flow, flow.file)
