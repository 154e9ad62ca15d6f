"""The metrics of a node: what they count, what they are bounded by, what an outage does to them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.asgi_client import answer_of
from headgate.app import Service, build_app, build_service
from headgate.budgets.tracker import LedgerTracker
from headgate.config import load_settings
from headgate.core.budgets.ledger import Unit
from headgate.core.call import CallRecord, CallState
from headgate.core.dispatch_state import Waiting
from headgate.core.estimates import Kind, SilentKind
from headgate.core.gates import GateClosure, RoomPart
from headgate.core.retention import StoreSize
from headgate.core.snapshot import Project
from headgate.core.task import Progress, Task, TaskRecord, TaskStatus, Terms
from headgate.engine.events import EventFeed
from headgate.errors import StoreUnavailableError
from headgate.metrics import (
    MAX_CALL_SERIES,
    MAX_LABELS,
    METRICS,
    Beside,
    CallMetrics,
    Durations,
    Labels,
    ServiceMetrics,
    closure_metric,
    count_metrics,
    oldest_metrics,
    oldest_waits,
    share_metrics,
    silence_metric,
    usage_metrics,
)
from headgate.storage.sql_store import SqlTaskStore
from headgate.storage.store import LaneCount, Totals
from headgate.storage.transaction import Transaction
from headgate.storage.unit_of_work import Counters
from headgate.storage.usage import OTHER, UsageTotal

Samples = dict[tuple[str, str], float]


def samples(text: str) -> Samples:
    """Return the value of every sample, by its name and its labels, in the order of their names."""
    return {
        (sample.name, " ".join(filter(None, sample.labels.values()))): sample.value
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
    for metric in count_metrics(Totals(lanes=counts, submitted=lanes), Labels(), Labels()):
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
    assert max(oldest_waits(waiting, 100.0).values(), default=0.0) == seconds
    child = {"t": Waiting(Task(id="t"), Terms(), 0, 1)}
    assert oldest_waits(child, 100.0) == {}


def test_the_oldest_wait_is_shown_in_all_and_by_project() -> None:
    waits = {f"p{n}": float(n) for n in range(MAX_LABELS + 3)}
    whole, each = oldest_metrics(waits, Labels())
    assert [sample.value for sample in whole.samples] == [MAX_LABELS + 2]
    by_project = {sample.labels["project"]: sample.value for sample in each.samples}
    assert (by_project["p7"], by_project["other"]) == (7.0, MAX_LABELS + 2)
    assert len(by_project) == MAX_LABELS + 1


def by_project(totals: Totals, labels: Labels) -> dict[str, dict[str, float]]:
    """Return the metrics by project, each with its values."""
    return {
        metric.name.removeprefix("headgate_project_"): {
            sample.labels["project"]: sample.value for sample in metric.samples
        }
        for metric in count_metrics(totals, Labels(), labels)
        if metric.name.startswith("headgate_project_")
    }


def test_a_project_shows_its_queue_and_its_waits_over_all_agents() -> None:
    lanes = (
        LaneCount(project_id="p", agent_id="a", queued=2, inflight=1, started=3, wait_ms=1_500),
        LaneCount(project_id="p", agent_id="", queued=5),
        LaneCount(project_id="q", agent_id="a", queued=1, started=1, wait_ms=250),
    )
    found = by_project(Totals(lanes=lanes), Labels())
    assert found["tasks_queued"] == {"p": 7, "q": 1}
    assert found["tasks_inflight"] == {"p": 1, "q": 0}
    assert found["dispatches"] == {"p": 3, "q": 1}
    assert found["dispatch_latency_seconds"] == {"p": 1.5, "q": 0.25}


def test_what_a_project_counted_stays_when_its_lanes_are_forgotten() -> None:
    labels = Labels()
    lane = LaneCount(project_id="p", agent_id="a", completed=3, started=4, wait_ms=2_000)
    before = by_project(Totals(lanes=(lane,)), labels)
    forgotten = msgspec.structs.replace(lane, agent_id="")
    assert by_project(Totals(lanes=(), forgotten=(forgotten,)), labels) == before


def used(totals: list[UsageTotal]) -> tuple[dict[str, float], dict[str, float]]:
    """Return dollars and tokens by their labels."""
    spend, tokens, *_ = (
        {" ".join(sample.labels.values()): sample.value for sample in metric.samples}
        for metric in usage_metrics(totals)
    )
    return spend, tokens


def test_spend_is_told_apart_by_how_it_is_known() -> None:
    total = UsageTotal(
        project_id="p",
        model="m",
        tokens=100,
        assumed_tokens=30,
        micro_usd=5_000_000,
        assumed_micro_usd=1_000_000,
        priced_micro_usd=2_500_000,
    )
    spend, tokens = used([total, UsageTotal(project_id="p", model="", tokens=1)])
    assert {name: value for name, value in spend.items() if value} == {
        "p m reported": 1.5,
        "p m priced": 2.5,
        "p m assumed": 1.0,
    }
    assert tokens == {
        "p m reported": 70,
        "p m assumed": 30,
        "p (none) reported": 1,
        "p (none) assumed": 0,
    }


def test_overruns_are_counted_by_project_and_model() -> None:
    totals = [UsageTotal(project_id="p", model=model, overruns=2) for model in (OTHER, "other")]
    *_, overruns, _ = usage_metrics([*totals, UsageTotal(project_id="p", model="m", overruns=1)])
    found = {tuple(sample.labels.values()): sample.value for sample in overruns.samples}
    assert found == {("p", "other"): 4, ("p", "m"): 1}


def test_work_that_reports_nothing_is_a_gauge_of_one() -> None:
    metric = silence_metric([SilentKind(Kind("p", "review"), Unit.TOKENS)])
    found = {(sample.name, *sample.labels.values()): sample.value for sample in metric.samples}
    assert found == {("headgate_silent_kinds", "p", "review", "tokens"): 1}


def test_tokens_of_models_without_a_price_are_counted() -> None:
    total = UsageTotal(project_id="p", model="house-model", tokens=9, unpriced_tokens=7)
    *_, unpriced = usage_metrics([total, UsageTotal(project_id="p", model="m", tokens=1)])
    found = {(sample.name, *sample.labels.values()): sample.value for sample in unpriced.samples}
    assert found == {("headgate_unpriced_tokens_total", "p", "house-model"): 7}


def test_models_and_projects_beyond_the_bound_are_summed_up() -> None:
    totals = [UsageTotal(project_id=f"p{n}", model="m", tokens=1) for n in range(MAX_LABELS + 5)]
    totals += [UsageTotal(project_id="p0", model=OTHER, tokens=7)]
    totals += [UsageTotal(project_id="p0", model="other", tokens=1)]
    _, tokens = used(totals)
    assert len(tokens) == 2 * (MAX_LABELS + 2)
    assert (tokens["p0 other reported"], tokens["other m reported"]) == (8, 5)


async def test_a_refused_reservation_over_http_counts_as_a_rejection(tmp_path: Path) -> None:
    async with asyncio.timeout(20), running(tmp_path) as service:
        app = build_app(service)
        await app.api.tracker.set_budget("session:s", limit_usd="1", limit_tokens=10)
        for number, body in enumerate(({"usd": 2}, {"tokens": 11}, {"tokens": 12}, {"usd": 1})):
            sent = {"id": f"r{number}", "scope": "session:s/run:r", **body}
            answer = await answer_of(app, "POST", "/budgets/reserve", msgspec.json.encode(sent))
            assert answer.status == (200 if number == 3 else 402)
        found = samples((await answer_of(app, "GET", "/metrics")).body.decode())
        rejections = "headgate_budget_rejections_total"
        assert found[(rejections, "micro_usd session:s")] == 1
        assert found[(rejections, "tokens session:s")] == 2
        assert found[("headgate_budget_reserved_usd", "session:s")] == 1
        assert found[("headgate_budget_limit_tokens", "session:s")] == 10


async def test_budgets_are_shown_at_most_a_second_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_000.0]
    monkeypatch.setattr("headgate.metrics.time.monotonic", lambda: clock[0])
    async with asyncio.timeout(20), running(tmp_path) as service:
        app = build_app(service)
        tracker = app.api.tracker
        for amount in range(1, 6):
            token = await tracker.reserve("session:s", 1, tokens=1)
            await tracker.commit(token, 1, tokens=1)
            clock[0] += 1.0
            found = samples((await answer_of(app, "GET", "/metrics")).body.decode())
            assert found[("headgate_budget_spent_usd", "session:s")] == amount
            assert found[("headgate_budget_spent_tokens", "session:s")] == amount


async def test_spend_goes_on_after_a_restart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'tasks.db'}"

    def use(transaction: Transaction, now: float) -> None:
        counters = Counters(now)
        counters.use(
            ("default", "coder", "large"),
            is_over=True,
            tokens=70,
            micro_usd=1_500_000,
            assumed_tokens=0,
            assumed_micro_usd=0,
        )
        transaction.insert_all(counters.rows())

    for times in (1, 2):
        async with asyncio.timeout(20), running(tmp_path, store__url=url) as service:
            assert isinstance(service.engine.store, SqlTaskStore)
            await service.engine.store.run(use)
            app = build_app(service)
            found = samples((await answer_of(app, "GET", "/metrics")).body.decode())
            assert found[("headgate_spend_usd_total", "reported large default")] == 1.5 * times
            assert found[("headgate_tokens_total", "reported large default")] == 70 * times


def test_what_is_closed_is_counted_by_kind_and_cause() -> None:
    closures = [
        GateClosure(kind="scope", name="a", cause="budget"),
        GateClosure(kind="scope", name="b", cause="budget"),
        GateClosure(kind="slot", name="work", cause="provider"),
        *(
            GateClosure(kind="room", name=RoomPart(project, scope).part.name, cause="budget")
            for project in "xy"
            for scope in "bc"
        ),
    ]
    found = {tuple(one.labels.values()): one.value for one in closure_metric(closures).samples}
    assert found == {("scope", "budget"): 3, ("slot", "provider"): 1}


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


def call(**fields: Any) -> CallRecord:
    """Return a call that has ended well."""
    values: dict[str, Any] = {
        "id": "call-1",
        "project_id": "p",
        "agent_id": "a",
        "model": "m",
        "upstream": "up",
        "state": CallState.DONE,
        "created_at": 100.0,
    }
    return CallRecord(**(values | fields))


def counted(*records: CallRecord, live: Sequence[CallRecord] = ()) -> Samples:
    """Return the samples of calls that are counted."""
    metrics = CallMetrics()
    for record in records:
        metrics(record)
        metrics.count_added(record, 0.0006)
    return {
        (sample.name.removeprefix("headgate_"), " ".join(sample.labels.values())): sample.value
        for metric in metrics.metrics(live)
        for sample in metric.samples
    }


def test_a_call_counts_with_its_outcome_its_tokens_its_cost_and_its_times() -> None:
    found = counted(
        call(
            upstream_model="large",
            started_at=102.0,
            first_byte_at=102.3,
            ended_at=105.0,
            input_tokens=100,
            cached_tokens=80,
            output_tokens=7,
            assumed_tokens=3,
            micro_usd=1_500_000,
        )
    )
    assert found["calls_total", "up large done"] == 1
    assert found["call_tokens_total", "up large input"] == 20
    assert found["call_tokens_total", "up large cached"] == 80
    assert found["call_tokens_total", "up large output"] == 7
    assert found["call_tokens_total", "up large assumed"] == 3
    assert found["call_cost_usd_total", "up large"] == 1.5
    waits = ("call_wait_seconds_bucket", "up large 1.0"), ("call_wait_seconds_sum", "up large")
    assert [found[one] for one in waits] == [0, 2.0]
    assert found["call_first_byte_seconds_bucket", "up large 0.25"] == 0
    assert found["call_first_byte_seconds_bucket", "up large 0.5"] == 1
    assert found["call_added_seconds_bucket", "up large 0.0005"] == 0
    assert found["call_added_seconds_bucket", "up large 0.00075"] == 1


def test_a_call_that_never_started_has_waited_until_its_end() -> None:
    found = counted(call(state=CallState.REFUSED, ended_at=104.0))
    assert found["call_wait_seconds_sum", "up other"] == 4.0
    assert found["call_first_byte_seconds_count", "up other"] == 0
    assert found["calls_total", "up other refused"] == 1


def test_a_model_has_a_label_once_an_upstream_has_answered_for_it() -> None:
    failed = call(state=CallState.FAILED)
    found = counted(failed, call(), failed)
    assert found["calls_total", "up other failed"] == 1
    assert found["calls_total", "up m failed"] == 1
    assert found["calls_total", "up m done"] == 1


def test_models_of_calls_beyond_the_bound_share_a_label() -> None:
    found = counted(*(call(model=f"m{n}") for n in range(MAX_CALL_SERIES + 3)))
    assert found["calls_total", "up other done"] == 3
    assert found["calls_total", "up m99 done"] == 1


def test_figures_that_cannot_be_right_never_count_down() -> None:
    found = counted(call(input_tokens=1, cached_tokens=5, output_tokens=-7))
    assert all(value >= 0 for value in found.values())


def test_calls_that_wait_and_run_are_gauges_by_upstream() -> None:
    waiting, running = call(state=CallState.WAITING), call(state=CallState.RUNNING)
    found = counted(live=(waiting, waiting, running, call(upstream="b", state=CallState.RUNNING)))
    assert found == {
        ("calls_waiting", "up"): 2,
        ("calls_running", "up"): 1,
        ("calls_waiting", "b"): 0,
        ("calls_running", "b"): 1,
        ("project_calls_waiting", "p"): 2,
    }


def test_a_project_has_its_calls_by_outcome_up_to_a_bound_of_projects() -> None:
    refused = call(state=CallState.REFUSED)
    found = counted(refused, refused, call())
    assert found["project_calls_total", "p refused"] == 2
    assert found["project_calls_total", "p done"] == 1
    found = counted(*(call(project_id=f"p{n}") for n in range(MAX_LABELS + 3)))
    assert found["project_calls_total", "other done"] == 3
    waiting = [call(project_id=f"p{n}", state=CallState.WAITING) for n in range(MAX_LABELS + 3)]
    assert counted(live=waiting)["project_calls_waiting", "other"] == 3


async def test_every_metric_of_the_list_is_shown_and_no_other(tmp_path: Path) -> None:
    async def counts() -> dict[str, int]:
        return {"pending": 1, "dead": 0}

    async with asyncio.timeout(20), running(tmp_path) as service:
        tracker: LedgerTracker = service.api.tracker
        service.engine.reaper.size = StoreSize(used_bytes=1, free_bytes=2, max_bytes=3)
        metrics = ServiceMetrics(service.engine, Beside(tracker=tracker, deliveries=counts))
        text = (await metrics.text()).decode()
    found = dict(re.findall(r"^# TYPE (headgate_\w+) (\w+)$", text, re.MULTILINE))
    assert found == {name: info.kind for name, info in METRICS.items()}
