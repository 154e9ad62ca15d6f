"""Runs in this process: the engine, its store and its ledger, without a service around them.

The store lies in the folder of the run, and so does all that a resume needs. Nothing is turned
away and no result expires; how much runs at a time is the concurrency of the run.

Rule: the end of a task is told once, and always. Events tell of it at once; whenever the
dispatcher has read everything anew, some may have been missed, and the store is asked.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headgate.budgets.connect import connect_budget
from headgate.config import StoreSettings, settings_file
from headgate.core.admission import QueueLimits
from headgate.core.budgets.ledger import Ledger, Limit, Refused, Unit
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch_state import DispatchSettings, DispatchState, Waiting
from headgate.core.estimates import MAX_KINDS, Estimates, Hold
from headgate.core.events import LAST_RANK, rank_of
from headgate.core.gates import GatePart
from headgate.core.money import format_usd
from headgate.core.reasons import (
    BudgetShort,
    FirstOfKind,
    GateClosed,
    LaneBehind,
    NotYetDue,
    Reason,
)
from headgate.core.retention import Retention
from headgate.core.snapshot import Project
from headgate.core.task import TERMINAL, Draft, Submission, Task, TaskRecord, TaskStatus, Terms
from headgate.core.why import TaskReason, reasons
from headgate.engine.engine import Engine, EngineSettings, Why
from headgate.engine.events import Happening
from headgate.errors import (
    IllegalTransitionError,
    InvalidSettingError,
    InvalidTaskError,
    NotDispatchingError,
    StoreError,
    StoreUnavailableError,
    WorkflowError,
)
from headgate.executors.callable import CallableExecutor
from headgate.executors.command import check_variable, found_program, start_problem
from headgate.executors.executor import Executor
from headgate.executors.targets import CallableTarget
from headgate.executors.templates import ObserveSlot
from headgate.providers.prices import PriceList
from headgate.storage import queries, usage
from headgate.storage.sql_store import StoreLedger
from headgate.storage.sqlite import SqliteTaskStore
from headgate.storage.store import TaskQuery
from headgate.storage.usage import KnownKind, keep_kinds
from headgate.storage.writer import ChildStarter
from headgate.workflow.backend import (
    STATES,
    Backend,
    Money,
    StepOrder,
    StepTask,
    TaskListener,
    with_last_try,
)
from headgate.workflow.budgets import (
    RunLedger,
    change_in_ledger,
    choose_ledger,
    create_limits,
    limits_of,
    money_of,
    recorded_ledger,
    run_scopes,
    scopes_again,
)
from headgate.workflow.costs import earlier_kinds, write_kinds
from headgate.workflow.placeholders import EnvPlaceholder, references
from headgate.workflow.run_folder import STORE, Run
from headgate.workflow.run_record import RunOptions, RunScope
from headgate.workflow.step_executors import (
    OWN_PREFIX,
    RUN_LABEL,
    STEP_LABEL,
    CallSteps,
    CommandSteps,
    WithinTimeout,
    WrongSteps,
)
from headgate.workflow.step_requests import (
    CallRequest,
    CommandRequest,
    HttpRequest,
    ModelRequest,
    TargetRequest,
    Variables,
    check_header_name,
    encoded,
    is_truncated,
    model_headers,
    model_url,
    result_value,
)
from headgate.workflow.workflow import (
    CallWork,
    CommandWork,
    HttpWork,
    ModelWork,
    Step,
    TargetWork,
    Workflow,
)

if TYPE_CHECKING:
    from headgate.app import SlotWork
    from headgate.workflow.target_steps import TargetSteps

PAGE = 1_000
LOOK_SECONDS = 1.0
MAX_ASKED_AT_ONCE = 32

SUBMIT_TRIES = 60
SUBMIT_PAUSE_SECONDS = 0.5
LEAVE_SECONDS = 10.0
BOOK_SECONDS = 30.0
"""How long the end of a run waits for a ledger that is away."""

_LIVE = tuple(dict.fromkeys(set(TaskStatus) - TERMINAL))


def local_backend(
    run: Run, workflow: Workflow, options: RunOptions, environ: Mapping[str, str]
) -> Backend:
    """Return what carries out a run here; whatever is missing is found before anything is opened.

    The run must be held by this process.
    """
    variables = Variables(environ)
    check_steps(workflow, variables)
    targets = targets_of(run, workflow, options, environ)
    scopes, choice = _budgets(run, workflow, options, environ)
    if any(isinstance(step.work, CallWork) for step in workflow.steps):
        search(workflow.folder)
    concurrency = options.concurrency or workflow.concurrency
    ledger = None if choice.url is None else connect_budget(choice.url).ledger
    store = SqliteTaskStore(run.path / STORE, keeps_ledger=ledger is None, starter=starter_of(run))
    slots = None if targets is None else _slots(run, store, targets, environ)
    executors = step_executors(
        workflow,
        variables,
        workflow.price_list,
        targets,
        concurrency=concurrency,
        observe_slot=None if slots is None else slots.slots.observe,
    )
    engine = Engine(
        store,
        executors,
        engine_settings(workflow, targets, concurrency, {} if ledger else limits_of(scopes)),
        ledger=ledger,
    )
    if slots is not None:
        from headgate.app import attach_slots  # noqa: PLC0415  most runs have no slots

        attach_slots(engine, slots)
    tasks = LocalTasks(run.id, workflow, scopes[-1].scope, targets)
    return LocalBackend(run, tasks, store, engine, scopes=scopes, options=options)


class StepHolds:
    """What runs of steps are to hold before they start, as the engine of a run would say."""

    def __init__(
        self, workflow: Workflow, targets: TargetSteps | None, kinds: Sequence[KnownKind]
    ) -> None:
        self._settings = engine_settings(workflow, targets, 1, {}).dispatch
        self._tasks = LocalTasks("", workflow, "", targets)
        known = sorted(kinds, key=attrgetter("fed_at"))
        self._estimates = Estimates([(one.kind, one.learned) for one in known])

    def __call__(self, order: StepOrder) -> Hold:
        """Return what an attempt at an order has to hold."""
        draft = self._tasks.draft(order, 0.0)
        return self._settings.hold(Waiting(draft.task, draft.terms, 1, 0), self._estimates)


def _slots(
    run: Run, store: SqliteTaskStore, targets: TargetSteps, environ: Mapping[str, str]
) -> SlotWork | None:
    """Return the slots that the targets of a run use; None if they use none."""
    settings = targets.slot_settings
    if settings is None:
        return None
    from headgate.app import build_slots  # noqa: PLC0415  most runs have no slots

    return build_slots(settings, store, environ, data=run.path, is_shared=False)


def _budgets(
    run: Run, workflow: Workflow, options: RunOptions, environ: Mapping[str, str]
) -> tuple[tuple[RunScope, ...], RunLedger]:
    """Return the scopes of a run and its ledger: as they were chosen once, before it began."""
    if (run.path / STORE).exists():
        ledger = recorded_ledger(run.record, options, environ)
        return scopes_again(run.record, options), ledger
    scopes = scopes_again(run.record, options) if run.record.scopes else ()
    scopes = scopes or run_scopes(workflow, options, environ)
    ledger = choose_ledger(scopes, options, environ)
    run.change(scopes=scopes, tracker=ledger.tracker, ledger=ledger.address)
    return scopes, ledger


def _ignore(_task: StepTask) -> None:
    return


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
        self._listener: TaskListener = _ignore
        # By task that has not ended, the rank of what was told of it last.
        self._live: dict[str, int] = {}
        self._file = StoreFile(run.path / STORE)
        self._is_closing = self._is_closed = False
        self._asked_at = store.now()
        self.unbooked_micro_usd = 0
        """What the ledger had not recorded when everything was closed; a resume records it."""
        self.cut_off = 0
        """How many steps ran when an earlier process of the run was killed."""
        self.cut_off_micro_usd = 0
        self._money: list[Money] = [
            Money(
                scope=one.scope,
                spent_micro_usd=0,
                reserved_micro_usd=0,
                limit_micro_usd=one.micro_usd,
            )
            for one in scopes
        ]
        # Events end when dispatching does; what runs then may end later, and is told of, too.
        engine.feed.subscribe(events=self._observe_event, records=self._observe)
        engine.before_start(self._prepare)
        engine.also_run("run", self._recheck_when_needed)

    @property
    def trouble(self) -> str:
        """Why nothing ends or starts, in one line; at the end, why not everything is booked."""
        engine, ledger = self._engine, self._ledger_problem
        if self._is_closed:
            return ledger if self.unbooked_micro_usd else ""
        if ledger and self._is_closing:
            wait = f"the end waits {BOOK_SECONDS:.0f} s for it, or until Ctrl-C"
            return f"the ledger does not answer, and what has ended is not booked; {wait}: {ledger}"
        if ledger:
            return f"the ledger does not answer, and nothing starts or is booked: {ledger}"
        if store := engine.runner.problem or engine.node.problem or engine.dispatcher.problem:
            return f"the store does not answer, and no step ends before it does: {store}"
        return ""

    def check(self) -> None:
        """Raise if the store was deleted under the run: nothing can ever end then."""
        self._file.check()

    def listen(self, listener: TaskListener) -> None:
        """Have changes told from now on."""
        self._listener = listener

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
            waiting, error = await self._try_submit(waiting)
            if error is None:
                return
            if tries == SUBMIT_TRIES:
                raise error
            await asyncio.sleep(SUBMIT_PAUSE_SECONDS)

    async def results(self, tasks: Sequence[StepTask]) -> list[Any]:
        """Return the results of tasks that are done, as values, in their order."""
        names = [task.task_id for task in tasks]
        found = await self._store.ask(partial(queries.results, task_ids=names))
        return [result_value(found.get(name)) for name in names]

    async def cancel(self, tasks: Sequence[StepTask]) -> None:
        """Cancel what waits and stop what runs; what has ended meanwhile stays as it is."""
        if self._is_closing:
            # Whoever wants an end waits no longer for a ledger that is away, either.
            self._engine.hurry()
        for start in range(0, len(tasks), MAX_ASKED_AT_ONCE):
            some = tasks[start : start + MAX_ASKED_AT_ONCE]
            await asyncio.gather(*(self._cancel(task.task_id) for task in some))

    async def why(self, task: StepTask) -> str:
        """Say in one line why a task waits; empty if nobody knows."""
        engine = self._engine
        if engine.dispatcher.problem:
            return engine.dispatcher.problem
        try:
            found = await engine.why(task.task_id)
        except (NotDispatchingError, StoreUnavailableError):
            return ""
        if found is None:
            return ""
        return why_line(found, engine.dispatcher.dispatch_state, engine.now(), task)

    async def money(self) -> list[Money]:
        """Return the scopes of the run; as they were last, while the ledger cannot be asked."""
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
        dispatch_state = self._engine.dispatcher.dispatch_state
        return dispatch_state is not None and waits_for_windows(dispatch_state, self._engine.now())

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
            await self._keep_learned()
        self._is_closed = True
        await self._engine.close()

    async def _keep_learned(self) -> None:
        """Have later runs of the workflow know what its steps have cost."""
        project_id = self._run.workflow.name
        kinds = await self._store.ask(
            partial(usage.known_kinds, project_id=project_id, most=MAX_KINDS)
        )
        write_kinds(self._options.data, kinds)

    @property
    def has_left_behind(self) -> bool:
        """Whether work that was told to stop goes on all the same, and ends with the process."""
        return self._engine.runner.has_left_behind

    @property
    def _ledger(self) -> Ledger:
        return self._engine.ledger or StoreLedger(self._store)

    @property
    def _ledger_problem(self) -> str:
        """What a ledger outside the store failed by the last time; empty if by nothing."""
        return "" if self._engine.ledger is None else self._engine.ledger.problem

    async def _prepare(self) -> None:
        """Create what budgets there are not, and know what is yet to end, before anything runs."""
        self._file.note()
        await self._create_limits()
        if not self._run.record.has_begun:
            kinds = earlier_kinds(self._options.data, self._run.workflow.name)
            await self._store.run(partial(keep_kinds, kinds))
        before: str | None = None
        while True:
            page = await self._store.find(TaskQuery(states=_LIVE, before=before, limit=PAGE))
            for record in page.records:
                if record.task.status is TaskStatus.RUNNING:
                    self.cut_off += 1
                    self.cut_off_micro_usd += record.progress.reserved_micro_usd
                if self._is_void(record):
                    # Before anything is decided, so that no work of an earlier file starts.
                    await self._store.cancel(record.task.id, node_id=self._engine.node.node_id)
                self._live[record.task.id] = -1
            before = page.next_before
            if before is None:
                return

    def _is_void(self, record: TaskRecord) -> bool:
        return self._run.is_void(
            record.submission.labels[STEP_LABEL], step_task(record, self._run.id)
        )

    async def _create_limits(self) -> None:
        record, ledger = self._run.record, self._engine.ledger
        if ledger is not None:
            if record.has_begun and self._options.micro_usd is not None:
                for scope, limit in limits_of(self._scopes[-1:]).items():
                    await ledger.set_limit(scope, limit)
            self._scopes = await create_limits(
                ledger,
                self._scopes,
                self._options,
                change=change_in_ledger(record.tracker, record.ledger),
                is_resumed=record.has_begun,
            )
        if self._scopes != record.scopes:
            self._run.change(scopes=self._scopes, micro_usd=self._scopes[-1].micro_usd)

    async def _try_submit(self, drafts: list[Draft]) -> tuple[list[Draft], Exception | None]:
        """Submit tasks, and return those of which nobody knows whether they were stored."""
        outcomes = await asyncio.gather(
            *(self._engine.submit(*draft) for draft in drafts), return_exceptions=True
        )
        failed: list[Draft] = []
        problem: Exception | None = None
        for draft, outcome in zip(drafts, outcomes, strict=True):
            if isinstance(outcome, StoreUnavailableError):
                failed.append(draft)
                problem = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        return failed, problem

    async def _cancel(self, task_id: str) -> None:
        try:
            await self._engine.cancel_soon(task_id)
        except IllegalTransitionError:
            return

    def _observe_event(self, _happening: Happening, record: TaskRecord) -> None:
        self._notify(record)

    def _observe(self, records: Iterable[TaskRecord]) -> None:
        for record in records:
            self._notify(record)

    def _notify(self, record: TaskRecord) -> None:
        """Tell of a change, unless this or what came after it was told before."""
        task_id = record.task.id
        rank = rank_of(record.task.status, record.progress.attempt)
        if rank <= self._live.get(task_id, LAST_RANK):
            return
        if rank == LAST_RANK:
            del self._live[task_id]
        else:
            self._live[task_id] = rank
        self._listener(step_task(record, self._run.id))

    async def _recheck_when_needed(self) -> None:
        life = self._engine.feed.life
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if life != self._engine.feed.life:
                life = self._engine.feed.life
                await self._recheck()

    async def _recheck(self) -> None:
        """Tell what happened to tasks while nobody was told."""
        for task_id in list(self._live):
            record = await self._store.get(task_id)
            if record is not None:
                self._notify(record)


class StoreFile:
    """The file of a store as it was opened: one that was deleted does not come back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: tuple[int, int] | None = None

    def note(self) -> None:
        """Remember the file, now that it is open."""
        self._opened = self._identity()

    def check(self) -> None:
        """Raise if the file is not the one that was opened."""
        if self._opened is None or self._identity() == self._opened:
            return
        folder = self._path.parent
        lost = self._path if folder.exists() else f"the folder of the run, {folder},"
        problem = f"{lost} was deleted or replaced while the run went on; what ran is lost"
        advice = "; begin anew with headgate run FILE"
        raise StoreError(problem + advice)

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino


