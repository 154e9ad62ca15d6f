"""A worker for pull targets: claims tasks, runs them, and reports what came of them.

Rule: it runs nothing without a lease. If the service has not answered for as long as the lease
lasts, others may have the tasks by then: what runs is stopped, and the worker comes back as a new
one. What has come to its end before is handed in all the same, and the service judges it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Protocol, TypeVar
from urllib.parse import quote

import msgspec

from headgate.api.schema.workers import (
    BeatBody,
    ClaimBody,
    ClaimedBody,
    CompleteBody,
    FailBody,
    GatewayBody,
    HeartbeatBody,
    ReportBody,
    RunningBody,
    SettledTaskBody,
    UsedBody,
)
from headgate.core.lifecycle import (
    DEADLINE_EXCEEDED,
    NOTHING_USED,
    Cancelled,
    Failed,
    Limited,
    Lost,
    Outcome,
    Succeeded,
    Usage,
    timed_out,
)
from headgate.core.money import format_usd
from headgate.core.retries import Backoff
from headgate.core.task import NO_JSON, ProgressReport, Submission
from headgate.core.task_view import TaskSnapshot
from headgate.errors import (
    NotAllowedError,
    RequestRefusedError,
    ServiceError,
    ServiceLimitError,
    ServiceUnavailableError,
)
from headgate.executors.executor import (
    Executor,
    GatewayAccess,
    WorkOrder,
    shortened,
    taking_reports,
)

Body = TypeVar("Body")

LOG = logging.getLogger("headgate.worker")

WAIT_SECONDS = 20.0
BEATS_PER_LEASE = 3
FIRST_LEASE_SECONDS = 30.0
LEAVE_SECONDS = 5.0
AGAIN_SECONDS = 1.0
TOO_LARGE = 413


class _Run:
    """One attempt, from its start until the service has taken what came of it."""

    def __init__(self, order: WorkOrder, worker_id: str) -> None:
        self.order = order
        self.worker_id = worker_id
        self.has_begun = False
        self.is_working = True
        self.is_stopped = False
        self.is_dropped = False
        self.report: ProgressReport | None = None
        self.task: asyncio.Task[None] | None = None

    def take_report(self, report: ProgressReport) -> None:
        """Say with the next signs of life how far the work is."""
        self.report = report

    def stop(self) -> None:
        """End the work; what came of it is still reported."""
        if self.is_working and not self.is_stopped:
            self.is_stopped = True
            self._cancel()

    def drop(self) -> None:
        """End the work and report nothing: it is not this worker's any more."""
        self.is_dropped = True
        self.stop()

    def abandon(self) -> None:
        """End the work, and its report, at once."""
        if not self.is_dropped or not self.is_working:
            self.is_dropped = self.is_stopped = True
            self._cancel()

    def _cancel(self) -> None:
        # Cancelled before its first step, a task would end without leaving the table of runs.
        if self.has_begun and self.task is not None:
            self.task.cancel()


