"""A service that is killed while its tasks call models: nothing leaks, nothing is overspent."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import msgspec
import pytest

from gateway.billing_upstream import BillingUpstream, upstream_in_thread
from gateway.test_task_calls import AGENT
from service.support import ServiceProcess, running_service, wait_until

KEY = "sk-tasks-0001"
LIMIT_TOKENS = 100_000
TASKS = 4
CALLS = 12
KILLS = 3
SCRIPT = AGENT + f"print([ask('[[words 20]] [[delay 0.1]]')[0] for _ in range({CALLS})])\n"
SETTINGS = """
[scheduler]
node_lease_seconds = 1.0

[gateway]
reserve = "strict"

[budgets."project:default"]
limit_tokens = {limit}

[targets.agent]
kind = "command"
command = {command}

[upstreams.openai]
kind = "openai"
base_url = "{url}"
key_env = "TASKS_KEY"

[prices."*"]
input = 1.0
output = 2.0
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("held", [2_000, 50])
def test_what_tasks_were_billed_is_booked_whatever_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setenv("TASKS_KEY", KEY)
    chosen = random.Random(held)
    with upstream_in_thread(KEY) as upstream:
        command = msgspec.json.encode([sys.executable, "-c", SCRIPT]).decode()
        text = SETTINGS.format(limit=LIMIT_TOKENS, command=command, url=upstream.openai_url)
        (tmp_path / "headgate.toml").write_text(text)
        with running_service(tmp_path, "--config", str(tmp_path / "headgate.toml")) as service:
            estimate = {"tokens": held}
            task_ids = [
                service.submit(target="agent", estimate=estimate, maxAttempts=20)
                for _ in range(TASKS)
            ]
            for _ in range(KILLS):
                seen = len(upstream.requests)
                wait_until(lambda: len(upstream.requests) > seen + 2, seconds=30.0)  # noqa: B023
                time.sleep(chosen.random() * 0.2)
                service.kill()
                service.start()
            ends = [service.wait_for(one, seconds=60.0) for one in task_ids]
            assert [one["state"] for one in ends] == ["done"] * TASKS
            _check(service, upstream, has_grown=held < 1_000)


def _check(service: ServiceProcess, upstream: BillingUpstream, *, has_grown: bool) -> None:
    status = service.ask("GET", "/budgets/status?scope=project:default").body
    booked = status["spentTokens"] + status["overrunTokens"]
    billed = sum(charge.tokens for charge in upstream.bill)
    reserved = status["reservedTokens"]
    assert booked + reserved <= LIMIT_TOKENS
    # A call that was cut off while it grew is held until its lease ends, and is booked then.
    assert booked + reserved >= billed
    assert has_grown or reserved == 0