# Runs of steps as tasks of the engine, and back.
#
# A task is named after its run and its number, and after the generation if a resume began it anew.
# Rule: the same order gives the same task, so that submitting it again changes nothing.

AGENT = "run"
"""The agent of steps that name none."""

PROVISIONAL = "p"
"""How the name of a task ends that went without one of its parents."""

_WRONG = f"{OWN_PREFIX}wrong"
_MODEL = f"{OWN_PREFIX}model:"


class LocalTasks:
    """Makes tasks of the orders of one run; all of them are charged to the same scope."""

    def __init__(
        self, run_id: str, workflow: Workflow, scope: str, targets: TargetSteps | None
    ) -> None:
        self._run_id = run_id
        self._project_id = workflow.name
        self._scopes = (scope,)
        self._targets = targets
        self._terms: dict[tuple[str, int | None], Terms] = {}

    def draft(self, order: StepOrder, now: float) -> Draft:
        """Return the task of an order; one that no target would take fails when it runs."""
        step, request = order.step, order.request
        labels = {**step.labels, RUN_LABEL: self._run_id, STEP_LABEL: step.id}
        if not isinstance(request, TargetRequest):
            submission = Submission(input=encoded(request), labels=labels)
            return self._made(order, Task(target=_target_name(step, request)), submission, now)
        if self._targets is None:
            raise ValueError("the workflow has no step for a target")
        try:
            task, terms, submission = self._targets.draft(step, request, now)
        except InvalidTaskError as error:
            line = msgspec.Raw(msgspec.json.encode(str(error)))
            return self._made(
                order, Task(target=_WRONG), Submission(input=line, labels=labels), now
            )
        submission = msgspec.structs.replace(submission, labels=labels)
        made = self._made(order, task, submission, now)
        own = msgspec.structs.replace(made.terms, names_slot=terms.names_slot)
        return made._replace(terms=own)

    def _made(self, order: StepOrder, task: Task, submission: Submission, now: float) -> Draft:
        step = order.step
        own = Task(
            id=task_id(self._run_id, order),
            project_id=self._project_id,
            agent_id=step.agent or AGENT,
            priority=step.priority,
            weight=step.weight,
            created_at=now,
            estimate_tokens=order.tokens,
            scopes=self._scopes,
            target=task.target,
            slot=task.slot,
            provider=task.provider,
            has_usd_estimate=order.micro_usd is not None or step.cost_micro_usd is not None,
        )
        return Draft(own, self._terms_of(step, order.micro_usd), submission)

    def _terms_of(self, step: Step, micro_usd: int | None) -> Terms:
        key = (step.id, micro_usd)
        terms = self._terms.get(key)
        if terms is None:
            if len(self._terms) >= MAX_TERMS:
                self._terms.clear()
            is_fixed = step.cost_micro_usd is not None
            terms = self._terms[key] = Terms(
                estimate_micro_usd=None if is_fixed else micro_usd,
                action=step.id,
                max_attempts=step.retries + 1,
                attempt_seconds=step.timeout_seconds,
                cost_micro_usd=step.cost_micro_usd,
            )
        return terms


