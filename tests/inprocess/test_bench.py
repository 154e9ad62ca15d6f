"""The benchmark of the scheduler runs to its end, so that it can be run when it is wanted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_quick_run_prints_every_figure_and_goes_without_the_peer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "inprocess", "--quick"]
    command += ["--peers", str(tmp_path / "no-python")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for agents in ("8", "100", "1,000"):
        pattern = rf"^  {agents} agents +[\d,]+ +[\d.]+ +not installed$"
        assert re.search(pattern, done.stdout, re.MULTILINE), done.stdout
        pattern = rf"^  {agents} agents in loops +[\d,]+ +[\d,]+ +[\d.]+$"
        assert re.search(pattern, done.stdout, re.MULTILINE), done.stdout
    for preset in ("latency", "balanced", "throughput"):
        assert (
            len(re.findall(rf" {preset} +[\d.]+ +[\d.]+ +\d+ +[\d,]+$", done.stdout, re.MULTILINE))
            == 3
        )
