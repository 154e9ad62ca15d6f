"""The task runner: every attempt on this node, each with its own deadline and cancel handle.

An attempt ends in a settlement, whatever ends it: the executor, the deadline, a cancel, a stop of
the node. Rule: a settlement is offered until the store has answered it. Only a lost lease ends
that, because then the attempt is no longer this node's to settle.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Generic, TypeVar

import structlog

from headgate.core.budgets.ledger import Ledger
from headgate.core.dispatch_state import Timers
from headgate.core.gates import GateClosure
from headgate.core.lifecycle import (
    DEADLINE_EXCEEDED,
    DEFAULT_POLICY,
    NOTHING_USED,
    UNKNOWN_USAGE,
    Cancelled,
    Failed,
    Limited,
    Lost,
    Outcome,
    RetryPolicy,
    Succeeded,
    at_fixed_cost,
    behind,
    closure_after,
    known_usage,
    next_step,
    timed_out,
    without_failure_cost,
)
from headgate.core.retries import Backoff
from headgate.core.task import AttemptReport, ProgressReport, Task, TaskRecord
from headgate.core.task_money import OpenCalls
from headgate.engine.call_registry import Calls
from headgate.engine.external_ledger import mark_dispatched
from headgate.errors import StoreUnavailableError
from headgate.executors.executor import (
    OUT_OF_DESCRIPTORS,
    Executor,
    RemoteExecutor,
    taking_reports,
    work_order_of,
)
from headgate.providers.usage import tells_unknown_usage
from headgate.storage.store import Settled, Settlement, TaskStore

log = structlog.get_logger("headgate.runner")

SETTLE_SECONDS = 10.0
"""How long a node that stops tries to settle what it has stopped."""

MAX_CANCELLED_EARLY = 1_000
MAX_LATE = 1_000
ELSEWHERE_SECONDS = 5.0
UNPAID_SECONDS = 1.0
SHORTAGE_SECONDS = 10.0
"""A shortage of file descriptors is over when nothing met it for so long."""

SETTLE_BACKOFF = Backoff(base_seconds=0.05, max_seconds=2.0)

Key = TypeVar("Key", bound=Hashable)

Changed = Callable[[Iterable[TaskRecord], GateClosure | None], None]
"""Is shown the records that a settlement changed, and the pause that a provider asked for."""

SlotResetsAt = Callable[[str], float | None]
"""Says when the window of a slot resets, where that is known."""


class TaskRunner:
    """Runs attempts through the executors of their targets."""

    def __init__(
        self,
        store: TaskStore,
        executors: Mapping[str, Executor],
        *,
        changed: Changed,
        policy: RetryPolicy = DEFAULT_POLICY,
        draws: random.Random | None = None,
        max_result_bytes: int = 1_048_576,
        free_failures: Collection[str] = (),
        ledger: Ledger | None = None,
        slot_resets_at: SlotResetsAt = lambda _slot: None,
        calls: Calls | None = None,
    ) -> None:
        self._ledger = ledger
        self._calls = calls
        self._store = store
        self._executors = executors
        self._changed = changed
        self._draws = draws or random.Random()  # noqa: S311
        self.settlements = Settlements(
            policy=policy,
            max_result_bytes=max_result_bytes,
            free_failures=free_failures,
            draws=self._draws,
            slot_resets_at=slot_resets_at,
        )
        self._attempts: dict[str, _Attempt] = {}
        self._deadlines: DeadlineWatch[_Attempt] = DeadlineWatch(store.now, self._be_late)
        self._cancelled_early: dict[str, int] = {}
        self._inherited: set[str] = set()
        self._left_behind: set[asyncio.Task[None]] = set()
        self.problem = ""
        """Why outcomes cannot be written now; empty while they can."""

        self.reports: dict[str, AttemptReport] = {}
        """The latest reports of attempts, by task, that the store has yet to be told."""

        self._not_understood: set[str] = set()
        self._out_of_descriptors_at = float("-inf")

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._attempts

    def reconfigure(
        self,
        executors: Mapping[str, Executor],
        *,
        policy: RetryPolicy,
        max_result_bytes: int,
        free_failures: Collection[str] = (),
    ) -> None:
        """Run what starts from now on with these; what runs goes on as it began."""
        self._executors = executors
        self.settlements.policy = policy
        self.settlements.max_result_bytes = max_result_bytes
        self.settlements.free_failures = free_failures

    def under_way_at(self, targets: Collection[str]) -> list[asyncio.Task[None]]:
        """Return the attempts that are under way at some targets."""
        found = [one for one in self._attempts.values() if one.record.task.target in targets]
        return [attempt.task for attempt in found if attempt.task is not None]

    def known(self) -> list[str]:
        """Return the tasks that are under way."""
        return list(self._attempts)

    def reservations(self) -> list[str]:
        """Return what the money of the attempts under way is held under."""
        names = [one.record.progress.reservation_id for one in self._attempts.values()]
        return [name for name in names if name]

    def inherit(self, task_ids: Iterable[str]) -> None:
        """Go on with what another node began, when these are started here."""
        self._inherited.update(task_ids)

    def start(self, record: TaskRecord) -> None:
        """Begin an attempt; one that is under way already goes on."""
        task_id = record.task.id
        known = self._attempts.get(task_id)
        if known is not None and known.record.progress.attempt == record.progress.attempt:
            return
        attempt = self._attempts[task_id] = _Attempt(record)
        if task_id in self._inherited:
            self._inherited.discard(task_id)
            attempt.is_resumed = True
        if self._cancelled_early.pop(task_id, None) == record.progress.attempt:
            attempt.stopped_by = Cancelled(usage=NOTHING_USED)
        attempt.task = asyncio.get_running_loop().create_task(self._run(attempt))
        if record.progress.cancel_requested:
            # Asked for while nobody knew that the attempt was here.
            self.cancel(task_id)

    def cancel(self, task_id: str, *, attempt: int | None = None) -> bool:
        """Stop an attempt because its task was cancelled; False if it is not here.

        One that the store has started, and that this node is yet to hear of, is stopped then.
        """
        known = self._attempts.get(task_id)
        if known is None:
            self._cancel_early(task_id, attempt)
            return False
        usage = UNKNOWN_USAGE if known.has_begun else NOTHING_USED
        self._stop(known, Cancelled(usage=usage))
        return True

    def _cancel_early(self, task_id: str, attempt: int | None) -> None:
        if attempt is None:
            return
        self._cancelled_early[task_id] = attempt
        if len(self._cancelled_early) > MAX_CANCELLED_EARLY:
            del self._cancelled_early[next(iter(self._cancelled_early))]

    def abandon(self) -> None:
        """Stop everything without settling: the leases are lost, and others settle these tasks."""
        for attempt in list(self._attempts.values()):
            self._leave(attempt)
            attempt.is_abandoned = True
            self._stop(attempt, Lost(has_started=attempt.has_begun))
            if attempt.task is not None:
                self._left_behind.add(attempt.task)
                attempt.task.add_done_callback(self._left_behind.discard)
        self._attempts.clear()

    @property
    def has_left_behind(self) -> bool:
        """Whether work that was told to stop goes on all the same."""
        return bool(self._left_behind)

    async def drain(self, seconds: float) -> None:
        """Let what runs come to its end, and stop what takes longer; it is queued again.

        What cannot be settled even then is left to others, who take it back. So is what goes on
        without this node.
        """
        for attempt in list(self._attempts.values()):
            if self._leave(attempt):
                attempt.is_abandoned = True
                self._stop(attempt, Lost(has_started=True))
        await self._wait(seconds)
        ends_at = asyncio.get_running_loop().time() + SETTLE_SECONDS
        while self._attempts and (left := ends_at - asyncio.get_running_loop().time()) > 0:
            for attempt in list(self._attempts.values()):
                self._stop(attempt, Lost(has_started=attempt.has_begun))
            await self._wait(left)
        self.abandon()

    async def leave(self, seconds: float) -> None:
        """Stop everything, and settle nothing: there is no store any more that could be told."""
        self.abandon()
        if self._left_behind:
            await asyncio.wait(list(self._left_behind), timeout=seconds)

    async def _wait(self, seconds: float | None) -> None:
        tasks = [attempt.task for attempt in self._attempts.values() if attempt.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    def _stop(self, attempt: _Attempt, outcome: Outcome) -> None:
        if attempt.stopped_by is not None or attempt.task is None:
            return
        attempt.stopped_by = outcome
        # Cancelled before its first step, a task would end without settling anything.
        if attempt.has_begun:
            attempt.task.cancel()

    def _leave(self, attempt: _Attempt) -> bool:
        """Let the work of an attempt go on elsewhere; False if it is done here."""
        executor = self._executors.get(attempt.record.task.target or "")
        if not isinstance(executor, RemoteExecutor):
            return False
        executor.leave(attempt.record.task.id)
        return True

    def _watch(self, attempt: _Attempt) -> None:
        """Have an attempt stopped at its deadline, or when it has had its own time."""
        deadline, seconds = attempt.record.task.deadline, attempt.record.terms.attempt_seconds
        if seconds is not None:
            over_at = self._store.now() + seconds
            deadline = over_at if deadline is None else min(deadline, over_at)
        self._deadlines.watch(attempt, deadline)

    def _be_late(self, attempt: _Attempt) -> None:
        deadline, seconds = attempt.record.task.deadline, attempt.record.terms.attempt_seconds
        is_over = deadline is not None and deadline <= self._store.now()
        if is_over or seconds is None:
            self._stop(attempt, Failed(error=DEADLINE_EXCEEDED, is_cut=True))
        else:
            self._stop(attempt, timed_out(seconds))

    async def _run(self, attempt: _Attempt) -> None:
        attempt.has_begun = True
        try:
            outcome = await self._outcome(attempt)
            if not attempt.is_abandoned:
                await self._settle(attempt, outcome)
        finally:
            task_id = attempt.record.task.id
            if self._attempts.get(task_id) is attempt:
                del self._attempts[task_id]

    async def _outcome(self, attempt: _Attempt) -> Outcome:
        if attempt.stopped_by is not None:
            return attempt.stopped_by
        self._watch(attempt)
        try:
            if not await self._may_spend(attempt.record):
                return Lost(has_started=False, retry_seconds=UNPAID_SECONDS)
            outcome = await self._execute(attempt.record, is_resumed=attempt.is_resumed)
            return self.settlements.reported(attempt.record, outcome)
        except asyncio.CancelledError:
            if attempt.stopped_by is None:
                raise
            return attempt.stopped_by
        finally:
            self._deadlines.leave(attempt)

    async def _may_spend(self, record: TaskRecord) -> bool:
        """Tell whether the money is reserved; a store that keeps the ledger did it at the start."""
        reservation_id = record.progress.reservation_id
        if self._ledger is None or reservation_id is None:
            return True
        return await mark_dispatched(self._ledger, reservation_id)

    async def _execute(self, record: TaskRecord, *, is_resumed: bool) -> Outcome:
        task = record.task
        executor = self._executors.get(task.target or "")
        if executor is None:
            line = f"target {task.target!r} is not configured on this node"
            if not self._store.is_shared:
                return Failed(error=line, usage=NOTHING_USED)
            # Another node may know it: while a fleet is given a new configuration, some do.
            return Lost(has_started=False, retry_seconds=ELSEWHERE_SECONDS, error=line)
        gateway = None
        if self._calls is not None and self._calls.tasks.may_call(record):
            try:
                gateway = await self._calls.tasks.access(record)
            except StoreUnavailableError as error:
                return Lost(has_started=False, retry_seconds=UNPAID_SECONDS, error=str(error))
        order = work_order_of(record, gateway, is_resumed=is_resumed)
        taking_reports.set(partial(self._take_report, task.id, order.attempt))
        # The executor has a fault of its own. The task must settle all the same.
        try:
            outcome = await executor.execute(order)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            log.exception("executor raised", task_id=task.id, target=task.target)
            return Failed(error=f"the executor failed: {type(error).__name__}: {error}")
        if isinstance(outcome, Lost) and outcome.error == OUT_OF_DESCRIPTORS:
            self._note_descriptors(task)
        self._note_usage(task, outcome)
        return outcome

    def _take_report(self, task_id: str, attempt: int, report: ProgressReport) -> None:
        # By any thread. A function that was given up may go on, and its word counts no more.
        known = self._attempts.get(task_id)
        if known is not None and known.record.progress.attempt == attempt:
            self.reports[task_id] = AttemptReport(task_id=task_id, attempt=attempt, report=report)

    def _note_usage(self, task: Task, outcome: Outcome) -> None:
        """Log once of each target that what it tells of its usage is not understood."""
        target = task.target or ""
        if not isinstance(outcome, Succeeded) or outcome.usage != UNKNOWN_USAGE:
            return
        if outcome.result is None or target in self._not_understood:
            return
        if tells_unknown_usage(outcome.result):
            # As many as there are targets, in all settings that this process has had.
            self._not_understood.add(target)
            log.warning("usage in an unknown shape", task_id=task.id, target=task.target)

    @property
    def is_out_of_descriptors(self) -> bool:
        """Whether work could not begin lately for want of a file descriptor."""
        return self._store.now() - self._out_of_descriptors_at < SHORTAGE_SECONDS

    def _note_descriptors(self, task: Task) -> None:
        """Log a shortage once, and not again while it lasts."""
        if not self.is_out_of_descriptors:
            log.error("out of file descriptors", task_id=task.id, target=task.target)
        self._out_of_descriptors_at = self._store.now()

    async def _settle(self, attempt: _Attempt, outcome: Outcome) -> None:
        record = attempt.record
        open_calls = None
        if self._calls is not None and self._calls.tasks.may_call(record):
            open_calls = await self._uncancelled(attempt, self._calls.task_ended(record))
        try:
            await self._offer(attempt, self._settlement(record, outcome, open_calls))
        # It holds something that the store cannot write. The task must settle all the same.
        except Exception as error:
            log.exception("an outcome cannot be stored", task_id=record.task.id)
            failed = Failed(error=f"its outcome cannot be stored: {type(error).__name__}")
            await self._offer_until_taken(attempt, self._settlement(record, failed, open_calls))

    async def _uncancelled(
        self, attempt: _Attempt, waiting: Awaitable[OpenCalls | None]
    ) -> OpenCalls | None:
        """Wait for something; an attempt that is stopped meanwhile has its outcome already."""
        task = asyncio.ensure_future(waiting)
        while True:
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if attempt.stopped_by is None or task.cancelled():
                    raise

    async def _offer_until_taken(self, attempt: _Attempt, settlement: Settlement) -> None:
        """Offer a settlement until it is taken: its capacity is not free before."""
        for tries in count(1):
            try:
                await self._offer(attempt, settlement)
            except Exception as error:  # noqa: BLE001
                await self._pause(settlement.task_id, tries, error)
            else:
                return

    async def _offer(self, attempt: _Attempt, settlement: Settlement) -> None:
        tries = 0
        while not attempt.is_abandoned:
            try:
                answer = await self._store.settle(settlement)
            except asyncio.CancelledError:
                # Stopped while the outcome is being written: it stays the outcome.
                if attempt.stopped_by is None:
                    raise
                continue
            except StoreUnavailableError as error:
                tries += 1
                await self._pause(settlement.task_id, tries, error)
                continue
            self.problem = ""
            if isinstance(answer, Settled):
                self._changed(answer.records, settlement.closure)
            return

    async def _pause(self, task_id: str, tries: int, error: Exception) -> None:
        if not self.problem:
            log.warning("settlements wait for the store", task_id=task_id, problem=str(error))
        self.problem = str(error) or type(error).__name__
        draw = self._draws.random()
        try:
            await asyncio.sleep(SETTLE_BACKOFF.seconds(tries, draw=draw))
        except asyncio.CancelledError:
            attempt = self._attempts.get(task_id)
            if attempt is None or attempt.stopped_by is None:
                raise

    def _settlement(
        self, record: TaskRecord, outcome: Outcome, open_calls: OpenCalls | None
    ) -> Settlement:
        return self.settlements.make(record, outcome, self._store.now(), open_calls=open_calls)


class _Attempt:
    """One attempt under way, and why it was stopped, if it was."""

    __slots__ = ("has_begun", "is_abandoned", "is_resumed", "record", "stopped_by", "task")

    def __init__(self, record: TaskRecord) -> None:
        self.record = record
        self.has_begun = False
        self.stopped_by: Outcome | None = None
        self.is_abandoned = False
        self.is_resumed = False
        self.task: asyncio.Task[None] | None = None


class Settlements:
    """Makes settlements by the rules in force; a reload puts others in their place.

    Rule: what a task does next, what it costs and whom a provider's pause stops is decided here and
    nowhere else, whether a node or a worker ran the attempt. `free_failures` are the targets whose
    failures cost nothing unless they report figures.
    """

    def __init__(
        self,
        *,
        policy: RetryPolicy,
        max_result_bytes: int,
        free_failures: Collection[str] = (),
        draws: random.Random,
        slot_resets_at: SlotResetsAt = lambda _slot: None,
    ) -> None:
        self._slot_resets_at = slot_resets_at
        self.policy = policy
        self.max_result_bytes = max_result_bytes
        self.free_failures = free_failures
        self._draws = draws

    def reported(self, record: TaskRecord, outcome: Outcome) -> Outcome:
        """Return what an executor or a worker reports, at its cost and with what may be kept."""
        if record.task.target in self.free_failures:
            outcome = without_failure_cost(outcome)
        return self._bounded(at_fixed_cost(outcome, record.terms))

    def _bounded(self, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, Succeeded) or outcome.result is None:
            return outcome
        if len(memoryview(outcome.result)) <= self.max_result_bytes:
            return outcome
        error = f"result is larger than {self.max_result_bytes} bytes"
        return Failed(error=error, usage=outcome.usage)

    def make(
        self,
        record: TaskRecord,
        outcome: Outcome,
        now: float,
        *,
        node_id: str = "",
        open_calls: OpenCalls | None = None,
    ) -> Settlement:
        """Return the settlement of an attempt; `node_id` is who writes it for another.

        `open_calls` is what is known of calls that it has made.
        """
        progress, lease = record.progress, record.lease
        if lease is None:
            problem = f"task {record.task.id} has no lease to settle"
            raise ValueError(problem)
        draw = self._draws.random()
        step = next_step(outcome, progress, record.terms, now=now, draw=draw, policy=self.policy)
        closure = self._closure(record, outcome, now)
        return Settlement(
            task_id=record.task.id,
            lease=lease,
            step=step if closure is None else behind(closure, step, record.task),
            cost=known_usage(outcome),
            result=_result_text(outcome),
            closure=closure,
            node_id=node_id,
            open_calls=open_calls,
        )

    def _closure(self, record: TaskRecord, outcome: Outcome, now: float) -> GateClosure | None:
        if not isinstance(outcome, Limited):
            return None
        slot = outcome.slot
        resets_at = None if slot is None else self._slot_resets_at(slot)
        return closure_after(outcome, record, now=now, policy=self.policy, slot_resets_at=resets_at)


def _result_text(outcome: Outcome) -> str | None:
    if not isinstance(outcome, Succeeded) or outcome.result is None:
        return None
    # One that is no text raises: its task fails, rather than keeping another result than it had.
    return bytes(outcome.result).decode()


class DeadlineWatch(Generic[Key]):
    """Calls `late` with whatever has not left by its deadline, which is judged by `clock`.

    All deadlines share one timer of the event loop. A timer for each attempt would cost more than
    it gives: most attempts end in time.
    """

    def __init__(self, clock: Callable[[], float], late: Callable[[Key], None]) -> None:
        self._clock = clock
        self._late = late
        self._timers: Timers[Key] = Timers()
        self._alarm: asyncio.TimerHandle | None = None
        self._rings_at = 0.0

    def watch(self, key: Key, deadline: float | None) -> None:
        """Call if this has not left by the deadline; None is without end."""
        if deadline is None:
            return
        self._timers.set(key, deadline)
        if self._alarm is None or deadline < self._rings_at:
            self._set_alarm(deadline)

    def leave(self, key: Key) -> None:
        """Call no more for this."""
        self._timers.drop(key)

    def _set_alarm(self, at: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._rings_at = at
        seconds = max(0.0, at - self._clock())
        self._alarm = asyncio.get_running_loop().call_later(seconds, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        for key in self._timers.pop_due(self._clock(), most=MAX_LATE):
            self._late(key)
        following = self._timers.next_at()
        if following is not None:
            self._set_alarm(following)


class RetiredExecutors:
    """Closes the executors that the configuration has replaced or dropped.

    Each is closed once, when its last attempt has ended or when the service ends.
    """

    def __init__(self) -> None:
        self._closing: dict[asyncio.Task[None], Sequence[Executor]] = {}

    def retire(self, executors: Sequence[Executor], attempts: Iterable[asyncio.Task[None]]) -> None:
        """Close executors when these attempts have ended."""
        if not executors:
            return
        closing = asyncio.get_running_loop().create_task(_close_after(executors, tuple(attempts)))
        self._closing[closing] = executors
        closing.add_done_callback(lambda task: self._closing.pop(task, None))

    async def close(self) -> None:
        """Close what is left now, whoever may still use it."""
        left, self._closing = self._closing, {}
        for task in left:
            task.cancel()
        for executors in left.values():
            await _close(executors)


async def _close_after(
    executors: Sequence[Executor], attempts: Sequence[asyncio.Task[None]]
) -> None:
    if attempts:
        await asyncio.wait(attempts)
    await _close(executors)


async def _close(executors: Sequence[Executor]) -> None:
    for executor in executors:
        try:
            await executor.close()
        except Exception:
            # It may be anybody's, and the next one is to be closed all the same.
            log.exception("an executor could not be closed")