MAX_TERMS = 10_000
"""How many terms are kept to be used again; estimates may differ from item to item."""


def task_id(run_id: str, order: StepOrder) -> str:
    """Return the name of a task; names sort by number."""
    mark = PROVISIONAL if order.is_provisional else ""
    name = f"{run_id}-{order.number:07d}"
    return f"{name}-{order.generation}{mark}" if order.generation or mark else name


def step_task(record: TaskRecord, run_id: str) -> StepTask:
    """Return what is known of a task, as whoever conducts the run knows it."""
    task, progress = record.task, record.progress
    number, _, generation = task.id[len(run_id) + 1 :].partition("-")
    return StepTask(
        number=int(number),
        generation=int(generation.removesuffix(PROVISIONAL) or 0),
        task_id=task.id,
        state=STATES[task.status],
        attempt=progress.attempt,
        started_at=progress.started_at,
        completed_at=progress.completed_at,
        error=record.error,
        tokens=progress.used_tokens,
        micro_usd=progress.used_micro_usd,
        assumed_micro_usd=progress.assumed_micro_usd,
        is_unpriced=progress.is_unpriced,
        is_truncated=_is_truncated(record),
        is_provisional=generation.endswith(PROVISIONAL),
    )


def _is_truncated(record: TaskRecord) -> bool:
    """Tell whether the answer of a model was truncated, and read only those that may be."""
    text = record.result
    if text is None or not (record.task.target or "").startswith(_MODEL):
        return False
    has_word = any(word in text for word in ('"length"', '"max_tokens"'))
    return has_word and is_truncated(result_value(text.encode()))


