"""Many `headgate run` processes at once in one session on one server, held to its limit."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from typing import Any

from headgate.core.money import to_micro_usd
from run_commands import EXIT_DONE, EXIT_EXHAUSTED, Commands, Ended, ended, no_process_left

SESSION = "together"
COST_USD = "0.07"
COST_MICRO_USD = to_micro_usd(COST_USD)
MOST_SECONDS = 100.0


class Session:
    """A session with a limit, the processes that ran in it, and what its ledger says."""

    def __init__(
        self, commands: Commands, url: str, *, limit_usd: str, processes: int, steps_each: int
    ) -> None:
        self._commands = commands
        self._url = url
        self._limit_usd = limit_usd
        self._steps_each = steps_each
        self._names = [f"scenario-{number:03}" for number in range(processes)]
        self.limit_micro_usd = to_micro_usd(limit_usd)
        self.runs: dict[str, Ended] = {}
        self.seconds = 0.0

    def run_all(self) -> None:
        """Start all processes at once, and wait for each; one that hangs is a failure."""
        text = (
            "config: {concurrency: 2}\n"
            "steps:\n"
            f"  - {{id: case, foreach: {list(range(self._steps_each))},"
            f' command: ["true"], cost_usd: {COST_USD}}}\n'
        )
        for name in self._names:
            (self._commands.folder / f"{name}.yaml").write_text(text)
        ledger = ("--budget-tracker", "redis", "--budget-redis-url", self._url)
        session = ("--budget-session-id", SESSION, "--budget-session-limit", self._limit_usd)
        began = time.monotonic()
        started = {
            name: self._commands.start_run(f"{name}.yaml", *ledger, *session)
            for name in self._names
        }
        with no_process_left(*started.values()):
            self.runs = {
                name: ended(process, seconds=MOST_SECONDS) for name, process in started.items()
            }
        self.seconds = time.monotonic() - began

    def done(self) -> dict[str, int]:
        """Return how many steps of each process were done, as it says."""
        return {
            name: run.json["steps"][0]["counts"].get("done", 0) for name, run in self.runs.items()
        }

    def status(self) -> Any:
        """Return what the ledger says of the session."""
        return self.budget("status", "--json").json

    def budget(self, command: str, *arguments: str) -> Ended:
        """Ask for the session in the ledger, as anybody would."""
        options = ("--ledger", self._url)
        return self._commands.call("budget", command, "--session", SESSION, *arguments, *options)

    def faults(self) -> list[str]:
        """Hold ends, steps, ledger and journal against each other; return what does not fit."""
        done = self.done()
        found = [
            f"{name} exited with {run.code} and {done[name]} steps: {run.stderr}"
            for name, run in self.runs.items()
            if run.code != (EXIT_DONE if done[name] == self._steps_each else EXIT_EXHAUSTED)
        ]
        # Nobody gives up while there is room, and nobody goes past the limit.
        fitting = min(len(done) * self._steps_each, self.limit_micro_usd // COST_MICRO_USD)
        if sum(done.values()) != fitting:
            found.append(f"{sum(done.values())} steps were done, and {fitting} fit")
        return found + self._faults_of_ledger(done)

    def _faults_of_ledger(self, done: dict[str, int]) -> list[str]:
        status = self.status()
        spent = {child["scope"]: micro(child["spentUsd"]) for child in status["children"]}
        expected = {
            f"session:{SESSION}/workflow:{name}": COST_MICRO_USD * count
            for name, count in done.items()
        }
        found = [
            f"{scope} has {spent.get(scope, 0)} and not {amount}"
            for scope, amount in expected.items()
            if spent.get(scope, 0) != amount
        ]
        told = self.budget("journal", "--limit", "10000", "--json").stdout
        journal = [json.loads(line) for line in told.splitlines()]
        for name, amount in (("spent", sum(expected.values())), ("reserved", 0), ("overrun", 0)):
            journalled = sum(micro(entry[f"{name}Usd"]) for entry in journal)
            kept = micro(status[f"{name}Usd"])
            if not journalled == kept == amount:
                found.append(f"{name}: {kept}, {journalled} in the journal and not {amount}")
        if micro(status["limitUsd"]) != self.limit_micro_usd:
            found.append(f"the limit is {status['limitUsd']}")
        return found


def micro(usd: str) -> int:
    """Return dollars as they are written in whole micro-dollars."""
    return int(Decimal(usd).scaleb(6))
