"""A short form of `make torture`: services are killed and stopped, and nothing is lost or doubled.

All of it runs side by side: most of the time is spent waiting for leases and deadlines to end.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from service.support import ROOT

KILLS = 4
CHECKS = (
    ("service", "--backend", "sqlite"),
    ("service", "--backend", "postgres"),
    ("nodes", "--backend", "postgres"),
    ("webhooks", "--backend", "sqlite"),
)


def start_torture(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torture", *arguments, "--kills", str(KILLS)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(240)
def test_services_that_are_killed_or_stopped_keep_every_promise() -> None:
    running = {check: start_torture(*check) for check in CHECKS}
    for check, torture in running.items():
        output, _ = torture.communicate(timeout=200)
        assert torture.returncode == 0, f"{check}: {output}"
        assert "broken promises: none" in output
