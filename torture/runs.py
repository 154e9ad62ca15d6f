"""Runs of a workflow are killed at random moments and resumed, until each of them is done.

A process is killed while it starts, works, drains or ends, with its writer or alone, or it is asked
to end once or twice. Whatever was recorded as done before must be as it was and must not have run
again; whatever has run is booked, as done or as assumed; and the ledger equals what the tasks of
all runs have used. A service that carries runs out is ended as well, and started again. The session
beside it is many processes at once, on one limit.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from budgets.servers import running_valkey
from headgate.budgets.redis import RedisLedger
from headgate.budgets.sqlite import SqliteBudgetTracker
from headgate.core.budgets.ledger import Audit, Ledger
from headgate.core.money import format_usd
from run_commands import EXIT_DONE, EXIT_EXHAUSTED, Commands, Ended
from run_sessions import Session
from service.support import ROOT
from torture.run_audit import (
    Remains,
    RunAudit,
    StepRow,
    ledger_in,
    look_at_ledger,
    marks_in,
    shared_ledger,
    tasks_in,
    when_leases_have_ended,
)
from torture.run_lives import LEFT_ALONE, USUAL_CODES, Life, draw_kind, wait_until_left
from torture.run_service import RunService

UNKNOWN = "-unknown"
BACKENDS = ("local", "sqlite", "redis", "server", f"local{UNKNOWN}", f"redis{UNKNOWN}")
"""Where the ledger is: in each run's own store, in a file for all of them, on a Redis server, or in
the store of a service that carries the runs out. Of the last ones nobody says what steps cost: a
kill while a probe is out books a tenth of the limit, so that some runs end for want of money."""

KILLS_SHARE = 4
"""A process of a run lives for a second or two, so that a quarter of the kills is enough here."""

ITEMS, PERMITS = 12, 4
COSTS = [10_000] * ITEMS + [20_000] * ITEMS + [50_000]
NAMES = [f"{step}-{index}" for step in ("first", "second") for index in range(ITEMS)] + ["last-0"]
SESSION = "tortured"
SCOPE = f"session:{SESSION}/workflow:tortured"
MOST_LIVES = 60
MOST_SAID, MOST_NAMED = 500, 5
PROCESSES, STEPS_EACH, SESSION_USD = 40, 5, "5.00"
STEP_PROGRAM = ROOT / "torture/run_step.py"

WORKFLOW = """
name: tortured
config:
  budget_usd: 1000
  concurrency: {permits}
  defaults: {{timeout: 30}}
steps:
  - id: first
    foreach: {items}
    command: ["{python}", "-IS", "{program}", "first-{{index}}", "{marks}"]
    cost_usd: 0.01
  - id: second
    foreach: {{step: first}}
    command: ["{python}", "-IS", "{program}", "second-{{index}}", "{marks}"]
    stdin: "{{steps.first.output}}"
    cost_usd: 0.02
  - id: last
    command: ["{python}", "-IS", "{program}", "last-0", "{marks}"]
    stdin: "{{steps.second.outputs}}"
    cost_usd: 0.05
"""

UNKNOWN_WORKFLOW = """
name: tortured
config:
  budget_usd: {usd}
  concurrency: {permits}
  prices: {{stand-in: {{input: 1, output: 0}}}}
  defaults: {{timeout: 30}}
steps:
  - id: first
    foreach: {items}
    command: ["{python}", "-IS", "{program}", "first-{{index}}", "{marks}", "10000"]
  - id: second
    foreach: {{step: first}}
    command: ["{python}", "-IS", "{program}", "second-{{index}}", "{marks}", "20000"]
    stdin: "{{steps.first.output}}"
  - id: last
    command: ["{python}", "-IS", "{program}", "last-0", "{marks}", "50000"]
    stdin: "{{steps.second.outputs}}"
"""
KNOWN_USD, OWN_USD, SHARED_USD = 1_000, 3, 30
"""The limit where costs are known, that of each run where they are not, and of all runs."""

SERVICE_WORKFLOW = """
name: tortured
config: {{budget_usd: 1000, concurrency: {permits}, defaults: {{timeout: 30}}}}
steps:
  - id: first
    foreach: {items}
    target: step
    action: work
    params: {{name: "first-{{index}}", marks: "{marks}"}}
    cost_usd: 0.01
  - id: second
    foreach: {{step: first}}
    target: step
    action: work
    params: {{name: "second-{{index}}", marks: "{marks}", first: "{{steps.first.output}}"}}
    cost_usd: 0.02
  - id: last
    target: step
    action: work
    params: {{name: last-0, marks: "{marks}", all: "{{steps.second.outputs}}"}}
    cost_usd: 0.05
