"""The dispatcher: decides what runs next, and applies the plan in one transaction.

It keeps a desk between rounds and is shown every record that changes. A submit, a settlement or a
timer wakes it; the tick is only a net below that. It dispatches while it is elected. When nobody
knows whether a step was applied, the desk is thrown away and made again from the store. What is
seen while that goes on may be newer than what is read, so it is kept and seen again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import structlog

from headgate.core.dispatch.desk import Desk
from headgate.core.dispatch.desk_settings import DeskSettings, Planned
from headgate.core.gates import GateClosure
from headgate.core.key_slots.slot import SlotStanding
from headgate.core.tasks.records import TaskRecord, is_worker
from headgate.core.tasks.task import TaskStatus
from headgate.errors import StaleEpochError, StoreUnavailableError
from headgate.ledger import Ledger
from headgate.runtime.assignments import assignment_of, not_held
from headgate.runtime.doubts import Doubts
from headgate.runtime.drops import expired, rejected
from headgate.runtime.expecting import expect, unexpect
from headgate.runtime.forgotten import ForgottenStarts, Runs, Start
from headgate.runtime.holding import OutsideBooks, reservation_id
from headgate.runtime.loading import desk_from, ended_while_loading
from headgate.runtime.pending_settings import PendingSettings
from headgate.runtime.rest import Rest
from headgate.runtime.telling.event_feed import EventFeed
from headgate.runtime.unseen import Unseen
from headgate.store import Assigned, Assignment, Drop, NewTask, NotAssigned, TaskStore
from headgate.worker_store import Overdue

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
        settings: DeskSettings,
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
        self._forgotten = ForgottenStarts(store, start=self._begin, runs=runs)
        self._set_tick(tick_seconds)
        self._outside = None if ledger is None else OutsideBooks(ledger)
        self._rest = Rest()
        self._loaded = asyncio.Event()
        self._epoch: int | None = None
        self._node_id = ""
        self._has_news = False
        self._news_at = 0.0
        self._loads = 0
        self._unseen = Unseen()
        self._doubts = Doubts(store)
        self.desk: Desk | None = None
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

    def see(self, changed: Iterable[TaskRecord], closure: GateClosure | None = None) -> None:
        """Look at records that changed.

        A gate that closes is closed first, or what it holds would be planned once more.
        """
        records = tuple(changed)
        if self.desk is not None:
            if closure is not None:
                self.desk.close(closure, self._store.now())
            self._look_at(self.desk, records)
            self._rest.wake()
        elif self._epoch is not None:
            self._feed.see(records)
            self._unseen.keep(records, closure)

    def expect(self, new: NewTask) -> bool:
        """Plan a task that is about to be stored, if there is nothing else to do."""
        is_free = self._rest.is_asleep and self._outside is None
        if not is_free or not expect(self.desk, new, self._store.now()):
            return False
        self._rest.wake()
        return True

    def unexpect(self, task_id: str) -> None:
        """Forget a task that was expected, and was not stored as that."""
        unexpect(self.desk, task_id, self._store.now())

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
        self, settings: DeskSettings, *, tick_seconds: float, asks_budgets: bool
    ) -> None:
        """Decide by other settings, from the next round on."""
        self._set_tick(tick_seconds)
        self.pending.put(settings, asks_budgets=asks_budgets)
        self._rest.wake()

    def set_slots(self, standings: tuple[SlotStanding, ...]) -> None:
        """Go by what is known of slots now, at this desk and at every one to come."""
        self.standings = standings
        if self.desk is not None:
            self.desk.set_slots(standings)
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
        if self.pending.is_waiting and not self.pending.come_into_force(self.desk):
            self._start_anew()
        epoch = self._epoch
        if epoch is None:
            return False
        desk = self.desk or await self._load(epoch)
        if len(self._doubts):
            await self._look_again(desk)
        # Whoever is never at rest must hear of lost nodes, too.
        if self._has_news or self._store.now() >= self._news_at + self._patience(desk):
            await self._read_news(desk, epoch)
        due = desk.fall_due(self._store.now())
        drops = [*expired(due), *rejected(desk.take_hopeless())]
        await self._give_up(desk, epoch)
        if drops:
            self._look_at(desk, await self._store.drop(epoch, drops))
        # Asked again: rates count from when they are taken, and time has passed since.
        planned = desk.plan(self._store.now(), most=MAX_PLANNED)
        if planned:
            await self._apply(desk, epoch, planned)
        if desk.forgiven_now:
            forgiven, desk.forgiven_now = desk.forgiven_now, {}
            await self._store.forgive(epoch, forgiven)
        return bool(planned or drops)

    async def recover(self, dead_nodes: Sequence[str]) -> None:
        """Take tasks back from nodes whose lease has ended."""
        desk, epoch = self.desk, self._epoch
        if desk is None or epoch is None:
            return
        for node_id in dead_nodes:
            desk.workers.drop_node(node_id, self._store.now())
            tasks = desk.flights.on_node(node_id)
            for start in range(0, len(tasks), MAX_RECOVERED):
                batch = tasks[start : start + MAX_RECOVERED]
                self.see(await self._store.recover(epoch, batch))
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
        seconds = self._patience(self.desk)
        next_at = None if self.desk is None else self.desk.next_at()
        if next_at is not None:
            seconds = min(seconds, max(0.0, next_at - self._store.now()))
        if not await self._rest.sleep(seconds):
            self._has_news = True

    def _set_tick(self, seconds: float) -> None:
        # Nodes come and go without a word where several share a store.
        self._news_seconds = min(seconds, NEWS_SECONDS) if self._store.is_shared else seconds

    def _patience(self, desk: Desk | None) -> float:
        """Return how long nobody need look for nodes that are gone; workers go without a word."""
        has_workers = desk is not None and desk.flights.has_workers
        return min(self._news_seconds, NEWS_SECONDS) if has_workers else self._news_seconds

    def _start_anew(self) -> None:
        """Throw the desk away; the next round makes another from the store."""
        self.desk = None
        if self._epoch is not None:
            self._loaded.clear()
        self._loads += 1
        self._unseen.forget()
        self._doubts.forget()
        self._rest.wake()

    async def _load(self, epoch: int) -> Desk:
        self._start_anew()
        load = self._loads
        backlog = await self._store.backlog(epoch)
        if load != self._loads:
            raise ended_while_loading(epoch)
        settings, now = self.pending.current, self._store.now()
        desk = await desk_from(backlog, settings, now, node_id=self._node_id)
        if load != self._loads:
            raise ended_while_loading(epoch)
        self.desk = desk
        self._feed.load(backlog.records)
        self._loaded.set()
        desk.set_slots(self.standings)
        self._look_at(desk, self._unseen.take(desk, self._store.now()))
        self._feed.start_anew(lambda one: one in desk.waiting or desk.flights.get(one) is not None)
        self._has_news = True
        log.info("dispatching", epoch=epoch, waiting=len(desk.waiting), running=len(desk.flights))
        own = desk.flights.on_node(self._node_id)
        self._forgotten.suspect(task_id for task_id in own if not self._runs(task_id))
        return desk

    def _look_at(self, desk: Desk, records: Sequence[TaskRecord]) -> None:
        now = self._store.now()
        for record in records:
            desk.see(record, now)
        self._feed.see(records)

    async def _look_again(self, desk: Desk) -> None:
        async for task_id, record in self._doubts.look():
            if record is None:
                unexpect(desk, task_id, self._store.now())
            elif record.is_terminal and record.progress.dependants:
                # Its end has changed others, too.
                self._start_anew()
                return
            else:
                self._look_at(desk, (record,))

    async def _read_news(self, desk: Desk, epoch: int) -> None:
        self._has_news = False
        news = await self._store.news(epoch)
        now = self._news_at = self._store.now()
        self._look_at(desk, news.records)
        for task_id in news.gone:
            desk.forget(task_id, now)
            self._feed.forget(task_id)
        for closure in news.closures:
            desk.close(closure, now)
        for node in news.nodes:
            desk.workers.set_node(node.id, node.places, agent_id=node.agent_id, now=now)
        known = desk.flights.nodes() | desk.flights.known_nodes()
        await self.recover(sorted(known - {node.id for node in news.nodes}))

    async def _give_up(self, desk: Desk, epoch: int) -> None:
        overdue = desk.workers.take_overdue(self._store.now())
        if overdue:
            attempts = [Overdue(task_id=one.task.id, attempt=one.attempt) for one in overdue]
            self._look_at(desk, await self._store.give_up(epoch, attempts))

    async def _apply(self, desk: Desk, epoch: int, planned: list[Planned]) -> None:
        now = self._store.now()
        drops: list[Drop] = []
        if self._outside is not None:
            plan = await self._outside.hold(planned, epoch, now)
            planned = plan.held
            for line, refused in plan.refused:
                drops += self._refusal(desk, line, not_held(line, refused))
            for line, error in plan.wrong:
                self._refusal(desk, line, not_held(line, None))
                drops += rejected({line.task.id: error})
        answers = await self._assign(planned, epoch, now) if planned else []
        drops += await self._take_answers(desk, epoch, planned, answers)
        if drops:
            self._look_at(desk, await self._store.drop(epoch, drops))

    async def _take_answers(
        self,
        desk: Desk,
        epoch: int,
        planned: list[Planned],
        answers: list[Assigned | NotAssigned],
    ) -> list[Drop]:
        drops: list[Drop] = []
        not_applied: list[Planned] = []
        for line, answer in zip(planned, answers, strict=True):
            if isinstance(answer, Assigned):
                self._assigned(answer.record)
                continue
            drops += self._refusal(desk, line, answer)
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
        self._feed.see((record,))
        node_id = record.progress.node_id or ""
        if record.task.status is TaskStatus.RUNNING and node_id == self._node_id:
            self._start(record)
        elif is_worker(node_id):
            self.call_worker(node_id)

    def _begin(self, record: TaskRecord) -> None:
        self._feed.see((record,))
        self._start(record)

    def _refusal(self, desk: Desk, line: Planned, answer: NotAssigned) -> list[Drop]:
        self._feed.see_refusal(answer.refused)
        error = desk.refuse(line, answer.record, answer.refused, self._store.now())
        return [] if error is None else rejected({line.task.id: error})

    def _assignment(self, line: Planned, epoch: int, now: float) -> Assignment:
        is_own = line.node_id == self._node_id
        name = (self._outside.name if self._outside else reservation_id)(line, epoch)
        tick = self.desk.tick if self.desk is not None else 0
        is_held = self._outside is not None
        return assignment_of(line, name=name, now=now, tick=tick, starts=is_own, is_held=is_held)
