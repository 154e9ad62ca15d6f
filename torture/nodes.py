"""Two nodes on one PostgreSQL: the one that dispatches is killed, or stopped past its leases.

The other must take over within five seconds of a kill. A node that is stopped in the middle of a
transaction keeps its locks until the server takes them back, so that may take longer. It comes
back with attempts that are no longer its own, and what it says of them must change nothing. At the
end the tables are held against what clients were told and what was executed.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from executors.endpoint import free_port, running_endpoint
from headgate.storage.postgres import STORE_TRANSACTION_TIMEOUT_SECONDS
from service.support import ServiceProcess
from torture.service import (
    Findings,
    Sandbox,
    come_to_rest,
    is_ready,
    new_sandbox,
    report,
    until,
)
from torture.service_load import TaskServer, callers, dismiss

NODES = 2
KILLS_PER_FALL = 10
FEWEST_FALLS = 2
MOST_SECONDS = {"killed": 5.0, "stopped": 5.0 + STORE_TRANSACTION_TIMEOUT_SECONDS}
STOPPED_SECONDS = 5.0
BETWEEN_SECONDS = 1.5
# So long that an attempt which was taken back is under way again when its first node returns.
LONGEST_TASK_SECONDS = 5.0
LONG_RATIO = 0.8


@dataclass
class NodeFindings(Findings):
    """What was found, and how long each way of taking over has taken."""

    takeovers: dict[str, list[float]] = field(default_factory=dict)

    def is_right(self, kills: int) -> bool:
        """Tell whether every promise was kept, and enough was done to say so."""
        is_in_time = all(max(each) <= MOST_SECONDS[kind] for kind, each in self.takeovers.items())
        return super().is_right(kills) and is_in_time


class Fleet:
    """The nodes of one system."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.ports = [free_port() for _ in range(NODES)]
        self.nodes = [sandbox.service(port, f"node-{port}") for port in self.ports]

    async def start(self) -> None:
        """Start all nodes, and wait until they do their work."""
        for node in self.nodes:
            node.spawn()
        for port in self.ports:
            await is_ready(port, role=None)

    async def kill_dispatcher(self) -> float:
        """Kill the dispatcher, and start it once another dispatches; return how long that took."""
        port, node = await self._dispatcher()
        node.kill()
        seconds = await self._taken_over(port)
        node.spawn()
        await is_ready(port, role=None)
        return seconds

    async def stop_dispatcher(self) -> float:
        """Stop the dispatcher past its leases and let it go on; return how long nobody was it."""
        port, node = await self._dispatcher()
        node.send(signal.SIGSTOP)
        started = time.monotonic()
        seconds = await self._taken_over(port)
        await asyncio.sleep(max(0.0, STOPPED_SECONDS - (time.monotonic() - started)))
        node.send(signal.SIGCONT)
        await is_ready(port, role="node")
        return seconds

    async def drain_dispatcher(self) -> float:
        """End the dispatcher as an operator does, and start it again; return how long that took."""
        port, node = await self._dispatcher()
        started = time.monotonic()
        await asyncio.to_thread(node.stop)
        seconds = time.monotonic() - started
        node.spawn()
        await is_ready(port, role=None)
        return seconds

    async def drain(self) -> int:
        """Stop all nodes, and return the highest of their exit codes."""
        codes = [await asyncio.to_thread(node.stop) for node in self.nodes]
        return max(codes)

    def kill(self) -> None:
        """Kill all nodes for good."""
        for node in self.nodes:
            node.kill()

    async def _dispatcher(self) -> tuple[int, ServiceProcess]:
        found = asyncio.get_running_loop().create_future()

        async def look_at(port: int) -> None:
            await is_ready(port, role="dispatcher")
            if not found.done():
                found.set_result(port)

        looking = [asyncio.create_task(look_at(port)) for port in self.ports]
        port = await found
        for task in looking:
            task.cancel()
        return port, self.nodes[self.ports.index(port)]

    async def _taken_over(self, fallen: int) -> float:
        started = time.monotonic()

        def dispatches(answer: dict[str, Any]) -> bool:
            return answer.get("status") == "ready" and answer["role"] == "dispatcher"

        others = [port for port in self.ports if port != fallen]
        waiting = [asyncio.create_task(until(port, "/readyz", dispatches, 30.0)) for port in others]
        _, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        return time.monotonic() - started


async def torture_fleet(
    sandbox: Sandbox,
    findings: Findings,
    trouble: Callable[[Fleet, bool], Awaitable[None]],
    *,
    rounds: int,
    seed: int,
) -> None:
    """Make trouble for nodes under load, let them come to rest, and look at what they left.

    The trouble is told whether its number is odd.
    """
    task_server = TaskServer()
    async with running_endpoint(task_server.answer) as endpoint:
        sandbox.write_settings(endpoint.url, rounds=rounds + 1)
        fleet = Fleet(sandbox)
        try:
            await fleet.start()
            clients = callers(fleet.ports, findings.memory, seed)
            await asyncio.sleep(BETWEEN_SECONDS)
            for number in range(rounds):
                findings.memory.round = number
                await trouble(fleet, number % 2 == 1)
                await asyncio.sleep(BETWEEN_SECONDS)
            await dismiss(clients)
            await come_to_rest(fleet.ports)
            findings.exit_code = await fleet.drain()
        finally:
            fleet.kill()
    await findings.look(sandbox, task_server)


async def torture(sandbox: Sandbox, *, falls: int, seed: int) -> NodeFindings:
    """Let dispatchers fall, and look at what is left."""
    findings = NodeFindings()
    findings.memory.longest_seconds = LONGEST_TASK_SECONDS
    findings.memory.long_ratio = LONG_RATIO

    async def fall(fleet: Fleet, is_odd: bool) -> None:  # noqa: FBT001
        kind = "stopped" if is_odd else "killed"
        seconds = await (fleet.stop_dispatcher() if is_odd else fleet.kill_dispatcher())
        findings.takeovers.setdefault(kind, []).append(seconds)
        findings.kills[kind] = findings.kills.get(kind, 0) + 1
        print(f"  the dispatcher was {kind}; another took over after {seconds:.2f} s", flush=True)

    await torture_fleet(sandbox, findings, fall, rounds=falls, seed=seed)
    return findings


def run(options: argparse.Namespace) -> bool:
    """Torture two nodes, print what was found, and tell whether all is right."""
    if options.backend and "postgres" not in options.backend:
        return True
    falls = max(FEWEST_FALLS, options.kills // KILLS_PER_FALL)
    print(f"\n{NODES} nodes on postgres", flush=True)
    with new_sandbox("postgres") as sandbox:
        found = asyncio.run(torture(sandbox, falls=falls, seed=options.seed))
        is_kept = found.is_right(falls)
        if not is_kept:
            sandbox.keep_logs()
    report(f"{NODES} nodes on postgres", found, is_kept=is_kept)
    for kind, times in found.takeovers.items():
        print(f"  taken over after, {kind:<9} {min(times):.2f} to {max(times):.2f} s")
    return is_kept