def step_executors(
    workflow: Workflow,
    variables: Variables,
    prices: PriceList,
    targets: TargetSteps | None,
    *,
    concurrency: int,
    observe_slot: ObserveSlot | None = None,
) -> dict[str, WithinTimeout]:
    """Return the executors of all steps, by the names that their tasks have them under."""
    found = {} if targets is None else targets.executors(variables.environ, observe_slot)
    found[_WRONG] = WrongSteps()
    commands = CommandSteps(workflow.folder, variables, prices)
    for step in workflow.steps:
        name = _target_name(step, step.work)
        match step.work:
            case CommandWork():
                found[name] = commands
            case CallWork(entry_point=entry_point) if name not in found:
                found[name] = _call(entry_point, f"steps.{step.id}.call", prices, concurrency)
    found |= _requesting(workflow, variables, prices, concurrency, targets, observe_slot)
    return {name: WithinTimeout(executor) for name, executor in found.items()}


def _requesting(
    workflow: Workflow,
    variables: Variables,
    prices: PriceList,
    concurrency: int,
    targets: TargetSteps | None,
    observe_slot: ObserveSlot | None,
) -> dict[str, Executor]:
    """Return the executors of steps that are requests; they share their connections."""
    steps = [step for step in workflow.steps if isinstance(step.work, HttpWork | ModelWork)]
    if not steps:
        return {}
    # It brings a client for HTTP along, which a run of commands does without.
    from headgate.workflow import http_steps as step_requests  # noqa: PLC0415

    connections = step_requests.Connections(concurrency)
    sending = step_requests.Sending(connections, variables, prices, observe_slot)
    http = sending.http()
    found: dict[str, Executor] = {}
    for step in steps:
        name = _target_name(step, step.work)
        if isinstance(step.work, HttpWork):
            found[name] = http
        elif isinstance(step.work, ModelWork) and name not in found:
            endpoint = workflow.endpoints[step.work.endpoint]
            slot = None if targets is None else targets.slot_of(endpoint)
            found[name] = sending.model(endpoint, slot)
    return found


