"""The dispatcher: decides what runs next, and applies the plan in one transaction.

It keeps a desk between rounds and is shown every record that changes. A submit, a settlement or a
timer wakes it; the tick is only a net below that. It dispatches while it is elected. When nobody
knows whether a step was applied, the desk is thrown away and made again from the store. What is
seen while that goes on may be newer than what is read, so it is kept and seen again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec
import structlog

from headgate.core.budgets.ledger import Ledger, Refused, ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import LIVE, Call, Reservation
from headgate.core.budgets.scopes import ROOT, Scope, charged_scopes
from headgate.core.dispatch_state import (
    DispatchSettings,
    DispatchState,
    Planned,
)
from headgate.core.gates import GateClosure
from headgate.core.lifecycle import EXPIRED_WHILE_QUEUED
from headgate.core.money import MicroUsd, Tokens
from headgate.core.slots.slot import SlotStanding
from headgate.core.task import Progress, TaskRecord, TaskStatus, is_worker
from headgate.engine.events import EventFeed
from headgate.errors import (
    CallerError,
    IllegalSettlementError,
    StaleEpochError,
    StoreUnavailableError,
)
from headgate.storage.store import (
    Assigned,
    Assignment,
    Backlog,
    Expiration,
    NewTask,
    NotAssigned,
    Overdue,
    TaskStore,
)

# Tasks in doubt: nobody knows whether what was asked for them is on disk, so the store is asked.
#
# The answer to a step got lost, or whoever waited for it has gone. Then the step may be on its way
# still, and a look at the store would come too soon. So the look is taken behind it.

MAX_IN_DOUBT = 1_000
"""With more of them, it is quicker to read everything anew."""


class UnknownWrites:
    """The tasks to look at."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store
        self._task_ids: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._task_ids)

    @property
    def are_too_many(self) -> bool:
        """Whether it is better to read everything anew."""
        return len(self._task_ids) > MAX_IN_DOUBT

    def add(self, task_id: str) -> None:
        """Look at a task the next time."""
        self._task_ids[task_id] = None

    def forget(self) -> None:
        """Look at none; everything is read anew."""
        self._task_ids = {}

    async def look(self) -> AsyncIterator[tuple[str, TaskRecord | None]]:
        """Return the tasks as the store has them, each when it was read; None if it has not."""
        task_ids, self._task_ids = self._task_ids, {}
        # Steps are written in their order: what was sent before this is on disk now, or lost.
        await self._store.sent(())
        for task_id in task_ids:
            yield task_id, await self._store.get(task_id)


# Drops: queued tasks that the dispatcher ends without having run them, and what they are told.


def expired(task_ids: Iterable[str]) -> list[Expiration]:
    """Return the end of tasks whose deadline passed while they waited."""
    return [
        Expiration(task_id=task_id, status=TaskStatus.FAILED, error=EXPIRED_WHILE_QUEUED)
        for task_id in task_ids
    ]


def rejected(errors: Mapping[str, str]) -> list[Expiration]:
    """Return the end of tasks that no budget will hold, each with its reason."""
    return [
        Expiration(task_id=task_id, status=TaskStatus.REJECTED, error=error)
        for task_id, error in errors.items()
    ]


# Tasks that are expected: on their way to the store, and shown to a desk that has nothing to do.
#
# Where nothing waits that could start, a task starts as soon as it is stored. Its plan need not
# wait for the answer to its submit: it is sent behind it, and both are in one transaction if they
# arrive together. The store decides as ever: a task that it did not take is not there to be
# assigned.


def expect(dispatch_state: DispatchState | None, new: NewTask, now: float) -> bool:
    """Show a desk the record that a task will most likely have; False if others could start."""
    if (
        dispatch_state is None
        or dispatch_state.index.offers.has_ready
        or new.task.id in dispatch_state.waiting
    ):
        return False
    if new.terms.depends_on or new.task.not_before is not None:
        return False
    task = msgspec.structs.replace(
        new.task, status=TaskStatus.QUEUED, enqueued_tick=dispatch_state.tick
    )
    dispatch_state.observe(TaskRecord(task=task, terms=new.terms, agent_id=task.agent_id), now)
    return True


def unexpect(dispatch_state: DispatchState | None, task_id: str, now: float) -> None:
    """Have a desk forget a task that it was shown too soon; what is planned the store judges."""
    if dispatch_state is not None and task_id in dispatch_state.waiting:
        dispatch_state.forget(task_id, now)


