"""Secrets that are put into a service appear nowhere that it writes or answers.

A surface is a function that returns texts by their names. A new one is added to `SURFACES`; a new
route that lists or shows something is among the pages by itself.
"""

from __future__ import annotations

import base64
import http.client
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import pytest

from executors.endpoint import free_port
from headgate.api.app import ROUTES
from headgate.cli.main import COMMANDS
from service.support import TERMINAL, ServiceProcess, running_service, wait_until

SETTINGS = """
[log]
level = "debug"

[auth]
required = true

[webhooks]
allow = ["127.0.0.0/8"]

[targets.endpoint]
kind = "http"
url = "http://127.0.0.1:{port}/run?key={url_key}"
default = true

[targets.endpoint.headers]
Authorization = "Bearer {{env.CANARY_ENVIRONMENT}}"
X-Api-Key = "{header}"

[targets.command]
kind = "command"
command = ["sh", "-c", "echo broken >&2; exit 3"]

[targets.command.env]
FROM_OUTSIDE = "{{env.CANARY_ENVIRONMENT}}"
WRITTEN_HERE = "{variable}"
"""
GIVEN_ON_PURPOSE = ("/webhooks/secret",)
ENDLESS = ("/events",)
STREAM_SECONDS = 1.0
WRONG_BODIES = (b"", b"{", b'{"agentId": 1}', b'{"agentId": "a", "action": "x", "target": "no"}')


class Texts(NamedTuple):
    """What one surface has shown, by name."""

    by_name: dict[str, str]


class Scene:
    """A service with secrets in all places that take one, and clients that make mistakes."""

    def __init__(self, service: ServiceProcess, canaries: dict[str, str], config: Path) -> None:
        self.service = service
        self.canaries = canaries
        self.config = config
        self.token = (service.folder / "data" / "token").read_text().strip()
        self.task_ids: list[str] = []

    def send(
        self, method: str, path: str, body: bytes = b"", *, token: str | None = None
    ) -> tuple[int, str]:
        """Send a request, and return the status with the head and the body of the answer."""
        connection = http.client.HTTPConnection(urlsplit(self.service.address).netloc, timeout=20)
        with closing(connection):
            headers = {"Authorization": f"Bearer {self.token if token is None else token}"}
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            return response.status, f"{response.headers}{text}"

    def show(self, path: str) -> str:
        """Return a page that must be there."""
        status, text = self.send("GET", path)
        assert status in (200, 204), f"{path}: {text}"
        return text

    def prepare(self) -> None:
        """Have secrets made by the service, and let work fail that has some."""
        status, text = self.send("POST", "/tokens", b'{"name": "c", "permissions": ["read"]}')
        assert status == 201, text
        self.canaries["made token"] = msgspec.json.decode(text.partition("\n\n")[2])["token"]
        status, text = self.send("GET", "/webhooks/secret")
        assert status == 200, text
        found = re.findall(r"whsec_[A-Za-z0-9+/=_-]+", text)
        self.canaries.update({f"webhook secret {n}": one for n, one in enumerate(found)})
        assert found
        for target in ("endpoint", "command"):
            self.task_ids.append(self.submit(target))
        for task_id in self.task_ids:
            wait_until(lambda one=task_id: self.has_ended(one), seconds=20.0)  # type: ignore[misc]

    def submit(self, target: str) -> str:
        """Submit a task whose end is told to an address where nobody is."""
        told = f"http://127.0.0.1:{free_port()}/told"
        body = {"agentId": "a", "action": "x", "target": target, "callbackUrl": told}
        status, text = self.send("POST", "/tasks", msgspec.json.encode(body))
        assert status == 202, text
        return str(msgspec.json.decode(text.partition("\n\n")[2])["taskId"])

    def has_ended(self, task_id: str) -> bool:
        """Tell whether a task is over."""
        text = self.send("GET", f"/tasks/{task_id}")[1]
        return any(f'"state":"{state}"' in text for state in TERMINAL)


def pages(scene: Scene) -> Texts:
    """Whatever lists or shows something without being told what."""
    paths = [route.path for route in ROUTES if route.method == "GET" and "{id}" not in route.path]
    shown = [path for path in paths if path not in (*GIVEN_ON_PURPOSE, *ENDLESS)]
    assert {"/metrics", "/openapi.json", "/tasks", "/tokens", "/targets"} <= set(shown)
    return Texts({path: scene.show(path) for path in shown})


