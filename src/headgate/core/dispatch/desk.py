"""The desk: the dispatcher's picture of everything that waits and runs, kept between rounds.

Whatever changes in the store is shown to the desk as a record, and `see` brings the picture in line
with it: the record carries the whole truth of its attempt, so seeing it twice or late does no harm.
`plan` makes a round of decisions and takes what it plans as in flight at once; what the store then
refuses is given back. The desk may be behind the store, and is never asked whether a limit holds:
it plans, and the transaction that applies the plan decides.
"""

from __future__ import annotations

from collections.abc import Iterable

from headgate.core.budgets.accounts import Refused, Unit
from headgate.core.decision import Round
from headgate.core.dispatch.budget_parking import BudgetParking, ask_again_at
from headgate.core.dispatch.closures import Closures
from headgate.core.dispatch.desk_settings import DeskSettings, Planned, Waiting
from headgate.core.dispatch.desk_state import forgive, state_of
from headgate.core.dispatch.flights import Flights, InFlight
from headgate.core.dispatch.landing import IN_FLIGHT, give_back_place, lands, take_back
from headgate.core.dispatch.made_agents import MadeAgents
from headgate.core.dispatch.project_figures import ProjectFigures, UsageRow
from headgate.core.dispatch.slot_gates import SlotGates
from headgate.core.dispatch.timers import Timers
from headgate.core.dispatch.worker_watch import WorkerWatch
from headgate.core.gates import GateClosure, GateKind, GatePart
from headgate.core.key_slots.slot import SlotStanding
from headgate.core.load import AdaptiveAlpha
from headgate.core.rate_limits import NoRoom, RateBook, RateCharge, RateLimit
from headgate.core.snapshot import AssignAction, SchedulerState
from headgate.core.tasks.choice import Choice
from headgate.core.tasks.records import TaskRecord, slot_of
from headgate.core.tasks.task import Task, TaskStatus

MAX_DUE = 1_000
ASIDE_SECONDS = 60.0


