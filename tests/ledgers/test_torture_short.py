"""A short form of `make torture`: processes are killed, and the books stay right."""

from __future__ import annotations

import subprocess
import sys

from doc_pages import ROOT
from ledgers.support import SHARED_BACKENDS

KILLS = 8


def start_torture(backend: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torture", "ledger", "--backend", backend]
    return subprocess.Popen(
        [*command, "--kills", str(KILLS), "--seconds", "1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_processes_that_are_killed_neither_overspend_nor_leak() -> None:
    """The backends are tortured side by side: most of the time they wait for leases to end."""
    running = {backend: start_torture(backend) for backend in SHARED_BACKENDS}
    for backend, torture in running.items():
        output, _ = torture.communicate(timeout=100)
        assert torture.returncode == 0, f"{backend}: {output}"
        assert "broken promises: none" in output