"""


@dataclass
class Findings:
    """What was done to runs, and what was found."""

    ends: Counter[str] = field(default_factory=Counter)
    service_ends: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    executions: int = 0
    used_micro_usd: int = 0
    assumed_micro_usd: int = 0
    overrun_micro_usd: int = 0
    nearest_micro_usd: int = 0
    """The most that a limited scope has spent, overrun included."""
    exhausted: int = 0
    remains: Remains = field(default_factory=Remains)
    seconds: float = 0.0

    def is_right(self, kills: int) -> bool:
        """Tell whether every promise was kept, and enough was done to say so."""
        return self.ends.total() >= kills and self.runs > 0 and self.remains.is_right()


class Sandbox:
    """A folder for runs one after the other, with a ledger of one kind."""

    def __init__(
        self, folder: Path, name: str, url: str = "", service: RunService | None = None
    ) -> None:
        backend = name.removesuffix(UNKNOWN)
        self.is_unknown = name.endswith(UNKNOWN)
        unknown_usd = OWN_USD if backend == "local" else SHARED_USD
        self.limit_usd = unknown_usd if self.is_unknown else KNOWN_USD
        # The address of a server may be a secret in part, so a resume is told of it anew.
        named = {"HEADGATE_BUDGET_URL": url} if url else {}
        self.commands = Commands(folder, **named)
        self.service = service
        self._backend = backend
        self._url = url

    def begin(self, marks: Path) -> subprocess.Popen[str]:
        """Start a process that begins a run, whose steps leave their marks in a file."""
        file = self.commands.folder / "tortured.yaml"
        text = WORKFLOW if self.service is None else SERVICE_WORKFLOW
        text = UNKNOWN_WORKFLOW if self.is_unknown else text
        words = {"python": sys.executable, "program": STEP_PROGRAM, "marks": marks}
        words["usd"] = str(self.limit_usd)
        file.write_text(text.format(items=list(range(ITEMS)), permits=PERMITS, **words))
        return self.commands.start_run(str(file), *self._ledger_options())

    def resume(self, run_id: str) -> subprocess.Popen[str]:
        """Start a process that goes on with a run."""
        return self.commands.start_run("--resume", run_id)

    def session(self) -> Session:
        """Return a session on the server of this sandbox."""
        return Session(
            self.commands,
            self._url,
            limit_usd=SESSION_USD,
            processes=PROCESSES,
            steps_each=STEPS_EACH,
        )

    def folder_of(self, run_id: str) -> Path:
        """Return where a run is kept."""
        return self.commands.data / "runs" / run_id

    def tasks_of(self, run_id: str) -> list[StepRow]:
        """Read the tasks of a run from wherever they are kept."""
        if self.service is not None:
            return self.service.tasks_of(run_id, NAMES)
        return tasks_in(self.folder_of(run_id))

    def troubled(self) -> AbstractContextManager[None]:
        """Have the service be in trouble at some moment of the block, if there is one."""
        return nullcontext() if self.service is None else self.service.troubled()

    def service_ends(self) -> Counter[str]:
        """Return how often the service was ended in each way, if there is one."""
        return Counter() if self.service is None else self.service.ends

    def look_at_ledger_of(self, run_id: str, used_micro_usd: int, findings: Findings) -> None:
        """Compare the ledger that a run keeps itself with what its tasks have used."""
        if self._backend == "local":
            audit = ledger_in(self.folder_of(run_id))
            self._look_at(audit, "workflow:tortured", used_micro_usd, findings)

    def look_at_shared_ledger(self, findings: Findings) -> None:
        """Compare the ledger that all runs share with what the tasks of all of them have used."""
        used_micro_usd = findings.used_micro_usd
        if self.service is not None:
            self.service.stop()
            findings.remains.strange_ends += self.service.strange_ends
            self._look_at(ledger_in(self.service.data), SCOPE, used_micro_usd, findings)
        elif self._backend != "local":
            audit = asyncio.run(shared_ledger(self._ledger()))
            self._look_at(audit, SCOPE, used_micro_usd, findings)

    def _look_at(self, audit: Audit, scope: str, used: int, findings: Findings) -> None:
        limit = self.limit_usd * 1_000_000
        found = look_at_ledger(findings.remains, audit, scope, used, limit_micro_usd=limit)
        spent = found.spent_micro_usd + found.overrun_micro_usd
        findings.nearest_micro_usd = max(findings.nearest_micro_usd, spent)
        findings.overrun_micro_usd += found.overrun_micro_usd

    def _ledger_options(self) -> tuple[str, ...]:
        if self._backend == "local":
            return ("--budget-tracker", "local")
        session = ("--budget-session-id", SESSION, "--budget-session-limit", "1000")
        if self.service is not None:
            return ("--server", self.service.url, *session)
        return ("--budget-tracker", self._backend, *session)

    def _ledger(self) -> Ledger:
        if self._backend == "redis":
            return RedisLedger(self._url, clock=when_leases_have_ended)
        path = self.commands.data / "budget.db"
        return SqliteBudgetTracker(path, clock=when_leases_have_ended).ledger


@contextmanager
def new_sandbox(backend: str, *, seed: int = 1) -> Iterator[Sandbox]:
    """Give an empty sandbox for runs."""
    with tempfile.TemporaryDirectory(prefix="hg-", ignore_cleanup_errors=True) as name:
        if backend.removesuffix(UNKNOWN) == "redis":
            with running_valkey() as valkey:
                yield Sandbox(Path(name), backend, valkey.url)
        elif backend == "server":
            with _running_service(Path(name) / "service", seed) as service:
                yield Sandbox(Path(name), backend, service=service)
        else:
            yield Sandbox(Path(name), backend)


@contextmanager
def _running_service(folder: Path, seed: int) -> Iterator[RunService]:
    service = RunService(folder, random.Random(seed), permits=PERMITS)
    try:
        service.start()
        yield service
    finally:
        service.kill()


class TorturedRun:
    """One run, whose processes are ended one after the other until it is done."""

    def __init__(self, sandbox: Sandbox, findings: Findings, source: random.Random) -> None:
        self._sandbox = sandbox
        self._findings = findings
        self._random = source
        self._marks = sandbox.commands.folder / f"marks-{findings.runs}"
        self._known = set(sandbox.commands.ids())
        self._service_ends = sandbox.service_ends().total()
        self._run_id: str | None = None
        self._audit: RunAudit | None = None

    def live(self, kind: str) -> bool:
        """Have a process live until it is ended, and return whether the run is done."""
        sandbox, run_id = self._sandbox, self._run_id
        with sandbox.troubled():
            process = sandbox.begin(self._marks) if run_id is None else sandbox.resume(run_id)
            end = Life(process, self._marks, self._random, NAMES[-1]).end(kind)
        if kind != LEFT_ALONE and end.code != EXIT_DONE:
            self._findings.ends[kind] += 1
        _judge(end, kind, self._findings.remains)
        self._look(kind)
        is_exhausted = self._sandbox.is_unknown and end.code == EXIT_EXHAUSTED
        self._findings.exhausted += is_exhausted
        return end.code == EXIT_DONE or is_exhausted

    def look_at_end(self) -> None:
        """Compare the run that is done with its marks, its ledger and what it shows."""
        findings, found = self._findings, self._findings.remains
        findings.runs += 1
        if self._audit is None or self._run_id is None:
            found.unended.append("a run that never began")
            return
        service_ends = self._sandbox.service_ends().total() - self._service_ends
        used, assumed = self._audit.look_at_end(found, service_ends=service_ends)
        self._sandbox.look_at_ledger_of(self._run_id, used, findings)
        _look_at_report(self._sandbox, self._run_id, assumed, found)
        findings.executions += marks_in(self._marks).total()
        findings.used_micro_usd += used
        findings.assumed_micro_usd += assumed

    def _look(self, kind: str) -> None:
        if self._run_id is None:
            # A process that was killed early enough has left no run.
            new = set(self._sandbox.commands.ids()) - self._known
            if not new:
                return
            self._run_id = new.pop()
            tasks = partial(self._sandbox.tasks_of, self._run_id)
            costs = [] if self._sandbox.is_unknown else COSTS
            self._audit = RunAudit(self._run_id, tasks, self._marks, NAMES, costs, permits=PERMITS)
        if not wait_until_left(self._sandbox.folder_of(self._run_id)):
            line = f"{self._run_id} is still held after {kind}"
            self._findings.remains.strange_ends.append(line)
        if self._audit is not None:
            self._audit.look(self._findings.remains)


def torture(sandbox: Sandbox, *, kills: int, seed: int) -> Findings:
    """End and resume one run after the other, and look at what each has left."""
    findings, source, started = Findings(), random.Random(seed), time.monotonic()
    while findings.ends.total() < kills:
        tortured = TorturedRun(sandbox, findings, source)
        for _ in range(MOST_LIVES):
            kind = draw_kind(source) if findings.ends.total() < kills else LEFT_ALONE
            if tortured.live(kind):
                break
        tortured.look_at_end()
        print(f"  {findings.ends.total()} ends, {findings.runs} runs", flush=True)
    findings.service_ends += sandbox.service_ends()
    sandbox.look_at_shared_ledger(findings)
    findings.seconds = time.monotonic() - started
    return findings


def _judge(end: Ended, kind: str, found: Remains) -> None:
    """Have a process end with a code that means something, and without a traceback."""
    has_traceback = "Traceback" in end.stderr and not _came_too_early(end)
    if end.code not in USUAL_CODES or has_traceback:
        found.strange_ends.append(f"{kind}: exit {end.code}: {end.stderr[-MOST_SAID:]}")


def _came_too_early(end: Ended) -> bool:
    """Tell whether Ctrl-C met Python itself, before the command line was there to hear it."""
    return end.stderr.rstrip().endswith("KeyboardInterrupt") and ", in run\n" not in end.stderr


def _look_at_report(sandbox: Sandbox, run_id: str, assumed_micro_usd: int, found: Remains) -> None:
    """Have what is assumed be shown to whoever looks at the run."""
    data = ("--data", str(sandbox.commands.data))
    shown = sandbox.commands.call("runs", "show", run_id, "--json", *data).json
    said = sum(step["assumed_micro_usd"] for step in shown["steps"])
    if said != assumed_micro_usd:
        found.misbooked.append(f"{run_id} shows {said} as assumed and not {assumed_micro_usd}")


def run(options: argparse.Namespace) -> bool:
    """Torture runs with each kind of ledger, then run a session; tell whether all is right."""
    kills = max(1, options.kills // KILLS_SHARE)
    is_right = True
    for backend in options.backend or BACKENDS:
        if backend not in BACKENDS:
            continue
        print(f"\nruns with a {backend} ledger", flush=True)
        with new_sandbox(backend, seed=options.seed) as sandbox:
            found = torture(sandbox, kills=kills, seed=options.seed)
        is_kept = found.is_right(kills)
        is_right &= is_kept
        _report(backend, found, is_kept=is_kept)
    if options.backend is None:
        is_right &= _holds_a_session()
    return is_right


def _report(backend: str, found: Findings, *, is_kept: bool) -> None:
    used, assumed = format_usd(found.used_micro_usd), format_usd(found.assumed_micro_usd)
    print(
        f"\nruns with a {backend} ledger: {'kept' if is_kept else 'BROKEN'} ({found.seconds:.0f} s)"
    )
    print(f"  processes ended             {_counted(found.ends)}")
    if found.service_ends:
        print(f"  the service ended           {_counted(found.service_ends)}")
    print(f"  runs                        {found.runs} of {len(NAMES)} steps")
    print(f"  executions                  {found.executions:,}")
    print(f"  booked                      {used}, of which assumed {assumed}")
    if found.nearest_micro_usd and backend.endswith(UNKNOWN):
        nearest, over = format_usd(found.nearest_micro_usd), format_usd(found.overrun_micro_usd)
        limit = OWN_USD if backend.startswith("local") else SHARED_USD
        print(f"  nearest to the limit        {nearest} of ${limit}.00; overrun in all {over}")
        print(f"  ended for want of money     {found.exhausted}")
    for promise, broken in found.remains.broken().items():
        print(f"  {promise:<27} {len(broken)}")
        for line in broken[:MOST_NAMED]:
            print(f"    {line}")


def _counted(ends: Counter[str]) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(ends.items()))
    return f"{ends.total()} ({kinds})"


def _holds_a_session() -> bool:
    with new_sandbox("redis") as sandbox:
        session = sandbox.session()
        session.run_all()
        faults, spent = session.faults(), format_usd(session.status()["spent_micro_usd"])
    print(f"\na session of ${SESSION_USD}: {'BROKEN' if faults else 'kept'}", end=" ")
    print(f"({session.seconds:.0f} s)")
    print(f"  {PROCESSES} processes with {STEPS_EACH} steps of $0.07 each spent {spent}")
    for line in faults[:MOST_NAMED]:
        print(f"    {line}")
    return not faults
