"""Commands of pages in one real shell, so that they share variables and a folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from doc_pages import ROOT, blocks_of

END_SECONDS = 30.0
_END = "end of command "
_EACH_COMMAND = """
_code=0
while IFS= read -r -d "" _command <&$0; do (exit $_code); eval "$_command"; done
"""


class Shell:
    """One shell in which the commands of a page run, so that they share variables."""

    def __init__(self, input_: IO[str], output: IO[str]) -> None:
        self._input = input_
        self._output = output
        self.code = 0
        """The exit code of the latest command."""

    def run(self, command: str) -> str:
        """Run a command, and return what it prints; its exit code is kept for the next one."""
        self._input.write(f"{command}\n_code=$?; echo; echo {_END}$_code\0")
        self._input.flush()
        lines: list[str] = []
        while not (line := self._output.readline()).startswith(_END):
            assert line, f"the shell has ended in: {command}"
            lines.append(line)
        self.code = int(line.removeprefix(_END))
        return "".join(lines).removesuffix("\n")


@contextmanager
def shell_in(folder: Path, **environ: str) -> Iterator[Shell]:
    """Start a shell in a folder that has the documentation in it."""
    for name in ("docs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    commands = Path(sys.executable).parent
    own = {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "XDG_DATA_HOME": str(folder / "nothing"),
    }
    with shell_session(folder, {**os.environ, **own, **environ}) as shell:
        yield shell


@contextmanager
def shell_session(folder: Path, environ: dict[str, str]) -> Iterator[Shell]:
    """Start a shell in a folder with these variables, and end it.

    What it runs finds nothing on its standard input, as little as from somebody who types nothing.
    """
    reading, writing = os.pipe()
    process = subprocess.Popen(
        ["bash", "-c", _EACH_COMMAND, str(reading)],
        cwd=folder,
        env=environ,
        pass_fds=[reading],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    os.close(reading)
    assert process.stdout is not None
    try:
        with os.fdopen(writing, "w") as commands:
            yield Shell(commands, process.stdout)
        process.wait(END_SECONDS)
    finally:
        # Whatever is left of it, and of what it has started, after a command that hangs too.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def commands_of(page: Path) -> list[tuple[str, str]]:
    """Return each command of a page with the output that it shows."""
    bodies = [block.body for block in blocks_of(page.read_text()) if block.language == "shell"]
    found: list[tuple[str, str]] = []
    for body in bodies:
        parts = re.split(r"^\$ (.*)\n", body, flags=re.MULTILINE)
        found += zip(parts[1::2], parts[2::2], strict=True)
    return found


def saved_files(text: str) -> dict[str, str]:
    """Return the files that a page has saved, by name: blocks after a line that names one."""
    named = re.finditer(
        r"^(?:.* )?[Ss]ave this as `(?P<name>\S+)`:\n\n```\w+\n(?P<body>.*?)^```$",
        text,
        re.MULTILINE | re.DOTALL,
    )
    return {match["name"]: match["body"] for match in named}
