"""What each caller has in hand, so that one of them leaves room for the others.

A caller is whoever holds a token; before the token is known it is an address. Counted are its
connections, its streams, the bytes of its requests and answers, and its time on the event loop.

Rule: the bound of a caller is a dynamic threshold, as that of a project in `core.admission`. It may
have up to `SHARE` times as much as is still free. One that is alone gets nearly everything; one
that takes all it can get leaves a part free by its own bound, and so does each further one. An
operator is held to the whole alone, of which a part is kept for operators.

Nothing here does any I/O. What is kept is bounded by what callers have in hand, and of the time
that they used, by what they did in the last seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Any, NamedTuple, Self, TypeVar

from headgate.api.errors import ApiError
from headgate.api.schema.tasks import Details
from headgate.errors import LimitReachedError

SHARE = 8
"""How many times as much as is free a caller may have: alone, eight ninths of everything."""

KEPT_FOR_OPERATORS = 16
"""One part in so many of everything is for operators alone."""

MAX_CONNECTIONS = 12_288
EXTRA_CONNECTIONS = 32
"""Connections beyond the bound, each for one request: an operator's, or one that needs no token."""

MAX_STREAMS = 500
"""Streams of events at this node."""

MAX_PAGES = 200
"""Pages of the dashboard at this node that are told of changes."""

MAX_CLAIMS = 12_000
"""Claims of workers that wait at this node."""

MAX_BYTES = 128 * 1024 * 1024
"""What bodies of requests, and answers that were not taken yet, keep in memory in all."""

ROOM_SECONDS = 30.0
ROOM_LOOK_SECONDS = 0.05
"""For how long a long answer of an upstream waits for room among these, and how often it looks."""

HEAD_BYTES = 64 * 1024
"""What the head of an answer adds to it at most."""

MAX_SPILLED_BYTES = 2 * 1024 * 1024 * 1024
MAX_SPILLED_FILES = 4_096
"""What bodies of calls that wait take of the disk at this node, and in how many files."""

MAX_MADE = 8
"""Answers that may be large and are made at a time, each from up to 1 MiB that the store has read.

More would not be made sooner: one loop makes them all. Each takes some times its size meanwhile.
"""

_IPV6_NETWORK_BITS = 64
_Result = TypeVar("_Result")


class Holder(NamedTuple):
    """Whoever has something in hand: the id of a token, or an address; is it an operator?"""

    key: str
    is_trusted: bool = False


