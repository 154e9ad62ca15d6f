"""Tasks on several nodes whose calls one node decides: the books are one, and exact."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from gateway.billing_upstream import BillingUpstream
from gateway.gateway_service import OPENAI_KEY
from gateway.test_task_calls import TWO_CALLS
from service.support import ServiceProcess, running_service, wait_until

TASKS = 8
SETTINGS = """
[scheduler]
worker_count = 2

[upstreams.openai]
kind = "openai"
base_url = "{url}"
key_env = "NODES_KEY"

[targets.agent]
kind = "command"
command = {command}

[budgets."project:default"]
limit_tokens = 1000000

[prices."*"]
input = 1.0
output = 2.0
"""


@pytest.mark.timeout(120)
async def test_what_tasks_cost_is_what_was_billed_on_whichever_node_they_run(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODES_KEY", OPENAI_KEY)
    path = tmp_path / "headgate.toml"
    arguments = ("--store", postgres_url, "--config", str(path))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    async with BillingUpstream() as upstream:
        command = msgspec.json.encode([sys.executable, "-c", TWO_CALLS]).decode()
        path.write_text(SETTINGS.format(url=upstream.openai_url, command=command))

        def run() -> None:
            with (
                running_service(tmp_path / "first", *arguments) as first,
                running_service(tmp_path / "second", *arguments) as second,
            ):
                for node in (first, second):
                    wait_until(node.is_ready, seconds=20.0, what=node.output)
                _run_tasks(first, second, upstream)

        await asyncio.to_thread(run)


def _run_tasks(first: ServiceProcess, second: ServiceProcess, upstream: BillingUpstream) -> None:
    task_ids = [
        first.submit(target="agent", agentId=f"a{number}", estimate={"tokens": 500})
        for number in range(TASKS)
    ]
    ends = [second.wait_for(one, seconds=60.0) for one in task_ids]
    assert {one["state"] for one in ends} == {"done"}, ends
    billed = sum(charge.tokens for charge in upstream.bill)
    assert len(upstream.bill) == 2 * TASKS

    def booked() -> int:
        status = first.ask("GET", "/budgets/status?scope=project:default").body
        assert not status["overrunTokens"] or status["reservedTokens"] == 0
        return int(status["spentTokens"] + status["overrunTokens"])

    wait_until(lambda: booked() == billed, seconds=10.0, what=lambda: f"{booked()} {billed}")
    assert sum(one["usage"]["tokens"] for one in ends) == billed