def tasks(scene: Scene) -> Texts:
    """Tasks that have failed, and what is known of them."""
    paths = [f"/tasks/{one}{rest}" for one in scene.task_ids for rest in ("", "/why", "/events")]
    paths += [f"/targets/{name}" for name in ("endpoint", "command")]
    return Texts({path: scene.show(path) for path in paths})


def mistakes(scene: Scene) -> Texts:
    """Requests that are refused; what they brought along is not told to anybody."""
    presented = scene.canaries["presented"]
    texts = {
        "no such token": scene.send("GET", "/tasks", token=presented),
        "half a token": scene.send("GET", "/tasks", token=scene.token[:-4]),
        "no such page": scene.send("GET", f"/nowhere?access_token={presented}"),
        "no such field": scene.send("GET", f"/tasks?access_token={presented}"),
    }
    texts |= {
        f"body {number}": scene.send("POST", "/tasks", body)
        for number, body in enumerate(WRONG_BODIES)
    }
    assert all(status < 500 for status, _ in texts.values())
    return Texts({name: text for name, (_, text) in texts.items()})


def stream(scene: Scene) -> Texts:
    """The events of a task that runs and fails."""
    place = urlsplit(scene.service.address)
    request = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {scene.token}\r\n"
    with socket.create_connection((place.hostname, place.port)) as client:
        client.sendall(f"{request}\r\n".encode())
        scene.task_ids.append(scene.submit("endpoint"))
        client.settimeout(STREAM_SECONDS)
        return Texts({"/events": b"".join(received(client)).decode(errors="replace")})


def received(client: socket.socket) -> Iterator[bytes]:
    try:
        while data := client.recv(65_536):
            yield data
    except TimeoutError:
        return


def changes(scene: Scene) -> Texts:
    """What is answered when settings are read again, and what the audit log keeps of it."""
    return Texts({"/scheduler/reload": scene.send("POST", "/scheduler/reload")[1]})


def commands(scene: Scene) -> Texts:
    """What commands print that read the settings, or ask the service."""
    config = ("--config", str(scene.config))
    lines: dict[str, tuple[str, ...]] = {
        "check": ("config", "check", *config),
        "show": ("config", "show", *config),
    }
    if "doctor" in COMMANDS:
        lines["doctor"] = ("doctor", *config, "--data", str(scene.service.folder / "data"))
    return Texts({name: printed(scene.service.folder, *line) for name, line in lines.items()})


