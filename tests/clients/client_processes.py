"""The clients as a user starts them: which command, which variables, which files.

Nothing of a client is changed. Each run has a home of its own, in which nothing is logged in, and
the variables by which its makers let one switch off telemetry, updates and downloads.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from clients.install import folder_of, python_path

Mode = Literal["plain", "stream", "tool"]
Kind = Literal["anthropic", "openai"]

PROGRAM = Path(__file__).parent / "sdk_program.py"
RUN_SECONDS = 60.0
SILENT = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "LANGSMITH_TRACING": "false",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}
"""Lets no client talk to its makers, as they document it."""
CODEX_SETTINGS = """\
model = "{model}"
model_provider = "headgate"
check_for_update_on_startup = false

[model_providers.headgate]
name = "Headgate"
base_url = "{url}"
env_key = "HEADGATE_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""


class Ask(NamedTuple):
    """What a client is to ask, and where."""

    url: str
    """The base URL, as the protocol of the client wants it."""
    model: str
    prompt: str
    mode: Mode
    folder: Path
    """The client's home and working folder."""


class Run(NamedTuple):
    """How a client ended."""

    code: int
    output: str
    errors: str

    @property
    def text(self) -> str:
        """Everything that its user saw."""
        return f"{self.output}\n{self.errors}"


class Client(NamedTuple):
    """A client: the protocol it speaks, and how it is started."""

    name: str
    kind: Kind
    agent: str
    """What its calls are called where nobody says who calls."""
    tool: str
    """The prompt that makes it call a tool, whose doing `did_tool` looks for."""
    did_tool: str
    command: Callable[[Ask], tuple[list[str], dict[str, str]]]
    why_not: Callable[[], str | None]
    """Says why it cannot run here; None if it can."""
    model: str
    is_agent: bool = False
    """Whether it is a coding agent, which streams in every mode."""

    def base_url(self, server: str, path: str = "") -> str:
        """Return what the client has to be told, for a server and a prefix there."""
        return f"{server}{path}" + ("/v1" if self.kind == "openai" else "")