# Starts that nobody heard of: written as running on this node by a step whose answer got lost.
#
# The store has them running here, and this node does not run them; nobody else would ever take them
# back, because the node is alive. So it looks for them itself, whether it still dispatches or not.

LOOKED_FOR_SECONDS = 10.0
"""A server may finish a step a little after its caller has lost sight of it."""

Start = Callable[[TaskRecord], None]
"""Begins an attempt on this node."""

Runs = Callable[[str], bool]
"""Tells whether an attempt at a task is under way on this node."""


class LostStarts:
    """Looks for tasks that may have been started on this node."""

    def __init__(self, store: TaskStore, *, start: Start, runs: Runs) -> None:
        self._store = store
        self._start = start
        self._runs = runs
        self._since: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def suspect(self, task_ids: Iterable[str]) -> None:
        """Look for these tasks for a while; nobody knows whether they were started."""
        now = self._store.now()
        for task_id in task_ids:
            self._since[task_id] = now

    async def look(self, node_id: str) -> None:
        """Start what the store has running on this node, and this node does not."""
        now = self._store.now()
        for task_id, since in list(self._since.items()):
            if not self._runs(task_id):
                await self._look_at(task_id, node_id)
            if now - since >= LOOKED_FOR_SECONDS:
                self._since.pop(task_id, None)

    async def _look_at(self, task_id: str, node_id: str) -> None:
        record = await self._store.get(task_id)
        if record is None or record.task.status is not TaskStatus.RUNNING:
            return
        if record.progress.node_id == node_id and not self._runs(task_id):
            self._start(record)


# Making a desk from the store, while the event loop goes on with everything else.

LOADED_AT_ONCE = 500
"""How many tasks are loaded between two turns of the loop, which has signs of life to show."""


def ended_while_loading(epoch: int) -> StaleEpochError:
    """Return why what was loaded is of no use."""
    return StaleEpochError(f"epoch {epoch} ended while the backlog was read")


async def dispatch_state_from(
    backlog: Backlog, settings: DispatchSettings, now: float, *, node_id: str
) -> DispatchState:
    """Return a desk that has everything in the backlog, for the node that dispatches."""
    dispatch_state = DispatchState(settings)
    dispatch_state.load(
        (),
        usage=backlog.usage,
        rate_counts=backlog.rate_counts,
        closures=backlog.closures,
        lane_served=_served(backlog),
        tick=backlog.tick,
        now=now,
    )
    # Among equals the first is taken, and a task starts here in one step less than elsewhere.
    for node in sorted(backlog.nodes, key=lambda node: node.id != node_id):
        dispatch_state.workers.set_node(node.id, node.places, agent_id=node.agent_id, now=now)
    for start in range(0, len(backlog.records), LOADED_AT_ONCE):
        dispatch_state.load_more(backlog.records[start : start + LOADED_AT_ONCE], now)
        await asyncio.sleep(0)
    return dispatch_state


def _served(backlog: Backlog) -> dict[str, dict[str, int]]:
    served: dict[str, dict[str, int]] = {}
    for lane in backlog.lanes:
        served.setdefault(lane.project_id, {})[lane.agent_id] = lane.served_tick
    return served


# Rest: how a loop sleeps until somebody wakes it, and how others can tell that it does.


class WakeUpEvent:
    """A sleep that is ended by `wake`, also by one that came before it."""

    def __init__(self) -> None:
        self._call = asyncio.Event()
        self.is_asleep = False

    def wake(self) -> None:
        """End the sleep, or the next one as soon as it begins."""
        self._call.set()

    def begin(self) -> None:
        """Have heard all that was called until now."""
        self._call.clear()

    async def sleep(self, seconds: float) -> bool:
        """Sleep until somebody calls; False if nobody has for so long."""
        self.is_asleep = True
        try:
            async with asyncio.timeout(seconds):
                await self._call.wait()
        except TimeoutError:
            return False
        finally:
            self.is_asleep = False
        return True


# What changed while there was no desk to look at it: kept, and shown to the next one.