def printed(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "headgate", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def log_lines(scene: Scene) -> Texts:
    """Everything that was logged and printed, except the token that is shown once."""
    shown_once = f"token {scene.token}"
    return Texts({"log": scene.service.output().replace(shown_once, "", 1)})


def files(scene: Scene) -> Texts:
    """What is on disk, except the files that are there to keep a secret."""
    folder = scene.service.folder / "data"
    kept = [path for path in folder.iterdir() if path.is_file() and path.name != "token"]
    return Texts({path.name: path.read_bytes().decode("latin-1") for path in kept})


SURFACES: tuple[Callable[[Scene], Texts], ...] = (
    mistakes,
    stream,
    changes,
    pages,
    tasks,
    commands,
    log_lines,
    files,
)
KEPT_IN_STORE = ("webhook secret",)
"""What the store has to keep as it is, because it signs with it."""


def leaks(texts: Texts, canaries: dict[str, str], *, is_store: bool) -> list[str]:
    return [
        f"{name} is in {place}"
        for place, text in texts.by_name.items()
        for name, canary in canaries.items()
        if not (is_store and name.startswith(KEPT_IN_STORE))
        for form in (canary, base64.b64encode(canary.encode()).decode().rstrip("="))
        if form in text
    ]


def test_a_secret_that_is_told_would_be_found() -> None:
    canaries = {"a": "canary-a", "webhook secret 0": "whsec_b"}
    shown = Texts({"x": "the key is canary-a", "y": "Basic Y2FuYXJ5LWE=", "z": "whsec_b"})
    assert leaks(shown, canaries, is_store=True) == ["a is in x", "a is in y"]
    assert leaks(shown, canaries, is_store=False)[-1] == "webhook secret 0 is in z"


def test_no_secret_is_told_to_anybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("environment", "header", "variable", "url_key", "presented")
    canaries = {name: f"canary-{name}-{secrets.token_hex(12)}" for name in names}
    monkeypatch.setenv("CANARY_ENVIRONMENT", canaries["environment"])
    config = tmp_path / "service.toml"
    config.write_text(SETTINGS.format(port=free_port(), **canaries))
    with running_service(tmp_path, "--config", str(config)) as service:
        scene = Scene(service, canaries, config)
        scene.prepare()
        scene.canaries["first token"] = scene.token
        found = [
            leak
            for surface in SURFACES
            for leak in leaks(surface(scene), scene.canaries, is_store=surface is files)
        ]
        assert found == []
        service.stop()
        assert leaks(log_lines(scene), scene.canaries, is_store=False) == []


class Echo(BaseHTTPRequestHandler):
    """Answers with whatever it was asked, as pages about errors do."""

    def do_POST(self) -> None:
        """Repeat the address and the body, under the status that the address names."""
        length = int(self.headers["Content-Length"] or 0)
        text = f"Cannot POST {self.path}: ".encode() + self.rfile.read(length)
        self.send_response(503 if "busy" in self.path else 400)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def echoing() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


ECHOING = """
[log]
level = "debug"

[scheduler]
max_attempts = 2
retry_base_seconds = 0.01

[webhooks]
allow = ["127.0.0.0/8"]

[targets.refusing]
kind = "http"
url = "{address}/run"

[targets.busy]
kind = "http"
url = "{address}/busy"
"""


def test_what_others_answer_is_kept_and_not_logged(tmp_path: Path) -> None:
    names = ("params", "label", "path", "query")
    canaries = {name: f"canary-{name}-{secrets.token_hex(6)}" for name in names}
    with echoing() as address:
        config = tmp_path / "service.toml"
        config.write_text(ECHOING.format(address=address))
        told = f"{address}/{canaries['path']}?key={canaries['query']}"
        with running_service(tmp_path, "--config", str(config)) as service:
            for target in ("refusing", "busy"):
                task_id = service.submit(
                    target=target,
                    params={"key": canaries["params"]},
                    labels={"key": canaries["label"]},
                    callbackUrl=told,
                )
                error = service.wait_for(task_id)["error"]
                assert canaries["params"] in error, "the target has said so"
                message_id = task_id.replace("tsk_", "msg_")
                wait_until(lambda one=message_id: one in service.output(), seconds=20.0)  # type: ignore[misc]
            kept = str(service.ask("GET", "/webhooks").body)
            assert canaries["path"] in kept
            assert f"Cannot POST /{canaries['path']}" in kept, "the receiver has said so"
            pages = {path: service.text(path) for path in ("/metrics", "/audit", "/targets")}
            texts = Texts(pages | {"log": service.output()})
            service.stop()
        assert "webhook failed" in texts.by_name["log"]
        assert "task retrying" in texts.by_name["log"]
        assert leaks(texts, canaries, is_store=False) == []


def test_the_password_of_a_database_is_told_to_nobody(tmp_path: Path, postgres_url: str) -> None:
    canary = f"canary-{secrets.token_hex(12)}"
    url = with_password(postgres_url, canary)
    away = f"postgresql://headgate:{canary}@127.0.0.1:{free_port()}/none"
    config = tmp_path / "service.toml"
    config.write_text(f'[log]\nlevel = "debug"\n\n[store]\nurl = "{url}"\n')
    with running_service(tmp_path, "--config", str(config)) as service:
        service.wait_for(service.submit())
        texts = [service.output(), printed(tmp_path, "config", "show", "--config", str(config))]
        pages = ("/readyz", "/scheduler/stats", "/openapi.json", "/tasks")
        texts += [str(service.ask("GET", path)) for path in pages]
        service.stop()
        texts.append(service.output())
    nowhere = ServiceProcess(tmp_path, "--data", str(tmp_path / "other"), "--store", away)
    nowhere.spawn()
    assert nowhere.wait() == 1
    texts.append(nowhere.output())
    assert "PostgreSQL" in texts[-1]
    assert [text for text in texts if canary in text] == []


def with_password(url: str, password: str) -> str:
    """Put a password into a URL; the server of the tests does not ask for one."""
    scheme, _, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    user, _, host = place.rpartition("@")
    return f"{scheme}://{user.partition(':')[0] or 'postgres'}:{password}@{host}{slash}{path}"
