"""The event feed: what happened to tasks lately, in order, for everybody who listens.

The dispatcher shows it every record that it observes. The feed drops what it has seen before and
keeps the rest in a ring; nobody is waited for. A stream has a position in the ring, and reads on
from there at a pace of its own. Rule: a stream is told every event after its position, or that it
missed some; so the ring begins a new life, with another name in all ids, when this node becomes the
dispatcher and whenever the dispatcher has read everything anew.

Parts of the process that count or act at once `subscribe` instead: they are called with each event,
and with whatever else the engine tells.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from headgate.core.budgets.ledger import Refused
from headgate.core.events import LAST_RANK, EventKind, TaskEvent, kind_of, rank_of, shortened_error
from headgate.core.gates import GateClosure
from headgate.core.task import TERMINAL, TaskRecord, TaskStatus
from headgate.core.task_view import exact_moment
from headgate.errors import without_figures

MAX_EVENTS = 10_000
MAX_ENDED = 10_000
"""How many ended tasks are remembered, so that their end is told once."""

MAX_UNREAD = 1_000
"""How many events of one task wait for a stream that does not read; older ones are left out."""

_UNKNOWN_RANK = -1
_QUEUED = TaskStatus.QUEUED
_RUNNING = TaskStatus.RUNNING


class Happening(msgspec.Struct, gc=False):
    """One event as the ring keeps it: no text is made of it before somebody listens."""

    task_id: str
    agent_id: str | None
    project_id: str
    status: TaskStatus
    attempt: int
    error: str | None
    at: float
    kind: EventKind
    rendered: bytes | None = None
    booked_micro_usd: int = 0
    """What was booked for the task since its event before, for whoever sums it up over time."""

    @property
    def rank(self) -> int:
        """How far the task had come."""
        return rank_of(self.status, self.attempt)


EventListener = Callable[[Happening, TaskRecord], None]
RecordsListener = Callable[[Iterable[TaskRecord]], None]
RefusalListener = Callable[[Refused], None]
SlotListener = Callable[[str], None]


class TaskWatch:
    """What happens to one task, from now on."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self.news: deque[tuple[int, Happening]] = deque(maxlen=MAX_UNREAD)
        self.changed = asyncio.Event()


