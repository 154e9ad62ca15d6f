"""Other gateways, measured in the same run; one that is not there is told and left out.

They lie in an environment of their own, which `make bench` installs. Each is started as its own
documentation says, listens on this machine only, and gets no key or setting of whoever runs this.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.engine_client import cpu_seconds
from benchmarks.engine_peers import FAILED, NOT_INSTALLED
from benchmarks.gateway_upstream import MODEL
from benchmarks.options import ROOT
from budgets.servers import ServerDidNotStartError, running_valkey
from executors.endpoint import free_port
from service.support import family

START_SECONDS = 60.0
LOOK_SECONDS = 0.1
STOP_SECONDS = 10.0
PROMPT = "Tell me whether all is well, and why. " * 16
MOST_TOKENS = 300
MASTER_KEY = "sk-benchmark"

TENSORZERO_SETTINGS = """
[gateway]
observability.enabled = false

[models.mock]
routing = ["mock"]

[models.mock.providers.mock]
type = "openai"
model_name = "{model}"
api_base = "http://127.0.0.1:{port}/v1/"
api_key_location = "none"
"""
# As Headgate is measured: two limited scopes, and a window of requests.
TENSORZERO_LIMITS = """
[[rate_limiting.rules]]
always = true
tokens_per_hour = 1_000_000_000_000

[[rate_limiting.rules]]
always = true
tokens_per_hour = 1_000_000_000_000
model_inferences_per_minute = 1_000_000_000
scope = [{ tag_key = "project", tag_value = "bench" }]
"""
LITELLM_SETTINGS = """
model_list:
  - model_name: {model}
    litellm_params:
      model: openai/{model}
      api_base: http://127.0.0.1:{port}/v1
      api_key: none
