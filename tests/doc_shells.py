"""Commands of pages in one real shell, so that they share variables and a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from doc_pages import ROOT, blocks_of


class Shell:
    """One shell in which the commands of a page run, so that they share variables."""

    def __init__(self, input_: IO[str], output: IO[str]) -> None:
        self._input = input_
        self._output = output

    def run(self, command: str) -> str:
        """Run a command, and return what it prints; its exit code is kept for the next one."""
        self._input.write(f"{command}\ncode=$?; echo; echo end of command; (exit $code)\n")
        self._input.flush()
        lines = list(iter(self._output.readline, "end of command\n"))
        return "".join(lines).removesuffix("\n")


@contextmanager
def shell_in(folder: Path, **environ: str) -> Iterator[Shell]:
    """Start a shell in a folder that has the documentation in it."""
    for name in ("docs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    commands = Path(sys.executable).parent
    process = subprocess.Popen(
        ["bash"],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "XDG_DATA_HOME": str(folder / "nothing"),
            **environ,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        yield Shell(process.stdin, process.stdout)
        process.stdin.close()


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
        r"^Save this as `(?P<name>\S+)`:\n\n```\w+\n(?P<body>.*?)^```$",
        text,
        re.MULTILINE | re.DOTALL,
    )
    return {match["name"]: match["body"] for match in named}
