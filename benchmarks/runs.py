"""`headgate run` end to end: a workflow of no-op steps, beside the engine's own throughput.

The engine is the service of the benchmark of that name, fed in batches over HTTP, in the same run;
the workflow goes through the same engine inside its own process. Both are durable, and both charge
every task to budgets. The rate of a run counts from its begin to its end, as its own report says;
how long the whole command took stands beside it.

Memory is how much more a run of many steps takes than one of few, for each step: by the pages of
its processes, the one that writes included, and by what Python allocates in the first of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine_client import Measured, cpu_seconds
from benchmarks.engine_measures import Sizes, serving, through_batches
from benchmarks.options import Options
from benchmarks.report import Row, table
from service.support import environment, family

STEPS, FEW_STEPS, TURNS = 10_000, 1_000, 3
QUICK_STEPS, QUICK_FEW_STEPS = 300, 100
CONCURRENCY = 1_000
USUAL_CONCURRENCY = 8
LEAST_RATIO = 0.60
MOST_BYTES = 5 * 1_024
SAMPLE_SECONDS = 0.02
KILOBYTE = 1_024

RATES_HEADER = ("", "steps/s", "CPU us/step", "command s", "of engine", "target", "met")
MEMORY_HEADER = ("bytes a step", "growth", "target", "met")

WORKFLOW = """
name: noop
config:
  budget_usd: 900000
  concurrency: {concurrency}
steps:
  - id: noop
    foreach: items.jsonl
    call: benchmarks.noop:noop
    with: {{n: "{{item.n}}"}}
    cost_usd: 0.001
"""


class Ran(NamedTuple):
    """Steps a second, how long the command and the processor took, and the most memory it had."""

    rate: float
    seconds: float
    cpu_seconds: float
    resident_bytes: int


class Place:
    """A folder in which runs are made one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def command(self, steps: int, concurrency: int) -> list[str]:
        """Write a workflow of so many steps, and return the arguments that run it."""
        (self._folder / "noop.yaml").write_text(WORKFLOW.format(concurrency=concurrency))
        lines = (f'{{"n": {number}}}\n' for number in range(steps))
        (self._folder / "items.jsonl").write_text("".join(lines))
        return ["run", "noop.yaml", "--data", str(self._folder / "data"), "--json"]

    def run(self, steps: int, *, concurrency: int = CONCURRENCY) -> Ran:
        """Run a workflow, and look at its processes meanwhile."""
        command = [sys.executable, "-m", "headgate", *self.command(steps, concurrency)]
        printed, told = self._folder / "printed", self._folder / "told"
        began = time.perf_counter()
        with printed.open("w") as out, told.open("w") as err:
            process = subprocess.Popen(
                command, cwd=self._folder, env=environment(), stdout=out, stderr=err
            )
            peak, used = _watched(process)
        seconds = time.perf_counter() - began
        if process.returncode:
            problem = f"a run of {steps} steps ended with {process.returncode}: {told.read_text()}"
            raise RuntimeError(problem)
        report = json.loads(printed.read_text())
        began_at, ended_at = (
            datetime.fromisoformat(report[name]) for name in ("began_at", "ended_at")
        )
        rate = steps / (ended_at - began_at).total_seconds()
        return Ran(rate, seconds, used, peak)

    def traced_bytes(self, steps: int) -> int:
        """Run a workflow with every allocation of Python counted, and return their peak."""
        command = [sys.executable, "-m", "benchmarks.traced", *self.command(steps, CONCURRENCY)]
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stderr.splitlines()[-1])


def run(options: Options) -> bool:
    """Measure rates and memory, print them, and tell whether all targets were met."""
    steps, few = (QUICK_STEPS, QUICK_FEW_STEPS) if options.quick else (STEPS, FEW_STEPS)
    turns = 1 if options.quick else TURNS
    rates, memory = measure_rates(steps, turns), measure_memory(steps, few)
    if options.quick:
        print("  a quick run shows that it works, and judges nothing")
    return options.quick or (rates and memory)


def measure_rates(steps: int, turns: int) -> bool:
    """Run the engine and the workflow in turns; the best turn of each is nearest to its cost."""
    sizes = Sizes(tasks=steps, runs=1, warm_up=steps // 10, starts=0, window_seconds=0.0)
    engine: list[Measured] = []
    runs: list[Ran] = []
    usual: list[Ran] = []
    for _ in range(turns):
        with _folder() as folder, serving(folder) as service:
            engine.append(through_batches(service, sizes))
        with _folder() as folder:
            runs.append(Place(folder).run(steps))
            usual.append(Place(folder).run(steps, concurrency=USUAL_CONCURRENCY))
    best, cpu_us = max(one.done for one in engine), min(one.cpu_us for one in engine)
    is_met = max(runs).rate >= LEAST_RATIO * best
    target = f"{LEAST_RATIO:.2f}"
    rows: list[Row] = [
        ("engine, batches over HTTP", f"{best:,.0f}", f"{cpu_us:.0f}", "", "1.00", "", ""),
        _rate_row(f"a run, concurrency {CONCURRENCY:,}", steps, runs, best, target, _met(is_met)),
        _rate_row(f"a run, concurrency {USUAL_CONCURRENCY}", steps, usual, best, "", ""),
    ]
    table(f"runs: {steps:,} no-op steps from begin to end, on SQLite", RATES_HEADER, rows)
    return is_met


def measure_memory(steps: int, few: int) -> bool:
    """Run few steps and many, and share the difference out."""
    with _folder() as folder:
        place = Place(folder)
        place.run(few)
        resident = place.run(steps).resident_bytes - place.run(few).resident_bytes
        traced = place.traced_bytes(steps) - place.traced_bytes(few)
    growths = {
        "pages of all its processes": resident / (steps - few),
        "allocated by Python": traced / (steps - few),
    }
    target = f"under {MOST_BYTES:,}"
    rows: list[Row] = [
        (name, f"{growth:,.0f}", target, _met(growth < MOST_BYTES))
        for name, growth in growths.items()
    ]
    table(f"runs: memory from {few:,} to {steps:,} steps", MEMORY_HEADER, rows)
    return all(growth < MOST_BYTES for growth in growths.values())


def _rate_row(what: str, steps: int, runs: list[Ran], engine: float, *verdict: str) -> Row:
    """Write the best of some runs; the time of the processor is that of the whole command."""
    best = max(runs)
    cpu_us = min(one.cpu_seconds for one in runs) / steps * 1e6
    figures = (f"{best.rate:,.0f}", f"{cpu_us:.0f}", f"{best.seconds:.2f}")
    return what, *figures, f"{best.rate / engine:.2f}", *verdict


def _met(is_met: object) -> str:
    return "yes" if is_met else "no"


def _watched(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Watch a process until it ends; return the peaks of it and its children, and their time."""
    peaks: dict[int, int] = {}
    times: dict[int, float] = {}
    while process.poll() is None:
        # Whatever is looked at may end at this moment.
        with suppress(OSError):
            for pid in family(process.pid):
                peaks[pid] = _resident_peak(pid) or peaks.get(pid, 0)
                times[pid] = max(cpu_seconds(pid), times.get(pid, 0.0))
        time.sleep(SAMPLE_SECONDS)
    return sum(peaks.values()), sum(times.values())


def _resident_peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    lines = (line.split() for line in status.splitlines())
    return next((int(line[1]) * KILOBYTE for line in lines if line[0] == "VmHWM:"), 0)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hg-") as name:
        yield Path(name)
