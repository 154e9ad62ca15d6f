"""The dispatcher: decides what runs next, and applies the plan in one transaction.

It keeps the dispatch state between rounds and is shown every record that changes. A submit, a
settlement or a timer wakes it; the tick is only a net below that. It dispatches while it is
elected. When nobody knows whether a step was applied, it throws the state away and makes another
from the store. What it is shown meanwhile may be newer than what it reads, so it is kept and shown
to the next state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Protocol

import structlog

from headgate.core.budgets.ledger import Ledger, Refused
from headgate.core.budgets.reservations import Reservation
from headgate.core.call import CALL_PREFIX
from headgate.core.dispatch_state import DispatchSettings, DispatchState, Due, Planned
from headgate.core.gates import GateClosure, GatePart
from headgate.core.lifecycle import EXPIRED_WHILE_QUEUED
from headgate.core.slots.slot import SlotStanding
from headgate.core.task import Progress, TaskRecord, TaskStatus, is_worker
from headgate.engine.events import EventFeed
from headgate.engine.external_ledger import ExternalReservations
from headgate.errors import StaleEpochError, StoreUnavailableError
from headgate.executors.executor import Room
from headgate.storage.store import (
    Assigned,
    Assignment,
    Backlog,
    Expiration,
    Heir,
    NewTask,
    NotAssigned,
    Overdue,
    TaskStore,
)

log = structlog.get_logger("headgate.dispatcher")

MAX_PLANNED = 512
MAX_RECOVERED = 500
RETRY_SECONDS = 0.5
NEWS_SECONDS = 1.0

NEWS_PAUSE_SECONDS = 0.003
"""How long messages of other nodes gather after some were read: a read costs as much as fifty."""

FEW_NEWS = 8
MAX_NEWS_PAUSES = 4
"""The pause is so many times as long at most, where more than a few were read at once."""

ALL_WORKERS_SECONDS = 120.0
"""How often all workers are read, also where their number says that none of them is lost."""

LOADED_AT_ONCE = 100
"""How many tasks are loaded between two turns of the loop, which has requests to answer."""

MAX_UNKNOWN_WRITES = 1_000
"""With more of them, it is quicker to read everything anew."""

LOST_START_SECONDS = 10.0
"""A server may finish a step a little after its caller has lost sight of it."""

Start = Callable[[TaskRecord], None]
"""Begins an attempt on this node."""

Runs = Callable[[str], bool]
"""Tells whether an attempt at a task is under way on this node."""


class CallGrants(Protocol):
    """The calls through the gateway, as far as the dispatcher goes; it stores none of them."""

    def feed(self, state: DispatchState) -> None:
        """Show a new dispatch state all calls that wait and run."""

    def grant(self, planned: Iterable[Planned]) -> None:
        """Give calls their turn."""

    def step_down(self) -> None:
        """Wait no more: another node dispatches."""

    def refuse(self, call_id: str, error: str) -> None:
        """Refuse a call that waits."""

    async def note_running(self) -> None:
        """Have the store know of calls that run here, for whoever dispatches next."""

    def forget_closure(self, part: GatePart) -> None:
        """Forget that an answer has closed what was opened at another node."""

    async def look_elsewhere(self) -> None:
        """Learn which calls run at other nodes, which dispatched before."""


class Dispatcher:
    """Makes plans for all nodes, while this node is the elected one."""

    def __init__(
        self,
        store: TaskStore,
        settings: DispatchSettings,
        *,
        start: Start,
        runs: Runs = lambda _task_id: False,
        inherit: Callable[[Sequence[str]], None] = lambda _task_ids: None,
        tick_seconds: float = 5.0,
        ledger: Ledger | None = None,
        feed: EventFeed | None = None,
        call_worker: Callable[[str], None] = lambda _worker_id: None,
        calls: CallGrants | None = None,
    ) -> None:
        self._call_worker = call_worker
        self._calls = calls
        self._store = store
        self.pending = PendingSettings(settings)
        self._start = start
        self._runs = runs
        self._inherit = inherit
        self._feed = feed or EventFeed(store.now)
        self._lost_starts = LostStarts(store, start=self._start_lost, runs=runs)
        self._set_tick(tick_seconds)
        self._external = None if ledger is None else ExternalReservations(ledger)
        self._wake_up = WakeUpEvent()
        self._loaded = asyncio.Event()
        self._epoch: int | None = None
        self._led = 0
        self._leads_until = 0.0
        self._is_held_up = False
        self.starts_tasks = True
        """Off while the node drains: then only calls start, which running tasks may need."""

        self.leads_since: float | None = None
        """Since when no other process has dispatched, as of the latest time that this one led."""

        self._followed: str | None = None
        self._followed_since: float | None = None
        self._node_id = ""
        self._has_news = False
        self._news_at = 0.0
        self._next_news_at = 0.0
        self._all_workers_at = -inf
        self._loads = 0
        self._pending_records: list[TaskRecord] = []
        self._pending_closures: list[GateClosure] = []
        self._refused: list[Expiration] = []
        self._unknown_writes = UnknownWrites(store)
        self._overtaken: set[str] | None = None
        self.dispatch_state: DispatchState | None = None
        self.standings: tuple[SlotStanding, ...] = ()
        self.problem = ""
        self.has_fault = False

    @property
    def is_leading(self) -> bool:
        """Whether this node dispatches."""
        return self._epoch is not None

    @property
    def epoch(self) -> int | None:
        """The epoch under which this node dispatches."""
        return self._epoch

    async def loaded(self) -> None:
        """Wait until this node knows what there is to do, if it is the one that dispatches."""
        if self._epoch is not None:
            await self._loaded.wait()

    @property
    def may_grant(self) -> bool:
        """Whether no other node can dispatch at this moment, as the store said last.

        A plan for tasks is applied by the store, which knows. Calls are started without asking it,
        so a node that is cut off from it must stop by itself.
        """
        return asyncio.get_running_loop().time() < self._leads_until

    def become_leader(self, node_id: str, epoch: int, *, until: float = inf) -> None:
        """Dispatch from now on, under this epoch; `until` a time of the loop, if not again."""
        self._leads_until = until
        self._followed = None
        if self._is_held_up:
            self._is_held_up = False
            self._wake_up.wake()
        if (node_id, epoch) != (self._node_id, self._epoch):
            if self.leads_since is None or epoch > self._led + 1:
                self.leads_since = self._store.now()
            self._node_id, self._epoch, self._led = node_id, epoch, epoch
            self._start_anew()
            self._feed.open(epoch)

    def step_down(self) -> None:
        """Dispatch no more; another node does."""
        if self._epoch is not None:
            self._epoch, self._leads_until = None, 0.0
            self._start_anew()
            self._feed.close()
            if self._calls is not None:
                self._calls.step_down()

    def follow(self, node_id: str, epoch: int) -> None:
        """Dispatch no more, and take note of the node that does, if there is one."""
        self.step_down()
        if not node_id or node_id == self._followed:
            return
        # Whoever comes right after this node has lost nothing: this one knows its own calls.
        is_next = self._followed is None and self._led > 0 and epoch <= self._led + 1
        self._followed = node_id
        self._followed_since = self.leads_since if is_next else self._store.now()

    @property
    def decided_since(self) -> float | None:
        """Since when one node has dispatched, this one or another, as far as this one knows.

        What the node before knew of calls that it had under way may be lost.
        """
        return self.leads_since if self._followed is None else self._followed_since

    async def note_calls(self) -> None:
        """Have the store know of calls that run here, for whoever dispatches next."""
        if self._calls is not None:
            await self._calls.note_running()

    def observe(self, changed: Iterable[TaskRecord], closure: GateClosure | None = None) -> None:
        """Bring the state in line with records that changed.

        A gate that closes is closed first, or what stands behind it would be planned once more.
        """
        records = tuple(changed)
        if self._overtaken is not None:
            self._overtaken.update(record.task.id for record in records)
        if self.dispatch_state is not None:
            if closure is not None:
                self.dispatch_state.close(closure, self._store.now())
            self._observe(self.dispatch_state, records)
            self._wake_up.wake()
        elif self._epoch is not None:
            self._feed.observe(records)
            self._pending_records += records
            if closure is not None:
                self._pending_closures.append(closure)

    def set_room(self, target: str, room: Room) -> None:
        """Begin no more at a target than it has room for."""
        state = self.dispatch_state
        if state is not None:
            now = self._store.now()
            state.rooms.set(
                target,
                room.free,
                room.why,
                now,
                pool=room.pool,
                needs=room.needs,
                arrived=room.arrived,
            )
            self._wake_up.wake()

    def slot_resets_at(self, slot: str) -> float | None:
        """Return when the window of a slot resets, as far as this node knows."""
        found = (one.resets_at for one in self.standings if one.name == slot)
        return next(found, None)

    def plan_early(self, new: NewTask) -> bool:
        """Plan a task that is about to be stored, if there is nothing else to do.

        Where nothing waits that could start, a task starts as soon as it is stored. Its plan need
        not wait for the answer to its submit: it is sent behind it, and both are in one transaction
        if they arrive together. The store decides as ever: a task that it did not take is not there
        to be assigned.
        """
        state = self.dispatch_state
        if state is None or not self._wake_up.is_asleep or self._external is not None:
            return False
        if not state.observe_early(new.task, new.terms, self._store.now()):
            return False
        self._wake_up.wake()
        return True

    def withdraw_early(self, task_id: str) -> None:
        """Forget a task that was shown early, and was not stored as that."""
        if self.dispatch_state is not None and task_id in self.dispatch_state.waiting:
            self.dispatch_state.forget(task_id, self._store.now())

    def recheck(self, task_id: str) -> None:
        """Read a task of which nobody knows whether it was changed, at the next round."""
        if self._epoch is None:
            return
        self._unknown_writes.add(task_id)
        if self._unknown_writes.are_too_many:
            self._start_anew()
        self._wake_up.wake()

    def refresh(self) -> None:
        """Read what other nodes changed, at the next round; who does not dispatch has none."""
        self._has_news = True
        if self._epoch is not None:
            self._wake_up.wake()

    def reconfigure(
        self, settings: DispatchSettings, *, tick_seconds: float, asks_budgets: bool
    ) -> None:
        """Decide by other settings, from the next round on."""
        self._set_tick(tick_seconds)
        self.pending.put(settings, asks_budgets=asks_budgets)
        self._wake_up.wake()

    def set_slots(self, standings: tuple[SlotStanding, ...]) -> None:
        """Go by what is known of slots now, in this state and in every one to come."""
        self.standings = standings
        if self.dispatch_state is not None:
            self.dispatch_state.set_slots(standings)
            self._wake_up.wake()

    async def run(self) -> None:
        """Dispatch until cancelled."""
        while True:
            self._wake_up.begin()
            if not await self._run_safely():
                await self._sleep()

    async def run_once(self) -> bool:
        """Make one round; return whether another may find more to do at once."""
        if len(self._lost_starts):
            await self._lost_starts.start(self._node_id)
        if self.pending.is_waiting and not self.pending.come_into_force(self.dispatch_state):
            self._start_anew()
        epoch = self._epoch
        if epoch is None:
            return False
        state = self.dispatch_state or await self._load(epoch)
        if len(self._unknown_writes):
            await self._recheck_unknown(state)
        now = self._store.now()
        # Who is never idle must hear of lost nodes, too.
        is_told = self._has_news and now >= self._next_news_at
        if is_told or now >= self._news_at + self._patience(state):
            await self._read_news(state, epoch)
            now = self._store.now()
        due = self._without_calls(state.fall_due(now))
        refused, self._refused = self._refused, []
        expirations = [*refused, *_expired(due.expired), *_rejected(due.rejected)]
        if due.overdue:
            attempts = [Overdue(task_id=one.task.id, attempt=one.number) for one in due.overdue]
            self._observe(state, await self._store.give_up(epoch, attempts))
            # Rates count from when they are taken, and time has passed since.
            now = self._store.now()
        if state is not self.dispatch_state:
            # It was thrown away meanwhile, and whoever had a turn in it would not be counted.
            return True
        planned: list[Planned] = []
        if self.may_grant:
            most = MAX_PLANNED if self.starts_tasks else 0
            planned = self._grant_calls(state.plan(now, most=most))
        else:
            # The next sign of life says who dispatches, and wakes this loop.
            self._is_held_up = True
        if expirations:
            await self._drop_beside(expirations, planned, state, epoch)
        elif planned:
            await self._apply(state, epoch, planned)
        if state.forgiven_now:
            forgiven, state.forgiven_now = state.forgiven_now, {}
            await self._store.forgive(epoch, forgiven)
        return bool(planned or expirations or self._refused)

    async def _drop_beside(
        self, drops: list[Expiration], planned: list[Planned], state: DispatchState, epoch: int
    ) -> None:
        """End tasks, which no plan has any more, while the plan is applied.

        A tenant whose tasks no budget has room for would have all others wait for each of them.
        """
        dropping = asyncio.ensure_future(self._store.drop(epoch, drops))
        # If the plan fails, whether they have ended is read with everything else.
        dropping.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            if planned:
                await self._apply(state, epoch, planned)
            self._observe(state, await dropping)
        finally:
            dropping.cancel()

    def _grant_calls(self, planned: list[Planned]) -> list[Planned]:
        """Give calls their turn, and return the tasks of a plan."""
        calls = [one for one in planned if one.task.is_call]
        if not calls or self._calls is None:
            return planned
        self._calls.grant(calls)
        return [one for one in planned if not one.task.is_call]

    def _without_calls(self, due: Due) -> Due:
        """Refuse the calls among what fell due, of which the store knows nothing."""
        calls = {one: why for one, why in due.rejected.items() if one.startswith(CALL_PREFIX)}
        if not calls or self._calls is None:
            return due
        for call_id, error in calls.items():
            self._calls.refuse(call_id, error)
        rejected = {one: why for one, why in due.rejected.items() if one not in calls}
        return Due(expired=due.expired, rejected=rejected, overdue=due.overdue)

    def wake(self) -> None:
        """Make a round soon."""
        self._wake_up.wake()

    def reservations(self) -> list[str]:
        """Return what the money of everything in flight is held under, as far as this node knows.

        A node that does not dispatch, or has not read the tasks yet, knows of nothing.
        """
        state = self.dispatch_state
        attempts = () if state is None else state.in_flight
        return [one.reservation_id for one in attempts if one.reservation_id]

    async def recover(self, dead_nodes: Sequence[str]) -> None:
        """Take tasks back from nodes whose lease has ended."""
        state, epoch = self.dispatch_state, self._epoch
        if state is None or epoch is None:
            return
        for node_id in dead_nodes:
            state.workers.drop_node(node_id, self._store.now())
        lost = state.in_flight.on_nodes(dead_nodes) if dead_nodes else {}
        # Of all together: thousands of workers may be lost at once, with a task each.
        tasks = [task_id for its_tasks in lost.values() for task_id in its_tasks]
        recovered = set[str]()
        for start in range(0, len(tasks), MAX_RECOVERED):
            batch = tasks[start : start + MAX_RECOVERED]
            heir = Heir(node_id=self._node_id, targets=state.settings.remote_targets)
            changed = await self._store.recover(epoch, batch, heir=heir)
            recovered.update(one.task.id for one in changed)
            self.observe(changed)
            inherited = [one.task.id for one in changed if heir.has(one)]
            self._inherit(inherited)
            self._lost_starts.suspect(inherited)
        for node_id, its_tasks in lost.items():
            # None, if the node came back meanwhile.
            if not recovered.isdisjoint(its_tasks):
                log.warning("recovered tasks of a lost node", node_id=node_id, tasks=len(its_tasks))

    async def _run_safely(self) -> bool:
        epoch = self._epoch
        try:
            is_busy = await self.run_once()
        except StaleEpochError:
            log.warning("another node dispatches now", epoch=epoch)
            if self._epoch == epoch:
                self.step_down()
            return False
        except StoreUnavailableError as error:
            # Whether the step was applied is not known; the store is asked for everything again.
            if self.problem != str(error):
                log.warning("the store is unavailable", problem=str(error))
            self.problem = str(error)
            self._start_anew()
            await asyncio.sleep(RETRY_SECONDS)
            return True
        except Exception:
            # What was planned and not applied would keep its capacity for ever.
            self.has_fault = True
            self._start_anew()
            raise
        self.problem, self.has_fault = "", False
        return is_busy

    async def _sleep(self) -> None:
        seconds = self._patience(self.dispatch_state)
        if self.dispatch_state is not None:
            next_at = self.dispatch_state.next_at()
            if self._has_news:
                next_at = min(self._next_news_at, inf if next_at is None else next_at)
            if next_at is not None:
                seconds = min(seconds, max(0.0, next_at - self._store.now()))
        if not await self._wake_up.sleep(seconds):
            self._has_news = True

    def _set_tick(self, seconds: float) -> None:
        # Nodes come and go without a word where several share a store.
        self._news_seconds = min(seconds, NEWS_SECONDS) if self._store.is_shared else seconds

    def _patience(self, state: DispatchState | None) -> float:
        """Return how long nobody need ask for nodes that are gone; workers go without a word."""
        has_workers = state is not None and state.in_flight.has_workers
        return min(self._news_seconds, NEWS_SECONDS) if has_workers else self._news_seconds

    def _start_anew(self) -> None:
        """Throw the state away; the next round makes another from the store."""
        self.dispatch_state = None
        if self._epoch is not None:
            self._loaded.clear()
        self._loads += 1
        self._pending_records, self._pending_closures = [], []
        self._refused = []
        self._next_news_at, self._all_workers_at = 0.0, -inf
        self._unknown_writes.clear()
        self._wake_up.wake()

    async def _load(self, epoch: int) -> DispatchState:
        """Make a state from the store; once more, if somebody had it thrown away meanwhile."""
        while True:
            self._start_anew()
            load = self._loads
            backlog = await self._store.backlog(epoch)
            state = await self._state_from(backlog, self._store.now())
            if self._calls is not None and self._store.is_shared:
                await self._calls.look_elsewhere()
            if self._epoch != epoch:
                problem = f"epoch {epoch} ended while the backlog was read"
                raise StaleEpochError(problem)
            if load == self._loads:
                break
        self.dispatch_state = state
        self._feed.load(backlog.records)
        self._loaded.set()
        state.set_slots(self.standings)
        records, closures = self._pending_records, self._pending_closures
        self._pending_records, self._pending_closures = [], []
        for closure in closures:
            state.close(closure, self._store.now())
        self._observe(state, records)
        if self._calls is not None:
            self._calls.feed(state)
        self._feed.start_anew(lambda one: one in state.waiting or one in state.in_flight)
        self._has_news = True
        waiting, running = state.waiting_tasks, len(state.in_flight)
        log.info("dispatching", epoch=epoch, waiting=waiting, running=running)
        own = state.in_flight.on_node(self._node_id)
        self._lost_starts.suspect(task_id for task_id in own if not self._runs(task_id))
        return state

    async def _state_from(self, backlog: Backlog, now: float) -> DispatchState:
        """Return a state with everything in the backlog; the event loop goes on meanwhile."""
        served: dict[str, dict[str, float]] = {}
        for lane in backlog.lanes:
            served.setdefault(lane.project_id, {})[lane.agent_id] = lane.served_tick
        state = DispatchState(self.pending.current)
        state.load(
            (),
            usage=backlog.usage,
            rate_counts=backlog.rate_counts,
            closures=backlog.closures,
            lane_served=served,
            tick=backlog.tick,
            now=now,
            learned=backlog.learned,
        )
        # Among equals the first is taken, and a task starts here in one step less than elsewhere.
        for node in sorted(backlog.nodes, key=lambda node: node.id != self._node_id):
            state.workers.set_node(node.id, node.capacity, agent_id=node.agent_id, now=now)
        for start in range(0, len(backlog.records), LOADED_AT_ONCE):
            state.load_more(backlog.records[start : start + LOADED_AT_ONCE], now)
            await asyncio.sleep(0)
        return state

    def _observe(self, state: DispatchState, records: Sequence[TaskRecord]) -> None:
        now = self._store.now()
        for record in records:
            state.observe(record, now)
        self._feed.observe(records)

    async def _recheck_unknown(self, state: DispatchState) -> None:
        async for task_id, record in self._unknown_writes.read():
            if record is None:
                self.withdraw_early(task_id)
            elif record.is_terminal and record.progress.dependants:
                # Its end has changed others, too.
                self._start_anew()
                return
            else:
                self._observe(state, (record,))

    async def _read_news(self, state: DispatchState, epoch: int) -> None:
        self._has_news = False
        # What this node changes while it reads may be newer than what is read.
        self._overtaken = overtaken = set[str]()
        try:
            all_workers = self._store.now() >= self._all_workers_at + ALL_WORKERS_SECONDS
            news = await self._store.news(epoch, all_workers=all_workers)
            now = self._news_at = self._store.now()
            for start in range(0, len(news.records), LOADED_AT_ONCE):
                records = news.records[start : start + LOADED_AT_ONCE]
                self._observe(state, [one for one in records if one.task.id not in overtaken])
                await asyncio.sleep(0)
        finally:
            self._overtaken = None
        for record in news.records if overtaken else ():
            if record.task.id in overtaken:
                self.recheck(record.task.id)
        if news.has_more:
            self.refresh()
        elif news.records:
            self._next_news_at = now + news_pause_seconds(len(news.records))
        for task_id in news.gone:
            state.forget(task_id, now)
            self._feed.forget(task_id)
        for closure in news.closures:
            state.close(closure, now)
        for part in news.opened:
            state.open(part)
            if self._calls is not None:
                self._calls.forget_closure(part)
        for node in news.nodes:
            state.workers.set_node(node.id, node.capacity, agent_id=node.agent_id, now=now)
        known = state.in_flight.nodes() | state.in_flight.known_nodes()
        # This node is here. If its own lease has ended, its next sign of life renews that.
        alive = {self._node_id, *(node.id for node in news.nodes)}
        if news.has_all_workers:
            self._all_workers_at = now
            await self.recover(sorted(known - alive))
            return
        gone = {node_id for node_id in known - alive if not is_worker(node_id)}
        await self.recover(sorted(gone | known.intersection(news.gone_workers)))
        # A worker that is lost says nothing of it.
        if not news.has_more and state.in_flight.worker_totals() != news.workers:
            self._all_workers_at = -inf
            self.refresh()

    async def _apply(self, state: DispatchState, epoch: int, planned: list[Planned]) -> None:
        """Have the store apply a plan, and give back what it or a budget refused."""
        expirations: list[Expiration] = []
        held: dict[str, Reservation] = {}
        if self._external is not None:
            plan = await self._external.reserve(planned, epoch)
            planned = [one for one, _ in plan.reserved]
            held = {one.task.id: reservation for one, reservation in plan.reserved}
            for one, refused in plan.refused:
                expirations += self._refuse(state, one, _not_reserved(one, refused))
            for one, error in plan.wrong:
                self._refuse(state, one, _not_reserved(one, None))
                expirations += _rejected({one.task.id: error})
        answers = await self._assign(planned, epoch, held) if planned else []
        not_applied: list[Planned] = []
        for one, answer in zip(planned, answers, strict=True):
            if isinstance(answer, Assigned):
                if self._external is not None:
                    name = answer.record.progress.reservation_id or ""
                    state.in_flight.name_reservation(one.task.id, one.attempt, name)
                self._assigned(answer.record)
                continue
            expirations += self._refuse(state, one, answer)
            not_applied.append(one)
            # Its node may be gone. The same plan again would be refused again, and so on.
            if answer.refused is None:
                self._has_news, self._next_news_at = True, 0.0
        if self._external is not None:
            await self._external.give_back(not_applied, epoch)
        self._refused += expirations

    async def _assign(
        self, planned: list[Planned], epoch: int, held: Mapping[str, Reservation]
    ) -> list[Assigned | NotAssigned]:
        assignments = [self._assignment(one, epoch, held.get(one.task.id)) for one in planned]
        try:
            return await self._store.assign(epoch, assignments)
        except StaleEpochError:
            # Nothing of the plan was applied, and the next dispatcher does not know its names.
            if self._external is not None:
                await self._external.give_back(planned, epoch)
            raise
        except Exception:
            self._lost_starts.suspect(one.task.id for one in planned)
            raise

    def _assignment(self, planned: Planned, epoch: int, held: Reservation | None) -> Assignment:
        """Return what the store is asked for; what is reserved elsewhere is not reserved again."""
        starts = planned.node_id == self._node_id
        if self._external is None:
            name = planned.reservation_id(epoch)
            reserve = planned.reserve_request(name, dispatched=starts)
        else:
            name, reserve = self._external.name(planned, epoch), None
        return Assignment(
            task_id=planned.task.id,
            attempt=planned.attempt,
            agent_id=planned.agent_id,
            node_id=planned.node_id,
            starts=starts,
            reservation_id=name,
            share_tokens=planned.share_tokens,
            tokens=0 if held is None else held.tokens,
            micro_usd=0 if held is None else held.micro_usd,
            hold=planned.hold if planned.hold.is_worth_keeping else None,
            reserve=reserve,
            rate_charges=planned.rate_charges,
            tick=self.dispatch_state.tick if self.dispatch_state is not None else 0,
            slot=planned.slot,
            choice=planned.choice,
        )

    def _assigned(self, record: TaskRecord) -> None:
        self._feed.observe((record,))
        node_id = record.progress.node_id or ""
        if record.task.status is TaskStatus.RUNNING and node_id == self._node_id:
            self._start(record)
        elif is_worker(node_id):
            self._call_worker(node_id)

    def _start_lost(self, record: TaskRecord) -> None:
        self._feed.observe((record,))
        self._start(record)

    def _refuse(
        self, state: DispatchState, planned: Planned, answer: NotAssigned
    ) -> list[Expiration]:
        if answer.refused is not None:
            self._feed.refused(answer.refused)
        error = state.refuse(planned, answer.record, answer.refused, self._store.now())
        return [] if error is None else _rejected({planned.task.id: error})


class PendingSettings:
    """The settings that decisions go by, and those that are to come.

    They come into force between two rounds, and never within one: a plan that is being applied was
    made by one set of settings, so it is finished under them.
    """

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
        """Take settings for the next round; `asks_budgets` if limits in the ledger changed, too."""
        self._next = settings
        self._asks_budgets = self._asks_budgets or asks_budgets
        self._in_force.clear()

    def come_into_force(self, dispatch_state: DispatchState | None) -> bool:
        """Go by what is to come; return whether the state can go on, or a new one is needed."""
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


class LostStarts:
    """Tasks written as running on this node by a step whose answer got lost.

    The store has them running here, and this node does not run them; nobody else would ever take
    them back, because the node is alive. So it looks for them, whether it still dispatches or not.
    """

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

    async def start(self, node_id: str) -> None:
        """Start what the store has running on this node, and this node does not."""
        now = self._store.now()
        for task_id, since in list(self._since.items()):
            if not self._runs(task_id):
                await self._start_if_lost(task_id, node_id)
            if now - since >= LOST_START_SECONDS:
                self._since.pop(task_id, None)

    async def _start_if_lost(self, task_id: str, node_id: str) -> None:
        record = await self._store.get(task_id)
        if record is None or record.task.status is not TaskStatus.RUNNING:
            return
        if record.progress.node_id == node_id and not self._runs(task_id):
            self._start(record)


class WakeUpEvent:
    """How a loop sleeps until somebody wakes it, also if that came before it slept."""

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


class UnknownWrites:
    """Tasks of which nobody knows whether what was asked for them is on disk.

    The answer to a step got lost, or whoever waited for it has gone. Then the step may be on its
    way still, and a read would come too soon; so the read is taken behind it.
    """

    def __init__(self, store: TaskStore) -> None:
        self._store = store
        self._task_ids: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._task_ids)

    @property
    def are_too_many(self) -> bool:
        """Whether it is better to read everything anew."""
        return len(self._task_ids) > MAX_UNKNOWN_WRITES

    def add(self, task_id: str) -> None:
        """Read a task the next time."""
        self._task_ids[task_id] = None

    def clear(self) -> None:
        """Read none; everything is read anew."""
        self._task_ids = {}

    async def read(self) -> AsyncIterator[tuple[str, TaskRecord | None]]:
        """Return the tasks as the store has them, each when it was read; None if it has not."""
        task_ids, self._task_ids = self._task_ids, {}
        # Steps are written in their order: what was sent before this is on disk now, or lost.
        await self._store.sent(())
        for task_id in task_ids:
            yield task_id, await self._store.get(task_id)


def news_pause_seconds(records: int) -> float:
    """Return how long messages gather after so many records were read."""
    return NEWS_PAUSE_SECONDS * min(max(1.0, records / FEW_NEWS), MAX_NEWS_PAUSES)


def _expired(task_ids: Iterable[str]) -> list[Expiration]:
    """Return the end of tasks whose deadline passed while they waited."""
    return [
        Expiration(task_id=task_id, status=TaskStatus.FAILED, error=EXPIRED_WHILE_QUEUED)
        for task_id in task_ids
    ]


def _rejected(errors: Mapping[str, str]) -> list[Expiration]:
    """Return the end of tasks that no budget has room for, each with its reason."""
    return [
        Expiration(task_id=task_id, status=TaskStatus.REJECTED, error=error)
        for task_id, error in errors.items()
    ]


def _not_reserved(planned: Planned, refused: Refused | None) -> NotAssigned:
    """Return the answer for an attempt whose money was refused before the store was asked."""
    record = TaskRecord(
        task=planned.task, terms=planned.terms, progress=Progress(attempt=planned.attempt - 1)
    )
    return NotAssigned(task_id=planned.task.id, record=record, refused=refused)
