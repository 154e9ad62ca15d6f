"""Follows a page as a person does: its blocks in order, in one shell, and nothing else.

What runs until Ctrl-C is started in the background, as in a terminal of its own, and is ended when
the page starts another one of its kind. The ports that pages name may be taken here, so that others
stand for them in what is typed and in what is shown.
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from doc_pages import ROOT, Block, Output, blocks_of
from doc_shells import Shell, saved_files, shell_session
from executors.endpoint import free_port
from walk.installed import Installed, overlay, variables

START_SECONDS = 120.0
PATIENCE_SECONDS = 120.0
LOOK_SECONDS = 0.05
SERVICE_PORT, PROVIDER_PORT = "7420", "7430"
CHECKOUT = ("Makefile", "pyproject.toml", "constraints.txt")

_UNTIL_CTRL_C = re.compile(r"(?:\w+=\S+ )*(?:headgate|make) (up|fake-provider|worker|slot run)\b")
_STARTS_A_SERVICE = re.compile(r"(?:\w+=\S+ )*(?:headgate|make) up\b")
_IN_THE_BACKGROUND = re.compile(r" &( |$)")
_NEEDS_A_TERMINAL = re.compile(r"headgate top\b(?!.*--json)")
_TESTS_ALL = re.compile(r"make test\b")
_ONLY_LOOKS = re.compile(
    r"(show|cat|curl -s [^-]*$|"
    r"headgate (show|slot log|slot list|calls|tasks|why|stats|usage|budget status|webhooks list))\b"
)
_PROMPT = re.compile(r"^\$ (.*)\n", re.MULTILINE)


class WrongTurnError(AssertionError):
    """What a page says to do does not work, or shows something else."""


class Step(NamedTuple):
    """A command of a page, and what the page shows of its output; None if it shows nothing."""

    command: str
    shown: str | None = None


class Walker:
    """One reader of one page, in an empty folder."""

    def __init__(self, folder: Path, shell: Shell, ports: dict[str, str]) -> None:
        self._folder = folder
        self._shell = shell
        self._ports = ports
        self._running: dict[str, str] = {}
        self.started = time.monotonic()
        self.first_answer_seconds: float | None = None
        """When the first answer of a model came through the gateway, from the start of the page."""

    def follow(self, text: str) -> None:
        """Do what a page says, from its beginning to its end."""
        saved = saved_files(text)
        for name, body in saved.items():
            self._write(name, body)
        blocks = [block for block in blocks_of(text) if not block.is_excused]
        typed = [block for block in blocks if block.body not in saved.values()]
        commands = [self._there(step.command) for block in typed for step in steps_of(block)]
        if not any(_STARTS_A_SERVICE.match(command) for command in commands):
            self._start_what_is_assumed(blocks)
        for block in typed:
            for step in steps_of(block):
                self._do(step)
        if any(block.language == "python" for block in typed):
            # Blocks of a page share their names, also with those that it has saved.
            script = [block.body for block in blocks if block.language == "python"]
            self._write("page.py", "\n".join(script))
            self._do(Step("python page.py"))

    def end(self) -> None:
        """End what still runs, as Ctrl-C does."""
        for kind in list(self._running):
            self._end(kind)

    def _start_what_is_assumed(self, blocks: list[Block]) -> None:
        """Start the service that a page takes for granted, with the settings that it has shown."""
        before = itertools.takewhile(lambda block: not steps_of(block), blocks)
        settings = [block.body for block in before if block.language == "toml"]
        if settings:
            self._write("headgate.toml", settings[0])
        self._do(Step("headgate up"))

    def _do(self, step: Step) -> None:
        command = self._there(step.command)
        if _TESTS_ALL.match(command) or _NEEDS_A_TERMINAL.match(command):
            return
        if found := _UNTIL_CTRL_C.match(command):
            self._end(found[1])
            if not _IN_THE_BACKGROUND.search(command):
                self._start(found[1], command)
                return
        shown = step.shown
        ends_at = time.monotonic() + PATIENCE_SECONDS
        while True:
            printed = self._back(self._shell.run(command))
            printed = re.sub(r"[ \t]+$", "", printed, flags=re.MULTILINE)
            is_right = self._shell.code == 0 if shown is None else Output(shown, printed).is_right
            if is_right or time.monotonic() > ends_at or not _ONLY_LOOKS.match(command):
                break
            time.sleep(LOOK_SECONDS)
        if not is_right:
            raise WrongTurnError(self._told(step, printed))
        if self.first_answer_seconds is None and '"choices":' in printed:
            self.first_answer_seconds = time.monotonic() - self.started

    def _start(self, kind: str, command: str) -> None:
        if kind == "fake-provider" and "--port" not in command:
            command += f" --port {self._ports[PROVIDER_PORT]}"
        log = self._folder / f"{kind.replace(' ', '-')}.log"
        # What an earlier one of its kind said is not taken for what this one says.
        log.unlink(missing_ok=True)
        # No job of this shell, which may wait for its own: a terminal of its own.
        started = f"({command} > {shlex.quote(str(log))} 2>&1 & echo $!)"
        pid = self._shell.run(started).strip()
        self._running[kind] = pid
        ends_at = time.monotonic() + START_SECONDS
        while not log.exists() or not log.read_text():
            if time.monotonic() > ends_at:
                raise WrongTurnError(f"$ {command}\nsays nothing in {START_SECONDS:g} seconds")
            time.sleep(LOOK_SECONDS)
        if kind == "up":
            self._wait_for_service(command, log, ends_at)

    def _wait_for_service(self, command: str, log: Path, ends_at: float) -> None:
        while not re.search(r"^(headgate serves|open) http", log.read_text(), re.MULTILINE):
            is_there = self._shell.run(f"kill -0 {self._running['up']} 2> /dev/null && echo yes")
            if not is_there.strip() or time.monotonic() > ends_at:
                raise WrongTurnError(f"$ {command}\n{log.read_text()}")
            time.sleep(LOOK_SECONDS)

    def _end(self, kind: str) -> None:
        pid = self._running.pop(kind, None)
        if pid is not None:
            self._shell.run(f"kill {pid} && while kill -0 {pid} 2> /dev/null; do sleep 0.05; done")

    def _write(self, name: str, body: str) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._there(body))

    def _there(self, text: str) -> str:
        return reduce(lambda done, port: done.replace(*port), self._ports.items(), text)

    def _back(self, text: str) -> str:
        return reduce(lambda done, port: done.replace(port[1], port[0]), self._ports.items(), text)

    def _told(self, step: Step, printed: str) -> str:
        logs = "\n".join(
            f"== {path.name}\n{path.read_text()}" for path in self._folder.glob("*.log")
        )
        wanted = "" if step.shown is None else f"\n-- and not:\n{step.shown}"
        return f"$ {step.command}\n{printed}(exit code {self._shell.code}){wanted}\n{logs}"


def steps_of(block: Block) -> list[Step]:
    """Return the commands of a block; those with a prompt have their output below them."""
    if block.language == "sh":
        return [Step(line) for line in _commands(block.body)]
    if block.language == "shell":
        parts = _PROMPT.split(block.body)
        return [Step(*one) for one in zip(parts[1::2], parts[2::2], strict=True)]
    return []


def _commands(body: str) -> list[str]:
    """Return the lines of a block, each with the lines that belong to it, without comments."""
    commands: list[str] = []
    for line in body.splitlines():
        is_more = bool(commands) and (
            commands[-1].endswith("\\") or line.startswith((" ", "\t")) or _is_open(commands[-1])
        )
        if is_more:
            commands[-1] += f"\n{line}"
        elif line.strip() and not line.startswith("#"):
            commands.append(re.sub(r"\s{2,}#.*$", "", line))
    return commands


def _is_open(command: str) -> bool:
    """Tell whether a quote or a bracket is still open, or a here-document."""
    done = subprocess.run(
        ["bash", "-n"], input=command, capture_output=True, text=True, check=False
    )
    return done.returncode != 0 or "here-document" in done.stderr


@contextmanager
def walking(
    installed: Installed,
    folder: Path,
    *,
    is_checkout: bool = False,
    stand_ins: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Walker]:
    """Give a reader an empty folder, a shell and the installed wheel.

    The folder may be a checkout in which `make` has installed the wheel. `stand_ins` are typed in
    place of what a page names beside the ports.
    """
    ports = {shown: str(free_port()) for shown in (SERVICE_PORT, PROVIDER_PORT)}
    commands = overlay(installed, folder / "venv")
    home, place = folder / "home", folder / "here"
    home.mkdir()
    place.mkdir()
    for name in ("docs", "examples", *(CHECKOUT if is_checkout else ())):
        (place / name).symlink_to(ROOT / name)
    if is_checkout:
        (place / ".venv").symlink_to(commands.parent)
        (commands.parent / ".installed").touch()
    common = variables(installed.constraints)
    own = {
        "HOME": str(home),
        "PATH": f"{commands}:{_path_of_the_system(common['PATH'])}",
        "COLUMNS": "120",
        "NO_COLOR": "1",
        # In place of the address that everything has by default.
        "HEADGATE_SERVER__PORT": ports[SERVICE_PORT],
        "HEADGATE_URL": f"http://127.0.0.1:{ports[SERVICE_PORT]}",
    }
    with ExitStack() as stack:
        shell = stack.enter_context(shell_session(place, {**common, **own, **(environ or {})}))
        walker = Walker(place, shell, {**ports, **(stand_ins or {})})
        yield walker
        walker.end()


def _path_of_the_system(path: str) -> str:
    """Leave out the environment of the tests: nothing of it is there for a user."""
    return ":".join(part for part in path.split(":") if not part.startswith(str(ROOT)))
