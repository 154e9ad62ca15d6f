"""`headgate run` in processes of their own, as people start it, over a folder that outlives them.

No part of a process is replaced. It can be ended in every way in which a process ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from headgate.workflow.run_folder import run_folders
from service.support import environment

RUN_SECONDS = 60.0
EXIT_DONE, EXIT_FAILED, EXIT_BAD_FILE, EXIT_EXHAUSTED, EXIT_INTERRUPTED = 0, 1, 2, 6, 130


class Ended(NamedTuple):
    """A process that has ended: its exit code, and what it printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """What it printed, decoded; it says what it printed if that is no JSON."""
        try:
            return json.loads(self.stdout)
        except ValueError:
            raise AssertionError(f"no JSON but: {self.stdout}\n{self.stderr}") from None


class Commands:
    """Commands over one data directory, started in one folder."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.folder = folder
        self.data = folder / "data"
        self._environ = environ

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command, in a group of its own so that it alone gets a signal."""
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # A ledger that is not named is where this folder's user would have them.
        own = {"PATH": programs, "XDG_DATA_HOME": str(self.folder / "share"), "NO_COLOR": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "headgate", *arguments],
            cwd=self.folder,
            env={**environment(), **own, **self._environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def start_run(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a run that tells of its end as JSON."""
        return self.start("run", *arguments, "--data", str(self.data), "--json")

    def run(self, *arguments: str) -> Ended:
        """Run a workflow to its end."""
        return ended(self.start_run(*arguments))

    def call(self, *arguments: str) -> Ended:
        """Call another command."""
        return ended(self.start(*arguments))

    def ids(self) -> list[str]:
        """Return the ids of the runs that were begun here, oldest first."""
        return [path.name for path in reversed(run_folders(self.data))]


def ended(process: subprocess.Popen[str], *, seconds: float = RUN_SECONDS) -> Ended:
    """Wait for the end of a process; one that hangs is killed, and that is a failure."""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        problem = f"{process.args!r} did not end within {seconds:g} seconds: {stdout}\n{stderr}"
        raise AssertionError(problem) from None
    return Ended(process.returncode, stdout, stderr)


@contextmanager
def no_process_left(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """Kill what still runs when the body ends, however it does."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