def _call(entry_point: str, setting: str, prices: PriceList, concurrency: int) -> CallSteps:
    target = CallableTarget(entry_point=entry_point, threads=concurrency)
    return CallSteps(CallableExecutor(entry_point, target, prices=prices, setting=setting))


def _target_name(step: Step, work: object) -> str:
    """Return the name of the target of a step.

    A pause of it holds back these steps alone, and what is learned of costs is learned for it.
    """
    match work:
        case CommandRequest() | CommandWork():
            return f"{OWN_PREFIX}command:{step.id}"
        case HttpRequest() | HttpWork():
            return f"{OWN_PREFIX}http:{step.id}"
        case CallRequest(entry_point=entry_point) | CallWork(entry_point=entry_point):
            return f"{OWN_PREFIX}call:{entry_point}"
        case ModelRequest(endpoint=endpoint) | ModelWork(endpoint=endpoint):
            return f"{_MODEL}{endpoint}"
    return ""


# The engine of a run in this process: what it runs on, what it may use, how it is set.

RESULTS_KEPT_SECONDS = 100 * 365 * 86_400.0
WRITTEN_APART = 1_000
"""From how many runs of steps on a process of its own writes: starting one takes a moment."""


def targets_of(
    run: Run, workflow: Workflow, options: RunOptions, environ: Mapping[str, str]
) -> TargetSteps | None:
    """Return the targets of a workflow, and have the record name their file for a resume."""
    targets = named_targets(workflow, options, environ)
    path = None if targets is None else settings_file(options.config)
    if path is not None and run.record.config is None:
        run.change(config=str(path.absolute()))
    return targets


