"""The metrics of a node: what they count, what they are bounded by, what an outage does to them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.asgi_client import answer_of
from doc_pages import ROOT, rows_under
from headgate.app import Service, build_app, build_service
from headgate.budgets.tracker import LedgerTracker
from headgate.config import load_settings
from headgate.core.dispatch_state import Waiting
from headgate.core.snapshot import Project
from headgate.core.task import Progress, Task, TaskRecord, TaskStatus, Terms
from headgate.engine.events import EventFeed
from headgate.errors import StoreUnavailableError
from headgate.metrics import (
    MAX_LABELS,
    Beside,
    Durations,
    Labels,
    ServiceMetrics,
    count_metrics,
    oldest_wait_seconds,
    share_metrics,
)
from headgate.storage.store import LaneCount, Totals

PAGE = (ROOT / "docs/reference/metrics.md").read_text()
Samples = dict[tuple[str, str], float]


def samples(text: str) -> Samples:
    """Return the value of every sample, by its name and its one label."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@asynccontextmanager
async def running(data: Path, **settings: object) -> AsyncIterator[Service]:
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    loaded = load_settings(None, {}, {"store.url": "memory:", **flags})
    service = build_service(loaded, data=data, environ={})
    await service.engine.start()
    try:
        yield service
    finally:
        await service.engine.stop(drain_seconds=1.0)


