"""A short form of `make torture`: processes are killed, and the books stay right."""

from __future__ import annotations

import subprocess
import sys

import pytest

from doc_pages import ROOT
from ledgers.support import SHARED_BACKENDS

KILLS = 10


@pytest.mark.parametrize("backend", SHARED_BACKENDS)
def test_processes_that_are_killed_neither_overspend_nor_leak(backend: str) -> None:
    command = [sys.executable, "-m", "torture", "ledger"]
    options = ["--backend", backend, "--kills", str(KILLS), "--seconds", "1"]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "broken promises: none" in done.stdout
