"""A real `headgate up` in a process of its own, over a folder that outlives it.

The process is what a user starts: no part of it is replaced. It can be ended in every way in which
a process ends, and started again over the same data.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import urlopen

import msgspec

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 60.0
STOP_SECONDS = 60.0
LOOK_SECONDS = 0.02
ECHO_TARGET = """
[targets.echo]
kind = "callable"
entry_point = "headgate.executors.callable:echo"
default = true
"""
SLOW_TARGET = """
[targets.slow]
kind = "command"
command = ["sleep", "600"]
"""
"""It runs until somebody ends it."""
TERMINAL = ("done", "failed", "cancelled", "rejected")

_ADDRESS = re.compile(
    r"^(?:headgate serves |open |\{\"address\":\")(http://[^\s\"]+)", re.MULTILINE
)


class Answer(NamedTuple):
    """The status and the decoded body of a response."""

    status: int
    body: Any


class DidNotHappenError(AssertionError):
    """What was waited for did not come in time."""


class Gate:
    """A file that tasks wait for: they run until it is opened."""

    def __init__(self, path: Path) -> None:
        self.params: dict[str, Any] = {"until": str(path)}
        self._path = path

    def open(self) -> None:
        """Let the tasks end."""
        self._path.touch()


class ServiceProcess:
    """One service, which may have several processes one after the other."""

    def __init__(
        self, folder: Path, *arguments: str, port: int = 0, open_files: int | None = None
    ) -> None:
        self.folder = folder
        self.log_path = folder / "service.log"
        self.address = f"http://127.0.0.1:{port}"
        self.token = ""
        self.variables: dict[str, str] = {}
        self._command = [sys.executable, "-m", "headgate", "up", "--port", str(port), *arguments]
        if open_files is not None:
            limited = 'ulimit -n "$0" && exec "$@"'
            self._command = ["sh", "-c", limited, str(open_files), *self._command]
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        """The id of the process that runs."""
        return self._running().pid

    @property
    def pids(self) -> list[int]:
        """The ids of the process that runs and of those that it has started, itself first."""
        return family(self.pid)

    @property
    def writer_pid(self) -> int:
        """The id of the process that writes to the store."""
        writers = [pid for pid in self.pids[1:] if b"headgate.storage.writer" in _command_line(pid)]
        if not writers:
            raise DidNotHappenError(f"no process writes\n{self.output()}")
        return writers[-1]

    def spawn(self) -> None:
        """Start a process, and do not wait for anything."""
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self._command,
                cwd=self.folder,
                env=environment() | self.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C ends the tests first, and they end the service.
                start_new_session=True,
            )

    def start(self) -> None:
        """Start a process, and return when it says where it serves."""
        self.spawn()
        wait_until(self._says_address, seconds=START_SECONDS, what=self.output)
        self.address = self._says_address() or self.address

    def output(self) -> str:
        """Return what the latest process has printed."""
        return self.log_path.read_bytes()[self._log_start :].decode(errors="replace")

    def has_ended(self) -> bool:
        """Tell whether no process runs."""
        return self._process is None or self._process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._running().send_signal(number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Wait for the end of the process, and return its exit code."""
        code = self._running().wait(seconds)
        self._process = None
        return code

    def stop(self) -> int:
        """End the process as an operator does, and return its exit code."""
        self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """End the process as a power cut would, if there is one."""
        if self._process is not None:
            self._process.kill()
            self.wait()

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        seconds: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one request, and return its answer."""
        place = urlsplit(self.address)
        connection = http.client.HTTPConnection(place.netloc, timeout=seconds)
        try:
            content = None if body is None else msgspec.json.encode(body)
            sent = {"Content-Type": "application/json", **(headers or {})}
            if self.token:
                sent["Authorization"] = f"Bearer {self.token}"
            connection.request(method, path, content, sent)
            response = connection.getresponse()
            return Answer(response.status, msgspec.json.decode(response.read()))
        finally:
            connection.close()

    def text(self, path: str) -> str:
        """Return what an address answers, as text."""
        with urlopen(self.address + path, timeout=30.0) as response:
            return str(response.read().decode())

    def submit(self, **fields: object) -> str:
        """Submit a task that must be taken, and return its id."""
        answer = self.ask("POST", "/tasks", {"agentId": "a", "action": "work", **fields})
        assert answer.status == 202, answer
        return str(answer.body["taskId"])

    def task(self, task_id: str) -> Any:
        """Return a task that must be there."""
        answer = self.ask("GET", f"/tasks/{task_id}")
        assert answer.status == 200, answer
        return answer.body

    def wait_for(self, task_id: str, *states: str, seconds: float = 60.0) -> Any:
        """Wait until a task is in one of these states, or ends if none is named, and return it."""
        wanted = states or TERMINAL
        wait_until(
            lambda: self.task(task_id)["state"] in wanted,
            seconds=seconds,
            what=lambda: f"{self.task(task_id)}\n{self.output()}",
        )
        return self.task(task_id)

    def is_ready(self) -> bool:
        """Tell whether the service says that it does its work."""
        try:
            return self.ask("GET", "/readyz").status == 200
        except OSError:
            return False

    def _says_address(self) -> str | None:
        if self.has_ended():
            raise DidNotHappenError(self.output())
        found = _ADDRESS.search(self.output())
        return None if found is None else found[1]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise DidNotHappenError(f"no process runs\n{self.output()}")
        return self._process


@contextmanager
def running_service(
    folder: Path, *arguments: str, port: int = 0, open_files: int | None = None
) -> Iterator[ServiceProcess]:
    """Run a service over the data in a folder, and end whatever process is left of it."""
    data = str(folder / "data")
    service = ServiceProcess(folder, "--data", data, *arguments, port=port, open_files=open_files)
    service.start()
    try:
        yield service
    finally:
        service.kill()


def wait_until(
    condition: Callable[[], object], *, seconds: float, what: Callable[[], str] = str
) -> float:
    """Wait until something is so, and return how many seconds that took."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            raise DidNotHappenError(f"not within {seconds} seconds: {what()}")
        time.sleep(LOOK_SECONDS)
    return time.monotonic() - started


def family(pid: int) -> list[int]:
    """Return a process and all that it has started and that still run, itself first."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may end while its children are read.
        with suppress(OSError):
            children += map(int, path.read_text().split())
    return [pid, *(each for child in children for each in family(child))]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def environment() -> dict[str, str]:
    """Return the variables of a process of the tests, in which targets are found."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    # The program is the one beside the tests, and targets of tests are functions in these folders.
    folders = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests")]
    given = [own["PYTHONPATH"]] if own.get("PYTHONPATH") else []
    return {**own, "PYTHONPATH": os.pathsep.join(folders + given)}