def named_targets(
    workflow: Workflow, options: RunOptions, environ: Mapping[str, str]
) -> TargetSteps | None:
    """Return the targets that the steps of a workflow name; None if they name none."""
    if not any(isinstance(step.work, TargetWork) for step in workflow.steps):
        return None
    # It brings the service along, which most runs do without.
    from headgate.workflow.target_steps import target_steps  # noqa: PLC0415

    return target_steps(workflow, settings_file(options.config), environ, agent_id=AGENT)


def search(folder: Path) -> None:
    """Have functions beside a workflow found when its steps call them."""
    # Behind everything else: a file beside the workflow must not hide a module of ours.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def starter_of(run: Run) -> ChildStarter | None:
    """Return what starts the process that writes, where the run is long enough to be worth one."""
    if run.record.total < WRITTEN_APART or not StoreSettings().writes_in_process:
        return None
    modules = ("headgate.storage.sqlite",)
    return ChildStarter(inherited=() if run.lock is None else (run.lock,), modules=modules)


def engine_settings(
    workflow: Workflow,
    targets: TargetSteps | None,
    concurrency: int,
    budgets: dict[Scope, Limit],
) -> EngineSettings:
    """Return how the engine of a run works: nothing is turned away, and no result expires."""
    dispatch = DispatchSettings(
        projects=(Project(id=workflow.name, max_concurrent_agents=None),),
        max_inflight=concurrency,
        max_per_agent_inflight=concurrency,
    )
    return EngineSettings(
        dispatch=dispatch if targets is None else targets.applied_to(dispatch),
        limits=QueueLimits(max_queue=None, max_per_agent=None, max_scheduled=None),
        budgets=budgets,
        capacity=concurrency,
        retention=Retention(seconds=RESULTS_KEPT_SECONDS, max_tasks=None),
        free_failures=frozenset() if targets is None else targets.free_failures,
    )


