"""Tables that an earlier version made, with tasks and money in them, under the present version."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import psycopg
import pytest

from budgets.servers import running_postgres
from service.support import ServiceProcess

SCHEMAS = Path(__file__).parent / "schemas"
SETTINGS = """
[projects.evals]
credit_weight = 2.0
budget_limit = 1000000

[budgets."session:eval"]
limit_usd = "5.00"

[targets.echo]
kind = "callable"
entry_point = "headgate.executors.callable:echo"
default = true
"""


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_what_an_earlier_version_stored_goes_on(database: str, tmp_path: Path) -> None:
    script = (SCHEMAS / f"earlier-{database}.sql").read_text()
    (tmp_path / "headgate.toml").write_text(SETTINGS)
    data = tmp_path / "data"
    if database == "sqlite":
        data.mkdir()
        connection = sqlite3.connect(data / "headgate.db")
        connection.executescript(script)
        connection.close()
        goes_on(ServiceProcess(tmp_path, "--data", str(data)))
        return
    with running_postgres() as server:
        with psycopg.connect(server.url, autocommit=True) as connected:
            connected.execute(script.encode())
        goes_on(ServiceProcess(tmp_path, "--data", str(data), "--store", server.url))


def goes_on(service: ServiceProcess) -> None:
    """Start the present version: what ended is there, what waits waits, and the books go on."""
    service.start()
    try:
        tasks = service.ask("GET", "/tasks?limit=100").body["tasks"]
        assert sorted(task["state"] for task in tasks) == ["done", "done", *["queued"] * 3]
        estimate = {"tokens": 100, "usd": "0.10"}
        new = service.submit(projectId="evals", scopes=["session:eval"], estimate=estimate)
        assert service.wait_for(new)["state"] == "done"
        status = service.ask("GET", "/budgets/status?scope=session:eval").body
        assert (status["spentUsd"], status["remainingUsd"]) == ("0.30", "4.70")
        service.stop()
    finally:
        service.kill()