class ClientProcess:
    """A client that runs."""

    def __init__(self, client: Client, ask: Ask) -> None:
        ask.folder.mkdir(parents=True, exist_ok=True)
        command, variables = client.command(ask)
        self.client = client
        self.ask = ask
        own = {"PATH": os.environ["PATH"], "HOME": str(ask.folder), "LANG": "C.UTF-8"}
        self._output = ask.folder / "output.txt"
        self._errors = ask.folder / "errors.txt"
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ask.folder,
                env={**own, **SILENT, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def wait(self, seconds: float = RUN_SECONDS) -> Run:
        """Wait for its end, and return what it said; a client that does not end is killed."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it did not end in {seconds} seconds: {self._said(-9)}") from None
        return self._said(code)

    def kill(self) -> None:
        """End it and all that it started, as a user who closes the window does."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def has_ended(self) -> bool:
        """Tell whether it has ended by itself."""
        return self._process.poll() is not None

    def _said(self, code: int) -> Run:
        output, errors = (path.read_text() for path in (self._output, self._errors))
        return Run(code, output, errors)


def claude_code(ask: Ask) -> tuple[list[str], dict[str, str]]:
    """Start Claude Code; it takes any name of a model."""
    streamed = ["--output-format", "stream-json", "--verbose", "--include-partial-messages"]
    command = [
        str(_claude_path()),
        "-p",
        ask.prompt,
        "--model",
        ask.model,
        "--allowedTools",
        "Bash",
        *(streamed if ask.mode == "stream" else ()),
    ]
    return command, {"ANTHROPIC_BASE_URL": ask.url, "ANTHROPIC_API_KEY": "any"}


def codex(ask: Ask) -> tuple[list[str], dict[str, str]]:
    """Start Codex with a provider of its own in its settings."""
    home = ask.folder / ".codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(CODEX_SETTINGS.format(model=ask.model, url=ask.url))
    command = [
        "node",
        str(_codex_path()),
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        *(["--json"] if ask.mode == "stream" else ()),
        ask.prompt,
    ]
    return command, {"CODEX_HOME": str(home), "HEADGATE_KEY": "any"}


def opencode(ask: Ask) -> tuple[list[str], dict[str, str]]:
    """Start opencode with a provider of its own in the settings of the project."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Headgate",
        "options": {"baseURL": ask.url, "apiKey": "any"},
        "models": {ask.model: {"name": ask.model}},
    }
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "autoupdate": False,
        "share": "disabled",
        "provider": {"headgate": provider},
        "model": f"headgate/{ask.model}",
    }
    (ask.folder / "opencode.json").write_text(json.dumps(settings))
    command = [str(_opencode_path()), "run", ask.prompt]
    command += ["--format", "json"] if ask.mode == "stream" else []
    return command, {}


def program(name: str, python: str) -> Callable[[Ask], tuple[list[str], dict[str, str]]]:
    """Return how a program that uses an SDK is started."""

    def command(ask: Ask) -> tuple[list[str], dict[str, str]]:
        variables = {"BASE_URL": ask.url, "MODEL": ask.model, "PROMPT": ask.prompt}
        return [python, str(PROGRAM), name, ask.mode], variables

    return command


def installed_commands(folder: Path, *, has_langchain: bool) -> str:
    """Put the clients into a folder, by the names that users type; return the path to search."""
    folder.mkdir()
    python = python_path() if has_langchain else Path(sys.executable)
    commands = {"claude": _claude_path(), "codex": _codex_path(), "opencode": _opencode_path()}
    for name, path in commands.items():
        (folder / name).symlink_to(path)
    # A link to an interpreter would not find the packages beside it.
    (folder / "python").write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
    (folder / "python").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def _codex_path() -> Path:
    return folder_of("@openai/codex") / "node_modules/@openai/codex/bin/codex.js"


def _claude_path() -> Path:
    return _binary("@anthropic-ai/claude-code", "node_modules/@anthropic-ai/claude-code-*/claude")


def _opencode_path() -> Path:
    # One of two, where processors differ: the one for all of them sorts last.
    return _binary("opencode-ai", "node_modules/opencode-*/bin/opencode")


def _binary(package: str, pattern: str) -> Path:
    found = sorted(folder_of(package).glob(pattern))
    return found[-1] if found else folder_of(package) / "missing"


def _missing(*paths: Callable[[], Path]) -> Callable[[], str | None]:
    def why_not() -> str | None:
        gone = [path() for path in paths if not path().exists()]
        return f"it is not installed: no {gone[0]}; see make test-clients" if gone else None

    return why_not


def _codex_why_not() -> str | None:
    if shutil.which("node") is None:
        return "it needs node, and none is here"
    return _missing(lambda: folder_of("@openai/codex") / "installed")()


def _sdk(name: str, kind: Kind, agent: str, *, is_apart: bool = False) -> Client:
    python = str(python_path()) if is_apart else sys.executable
    installed = python_path().parent.parent / "installed"
    return Client(
        name=name,
        kind=kind,
        agent=agent,
        tool='[[tool weather {"city": "Ghent"}]]',
        did_tool="looked up Ghent",
        command=program(name, python),
        why_not=_missing(lambda: installed) if is_apart else lambda: None,
        model="claude-haiku-4-5" if kind == "anthropic" else "gpt-5-mini",
    )


def _agent(
    name: str,
    kind: Kind,
    tool: str,
    command: Callable[[Ask], tuple[list[str], dict[str, str]]],
    why_not: Callable[[], str | None],
) -> Client:
    return Client(
        name=name,
        kind=kind,
        agent=name,
        tool=tool,
        did_tool="made by a tool",
        command=command,
        why_not=why_not,
        model="claude-haiku-4-5" if kind == "anthropic" else "gpt-5-mini",
        is_agent=True,
    )


_SHELL = '"echo made by a tool | tee made.txt"'
CLIENTS = (
    _agent(
        "claude-code",
        "anthropic",
        f'[[tool Bash {{"command": {_SHELL}, "description": "write"}}]]',
        claude_code,
        _missing(_claude_path),
    ),
    _agent("codex", "openai", f'[[tool exec_command {{"cmd": {_SHELL}}}]]', codex, _codex_why_not),
    _agent(
        "opencode",
        "openai",
        f'[[tool bash {{"command": {_SHELL}, "description": "write"}}]]',
        opencode,
        _missing(_opencode_path),
    ),
    _sdk("openai-chat", "openai", "openai-python"),
    _sdk("openai-responses", "openai", "openai-python"),
    _sdk("anthropic", "anthropic", "anthropic-python"),
    _sdk("anthropic-async", "anthropic", "anthropic-python"),
    _sdk("langchain-openai", "openai", "openai-python", is_apart=True),
    _sdk("langchain-anthropic", "anthropic", "langchain", is_apart=True),
)
