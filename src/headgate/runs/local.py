"""Runs in this process: the engine, its store and its books, without a service around them.

The store lies in the folder of the run, and so does all that a resume needs. Nothing is turned
away and no result expires; how much runs at a time is the concurrency of the run.

Rule: the end of a task is told once, and always. Events tell of it at once; whenever the
dispatcher has read everything anew, some may have been missed, and the store is asked.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headgate.core.accounts import Limit
from headgate.core.admission import QueueLimits
from headgate.core.desk_settings import DeskSettings
from headgate.core.projects import Project
from headgate.core.records import TaskRecord
from headgate.core.scopes import Scope
from headgate.core.task_events import LAST_RANK, rank_of
from headgate.core.tasks import TERMINAL, TaskStatus
from headgate.databases.child import ChildStarter
from headgate.errors import (
    IllegalTransitionError,
    NotDispatchingError,
    StoreUnavailableError,
)
from headgate.intake import Draft
from headgate.ledger import Ledger
from headgate.ledgers.connect import connect_budget
from headgate.providers.prices import PriceList
from headgate.runs.backend import Backend, Money, StepOrder, StepTask, Told
from headgate.runs.budgets import (
    Books,
    books_again,
    choose_books,
    found_limits,
    limits_of,
    money_of,
    run_scopes,
    with_own_limit,
)
from headgate.runs.checking import check_steps
from headgate.runs.folder import STORE, Run
from headgate.runs.local_tasks import AGENT, LocalTasks, step_executors, step_task
from headgate.runs.local_waiting import waits_for_windows, why_line
from headgate.runs.options import RunOptions
from headgate.runs.record import RunScope
from headgate.runs.variables import Variables
from headgate.runtime.engine import Engine, EngineSettings
from headgate.runtime.event_feed import Happening
from headgate.settings import StoreSettings, settings_file
from headgate.store import TaskQuery
from headgate.stores import reading
from headgate.stores.books import StoreLedger
from headgate.stores.sqlite import SqliteTaskStore
from headgate.workflow.workflow import CallWork, TargetWork, Workflow

if TYPE_CHECKING:
    from headgate.runs.target_steps import TargetSteps

RESULTS_KEPT_SECONDS = 100 * 365 * 86_400.0
PAGE = 1_000
LOOK_SECONDS = 1.0
MAX_ASKED_AT_ONCE = 32
WRITTEN_APART = 1_000
"""From how many runs of steps on a process of its own writes: starting one takes a moment."""

SUBMIT_TRIES = 60
SUBMIT_PAUSE_SECONDS = 0.5

_LIVE = tuple(dict.fromkeys(set(TaskStatus) - TERMINAL))


class LocalBackend:
    """Carries out the steps of one run on an engine of its own."""

    def __init__(
        self,
        run: Run,
        tasks: LocalTasks,
        store: SqliteTaskStore,
        engine: Engine,
        *,
        scopes: tuple[RunScope, ...],
        options: RunOptions,
    ) -> None:
        self._run = run
        self._options = options
        self._tasks = tasks
        self._store = store
        self._engine = engine
        self._scopes = scopes
        self._told: Told = _tell_nobody
        # By task that has not ended, the rank of what was told of it last.
        self._live: dict[str, int] = {}
        self._money: list[Money] = [
            Money(
                scope=one.scope,
                spent_micro_usd=0,
                reserved_micro_usd=0,
                limit_micro_usd=one.micro_usd,
            )
            for one in scopes
        ]
        engine.feed.witnesses.append(self._hear)
        # Events end when dispatching does; what runs then may end later, and is told of, too.
        engine.told = self._look_at
        engine.before_start(self._prepare)
        engine.also_run("run", self._look_again_when_needed)

    def listen(self, told: Told) -> None:
        """Have changes told from now on."""
        self._told = told

    async def open(self) -> None:
        """Start the engine; it recovers what an earlier process left unfinished."""
        try:
            await self._engine.start()
        except BaseException:
            await self.close(drain_seconds=0.0)
            raise

    async def known(self) -> AsyncIterator[StepTask]:
        """Give every task of the run, page by page."""
        before: str | None = None
        while True:
            page = await self._store.find(TaskQuery(before=before, limit=PAGE))
            for record in page.records:
                yield step_task(record, self._run.id)
            before = page.next_before
            if before is None:
                return

    async def submit(self, orders: Sequence[StepOrder]) -> None:
        """Have steps carried out; one that was submitted before is left as it is."""
        now = self._store.now()
        waiting = [self._tasks.draft(order, now) for order in orders]
        for draft in waiting:
            self._live.setdefault(draft.task.id, -1)
        for tries in count(1):
            waiting, error = await self._submitted(waiting)
            if error is None:
                return
            if tries == SUBMIT_TRIES:
                raise error
            await asyncio.sleep(SUBMIT_PAUSE_SECONDS)

    async def results(self, tasks: Sequence[StepTask]) -> list[Any]:
        """Return the results of tasks that are done, as values, in their order."""
        names = [task.task_id for task in tasks]
        found = await self._store.ask(partial(reading.results, task_ids=names))
        return [msgspec.json.decode(found[name]) if name in found else None for name in names]

    async def cancel(self, tasks: Sequence[StepTask]) -> None:
        """Cancel what waits and stop what runs; what has ended meanwhile stays as it is."""
        for start in range(0, len(tasks), MAX_ASKED_AT_ONCE):
            some = tasks[start : start + MAX_ASKED_AT_ONCE]
            await asyncio.gather(*(self._cancelled(task.task_id) for task in some))

    async def why(self, task: StepTask) -> str:
        """Say in one line why a task waits; empty if nobody knows."""
        engine = self._engine
        if engine.dispatcher.problem:
            return engine.dispatcher.problem
        try:
            found = await engine.why(task.task_id)
        except (NotDispatchingError, StoreUnavailableError):
            return ""
        return "" if found is None else why_line(found, engine.dispatcher.desk, engine.now())

    async def money(self) -> list[Money]:
        """Return the scopes of the run; as they were last, while the books cannot be asked."""
        try:
            await self._engine.carry_settlements()
            self._money = await money_of(self._ledger, self._scopes)
        except StoreUnavailableError:
            return self._money
        return self._money

    async def is_stuck(self) -> bool:
        """Tell whether what waits can only go on when a budget's window moves on."""
        desk = self._engine.dispatcher.desk
        return desk is not None and waits_for_windows(desk, self._engine.now())

    async def close(self, *, drain_seconds: float) -> None:
        """Take no more, let what runs finish for so long, then stop it; what waits stays."""
        await self._engine.stop(drain_seconds=drain_seconds)

    @property
    def has_left_behind(self) -> bool:
        """Whether work that was told to stop goes on all the same, and ends with the process."""
        return self._engine.runner.has_left_behind

    @property
    def _ledger(self) -> Ledger:
        return self._engine.ledger or StoreLedger(self._store)

    async def _prepare(self) -> None:
        """Found what budgets there are not, and know what is yet to end, before anything runs."""
        await self._found()
        before: str | None = None
        while True:
            page = await self._store.find(TaskQuery(states=_LIVE, before=before, limit=PAGE))
            self._live.update((record.task.id, -1) for record in page.records)
            before = page.next_before
            if before is None:
                return

    async def _found(self) -> None:
        own = self._scopes[-1]
        is_changed = own != self._run.record.scopes[-1]
        ledger = self._engine.ledger
        if ledger is not None:
            if is_changed:
                for scope, limit in limits_of([own]).items():
                    await ledger.set_limit(scope, limit)
            await found_limits(ledger, self._scopes, self._options)
        if is_changed:
            self._run.change(scopes=self._scopes, micro_usd=own.micro_usd)

    async def _submitted(self, drafts: list[Draft]) -> tuple[list[Draft], Exception | None]:
        """Submit tasks, and return those of which nobody knows whether they were stored."""
        answers = await asyncio.gather(
            *(self._engine.submit(*draft) for draft in drafts), return_exceptions=True
        )
        failed: list[Draft] = []
        problem: Exception | None = None
        for draft, answer in zip(drafts, answers, strict=True):
            if isinstance(answer, StoreUnavailableError):
                failed.append(draft)
                problem = answer
            elif isinstance(answer, BaseException):
                raise answer
        return failed, problem

    async def _cancelled(self, task_id: str) -> None:
        try:
            await self._engine.cancel_soon(task_id)
        except IllegalTransitionError:
            return

    def _hear(self, _happening: Happening, record: TaskRecord) -> None:
        self._tell(record)

    def _look_at(self, records: Iterable[TaskRecord]) -> None:
        for record in records:
            self._tell(record)

    def _tell(self, record: TaskRecord) -> None:
        """Tell of a change, unless this or what came after it was told before."""
        task_id = record.task.id
        rank = rank_of(record.task.status, record.progress.attempt)
        if rank <= self._live.get(task_id, LAST_RANK):
            return
        if rank == LAST_RANK:
            del self._live[task_id]
        else:
            self._live[task_id] = rank
        self._told(step_task(record, self._run.id))

    async def _look_again_when_needed(self) -> None:
        life = self._engine.feed.life
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if life != self._engine.feed.life:
                life = self._engine.feed.life
                await self._look_again()

    async def _look_again(self) -> None:
        """Tell what happened to tasks while nobody was told."""
        for task_id in list(self._live):
            record = await self._store.get(task_id)
            if record is not None:
                self._tell(record)