class Worker:
    """Serves one agent with a number of tasks at once until it is drained."""

    def __init__(
        self,
        connection: ServiceConnection,
        executor: Executor,
        *,
        agent_id: str,
        capacity: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._connection = connection
        self._executor = executor
        self._agent_id = agent_id
        self._capacity = capacity
        self._worker_id: str | None = None
        self._runs: dict[str, _Run] = {}
        self._has_connected = False
        self._has_room = asyncio.Event()
        self._lease_seconds = FIRST_LEASE_SECONDS
        self._lease_until = 0.0
        self._is_draining = asyncio.Event()
        self._is_beat_due = asyncio.Event()
        self._drain_seconds: float | None = None
        self.finished = 0

    def __len__(self) -> int:
        return len(self._runs)

    async def run(self, *, opened: Callable[[], None] = lambda: None) -> None:
        """Work until drained; an answer that no try can change is raised.

        `opened` is called when there is something to run tasks with, before any is taken.
        """
        await self._executor.open()
        opened()
        loop = asyncio.get_running_loop()
        beating = asyncio.create_task(self._beat_for_ever())
        claiming = asyncio.create_task(self._claim_for_ever())
        draining = asyncio.create_task(self._is_draining.wait())
        giving_up: asyncio.TimerHandle | None = None
        try:
            await asyncio.wait((claiming, draining), return_when=asyncio.FIRST_COMPLETED)
            if claiming.done():
                claiming.result()
            await _ended(claiming)
            if self._drain_seconds is not None:
                giving_up = loop.call_later(self._drain_seconds, self._hand_back)
            await self._leave()
        finally:
            if giving_up is not None:
                giving_up.cancel()
            for task in (beating, claiming, draining):
                await _ended(task)
            await self._executor.close()

    def drain(self, seconds: float | None = None) -> None:
        """Take no more tasks, and end when those that run have ended.

        What still runs after so many `seconds` is stopped and handed back. Without, it may take as
        long as it takes.
        """
        self._drain_seconds = seconds
        self._is_draining.set()

    def give_up(self) -> None:
        """End what runs at once; the service gives it to others."""
        self._is_draining.set()
        for run in list(self._runs.values()):
            run.abandon()

    def _hand_back(self) -> None:
        if self._runs:
            LOG.warning("%d tasks still run; they are stopped and handed back", len(self._runs))
            self.give_up()

    async def _claim_for_ever(self) -> None:
        tries = 0
        while True:
            await self._wait_for_room()
            try:
                await self._claim()
                tries = 0
            except ServiceError as error:
                if isinstance(error, RequestRefusedError) and error.code == "stale_worker":
                    self._lose("the service does not know this worker any more")
                    continue
                if not self._may_ask_again(error):
                    raise
                tries += 1
                await self._connection.pause(tries, error)

    def _may_ask_again(self, error: ServiceError) -> bool:
        """Tell whether a claim may be taken later: a token that was good may be so again."""
        was_let_in = isinstance(error, NotAllowedError) and self._has_connected
        return was_let_in or not isinstance(error, RequestRefusedError)

    async def _wait_for_room(self) -> None:
        while len(self._runs) >= self._capacity:
            self._has_room.clear()
            await self._has_room.wait()

    async def _claim(self) -> None:
        sent_at, worker_id = asyncio.get_running_loop().time(), self._worker_id
        ending = sum(run.worker_id != worker_id for run in self._runs.values())
        claimed = await self._connection.claim(
            ClaimBody(
                worker_id=worker_id,
                # What still ends under an earlier lease takes capacity here that nobody else knows.
                capacity=self._capacity - ending,
                # The name comes with the first answer, and signs of life with the name.
                wait_seconds=0.0 if worker_id is None else WAIT_SECONDS,
                running=self._running(worker_id),
            )
        )
        self._connection.is_back()
        if worker_id is not None and worker_id != self._worker_id:
            return  # The lease was lost meanwhile; what was handed out goes to others.
        renewed_at = sent_at + (claimed.waited_seconds or 0.0)
        self._renew(claimed.worker_id, claimed.lease_seconds, renewed_at)
        self._stop_runs(claimed.cancelled, claimed.lost)
        if self._lease_left() <= 0:
            return  # It was held up for as long as the lease; the next claim tells who has what.
        # A service that stops, or for which too many wait, answers at once.
        is_brief = asyncio.get_running_loop().time() - sent_at < AGAIN_SECONDS
        is_early = worker_id is not None and is_brief and _is_empty(claimed)
        has_all = self._start(claimed)
        if self._runs and self._lease_left() < self._lease_seconds * (1 - 1 / BEATS_PER_LEASE):
            # The answer was long under way, and now there is something to lose.
            self._is_beat_due.set()
        if not has_all or is_early:
            await asyncio.sleep(AGAIN_SECONDS)

    def _start(self, claimed: ClaimedBody) -> bool:
        """Run what was handed out; tell whether all of it is under way.

        A task that still ends under an earlier lease is handed out again by the next claim.
        """
        gateway = claimed.gateway or {}
        orders = [
            order_of(task, self._agent_id, gateway.get(task.task_id)) for task in claimed.tasks
        ]
        new = [order for order in orders if order.task_id not in self._runs]
        for order in new:
            run = self._runs[order.task_id] = _Run(order, claimed.worker_id)
            run.task = asyncio.create_task(self._run_order(run))
        return len(new) == len(orders)

    async def _run_order(self, run: _Run) -> None:
        run.has_begun = True
        try:
            outcome = Cancelled(usage=NOTHING_USED) if run.is_stopped else await self._work(run)
            run.is_working = False
            if not run.is_dropped:
                await self._report(run, outcome)
        finally:
            del self._runs[run.order.task_id]
            self._has_room.set()

    async def _work(self, run: _Run) -> Outcome:
        order = run.order
        left, late = self._time_for(order)
        taking_reports.set(run.take_report)
        try:
            async with asyncio.timeout(left):
                return await self._executor.execute(order)
        except TimeoutError:
            return late
        except asyncio.CancelledError:
            return Cancelled()
        except Exception as error:
            LOG.exception("task %s: the executor raised", order.task_id)
            return Failed(error=f"the executor failed: {type(error).__name__}: {error}")

    def _time_for(self, order: WorkOrder) -> tuple[float | None, Failed]:
        """Return how long an order may take, and what it comes to if it takes longer."""
        left = None if order.deadline is None else order.deadline - self._clock()
        seconds = order.attempt_seconds
        if seconds is not None and (left is None or seconds < left):
            return seconds, timed_out(seconds)
        return left, Failed(error=DEADLINE_EXCEEDED, is_cut=True)

    async def _report(self, run: _Run, outcome: Outcome) -> None:
        order = run.order
        body = report_of(outcome, worker_id=run.worker_id, attempt=order.attempt)
        try:
            settled = await self._connection.report(order.task_id, body)
            self.finished += 1
            problem = (
                f": {shortened(outcome.error)}" if isinstance(outcome, Failed | Limited) else ""
            )
            LOG.info("task %s is %s%s", order.task_id, settled.state.value, problem)
        except RequestRefusedError as error:
            if is_stale(error):
                LOG.warning("task %s was given to others, its outcome is void", order.task_id)
            elif isinstance(outcome, Failed):
                LOG.error("task %s: its outcome was refused: %s", order.task_id, error)
            else:
                problem = "its result is too large" if error.status == TOO_LARGE else str(error)
                failed = Failed(error=f"{problem}; the work was done", is_cut=True)
                await self._report(run, failed)

    async def _beat_for_ever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_seconds / BEATS_PER_LEASE):
                    await self._is_beat_due.wait()
            self._is_beat_due.clear()
            worker_id = self._worker_id
            # Who runs nothing has nothing to lose, and its claims are signs enough.
            if worker_id is None or not self._runs:
                continue
            try:
                await self._beat(worker_id)
            except RequestRefusedError as error:
                if error.code == "stale_worker" and worker_id == self._worker_id:
                    self._lose("the service does not know this worker any more")
            except ServiceError as error:
                LOG.debug("no answer to a heartbeat: %s", error)
            if self._worker_id is not None and self._lease_left() <= 0:
                self._lose("the service has not answered for as long as the lease lasts")

    async def _beat(self, worker_id: str) -> None:
        sent_at = asyncio.get_running_loop().time()
        named = self._running(worker_id)
        left = max(0.1, self._lease_until - sent_at)
        try:
            async with asyncio.timeout(left):
                beat = await self._connection.beat(
                    HeartbeatBody(worker_id=worker_id, running=named)
                )
        except TimeoutError:
            raise ServiceUnavailableError("no answer in time", code="no_answer") from None
        if worker_id == self._worker_id:
            self._renew(worker_id, beat.lease_seconds, sent_at)
            self._stop_runs(beat.cancelled, beat.lost)

    async def _leave(self) -> None:
        """Offer no more capacity, let what runs come to its end, and go."""
        await self._offer_nothing()
        while self._runs:
            tasks = [run.task for run in self._runs.values() if run.task is not None]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await self._offer_nothing()

    async def _offer_nothing(self) -> None:
        if self._worker_id is None:
            return
        working = [run for run in self._runs.values() if not run.is_dropped]
        body = ClaimBody(
            worker_id=self._worker_id, capacity=0, running=_named(working, self._worker_id)
        )
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                claimed = await self._connection.claim(body)
        except (ServiceError, TimeoutError) as error:
            LOG.warning(
                "the service was not told of the end, and finds out by the lease: %s", error
            )
            return
        if not working:
            self._worker_id = None
        self._stop_runs(claimed.cancelled, claimed.lost)

    def _running(self, worker_id: str | None) -> tuple[RunningBody, ...]:
        return _named(self._runs.values(), worker_id)

    def _renew(self, worker_id: str, lease_seconds: float, renewed_at: float) -> None:
        if worker_id != self._worker_id:
            LOG.info("connected as %s", worker_id)
        if lease_seconds != self._lease_seconds:
            # The next heartbeat was to come after a part of another lease.
            self._is_beat_due.set()
        self._has_connected = True
        self._worker_id = worker_id
        self._lease_seconds = lease_seconds
        # From when it was sent, and what the service says that it waited: the service counts from
        # later, so its lease is never the shorter.
        self._lease_until = max(self._lease_until, renewed_at + lease_seconds)

    def _lease_left(self) -> float:
        return self._lease_until - asyncio.get_running_loop().time()

    def _stop_runs(self, cancelled: Iterable[str], lost: Iterable[str]) -> None:
        for task_id in cancelled:
            if task_id in self._runs:
                LOG.info("task %s is cancelled", task_id)
                self._runs[task_id].stop()
        for task_id in lost:
            run = self._runs.get(task_id)
            if run is not None and run.is_working:
                LOG.warning("task %s was given to others, and is stopped", task_id)
                run.drop()

    def _lose(self, why: str) -> None:
        LOG.warning("%s; what runs is stopped", why)
        self._worker_id, self._lease_until = None, 0.0
        for run in list(self._runs.values()):
            if run.is_working:
                run.drop()


