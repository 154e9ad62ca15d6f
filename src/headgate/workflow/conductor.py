"""The conductor: carries out a workflow, one task for each run of a step, through a backend.

A run goes out when its parents have ended, so that it is filled, estimated and held only then. At
most a window of them is at the backend, however many there are; the lowest priority value goes
first. What a budget refuses, a failure, an interruption and a resume change what goes out next, and
nothing that was done is ever sent again.

Rule: what is known of a run is what the backend says. The conductor keeps nothing that a crash
could lose but the state in the record of the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from headgate.errors import HeadgateError, to_step
from headgate.workflow.backend import Backend, StepOrder, StepTask, TaskState, keep_newest
from headgate.workflow.costs import limits_dollars
from headgate.workflow.expansion import Expansion
from headgate.workflow.progress import StepRunState, WorkflowProgress
from headgate.workflow.report import Ended, RunReport, RunState, RunTotals
from headgate.workflow.run_folder import RecordWriter, Run
from headgate.workflow.run_list import LiveTask, Reporter, end_state, stopped_as
from headgate.workflow.run_tasks import left_at
from headgate.workflow.step_requests import Filler, NoOrder, OrderMaker, RefusedAmounts, fields_read
from headgate.workflow.workflow import ModelWork, Step

# What nobody tells a run and so has to be asked for: its money, why tasks wait, and if in vain.
#
# Rule: an answer that cannot be had now is asked for again; only a backend that says that it cannot
# go on at all ends the run.

WATCH_SECONDS = 1.0
WHYS = 3


class Watch:
    """Asks the backend of one run; `live` are its tasks that have not ended.

    Whoever submits says so by `is_sending`: what is under way to the backend does not wait there.
    """

    def __init__(
        self,
        backend: Backend,
        live: Mapping[int, LiveTask],
        reporter: Reporter,
        *,
        clock: Callable[[], float],
        waits_for_windows: bool,
    ) -> None:
        self._backend = backend
        self._live = live
        self._reporter = reporter
        self._clock = clock
        self._waits_for_windows = waits_for_windows
        self.is_sending = False

    async def run(self) -> None:
        """Ask again and again, until it is cancelled."""
        while True:
            self._backend.check()
            await self.look_at_money()
            with suppress(HeadgateError):
                # What cannot be asked now is asked again; the backend itself waits for its store.
                await self._look_at_whys()
                await self._look_for_exhaustion()
            await asyncio.sleep(WATCH_SECONDS)

    async def look_at_money(self) -> None:
        """Ask what is spent and held."""
        with suppress(HeadgateError):
            self._reporter.money = tuple(await self._backend.money())

    async def give_up(self, waiting: Sequence[LiveTask], run_state: StepRunState) -> None:
        """Cancel what waits; each becomes `run_state` when its cancel comes through."""
        for live in waiting:
            live.cancelled_as = run_state
        await self._backend.cancel([live.task for live in waiting])

    def queued(self) -> list[LiveTask]:
        """Return the tasks that wait at the backend."""
        return [live for live in self._live.values() if live.task.state is TaskState.QUEUED]

    async def _look_at_whys(self) -> None:
        for live in self.queued()[:WHYS]:
            if self._clock() - live.since >= WATCH_SECONDS:
                live.why = await self._backend.why(live.task)

    async def _look_for_exhaustion(self) -> None:
        """Give up what waits for a budget whose window moves on, unless the file says to wait."""
        if self._waits_for_windows or not self._waits_only():
            return
        if not await self._backend.is_stuck() or not self._waits_only():
            return
        waiting = list(self._live.values())
        why = await self._backend.why(waiting[0].task)
        self._reporter.exhausted_by = self._reporter.exhausted_by or why or None
        await self.give_up(waiting, StepRunState.OVER_BUDGET)

    def _waits_only(self) -> bool:
        return bool(self._live) and not self.is_sending and len(self.queued()) == len(self._live)


SMALLEST_WINDOW = 256
WINDOW_PER_PERMIT = 8
BATCH = 64
REFILL_SECONDS = 0.01
PATIENCE_SECONDS = 7 * 86_400.0
"""How long an interrupted run waits for what runs; a second interruption ends it at once."""
FAULT_SECONDS = 5.0

_RUN_STATES = {
    TaskState.DONE: StepRunState.DONE,
    TaskState.FAILED: StepRunState.FAILED,
    TaskState.REJECTED: StepRunState.OVER_BUDGET,
}
_BEGUN_ANEW = (TaskState.FAILED, TaskState.REJECTED, TaskState.CANCELLED)


class Conductor:
    """Carries out one run; `ended` is told of every run of a step that has ended.

    `begun` is called once nothing can refuse the run any more, before anything is told or sent.
    """

    def __init__(
        self,
        run: Run,
        backend: Backend,
        *,
        clock: Callable[[], float] = time.time,
        ended: Ended | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        workflow = run.workflow
        expansion = Expansion(workflow, run.items)
        runs = {step.id: expansion.runs_of(step.id) for step in workflow.steps}
        self._run = run
        self._backend = backend
        self._clock = clock
        self._listener = ended
        self._tell_begin = begun
        self._progress = WorkflowProgress(workflow, runs, ended=self._note_end)
        self._tally = RunTotals(workflow, self._progress, fields_read(workflow))
        self._filler = Filler(run, self._progress, self._tally, backend.results)
        self._refusals = RefusedAmounts()
        self._maker = OrderMaker(
            workflow,
            self._filler,
            self._refusals,
            self._progress,
            # A service has prices of its own, and refuses what has none.
            is_limited=limits_dollars(run.record.scopes) and run.record.server is None,
        )
        self._reporter = Reporter(run, self._progress, self._tally)
        concurrency = run.record.concurrency or workflow.concurrency
        self._window = max(SMALLEST_WINDOW, WINDOW_PER_PERMIT * concurrency)
        self._live: dict[int, LiveTask] = {}
        self._watch = Watch(
            backend,
            self._live,
            self._reporter,
            clock=clock,
            waits_for_windows=workflow.on_exhausted == "wait",
        )
        self._generations: dict[int, int] = {}
        self._early: dict[int, StepTask] = {}
        self._latest_end: tuple[int, StepTask | None, str] = (-1, None, "")
        self._has_begun = False
        self._record = RecordWriter(run)
        self._fails_fast = False
        self._interrupts = 0
        self._wake = asyncio.Event()
        self._interrupted = asyncio.Event()
        self._stopped = asyncio.Event()

    def report(self) -> RunReport:
        """Return how the run stands now."""
        self._reporter.trouble = self._backend.trouble
        return self._reporter.report(self._live, self._clock())

    def interrupt(self) -> None:
        """Start nothing new, the first time; stop what runs, the second."""
        self._interrupts += 1
        self._interrupted.set()
        if self._interrupts > 1:
            self._stopped.set()

    async def run(self) -> RunReport:
        """Carry out the run to its end, and return how it ended."""
        with self._run.held():
            self._record.begin(now=self._clock(), left_at=lambda: left_at(self._run))
            self._backend.listen(self._task_changed)
            if await self._opened():
                await self._run_to_the_end()
            else:
                self._reporter.state = RunState.INTERRUPTED
            self._keep_end()
        return self.report()

    async def _opened(self) -> bool:
        try:
            return await self._unless_interrupted(self._backend.open())
        except BaseException:
            with suppress(HeadgateError):
                self._keep_end()
            raise

    async def _run_to_the_end(self) -> None:
        try:
            if await self._unless_interrupted(self._begin()):
                await self._conduct()
            else:
                await self._close(is_over=True)
                self._reporter.state = RunState.INTERRUPTED
        except BaseException:
            self._reporter.state = RunState.INTERRUPTED
            with suppress(HeadgateError):
                await self._backend.close(drain_seconds=FAULT_SECONDS)
            self._leave()
            with suppress(HeadgateError):
                self._keep_end()
            raise

    async def _unless_interrupted(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do something that may take long; False if it was stopped by an interruption."""
        working = asyncio.create_task(work)
        interrupted = asyncio.create_task(self._interrupted.wait())
        try:
            await asyncio.wait((working, interrupted), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
                return True
        finally:
            await _cancelled(interrupted)
            await _cancelled(working)
        return False

    async def _begin(self) -> None:
        """Take over what earlier processes did: done stays done, what failed begins anew.

        So does what ran although a parent had failed or was not run: it begins anew after that.
        What a corrected file made void begins anew, too.
        """
        if not self._run.record.has_begun:
            # From here on what was done is kept somewhere; should that be gone, a resume says so.
            self._run.change(has_begun=True)
        latest: dict[int, StepTask] = {}
        async for task in self._backend.known():
            if task.state.has_ended:
                self._tally.add(task)
            keep_newest(latest, task)
        outdated: list[StepTask] = []
        for number, task in latest.items():
            step_id = self._progress.step(number).id
            is_void = task.is_provisional or self._run.is_void(step_id, task)
            if is_void and not task.state.has_ended:
                outdated.append(task)
            if is_void or task.state in _BEGUN_ANEW:
                self._generations[number] = self._run.next_generation(step_id, task)
            elif task.state is TaskState.DONE:
                self._progress.restore(number, StepRunState.DONE)
            else:
                self._progress.restore(number, StepRunState.SUBMITTED)
                self._live[number] = LiveTask(task, self._clock())
        await self._backend.cancel(outdated)
        self._tell_begin()
        self._has_begun = True
        self._progress.start()
        for task in self._early.values():
            self._task_changed(task)
        self._early.clear()

    async def _conduct(self) -> None:
        feeding = asyncio.create_task(self._feed(), name="feed")
        watching = asyncio.create_task(self._watch.run(), name="watch")
        interrupted = asyncio.create_task(self._interrupted.wait(), name="interrupted")
        tasks: tuple[asyncio.Task[Any], ...] = (feeding, watching, interrupted)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for loop in (feeding, watching):
                if loop.done():
                    loop.result()
        finally:
            has_ended = feeding.done()
            for task in tasks:
                await _cancelled(task)
        await self._watch.look_at_money()
        await self._close(is_over=has_ended)
        if not has_ended:
            self._leave()
        is_booked = not self._reporter.unbooked_micro_usd
        self._reporter.state = end_state(
            self._progress, is_interrupted=not has_ended, is_booked=is_booked
        )

    async def _close(self, *, is_over: bool) -> None:
        """Let what runs finish and start nothing, until somebody interrupts (again)."""
        patience = 0.0 if is_over else PATIENCE_SECONDS
        enough = self._interrupted if is_over else self._stopped
        closing = asyncio.create_task(self._backend.close(drain_seconds=patience))
        stopping = asyncio.create_task(self._stop_when(enough))
        looking = asyncio.create_task(self._look_after_ends())
        try:
            await closing
        finally:
            await _cancelled(stopping)
            await _cancelled(looking)
        await self._watch.look_at_money()
        self._reporter.unbooked_micro_usd = self._backend.unbooked_micro_usd

    def _leave(self) -> None:
        """Leave the rest to a resume: it was stopped, or not run; a service goes on with its own.

        Nobody is told of each: there may be as many as the run has.
        """
        self._listener = None
        self._progress.stop()
        if self._run.record.server is not None:
            return
        for number, live in list(self._live.items()):
            del self._live[number]
            self._tally.add(live.task)
            self._progress.end(number, stopped_as(live.task))

    async def _stop_when(self, enough: asyncio.Event) -> None:
        await enough.wait()
        # Where one interruption is enough, it hurries the closing, and a service keeps its tasks.
        live = self._live.values() if self._stopped.is_set() else ()
        await self._backend.cancel([each.task for each in live])

    async def _look_after_ends(self) -> None:
        # When everything has been closed it is too late to ask what the last steps cost.
        while True:
            self._wake.clear()
            await self._wake.wait()
            await self._watch.look_at_money()

    async def _feed(self) -> None:
        """Send what is ready, whenever there is room, until everything has ended."""
        while self._progress.ended < self._progress.total:
            self._wake.clear()
            await self._send()
            if self._fails_fast:
                self._fails_fast = False
                await self._watch.give_up(self._watch.queued(), StepRunState.STOPPED)
            if self._live:
                await self._wake.wait()
                if len(self._live) > self._window - BATCH:
                    # The permits are busy for longer than this, and one submit takes many.
                    await asyncio.sleep(REFILL_SECONDS)
            elif self._progress.ended < self._progress.total:
                raise RuntimeError("nothing runs, and nothing that is left can")

    async def _send(self) -> None:
        while (room := self._window - len(self._live)) > 0:
            numbers = self._taken(min(room, BATCH))
            if not numbers:
                return
            orders = await self._orders(numbers)
            if orders:
                self._watch.is_sending = True
                try:
                    await self._backend.submit(orders)
                finally:
                    self._watch.is_sending = False

    def _taken(self, most: int) -> list[int]:
        numbers: list[int] = []
        while len(numbers) < most and (number := self._progress.take()) is not None:
            numbers.append(number)
        return numbers

    async def _orders(self, numbers: Sequence[int]) -> list[StepOrder]:
        reading = [number for number in numbers if self._filler.needs_results(number)]
        values = await self._filler.fetch(reading) if reading else {}
        orders: list[StepOrder] = []
        for number in numbers:
            # Another end may have stopped the run, or one of these, since they were taken.
            if self._progress.run_state(number) is not StepRunState.WAITING:
                continue
            made = self._maker.made(number, self._generation(number), values)
            if isinstance(made, NoOrder):
                self._end_without_task(number, made)
            else:
                self._put_out(made)
                orders.append(made)
        return orders

    def _generation(self, number: int) -> int:
        known = self._generations.get(number)
        if known is not None:
            return known
        return self._run.next_generation(self._progress.step(number).id, None)

    def _put_out(self, order: StepOrder) -> None:
        task = StepTask(
            number=order.number, generation=order.generation, task_id="", state=TaskState.QUEUED
        )
        # It may be heard of before the answer to its submission.
        self._live[order.number] = LiveTask(task, self._clock(), order.amounts)
        self._progress.submit(order.number)
        self._tally.touch(order.step.id)

    def _end_without_task(self, number: int, ending: NoOrder) -> None:
        if ending.run_state is StepRunState.FAILED:
            self._tally.fail(number, ending.error)
            self._reporter.failed(number, None, ending.error)
        self._latest_end = (number, None, ending.error)
        self._end_step(number, ending.run_state)

    def _task_changed(self, task: StepTask) -> None:
        if not self._has_begun:
            self._early[task.number] = task
            return
        live = self._live.get(task.number)
        if live is None or live.task.generation != task.generation:
            if task.state.has_ended and task.generation < self._generations.get(task.number, 0):
                # What was cancelled at the begin may have cost something.
                self._tally.add(task)
            return
        live.task = task
        if task.state.has_ended:
            del self._live[task.number]
            self._end_task(task, live)
            self._wake.set()

    def _end_task(self, task: StepTask, live: LiveTask) -> None:
        run_state = self._run_state(task, live)
        self._tally.add(task)
        if run_state is StepRunState.FAILED:
            error = task.error or "it was cancelled"
            self._tally.fail(task.number, error)
            self._reporter.failed(task.number, task, error)
        elif run_state is StepRunState.OVER_BUDGET:
            if task.error:
                step = self._progress.step(task.number)
                task = msgspec.structs.replace(task, error=to_step(task.error, _estimated_by(step)))
            self._reporter.exhausted_by = self._reporter.exhausted_by or task.error
            if live.amounts is not None:
                self._refusals.add(self._progress.step(task.number).id, live.amounts)
        self._latest_end = (task.number, task, "")
        self._end_step(task.number, run_state)

    def _run_state(self, task: StepTask, live: LiveTask) -> StepRunState:
        if task.state is not TaskState.CANCELLED:
            return _RUN_STATES[task.state]
        if live.cancelled_as is StepRunState.OVER_BUDGET:
            return live.cancelled_as
        is_stopped = self._interrupts or live.cancelled_as is StepRunState.STOPPED
        return stopped_as(task) if is_stopped else StepRunState.FAILED

    def _end_step(self, number: int, run_state: StepRunState) -> None:
        is_last = run_state is StepRunState.FAILED and self._run.workflow.fail_fast
        self._fails_fast = self._fails_fast or is_last
        self._progress.end(number, run_state, is_last=is_last)

    def _note_end(self, number: int) -> None:
        self._tally.touch(self._progress.step(number).id)
        if self._listener is not None:
            latest, task, error = self._latest_end
            known = (task, error) if latest == number else (None, "")
            self._listener(self._reporter.row(number, *known))

    def _keep_end(self) -> None:
        now = self._reporter.ended_at = self._clock()
        if self._has_begun:
            self._record.end(self.report(), now=now)
        else:
            self._record.take_back()


def _estimated_by(step: Step) -> str:
    """Name what of a step says the cost that is held for it."""
    if step.cost_micro_usd is not None:
        return f"cost_usd of {step.id}"
    if step.estimate is not None:
        return f"the estimate of {step.id}"
    return (
        f"max_tokens of {step.id}" if isinstance(step.work, ModelWork) else f"what {step.id} costs"
    )


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """End a task; what it failed by is heard, unless it is trouble that is over with it."""
    task.cancel()
    # Not awaited itself: a cancel of whoever waits here would look like that of the task.
    await asyncio.wait((task,))
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, HeadgateError):
        raise error