"""


class Gateway(NamedTuple):
    """Where a gateway answers, what is sent to it, and whose time of the processor is its own."""

    title: str
    port: int
    pids: tuple[int, ...] = ()
    path: str = "/v1/chat/completions"
    model: str = MODEL
    headers: Mapping[str, str] = {}
    fields: Mapping[str, object] = {}

    def body(self, *, is_stream: bool) -> dict[str, object]:
        """Return what is asked."""
        asked: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": MOST_TOKENS,
            **self.fields,
        }
        if is_stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return asked

    def cpu_seconds(self) -> float:
        """Return what its processes have used of the processor."""
        return sum(cpu_seconds(each) for pid in self.pids for each in family(pid))

    def problem(self) -> str:
        """Ask once, and return why no answer came, or nothing."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10.0)
        try:
            body = msgspec.json.encode(self.body(is_stream=False))
            headers = {"Content-Type": "application/json", **self.headers}
            connection.request("POST", self.path, body, headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            return f"no answer: {error}"
        finally:
            connection.close()
        return "" if answer.status == 200 else f"answered with {answer.status}: {text[:200]!r}"


class Place(NamedTuple):
    """Where peers are installed, where they may write, and the provider that they ask."""

    installed: Path
    folder: Path
    upstream_port: int


class NotThereError(Exception):
    """A gateway is not installed, or did not start; the message says which."""


@contextmanager
def running_peers(place: Place) -> Iterator[tuple[list[Gateway], dict[str, str]]]:
    """Run every peer that is installed; the others are told with the reason."""
    with ExitStack() as stack:
        running: list[Gateway] = []
        missing: dict[str, str] = {}
        for title, start in PEERS.items():
            # What was begun for a peer that did not start ends at once.
            with ExitStack() as begun:
                try:
                    gateway = start(begun, place)
                except NotThereError as error:
                    missing[title] = str(error)
                except ServerDidNotStartError as error:
                    print(f"{title}: {error}")
                    missing[title] = FAILED
                else:
                    running.append(gateway)
                    stack.push(begun.pop_all())
        yield running, missing


def _tensorzero(stack: ExitStack, place: Place) -> Gateway:
    """Start it without limits: what it costs only to pass a call on."""
    return _start_tensorzero(stack, place, "TensorZero", limits="")


def _tensorzero_with_limits(stack: ExitStack, place: Place) -> Gateway:
    return _start_tensorzero(stack, place, "TensorZero with limits", limits=TENSORZERO_LIMITS)


def _start_tensorzero(stack: ExitStack, place: Place, title: str, *, limits: str) -> Gateway:
    python = _installed(place.installed / "bin/python")
    _installed(next(place.installed.glob("lib/*/site-packages/tensorzero"), place.folder / "none"))
    name = title.replace(" ", "-").lower()
    settings = place.folder / f"{name}.toml"
    text = TENSORZERO_SETTINGS.format(model=MODEL, port=place.upstream_port)
    settings.write_text(text + limits)
    command = [str(python), "-m", "benchmarks.peers.serve_tensorzero", str(settings)]
    valkey_pids: set[int] = set()
    if limits:
        others, port = set(family(os.getpid())), free_port()
        stack.enter_context(running_valkey("--bind", "127.0.0.1", "--port", str(port)))
        valkey_pids = set(family(os.getpid())) - others
        command.append(f"redis://127.0.0.1:{port}")
    log = place.folder / f"{name}.log"
    process = stack.enter_context(_process(command, log))

    def found() -> Gateway:
        lines = log.read_text(errors="replace").splitlines()
        told = next((line for line in lines if line.startswith("address ")), "")
        port = told.partition("127.0.0.1:")[2].partition("/")[0]
        return Gateway(
            title,
            int(port or 0),
            (process.pid, *valkey_pids),
            "/openai/v1/chat/completions",
            "tensorzero::model_name::mock",
            fields={"tensorzero::tags": {"project": "bench"}},
        )

    return _ready(process, log, found)


def _smg(stack: ExitStack, place: Place) -> Gateway:
    program = _installed(place.installed / "bin/smg")
    port, log = free_port(), place.folder / "smg.log"
    command = [str(program), "launch", "--backend", "openai"]
    command += ["--worker-urls", f"http://127.0.0.1:{place.upstream_port}"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    process = stack.enter_context(_process(command, log))
    gateway = Gateway("SMG", port, (process.pid,))
    return _ready(process, log, lambda: gateway)


def _portkey(stack: ExitStack, place: Place) -> Gateway:
    server = place.installed / "node_modules/@portkey-ai/gateway/build/start-server.js"
    port, log = free_port(), place.folder / "portkey.log"
    command = ["node", "--require", str(ROOT / "benchmarks/peers/loopback.cjs")]
    command += [str(_installed(server)), "--headless", f"--port={port}"]
    process = stack.enter_context(_process(command, log))
    headers = {
        "Authorization": f"Bearer {MASTER_KEY}",
        "x-portkey-provider": "openai",
        "x-portkey-custom-host": f"http://127.0.0.1:{place.upstream_port}/v1",
    }
    gateway = Gateway("Portkey", port, (process.pid,), headers=headers)
    return _ready(process, log, lambda: gateway)


def _litellm(stack: ExitStack, place: Place) -> Gateway:
    program = _installed(place.installed / "bin/litellm")
    settings, log = place.folder / "litellm.yaml", place.folder / "litellm.log"
    settings.write_text(LITELLM_SETTINGS.format(model=MODEL, port=place.upstream_port))
    port = free_port()
    command = [str(program), "--config", str(settings), "--num_workers", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    # Without the first it fetches a list of prices from elsewhere.
    more = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": MASTER_KEY}
    process = stack.enter_context(_process(command, log, more))
    headers = {"Authorization": f"Bearer {MASTER_KEY}"}
    gateway = Gateway("LiteLLM", port, (process.pid,), headers=headers)
    return _ready(process, log, lambda: gateway)


PEERS: dict[str, Callable[[ExitStack, Place], Gateway]] = {
    "TensorZero with limits": _tensorzero_with_limits,
    "TensorZero": _tensorzero,
    "SMG": _smg,
    "Portkey": _portkey,
    "LiteLLM": _litellm,
}


def _installed(path: Path) -> Path:
    if not path.exists():
        raise NotThereError(NOT_INSTALLED)
    return path


@contextmanager
def _process(
    command: list[str], log: Path, more: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program as a group of its own, and end it with all of its children."""
    own = {"PATH": os.environ["PATH"], "HOME": str(log.parent), "LANG": "C.UTF-8", **(more or {})}
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise NotThereError(NOT_INSTALLED) from error
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_SECONDS)


def _ready(process: subprocess.Popen[bytes], log: Path, found: Callable[[], Gateway]) -> Gateway:
    """Wait until a gateway passes a call on, and return it."""
    ends_at = time.monotonic() + START_SECONDS
    while problem := found().problem():
        if process.poll() is not None or time.monotonic() > ends_at:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            print(f"{found().title}: {problem}; {last}")
            raise NotThereError(FAILED)
        time.sleep(LOOK_SECONDS)
    return found()
