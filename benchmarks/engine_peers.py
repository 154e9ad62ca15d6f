"""Other task queues, measured in the same run; one that is not there is told and left out."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.options import ROOT
from budgets.servers import running_valkey

NOT_INSTALLED = "not installed"
FAILED = "failed"


class Peer(NamedTuple):
    """One queue on one broker: a Valkey server, or a file under a URL with a place for it."""

    title: str
    module: str
    file_url: str = ""


PEERS = (
    Peer("Dramatiq", "on_dramatiq"),
    Peer("Huey", "on_huey"),
    Peer("Huey on SQLite", "on_huey", "sqlite://{folder}/queue.db"),
    Peer("Huey on SQLite, no fsync", "on_huey", "sqlite://{folder}/queue.db?unsynced"),
    Peer("Taskiq", "on_taskiq"),
    Peer("SAQ", "on_saq"),
    Peer("Celery", "on_celery"),
)


def measure(peer: Peer, python: Path, *, tasks: int, runs: int) -> float | str:
    """Return the tasks a second of the best run, or why there are none."""
    if not python.exists():
        return NOT_INSTALLED
    with _broker(peer) as url:
        command = [str(python), "-m", "benchmarks.peers", peer.module, "--broker", url]
        command += ["--tasks", str(tasks), "--runs", str(runs)]
        # The worker ends with the process that feeds it, which ends by itself.
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in answer.stderr:
        return NOT_INSTALLED
    if answer.returncode != 0:
        print(f"{peer.title}: {answer.stderr.strip().splitlines()[-1:]}")
        return FAILED
    seconds: list[float] = json.loads(answer.stdout.splitlines()[-1])
    return tasks / min(seconds)


@contextmanager
def _broker(peer: Peer) -> Iterator[str]:
    if peer.file_url:
        with tempfile.TemporaryDirectory(prefix="hg-") as folder:
            yield peer.file_url.format(folder=folder)
    else:
        with running_valkey() as valkey:
            yield valkey.url
