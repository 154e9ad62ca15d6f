"""Runs in this process: the engine, its store and its books, without a service around them.

The store lies in the folder of the run, and so does all that a resume needs. Nothing is turned
away and no result expires; how much runs at a time is the concurrency of the run.

Rule: the end of a task is told once, and always. Events tell of it at once; whenever the
dispatcher has read everything anew, some may have been missed, and the store is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import msgspec

from headgate.core.tasks.events import LAST_RANK, rank_of
from headgate.core.tasks.records import TaskRecord
from headgate.core.tasks.task import TERMINAL, TaskStatus
from headgate.errors import (
    IllegalTransitionError,
    NotDispatchingError,
    StoreError,
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
    scopes_again,
)
from headgate.runs.checking import check_steps
from headgate.runs.kept.files import STORE
from headgate.runs.kept.folder import Run
from headgate.runs.kept.record import RunScope
from headgate.runs.local.engine import engine_settings, search, starter_of, targets_of
from headgate.runs.local.tasks import LocalTasks, step_executors, step_task
from headgate.runs.local.trouble import StoreFile, books_problem, closing_trouble, trouble_of
from headgate.runs.local.waiting import waits_for_windows, why_line
from headgate.runs.options import RunOptions
from headgate.runs.outputs import result_value
from headgate.runs.raising import change_in_books
from headgate.runs.variables import Variables
from headgate.runtime.engine import Engine
from headgate.runtime.telling.event_feed import Happening
from headgate.stores.books import StoreLedger
from headgate.stores.looking import reading
from headgate.stores.sqlite import SqliteTaskStore
from headgate.task_query import TaskQuery
from headgate.workflow.workflow import CallWork, Workflow

PAGE = 1_000
LOOK_SECONDS = 1.0
MAX_ASKED_AT_ONCE = 32

SUBMIT_TRIES = 60
SUBMIT_PAUSE_SECONDS = 0.5
LEAVE_SECONDS = 10.0
BOOK_SECONDS = 30.0
"""How long the end of a run waits for books that are away."""

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
        self._file = StoreFile(run.path / STORE)
        self._is_closing = self._is_closed = False
        self._asked_at = store.now()
        self.unbooked_micro_usd = 0
        """What the books had not been told when everything was closed; a resume tells them."""
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

    @property
    def trouble(self) -> str:
        """Why nothing ends or starts, in one line; at the end, why not everything is booked."""
        if self._is_closed:
            return books_problem(self._engine) if self.unbooked_micro_usd else ""
        if self._is_closing:
            return closing_trouble(self._engine, BOOK_SECONDS)
        return trouble_of(self._engine)

    def check(self) -> None:
        """Raise if the store was deleted under the run: nothing can ever end then."""
        self._file.check()

    def listen(self, told: Told) -> None:
        """Have changes told from now on."""
        self._told = told

    async def open(self) -> None:
        """Start the engine; it recovers what an earlier process left unfinished."""
        try:
            await self._engine.start()
        except BaseException:
            await self._close(drain_seconds=0.0, book_seconds=0.0)
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
        return [result_value(found.get(name)) for name in names]

    async def cancel(self, tasks: Sequence[StepTask]) -> None:
        """Cancel what waits and stop what runs; what has ended meanwhile stays as it is."""
        if self._is_closing:
            # Whoever wants an end waits no longer for books that are away, either.
            self._engine.hurry()
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
        if self._is_closed:
            return self._money
        try:
            await self._engine.carry_settlements()
            self._money = await money_of(self._ledger, self._scopes)
            self._asked_at = self._store.now()
        except StoreUnavailableError:
            replace, asked_at = msgspec.structs.replace, self._asked_at
            self._money = [replace(one, as_of=asked_at) for one in self._money]
        return self._money

    async def is_stuck(self) -> bool:
        """Tell whether what waits can only go on when a budget's window moves on."""
        desk = self._engine.dispatcher.desk
        return desk is not None and waits_for_windows(desk, self._engine.now())

    async def close(self, *, drain_seconds: float) -> None:
        """Take no more, let what runs finish for so long, then stop it; what waits stays."""
        await self._close(drain_seconds=drain_seconds, book_seconds=BOOK_SECONDS)

    async def _close(self, *, drain_seconds: float, book_seconds: float) -> None:
        self._is_closing = True
        try:
            self.check()
        except StoreError:
            drain_seconds = book_seconds = 0.0
            await self._engine.runner.leave(LEAVE_SECONDS)
        await self._engine.drain(drain_seconds=drain_seconds, settle_seconds=book_seconds)
        with suppress(StoreUnavailableError):
            self.unbooked_micro_usd = await self._engine.unbooked_micro_usd()
            await self.money()
        self._is_closed = True
        await self._engine.close()

    @property
    def has_left_behind(self) -> bool:
        """Whether work that was told to stop goes on all the same, and ends with the process."""
        return self._engine.runner.has_left_behind

    @property
    def _ledger(self) -> Ledger:
        return self._engine.ledger or StoreLedger(self._store)

    async def _prepare(self) -> None:
        """Found what budgets there are not, and know what is yet to end, before anything runs."""
        self._file.note()
        await self._found()
        before: str | None = None
        while True:
            page = await self._store.find(TaskQuery(states=_LIVE, before=before, limit=PAGE))
            self._live.update((record.task.id, -1) for record in page.records)
            before = page.next_before
            if before is None:
                return

    async def _found(self) -> None:
        record, ledger = self._run.record, self._engine.ledger
        if ledger is not None:
            if record.has_begun and self._options.micro_usd is not None:
                for scope, limit in limits_of(self._scopes[-1:]).items():
                    await ledger.set_limit(scope, limit)
            self._scopes = await found_limits(
                ledger,
                self._scopes,
                self._options,
                change=change_in_books(record.tracker, record.books),
                is_resumed=record.has_begun,
            )
        if self._scopes != record.scopes:
            self._run.change(scopes=self._scopes, micro_usd=self._scopes[-1].micro_usd)

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
    targets = targets_of(run, workflow, options, environ)
    scopes, books = _budgets(run, workflow, options, environ)
    if any(isinstance(step.work, CallWork) for step in workflow.steps):
        search(workflow.folder)
    places = options.concurrency or workflow.concurrency
    ledger = None if books.url is None else connect_budget(books.url).ledger
    store = SqliteTaskStore(run.path / STORE, keeps_books=ledger is None, starter=starter_of(run))
    prices = PriceList(workflow.prices)
    engine = Engine(
        store,
        step_executors(workflow, variables, prices, targets, places=places),
        engine_settings(workflow, targets, places, {} if ledger else limits_of(scopes)),
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
        return scopes_again(run.record, options), books
    scopes = scopes_again(run.record, options) if run.record.scopes else ()
    scopes = scopes or run_scopes(workflow, options, environ)
    books = choose_books(scopes, options, environ)
    run.change(scopes=scopes, tracker=books.tracker, books=books.address)
    return scopes, books


def _tell_nobody(_task: StepTask) -> None:
    return