def local_backend(
    run: Run, workflow: Workflow, options: RunOptions, environ: Mapping[str, str]
) -> Backend:
    """Return what carries out a run here; whatever is missing is found before anything is opened.

    The run must be held by this process.
    """
    variables = Variables(environ)
    check_steps(workflow, variables)
    targets = _targets(run, workflow, options, environ)
    scopes, books = _budgets(run, workflow, options, environ)
    if any(isinstance(step.work, CallWork) for step in workflow.steps):
        _search(workflow.folder)
    places = options.concurrency or workflow.concurrency
    ledger = None if books.url is None else connect_budget(books.url).ledger
    store = SqliteTaskStore(run.path / STORE, keeps_books=ledger is None, starter=_starter(run))
    prices = PriceList(workflow.prices)
    engine = Engine(
        store,
        step_executors(workflow, variables, prices, targets, places=places),
        _engine_settings(workflow, targets, places, {} if ledger else limits_of(scopes)),
        ledger=ledger,
    )
    if targets is not None and targets.slot_settings is not None:
        from headgate.slot_wiring import attach_slots  # noqa: PLC0415  most runs have no slots

        attach_slots(engine, store, targets.slot_settings, environ, data=run.path, is_shared=False)
    tasks = LocalTasks(run.id, workflow, scopes[-1].scope, targets)
    return LocalBackend(run, tasks, store, engine, scopes=scopes, options=options)


