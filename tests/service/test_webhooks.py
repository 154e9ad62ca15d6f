"""Webhooks of a real service: told, signed, sent again by command, and alerts of budgets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from standardwebhooks.webhooks import Webhook

from headgate.cli.main import EXIT_NOT_ALLOWED, run
from service.support import running_service, wait_until

SETTINGS = """
[webhooks]
allow = ["127.0.0.0/8"]
alerts_url = "http://127.0.0.1:{port}/alerts"

[budgets."session:s"]
limit_tokens = 100
"""


class Came(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class Receiver(ThreadingHTTPServer):
    """Takes everything, except what comes to an address that says otherwise."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.came: list[Came] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def at(self, path: str) -> list[Came]:
        return [one for one in self.came if one.path == path]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.came.append(Came(self.path, dict(self.headers), body))
        self.send_response(410 if self.path == "/gone" else 204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing."""


@contextmanager
def running_receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.shutdown()
        receiver.server_close()
        thread.join()


def test_a_service_tells_what_it_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run(["webhooks", *arguments, "--url", service.address, "--json"])
        return code, capsys.readouterr().out

    def listed(*arguments: str) -> list[Any]:
        return [json.loads(line) for line in printed(*arguments)[1].splitlines()]

    with running_receiver() as receiver:
        (tmp_path / "headgate.toml").write_text(SETTINGS.format(port=receiver.server_port))
        with running_service(tmp_path) as service:
            taken = service.submit(callbackUrl=f"{receiver.url}/take", scopes=["session:s"],
                                   estimate={"tokens": 90})  # fmt: skip
            wait_until(lambda: receiver.at("/take"), seconds=30, what=service.output)
            # Whoever reaches the service may not read what its messages are signed with.
            assert printed("secret", "--data", str(tmp_path))[0] == EXIT_NOT_ALLOWED
            (secret,) = listed("secret", "--data", str(tmp_path / "data"))
            (came,) = receiver.at("/take")
            told = Webhook(secret["secret"]).verify(came.body, came.headers)
            shown = service.task(taken)
            assert shown.pop("held")[0]["basis"] == "given"
            assert told == shown
            assert came.headers["x-headgate-task-id"] == taken

            gone = service.submit(callbackUrl=f"{receiver.url}/gone")
            wait_until(lambda: listed("list", "--state", "dead"), seconds=30)
            (dead,) = listed("list", "--task", gone)
            assert (dead["state"], dead["status"], dead["tries"]) == ("dead", 410, 1)
            assert printed("redeliver", dead["id"])[0] == 0
            wait_until(lambda: len(receiver.at("/gone")) == 2, seconds=30)
            first, second = receiver.at("/gone")
            assert first.body == second.body
            assert first.headers["webhook-id"] == second.headers["webhook-id"] == dead["id"]

            code, ping = printed("ping", f"{receiver.url}/ping")
            assert (code, json.loads(ping)) == (0, {"delivered": True, "status": 204})
            assert printed("ping", f"{receiver.url}/gone")[0] == 1
            assert printed("ping", "http://169.254.169.254/")[0] == 2
            assert [one["secret"] for one in listed("rotate")][1:] == [secret["secret"]]

            wait_until(lambda: len(receiver.at("/alerts")) == 2, seconds=20, what=service.output)
            alerts = sorted(json.loads(one.body)["percent"] for one in receiver.at("/alerts"))
            assert alerts == [50, 80]
            refused = service.ask(
                "POST",
                "/tasks",
                {"agentId": "a", "action": "x", "callbackUrl": "http://169.254.169.254/"},
            )
            assert (refused.status, refused.body["details"]) == (400, {"field": "callbackUrl"})