class EventFeed:
    """The ring, what was seen of each task, and who waits for more."""

    def __init__(self, clock: Callable[[], float], *, size: int = MAX_EVENTS) -> None:
        self._clock = clock
        self._size = size
        self._ring: list[Happening | None] = [None] * size
        self._began_at = 1
        self._ranks: dict[str, int] = {}
        self._ended: deque[str] = deque()
        self._bookings = Bookings()
        self._watches: dict[str, set[TaskWatch]] = {}
        self._changed = asyncio.Event()
        self._waiting = 0
        self._event_listeners: list[EventListener] = []
        self._records_listeners: list[RecordsListener] = []
        self._refusal_listeners: list[RefusalListener] = []
        self._slot_listeners: list[SlotListener] = []
        self.epoch: int | None = None
        self.life = secrets.token_hex(6)
        self.next = 1
        """The number of the next event."""

    def subscribe(
        self,
        *,
        events: EventListener | None = None,
        records: RecordsListener | None = None,
        refusals: RefusalListener | None = None,
        paused_slots: SlotListener | None = None,
    ) -> None:
        """Be called from now on; a listener must be quick and raise nothing.

        `events` has every event once, on the node that dispatches. `records` has whatever this node
        changed, whether it dispatches or not. `refusals` has each refusal of a budget, and
        `paused_slots` the name of a slot whose provider asked for a pause.
        """
        if events is not None:
            self._event_listeners.append(events)
        if records is not None:
            self._records_listeners.append(records)
        if refusals is not None:
            self._refusal_listeners.append(refusals)
        if paused_slots is not None:
            self._slot_listeners.append(paused_slots)

    def now(self) -> float:
        """Return the time by which events are dated."""
        return self._clock()

    @property
    def first(self) -> int:
        """The number of the oldest event that is still there."""
        return max(self._began_at, self.next - self._size)

    @property
    def is_open(self) -> bool:
        """Whether this node dispatches, and so sees what happens."""
        return self.epoch is not None

    def open(self, epoch: int) -> None:
        """Begin, because this node dispatches from now on."""
        self.epoch = epoch
        self._ranks.clear()
        self._ended.clear()
        self._bookings = Bookings()
        self._begin_life()

    def close(self) -> None:
        """End all streams, because another node dispatches, or none."""
        self.epoch = None
        self._begin_life()

    def start_anew(self, is_known: Callable[[str], bool]) -> None:
        """Note that changes may have been missed; live tasks that are not known are forgotten."""
        live = self._ranks.items()
        self._ranks = {one: rank for one, rank in live if rank == LAST_RANK or is_known(one)}
        self._bookings.keep(is_known)
        self._begin_life()

    def load(self, live: Iterable[TaskRecord]) -> None:
        """Take what there was when the dispatcher read everything; that is no event."""
        self._bookings.load(one for one in live if self._ranks.get(one.task.id) != LAST_RANK)

    def observe(self, records: Iterable[TaskRecord]) -> None:
        """Take records that changed; one that tells nothing new is passed over."""
        if self.epoch is None:
            return
        ranks = self._ranks
        for record in records:
            task, attempt = record.task, record.progress.attempt
            rank = rank_of(task.status, attempt)
            if rank <= ranks.get(task.id, _UNKNOWN_RANK):
                continue
            kind = kind_of(task.status, attempt)
            ranks[task.id] = rank
            if rank == LAST_RANK:
                self._remember_end(task.id)
            happening = _happening(record, kind, self._clock())
            if record.progress.used_micro_usd:
                happening.booked_micro_usd = self._bookings.take(record)
            self._add(happening, record)

    def changed(self, records: Iterable[TaskRecord], closure: GateClosure | None = None) -> None:
        """Tell of records that this node changed, and of a pause that a provider asked for."""
        for listener in self._records_listeners:
            listener(records)
        if closure is not None and closure.kind == "slot":
            self.doubt_slot(closure.name)

    def doubt_slot(self, name: str) -> None:
        """Tell of a slot of which somebody says that it has no room."""
        for tell in self._slot_listeners:
            tell(name)

    def refused(self, refused: Refused) -> None:
        """Tell of a budget that had no room; that is no event."""
        for listener in self._refusal_listeners:
            listener(refused)

    def forget(self, task_id: str) -> None:
        """Drop what was seen of a task that the store no longer has."""
        if self._ranks.get(task_id) != LAST_RANK:
            self._ranks.pop(task_id, None)
            self._bookings.forget(task_id)

    def event_id(self, number: int) -> str:
        """Return the id of an event of this life."""
        return f"{self.life}-{number}"

    def position_after(self, event_id: str) -> int | None:
        """Return where to read on after an event; None if it is not known what came after it."""
        life, _, number = event_id.partition("-")
        if life != self.life or not (number.isascii() and number.isdigit()):
            return None
        position = int(number[:20]) + 1
        return position if self.first <= position <= self.next else None

    def since(self, position: int) -> Iterator[Happening]:
        """Return the events from a position on; what lies before the first is gone."""
        ring, size = self._ring, self._size
        for number in range(max(position, self.first), self.next):
            happening = ring[number % size]
            if happening is not None:
                yield happening

    async def wait(self) -> None:
        """Wait until there is another event, or another life."""
        self._waiting += 1
        try:
            await self._changed.wait()
        finally:
            self._waiting -= 1

    def watch(self, task_id: str) -> TaskWatch:
        """Begin to watch a task; it has to be left."""
        watch = TaskWatch(task_id)
        self._watches.setdefault(task_id, set()).add(watch)
        return watch

    def leave(self, watch: TaskWatch) -> None:
        """Watch a task no more."""
        watches = self._watches.get(watch.task_id, set())
        watches.discard(watch)
        if not watches:
            self._watches.pop(watch.task_id, None)

    def _add(self, happening: Happening, record: TaskRecord) -> None:
        self._ring[self.next % self._size] = happening
        self.next += 1
        if self._waiting:
            self._wake()
        for listener in self._event_listeners:
            listener(happening, record)
        if self._watches:
            for watch in self._watches.get(happening.task_id, ()):
                watch.news.append((self.next - 1, happening))
                watch.changed.set()

    def _remember_end(self, task_id: str) -> None:
        self._ended.append(task_id)
        if len(self._ended) > MAX_ENDED:
            self._ranks.pop(self._ended.popleft(), None)

    def _begin_life(self) -> None:
        self.life = secrets.token_hex(6)
        self._ring = [None] * self._size
        self._began_at = self.next
        for watches in self._watches.values():
            for watch in watches:
                watch.changed.set()
        self._wake()

    def _wake(self) -> None:
        # Those who wait are woken, and whoever waits from now on waits for the next time.
        self._changed.set()
        self._changed.clear()


