"""Workers of a simulated service: they crash, stand still, leave, and come back.

They are the real ones, on a line that reaches any node that is up, and loses answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import TypeVar, cast
from urllib.parse import unquote

from headgate.api.schema.workers import (
    BeatBody,
    ClaimBody,
    ClaimedBody,
    CompleteBody,
    FailBody,
    HeartbeatBody,
    SettledTaskBody,
    UsedBody,
)
from headgate.client.worker import ServiceConnection, Worker
from headgate.core.lifecycle import Failed, Limited, Outcome, Succeeded, Usage
from headgate.core.money import to_micro_usd
from headgate.core.task_view import snapshot_of
from headgate.engine.engine import Engine
from headgate.engine.workers import Claim, Report
from headgate.errors import (
    RequestRefusedError,
    ServiceUnavailableError,
    StaleWorkerError,
    StoreError,
)
from headgate.executors.executor import Executor
from headgate.storage.store import StaleLease
from headgate.testing import Host, HostCrashedError, SimulatedLoop

Answered = TypeVar("Answered")
PickHost = Callable[[], tuple[Host, Engine] | None]


class SimulatedClient:
    """Asks any node that is up; while it stands still, nothing comes or goes."""

    def __init__(self, random: Random, pick: PickHost, *, lost_rate: float) -> None:
        self._random = random
        self._pick = pick
        self.lost_rate = lost_rate
        self.moves = asyncio.Event()
        self.moves.set()

    async def request(
        self,
        method: str,  # noqa: ARG002
        path: str,
        *,
        response_type: type[Answered],  # noqa: ARG002
        body: object = None,
        timeout_seconds: float | None = None,
    ) -> Answered:
        """Have one request answered, or not."""
        await self.moves.wait()
        found = self._pick()
        if found is None:
            raise _away()
        host, engine = found
        try:
            async with asyncio.timeout(timeout_seconds or 30.0):
                reply = await host.spawn(_answer(engine, path, body))
        except (HostCrashedError, TimeoutError):
            raise _away() from None
        await self.moves.wait()
        if self._random.random() < self.lost_rate:
            raise _away()
        if isinstance(reply, Exception):
            raise reply
        return cast("Answered", reply)


class SimulatedWorker:
    """One machine that serves an agent, again and again."""

    def __init__(
        self,
        loop: SimulatedLoop,
        agent_id: str,
        pick: PickHost,
        make_executor: Callable[[], Executor],
        *,
        lost_rate: float,
        crashes: int,
    ) -> None:
        self.host = Host(loop, f"machine of {agent_id}")
        self.agent_id = agent_id
        self.crashes_left = crashes
        self.worker: Worker | None = None
        self.is_quiet = False
        self._loop = loop
        self._make_executor = make_executor
        self._client = SimulatedClient(loop.random, pick, lost_rate=lost_rate)

    def calm_down(self) -> None:
        """Let nothing go wrong any more."""
        self.is_quiet = True
        self._client.lost_rate = 0.0

    async def keep(self) -> None:
        """Start the worker again and again."""
        draws = self._loop.random
        while True:
            life = self.host.spawn(self._live())
            if self.crashes_left and not self.is_quiet:
                self.crashes_left -= 1
                self.host.crash_after(draws.choice([15, 60, 200, 900]))
            with suppress(HostCrashedError):
                await life
            await asyncio.sleep(draws.choice([0.0, 0.5, 4.0, 14.0]))

    async def stand_still_now_and_then(self) -> None:
        """Hold up everything that comes or goes, also for longer than a lease."""
        draws = self._loop.random
        while not self.is_quiet:
            await asyncio.sleep(draws.uniform(2.0, 40.0))
            if self.is_quiet:
                return
            self._client.moves.clear()
            await asyncio.sleep(draws.choice([1.0, 9.0, 25.0]))
            self._client.moves.set()

    async def _live(self) -> None:
        line = ServiceConnection(
            self._client, self.agent_id, notify=lambda _line: None, draws=self._loop.random
        )
        self.worker = worker = Worker(
            line,
            self._make_executor(),
            agent_id=self.agent_id,
            capacity=2,
            clock=self._loop.clock,
        )
        if self._loop.random.random() < 0.3 and not self.is_quiet:
            self._loop.call_later(self._loop.random.uniform(1, 30), worker.drain)
            if self._loop.random.random() < 0.5:
                self._loop.call_later(self._loop.random.uniform(10, 40), worker.give_up)
        await worker.run()


async def _answer(engine: Engine, path: str, body: object) -> object:
    """Return an answer, also where it is an error: whoever asked may be gone by then."""
    try:
        return await _serve(engine, path, body)
    except StoreError:
        return _away()
    except StaleWorkerError as error:
        return RequestRefusedError(str(error), code="stale_worker", status=410)
    except RequestRefusedError as error:
        return error


async def _serve(engine: Engine, path: str, body: object) -> object:
    _, kind, name, verb = path.split("/")
    workers, name = engine.workers, unquote(name)
    match body:
        case ClaimBody():
            worker_id, orders = await workers.claim(
                Claim(
                    agent_id=name,
                    worker_id=body.worker_id,
                    capacity=body.capacity,
                    running={one.task_id: one.attempt for one in body.running},
                    wait_seconds=body.wait_seconds,
                )
            )
            return ClaimedBody(
                worker_id=worker_id,
                lease_seconds=workers.lease_seconds,
                tasks=tuple([snapshot_of(record) for record in orders.tasks]),
                cancelled=orders.cancelled,
                lost=orders.lost,
                waited_seconds=orders.waited_seconds,
            )
        case HeartbeatBody():
            running = {one.task_id: one.attempt for one in body.running}
            orders = await workers.beat(body.worker_id, name, running)
            return BeatBody(
                lease_seconds=workers.lease_seconds, cancelled=orders.cancelled, lost=orders.lost
            )
        case CompleteBody() | FailBody():
            return await _settled(engine, name, body)
    raise AssertionError(kind, verb)


async def _settled(engine: Engine, task_id: str, body: CompleteBody | FailBody) -> object:
    record = await engine.get(task_id)
    assert record is not None
    report = Report(
        record=record,
        worker_id=body.worker_id,
        attempt=body.attempt,
        outcome=_outcome(body),
    )
    answer = await engine.workers.settle(report)
    if isinstance(answer, StaleLease):
        raise RequestRefusedError("stale", code="stale_lease", status=409)
    return SettledTaskBody(task_id=task_id, state=answer.task.status)


def _outcome(body: CompleteBody | FailBody) -> Outcome:
    usage = _usage(body.usage)
    if isinstance(body, CompleteBody):
        return Succeeded(result=body.result or None, usage=usage)
    if body.retry_after_seconds is not None:
        return Limited(retry_after_seconds=body.retry_after_seconds, error=body.error)
    return Failed(error=body.error, is_transient=body.retryable, usage=usage)


def _usage(used: UsedBody | None) -> Usage:
    if used is None:
        return Usage()
    return Usage(tokens=used.tokens, micro_usd=None if used.usd is None else to_micro_usd(used.usd))


def _away() -> ServiceUnavailableError:
    return ServiceUnavailableError("the service was not reached", code="unreachable")