class PendingRecords:
    """Records and closures in the order in which they came."""

    def __init__(self) -> None:
        self._records: list[TaskRecord] = []
        self._closures: list[GateClosure] = []

    def keep(self, records: Sequence[TaskRecord], closure: GateClosure | None) -> None:
        """Keep what a step has changed."""
        self._records += records
        if closure is not None:
            self._closures.append(closure)

    def forget(self) -> None:
        """Drop everything; what is read from now on has it."""
        self._records, self._closures = [], []

    def take(self, dispatch_state: DispatchState, now: float) -> list[TaskRecord]:
        """Close at a desk what was closed, and return the records that it is yet to see."""
        records, closures = self._records, self._closures
        self.forget()
        for closure in closures:
            dispatch_state.close(closure, now)
        return records


# Holding the money of a plan: the requests, and the books that are not in the store.
#
# A reservation is named after its task, its attempt and the epoch that planned it. So a plan that
# is tried again holds the same money again, and none twice.


GRACE_SECONDS = 60.0
"""How long a reservation outlives the time of its attempt, so that settling comes first."""

NO_DEADLINE_SECONDS = 86_400.0
MAX_GIVEN_BACK = 10_000
MAX_NAMES = 5


def reservation_id(line: Planned, epoch: int) -> str:
    """Return the name of the reservation of a line."""
    return f"{line.task.id}:{line.attempt}:{epoch}"


def reserve_request(line: Planned, name: str, now: float, *, dispatched: bool) -> ReserveRequest:
    """Return what a line asks the books for.

    The lease lasts as long as the attempt can: its settlement ends it, and after a crash the task
    is recovered and its reservation with it. So nothing has to be renewed while a task runs.
    """
    return ReserveRequest(
        reservation_id=name,
        scopes=_charged(line.task.scopes),
        micro_usd=MicroUsd(line.micro_usd),
        tokens=Tokens(line.tokens),
        lease_seconds=_longest_seconds(line, now) + GRACE_SECONDS,
        dispatched=dispatched,
    )


def _longest_seconds(line: Planned, now: float) -> float:
    """Return how long the attempt of a line can take."""
    deadline, attempt_seconds = line.task.deadline, line.terms.attempt_seconds
    if deadline is None:
        return NO_DEADLINE_SECONDS if attempt_seconds is None else attempt_seconds
    left_seconds = max(0.0, deadline - now)
    return left_seconds if attempt_seconds is None else min(left_seconds, attempt_seconds)


class ReservedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a plan: lines with money, lines that a scope refused, lines that are wrong."""

    held: list[Planned]
    refused: list[tuple[Planned, Refused]]
    wrong: list[tuple[Planned, str]]


class OutsideLedger:
    """Holds the money of plans in a ledger outside the store.

    It is only held: a crash before the work starts gives it back when its lease ends. The node
    that starts the work says so to the books first. What was given back is over for these books,
    so the next try at the same attempt has another name.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._given_back: dict[str, int] = {}

    def name(self, line: Planned, epoch: int) -> str:
        """Return the name under which the money of a line is held."""
        first = reservation_id(line, epoch)
        tries = self._given_back.get(first, 0)
        return f"{first}:{tries}" if tries else first

    async def hold(self, planned: list[Planned], epoch: int, now: float) -> ReservedPlan:
        """Hold the money of a plan, each line by itself."""
        answers = await asyncio.gather(*(self._hold(line, epoch, now) for line in planned))
        plan = ReservedPlan(held=[], refused=[], wrong=[])
        for line, answer in zip(planned, answers, strict=True):
            if isinstance(answer, Refused):
                plan.refused.append((line, answer))
            elif isinstance(answer, CallerError):
                plan.wrong.append((line, str(answer)))
            else:
                plan.held.append(line)
        return plan

    async def give_back(self, lines: Iterable[Planned], epoch: int) -> None:
        """Give the money of lines back that were not applied."""
        for line in lines:
            name = self.name(line, epoch)
            self._use_up(line, epoch)
            await self._ledger.settle(SettleRequest(reservation_id=name, call=Call.RELEASE))

    async def _hold(
        self, line: Planned, epoch: int, now: float
    ) -> Reservation | Refused | CallerError:
        for _ in range(MAX_NAMES):
            request = reserve_request(line, self.name(line, epoch), now, dispatched=False)
            try:
                answer = await self._ledger.reserve(request)
            except CallerError as error:
                return error
            if isinstance(answer, Refused) or answer.state in LIVE:
                return answer
            # It was given back by a step whose answer got lost.
            self._use_up(line, epoch)
        return CallerError(f"reservation {self.name(line, epoch)} is over; submit the task anew")

    def _use_up(self, line: Planned, epoch: int) -> None:
        first = reservation_id(line, epoch)
        self._given_back[first] = self._given_back.get(first, 0) + 1
        if len(self._given_back) > MAX_GIVEN_BACK:
            del self._given_back[next(iter(self._given_back))]


