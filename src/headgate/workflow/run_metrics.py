"""The metrics of one run for Prometheus: in a file for its textfile collector, or on a port.

All of them come from the report of the run, so that they are the same here and on a service.

Rules: the file is replaced as a whole, so that nobody reads a part of it. The port is on loopback.
What cannot be written once the run goes on is said, and ends nothing. At most `MAX_STEPS` steps
have a label of their own, the rest share `other`, because every label is a time series that
somebody has to keep. A run without metrics does not load this module.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from headgate.core.money import to_usd_float
from headgate.errors import InvalidSettingError
from headgate.workflow.backend import Money
from headgate.workflow.report import RunReport, RunState, StepSummary

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

MAX_STEPS = 200
OTHER = "other"
HOST = "127.0.0.1"
SHOW_SECONDS = 1.0

_ATTEMPTS = "Attempts at the runs of a step."
_TOKENS = "Tokens that the runs of a step have used."
_COST = "Dollars that the runs of a step have cost."
_ASSUMED = "The part of the cost that nobody confirmed."


class RunMetrics(Collector):
    """Shows how a run stands; whatever it cannot write to or open is refused when it is made."""

    def __init__(
        self,
        *,
        file: Path | None,
        port: int | None,
        tell: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.tell = tell
        """Is told why the file cannot be written any more."""
        self._file = file
        self._shown: list[Metric] = []
        self._is_failing = False
        self._registry = CollectorRegistry()
        self._registry.register(self)
        if file is not None:
            self._check(file)
        self._server = None if port is None else self._opened(port)

    @property
    def address(self) -> str | None:
        """Where the metrics can be fetched; None without a port."""
        if self._server is None:
            return None
        return f"http://{HOST}:{self._server.server_port}/metrics"

    def collect(self) -> Iterator[Metric]:
        """Yield what was shown last, as prometheus-client asks for it, in whatever thread."""
        yield from self._shown

    def show(self, report: RunReport) -> None:
        """Have everybody see the run as it stands now."""
        self._shown = list(run_metrics(report, time.time()))
        if self._file is None:
            return
        try:
            _replace(self._file, generate_latest(self._registry))
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                self.tell(f"headgate: {self._file} cannot be written: {error.strerror}")
            self._is_failing = True

    @asynccontextmanager
    async def followed(self, report: Callable[[], RunReport]) -> AsyncIterator[None]:
        """Show how a run stands, again and again while the body runs, and at its end."""
        looking = asyncio.create_task(self._keep_showing(report), name="metrics")
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait((looking,))
            self.show(report())

    def close(self) -> None:
        """Close the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    async def _keep_showing(self, report: Callable[[], RunReport]) -> None:
        while True:
            self.show(report())
            await asyncio.sleep(SHOW_SECONDS)

    def _check(self, file: Path) -> None:
        try:
            if file.is_dir():
                raise IsADirectoryError(0, "Is a directory")
            part = _part_of(file)
            part.touch()
            part.unlink()
        except OSError as error:
            problem = f"{file} cannot be written: {error.strerror}; name a file that can"
            raise InvalidSettingError("--metrics-file", problem) from None

    def _opened(self, port: int) -> WSGIServer:
        try:
            server, _ = start_http_server(port, addr=HOST, registry=self._registry)
        except OSError as error:
            problem = f"{HOST}:{port} cannot be opened: {error.strerror}; name another, or 0"
            raise InvalidSettingError("--metrics-port", problem) from None
        return server


def _part_of(file: Path) -> Path:
    return file.with_name(f".{file.name}.{os.getpid()}.part")


def _replace(file: Path, text: bytes) -> None:
    part = _part_of(file)
    try:
        part.write_bytes(text)
        part.replace(file)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def run_metrics(report: RunReport, now: float) -> Iterator[Metric]:
    """Yield the metrics of a run; each has the name of its workflow as a label."""
    name = report.workflow
    text = "The run."
    yield InfoMetricFamily("headgate_run", text, {"workflow": name, "run": report.run_id})
    state = _gauge("state", "1 for the state that the run is in, 0 for all others.", "state")
    for one in RunState:
        state.add_metric((name, one.value), one is report.state)
    yield state
    yield _single("seconds", "How long processes have carried the run.", name, report.seconds)
    yield _single("began_timestamp_seconds", "When it was begun.", name, report.began_at)
    yield _single("shown_timestamp_seconds", "When this was written or fetched.", name, now)
    text = "1 if something keeps the whole run from going on now."
    yield _single("blocked", text, name, bool(report.trouble))
    yield from _of_steps(name, report.steps)
    yield from _of_budgets(name, report.money)


def _of_steps(workflow: str, steps: Sequence[StepSummary]) -> Iterator[Metric]:
    states = _gauge("steps", "Runs of a step, by their state.", "step", "state")
    counts: dict[tuple[str, str], int] = {}
    for at, step in enumerate(steps):
        for state, count in step.counts.items():
            key = (_label(at, step), state)
            counts[key] = counts.get(key, 0) + count
    for key, count in counts.items():
        states.add_metric((workflow, *key), count)
    yield states
    yield _counter("attempts", _ATTEMPTS, workflow, steps, lambda step: step.attempts)
    yield _counter("tokens", _TOKENS, workflow, steps, lambda step: step.tokens)
    yield _counter("cost_usd", _COST, workflow, steps, lambda step: to_usd_float(step.micro_usd))
    yield _counter(
        "assumed_usd", _ASSUMED, workflow, steps, lambda step: to_usd_float(step.assumed_micro_usd)
    )


def _of_budgets(workflow: str, money: Sequence[Money]) -> Iterator[Metric]:
    spent = _gauge("budget_spent_usd", "Dollars that a budget has spent, by all.", "scope")
    reserved = _gauge("budget_reserved_usd", "Dollars that are reserved in it, by all.", "scope")
    limit = _gauge("budget_limit_usd", "Dollars that it may spend, if it is limited.", "scope")
    left = _gauge("budget_remaining_usd", "Dollars that it has left, if it is limited.", "scope")
    for one in money:
        labels = (workflow, one.scope)
        spent.add_metric(labels, to_usd_float(one.spent_micro_usd))
        reserved.add_metric(labels, to_usd_float(one.reserved_micro_usd))
        if one.limit_micro_usd is not None:
            used = one.spent_micro_usd + one.reserved_micro_usd
            limit.add_metric(labels, to_usd_float(one.limit_micro_usd))
            left.add_metric(labels, to_usd_float(max(0, one.limit_micro_usd - used)))
    yield from (spent, reserved, limit, left)


def _label(at: int, step: StepSummary) -> str:
    return step.step if at < MAX_STEPS else OTHER


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"headgate_run_{name}", text, labels=("workflow", *labels))


def _single(name: str, text: str, workflow: str, value: float) -> GaugeMetricFamily:
    gauge = _gauge(name, text)
    gauge.add_metric((workflow,), value)
    return gauge


def _counter(
    name: str,
    text: str,
    workflow: str,
    steps: Sequence[StepSummary],
    value_of: Callable[[StepSummary], float],
) -> CounterMetricFamily:
    counter = CounterMetricFamily(f"headgate_run_{name}", text, labels=("workflow", "step"))
    summed: dict[str, float] = {}
    for at, step in enumerate(steps):
        label = _label(at, step)
        summed[label] = summed.get(label, 0.0) + value_of(step)
    for label, value in summed.items():
        counter.add_metric((workflow, label), value)
    return counter
