"""A stop while calls run: not ready from the first signal on, and tasks may still call models."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from gateway.billing_upstream import upstream_in_thread
from gateway.test_task_calls import AGENT
from service.support import running_service, wait_until
from service.test_task_calls_killed import KEY, LIMIT_TOKENS, SETTINGS

SLOW = {
    "model": "gpt-5",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "[[words 1]] [[delay 3]]"}],
}


def settings(folder: Path, url: str, script: str) -> Path:
    command = msgspec.json.encode([sys.executable, "-c", AGENT + script]).decode()
    path = folder / "headgate.toml"
    path.write_text(SETTINGS.format(limit=LIMIT_TOKENS, command=command, url=url))
    return path


def test_a_service_that_stops_is_not_ready_while_a_call_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKS_KEY", KEY)
    with upstream_in_thread(KEY) as upstream, ThreadPoolExecutor() as pool:
        path = settings(tmp_path, upstream.openai_url, "")
        with running_service(tmp_path, "--config", str(path)) as service:
            call = pool.submit(service.ask, "POST", "/v1/chat/completions", SLOW)
            wait_until(lambda: upstream.requests, seconds=30.0)
            service.send(signal.SIGTERM)
            wait_until(lambda: "1 call has finished" in service.output(), seconds=10.0)
            answer = service.ask("GET", "/readyz")
            assert (answer.status, answer.body["error"]) == (503, "draining")
            assert service.ask("POST", "/v1/chat/completions", SLOW).status == 503
            assert call.result(30.0).status == 200
            assert service.wait() == 0


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_a_task_that_finishes_during_a_stop_may_still_call_models(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    store: str,
    request: pytest.FixtureRequest,
) -> None:
    """The only node goes on to decide about calls, also where others could join."""
    monkeypatch.setenv("TASKS_KEY", KEY)
    is_shared = store == "postgres"
    where = ("--store", request.getfixturevalue("postgres_url")) if is_shared else ()
    script = "print([ask('[[words 5]] [[delay 0.5]]')[0] for _ in range(4)])\n"
    with upstream_in_thread(KEY) as upstream:
        path = settings(tmp_path, upstream.openai_url, script)
        with running_service(tmp_path, "--config", str(path), *where) as service:
            task_id = service.submit(target="agent", estimate={"tokens": 2_000})
            wait_until(lambda: upstream.requests, seconds=30.0)
            service.send(signal.SIGTERM)
            assert service.wait() == 0
            service.start()
            ended = service.wait_for(task_id, seconds=30.0)
            assert (ended["state"], ended["attempt"]) == ("done", 1)
            assert len(upstream.requests) == 4