async def mark_dispatched(ledger: Ledger, name: str) -> bool:
    """Tell books outside the store that the work is about to start; False if it must not.

    Either they cannot be asked, or the money is not held any more.
    """
    request = SettleRequest(reservation_id=name, call=Call.DISPATCHED)
    try:
        await ledger.settle(request)
    except (StoreUnavailableError, IllegalSettlementError) as error:
        log.warning("an attempt was not started", reservation=name, problem=str(error))
        return False
    return True


@lru_cache(maxsize=4_096)
def _charged(scopes: tuple[str, ...]) -> tuple[Scope, ...]:
    return charged_scopes(ROOT, [Scope(scope) for scope in scopes])


# Lines of a plan as the store is asked for them, and those that came to nothing before that.


def assignment_of(
    line: Planned, *, name: str, now: float, tick: int, starts: bool, is_held: bool
) -> Assignment:
    """Return what the store is asked for; money that is held elsewhere is not held again."""
    reserve = None if is_held else reserve_request(line, name, now, dispatched=starts)
    return Assignment(
        task_id=line.task.id,
        attempt=line.attempt,
        agent_id=line.agent_id,
        node_id=line.node_id,
        starts=starts,
        reservation_id=name,
        tokens=line.tokens,
        micro_usd=line.micro_usd,
        reserve=reserve,
        rate_charges=line.rate_charges,
        tick=tick,
        slot=line.slot,
        choice=line.choice,
    )


def not_held(line: Planned, refused: Refused | None) -> NotAssigned:
    """Return the answer for a line whose money was refused before the store was asked."""
    record = TaskRecord(
        task=line.task, terms=line.terms, progress=Progress(attempt=line.attempt - 1)
    )
    return NotAssigned(task_id=line.task.id, record=record, refused=refused)


# Settings that come into force between two rounds of the dispatcher, and never within one.
#
# A plan that is being applied was made by one set of settings; so it is finished under them.


class PendingSettings:
    """The settings that decisions go by, and those that are to come."""

    def __init__(self, current: DispatchSettings) -> None:
        self.current = current
        self._next: DispatchSettings | None = None
        self._asks_budgets = False
        self._in_force = asyncio.Event()
        self._in_force.set()

    @property
    def is_waiting(self) -> bool:
        """Whether other settings are to come into force."""
        return self._next is not None

    def put(self, settings: DispatchSettings, *, asks_budgets: bool) -> None:
        """Take settings for the next round; `asks_budgets` if limits in the books changed, too."""
        self._next = settings
        self._asks_budgets = self._asks_budgets or asks_budgets
        self._in_force.clear()

    def come_into_force(self, dispatch_state: DispatchState | None) -> bool:
        """Go by what is to come; return whether the desk can go on, or a new one is needed."""
        settings = self._next or self.current
        self.current, self._next = settings, None
        asks_budgets, self._asks_budgets = self._asks_budgets, False
        self._in_force.set()
        if dispatch_state is None:
            return True
        if dispatch_state.must_be_rebuilt(settings):
            return False
        dispatch_state.refit(settings)
        if asks_budgets:
            dispatch_state.ask_budgets_again()
        return True

    async def in_force(self) -> None:
        """Wait until nothing is to come any more."""
        await self._in_force.wait()


log = structlog.get_logger("headgate.dispatcher")

MAX_PLANNED = 512
MAX_RECOVERED = 500
RETRY_SECONDS = 0.5
NEWS_SECONDS = 1.0


