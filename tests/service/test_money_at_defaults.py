"""Budgets of a real service hold at the defaults, for tasks that nobody gave an estimate."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from service.support import ServiceProcess, running_service

SETTINGS = """
[targets.agent]
kind = "http"
url = "http://127.0.0.1:{port}/run"
default = true

[budgets."session:eval"]
limit_usd = "0.50"
"""
SCOPE = "session:eval"
TOKENS = 900_000
"""Of gpt-4o they cost $2.25."""

WORK_SECONDS = 0.3
TASKS = 10


class Agent(ThreadingHTTPServer):
    """Does what it is asked, and says which model it has used for it."""

    def __init__(self, model: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model
        self.orders = 0
        self.running = 0
        self.most_running = 0
        self._lock = threading.Lock()

    def work(self) -> bytes:
        with self._lock:
            self.orders += 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        time.sleep(WORK_SECONDS)
        with self._lock:
            self.running -= 1
        usage = {"prompt_tokens": TOKENS, "completion_tokens": 0}
        return json.dumps({"model": self.model, "usage": usage}).encode()


class _Handler(BaseHTTPRequestHandler):
    server: Agent

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = self.server.work()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing."""


@contextmanager
def service_with(folder: Path, model: str) -> Iterator[tuple[ServiceProcess, Agent]]:
    agent = Agent(model)
    thread = threading.Thread(target=agent.serve_forever)
    thread.start()
    config = folder / "headgate.toml"
    config.write_text(SETTINGS.format(port=agent.server_port))
    try:
        with running_service(folder, "--config", str(config)) as service:
            yield service, agent
    finally:
        agent.shutdown()
        thread.join()
        agent.server_close()


def budget(service: ServiceProcess) -> Any:
    answer = service.ask("GET", f"/budgets/status?scope={SCOPE}")
    assert answer.status == 200, answer
    return answer.body


def test_ten_parallel_tasks_of_a_dear_model_spend_what_one_of_them_costs(tmp_path: Path) -> None:
    with service_with(tmp_path, "gpt-4o") as (service, agent):
        task_ids = [service.submit(scopes=[SCOPE]) for _ in range(TASKS)]
        ended = [service.wait_for(task_id) for task_id in task_ids]
        status = budget(service)
    states = sorted(task["state"] for task in ended)
    assert states == ["done", *["rejected"] * (TASKS - 1)]
    assert (agent.orders, agent.most_running) == (1, 1)
    assert [task["usage"]["usd"] for task in ended if task["state"] == "done"] == [2.25]
    assert (status["spentUsd"], status["overrunUsd"]) == ("0.05", "2.20")
    assert status["reservedUsd"] == "0.00"
    for task in ended:
        assert task["state"] == "done" or SCOPE in task["error"]


def test_an_unknown_model_is_booked_as_what_was_held_and_never_as_nothing(tmp_path: Path) -> None:
    with service_with(tmp_path, "unheard-of-1") as (service, agent):
        task = service.wait_for(service.submit(scopes=[SCOPE]))
        status = budget(service)
        metrics = service.text("/metrics")
    assert (task["state"], agent.orders) == ("done", 1)
    assert task["usage"] == {"tokens": TOKENS, "usd": 0.05, "assumedUsd": 0.05}
    assert task["unpriced"] is True
    assert (status["spentUsd"], status["overrunUsd"]) == ("0.05", "0.00")
    assert 'headgate_unpriced_tokens_total{model="unheard-of-1",project="default"} 900000.0' in (
        metrics
    )
