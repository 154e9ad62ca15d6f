"""A short form of `make torture`: runs are killed and resumed, and nothing runs or costs twice."""

from __future__ import annotations

import subprocess
import sys

import pytest

from doc_pages import ROOT

KILLS = 20
"""A quarter of these is done here."""
BACKENDS = ("local", "redis")


@pytest.mark.timeout(200)
def test_runs_that_are_killed_go_on_where_they_were() -> None:
    """Both kinds of books are tortured side by side: much of the time is waiting."""
    command = [sys.executable, "-m", "torture", "runs", "--kills", str(KILLS), "--backend"]
    running = {
        backend: subprocess.Popen(
            [*command, backend],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for backend in BACKENDS
    }
    for backend, torture in running.items():
        output, _ = torture.communicate(timeout=150)
        assert torture.returncode == 0, f"{backend}: {output}"
        assert "broken promises: none" in output