class Dispatcher:
    """Makes plans for all nodes, while this node is the elected one."""

    def __init__(
        self,
        store: TaskStore,
        settings: DispatchSettings,
        *,
        start: Start,
        runs: Runs = lambda _task_id: False,
        tick_seconds: float = 5.0,
        ledger: Ledger | None = None,
        feed: EventFeed | None = None,
    ) -> None:
        self.call_worker: Callable[[str], None] = lambda _worker_id: None
        self._store = store
        self.pending = PendingSettings(settings)
        self._start = start
        self._runs = runs
        self._feed = feed or EventFeed(store.now)
        self._forgotten = LostStarts(store, start=self._begin, runs=runs)
        self._set_tick(tick_seconds)
        self._outside = None if ledger is None else OutsideLedger(ledger)
        self._rest = WakeUpEvent()
        self._loaded = asyncio.Event()
        self._epoch: int | None = None
        self._node_id = ""
        self._has_news = False
        self._news_at = 0.0
        self._loads = 0
        self._unseen = PendingRecords()
        self._doubts = UnknownWrites(store)
        self.dispatch_state: DispatchState | None = None
        self.standings: tuple[SlotStanding, ...] = ()
        self.problem = ""
        self.has_fault = False

    @property
    def is_leading(self) -> bool:
        """Whether this node dispatches."""
        return self._epoch is not None

    async def loaded(self) -> None:
        """Wait until this node knows what there is to do, if it is the one that dispatches."""
        if self._epoch is not None:
            await self._loaded.wait()

    def lead(self, node_id: str, epoch: int) -> None:
        """Dispatch from now on, under this epoch."""
        if (node_id, epoch) != (self._node_id, self._epoch):
            self._node_id, self._epoch = node_id, epoch
            self._start_anew()
            self._feed.open(epoch)

    def follow(self) -> None:
        """Dispatch no more; another node does."""
        if self._epoch is not None:
            self._epoch = None
            self._start_anew()
            self._feed.close()

    def observe(self, changed: Iterable[TaskRecord], closure: GateClosure | None = None) -> None:
        """Look at records that changed.

        A gate that closes is closed first, or what it holds would be planned once more.
        """
        records = tuple(changed)
        if self.dispatch_state is not None:
            if closure is not None:
                self.dispatch_state.close(closure, self._store.now())
            self._look_at(self.dispatch_state, records)
            self._rest.wake()
        elif self._epoch is not None:
            self._feed.observe(records)
            self._unseen.keep(records, closure)

    def expect(self, new: NewTask) -> bool:
        """Plan a task that is about to be stored, if there is nothing else to do."""
        is_free = self._rest.is_asleep and self._outside is None
        if not is_free or not expect(self.dispatch_state, new, self._store.now()):
            return False
        self._rest.wake()
        return True

    def unexpect(self, task_id: str) -> None:
        """Forget a task that was expected, and was not stored as that."""
        unexpect(self.dispatch_state, task_id, self._store.now())

    def doubt(self, task_id: str) -> None:
        """Look at a task of which nobody knows whether it was changed, at the next round."""
        if self._epoch is None:
            return
        self._doubts.add(task_id)
        if self._doubts.are_too_many:
            self._start_anew()
        self._rest.wake()

    def hear(self) -> None:
        """Read what other nodes changed, at the next round."""
        self._has_news = True
        self._rest.wake()

    def reconfigure(
        self, settings: DispatchSettings, *, tick_seconds: float, asks_budgets: bool
    ) -> None:
        """Decide by other settings, from the next round on."""
        self._set_tick(tick_seconds)
        self.pending.put(settings, asks_budgets=asks_budgets)
        self._rest.wake()

    def set_slots(self, standings: tuple[SlotStanding, ...]) -> None:
        """Go by what is known of slots now, at this desk and at every one to come."""
        self.standings = standings
        if self.dispatch_state is not None:
            self.dispatch_state.set_slots(standings)
            self._rest.wake()

    async def run(self) -> None:
        """Dispatch until cancelled."""
        while True:
            self._rest.begin()
            if not await self._run_safely():
                await self._sleep()

    async def run_once(self) -> bool:
        """Make one round; return whether another may find more to do at once."""
        if len(self._forgotten):
            await self._forgotten.look(self._node_id)
        if self.pending.is_waiting and not self.pending.come_into_force(self.dispatch_state):
            self._start_anew()
        epoch = self._epoch
        if epoch is None:
            return False
        dispatch_state = self.dispatch_state or await self._load(epoch)
        if len(self._doubts):
            await self._look_again(dispatch_state)
        # Whoever is never at rest must hear of lost nodes, too.
        if self._has_news or self._store.now() >= self._news_at + self._patience(dispatch_state):
            await self._read_news(dispatch_state, epoch)
        due = dispatch_state.fall_due(self._store.now())
        drops = [*expired(due.expired), *rejected(due.rejected)]
        if due.overdue:
            attempts = [Overdue(task_id=one.task.id, attempt=one.number) for one in due.overdue]
            self._look_at(dispatch_state, await self._store.give_up(epoch, attempts))
        if drops:
            self._look_at(dispatch_state, await self._store.drop(epoch, drops))
        # Asked again: rates count from when they are taken, and time has passed since.
        planned = dispatch_state.plan(self._store.now(), most=MAX_PLANNED)
        if planned:
            await self._apply(dispatch_state, epoch, planned)
        if dispatch_state.forgiven_now:
            forgiven, dispatch_state.forgiven_now = dispatch_state.forgiven_now, {}
            await self._store.forgive(epoch, forgiven)
        return bool(planned or drops)

    async def recover(self, dead_nodes: Sequence[str]) -> None:
        """Take tasks back from nodes whose lease has ended."""
        dispatch_state, epoch = self.dispatch_state, self._epoch
        if dispatch_state is None or epoch is None:
            return
        for node_id in dead_nodes:
            dispatch_state.workers.drop_node(node_id, self._store.now())
            tasks = dispatch_state.in_flight.on_node(node_id)
            for start in range(0, len(tasks), MAX_RECOVERED):
                batch = tasks[start : start + MAX_RECOVERED]
                self.observe(await self._store.recover(epoch, batch))
            if tasks:
                log.warning("recovered tasks of a lost node", node_id=node_id, tasks=len(tasks))

    async def _run_safely(self) -> bool:
        epoch = self._epoch
        try:
            is_busy = await self.run_once()
        except StaleEpochError:
            log.warning("another node dispatches now", epoch=epoch)
            if self._epoch == epoch:
                self.follow()
            return False
        except StoreUnavailableError as error:
            # Whether the step was applied is not known; the store is asked for everything again.
            if self.problem != str(error):
                log.warning("the store cannot be asked", problem=str(error))
            self.problem = str(error)
            self._start_anew()
            await asyncio.sleep(RETRY_SECONDS)
            return True
        except Exception:
            # What was planned and not applied would hold its places for ever.
            self.has_fault = True
            self._start_anew()
            raise
        self.problem, self.has_fault = "", False
        return is_busy

    async def _sleep(self) -> None:
        seconds = self._patience(self.dispatch_state)
        next_at = None if self.dispatch_state is None else self.dispatch_state.next_at()
        if next_at is not None:
            seconds = min(seconds, max(0.0, next_at - self._store.now()))
        if not await self._rest.sleep(seconds):
            self._has_news = True

    def _set_tick(self, seconds: float) -> None:
        # Nodes come and go without a word where several share a store.
        self._news_seconds = min(seconds, NEWS_SECONDS) if self._store.is_shared else seconds

    def _patience(self, dispatch_state: DispatchState | None) -> float:
        """Return how long nobody need look for nodes that are gone; workers go without a word."""
        has_workers = dispatch_state is not None and dispatch_state.in_flight.has_workers
        return min(self._news_seconds, NEWS_SECONDS) if has_workers else self._news_seconds

    def _start_anew(self) -> None:
        """Throw the desk away; the next round makes another from the store."""
        self.dispatch_state = None
        if self._epoch is not None:
            self._loaded.clear()
        self._loads += 1
        self._unseen.forget()
        self._doubts.forget()
        self._rest.wake()

    async def _load(self, epoch: int) -> DispatchState:
        self._start_anew()
        load = self._loads
        backlog = await self._store.backlog(epoch)
        if load != self._loads:
            raise ended_while_loading(epoch)
        settings, now = self.pending.current, self._store.now()
        dispatch_state = await dispatch_state_from(backlog, settings, now, node_id=self._node_id)
        if load != self._loads:
            raise ended_while_loading(epoch)
        self.dispatch_state = dispatch_state
        self._feed.load(backlog.records)
        self._loaded.set()
        dispatch_state.set_slots(self.standings)
        self._look_at(dispatch_state, self._unseen.take(dispatch_state, self._store.now()))
        self._feed.start_anew(
            lambda one: (
                one in dispatch_state.waiting or dispatch_state.in_flight.get(one) is not None
            )
        )
        self._has_news = True
        log.info(
            "dispatching",
            epoch=epoch,
            waiting=len(dispatch_state.waiting),
            running=len(dispatch_state.in_flight),
        )
        own = dispatch_state.in_flight.on_node(self._node_id)
        self._forgotten.suspect(task_id for task_id in own if not self._runs(task_id))
        return dispatch_state

    def _look_at(self, dispatch_state: DispatchState, records: Sequence[TaskRecord]) -> None:
        now = self._store.now()
        for record in records:
            dispatch_state.observe(record, now)
        self._feed.observe(records)

    async def _look_again(self, dispatch_state: DispatchState) -> None:
        async for task_id, record in self._doubts.look():
            if record is None:
                unexpect(dispatch_state, task_id, self._store.now())
            elif record.is_terminal and record.progress.dependants:
                # Its end has changed others, too.
                self._start_anew()
                return
            else:
                self._look_at(dispatch_state, (record,))

    async def _read_news(self, dispatch_state: DispatchState, epoch: int) -> None:
        self._has_news = False
        news = await self._store.news(epoch)
        now = self._news_at = self._store.now()
        self._look_at(dispatch_state, news.records)
        for task_id in news.gone:
            dispatch_state.forget(task_id, now)
            self._feed.forget(task_id)
        for closure in news.closures:
            dispatch_state.close(closure, now)
        for node in news.nodes:
            dispatch_state.workers.set_node(node.id, node.places, agent_id=node.agent_id, now=now)
        known = dispatch_state.in_flight.nodes() | dispatch_state.in_flight.known_nodes()
        await self.recover(sorted(known - {node.id for node in news.nodes}))

    async def _apply(
        self, dispatch_state: DispatchState, epoch: int, planned: list[Planned]
    ) -> None:
        now = self._store.now()
        drops: list[Expiration] = []
        if self._outside is not None:
            plan = await self._outside.hold(planned, epoch, now)
            planned = plan.held
            for line, refused in plan.refused:
                drops += self._refusal(dispatch_state, line, not_held(line, refused))
            for line, error in plan.wrong:
                self._refusal(dispatch_state, line, not_held(line, None))
                drops += rejected({line.task.id: error})
        answers = await self._assign(planned, epoch, now) if planned else []
        drops += await self._take_answers(dispatch_state, epoch, planned, answers)
        if drops:
            self._look_at(dispatch_state, await self._store.drop(epoch, drops))

    async def _take_answers(
        self,
        dispatch_state: DispatchState,
        epoch: int,
        planned: list[Planned],
        answers: list[Assigned | NotAssigned],
    ) -> list[Expiration]:
        drops: list[Expiration] = []
        not_applied: list[Planned] = []
        for line, answer in zip(planned, answers, strict=True):
            if isinstance(answer, Assigned):
                self._assigned(answer.record)
                continue
            drops += self._refusal(dispatch_state, line, answer)
            not_applied.append(line)
            # Its node may be gone. The same plan again would be refused again, and so on.
            self._has_news = self._has_news or answer.refused is None
        if self._outside is not None:
            await self._outside.give_back(not_applied, epoch)
        return drops

    async def _assign(
        self, planned: list[Planned], epoch: int, now: float
    ) -> list[Assigned | NotAssigned]:
        assignments = [self._assignment(line, epoch, now) for line in planned]
        try:
            return await self._store.assign(epoch, assignments)
        except StaleEpochError:
            # Nothing of the plan was applied, and the next dispatcher does not know its names.
            if self._outside is not None:
                await self._outside.give_back(planned, epoch)
            raise
        except Exception:
            self._forgotten.suspect(line.task.id for line in planned)
            raise

    def _assigned(self, record: TaskRecord) -> None:
        self._feed.observe((record,))
        node_id = record.progress.node_id or ""
        if record.task.status is TaskStatus.RUNNING and node_id == self._node_id:
            self._start(record)
        elif is_worker(node_id):
            self.call_worker(node_id)

    def _begin(self, record: TaskRecord) -> None:
        self._feed.observe((record,))
        self._start(record)

    def _refusal(
        self, dispatch_state: DispatchState, line: Planned, answer: NotAssigned
    ) -> list[Expiration]:
        self._feed.see_refusal(answer.refused)
        error = dispatch_state.refuse(line, answer.record, answer.refused, self._store.now())
        return [] if error is None else rejected({line.task.id: error})

    def _assignment(self, line: Planned, epoch: int, now: float) -> Assignment:
        is_own = line.node_id == self._node_id
        name = (self._outside.name if self._outside else reservation_id)(line, epoch)
        tick = self.dispatch_state.tick if self.dispatch_state is not None else 0
        is_held = self._outside is not None
        return assignment_of(line, name=name, now=now, tick=tick, starts=is_own, is_held=is_held)
