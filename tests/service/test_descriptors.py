"""A service with few file descriptors, or none left, loses nothing and recovers by itself."""

from __future__ import annotations

import http.client
import json
import resource
import socket
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from service.support import ServiceProcess, running_service, wait_until

TARGETS = """
[targets.quick]
kind = "command"
command = ["true"]
default = true

[targets.web]
kind = "http"
url = "http://127.0.0.1:9/"
"""


class KeptConnection:
    """Requests over one connection: no further descriptor is needed for them."""

    def __init__(self, service: ServiceProcess) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(service.address).netloc, timeout=20)

    def close(self) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        self._connection.request(method, path, None if body is None else json.dumps(body))
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())

    def state(self, task_id: str) -> str:
        return str(self.ask("GET", f"/tasks/{task_id}")[1].get("state", "not read"))

    def descriptors(self) -> str:
        status, body = self.ask("GET", "/readyz")
        return str(body["descriptors"] if status == 200 else body["details"]["descriptors"])


def settings(tmp_path: Path) -> str:
    path = tmp_path / "headgate.toml"
    path.write_text(TARGETS)
    return str(path)


def test_idle_connections_leave_descriptors_for_tasks(tmp_path: Path) -> None:
    """A thousand idle connections once took all of them, and commands failed for good."""
    with running_service(tmp_path, "--config", settings(tmp_path), open_files=256) as service:
        where = urlsplit(service.address)
        with closing(KeptConnection(service)) as kept, ExitStack() as stack:
            for _ in range(400):
                idle = socket.create_connection((where.hostname, where.port or 0), timeout=10)
                stack.enter_context(idle)
            wish = {"agentId": "a", "action": "x"}
            ids = [service.ask("POST", "/tasks", wish).body["taskId"] for _ in range(20)]
            wait_until(lambda: all(kept.state(one) == "done" for one in ids), seconds=30)
            assert kept.descriptors() == "ok"
            open_now = len(list(Path(f"/proc/{service.pid}/fd").iterdir()))
        assert open_now < 200
        assert "few files may be open" in service.output()


def test_without_a_descriptor_tasks_wait_and_begin_when_there_is_one(tmp_path: Path) -> None:
    with (
        running_service(tmp_path, "--config", settings(tmp_path)) as service,
        closing(KeptConnection(service)) as kept,
    ):
        assert kept.descriptors() == "ok"
        soft, hard = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (3, hard))
        command = {"agentId": "a", "action": "x"}
        ids = [kept.ask("POST", "/tasks", command)[1]["taskId"] for _ in range(3)]
        web = kept.ask("POST", "/tasks", {"agentId": "a", "action": "x", "target": "web"})[1]
        wait_until(lambda: "out of file descriptors" in service.output(), seconds=20)
        assert kept.descriptors().startswith("no file descriptor is left")
        assert kept.ask("GET", "/readyz")[0] == 503
        assert {kept.state(one) for one in (*ids, web["taskId"])} <= {"queued", "running"}
        assert service.output().count("out of file descriptors") == 1
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (soft, hard))
        wait_until(lambda: all(kept.state(one) == "done" for one in ids), seconds=30)
        # Nobody listens at its address, which is a failure like any other.
        wait_until(lambda: kept.state(web["taskId"]) == "failed", seconds=30)
        wait_until(lambda: kept.descriptors() == "ok", seconds=20)
        assert kept.ask("GET", "/readyz")[0] == 200