PARALLEL_ADVICE = "give the step an estimate to run more at once"

# Why steps wait in this process, in one line each, and whether anything but time can help.


def why_line(why: Why, dispatch_state: DispatchState | None, now: float, task: StepTask) -> str:
    """Return every reason why a task waits, in one line, and what it met when it was tried last."""
    lines = [_line(reason, dispatch_state, now) for reason in why.reasons]
    return with_last_try("; ".join(lines), task)


def waits_for_windows(dispatch_state: DispatchState, now: float) -> bool:
    """Tell whether all that waits can start only when the window of a budget moves on."""
    if not dispatch_state.waiting or len(dispatch_state.in_flight):
        return False
    return all(
        _waits_for_window(dispatch_state, reasons(dispatch_state, one, now))
        for one in list(dispatch_state.waiting)
    )


def _waits_for_window(dispatch_state: DispatchState, found: tuple[TaskReason, ...]) -> bool:
    refusals = (_refusal(reason.detail, dispatch_state) for reason in found)
    # What others hold may be given back, and is asked for again before long.
    return any(one is not None and one.resets_at is not None and not one.reserved
               for one in refusals)  # fmt: skip


def _refusal(reason: Reason, dispatch_state: DispatchState) -> Refused | None:
    match reason:
        case BudgetShort(scope=scope) | GateClosed(kind="scope", name=scope):
            return dispatch_state.parking.refusals.get(GatePart("scope", scope))
    return None


def _line(found: TaskReason, dispatch_state: DispatchState | None, now: float) -> str:
    reason = found.detail
    refused = None if dispatch_state is None else _refusal(reason, dispatch_state)
    if refused is not None:
        return _budget_line(refused, now)
    match reason:
        case NotYetDue(until=until):
            return f"tries again in {max(0.0, until - now):.0f} s"
        case LaneBehind():
            return "others go first"
        case FirstOfKind():
            return f"{reason.message.partition(';')[0]}; {PARALLEL_ADVICE}"
        case GateClosed(kind="target", why=why, until=until) if until is not None:
            return f"paused for {max(0.0, until - now):.0f} s: {why}"
    return reason.message


def _budget_line(refused: Refused, now: float) -> str:
    used = refused.spent + refused.overrun
    line = f"{refused.scope or 'the root'}: {_amount(used, refused)} of"
    line += f" {_amount(refused.limit, refused)} spent"
    line += f", {_amount(refused.reserved, refused)} reserved"
    line += f"; needed: {_amount(refused.requested, refused)}"
    if refused.resets_at is None:
        return line
    return f"{line}; more in {max(0.0, refused.resets_at - now):.0f} s"


def _amount(amount: int, refused: Refused) -> str:
    if refused.unit is Unit.TOKENS:
        return f"{amount} tokens"
    return format_usd(amount)


# What can be known to be missing before a run begins: variables, programs, keys, headers.
#
# Rule: nothing is started or sent here. What an earlier step may yet make, such as a program in the
# folder, is not asked for.

MAX_REMEMBERED = 1_000


def missing_keys(
    workflow: Workflow, environ: Mapping[str, str]
) -> Iterator[tuple[str, InvalidSettingError]]:
    """Give the variables with keys of providers that model steps need and that are not set.

    An endpoint that the file describes names its variables itself, and its errors name the file.
    """
    found: set[str] = set()
    for step in workflow.steps:
        if not isinstance(step.work, ModelWork):
            continue
        endpoint = workflow.endpoints.get(step.work.endpoint)
        if endpoint is None or endpoint.key is None or endpoint.line is not None:
            continue
        for one in references(endpoint.key):
            if isinstance(one, EnvPlaceholder) and one.name not in {*found, *environ}:
                found.add(one.name)
                goes_to = f"{step.work.model} goes to {endpoint.name}, which needs {one.name}"
                yield one.name, InvalidSettingError(f"steps.{step.id}.model", f"{goes_to}; set it")


