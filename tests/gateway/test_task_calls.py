"""Calls that running tasks make: on whose money, as whose usage, and who waits for whom."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from gateway.billing_upstream import Plan
from gateway.gateway_service import (
    CHAT,
    MESSAGES,
    OPENAI_KEY,
    WAIT_SECONDS,
    GatewayService,
    asking,
    error_of,
    gateway_service,
    usd,
)
from headgate.client.client import Client as AsyncClient
from headgate.client.worker import ServiceConnection, Worker
from headgate.core.call import CallRecord
from headgate.core.dispatch_state import ASK_AGAIN_SECONDS
from headgate.core.task import TaskRecord, TaskStatus
from headgate.engine import task_calls
from headgate.executors.callable import CallableExecutor
from headgate.executors.targets import CallableTarget
from headgate.providers.prices import PriceList
from headgate.storage.call_rows import CallStore, EndedCall

AGENT = r"""
import json, os, sys, urllib.error, urllib.request

def ask(prompt, **fields):
    body = {"model": "gpt-5", "max_tokens": 100, "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body | fields).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

"""
PLAIN = """
[targets.plain]
kind = "callable"
entry_point = "gateway.test_task_calls:agent"
gateway = true
"""
FUNCTION = CallableTarget(entry_point="gateway.test_task_calls:agent")
STRICT = '[gateway]\nreserve = "strict"\n'
CAPS = """
[scheduler]
max_inflight = 1
worker_count = 1
max_per_agent_inflight = 1

[agents.coder]
capacity = 1

[projects.default]
max_concurrent_agents = 1
"""
ONE_CALL = AGENT + "status, body = ask('hi')\nprint(json.dumps({'status': status}))\n"
TWO_CALLS = AGENT + "print(json.dumps([ask('one')[0], ask('two')[0]]))\n"


async def agent(order: Any) -> dict[str, Any]:
    """Make the calls that a task asks for, one after the other or at once, and say what came back.

    One that is refused for want of money is asked for once more, in a form that costs little.
    """
    access = order.gateway
    assert access is not None
    params = order["params"] or {}
    headers = {"authorization": f"Bearer {access.token}"}

    async def call(client: httpx2.AsyncClient, fields: dict[str, Any]) -> int:
        answer = await client.post(CHAT, json=asking(CHAT, **fields), headers=headers)
        if answer.status_code == 402 and params.get("tries_less"):
            answer = await client.post(CHAT, json=asking(CHAT, max_tokens=5), headers=headers)
            return 402 if answer.status_code == 200 else 0
        return answer.status_code

    async with httpx2.AsyncClient(base_url=access.base_url, timeout=30.0) as client:
        if params.get("at_once"):
            found = await asyncio.gather(*(call(client, one) for one in params["calls"]))
            return {"statuses": list(found)}
        return {"statuses": [await call(client, one) for one in params["calls"]]}


def command(name: str, script: str, *, more: str = "") -> str:
    """Write a target that runs a program."""
    words = msgspec.json.encode([sys.executable, "-c", script]).decode()
    return f'[targets.{name}]\nkind = "command"\ncommand = {words}\n{more}\n'


@asynccontextmanager
async def service(folder: Path, text: str, **options: Any) -> AsyncIterator[GatewayService]:
    """Start a service that knows its own address, as one of `headgate up` does."""
    async with gateway_service(folder, text, **options) as gateway:
        gateway.service.engine.node.address = f"http://127.0.0.1:{gateway.port}"
        yield gateway


async def submit(gateway: GatewayService, target: str, **fields: Any) -> str:
    """Submit a task, and return its id."""
    body = {"action": "work", "agentId": "coder", "projectId": "default", "target": target}
    answer = await gateway.client.post("/tasks", json=body | fields)
    assert answer.status_code in (201, 202), answer.text
    task_id: str = answer.json()["taskId"]
    return task_id


async def ended(gateway: GatewayService, task_id: str, *, is_settled: bool = True) -> TaskRecord:
    """Return a task when it has ended, and by default when all its calls are written."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            record = await gateway.service.engine.get(task_id)
            assert record is not None
            if record.is_terminal:
                if is_settled:
                    await gateway.calls.settled(seconds=WAIT_SECONDS)
                return record
            await asyncio.sleep(0.01)


async def task(gateway: GatewayService, task_id: str) -> TaskRecord:
    """Return a task as it stands."""
    record = await gateway.service.engine.get(task_id)
    assert record is not None
    return record


async def booked(gateway: GatewayService) -> int:
    """Return all tokens that the ledger has booked."""
    status = await gateway.status("project:default")
    return int(status["spentTokens"] + status["overrunTokens"])


async def claim(gateway: GatewayService, task_id: str) -> tuple[str, dict[str, Any]]:
    """Claim a task as a worker; return the id of that, and how the task makes calls."""
    claimed = (await gateway.client.post("/agents/coder/claim", json={})).json()
    worker: str = claimed["workerId"]
    async with asyncio.timeout(WAIT_SECONDS):
        while not claimed["tasks"]:
            body = {"workerId": worker, "waitSeconds": 5}
            claimed = (await gateway.client.post("/agents/coder/claim", json=body)).json()
    return worker, claimed["gateway"][task_id]


async def token_of(gateway: GatewayService, task_id: str) -> str:
    """Return the token that a task was handed."""
    access = await gateway.calls.tasks.access(await task(gateway, task_id))
    assert access is not None
    return access.token


def statuses(record: TaskRecord) -> list[int]:
    """Return what the calls of a task were answered with."""
    found: list[int] = msgspec.json.decode(record.result or "{}")["statuses"]
    return found


def calls_of(gateway: GatewayService, task_id: str) -> list[CallRecord]:
    """Return the calls of a task that have ended."""
    return [one for one in gateway.calls.latest() if one.task_id == task_id]


def says_why(gateway: GatewayService, call: CallRecord) -> bool:
    """Tell whether it is known which budget a call waits for."""
    why = gateway.calls.why(call.id)
    return why is not None and bool(why.reasons)


def billed(gateway: GatewayService) -> int:
    """Return all tokens on the bill of the provider."""
    return sum(charge.tokens for charge in gateway.upstream.bill)


def test_what_the_calls_of_a_task_used_is_what_it_cost(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = '[budgets."project:default"]\nlimit_usd = 5.0\n'
        text = command("agent", TWO_CALLS) + limits
        async with service(tmp_path, text) as gateway:
            task_id = await submit(gateway, "agent", estimate={"tokens": 1_000})
            record = await ended(gateway, task_id)
            assert record.task.status is TaskStatus.DONE, record.error
            calls = calls_of(gateway, task_id)
            assert [one.state.value for one in calls] == ["done", "done"]
            assert record.tokens == billed(gateway) == sum(one.tokens or 0 for one in calls)
            assert record.micro_usd == sum(one.micro_usd or 0 for one in calls)
            assert record.progress.assumed_tokens == record.progress.assumed_micro_usd == 0
            status = await gateway.status("project:default")
            assert usd(float(status["spentUsd"])) == record.micro_usd
            assert float(status["reservedUsd"]) == 0.0

    asyncio.run(scenario())


@pytest.mark.parametrize("target", ["agent", "plain", "web"])
def test_with_every_cap_at_one_a_task_and_its_calls_come_to_their_end(
    tmp_path: Path, target: str
) -> None:
    async def scenario() -> None:
        async with web_agent() as url:
            web = f'[targets.web]\nkind = "http"\nurl = "{url}"\ngateway = true\n'
            text = CAPS + command("agent", TWO_CALLS) + PLAIN + web
            async with service(tmp_path, text, inflight=1) as gateway:
                calls = [{"prompt": "one"}, {"prompt": "two"}]
                task_ids = [
                    await submit(gateway, target, params={"calls": calls}) for _ in range(3)
                ]
                for task_id in task_ids:
                    record = await ended(gateway, task_id)
                    assert record.task.status is TaskStatus.DONE, record.error
                    assert [one.status for one in calls_of(gateway, task_id)] == [200, 200]
                assert len(gateway.upstream.bill) == 6

    asyncio.run(scenario())


@asynccontextmanager
async def web_agent() -> AsyncIterator[str]:
    """Serve an agent that calls models with what the headers of its request say."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        sent = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
        await reader.readexactly(int(sent["content-length"]))
        headers = {"x-api-key": sent["x-headgate-task-token"]}
        async with httpx2.AsyncClient(base_url=sent["x-headgate-base-url"]) as client:
            for _ in range(2):
                (
                    await client.post(MESSAGES, json=asking(MESSAGES), headers=headers)
                ).raise_for_status()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/work"


def test_a_token_is_good_for_calls_and_while_its_attempt_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path, PLAIN) as gateway:
            held = [{"prompt": "[[until free]]"}]
            task_id = await submit(gateway, "plain", params={"calls": held}, scopes=["session:s"])
            await gateway.until(lambda: len(gateway.upstream.requests) == 1)
            token = await token_of(gateway, task_id)
            headers = {"authorization": f"Bearer {token}"}
            other = await gateway.ask(CHAT, headers=headers)
            assert other.status_code == 200
            call = await gateway.record(other)
            assert (call.task_id, call.agent_id) == (task_id, "coder")
            assert "session:s" in call.scopes
            stolen = await gateway.ask("/p/other/v1/chat/completions", headers=headers)
            assert stolen.status_code in (403, 404)
            for path in ("/tasks", f"/tasks/{task_id}", "/budgets", "/calls"):
                answer = await gateway.client.get(path, headers=headers)
                assert answer.status_code == 401, path
            changed = {"authorization": f"Bearer {token[:-1]}{'0' if token[-1] != '0' else '1'}"}
            assert (await gateway.ask(CHAT, headers=changed)).status_code == 401
            gateway.upstream.releases.add("free")
            record = await ended(gateway, task_id)
            assert record.tokens == billed(gateway)
            refused = await gateway.ask(CHAT, headers=headers)
            assert refused.status_code == 401
            assert "attempt" in error_of(refused)["message"]
            refused = await gateway.ask(MESSAGES, headers={"x-api-key": token})
            assert refused.status_code == 401
            assert error_of(refused)["type"] == "authentication_error"
            assert all(token not in str(one.headers) for one in gateway.upstream.requests)

    asyncio.run(scenario())


def test_a_call_that_a_task_cannot_hold_grows_beside_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = PLAIN + STRICT + '[budgets."project:default"]\nlimit_tokens = 5000\n'
        async with service(tmp_path, text) as gateway:
            held = [{"prompt": "[[until free]]", "max_tokens": 2_000}]
            task_id = await submit(
                gateway, "plain", params={"calls": held}, estimate={"tokens": 500}
            )
            await gateway.until(lambda: len(gateway.upstream.requests) == 1)
            (live,) = gateway.calls.live()
            status = await gateway.status("project:default")
            assert status["reservedTokens"] == live.reserved_tokens > 2_000
            gateway.upstream.releases.add("free")
            record = await ended(gateway, task_id)
            assert record.tokens == billed(gateway)
            status = await gateway.status("project:default")
            assert status["reservedTokens"] == 0
            assert status["spentTokens"] == billed(gateway)
            assert not status["overrunTokens"]

    asyncio.run(scenario())


@pytest.mark.parametrize("window", ["none", "day", "rolling:1h"])
def test_two_tasks_that_wait_for_each_other_lose_the_youngest_call_alone(
    tmp_path: Path, window: str
) -> None:
    async def scenario() -> None:
        limits = f'[budgets."project:default"]\nlimit_tokens = 3000\nwindow = "{window}"\n'
        text = PLAIN + STRICT + limits
        async with service(tmp_path, text) as gateway:
            first = {"prompt": "[[until both]]", "max_tokens": 5}
            wanted = {"calls": [first, {"prompt": "hi", "max_tokens": 2_000}], "tries_less": True}
            task_ids = [
                await submit(gateway, "plain", params=wanted, estimate={"tokens": 1_200})
                for _ in range(2)
            ]
            await gateway.until(lambda: len(gateway.upstream.requests) == 2)
            gateway.upstream.releases.add("both")
            records = [await ended(gateway, one) for one in task_ids]
            assert sorted(map(statuses, records)) == [[200, 200], [200, 402]]
            assert sum(one.tokens or 0 for one in records) == billed(gateway)
            status = await gateway.status("project:default")
            assert status["reservedTokens"] == 0
            assert status["spentTokens"] == billed(gateway)

    asyncio.run(scenario())


@pytest.mark.parametrize(("timeout", "waits"), [(20_000, True), (1_000, False)])
def test_a_call_of_a_task_waits_for_a_window_that_resets_in_time(
    tmp_path: Path, timeout: int, *, waits: bool
) -> None:
    async def scenario() -> None:
        limits = '[budgets."project:default"]\nlimit_tokens = 3000\nwindow = "rolling:1h"\n'
        async with service(tmp_path, PLAIN + STRICT + limits) as gateway:
            spent = {"id": "r-1", "scope": "project:default", "tokens": 1_500}
            for step in ("reserve", "commit"):
                (await gateway.client.post(f"/budgets/{step}", json=spent)).raise_for_status()
            large = {"calls": [{"prompt": "hi", "max_tokens": 2_000}]}
            task_id = await submit(
                gateway,
                "plain",
                params=large,
                estimate={"tokens": 500},
                timeoutSeconds=timeout,
            )
            if waits:
                await gateway.until_waiting()
                assert not gateway.upstream.bill
            else:
                assert statuses(await ended(gateway, task_id)) == [402]

    asyncio.run(scenario())


def test_a_call_waits_while_another_task_may_give_something_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = PLAIN + STRICT + '[budgets."project:default"]\nlimit_tokens = 3000\n'
        async with service(tmp_path, text) as gateway:
            held = {"calls": [{"prompt": "[[until free]]", "max_tokens": 100}]}
            first = await submit(gateway, "plain", params=held, estimate={"tokens": 1_200})
            await gateway.until(lambda: len(gateway.upstream.requests) == 1)
            large = {"calls": [{"prompt": "hi", "max_tokens": 2_000}]}
            second = await submit(gateway, "plain", params=large, estimate={"tokens": 1_200})
            await gateway.until_waiting()
            (waiting,) = [one for one in gateway.calls.live() if one.task_id == second]

            await gateway.until(lambda: says_why(gateway, waiting))
            small = {"calls": [{"prompt": "x", "max_tokens": 5}]}
            third = await submit(gateway, "plain", params=small, estimate={"tokens": 300})
            assert (await ended(gateway, third)).task.status is TaskStatus.DONE
            gateway.upstream.releases.add("free")
            for task_id in (first, second):
                record = await ended(gateway, task_id)
                assert statuses(record) == [200]
            assert (await gateway.status("project:default"))["spentTokens"] == billed(gateway)

    asyncio.run(scenario())


def test_a_call_grows_as_soon_as_another_of_its_task_gives_back_what_it_drew(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        text = PLAIN + STRICT + '[budgets."project:default"]\nlimit_tokens = 3000\n'
        async with service(tmp_path, text) as gateway:
            limited = Plan(status=429, retry_after="30", until="go")
            gateway.upstream.account(OPENAI_KEY).script.append(limited)
            first, held = [{"max_tokens": 2_000}], {"tokens": 2_700, "usd": 1}
            task_id = await submit(gateway, "plain", params={"calls": first}, estimate=held)
            await gateway.until(lambda: len(gateway.upstream.requests) == 1)
            headers = {"authorization": f"Bearer {await token_of(gateway, task_id)}"}
            second = gateway.start(MESSAGES, headers=headers, max_tokens=2_000)
            await gateway.until_waiting()
            (waiting,) = [one for one in gateway.calls.live() if one.state.value == "waiting"]
            await gateway.until(lambda: says_why(gateway, waiting))
            gateway.upstream.releases.add("go")
            async with asyncio.timeout(ASK_AGAIN_SECONDS / 2):
                assert (await second).status_code == 200

    asyncio.run(scenario())


def test_what_the_target_reports_beside_its_calls_is_ignored(tmp_path: Path) -> None:
    async def scenario() -> None:
        script = ONE_CALL.replace("{'status': status}", "{**body, 'usage': {'total_tokens': 9}}")
        async with service(tmp_path, command("agent", script)) as gateway:
            record = await ended(gateway, await submit(gateway, "agent"))
            assert record.task.status is TaskStatus.DONE, record.error
            assert record.tokens == billed(gateway)
            answer = await gateway.client.get("/usage", params={"by": "model"})
            (row,) = [one for one in answer.json()["rows"] if one["tokens"]]
            assert (row["key"], row["tokens"], row["calls"]) == ("gpt-5", billed(gateway), 1)

    asyncio.run(scenario())


def test_variables_of_the_target_itself_win(tmp_path: Path) -> None:
    names = "HEADGATE_BASE_URL OPENAI_BASE_URL OPENAI_API_KEY ANTHROPIC_BASE_URL ANTHROPIC_API_KEY"
    script = f"import json, os\nprint(json.dumps([os.environ.get(n) for n in {names.split()}]))"
    own = 'env = { OPENAI_API_KEY = "sk-own" }\n'

    async def scenario() -> None:
        text = command("own", script, more=own) + command("off", script, more="gateway = false\n")
        async with service(tmp_path, text) as gateway:
            url = f"http://127.0.0.1:{gateway.port}"
            record = await ended(gateway, await submit(gateway, "own"))
            result = msgspec.json.decode(record.result or b"")["json"]
            assert result[:4] == [url, None, "sk-own", url]
            assert result[4].startswith("hg_task_")
            record = await ended(gateway, await submit(gateway, "off"))
            assert msgspec.json.decode(record.result or b"")["json"] == [None] * 5

    asyncio.run(scenario())


def test_nothing_is_handed_out_for_protocols_without_a_key(tmp_path: Path) -> None:
    script = "import json, os\nprint(json.dumps(sorted(n for n in os.environ if 'BASE_URL' in n)))"

    async def scenario() -> None:
        for environ, expected in (
            ({"A_KEY": "sk-1"}, ["ANTHROPIC_BASE_URL", "HEADGATE_BASE_URL"]),
            ({}, []),
        ):
            async with service(tmp_path, command("agent", script), environ=environ) as gateway:
                record = await ended(gateway, await submit(gateway, "agent"))
                assert msgspec.json.decode(record.result or b"")["json"] == expected

    asyncio.run(scenario())


def test_a_worker_is_handed_a_token_for_each_task_it_claims(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = '[targets.pull]\nkind = "pull"\ngateway = true\n'
        async with service(tmp_path, text) as gateway:
            task_id = await submit(gateway, "pull")
            worker, access = await claim(gateway, task_id)
            assert access["protocols"] == ["anthropic", "openai"]
            headers = {"authorization": f"Bearer {access['token']}"}
            assert (await gateway.ask(CHAT, headers=headers)).status_code == 200
            done = {"workerId": worker, "attempt": 1, "usage": {"tokens": 1}}
            answer = await gateway.client.post(f"/tasks/{task_id}/complete", json=done)
            assert answer.status_code == 200, answer.text
            record = await ended(gateway, task_id)
            assert record.tokens == billed(gateway)
            assert (await gateway.ask(CHAT, headers=headers)).status_code == 401

    asyncio.run(scenario())


async def test_a_worker_hands_the_token_to_what_it_runs(tmp_path: Path) -> None:
    async with service(tmp_path, '[targets.pull]\nkind = "pull"\ngateway = true\n') as gateway:
        task_ids = [
            await submit(gateway, "pull", params={"calls": [{"prompt": "hi"}]}) for _ in range(3)
        ]
        async with AsyncClient(f"http://127.0.0.1:{gateway.port}") as client:
            connection = ServiceConnection(client, "coder", notify=lambda _line: None)
            executor = CallableExecutor("agent", FUNCTION, prices=PriceList())
            worker = Worker(connection, executor, agent_id="coder", capacity=2)
            working = asyncio.create_task(worker.run())
            records = [await ended(gateway, one) for one in task_ids]
            worker.drain()
            await working
        assert [statuses(one) for one in records] == [[200]] * 3
        assert sum(one.tokens or 0 for one in records) == billed(gateway)
        assert all(one.progress.assumed_tokens == 0 for one in records)


def test_streams_of_a_task_and_calls_at_once_are_added_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = PLAIN + '[budgets."project:default"]\nlimit_usd = 5.0\n'
        async with service(tmp_path, text) as gateway:
            calls = [{"prompt": f"[[words {n}]]", "is_stream": n % 2 == 0} for n in range(1, 21)]
            params = {"calls": calls, "at_once": True}
            task_ids = [await submit(gateway, "plain", params=params) for _ in range(3)]
            records = [await ended(gateway, one) for one in task_ids]
            assert [statuses(one) for one in records] == [[200] * 20] * 3
            assert sum(one.tokens or 0 for one in records) == billed(gateway)
            assert await booked(gateway) == billed(gateway)
            status = await gateway.status("project:default")
            assert status["reservedTokens"] == 0
            assert float(status["reservedUsd"]) == 0.0

    asyncio.run(scenario())


def test_calls_that_outlive_their_task_are_booked_at_what_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_calls, "SETTLE_SECONDS", 0.05)

    async def scenario() -> None:
        text = PLAIN + STRICT + '[budgets."project:default"]\nlimit_tokens = 5000\n'
        async with service(tmp_path, text) as gateway:
            held = [{"prompt": "[[until free]]", "max_tokens": 700}]
            task_id = await submit(
                gateway, "plain", params={"calls": held}, estimate={"tokens": 300}
            )
            await gateway.until(lambda: len(gateway.upstream.requests) == 1)
            (live,) = gateway.calls.live()
            await gateway.service.engine.cancel(task_id)
            record = await ended(gateway, task_id)
            assert record.task.status is TaskStatus.CANCELLED
            assert record.tokens == record.progress.assumed_tokens == 300
            gateway.upstream.releases.add("free")
            await gateway.until_idle()
            status = await gateway.status("project:default")
            assert status["reservedTokens"] == 0
            assert billed(gateway) <= status["spentTokens"] <= live.reserved_tokens

    asyncio.run(scenario())


@pytest.mark.parametrize("is_late", [True, False])
def test_a_call_that_the_store_answers_late_for_is_booked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """Whether it was the call that came late, or only the answer that it is written."""
    monkeypatch.setattr(task_calls, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(task_calls, "WRITE_SECONDS", 0.05)

    async def scenario() -> None:
        text = PLAIN + STRICT + '[budgets."project:default"]\nlimit_tokens = 5000\n'
        async with service(tmp_path, text) as gateway:
            write, has_ended = CallStore.finish, asyncio.Event()

            async def write_late(self: CallStore, ended: Sequence[EndedCall]) -> object:
                if is_late:
                    await has_ended.wait()
                    return await write(self, ended)
                answer = await write(self, ended)
                await has_ended.wait()
                return answer

            monkeypatch.setattr(CallStore, "finish", write_late)
            calls = [{"prompt": "one", "max_tokens": 5}]
            task_id = await submit(
                gateway, "plain", params={"calls": calls}, estimate={"tokens": 3_000}
            )
            await gateway.until(lambda: bool(gateway.upstream.bill))
            await ended(gateway, task_id, is_settled=False)
            has_ended.set()
            await gateway.calls.settled(seconds=WAIT_SECONDS)
            assert await booked(gateway) == billed(gateway)

    asyncio.run(scenario())


def test_an_overrun_of_a_call_shows_while_its_task_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = PLAIN + '[budgets."project:default"]\nlimit_tokens = 6000\n'
        async with service(tmp_path, text) as gateway:
            usage = {"prompt_tokens": 10, "completion_tokens": 4_900, "total_tokens": 4_910}
            gateway.upstream.script.append(Plan(usage=usage))
            calls = [
                {"prompt": "one", "max_tokens": 100},
                {"prompt": "[[until free]]", "max_tokens": 5},
            ]
            task_id = await submit(
                gateway, "plain", params={"calls": calls}, estimate={"tokens": 1_000}
            )
            await gateway.until(lambda: len(gateway.upstream.requests) == 2)
            (live,) = gateway.calls.live()
            status = await gateway.status("project:default")
            assert status["overrunTokens"] == 4_910 - 1_000
            assert status["reservedTokens"] == 1_000 + live.reserved_tokens
            gateway.upstream.releases.add("free")
            record = await ended(gateway, task_id)
            rows = sum(one.tokens or 0 for one in calls_of(gateway, task_id))
            assert await booked(gateway) == rows == record.tokens

    asyncio.run(scenario())


@pytest.mark.parametrize("calls_again", [True, False])
def test_a_task_of_a_worker_that_outlives_the_service_is_booked_at_what_it_held(
    tmp_path: Path, *, calls_again: bool
) -> None:
    """Nobody knows which of its calls were under way when the service ended."""
    limits = '[budgets."project:default"]\nlimit_tokens = 100000\n'
    text = '[targets.pull]\nkind = "pull"\ngateway = true\n' + limits
    store = f"sqlite:///{tmp_path}/tasks.db"

    async def scenario() -> None:
        async with service(tmp_path, text, store=store) as gateway:
            task_id = await submit(gateway, "pull", estimate={"tokens": 5_000})
            worker, access = await claim(gateway, task_id)
            headers = {"authorization": f"Bearer {access['token']}"}
            assert (await gateway.ask(CHAT, headers=headers)).status_code == 200
            known = billed(gateway)
        async with service(tmp_path, text, store=store) as gateway:
            if calls_again:
                assert (await gateway.ask(CHAT, headers=headers)).status_code == 200
            known += billed(gateway)
            done = {"workerId": worker, "attempt": 1}
            answer = await gateway.client.post(f"/tasks/{task_id}/complete", json=done)
            assert answer.status_code == 200, answer.text
            record = await ended(gateway, task_id)
            assert record.tokens == await booked(gateway) == 5_000
            assert record.progress.assumed_tokens == 5_000 - known

    asyncio.run(scenario())
