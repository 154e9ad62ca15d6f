"""The desk: the dispatcher's picture of everything that waits and runs, kept between rounds.

Whatever changes in the store is shown to the desk as a record, and `see` brings the picture in line
with it: the record carries the whole truth of its attempt, so seeing it twice or late does no harm.
`plan` makes a round of decisions and takes what it plans as in flight at once; what the store then
refuses is given back. The desk may be behind the store, and is never asked whether a limit holds:
it plans, and the transaction that applies the plan decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import msgspec

from headgate.core.budgets.accounts import Refused, Unit
from headgate.core.dispatch_plan import DispatchSettings, Planned, Waiting
from headgate.core.fair_share import ProjectUsage, UsageRow
from headgate.core.gates import GateClosure, GateKind, GatePart
from headgate.core.in_flight import InFlightAttempt, InFlightAttempts, Timers, WorkerWatch
from headgate.core.lane_index import LaneIndex, ProjectLanes
from headgate.core.lanes import Lane, waited
from headgate.core.load import AdaptiveAlpha, load_score
from headgate.core.parking import BudgetParking, Closures, SlotGates, ask_again_at
from headgate.core.rate_limits import NoRoom, RateCharge, RateLimit, RateTable
from headgate.core.scheduler import Round, eligible_turns
from headgate.core.slots.slot import SlotStanding
from headgate.core.snapshot import WORKING, Agent, AgentState, AssignAction, SchedulerState
from headgate.core.task import Choice, Task, TaskRecord, TaskStatus, slot_of

# The figures of a desk as the decision wants them, without the tasks, agents and gates.


def state_of(
    dispatch_state: DispatchState, now: float, *, max_started: int | None
) -> SchedulerState:
    """Return the figures of this moment; at most `max_started` tasks may be added to them."""
    settings = dispatch_state.settings
    total = len(dispatch_state.flights)
    most = settings.max_inflight
    if max_started is not None:
        most = min(most, total + max_started)
    return SchedulerState(
        projects=list(settings.projects),
        tasks=[],
        agents=[],
        project_token_usage=dispatch_state.figures.tokens,
        project_active_agent_counts=dispatch_state.flights.active,
        tasks_completed_in_window=dispatch_state.figures.completed,
        charge_in_round=True,
        default_tokens=settings.default_tokens,
        project_reserved=dispatch_state.flights.reserved,
        project_started=dispatch_state.figures.started,
        # The index has the agents one by one; a round only asks for the sum.
        agent_inflight={"": total},
        max_inflight=most,
        lane_policy=settings.lane_policy,
        tick=dispatch_state.tick,
        alpha=dispatch_state.tuning.alpha,
        max_wait_ticks=settings.max_wait_ticks,
        max_lag_tokens=settings.max_lag_tokens,
        projects_present=dispatch_state.present,
        project_forgiven=dispatch_state.figures.forgiven,
        priority_ageing_seconds=settings.priority_ageing_seconds,
        now=now,
    )


def forgive(dispatch_state: DispatchState, state: SchedulerState, now: float) -> None:
    """Note which projects take part now, and what those that join are forgiven."""
    if state.max_lag_tokens is None:
        return
    turns = eligible_turns(dispatch_state.index, state)
    for turn in turns:
        tokens = turn.forgiven - state.project_forgiven.get(turn.project.id, 0)
        if tokens:
            dispatch_state.figures.add(turn.project.id, now, forgiven=tokens)
            known = dispatch_state.forgiven_now.get(turn.project.id, 0)
            dispatch_state.forgiven_now[turn.project.id] = known + tokens
    dispatch_state.present = [turn.project.id for turn in turns]


# How attempts leave a desk: their places come back, and what they used is counted.

IN_FLIGHT = (TaskStatus.ASSIGNED, TaskStatus.RUNNING)


def lands(
    dispatch_state: DispatchState, flight: InFlightAttempt, record: TaskRecord, now: float
) -> bool:
    """Say whether a record ends an attempt, and if so let it land."""
    is_before = record.progress.attempt < flight.attempt
    if is_before and record.is_terminal:
        take_back(dispatch_state, flight, now)
        return True
    is_under_way = record.task.status in IN_FLIGHT and record.progress.attempt == flight.attempt
    if is_under_way:
        dispatch_state.workers.observe(flight, record, now)
    if is_before or is_under_way:
        return False
    _land(dispatch_state, flight, record, now)
    return True


def take_back(dispatch_state: DispatchState, flight: InFlightAttempt, now: float) -> None:
    """Give back the place of an attempt that never began."""
    give_back_place(dispatch_state, flight, now)
    dispatch_state.figures.add(flight.task.project_id, now, started=-1)


def give_back_place(dispatch_state: DispatchState, flight: InFlightAttempt, now: float) -> None:
    """Have the place of an attempt free again, for whatever reason."""
    dispatch_state.flights.remove(flight)
    dispatch_state.index.free_place(flight.agent_id)
    dispatch_state.workers.land(flight, now)


def _land(
    dispatch_state: DispatchState, flight: InFlightAttempt, record: TaskRecord, now: float
) -> None:
    give_back_place(dispatch_state, flight, now)
    dispatch_state.tick += 1
    tokens = record.tokens or 0
    is_done = record.task.status is TaskStatus.DONE
    dispatch_state.figures.add(flight.task.project_id, now, tokens=tokens, completed=int(is_done))
    _count_overrun(dispatch_state, flight, tokens, now)
    has_freed = tokens < flight.tokens or (record.micro_usd or 0) < (
        record.progress.reserved_micro_usd
    )
    dispatch_state.ask_again(flight.task.scopes, has_freed=has_freed)


def _count_overrun(
    dispatch_state: DispatchState, flight: InFlightAttempt, tokens: int, now: float
) -> None:
    if tokens > flight.tokens:
        limits = dispatch_state.rate_limits_on(flight.task, flight.slot, flight.agent_id)
        dispatch_state.rates.count_more(limits, tokens=tokens - flight.tokens, now=now)


# Agents that nobody declared: made by their first task, and forgotten when they are idle.
#
# Clients name them, so their number has no bound of its own. Rule: beyond `MAX_KNOWN_AGENTS` those
# with nothing queued and nothing in flight are dropped; the next task makes them anew.

MAX_KNOWN_AGENTS = 10_000


class MadeAgents:
    """Makes agents in an index, and drops those that nobody needs."""

    def __init__(self, index: LaneIndex, flights: InFlightAttempts, *, capacity: int) -> None:
        self.index = index
        self._flights = flights
        self._capacity = capacity
        self._made: dict[str, None] = {}
        self._most = MAX_KNOWN_AGENTS

    def __len__(self) -> int:
        return len(self._made)

    def make(self, agent_id: str) -> Agent:
        """Return the agent that a task which names it would bring about."""
        return Agent(id=agent_id, capacity=self._capacity, accepts_open=False)

    def set_capacity(self, capacity: int) -> None:
        """Give all of them, and those to come, this many places; what is in flight stays."""
        self._capacity = capacity
        for agent_id in self._made:
            self.index.set_agent(self.make(agent_id), inflight=self._inflight(agent_id))

    def declare(self, agent_id: str) -> None:
        """Leave an agent to the configuration, which names it from now on."""
        self._made.pop(agent_id, None)

    def take_over(self, agent_id: str) -> None:
        """Go on with an agent that the configuration names no more, as long as it has work."""
        inflight = self._inflight(agent_id)
        if inflight or self.index.has_own_lane(agent_id):
            self._made[agent_id] = None
            self.index.set_agent(self.make(agent_id), inflight=inflight)
        else:
            self.index.remove_agent(agent_id)

    def _inflight(self, agent_id: str) -> int:
        entry = self.index.agents.get(agent_id)
        return 0 if entry is None else entry.inflight

    def know(self, agent_id: str | None) -> None:
        """Make the agent that a task names, unless it is there; it takes only its own tasks."""
        if agent_id is None or self.index.agents.get(agent_id) is not None:
            return
        self.index.set_agent(self.make(agent_id))
        self._made[agent_id] = None
        if len(self._made) > self._most:
            self._forget_idle(agent_id)
            # Where all of them are busy, looking again at each new one would take ever longer.
            self._most = max(MAX_KNOWN_AGENTS, 2 * len(self._made))

    def _forget_idle(self, needed: str) -> None:
        busy = {flight.agent_id for flight in self._flights} | {needed}
        for agent_id in list(self._made):
            if agent_id not in busy and not self.index.has_own_lane(agent_id):
                del self._made[agent_id]
                self.index.remove_agent(agent_id)


MAX_DUE = 1_000
ASIDE_SECONDS = 60.0


class DispatchState:
    """The picture; every method takes the time that it is to be judged at."""

    def __init__(self, settings: DispatchSettings) -> None:
        self.settings = settings
        self.tick = 0
        self.waiting: dict[str, Waiting] = {}
        self.flights = InFlightAttempts()
        self.rate_closed: dict[GatePart, GateClosure] = {}
        self.limited: dict[str, NoRoom] = {}
        self.too_large: dict[str, NoRoom] = {}
        self.hopeless: dict[str, str] = {}
        self.figures = ProjectUsage(window_hours=settings.usage_window_hours)
        self.rates = RateTable(settings.rate_limits)
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
        self.figures = ProjectUsage(window_hours=window_hours, rows=usage)
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
                self.observe(record, now)

    def observe(self, record: TaskRecord, now: float) -> None:
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
        self.observe(record, now)
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
        flight = InFlightAttempt(task, attempt, action.agent_id, node_id, tokens, slot, seconds)
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
        flight = InFlightAttempt(task, progress.attempt, agent_id, node_id, tokens, slot, seconds)
        self.flights.add(flight)
        self.workers.take_off(flight, now)
        self.workers.observe(flight, record, now)


# Other settings for a desk that is at work, in place: nothing that waits is touched one by one.
#
# Rule: afterwards the desk plans as one would that was made with the new settings from the same
# records, but for ties between agents that nobody declares. What is in flight stays, also beyond a
# limit that was lowered; only new starts obey it. Another order within lanes builds all of them
# again; where many tasks wait, and where figures of another stretch of the past are needed, a new
# desk is made from the store instead.

_ORDERS = ("lane_policy", "max_wait_ticks", "priority_ageing_seconds", "pull_targets")
"""What lanes and gates are built by: with another one, all of them are built again."""


MAX_REBUILT = 2_000
"""How many tasks may wait for all lanes to be built again at once; more would take too long."""


def needs_new_state(dispatch_state: DispatchState, after: DispatchSettings) -> bool:
    """Tell whether a desk is better made anew from the store, step by step, than changed."""
    before = dispatch_state.settings
    if len(dispatch_state.waiting) > MAX_REBUILT and _differ(before, after, _ORDERS):
        return True
    return _differ(before, after, ("usage_window_hours",))


def refit(dispatch_state: DispatchState, settings: DispatchSettings) -> None:
    """Have a desk decide by other settings from now on."""
    _Refit(dispatch_state, settings).run()


def ask_budgets_again(dispatch_state: DispatchState) -> None:
    """Offer again what waits for budgets, because their limits may have been raised."""
    _Refit(dispatch_state, dispatch_state.settings).ask_budgets_again()


class _Refit:
    """One change of one desk."""

    def __init__(self, dispatch_state: DispatchState, after: DispatchSettings) -> None:
        self._dispatch_state = dispatch_state
        self._before = dispatch_state.settings
        self._after = after

    def run(self) -> None:
        self._dispatch_state.settings = self._after
        if self._differs(*_ORDERS):
            self._build_index()
        if self._differs("agents", "max_per_agent_inflight"):
            self._set_agents()
        if self._differs("alpha", "auto_tune"):
            self._dispatch_state.tuning = AdaptiveAlpha(alpha=self._after.alpha)
        if self._differs("rate_limits"):
            self._set_rate_limits()
        if self._differs("default_tokens", "default_micro_usd"):
            self.ask_budgets_again()
        self._dispatch_state.set_pauses(self._after.pauses())

    def ask_budgets_again(self) -> None:
        for scope in list(self._dispatch_state.parking.refusals):
            self._dispatch_state.open(GatePart("scope", scope))

    def _differs(self, *names: str) -> bool:
        return _differ(self._before, self._after, names)

    def _build_index(self) -> None:
        dispatch_state, old = self._dispatch_state, self._dispatch_state.index
        new = self._after.new_index()
        new.remember_served(old.served())
        for entry in old.agents:
            new.set_agent(entry.agent, inflight=entry.inflight)
            new.set_workers(entry.agent.id, old.agents.workers(entry.agent.id))
        for agent_type, no_room in dispatch_state.limited.items():
            new.limit_agent_type(agent_type, no_room.until)
        for closure in dispatch_state.closures.shown():
            new.close(closure)
        new.load(old)
        dispatch_state.index = dispatch_state.workers.index = dispatch_state.made_agents.index = (
            dispatch_state.closures.index
        ) = new

    def _set_agents(self) -> None:
        index, made = self._dispatch_state.index, self._dispatch_state.made_agents
        if self._differs("max_per_agent_inflight"):
            made.set_capacity(self._after.max_per_agent_inflight)
        known = {agent.id: agent for agent in self._before.agents}
        declared = {agent.id for agent in self._after.agents}
        for agent in self._after.agents:
            if known.get(agent.id) != agent:
                entry = index.agents.get(agent.id)
                index.set_agent(agent, inflight=0 if entry is None else entry.inflight)
            made.declare(agent.id)
        for agent_id in known:
            if agent_id not in declared:
                made.take_over(agent_id)
        # A lane is ranked by the place of its agent, so those that moved are ranked again.
        for moved in index.agents.arrange(agent.id for agent in self._after.agents):
            index.set_agent(moved.agent, inflight=moved.inflight)

    def _set_rate_limits(self) -> None:
        """Count by other limits; who was held by one is asked again, and held again if need be."""
        dispatch_state = self._dispatch_state
        dispatch_state.rates.change(self._after.rate_limits)
        for agent_type in list(dispatch_state.limited):
            dispatch_state.lift(agent_type)
        for part, closure in list(dispatch_state.rate_closed.items()):
            if dispatch_state.closures.timed.get(part) is closure:
                self._dispatch_state.open(part)
        dispatch_state.rate_closed.clear()
        for task_id in list(dispatch_state.too_large):
            dispatch_state.offer_again(task_id)


def _differ(before: DispatchSettings, after: DispatchSettings, names: tuple[str, ...]) -> bool:
    return any(getattr(before, name) != getattr(after, name) for name in names)


# What people ask about lanes and budgets that is known at the desk alone.
#
# Rule: the cost grows with the lanes and gates that have work, never with the tasks behind them,
# and nothing changes by looking.

MAX_GATES_COUNTED = 2_000
MAX_ASIDE_LOOKED_AT = 2_000
_HELD_AGENTS = (AgentState.PAUSED, AgentState.ERROR)


class LaneStats(msgspec.Struct, frozen=True, kw_only=True):
    """A lane that has tasks; an `agent_id` of "" is the open one.

    Tasks that nothing but a free place holds are `ready`: none where a gate, a pause or the end of
    the project holds them. `load` compares it with the other lanes of its project that have ready
    tasks; None is none of its own. `longest_wait_seconds` is None where waits are not kept.
    """

    project_id: str
    agent_id: str
    ready: int = 0
    longest_wait_seconds: float | None = None
    load: float | None = None


def lane_stats(dispatch_state: DispatchState, now: float) -> tuple[LaneStats, ...]:
    """Return every lane in which a task waits that is due and needs no parent."""
    aside = _waits_aside(dispatch_state, now)
    stopped = _Stopped(dispatch_state.settings)
    figures = [
        _figure(lane, load, now, aside.pop((lane.project_id, lane.owner or ""), None))
        for project in dispatch_state.index.projects.values()
        for lane, load in _loads(
            project, stopped, tick=dispatch_state.tick, alpha=dispatch_state.tuning.alpha
        )
    ]
    figures += [
        LaneStats(project_id=project_id, agent_id=agent_id, longest_wait_seconds=wait)
        for (project_id, agent_id), wait in aside.items()
    ]
    return tuple(figures)


def waiting_for_scopes(dispatch_state: DispatchState) -> dict[str, int]:
    """Return how many tasks wait for each budget that has refused some."""
    return {
        scope: dispatch_state.parking.set_aside(scope)
        + _behind(dispatch_state.index, GatePart("scope", scope))
        for scope in dispatch_state.parking.refusals
    }


class _Stopped:
    """The lanes that start nothing, whatever they hold, because somebody wants it so."""

    def __init__(self, settings: DispatchSettings) -> None:
        self._is_paused = settings.is_paused
        self._projects = {one.id for one in settings.projects if one.status not in WORKING}
        self._agents = {one.id for one in settings.agents if one.state in _HELD_AGENTS}

    def __contains__(self, lane: Lane) -> bool:
        is_held = lane.project_id in self._projects or lane.owner in self._agents
        return self._is_paused or is_held


def _figure(lane: Lane, load: float | None, now: float, aside: float | None) -> LaneStats:
    waits = [wait for wait in (lane.longest_wait(now), aside) if wait is not None]
    return LaneStats(
        project_id=lane.project_id,
        agent_id=lane.owner or "",
        # A lane that could start something has a load, be it 0.
        ready=0 if load is None else lane.ready,
        longest_wait_seconds=max(waits, default=None),
        load=load,
    )


def _waits_aside(dispatch_state: DispatchState, now: float) -> dict[tuple[str, str], float]:
    """Return the longest wait, by lane, of tasks that a budget refused one by one."""
    waits: dict[tuple[str, str], float] = {}
    for task_id in islice(dispatch_state.parking.all_aside(), MAX_ASIDE_LOOKED_AT):
        task = dispatch_state.waiting[task_id].task
        key = (task.project_id, task.agent_id or "")
        waits[key] = max(waits.get(key, 0.0), waited(task, now))
    return waits


def _behind(index: LaneIndex, part: GatePart) -> int:
    gates = islice(index.gates.behind(part), MAX_GATES_COUNTED)
    return sum(lane.behind(gate) for gate in gates for lane in index.gate_lanes[gate])


def _loads(
    project: ProjectLanes, stopped: _Stopped, *, tick: int, alpha: float
) -> list[tuple[Lane, float | None]]:
    waits = {lane: max(0, tick - lane.oldest_tick()) for lane in project.lanes.values()}
    competing = {lane for lane in waits if lane.ready and lane not in stopped}
    deepest = max((lane.depth_micro for lane in competing), default=0)
    longest = max((waits[lane] for lane in competing), default=0)
    return [
        (
            lane,
            load_score(
                alpha=alpha,
                queue_depth=lane.depth_micro,
                max_queue_depth=deepest,
                oldest_wait=waits[lane],
                max_oldest_wait=longest,
            )
            if lane in competing
            else None,
        )
        for lane in waits
    ]