def _named(runs: Iterable[_Run], worker_id: str | None) -> tuple[RunningBody, ...]:
    own = [run for run in runs if run.worker_id == worker_id]
    return tuple([_running_body(run.order, run.report) for run in own])


def _running_body(order: WorkOrder, report: ProgressReport | None) -> RunningBody:
    progress = None if report is None else ReportBody(fraction=report.fraction, text=report.text)
    return RunningBody(task_id=order.task_id, attempt=order.attempt, progress=progress)


def _is_empty(claimed: ClaimedBody) -> bool:
    return not (claimed.tasks or claimed.cancelled or claimed.lost)


async def _ended(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait((task,))


# The connection of a worker to its service: what it sends, and for how long it tries again.
#
# A worker outlives outages of its service. What is worth asking again is asked for ever, with waits
# that grow and differ; what the service refuses for good is the caller's to judge.

BACKOFF = Backoff(base_seconds=0.5, max_seconds=15.0)
RESPONSE_SECONDS = 10.0
BEAT_SECONDS = 5.0


class RequestSender(Protocol):
    """The one thing that a connection needs of a client."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        response_type: type[Body],
        body: object = None,
        timeout_seconds: float | None = None,
    ) -> Body:
        """Send a request once, and return its answer as this type."""


class ServiceConnection:
    """Asks one service for one agent."""

    def __init__(
        self,
        client: RequestSender,
        agent_id: str,
        *,
        notify: Callable[[str], None],
        draws: random.Random | None = None,
    ) -> None:
        self._client = client
        self._agent = f"/agents/{quote(agent_id, safe='')}"
        self._notify = notify
        self._draws = draws or random.Random()  # noqa: S311
        self._is_away = False

    async def claim(self, body: ClaimBody) -> ClaimedBody:
        """Offer capacity, once."""
        return await self._client.request(
            "POST",
            f"{self._agent}/claim",
            body=body,
            response_type=ClaimedBody,
            timeout_seconds=body.wait_seconds + RESPONSE_SECONDS,
        )

    async def beat(self, body: HeartbeatBody) -> BeatBody:
        """Show that the worker lives, once."""
        return await self._client.request(
            "POST",
            f"{self._agent}/heartbeat",
            body=body,
            response_type=BeatBody,
            timeout_seconds=BEAT_SECONDS,
        )

    async def report(self, task_id: str, body: CompleteBody | FailBody) -> SettledTaskBody:
        """Hand in what came of an attempt, again and again until the service has answered."""
        verb = "complete" if isinstance(body, CompleteBody) else "fail"
        path = f"/tasks/{quote(task_id, safe='')}/{verb}"
        return await self.send_until_answered(
            lambda: self._client.request("POST", path, body=body, response_type=SettledTaskBody)
        )

    async def send_until_answered(self, ask: Callable[[], Awaitable[Body]]) -> Body:
        """Ask until there is an answer, or a refusal that stays one."""
        tries = 0
        while True:
            try:
                answer = await ask()
            except ServiceError as error:
                if not _may_pass(error):
                    raise
                tries += 1
                await self.pause(tries, error)
            else:
                self.is_back()
                return answer

    async def pause(self, tries: int, error: ServiceError) -> None:
        """Wait before the next try, longer each time; the first of a row is told of."""
        if not self._is_away:
            self._is_away = True
            self._notify(f"the service does not answer, and is asked again: {error}")
        await asyncio.sleep(BACKOFF.seconds(tries, draw=self._draws.random()))

    def is_back(self) -> None:
        """Note that the service has answered."""
        if self._is_away:
            self._is_away = False
            self._notify("the service answers again")


def _may_pass(error: ServiceError) -> bool:
    # A token may be let in again, or another one be put in its place.
    return isinstance(error, ServiceUnavailableError | ServiceLimitError | NotAllowedError)


def is_stale(error: RequestRefusedError) -> bool:
    """Tell whether what was asked about is not the worker's any more."""
    return error.code in ("stale_worker", "stale_lease", "not_found", "task_deleted")


# The JSON of the API as executors know it: work orders in, outcomes out.

STOPPED = "the worker was stopped"


def order_of(task: TaskSnapshot, agent_id: str, gateway: GatewayBody | None = None) -> WorkOrder:
    """Return a task as an executor wants it, with what it needs to call models as its own."""
    access = None
    if gateway is not None:
        access = GatewayAccess(
            base_url=gateway.base_url, token=gateway.token, protocols=gateway.protocols
        )
    return WorkOrder(
        task_id=task.task_id,
        attempt=task.attempt,
        project_id=task.project_id,
        agent_id=task.agent_id or agent_id,
        submission=Submission(
            action=task.action,
            tab_id=task.tab_id,
            selector=task.selector,
            ref=task.ref,
            params=_raw(task.params),
            input=_raw(task.input),
            labels=task.labels,
        ),
        deadline=None if task.deadline is None else task.deadline.timestamp(),
        traceparent=task.traceparent,
        slot=task.slot,
        attempt_seconds=task.timeout_seconds,
        gateway=access,
    )


def report_of(outcome: Outcome, *, worker_id: str, attempt: int) -> CompleteBody | FailBody:
    """Return an outcome as the service wants it."""
    match outcome:
        case Succeeded():
            return CompleteBody(
                worker_id=worker_id,
                attempt=attempt,
                result=outcome.result or msgspec.Raw(),
                usage=_used(outcome.usage),
            )
        case Failed():
            return FailBody(
                worker_id=worker_id,
                attempt=attempt,
                error=outcome.error,
                retryable=outcome.is_transient,
                cut_off=outcome.is_cut,
                usage=_used(outcome.usage),
            )
        case Limited():
            return FailBody(
                worker_id=worker_id,
                attempt=attempt,
                error=outcome.error,
                retry_after_seconds=max(0.0, outcome.retry_after_seconds or 0.0),
            )
        case Cancelled():
            return FailBody(
                worker_id=worker_id,
                attempt=attempt,
                error=STOPPED,
                retryable=True,
                cut_off=True,
                usage=_used(outcome.usage),
            )
        case Lost():
            return FailBody(
                worker_id=worker_id,
                attempt=attempt,
                error=outcome.error or STOPPED,
                retryable=True,
                cut_off=outcome.has_started,
                usage=None if outcome.has_started else _used(NOTHING_USED),
            )


def _used(usage: Usage) -> UsedBody:
    micro_usd = usage.micro_usd
    return UsedBody(
        tokens=usage.tokens,
        usd=None if micro_usd is None else format_usd(micro_usd).replace("$", ""),
        model=usage.model,
    )


def _raw(value: object) -> msgspec.Raw:
    return NO_JSON if value is None else msgspec.Raw(msgspec.json.encode(value))
