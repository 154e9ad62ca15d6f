"""Calls through the gateway: those that wait and run, in the one dispatcher.

A call is a task record that the store never sees. It is decided by the same function as a task, in
the same lane index, and holds money in the same ledger. The registry here is what the dispatch
state knows of calls, so a state that is made anew is fed from it: what runs first, then what waits.

Rule: however a call ends, its permits are freed once and its reservation is settled once. What the
store cannot be told now is told later; meanwhile the money stays held, or its lease books it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from headgate.core.budgets.escrow import NO_AMOUNTS, Amounts
from headgate.core.budgets.ledger import Ledger, Refused, SettleRequest, UnheldCost, exceeded
from headgate.core.budgets.reservations import Call, Reservation
from headgate.core.budgets.scopes import ROOT, Scope, charged_scopes
from headgate.core.call import CALL_PREFIX, CallRecord, CallState
from headgate.core.dispatch_state import (
    ChooseKey,
    DispatchState,
    HoldOf,
    InFlightAttempt,
    Planned,
    Settled,
    charged_by,
    refusal_text,
)
from headgate.core.estimates import Basis, Hold
from headgate.core.gates import GateClosure, GatePart
from headgate.core.lifecycle import share_of_try
from headgate.core.money import MicroUsd, Tokens
from headgate.core.rate_limits import RateCharge
from headgate.core.reasons import ClientAway
from headgate.core.task import UPSTREAM_PREFIX, Progress, Task, TaskRecord
from headgate.core.task_money import OpenCalls
from headgate.core.why import TaskReason, WaitingLanes, reasons, start_rank
from headgate.engine.escrow import Draw, Escrow
from headgate.engine.task_calls import TaskCalls, TaskDraw
from headgate.errors import (
    CallerError,
    IllegalSettlementError,
    LedgerUnavailableError,
    LimitReachedError,
    NotDispatchingError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from headgate.storage.call_rows import CallStore, EndedCall, KeptPlace
from headgate.storage.task_calls import TaskPart
from headgate.storage.task_ids import PREFIX
from headgate.storage.tokens import UNBOUND, Bounds
from headgate.storage.writer import for_the_service

log = structlog.get_logger("headgate.calls")

T = TypeVar("T")

LEASE_SECONDS = 90.0
"""How long money is held for a call that nobody renews; then it is booked in full."""

RENEWALS_PER_LEASE = 3
RETRY_SECONDS = 1.0
MAX_LIVE = 20_000
"""How many calls may wait and run at this node."""

MAX_RENEWED = 256
"""How many leases are renewed at a time; they share a transaction."""

MAX_CLOSURES = 1_000
"""How many closures by answers are remembered for a state that is made anew."""

MAX_AWAY = 10_000
MAX_AWAY_EACH = 1_000
"""How many calls keep their place whose client is away: of all, and of one tenant."""

NOTE_SECONDS = 1.0
"""A call that runs for longer is noted in the store, so that a crash leaves a row of it."""

LOST_SECONDS = 2 * LEASE_SECONDS
"""A call is lost that was noted and that nobody has seen for so long, where several nodes run."""

ADMIT_SECONDS = 15.0
"""How long a call that has its turn waits for the store; then it is told that nothing is granted.

A failover of a database takes less, as a rule, and a client hears nothing meanwhile.
"""

CONFIRM_SECONDS = 0.05
"""How often a call that has its money looks whether the store has said who dispatches."""

NODE_MARK_LENGTH = 12
"""How much of the id of a node is in the names of its reservations."""

MAX_LATEST = 1_000
"""How many calls that have ended are kept in memory, for whoever asks before the store has them."""

SHARED_KEY = "it is the only key of its upstream"
CLIENT_KEY = "its client sent it, and the upstream has no key of its own"
"""The rules where there is nothing to choose from."""

NOT_BACK = "its client went away while it waited, and has not come back to its place"
TASK_HAS_ENDED = "the attempt of the task that makes the call has ended"

_RATE_SAMPLES = 0.1


class CallRefusedError(LimitReachedError):
    """A call was refused for good: a budget has no room for it, or its route is gone."""

    def __init__(self, message: str, refused: Refused | None = None) -> None:
        super().__init__(message)
        self.refused = refused


class Route(NamedTuple):
    """Where a call goes: its upstream, the model there, and the slots or the slot that it may use.

    With `has_slots` and a `slot` it is that one of the slots of the upstream alone. With
    `is_shared` the upstream has one key for everybody, and its slot stands for the model there:
    what a provider says of one model closes no other.
    """

    upstream: str
    model: str
    slot: str | None = None
    has_slots: bool = False
    is_shared: bool = False

    @property
    def target(self) -> str:
        """The target of calls to the upstream."""
        return UPSTREAM_PREFIX + self.upstream


class KeptPlaces:
    """The places of calls whose client has gone or was asked to come back.

    One tenant keeps so many at most, and takes no place from another by that.
    """

    def __init__(self, *, most: int = MAX_AWAY, most_each: int = MAX_AWAY_EACH) -> None:
        self._most = most
        self._most_each = most_each
        self._places: OrderedDict[str, tuple[CallRecord, float]] = OrderedDict()
        self._by_tenant: dict[tuple[str, str], OrderedDict[str, None]] = {}
        self._by_id: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[CallRecord]:
        return (record for record, _ in self._places.values())

    def add(self, identity: str, record: CallRecord, until: float) -> list[CallRecord]:
        """Keep a place; return the calls that have lost theirs by that."""
        given_up = [] if (same := self._pop(identity)) is None else [same[0]]
        own = self._by_tenant.setdefault((record.token_id, record.project_id), OrderedDict())
        self._places[identity] = (record, until)
        own[identity] = None
        self._by_id[record.id] = identity
        if len(own) > self._most_each:
            given_up.append(self._given_up(next(iter(own))))
        if len(self._places) > self._most:
            given_up.append(self._given_up(next(iter(self._places))))
        return given_up

    def take(self, identity: str, now: float) -> CallRecord | None:
        """Return the call that has a place, which is taken by its retry now."""
        found = self._pop(identity)
        return found[0] if found is not None and found[1] > now else None

    def get(self, identity: str, now: float) -> CallRecord | None:
        """Return the call that has a place."""
        found = self._places.get(identity)
        return found[0] if found is not None and found[1] > now else None

    def of_call(self, call_id: str) -> tuple[CallRecord, float] | None:
        """Return a call by its id, and until when its place is kept."""
        return self._places.get(self._by_id.get(call_id, ""))

    def expire(self, now: float) -> list[CallRecord]:
        """Give up the places whose time is over, and return their calls."""
        over = [identity for identity, (_, until) in self._places.items() if until <= now]
        return [self._given_up(identity) for identity in over]

    def _given_up(self, identity: str) -> CallRecord:
        record, _ = self._places[identity]
        self._pop(identity)
        return record

    def _pop(self, identity: str) -> tuple[CallRecord, float] | None:
        found = self._places.pop(identity, None)
        if found is not None:
            tenant = (found[0].token_id, found[0].project_id)
            del self._by_tenant[tenant][identity]
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
            self._by_id.pop(found[0].id, None)
        return found


class CallDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A call that is to wait: who makes it, where it goes, and what it has to hold, unless it is
    free.

    `identity` is the same for a retry of the same call; without one there is no place for it.
    `estimate_tokens` is what it counts in the share of its project until it has ended.
    """

    record: CallRecord
    route: Route
    hold: HoldOf
    estimate_tokens: int
    identity: str = ""
    has_claims: bool = False
    is_free: bool = False
    is_background: bool = False