class Desk:
    """The picture; every method takes the time that it is to be judged at."""

    def __init__(self, settings: DeskSettings) -> None:
        self.settings = settings
        self.tick = 0
        self.waiting: dict[str, Waiting] = {}
        self.flights = Flights()
        self.rate_closed: dict[GatePart, GateClosure] = {}
        self.limited: dict[str, NoRoom] = {}
        self.too_large: dict[str, NoRoom] = {}
        self.hopeless: dict[str, str] = {}
        self.figures = ProjectFigures(window_hours=settings.usage_window_hours)
        self.rates = RateBook(settings.rate_limits)
        self.parking = BudgetParking()
        self.tuning = AdaptiveAlpha(alpha=settings.alpha)
        self.forgiven_now: dict[str, int] = {}
        self.present: list[str] = []
        self._starts: Timers[str] = Timers()
        self._deadlines: Timers[str] = Timers()
        self._lifts: Timers[str] = Timers()
        self.index = settings.new_index()
        self.closures = Closures(self.index)
        self.slots = SlotGates(self.closures, self.flights)
        self.workers = WorkerWatch(self.index, self.flights)
        for agent in settings.agents:
            self.index.set_agent(agent)
        capacity = settings.max_per_agent_inflight
        self.made_agents = MadeAgents(self.index, self.flights, capacity=capacity)
        self.set_pauses(settings.pauses())

    def load(
        self,
        records: Iterable[TaskRecord],
        *,
        usage: Iterable[UsageRow],
        rate_counts: Iterable[RateCharge],
        closures: Iterable[GateClosure],
        lane_served: dict[str, dict[str, int]],
        tick: int,
        now: float,
    ) -> None:
        """Start from what the store has; only on a new desk."""
        window_hours = self.settings.usage_window_hours
        self.figures = ProjectFigures(window_hours=window_hours, rows=usage)
        self.rates.load(rate_counts)
        self.tick = tick
        self.index.remember_served(lane_served)
        for closure in closures:
            self.close(closure, now)
        self.load_more(records, now)

    def load_more(self, records: Iterable[TaskRecord], now: float) -> None:
        """Go on loading, where all of it at once would take too long; before anything is seen."""
        for record in records:
            if record.task.status in IN_FLIGHT:
                self._take_off(record, now)
            else:
                self.see(record, now)

    def see(self, record: TaskRecord, now: float) -> None:
        """Bring the picture in line with a record; one from before what is known changes nothing.

        Only loading finds attempts that the desk has not planned. Later a record of an attempt
        that it does not know is an old one, of an attempt that has landed since.
        """
        task_id, status = record.task.id, record.task.status
        flight = self.flights.get(task_id)
        if flight is not None and not lands(self, flight, record, now):
            return
        if status is TaskStatus.QUEUED:
            self._queue(record, now)
        elif status not in IN_FLIGHT:
            self._unqueue(task_id)

    def forget(self, task_id: str, now: float) -> None:
        """Drop a task that the store no longer has."""
        known = self.flights.get(task_id)
        if known is not None:
            give_back_place(self, known, now)
        self._unqueue(task_id)

    def close(self, closure: GateClosure, now: float) -> None:
        """Park what stands behind a scope, target or slot, until its time."""
        self.closures.close(closure, now)
        if closure.kind == "slot":
            self.slots.changed(closure.name)

    def open(self, part: GatePart) -> None:
        """Offer again what stood behind a scope, target or slot."""
        if self.closures.open(part):
            self.rate_closed.pop(part, None)
            if part.kind == "slot":
                self.slots.changed(part.name)
        if part.kind == "scope":
            for task_id in self.parking.leave(part.name):
                self._offer(task_id)

    def ask_again(self, scopes: Iterable[str], *, has_freed: bool) -> None:
        """Offer again what waits for budgets that an attempt was charged to."""
        for scope in self.parking.wake(scopes, has_freed=has_freed):
            self.open(GatePart("scope", scope))

    def set_pauses(self, pauses: dict[GatePart, GateClosure]) -> None:
        """Hold what an administrator has paused, and offer again what is paused no more."""
        self.closures.hold("target", pauses)

    def set_slots(self, standings: Iterable[SlotStanding]) -> None:
        """Hold what uses slots that have no room, and offer again what uses those that have."""
        self.slots.set(tuple(standings))

    def next_at(self) -> float | None:
        """Return when something falls due by itself."""
        timers = (self._starts, self._deadlines, self.closures, self._lifts, self.workers)
        times = (timer.next_at() for timer in timers)
        return min((at for at in times if at is not None), default=None)

    def fall_due(self, now: float) -> list[str]:
        """Let everything due happen; return the queued tasks that missed their deadline."""
        self.figures.roll(now)
        for part in self.closures.pop_due(now, most=MAX_DUE):
            self.open(part)
        for agent_type in self._lifts.pop_due(now, most=MAX_DUE):
            self.lift(agent_type)
        for task_id in self._starts.pop_due(now, most=MAX_DUE):
            self._offer(task_id)
        due = self._deadlines.pop_due(now, most=MAX_DUE)
        # A task stays on the desk until the store says that it ended; until then it is due again.
        for task_id in due:
            self._deadlines.set(task_id, now + 1.0)
            self.index.remove(task_id)
        return due

    def lift(self, agent_type: str) -> None:
        """Let the agents of a type work again."""
        self._lifts.drop(agent_type)
        self.limited.pop(agent_type, None)
        self.index.limit_agent_type(agent_type, None)

    def take_hopeless(self) -> dict[str, str]:
        """Return why tasks can never start that a budget would refuse and that will not wait."""
        hopeless, self.hopeless = self.hopeless, {}
        return hopeless

    def plan(self, now: float, *, most: int) -> list[Planned]:
        """Decide a round; what is planned is in flight from now on, until it is refused."""
        planned: list[Planned] = []
        while not self.settings.is_paused:
            room = most - len(planned)
            has_places = self.index.begin_round(self.flights.free_places())
            if not len(self.index) or room <= 0 or not has_places:
                return planned
            # Who waits for a place on a node has not left, though it is not asked now.
            if not self.index.offers.are_nodes_shut:
                forgive(self, self.state(now, max_started=room), now)
            decided = Round(self.index, self.state(now, max_started=room))
            chosen = zip(decided.run(), decided.choices, strict=True)
            lines = [line for one in chosen if (line := self._line(*one, now))]
            planned += lines
            # What met a rate limit has left its place to others, who are asked at once.
            if len(lines) == len(decided.actions):
                break
        return planned

    def refuse(
        self, line: Planned, record: TaskRecord | None, refused: Refused | None, now: float
    ) -> str | None:
        """Give back what was planned; return why the task can never start, if it cannot.

        The gate of the scope that refused is parked, or only this task if others may still fit.
        """
        task_id = line.task.id
        flight = self.flights.get(task_id)
        if flight is not None and flight.attempt == line.attempt:
            take_back(self, flight, now)
        own = len(self.rate_limits_on(line.task, line.used_slot, line.agent_id))
        self.rates.take_back(line.rate_charges, own=own)
        if record is None:
            self._unqueue(task_id)
            return None
        self.see(record, now)
        if refused is None or task_id not in self.waiting:
            return None
        verdict = self.parking.judge(task_id, refused, line.terms)
        if verdict.error is not None:
            self.index.remove(task_id)
            return verdict.error
        if verdict.closure is not None:
            self.close(verdict.closure, now)
            for unwilling in self.parking.unwilling(refused.scope):
                self._offer(unwilling)
        else:
            self.index.remove(task_id)
        ask_at = ask_again_at(refused, now)
        if ask_at is not None:
            self.closures.look_at(GatePart("scope", refused.scope), ask_at)
        return None

    def state(self, now: float, *, max_started: int | None = None) -> SchedulerState:
        """Return the figures of this moment; tasks, agents and gates are in the index."""
        return state_of(self, now, max_started=max_started)

    def _line(self, action: AssignAction, choice: Choice, now: float) -> Planned | None:
        waiting = self.waiting[action.task_id]
        task, terms = waiting.task, waiting.terms
        needs = self.settings.needs(waiting)
        tokens = needs[Unit.TOKENS]
        slot = task.slot
        if slot is None and task.provider is not None:
            slot = self._chosen_slot(task, task.provider, tokens, now)
            if slot is None:
                self._leave_place(action.agent_id, now)
                return None
        limits = self.rate_limits_on(task, slot, action.agent_id)
        no_room = self.rates.reached(limits, tokens=tokens, now=now)
        if no_room is not None:
            self._leave_place(action.agent_id, now)
            self._limit(task, no_room, now)
            return None
        if self.settings.auto_tune:
            wait_ticks = max(0, self.tick - task.enqueued_tick)
            self.tuning = self.tuning.observe(wait_ticks=wait_ticks, queue_depth=len(self.index))
        attempt = waiting.attempt + 1
        is_pull = task.target in self.settings.pull_targets
        node_id = self.flights.node_for_next(action.agent_id if is_pull else "")
        seconds = terms.attempt_seconds
        flight = InFlight(task, attempt, action.agent_id, node_id, tokens, slot, seconds)
        self.flights.add(flight)
        self.workers.take_off(flight, now)
        self.figures.add(task.project_id, now, started=1)
        self._unqueue(task.id)
        return Planned(
            task=task,
            terms=terms,
            attempt=attempt,
            agent_id=action.agent_id,
            node_id=node_id,
            tokens=tokens,
            micro_usd=needs[Unit.MICRO_USD],
            rate_charges=self.rates.count(limits, tokens=tokens, now=now),
            slot=None if task.provider is None else slot,
            choice=choice,
        )

    def _leave_place(self, agent_id: str, now: float) -> None:
        self.index.free_place(agent_id)
        self.workers.look(agent_id, now)

    def _chosen_slot(self, task: Task, provider: str, tokens: int, now: float) -> str | None:
        """Return the slot for a task that leaves it open; without one, the task waits."""
        too_small: dict[str, NoRoom] = {}
        while (slot := self.slots.choose(provider, without=too_small)) is not None:
            limits = self.rates.limits_on(("slot", slot))
            no_room = self.rates.reached(limits, tokens=tokens, now=now)
            if no_room is None:
                return slot
            if no_room.until is None:
                too_small[slot] = no_room
            else:
                self._close_full(no_room, no_room.until, now)
        if too_small:
            # Others may fit, so it alone waits; another slot of the provider may open before long.
            no_room = next(iter(too_small.values()))
            self._set_aside(task, no_room, now + min(no_room.limit.window_seconds, ASIDE_SECONDS))
        else:
            self.index.add(task)
        return None

    def rate_limits_on(self, task: Task, slot: str | None, agent_id: str) -> list[RateLimit]:
        """Return every limit that an attempt at a task counts for."""
        entry = self.index.agents.get(agent_id)
        agent_type = None if entry is None else entry.agent.agent_type
        return self.rates.limits_on(
            ("agent_type", agent_type), ("target", task.target), ("slot", slot)
        )

    def _limit(self, task: Task, no_room: NoRoom, now: float) -> None:
        limit, until = no_room.limit, no_room.until
        if until is None:
            # It is larger than the limit. Closing the limit for it would keep all others out, so
            # it alone waits, and is tried again in case that the configuration has changed.
            self._set_aside(task, no_room, now + limit.window_seconds)
            return
        if limit.kind == "agent_type":
            self.limited[limit.name] = no_room
            self.index.limit_agent_type(limit.name, until)
            self._lifts.set(limit.name, until)
        else:
            self._close_full(no_room, until, now)
        self.index.add(task)

    def _set_aside(self, task: Task, no_room: NoRoom, until: float) -> None:
        self.too_large[task.id] = no_room
        self._starts.set(task.id, until)

    def _close_full(self, no_room: NoRoom, until: float, now: float) -> None:
        limit = no_room.limit
        kind: GateKind = "slot" if limit.kind == "slot" else "target"
        closure = GateClosure(kind=kind, name=limit.name, until=until, why=no_room.why)
        self.rate_closed[closure.part] = closure
        self.close(closure, now)

    def _queue(self, record: TaskRecord, now: float) -> None:
        task, progress = record.task, record.progress
        waiting = Waiting(task, record.terms, progress.attempt, progress.waiting_for)
        known = self.waiting.get(task.id)
        if known is not None and not waiting.is_after(known):
            return
        self.waiting[task.id] = waiting
        if task.deadline is not None:
            self._deadlines.set(task.id, task.deadline)
        if task.not_before is not None and task.not_before > now:
            self._starts.set(task.id, task.not_before)
            return
        self._offer(task.id)

    def _offer(self, task_id: str) -> None:
        waiting = self.waiting.get(task_id)
        if waiting is None or waiting.waiting_for:
            return
        self.too_large.pop(task_id, None)
        error = self.parking.refuses(waiting, self.settings.needs)
        if error is not None:
            self.hopeless[task_id] = error
            self.index.remove(task_id)
            return
        task = waiting.task
        if task.provider is not None:
            self.slots.know(task.provider)
        self.made_agents.know(task.agent_id)
        self.index.add(task)

    def offer_again(self, task_id: str) -> None:
        """Try a task that a rule had set aside, because the rule has changed."""
        self._starts.drop(task_id)
        self._offer(task_id)

    def _unqueue(self, task_id: str) -> None:
        waiting = self.waiting.pop(task_id, None)
        if waiting is not None:
            self.index.remove(task_id)
            self._starts.drop(task_id)
            self._deadlines.drop(task_id)
            self.parking.drop(task_id, waiting.task.scopes)
            self.too_large.pop(task_id, None)
            self.hopeless.pop(task_id, None)

    def _take_off(self, record: TaskRecord, now: float) -> None:
        task, progress = record.task, record.progress
        agent_id = record.agent_id or task.agent_id or ""
        self.made_agents.know(agent_id)
        self.index.take_place(agent_id)
        node_id = progress.node_id or ""
        slot, tokens = slot_of(record), progress.reserved_tokens
        seconds = record.terms.attempt_seconds
        flight = InFlight(task, progress.attempt, agent_id, node_id, tokens, slot, seconds)
        self.flights.add(flight)
        self.workers.take_off(flight, now)
        self.workers.see(flight, record, now)
