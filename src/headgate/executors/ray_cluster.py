"""What runs inside a Ray cluster, and the driver process that stands between it and a service.

The *holder* is a detached actor that owns the work of all attempts, so that neither the end of a
service nor that of its driver ends them: whoever comes next finds an attempt by its id. Ray's own
library may end the process that it is loaded into when the cluster goes away. So a service never
loads it: its driver does, a child process that answers questions in lines of JSON and ends with its
standard input.

Rule: nothing that comes from the cluster is unpickled by the service; outcomes are JSON.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import msgspec
import ray
from ray import exceptions

from headgate.core.lifecycle import (
    DEADLINE_EXCEEDED,
    Cancelled,
    Failed,
    Lost,
    Outcome,
    timed_out,
)
from headgate.core.task import ProgressReport
from headgate.executors.build import build_executor
from headgate.executors.executor import shortened, taking_reports
from headgate.executors.ray import RESOURCE_OPTIONS, Answer, Away, Question, Work, tell

NAMESPACE = "headgate"
OLDER_HOLDERS = ("headgate-attempts",)
HOLDER = "headgate-attempts-2"
"""The number changes with the methods of the holder, which outlives an upgrade of the service.

An older holder keeps what was begun there. It is only asked for outcomes and cancels, which all
have in common.
"""
MAX_HELD = 100_000
"""How many attempts the holder knows at most; the oldest that have ended are forgotten first."""
UNREAD_SECONDS = 24 * 3_600.0
READ_SECONDS = 900.0
"""How long the holder keeps an outcome that nobody has read, and one that somebody has."""
HOLDER_SECONDS = 20.0
REPLACE_SECONDS = 0.5
"""How long a question waits for a holder that answers, and how often a lost one is replaced."""
REPORT_SECONDS = 1.0
"""How often an attempt sends what it reports, at most."""
PLACED_SECONDS = 0.3
"""How long Ray may take to say what is free after it has placed something."""
ROOM_SECONDS = 4.0
"""How long the room is waited for: less than an engine does, which then goes by an older answer."""


# The work itself, on some node of the cluster.


def run_attempt(attempt_id: str, work: bytes, holder: Any) -> bytes:  # noqa: ANN401  a handle of Ray
    """Do the work of one attempt, as a node of the service would."""
    holder.begin.remote(attempt_id)
    try:
        taking_reports.set(ReportSender(attempt_id, holder).take)
        return tell(asyncio.run(_execute(pickle.loads(work))))  # noqa: S301  from the service
    except (KeyboardInterrupt, asyncio.CancelledError):
        # A function that goes on in a thread must not outlive its attempt.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


async def _execute(work: Work) -> Outcome:
    order, seconds = work.order, work.order.attempt_seconds
    left = None if order.deadline is None else order.deadline - time.time()
    timeout = min((one for one in (left, seconds) if one is not None), default=None)
    executor = build_executor(
        work.name,
        work.target,
        environ={**os.environ, **work.environ},
        clock=time.time,
        prices=work.prices,
    )
    await executor.open()
    try:
        async with asyncio.timeout(timeout):
            return await executor.execute(order)
    except TimeoutError:
        if seconds is not None and timeout == seconds:
            return timed_out(seconds)
        return Failed(error=DEADLINE_EXCEEDED, is_cut=True)
    finally:
        await executor.close()


class ReportSender:
    """Sends what an attempt reports to the holder, the latest of each second."""

    def __init__(self, attempt_id: str, holder: Any) -> None:  # noqa: ANN401  a handle of Ray
        self._attempt_id = attempt_id
        self._holder = holder
        self._lock = threading.Lock()
        self._latest: ProgressReport | None = None
        self._is_waiting = False

    def take(self, report: ProgressReport) -> None:
        """Send a report now, or when a second has passed since the last one was sent."""
        with self._lock:
            self._latest = report
            if not self._is_waiting:
                self._send()

    def _send(self) -> None:
        report, self._latest = self._latest, None
        self._is_waiting = report is not None
        if report is not None:
            timer = threading.Timer(REPORT_SECONDS, self._send_later)
            timer.daemon = True
            timer.start()
            self._holder.report.remote(self._attempt_id, report)

    def _send_later(self) -> None:
        with self._lock:
            self._send()


# The holder.

State = Literal["pending", "running", "done"]


class _Held:
    """What the holder knows of one attempt."""

    def __init__(self, target: str, needs: Mapping[str, float]) -> None:
        self.target = target
        self.needs = needs
        self.begun_at = float("inf")
        self.state: State = "pending"
        self.is_cancelled = False
        self.work: Any = None
        self.outcome: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self.forget_at = float("inf")
        self.report: ProgressReport | None = None
        self.report_number = 0


class Holder:
    """Owns the work of attempts, and keeps what came of each until it is old."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        # A holder that replaces a lost one begins beyond the numbers of that.
        self._report_number = time.time_ns()
        self._waiting: set[asyncio.Task[None]] = set()

    async def start(
        self, attempt_id: str, target: str, work: bytes, options: dict[str, Any]
    ) -> None:
        """Start the work of an attempt; one that is known or was given up is left as it is."""
        if attempt_id in self._held:
            return
        self._make_room()
        run = ray.remote(run_attempt).options(name=attempt_id, max_retries=0, **options)
        begun = run.remote(attempt_id, work, ray.get_runtime_context().current_actor)
        # What Ray refuses is not held: it would wait to be placed for ever.
        held = self._held[attempt_id] = _Held(target, needs_in(options))
        held.work = begun
        waiting = asyncio.get_running_loop().create_task(self._wait(held))
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)

    async def begin(self, attempt_id: str) -> None:
        """Note that the work of an attempt has been placed and begins."""
        held = self._held.get(attempt_id)
        if held is not None and held.state == "pending":
            held.state, held.begun_at = "running", time.monotonic()

    async def outcome(self, attempt_id: str) -> bytes | None:
        """Wait for what comes of an attempt; None if it is not known here, now and later."""
        held = self._known(attempt_id)
        outcome = await asyncio.shield(held.outcome)
        held.forget_at = min(held.forget_at, time.monotonic() + READ_SECONDS)
        return outcome

    async def cancel(self, attempt_id: str, *, is_forced: bool) -> None:
        """Ask the work of an attempt to stop, or end the process that does it."""
        held = self._known(attempt_id)
        if not held.outcome.done():
            held.is_cancelled = True
            # What has ended meanwhile cannot be cancelled any more.
            with suppress(exceptions.RayError, ValueError):
                ray.cancel(held.work, force=is_forced)

    async def pending(self) -> list[tuple[dict[str, float], int]]:
        """Return what attempts need that have not been placed yet, and how many need the same.

        What has been placed just now counts as well: Ray takes a moment to say what is free then.
        """
        placed = time.monotonic() - PLACED_SECONDS
        counts = Counter(
            tuple(sorted(held.needs.items()))
            for held in self._held.values()
            if held.state != "done" and held.begun_at > placed
        )
        return [(dict(needs), number) for needs, number in counts.items()]

    async def report(self, attempt_id: str, report: ProgressReport) -> None:
        """Keep the latest report of an attempt while it runs."""
        held = self._held.get(attempt_id)
        if held is not None and held.state != "done":
            self._report_number += 1
            held.report, held.report_number = report, self._report_number

    async def reports(self, target: str, since: int) -> tuple[dict[str, ProgressReport], int]:
        """Return what attempts at a target have reported since a number, and the latest number."""
        if since > self._report_number:
            since = 0
        new = {
            name: held.report
            for name, held in self._held.items()
            if held.report is not None and held.report_number > since and held.target == target
        }
        return new, self._report_number

    def _known(self, attempt_id: str) -> _Held:
        """Return an attempt. One that is not known is given up: its start may still be on the way.

        Whoever asked takes it for lost or stopped, so it must not begin after that.
        """
        held = self._held.get(attempt_id)
        if held is None:
            self._make_room()
            held = self._held[attempt_id] = _Held("", {})
            held.state = "done"
            held.forget_at = time.monotonic() + READ_SECONDS
            held.outcome.set_result(None)
        return held

    async def _wait(self, held: _Held) -> None:
        try:
            outcome = await held.work
        except Exception as error:  # noqa: BLE001  Ray raises what the work raised
            outcome = tell(self._judged(held, error))
        held.state, held.report = "done", None
        held.forget_at = time.monotonic() + UNREAD_SECONDS
        held.outcome.set_result(outcome)

    def _judged(self, held: _Held, error: Exception) -> Outcome:
        has_started = held.state != "pending"
        if held.is_cancelled:
            return Cancelled()
        match error:
            case exceptions.OutOfMemoryError():
                return Failed(error=shortened(f"Ray ended it for want of memory: {error}"))
            case (
                exceptions.WorkerCrashedError()
                | exceptions.NodeDiedError()
                | exceptions.ObjectLostError()
                | exceptions.RayActorError()
                | exceptions.TaskCancelledError()
            ):
                return Lost(has_started=has_started, error=shortened(f"Ray lost it: {error}"))
            case exceptions.RuntimeEnvSetupError():
                return Failed(error=shortened(f"Ray cannot make its runtime_env: {error}"))
            case _:
                return Failed(error=shortened(f"Ray: {type(error).__name__}: {error}"))

    def _make_room(self) -> None:
        now = time.monotonic()
        old = [name for name, held in self._held.items() if held.forget_at <= now]
        for name in old:
            del self._held[name]
        if len(self._held) >= MAX_HELD:
            ended = (name for name, held in self._held.items() if held.state == "done")
            self._held.pop(next(ended, ""), None)