class Grant(NamedTuple):
    """What a call was given: a key, and the rule that chose it."""

    slot: str | None
    key_rule: str


class CallEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a call has ended and what it cost; with `micro_usd` None nothing was charged.

    `assumed_…` is the part of the cost that nobody reported. With a `reservation_id` it stays held
    until its lease books it, and may be corrected.
    """

    state: CallState
    status: int | None = None
    error: str | None = None
    tokens: int | None = None
    micro_usd: int | None = None
    assumed_tokens: int = 0
    assumed_micro_usd: int = 0
    input_tokens: int | None = None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    is_unpriced: bool = False
    prompt_chars: int = 0
    reservation_id: str = ""


class CallWhy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Where a call stands: what keeps it waiting, how many go before it, and for about how long."""

    call_id: str
    state: CallState
    reasons: tuple[TaskReason, ...] = ()
    position: int | None = None
    expected_seconds: float | None = None
    slot: str | None = None
    key_rule: str = ""
    error: str | None = None


class LiveCall:
    """One call that waits or runs."""

    __slots__ = (
        "attempt",
        "draw",
        "hold",
        "id",
        "is_background",
        "is_noted",
        "is_over",
        "number",
        "planned",
        "rate_charges",
        "record",
        "reservation",
        "reserved_name",
        "route",
        "task",
        "task_draw",
        "tried",
        "turn",
    )

    def __init__(self, draft: CallDraft, task: Task) -> None:
        self.record = draft.record
        self.id = draft.record.id
        self.route = draft.route
        self.hold = draft.hold
        self.is_background = draft.is_background
        self.task = task
        self.number = 0
        self.turn: asyncio.Future[Planned] = asyncio.get_running_loop().create_future()
        self.planned: Planned | None = None
        """What it was given its turn with, once it has it."""

        self.attempt: InFlightAttempt | None = None
        self.reservation: Reservation | None = None
        self.draw: Draw | None = None
        self.task_draw: TaskDraw | None = None
        self.reserved_name = ""
        self.rate_charges: tuple[RateCharge, ...] = ()
        self.tried = NO_AMOUNTS
        """What its tries count in the share of its project that failed, and were not the last."""

        self.is_over = False
        self.is_noted = False

    @property
    def held(self) -> Amounts:
        """What is held for the call, by itself, out of a slice or by its task."""
        if self.draw is not None:
            return self.draw.amounts
        if self.task_draw is not None:
            return self.task_draw.held
        held = self.reservation
        return Amounts() if held is None else Amounts(held.micro_usd, held.tokens)

    def has_permit(self) -> bool:
        """Tell whether it has a permit, which others may wait for."""
        return self.turn.done() and not self.is_over

    @property
    def has_money(self) -> bool:
        """Whether it starts with its next turn, without asking a budget: it may hold nothing."""
        return not (self.draw is None and self.task_draw is None and self.reservation is None)

    def share_of_try(self, used: Amounts, now: float) -> Amounts:
        """Return what the try that is under way counts in the share of its project by now.

        What a call of a task uses counts for the task alone.
        """
        started_at, planned = self.record.started_at, self.planned
        if self.record.state is not CallState.RUNNING or started_at is None or planned is None:
            return used
        charged = planned.share if self.task.parent_id is None else NO_AMOUNTS
        return share_of_try(used, charged, now - started_at)

    def change(self, **changes: object) -> None:
        """Note what has become of the call."""
        self.record = msgspec.structs.replace(self.record, **changes)

    def waiting_record(self) -> TaskRecord:
        """Return the call as the dispatch state takes one that waits."""
        return TaskRecord(task=self.task, progress=Progress(attempt=self.number))