async def test_what_happened_is_counted_in_all_and_by_agent(tmp_path: Path) -> None:
    async with asyncio.timeout(20), running(tmp_path) as service:
        app = build_app(service)
        for agent in ("a", "a", 'quoted " \\ agent'):
            body = (
                b'{"agentId": "%b", "action": "x"}'
                % agent.replace("\\", "\\\\").replace('"', '\\"').encode()
            )
            assert (await answer_of(app, "POST", "/tasks", body)).status == 202
        assert app.api.metrics is not None
        found: Samples = {}
        while found.get(("headgate_tasks_completed_total", "")) != 3:
            await asyncio.sleep(0.02)
            app.api.metrics._read_at = float("-inf")
            answer = await answer_of(app, "GET", "/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            found = samples(answer.body.decode())
        assert found[("headgate_tasks_submitted_total", "")] == 3
        assert found[("headgate_agent_tasks_submitted_total", "a")] == 2
        assert found[("headgate_agent_tasks_completed_total", 'quoted " \\ agent')] == 1
        assert found[("headgate_dispatches_total", "")] == 3
        assert found[("headgate_task_run_seconds_count", "")] == 3
        assert found[("headgate_task_wait_seconds_bucket", "+Inf")] == 3
        assert found[("headgate_store_up", "")] == found[("headgate_ledger_up", "")] == 1
        assert found[("headgate_dispatcher", "")] == found[("headgate_ready", "")] == 1
        assert found[("headgate_project_share_target", "default")] == 1
        assert found[("headgate_budget_reserved_usd", "(root)")] == 0
        assert found[("headgate_webhooks", "pending")] == 0
        assert found[("process_resident_memory_bytes", "")] > 0


class Unreachable:
    """A store, a ledger and a count of webhooks that are away or hang."""

    async def totals(self) -> Totals:
        raise StoreUnavailableError("gone")

    async def hang(self) -> dict[str, int]:
        await asyncio.Event().wait()
        return {}


async def test_while_the_store_is_away_the_last_counts_are_shown_and_the_outage_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.metrics.READ_SECONDS", 0.05)
    monkeypatch.setattr("headgate.metrics.FRESH_SECONDS", 0.0)
    async with asyncio.timeout(20), running(tmp_path) as service:
        metrics = ServiceMetrics(service.engine, Beside(deliveries=Unreachable().hang))
        before = samples((await metrics.text()).decode())
        assert before[("headgate_store_up", "")] == 1
        monkeypatch.setattr(service.engine.store, "totals", Unreachable().totals)
        after = samples((await metrics.text()).decode())
        assert after[("headgate_store_up", "")] == 0
        assert ("headgate_tasks_submitted_total", "") in after


async def test_fetches_that_come_together_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(20), running(tmp_path) as service:
        metrics, reads = ServiceMetrics(service.engine, Beside()), []
        totals = service.engine.store.totals

        async def counted() -> Totals:
            reads.append(1)
            return await totals()

        monkeypatch.setattr(service.engine.store, "totals", counted)
        texts = await asyncio.gather(*(metrics.text() for _ in range(5)))
        assert (len(reads), len(texts)) == (1, 5)


def families(lanes: int) -> Iterator[tuple[str, set[str]]]:
    counts = tuple(
        LaneCount(project_id="p", agent_id=f"a{n}", submitted=1, started=n) for n in range(lanes)
    )
    for metric in count_metrics(Totals(lanes=counts, submitted=lanes), Labels()):
        yield metric.name, {sample.labels.get("agent", "") for sample in metric.samples}


def test_agents_beyond_the_bound_share_a_label() -> None:
    by_name = dict(families(MAX_LABELS + 100))
    agents = by_name["headgate_agent_tasks_submitted"]
    assert len(agents) == MAX_LABELS + 1
    assert "other" in agents
    assert "a299" in agents


def test_an_agent_keeps_its_label_while_it_is_there() -> None:
    labels = Labels()
    first = [f"a{n}" for n in range(MAX_LABELS)]
    labels.shared_out(first)
    shared = labels.shared_out(["busier", *first])
    assert (shared["busier"], shared["a0"]) == ("other", "a0")
    assert labels.shared_out(["busier", *first[1:]])["busier"] == "busier"


def shares(tokens: dict[str, int], **weights: float) -> dict[str, dict[str, float]]:
    projects = [Project(id=name, credit_weight=weight) for name, weight in weights.items()]
    return {
        metric.name.removeprefix("headgate_project_share_"): {
            sample.labels["project"]: sample.value for sample in metric.samples
        }
        for metric in share_metrics(projects, tokens, Labels())
    }


def test_shares_are_those_of_the_budget_manager() -> None:
    found = shares({"x": 10, "y": 30}, x=1.0, y=1.0)
    assert found == {"target": {"x": 0.5, "y": 0.5}, "actual": {"x": 0.25, "y": 0.75}}
    assert shares({}, x=1.0, y=3.0)["actual"] == {"x": 0.0, "y": 0.0}


OLDEST = [
    ({}, 0.0),
    ({"created_at": 40.0}, 60.0),
    ({"created_at": 40.0, "not_before": 90.0}, 10.0),
    ({"created_at": 40.0, "not_before": 190.0}, 0.0),
]


@pytest.mark.parametrize(("fields", "seconds"), OLDEST)
def test_the_oldest_wait_counts_from_when_a_task_could_start(
    fields: dict[str, Any], seconds: float
) -> None:
    waiting = {"t": Waiting(Task(id="t", **fields), Terms(), 0, 0)} if fields else {}
    assert oldest_wait_seconds(waiting, 100.0) == seconds
    child = {"t": Waiting(Task(id="t"), Terms(), 0, 1)}
    assert oldest_wait_seconds(child, 100.0) == 0.0


def test_waits_and_runs_are_counted_by_bucket() -> None:
    feed, durations = EventFeed(lambda: 103.0), Durations()
    feed.open(1)
    feed.subscribe(events=durations)
    for status, attempt in (
        (TaskStatus.QUEUED, 0),
        (TaskStatus.RUNNING, 1),
        (TaskStatus.QUEUED, 1),
        (TaskStatus.RUNNING, 2),
        (TaskStatus.DONE, 2),
    ):
        task = Task(id="t", created_at=100.0, status=status)
        progress = Progress(attempt=attempt, started_at=102.0, completed_at=102.2)
        feed.observe([TaskRecord(task=task, progress=progress)])
    wait = {str(s.labels): s.value for s in durations.wait.metric().samples}
    assert (wait["{'le': '1.0'}"], wait["{'le': '5.0'}"]) == (0, 1)
    run = {s.name + str(s.labels): s.value for s in durations.run.metric().samples}
    assert run["headgate_task_run_seconds_bucket{'le': '0.5'}"] == 1
    assert run["headgate_task_run_seconds_count{}"] == 2
    assert run["headgate_task_run_seconds_sum{}"] == pytest.approx(1.2)


async def test_every_metric_is_in_the_reference(tmp_path: Path) -> None:
    async def counts() -> dict[str, int]:
        return {"pending": 1, "dead": 0}

    async with asyncio.timeout(20), running(tmp_path) as service:
        tracker: LedgerTracker = service.api.tracker
        metrics = ServiceMetrics(service.engine, Beside(tracker=tracker, deliveries=counts))
        text = (await metrics.text()).decode()
    found = dict(re.findall(r"^# TYPE (headgate_\w+) (\w+)$", text, re.MULTILINE))
    rows = rows_under(PAGE, "All metrics")
    assert sorted((row[0], row[1]) for row in rows) == sorted(found.items())
    assert all(row[3] for row in rows)