def _budgets(
    run: Run, workflow: Workflow, options: RunOptions, environ: Mapping[str, str]
) -> tuple[tuple[RunScope, ...], Books]:
    """Return the scopes of a run and its books: as they were chosen once, before it began."""
    if (run.path / STORE).exists():
        books = books_again(run.record, options, environ)
        return with_own_limit(run.record.scopes, options.micro_usd), books
    scopes = run.record.scopes or run_scopes(workflow, options, environ)
    books = choose_books(scopes, options, environ)
    run.change(scopes=scopes, tracker=books.tracker, books=books.address)
    return scopes, books


def _targets(
    run: Run, workflow: Workflow, options: RunOptions, environ: Mapping[str, str]
) -> TargetSteps | None:
    """Return the targets of a workflow, and have the record name their file for a resume."""
    if not any(isinstance(step.work, TargetWork) for step in workflow.steps):
        return None
    # It brings the service along, which most runs do without.
    from headgate.runs.target_steps import target_steps  # noqa: PLC0415

    path = settings_file(options.config)
    targets = target_steps(workflow, path, environ, agent_id=AGENT)
    if path is not None and run.record.config is None:
        run.change(config=str(path.absolute()))
    return targets


def _search(folder: Path) -> None:
    # Behind everything else: a file beside the workflow must not hide a module of ours.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _starter(run: Run) -> ChildStarter | None:
    """Return what starts the process that writes, where the run is long enough to be worth one."""
    if run.record.total < WRITTEN_APART or not StoreSettings().writes_in_process:
        return None
    modules = ("headgate.stores.sqlite_workplace",)
    return ChildStarter(inherited=() if run.lock is None else (run.lock,), modules=modules)


def _engine_settings(
    workflow: Workflow,
    targets: TargetSteps | None,
    places: int,
    budgets: dict[Scope, Limit],
) -> EngineSettings:
    return EngineSettings(
        desk=DeskSettings(
            projects=(Project(id=workflow.name, max_concurrent_agents=None),),
            rate_limits=() if targets is None else targets.rate_limits,
            max_inflight=places,
            max_per_agent_inflight=places,
        ),
        limits=QueueLimits(max_queue=None, max_per_agent=None),
        budgets=budgets,
        places=places,
        result_ttl_seconds=RESULTS_KEPT_SECONDS,
    )


def _tell_nobody(_task: StepTask) -> None:
    return