class Calls:
    """All calls of the node that dispatches."""

    def __init__(
        self,
        ledger: Ledger,
        store: CallStore,
        *,
        tasks: TaskCalls,
        now: Callable[[], float],
        new_id: Callable[[], str],
        state: Callable[[], DispatchState | None],
        wake: Callable[[], None],
        is_ledger_outside: bool,
        settled: Callable[[Settled], None],
        leads: Callable[[], bool],
        may_grant: Callable[[], bool],
        node_id: Callable[[], str],
        is_shared: bool = False,
    ) -> None:
        self._leads = leads
        self._may_grant = may_grant
        self._node_id = node_id
        self._noted_as = ""
        self._keeps_as = ""
        self._elsewhere: dict[str, CallRecord] = {}
        self._looking = asyncio.Lock()
        self._is_shared = is_shared
        self._names = count(1)
        self._ledger = ledger
        self._store = store
        self.tasks = tasks
        """The tasks that make some of the calls."""

        self._now = now
        self._new_id = new_id
        self._state = state
        self._wake = wake
        self._is_outside = is_ledger_outside
        self._tell_settled = settled
        self._asking: dict[str, list[Settled]] = {}
        """What was settled while the ledger was asked for the money of a call."""

        # Slices are turned in the transaction that writes the calls, so the store has the ledger.
        self.escrow = (
            None
            if is_ledger_outside
            else Escrow(store, now=now, new_name=new_id, settled=self._settled)
        )
        self._live: dict[str, LiveCall] = {}
        self._away = KeptPlaces()
        self._latest: OrderedDict[str, CallRecord] = OrderedDict()
        self._closures: dict[GatePart, GateClosure] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._intervals: dict[str, tuple[float, float]] = {}
        self._lanes = WaitingLanes()
        self._listeners: list[Callable[[CallRecord], None]] = []
        self.choose_key: ChooseKey | None = None
        """Chooses among several keys; without, the one with the most headroom is used."""

        self.is_paused: Callable[[str, str], bool] = lambda _slot, _model: False
        """Tells whether a slot is paused for a model, and open for others."""

    def __len__(self) -> int:
        return len(self._live)

    def listen(self, listener: Callable[[CallRecord], None]) -> None:
        """Tell somebody of every call that has ended."""
        self._listeners.append(listener)

    @property
    def has_places(self) -> bool:
        """Whether the place of any call is kept for its client to come back."""
        return bool(self._away)

    def kept_id(self, identity: str) -> str | None:
        """Return the id of a call whose place is kept for a retry of it."""
        kept = self._away.get(identity, self._now()) if identity else None
        return None if kept is None else kept.id

    def new_call_id(self) -> str:
        """Return an id for a call; later ones sort later."""
        return CALL_PREFIX + self._new_id().removeprefix(PREFIX)

    # The way of a call: it enters, is admitted, and ends.

    def enter(self, draft: CallDraft) -> LiveCall:
        """Let a call wait; where there is room it has its turn at once.

        One that comes back to its place goes by the time at which it came first.
        """
        if len(self._live) >= MAX_LIVE:
            line = f"{MAX_LIVE} calls wait and run here; try again in a moment"
            raise LimitReachedError(line)
        earlier = self._away.take(draft.identity, self._now()) if draft.identity else None
        record = draft.record
        if earlier is not None:
            if self._is_shared:
                self._in_background(self._not_running(earlier.id))
            record = msgspec.structs.replace(record, id=earlier.id, created_at=earlier.created_at)
            draft = msgspec.structs.replace(draft, record=record)
        if record.task_id is not None and not self.tasks.enter(record.task_id, record.id):
            raise CallRefusedError(TASK_HAS_ENDED)
        call = LiveCall(draft, _task_of(draft))
        self._live[call.id] = call
        self._queue(call)
        return call

    def _queue(self, call: LiveCall) -> None:
        state = self._state()
        if state is None:
            self._wait_for_state(call)
            return
        state.choose_key = self.choose_key
        now = self._now()
        if self._may_grant():
            planned = state.start_call(call.task, call.hold, now, attempt=call.number)
            if planned is not None:
                self._give_turn(call, planned, state)
                return
        state.observe_call(call.waiting_record(), call.hold, now)
        self.plan(state)

    def _wait_for_state(self, call: LiveCall) -> None:
        """Have a call wait until the tasks are read again; another node decides it otherwise."""
        if not self._leads() and not call.turn.done():
            call.turn.set_exception(NotDispatchingError(""))

    def plan(self, state: DispatchState) -> None:
        """Start what calls can start now, without waiting for the dispatcher's next round."""
        if not state.waiting_calls:
            return
        planned = state.plan(self._now(), most=0) if self._may_grant() else ()
        if planned:
            self.grant(planned)
        if state.waiting_calls:
            # A timer may have to be set for what the call waits for.
            self._wake()

    def grant(self, planned: Iterable[Planned]) -> None:
        """Give calls their turn, which the dispatch state counts as in flight already."""
        state = self._state()
        for one in planned:
            call = self._live.get(one.task.id)
            if call is None or call.turn.done():
                # It has gone meanwhile.
                if state is not None:
                    state.withdraw_call(one.task.id, self._now())
                continue
            self._give_turn(call, one, state)

    def _give_turn(self, call: LiveCall, planned: Planned, state: DispatchState | None) -> None:
        call.number = planned.attempt
        call.attempt = None if state is None else state.in_flight.calls.get(call.id)
        call.planned = planned
        call.turn.set_result(planned)

    def admit_at_once(self, call: LiveCall) -> Grant | None:
        """Hold the money of a call that has its turn, if a slice has it; None if `admit` has to."""
        planned = call.planned
        if planned is None or call.task.parent_id is not None:
            return None
        if call.task.is_free or call.draw is not None or self._draw(call, planned) is not None:
            return self._started(call, planned)
        return None

    async def admit(self, call: LiveCall) -> Grant | None:
        """Hold the money of a call that has its turn; None if it has to wait for another turn.

        `CallRefusedError` if it is refused for good, `LedgerUnavailableError` if nobody answers in
        time. Whoever is cancelled here calls `end` or `go_away`, as after anything else.
        """
        try:
            async with asyncio.timeout(ADMIT_SECONDS):
                return await self._admit(call)
        except TimeoutError:
            line = f"the store has not answered for {ADMIT_SECONDS:g} s; nothing is granted"
            raise LedgerUnavailableError(line) from None

    async def _admit(self, call: LiveCall) -> Grant | None:
        planned = call.turn.result()
        if call.task.parent_id is not None:
            return await self._admit_of_task(call, planned, call.task.parent_id)
        granted = self.admit_at_once(call)
        if granted is not None:
            return granted
        if await self._drawn(call, planned):
            await self._confirmed()
            return self._started(call, planned)
        answer: Reservation | Refused | None = call.reservation
        meanwhile = self._asking[call.id] = []
        try:
            if answer is None:
                answer = await self._reserve(call, planned)
        finally:
            del self._asking[call.id]
        if isinstance(answer, Reservation):
            call.reservation = answer
            await self._confirmed()
            return self._started(call, planned)
        self._not_reserved(call, planned, answer)
        for settled in meanwhile:
            # It may be room for the call, and nobody will say so again.
            self._tell_settled(settled)
        return None

    async def _confirmed(self) -> None:
        """Wait for the store to say who dispatches, if it has not for as long as that is sure."""
        while self._leads() and not self._may_grant():  # noqa: ASYNC110 - a rare moment
            await asyncio.sleep(CONFIRM_SECONDS)

    def _settled(self, settled: Settled) -> None:
        """Tell those who wait for budgets what the ledger has settled."""
        for meanwhile in self._asking.values():
            meanwhile.append(settled)
        self._tell_settled(settled)

    def _draw(self, call: LiveCall, planned: Planned) -> Draw | None:
        """Have a call draw on a slice of its budgets, if there is enough in it."""
        if self.escrow is not None and _may_draw(call, planned.hold):
            call.draw = self.escrow.draw(planned.charged, _amounts_of(planned.hold))
        return call.draw

    async def _drawn(self, call: LiveCall, planned: Planned) -> bool:
        """Have a slice turned that has too little for a call, and the call draw on it."""
        if self.escrow is not None and _may_draw(call, planned.hold):
            call.draw = await self.escrow.refill(planned.charged, _amounts_of(planned.hold))
        return call.draw is not None

    async def _reserve(self, call: LiveCall, planned: Planned) -> Reservation | Refused:
        call.reserved_name = self._name_of(call)
        request = planned.reserve_request(
            call.reserved_name, dispatched=True, lease_seconds=LEASE_SECONDS
        )
        return await _until_answered(partial(self._ledger.reserve, request))

    def _name_of(self, call: LiveCall) -> str:
        """Return a name for a reservation that none had before.

        A call may come back, or move to another node, which counts from 1 as well.
        """
        return f"{call.id}:{self._node_id()[:NODE_MARK_LENGTH]}.{next(self._names)}"

    async def _admit_of_task(self, call: LiveCall, planned: Planned, task_id: str) -> Grant | None:
        """Have a call of a task draw on what that holds, and hold beside it what it lacks."""
        if call.task_draw is None:
            draw = call.task_draw = self.tasks.draw(task_id, planned.hold)
            if draw is None:
                raise CallRefusedError(TASK_HAS_ENDED)
            name = call.reserved_name = self._name_of(call)
            refused = await _until_answered(
                partial(self.tasks.grow, draw, planned, name, lease_seconds=LEASE_SECONDS)
            )
            if refused is not None:
                self._not_grown(call, planned, draw, refused)
                return None
            if not draw.has_reservation:
                call.reserved_name = ""
            self.tasks.has_grown(draw, call.id)
            await self._confirmed()
        return self._started(call, planned)

    def _not_grown(
        self, call: LiveCall, planned: Planned, draw: TaskDraw, refused: Refused
    ) -> None:
        """Let a call wait for room, or refuse one where all who hold the rest wait as well."""
        call.task_draw = None
        self.tasks.give_back(draw)
        loser_id = self.tasks.refused_for(draw, call.id, call.record.created_at, refused)
        self._not_reserved(call, planned, refused)
        if loser_id == call.id:
            raise CallRefusedError(refusal_text(call.task, refused), refused)
        loser = self._live.get(loser_id or "")
        if loser is not None:
            self.refuse(loser.id, refusal_text(loser.task, refused))

    def _started(self, call: LiveCall, planned: Planned) -> Grant:
        if self._is_shared and not self._leads():
            # Its turn came here, and another node has given its permit to somebody by now.
            raise NotDispatchingError("")
        now = self._now()
        held = call.held
        slot, key_rule = planned.used_slot, planned.key_rule
        if call.route.is_shared:
            slot, key_rule = None, SHARED_KEY
        elif not call.route.has_slots:
            key_rule = CLIENT_KEY
        call.rate_charges += planned.rate_charges
        call.change(
            state=CallState.RUNNING,
            started_at=now,
            slot=slot,
            key_rule=key_rule,
            reserved_tokens=held.tokens,
            reserved_micro_usd=held.micro_usd,
            reserved_basis=planned.hold.tokens.basis.value,
        )
        self._note_start(call.route.target, now)
        return Grant(slot, planned.key_rule)

    def _not_reserved(self, call: LiveCall, planned: Planned, refused: Refused) -> None:
        """Let a call wait for the budget that refused it, or refuse it for good."""
        call.reserved_name = ""
        call.turn = asyncio.get_running_loop().create_future()
        call.planned = None
        call.attempt = None
        call.number = planned.attempt - 1
        state = self._state()
        if state is None:
            self._wait_for_state(call)
            return
        error = state.refuse(planned, call.waiting_record(), refused, self._now())
        if error is not None:
            raise CallRefusedError(error, refused)
        self._wake()

    def refusal_of(self, call: LiveCall) -> Refused | None:
        """Return what a call that waits was refused by: a budget without room for it."""
        state = self._state()
        if state is None:
            return None
        found = state.parking.refusal_of(call.id)
        if found is not None or not call.task.is_bound_by_budgets:
            return found
        for scope in charged_scopes(ROOT, [Scope(one) for one in call.task.scopes]):
            refused = state.parking.refusal_behind(scope, call.task.project_id)
            if refused is not None:
                return refused
        return None

    def hopeless(self, call: LiveCall, until: float) -> CallRefusedError | None:
        """Return why a call cannot start until a time: its budget is spent, and resets later."""
        refused = self.refusal_of(call)
        if refused is None or refused.kind or refused.resets_at is None:
            return None
        own = refused.requested
        if call.task.parent_id is None:
            # A closed budget said so to another call. Of this one a margin may be left out.
            own = call.hold().room_needed(refused.unit, refused.limit, is_shared=False).alone
        is_spent = refused.spent + refused.overrun + own > refused.limit
        if not is_spent or refused.resets_at <= until:
            return None
        refused = msgspec.structs.replace(refused, requested=own)
        most = until - call.record.created_at
        return CallRefusedError(exceeded(refused).of_call(most_wait_seconds=most), refused)

    def step_down(self) -> None:
        """Have those who wait ask the node that dispatches now; what runs here goes on.

        The places that were kept here are that node's by now.
        """
        self._elsewhere.clear()
        self._away, self._keeps_as = KeptPlaces(), ""
        for call in self._live.values():
            if not call.turn.done():
                call.turn.set_exception(NotDispatchingError(""))
        self._in_background(self.note_running())

    def refuse(self, call_id: str, error: str) -> None:
        """Refuse a call that waits: its budget has no room, and it will not wait for any."""
        call = self._live.get(call_id)
        if call is not None and not call.turn.done():
            call.turn.set_exception(CallRefusedError(error))

    def move(self, call: LiveCall, route: Route, *, keeps_money: bool = True) -> None:
        """Send a call elsewhere: to another key, upstream or model; it keeps its time.

        It keeps its money as well, unless it is to wait or another model may cost something else.
        """
        self._withdraw(call)
        self._forget_note(call)
        if not keeps_money or route.model != call.route.model:
            self._give_back(call)
            call.reservation = None
        call.route = route
        call.task = msgspec.structs.replace(
            call.task,
            target=route.target,
            slot=route.slot,
            provider=route.target if route.has_slots else None,
            has_money=call.has_money,
        )
        call.turn = asyncio.get_running_loop().create_future()
        call.planned = None
        call.attempt = None
        call.change(
            state=CallState.WAITING,
            upstream=route.upstream,
            upstream_model=route.model,
            slot=None,
            key_rule="",
        )
        self._queue(call)

    def go_away(self, call: LiveCall, identity: str, *, seconds: float) -> None:
        """Keep the place of a call whose client was asked to come back, and free what it has."""
        self.hand_over(call)
        if identity:
            call.change(state=CallState.WAITING, slot=None, key_rule="")
            self._keep_places([KeptPlace(identity, self._now() + seconds, call.record)])

    def _keep_places(self, places: Sequence[KeptPlace]) -> None:
        """Keep places; where several nodes run, also for whoever dispatches next."""
        if self._is_shared:
            self._in_background(self._note_places(places))
            if not self._leads():
                return
        for identity, until, record in places:
            self._give_up(self._away.add(identity, record, until))

    async def _note_places(self, places: Sequence[KeptPlace]) -> None:
        with suppress(StoreError):
            await self._store.note_places(places, node_id=self._node_id())

    def hand_over(self, call: LiveCall) -> None:
        """Let go of a call that goes on elsewhere, and free what it has."""
        self._leave(call)
        self._withdraw(call)
        self._forget_note(call)
        self._give_back(call)

    def _forget_note(self, call: LiveCall) -> None:
        """Have the store know of a call that it does not run any more."""
        if call.is_noted:
            call.is_noted = False
            self._in_background(self._not_running(call.id))

    async def _not_running(self, call_id: str) -> None:
        with suppress(StoreError):
            await self._store.forget_running([call_id])

    def _give_up(self, records: Sequence[CallRecord]) -> None:
        """End calls whose client has not come back; nothing was charged for them."""
        for one in records:
            record = msgspec.structs.replace(
                one, state=CallState.CANCELLED, error=NOT_BACK, ended_at=self._now()
            )
            self._keep(record)
            ended = EndedCall(record=record, is_noted=self._is_shared)
            self._in_background(self._finish(ended, has_freed=False))
            for listener in self._listeners:
                listener(record)

    def end(self, call: LiveCall, end: CallEnd) -> CallRecord:
        """End a call, and return it as it is kept; the store is told in the background."""
        if call.is_over:
            return call.record
        charged = end.micro_usd is not None or end.tokens is not None
        now = self._now()
        share = call.share_of_try(Amounts(end.micro_usd or 0, end.tokens or 0), now)
        call.change(ended_at=now, **msgspec.structs.asdict(end))
        held = call.held
        has_freed = (end.tokens or 0) < held.tokens or (end.micro_usd or 0) < held.micro_usd
        settle, of_task, over = None, None, NO_AMOUNTS
        if charged and call.task_draw is not None:
            settle, of_task, over = self._settlement_of_task(call, call.task_draw, end)
        elif charged and call.reserved_name and not end.reservation_id:
            settle = self._settlement(call, end)
        self._leave(call)
        if call.record.started_at is None or end.state is CallState.REFUSED:
            share = NO_AMOUNTS
            self._withdraw(call)
        else:
            self._free(call, end, share)
        self._keep(call.record)
        ended = EndedCall(
            record=call.record,
            settle=settle,
            share=call.tried.plus(share),
            rate_charges=call.rate_charges,
            of_task=of_task,
            over=over,
            is_noted=call.is_noted,
        )
        if charged and call.draw is not None and self.escrow is not None:
            draw, call.draw = call.draw, None
            spent = Amounts(end.micro_usd or 0, end.tokens or 0)
            self.escrow.settle(draw, spent, ended)
        else:
            if not charged:
                self._give_back(call)
            # What is given back is told of by itself.
            self._in_background(self._finish(ended, has_freed=charged and has_freed))
        for listener in self._listeners:
            listener(call.record)
        return call.record

    def leave_open(self, call: LiveCall, *, status: int) -> CallRecord | None:
        """End a call whose response is made in the background, and leave its money held.

        None if nothing is held for it alone, so that there is nothing to correct later.
        """
        if call.reservation is None or not call.reserved_name or call.task.parent_id is not None:
            return None
        held, name = call.held, call.reserved_name
        end = CallEnd(
            state=CallState.DONE,
            status=status,
            tokens=held.tokens,
            micro_usd=held.micro_usd,
            assumed_tokens=held.tokens,
            assumed_micro_usd=held.micro_usd,
            reservation_id=name,
        )
        return self.end(call, end)

    async def correct(self, call_id: str, end: CallEnd) -> None:
        """Book what a response cost that was made in the background, in place of what it held."""
        record = await self._store.get(call_id)
        if record is None or not record.reservation_id:
            return
        request = SettleRequest(
            reservation_id=record.reservation_id,
            call=Call.COMMIT,
            micro_usd=MicroUsd(end.micro_usd or 0),
            tokens=Tokens(end.tokens or 0),
        )
        end = msgspec.structs.replace(end, prompt_chars=record.prompt_chars)
        changed = msgspec.structs.replace(record, **msgspec.structs.asdict(end))
        if self._is_outside:
            try:
                await self._ledger.settle(request)
            except CallerError:
                return
        if await self._store.correct(changed, None if self._is_outside else request):
            self._keep(changed)
            self._settled(Settled(changed.scopes, (changed.kind,)))

    def _settlement(self, call: LiveCall, end: CallEnd) -> SettleRequest:
        return SettleRequest(
            reservation_id=call.reserved_name,
            call=Call.COMMIT,
            micro_usd=MicroUsd(end.micro_usd or 0),
            tokens=Tokens(end.tokens or 0),
        )

    def _settlement_of_task(
        self, call: LiveCall, draw: TaskDraw, end: CallEnd
    ) -> tuple[SettleRequest | None, TaskPart | None, Amounts]:
        """Return what settles the reservation of a call of a task, and what its task adds up.

        What a call without a reservation cost beyond what its task holds comes last.
        """
        cost = Amounts(end.micro_usd or 0, end.tokens or 0)
        beside, part = self.tasks.settle(draw, call.id, cost)
        if call.reserved_name:
            request = SettleRequest(
                reservation_id=call.reserved_name,
                call=Call.COMMIT if any(beside) else Call.RELEASE,
                micro_usd=MicroUsd(beside.micro_usd),
                tokens=Tokens(beside.tokens),
            )
            return request, part, Amounts()
        if not self._is_outside:
            return None, part, beside
        if any(beside):
            over = UnheldCost.of(
                f"{call.id}:over",
                charged_by(call.task.scopes),
                micro_usd=beside.micro_usd,
                tokens=beside.tokens,
                lease_seconds=LEASE_SECONDS,
            )
            self._in_background(self._book(over))
        return None, part, Amounts()

    async def _book(self, cost: UnheldCost) -> None:
        while True:
            try:
                await self._ledger.reserve(cost.reserve)
            except StoreUnavailableError:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                break
        await self._settle(cost.commit)

    async def task_ended(self, record: TaskRecord) -> OpenCalls | None:
        """Refuse the calls of an attempt that wait, and wait for the others to be written.

        Return what is known of those that take too long; None if it could make no calls.
        """
        for call_id in self.tasks.calls_of(record):
            self.refuse(call_id, TASK_HAS_ENDED)
        return await self.tasks.ended(record)

    def _leave(self, call: LiveCall) -> None:
        call.is_over = True
        self._live.pop(call.id, None)
        if call.record.task_id is not None:
            self.tasks.leave(call.record.task_id, call.id)
        if not call.turn.done():
            call.turn.cancel()

    def _free(self, call: LiveCall, end: CallEnd, share: Amounts) -> None:
        """Have the dispatch state free the permits of a call that has ended, and count it."""
        state = self._state()
        if state is None:
            return
        state.end_call(
            call.id,
            self._now(),
            tokens=end.tokens or 0,
            share=share,
            is_done=end.state is CallState.DONE,
        )
        if state.waiting_calls:
            self.plan(state)

    def _withdraw(self, call: LiveCall) -> None:
        """Have the dispatch state forget a call as if it had not come; it may come again."""
        state, now = self._state(), self._now()
        share = call.share_of_try(NO_AMOUNTS, now)
        call.tried = call.tried.plus(share)
        if state is not None:
            state.withdraw_call(call.id, now, share)
            self.plan(state)

    def _give_back(self, call: LiveCall) -> None:
        """Release what is held, or may be held by now, for a call that cost nothing."""
        draw, call.draw = call.draw, None
        if draw is not None and self.escrow is not None:
            self.escrow.give_back(draw)
        task_draw, call.task_draw = call.task_draw, None
        if task_draw is not None:
            self.tasks.give_back(task_draw)
        name, call.reserved_name = call.reserved_name, ""
        settled = Settled(call.record.scopes, (call.record.kind,))
        if name:
            self._in_background(self._release(name, settled))
        elif draw is not None or task_draw is not None:
            self._settled(settled)

    async def _release(self, name: str, settled: Settled) -> None:
        await self._settle(SettleRequest(reservation_id=name, call=Call.RELEASE))
        self._settled(settled)

    # What the store and the ledger are told, in the background.

    def _in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _finish(self, ended: EndedCall, *, has_freed: bool) -> None:
        has_settled = ended.settle is not None or ended.of_task is not None
        if self._is_outside and ended.settle is not None:
            await self._settle(ended.settle)
            ended = msgspec.structs.replace(ended, settle=None)
        while True:
            try:
                await self._store.finish([ended])
            except StoreUnavailableError:
                await asyncio.sleep(RETRY_SECONDS)
            except StoreError as error:
                log.warning("a call was not kept", call_id=ended.record.id, problem=str(error))
                return
            else:
                break
        if ended.of_task is not None:
            self.tasks.written(ended.record.task_id or "", ended.record.id)
        if has_settled:
            self._settled(Settled(ended.record.scopes, (ended.record.kind,), has_freed))

    async def _settle(self, request: SettleRequest) -> None:
        while True:
            try:
                await self._ledger.settle(request)
            except IllegalSettlementError:
                # It was never held, or its lease has ended and booked it.
                return
            except StoreUnavailableError:
                await asyncio.sleep(RETRY_SECONDS)
            except (StoreError, CallerError) as error:
                log.warning(
                    "money was not settled", reservation=request.reservation_id, problem=str(error)
                )
                return
            else:
                return

    async def settled(self, *, seconds: float) -> None:
        """Wait until everything is written that has ended so far, for so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if self.escrow is not None:
                    await self.escrow.recall()
                while self._settling:
                    await asyncio.wait(set(self._settling))

    async def run(self) -> None:
        """Renew the leases of money in use until cancelled, and forget who stays away.

        What runs for longer than a moment is noted, and what a crash has left behind is ended.
        """
        if not self._is_shared:
            # Whoever has noted calls here has ended.
            await self.end_lost(seen_before=self._now())
        renews_at = self._now() + LEASE_SECONDS / RENEWALS_PER_LEASE
        while True:
            await asyncio.sleep(NOTE_SECONDS)
            await self.note_running()
            if self._is_shared and self._leads():
                # Those that are lost come first: what they may have cost is in their shares then.
                await self.end_lost(seen_before=self._now() - LOST_SECONDS)
                with suppress(StoreError):
                    await self.look_elsewhere()
            if self._now() >= renews_at:
                renews_at = self._now() + LEASE_SECONDS / RENEWALS_PER_LEASE
                await self.run_once()

    async def note_running(self, *, is_again: bool = False) -> None:
        """Have the store know of calls that have run for a while; all of them, if again.

        While another node dispatches, this is how it knows what runs here.
        """
        is_alone = self._leads() or not self._is_shared
        since = self._now() - (NOTE_SECONDS if is_alone else 0.0)
        node_id = self._node_id()
        is_again = is_again or node_id != self._noted_as
        found = [
            call
            for call in self._live.values()
            if (is_again or not call.is_noted)
            and call.record.state is CallState.RUNNING
            and (call.record.started_at or since) <= since
        ]
        self._noted_as = node_id
        if not found:
            return
        for call in found:
            call.is_noted = True
        try:
            await self._store.note_running([call.record for call in found], node_id=node_id)
        except StoreError:
            # Which of them it has is not known.
            self._noted_as = ""

    async def end_lost(self, *, seen_before: float) -> None:
        """End the calls that a process has left behind which was killed.

        Where several nodes run, these are the calls of nodes whose lease has ended.
        """
        with suppress(StoreError):
            lost = await self._store.end_lost(
                seen_before, without=list(self._live), with_dead_nodes=self._is_shared
            )
            for record in lost:
                log.warning("a call was lost", call_id=record.id, project_id=record.project_id)

    async def run_once(self) -> None:
        """Renew once."""
        now = self._now()
        await self.note_running(is_again=True)
        if self._may_grant():
            # Otherwise the place may be another node's by now, and the call may run there.
            self._give_up(self._away.expire(now))
        for call_id in self.tasks.forget_lost():
            self.refuse(call_id, TASK_HAS_ENDED)
        since = now - LEASE_SECONDS / RENEWALS_PER_LEASE / 2
        names = [
            call.reserved_name
            for call in self._live.values()
            if call.reserved_name and (call.record.started_at or now) <= since
        ]
        for start in range(0, len(names), MAX_RENEWED):
            renewals = [self._renew(name) for name in names[start : start + MAX_RENEWED]]
            await asyncio.gather(*renewals)

    async def _renew(self, name: str) -> None:
        request = SettleRequest(reservation_id=name, call=Call.EXTEND, lease_seconds=LEASE_SECONDS)
        with suppress(IllegalSettlementError, StoreError):
            await self._ledger.settle(request)

    # A dispatch state that was made anew.

    def feed(self, state: DispatchState) -> None:
        """Show a new dispatch state all calls: those in flight first, then those that wait."""
        now = self._now()
        state.choose_key = self.choose_key
        for part, closure in list(self._closures.items()):
            if closure.until is not None and closure.until <= now:
                del self._closures[part]
            else:
                state.close(closure, now)
        for call in self._live.values():
            if call.attempt is not None:
                state.load_call(call.attempt)
        for record in self._elsewhere.values():
            state.load_call_elsewhere(record)
        for call in self._live.values():
            if call.attempt is None:
                state.observe_call(call.waiting_record(), call.hold, now)

    async def look_elsewhere(self) -> None:
        """Learn which calls run at other nodes, which dispatched before, and which of them ended.

        They have their permits until they end, or until their node is gone. The places that those
        nodes have kept are kept here from now on.
        """
        async with self._looking:
            await self._take_over_places()
            seen_after = self._now() - LEASE_SECONDS
            records = await self._store.running_elsewhere(self._node_id(), seen_after=seen_after)
            found = {one.id: one for one in records if one.id not in self._live}
            gone = [one for one in self._elsewhere if one not in found]
            ended = {one.id: one for one in await self._store.ended(gone)}
            state, now = self._state(), self._now()
            # Meanwhile this node may have stepped down, or a call may have come here.
            for call_id in gone:
                if self._elsewhere.pop(call_id, None) is not None and state is not None:
                    state.end_call_elsewhere(call_id, ended.get(call_id), now)
            for record in found.values():
                if record.id in self._live:
                    continue
                if record.id not in self._elsewhere and state is not None:
                    state.load_call_elsewhere(record)
                self._elsewhere[record.id] = record
            if state is not None and gone:
                self.plan(state)

    async def _take_over_places(self) -> None:
        """Keep the places that were kept elsewhere, or here before another node dispatched."""
        node_id = self._node_id()
        places = await self._store.places_elsewhere(self._keeps_as)
        ids = [one.record.id for one in places]
        ended = {one.id for one in await self._store.ended(ids)} if ids else set()
        if not self._leads():
            return
        self._keeps_as = node_id
        found = [one for one in places if self._away.of_call(one.record.id) is None]
        # One that has come back meanwhile has no place any more.
        over = ended | {one.record.id for one in found if self.get(one.record.id) is not None}
        if found := [one for one in found if one.record.id not in over]:
            self._keep_places(found)
        if over:
            await self._store.forget_running(sorted(over))

    def close(self, closure: GateClosure) -> None:
        """Close a slot or an upstream for everybody, as an answer of its provider says."""
        if len(self._closures) >= MAX_CLOSURES:
            now = self._now()
            kept = {one: each for one, each in self._closures.items() if (each.until or now) > now}
            self._closures = dict(list(kept.items())[-MAX_CLOSURES // 2 :])
        self._closures[closure.part] = closure
        state = self._state()
        if state is not None:
            state.close(closure, self._now())
            # A timer has to be set for its end.
            self._wake()

    def open(self, part: GatePart) -> None:
        """Open a slot or an upstream that an answer has closed."""
        if self._closures.pop(part, None) is None:
            return
        state = self._state()
        if state is not None:
            state.open(part)
            self.plan(state)

    def forget_closure(self, part: GatePart) -> None:
        """Forget that an answer has closed what was opened at another node."""
        self._closures.pop(part, None)

    def open_slots(self, route: Route, project_id: str) -> list[str] | None:
        """Return the slots of a route that a project may use now; None if nobody knows."""
        state = self._state()
        if state is None:
            return None
        if not route.has_slots:
            return []
        found = state.slots.open_slots(route.target, project_id, without=(), with_full=True)
        return [
            one.name
            for one in found
            if route.slot in (None, one.name) and not self.is_paused(one.name, route.model)
        ]

    def is_closed(self, route: Route, project_id: str) -> bool:
        """Tell whether a route leads a project nowhere at this moment, whatever closes it."""
        state = self._state()
        if state is None:
            return False
        parts = [GatePart("target", route.target)]
        if route.slot is not None:
            parts.append(GatePart("slot", route.slot))
        if route.has_slots and not self.open_slots(route, project_id):
            return True
        return any(state.closures.is_closed(part) for part in parts)

    def unusable(self, route: Route, project_id: str) -> list[GateClosure]:
        """Return what closes the keys of a route, if none of them can come back by itself."""
        state = self._state()
        if state is None:
            return []
        if route.has_slots:
            found = state.slots.unusable(route.target, project_id, slot=route.slot)
        else:
            closure = state.closures.timed.get(GatePart("target", route.target))
            found = [closure] if closure is not None and closure.cause == "credit" else []
        now = self._now()
        # One whose time has come is opened in a moment.
        is_over = any(one.cause == "credit" and one.opens_at <= now for one in found)
        return [] if is_over else found

    # What people ask.

    def model_of(self, call_id: str) -> str:
        """Return the model that a call goes to; empty if it is not here any more."""
        call = self._live.get(call_id)
        return "" if call is None else call.route.model

    def live(self) -> Iterable[CallRecord]:
        """Return the calls that wait and run, also those that run at a node that led before."""
        return [*(call.record for call in self._live.values()), *self._elsewhere.values()]

    def kept(self) -> Iterable[CallRecord]:
        """Return the calls whose client is away, and whose place is kept."""
        return list(self._away)

    def latest(self) -> Iterable[CallRecord]:
        """Return the calls that ended last, the store may not have them yet."""
        return self._latest.values()

    def get(self, call_id: str) -> CallRecord | None:
        """Return a call that waits, runs or has just ended."""
        call = self._live.get(call_id)
        if call is not None:
            return call.record
        kept = self._away.of_call(call_id)
        if kept is not None:
            return kept[0]
        return self._elsewhere.get(call_id) or self._latest.get(call_id)

    def why(self, call_id: str, bounds: Bounds = UNBOUND) -> CallWhy | None:
        """Say why a call waits; None if it is not known here."""
        record = self.get(call_id)
        if record is None:
            return None
        state = self._state()
        if record.state is not CallState.WAITING or state is None:
            return CallWhy(
                call_id=call_id, state=record.state, slot=record.slot, key_rule=record.key_rule
            )

        kept = self._away.of_call(call_id)
        if kept is not None:
            away = ClientAway(until=kept[1])
            told = TaskReason(detail=away, message=away.message, until=kept[1])
            return CallWhy(call_id=call_id, state=record.state, reasons=(told,))

        def is_own(attempt: InFlightAttempt) -> bool:
            return bounds.has(agent_id=attempt.agent_id, project_id=attempt.task.project_id)

        now = self._now()
        found = reasons(state, call_id, now, is_own, bounds.may_charge)
        position = self._position(record)
        expected = self._expected(self._live[call_id], state, found, now)
        return CallWhy(
            call_id=call_id,
            state=record.state,
            reasons=found,
            position=position,
            expected_seconds=expected,
            slot=record.slot,
            key_rule=record.key_rule,
        )

    def _position(self, record: CallRecord, target: str | None = None) -> int:
        """Return the place of a call among those of its agent that wait, the first is 1.

        With a target only those that wait for that count.
        """
        own = (record.priority, record.created_at, record.id)
        return 1 + sum(
            (one.record.priority, one.record.created_at, one.id) < own
            for one in self._live.values()
            if one.record.state is CallState.WAITING
            and one.record.project_id == record.project_id
            and one.record.agent_id == record.agent_id
            and (target is None or one.route.target == target)
        )

    def _expected(
        self, call: LiveCall, state: DispatchState, found: tuple[TaskReason, ...], now: float
    ) -> float | None:
        """Return about how long a call waits: until a time that is known, or at the latest pace.

        Where calls wait in very many lanes nobody says.
        """
        times = [one.until for one in found if one.until is not None]
        if times:
            return max(0.0, max(times) - now)
        target = call.route.target
        _, seconds = self._intervals.get(target, (0.0, 0.0))
        lanes = self._lanes.of(state, target, now) if seconds else None
        if lanes is None:
            return None
        return seconds * start_rank(state, call.task, self._position(call.record, target), lanes)

    def _note_start(self, target: str, now: float) -> None:
        """Learn the pace at which an upstream takes calls while some wait."""
        state = self._state()
        last_at, seconds = self._intervals.get(target, (0.0, 0.0))
        if last_at and state is not None and state.waiting_calls:
            seconds += ((now - last_at) - seconds) * (_RATE_SAMPLES if seconds else 1.0)
        self._intervals[target] = (now, seconds)

    def _keep(self, record: CallRecord) -> None:
        self._latest[record.id] = record
        if len(self._latest) > MAX_LATEST:
            self._latest.popitem(last=False)


async def _until_answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask the store until it can be asked; what is asked for has a name, and is done once.

    Whoever calls this bounds the time.
    """
    while True:
        try:
            # A call has its permit meanwhile, which others wait for.
            with for_the_service():
                return await ask()
        except StoreFullError:
            raise
        except StoreUnavailableError:
            await asyncio.sleep(RETRY_SECONDS)


def _may_draw(call: LiveCall, hold: Hold) -> bool:
    """Tell whether a call may draw on a slice: only the ledger knows what a probe holds."""
    if call.reservation is not None or call.is_background:
        return False
    usd, tokens = hold.micro_usd, hold.tokens
    is_probe = usd.basis is Basis.PROBE or tokens.basis is Basis.PROBE
    return not (is_probe or usd.at_once or tokens.at_once)


def _amounts_of(hold: Hold) -> Amounts:
    return Amounts(hold.micro_usd.amount, hold.tokens.amount)


def _task_of(draft: CallDraft) -> Task:
    record, route = draft.record, draft.route
    return Task(
        id=record.id,
        project_id=record.project_id,
        agent_id=record.agent_id,
        priority=record.priority,
        created_at=record.created_at,
        estimate_tokens=draft.estimate_tokens,
        scopes=record.scopes,
        target=route.target,
        slot=route.slot,
        provider=route.target if route.has_slots else None,
        has_usd_estimate=True,
        has_claims=draft.has_claims,
        is_free=draft.is_free,
        is_call=True,
        parent_id=record.task_id,
    )