def needs_in(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources among the options of a task."""
    own = {name: options[name] for name in RESOURCE_OPTIONS if name in options}
    return {**own, **options.get("resources", {})}


# The driver: a child process of a service.


class Driver:
    """Answers questions of a service about one cluster."""

    def __init__(self) -> None:
        options = {"name": HOLDER, "get_if_exists": True, "lifetime": "detached"}
        self._holders = ray.remote(Holder).options(num_cpus=0, max_concurrency=100_000, **options)
        self._holder: Any = None
        self._older = [found for name in OLDER_HOLDERS if (found := _older_holder(name))]
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer until the service closes its end."""
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader(limit=1 << 30)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            question = msgspec.json.decode(line, type=Question)
            task = loop.create_task(self._answer(question))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _answer(self, question: Question) -> None:
        away: Away = "unasked"
        seconds = ROOM_SECONDS if question.ask == "room" else HOLDER_SECONDS
        try:
            holder = await self._answering_holder(seconds)
            away = "unanswered"
            # Work takes as long as it takes; all else is quick.
            async with asyncio.timeout(None if question.ask == "outcome" else seconds):
                answer = await self._answered(question, holder)
        except TimeoutError as error:
            problem = f"its actor {HOLDER} did not answer within {seconds:g} s{error}"
            answer = Answer(id=question.id, away=away, problem=shortened(problem))
        except Exception as error:  # noqa: BLE001  whatever Ray raises, somebody waits for an answer
            # What the holder raises is its answer; all else that Ray raises means there is none.
            is_answered = isinstance(error, exceptions.RayTaskError) or _cannot_begin(error)
            if is_answered or not isinstance(error, exceptions.RayError):
                away = ""
            problem = shortened(f"{type(error).__name__}: {error}")
            answer = Answer(id=question.id, away=away, problem=problem)
        write(answer)

    async def _answered(self, question: Question, holder: Any) -> Answer:  # noqa: ANN401  a handle of Ray
        match question.ask:
            case "start":
                work = base64.b64decode(question.work)
                arguments = (question.attempt, question.target, work, question.options)
                await holder.start.remote(*arguments)
                return Answer(id=question.id)
            case "outcome":
                found = await self._asked_of_older(question, "outcome")
                outcome = found or await holder.outcome.remote(question.attempt)
                told = None if outcome is None else outcome.decode()
                return Answer(id=question.id, outcome=told)
            case "cancel":
                forced = {"is_forced": question.is_forced}
                await self._asked_of_older(question, "cancel", **forced)
                await holder.cancel.remote(question.attempt, **forced)
                return Answer(id=question.id)
            case "room":
                pending = await holder.pending.remote()
                reports, seen = await holder.reports.remote(question.target, question.since)
                nodes = await asyncio.to_thread(room_of_nodes)
                cluster = ray.get_runtime_context().gcs_address
                return Answer(
                    id=question.id,
                    nodes=nodes,
                    pending=pending,
                    cluster=cluster,
                    reports=reports,
                    seen=seen,
                )

    async def _asked_of_older(
        self, question: Question, method: Literal["outcome", "cancel"], **arguments: bool
    ) -> bytes | None:
        """Ask what an older version of Headgate has left, where the attempt may be of it."""
        if not question.is_resumed:
            return None
        outcome: bytes | None = None
        for holder in list(self._older):
            try:
                answer = await getattr(holder, method).remote(question.attempt, **arguments)
                outcome = outcome or answer
            except exceptions.ActorDiedError:
                if holder in self._older:
                    self._older.remove(holder)
        return outcome

    async def _answering_holder(self, seconds: float) -> Any:  # noqa: ANN401  a handle of Ray
        """Return a holder that has just answered; one that was lost with its node is replaced.

        A start is sent once, and only to such a holder. So its fate is in doubt only if the holder
        is lost in that moment, and then the work is not started again: it may have begun.
        """
        problem = ""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        # The name may still lead to the lost one, or to nobody any more.
                        holder = self._holder = self._holder or self._holders.remote()
                        await holder.__ray_ready__.remote()
                    except (exceptions.RayActorError, ValueError) as error:
                        self._holder = None
                        if _cannot_begin(error):
                            raise
                        problem = f": {type(error).__name__}: {error}"
                    else:
                        return holder
                    await asyncio.sleep(REPLACE_SECONDS)
        except TimeoutError:
            self._holder = None
            raise TimeoutError(problem) from None


def _older_holder(name: str) -> Any:  # noqa: ANN401  a handle of Ray, None without one
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _cannot_begin(error: Exception) -> bool:
    """Tell whether no holder can live in this cluster: another one would fail as well."""
    return isinstance(error, exceptions.RayActorError) and error.actor_init_failed


def room_of_nodes() -> list[dict[str, dict[str, float]]]:
    """Return what each node of the cluster has, and what of it is free."""
    from ray._private.state import available_resources_per_node  # noqa: PLC0415

    free = available_resources_per_node()
    return [
        {"total": node["Resources"], "free": free.get(node["NodeID"], {})}
        for node in ray.nodes()
        if node["Alive"]
    ]


def write(answer: Answer) -> None:
    """Send a line to the service."""
    line = msgspec.json.encode(answer) + b"\n"
    while line:
        line = line[os.write(_ANSWERS, line) :]


_ANSWERS = 1


def main() -> None:
    """Reach a cluster, say so, and answer."""
    global _ANSWERS  # noqa: PLW0603  Ray prints to standard output, so its place is taken
    _ANSWERS = os.dup(1)
    os.dup2(2, 1)
    try:
        ray.init(address=sys.argv[1], namespace=NAMESPACE, log_to_driver=False)
    except Exception as error:  # noqa: BLE001  whatever Ray raises, the service shows it
        write(Answer(id=0, problem=shortened(f"{type(error).__name__}: {error}")))
        return
    write(Answer(id=0))
    asyncio.run(Driver().run())
    # Ray would take seconds to take its leave.
    os._exit(0)