@lru_cache(maxsize=1_024)
def address_key(address: str) -> str:
    """Return under which name an address is counted; whoever has one of a /64 has all of it."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return f"at {address}"
    if isinstance(parsed, IPv6Address):
        if parsed.ipv4_mapped is not None:
            return f"at {parsed.ipv4_mapped}"
        return f"at {IPv6Address(int(parsed) >> _IPV6_NETWORK_BITS << _IPV6_NETWORK_BITS)}/64"
    return f"at {parsed}"


class Pool:
    """Something of which there is so much, and who has how much of it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        self._by_holder: dict[str, int] = {}

    def of(self, key: str) -> int:
        """Return how much a caller has."""
        return self._by_holder.get(key, 0)

    @property
    def bound(self) -> int:
        """How much a caller may have at this moment that is no operator."""
        return SHARE * max(self.most - self.most // KEPT_FOR_OPERATORS - self.taken, 0)

    def has_room(self, holder: Holder, amount: int = 1) -> bool:
        """Tell whether a caller may take so much more."""
        after = self.taken + amount
        if holder.is_trusted:
            return after <= self.most
        free = self.most - self.most // KEPT_FOR_OPERATORS - after
        return self._by_holder.get(holder.key, 0) + amount <= SHARE * free

    def is_within(self, holder: Holder) -> bool:
        """Tell whether a caller has no more than it may."""
        return self.has_room(holder, 0)

    def take(self, key: str, amount: int = 1) -> None:
        """Count what a caller has taken, be there room or not."""
        self.taken += amount
        self._by_holder[key] = self._by_holder.get(key, 0) + amount

    def give_back(self, key: str, amount: int = 1) -> None:
        """Count what a caller has no more."""
        self.taken -= amount
        left = self._by_holder[key] - amount
        if left:
            self._by_holder[key] = left
        else:
            del self._by_holder[key]

    def greediest(self) -> str:
        """Return who has most; there must be somebody."""
        return max(self._by_holder, key=self._by_holder.__getitem__)


def check_room(pool: Pool, holder: Holder, what: str) -> None:
    """Refuse a caller that may have no more of something."""
    if pool.has_room(holder):
        return
    own = pool.of(holder.key)
    line = f"this node has {pool.taken} {what}, {own} of them yours: your share of {pool.most}"
    details: Details = {"yours": own, "taken": pool.taken, "most": pool.most}
    advice = "end some of them, or try again later"
    raise ApiError("limit_reached", f"{line}; {advice}", details=details)


@contextmanager
def held(pool: Pool, holder: Holder, what: str) -> Iterator[None]:
    """Have one of a pool in hand, or refuse."""
    check_room(pool, holder, what)
    pool.take(holder.key)
    try:
        yield
    finally:
        pool.give_back(holder.key)


class HeldAnswer:
    """An answer of an upstream that is kept as a whole: what was read of it counts for its caller.

    If its caller is at its limit, reading stops until there is room. The one that came first does
    not wait for others that are read, or they could all wait for each other.
    """

    __slots__ = ("_all", "_holder", "_pool", "size")

    def __init__(self, shares: Shares, holder: Holder) -> None:
        self._pool = shares.bytes
        self._all = shares.answers
        self._holder = holder
        self.size = 0

    def __enter__(self) -> Self:
        """Hold nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Hold nothing any more."""
        self.let_go()

    async def count(self, size: int) -> None:
        """Count so many bytes as held from now on; wait for room, and refuse if none comes."""
        more = size - self.size
        if more <= 0:
            return
        self._all.setdefault(self)
        if not self._may_take(more):
            await self._until_room(more)
        self._pool.take(self._holder.key, more)
        self.size = size

    def _may_take(self, more: int) -> bool:
        if self._pool.has_room(self._holder, more):
            return True
        if next(iter(self._all)) is not self:
            return False
        others = sum(one.size for one in self._all) - self.size
        return self._pool.has_room(self._holder, more - others)

    async def _until_room(self, more: int) -> None:
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                while not self._may_take(more):  # noqa: ASYNC110 - nobody tells of room
                    await asyncio.sleep(ROOM_LOOK_SECONDS)
        except TimeoutError:
            own, pool = self._pool.of(self._holder.key), self._pool
            line = f"there was no room for its answer within {ROOM_SECONDS:g} s: {own:,} bytes of"
            line += f" your requests and answers are held, of {pool.most:,} in all; stream answers,"
            line += " or ask for fewer at a time"
            raise LimitReachedError(line) from None

    def hand_over(self, seat: Seat | None) -> None:
        """Let go of an answer that is about to be sent; its connection counts what is not taken."""
        if self.size and seat is not None:
            seat.admitted = self.size + HEAD_BYTES
        self.let_go()

    def let_go(self) -> None:
        """Hold nothing any more."""
        if self.size:
            self._pool.give_back(self._holder.key, self.size)
            self.size = 0
        self._all.pop(self, None)


class SpillRoom:
    """How much of the disk bodies of calls may take that wait, and how much each caller has."""

    def __init__(self) -> None:
        self.bytes = Pool(MAX_SPILLED_BYTES)
        self.files = Pool(MAX_SPILLED_FILES)

    def take(self, holder: Holder, size: int) -> bool:
        """Count a file of a caller; False, and nothing is counted, if it may have no more."""
        if not (self.files.has_room(holder) and self.bytes.has_room(holder, size)):
            return False
        self.files.take(holder.key)
        self.bytes.take(holder.key, size)
        return True

    def give_back(self, key: str, size: int) -> None:
        """Count a file of a caller as gone."""
        self.files.give_back(key)
        self.bytes.give_back(key, size)


class Making:
    """Lets a few answers be made at a time, and has callers take turns.

    What an answer is made from is in memory before it is counted as bytes in hand. So a caller that
    asks for hundreds of long lists at once waits, with its own and not with those of others: it may
    have as many in the making as others could still have, and one at least.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_holder: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, holder: Holder) -> AsyncIterator[None]:
        """Wait for the turn to make an answer, and make it within."""
        key = holder.key
        if self._may(key) and key not in self._waiting:
            self._by_holder[key] += 1
        else:
            await self._granted(key)
        try:
            yield
        finally:
            self._give_back(key)

    def _may(self, key: str) -> bool:
        free = self._most - self._by_holder.total()
        own = self._by_holder[key]
        return free > 0 and (not own or own < free)

    async def _granted(self, key: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(key)
            raise

    def _give_back(self, key: str) -> None:
        self._by_holder[key] -= 1
        if not self._by_holder[key]:
            del self._by_holder[key]
        while (following := self._next()) is not None:
            turns = self._waiting.pop(following)
            turn = turns.popleft()
            if turns:
                self._waiting[following] = turns
            if not turn.done():
                self._by_holder[following] += 1
                turn.set_result(None)

    def _next(self) -> str | None:
        """Return whose turn it is: of those who may, who has least, then who waited longest."""
        may = [key for key in self._waiting if self._may(key)]
        return min(may, key=self._by_holder.__getitem__, default=None)


def _never() -> bool:
    return False


class Seat:
    """What one connection has in hand, and for whom it counts: an address, then a token."""

    __slots__ = (
        "_bytes",
        "_close",
        "_has_left",
        "_shares",
        "address",
        "admitted",
        "holder",
        "is_awaited",
        "is_extra",
    )

    def __init__(self, shares: Shares, address: str, close: Callable[[], None]) -> None:
        """Count a connection; `close` ends it while it is idle, if room is needed."""
        self._shares = shares
        self._close = close
        self._bytes = 0
        self._has_left = False
        self.admitted = 0
        """The size of an answer that there was room for before it was sent."""

        self.is_awaited: Callable[[], bool] = _never
        """Tells whether others wait for what the request has, as a permit: so it waits for no turn.
        """

        self.address = address_key(address)
        self.holder = Holder(self.address)
        shares.connections.take(self.address)
        self.is_extra = not shares.make_room(self)
        """Whether it came when there was no room: it is for one request of an operator."""

        self.rest()

    @property
    def is_known(self) -> bool:
        """Whether it counts for a token."""
        return self.holder.key is not self.address

    def rest(self) -> None:
        """Note that no request is worked on, from now on."""
        if not self._has_left:
            self._shares.idle.setdefault(self.holder.key, {})[self] = None

    def work(self) -> None:
        """Note that a request is worked on."""
        resting = self._shares.idle.get(self.holder.key)
        if resting is not None:
            resting.pop(self, None)
            if not resting:
                del self._shares.idle[self.holder.key]

    def wait_again(self) -> None:
        """Have the request wait for its turns, whatever it has."""
        self.is_awaited = _never

    def identify(self, token_id: str, *, is_trusted: bool) -> None:
        """Count the connection for whoever sent its request; without a token, for its address.

        Where that caller has more connections than it may, the one of them that has been idle
        longest is closed; if none is, this one is refused.
        """
        key = token_id or self.address
        if key == self.holder.key and not self.is_extra:
            if is_trusted is not self.holder.is_trusted:
                self.holder = Holder(self.holder.key, is_trusted)
            return
        self._move(Holder(key if token_id else self.address, is_trusted))
        shares = self._shares
        self.is_extra = not shares.make_room(self)
        if self.is_extra and not is_trusted:
            own, pool = shares.connections.of(key), shares.connections
            line = f"{own} of the {pool.taken} connections of this node are yours, and all are busy"
            advice = "use fewer at a time, and each for many requests"
            raise ApiError("limit_reached", f"{line}; {advice}", closes=True)

    def _move(self, holder: Holder) -> None:
        before, self.holder = self.holder, holder
        if before.key == holder.key or self._has_left:
            return
        shares = self._shares
        resting = shares.idle.get(before.key, {})
        if self in resting:
            del resting[self]
            if not resting:
                del shares.idle[before.key]
            self.rest()
        shares.connections.give_back(before.key)
        shares.connections.take(holder.key)
        if self._bytes:
            shares.bytes.give_back(before.key, self._bytes)
            shares.bytes.take(holder.key, self._bytes)

    def hold(self, size: int) -> bool:
        """Count bytes as held; False if these are more than the caller may have."""
        pool = self._shares.bytes
        has_room = size <= self.admitted or pool.has_room(self.holder, size)
        if not self._has_left:
            self._bytes += size
            pool.take(self.holder.key, size)
        return has_room

    def let_go(self, size: int) -> None:
        """Count bytes as not held any more; those of a connection that has left are not again."""
        size = min(size, self._bytes)
        if size:
            self._bytes -= size
            self._shares.bytes.give_back(self.holder.key, size)

    def leave(self) -> None:
        """Have nothing in hand any more."""
        if self._has_left:
            return
        self.work()
        self.let_go(self._bytes)
        self._has_left = True
        self._shares.connections.give_back(self.holder.key)
        # It is of the connection, which has this seat: each would keep the other.
        del self._close

    def give_way(self) -> None:
        """Close the connection, which is idle, to make room for another."""
        close = self._close
        self.leave()
        close()


# Budgets. A scope is a row of the ledger for as long as anything is spent there.

MAX_OWN_SCOPES = 10_000
"""How many scopes a tenant charges at most: as many as a report of its budgets shows.

A scope for each workflow and agent stays far below that. A scope for each run would grow for ever.
"""

MAX_COUNTED_SCOPES = 500_000
"""How many scopes of all tenants a node remembers; it reads those of a forgotten tenant again."""

UNUSED_SECONDS = 3_600.0
"""How long a scope counts in which nothing is booked: a task that charges it may still wait."""

READ_AGAIN_SECONDS = 600.0
"""How often the scopes of a tenant that has too many are read again; some may be gone."""


class OwnScopes:
    """The scopes that tenants charge, in the view of this node.

    Those of a tenant are read from the ledger once, when it first names one that is not known here,
    and again when they seem too many. A scope is kept as its hash, with the time of its last use.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used_at: dict[str, dict[int, float]] = {}
        self._read_at: dict[str, float] = {}
        self._count = 0

    def count(self, key: str) -> int:
        """Return how many scopes a tenant has."""
        return len(self._used_at.get(key, ()))

    def take(self, key: str, scopes: Collection[str]) -> bool:
        """Count scopes that a tenant charges; False if it has too many with these."""
        known = self._used_at.get(key)
        if known is None:
            return False
        now = self._clock()
        used = [hash(scope) for scope in scopes]
        new = sum(one not in known for one in used)
        if new and len(known) + new > MAX_OWN_SCOPES:
            return False
        known.update(dict.fromkeys(used, now))
        if new:
            self._count += new
            self._make_room(key)
        return True

    def is_to_be_read(self, key: str) -> bool:
        """Tell whether the ledger may know better how many scopes a tenant has."""
        read_at = self._read_at.get(key)
        return read_at is None or self._clock() - read_at >= READ_AGAIN_SECONDS

    def read(self, key: str, kept: Iterable[str]) -> None:
        """Take over the scopes that the ledger has of a tenant."""
        now = self._clock()
        known = self._used_at.pop(key, {})
        after = {one: at for one, at in known.items() if now - at < UNUSED_SECONDS}
        for scope in kept:
            after.setdefault(hash(scope), now - UNUSED_SECONDS)
        self._used_at[key], self._read_at[key] = after, now
        self._count += len(after) - len(known)
        self._make_room(key)

    def _make_room(self, key: str) -> None:
        """Forget the tenants whose scopes were read longest ago, beyond a number of scopes."""
        while self._count > MAX_COUNTED_SCOPES and len(self._used_at) > 1:
            other = next(one for one in self._used_at if one != key)
            self._count -= len(self._used_at.pop(other))
            del self._read_at[other]


class Shares:
    """What all callers of a node share."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.connections = Pool(MAX_CONNECTIONS)
        self.streams = Pool(MAX_STREAMS)
        self.pages = Pool(MAX_PAGES)
        self.claims = Pool(MAX_CLAIMS)
        self.bytes = Pool(MAX_BYTES)
        self.answers: dict[HeldAnswer, None] = {}
        """The long answers that are read, the one that came first, first."""

        self.spilled = SpillRoom()
        self.making = Making(MAX_MADE)
        self.scopes = OwnScopes(clock)
        self.turns = Turns(clock)
        self.idle: dict[str, dict[Seat, None]] = {}
        """The connections that no request is worked on, by caller; idle longest, first."""

    @property
    def is_overfull(self) -> bool:
        """Whether not even one request of an operator has room for a connection."""
        return self.connections.taken > self.connections.most + EXTRA_CONNECTIONS

    def make_room(self, seat: Seat) -> bool:
        """Close an idle connection where a caller has too many, or all have; False if none is."""
        pool = self.connections
        while not pool.is_within(seat.holder):
            # Where all together have too many, whoever has most gives way.
            key = seat.holder.key if pool.bound else pool.greediest()
            other = next((one for one in self.idle.get(key, ()) if one is not seat), None)
            if other is None:
                return False
            other.give_way()
        return True


# Time on the event loop.
#
# Everything that the service does waits for the loop, which does one thing at a time, in the order
# in which things came. A caller with hundreds of requests under way would have hundreds of turns
# for one of another's.

BUSY_SHARE = 0.25
"""The part of its time that the loop may spend on requests before callers are held to shares."""

TURN_PAUSES = 2
"""How many times as long as a round took callers with more than their share wait for the next.

The processors that the loop does not take are those of whoever writes and of a database beside it,
and each start of a task waits for them a dozen times.
"""

LATE_PAUSES = 4
"""How many times as long as the loop comes late to a round those callers wait in addition.

A loop that comes late has too much to do, and each step of everybody else waits as long.
"""

MAX_PAUSE_SECONDS = 0.05

ROUND_SECONDS = 0.001
"""For so long at a time requests are worked on of callers that had more than their share."""

WINDOW_SECONDS = 0.25
"""After so long what a caller used counts half."""

MAX_CALLERS = 4_096
"""Of so many callers it is kept apart how much time they used lately."""

_LEAST_SECONDS = 0.000_1


class _Used:
    """The time that a caller used lately, in all and for a step, and what of its work waits."""

    __slots__ = ("seconds", "step_seconds", "waiting")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.step_seconds = 0.0
        self.waiting: deque[asyncio.Future[None]] = deque()


class Turns:
    """Shares the time of the event loop between callers.

    Work is a coroutine, and is counted step by step: what it does from one wait to the next. While
    the loop has time, and for whoever had no more than others, a step is taken at once. Otherwise
    it waits for its turn: in each round those go first that had least, and after a round there is a
    pause. A caller that is alone waits for nothing.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, pauses: float = TURN_PAUSES
    ) -> None:
        self.clock = clock
        self._pauses = pauses
        self._used: dict[str, _Used] = {}
        self._total = 0.0
        self._window_ends_at = 0.0
        self.backlog_seconds = 0.0
        """How much more was done for requests lately than the loop has time for."""

        self._noted_at = 0.0
        self._is_dealing = False
        self._due_at: float | None = None
        self._late_seconds = 0.0
        """How late the loop lately came to rounds that were due."""

    def run(self, work: Coroutine[Any, Any, _Result], seat: Seat) -> Coroutine[Any, Any, _Result]:
        """Do some work for whomever a seat counts for at the time."""
        return _Stepped(self, work, seat)

    def charge(self, key: str, seconds: float, now: float) -> None:
        """Count a step of a caller that has just ended."""
        if now >= self._window_ends_at:
            self._begin_window(now)
        used = self._used.get(key)
        if used is None:
            used = self._first_of(key, now)
        used.seconds += seconds
        used.step_seconds += (seconds - used.step_seconds) / 8
        self._total += seconds
        drained = self.backlog_seconds - (now - self._noted_at) * BUSY_SHARE
        self.backlog_seconds = drained + seconds if drained > 0.0 else seconds
        self._noted_at = now

    def _first_of(self, key: str, now: float) -> _Used:
        """Return where a caller is counted that did nothing lately; too many are one together."""
        if len(self._used) >= MAX_CALLERS:
            self._begin_window(now)
        return self._used.setdefault(key if len(self._used) < MAX_CALLERS else "", _Used())

    def is_greedy(self, key: str) -> bool:
        """Tell whether a caller had more than an equal part of what all had lately."""
        callers = len(self._used)
        if callers == 1:
            return False
        used = self._used.get(key)
        return used is not None and (
            used.seconds * callers > self._total * 1.001 or bool(used.waiting)
        )

    def turn(self, key: str) -> asyncio.Future[None]:
        """Return the next turn of a caller, which comes when it is its own."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._used[key].waiting.append(turn)
        if not self._is_dealing:
            self._is_dealing = True
            loop.call_soon(self._deal)
        return turn

    def _deal(self) -> None:
        """Give turns for a round, to those first that had least; go on while anybody waits."""
        loop, left = asyncio.get_running_loop(), ROUND_SECONDS
        if self._due_at is not None:
            self.note_late(self.clock() - self._due_at)
            self._due_at = None
        for used in sorted(
            [used for used in self._used.values() if used.waiting], key=lambda used: used.seconds
        ):
            while used.waiting and left > 0:
                turn = used.waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    left -= used.step_seconds
            if left <= 0:
                break
        pause_seconds = self.pause_seconds(ROUND_SECONDS - left)
        if not pause_seconds:
            # Nobody has waited, or there is no pause between rounds.
            self._is_dealing = left <= 0
            if self._is_dealing:
                loop.call_soon(self._deal)
        elif len(self._used) == 1:
            loop.call_soon(self._deal)
        else:
            self._due_at = self.clock() + pause_seconds
            loop.call_later(pause_seconds, self._deal)

    def note_late(self, seconds: float) -> None:
        """Count that the loop came so late to a round."""
        self._late_seconds += (max(seconds, 0.0) - self._late_seconds) / 4

    def pause_seconds(self, round_seconds: float) -> float:
        """Return how long greedy callers wait after a round that took so long."""
        if not self._pauses or not round_seconds:
            return 0.0
        pause = self._pauses * round_seconds + LATE_PAUSES * self._late_seconds
        return min(pause, MAX_PAUSE_SECONDS)

    def _begin_window(self, now: float) -> None:
        """Let what was used count half, and forget who used next to nothing."""
        windows = 1 + max(now - self._window_ends_at, 0.0) // WINDOW_SECONDS
        part = 0.5 ** min(windows, 64)
        for key, used in list(self._used.items()):
            used.seconds *= part
            if used.seconds < _LEAST_SECONDS and not used.waiting:
                del self._used[key]
        self._total = sum(used.seconds for used in self._used.values())
        self._window_ends_at = now + WINDOW_SECONDS


class _Stepped(Coroutine[Any, Any, _Result]):
    """Work whose steps are counted, and wait for a turn where they must."""

    __slots__ = ("_is_waiting", "_seat", "_turns", "_work")

    def __init__(self, turns: Turns, work: Coroutine[Any, Any, _Result], seat: Seat) -> None:
        self._turns = turns
        self._work = work
        self._seat = seat
        self._is_waiting = False

    def __await__(self) -> Generator[Any, Any, _Result]:
        # A part of other work is counted with that.
        return self._work.__await__()

    def send(self, value: Any, /) -> Any:  # noqa: ANN401 - as a coroutine has it
        """Take a step, or wait for the turn to take it."""
        turns, key = self._turns, self._seat.holder.key
        if self._is_waiting:
            self._is_waiting = False
        elif (
            turns.backlog_seconds > ROUND_SECONDS
            and turns.is_greedy(key)
            and not self._seat.is_awaited()
        ):
            self._is_waiting = True
            return turns.turn(key).__await__().send(None)
        began_at = turns.clock()
        try:
            return self._work.send(value)
        finally:
            now = turns.clock()
            turns.charge(self._seat.holder.key, now - began_at, now)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401 - as a coroutine has it
        """Tell the work of an error, for which there is no waiting."""
        self._is_waiting = False
        try:
            return self._work.throw(*error)
        finally:
            # This frame is one of the traceback: the error would keep itself, and all other frames.
            del error

    def close(self) -> None:
        """End the work."""
        self._work.close()