def check_steps(workflow: Workflow, variables: Variables) -> None:
    """Raise `InvalidSettingError` for what a step needs and does not find."""
    for _, error in missing_keys(workflow, variables.environ):
        raise error
    asked: set[str] = set()
    for step in workflow.steps:
        setting = f"steps.{step.id}"
        match step.work:
            case CommandWork():
                _check_command(step, step.work, workflow, variables)
            case HttpWork(url=url, headers=headers):
                variables.check(url, f"{setting}.http.url")
                for name, text in headers.items():
                    check_header_name(name, f"{setting}.http.headers.{name}")
                    variables.check(text, f"{setting}.http.headers.{name}")
            case ModelWork(endpoint=endpoint) if endpoint not in asked:
                asked.add(endpoint)
                _check_endpoint(endpoint, setting, workflow, variables)


def in_file(error: InvalidSettingError, workflow: Workflow) -> InvalidSettingError | WorkflowError:
    """Return an error as one of the file, with its line and key, if it is about what stands there.

    Executors and the like name what they are for as `steps.ID.…`; a file has steps in an order.
    """
    kind, _, rest = error.field.partition(".")
    if kind == "steps":
        step_id, _, key = rest.partition(".")
        for index, step in enumerate(workflow.steps):
            if step.id == step_id:
                return _located(error, workflow, step.line, f"steps[{index}].{key}")
    if kind == "config":
        return _located(error, workflow, _endpoint_line(error.field, workflow), error.field)
    return error


def _located(
    error: InvalidSettingError, workflow: Workflow, line: int | None, key: str
) -> WorkflowError:
    return WorkflowError(workflow.file, error.problem, line=line, key=key)


def _endpoint_line(field: str, workflow: Workflow) -> int | None:
    """Return the line of an endpoint, or of the first step that asks one that is always there."""
    for name, endpoint in workflow.endpoints.items():
        if field.startswith(f"config.endpoints.{name}."):
            asking = (one.line for one in workflow.steps
                      if isinstance(one.work, ModelWork) and one.work.endpoint == name)  # fmt: skip
            return next(asking, None) if endpoint.line is None else endpoint.line
    return None


def _check_command(step: Step, work: CommandWork, workflow: Workflow, variables: Variables) -> None:
    setting = f"steps.{step.id}"
    for text in work.command:
        variables.check(text, f"{setting}.command")
    for name, text in work.env.items():
        check_variable(name, setting=f"{setting}.env.{name}")
        variables.check(text, f"{setting}.env.{name}")
    if work.cwd is not None:
        variables.check(work.cwd, f"{setting}.cwd")
    _check_program(step, work, workflow, variables)


def _check_program(step: Step, work: CommandWork, workflow: Workflow, variables: Variables) -> None:
    setting = f"steps.{step.id}.command"
    name = variables.fixed(work.command[0], setting)
    inner = "" if work.cwd is None else variables.fixed(work.cwd, f"steps.{step.id}.cwd")
    # Another PATH may be filled in later; a step before this one may make a file or a folder.
    is_known = "PATH" not in work.env and not (step.depends_on and ("/" in (name or "") or inner))
    if name is None or inner is None or not is_known:
        return
    cwd = str(workflow.folder / inner)
    try:
        _find(name, cwd, variables.environ.get("PATH"))
    except OSError as error:
        problem, _ = start_problem(error, name, cwd)
        advice = "install it, or correct the name"
        raise InvalidSettingError(setting, f"{variables.cleaned(problem)}; {advice}") from None


@lru_cache(maxsize=MAX_REMEMBERED)
def _find(name: str, cwd: str, search: str | None) -> str:
    """Look for a program; ten thousand steps mostly run the same few."""
    return found_program(name, cwd, {} if search is None else {"PATH": search})


def _check_endpoint(name: str, setting: str, workflow: Workflow, variables: Variables) -> None:
    endpoint = workflow.endpoints.get(name)
    if endpoint is None:
        where = f"{setting}.endpoint"
        problem = f"there is no endpoint {name!r}; add it to config.endpoints"
        raise InvalidSettingError(where, problem)
    url = model_url(endpoint, variables)
    if not url.startswith(("http://", "https://")):
        where = f"config.endpoints.{name}.url"
        raise InvalidSettingError(where, "must begin with http:// or https://")
    model_headers(endpoint, variables)
