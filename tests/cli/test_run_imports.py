"""A run loads what its steps need, and nothing of the service around an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import json, sys
from headgate.cli.main import run
code = run(sys.argv[1:])
print(json.dumps({"code": code, "loaded": sorted(sys.modules)}), file=sys.stderr)
"""
NOT_FOR_A_RUN = {
    "headgate.app",
    "headgate.dashboard",
    "headgate.executors.http",
    "headgate.inprocess",
    "headgate.metrics",
    "headgate.providers.quota_apis",
    "headgate.providers.http_client",
    "headgate.telemetry",
    "headgate.webhooks",
    "httpcore2",
    "httptools",
    "httpx2",
    "jinja2",
    "prometheus_client",
    "psycopg",
    "redis",
    "ssrfguard",
}
SETTINGS = '[targets.cat]\nkind = "command"\ncommand = ["cat"]\n'


def loaded_by_run(folder: Path, step: str) -> set[str]:
    """Run a workflow of one step in a process of its own; return the modules that it loaded."""
    if "cat" in step:
        (folder / "headgate.toml").write_text(SETTINGS)
    (folder / "one.yaml").write_text(f"name: one\nsteps:\n  - id: echo\n    {step}\n")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, "run", "one.yaml", "--data", "data"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    report = json.loads(done.stderr.splitlines()[-1])
    assert report["code"] == 0, done.stderr
    return set(report["loaded"])


@pytest.mark.parametrize(
    "step",
    ['command: ["echo", "hi"]', "target: echo\n    action: say", "target: cat\n    action: say"],
)
def test_an_echo_step_loads_no_client_for_http_no_sdk_and_no_dashboard(
    tmp_path: Path, step: str
) -> None:
    assert loaded_by_run(tmp_path, step).isdisjoint(NOT_FOR_A_RUN)


def test_a_step_without_a_target_loads_nothing_of_the_http_api(tmp_path: Path) -> None:
    assert "headgate.api" not in loaded_by_run(tmp_path, 'command: ["echo", "hi"]')
