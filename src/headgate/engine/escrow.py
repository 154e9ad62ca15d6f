"""Slices of budgets that calls draw from in memory, so that a call needs no transaction of its own.

`core.budgets.escrow` says how large a slice is, and `storage.call_rows.turn_slice` turns one into
the next. Here is who draws on it, and when it is turned: soon after it was drawn on, at once where
a call needs more than there is, and before it has been idle for long, so that what nobody uses is
given back.

Rule: what is drawn on a slice while it is turned was in it before: so much of its headroom as may
be needed meanwhile is carried over like what is in flight, and calls that end are counted for the
next. A slice whose turn failed is closed until the store has answered, and the same turn is asked
for again: it recognises its own work.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from headgate.core.budgets.escrow import Amounts
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch_state import Settled
from headgate.errors import StoreError, StoreUnavailableError
from headgate.storage.call_rows import CallStore, EndedCall, SliceAnswer, SliceTurn
from headgate.storage.writer import for_the_service

log = structlog.get_logger("headgate.escrow")

TURN_SECONDS = 0.05
IDLE_SECONDS = 1.0
"""A slice that nobody has drawn on for so long holds what is in flight, and no more."""

LEASE_SECONDS = 90.0
RENEW_SECONDS = LEASE_SECONDS / 3
RETRY_SECONDS = 0.5
MAX_SLICES = 256
MAX_SLICES_EACH = 64
"""For how many sets of scopes there are slices: of all, and of one project; calls of others are
reserved one by one. A slice that was idle for a moment makes room for another."""

HEADROOM_DRAWS = 4
"""The headroom that is asked for: so many draws like the largest of late, or two turns' worth.

What calls wait for comes on top of it.
"""

NEAR_SECONDS = 0.5
"""How long calls are reserved one by one where a limit was near, before a slice is tried again."""

MAX_ENDED = 2_048
FLUSH_SECONDS = 1.0
"""How long a question about budgets waits for what was just spent; then it is answered without."""

NewName = Callable[[], str]


class Slice:
    """What is held for one set of scopes, and how much of that is drawn and spent."""

    __slots__ = (
        "drawn",
        "ended",
        "held",
        "is_retired",
        "is_turning",
        "largest",
        "largest_until",
        "last_draw_at",
        "name",
        "near_until",
        "open_draws",
        "project",
        "recent",
        "scopes",
        "spent",
        "turned",
        "turned_at",
        "until",
        "waiting",
    )

    def __init__(self, scopes: tuple[Scope, ...], project: str) -> None:
        self.scopes = scopes
        self.project = project
        self.name = ""
        self.held = Amounts()
        self.drawn = Amounts()
        self.spent = Amounts()
        self.recent = Amounts()
        self.largest = Amounts()
        self.largest_until = 0.0
        self.waiting = Amounts()
        """What is asked for by calls that wait until there is enough."""

        self.ended: list[EndedCall] = []
        self.open_draws = 0
        self.until: float | None = None
        self.near_until = 0.0
        self.last_draw_at = 0.0
        self.turned_at = 0.0
        self.is_turning = False
        self.is_retired = False
        self.turned = asyncio.Event()

    @property
    def available(self) -> Amounts:
        """What may still be drawn."""
        return self.held.minus(self.drawn).minus(self.spent)

    @property
    def is_dirty(self) -> bool:
        """Whether the store has yet to be told of something."""
        return bool(self.ended) or self.spent != Amounts()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight, spent or held."""
        # A call that is free draws nothing, and has a row to write all the same.
        return self.held == Amounts() and not self.open_draws and not self.is_dirty


class Draw:
    """What one call has drawn from a slice."""

    __slots__ = ("amounts", "slice")

    def __init__(self, slice_: Slice, amounts: Amounts) -> None:
        self.slice = slice_
        self.amounts = amounts


