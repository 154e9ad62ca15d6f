"""A short form of `make torture slots`: some slots, some days and a change of clocks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from service.support import ROOT


@pytest.mark.timeout(300)
def test_no_trigger_of_a_fleet_is_missed_or_doubled_and_memory_does_not_grow() -> None:
    command = [sys.executable, "-m", "torture", "slots", "--slots", "30", "--days", "4"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "missed 0, doubled 0" in done.stdout