class Bookings:
    """The sums that were seen of live tasks for which something was booked; others are not kept.

    A record has the sum over all attempts of its task, so whoever counts money over time has to
    know which sum is counted already. Rule: what was booked before this node began to dispatch is
    counted nowhere, and everything that is booked from then on is counted once. That holds for
    tasks that were in flight or waited for a retry at that moment, too: the backlog, which a
    dispatcher reads before its first decision, has the sum of each. The cost of the last attempt
    would not do instead: the record of a cancelled task does not tell whether it waited or ran.
    """

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}
        self._is_loaded = False

    def load(self, live: Iterable[TaskRecord]) -> None:
        """Take the sums of live tasks as counted; once, for a later backlog may have news."""
        if self._is_loaded:
            return
        self._is_loaded = True
        for record in live:
            if record.progress.used_micro_usd:
                self._sums.setdefault(record.task.id, record.progress.used_micro_usd)

    def take(self, record: TaskRecord) -> int:
        """Return what was booked for a task since its record before."""
        task_id, booked = record.task.id, record.progress.used_micro_usd
        known = self._sums.get(task_id)
        if known is None:
            known = 0 if self._is_loaded else _before(record)
        if record.task.status in TERMINAL:
            self._sums.pop(task_id, None)
        else:
            self._sums[task_id] = booked
        return booked - known

    def keep(self, is_known: Callable[[str], bool]) -> None:
        """Forget the tasks that are not known any more."""
        self._sums = {one: booked for one, booked in self._sums.items() if is_known(one)}

    def forget(self, task_id: str) -> None:
        """Forget a task that the store no longer has."""
        self._sums.pop(task_id, None)


def _before(record: TaskRecord) -> int:
    """Return what was booked before the latest change of a task that nobody has told of yet.

    Before the backlog is there, a change that comes is of a task that was in flight on this node.
    """
    booked = record.progress.used_micro_usd
    if record.task.status is TaskStatus.RUNNING or record.task.status is TaskStatus.ASSIGNED:
        return booked
    return booked - (record.micro_usd or 0)


def happening_of(record: TaskRecord, now: float) -> Happening:
    """Return the latest event of a task; `now` is its time where the record has none."""
    return _happening(record, kind_of(record.task.status, record.progress.attempt), now)


def _happening(record: TaskRecord, kind: EventKind, now: float) -> Happening:
    task, progress = record.task, record.progress
    status = task.status
    if status is _RUNNING:
        at = progress.started_at
    elif status is _QUEUED:
        at = now if progress.attempt else task.created_at
    else:
        at = progress.completed_at
    return Happening(
        task.id,
        record.agent_id or task.agent_id,
        task.project_id,
        status,
        progress.attempt,
        None if record.error is None else shortened_error(_error(record.error)),
        now if at is None else at,
        kind,
    )


def _error(error: str) -> str:
    """Return an error as every stream may show it: events are written once for all of them."""
    return without_figures(error, lambda _: False)


def event_of(happening: Happening, event_id: str) -> TaskEvent:
    """Return an event as its JSON has it."""
    return TaskEvent(
        id=event_id,
        kind=happening.kind,
        time=exact_moment(happening.at),
        task_id=happening.task_id,
        agent_id=happening.agent_id,
        project_id=happening.project_id,
        state=happening.status,
        attempt=happening.attempt,
        error=happening.error,
    )