class Escrow:
    """The slices of one node."""

    def __init__(
        self,
        store: CallStore,
        *,
        now: Callable[[], float],
        new_name: NewName,
        settled: Callable[[Settled], None],
    ) -> None:
        self._store = store
        self._now = now
        self._new_name = new_name
        self._settled = settled
        self._slices: dict[tuple[Scope, ...], Slice] = {}
        self._retired: list[Slice] = []
        """Those that made room for others, until the store has all that was spent of them."""

        self._turning: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self.is_on = True

    def draw(self, scopes: tuple[Scope, ...], amounts: Amounts) -> Draw | None:
        """Take from the slice of some scopes; None if it has too little, or cannot be used now."""
        found = self._slices.get(scopes)
        if found is None or not self.is_on:
            return None
        now = self._now()
        if found.until is not None and now >= found.until:
            return None
        micro_usd, tokens = amounts
        held, drawn, spent = found.held, found.drawn, found.spent
        if held[0] - drawn[0] - spent[0] < micro_usd or held[1] - drawn[1] - spent[1] < tokens:
            return None
        found.drawn = Amounts(drawn[0] + micro_usd, drawn[1] + tokens)
        found.open_draws += 1
        found.recent = Amounts(found.recent[0] + micro_usd, found.recent[1] + tokens)
        if micro_usd > found.largest[0] or tokens > found.largest[1]:
            found.largest = found.largest.most(amounts)
        found.last_draw_at = now
        return Draw(found, amounts)

    async def refill(self, scopes: tuple[Scope, ...], amounts: Amounts) -> Draw | None:
        """Have a slice turned that has too little, and take from it.

        None if the call is to be reserved by itself: a limit is near, or there are too many sets
        of scopes. It waits for as long as the store is away; whoever asks bounds that.
        """
        if not self.is_on:
            return None
        found = self._slices.get(scopes)
        if found is None:
            project = _project_of(scopes)
            if not self._has_room(project):
                return None
            found = self._slices[scopes] = Slice(scopes, project)
            self._wake.set()
        if self._now() < found.near_until:
            return None
        found.last_draw_at = self._now()
        found.largest = found.largest.most(amounts)
        found.waiting = found.waiting.plus(amounts)
        try:
            # One that is under way may have begun before this call was counted.
            for _ in range(2):
                await self._turned(found)
                draw = self.draw(scopes, amounts)
                if draw is not None or self._now() < found.near_until:
                    return draw
        finally:
            found.waiting = found.waiting.minus(amounts)
        return None

    def _has_room(self, project: str) -> bool:
        """Tell whether a project may have one more slice; the least used one makes room.

        Among those of the project, if it has as many as it may, otherwise of the one with most.
        """
        if len(self._slices) < MAX_SLICES_EACH:
            return True
        counts = Counter(one.project for one in self._slices.values())
        if counts[project] < MAX_SLICES_EACH:
            if len(self._slices) < MAX_SLICES:
                return True
            project = counts.most_common(1)[0][0]
        unused_since = self._now() - IDLE_SECONDS
        unused = [
            one
            for one in self._slices.values()
            if one.project == project
            and not (one.open_draws or one.is_turning)
            and one.last_draw_at <= unused_since
        ]
        if not unused:
            return False
        self._retire(min(unused, key=lambda one: one.last_draw_at))
        return True

    def _retire(self, found: Slice) -> None:
        """Have a slice give back what it holds, and be forgotten."""
        del self._slices[found.scopes]
        if not found.is_idle:
            found.is_retired = True
            self._retired.append(found)
            self._begin_turn(found)

    async def _turned(self, found: Slice) -> None:
        if not found.is_turning:
            self._begin_turn(found)
        await found.turned.wait()

    def settle(self, draw: Draw, spent: Amounts, ended: EndedCall) -> None:
        """Count what a call cost in place of what it drew; its row goes with the next turn."""
        found, drawn = draw.slice, draw.amounts
        found.drawn = Amounts(found.drawn[0] - drawn[0], found.drawn[1] - drawn[1])
        found.open_draws -= 1
        found.spent = Amounts(found.spent[0] + spent[0], found.spent[1] + spent[1])
        found.ended.append(ended)
        if len(found.ended) >= MAX_ENDED and not found.is_turning:
            self._begin_turn(found)

    def give_back(self, draw: Draw) -> None:
        """Give back what a call drew that was not sent."""
        draw.slice.drawn = draw.slice.drawn.minus(draw.amounts)
        draw.slice.open_draws -= 1

    # Turning slices.

    async def run(self) -> None:
        """Turn slices until cancelled."""
        while True:
            if not (self._slices or self._retired):
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(TURN_SECONDS)
            self.turn_due()

    def turn_due(self) -> None:
        """Begin the turn of every slice that needs one."""
        now = self._now()
        self._retired = [one for one in self._retired if one.is_turning or not one.is_idle]
        for one in self._retired:
            if not one.is_turning:
                self._begin_turn(one)
        for scopes, found in list(self._slices.items()):
            if found.is_turning:
                continue
            if found.is_idle:
                if now - found.last_draw_at > RENEW_SECONDS:
                    del self._slices[scopes]
                continue
            is_unused = found.available != Amounts() and now - found.last_draw_at >= IDLE_SECONDS
            is_old = now - found.turned_at >= RENEW_SECONDS
            if found.is_dirty or is_unused or is_old:
                self._begin_turn(found)

    def _begin_turn(self, found: Slice) -> None:
        found.is_turning = True
        found.turned.clear()
        self._in_background(self._turn(found))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        # Calls have their permits meanwhile, which others wait for, and a slice has one turn at a
        # time: it does not wait behind all that the caller asks for who needs it.
        with for_the_service():
            task = asyncio.ensure_future(work)
        self._turning.add(task)
        task.add_done_callback(self._turned_or_not)

    def _turned_or_not(self, task: asyncio.Task[None]) -> None:
        self._turning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a slice of a budget was not turned", exc_info=error)

    async def _turn(self, found: Slice) -> None:
        now = self._now()
        is_unused = now - found.last_draw_at >= IDLE_SECONDS
        is_given_back = is_unused or found.is_retired or not self.is_on
        wanted = Amounts() if is_given_back else _wanted(found)
        # Headroom stays open for draws, unless there is to be none.
        carried = Amounts()
        if now >= found.near_until:
            carried = found.available.least(wanted).most(Amounts())
        in_flight = found.drawn.plus(carried)
        found.recent = Amounts()
        needs_next = in_flight != Amounts() or wanted != Amounts()
        ended, found.ended = tuple(found.ended), []
        spent, found.spent = found.spent, Amounts()
        turn = SliceTurn(
            old=found.name,
            new=f"escrow:{self._new_name()}" if needs_next else "",
            scopes=found.scopes,
            spent=spent,
            in_flight=in_flight,
            wanted=wanted.minus(carried),
            least=found.largest.minus(carried).most(Amounts()) if any(wanted) else Amounts(),
            lease_seconds=LEASE_SECONDS,
            ended=ended,
        )
        before, found.held = found.held, in_flight
        answer: SliceAnswer | None = None
        try:
            answer = await self._answer(found, turn)
        finally:
            if answer is None:
                # Whatever it was: what was spent is told with the next turn. One of the rows may
                # have been the cause, so they are written by themselves.
                found.spent = found.spent.plus(spent)
                found.held = Amounts()
                self._in_background(self._write_rows(ended))
                found.near_until = self._now() + NEAR_SECONDS
            else:
                found.name = turn.new if answer.held != Amounts() else ""
                found.held = answer.held
                found.until = answer.until
                if answer.is_near:
                    found.near_until = self._now() + NEAR_SECONDS
            found.turned_at = self._now()
            if found.turned_at >= found.largest_until:
                found.largest = Amounts(found.largest.micro_usd // 2, found.largest.tokens // 2)
                found.largest_until = found.turned_at + IDLE_SECONDS
            found.is_turning = False
            found.turned.set()
        # What was not spent, or headroom that nobody used, may be room for others.
        has_freed = not found.held.plus(spent).covers(before)
        if ended or has_freed:
            kinds = {one.record.kind for one in ended}
            self._settled(Settled(found.scopes, kinds, has_freed))

    async def _answer(self, found: Slice, turn: SliceTurn) -> SliceAnswer:
        while True:
            try:
                return await self._store.turn(turn)
            except StoreUnavailableError:
                found.held = Amounts()
                await asyncio.sleep(RETRY_SECONDS)

    async def _write_rows(self, ended: Sequence[EndedCall]) -> None:
        for one in ended:
            try:
                await self._store.finish([one])
            except StoreError as error:
                log.warning("a call was not kept", call_id=one.record.id, problem=str(error))

    async def flush(self) -> None:
        """Tell the store of everything that was spent, for an exact answer about budgets."""
        # What ended while a slice was turned goes with its next turn.
        for _ in range(2):
            for found in [*self._slices.values(), *self._retired]:
                if found.is_dirty and not found.is_turning:
                    self._begin_turn(found)
            turning = set(self._turning)
            if not turning:
                return
            await asyncio.wait(turning, timeout=FLUSH_SECONDS)

    async def recall(self) -> None:
        """Give back all headroom and wait until that is so; slices are made again when needed."""
        was_on, self.is_on = self.is_on, False
        try:
            for found in [*self._slices.values(), *self._retired]:
                if not found.is_turning:
                    self._begin_turn(found)
            while self._turning:
                await asyncio.wait(set(self._turning))
        finally:
            self.is_on = was_on


def _project_of(scopes: tuple[Scope, ...]) -> str:
    """Return the project whose budgets some scopes are; empty if they are of none."""
    parts = (scope.partition("/")[0] for scope in scopes)
    return next((part for part in parts if part.startswith("project:")), "")


def _wanted(found: Slice) -> Amounts:
    recent, largest = found.recent, found.largest
    headroom = Amounts(
        max(2 * recent.micro_usd, HEADROOM_DRAWS * largest.micro_usd),
        max(2 * recent.tokens, HEADROOM_DRAWS * largest.tokens),
    )
    return headroom.plus(found.waiting)
