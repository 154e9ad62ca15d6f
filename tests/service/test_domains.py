"""Two domains in one database, each a real service: neither waits or pays for the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from budgets.servers import PostgresServer
from service.support import ECHO_TARGET, ServiceProcess, running_service, wait_until

SETTINGS = """
[store]
domain = "{domain}"

[scheduler]
node_lease_seconds = 2.0

[budgets."project:tight"]
limit_tokens = {limit}

[projects.work]

[projects.tight]
"""
TASKS = 20
TOKENS = 100
PATIENCE_SECONDS = 60.0
LOCK = "SELECT 1 FROM {schema}.ledger_balances WHERE scope = '' AND bucket_start = 0 FOR UPDATE"


class Domains(NamedTuple):
    """Two services, and the database that they share."""

    evals: ServiceProcess
    prod: ServiceProcess
    url: str


@pytest.fixture
def domains(tmp_path: Path, postgres: PostgresServer) -> Iterator[Domains]:
    url = postgres.new_database()
    with ExitStack() as stack:
        services = []
        for domain, limit in (("evals", TOKENS - 1), ("prod", TASKS * TOKENS)):
            folder = tmp_path / domain
            folder.mkdir()
            settings = folder / "headgate.toml"
            settings.write_text(SETTINGS.format(domain=domain, limit=limit) + ECHO_TARGET)
            given = ("--store", url, "--config", str(settings))
            services.append(stack.enter_context(running_service(folder, *given)))
        for service in services:
            wait_until(service.is_ready, seconds=PATIENCE_SECONDS, what=service.output)
        yield Domains(services[0], services[1], url)


def submit(service: ServiceProcess, tasks: int = 1, *, project: str = "work") -> list[str]:
    estimate = {"tokens": TOKENS}
    return [service.submit(projectId=project, estimate=estimate) for _ in range(tasks)]


def test_a_domain_dispatches_while_the_lock_of_another_is_kept(domains: Domains) -> None:
    roles = [service.ask("GET", "/readyz").body["role"] for service in domains[:2]]
    assert roles == ["dispatcher", "dispatcher"]
    with psycopg.connect(domains.url) as connection:
        connection.execute(LOCK.format(schema="headgate_evals").encode())
        started = time.monotonic()
        (task_id,) = submit(domains.prod)
        assert domains.prod.wait_for(task_id)["state"] == "done"
        # The other one is given up after ten seconds.
        assert time.monotonic() - started < 8.0
        connection.rollback()
    (task_id,) = submit(domains.evals)
    assert domains.evals.wait_for(task_id)["state"] == "done"


def test_both_domains_survive_a_kill_with_their_own_tasks_and_budgets(domains: Domains) -> None:
    taken = {service: submit(service, TASKS) for service in (domains.evals, domains.prod)}
    for service in taken:
        service.kill()
    for service in taken:
        service.start()
    for service, task_ids in taken.items():
        wait_until(service.is_ready, seconds=PATIENCE_SECONDS, what=service.output)
        for task_id in task_ids:
            assert service.wait_for(task_id, seconds=PATIENCE_SECONDS)["state"] == "done"
    assert domains.prod.ask("GET", f"/tasks/{taken[domains.evals][0]}").status == 404
    tight = [service.wait_for(*submit(service, project="tight"))["state"] for service in taken]
    assert tight == ["rejected", "done"]
